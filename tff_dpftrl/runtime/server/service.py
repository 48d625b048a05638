"""The gRPC service: connects the streams of devices' sessions with the actors.

Nothing about a device is kept or logged. While its stream lasts, a session has a number for its
address, and a hash of the device's network address is counted.
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

from tff_dpftrl.runtime.actors import events, messages
from tff_dpftrl.runtime.plans import plan_pb2
from tff_dpftrl.runtime.protocol import attestation as attestation_lib
from tff_dpftrl.runtime.protocol import session_stream, wire_pb2
from tff_dpftrl.runtime.server import (
    admission,
    received,
    secure_conversation,
    served_population,
    summaries,
)
from tff_dpftrl.runtime.server import desk as desk_lib
from tff_dpftrl.runtime.server import engine as engine_lib
from tff_dpftrl.runtime.server import limits as limits_lib
from tff_dpftrl.runtime.server import peers as peers_lib
from tff_dpftrl.runtime.server.errors import Refused, TimeIsOver
from tff_dpftrl.runtime.server.session import Phase, Session

_logger = logging.getLogger(__name__)

_STOPS = "the server stops"
_SMALL = 1 << 16  # Bytes of a configuration that is sent without waiting for room.
_SWEEP_SECONDS = 0.25
_KEPT_CONFIGURATIONS = 4  # Pairs of attempt and plan; a population has few at a time.


class Service:
    """Service for the devices of all populations; for its event loop only.

    A device names its population when it opens a session, which counts against that population's
    quota from then on.
    """

    def __init__(
        self,
        populations: Sequence[served_population.ServedPopulation],
        engine: engine_lib.Engine,
        *,
        selector_address: str,
        attestation: attestation_lib.Attestation | None,
        server_names: Sequence[str],
        limits: limits_lib.Limits,
        clock: Callable[[], float],
        randomness: random.Random,
        device_prefix: str = "device/",
    ):
        """Begins without sessions, on the running event loop.

        `selector_address` is that of the Selector that gets this service's devices; with several
        populations, of their Selectors (`served_population.address`). With `attestation` None,
        every connection counts as a device. `server_names` are those under which devices may know
        the server, for their tokens. The clock returns the seconds since 1970. `device_prefix`
        begins devices' addresses. Where there are several services, no other one and no earlier
        start may have it.
        """
        self._device_prefix = device_prefix
        self._engine = engine
        self._limits = limits
        self._desks = {
            one.name: desk_lib.Desk(
                one,
                served_population.address(selector_address, one.name, populations),
                attestation=attestation,
                server_names=server_names,
                limits=limits,
                clock=clock,
                randomness=randomness,
            )
            for one in populations
        }
        self._first = next(iter(self._desks.values()))
        self._quota = limits_lib.Quota(
            limits.sessions,
            limits.check_ins_per_second,
            served_population.shares(populations),
            time.monotonic,
        )
        self._summaries = limits_lib.TokenBucket(limits.summaries_per_second, time.monotonic)
        self._sessions: dict[str, Session] = {}
        self._peers = peers_lib.Peers(limits)
        self._numbers = itertools.count(1)
        self._configurations: collections.OrderedDict[tuple[str, bytes, bool], bytes]
        self._configurations = collections.OrderedDict()
        self._sending = limits_lib.Room(limits.sending_bytes)
        self._receiving = limits_lib.Room(limits.receiving_bytes)
        self._is_stopping = False
        self._loop_time: Callable[[], float] = asyncio.get_running_loop().time
        self._sweeping = asyncio.ensure_future(self._sweep())

    def opened(self, population: str, opening: events.SelectionOpened) -> None:
        """Notes the open selection of a population, which the challenge of each session names."""
        self._desks[population].opening = opening

    def handler(self) -> grpc.GenericRpcHandler:
        """Returns the handler for a gRPC server."""
        return _Handler(
            {
                # Bytes in and out: a message that many devices get is serialised once.
                session_stream.SESSION_METHOD: grpc.stream_stream_rpc_method_handler(self._session),
                session_stream.TELL_METHOD: grpc.unary_unary_rpc_method_handler(self._summary),
            }
        )

    @property
    def largest_message(self) -> int:
        """Size of the largest message that a device may send, in bytes."""
        tasks = [task for desk in self._desks.values() for task in desk.tasks.values()]
        parts = max(task.largest_report_bytes for task in tasks)
        of_groups = max(secure_conversation.most_bytes(task) for task in tasks)
        largest = max(min(parts, session_stream.PART_BYTES), of_groups)
        return largest + limits_lib.MESSAGE_MARGIN_BYTES

    async def _sweep(self) -> None:
        """Ends sessions whose deadline has passed; cheaper than a timer for each session."""
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
            if session.phase in (Phase.WAITING, Phase.NOISE_PARTY):
                session.receive(session.desk.come_back(session.address, _STOPS))
            elif session.phase in (Phase.CONNECTING, Phase.TRAINING):
                session.interrupt(Refused(grpc.StatusCode.UNAVAILABLE, _STOPS, _STOPS))

    def selector_lost(self, address: str) -> None:
        """Sends away the waiting devices of a Selector that was lost."""
        for session in self._sessions.values():
            is_there = session.phase in (Phase.WAITING, Phase.NOISE_PARTY)
            if is_there and session.desk.selector == address:
                lost = session.desk.come_back(session.address, "the server has lost its place")
                session.receive(lost)

    def actor_gone(self, address: str) -> None:
        """Refuses the devices of an Aggregator that is gone, in a secure sum."""
        if not any(desk.has_secure_sums for desk in self._desks.values()):
            return
        for session in self._sessions.values():
            if session.report_to == address and session.is_in_secure_sum:
                self._refuse_late(session)

    def actors_lost(self, are_lost: Callable[[str], bool]) -> None:
        """Refuses all devices of the Aggregators whose addresses `are_lost` holds for."""
        for session in self._sessions.values():
            if session.report_to and are_lost(session.report_to):
                self._refuse_late(session)

    def _refuse_late(self, session: Session) -> None:
        session.receive(messages.ReportRefused(session.address, "", messages.Refusal.LATE))

    # A session.

    def _desk_of(self, context: grpc.aio.ServicerContext) -> desk_lib.Desk:
        """Returns the desk of the population that a call names, or raises `Refused`."""
        if len(self._desks) == 1:  # The check-in names it, too.
            return self._first
        for key, value in context.invocation_metadata() or ():
            if key == session_stream.POPULATION_KEY and isinstance(value, bytes):
                desk = self._desks.get(value.decode("utf-8", "replace"))
                if desk is None:
                    raise admission.unknown_population()
                return desk
        raise Refused(
            grpc.StatusCode.FAILED_PRECONDITION,
            "this server has several populations, and the session does not name its own when it "
            "opens: update the device",
            "no population named",
        )

    async def _session(self, unused_requests: Any, context: grpc.aio.ServicerContext) -> None:
        desk, stranger = self._first, None  # The first one's observer hears of strangers.
        try:
            desk = self._desk_of(context)
        except Refused as refused:
            stranger = refused
        session = Session(
            f"{self._device_prefix}{next(self._numbers)}",
            self._loop_time() + self._limits.check_in_seconds,
            desk,
        )
        session.desk.observer.session_opened()
        session.desk.summaries.session_opened()
        try:
            try:
                if stranger is not None:
                    raise stranger
                await self._converse(session, context)
            except asyncio.CancelledError:
                error = session.interruption()
                if error is None:  # The device or its connection is gone.
                    raise
                await self._interrupted(session, context, error)
        except Refused as refused:
            if session.phase is Phase.CONNECTING:
                session.phase = Phase.REFUSED
            session.desk.observer.session_refused(refused.reason)
            context.set_code(refused.code)
            context.set_details(refused.text)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # The error's text may quote a device's message.
            _logger.error("a session failed with %s", type(error).__name__)
            session.desk.observer.session_refused("error of the server")
            context.set_code(grpc.StatusCode.INTERNAL)
            context.set_details("error of the server")
        finally:
            self._close(session)

    def _close(self, session: Session) -> None:
        if self._sessions.pop(session.address, None) is not None:
            self._engine.disconnect(session.address)
            self._quota.give_back_place(session.desk.name)
        if session.peer is not None:
            self._peers.leave(session.peer)
        if session.phase in (Phase.WAITING, Phase.NOISE_PARTY):
            self._engine.deliver(session.desk.selector, messages.DeviceGone(session.address))
        if session.report_to:
            self._engine.deliver(session.report_to, messages.DeviceGone(session.address))
        if not session.is_noise_party:
            session.desk.observer.session_closed(session.phase.value)

    async def _interrupted(
        self, session: Session, context: grpc.aio.ServicerContext, error: Exception
    ) -> None:
        """Ends a session whose deadline has passed, or that the server ends."""
        if session.is_writing:  # gRPC sends one message at a time, so not even a status now.
            if session.phase is Phase.CONNECTING:
                session.phase = Phase.REFUSED
                session.desk.observer.session_refused("no check-in in time")
            raise asyncio.CancelledError
        if not isinstance(error, TimeIsOver):
            raise error
        if session.phase is Phase.WAITING:
            self._engine.deliver(session.desk.selector, messages.DeviceGone(session.address))
            await self._send_away(session, context, session.desk.turns(), "no round has begun")
        elif session.phase is Phase.NOISE_PARTY:
            await session.write(context, _come_back((0.0,), "no round has begun"))
        elif session.phase is Phase.TRAINING:
            await session.write(
                context, self._answer(False, messages.Refusal.LATE.value, session.desk.turns())
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
        desk = session.desk
        session.peer = self._peers.enter(context.peer())
        if not self._quota.take_place(desk.name):
            raise Refused(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "too many sessions at a time: try again later",
                "too many sessions",
            )
        self._sessions[session.address] = session
        challenge = attestation_lib.new_challenge()
        opening = wire_pb2.FromServer()
        opening.challenge.challenge = challenge
        opening.challenge.protocol_versions.extend(session_stream.VERSIONS)
        opening.challenge.task = desk.opening.task
        opening.challenge.round_index = desk.opening.round_index
        await session.write(context, opening.SerializeToString())
        raw = await context.read()
        if raw is received.END:  # The device knows the round, so it has to rest.
            session.phase = Phase.SENT_AWAY
            self._engine.deliver(desk.selector, messages.DeviceRests())
            desk.observer.sent_away("it has to rest", False)
            return
        check_in = received.parse(raw, ("check_in",), limits_lib.CHECK_IN_BYTES).check_in
        if not self._quota.arrives(desk.name):
            await self._send_away(session, context, desk.turns(), "too many devices check in")
            return
        if check_in.HasField("noise_party"):
            await self._converse_with_party(session, context, check_in, challenge)
            return
        plans = desk.admission.admit(check_in, challenge)
        session.phase = Phase.WAITING
        session.deadline = self._loop_time() + self._limits.waiting_seconds
        desk.observer.waiting()
        self._engine.connect(session.address, session.receive)
        ready = messages.CheckIn(session.address, frozenset(plans), session.peer.source)
        self._engine.deliver(desk.selector, ready)
        answer = await session.next_message()
        if type(answer) is messages.ComeBack:
            await self._send_away(
                session, context, answer.turns, answer.reason, finished=answer.is_finished
            )
            return
        session.phase = Phase.TRAINING
        ends = self._loop_time() + desk.tasks[answer.task].task.longest
        session.deadline = ends
        plan, by_hash = plans[answer.task], session_stream.sends_less(check_in.protocol_version)
        await self._configure(session, context, answer, plan, by_hash)
        session.deadline = ends
        raw = await context.read()
        if by_hash and received.is_plan_wanted(raw):
            await self._send_plan(session, context, answer.task, plan)
            session.deadline = ends
            raw = await context.read()
        if answer.secure_sum_session:
            await self._converse_securely(session, context, answer, raw)
        else:
            await self._take_report(session, context, answer.task, raw)

    async def _converse_with_party(
        self,
        session: Session,
        context: grpc.aio.ServicerContext,
        check_in: wire_pb2.CheckIn,
        challenge: bytes,
    ) -> None:
        """Serves a noise party, which counts neither as a device nor for the pace."""
        desk, party = session.desk, check_in.noise_party
        plan = desk.admission.admit_noise_party(check_in, challenge)
        session.phase, session.is_noise_party = Phase.NOISE_PARTY, True
        desk.observer.session_closed(session.phase.value)
        session.deadline = self._loop_time() + self._limits.waiting_seconds
        self._engine.connect(session.address, session.receive)
        ready = messages.PartyReady(session.address, party.key, party.task, party.next_round)
        self._engine.deliver(desk.selector, ready)
        answer = await session.next_message()
        self._engine.deliver(desk.selector, messages.DeviceGone(session.address))
        if type(answer) is messages.ComeBack:
            session.phase = Phase.SENT_AWAY
            session.deadline = self._loop_time() + self._limits.check_in_seconds
            away = _come_back((0.0,), answer.reason, finished=answer.is_finished)
            await session.write(context, away)
            return
        session.phase = Phase.TRAINING
        ends = session.deadline = self._loop_time() + desk.tasks[answer.task].task.longest
        by_hash = session_stream.sends_less(check_in.protocol_version)
        await self._send(session, context, self._configuration_of(answer, plan, by_hash=by_hash))
        session.deadline = ends
        conversation = self._secure_conversation(session, context, answer, await context.read())
        reply = await conversation.take()
        session.deadline = self._loop_time() + self._limits.check_in_seconds
        if isinstance(reply, messages.ReportAccepted):
            session.report_to = ""
            await session.write(context, self._answer(True, "", (0.0,)))
        else:
            reason = f"{reply.refusal.value}: {reply.reason}".removesuffix(": ")
            await session.write(context, self._answer(False, reason, (0.0,)))

    async def _send_away(
        self,
        session: Session,
        context: grpc.aio.ServicerContext,
        turns: tuple[float, ...],
        reason: str,
        *,
        finished: bool = False,
    ) -> None:
        has_waited = session.phase is Phase.WAITING
        session.phase = Phase.SENT_AWAY
        session.deadline = self._loop_time() + self._limits.check_in_seconds
        session.desk.observer.sent_away(reason, has_waited)
        await session.write(context, _come_back(turns, reason, finished=finished))

    async def _take_report(
        self, session: Session, context: grpc.aio.ServicerContext, task: str, raw: Any
    ) -> None:
        limit = session.desk.tasks[task].largest_report_bytes + limits_lib.MESSAGE_MARGIN_BYTES
        message = received.parse(raw, ("report", "update_part"), limit)
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
            sent, num_bytes = message.report, len(update)
            report = received.LargeReport(
                update, list(sent.strides), list(sent.times), list(sent.scales)
            )
            del message, update
            self._engine.deliver(
                session.report_to, messages.Report(session.address, sent.attempt, report)
            )
            del report
            answer = await session.next_message()
            await self._answer_report(session, context, task, answer, num_bytes)
        finally:
            self._receiving.give_back(limit)

    async def _converse_securely(
        self,
        session: Session,
        context: grpc.aio.ServicerContext,
        configure: messages.Configure,
        first: Any,
    ) -> None:
        conversation = self._secure_conversation(session, context, configure, first)
        try:
            answer = await conversation.take()
        finally:
            session.desk.observer.sent(configure.task, conversation.num_bytes_sent)
        num_bytes = conversation.num_bytes
        await self._answer_report(session, context, configure.task, answer, num_bytes)

    def _secure_conversation(
        self,
        session: Session,
        context: grpc.aio.ServicerContext,
        configure: messages.Configure,
        first: Any,
    ) -> secure_conversation.SecureConversation:
        return secure_conversation.SecureConversation(
            session,
            context,
            session.desk.tasks[configure.task],
            configure.attempt,
            deliver=self._engine.deliver,
            receiving=self._receiving,
            transfer_ends=lambda: self._loop_time() + self._limits.transfer_seconds,
            first=first,
        )

    async def _sum(
        self,
        session: Session,
        context: grpc.aio.ServicerContext,
        task: str,
        report: wire_pb2.Report,
        num_bytes: int,
    ) -> None:
        """Has a report summed, and answers the device."""
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
        if isinstance(answer, messages.ReportAccepted):
            session.report_to = ""
            session.desk.observer.reported(task, "", num_bytes)
            await session.write(context, self._answer(True, "", answer.turns))
            return
        refusal = answer.refusal.value
        reason = f"{refusal}: {answer.reason}" if answer.reason else refusal
        session.desk.observer.reported(task, refusal, num_bytes)
        await session.write(context, self._answer(False, reason, session.desk.turns()))

    def _answer(self, is_accepted: bool, reason: str, turns: tuple[float, ...]) -> bytes:
        answer = wire_pb2.FromServer()
        answer.report_answer.accepted = is_accepted
        answer.report_answer.reason = reason
        answer.report_answer.turns.extend(turns)
        return answer.SerializeToString()

    def _allow_transfer(self, session: Session) -> None:
        """Sets the deadline of a transfer, so that a slow device does not keep others' room."""
        ends = self._loop_time() + self._limits.transfer_seconds
        session.deadline = min(session.deadline, ends)

    async def _configure(
        self,
        session: Session,
        context: grpc.aio.ServicerContext,
        configure: messages.Configure,
        plan: bytes,
        by_hash: bool,
    ) -> None:
        num_bytes = len(self._configuration(configure, plan, by_hash))
        session.desk.observer.configured(configure.task, num_bytes)
        session.desk.summaries.session_configured()
        await self._send(session, context, self._configuration_of(configure, plan, by_hash=by_hash))

    def _configuration_of(
        self, configure: messages.Configure, plan: bytes, *, by_hash: bool
    ) -> bytes:
        """Returns the configuration of one group of an attempt."""
        configuration = self._configuration(configure, plan, by_hash)
        if not configure.secure_sum_session:
            return configuration
        # Concatenated protobuf messages are merged: groups differ in their sessions only.
        added = wire_pb2.Configuration(secure_sum_session=configure.secure_sum_session)
        return configuration + wire_pb2.FromServer(configuration=added).SerializeToString()

    async def _send_plan(
        self, session: Session, context: grpc.aio.ServicerContext, task: str, plan: bytes
    ) -> None:
        message = _plan_message(plan)
        session.desk.observer.sent(task, len(message))
        await self._send(session, context, message)

    async def _send(
        self, session: Session, context: grpc.aio.ServicerContext, message: bytes
    ) -> None:
        """Sends a message that may be large, and sets the deadline of its transfer."""
        if len(message) <= _SMALL:
            await session.write(context, message)
            return
        # gRPC copies each message that it sends: the room bounds the copies.
        await self._sending.take(len(message))
        try:
            self._allow_transfer(session)
            await session.write(context, message)
        finally:
            self._sending.give_back(len(message))

    def _configuration(self, configure: messages.Configure, plan: bytes, by_hash: bool) -> bytes:
        """Returns the bytes that all devices of an attempt and a variant of the plan get."""
        key = (configure.attempt, plan, by_hash)
        serialized = self._configurations.get(key)
        if serialized is None:
            message = wire_pb2.FromServer(
                configuration=wire_pb2.Configuration(
                    attempt=configure.attempt,
                    task=configure.task,
                    round_index=configure.round_index,
                    plan=b"" if by_hash else plan,
                    plan_sha256=plan_pb2.SignedPlan.FromString(plan).sha256 if by_hash else b"",
                    broadcast=configure.model,
                )
            )
            serialized = message.SerializeToString()
            self._configurations[key] = serialized
            if len(self._configurations) > _KEPT_CONFIGURATIONS * len(self._desks):
                self._configurations.popitem(last=False)
        return serialized

    # After a session.

    async def _summary(self, raw: bytes, context: grpc.aio.ServicerContext) -> bytes:
        try:
            if not self._summaries.take():
                raise Refused(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    "too many summaries at a time: do not try again",
                    "too many summaries",
                )
            summary = summaries.parse(raw, self._desks)
            desk = self._desks[summary.population]
            desk.summaries.check(summary)
            desk.observer.session_summarized(summary)
        except Refused as refused:
            context.set_code(refused.code)
            context.set_details(refused.text)
        return b""


def _come_back(turns: Sequence[float], reason: str, *, finished: bool = False) -> bytes:
    """Makes the message that sends a device or a noise party away."""
    message = wire_pb2.ComeBack(turns=turns, reason=reason, finished=finished)
    return wire_pb2.FromServer(come_back=message).SerializeToString()


@functools.lru_cache(maxsize=_KEPT_CONFIGURATIONS)
def _plan_message(plan: bytes) -> bytes:
    """Returns the message with a plan, which is deflated once."""
    deflated = wire_pb2.Plan(deflated=session_stream.deflated_plan(plan))
    return wire_pb2.FromServer(plan=deflated).SerializeToString()


class _Handler(grpc.GenericRpcHandler):
    def __init__(self, methods: Mapping[str, grpc.RpcMethodHandler]):
        self._methods = methods

    def service(self, handler_call_details: grpc.HandlerCallDetails):
        return self._methods.get(handler_call_details.method)
