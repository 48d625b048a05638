"""When a run ends, and the sentence that says why."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from tff_dpftrl.accounting import display
from tff_dpftrl.runs import privacy

ACCURACY = "eval_top1_in_vocab"
"""The column that `stop_at_accuracy` is about."""


class StoppingConfig(Protocol):
    """What decides when a run ends.

    Attributes:
      unit: What people call its rounds: "round", or "step".
      num_rounds: Number of rounds, at most.
      max_epsilon: ε above which no round begins; None if there is no such budget.
      stop_at_accuracy: Held-out accuracy at which it ends; None if at none.
    """

    unit: ClassVar[str]
    num_rounds: int
    max_epsilon: float | None
    stop_at_accuracy: float | None


def best_accuracy(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """The best held-out accuracy so far; None before the first evaluation."""
    found = [row[ACCURACY] for row in rows if row.get(ACCURACY) is not None]
    return max(found, default=None)


def reason(
    config: StoppingConfig,
    plan: privacy.PrivacyPlan,
    rows: Sequence[Mapping[str, Any]],
    rounds_done: int,
) -> str | None:
    """Why no further round may begin.

    Args:
      config: Options of the run.
      plan: Its privacy.
      rows: Metrics of its committed rounds.
      rounds_done: Their number.

    Returns:
      A sentence; None if there are rounds to go.
    """
    if rounds_done == config.num_rounds:
        return f"All {rounds_done} {config.unit}s are done."
    of_all = f"{rounds_done} of {config.num_rounds} {config.unit}s"
    if config.max_epsilon is not None:
        following = plan.epsilon_after(rounds_done + 1)
        if following > config.max_epsilon:
            return (
                f"Stopped after {of_all}: the next one would "
                f"bring ε to {display.round_up(following)}, above max_epsilon="
                f"{config.max_epsilon:g}."
            )
    best = best_accuracy(rows)
    if best is not None and config.stop_at_accuracy is not None and best >= config.stop_at_accuracy:
        return (
            f"Stopped after {of_all}: the held-out accuracy "
            f"reached {best:.2%}, and stop_at_accuracy is {config.stop_at_accuracy:.2%}."
        )
    return None


PRETRAINED = "pretrained"
"""Name of the model that a run began with, among the simpler ones it is compared with."""


def failure(
    rows: Sequence[Mapping[str, Any]],
    vocabulary_size: int,
    baselines: Mapping[str, float] | None = None,
) -> str | None:
    """Says so if the model has learned less than nothing.

    Args:
      rows: Metrics of the committed rounds.
      vocabulary_size: Number of ids that the model chooses from.
      baselines: Top-1 accuracies of simpler models, `PRETRAINED` perhaps among them.

    Returns:
      A sentence if the last held-out accuracy is below that of the pretrained model, or the
      loss above that of a guess that takes all words for equally likely, which is what an
      untrained model makes; else None.
    """
    accuracies = [row[ACCURACY] for row in rows if row.get(ACCURACY) is not None]
    before = (baselines or {}).get(PRETRAINED)
    if before is not None and accuracies and accuracies[-1] < before:
        return (
            f"Warning: the model is worse than the one it began with: {accuracies[-1]:.2%}, which "
            f"was {before:.2%}. Either the noise outweighs what is learned (more steps, a larger "
            "compute_budget or a larger ε help), or the learning rate is too large."
        )
    losses = [row["eval_loss"] for row in rows if row.get("eval_loss") is not None]
    guess = math.log(vocabulary_size)
    if not losses or losses[-1] <= guess:
        return None
    return (
        f"Warning: the model is worse than before training: its held-out loss is "
        f"{losses[-1]:.4g}, that of taking all words for equally likely is {guess:.4g}. Either "
        "the noise outweighs what the clients send (more clients a round, more rounds or a larger "
        "ε help), or a learning rate is too large."
    )
