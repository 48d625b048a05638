"""Schedule of a device's sessions: each population has one at a time, and one of them trains.

The schedule is a plain state machine: `Schedule.next_job` returns the population that is due next,
and `Schedule.finished` takes the result of its session. `run_jobs` is the loop around it. Clock,
randomness and waiting are arguments.

A server may hold a device for an hour until it selects it. So the sessions of several populations
wait side by side, and the first one to be selected trains. A population that comes due meanwhile
checks in when the training is over; one that was selected already trains next (`session.Turn`).
First due, first served: no population delays another one by more than one training of each, however
often its server asks for the device.

The server assigns a few turns, in seconds; a device never comes before them. It takes the first
turn at which it is eligible and drops the others; a turn at which it is not eligible is lost. It
does not come as soon as it becomes eligible: in the evening, all devices of the day would come at
once. With no turn left it draws one at random, about as far away as turns are from one another.
After failures it backs off (`backoff`), so that devices that failed together (an outage) do not
return together. It rarely comes to a population whose tasks are all finished.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Container, Iterable
from typing import Generic, TypeVar

from tff_dpftrl import durable_files, validation
from tff_dpftrl.runtime.device import backoff, session
from tff_dpftrl.runtime.device import eligibility as eligibility_lib

_Result = TypeVar("_Result")
_FAILURES = (session.SessionOutcome.FAILED, session.SessionOutcome.ATTESTATION_FAILED)
_MAX_TURNS = 100
_LOOK_S = 1.0  # Seconds between two looks at a session that trains.
_END_S = 10.0  # Seconds in which sessions end when the runtime does.


@dataclasses.dataclass(frozen=True)
class Job:
    """The next session: its population, and the seconds until it is due (0: now)."""

    population: str
    seconds: float


@dataclasses.dataclass
class _Appointments:
    turns: list[float]  # Clock times, growing; never empty.
    spacing: float = 0.0  # Mean seconds between the turns that the server assigned last.
    failures: int = 0
    is_finished: bool = False


class Schedule:
    """Turns of all populations of one device."""

    def __init__(
        self,
        populations: Iterable[str],
        *,
        clock: Callable[[], float],
        generator: random.Random,
        waits: backoff.Waits | None = None,
    ):
        """Draws the first turn of each population; their order decides between equal turns.

        `clock` is monotonic, in seconds. All randomness comes from `generator`.
        """
        names = tuple(populations)
        if not names or len(set(names)) != len(names):
            raise validation.UsageError(
                f"populations must be distinct names, at least one, got {names}."
            )
        self._clock, self._generator = clock, generator
        self._waits = backoff.Waits() if waits is None else waits
        begin = clock()
        self._appointments = {
            name: _Appointments([begin + self._waits.first_s * generator.random()])
            for name in names
        }

    @property
    def populations(self) -> tuple[str, ...]:
        """Names of the populations."""
        return tuple(self._appointments)

    def next_job(self, busy: Container[str] = ()) -> Job:
        """Returns the session that is due first, of a population that is not `busy`."""
        free = [name for name in self._appointments if name not in busy]
        population = min(free, key=self._due)
        return Job(population, max(0.0, self._due(population) - self._clock()))

    @property
    def is_finished(self) -> bool:
        """Whether each population had no further round when the device last came."""
        return all(one.is_finished for one in self._appointments.values())

    def missed(self, population: str) -> None:
        """Drops the turns of a population that have come while the device is not eligible."""
        appointments, now = self._appointments[population], self._clock()
        appointments.turns = [turn for turn in appointments.turns if turn > now]
        if not appointments.turns:
            longest = max(self._waits.usual_s, 2 * appointments.spacing)
            appointments.turns = [now + longest * (1.0 - self._generator.random())]

    def finished(self, population: str, result: session.SessionResult) -> None:
        """Sets the next turns of a population whose session has just ended."""
        # Last among those that are due now: dictionaries keep the order of insertion.
        appointments = self._appointments.pop(population)
        self._appointments[population] = appointments
        turns = [seconds for seconds in result.turns[:_MAX_TURNS] if not math.isnan(seconds)]
        longest = self._waits.longest_turn_s
        waits = sorted({max(seconds, 0.0) for seconds in turns if seconds <= longest})
        if turns and not waits:  # Cut to the longest time, all such devices would come together.
            waits = [longest * self._generator.uniform(0.5, 1.0)]
        if waits:
            appointments.spacing = waits[-1] / len(waits)
        if result.outcome in _FAILURES:
            appointments.failures += 1
            least = self._waits.back_off_s(appointments.failures, self._generator)
            waits = [seconds for seconds in waits if seconds >= least] or [least]
        else:
            appointments.failures = 0
            if result.outcome is session.SessionOutcome.INTERRUPTED:
                waits = waits or [self._waits.back_off_s(1, self._generator)]
        appointments.is_finished = result.outcome is session.SessionOutcome.FINISHED
        if appointments.is_finished:  # Later tasks can wait: the device comes rarely.
            waits = [self._waits.longest_s * self._generator.uniform(0.5, 1.0)]
        now = self._clock()
        if result.outcome is session.SessionOutcome.RESTING and not waits:
            # The timer forbids this turn: the device takes the next assigned one.
            waits = [turn - now for turn in appointments.turns if turn > now]
        appointments.turns = [now + seconds for seconds in waits or [self._waits.usual_s]]

    def _due(self, population: str) -> float:
        return self._appointments[population].turns[0]


class SideBySide(Generic[_Result]):
    """Sessions of a device's populations, one of each population at a time.

    The session of a device with one population runs in the thread that begins it. Those of
    several run in threads of their own, which end with the context.
    """

    def __init__(
        self,
        run_session: Callable[[str], _Result],
        turn: session.Turn,
        populations: Iterable[str],
    ):
        """Begins without sessions; `turn` is over when the context ends."""
        self._run_session, self._turn = run_session, turn
        self._is_alone = len(tuple(populations)) == 1
        self._threads: dict[str, threading.Thread] = {}
        self._ended: queue.SimpleQueue[tuple[str, _Result | BaseException]] = queue.SimpleQueue()

    @property
    def running(self) -> Container[str]:
        """Populations whose session was begun and not returned by `next_ended`."""
        return self._threads

    def __len__(self) -> int:
        """Returns the number of these populations."""
        return len(self._threads)

    def begin(self, population: str) -> None:
        """Begins a session; if the device has one population, returns at its end."""
        thread = threading.Thread(
            target=self._run, args=(population,), name=f"session of {population}", daemon=True
        )
        self._threads[population] = thread
        if self._is_alone:
            self._ended.put((population, self._run_session(population)))
        else:
            thread.start()

    def _run(self, population: str) -> None:
        try:
            self._ended.put((population, self._run_session(population)))
        except BaseException as error:  # A fault of the runtime itself, for `next_ended`.
            self._ended.put((population, error))

    def next_ended(self, seconds: float) -> tuple[str, _Result] | None:
        """Waits up to some seconds for a session to end; returns population and result, or None.

        It raises any exception of `run_session`.
        """
        try:
            population, result = self._ended.get(timeout=max(seconds, 1e-3))
        except queue.Empty:
            return None
        del self._threads[population]
        if isinstance(result, BaseException):
            raise result
        return population, result

    def __enter__(self) -> SideBySide[_Result]:
        return self

    def __exit__(self, *unused: object) -> None:
        self._turn.is_over = True
        until = time.monotonic() + _END_S
        for thread in self._threads.values():
            if thread.ident is not None:
                thread.join(max(0.0, until - time.monotonic()))


def run_jobs(
    schedule: Schedule,
    run_session: Callable[[str], session.SessionResult],
    eligibility: eligibility_lib.Eligibility,
    *,
    wait: Callable[[float], None],
    should_stop: Callable[[], bool],
    turn: session.Turn | None = None,
    lock_file: str | os.PathLike[str] | None = None,
    look_again_s: float = 30.0,
    progress: Callable[[str], None] = lambda line: None,
) -> None:
    """Runs sessions until `should_stop` returns True: of each population one, side by side.

    With several populations, `run_session` is called in several threads. The device's eligibility
    is checked at each turn, which is lost if a condition does not hold. `wait` sleeps for a number
    of seconds, or less. `should_stop` is called before each session and after each wait. It ends
    the sessions that run. No session begins while `turn` is taken.

    With `lock_file`, the processes of a device make sure that only one of them has sessions at a
    time; the others look again after `look_again_s` seconds.
    """
    turn = session.Turn() if turn is None else turn
    with (
        contextlib.ExitStack() as locked,  # Held while there are sessions.
        SideBySide(run_session, turn, schedule.populations) as sessions,
    ):
        while not should_stop():
            if len(sessions):
                seconds = _LOOK_S
                if len(sessions) < len(schedule.populations) and not turn.is_taken:
                    seconds = min(seconds, schedule.next_job(sessions.running).seconds)
                if (ended := sessions.next_ended(seconds)) is not None:
                    schedule.finished(*ended)
                    if not len(sessions):
                        locked.close()
                    continue
                wait(0.0)  # The caller's wait may have something to do.
                if len(sessions) == len(schedule.populations) or turn.is_taken:
                    continue
            job = schedule.next_job(sessions.running)
            if job.seconds > 0:
                if not len(sessions):
                    progress(f"The next session of {job.population} is in {job.seconds:.0f} s.")
                    wait(job.seconds)
            elif unmet := eligibility.unmet():
                progress(
                    f"No session of {job.population} now: the device is not {' and '.join(unmet)}."
                )
                schedule.missed(job.population)
            elif (
                len(sessions)
                or lock_file is None
                or locked.enter_context(durable_files.locked(lock_file))
            ):
                sessions.begin(job.population)
            else:
                locked.close()
                progress("Another process of this device has a session: waiting for its end.")
                wait(look_again_s)
