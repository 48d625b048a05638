"""Messages among actors and devices.

In all messages, `device` is the address of a device's connection, and `task` the name of a task.
`attempt` names one attempt at a round: it is the address of its Master Aggregator, which no other
attempt ever has. A message's repr leaves out bytes that are secret or come from one device.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from tff_dpftrl.runtime.store import contents, interface


def _unprinted() -> Any:
    return dataclasses.field(repr=False)


def _unprinted_bytes() -> Any:
    return dataclasses.field(default=b"", repr=False)


# Between devices and the server.


class Refusal(str, enum.Enum):
    """Reason why a report is not in the sum."""

    LATE = "late"
    DUPLICATE = "duplicate"
    NOT_SELECTED = "not selected"
    WRONG_ATTEMPT = "wrong attempt"
    UNUSABLE = "unusable"
    IN_THE_CLEAR = "in the clear"
    GROUP_LOST = "group lost"


@dataclasses.dataclass(frozen=True)
class CheckIn:
    """Device to Selector: the device is ready to take part.

    Attributes:
      device: Address of the device's connection; its attestation is verified already.
      tasks: Names of the tasks whose plans the device's version can run.
      peer: Name of the network address that the device connects from, or of its connection on
        loopback: a hash with a key of this start of the service. Devices with the same name may be
        one host.
    """

    device: str
    tasks: frozenset[str]
    peer: str = ""


@dataclasses.dataclass(frozen=True)
class PartyReady:
    """Engine to Selector, and on to the Coordinator: a noise party waits for an attempt.

    Attributes:
      address: Address of the party's connection, which serves one attempt; its signature is
        verified already.
      key: Raw public key of the party, one of those that the task's plan names.
      task: Name of the task.
      next_round: Index of the first round whose noise the party has not given.
    """

    address: str
    key: bytes
    task: str
    next_round: int


@dataclasses.dataclass(frozen=True)
class DeviceRests:
    """Engine to Selector: a device connected and left, since it has to rest in the open round."""


@dataclasses.dataclass(frozen=True)
class ComeBack:
    """Server to device: the device is not needed now.

    Attributes:
      device: Address of the device's connection.
      turns: Times at which to check in again, in increasing seconds from now; the device takes the
        first one that it can.
      reason: Reason in a few words.
      is_finished: Whether no task of the population has a further round.
    """

    device: str
    turns: tuple[float, ...]
    reason: str
    is_finished: bool = False


@dataclasses.dataclass(frozen=True)
class Configure:
    """Aggregator to device: take part. The engine adds the plan for the device's version.

    Attributes:
      device: Address of the device's connection.
      report_to: Address of the Aggregator that takes the report.
      attempt: Name of the attempt, which the report must repeat.
      task: Name of the task.
      round_index: Index of the round, from 0.
      model: Serialised committed model to begin with.
      secure_sum_session: Session of the group's secure sum; empty where reports are in the clear.
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
    """Device to Aggregator: the device's result.

    Attributes:
      device: Address of the device's connection.
      attempt: Name of the attempt, as `Configure` gave it.
      payload: Report for the task's summation. Untrusted.
    """

    device: str
    attempt: str
    payload: Any = _unprinted()


@dataclasses.dataclass(frozen=True)
class ReportBegun:
    """Engine to Aggregator: a device has begun to send its report in parts."""

    device: str


@dataclasses.dataclass(frozen=True)
class SecureSumMessage:
    """Device to Aggregator: one step of a secure sum, which takes the place of a report.

    Attributes:
      device: Address of the device's connection.
      attempt: Name of the attempt, as `Configure` gave it.
      step: Number of the step, from 0; it tells a duplicate from the next step.
      content: Serialised `secure_sum_pb2.ToServer`.
      vector: Content of the masked vector, if it is not in `content`.
    """

    device: str
    attempt: str
    step: int
    content: bytes = _unprinted()
    vector: bytes | bytearray = _unprinted_bytes()


@dataclasses.dataclass(frozen=True)
class SecureSumAnswer:
    """Aggregator to device: data for the device's next step.

    Attributes:
      device: Address of the device's connection.
      step: Number of the step that this message answers.
      content: Serialised `secure_sum_pb2.ToDevice`.
    """

    device: str
    step: int
    content: bytes = _unprinted()


@dataclasses.dataclass(frozen=True)
class VectorAdded:
    """Aggregator to engine: a device's masked vector is summed, and takes up no more memory."""

    device: str


