"""Runs a campaign: one fault after another, each mended, and followed by progress."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import TypeAlias

from tff_dpftrl.runtime import signing_keys
from verification.campaign import (
    database_log,
    devices,
    engines,
    fault_injection,
    faults,
    hostile,
    memory_search,
    proxy,
    stage,
    tiny_tasks,
)

_LOOK_SECONDS = 0.02
_STRIKE_SECONDS = 20.0  # Within which a fault strikes, or does not come.
_ATTEMPTS = 3
_SEEN_WITHIN = 0.2  # Seconds after which a commit has been seen.
_LOOKED_FOR = 3  # Devices whose vectors are looked for in the memory of a stopped process.
_HOW = {
    faults.Kind.KILL: fault_injection.KILL,
    faults.Kind.STOP: fault_injection.STOP,
    faults.Kind.RAISE: fault_injection.RAISE,
}


_Search: TypeAlias = tuple[asyncio.subprocess.Process, int]  # And how many pieces it looks for.


def progress_bound(start_seconds: float = 0.0, num_hostile: int = 0) -> float:
    """Seconds within which a round is released after a fault, by the sum of the time-outs.

    A server starts, the old lease ends, devices lose their patience and come back; then three
    attempts at most, of which the first may meet devices that are gone, and the last has begun
    after the fault. Rounds are skipped until nobody has to rest. Hostile devices may make as many
    attempts fail on average as there are of them.

    Args:
      start_seconds: How long it takes at most until what is lost is found and started anew.
      num_hostile: Number of hostile devices.
    """
    served = tiny_tasks.served_population(tiny_tasks.served_tasks())
    leads = 2 * served.lease_seconds + served.silence_seconds + 2 * served.heartbeat_seconds
    attempt = max(task.rounds.selection_timeout + task.longest for task in served.tasks)
    rests = tiny_tasks.MIN_SEP * tiny_tasks.ROUNDS.selection_timeout
    attempts = (_ATTEMPTS + num_hostile) * attempt
    return start_seconds + leads + devices.LONGEST_PATIENCE + rests + attempts


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Outcome of a fault.

    Attributes:
      fault: The fault.
      has_struck: Whether it came to it.
      progress: Seconds from the strike to the second release from then on, which is that of a
        round that has begun after it; None if there was none in time.
      looked_for: Pieces that were looked for in the memory of the process.
      found: Pieces that were found there.
    """

    fault: faults.Fault
    has_struck: bool
    progress: float | None = None
    looked_for: int = 0
    found: tuple[str, ...] = ()


@dataclasses.dataclass
class Campaign:
    """Traces that a campaign leaves, for `checks`.

    Attributes:
      place: Its folder.
      seed: Seed of the devices' vectors and of the noise.
      bound: Seconds within which there has to be progress.
      outcomes: Outcomes of its faults, in order.
      records: What devices were told and have sent.
      hostile: Kinds of the hostile devices, by their numbers.
      after_faults: Number of the last line of the log when the last fault was over.
    """

    place: stage.Stage
    seed: int
    bound: float
    outcomes: list[Outcome] = dataclasses.field(default_factory=list)
    records: list[devices.Record] = dataclasses.field(default_factory=list)
    hostile: dict[int, hostile.Kind] = dataclasses.field(default_factory=dict)
    after_faults: int = 0


async def run(
    place: stage.Stage,
    servers: engines.Engines,
    *,
    num_faults: int,
    seed: int,
    numbers: Iterable[int] | None = None,
    seconds: float = float("inf"),
    start_seconds: float = 0.0,
    has_nodes: bool = False,
    num_hostile: int = 0,
    progress: Callable[[str], None] = print,
) -> Campaign:
    """Runs a campaign.

    Args:
      place: Its folder, which was made.
      servers: What runs the server; begun and ended here.
      num_faults: How many faults are to strike.
      seed: The number of the first fault; the others follow. Also of vectors and noise.
      numbers: Numbers of faults in the place of those from `seed` on.
      seconds: After which no further fault is begun.
      start_seconds: Seconds that a new server needs until it serves.
      has_nodes: Whether whole nodes can be killed.
      num_hostile: Number of hostile devices, which are drawn by the seed.
      progress: Callback for one line about each fault.

    Returns:
      What it leaves.
    """
    left = Campaign(place, seed, progress_bound(start_seconds, num_hostile))
    left.hostile = hostile.draw(seed, num_hostile)
    draw = {"has_nodes": has_nodes}
    async with contextlib.AsyncExitStack() as stack:
        proxies = [proxy.Proxy(target) for target in servers.targets]
        for one in proxies:
            await one.start()
            stack.push_async_callback(one.stop)
        stack.push_async_callback(servers.end)
        await servers.begin()
        setting = devices.Setting(
            tuple(one.address for one in proxies),
            place.server_folder.certificate.read_bytes(),
            signing_keys.load_private(place.server_folder.issuer),
            seed,
        )
        records = stack.enter_context(open(place.folder / "devices.jsonl", "w"))

        def note(record: devices.Record) -> None:
            left.records.append(record)
            records.write(json.dumps(dataclasses.asdict(record)) + "\n")

        made = []
        for number in range(tiny_tasks.NUM_DEVICES):
            shared = devices.SharedState()
            for name in place.populations:
                options = number, setting, note, name, shared
                made.append(
                    hostile.HostileDevice(*options, kind=left.hostile[number])
                    if number in left.hostile
                    else devices.Device(*options)
                )
        fleet = await stack.enter_async_context(devices.fleet(made))
        runner = await stack.enter_async_context(
            _runner(left, servers, proxies, fleet, start_seconds)
        )
        if not await runner.has_progress(0, left.bound):
            raise RuntimeError("No rounds were released before the first fault.")
        struck, until = 0, time.monotonic() + seconds
        for number in numbers or range(seed, sys.maxsize):
            fault = faults.draw(number, lease_seconds=runner.lease_seconds, **draw)
            outcome = await runner.execute(fault)
            left.outcomes.append(outcome)
            struck += outcome.has_struck
            progress(_line(struck, outcome))
            if struck == num_faults or time.monotonic() > until:
                break
        left.after_faults = runner.last_line
        await runner.last_rounds()
    return left


