"""The merging Aggregator: merges the sums of other Aggregators of one attempt, in memory only."""

from __future__ import annotations

from tff_dpftrl.runtime.actors import merging, messages, population, reporting, roles


class MergingAggregator(merging.Merging):
    """Aggregator of Aggregators: to its parent, it is one Aggregator with all of their devices.

    It sees sums, never a report. What is lost below it is in its counts.
    """

    def __init__(self, address: str, task: population.Task, role: roles.MergingAggregatorRole):
        """Stores the parts; `factory.ActorFactory` documents them."""
        super().__init__(address, task)
        self._role = role

    def _begin(self) -> None:
        self._spawn_aggregators(self._role.children)
        self.after(self._task.longest, reporting.TOO_OLD)

    def _receive(self, message: object) -> None:
        match message:
            case messages.ReportsCounted():
                self._counted(message)
            case messages.PartialSum():
                self._merge(message)
            case messages.DropSilent():
                if self._phase is merging.Phase.REPORTING:
                    self._drop_silent()
            case messages.CloseReporting():
                if self._phase is merging.Phase.REPORTING:
                    self._close()
            case messages.Lost():
                self._lose(message.address)
            case merging.Phase():
                if message is self._phase:
                    self._finish()
            case str() if message == reporting.TOO_OLD:
                self.stop(self.address)
            case _:
                raise self._unknown(message)

    def _progressed(self) -> None:
        self.send(self._role.parent, self._all_progress)

    def _use(self, total: object) -> None:
        self._phase = merging.Phase.OVER
        self.send(
            self._role.parent,
            messages.PartialSum(
                self.address, total if self._counts["reports"] else None, dict(self._counts)
            ),
        )
