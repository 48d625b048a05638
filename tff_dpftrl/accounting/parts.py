"""Everything that a run releases about the same users, and its total privacy cost.

A run releases more than its weights: perhaps a vocabulary, metrics, or the choice of one run among
several. Each part is a Gaussian mechanism, or bounded by (ε, δ). Its *losses* are composed with
those of the weights: squared μ of Gaussian mechanisms add up (Dong, Roth & Su 2022, corollary 2),
and privacy loss distributions of sampled steps are convolved (Zhu, Dong & Wang 2022, theorem 10).
What is known by ε and δ alone is added (Dwork & Roth 2014, theorem 3.16): pure ε to ε, and the
probability of unbounded loss to δ, before the conversion. `composition` does the same with runs.

A figure of each round, of the same secret sample as the round's update, is no run of its own: it
says who was sampled. Both are one Gaussian vector, of the precision
1/z² = 1/z_update² + 1/z_round², which is sampled as a whole.

`EVALUATION` is of other users, who never train (`runs.released_metrics` has the proof): ε of the
whole is the larger one of theirs and that of all other parts together.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from tff_dpftrl import validation
from tff_dpftrl.accounting import gaussian

if TYPE_CHECKING:
    from tff_dpftrl.accounting import mixture_of_gaussians

    _Runs: TypeAlias = Sequence[tuple[mixture_of_gaussians.MixtureOfGaussians, int]]

VOCABULARY = "vocabulary"
METRICS = "training metrics"
EVALUATION = "evaluation of held-out users"
SELECTION = "selection among runs"
MEDIAN = "median of the group sizes"
GROUP_SIZES = "group sizes"
NAMES = (VOCABULARY, METRICS, EVALUATION, SELECTION, MEDIAN, GROUP_SIZES)
"""Names of parts."""
WEIGHTS = "weights"
"""Name of the cost of the rounds' updates, beside those of parts."""
EARLIER = "earlier run"
"""Beginning of the name of the cost of an earlier run on the same users."""

# Share of δ for Gaussian mechanisms beside rounds of which ε alone is bounded, at any δ.
_SHARE_OF_DELTA = 0.1
# Relative excess of noise for rounding.
_SAFETY = 1e-12


@dataclasses.dataclass(frozen=True)
class Part:
    """Release of a run about its users, other than the weights.

    Attributes:
      name: One of `NAMES`. Use `EVALUATION` only if nothing else is released about its users.
      says: What is released, and by which mechanism; a phrase for statements.
      rho_zcdp: ρ of the Gaussian mechanism with μ = √(2ρ) that it is, or contains.
      delta: Probability of an unbounded privacy loss, in addition to the Gaussian mechanism.
      epsilon: ε of its pure (ε, 0) cost, which is added to that of the Gaussian mechanism.
      noise_multiplier_of_round: Standard deviation of the noise of a figure that each round
        releases of its own cohort, over the largest change of the figure by one unit; None if
        there is none.
    """

    name: str
    says: str
    rho_zcdp: float = 0.0
    delta: float = 0.0
    epsilon: float = 0.0
    noise_multiplier_of_round: float | None = None

    def __post_init__(self):
        if self.name not in NAMES:
            raise validation.UsageError(
                f"The name of a part must be one of {', '.join(NAMES)}, got {self.name!r}."
            )
        for name in ("rho_zcdp", "delta", "epsilon"):
            validation.number(name, getattr(self, name), at_least=0)
        if self.delta > 0.0:
            validation.delta(self.delta)
        if self.noise_multiplier_of_round is not None:
            validation.positive("noise_multiplier_of_round", self.noise_multiplier_of_round)


def to_json(parts: Iterable[Part]) -> list[dict[str, Any]]:
    """Returns parts as JSON-compatible values, as a run records them."""
    return [dataclasses.asdict(part) for part in parts]


def from_json(values: Iterable[Mapping[str, Any]]) -> tuple[Part, ...]:
    """Reads what `to_json` returned; refuses entries that are no parts and costs out of range."""
    return tuple(Part(**value) for value in values)


