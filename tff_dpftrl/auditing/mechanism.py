"""The numbers of a mechanism, as an aggregator states them, for an audit to test."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from tff_dpftrl import validation
from tff_dpftrl.discretization import grid
from tff_dpftrl.mechanisms import identity
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.private_round import (
    adaptive_clipping,
    estimators,
    fixed_clip,
    interface,
    sampled_gaussian,
)


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """The numbers of a mechanism: (sum of clipped updates + noise) / clients_per_round.

    Attributes:
      strategy: Strategy C of the noise.
      noise_multiplier: Standard deviation of z before the division, per unit of
        `contribution · clip_norm`.
      clip_norm: L2 norm that updates are clipped to; that of the first round if it is published.
      clients_per_round: Denominator of the noised sum.
      contribution: Largest L2 norm that one client adds, over the clip norm: above 1 if updates
        are encoded.
      publishes_clip_norm: Whether the measurement "clip_norm" is the norm a round clipped to.
      count_stddev: With adaptive clipping, the standard deviation of the noise on the number of
        clients below the estimate, before the division; measured as "unclipped_fraction".
      encoding: Grid that updates are rounded to, if any.
      client_weight: Smallest weight with which a client counts in full, where clients have one.
      most_clients: Largest number of clients of weight 1 in a round whose sum is divided by
        `clients_per_round`, and not by more; None if there is no limit.
    """

    strategy: strategy_lib.Strategy
    noise_multiplier: float
    clip_norm: float
    clients_per_round: float
    contribution: float = 1.0
    publishes_clip_norm: bool = False
    count_stddev: float | None = None
    encoding: grid.GridEncoding | None = None
    client_weight: float = 1.0
    most_clients: int | None = None

    def __post_init__(self):
        strategy_lib.check_strategy(self.strategy)
        validation.positive("noise_multiplier", self.noise_multiplier)
        validation.positive("clip_norm", self.clip_norm)
        validation.positive("clients_per_round", self.clients_per_round)
        validation.number("contribution", self.contribution, at_least=1)
        validation.positive("client_weight", self.client_weight)
        if self.most_clients is not None:
            validation.integer("most_clients", self.most_clients, minimum=1)

    @property
    def noise_stddev(self) -> float:
        """The standard deviation of z before the division, in clip norms."""
        return self.noise_multiplier * self.contribution

    @property
    def starts(self) -> tuple[int, ...]:
        """The first rounds of the blocks of noise."""
        return tuple(getattr(self.strategy, "starts", (0,)))

    def mu(self, schema: schema_lib.MinSep) -> float:
        """Returns μ of all rounds, for an adversary that knows who takes part in which."""
        return self.strategy.sensitivity(schema).value / self.noise_multiplier

    @classmethod
    def of(cls, factory: Any) -> Mechanism | None:
        """Returns the numbers of one of this package's factories; None for another factory."""
        if hasattr(factory, "weight_cap") and hasattr(factory, "aggregator"):  # WeightedFactory
            inner = cls.of(factory.aggregator)
            return inner and dataclasses.replace(inner, client_weight=factory.weight_cap)
        if not _is_ours(factory) or hasattr(factory, "for_updates"):
            return None
        private_round = getattr(factory, "private_round", None)
        if isinstance(private_round, fixed_clip.FixedClipRound):
            clip_norm = private_round.clipping.constant_norm
            return cls(
                strategy=private_round.strategy,
                noise_multiplier=private_round.noise_multiplier,
                clip_norm=clip_norm,
                clients_per_round=private_round.clients_per_round,
                contribution=private_round.encoded_norm / clip_norm,
                encoding=_encoding(factory),
            )
        if isinstance(private_round, adaptive_clipping.AdaptiveClipRound):
            return cls(
                strategy=private_round.strategy,
                noise_multiplier=private_round.update_noise_multiplier,
                clip_norm=private_round.clipping.initial_clip_norm,
                clients_per_round=private_round.clients_per_round,
                contribution=private_round.unit_inflation or 1.0,
                publishes_clip_norm=True,
                count_stddev=private_round.clipped_count_stddev,
                encoding=_encoding(factory),
            )
        if isinstance(private_round, sampled_gaussian.SampledGaussianRound):
            estimator = private_round.estimator
            is_fixed = isinstance(estimator, estimators.FixedDenominator)
            norm = private_round.clipping.clip_norm
            first = norm[0] if isinstance(norm, tuple) else norm
            weight = estimator.expected_weight if is_fixed else estimator.min_expected_weight
            return cls(
                strategy=identity.Identity(),
                noise_multiplier=private_round.noise_multiplier,
                clip_norm=first if isinstance(first, float) else 1.0,
                clients_per_round=weight,
                contribution=1.0 if is_fixed else 2.0,
                publishes_clip_norm=True,
                # Weights may be integers.
                client_weight=float(math.ceil(private_round.weight_cap)),
                most_clients=None if is_fixed else max(1, math.floor(weight)),
            )
        return None


def _is_ours(factory: Any) -> bool:
    """Returns whether the class of a factory, or one that it is derived from, is ours."""
    package = __name__.partition(".")[0]
    return any(one.__module__.partition(".")[0] == package for one in type(factory).__mro__)


def is_ours(factory: Any) -> bool:
    """Returns whether all code of an aggregator is from this package, or TFF's plain sum."""
    parts = [factory]
    inner = getattr(factory, "inner_sum", None)
    if inner is not None and not inner.is_exact:
        parts.append(inner.factory)
    modules = [type(part).__module__ for part in parts]
    return all(module.partition(".")[0] == "tff_dpftrl" for module in modules) and all(
        interface.foreign_part(getattr(factory, name, None)) is None
        for name in ("private_round", "vector_sum")
    )


def _encoding(factory: Any) -> grid.GridEncoding | None:
    """Returns the grid of an aggregation's secure sum, or of a factory's."""
    secure = getattr(factory, "vector_sum", None)
    if secure is None:
        secure = getattr(getattr(factory, "inner_sum", None), "factory", None)
    return getattr(secure, "encoding", None) if _is_ours(secure) else None
