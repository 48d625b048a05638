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
    """Device to Selector: the device is ready to take part."""

    device: str  # Address of the device's connection; its attestation is verified already.
    tasks: frozenset[str]  # Names of the tasks whose plans the device's version can run.
    # Name of the network address that the device connects from, or of its connection on loopback: a
    # hash with a key of this start of the service. Devices with the same name may be one host.
    peer: str = ""


@dataclasses.dataclass(frozen=True)
class PartyReady:
    """Engine to Selector, and on to the Coordinator: a noise party waits for an attempt."""

    address: str  # Address of its connection, which serves one attempt. Its signature is verified.
    key: bytes  # Raw public key of the party, one of those that the task's plan names.
    task: str
    next_round: int  # Index of the first round whose noise the party has not given.


@dataclasses.dataclass(frozen=True)
class DeviceRests:
    """Engine to Selector: a device connected and left, since it has to rest in the open round."""


@dataclasses.dataclass(frozen=True)
class ComeBack:
    """Server to device: the device is not needed now."""

    device: str
    # Times at which to check in again, in increasing seconds from now; the device takes the first
    # one that it can.
    turns: tuple[float, ...]
    reason: str
    is_finished: bool = False  # Whether no task of the population has a further round.


@dataclasses.dataclass(frozen=True)
class Configure:
    """Aggregator to device: take part. The engine adds the plan for the device's version."""

    device: str
    report_to: str
    attempt: str  # Name of the attempt, which the report must repeat.
    task: str
    round_index: int
    model: bytes = _unprinted()  # Serialised committed model to begin with.
    secure_sum_session: bytes = _unprinted_bytes()  # Empty where reports are in the clear.


@dataclasses.dataclass(frozen=True)
class Report:
    """Device to Aggregator: the device's result."""

    device: str
    attempt: str
    payload: Any = _unprinted()  # Report for the task's summation. Untrusted.


@dataclasses.dataclass(frozen=True)
class ReportBegun:
    """Engine to Aggregator: a device has begun to send its report in parts."""

    device: str


@dataclasses.dataclass(frozen=True)
class SecureSumMessage:
    """Device to Aggregator: one step of a secure sum, which takes the place of a report."""

    device: str
    attempt: str
    step: int  # Number of the step, from 0; it tells a duplicate from the next step.
    content: bytes = _unprinted()  # Serialised `secure_sum_pb2.ToServer`.
    vector: bytes | bytearray = _unprinted_bytes()  # The masked vector, if it is not in `content`.


@dataclasses.dataclass(frozen=True)
class SecureSumAnswer:
    """Aggregator to device: data for the device's next step."""

    device: str
    step: int  # Number of the step that this message answers.
    content: bytes = _unprinted()  # Serialised `secure_sum_pb2.ToDevice`.


@dataclasses.dataclass(frozen=True)
class VectorAdded:
    """Aggregator to engine: a device's masked vector is summed, and takes up no more memory."""

    device: str


@dataclasses.dataclass(frozen=True)
class ReportAccepted:
    """Aggregator to device: the result is in the sum; the round may still be abandoned."""

    device: str
    attempt: str
    # Times at which to check in again, in increasing seconds from now; the device takes the first
    # one that it can.
    turns: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class ReportRefused:
    """Aggregator or engine to device: this result does not count, or not a second time."""

    device: str
    attempt: str
    refusal: Refusal
    reason: str = ""  # Description of an unusable report in a few words.


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
    """Coordinator to Selector: a heartbeat with the wanted devices."""

    epoch: int
    coordinator: str
    task: str  # Name of the task of the next round; empty if there is none.
    wanted: int  # Number of devices that should wait for the round.
    accepting: bool
    is_finished: bool = False  # Whether no task of the population has a further round.


@dataclasses.dataclass(frozen=True)
class DevicesWaiting:
    """Selector to Coordinator: the number of waiting devices."""

    selector: str
    epoch: int  # Epoch of the last `SelectDevices`.
    task: str  # Name of the task that the devices can take part in, from the last `SelectDevices`.
    serial: int  # Serial number of the last `ForwardDevices` of this epoch that is carried out.
    waiting: int
    resting: int = 0  # Number of connections of devices that had to rest, since its start.
    parties: tuple[PartyReady, ...] = ()  # Waiting noise parties, which are no devices.


@dataclasses.dataclass(frozen=True)
class ForwardDevices:
    """Coordinator to Selector: forward devices to a Master Aggregator."""

    epoch: int
    serial: int  # Serial number, which grows with every attempt of an epoch.
    attempt: str
    task: str
    count: int
    then: SelectDevices  # Devices that are wanted afterwards.


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
    """Numbers of one attempt's devices, by which the next attempts are planned."""

    chosen: int
    reported: int  # Number of devices that reported (in a secure sum: arrived) before the closing.
    undecided: int  # Number of devices that might have reported later.
    half_seconds: float  # Seconds in which half of the goal's reports came; 0 if they did not come.
    has_given_up: bool = False  # Whether silent devices were given up before the time-out.


