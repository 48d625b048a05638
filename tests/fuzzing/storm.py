"""A server under a storm of sessions that keep to no protocol, and devices of a malicious server.

Both ends are the real ones, over gRPC and TLS on loopback. After each part of a storm devices
that do keep to the protocol must complete a round; memory and open files are what they were.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import gc
import logging
import os
import pathlib
import random
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc

from tests.fuzzing import judging, messages, mutations, plans
from tests.runtime.device import wire_server
from tests.runtime.plans import plain_plans
from tests.runtime.server import example_secure_task, example_service
from tff_dpftrl.runtime.device import (
    attester,
    device_runtime,
    eligibility,
    example_store,
    loaded_plans,
    participation_timer,
    server_connection,
)
from tff_dpftrl.runtime.plans import plan_pb2, signing, tensor_values
from tff_dpftrl.runtime.protocol import attestation, session_stream, wire_pb2
from tff_dpftrl.runtime.server import limits
from tff_dpftrl.secure_sums import refusals

_NUM_AT_ONCE = 256
_ROUND_SECONDS = 240.0  # Far more than a round of these devices takes, on a busy machine too.
_RUNTIME = "tff_dpftrl.runtime"


@dataclasses.dataclass(frozen=True)
class Look:
    """What the process had after a part of a storm, when all sessions had ended.

    Attributes:
      num_messages: Sent so far.
      resident_mb: Memory.
      open_files: Descriptors.
      round_seconds: How long the honest round took.
    """

    num_messages: int
    resident_mb: float
    open_files: int
    round_seconds: float


class _Errors(logging.Handler):
    """Notes what the runtime logs of failures, and asyncio of exceptions that nobody caught."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info:
            text += f" {''.join(traceback.format_exception(record.exc_info[1])[-6:])}"
        if "failed" in text or "exception" in text.lower() or record.exc_info:
            self.lines.append(text[-3000:])


@contextlib.contextmanager
def _errors() -> Iterator[list[str]]:
    handler = _Errors()
    loggers = [logging.getLogger(name) for name in (_RUNTIME, "asyncio", "grpc")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


def _look(num_messages: int, round_seconds: float) -> Look:
    gc.collect()
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return Look(
        num_messages,
        pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
        len(os.listdir("/proc/self/fd")),
        round_seconds,
    )


# A server.


class _Attacker:
    """Sessions of random numbers: valid to begin with, and changed somewhere."""

    def __init__(self, channel: grpc.aio.Channel, is_secure: bool, issuer: attestation.TokenIssuer):
        self._open = channel.stream_stream(session_stream.SESSION_METHOD)
        self._tell = channel.unary_unary(session_stream.TELL_METHOD)
        self._is_secure, self._issuer = is_secure, issuer
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.num_messages = 0

    async def attack(self, seed: int) -> None:
        """One session, or one summary."""
        drawn = random.Random(f"storm {seed}")
        if drawn.random() < 0.1:
            await self._summary(drawn)
            return
        call = self._open(timeout=_ROUND_SECONDS)
        try:
            await self._session(call, drawn)
            self.outcomes["left"] += 1
        except grpc.aio.AioRpcError as error:
            self.outcomes[error.code().name] += 1
            judging.one_line(error.details() or "?")
            if error.code() in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL):
                # gRPC's own words for a stream that has ended while it is written to.
                if "Internal error from Core" not in (error.details() or ""):
                    raise judging.Violation(f"seed {seed}: {error.details()}") from None
        except refusals.ProtocolRefusedError:  # By the device, whose own words were changed.
            self.outcomes["left"] += 1
        except asyncio.InvalidStateError:  # It ended between two of our messages.
            self.outcomes["ended"] += 1
        finally:
            call.cancel()

    async def _summary(self, drawn: random.Random) -> None:
        [valid] = messages.summaries_of_devices()
        self.num_messages += 1
        try:
            await self._tell(mutations.protobuf(valid, valid, drawn), timeout=_ROUND_SECONDS)
            self.outcomes["summary taken"] += 1
        except grpc.aio.AioRpcError as error:
            self.outcomes[f"summary {error.code().name}"] += 1

    async def _session(self, call: Any, drawn: random.Random) -> None:
        raw = await call.read()
        if raw is grpc.aio.EOF:
            raise asyncio.InvalidStateError
        challenge = wire_pb2.FromServer.FromString(raw).challenge
        nonce = session_stream.attested_nonce(
            challenge.challenge, "localhost", example_service.POPULATION
        )
        check_in = wire_pb2.CheckIn(
            population=example_service.POPULATION,
            protocol_version=1,
            runtime_version=example_service.NEWEST,
            token=self._issuer.issue(nonce),
        )
        first = wire_pb2.FromDevice(check_in=check_in)
        is_changed = drawn.random() < 0.5
        await self._send(call, first.SerializeToString(), drawn if is_changed else None)
        if drawn.random() < 0.2:  # Does not wait for its turn.
            await self._send_any(call, drawn)
        raw = await call.read()
        if raw is grpc.aio.EOF:
            raise asyncio.InvalidStateError
        told = wire_pb2.FromServer.FromString(raw).configuration
        if self._is_secure and told.secure_sum_session and drawn.random() < 0.8:
            await self._sum_securely(call, told, drawn)
            return
        report = wire_pb2.Report(attempt=told.attempt, update=b"1", strides=[1], times=[1])
        valid = [message.SerializeToString() for message in session_stream.report_messages(report)]
        for content in valid:
            await self._send(call, content, drawn)
        for _ in range(drawn.choice((0, 0, 1, 5))):
            await self._send_any(call, drawn)
        await call.read()

    async def _sum_securely(
        self, call: Any, told: wire_pb2.Configuration, drawn: random.Random
    ) -> None:
        one = example_secure_task.SecureDevice(example_service.Stream(call, None), told, (1, 2, 3))
        changed = drawn.randrange(example_secure_task.NUM_STEPS)
        for step in range(example_secure_task.NUM_STEPS):
            content = one.message.SerializeToString()
            if step == changed:
                content = mutations.protobuf(content, content, drawn)
            await self._send(call, wire_pb2.FromDevice(secure_sum=content).SerializeToString())
            if await one.receive():
                return

    async def _send_any(self, call: Any, drawn: random.Random) -> None:
        await self._send(call, drawn.choice(messages.from_device()), drawn)

    async def _send(self, call: Any, content: bytes, drawn: random.Random | None = None) -> None:
        if drawn is not None:
            content = mutations.protobuf(content, drawn.choice(messages.from_device()), drawn)
        self.num_messages += 1
        await call.write(content)


