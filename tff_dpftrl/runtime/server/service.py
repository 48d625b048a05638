"""The gRPC service: sessions of devices, between their streams and the actors.

Nothing about a device is kept or logged: a session is an address, which is a number of the
connection, as long as the stream lasts. So long its network address is counted, as a hash.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import itertools
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc

from tff_dpftrl.runtime.actors import events, messages, selector
from tff_dpftrl.runtime.protocol import attestation as attestation_lib
from tff_dpftrl.runtime.protocol import session_stream, wire_pb2
from tff_dpftrl.runtime.server import engine as engine_lib
from tff_dpftrl.runtime.server import limits as limits_lib
from tff_dpftrl.runtime.server import observer as observer_lib
from tff_dpftrl.runtime.server import peers as peers_lib
from tff_dpftrl.runtime.server import received, secure_conversation, served_task, summaries
from tff_dpftrl.runtime.server.session import Phase, Refused, Session, TimeIsOver

_logger = logging.getLogger(__name__)

_STOPS = "the server stops"
_SMALL = 1 << 16  # Bytes of a configuration that need no place among those on their way.
_SWEEP_SECONDS = 0.25
_KEPT_CONFIGURATIONS = 4  # Of attempts and plans; a population has few variants at a time.


class Service:
    """Serves the devices of one population; all methods are for its event loop."""

    def __init__(
        self,
        population: str,
        tasks: Mapping[str, served_task.ServedTask],
        engine: engine_lib.Engine,
        *,
        selector_address: str,
        attestation: attestation_lib.Attestation | None,
        server_names: Sequence[str],
        pace: selector.Pace,
        observer: observer_lib.Observer,
        limits: limits_lib.Limits,
        clock: Callable[[], float],
        randomness: random.Random,
        device_prefix: str = "device/",
    ):
        """See `server.Server`; made on the running event loop.

        Args:
          population: Name of the population.
          tasks: Its tasks by name.
          engine: Runs the actors.
          selector_address: The Selector that devices of this service are connected to.
          attestation: Verifies tokens; all devices are genuine if None.
          server_names: Names that devices may know the server by.
          pace: When devices are to check in again.
          observer: Hears of sessions.
          limits: How much devices may use.
          clock: Seconds since 1970.
          randomness: For `pace`.
          device_prefix: What addresses of devices begin with; no other service's, and of no
            earlier start, where there are several.
        """
        self._population = population
        self._device_prefix = device_prefix
        self._tasks = tasks
        self._engine = engine
        self._selector = selector_address
        self._attestation = attestation
        self._names = list(server_names)
        self._pace = pace
        self._observer = observer
        self._limits = limits
        self._clock = clock
        self._random = randomness
        self._check_ins = limits_lib.TokenBucket(limits.check_ins_per_second, time.monotonic)
        self._summaries = limits_lib.TokenBucket(limits.summaries_per_second, time.monotonic)
        longest = limits.waiting_seconds + max(task.task.longest for task in tasks.values())
        self._shares = summaries.Shares(longest, time.monotonic)
        self._sessions: dict[str, Session] = {}
        self._peers = peers_lib.Peers(limits)
        self._numbers = itertools.count(1)
        self._configurations: collections.OrderedDict[tuple[str, bytes], bytes]
        self._configurations = collections.OrderedDict()
        self._sending = limits_lib.Room(limits.sending_bytes)
        self._receiving = limits_lib.Room(limits.receiving_bytes)
        self._is_stopping = False
        self._has_secure_sums = any(task.task.secure_sum for task in tasks.values())
        self._loop_time: Callable[[], float] = asyncio.get_running_loop().time
        self._sweeping = asyncio.ensure_future(self._sweep())
        self.opening = events.SelectionOpened("", 0)
        """What devices are chosen for, as far as known; devices are told at once."""
        # Any version may be claimed; few are.
        self._plans = functools.lru_cache(maxsize=64)(self._plans_for)

    def handler(self) -> grpc.GenericRpcHandler:
        """What a gRPC server is to be given."""
        return _Handler(
            {
                # Bytes in and out: what is the same for many is serialised once.
                session_stream.SESSION_METHOD: grpc.stream_stream_rpc_method_handler(self._session),
                session_stream.TELL_METHOD: grpc.unary_unary_rpc_method_handler(self._tell),
            }
        )

    @property
    def largest_message(self) -> int:
        """Bytes of the largest message that a device may send."""
        parts = max(task.largest_report_bytes for task in self._tasks.values())
        of_groups = max(secure_conversation.most_bytes(task) for task in self._tasks.values())
        largest = max(min(parts, session_stream.PART_BYTES), of_groups)
        return largest + limits_lib.MESSAGE_MARGIN_BYTES

    async def _sweep(self) -> None:
        """Ends sessions whose time is over; cheaper than a timer for each."""
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            now = self._loop_time()
            for session in [s for s in self._sessions.values() if s.deadline <= now]:
                session.interrupt(TimeIsOver())

    def stop(self) -> None:
        """Sends waiting devices away, and ends the sessions of the others."""
        self._is_stopping = True
        self._sweeping.cancel()
        for session in self._sessions.values():
            if session.phase is Phase.WAITING:
                session.receive(self._come_back(session, _STOPS))
            elif session.phase in (Phase.CONNECTING, Phase.TRAINING):
                session.interrupt(Refused(grpc.StatusCode.UNAVAILABLE, _STOPS, _STOPS))

    def selector_lost(self, address: str) -> None:
        """Sends those away that a Selector has forgotten."""
        del address  # There is one.
        for session in self._sessions.values():
            if session.phase is Phase.WAITING:
                session.receive(self._come_back(session, "the server has lost its place"))

    def actor_gone(self, address: str) -> None:
        """Refuses those that an Aggregator owes an answer, or will owe one, in a secure sum."""
        if not self._has_secure_sums:
            return
        for session in self._sessions.values():
            if session.report_to == address and session.is_in_secure_sum:
                self._refuse_late(session)

    def actors_lost(self, are_lost: Callable[[str], bool]) -> None:
        """Refuses all that have reported, or will report, to Aggregators of a lost process.

        Args:
          are_lost: Whether the Aggregator of an address was there.
        """
        for session in self._sessions.values():
            if session.report_to and are_lost(session.report_to):
                self._refuse_late(session)

    def _refuse_late(self, session: Session) -> None:
        session.receive(messages.ReportRefused(session.address, "", messages.Refusal.LATE))

    def _come_back(self, session: Session, reason: str) -> messages.ComeBack:
        return messages.ComeBack(session.address, self._turns(), reason)

    def _turns(self) -> tuple[float, ...]:
        return self._pace(self._clock(), self._random)

    # A session.

    async def _session(self, unused_requests: Any, context: grpc.aio.ServicerContext) -> None:
        session = Session(
            f"{self._device_prefix}{next(self._numbers)}",
            self._loop_time() + self._limits.check_in_seconds,
        )
        self._observer.session_opened()
        self._shares.session_opened()
        try:
            try:
                await self._converse(session, context)
            except asyncio.CancelledError:
                error = session.interruption()
                if error is None:  # The device, or its connection, is gone.
                    raise
                await self._interrupted(session, context, error)
        except Refused as refused:
            if session.phase is Phase.CONNECTING:
                session.phase = Phase.REFUSED
            self._observer.session_refused(refused.reason)
            context.set_code(refused.code)
            context.set_details(refused.text)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # Its text may quote what a device sent.
            _logger.error("a session failed with %s", type(error).__name__)
            self._observer.session_refused("error of the server")
            context.set_code(grpc.StatusCode.INTERNAL)
            context.set_details("error of the server")
        finally:
            self._close(session)

    def _close(self, session: Session) -> None:
        if self._sessions.pop(session.address, None) is not None:
            self._engine.disconnect(session.address)
        if session.peer is not None:
            self._peers.leave(session.peer)
        if session.phase is Phase.WAITING:
            self._engine.deliver(self._selector, messages.DeviceGone(session.address))
        if session.report_to:
            self._engine.deliver(session.report_to, messages.DeviceGone(session.address))
        self._observer.session_closed(session.phase.value)

    async def _interrupted(
        self, session: Session, context: grpc.aio.ServicerContext, error: Exception
    ) -> None:
        """Ends a session whose time is over, or that the server ends."""
        if session.is_writing:  # gRPC sends one thing at a time: not even a status any more.
            if session.phase is Phase.CONNECTING:
                session.phase = Phase.REFUSED
                self._observer.session_refused("no check-in in time")
            raise asyncio.CancelledError
        if not isinstance(error, TimeIsOver):
            raise error
        if session.phase is Phase.WAITING:
            self._engine.deliver(self._selector, messages.DeviceGone(session.address))
            await self._send_away(session, context, self._turns(), "no round has begun")
        elif session.phase is Phase.TRAINING:
            await session.write(
                context, self._answer(False, messages.Refusal.LATE.value, self._turns())
            )
        elif session.phase is Phase.CONNECTING:
            raise Refused(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                f"no check-in within {self._limits.check_in_seconds:g} seconds",
                "no check-in in time",
            )

    async def _converse(self, session: Session, context: grpc.aio.ServicerContext) -> None:
        if self._is_stopping:
            raise Refused(grpc.StatusCode.UNAVAILABLE, _STOPS, _STOPS)
        if len(self._sessions) >= self._limits.sessions:
            raise Refused(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "too many sessions at a time: try again later",
                "too many sessions",
            )
        session.peer = self._peers.enter(context.peer())
        self._sessions[session.address] = session
        challenge = attestation_lib.new_challenge()
        opening = wire_pb2.FromServer()
        opening.challenge.challenge = challenge
        opening.challenge.protocol_versions.extend(session_stream.VERSIONS)
        opening.challenge.task = self.opening.task
        opening.challenge.round_index = self.opening.round_index
        await session.write(context, opening.SerializeToString())
        raw = await context.read()
        if raw is grpc.aio.EOF:  # As it knows the round, it has to rest.
            session.phase = Phase.SENT_AWAY
            self._engine.deliver(self._selector, messages.DeviceRests())
            self._observer.sent_away("it has to rest", False)
            return
        check_in = received.read(raw, ("check_in",), limits_lib.CHECK_IN_BYTES).check_in
        if not self._check_ins.take():
            await self._send_away(session, context, self._turns(), "too many devices check in")
            return
        plans = self._admit(check_in, challenge)
        session.phase = Phase.WAITING
        session.deadline = self._loop_time() + self._limits.waiting_seconds
        self._observer.waiting()
        self._engine.connect(session.address, session.receive)
        here = messages.CheckIn(session.address, frozenset(plans), session.peer.source)
        self._engine.deliver(self._selector, here)
        answer = await session.next_message()
        if type(answer) is messages.ComeBack:
            await self._send_away(session, context, answer.turns, answer.reason)
            return
        session.phase = Phase.TRAINING
        ends = self._loop_time() + self._tasks[answer.task].task.longest
        session.deadline = ends
        await self._configure(session, context, answer, plans[answer.task])
        session.deadline = ends
        if answer.secure_sum_session:
            await self._converse_securely(session, context, answer)
        else:
            await self._take_report(session, context, answer.task)

    def _admit(self, check_in: wire_pb2.CheckIn, challenge: bytes) -> dict[str, bytes]:
        """The plans that a device can run, by task.

        Raises:
          Refused: If it cannot take part.
        """
        if check_in.population != self._population:
            raise Refused(
                grpc.StatusCode.NOT_FOUND,
                "there is no such population here: correct its name, or the server's address",
                "unknown population",
            )
        if check_in.protocol_version not in session_stream.VERSIONS:
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"the server speaks versions {list(session_stream.VERSIONS)} of the protocol, "
                f"not {check_in.protocol_version}: update the device",
                "no common version",
            )
        self._attest(check_in.token, challenge)
        plans = self._plans(check_in.runtime_version)
        if not plans:
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"no task has a plan for version {check_in.runtime_version} of the runtime: "
                "update the device",
                "no plan for its version",
            )
        return plans

    def _plans_for(self, runtime_version: int) -> dict[str, bytes]:
        plans = {name: task.plan_for(runtime_version) for name, task in self._tasks.items()}
        return {name: plan for name, plan in plans.items() if plan is not None}

    def _attest(self, token: bytes, challenge: bytes) -> None:
        if self._attestation is None:
            return
        for i, name in enumerate(self._names):
            nonce = session_stream.attested_nonce(challenge, name, self._population)
            verdict = self._attestation.verify(token, nonce)
            if verdict is attestation_lib.Verdict.GENUINE:
                if i:  # Most devices know the server by one name.
                    self._names.insert(0, self._names.pop(i))
                return
            if verdict is not attestation_lib.Verdict.OTHER_NONCE:
                break
        raise Refused(grpc.StatusCode.UNAUTHENTICATED, verdict.value, verdict.value)

    async def _send_away(
        self,
        session: Session,
        context: grpc.aio.ServicerContext,
        turns: tuple[float, ...],
        reason: str,
    ) -> None:
        has_waited = session.phase is Phase.WAITING
        session.phase = Phase.SENT_AWAY
        session.deadline = self._loop_time() + self._limits.check_in_seconds
        self._observer.sent_away(reason, has_waited)
        answer = wire_pb2.FromServer()
        answer.come_back.turns.extend(turns)
        answer.come_back.reason = reason
        await session.write(context, answer.SerializeToString())

    async def _take_report(
        self, session: Session, context: grpc.aio.ServicerContext, task: str
    ) -> None:
        limit = self._tasks[task].largest_report_bytes + limits_lib.MESSAGE_MARGIN_BYTES
        raw = await context.read()
        message = received.read(raw, ("report", "update_part"), limit)
        if message.WhichOneof("message") == "report":
            await self._sum(session, context, task, message.report, len(raw))
            return
        if len(message.update_part) > session_stream.FIRST_PART_BYTES:
            raise received.too_large("first part", session_stream.FIRST_PART_BYTES)
        self._engine.deliver(session.report_to, messages.ReportBegun(session.address))
        await self._receiving.take(limit)
        try:
            self._allow_transfer(session)
            message, update = await received.read_parts(
                context, message.update_part, limit, "report"
            )
            message.report.update = update
            await self._sum(session, context, task, message.report, len(update))
        finally:
            self._receiving.give_back(limit)

    async def _converse_securely(
        self,
        session: Session,
        context: grpc.aio.ServicerContext,
        configure: messages.Configure,
    ) -> None:
        conversation = secure_conversation.SecureConversation(
            session,
            context,
            self._tasks[configure.task],
            configure.attempt,
            deliver=self._engine.deliver,
            receiving=self._receiving,
            transfer_ends=lambda: self._loop_time() + self._limits.transfer_seconds,
        )
        answer = await conversation.take()
        num_bytes = conversation.num_bytes
        await self._answer_report(session, context, configure.task, answer, num_bytes)

    async def _sum(
        self,
        session: Session,
        context: grpc.aio.ServicerContext,
        task: str,
        report: wire_pb2.Report,
        num_bytes: int,
    ) -> None:
        """Has a report summed, and tells the device."""
        self._engine.deliver(
            session.report_to, messages.Report(session.address, report.attempt, report)
        )
        del report
        await self._answer_report(session, context, task, await session.next_message(), num_bytes)

    async def _answer_report(
        self,
        session: Session,
        context: grpc.aio.ServicerContext,
        task: str,
        answer: messages.ReportAccepted | messages.ReportRefused,
        num_bytes: int,
    ) -> None:
        session.phase = Phase.REPORTED
        session.deadline = self._loop_time() + self._limits.check_in_seconds
        if type(answer) is messages.ReportAccepted:
            session.report_to = ""
            self._observer.reported(task, "", num_bytes)
            await session.write(context, self._answer(True, "", answer.turns))
            return
        refusal = answer.refusal.value
        reason = f"{refusal}: {answer.reason}" if answer.reason else refusal
        self._observer.reported(task, refusal, num_bytes)
        await session.write(context, self._answer(False, reason, self._turns()))

    def _answer(self, is_accepted: bool, reason: str, turns: tuple[float, ...]) -> bytes:
        answer = wire_pb2.FromServer()
        answer.report_answer.accepted = is_accepted
        answer.report_answer.reason = reason
        answer.report_answer.turns.extend(turns)
        return answer.SerializeToString()

    def _allow_transfer(self, session: Session) -> None:
        """So that nobody keeps the room of others."""
        ends = self._loop_time() + self._limits.transfer_seconds
        session.deadline = min(session.deadline, ends)

    async def _configure(
        self,
        session: Session,
        context: grpc.aio.ServicerContext,
        configure: messages.Configure,
        plan: bytes,
    ) -> None:
        configuration = self._configuration(configure, plan)
        num_bytes = len(configuration)
        self._observer.configured(configure.task, num_bytes)
        self._shares.session_configured()
        # What is written of a message twice is merged: groups differ in their sessions only.
        session_of_group = b""
        if configure.secure_sum_session:
            added = wire_pb2.Configuration(secure_sum_session=configure.secure_sum_session)
            session_of_group = wire_pb2.FromServer(configuration=added).SerializeToString()
        if num_bytes <= _SMALL:
            await session.write(context, configuration + session_of_group)
            return
        # gRPC copies what it sends: as many copies as there are places.
        await self._sending.take(num_bytes)
        try:
            self._allow_transfer(session)
            await session.write(context, configuration + session_of_group)
        finally:
            self._sending.give_back(num_bytes)

    def _configuration(self, configure: messages.Configure, plan: bytes) -> bytes:
        """The same bytes for all devices of an attempt and a variant of the plan."""
        key = (configure.attempt, plan)
        serialized = self._configurations.get(key)
        if serialized is None:
            message = wire_pb2.FromServer(
                configuration=wire_pb2.Configuration(
                    attempt=configure.attempt,
                    task=configure.task,
                    round_index=configure.round_index,
                    plan=plan,
                    broadcast=configure.model,
                )
            )
            serialized = message.SerializeToString()
            self._configurations[key] = serialized
            if len(self._configurations) > _KEPT_CONFIGURATIONS:
                self._configurations.popitem(last=False)
        return serialized

    # After a session.

    async def _tell(self, raw: bytes, context: grpc.aio.ServicerContext) -> bytes:
        try:
            if not self._summaries.take():
                raise Refused(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    "too many summaries at a time: do not try again",
                    "too many summaries",
                )
            summary = summaries.read(raw, self._population)
            self._shares.check(summary)
            self._observer.session_summarized(summary)
        except Refused as refused:
            context.set_code(refused.code)
            context.set_details(refused.text)
        return b""


class _Handler(grpc.GenericRpcHandler):
    def __init__(self, methods: Mapping[str, grpc.RpcMethodHandler]):
        self._methods = methods

    def service(self, handler_call_details: grpc.HandlerCallDetails):
        return self._methods.get(handler_call_details.method)