@dataclasses.dataclass(frozen=True)
class RoundCommitted:
    """Master Aggregator to Coordinator: the store has confirmed the commit."""

    attempt: str
    epoch: int  # Epoch of the lease under which the round was committed.
    commit: interface.Commit  # The commit: model and metrics may be released, the state is secret.
    turnout: Turnout | None = None  # None if Aggregators were lost with their devices.


@dataclasses.dataclass(frozen=True)
class RoundAbandoned:
    """Master Aggregator to Coordinator: the attempt has ended, and nothing was released."""

    attempt: str
    reason: str
    counts: Mapping[str, int]  # Numbers of devices by outcome.
    not_stored: bool = False  # Whether only the commit failed: the store refused it.
    used_devices: bool = True  # Whether devices were configured: they may count a participation.
    # Numbers of devices; None if no device was configured, or Aggregators were lost with their
    # devices.
    turnout: Turnout | None = None


@dataclasses.dataclass(frozen=True)
class ReportsCounted:
    """Aggregator to its parent, which merges its sum: the Aggregator's progress."""

    aggregator: str
    accepted: int  # Number of reports in the sum; in a secure sum, the number of arrived devices.
    outstanding: int  # Number of devices that may still report.
    is_short: bool = False  # Whether a secure sum needs outstanding devices, so as not to be lost.


@dataclasses.dataclass(frozen=True)
class CloseReporting:
    """Parent to Aggregator: take no more reports, and hand over the sum."""


@dataclasses.dataclass(frozen=True)
class DropSilent:
    """Parent to Aggregator: drop the devices that have sent nothing."""


@dataclasses.dataclass(frozen=True)
class PartialSum:
    """Aggregator to its parent, which merges sums: the Aggregator's sum."""

    aggregator: str
    total: Any = _unprinted()  # Sum, as the task's summation returns it; None if it is lost.
    # Numbers of devices by outcome; "reports" is the number of reports in the sum.
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)


# To and from the StoreActor.


@dataclasses.dataclass(frozen=True)
class AcquireLease:
    """Coordinator to StoreActor: acquire the lease."""

    owner: str
    asked_at: float  # Time of the request by the Coordinator's clock, in seconds.


@dataclasses.dataclass(frozen=True)
class RenewLease:
    """Coordinator to StoreActor: renew the lease."""

    owner: str
    epoch: int
    asked_at: float  # Time of the request by the Coordinator's clock, in seconds.


@dataclasses.dataclass(frozen=True)
class ReleaseLease:
    """Coordinator to StoreActor: release the lease, since the Coordinator stops."""

    owner: str
    epoch: int


@dataclasses.dataclass(frozen=True)
class LeaseGranted:
    """StoreActor to Coordinator: the Coordinator holds the lease."""

    epoch: int
    asked_at: float  # Time of the request, from which the lease's seconds count.


@dataclasses.dataclass(frozen=True)
class LeaseRefused:
    """StoreActor to Coordinator: the Coordinator does not hold the lease."""

    epoch: int  # Epoch of the lease that was lost; 0 if the request was for a new one.
    reason: str  # Message that names the holder.


@dataclasses.dataclass(frozen=True)
class ReadCommits:
    """Coordinator to StoreActor: read the last commits."""

    reply_to: str
    request: int
    tasks: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class CommitsRead:
    """StoreActor to Coordinator: the last commits."""

    request: int
    commits: tuple[interface.Commit, ...]  # Last commit of each task.


@dataclasses.dataclass(frozen=True)
class BeginAttempt:
    """Master Aggregator to StoreActor: note the attempt, whose devices are chosen."""

    reply_to: str
    epoch: int
    task: str
    round_index: int


@dataclasses.dataclass(frozen=True)
class AttemptBegun:
    """StoreActor to Master Aggregator: the attempt is noted, and no other one at its round is."""


@dataclasses.dataclass(frozen=True)
class CommitRound:
    """Master Aggregator to StoreActor: commit the noised result of a round."""

    reply_to: str
    epoch: int
    task: str
    round_index: int
    model: bytes = _unprinted()  # Serialised model after the round.
    state: bytes | contents.Content = _unprinted()  # State after the round; secret.
    metrics: Mapping[str, Any] = _unprinted()


@dataclasses.dataclass(frozen=True)
class RoundStored:
    """StoreActor to Master Aggregator: the round is committed."""

    commit: interface.Commit


@dataclasses.dataclass(frozen=True)
class CommitRefused:
    """StoreActor to Master Aggregator: this commit or note was not made; an earlier try may be."""

    reason: str