@dataclasses.dataclass(frozen=True)
class Cost:
    """Row of a statement's table of parts: what is released, and what it costs alone.

    Attributes:
      name: Name of the part, or `WEIGHTS`, or that of an earlier run on the same users.
      says: What is released, and by which mechanism.
      epsilon_alone: Upper bound of ε at the δ of the whole if nothing else were released; None if
        there is none.
      rho_zcdp: ρ of the Gaussian mechanism that it is, or contains; None if it is none.
      delta: Probability of an unbounded privacy loss, in addition to the Gaussian mechanism.
      epsilon: ε of its pure (ε, 0) cost, which is added to that of the Gaussian mechanism.
      noise_multiplier_of_round: Standard deviation of the noise of a figure that each round
        releases, over the largest change of the figure by one unit; None if there is none.
    """

    name: str
    says: str
    epsilon_alone: float | None
    rho_zcdp: float | None = None
    delta: float = 0.0
    epsilon: float = 0.0
    noise_multiplier_of_round: float | None = None

    @property
    def part(self) -> Part:
        """The part, where it is one of `NAMES`."""
        return Part(
            self.name,
            self.says,
            self.rho_zcdp or 0.0,
            self.delta,
            self.epsilon,
            self.noise_multiplier_of_round,
        )


class Weights(Protocol):
    """Rounds of a run, whose updates are noised."""

    def composed(self, mu: float, precision: float, delta: float) -> float:
        """Computes an upper bound of ε of the rounds together with other Gaussian mechanisms.

        Args:
          mu: Sensitivity of all other releases over the standard deviation of their noise; 0 if
            there are none.
          precision: Sum of 1 / z² over the further figures that each round releases about its
            cohort; 0 if there are none.
          delta: δ at which ε is computed.

        Returns:
          ε.
        """
        ...

    def delta(self, mu: float, precision: float, epsilon: float) -> float | None:
        """Computes an upper bound of δ at an ε; None if only ε is known.

        Args:
          mu: Sensitivity over standard deviation, as `composed` takes it.
          precision: Sum of 1 / z², as `composed` takes it.
          epsilon: ε.

        Returns:
          δ.
        """
        ...

    def without_updates(self) -> Weights:
        """Returns the same rounds without updates, for the cost of other figures of them."""
        ...

    def noise_of_figure(self) -> float:
        """Computes the noise of a figure of each round that costs as much as the updates.

        Returns:
          Standard deviation over the largest change of the figure by one unit.

        Raises:
          UsageError: If figures of rounds cannot be accounted for.
        """
        ...


@dataclasses.dataclass(frozen=True)
class GaussianRounds:
    """Rounds that are one Gaussian mechanism of `mu`, sensitivity over standard deviation.

    One unit is in at most `participations` rounds.
    """

    mu: float
    participations: int = 1

    def composed(self, mu: float, precision: float, delta: float) -> float:
        """Computes ε of the rounds and of other Gaussian mechanisms; see `Weights`."""
        return gaussian.epsilon(self.mu_with(mu, precision), delta)

    def delta(self, mu: float, precision: float, epsilon: float) -> float:
        """Computes δ at an ε; see `Weights`."""
        return gaussian.delta(self.mu_with(mu, precision), epsilon)

    def mu_with(self, mu: float, precision: float) -> float:
        """Computes μ of the rounds and of other Gaussian mechanisms."""
        return math.hypot(self.mu, mu, math.sqrt(self.participations * precision))

    def without_updates(self) -> GaussianRounds:
        """Returns the same rounds without updates."""
        return dataclasses.replace(self, mu=0.0)

    def noise_of_figure(self) -> float:
        """Computes the noise of a figure as costly as the updates; see `Weights`."""
        return math.sqrt(self.participations) / self.mu * (1.0 + _SAFETY)