@dataclasses.dataclass(frozen=True)
class ReportAccepted:
    """Aggregator to device: the result is in the sum; the round may still be abandoned.

    Attributes:
      device: Address of the device's connection.
      attempt: Name of the attempt.
      turns: Times at which to check in again, in increasing seconds from now; the device takes the
        first one that it can.
    """

    device: str
    attempt: str
    turns: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class ReportRefused:
    """Aggregator or engine to device: this result does not count, or not a second time.

    Attributes:
      device: Address of the device's connection.
      attempt: Name of the attempt.
      refusal: Reason of the refusal.
      reason: Description of an unusable report in a few words.
    """

    device: str
    attempt: str
    refusal: Refusal
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class DeviceGone:
    """Engine to Selector or Aggregator: a connection, of a device or a noise party, was closed."""

    device: str


# From the engine.


@dataclasses.dataclass(frozen=True)
class Lost:
    """Engine to the actor that spawned another one: the other one is gone."""

    address: str


@dataclasses.dataclass(frozen=True)
class Shutdown:
    """Engine to Coordinator: stop, and release the lease."""


# Between Coordinator and Selectors.


@dataclasses.dataclass(frozen=True)
class SelectDevices:
    """Coordinator to Selector: a heartbeat with the wanted devices.

    Attributes:
      epoch: Epoch of the Coordinator's lease.
      coordinator: Address of the Coordinator.
      task: Name of the task of the next round; empty if there is none.
      wanted: Number of devices that should wait for the round.
      accepting: Whether devices may wait now.
      is_finished: Whether no task of the population has a further round.
    """

    epoch: int
    coordinator: str
    task: str
    wanted: int
    accepting: bool
    is_finished: bool = False


@dataclasses.dataclass(frozen=True)
class DevicesWaiting:
    """Selector to Coordinator: the number of waiting devices.

    Attributes:
      selector: Address of the Selector.
      epoch: Epoch of the last `SelectDevices`.
      task: Name of the task that the devices can take part in, from the last `SelectDevices`.
      serial: Serial number of the last `ForwardDevices` of this epoch that is carried out.
      waiting: Number of waiting devices.
      resting: Number of connections of devices that had to rest, since the Selector's start.
      parties: Noise parties that wait; they are no devices, and not in `waiting`.
    """

    selector: str
    epoch: int
    task: str
    serial: int
    waiting: int
    resting: int = 0
    parties: tuple[PartyReady, ...] = ()


@dataclasses.dataclass(frozen=True)
class ForwardDevices:
    """Coordinator to Selector: forward devices to a Master Aggregator.

    Attributes:
      epoch: Epoch of the Coordinator's lease.
      serial: Serial number, which grows with every attempt of an epoch.
      attempt: Address of the Master Aggregator.
      task: Name of the task.
      count: Number of devices.
      then: Devices that are wanted afterwards.
    """

    epoch: int
    serial: int
    attempt: str
    task: str
    count: int
    then: SelectDevices


@dataclasses.dataclass(frozen=True)
class DevicesForwarded:
    """Selector to Master Aggregator: devices, chosen from those that wait.

    They are chosen evenly from all network addresses, and at random within an address.
    """

    selector: str
    devices: tuple[str, ...]


# Between Coordinator, Master Aggregator and Aggregators.


