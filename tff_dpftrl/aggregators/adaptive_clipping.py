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
from tff_dpftrl.accounting import guarantee as guarantee_lib
from tff_dpftrl.aggregators import adapter
from tff_dpftrl.aggregators import inner_sum as inner_sum_lib
from tff_dpftrl.mechanisms import noise_split
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.private_round import adaptive_clipping as adaptive_clipping_lib

_EXPENSIVE = 1.25


class ExpensiveClippingWarning(UserWarning):
    """Estimating the clip norm takes much of the privacy budget from the updates."""


class AdaptiveDPFTRLState(NamedTuple):
    """State of the aggregator between rounds; enough to go on after a crash.

    Secret, but for `clip`: it lets a reader subtract the noise.

    Attributes:
      round_index: int64 scalar, the next round.
      seed: int64 tensor of shape [2], the root seed of all noise.
      buffer: Past noise on the updates as `noise_stream.NoiseStream` keeps it.
      count_buffer: Past noise on the counts, likewise.
      clip: A `private_round.adaptive_clipping.ClipState`.
      sum_state: State of the inner sum.
      count_state: State of the inner sum of counts.
    """

    round_index: Any
    seed: Any
    buffer: Any
    count_buffer: Any
    clip: Any
    sum_state: Any
    count_state: Any


class AdaptiveDPFTRLFactory(tff.aggregators.UnweightedAggregationFactory):
    """Creates the processes of `build_adaptive_dp_ftrl_aggregator`, see there.

    Attributes:
      private_round: The mechanism, with its strategy, noise multipliers and clipping. It runs
        without TFF too.
      inner_sum: The sum of the clipped updates.
    """

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
          inner_sum: Sums the clipped updates; TFF's plain sum if None. If it is not
            exact, updates have to be handed over divided by the active clip norm:
            `private_round.unit_inflation` is not None.
          count_sum: Sums the clients' bits; TFF's plain sum if None.
          report_non_finite_clients: As in `dp_ftrl.build_dp_ftrl_aggregator`.

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
        self._count_sum = count_sum
        self._report_non_finite_clients = report_non_finite_clients

    @property
    def expensive_clipping(self) -> str | None:
        """What estimating the clip norm costs, in a sentence, if it is much; else None."""
        stddev, cost = self.private_round.clipped_count_stddev, self.private_round.estimation_cost
        if cost <= _EXPENSIVE:
            return None
        return (
            f"Estimating the clip norm with clipped_count_stddev = {stddev:g} multiplies the noise "
            f"of the updates by {cost:.2f}; a larger clipped_count_stddev, or more clients in a "
            "round, costs less."
        )

    def guarantee(self, schema: schema_lib.MinSep, delta: float) -> guarantee_lib.Guarantee:
        """What a run with this aggregator guarantees, the released clip norms included.

        Neighbours differ by zeroing out one client: its updates and its bits.

        Args:
          schema: Who may take part how often; all its rounds are charged.
          delta: The δ to state ε for.

        Returns:
          The guarantee of the total noise multiplier z. It knows whether the seed of
          the noise was given; then there is none, and a statement made of it says so.

        Raises:
          ValueError: If an argument is out of range, or the strategy is not defined
            for that many rounds.
        """
        return guarantee_lib.dp_ftrl_guarantee(
            self.private_round.strategy,
            noise_multiplier=self.private_round.noise_multiplier,
            schema=schema,
            delta=delta,
            seed_is_known=self.private_round.deterministic_seed is not None,
            adaptive_clipping=True,
        )

    def create(self, value_type: tff.Type) -> tff.templates.AggregationProcess:
        """Creates the process for updates of one type.

        Args:
          value_type: A floating-point tensor or any nesting of such tensors.

        Returns:
          The process; its state is an `AdaptiveDPFTRLState`.

        Raises:
          ValueError: If the type has no tensors, other dtypes or unknown shapes, or
            does not fit a sum.
        """
        return adapter.build_process(
            self.private_round,
            value_type,
            sums=[self.inner_sum, self._count_sum],
            state_type=AdaptiveDPFTRLState,
            report_non_finite_clients=self._report_non_finite_clients,
        )


