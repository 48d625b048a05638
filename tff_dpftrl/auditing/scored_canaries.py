"""Lower bounds of ε from scores of canaries, also of runs that were trained elsewhere.

Each canary took part in the training or not, by a fair coin of its own. Its score is a number that
is larger where the canary seems to have taken part, like its negative loss.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from tff_dpftrl.auditing.evidence import one_run


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Lower bounds that hold together, for every mechanism.

    Attributes:
      epsilon_at_least: Lower bound of ε at the given δ; 0 if nothing is proven.
      guesses: Guesses that show it.
      mu_at_least: Lower bound of the smallest μ of μ-GDP; None if it was not asked for.
      mu_guesses: Guesses that show it; None if it was not asked for.
    """

    epsilon_at_least: float
    guesses: one_run.Guesses
    mu_at_least: float | None = None
    mu_guesses: one_run.Guesses | None = None


def lower_bounds(
    scores: np.ndarray,
    present: np.ndarray,
    *,
    delta: float,
    error_rate: float = 0.05,
    with_mu: bool = False,
) -> Bounds:
    """Bounds ε from below by the scores of canaries of one training run.

    ε is bounded as in Steinke et al. 2023, and μ as in Mahloujifar et al. 2024. The bounds rest on
    the canaries' coins alone: these must be fair, independent, and unknown to whoever made the
    scores. A small bound proves nothing.

    Args:
      scores: One finite number for each canary.
      present: Whether each canary took part, bool.
      delta: δ at which ε is bounded.
      error_rate: Largest chance that a bound exceeds the truth.
      with_mu: Whether to bound μ of μ-GDP, too; each bound then has half of the error.

    Returns:
      The bounds.

    Raises:
      ValueError: If an argument is out of range, or scores and canaries do not match.
    """
    each = error_rate / 2.0 if with_mu else error_rate
    epsilon, guesses = one_run.epsilon_at_least(scores, present, delta=delta, error_rate=each)
    if not with_mu:
        return Bounds(epsilon, guesses)
    return Bounds(epsilon, guesses, *one_run.mu_at_least(scores, present, error_rate=each))
