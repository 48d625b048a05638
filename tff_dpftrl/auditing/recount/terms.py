"""The privacy terms of a run, computed from its options."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from tff_dpftrl import validation
from tff_dpftrl.accounting import parts, samplings
from tff_dpftrl.accounting.amplification import balls_in_bins
from tff_dpftrl.auditing.recount import arithmetic, records
from tff_dpftrl.mechanisms import serialization
from tff_dpftrl.participation import sampling as sampling_lib

DP_FTRL, SAMPLED = "DP-FTRL", "secret sampling"
_HELD_OUT = "evaluation of held-out users"  # Name of the part of users who never train.


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
      other_epsilon: Sum of the pure ε, without a δ, of choices and parts besides the weights.
      num_rounds: Declared number of rounds.
      is_secret: Whether the seed of the noise was drawn in secret.
      sampling: Sampling of a run whose noise is correlated, too, as `sampling_lib.Sampling`
        describes it; None for other runs.
      others: All else that the run released about the same users, as its records have it.
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
    sampling: dict[str, Any] | None = None
    others: tuple[dict[str, Any], ...] = ()

    @property
    def other_delta(self) -> float:
        """δ that other parts than the weights spend."""
        return math.fsum(part["delta"] for part in self.others)

    @property
    def is_gaussian(self) -> bool:
        """Whether the run is one Gaussian mechanism, which ρ says all of."""
        return self.kind == DP_FTRL and not self.other_delta and not self.other_epsilon

    @property
    def _mu_of_others(self) -> float:
        return math.sqrt(
            math.fsum(2.0 * p["rho_zcdp"] for p in self.others if p["name"] != _HELD_OUT)
        )

    @property
    def _mu_of_held_out(self) -> float:
        """Computes μ of what is released of users who never train, and are in nothing else."""
        return math.sqrt(
            math.fsum(2.0 * p["rho_zcdp"] for p in self.others if p["name"] == _HELD_OUT)
        )

    @property
    def _precision(self) -> float:
        """Sum of 1 / z² of what each round releases of its cohort besides the update."""
        noise = [part["noise_multiplier_of_round"] for part in self.others]
        return math.fsum(1.0 / one**2 for one in noise if one is not None)

    def mu(self, mu_of_weights: float, schema: arithmetic.Schema) -> float:
        """Computes μ of the weights and of all else, where nothing is sampled in secret."""
        times = min(schema.times, -(-schema.rounds // schema.stride))
        squares = (mu_of_weights**2, self._mu_of_others**2, times * self._precision)
        return max(math.sqrt(math.fsum(squares)), self._mu_of_held_out)

    @property
    def stride(self) -> int:
        """Least number of rounds from one of a client to its next that the sampling allows."""
        if self.sampling is None:
            return 1
        return self.sampling[_STRIDES[self.sampling["kind"]]]

    @property
    def is_mixture_of_patterns(self) -> bool:
        """Whether noise is correlated over the rounds that one client may be in.

        Then ε is no sum over samples, and it is computed anew by the package's own accounting.
        """
        return self.sampling is not None and self.sampling["kind"] != "cyclic"

    @property
    def has_guarantee(self) -> bool:
        """Whether anything can be promised at all."""
        return self.is_secret and self.noise_multiplier > 0.0

    def epsilon(self, schema: arithmetic.Schema, delta: float) -> tuple[float, float]:
        """Computes a lower and an upper bound of ε for all that a schema allows.

        For sampled runs only the number of rounds matters. The bounds are equal up to rounding
        where the worst participation is known exactly.
        """
        low, high = self._of_training(schema, delta)
        held_out = arithmetic.gaussian_epsilon(self._mu_of_held_out, delta)
        return max(low, held_out * (1.0 - 1e-6)), max(high, held_out * (1.0 + 1e-6))

    def _of_training(self, schema: arithmetic.Schema, delta: float) -> tuple[float, float]:
        delta -= self.other_delta
        mu, other = self._mu_of_others, self.other_epsilon
        if schema.rounds == 0:
            spent = other + arithmetic.gaussian_epsilon(mu, delta) if self.others else 0.0
            return spent * (1.0 - 1e-6), spent * (1.0 + 1e-6)
        if self.is_mixture_of_patterns:
            share = 0.1 * delta if mu else 0.0  # As `accounting.parts` splits it.
            sampled = other + self._amplified(schema.rounds).epsilon(delta - share)
            sampled += arithmetic.gaussian_epsilon(mu, share) if mu else 0.0
            return sampled * (1.0 - 1e-6), sampled * (1.0 + 1e-6)
        if self.kind == SAMPLED:
            noise_multiplier, num_steps = self.sampled_steps(schema.rounds)
            low, high = arithmetic.sampled_bounds(
                noise_multiplier, self.probability, self.group_size, num_steps, delta, mu
            )
            return other + low, other + high
        bounds = arithmetic.squared_sensitivity(self.strategy, schema)
        low, high = (
            arithmetic.gaussian_epsilon(
                self.mu(math.sqrt(squared) / self.noise_multiplier, schema), delta
            )
            for squared in (bounds.lower, bounds.upper)
        )
        return (other + low) * (1.0 - 1e-6), (other + high) * (1.0 + 1e-6)

    def sampled_steps(self, num_rounds: int) -> tuple[float, int]:
        """Returns noise and number of independent Poisson samples that cost what rounds cost.

        If groups take turns, these are those of one group (Choquette-Choo et al. 2023, Theorem 4),
        and begun turns count as whole.
        """
        if self.sampling is None:
            return self._with_figures(self.noise_multiplier), num_rounds
        turns, charged = -(-num_rounds // self.stride), self._charged(num_rounds)
        once = arithmetic.Schema(charged, charged, 1)
        squared = arithmetic.squared_sensitivity(self.strategy, once).upper
        return self._with_figures(self.noise_multiplier / math.sqrt(squared)), turns

    def _with_figures(self, noise_multiplier: float) -> float:
        """Returns the noise of an update and of what its round releases besides, as one vector."""
        if not self._precision or not noise_multiplier:
            return noise_multiplier
        return (noise_multiplier**-2 + self._precision) ** -0.5

    def deltas(self, epsilons: Sequence[float], num_rounds: int) -> list[float]:
        """Computes δ of a sampled run's first rounds at each ε."""
        if self.is_mixture_of_patterns:
            spent = self._amplified(num_rounds)
            if not isinstance(spent, balls_in_bins.BallsInBins):
                return [1.0] * len(epsilons)  # Nothing else has a profile.
            return [spent.delta(epsilon) for epsilon in epsilons]
        noise_multiplier, num_steps = self.sampled_steps(num_rounds)
        deltas = arithmetic.sampled_deltas(
            noise_multiplier,
            self.probability,
            self.group_size,
            num_steps,
            epsilons,
            self._mu_of_others,
        )
        return [delta + self.other_delta for delta in deltas]

    def _charged(self, num_rounds: int) -> int:
        return min(self.num_rounds, -(-num_rounds // self.stride) * self.stride)

    def _amplified(self, num_rounds: int) -> parts.Bounded:
        return samplings.zero_out(
            sampling_lib.Sampling.from_dict(self.sampling),
            serialization.strategy_from_dict(self.strategy),
            noise_multiplier=self.noise_multiplier,
            num_rounds=self._charged(num_rounds),
        )


_STRIDES = {"cyclic": "num_groups", "bins": "num_bins", "b-min-sep": "min_sep"}
"""Parameters of samplings that are the least stride."""


def of(run: records.Records) -> Terms:
    """Computes the terms of a run."""
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
        others = tuple(plan.get("others", ()))
        return Terms(
            kind=SAMPLED,
            noise_multiplier=plan["noise_multiplier"],
            delta=plan["delta"],
            strategy=None,
            probability=plan["expected_units"] / plan["num_units"],
            group_size=plan["group_size"] if plan["sampling"] == "example" else 1,
            other_epsilon=math.fsum(
                [plan["group_size_epsilon"], *(part["epsilon"] for part in others)]
            ),
            others=others,
            num_rounds=plan["num_steps"],
            is_secret=is_secret,
        )
    scale = 1.0
    if config.get("simulate_report_goal") is not None:
        scale = config["clients_per_round"] / config["simulate_report_goal"]
        if "sampling" in derived:  # By what each expects: bins have whole numbers.
            there = _share(derived["sampling"]) * config["simulate_population"]
            scale = _share(_sampling(run)) * run.num_users / there
    others = tuple(derived.get("others", ()))
    common = {
        "noise_multiplier": derived["noise_multiplier"] * scale,
        "delta": derived.get("delta", config["delta"]),
        "other_epsilon": math.fsum(part["epsilon"] for part in others),
        "others": others,
        "is_secret": is_secret,
        "group_size": derived.get("pool", {"of_client": 1})["of_client"],
    }
    if "sampling" in derived:
        sampling = _sampling(run)
        return Terms(
            kind=SAMPLED,
            strategy=derived["strategy"],
            probability=sampling.get("sampling_probability", 1.0),
            num_rounds=sampling["num_rounds"],
            sampling=sampling,
            **common,
        )
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


def _share(sampling: dict[str, Any]) -> float:
    """Returns the expected share of all clients in a round."""
    probability = sampling.get("sampling_probability", 1.0)
    if sampling["kind"] == "b-min-sep":
        return probability / (1.0 + (sampling["min_sep"] - 1) * probability)
    return probability / sampling[_STRIDES[sampling["kind"]]]


def _sampling(run: records.Records) -> dict[str, Any]:
    """Returns the sampling of a run itself, not of a larger one that it simulates."""
    config, sampling = run.config, dict(run.derived["sampling"])
    if config.get("simulate_report_goal") is None:
        return sampling
    share = config["clients_per_round"] / run.num_users
    match sampling["kind"]:
        case "cyclic":
            sampling["sampling_probability"] = share * sampling["num_groups"]
        case "bins":
            sampling["num_bins"] = run.num_users // config["clients_per_round"]
        case "b-min-sep":
            free = 1.0 - (sampling["min_sep"] - 1) * share
            sampling["sampling_probability"] = min(1.0, share / free)
    return sampling
