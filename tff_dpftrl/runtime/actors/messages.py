"""What actors, devices and observers say to each other.

`device` is the address of a connection. An `attempt` is one try at a round: the address of
its Master Aggregator, which no other try ever has. Bytes that are secret or a device's own
do not appear when a message is printed.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from tff_dpftrl.runtime.store import interface

# Where the events of the population are sent: counts and released metrics only.
OBSERVER = "observer"


def _unprinted() -> Any:
    return dataclasses.field(repr=False)


def _unprinted_bytes() -> Any:
    return dataclasses.field(default=b"", repr=False)


# Between devices and the server.


class Refusal(str, enum.Enum):
    """Why a report does not count."""

    LATE = "late"
    DUPLICATE = "duplicate"
    NOT_SELECTED = "not selected"
    WRONG_ATTEMPT = "wrong attempt"
    UNUSABLE = "unusable"
    IN_THE_CLEAR = "in the clear"
    GROUP_LOST = "group lost"


@dataclasses.dataclass(frozen=True)
class CheckIn:
    """Device to Selector: it is ready.

    Attributes:
      device: Its connection; the engine has checked what it attests.
      tasks: The tasks whose plans its version can run.
      peer: Name of the network address that it connects from, or of its connection on loopback: a
        hash with a key of this start of the service. Devices of one name may be one host.
    """

    device: str
    tasks: frozenset[str]
    peer: str = ""


@dataclasses.dataclass(frozen=True)
class DeviceRests:
    """Engine to Selector: a device came by and left, since it has to rest from the open round."""


@dataclasses.dataclass(frozen=True)
class ComeBack:
    """Server to device: it is not needed now.

    Attributes:
      device: Its connection.
      turns: When to check in again: seconds from now, growing; the device takes the first
        one that it can.
      reason: A few words.
    """

    device: str
    turns: tuple[float, ...]
    reason: str


@dataclasses.dataclass(frozen=True)
class Configure:
    """Aggregator to device: take part. The engine adds the plan for the device's version.

    Attributes:
      device: Its connection.
      report_to: Where its report goes.
      attempt: What its report has to name.
      task: The task.
      round_index: The round, from 0.
      model: The model to begin with; committed.
      secure_sum_session: Names the group's secure sum; empty where reports are in the clear.
    """

    device: str
    report_to: str
    attempt: str
    task: str
    round_index: int
    model: bytes = _unprinted()
    secure_sum_session: bytes = _unprinted_bytes()


@dataclasses.dataclass(frozen=True)
class Report:
    """Device to Aggregator: its result.

    Attributes:
      device: Its connection.
      attempt: From `Configure`.
      payload: What the task's summation takes.
    """

    device: str
    attempt: str
    payload: Any = _unprinted()


@dataclasses.dataclass(frozen=True)
class ReportBegun:
    """Engine to Aggregator: a device has begun to send its report, which comes in parts."""

    device: str


@dataclasses.dataclass(frozen=True)
class SecureSumMessage:
    """Device to Aggregator: a step of a secure sum, which takes the place of a report.

    Attributes:
      device: Its connection.
      attempt: From `Configure`.
      step: Its number, from 0: what comes twice is told from what comes next.
      content: A serialized `secure_sum_pb2.ToServer`.
      vector: The content of its masked vector, if that is not in it.
    """

    device: str
    attempt: str
    step: int
    content: bytes = _unprinted()
    vector: bytes = _unprinted_bytes()


@dataclasses.dataclass(frozen=True)
class SecureSumAnswer:
    """Aggregator to device: what the next step needs.

    Attributes:
      device: Its connection.
      step: Of the device's message that it answers.
      content: A serialized `secure_sum_pb2.ToDevice`.
    """

    device: str
    step: int
    content: bytes = _unprinted()


@dataclasses.dataclass(frozen=True)
class VectorAdded:
    """Aggregator to engine: a device's masked vector takes up no more room."""

    device: str


@dataclasses.dataclass(frozen=True)
class ReportAccepted:
    """Aggregator to device: its result is in the sum; the round may still be abandoned.

    Attributes:
      device: Its connection.
      attempt: The attempt.
      turns: When to check in again, as in `ComeBack`.
    """

    device: str
    attempt: str
    turns: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class ReportRefused:
    """Aggregator or engine to device: its result does not count (again).

    Attributes:
      device: Its connection.
      attempt: The attempt.
      refusal: Why.
      reason: What is wrong with an unusable one.
    """

    device: str
    attempt: str
    refusal: Refusal
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class DeviceGone:
    """Engine to Selector or Aggregator: a connection was closed."""

    device: str


# From the engine.


@dataclasses.dataclass(frozen=True)
class Lost:
    """Engine to who spawned an actor: it is gone."""

    address: str