def _line(struck: int, outcome: Outcome) -> str:
    fault = outcome.fault
    text = f"{struck}: fault {fault.number}: {fault.kind.value}, {fault.point}"
    if not outcome.has_struck:
        return f"{text}: did not come"
    if outcome.progress is None:
        return f"{text}: NO PROGRESS"
    found = f", FOUND {outcome.found}" if outcome.found else ""
    return f"{text}: a round after {outcome.progress:.1f} s{found}"


@contextlib.asynccontextmanager
async def _runner(
    left: Campaign,
    servers: engines.Engines,
    proxies: Sequence[proxy.Proxy],
    fleet: Sequence[asyncio.Future],
    start_seconds: float,
) -> AsyncIterator[_Runner]:
    read = database_log.Reader(left.place.store)
    runner = _Runner(left, servers, proxies, fleet, read, start_seconds)
    watching = asyncio.ensure_future(runner.watch())
    try:
        yield runner
    finally:
        watching.cancel()
        read.close()


class _Runner:
    """Has faults strike, and mends."""

    def __init__(
        self,
        left: Campaign,
        servers: engines.Engines,
        proxies: Sequence[proxy.Proxy],
        fleet: Sequence[asyncio.Future],
        read: database_log.Reader,
        start_seconds: float,
    ):
        self._left, self._servers, self._proxies = left, servers, proxies
        self._start_seconds = start_seconds
        self._fleet, self._log = fleet, read
        self._trigger = fault_injection.Trigger(left.place.folder)
        self._seen: dict[int, float] = {}  # When rounds were seen, by their lines in the log.
        self.lease_seconds = tiny_tasks.served_population(tiny_tasks.served_tasks()).lease_seconds

    async def execute(self, fault: faults.Fault) -> Outcome:
        """Has a fault strike, mends, and waits for progress."""
        before = self._log.last()
        strike = await self._strike(fault)
        if strike is None:
            await self.has_progress(self._log.last(), self._left.bound)
            return Outcome(fault, False)
        at, pid = strike
        struck_after = self._last_before(before, at)
        looked = await self._mend(fault, pid)
        progress = await self._progress(struck_after, at)
        if progress is None:
            await self._servers.start_anew()
            await self.has_progress(self._log.last(), self._left.bound)
        await self._servers.retire()
        return Outcome(fault, True, progress, *looked)

    @property
    def last_line(self) -> int:
        """The number of the last line of the log."""
        return self._log.last()

    async def last_rounds(self) -> None:
        """Waits until each task has released a round after all faults."""
        last = self._left.after_faults
        until = time.time() + self._left.bound
        while time.time() < until and not all(
            self._log.releases_after(last, task) for task in tiny_tasks.TASKS
        ):
            await self._look()

    async def has_progress(self, after: int, seconds: float) -> bool:
        """Returns whether each population releases two rounds after a line of the log, in time."""
        until = time.time() + seconds
        while time.time() < until:
            if self._second_after(after) is not None:
                return True
            await self._look()
        return False

    async def _look(self) -> None:
        for device in self._fleet:
            if device.done():
                device.result()  # Raises what has ended it.
        await self._servers.keep()
        await asyncio.sleep(_LOOK_SECONDS)

    async def watch(self) -> None:
        """Notes when rounds are seen to be released."""
        while True:
            self._note_rounds()
            await asyncio.sleep(_LOOK_SECONDS)

    def _note_rounds(self) -> None:
        now = time.time()
        for number in self._log.releases_after(max(self._seen, default=0)):
            self._seen[number] = now

    def _last_before(self, before: int, at: float) -> int:
        """Returns the last line of the log that is older than a time.

        What is stopped inside of its transaction has begun to commit before, and commits later.
        """
        older = [
            line.number
            for line in self._log.lines_after(before, database_log.ROUND)
            if line.at <= at and self._seen.get(line.number, 0.0) <= at + _SEEN_WITHIN
        ]
        return max(older, default=before)

    # Strikes.

    async def _strike(self, fault: faults.Fault) -> tuple[float, int] | None:
        """Returns when it has struck, and which process; None if it has not."""
        if fault.point == faults.SOME_MOMENT:
            await asyncio.sleep(fault.delay)
            return await self._strike_now(fault)
        if fault.is_of_a_start:
            await self._servers.lose_one(fault.point)
        self._trigger.arm(
            fault.number, fault.point, _HOW.get(fault.kind, fault_injection.TELL), fault.skip
        )
        until = time.time() + _STRIKE_SECONDS
        if fault.is_of_a_start:
            until += self._start_seconds
        while time.time() < until:
            found = self._trigger.strike_of(fault.number)
            if found is not None:
                return found["at"], found["pid"]
            await self._look()
        if self._trigger.disarm():
            return None
        await asyncio.sleep(_LOOK_SECONDS)  # It strikes at this moment.
        found = self._trigger.strike_of(fault.number)
        return found["at"], found["pid"]

    async def _strike_now(self, fault: faults.Fault) -> tuple[float, int] | None:
        at = time.time()
        if fault.kind is faults.Kind.NODE:
            await self._servers.lose_node()
            return at, 0
        pid = self._servers.victim(random.Random(fault.number))
        if pid is None:
            return None
        if fault.kind is faults.Kind.KILL:
            engines.send(pid, signal.SIGKILL)
        elif fault.kind in (faults.Kind.STOP, faults.Kind.PAUSE):
            engines.send(pid, signal.SIGSTOP)
        return at, pid

    # Mending.

    async def _mend(self, fault: faults.Fault, pid: int) -> tuple[int, tuple[str, ...]]:
        generator = random.Random(fault.number)
        looked: tuple[int, tuple[str, ...]] = (0, ())
        if fault.kind in (faults.Kind.STOP, faults.Kind.PAUSE):
            goes_on = time.time() + fault.hold
            if fault.kind is faults.Kind.STOP:
                self._servers.note_stopped(pid)
                await self._servers.keep()
            searches = []
            if fault.looks:
                searches.append(await self._begin_search(pid, self._servers.hides(pid), generator))
            await asyncio.sleep(max(0.0, goes_on - time.time()))
            engines.send(pid, signal.SIGCONT)
            self._servers.go_on()
            if fault.looks:
                for other in self._servers.bystanders():
                    searches.append(await self._begin_search(other, tiny_tasks.TASKS, generator))
            looked = await _end_searches(searches)
        elif fault.kind in (faults.Kind.CUT, faults.Kind.CUT_SOME):
            for one in self._proxies:
                one.cut(fault.share, generator)
        elif fault.kind is faults.Kind.STALL:
            await asyncio.gather(
                *(one.stall(fault.share, fault.hold, generator) for one in self._proxies)
            )
        return looked

    async def _begin_search(
        self, pid: int, tasks: Sequence[str], generator: random.Random
    ) -> _Search:
        """Copies the memory of a process, and begins to look for vectors it must not have."""
        wanted = memory_search.pieces_of(
            {
                f"{task}, device {device}": tiny_tasks.sentinel(self._left.seed, task, device)
                for task in tasks
                for device in generator.sample(range(tiny_tasks.NUM_DEVICES), _LOOKED_FOR)
            }
        )
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "verification.campaign.memory_search", str(pid)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        process.stdin.write(memory_search.to_json(wanted).encode())
        process.stdin.close()
        await process.stdout.readline()
        return process, len(wanted)

    async def _progress(self, after: int, at: float) -> float | None:
        if not await self.has_progress(after, self._left.bound + at - time.time()):
            return None
        self._note_rounds()
        return self._seen[self._second_after(after)] - at

    def _second_after(self, after: int) -> int | None:
        """Returns the line by which each population has released two rounds; None before that."""
        seconds = []
        for tasks in self._left.place.populations.values():
            lines = sorted(
                number for task in tasks for number in self._log.releases_after(after, task)
            )
            if len(lines) < 2:
                return None
            seconds.append(lines[1])
        return max(seconds)


async def _end_searches(searches: Sequence[_Search]) -> tuple[int, tuple[str, ...]]:
    """Returns how many pieces were looked for, and which were found."""
    num_pieces, found = 0, []
    for process, wanted in searches:
        out = await process.stdout.read()
        if not await process.wait():  # Or what was searched has been ended meanwhile.
            num_pieces += wanted
            found += json.loads(out)
    return num_pieces, tuple(found)
