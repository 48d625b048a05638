"""The base of actors that merge sums: the Master Aggregator and merging Aggregators."""

from __future__ import annotations

import abc
import collections
import dataclasses
import enum
from collections.abc import Iterable
from typing import TypeAlias

from tff_dpftrl.runtime.actors import actor, messages, population, roles

Child: TypeAlias = tuple[str, "roles.AggregatorRole | roles.MergingAggregatorRole"]
"""Address and role of an Aggregator."""


class Phase(enum.Enum):
    """Phase of an attempt, also the message of its time-out; the value is the time-out's reason."""

    SELECTION = "devices were not forwarded in time"
    BEGINNING = "the store did not note the attempt in time"
    REPORTING = "too few reports"
    CLOSING = "too few sums of Aggregators"
    COMMITTING = "the store did not answer"
    OVER = "over"


def tree(aggregators: Iterable[Child], task: population.Task, attempt: str) -> tuple[Child, ...]:
    """Puts Aggregators below merging Aggregators, until one actor can merge the sums that are left.

    The levels have the same fan-in, and are divided evenly. Merging Aggregators are numbered from
    0, so that a placement can put each on another machine. Returns the Aggregators whose sums the
    Master Aggregator (address `attempt`) merges.
    """
    level = tuple(aggregators)
    fan_in = task.rounds.fan_in(len(level))
    number = 0
    while len(level) > fan_in:
        above = []
        width = -(-len(level) // fan_in)
        for i in range(width):
            below = level[len(level) * i // width : len(level) * (i + 1) // width]
            if len(below) == 1:
                above += below
            else:
                role = roles.MergingAggregatorRole(task.name, below)
                above.append((f"{attempt}/merger/{number}", role))
                number += 1
        level = tuple(above)
    return level


class Merging(actor.Actor):
    """Actor that spawns Aggregators, follows their progress, and merges their sums.

    It holds the sum of those that have come, and counts each of them once. With an Aggregator that
    is lost, or does not answer in time, all devices below that Aggregator are lost.
    """

    def __init__(self, address: str, task: population.Task):
        """Begins without Aggregators."""
        super().__init__(address)
        self._task = task
        self._phase = Phase.SELECTION
        # Progress of each Aggregator that lives.
        self._progress: dict[str, messages.ReportsCounted] = {}
        self._levels = 0
        self._awaited: set[str] = set()
        self._total = task.summation.zero()
        self._counts: collections.Counter[str] = collections.Counter()

    def _spawn_aggregators(self, children: tuple[Child, ...]) -> None:
        self._phase = Phase.REPORTING
        self._levels = 1 + max(role.levels for _, role in children)
        is_secure = self._task.secure_sum is not None
        for address, role in children:
            count = len(role.devices)
            self._progress[address] = messages.ReportsCounted(address, 0, count, is_secure)
            self.spawn(address, dataclasses.replace(role, parent=self.address))

    def _counted(self, message: messages.ReportsCounted) -> None:
        if self._phase is Phase.REPORTING and message.aggregator in self._progress:
            # Counts may overtake each other. The newer one has the smaller weighted sum, also when
            # a device that had arrived for a secure sum leaves.
            self._progress[message.aggregator] = min(
                self._progress[message.aggregator],
                message,
                key=lambda one: one.accepted + 2 * one.outstanding,
            )
            self._progressed()

    @property
    def _all_progress(self) -> messages.ReportsCounted:
        """Progress of all Aggregators together."""
        known = self._progress.values()
        return messages.ReportsCounted(
            self.address,
            sum(one.accepted for one in known),
            sum(one.outstanding for one in known),
            any(one.is_short for one in known),
        )

    @abc.abstractmethod
    def _progressed(self) -> None:
        """Handles progress while devices report; there may be no Aggregator any more."""

    def _drop_silent(self) -> None:
        """Has the devices dropped that have sent nothing."""
        for aggregator in self._progress:
            self.send(aggregator, messages.DropSilent())

    def _close(self) -> None:
        """Ends reporting, and waits for the sums."""
        self._phase = Phase.CLOSING
        self._awaited = set(self._progress)
        for aggregator in self._progress:
            self.send(aggregator, messages.CloseReporting())
        self.after(self._task.longest_closing(self._levels), self._phase)
        self._finish_if_merged()

    def _merge(self, message: messages.PartialSum) -> None:
        if self._phase is Phase.CLOSING and message.aggregator in self._awaited:
            self._awaited.discard(message.aggregator)
            if message.total is not None:
                self._total = self._task.summation.merge(self._total, message.total)
            self._counts.update(message.counts)
            self._finish_if_merged()

    def _lose(self, aggregator: str) -> None:
        if self._progress.pop(aggregator, None) is None:
            return
        if self._phase is Phase.REPORTING:
            self._counts["lost_aggregators"] += 1
            self._progressed()
        elif self._phase is Phase.CLOSING and aggregator in self._awaited:
            self._counts["lost_aggregators"] += 1
            self._awaited.discard(aggregator)
            self._finish_if_merged()

    def _finish_if_merged(self) -> None:
        if not self._awaited:
            self._finish()

    def _finish(self) -> None:
        """Goes on with the sums that have come, and loses the others."""
        self._counts["lost_aggregators"] += len(self._awaited)
        total, self._total = self._total, None
        self._use(total)

    @abc.abstractmethod
    def _use(self, total: object) -> None:
        """Uses the sum of all reports; called once."""
