"""A population whose devices report integers, a server of it, and a device of a few lines."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import pathlib
import random

import grpc

from tests.runtime import stories
from tff_dpftrl.runtime import tls
from tff_dpftrl.runtime.actors import population
from tff_dpftrl.runtime.plans import plan_pb2
from tff_dpftrl.runtime.protocol import session_stream, wire_pb2
from tff_dpftrl.runtime.server import limits as limits_lib
from tff_dpftrl.runtime.server import observer, served_task, server
from verification import memory_store

POPULATION = "toys"
LARGEST = 1000
_LIMITS = limits_lib.Limits()
NEWEST = 2  # Runtime version; 1 has a plan of its own, 0 has none.


class Total(population.Summation):
    """Sums integers."""

    def zero(self):
        return 0

    def accumulate(self, total, payload):
        if payload.update == b"crash":
            raise ZeroDivisionError("secret words")
        try:
            return total + int(payload.update)
        except ValueError:
            raise population.UnusableReport("no integer") from None

    def merge(self, total, other):
        return total + other


class Add(population.ServerStep):
    """Adds the sum, and 1000 for noise, to the model; the state counts the rounds."""

    def apply(self, total, num_reports, model, state):
        if total < 0:
            raise ArithmeticError("secret words")
        return population.StepResult(
            model=str(int(model) + total + 1000).encode(),
            state=str(int(state) + 1).encode(),
            metrics={"total": total, "num_reports": num_reports},
        )

    def skip(self, model, state):
        return population.StepResult(
            model, str(int(state) + 1).encode(), {population.SKIPPED: True}
        )


def _signed(plan):
    signed = plan_pb2.SignedPlan(plan=plan, sha256=hashlib.sha256(plan).digest())
    return signed.SerializeToString()


PLAN_OF_NOW, PLAN_OF_OLD = _signed(b"plan of now"), _signed(b"plan of old")


def served(name="sum", goal_count=2, largest=LARGEST, weight=1.0, **changes):
    rounds = {
        "over_selection": 1.0,
        "least_fraction": 1.0,
        "selection_timeout": 30.0,
        "reporting_timeout": 30.0,
        "exchange_timeout": 5.0,
        **changes,
    }
    task = population.Task(
        name,
        population.RoundSettings(goal_count=goal_count, **rounds),
        Total(),
        Add(),
        weight=weight,
    )
    plans = {NEWEST: PLAN_OF_NOW, 1: PLAN_OF_OLD}
    return served_task.ServedTask(task, plans.get, largest)


def store_with(*tasks, store=None, model=b"0", population=POPULATION):
    store = memory_store.MemoryStore() if store is None else store
    for task in tasks:
        store.add_task(population, task.task.name, model=model, state=b"0")
    return store


class Notes(observer.Observer):
    """Keeps all that it hears."""

    def __init__(self):
        self.events = []
        self.calls = []

    def on_event(self, now, event):
        self.events.append(event)

    def session_refused(self, reason):
        self.calls.append(("refused", reason))

    def sent_away(self, reason, has_waited):
        self.calls.append(("sent away", reason))

    def configured(self, task, num_bytes):
        self.calls.append(("configured", task))

    def sent(self, task, num_bytes):
        self.calls.append(("sent", task, num_bytes))

    def reported(self, task, refusal, num_bytes):
        self.calls.append(("reported", refusal))

    def session_closed(self, phase):
        self.calls.append(("closed", phase))

    def session_summarized(self, summary):
        self.calls.append(("session_summarized", summary.shape))

    def waiting(self):
        self.calls.append(("waiting",))

    def named(self, name):
        return [call for call in self.calls if call[0] == name]

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


def certificate(folder: pathlib.Path):
    paths = folder / "server.pem", folder / "server.key"
    if not paths[0].exists():
        tls.create_self_signed(*paths)
    return {"certificate": paths[0], "key": paths[1]}


def endpoint(folder: pathlib.Path, attestation=None, **changes):
    return server.Endpoint(**certificate(folder), attestation=attestation, **changes)


def make(folder, tasks, store, *, attestation=None, limits=_LIMITS, **changes):
    """A server that is not started; an `endpoint` brings its own attestation and limits."""
    if "endpoint" in changes and (attestation, limits) != (None, _LIMITS):
        raise ValueError("give attestation and limits to the endpoint.")
    times = {"heartbeat_seconds": 0.1, "silence_seconds": 30.0, "lease_seconds": 60.0}
    members = tuple(task.task for task in tasks)
    given = {
        "endpoint": endpoint(folder, attestation, limits=limits),
        "pace": lambda now, randomness: (5.0, 9.0),
        "randomness": random.Random(1),
        "progress": lambda line: None,
    }
    return server.Server.of(
        population.Population(POPULATION, members, **times),
        {task.task.name: task for task in tasks},
        store,
        **{**given, **changes},
    )


@contextlib.asynccontextmanager
async def running(folder, tasks, store, **changes):
    """A server, started; stopped at the end."""
    made = make(folder, tasks, store, **changes)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


@contextlib.asynccontextmanager
async def channel_to(folder, address, options=()):
    credentials = grpc.ssl_channel_credentials((folder / "server.pem").read_bytes())
    options = [("grpc.max_receive_message_length", -1), *options]
    async with grpc.aio.secure_channel(address, credentials, options) as channel:
        yield channel


def play(folder, story, *tasks, model=b"0", **changes):
    """Runs a story of a channel, the observer's notes and the store; returns the notes."""
    tasks = tasks or (served(),)
    notes = Notes()
    store = store_with(*tasks, model=model)

    async def run():
        async with running(folder, tasks, store, observer=notes, **changes) as server:
            notes.server = server
            async with channel_to(folder, server.address) as channel:
                await story(channel, notes, store)

    asyncio.run(asyncio.wait_for(run(), 60))
    return notes


