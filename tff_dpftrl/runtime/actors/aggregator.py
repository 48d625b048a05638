"""The Aggregator: sums the reports of some devices of one attempt, in memory only."""

from __future__ import annotations

import collections
import random

from tff_dpftrl.runtime.actors import actor, messages, population, roles, selector

_TOO_OLD = "nobody wants the sum any more"


class Aggregator(actor.Actor):
    """Adds each device's report once, as it comes, and keeps none of them."""

    def __init__(
        self,
        address: str,
        task: population.Task,
        role: roles.AggregatorRole,
        randomness: random.Random,
        pace: selector.Pace,
    ):
        """See `cast.Cast.build`."""
        super().__init__(address)
        self._task = task
        self._role = role
        self._random = randomness
        self._pace = pace
        self._total = task.summation.zero()
        self._outstanding = set(role.devices)
        self._reported: set[str] = set()
        self._counts: collections.Counter[str] = collections.Counter()
        self._is_closed = False

    def _begin(self) -> None:
        role = self._role
        for device in role.devices:
            self.send(
                device,
                messages.Configure(
                    device, self.address, role.attempt, role.task, role.round_index, role.model
                ),
            )
        self.after(self._task.longest, _TOO_OLD)

    def _receive(self, message: object) -> None:
        match message:
            case messages.Report():
                self._report(message)
            case messages.DeviceGone():
                if message.device in self._outstanding:
                    self._outstanding.discard(message.device)
                    self._counts["dropped"] += 1
                    self._tell_count()
            case messages.CloseReporting():
                self._close()
            case str() if message == _TOO_OLD:
                self.stop(self.address)
            case _:
                raise self._unknown(message)

    def _report(self, message: messages.Report) -> None:
        device = message.device
        if message.attempt != self._role.attempt:
            self._refuse(message, messages.Refusal.WRONG_ATTEMPT)
        elif device in self._reported:
            self._refuse(message, messages.Refusal.DUPLICATE)
        elif self._is_closed:
            self._refuse(message, messages.Refusal.LATE)
        elif device not in self._outstanding:
            self._refuse(message, messages.Refusal.NOT_SELECTED)
        else:
            self._outstanding.discard(device)
            self._reported.add(device)
            self._add(message)
            self._tell_count()

    def _refuse(
        self, message: messages.Report, refusal: messages.Refusal, reason: str = ""
    ) -> None:
        self._counts[refusal.value] += 1
        self.send(
            message.device,
            messages.ReportRefused(message.device, message.attempt, refusal, reason),
        )

    def _add(self, message: messages.Report) -> None:
        try:
            self._total = self._task.summation.accumulate(self._total, message.payload)
        except population.UnusableReport as error:
            self._refuse(message, messages.Refusal.UNUSABLE, str(error))
            return
        self._counts["reports"] += 1
        rest = self._task.rest_seconds
        turns = tuple(rest + turn for turn in self._pace(self.now, self._random))
        self.send(message.device, messages.ReportAccepted(message.device, message.attempt, turns))

    def _tell_count(self) -> None:
        if not self._is_closed:
            self.send(
                self._role.attempt,
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
                self._role.attempt,
                messages.PartialSum(self.address, total, dict(self._counts)),
            )