async def _honest_round(
    channel: grpc.aio.Channel, is_secure: bool, store: Any, tokens: Any
) -> float:
    """Devices that keep to the protocol, until a round more is committed."""
    begin = time.monotonic()
    done = len(store.history(example_service.POPULATION, "sum"))

    async def one() -> None:
        while len(store.history(example_service.POPULATION, "sum")) == done:
            with contextlib.suppress(grpc.aio.AioRpcError, EOFError):
                stream = await example_service.connect(channel)
                nonce = session_stream.attested_nonce(
                    stream.challenge.challenge, "localhost", example_service.POPULATION
                )
                await stream.check_in(token=tokens.issue(nonce))
                told = await stream.receive()
                if not isinstance(told, wire_pb2.Configuration):
                    await asyncio.sleep(0.05)
                elif is_secure:
                    await example_secure_task.SecureDevice(stream, told, (1, 2, 3)).finish()
                else:
                    await stream.report(told.attempt, b"1")
                    await stream.receive()
            with contextlib.suppress(UnboundLocalError):
                stream.call.cancel()

    await asyncio.wait_for(asyncio.gather(*(one() for _ in range(5))), _ROUND_SECONDS)
    return time.monotonic() - begin


@dataclasses.dataclass(frozen=True)
class Storm:
    """What a storm did.

    Attributes:
      outcomes: How sessions ended.
      looks: What the process had after each part.
      errors: What was logged of failures.
    """

    outcomes: collections.Counter[str]
    looks: list[Look]
    errors: list[str]


def storm_of_sessions(
    folder: pathlib.Path,
    seeds: Sequence[int],
    *,
    is_secure: bool,
    sessions_a_part: int = 1000,
    tell: Callable[[Look], None] | None = None,
) -> Storm:
    """Runs a server under a storm.

    Args:
      folder: An empty folder, for its certificate.
      seeds: One for each session.
      is_secure: Whether reports are summed securely.
      sessions_a_part: Sessions from one honest round to the next.
      tell: Told each look.

    Returns:
      What happened.

    Raises:
      judging.Violation: If the server answers as it must not.
      TimeoutError: If an honest round is not committed.
    """
    key = plans.KEY
    issuer = attestation.TokenIssuer(key, clock=time.time)
    times = {"reporting_timeout": 1.0, "selection_timeout": 1.0, "exchange_timeout": 5.0}
    if is_secure:
        task = example_secure_task.served(goal_count=4, step_timeout=1.0, **times)
    else:
        task = example_service.served(goal_count=3, least_fraction=0.3, **times)
    store = example_service.store_with(task)
    looks: list[Look] = []

    async def run() -> collections.Counter[str]:
        async with (
            example_service.running(
                folder,
                [task],
                store,
                endpoint=example_service.endpoint(
                    folder,
                    attestation.SignedTokens([key.public_key()], clock=time.time),
                    names=["localhost"],
                    # A device that waits alone is sent away, so that no honest one hangs.
                    limits=limits.Limits(waiting_seconds=1.0, check_in_seconds=1.0),
                ),
            ) as server,
            example_service.channel_to(folder, server.address) as channel,
        ):
            attacker = _Attacker(channel, is_secure, issuer)
            free = asyncio.Semaphore(_NUM_AT_ONCE)

            async def one(seed: int) -> None:
                async with free:
                    await attacker.attack(seed)

            for begin in range(0, len(seeds), sessions_a_part):
                part = seeds[begin : begin + sessions_a_part]
                await asyncio.gather(*map(one, part))
                seconds = await _honest_round(channel, is_secure, store, issuer)
                looks.append(_look(attacker.num_messages, seconds))
                if tell is not None:
                    tell(looks[-1])
        return attacker.outcomes

    with _errors() as errors:
        outcomes = asyncio.run(run())
    return Storm(outcomes, looks, errors)


