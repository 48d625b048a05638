"""DP-FTRL as a TFF aggregation factory, made of a private round and the sums in it.

In a round every client's update is clipped and summed; the server adds correlated noise and divides
by `clients_per_round`, however many clients reported (McMahan, Xu & Zhang 2024, algorithm 1). Any
server optimizer may follow. The clip norm is fixed (`private_round.fixed_clip`), or follows a
quantile of the clients' norms (`private_round.adaptive_clipping`; Xu et al. 2023, algorithm 1).
"""

from __future__ import annotations

import collections
import warnings

import tensorflow_federated as tff
from typing_extensions import Unpack

from tff_dpftrl import validation
from tff_dpftrl.accounting import guarantee as guarantee_lib
from tff_dpftrl.aggregators import adapter
from tff_dpftrl.aggregators import inner_sum as inner_sum_lib
from tff_dpftrl.execution import tff_names
from tff_dpftrl.mechanisms import noise_split, restarts
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.private_round import adaptive_clipping, fixed_clip, interface
from tff_dpftrl.private_round import clipping as clipping_lib

# States: those of the round and of each sum. They are complete for resuming after a crash, and
# secret but for `clip`: they let a reader subtract the noise.
DPFTRLState = collections.namedtuple(
    "DPFTRLState", (*fixed_clip.FixedClipState._fields, "sum_state")
)
AdaptiveDPFTRLState = collections.namedtuple(
    "AdaptiveDPFTRLState",
    (*adaptive_clipping.AdaptiveClipState._fields, "sum_state", "count_state"),
)


class DPFTRLFactory(tff.aggregators.UnweightedAggregationFactory):
    """TFF factory of DP-FTRL, of any private round and sums; the builders make the usual ones.

    Attributes:
      private_round: The mechanism, with strategy, noise multiplier and clipping. It runs without
        TFF too.
      inner_sum: Sum of the clipped updates.
    """

    def __init__(
        self,
        private_round: fixed_clip.FixedClipRound | adaptive_clipping.AdaptiveClipRound,
        *,
        sum_factory: tff.aggregators.UnweightedAggregationFactory | None = None,
        count_sum_factory: tff.aggregators.UnweightedAggregationFactory | None = None,
        report_non_finite_clients: bool = False,
    ):
        """Initialises the factory.

        Args:
          private_round: The mechanism.
          sum_factory: Factory of the sum of clipped updates, nested like the updates; TFF's plain
            `SumFactory`, in float64, if None. Another one receives float32 unless it has an
            attribute `sum_dtype`, and has to declare, in an attribute `contribution_norm`, the
            largest L2 norm that one client can add to its sum. With adaptive clipping it receives
            updates divided by the active clip norm, of norm at most 1. Its measurements become the
            aggregator's.
          count_sum_factory: Factory of the sum of the clients' bits in adaptive clipping, scalars
            of ±1/2 or 0; TFF's plain `SumFactory` if None. Use a secure one where `sum_factory` is
            secure. It has to be exact, or to declare a `contribution_norm` of 1/2.
          report_non_finite_clients: Whether the measurement "non_finite_clients" counts updates
            dropped as not finite. No noise covers this exact count, so it is outside the privacy
            guarantee; show it to the operator only.

        Raises:
          ValueError: If a client can add more to a sum than the noise is scaled to.
        """
        self.private_round = private_round
        self._state_type, largest, further_sums = DPFTRLState, 1.0, []
        if isinstance(private_round, adaptive_clipping.AdaptiveClipRound):
            self._state_type = AdaptiveDPFTRLState
            further_sums = [
                inner_sum_lib.exact_count(count_sum_factory, noise_split.COUNT_SENSITIVITY)
            ]
        else:
            largest = private_round.clipping.constant_norm
        self.inner_sum = inner_sum_lib.InnerSum.of(sum_factory, largest)
        private_round.check_sum("sum_factory", self.inner_sum.encoded_norm)
        self._sums = [self.inner_sum, *further_sums]
        self._report_non_finite_clients = report_non_finite_clients

    def guarantee(self, schema: schema_lib.MinSep, delta: float) -> guarantee_lib.Guarantee:
        """Computes the guarantee of a run with this aggregator, for zeroing out one client.

        All that a client sends is zeroed out, its bits included. Released clip norms are covered.

        Args:
          schema: Participation schema of the clients; all its rounds are charged.
          delta: Parameter δ for which ε is stated.

        Returns:
          The guarantee. If the seed of the noise was given, the run has none, and a
          statement made of the guarantee says so.

        Raises:
          ValueError: If an argument is out of range, or the strategy is not defined
            for that many rounds.
        """
        return guarantee_lib.of_round(self.private_round, schema, delta)

    def create(self, value_type: tff_names.Type) -> tff.templates.AggregationProcess:
        """Creates the process for updates of one type, any nesting of floating-point tensors.

        A `ValueError` refuses a type without tensors, of other dtypes or unknown shapes, or that
        does not fit the clipping or a sum.
        """
        return adapter.build_process(
            self.private_round,
            value_type,
            sums=self._sums,
            state_type=self._state_type,
            report_non_finite_clients=self._report_non_finite_clients,
        )


