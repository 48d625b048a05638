"""The schedule of a run: when its model is evaluated, and when it ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tff_dpftrl import validation
from tff_dpftrl.accounting import display
from tff_dpftrl.runs import mechanism_plan

ACCURACY = "eval_top1_in_vocab"
"""Column of `metrics.csv` that decides about `stop_at_accuracy` and the best model."""
NOISED_ACCURACY = "noised_eval_top1"
"""The same of runs that release evaluations on protected users with noise."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Times at which a run is evaluated, and at which it ends.

    Attributes:
      unit: Name of a round in messages: "round", or "step" in fine-tuning.
      max_epsilon: ε above which no round begins; None for no such budget.
      stop_at_accuracy: Held-out accuracy at which the run ends; None if accuracy never ends it.
      accuracy: Column of `metrics.csv` with this accuracy, which decides about the best model, too.
    """

    unit: str
    eval_every: int
    max_epsilon: float | None = None
    stop_at_accuracy: float | None = None
    accuracy: str = ACCURACY

    def check_budget(self, plan: mechanism_plan.MechanismPlan, *, show_cost: bool = True) -> None:
        """Refuses a budget that does not pay for the first round.

        With `show_cost`, the message may have the cost of a round. It may not while this reveals a
        private choice that has not been recorded yet.
        """
        if self.max_epsilon is None:
            return
        cost = plan.epsilon_after(1)
        if cost is not None and cost > self.max_epsilon:
            shown = f", which costs {display.round_up(cost)}" if show_cost else ""
            also = " or noise_multiplier" if show_cost else ""
            raise validation.UsageError(
                f"max_epsilon={self.max_epsilon:g} does not pay for one {self.unit}{shown}: raise "
                f"it{also}."
            )

    def is_evaluated(self, rounds_done: int, num_rounds: int) -> bool:
        """Returns whether the model after `rounds_done` rounds is evaluated."""
        return rounds_done % self.eval_every == 0 or rounds_done == num_rounds

    def num_evaluations(self, num_rounds: int) -> int:
        """Returns the largest number of evaluations of a run, also of one that ends early."""
        return -(-num_rounds // self.eval_every)

    def reason_to_end(
        self,
        plan: mechanism_plan.MechanismPlan,
        rows: Sequence[Mapping[str, Any]],
        rounds_done: int,
    ) -> str | None:
        """Returns why no further round may begin, as a sentence; None if rounds are left."""
        if rounds_done == plan.num_rounds:
            return f"All {rounds_done} {self.unit}s are done."
        of_all = f"{rounds_done} of {plan.num_rounds} {self.unit}s"
        if self.max_epsilon is not None:
            following = plan.epsilon_after(rounds_done + 1)
            if following is not None and following > self.max_epsilon:
                return (
                    f"Stopped after {of_all}: the next one would bring ε to "
                    f"{display.round_up(following)}, above max_epsilon={self.max_epsilon:g}."
                )
        best = best_accuracy(rows, self.accuracy)
        if best is not None and self.stop_at_accuracy is not None and best >= self.stop_at_accuracy:
            return (
                f"Stopped after {of_all}: the held-out accuracy reached {best:.2%}, and "
                f"stop_at_accuracy is {self.stop_at_accuracy:.2%}."
            )
        return None


def best_accuracy(rows: Sequence[Mapping[str, Any]], column: str = ACCURACY) -> float | None:
    """Returns the best held-out accuracy of some rows; None before the first evaluation."""
    accuracies = [row[column] for row in rows if row.get(column) is not None]
    return max(accuracies, default=None)