@dataclasses.dataclass(frozen=True)
class SampledRounds:
    """Rounds that each sample units by themselves, in secret, with independent noise.

    σ is the noise per unit of one round's sensitivity, `num_rounds` the number of rounds in which a
    unit may be, and `group_size` the largest number of units of one user.
    """

    noise_multiplier: float
    sampling_probability: float
    num_rounds: int
    group_size: int = 1

    def composed(self, mu: float, precision: float, delta: float) -> float:
        """Computes ε of the rounds and of other Gaussian mechanisms; see `Weights`."""
        if self.noise_multiplier == 0.0:
            return math.inf
        return epsilon_of_losses(mu, self._steps(precision), delta)

    def delta(self, mu: float, precision: float, epsilon: float) -> float:
        """Computes δ at an ε; see `Weights`."""
        from tff_dpftrl.accounting import mixture_of_gaussians  # It takes long to import.

        if self.noise_multiplier == 0.0:
            return 1.0
        runs = _with_gaussian(mu, self._steps(precision))
        return mixture_of_gaussians.delta_of_runs(runs, epsilon=epsilon)

    def _steps(self, precision: float) -> _Runs:
        """Returns the pair of one round, and the number of rounds; nothing if they tell nothing."""
        from tff_dpftrl.accounting import mixture_of_gaussians  # It takes long to import.

        noise = self.noise_multiplier
        if precision > 0.0:
            noise = 1.0 / math.hypot(1.0 / noise, math.sqrt(precision))
        if self.num_rounds == 0 or math.isinf(noise):
            return []
        pair = mixture_of_gaussians.els(noise, self.sampling_probability, self.group_size)
        return [(pair, self.num_rounds)]

    def without_updates(self) -> SampledRounds:
        """Returns the same rounds without updates."""
        return dataclasses.replace(self, noise_multiplier=math.inf)

    def noise_of_figure(self) -> float:
        """Computes the noise of a figure as costly as the updates; see `Weights`."""
        return self.noise_multiplier


class Bounded(Protocol):
    """Run of which an upper bound of epsilon is known, in both directions of a zero-out."""

    def epsilon(self, delta: float) -> float:
        """Computes an upper bound of epsilon at `delta` for all data; it is no estimate."""
        ...


@dataclasses.dataclass(frozen=True)
class BoundedRounds:
    """Rounds of which an upper bound of ε is known at any δ, and nothing else."""

    run: Bounded
    sampling: str

    def composed(self, mu: float, precision: float, delta: float) -> float:
        """Computes ε of the rounds and of other Gaussian mechanisms.

        Figures of the rounds' cohorts are refused: they would say who was sampled.
        """
        if precision > 0.0:
            self.noise_of_figure()
        if mu == 0.0:
            return self.run.epsilon(delta)
        share = _SHARE_OF_DELTA * delta
        return self.run.epsilon(delta - share) + gaussian.epsilon(mu, share)

    def delta(self, mu: float, precision: float, epsilon: float) -> None:
        """Returns None: only ε is known."""

    def without_updates(self) -> BoundedRounds:
        """Returns the same rounds: figures of a round are refused."""
        return self

    def noise_of_figure(self) -> float:
        """Refuses figures of a round."""
        raise validation.UsageError(
            f"Figures of each round cannot be accounted for with the sampling {self.sampling!r}: "
            "release none, or take the sampling 'cyclic'."
        )


def epsilon_of_losses(mu: float, runs: _Runs, delta: float) -> float:
    """Bounds ε of a Gaussian mechanism (`mu`, 0 for none) and of sampled steps together."""
    if not runs:
        return gaussian.epsilon(mu, delta)
    from tff_dpftrl.accounting import mixture_of_gaussians  # It takes long to import.

    return mixture_of_gaussians.epsilon_of_runs(_with_gaussian(mu, runs), delta=delta)


def _with_gaussian(mu: float, runs: _Runs) -> _Runs:
    """Returns runs with a Gaussian mechanism, which is a run of one step, if there is one."""
    if mu == 0.0:
        return runs
    from tff_dpftrl.accounting import mixture_of_gaussians  # It takes long to import.

    return [*runs, (mixture_of_gaussians.MixtureOfGaussians(1.0, (mu,), (1.0,)), 1)]


def added_epsilon(parts: Iterable[Part]) -> float:
    """Computes the ε of parts that is added to that of the Gaussian mechanisms."""
    return math.fsum(part.epsilon for part in parts)