@dataclasses.dataclass(frozen=True)
class Shutdown:
    """Engine to Coordinator: stop, and let another one lead at once."""


# Between Coordinator and Selectors.


@dataclasses.dataclass(frozen=True)
class SelectDevices:
    """Coordinator to Selector, again and again: it lives, and this is what it wants.

    Attributes:
      epoch: Its epoch.
      coordinator: Its address.
      task: The task of the next round; empty if there is none.
      wanted: How many devices are to wait for it.
      accepting: Whether devices may wait now.
    """

    epoch: int
    coordinator: str
    task: str
    wanted: int
    accepting: bool


@dataclasses.dataclass(frozen=True)
class DevicesWaiting:
    """Selector to Coordinator: how many devices wait.

    Attributes:
      selector: Its address.
      epoch: From `SelectDevices`, as is `task`.
      task: The task they can take part in.
      serial: Of the last `ForwardDevices` of this epoch that it has carried out.
      waiting: How many.
      resting: How many times a device that has to rest came by, since the Selector's start.
    """

    selector: str
    epoch: int
    task: str
    serial: int
    waiting: int
    resting: int = 0


@dataclasses.dataclass(frozen=True)
class ForwardDevices:
    """Coordinator to Selector: give devices to a Master Aggregator.

    Attributes:
      epoch: The Coordinator's epoch.
      serial: Grows with every attempt of an epoch.
      attempt: The Master Aggregator.
      task: The task.
      count: How many.
      then: What it wants afterwards.
    """

    epoch: int
    serial: int
    attempt: str
    task: str
    count: int
    then: SelectDevices


@dataclasses.dataclass(frozen=True)
class DevicesForwarded:
    """Selector to Master Aggregator: the devices, chosen from those that wait.

    From as many network addresses as there are, evenly, and at random among the devices of each.
    """

    selector: str
    devices: tuple[str, ...]


# Between Coordinator, Master Aggregator and Aggregators.