story = stories.played_by(play, "channel", "notes", "store")


@dataclasses.dataclass
class Stream:
    """The device's side of a session.

    Attributes:
      call: The call.
      challenge: What the server has sent first.
    """

    call: grpc.aio.StreamStreamCall
    challenge: wire_pb2.Challenge

    async def check_in(self, **changes):
        given = {"population": POPULATION, "protocol_version": 1, "runtime_version": NEWEST}
        await self.send(check_in=wire_pb2.CheckIn(**{**given, **changes}))

    async def report(self, attempt, update, **changes):
        await self.send(report=wire_pb2.Report(attempt=attempt, update=update, **changes))

    async def send(self, **message):
        await self.call.write(wire_pb2.FromDevice(**message).SerializeToString())

    async def receive(self):
        """The next message; raises `grpc.aio.AioRpcError` if the session ends instead."""
        raw = await self.call.read()
        if raw is grpc.aio.EOF:
            await self.call  # Raises unless the status is OK.
            raise EOFError
        message = wire_pb2.FromServer.FromString(raw)
        return getattr(message, message.WhichOneof("message"))

    async def status(self):
        """Code and details with which the session ends."""
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await self.call.read() is not grpc.aio.EOF:
                pass
        return await self.call.code(), await self.call.details()


async def connect(channel, population=None):
    """Opens a session, of a population that is named if it is not None; reads the challenge."""
    key = session_stream.POPULATION_KEY
    metadata = () if population is None else ((key, population.encode()),)
    call = channel.stream_stream(session_stream.SESSION_METHOD)(metadata=metadata)
    stream = Stream(call, None)
    stream.challenge = await stream.receive()
    return stream


async def take_part(channel, update=b"1", **check_in):
    """A whole session.

    Returns:
      The configuration, or what came instead of it; and the answer to the report, or None.
    """
    stream = await connect(channel, check_in.get("population"))
    await stream.check_in(**check_in)
    configuration = await stream.receive()
    if not isinstance(configuration, wire_pb2.Configuration):
        return configuration, None
    await stream.report(configuration.attempt, update)
    answer = await stream.receive()
    assert await stream.status() == (grpc.StatusCode.OK, "")
    return configuration, answer


async def until(is_so):
    """Waits for something to be so, a minute at most."""
    for _ in range(6000):
        if is_so():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it has not happened in time")


def released(store, task="sum", whose=POPULATION):
    """Rows of the rounds that were not skipped."""
    return [row for row in store.history(whose, task) if not row.get(population.SKIPPED)]


def totals(store, task="sum"):
    return [row["total"] for row in released(store, task)]