# Devices.


class _Liar:
    """A server that says what random numbers make of what one may say."""

    def __init__(self):
        participation = {
            "participation": plan_pb2.Participation(
                min_sep_rounds=1, stride_edges=[1], times_edges=[1, 2**30]
            )
        }
        self._plans = [
            signing.sign(made, plans.KEY).SerializeToString()
            for made in (
                plain_plans.plan(**participation),
                plain_plans.plan(kind=plan_pb2.EVALUATION),
            )
        ]
        self._model = tensor_values.to_bytes(plain_plans.SCALE)
        self.drawn = random.Random(0)
        self.num_messages = 0

    def _valid(self) -> list[list[bytes]]:
        drawn = self.drawn
        return [
            [wire_server.challenge_of(b"c" * 32, task="plain", round_index=7)],
            drawn.choices(
                [
                    wire_server.come_back(5.0, 9.0),
                    wire_server.come_back(5.0, finished=True),
                    wire_server.configuration(
                        attempt="a",
                        task="plain",
                        round_index=7,
                        plan=drawn.choice(self._plans),
                        broadcast=self._model,
                    ),
                ],
                weights=[1, 1, 8],
            ),
            [wire_server.answer(True, 5.0)],
        ]

    def progress(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """The server's half of a session."""
        del context
        drawn = self.drawn
        steps = self._valid()
        changed = drawn.randrange(len(steps))
        for step, valid in enumerate(steps):
            if step and next(requests, None) is None:
                return
            for message in valid:
                content = message.SerializeToString()
                if step == changed:
                    other = drawn.choice(steps)[0].SerializeToString()
                    content = mutations.protobuf(content, other, drawn)
                for _ in range(drawn.choice((1, 1, 1, 1, 2, 9)) if step == changed else 1):
                    self.num_messages += 1
                    yield content


class _Handler(grpc.GenericRpcHandler):
    def __init__(self, liar: _Liar):
        self._session = grpc.stream_stream_rpc_method_handler(liar.progress)  # Of bytes.

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        return self._session if details.method == session_stream.SESSION_METHOD else None


def storm_of_servers(folder: pathlib.Path, seeds: Sequence[int], looks_after: int = 500) -> Storm:
    """Runs a device's sessions with a malicious server.

    Args:
      folder: An empty folder, for the device's files.
      seeds: One for each session.
      looks_after: Sessions from one look at the process to the next.

    Returns:
      What happened.
    """
    liar = _Liar()
    private, roots = wire_server.certificate("127.0.0.1")
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(4), handlers=[_Handler(liar)])
    credentials = grpc.ssl_server_credentials([(private, roots)])
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    clock = time.time
    patience = server_connection.Patience(answer_s=20, selection_s=20, upload_s=20, group_s=20)
    outcomes: collections.Counter[str] = collections.Counter()
    looks = []
    with contextlib.ExitStack() as stack, _errors() as errors:
        stack.callback(lambda: server.stop(0).wait())

        def opened(resource: Any) -> Any:
            return stack.enter_context(contextlib.closing(resource))

        examples = opened(example_store.SqliteExampleStore.open(folder / "examples", clock=clock))
        examples.add("numbers", plain_plans.examples(1.0, 2.0, 4.0))
        own = device_runtime.DeviceRuntime(
            opened(
                server_connection.ServerConnection(f"127.0.0.1:{port}", roots, patience=patience)
            ),
            loaded_plans.LoadedPlans(plans.KEYS),
            examples,
            participation_timer.MemoryTimer(clock),
            attester.NoAttester(),
            eligibility.SettableEligibility(),
        )
        for number, seed in enumerate(seeds, start=1):
            liar.drawn = random.Random(f"liar {seed}")
            # Or it would rest for good after a round that is said to be the last of all.
            fresh = dataclasses.replace(own, timer=participation_timer.MemoryTimer(clock), rules={})
            result = fresh.run_session("tests").result
            outcomes[result.outcome.value] += 1
            if result.reason:
                judging.one_line(result.reason)
            if number % looks_after == 0 or number == len(seeds):
                looks.append(_look(liar.num_messages, 0.0))
            if errors:
                raise judging.Violation(f"seed {seed}: {errors[-1]}")
    return Storm(outcomes, looks, errors)
