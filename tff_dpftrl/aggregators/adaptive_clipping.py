"""DP-FTRL whose clip norm follows a quantile of the clients' norms, as a TFF factory.

The mechanism is `private_round.adaptive_clipping`: two private streams under one strategy,
the sum of the clipped updates and the number of clients below an estimate (Xu et al.
2023, algorithm 1; Andrew et al. 2021).
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import tensorflow_federated as tff

from tff_dpftrl import validation
from tff_dpftrl.aggregators import adapter
from tff_dpftrl.aggregators import inner_sum as inner_sum_lib
from tff_dpftrl.mechanisms import noise_split, restarts
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.private_round import adaptive_clipping as adaptive_clipping_lib

ExpensiveClippingWarning = adaptive_clipping_lib.ExpensiveClippingWarning


class AdaptiveDPFTRLState(NamedTuple):
    """State of the aggregator: that of the round (`AdaptiveClipState`), and those of both sums.

    Complete for resuming after a crash. Secret, but for `clip`: it lets a reader subtract the
    noise.
    """

    round_index: Any
    seed: Any
    buffer: Any
    count_buffer: Any
    clip: Any
    sum_state: Any
    count_state: Any


class AdaptiveDPFTRLFactory(adapter.DpFtrlFactory):
    """TFF factory of DP-FTRL with adaptive clipping, of `build_adaptive_dp_ftrl_aggregator`."""

    _state_type = AdaptiveDPFTRLState

    def __init__(
        self,
        private_round: adaptive_clipping_lib.AdaptiveClipRound,
        *,
        inner_sum: inner_sum_lib.InnerSum | None = None,
        count_sum: inner_sum_lib.InnerSum | None = None,
        report_non_finite_clients: bool = False,
    ):
        """Initialises the factory.

        Args:
          private_round: The mechanism.
          inner_sum: Sum of the clipped updates; TFF's plain sum if None. One that is not
            exact needs updates divided by the active clip norm, so that
            `private_round.unit_inflation` is not None.
          count_sum: Sum of the clients' bits; TFF's plain sum if None.
          report_non_finite_clients: Whether the measurement "non_finite_clients" counts
            updates dropped as not finite. No noise covers that exact count.

        Raises:
          ValueError: If a client can add more to a sum than the noise is scaled to.
        """
        if inner_sum is None:
            inner_sum = inner_sum_lib.InnerSum.of(None, 1.0)
        covered = private_round.unit_inflation
        if not inner_sum.is_exact and (
            covered is None or not inner_sum.contribution_norm <= covered
        ):
            raise validation.UsageError(
                f"private_round.unit_inflation must be at least {inner_sum.contribution_norm}, "
                f"what one client can add to inner_sum, got {covered}."
            )
        if count_sum is None:
            count_sum = inner_sum_lib.exact_count(None, noise_split.COUNT_SENSITIVITY)
        if not count_sum.contribution_norm <= noise_split.COUNT_SENSITIVITY:
            raise validation.UsageError(
                f"count_sum.contribution_norm must be at most {noise_split.COUNT_SENSITIVITY}, got "
                f"{count_sum.contribution_norm}."
            )
        self.private_round = private_round
        self.inner_sum = inner_sum
        self._further_sums = [count_sum]
        self._report_non_finite_clients = report_non_finite_clients


def build_adaptive_dp_ftrl_aggregator(
    strategy: strategy_lib.Strategy,
    *,
    noise_multiplier: float,
    clients_per_round: float,
    clipping: adaptive_clipping_lib.AdaptiveClipping = adaptive_clipping_lib.DEFAULT_CLIPPING,
    deterministic_seed: int | None = None,
    secure_noise: bool = False,
    sum_factory: tff.aggregators.UnweightedAggregationFactory | None = None,
    count_sum_factory: tff.aggregators.UnweightedAggregationFactory | None = None,
    unit_inflation: float | None = None,
    report_non_finite_clients: bool = False,
    noise_parties: int = 0,
) -> AdaptiveDPFTRLFactory:
    """Builds DP-FTRL with adaptive clipping and restarts, for any strategy.

    With S the sensitivity of `strategy`, restarts included, under the schema that the
    cohorts keep to, the run satisfies ρ-zCDP with ρ = S² / (2 noise_multiplier²)
    against zeroing out one client, its bits included, as `guarantee` of the factory
    states. The estimation of the clip norm is inside; its price is more noise on the
    updates (`private_round.update_noise_multiplier`). It replaces
    `tff.aggregators.DifferentiallyPrivateFactory.tree_adaptive`.

    Measurements, all of them covered by the guarantee: "clip_norm" (active in the
    round), "estimated_clip_norm" (after it), "unclipped_fraction" (noised),
    "noise_stddev" (of z on the updates, before the division), "num_restarts".

    A client whose update has no finite norm below 1.8e19, or is zero, counts as
    zero in both sums, so as half unclipped. A client moves a round's average by at most
    clip_norm / clients_per_round and the unclipped fraction by at most
    1 / (2 clients_per_round), whatever it sends, for up to 200,000 clients in the round.

    Args:
      strategy: Strategy C of both streams. Its restarts are the rounds that
        take over the estimate, and restart both noises. The paper's schedule is
        `restarts.Restarted(base, (0, *range(128, num_rounds, 1024)))`. Without restarts the
        estimate is never used, which has to be asked for by `clipping.only_estimates`.
      noise_multiplier: Noise multiplier z of both streams together. With 0 there is no
        noise and no privacy.
      clients_per_round: Report goal, by which both noised sums are divided whatever the
        number of clients that reported.
      clipping: Settings of the estimation of the clip norm.
      deterministic_seed: Seed of all noise, an integer in [0, 2^128), for tests only: a
        run with a known seed is not private. From the operating system if None.
      secure_noise: Whether a cryptographic generator, AES-256 in counter mode, draws the noise on
        a grid (`numpy_noise.secure_draws`); else of Philox. TFF's own executor cannot draw it:
        compile the process (`tff_dpftrl.compile_process`).
      sum_factory: Factory of the sum of clipped updates; TFF's plain `SumFactory` if None.
        Any other one receives updates divided by the active clip norm, of norm at most 1,
        and its sum is multiplied by it again.
      count_sum_factory: Factory of the sum of the clients' bits, scalars of ±1/2 or 0;
        TFF's plain `SumFactory` if None. Use a secure one where `sum_factory` is secure.
        It has to be exact, or to declare a `contribution_norm` of 1/2.
      unit_inflation: Largest L2 norm in the sum of a contribution of norm 1, by which the
        noise is scaled. It is required if `sum_factory` may lengthen what clients send,
        and does not declare its `contribution_norm`.
      report_non_finite_clients: Whether the measurement "non_finite_clients" counts
        updates dropped as not finite. No noise covers this exact count, so it is
        outside the privacy guarantee; show it to the operator only.
      noise_parties: Number of parties that each add the whole noise within the sums, so that none
        is added here; 0 if it is.

    Returns:
      The factory.

    Raises:
      ValueError: If an argument is out of range, the noise cannot be split, or the strategy has
        no restart.

    Warns:
      ExpensiveClippingWarning: If the updates get more than 1.25 times the noise that
        a fixed clip norm would need.
    """
    if not (restarts.has_restarts(strategy) or clipping.only_estimates):
        raise validation.UsageError(
            f"strategy {strategy.name!r} has no restarts, so that the clip norm would stay "
            f"{clipping.initial_clip_norm:g} for ever, with more noise than a fixed one has: give "
            "build_strategy(..., starts=restarts.starts(num_rounds, first=128, every=1024)), take "
            "build_dp_ftrl_aggregator, or set AdaptiveClipping(only_estimates=True)."
        )
    inner_sum = inner_sum_lib.InnerSum.of(
        sum_factory, 1.0, stated_norm=unit_inflation, stated_name="unit_inflation"
    )
    is_encoded = unit_inflation is not None or not inner_sum.is_exact
    private_round = adaptive_clipping_lib.AdaptiveClipRound(
        strategy,
        noise_multiplier=noise_multiplier,
        clients_per_round=clients_per_round,
        clipping=clipping,
        unit_inflation=inner_sum.contribution_norm if is_encoded else None,
        deterministic_seed=deterministic_seed,
        noise_parties=noise_parties,
        secure_noise=secure_noise,
    )
    factory = AdaptiveDPFTRLFactory(
        private_round,
        inner_sum=inner_sum,
        count_sum=inner_sum_lib.exact_count(count_sum_factory, noise_split.COUNT_SENSITIVITY),
        report_non_finite_clients=report_non_finite_clients,
    )
    if private_round.expensive_clipping is not None:
        warnings.warn(private_round.expensive_clipping, ExpensiveClippingWarning, stacklevel=2)
    return factory
