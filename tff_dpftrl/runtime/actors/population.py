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
from tff_dpftrl.secure_sums import parameters as parameters_lib
from tff_dpftrl.secure_sums import vectors


class UnusableReport(ValueError):
    """A report that cannot be in a sum: wrong shape, not finite, not readable."""


class Summation(abc.ABC):
    """How the reports of a task are summed; it has no state of its own.

    Aggregators of one round may run in different processes; a total has to travel between
    them. Reports are added as they come and not kept. Where a task is summed securely, no
    report is ever seen: groups of devices hand over sums (`of_group`), and the Master
    Aggregator knows totals and counts only in any case.
    """

    @abc.abstractmethod
    def zero(self) -> Any:
        """The sum of no reports."""

    def for_round(self, model: bytes) -> Summation:
        """Returns what sums the reports of a round, where it depends on the devices' model.

        Args:
          model: The committed model that the devices begin with.

        Returns:
          The summation of that round.
        """
        del model
        return self

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

    def of_group(self, vector: vectors.Vector, num_devices: int) -> Any:
        """Makes a sum of what a group of devices has summed securely.

        Args:
          vector: The sum, laid out as the task's `SecureSumSettings` have it.
          num_devices: How many devices' vectors are in it.

        Returns:
          The sum of their reports.

        Raises:
          UnusableReport: If it cannot be the sum of so many; the group is lost then.
          TypeError: If the task's reports are not summed securely.
        """
        del vector, num_devices
        raise TypeError(f"{type(self).__name__} sums no vectors of groups.")


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

    @abc.abstractmethod
    def skip(self, model: bytes, state: bytes) -> StepResult:
        """Passes over a round of which nothing is released.

        Args:
          model: The committed model.
          state: The committed aggregator's state; secret.

        Returns:
          The model as it is, the state that the next round begins with, past the noise of this
          one, and metrics, among them `SKIPPED`.
        """


SKIPPED = "skipped"
"""Name of the metric that is true in the row of a skipped round, and missing in all others."""