def build_adaptive_dp_ftrl_aggregator(
    strategy: strategy_lib.Strategy,
    *,
    noise_multiplier: float,
    clients_per_round: float,
    clipping: adaptive_clipping_lib.AdaptiveClipping = adaptive_clipping_lib.DEFAULT_CLIPPING,
    deterministic_seed: int | None = None,
    sum_factory: tff.aggregators.UnweightedAggregationFactory | None = None,
    count_sum_factory: tff.aggregators.UnweightedAggregationFactory | None = None,
    unit_inflation: float | None = None,
    report_non_finite_clients: bool = False,
) -> AdaptiveDPFTRLFactory:
    """DP-FTRL with adaptive clipping and restarts, for any strategy.

    With S the sensitivity of `strategy`, restarts included, under the schema the
    cohorts keep to, the run satisfies ρ-zCDP with ρ = S² / (2 noise_multiplier²)
    against zeroing out one client, its bits included, as `guarantee` of the factory
    says: the estimation of the clip norm is inside, its price is more noise on the
    updates (`update_noise_multiplier`). It replaces
    `tff.aggregators.DifferentiallyPrivateFactory.tree_adaptive`.

    Measurements, all of them covered by the guarantee: "clip_norm" (active in the
    round), "estimated_clip_norm" (after it), "unclipped_fraction" (noised),
    "noise_stddev" (of z on the updates, before the division), "num_restarts".

    A client whose update has no finite norm below 1.8e19, or is zero, counts as
    zero in both sums, so as half unclipped. A client moves a round's average by at most
    clip_norm / clients_per_round and the unclipped fraction by at most
    1 / (2 clients_per_round), whatever it sends, for up to 200,000 clients in the round.

    Args:
      strategy: The strategy C of both streams. Its restarts are the rounds that
        take over the estimate, and restart both noises; without restarts the
        estimate is released but never used. The paper's schedule is
        `restarts.Restarted(base, (0, *range(128, num_rounds, 1024)))`.
      noise_multiplier: z, of both streams together.
      clients_per_round: The number both noised sums are divided by: the report goal.
      clipping: How the clip norm is estimated.
      deterministic_seed: As in `dp_ftrl.build_dp_ftrl_aggregator`.
      sum_factory: As in `dp_ftrl.build_dp_ftrl_aggregator`. Any but TFF's plain one is
        handed updates divided by the active clip norm, of norm at most 1, and its sum
        is multiplied by it again.
      count_sum_factory: Sums the clients' bits, scalars of ±1/2 or 0; TFF's
        plain `SumFactory` if None. Use a secure one where `sum_factory` is secure.
        It has to be exact, or to declare a `contribution_norm` of 1/2.
      unit_inflation: L2 norm that one client's contribution of norm 1 can have in the
        sum. It is required if `sum_factory` is not known to keep the norm that clients
        send, and does not declare it; the noise is scaled by it.
      report_non_finite_clients: As in `dp_ftrl.build_dp_ftrl_aggregator`.

    Returns:
      The factory.

    Raises:
      ValueError: If an argument is out of range, or the noise cannot be split.

    Warns:
      ExpensiveClippingWarning: If the updates get more than 1.25 times the noise that
        a fixed clip norm would need.
    """
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
    )
    factory = AdaptiveDPFTRLFactory(
        private_round,
        inner_sum=inner_sum,
        count_sum=inner_sum_lib.exact_count(count_sum_factory, noise_split.COUNT_SENSITIVITY),
        report_non_finite_clients=report_non_finite_clients,
    )
    if factory.expensive_clipping is not None:
        warnings.warn(factory.expensive_clipping, ExpensiveClippingWarning, stacklevel=2)
    return factory
