"""Privacy guarantee of a strategy with a noise multiplier and a participation schema.

With i.i.d. Gaussian noise of standard deviation z per unit clip norm, a strategy
of sensitivity S is a Gaussian mechanism with mu = S / z (Denisov et al. 2022;
McMahan, Xu & Zhang 2024, section 2): `rho = S² / (2 z²)`-zCDP and exactly as
(epsilon, delta)-DP as that Gaussian. Everything after the noise (momentum, Adam,
publishing every checkpoint) is post-processing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tff_dpftrl import validation
from tff_dpftrl.accounting import display, gaussian, parts
from tff_dpftrl.mechanisms import serialization
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.participation import schema as schema_lib

if TYPE_CHECKING:
    from tff_dpftrl.accounting import events


@dataclasses.dataclass(frozen=True)
class Guarantee:
    """Privacy guarantee of one run of a matrix mechanism to each client that follows it.

    Neighbouring data sets differ in one client only, all of whose contributions are
    zeroed out. The number of clients, who takes part in which round, the vocabulary
    and every seed but that of the noise are the same in both.

    There is no guarantee (mu, rho and epsilon are infinite) without noise, with a seed that
    somebody knows, or with so little noise that the numbers overflow.

    Attributes:
      mechanism: Name of the strategy, like "blt".
      noise_multiplier: z, standard deviation of the noise per unit clip norm.
      schema: Participation schema on which the guarantee relies.
      sensitivity: Sensitivity of the strategy under `schema`, for clip norm 1.
      delta: Delta for which `epsilon` is stated.
      clip_norm_inflation: Factor ≥ 1 by which the norm bound of what clients send exceeds
        the clip norm that z is relative to. It is above 1 with discretised secure
        aggregation whose noise was not scaled up (Xu et al. 2023, section 2.4).
      seed_is_known: Whether the caller gave the seed of the noise, instead of drawing it from
        the operating system. Whoever knows the seed can subtract the noise.
      clip_norm: Largest L2 norm of one client's update; None if it is not fixed or not
        known here. The other numbers do not depend on it.
      adaptive_clipping: Whether the run also releases the noised number of clients
        below a clip norm that it learns. z is then that of both sums together.
      clipped_by_caller: Whether code outside this package clips, sums and adds the noise.
      claimed_by_author: Whether the strategy is of a class outside this package, so that its
        sensitivity is what the author of the class says.
      others: All else that the run releases about the same clients. μ, ρ and ε are of the whole.
      strategy: The strategy itself; None if only its sensitivity is known.
    """

    mechanism: str
    noise_multiplier: float
    schema: schema_lib.MinSep
    sensitivity: strategy_lib.Sensitivity
    delta: float
    clip_norm_inflation: float = 1.0
    seed_is_known: bool = False
    clip_norm: float | None = None
    adaptive_clipping: bool = False
    clipped_by_caller: bool = False
    claimed_by_author: bool = False
    others: tuple[parts.Part, ...] = ()
    strategy: strategy_lib.Strategy | None = dataclasses.field(
        default=None, repr=False, compare=False
    )

    def __post_init__(self):
        validation.delta(self.delta)
        validation.noise_multiplier(self.noise_multiplier)
        validation.number(
            "clip_norm_inflation",
            self.clip_norm_inflation,
            at_least=1,
            remedy="It is the inflated norm over the clip norm.",
        )
        if self.clip_norm is not None:
            validation.positive("clip_norm", self.clip_norm)

    def __str__(self) -> str:
        schema = self.schema
        bound = (
            "no guarantee: the seed of the noise is known"
            if self.seed_is_known
            else (
                f"(ε = {display.round_up(self.epsilon)}, δ = {display.delta(self.delta)})"
                "-differential privacy"
                + (f", ρ = {display.round_up(self.rho_zcdp)} zCDP" if self.is_gaussian else "")
            )
        )
        return (
            f"{self.mechanism}: {bound}; noise multiplier "
            f"{display.round_down(self.noise_multiplier, 6)}, {schema.num_rounds} rounds, stride "
            f"at least {schema.min_sep}, at most {schema.max_participations} participations"
        )

    @property
    def weights(self) -> parts.GaussianRounds:
        """The rounds' updates alone, without `others`."""
        mu = math.inf
        if self.noise_multiplier > 0.0 and not self.seed_is_known:
            mu = self.sensitivity.value * self.clip_norm_inflation / self.noise_multiplier
        return parts.GaussianRounds(mu, self.schema.effective_participations)

    @property
    def mu(self) -> float:
        """Sensitivity over standard deviation of the equivalent Gaussian mechanism."""
        of_training = self.weights.mu_with(
            parts.gaussian_mu(self.others), parts.precision_of_rounds(self.others)
        )
        return max(of_training, parts.held_out_mu(self.others))

    @property
    def rho_zcdp(self) -> float:
        """Parameter ρ of zCDP, `S² · inflation² / (2 z²)`, and ρ of Gaussian parts besides."""
        return self.mu * (self.mu / 2.0)

    @property
    def is_gaussian(self) -> bool:
        """Whether ρ says it all: no part has a δ of its own, or an ε without one."""
        return not any(part.delta or part.epsilon for part in self.others)

    @property
    def epsilon(self) -> float:
        """Epsilon at `delta`, exact for the equivalent Gaussian."""
        return self.epsilon_at(self.delta)

    @property
    def epsilon_rdp(self) -> float:
        """Epsilon at `delta` by the looser conversion from zCDP, for comparison."""
        return gaussian.epsilon_from_rho_by_rdp(self.rho_zcdp, self.delta)

    def epsilon_at(self, delta: float) -> float:
        """Computes epsilon at another delta, exactly for the equivalent Gaussian."""
        return parts.compose(self.weights, self.others, delta)

    def delta_at(self, epsilon: float) -> float:
        """Computes delta at a given epsilon, exactly for the equivalent Gaussian."""
        if not self.others:
            return gaussian.delta(self.mu, epsilon)
        left = epsilon - parts.added_epsilon(self.others)
        lost = math.fsum(part.delta for part in self.others)
        return 1.0 if left < 0.0 else min(1.0, gaussian.delta(self.mu, left) + lost)

    def to_dp_event(self) -> events.DpFtrlDpEvent:
        """Describes the run, without `others`, as an event for dp_accounting's accountants."""
        from tff_dpftrl.accounting import events  # dp_accounting takes long to import.

        inflated = self.sensitivity.value * self.clip_norm_inflation
        secret_noise = 0.0 if self.seed_is_known else self.noise_multiplier
        return events.DpFtrlDpEvent(
            noise_multiplier=secret_noise / inflated,
            strategy_noise_multiplier=secret_noise,
            sensitivity_squared=self.sensitivity.squared,
            clip_norm_inflation=self.clip_norm_inflation,
            num_rounds=self.schema.num_rounds,
            min_sep=self.schema.min_sep,
            max_participations=self.schema.max_participations,
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the numbers as JSON-compatible values; None where there is no bound."""

        def finite(value: float, holds: bool = True) -> float | None:
            return value if holds and math.isfinite(value) else None

        return {
            "mechanism": self.mechanism,
            "noise_multiplier": self.noise_multiplier,
            "num_rounds": self.schema.num_rounds,
            "min_sep": self.schema.min_sep,
            "max_participations": self.schema.max_participations,
            "sensitivity_squared": self.sensitivity.squared,
            "sensitivity_exact": self.sensitivity.exact,
            "clip_norm_inflation": self.clip_norm_inflation,
            "seed_is_known": self.seed_is_known,
            "rho_zcdp": finite(self.rho_zcdp, self.is_gaussian),
            "epsilon": finite(self.epsilon),
            "delta": self.delta,
            "epsilon_rdp": finite(self.epsilon_rdp, self.is_gaussian),
        }


def of_round(private_round: Any, schema: schema_lib.MinSep, delta: float) -> Guarantee:
    """Computes the guarantee of a run with a private round of DP-FTRL, for zeroing out one client.

    `private_round` is a `private_round.fixed_clip.FixedClipRound` or an
    `adaptive_clipping.AdaptiveClipRound`, whose released clip norms are covered. All rounds of the
    schema are charged. If the seed of the noise was given, the run has no guarantee, and a
    statement made of this one says so.
    """
    clip_norm = getattr(private_round.clipping, "constant_norm", None)
    return dp_ftrl_guarantee(
        private_round.strategy,
        noise_multiplier=private_round.noise_multiplier,
        schema=schema,
        delta=delta,
        seed_is_known=private_round.deterministic_seed is not None,
        clip_norm=clip_norm,
        adaptive_clipping=clip_norm is None,
    )


def dp_ftrl_guarantee(
    strategy: strategy_lib.Strategy,
    *,
    noise_multiplier: float,
    schema: schema_lib.MinSep,
    delta: float,
    clip_norm_inflation: float = 1.0,
    seed_is_known: bool = False,
    clip_norm: float | None = None,
    adaptive_clipping: bool = False,
    clipped_by_caller: bool = False,
    others: tuple[parts.Part, ...] = (),
) -> Guarantee:
    """Computes the guarantee of a whole run.

    With adaptive clipping, `noise_multiplier` is the total z of Theorem 1 (Xu et
    al. 2023), not the larger multiplier of the update stream: see
    `mechanisms.noise_split`. With restarts, `strategy` is the block-diagonal one.

    Args:
      strategy: Strategy matrix C that generates the noise.
      noise_multiplier: z, standard deviation of the noise per unit clip norm.
      schema: Participation schema of the run; all its `num_rounds` rounds are charged.
      delta: Delta for which epsilon is stated.
      clip_norm_inflation: Factor ≥ 1 by which the norm bound of what clients send exceeds
        the clip norm that z is relative to.
      seed_is_known: Whether the caller, not the operating system, chose the noise's seed.
      clip_norm: Fixed clip norm, for statements; None if there is none or it is not known.
      adaptive_clipping: Whether the clip norm is learned under the same z.
      clipped_by_caller: Whether code outside this package clips, sums and adds the noise.
      others: All else that the run releases about the same clients.

    Returns:
      The guarantee of the whole.

    Raises:
      ValueError: If an argument is out of range.
    """
    strategy_lib.check_strategy(strategy)
    return Guarantee(
        mechanism=strategy.name,
        noise_multiplier=validation.noise_multiplier(noise_multiplier),
        schema=schema,
        sensitivity=strategy.sensitivity(schema),
        delta=validation.delta(delta),
        clip_norm_inflation=validation.number("clip_norm_inflation", clip_norm_inflation),
        seed_is_known=bool(seed_is_known),
        clip_norm=None if clip_norm is None else float(clip_norm),
        adaptive_clipping=bool(adaptive_clipping),
        clipped_by_caller=bool(clipped_by_caller),
        claimed_by_author=not serialization.is_built_in(strategy),
        others=others,
        strategy=strategy,
    )


def epsilon_so_far(
    strategy: strategy_lib.Strategy,
    *,
    noise_multiplier: float,
    schema: schema_lib.MinSep,
    rounds_released: int,
    delta: float,
    clip_norm_inflation: float = 1.0,
    others: tuple[parts.Part, ...] = (),
) -> float:
    """Computes epsilon of what the first rounds released; the whole run's is no smaller.

    Args:
      strategy: Strategy matrix C that generates the noise.
      noise_multiplier: z, standard deviation of the noise per unit clip norm.
      schema: Participation schema declared for the whole run.
      rounds_released: Number of rounds, from the first one on, whose noised sums have left
        the aggregator; 0 costs nothing.
      delta: Delta for which epsilon is stated.
      clip_norm_inflation: Factor ≥ 1 by which the norm bound of what clients send exceeds
        the clip norm that z is relative to.
      others: All else that the run releases about the same clients. What no round releases counts
        from the beginning.

    Returns:
      Epsilon at `delta`.

    Raises:
      ValueError: If an argument is out of range or `rounds_released` exceeds
        the schema's rounds.
    """
    strategy_lib.check_strategy(strategy)
    if not 0 <= rounds_released <= schema.num_rounds:
        raise validation.UsageError(
            f"rounds_released must be between 0 and num_rounds={schema.num_rounds}, got "
            f"{rounds_released!r}; a longer run needs a schema that declares its rounds."
        )
    if rounds_released == 0:
        return parts.compose(parts.GaussianRounds(0.0, 0), others, delta)
    return dp_ftrl_guarantee(
        strategy,
        noise_multiplier=noise_multiplier,
        schema=dataclasses.replace(schema, num_rounds=rounds_released),
        delta=delta,
        clip_norm_inflation=clip_norm_inflation,
        others=others,
    ).epsilon


def composed_rho(guarantees: Iterable[Guarantee]) -> float:
    """Computes the rho-zCDP of several runs or streams on the same clients.

    Gaussian mechanisms compose to a Gaussian one: `gaussian.epsilon` of
    `gaussian.mu_from_rho(composed_rho(...))` is the tight epsilon.

    It is inf if one of them has no guarantee, or a part with a δ of its own or an ε without one, of
    which no rho holds.
    """
    return float(sum(one.rho_zcdp if one.is_gaussian else math.inf for one in guarantees))
