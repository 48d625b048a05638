"""The base of both Aggregators: configures devices, and accepts or refuses their reports."""

from __future__ import annotations

import collections
import random

from tff_dpftrl.runtime.actors import actor, messages, population, roles, selector

TOO_OLD = "the attempt is over"


class Reporting(actor.Actor):
    """Aggregator of some devices of one attempt, without the sum."""

    def __init__(
        self,
        address: str,
        task: population.Task,
        role: roles.AggregatorRole,
        randomness: random.Random,
        pace: selector.Pace,
    ):
        """Stores the parts; `factory.ActorFactory` documents them."""
        super().__init__(address)
        self._task = task
        self._role = role
        self._random = randomness
        self._pace = pace
        self._counts: collections.Counter[str] = collections.Counter()
        most = role.most_reports
        self._most_reports = len(role.devices) if most is None else most

    def _configure(self, secure_sum_session: bytes = b"") -> None:
        """Configures devices and noise parties, and sets the timer that ends this actor."""
        role = self._role
        for device in (*role.parties, *role.devices):
            configure = messages.Configure(
                device,
                self.address,
                role.attempt,
                role.task,
                role.round_index,
                role.model,
                secure_sum_session,
            )
            self.send(device, configure)
        self.after(self._task.longest, TOO_OLD)

    def _accept(self, device: str) -> None:
        rest = self._task.rest_seconds
        turns = tuple(rest + turn for turn in self._pace(self.now, self._random))
        self.send(device, messages.ReportAccepted(device, self._role.attempt, turns))

    def _refuse(
        self, device: str, attempt: str, refusal: messages.Refusal, reason: str = ""
    ) -> None:
        self._counts[refusal.value] += 1
        self.send(device, messages.ReportRefused(device, attempt, refusal, reason))
