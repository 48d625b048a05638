"""What a population's server is told: tasks, sizes and time-outs of rounds, leases.

What a task does stands behind two small interfaces: how reports are summed, and what the
server makes of a sum. TensorFlow is behind them, or nothing but integers.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from tff_dpftrl import validation
from tff_dpftrl.runtime.store import interface


class UnusableReport(ValueError):
    """A report that cannot be in a sum: wrong shape, not finite, not readable."""


class Summation(abc.ABC):
    """How the reports of a task are summed; it has no state of its own.

    Aggregators of one round may run in different processes; a total has to travel between
    them. Reports are added as they come and not kept. A protocol in which devices and
    Aggregator talk more than once (secure aggregation) takes the place of `Aggregator`
    as well: the Master Aggregator knows totals and counts only.
    """

    @abc.abstractmethod
    def zero(self) -> Any:
        """The sum of no reports."""

    @abc.abstractmethod
    def accumulate(self, total: Any, payload: Any) -> Any:
        """Adds a report.

        Args:
          total: The sum so far; it may be changed in place unless this raises.
          payload: From the device; not to be trusted.

        Returns:
          The sum with it.

        Raises:
          UnusableReport: If it cannot be added; `total` is unchanged.
        """

    @abc.abstractmethod
    def merge(self, total: Any, other: Any) -> Any:
        """Adds two sums; both may be changed in place."""


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What the server made of a sum. It may not leave the server before it is committed.

    Attributes:
      model: The new model, serialised; empty if the task has none of its own.
      state: The new aggregator's state, serialised; secret.
      metrics: Of the round, JSON-compatible, for everybody to see after the commit.
    """

    model: bytes = dataclasses.field(repr=False)
    state: bytes = dataclasses.field(repr=False)
    metrics: Mapping[str, Any] = dataclasses.field(repr=False)


class ServerStep(abc.ABC):
    """What the server makes of a round's sum; noise is drawn here.

    It must be a function of its arguments: noise comes from the seed in `state`, so that a
    round that is retried draws the same noise. It sends, logs and writes nothing.
    """

    @abc.abstractmethod
    def apply(self, total: Any, num_reports: int, model: bytes, state: bytes) -> StepResult:
        """Makes the next model.

        Args:
          total: Sum of the reports, as the task's summation has it.
          num_reports: How many are in it.
          model: The committed model that the devices began with.
          state: The committed aggregator's state; secret.

        Returns:
          The next model and state, and metrics.
        """


@dataclasses.dataclass(frozen=True)
class RoundSettings:
    """Sizes and time-outs of a round (Bonawitz et al. 2019, section 2.2).

    Attributes:
      goal_count: Reports after which a round is complete.
      over_selection: Devices chosen for each report of the goal; some will not report.
      least_fraction: Share of the goal that is enough when time is over.
      selection_timeout: Seconds after which a round begins with fewer devices.
      reporting_timeout: Seconds that devices have to report.
      devices_per_aggregator: Size of the groups that are summed by one Aggregator.
      exchange_timeout: Seconds that an actor waits for another one's answer.
    """

    goal_count: int
    over_selection: float = 1.3
    least_fraction: float = 0.8
    selection_timeout: float = 600.0
    reporting_timeout: float = 600.0
    devices_per_aggregator: int = 500
    exchange_timeout: float = 10.0

    def __post_init__(self):
        validation.integer("goal_count", self.goal_count, minimum=1)
        validation.number("over_selection", self.over_selection, at_least=1)
        validation.probability("least_fraction", self.least_fraction)
        validation.integer("devices_per_aggregator", self.devices_per_aggregator, minimum=1)
        for name in ("selection_timeout", "reporting_timeout", "exchange_timeout"):
            validation.positive(name, getattr(self, name))

    @property
    def wanted(self) -> int:
        """Devices to choose; no sum ever holds more reports."""
        return math.ceil(self.goal_count * self.over_selection - 1e-9)

    @property
    def least(self) -> int:
        """Devices to begin a round with, and reports to complete it with, at least."""
        return math.ceil(self.goal_count * self.least_fraction - 1e-9)

    @property
    def longest(self) -> float:
        """Seconds after which an attempt is over in any case."""
        return self.reporting_timeout + 6 * self.exchange_timeout


def _always(commit: interface.Commit) -> None:
    del commit


@dataclasses.dataclass(frozen=True)
class Task:
    """A task of a population.

    Attributes:
      name: Name, the same in the store.
      rounds: Sizes and time-outs.
      summation: How reports are summed.
      server_step: What the server makes of a sum.
      weight: Its share of the rounds, relative to the population's other tasks.
      model_of: The task whose committed model the devices get, for an evaluation; its own
        if None.
      num_rounds: How many rounds it ends after; None if it does not.
      pipelined: Whether devices of its next round may be chosen while one reports. Not if
        the schedule of participation counts on whole rounds between a device's turns.
      rest_seconds: How long a device that has taken part cannot do so again, about: it is told
        to come back later by this.
      refusal: Given the last commit, says why no further round may begin (like a privacy
        budget), or None.
    """

    name: str
    rounds: RoundSettings
    summation: Summation
    server_step: ServerStep
    weight: float = 1.0
    model_of: str | None = None
    num_rounds: int | None = None
    pipelined: bool = True
    rest_seconds: float = 0.0
    refusal: Callable[[interface.Commit], str | None] = _always

    def __post_init__(self):
        validation.positive("weight", self.weight)
        validation.number("rest_seconds", self.rest_seconds, at_least=0)

    def is_over(self, commit: interface.Commit) -> bool:
        """Whether no further round may begin after a commit."""
        if self.num_rounds is not None and commit.rounds_done >= self.num_rounds:
            return True
        return self.refusal(commit) is not None


@dataclasses.dataclass(frozen=True)
class Population:
    """A population and how it is led.

    Attributes:
      name: Name, the same in the store.
      tasks: Its tasks.
      lease_seconds: How long a Coordinator leads without renewing its lease.
      heartbeat_seconds: How often it renews it, and tells the Selectors that it lives.
      silence_seconds: After which Selectors take the Coordinator for dead.
    """

    name: str
    tasks: tuple[Task, ...]
    lease_seconds: float = 15.0
    heartbeat_seconds: float = 2.0
    silence_seconds: float = 6.0

    def __post_init__(self):
        names = [task.name for task in self.tasks]
        if len(set(names)) != len(names) or not names:
            raise ValueError(f"tasks must have different names, and be one at least: {names}.")
        for task in self.tasks:
            if task.model_of is not None and task.model_of not in names:
                raise ValueError(
                    f"model_of={task.model_of!r} of the task {task.name!r} must be one of {names}."
                )
        validation.positive("heartbeat_seconds", self.heartbeat_seconds)
        for name in ("lease_seconds", "silence_seconds"):
            validation.number(
                name,
                getattr(self, name),
                at_least=2 * self.heartbeat_seconds,
                remedy="One lost heartbeat must not end a Coordinator.",
            )

    def task(self, name: str) -> Task:
        """The task of a name.

        Raises:
          KeyError: If there is none.
        """
        return {task.name: task for task in self.tasks}[name]