@dataclasses.dataclass(frozen=True)
class AbandonRound:
    """Coordinator to Master Aggregator: give up."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Turnout:
    """How many devices of one attempt reported, and how soon: numbers for the next attempts.

    Attributes:
      chosen: Devices that were chosen.
      reported: Devices that reported until the attempt was closed; in a secure sum, that arrived.
      undecided: Devices that may have reported too, had they been waited for.
      half_seconds: Seconds in which half of the goal's reports came; 0 if they did not.
    """

    chosen: int
    reported: int
    undecided: int
    half_seconds: float


@dataclasses.dataclass(frozen=True)
class RoundCommitted:
    """Master Aggregator to Coordinator: the store has confirmed the commit.

    Attributes:
      attempt: The attempt.
      epoch: The epoch it was committed under.
      commit: What may be released, and the secret state.
      turnout: How many devices reported; None if Aggregators were lost with their devices.
    """

    attempt: str
    epoch: int
    commit: interface.Commit
    turnout: Turnout | None = None


@dataclasses.dataclass(frozen=True)
class RoundAbandoned:
    """Master Aggregator to Coordinator: nothing was released.

    Attributes:
      attempt: The attempt.
      reason: A few words.
      counts: What became of the devices.
      not_stored: Whether all was done, and the store has not made the commit.
      used_devices: Whether devices were configured: they may have counted a participation.
      turnout: How many devices reported; None if it did not come to a sum, or if Aggregators
        were lost with their devices.
    """

    attempt: str
    reason: str
    counts: Mapping[str, int]
    not_stored: bool = False
    used_devices: bool = True
    turnout: Turnout | None = None


@dataclasses.dataclass(frozen=True)
class ReportsCounted:
    """Aggregator to Master Aggregator: how far it is.

    Attributes:
      aggregator: Its address.
      accepted: Reports in its sum; of a secure sum, devices that are there for it.
      outstanding: Devices that may still report.
    """

    aggregator: str
    accepted: int
    outstanding: int


@dataclasses.dataclass(frozen=True)
class CloseReporting:
    """Master Aggregator to Aggregator: take no more reports, and hand over the sum."""


@dataclasses.dataclass(frozen=True)
class DropSilent:
    """Master Aggregator to Aggregator: wait no longer for devices that have sent nothing."""


@dataclasses.dataclass(frozen=True)
class PartialSum:
    """Aggregator to Master Aggregator: its sum.

    Attributes:
      aggregator: Its address.
      total: The sum, as the task's summation has it; None if it is lost.
      counts: What became of its devices; "reports" are in the sum.
    """

    aggregator: str
    total: Any = _unprinted()
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)


# To and from the StoreActor.


@dataclasses.dataclass(frozen=True)
class AcquireLease:
    """Coordinator to StoreActor: it wants to lead.

    Attributes:
      owner: Its address.
      asked_at: When it asked, by its clock.
    """

    owner: str
    asked_at: float


@dataclasses.dataclass(frozen=True)
class RenewLease:
    """Coordinator to StoreActor: it leads, and wants to go on; attributes as for `AcquireLease`."""

    owner: str
    epoch: int
    asked_at: float


@dataclasses.dataclass(frozen=True)
class ReleaseLease:
    """Coordinator to StoreActor: it stops."""

    owner: str
    epoch: int


@dataclasses.dataclass(frozen=True)
class LeaseGranted:
    """StoreActor to Coordinator: it leads.

    Attributes:
      epoch: The epoch of its lease.
      asked_at: From the request: the lease is counted from there.
    """

    epoch: int
    asked_at: float


@dataclasses.dataclass(frozen=True)
class LeaseRefused:
    """StoreActor to Coordinator: it does not lead.

    Attributes:
      epoch: The epoch of the lease it has lost; 0 if it asked for a new one.
      reason: Who leads.
    """

    epoch: int
    reason: str


@dataclasses.dataclass(frozen=True)
class ReadCommits:
    """Coordinator to StoreActor: what are the last commits?

    Attributes:
      reply_to: Who asks.
      request: Number of the question.
      tasks: Names of the tasks.
    """

    reply_to: str
    request: int
    tasks: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class CommitsRead:
    """StoreActor to Coordinator: the last commits.

    Attributes:
      request: Number of the question.
      commits: One for each task.
    """

    request: int
    commits: tuple[interface.Commit, ...]


@dataclasses.dataclass(frozen=True)
class CommitRound:
    """Master Aggregator to StoreActor: the noised result of a round, on its way to be committed.

    Attributes:
      reply_to: The attempt.
      epoch: The Coordinator's epoch.
      task: The task.
      round_index: The round, from 0.
      model: The model after the round.
      state: The aggregator's state after the round; secret.
      metrics: Of the round.
    """

    reply_to: str
    epoch: int
    task: str
    round_index: int
    model: bytes = _unprinted()
    state: bytes = _unprinted()
    metrics: Mapping[str, Any] = _unprinted()


@dataclasses.dataclass(frozen=True)
class RoundStored:
    """StoreActor to Master Aggregator: the round is committed."""

    commit: interface.Commit


@dataclasses.dataclass(frozen=True)
class CommitRefused:
    """StoreActor to Master Aggregator: this commit was not made (an earlier one may have been)."""

    reason: str


@dataclasses.dataclass(frozen=True)
class StoreFailed:
    """The store cannot be read or written, or lacks a task."""

    reason: str


# To the observer.


@dataclasses.dataclass(frozen=True)
class Leading:
    """A Coordinator leads the population, and has read what is committed."""

    population: str
    epoch: int


@dataclasses.dataclass(frozen=True)
class SelectionOpened:
    """Devices are chosen for a round from now on.

    Attributes:
      task: The task; empty if no task may have another round.
      round_index: The round, from 0, if the attempt that runs is not abandoned.
    """

    task: str
    round_index: int


@dataclasses.dataclass(frozen=True)
class RoundBegan:
    """Devices were chosen for a round.

    Attributes:
      task: The task.
      round_index: The round, from 0.
      attempt: The attempt.
      devices: How many.
    """

    task: str
    round_index: int
    attempt: str
    devices: int


@dataclasses.dataclass(frozen=True)
class RoundReleased:
    """A round is committed; its metrics may be shown.

    A new Coordinator says it again; if one dies between commit and release, nobody says it.
    The store's history has every round.

    Attributes:
      task: The task.
      round_index: The round, from 0.
      attempt: The attempt.
      metrics: Of the round.
    """

    task: str
    round_index: int
    attempt: str
    metrics: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class RoundSkipped:
    """A round is committed as skipped: nothing of it is released, and the next one follows.

    A new Coordinator says it again, as `RoundReleased`.

    Attributes:
      task: The task.
      round_index: The round, from 0.
      attempt: The Master Aggregator that committed it.
    """

    task: str
    round_index: int
    attempt: str


@dataclasses.dataclass(frozen=True)
class RoundLost:
    """A round's attempt was abandoned.

    Attributes:
      task: The task.
      round_index: The round, from 0.
      attempt: The attempt.
      reason: A few words.
      counts: What became of the devices, as far as known.
    """

    task: str
    round_index: int
    attempt: str
    reason: str
    counts: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class TooFewDevices:
    """Selection went past its time-out with less than the least number; it goes on.

    Attributes:
      task: The task.
      waiting: How many wait.
      least: How many a round needs.
    """

    task: str
    waiting: int
    least: int
