"""Settings of a population: its tasks, sizes and time-outs of rounds, and leases.

Two small interfaces hide what a task computes: `Summation` sums reports, and `ServerStep` turns a
sum into the next model. They are implemented with TensorFlow, or with plain integers in tests.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from tff_dpftrl import validation
from tff_dpftrl.runtime.actors import events
from tff_dpftrl.runtime.store import contents, interface
from tff_dpftrl.secure_sums import parameters as parameters_lib
from tff_dpftrl.secure_sums import vectors


def check_name(name: str, value: str) -> None:
    """Refuses a name that cannot be the name of a file, or has special characters."""
    plain = value.replace("-", "").replace("_", "").replace(".", "").replace("=", "")
    if not (plain.isascii() and plain.isalnum()) or value[0] == "." or len(value) > 100:
        raise validation.UsageError(
            f"{name} must be a name of up to 100 letters, digits and -_.=, got {value!r}."
        )


class UnusableReport(ValueError):
    """A report that cannot be summed: wrong shape, not finite, not readable."""


class Summation(abc.ABC):
    """Stateless sum of a task's reports.

    Aggregators of one round may run in different processes, so that a total must be picklable.
    Reports are added as they come and not kept. In a secure sum, the server never sees a report:
    groups of devices hand over sums (`decode_group`). The actors that merge sums only see totals
    and counts in any case.
    """

    @abc.abstractmethod
    def zero(self) -> Any:
        """Returns the sum of no reports."""

    def for_round(self, model: bytes) -> Summation:
        """Returns the summation of one round, which may depend on the devices' model.

        Args:
          model: Serialised committed model that the devices begin with.

        Returns:
          The summation of that round; by default this one.
        """
        del model
        return self

    @abc.abstractmethod
    def accumulate(self, total: Any, payload: Any) -> Any:
        """Adds a report.

        Args:
          total: Sum of the earlier reports; it may be changed in place unless this raises.
          payload: Report that a device sent. Untrusted: validate before use.

        Returns:
          The sum with the report.

        Raises:
          UnusableReport: If the report cannot be added; `total` is unchanged.
        """

    @abc.abstractmethod
    def merge(self, total: Any, other: Any) -> Any:
        """Adds two sums; both may be changed in place."""

    def decode_group(self, vector: vectors.Vector, num_devices: int) -> Any:
        """Decodes the secure sum of a group of devices.

        Args:
          vector: Sum of the devices' vectors, in the layout of the task's `secure_sum`.
          num_devices: Number of devices whose vectors are in the sum.

        Returns:
          The sum of their reports.

        Raises:
          UnusableReport: If it cannot be the sum of that many reports; the group is lost then.
          TypeError: If the task's reports are not summed securely.
        """
        del vector, num_devices
        raise TypeError(f"{type(self).__name__} sums no vectors of groups.")


@dataclasses.dataclass(frozen=True)
class StepResult:
    """Result of a server step. It may not leave the server before it is committed.

    Attributes:
      model: Serialised new model; empty if the task trains no model.
      state: Serialised new state of the aggregator; secret.
      metrics: Metrics of the round, JSON-compatible; public after the commit.
    """

    model: bytes = dataclasses.field(repr=False)
    state: bytes | contents.Content = dataclasses.field(repr=False)
    metrics: Mapping[str, Any] = dataclasses.field(repr=False)


class ServerStep(abc.ABC):
    """The server's update of a round: adds the noise to the sum and updates the model.

    Each call may draw other noise: what is committed of a round is the result of one call, and
    nobody else sees another one. It sends, logs and writes nothing.
    """

    @abc.abstractmethod
    def apply(
        self, total: Any, num_reports: int, model: bytes, state: contents.Serialised
    ) -> StepResult:
        """Computes the next model.

        Args:
          total: Sum of the reports, as the task's summation returns it. It may be emptied, to have
            its memory free while the noise is added.
          num_reports: Number of reports in the sum.
          model: Serialised committed model that the devices began with.
          state: Serialised committed state of the aggregator; secret.

        Returns:
          The next model and state, and the metrics of the round.

        Raises:
          interface.StoreError: If the state is still in the store, and cannot be read.
        """

    @abc.abstractmethod
    def skip(self, model: bytes, state: contents.Serialised) -> StepResult:
        """Skips a round of which nothing is released.

        Args:
          model: Serialised committed model.
          state: Serialised committed state of the aggregator; secret.

        Returns:
          The unchanged model, the state of the next round, past the noise of the skipped one, and
          metrics, among them `SKIPPED`.
        """


SKIPPED = "skipped"
"""Name of the metric that is true in the row of a skipped round, and missing in all others."""

_MOST_REPORTS = 10**9
_PATIENCE = 4  # Multiple of the time in which half of the goal's reports come.
_SHORTEST_PATIENCE = 0.1  # Share of the time-out.


@dataclasses.dataclass(frozen=True)
class RoundSettings:
    """Sizes and time-outs of a round (Bonawitz et al. 2019, section 2.2)."""

    goal_count: int  # Number of reports that complete a round.
    over_selection: float = 1.3  # Devices selected per report of the goal: some will not report.
    least_fraction: float = 0.8  # Share of the goal that suffices at the time-out.
    selection_timeout: float = 600.0  # Seconds until a round begins with fewer devices.
    reporting_timeout: float = 600.0  # Seconds that devices have to report.
    devices_per_aggregator: int = 500  # Number of devices whose reports one Aggregator sums.
    exchange_timeout: float = 10.0  # Seconds that an actor waits for another actor's answer.
    # Largest number of devices selected for each report of the goal, where many have not reported
    # in earlier rounds. A sum still holds at most `wanted` reports. A value of at most
    # `over_selection` has no effect.
    most_over_selection: float = 3.0
    max_fan_in: int = 16  # Largest number of sums that one actor merges; beyond it there is a tree.
    # Share of a device's secret that does not recover it, where sums are secure; None for the least
    # that devices accept.
    secure_threshold: float | None = None
    # Seconds that devices have for each step of a secure sum once reporting is closed; slower
    # devices count as dropped.
    secure_step_timeout: float = 60.0

    def __post_init__(self):
        validation.integer("goal_count", self.goal_count, minimum=1)
        validation.number("goal_count", self.goal_count, at_most=_MOST_REPORTS)
        validation.number("over_selection", self.over_selection, at_least=1, at_most=1000)
        validation.number("most_over_selection", self.most_over_selection, at_least=1, at_most=1000)
        validation.probability("least_fraction", self.least_fraction)
        validation.integer("devices_per_aggregator", self.devices_per_aggregator, minimum=1)
        validation.integer("max_fan_in", self.max_fan_in, minimum=2)
        for name in ("selection", "reporting", "exchange", "secure_step"):
            validation.positive(f"{name}_timeout", getattr(self, f"{name}_timeout"))

    @property
    def wanted(self) -> int:
        """Number of devices to select if most of them report; no sum ever holds more reports."""
        return math.ceil(self.goal_count * self.over_selection - 1e-9)

    @property
    def most_wanted(self) -> int:
        """Largest number of devices to select."""
        return max(self.wanted, math.ceil(self.goal_count * self.most_over_selection - 1e-9))

    def patience(self, half_seconds: float) -> float:
        """Returns the seconds after which a device that has sent nothing is dropped."""
        shortest = _SHORTEST_PATIENCE * self.reporting_timeout
        return min(self.reporting_timeout, max(shortest, _PATIENCE * half_seconds))

    @property
    def least(self) -> int:
        """Smallest number of devices to begin a round, and of reports to complete it."""
        return math.ceil(self.goal_count * self.least_fraction - 1e-9)

    def merge_levels(self, num_sums: int) -> int:
        """Returns the smallest number of levels of merges in which no actor has too many sums."""
        levels = 1
        while self.max_fan_in**levels < num_sums:
            levels += 1
        return levels

    def fan_in(self, num_sums: int) -> int:
        """Returns the smallest fan-in with which that number of levels merges all sums."""
        levels = self.merge_levels(num_sums)
        fan_in = 1
        while fan_in**levels < num_sums:
            fan_in += 1
        return fan_in

    @property
    def longest(self) -> float:
        """Longest time that an attempt takes with one level of merges and no secure sums, in s."""
        return self.reporting_timeout + 7 * self.exchange_timeout


def _no_refusal(commit: interface.Commit) -> None:
    del commit


@dataclasses.dataclass(frozen=True)
class Task:
    """A task of a population."""

    name: str  # Name of the task, also in the store.
    rounds: RoundSettings
    summation: Summation
    server_step: ServerStep
    weight: float = 1.0  # Relative share of the rounds among the population's tasks.
    # Name of the task whose committed model the devices get, for an evaluation; the task itself if
    # None.
    model_of: str | None = None
    num_rounds: int | None = None  # Number of rounds after which the task ends; unlimited if None.
    # Whether devices of the next round may be selected while a round reports. Must be False if the
    # participation schedule counts whole rounds between a device's participations.
    pipelined: bool = True
    # Approximate time in seconds until a device that has taken part can do so again. It is added to
    # the times at which the device is to check in.
    rest_seconds: float = 0.0
    # Function of the last commit that returns the reason why no further round may begin, like a
    # spent privacy budget, or None.
    refusal: Callable[[interface.Commit], str | None] = _no_refusal
    # What the devices' plan demands of secure sums; None if the server sees reports in the clear.
    secure_sum: parameters_lib.Parameters | None = None
    min_sep: int = 1  # Smallest stride between two rounds of one device, in rounds.
    max_participations: int | None = None  # Largest number of rounds of one device, if limited.
    min_sep_hours: float = 0.0  # Hours that a device rests after it took part.
    tested_tensorflow: tuple[str, ...] = ()  # Versions tested on the devices' part, if known.

    def __post_init__(self):
        validation.positive("weight", self.weight)
        validation.integer("min_sep", self.min_sep, minimum=1)
        validation.number("rest_seconds", self.rest_seconds, at_least=0)
        if self.secure_sum is not None:
            self._check_sizes(self.secure_sum)

    def _check_sizes(self, secure_sum: parameters_lib.Parameters) -> None:
        wanted, least = self.rounds.wanted, secure_sum.least_devices
        most = validation.integer("most_devices", secure_sum.most_devices, minimum=least)
        if wanted < least:
            raise validation.UsageError(
                f"rounds of the task {self.name!r} choose {wanted} devices, and its devices are "
                f"in no secure sum of fewer than {least}: raise goal_count, or make the task with "
                "a smaller least_devices."
            )
        if wanted > most:
            raise validation.UsageError(
                f"rounds of the task {self.name!r} choose {wanted} devices, and its moduli have "
                f"room for {most}: lower goal_count or over_selection, or make "
                "the task with a larger most_devices."
            )
        if self.noise_parties and self.num_groups(wanted) != 1:
            raise validation.UsageError(
                f"rounds of the task {self.name!r} divide {wanted} devices into groups of "
                f"{self.rounds.devices_per_aggregator}, and its noise parties have noise for one "
                f"group a round: raise devices_per_aggregator to {wanted}."
            )

    @property
    def noise_parties(self) -> tuple[bytes, ...]:
        """Raw public keys of the parties without which no round begins; empty for most tasks."""
        return () if self.secure_sum is None else self.secure_sum.noise_parties

    def wait_for_parties(self, event: events.PartyAway) -> str:
        """Describes that the next round waits for noise parties, or why rounds are skipped."""
        if event.to_skip:
            return (
                f"rounds to skip: {event.to_skip}. A noise party has given their noise to attempts "
                "that this store has not committed, and gives none twice. If the task was begun "
                "with another --store, stop, and serve it with that one."
            )
        if not event.away:
            return "all noise parties are connected."
        return (
            f"{event.away} of {event.promised} noise parties that the plan names are away, and the "
            "next round waits for them: have their operators start tff-dpftrl noise-party."
        )

    @property
    def longest(self) -> float:
        """Longest time that an attempt takes, in seconds."""
        levels = self.rounds.merge_levels(self.num_groups(self.rounds.wanted))
        return self.rounds.longest - self.rounds.exchange_timeout + self.longest_closing(levels)

    def longest_closing(self, levels: int = 1) -> float:
        """Returns the longest time, in seconds, from the end of reporting to the sum of all.

        Each level of merges waits longer than the one below it, so that one missing sum does not
        take others with it.
        """
        return levels * self.rounds.exchange_timeout + self._secure_seconds

    @property
    def _secure_seconds(self) -> float:
        if self.secure_sum is None:
            return 0.0
        return (self.secure_sum.num_steps + 1) * self.rounds.secure_step_timeout

    def num_groups(self, num_devices: int) -> int:
        """Computes the number of Aggregators among which devices are divided evenly; 0 if too few.

        A secure sum's group is lost if too many of its devices drop out. A group should therefore
        hold the smallest sum's devices times `over_selection`. Where groups of
        `devices_per_aggregator` would be smaller, there are fewer and larger groups. This is not
        done with `least_neighbours`, since the proof for such groups holds up to this size only.
        """
        groups = math.ceil(num_devices / self.rounds.devices_per_aggregator)
        if self.secure_sum is None:
            return groups
        least = self.secure_sum.least_devices
        if self.secure_sum.least_neighbours is None:
            roomy = int(num_devices // (least * self.rounds.over_selection))
            groups = max(1, min(groups, roomy))
        return groups if num_devices >= groups * least else 0

    def rests_advice(self, num_devices: float) -> str:
        """Describes what helps a population that is too small for round after round; may be empty.

        In any `min_sep` rounds in a row, no device takes part twice.
        """
        wanted = self.rounds.wanted
        if num_devices >= self.min_sep * wanted:
            return ""
        # Rounding must not lower the largest goal whose rounds choose so many devices.
        goal = int(num_devices // self.min_sep / self.rounds.over_selection + 1e-9)
        remedies = [f"clients_per_round={goal}"] if goal >= 1 else []
        if num_devices >= wanted:
            remedies.append(f"min_sep={int(num_devices // wanted)}")
        return (
            f"rounds that choose {wanted} devices, which then rest until min_sep={self.min_sep} "
            f"rounds later, need {self.min_sep * wanted} devices, and {num_devices:g} come: "
            "rounds will be skipped, which costs privacy. Wait for more devices"
            + (f", or make the task with {' or '.join(remedies)}." if remedies else ".")
        )

    def shortage(self, event: events.TooFewDevices) -> str:
        """Describes, with the numbers of devices, why no round begins, and what would help."""
        text = f"{event.waiting} devices wait, and a round needs {event.least} at least"
        if not event.resting:
            return f"{text}: waiting for more."
        text += f"; {event.resting} check-ins were of devices that have to rest. "
        if event.min_sep_is_over:
            return f"{text}{self._other_limits(event.rounds_done)}"
        return (
            f"{text}Devices rest until min_sep={self.min_sep} rounds later, so that "
            f"{self.min_sep * self.rounds.wanted} devices are needed for a round after round: wait "
            "for more, or make a task with smaller clients_per_round or min_sep."
        )

    def _other_limits(self, rounds_done: int) -> str:
        """Describes why devices may rest whose `min_sep` is over by the store's rounds."""
        reasons, most = [], self.max_participations
        # Another attempt, of which this server does not know, may have been made at the next round.
        if most is not None and most <= math.ceil((rounds_done + 1) / self.min_sep):
            reasons.append(f"They have taken part max_participations={most} times")
        if self.min_sep_hours:
            reasons.append(f"min_sep_hours={self.min_sep_hours:g} are not over for them")
        others = ""
        if reasons:
            others = (
                f"{', or '.join(reasons)}: wait for more devices, or make a task with other "
                "limits. If neither is the reason: "
            )
        return (
            f"{others}They have counted later rounds than this store has: it was restored from an "
            "older copy, or begun anew. Stop, and serve the store that has all rounds, or make the "
            "task anew under another name. Rounds that are made twice cost privacy that no "
            "statement counts; those of a task of version 0.4 have the same noise, and reveal sums."
        )

    def is_over(self, commit: interface.Commit) -> bool:
        """Returns whether no further round may begin after a commit."""
        if self.num_rounds is not None and commit.rounds_done >= self.num_rounds:
            return True
        return self.refusal(commit) is not None


@dataclasses.dataclass(frozen=True)
class Population:
    """A population: its tasks, and the times of its leases."""

    name: str  # Name of the population, also in the store.
    tasks: tuple[Task, ...]
    lease_seconds: float = 15.0  # Seconds until a Coordinator's lease ends unless it is renewed.
    heartbeat_seconds: float = 2.0  # Interval of renewals, and of heartbeats to the Selectors.
    silence_seconds: float = 6.0  # Silence after which a Selector spawns another Coordinator.

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
        """Returns the task of a name; raises KeyError if there is none."""
        return {task.name: task for task in self.tasks}[name]