@dataclasses.dataclass(frozen=True)
class AbandonRound:
    """Coordinator to Master Aggregator: give the attempt up."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Turnout:
    """Numbers of one attempt's devices, from which the next attempts are planned.

    Attributes:
      chosen: Number of devices that were chosen.
      reported: Number of devices that reported before the attempt was closed; in a secure sum, the
        number that arrived.
      undecided: Number of devices that might have reported later.
      half_seconds: Seconds in which half of the goal's reports came; 0 if they did not come.
      has_given_up: Whether devices that had sent nothing were given up before the time-out.
    """

    chosen: int
    reported: int
    undecided: int
    half_seconds: float
    has_given_up: bool = False


@dataclasses.dataclass(frozen=True)
class RoundCommitted:
    """Master Aggregator to Coordinator: the store has confirmed the commit.

    Attributes:
      attempt: Name of the attempt.
      epoch: Epoch of the lease under which the round was committed.
      commit: The commit: model and metrics may be released, the state is secret.
      turnout: Numbers of devices; None if Aggregators were lost with their devices.
    """

    attempt: str
    epoch: int
    commit: interface.Commit
    turnout: Turnout | None = None


@dataclasses.dataclass(frozen=True)
class RoundAbandoned:
    """Master Aggregator to Coordinator: the attempt has ended, and nothing was released.

    Attributes:
      attempt: Name of the attempt.
      reason: Reason in a few words.
      counts: Numbers of devices by outcome.
      not_stored: Whether only the commit failed: the store refused it.
      used_devices: Whether devices were configured: they may have counted a participation.
      turnout: Numbers of devices; None if no device was configured, or Aggregators were lost with
        their devices.
    """

    attempt: str
    reason: str
    counts: Mapping[str, int]
    not_stored: bool = False
    used_devices: bool = True
    turnout: Turnout | None = None


@dataclasses.dataclass(frozen=True)
class ReportsCounted:
    """Aggregator to its parent, which merges its sum: the Aggregator's progress.

    Attributes:
      aggregator: Address of the Aggregator.
      accepted: Number of reports in the sum; in a secure sum, the number of arrived devices.
      outstanding: Number of devices that may still report.
      is_short: Whether a secure sum needs outstanding devices, so as not to be lost.
    """

    aggregator: str
    accepted: int
    outstanding: int
    is_short: bool = False


@dataclasses.dataclass(frozen=True)
class CloseReporting:
    """Parent to Aggregator: take no more reports, and hand over the sum."""


@dataclasses.dataclass(frozen=True)
class DropSilent:
    """Parent to Aggregator: drop the devices that have sent nothing."""


@dataclasses.dataclass(frozen=True)
class PartialSum:
    """Aggregator to its parent, which merges sums: the Aggregator's sum.

    Attributes:
      aggregator: Address of the Aggregator.
      total: Sum, as the task's summation returns it; None if it is lost.
      counts: Numbers of devices by outcome; "reports" is the number of reports in the sum.
    """

    aggregator: str
    total: Any = _unprinted()
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)


# To and from the StoreActor.


@dataclasses.dataclass(frozen=True)
class AcquireLease:
    """Coordinator to StoreActor: acquire the lease.

    Attributes:
      owner: Address of the Coordinator.
      asked_at: Time of the request by the Coordinator's clock, in seconds.
    """

    owner: str
    asked_at: float


@dataclasses.dataclass(frozen=True)
class RenewLease:
    """Coordinator to StoreActor: renew the lease.

    Attributes:
      owner: Address of the Coordinator.
      epoch: Epoch of the lease.
      asked_at: Time of the request by the Coordinator's clock, in seconds.
    """

    owner: str
    epoch: int
    asked_at: float


@dataclasses.dataclass(frozen=True)
class ReleaseLease:
    """Coordinator to StoreActor: release the lease, since the Coordinator stops."""

    owner: str
    epoch: int


@dataclasses.dataclass(frozen=True)
class LeaseGranted:
    """StoreActor to Coordinator: the Coordinator holds the lease.

    Attributes:
      epoch: Epoch of the lease.
      asked_at: Time of the request, from which the lease's seconds count.
    """

    epoch: int
    asked_at: float


@dataclasses.dataclass(frozen=True)
class LeaseRefused:
    """StoreActor to Coordinator: the Coordinator does not hold the lease.

    Attributes:
      epoch: Epoch of the lease that was lost; 0 if the request was for a new one.
      reason: Message that names the holder.
    """

    epoch: int
    reason: str


@dataclasses.dataclass(frozen=True)
class ReadCommits:
    """Coordinator to StoreActor: read the last commits.

    Attributes:
      reply_to: Address of the Coordinator.
      request: Number of the request.
      tasks: Names of the tasks.
    """

    reply_to: str
    request: int
    tasks: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class CommitsRead:
    """StoreActor to Coordinator: the last commits.

    Attributes:
      request: Number of the request.
      commits: Last commit of each task.
    """

    request: int
    commits: tuple[interface.Commit, ...]


@dataclasses.dataclass(frozen=True)
class BeginAttempt:
    """Master Aggregator to StoreActor: note the attempt, whose devices are chosen.

    Attributes:
      reply_to: Address of the Master Aggregator, the name of the attempt.
      epoch: Epoch of the Coordinator's lease.
      task: Name of the task.
      round_index: Index of the round, from 0.
    """

    reply_to: str
    epoch: int
    task: str
    round_index: int


@dataclasses.dataclass(frozen=True)
class AttemptBegun:
    """StoreActor to Master Aggregator: the attempt is noted, and no other one at its round is."""


@dataclasses.dataclass(frozen=True)
class CommitRound:
    """Master Aggregator to StoreActor: commit the noised result of a round.

    Attributes:
      reply_to: Address of the Master Aggregator.
      epoch: Epoch of the Coordinator's lease.
      task: Name of the task.
      round_index: Index of the round, from 0.
      model: Serialised model after the round.
      state: Serialised state of the aggregator after the round; secret.
      metrics: Metrics of the round.
    """

    reply_to: str
    epoch: int
    task: str
    round_index: int
    model: bytes = _unprinted()
    state: bytes | contents.Content = _unprinted()
    metrics: Mapping[str, Any] = _unprinted()


@dataclasses.dataclass(frozen=True)
class RoundStored:
    """StoreActor to Master Aggregator: the round is committed."""

    commit: interface.Commit


@dataclasses.dataclass(frozen=True)
class CommitRefused:
    """StoreActor to Master Aggregator: this commit or note was not made; an earlier try may be."""

    reason: str
