"""The Aggregator of a group whose devices sum their reports securely (`secure_sums`)."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import TypeAlias

from google.protobuf import message as protobuf_message

from tff_dpftrl.runtime.actors import messages, population, reporting, roles, selector
from tff_dpftrl.runtime.protocol import session_stream
from tff_dpftrl.secure_sums import group as group_lib
from tff_dpftrl.secure_sums import parameters, secure_sum_pb2

VerifyIdentity: TypeAlias = Callable[[bytes, bytes, bytes], bool]
"""Function of a secure sum's session, a device's identity key and its proof: returns whether a
genuine device has made the key. It is called from any thread."""


class SecureAggregator(reporting.Reporting):
    """Aggregator of a secure sum: passes a group's messages on, and times its steps.

    It sees masked vectors and their sum. A device has arrived with the first message of its secure
    sum, its keys. From then on it counts as a report, until reporting is closed.
    The group then goes from step to step with the devices that have arrived. A step ends when no
    device is outstanding, or at its time-out. A group with too few remaining devices is lost whole.
    So is one whose sum cannot be that of its devices; only this actor has seen that sum.

    Noise parties are no devices: they are not counted, and their keys may come a step's time after
    reporting is closed. A group that one of them leaves is lost.
    """

    def __init__(
        self,
        address: str,
        task: population.Task,
        role: roles.AggregatorRole,
        randomness: random.Random,
        pace: selector.Pace,
        verify_identity: VerifyIdentity | None = None,
    ):
        """Begins a group; `factory.ActorFactory` documents the arguments."""
        super().__init__(address, task, role, randomness, pace)
        demanded = task.secure_sum
        if demanded is None:
            raise ValueError(f"secure_sum of the task {task.name!r} is None: use an Aggregator.")
        self._least_devices = demanded.least_devices
        self._session = parameters.new_session()
        self._group = group_lib.Group(  # Deleted when it is over, since it is large.
            demanded,
            self._session,
            threshold_fraction=task.rounds.secure_threshold,
            num_neighbours=demanded.least_neighbours,
            verify_proof=verify_identity and functools.partial(verify_identity, self._session),
            context=session_stream.secure_sum_context(role.task, role.round_index, role.model),
        )
        self._is_over = False
        self._is_lost = False
        self._devices = frozenset(role.devices)
        self._parties = frozenset(role.parties)
        # Devices and parties whose message of this step is outstanding.
        self._awaited = {*role.devices, *role.parties}
        self._waits_for_parties = False  # Reporting is closed, but for their keys.
        self._here: set[str] = set()  # Devices that have arrived, and were not lost or refused.
        self._steps: dict[str, int] = {}  # The last step of each device.
        self._has_end: set[str] = set()  # Devices that were accepted or refused, or are gone.
        self._gone: set[str] = set()

    @property
    def _is_reporting(self) -> bool:
        return not self._is_over and self._group.phase is group_lib.Phase.ADVERTISING

    @property
    def _is_full(self) -> bool:
        """Whether no further device may arrive."""
        return self._is_reporting and len(self._here) >= self._most_reports

    @property
    def _is_short(self) -> bool:
        """Whether too few devices have arrived, and others may arrive."""
        return bool(self._awaited - self._parties) and len(self._here) < self._least_devices

    def _begin(self) -> None:
        self._configure(self._session)

    def _receive(self, message: object) -> None:
        match message:
            case messages.SecureSumMessage():
                self._check(message)
            case messages.Report():
                self._refuse_report(message)
            case messages.DeviceGone():
                self._lose_device(message.device)
            case messages.CloseReporting():
                if self._is_reporting:
                    self._close_reporting()
            case messages.DropSilent():
                if self._is_reporting:
                    self._awaited &= self._parties
                    self._go_on()
            case group_lib.Phase():
                if not self._is_over and message is self._group.phase:
                    self._advance()
            case str() if message == reporting.TOO_OLD:
                self.stop(self.address)
            case _:
                raise self._unknown(message)

    # Devices.

    def _check(self, message: messages.SecureSumMessage) -> None:
        device = message.device
        if device not in self._devices and device not in self._parties:
            self._refuse(device, message.attempt, messages.Refusal.NOT_SELECTED)
        elif message.attempt != self._role.attempt:
            self._refuse(device, message.attempt, messages.Refusal.WRONG_ATTEMPT)
        elif message.step <= self._steps.get(device, -1):
            # The device has, or will have, the answer to the first message of this step.
            self._counts[messages.Refusal.DUPLICATE.value] += 1
        elif device in self._has_end:
            self._refuse(device, message.attempt, messages.Refusal.LATE)
        elif self._is_lost:
            self._end(device, messages.Refusal.GROUP_LOST)
        elif device not in self._awaited or (self._is_full and device in self._devices):
            self._end(device, messages.Refusal.LATE)
            self._drop(device)
        else:
            self._steps[device] = message.step
            self._take(message)

    def _take(self, message: messages.SecureSumMessage) -> None:
        device = message.device
        self._awaited.discard(device)
        try:
            self._group.receive(device, _read(message))
        except (group_lib.MessageRefusedError, _Unreadable) as error:
            self._end(device, messages.Refusal.UNUSABLE, str(error))
            if device in self._parties:
                self._awaited.add(device)
                self._lose_party(device)
                return
            self._drop(device)
        else:
            if device in self._devices:
                self._here.add(device)
            if message.vector:
                self.send(device, messages.VectorAdded(device))
        self._go_on()

    def _refuse_report(self, message: messages.Report) -> None:
        """Refuses a report in the clear unseen, and drops its device from the group."""
        device = message.device
        if device in self._devices and device not in self._has_end:
            self._end(device, messages.Refusal.IN_THE_CLEAR)
            self._drop(device)
            self._go_on()
        else:
            self._refuse(device, message.attempt, messages.Refusal.IN_THE_CLEAR)

    def _lose_device(self, device: str) -> None:
        if device in self._parties:
            self._lose_party(device)
        elif device in self._devices and device not in self._has_end:
            self._has_end.add(device)
            self._gone.add(device)
            self._drop(device)
            self._go_on()

    def _lose_party(self, party: str) -> None:
        """Gives the group up, unless the party's noise has come."""
        if self._is_over or (
            self._group.phase is group_lib.Phase.NOISING and party not in self._awaited
        ):
            return
        self._gone.add(party)
        self._drop(party)
        self._awaited.clear()
        self._go_on()

    def _drop(self, device: str) -> None:
        self._awaited.discard(device)
        self._here.discard(device)
        if not self._is_over:
            self._group.drop(device)

    def _end(self, device: str, refusal: messages.Refusal, reason: str = "") -> None:
        self._has_end.add(device)
        if device in self._parties:
            attempt = self._role.attempt
            self.send(device, messages.ReportRefused(device, attempt, refusal, reason))
        else:
            self._refuse(device, self._role.attempt, refusal, reason)

    # Steps.

    def _go_on(self) -> None:
        if self._is_reporting:
            self.send(
                self._role.parent,
                messages.ReportsCounted(
                    self.address,
                    len(self._here),
                    len(self._awaited - self._parties),
                    self._is_short,
                ),
            )
            if self._waits_for_parties and not self._group.missing_noise_parties:
                self._advance()
        elif not self._is_over and not self._awaited:
            self._advance()

    def _close_reporting(self) -> None:
        """Ends reporting; noise parties that have not sent their keys get the time of a step."""
        if self._waits_for_parties:
            return
        if self._group.missing_noise_parties and not self._gone & self._parties:
            self._waits_for_parties = True
            self.after(self._task.rounds.secure_step_timeout, self._group.phase)
        else:
            self._advance()

    def _advance(self) -> None:
        """Ends a step with the devices that have taken it."""
        try:
            answers = {str(device): answer for device, answer in self._group.advance().items()}
        except group_lib.GroupLostError:
            self._lose_group()
            return
        if self._group.phase is group_lib.Phase.DONE:
            self._hand_over()
            return
        self._awaited = set(answers)
        for device, answer in answers.items():
            content = answer.SerializeToString()
            self.send(device, messages.SecureSumAnswer(device, self._steps[device], content))
        self.after(self._task.rounds.secure_step_timeout, self._group.phase)
        self._go_on()  # At once if no device is left.

    def _hand_over(self) -> None:
        survivors = tuple(map(str, self._group.survivors))
        try:
            total = self._task.summation.decode_group(self._group.total(), len(survivors))
        except population.UnusableReport:
            self._lose_group()
            return
        self._is_over = True
        self._counts["summed_groups"] = 1
        for device in (*survivors, *self._parties):
            if device not in self._has_end:
                self._has_end.add(device)
                self._accept(device)
        self._close(total, survivors)

    def _lose_group(self) -> None:
        self._is_over = self._is_lost = True
        self._counts["lost_groups"] = 1
        for device in self._steps:
            if device not in self._has_end:
                self._end(device, messages.Refusal.GROUP_LOST)
        self._close(None)

    def _close(self, total: object, survivors: tuple[str, ...] = ()) -> None:
        del self._group
        self._awaited.clear()
        self._counts["reports"] = len(survivors)
        for device in self._devices.difference(survivors):
            if device in self._gone:
                self._counts["dropped"] += 1
            elif device not in self._has_end:  # The device may still arrive, too late.
                self._counts["dropped" if device in self._steps else "outstanding"] += 1
        self.send(self._role.parent, messages.PartialSum(self.address, total, dict(self._counts)))


class _Unreadable(ValueError):
    """A message that cannot be read."""


def _read(message: messages.SecureSumMessage) -> secure_sum_pb2.ToServer:
    try:
        read = secure_sum_pb2.ToServer.FromString(message.content)
    except protobuf_message.DecodeError:
        raise _Unreadable("the message cannot be read") from None
    if message.vector:
        if read.WhichOneof("message") != "masked_vector" or read.masked_vector.content:
            raise _Unreadable("the message came in parts and is no masked vector")
        read.masked_vector.content = bytes(message.vector)
    return read