def remaining_delta(parts: Iterable[Part], delta: float) -> float:
    """Computes what parts leave of δ to the Gaussian mechanisms; refuses to leave nothing."""
    spent = math.fsum(part.delta for part in parts)
    if spent == 0.0:
        return delta
    if spent >= delta:
        raise validation.UsageError(
            f"delta={delta:g} is spent by other parts than the weights, {spent:g}: raise delta, or "
            "give the vocabulary less of it."
        )
    return math.nextafter(delta - spent, 0.0)


def gaussian_mu(parts: Iterable[Part]) -> float:
    """Computes sensitivity over standard deviation of all Gaussian mechanisms outside rounds.

    Those of held-out users are no part of it.
    """
    return _mu(part for part in parts if part.name != EVALUATION)


def held_out_mu(parts: Iterable[Part]) -> float:
    """Computes sensitivity over standard deviation of all that is released of held-out users."""
    return _mu(part for part in parts if part.name == EVALUATION)


def _mu(parts: Iterable[Part]) -> float:
    return math.hypot(*(gaussian.mu_from_rho(part.rho_zcdp) for part in parts))


def precision_of_rounds(parts: Iterable[Part]) -> float:
    """Computes the sum of 1 / z² of what each round releases of its cohort besides the update."""
    return math.fsum(
        part.noise_multiplier_of_round**-2
        for part in parts
        if part.noise_multiplier_of_round is not None
    )


def compose(weights: Weights, parts: Sequence[Part], delta: float) -> float:
    """Bounds ε of a run's weights and of all else that it releases, together.

    Parts whose own δ leave nothing are refused, and so are figures of rounds that cannot be
    accounted for.
    """
    left = remaining_delta(parts, delta)
    epsilon = weights.composed(gaussian_mu(parts), precision_of_rounds(parts), left)
    epsilon += added_epsilon(parts)
    held_out = held_out_mu(parts)
    return max(epsilon, gaussian.epsilon(held_out, delta)) if held_out else epsilon


def epsilon_without_weights(weights: Weights, parts: Sequence[Part], delta: float) -> float:
    """Computes ε of all that a run releases besides its weights, as `compose`."""
    rounds: Weights = GaussianRounds(0.0)
    if precision_of_rounds(parts) > 0.0:
        rounds = weights.without_updates()
    return compose(rounds, parts, delta)


def costs(weights: Weights, says: str, parts: Sequence[Part], delta: float) -> tuple[Cost, ...]:
    """Computes the cost of each part alone, that of the weights first; none without other parts.

    They do not add up to that of the whole, which is `compose`. `says` is the mechanism of the
    weights, a phrase.
    """
    if not parts:
        return ()
    rho = weights.mu * (weights.mu / 2.0) if isinstance(weights, GaussianRounds) else None
    rows = (
        Cost(epsilon_alone=epsilon_without_weights(weights, [part], delta), **vars(part))
        for part in parts
    )
    return Cost(WEIGHTS, says, compose(weights, (), delta), rho), *rows


_POINTS = 12
_LARGE_EPSILON = 40.0
"""ε above which no profile is computed: guesses are right practically always."""


@functools.lru_cache(maxsize=64)
def profile(
    weights: Weights, parts: tuple[Part, ...], epsilon: float
) -> tuple[tuple[float, float], ...]:
    """Computes points (ε, δ) of the weights and of all else together, with δ rounded up.

    The points begin at the smallest ε. There are none if only ε is known, or if it is so large that
    no guess is bounded.
    """
    spent, lost = added_epsilon(parts), math.fsum(part.delta for part in parts)
    left = epsilon - spent
    if not 0.0 < left <= _LARGE_EPSILON:
        return ()
    mu, precision, points = gaussian_mu(parts), precision_of_rounds(parts), []
    held_out = held_out_mu(parts)
    # Denser at small ε, which decide most of the trade-off curve.
    for at in (left * np.linspace(0.0, 1.0, _POINTS + 1)[:-1] ** 2).tolist():
        delta = weights.delta(mu, precision, at)
        if delta is None:
            return ()
        delta = min(1.0, lost + delta * (1.0 + _SAFETY)) if lost else delta
        if held_out:
            delta = max(delta, gaussian.delta(held_out, spent + at))
        points.append((spent + at, delta))
    return tuple(points)
