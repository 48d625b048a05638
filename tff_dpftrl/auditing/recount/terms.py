"""The privacy terms of a run, computed from its options."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from tff_dpftrl import validation
from tff_dpftrl.auditing.recount import arithmetic, records

DP_FTRL, SAMPLED = "DP-FTRL", "secret sampling"


@dataclasses.dataclass(frozen=True)
class Terms:
    """Noise and participation of a run.

    Attributes:
      kind: Kind of the mechanism, `DP_FTRL` or `SAMPLED`.
      noise_multiplier: Noise multiplier of the run itself, not of a larger one that it simulates.
      delta: δ of the guarantee; None if neither the options nor the plan have one.
      strategy: Parameters of the strategy; None if clipping and noise are off, or the noise
        is independent by definition.
      probability: Probability of a unit to be sampled; None for DP-FTRL.
      group_size: Number of units of one user in a sample.
      other_epsilon: ε that was spent before the first step.
      num_rounds: Declared number of rounds.
      is_secret: Whether the seed of the noise was drawn in secret.
    """

    kind: str
    noise_multiplier: float
    delta: float | None
    strategy: dict[str, Any] | None
    probability: float | None
    group_size: int
    other_epsilon: float
    num_rounds: int
    is_secret: bool

    @property
    def has_guarantee(self) -> bool:
        """Whether anything can be promised at all."""
        return self.is_secret and self.noise_multiplier > 0.0

    def epsilon(self, schema: arithmetic.Schema, delta: float) -> tuple[float, float]:
        """Computes a lower and an upper bound of ε for all that a schema allows.

        Args:
          schema: Participation schema; for sampled runs only the number of rounds matters.
          delta: δ of the guarantee.

        Returns:
          Two bounds, equal up to rounding where the worst participation is known exactly.
        """
        if schema.rounds == 0:
            return 0.0, 0.0
        if self.kind == SAMPLED:
            sampled = self.other_epsilon + arithmetic.sampled_epsilon(
                self.noise_multiplier, self.probability, self.group_size, schema.rounds, delta
            )
            # Each of the two accountants rounds up, on different grids.
            return sampled * 0.99 - 1e-4, sampled * 1.01 + 1e-4
        bounds = arithmetic.squared_sensitivity(self.strategy, schema)
        low, high = (
            arithmetic.gaussian_epsilon(math.sqrt(squared) / self.noise_multiplier, delta)
            for squared in (bounds.lower, bounds.upper)
        )
        return low * (1.0 - 1e-6), high * (1.0 + 1e-6)


def of(run: records.Records) -> Terms:
    """Computes the terms of a run.

    Raises:
      ValueError: If its options are those of no run that can be recounted.
    """
    try:
        return _of(run)
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise validation.UsageError(
            f"{run.folder / 'config.json'} does not say what the run was: {error!r} is missing or "
            "wrong."
        ) from None


def _of(run: records.Records) -> Terms:
    config, derived = run.config, run.derived
    is_secret = config.get("deterministic_noise_seed") is None
    if "plan" in derived:  # Fine-tuning by sampling.
        plan = derived["plan"]
        return Terms(
            kind=SAMPLED,
            noise_multiplier=plan["noise_multiplier"],
            delta=plan["delta"],
            strategy=None,
            probability=plan["expected_units"] / plan["num_units"],
            group_size=plan["group_size"] if plan["sampling"] == "example" else 1,
            other_epsilon=plan["group_size_epsilon"],
            num_rounds=plan["num_steps"],
            is_secret=is_secret,
        )
    scale = 1.0
    if config.get("simulate_report_goal") is not None:
        scale = config["clients_per_round"] / config["simulate_report_goal"]
    common = {
        "noise_multiplier": derived["noise_multiplier"] * scale,
        "delta": config["delta"],
        "other_epsilon": 0.0,
        "is_secret": is_secret,
        "group_size": 1,
    }
    if "sampling_probability" in derived:
        return Terms(
            kind=SAMPLED,
            strategy=None,
            probability=config["clients_per_round"] / run.num_users,
            num_rounds=config["num_rounds"],
            **common,
        )
    return Terms(
        kind=DP_FTRL,
        strategy=derived["strategy"],
        probability=None,
        num_rounds=derived["schema"]["num_rounds"],
        **common,
    )