def build_dp_ftrl_aggregator(
    strategy: strategy_lib.Strategy,
    *,
    noise_multiplier: float,
    clients_per_round: float,
    clip_norm: float | clipping_lib.Clipping,
    sum_factory: tff.aggregators.UnweightedAggregationFactory | None = None,
    report_non_finite_clients: bool = False,
    **noise: Unpack[interface.NoiseOptions],
) -> DPFTRLFactory:
    """Builds DP-FTRL as the `model_aggregator` of any unweighted TFF learning process.

    With S the sensitivity of the strategy under the participation schema that the
    cohorts keep to, the run satisfies ρ-zCDP with ρ = S² / (2 noise_multiplier²)
    against zeroing out one client, as `guarantee` of the factory states. It replaces
    `tff.aggregators.DifferentiallyPrivateFactory.tree_aggregation`.

    A client whose update has a norm that is not finite (NaN, Inf), or above 1.8e19,
    counts as zero. A client can move the average of a round by at most
    `clip_norm / clients_per_round`, whatever it sends, for up to 200,000 clients in
    the round (`private_round.summation` has the proof).

    Updates are clipped, summed and noised in float64; the average is cast back to
    their dtypes at the end. The draws of Philox's noise are float32.

    Args:
      strategy: Strategy C that correlates the noise of different rounds.
      noise_multiplier: Standard deviation of z for clip norm 1. With 0 there is no
        noise and no privacy.
      clients_per_round: Report goal, by which the noised sum is divided whatever the
        number of clients that reported.
      clip_norm: L2 norm that one client's update is clipped to, or a rule of clipping: a
        `clipping.PerLayerClipping` bounds every tensor separately (McMahan et al.
        2018). The norm has to be the same in all rounds.
      sum_factory: Factory of the sum of clipped updates, see `DPFTRLFactory`.
      report_non_finite_clients: Whether to count updates dropped as not finite, outside the
        privacy guarantee, see `DPFTRLFactory`.
      **noise: `deterministic_seed` and `secure_noise`, see `interface.NoiseOptions`.

    Returns:
      The factory.

    Raises:
      ValueError: If an argument is out of range.
    """
    if not isinstance(clip_norm, clipping_lib.Clipping):
        clip_norm = clipping_lib.FlatClipping(clip_norm)
    inner_sum = inner_sum_lib.InnerSum.of(sum_factory, clip_norm.constant_norm)
    private_round = fixed_clip.FixedClipRound(
        strategy,
        noise_multiplier=noise_multiplier,
        clipping=clip_norm,
        clients_per_round=clients_per_round,
        encoded_norm=inner_sum.encoded_norm,
        **noise,
    )
    return DPFTRLFactory(
        private_round,
        sum_factory=sum_factory,
        report_non_finite_clients=report_non_finite_clients,
    )


def build_adaptive_dp_ftrl_aggregator(
    strategy: strategy_lib.Strategy,
    *,
    noise_multiplier: float,
    clients_per_round: float,
    clipping: adaptive_clipping.AdaptiveClipping = adaptive_clipping.DEFAULT_CLIPPING,
    sum_factory: tff.aggregators.UnweightedAggregationFactory | None = None,
    count_sum_factory: tff.aggregators.UnweightedAggregationFactory | None = None,
    report_non_finite_clients: bool = False,
    **noise: Unpack[interface.NoiseOptions],
) -> DPFTRLFactory:
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
      sum_factory: Factory of the sum of clipped updates, see `DPFTRLFactory`.
      count_sum_factory: Factory of the sum of the clients' bits, see `DPFTRLFactory`.
      report_non_finite_clients: Whether to count updates dropped as not finite, outside the
        privacy guarantee, see `DPFTRLFactory`.
      **noise: `deterministic_seed` and `secure_noise`, see `interface.NoiseOptions`.

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
    private_round = adaptive_clipping.AdaptiveClipRound(
        strategy,
        noise_multiplier=noise_multiplier,
        clients_per_round=clients_per_round,
        clipping=clipping,
        unit_inflation=inner_sum_lib.InnerSum.of(sum_factory, 1.0).encoded_norm,
        **noise,
    )
    if private_round.expensive_clipping is not None:
        warning = adaptive_clipping.ExpensiveClippingWarning
        warnings.warn(private_round.expensive_clipping, warning, stacklevel=2)
    return DPFTRLFactory(
        private_round,
        sum_factory=sum_factory,
        count_sum_factory=count_sum_factory,
        report_non_finite_clients=report_non_finite_clients,
    )