_MOST_REPORTS = 10**9
_PATIENCE = 4  # Times the time in which half of the goal has come.
_SHORTEST_PATIENCE = 0.1  # Share of the time-out.


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
      most_over_selection: Largest number of devices chosen for each report of the goal, where
        many have not reported in the rounds before. Sums hold `wanted` reports at most, all the
        same. No more than `over_selection` are chosen if this is not larger.
    """

    goal_count: int
    over_selection: float = 1.3
    least_fraction: float = 0.8
    selection_timeout: float = 600.0
    reporting_timeout: float = 600.0
    devices_per_aggregator: int = 500
    exchange_timeout: float = 10.0
    most_over_selection: float = 3.0

    def __post_init__(self):
        validation.integer("goal_count", self.goal_count, minimum=1)
        validation.number("goal_count", self.goal_count, at_most=_MOST_REPORTS)
        validation.number("over_selection", self.over_selection, at_least=1, at_most=1000)
        validation.number("most_over_selection", self.most_over_selection, at_least=1, at_most=1000)
        validation.probability("least_fraction", self.least_fraction)
        validation.integer("devices_per_aggregator", self.devices_per_aggregator, minimum=1)
        for name in ("selection_timeout", "reporting_timeout", "exchange_timeout"):
            validation.positive(name, getattr(self, name))

    @property
    def wanted(self) -> int:
        """Devices to choose if most of them report; no sum ever holds more reports."""
        return math.ceil(self.goal_count * self.over_selection - 1e-9)

    @property
    def most_wanted(self) -> int:
        """Devices to choose at most."""
        return max(self.wanted, math.ceil(self.goal_count * self.most_over_selection - 1e-9))

    @property
    def extra_seconds(self) -> float:
        """Seconds that selection goes on for devices beyond `wanted`, at most."""
        return _SHORTEST_PATIENCE * self.selection_timeout

    def patience(self, half_seconds: float) -> float:
        """Returns after how many seconds a device that has sent nothing is given up.

        Args:
          half_seconds: Seconds in which half of the goal's reports come.
        """
        shortest = _SHORTEST_PATIENCE * self.reporting_timeout
        return min(self.reporting_timeout, max(shortest, _PATIENCE * half_seconds))

    @property
    def least(self) -> int:
        """Devices to begin a round with, and reports to complete it with, at least."""
        return math.ceil(self.goal_count * self.least_fraction - 1e-9)

    @property
    def longest(self) -> float:
        """Seconds after which an attempt is over in any case."""
        return self.reporting_timeout + 6 * self.exchange_timeout


@dataclasses.dataclass(frozen=True)
class SecureSumSettings:
    """How devices of a task sum their reports, so that the server sees sums of groups only.

    Attributes:
      parameters: What the devices demand, by their plan: the layout of a vector, whom the
        summands are hidden from, and the fewest devices in a group's sum.
      most_devices: Devices that the moduli have room for, in the sum of all groups.
      threshold_fraction: Share of the shares of a secret that recovers it; the threat model's
        own if None (`secure_sums.group.Group`).
      num_neighbours: Devices that each one shares its secrets with; all of its group if None.
      step_timeout: Seconds that devices have for each step once reporting is closed; who takes
        longer has dropped out.
    """

    parameters: parameters_lib.Parameters
    most_devices: int
    threshold_fraction: float | None = None
    num_neighbours: int | None = None
    step_timeout: float = 60.0

    def __post_init__(self):
        validation.integer("most_devices", self.most_devices, minimum=self.parameters.least_devices)
        validation.positive("step_timeout", self.step_timeout)

    @property
    def num_steps(self) -> int:
        """Steps that devices may be waited for in, once reporting is closed."""
        is_active = self.parameters.threat_model is parameters_lib.ThreatModel.ACTIVE_SERVER
        return 4 if is_active else 3

    @property
    def longest(self) -> float:
        """Seconds from the end of reporting to a group's sum, at most: its steps, and the sum."""
        return (self.num_steps + 1) * self.step_timeout


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
      secure_sum: How reports are summed so that the server sees none; None if it sees them.
      min_sep: Smallest stride between two rounds of one device, in rounds.
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
    secure_sum: SecureSumSettings | None = None
    min_sep: int = 1

    def __post_init__(self):
        validation.positive("weight", self.weight)
        validation.integer("min_sep", self.min_sep, minimum=1)
        validation.number("rest_seconds", self.rest_seconds, at_least=0)
        if self.secure_sum is not None:
            self._check_sizes(self.secure_sum)

    def _check_sizes(self, secure_sum: SecureSumSettings) -> None:
        wanted, least = self.rounds.wanted, secure_sum.parameters.least_devices
        if wanted < least:
            raise validation.UsageError(
                f"rounds of the task {self.name!r} choose {wanted} devices, and its devices are "
                f"in no secure sum of fewer than {least}: raise goal_count, or make the task with "
                "a smaller least_devices."
            )
        if wanted > secure_sum.most_devices:
            raise validation.UsageError(
                f"rounds of the task {self.name!r} choose {wanted} devices, and its moduli have "
                f"room for {secure_sum.most_devices}: lower goal_count or over_selection, or make "
                "the task with a larger most_devices."
            )

    @property
    def longest(self) -> float:
        """Seconds after which an attempt is over in any case."""
        return self.rounds.longest + self._sums_last

    @property
    def longest_closing(self) -> float:
        """Seconds that Aggregators have for their sums once reporting is closed."""
        return self.rounds.exchange_timeout + self._sums_last

    @property
    def _sums_last(self) -> float:
        return 0.0 if self.secure_sum is None else self.secure_sum.longest

    def num_groups(self, num_devices: int) -> int:
        """How many Aggregators devices are divided among, evenly.

        A group that is summed securely is lost with too many of its devices: where groups of
        `devices_per_aggregator` would hold fewer than the least sum and, on top of it, as many
        as are chosen in vain (`over_selection`), there are fewer groups, which are larger. Not
        with `num_neighbours`: what is proven of such groups is proven up to this size.

        Args:
          num_devices: How many there are.

        Returns:
          The number of groups; 0 if there are too few devices for them.
        """
        groups = math.ceil(num_devices / self.rounds.devices_per_aggregator)
        if self.secure_sum is None:
            return groups
        least = self.secure_sum.parameters.least_devices
        if self.secure_sum.num_neighbours is None:
            roomy = int(num_devices // (least * self.rounds.over_selection))
            groups = max(1, min(groups, roomy))
        return groups if num_devices >= groups * least else 0

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
            raise validation.UsageError(
                f"tasks must have different names, and be one at least: {names}."
            )
        for task in self.tasks:
            if task.model_of is not None and task.model_of not in names:
                raise validation.UsageError(
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
