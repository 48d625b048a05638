"""The Aggregator: sums the reports of some devices of one attempt, in memory only."""

from __future__ import annotations

import random

from tff_dpftrl.runtime.actors import messages, population, reporting, roles, selector


class Aggregator(reporting.Reporting):
    """Aggregator of reports in the clear: adds each device's report once, and keeps none."""

    def __init__(
        self,
        address: str,
        task: population.Task,
        role: roles.AggregatorRole,
        randomness: random.Random,
        pace: selector.Pace,
    ):
        """Begins with an empty sum; `factory.ActorFactory` documents the arguments."""
        super().__init__(address, task, role, randomness, pace)
        self._summation = task.summation.for_round(role.model)
        self._total = self._summation.zero()
        self._outstanding = set(role.devices)
        self._silent = set(role.devices)  # Devices that have sent nothing.
        self._reported: set[str] = set()
        self._given_up: set[str] = set()
        self._is_closed = False

    def _begin(self) -> None:
        self._configure()

    def _receive(self, message: object) -> None:
        match message:
            case messages.Report():
                self._report(message)
            case messages.ReportBegun():
                self._silent.discard(message.device)
            case messages.DeviceGone():
                self._drop({message.device})
            case messages.DropSilent():
                if not self._is_closed:
                    self._given_up |= self._silent & self._outstanding
                    self._drop(self._given_up)
            case messages.CloseReporting():
                self._close()
            case str() if message == reporting.TOO_OLD:
                self.stop(self.address)
            case _:
                raise self._unknown(message)

    def _drop(self, devices: set[str]) -> None:
        """Stops waiting for devices."""
        dropped = devices & self._outstanding
        if dropped:
            self._outstanding -= dropped
            self._counts["dropped"] += len(dropped)
            self._send_count()

    def _report(self, message: messages.Report) -> None:
        device = message.device
        if message.attempt != self._role.attempt:
            self._refuse(device, message.attempt, messages.Refusal.WRONG_ATTEMPT)
        elif device in self._reported:
            self._refuse(device, message.attempt, messages.Refusal.DUPLICATE)
        elif self._is_closed or device in self._given_up:
            self._refuse(device, message.attempt, messages.Refusal.LATE)
        elif device not in self._outstanding:
            self._refuse(device, message.attempt, messages.Refusal.NOT_SELECTED)
        elif self._counts["reports"] >= self._most_reports:
            self._refuse(device, message.attempt, messages.Refusal.LATE)
        else:
            self._outstanding.discard(device)
            self._reported.add(device)
            self._add(message)
            self._send_count()

    def _add(self, message: messages.Report) -> None:
        try:
            self._total = self._summation.accumulate(self._total, message.payload)
        except population.UnusableReport as error:
            unusable = messages.Refusal.UNUSABLE
            self._refuse(message.device, message.attempt, unusable, str(error))
            return
        self._counts["reports"] += 1
        self._accept(message.device)

    def _send_count(self) -> None:
        if not self._is_closed:
            self.send(
                self._role.parent,
                messages.ReportsCounted(
                    self.address, self._counts["reports"], len(self._outstanding)
                ),
            )

    def _close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._counts["outstanding"] = len(self._outstanding)
            total, self._total = self._total, None
            self.send(
                self._role.parent,
                messages.PartialSum(self.address, total, dict(self._counts)),
            )
