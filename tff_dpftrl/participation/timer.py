"""Simulation of a population whose devices wait for some hours after each round.

In production the server does not choose cohorts: a round takes the first devices that check
in, and a timer keeps a device away for a while after it took part (Xu et al. 2023, section
2.2, "System configuration"). The separation in rounds, MinS, is then a result. This
model shows how it depends on the timer:

- While its timer is not running, a device checks in at random moments: a Poisson process
  whose rate follows the hour of the day.
- A round waits for `clients_per_round` check-ins, then takes `overhead_minutes` to train
  and report. Rounds follow one another without a pause.
- The timer of its devices starts when the round ends.

A long timer leaves fewer devices, so rounds take longer; that is why MinS grows with the
timer only up to `num_clients / clients_per_round`.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator

import numpy as np
from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.participation import cohorts, observed
from tff_dpftrl.participation import schema as schema_lib

# Four times as many devices at night as in the day (Bonawitz et al. 2019, section 9).
NIGHT_AND_DAY = tuple(2.5 + 1.5 * math.cos(2 * math.pi * (hour - 2) / 24) for hour in range(24))


@dataclasses.dataclass(frozen=True)
class TimerModel:
    """Model of a population of devices with a timer.

    Attributes:
      num_clients: Number of devices.
      clients_per_round: Number of check-ins that a round waits for (the report goal).
      timer_hours: Time in hours after the end of its round during which a device stays away.
      checkins_per_day: Mean number of check-ins a day of a device without a timer.
      hourly_availability: Relative rate of check-ins in each of the 24 hours of a day.
      overhead_minutes: Time in minutes between the last check-in of a round and its end.

    The defaults of `checkins_per_day` and `overhead_minutes` are fitted to two published
    values of MinS, those of Gboard's es-ES (4.21M devices, 6,500 a round): 313 with a
    timer of 24 hours and 526 with one of 144 hours. Other populations differ.
    """

    num_clients: int
    clients_per_round: int
    timer_hours: float
    checkins_per_day: float = 12.0
    hourly_availability: tuple[float, ...] = NIGHT_AND_DAY
    overhead_minutes: float = 4.2

    def __post_init__(self):
        if not 1 <= self.clients_per_round <= self.num_clients:
            raise validation.UsageError(
                f"clients_per_round={self.clients_per_round} must be between 1 and "
                f"num_clients={self.num_clients}: a larger round never completes."
            )
        validation.number("timer_hours", self.timer_hours, at_least=0)
        validation.number("overhead_minutes", self.overhead_minutes, at_least=0)
        validation.positive("checkins_per_day", self.checkins_per_day)
        availability = np.asarray(self.hourly_availability, float)
        if availability.shape != (24,) or not (availability >= 0).all() or not availability.any():
            raise validation.UsageError(
                "hourly_availability must be 24 numbers, none negative and not all zero, got "
                f"{self.hourly_availability!r}."
            )

    def rounds(self, seed: int) -> Iterator[tuple[float, np.ndarray]]:
        """Simulates rounds without end.

        Args:
          seed: Non-negative integer. The same seed gives the same rounds with the same
            version of NumPy.

        Yields:
          The hour at which the round ends, counted from midnight before the first round,
          and its devices, int32, shape [clients_per_round].
        """
        rng = np.random.Generator(np.random.Philox(seed))
        clock = _CheckinClock(self.checkins_per_day, self.hourly_availability)
        waiting = _Pool(self.num_clients)
        resting: collections.deque[tuple[float, np.ndarray]] = collections.deque()
        now = 0.0
        while True:
            taken = []
            missing = self.clients_per_round
            while missing:
                while resting and resting[0][0] <= now:
                    waiting.add(resting.popleft()[1])
                next_return = resting[0][0] if resting else math.inf
                # Probability that a waiting device checks in before the next one returns.
                chance = -math.expm1(-(clock.checkins(next_return) - clock.checkins(now)))
                arrivals = rng.binomial(waiting.size, chance)
                if arrivals >= missing:
                    # The missing-th smallest of `arrivals` uniform chances below `chance`.
                    last = chance * rng.beta(missing, arrivals - missing + 1)
                    wait = -math.log1p(-min(last, 1 - 2.0**-53))
                    now = max(now, clock.hour(clock.checkins(now) + wait))
                    arrivals = missing
                else:
                    now = next_return
                taken.append(waiting.take(arrivals, rng))
                missing -= arrivals
            now += self.overhead_minutes / 60
            cohort = np.concatenate(taken)
            resting.append((now + self.timer_hours, cohort))
            yield now, cohort


@dataclasses.dataclass(frozen=True)
class Simulation:
    """Hours at which the rounds of a simulated run ended, and its observed participation."""

    end_hours: np.ndarray
    observed: observed.ObservedParticipation

    @property
    def min_sep(self) -> int:
        """Observed stride; the number of rounds if no device took part twice."""
        return self.observed.as_schema().min_sep


def simulate(model: TimerModel, num_rounds: int, seed: int) -> Simulation:
    """Simulates a run and observes its participation.

    Time and memory are linear in `num_clients + num_rounds * clients_per_round`.
    """
    counter = observed.ParticipationCounter(model.num_clients)
    end_hours = np.empty(num_rounds)
    for t, (end, cohort) in enumerate(itertools.islice(model.rounds(seed), num_rounds)):
        counter.add(cohort)
        end_hours[t] = end
    return Simulation(end_hours, counter.observed)


class TimerSampler(cohorts.CohortSampler):
    """Sampler of the cohorts of a simulated timer, to train as in production.

    All cohorts are kept, with 4 bytes for each participation.
    """

    def __init__(self, model: TimerModel, *, num_rounds: int, seed: int):
        """Prepares a simulation, which runs when it is first needed.

        Args:
          model: Model of the population and its timer.
          num_rounds: Number of rounds.
          seed: Seed of the simulation, a non-negative integer.

        Raises:
          ValueError: If an argument is out of range.
        """
        super().__init__(
            num_clients=model.num_clients,
            num_rounds=num_rounds,
            clients_per_round=model.clients_per_round,
            seed=seed,
        )
        self._model = model

    @functools.cached_property
    def _cohorts(self) -> list[np.ndarray]:
        rounds = itertools.islice(self._model.rounds(self.seed), self.num_rounds)
        return [cohort for _, cohort in rounds]

    @property
    @override
    def schema(self) -> schema_lib.MinSep:
        """Schema that the simulation observes; in production it is not known beforehand."""
        counter = observed.ParticipationCounter(self.num_clients)
        for cohort in self._cohorts:
            counter.add(cohort)
        return counter.observed.as_schema()

    @override
    def cohort(self, round_index: int) -> np.ndarray:
        return self._cohorts[self._checked_round(round_index)].astype(np.int64)


class _CheckinClock:
    """Clock of the expected number of check-ins of one device since hour 0."""

    def __init__(self, checkins_per_day: float, hourly_availability: tuple[float, ...]):
        self._per_day = checkins_per_day
        cumulative = np.concatenate([[0.0], np.cumsum(hourly_availability)])
        self._at_hour = checkins_per_day * cumulative / cumulative[-1]
        self._hours = np.arange(25.0)

    def checkins(self, hour: float) -> float:
        if hour == math.inf:
            return math.inf
        day, rest = divmod(hour, 24.0)
        return day * self._per_day + float(np.interp(rest, self._hours, self._at_hour))

    def hour(self, checkins: float) -> float:
        day, rest = divmod(checkins, self._per_day)
        return day * 24.0 + float(np.interp(rest, self._at_hour, self._hours))


class _Pool:
    """Set of waiting devices; adding or taking k of them takes O(k)."""

    def __init__(self, num_clients: int):
        self._members = np.arange(num_clients, dtype=np.int32)
        self.size = num_clients

    def add(self, members: np.ndarray) -> None:
        self._members[self.size : self.size + len(members)] = members
        self.size += len(members)

    def take(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Removes `count` members, chosen uniformly at random."""
        chosen = rng.choice(self.size, count, replace=False, shuffle=False)
        taken = self._members[chosen]
        self.size -= count
        # Members of the last `count` places that were not chosen move to the holes in front.
        stays = np.ones(count, bool)
        stays[chosen[chosen >= self.size] - self.size] = False
        self._members[chosen[chosen < self.size]] = self._members[self.size : self.size + count][
            stays
        ]
        return taken
