"""When each population of a device has its next session: one at a time, in turn.

The schedule is a plain state machine: `Schedule.next_job` says which population is due, or
will be, and `Schedule.finished` takes the result. `run_jobs` is the loop around it. Clock,
randomness and waiting are handed in.

Fair means first due, first served: whoever waits longest is next, so that no population,
however often its server calls, keeps another one waiting for more than one session of each.
What the server said (a few turns, in seconds) is never anticipated. A device takes the first
turn at which it may work and lets the others go; a turn at which it may not work is lost. It
never comes as soon as it may: in the evening, all devices of the day would come at once. With
no turn left it makes one for itself, at random. After a failure a population waits twice as
long as after the one before, less a random part, so that devices that failed together (an
outage) do not return together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import math
import os
import pathlib
import random
from collections.abc import Callable, Iterable, Iterator

from tff_dpftrl import validation
from tff_dpftrl.runtime.device import eligibility as eligibility_lib
from tff_dpftrl.runtime.device import session

_FAILURES = (session.Outcome.FAILED, session.Outcome.ATTESTATION_FAILED)
_MOST_TURNS = 100


@dataclasses.dataclass(frozen=True)
class Waits:
    """How long a device waits, all in seconds.

    Attributes:
      usual_s: Between sessions if the server does not say; a device that has missed all its
        turns tries again after a random time up to this.
      first_s: Before the first session: a random time up to this, so that devices that
        start together (an update, the end of a power cut) do not check in together.
      after_failure_s: After the first failure; also after an interruption.
      longest_s: Longest wait after failures, and longest that a server can ask for.
    """

    usual_s: float = 3600.0
    first_s: float = 60.0
    after_failure_s: float = 30.0
    longest_s: float = 24 * 3600.0

    def __post_init__(self):
        validation.positive("usual_s", self.usual_s)
        validation.number("first_s", self.first_s, at_least=0)
        validation.positive("after_failure_s", self.after_failure_s)
        validation.number("longest_s", self.longest_s, at_least=self.after_failure_s)

    def back_off_s(self, failures: int, generator: random.Random) -> float:
        """Seconds to wait after some failures in a row.

        Args:
          failures: How many, at least 1.
          generator: Source of the jitter.

        Returns:
          Between half and all of `after_failure_s` doubled with each failure but the first,
          and of `longest_s` in the end.
        """
        doublings = min(failures - 1, 60)
        limit = min(self.longest_s, self.after_failure_s * 2.0**doublings)
        return limit * (1.0 - 0.5 * generator.random())


@dataclasses.dataclass(frozen=True)
class Job:
    """The next session.

    Attributes:
      population: Whose.
      seconds: How long until it is due; 0 if it is.
    """

    population: str
    seconds: float


@dataclasses.dataclass
class _Appointments:
    turns: list[float]  # By the clock, growing; never empty.
    failures: int = 0


class Schedule:
    """The next session of every population of one device."""

    def __init__(
        self,
        populations: Iterable[str],
        *,
        clock: Callable[[], float],
        generator: random.Random,
        waits: Waits | None = None,
    ):
        """Makes the first appointments.

        Args:
          populations: Names, in the order of their first turns where these fall together.
          clock: Seconds since any moment, never going back.
          generator: Source of all randomness.
          waits: How long to wait.

        Raises:
          ValueError: If there is no population, or one comes twice.
        """
        names = tuple(populations)
        if not names or len(set(names)) != len(names):
            raise validation.UsageError(
                f"populations must be distinct names, at least one, got {names}."
            )
        self._clock, self._generator = clock, generator
        self._waits = Waits() if waits is None else waits
        begin = clock()
        self._appointments = {
            name: _Appointments([begin + self._waits.first_s * generator.random()])
            for name in names
        }

    def next_job(self) -> Job:
        """The population that is due first, and in how many seconds."""
        population = min(self._appointments, key=self._due)
        return Job(population, max(0.0, self._due(population) - self._clock()))

    def missed(self, population: str) -> None:
        """Lets the turns of a population go whose time has come, since the device may not work.

        Args:
          population: Whose.
        """
        appointments, now = self._appointments[population], self._clock()
        appointments.turns = [turn for turn in appointments.turns if turn > now]
        if not appointments.turns:
            appointments.turns = [now + self._waits.usual_s * (1.0 - self._generator.random())]

    def finished(self, population: str, result: session.SessionResult) -> None:
        """Makes the next appointments of a population.

        Args:
          population: Whose session ended just now.
          result: How.
        """
        # Behind all that are due now: dictionaries keep the order of insertion.
        appointments = self._appointments.pop(population)
        self._appointments[population] = appointments
        asked = [seconds for seconds in result.turns[:_MOST_TURNS] if not math.isnan(seconds)]
        waits = sorted({min(max(seconds, 0.0), self._waits.longest_s) for seconds in asked})
        if result.outcome in _FAILURES:
            appointments.failures += 1
            least = self._waits.back_off_s(appointments.failures, self._generator)
            waits = [seconds for seconds in waits if seconds >= least] or [least]
        else:
            appointments.failures = 0
            if result.outcome is session.Outcome.INTERRUPTED:
                waits = waits or [self._waits.back_off_s(1, self._generator)]
        now = self._clock()
        if result.outcome is session.Outcome.RESTING and not waits:
            # It could not take this turn: it takes the next one that it was given.
            waits = [turn - now for turn in appointments.turns if turn > now]
        appointments.turns = [now + seconds for seconds in waits or [self._waits.usual_s]]

    def _due(self, population: str) -> float:
        return self._appointments[population].turns[0]


def run_jobs(
    schedule: Schedule,
    run_session: Callable[[str], session.SessionResult],
    eligibility: eligibility_lib.Eligibility,
    *,
    wait: Callable[[float], None],
    should_stop: Callable[[], bool],
    lock_file: str | os.PathLike[str] | None = None,
    look_again_s: float = 30.0,
    tell: Callable[[str], None] = lambda line: None,
) -> None:
    """Runs sessions, one at a time, until it is told to stop.

    Args:
      schedule: The populations.
      run_session: Runs one session of a population to its end.
      eligibility: Whether the device may work; asked when a turn has come, which is lost if
        it may not.
      wait: Waits for some seconds, or less if there is a reason to look.
      should_stop: Asked before every session and after every wait.
      lock_file: A file that all processes of the device share, so that only one of them at
        a time has a session; None if there is one process.
      look_again_s: How long to wait while another process has a session.
      tell: Told, in a line, what the device waits for.

    Raises:
      OSError: If the lock file cannot be used.
    """
    while not should_stop():
        job = schedule.next_job()
        if job.seconds > 0:
            tell(f"The next session of {job.population} is in {job.seconds:.0f} s.")
            wait(job.seconds)
        elif unmet := eligibility.unmet():
            tell(f"No session of {job.population} now: the device is not {' and '.join(unmet)}.")
            schedule.missed(job.population)
        else:
            with lock(lock_file) as is_ours:
                if is_ours:
                    schedule.finished(job.population, run_session(job.population))
            if not is_ours:
                tell("Another process of this device has a session: waiting for its end.")
                wait(look_again_s)


@contextlib.contextmanager
def lock(path: str | os.PathLike[str] | None) -> Iterator[bool]:
    """Holds the lock of a device's sessions, which ends with the process.

    Args:
      path: The file; None if there is one process.

    Yields:
      Whether the lock is ours; another process has it if not.

    Raises:
      OSError: If the file cannot be used.
    """
    if path is None:
        yield True
        return
    descriptor = os.open(pathlib.Path(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(descriptor)
