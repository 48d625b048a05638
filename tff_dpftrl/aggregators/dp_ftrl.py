"""DP-FTRL with a fixed clip norm, as a TFF aggregation factory.

In a round every client's update is clipped to `clip_norm` and summed; the server
adds `noise_multiplier · clip_norm · (C⁻¹ z)_t` and divides by `clients_per_round`,
however many clients reported (McMahan, Xu & Zhang 2024, algorithm 1). Any server
optimizer may follow. The mechanism is `private_round.fixed_clip`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow_federated as tff

from tff_dpftrl import validation
from tff_dpftrl.aggregators import adapter
from tff_dpftrl.aggregators import inner_sum as inner_sum_lib
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.private_round import clipping as clipping_lib
from tff_dpftrl.private_round import fixed_clip


class DPFTRLState(NamedTuple):
    """State of the aggregator: that of the round (`FixedClipState`), and that of the inner sum.

    Complete for resuming after a crash. Secret: it lets a reader subtract the noise.
    """

    round_index: Any
    seed: Any
    buffer: Any
    sum_state: Any


class DPFTRLFactory(adapter.DpFtrlFactory):
    """TFF factory of DP-FTRL with a fixed clip norm; `build_dp_ftrl_aggregator` makes it."""

    _state_type = DPFTRLState

    def __init__(
        self,
        private_round: fixed_clip.FixedClipRound,
        *,
        inner_sum: inner_sum_lib.InnerSum | None = None,
        report_non_finite_clients: bool = False,
    ):
        """Initialises the factory.

        Args:
          private_round: The mechanism.
          inner_sum: Sum of the clipped updates; TFF's plain sum if None.
          report_non_finite_clients: Whether the measurement "non_finite_clients" counts
            updates dropped as not finite. No noise covers that exact count.

        Raises:
          ValueError: If a client can add more to the sum than the noise is scaled to.
        """
        if inner_sum is None:
            inner_sum = inner_sum_lib.InnerSum.of(None, private_round.clipping.constant_norm)
        if not inner_sum.contribution_norm <= private_round.encoded_norm:
            raise validation.UsageError(
                f"private_round.encoded_norm must be at least {inner_sum.contribution_norm}, what "
                f"one client can add to inner_sum, got {private_round.encoded_norm}."
            )
        self.private_round = private_round
        self.inner_sum = inner_sum
        self._report_non_finite_clients = report_non_finite_clients


def build_dp_ftrl_aggregator(
    strategy: strategy_lib.Strategy,
    *,
    noise_multiplier: float,
    clients_per_round: float,
    clip_norm: float | None = None,
    clipping: clipping_lib.Clipping | None = None,
    deterministic_seed: int | None = None,
    secure_noise: bool = False,
    sum_factory: tff.aggregators.UnweightedAggregationFactory | None = None,
    encoded_norm: float | None = None,
    report_non_finite_clients: bool = False,
    noise_parties: int = 0,
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
      clip_norm: L2 norm that one client's update is clipped to.
      clipping: Rule of clipping in place of `clip_norm`. A
        `clipping.PerLayerClipping` bounds every tensor separately (McMahan et al.
        2018). The norm has to be the same in all rounds.
      deterministic_seed: Seed of all noise, an integer in [0, 2^128), for tests only.
        A reader who knows it can remove the noise, so the run is not private.
        If None, `initialize` takes 128 bits (256 for secure noise) from the operating
        system each time it runs.
      secure_noise: Whether a cryptographic generator, AES-256 in counter mode, draws the noise on
        a grid (`numpy_noise.secure_draws`); else of Philox. TFF's own executor cannot draw it:
        compile the process (`tff_dpftrl.compile_process`).
      sum_factory: Factory of the sum of clipped updates, nested like the updates; TFF's
        plain `SumFactory`, in float64, if None. Another one receives float32 unless it
        has an attribute `sum_dtype`. Its measurements become the aggregator's.
      encoded_norm: Largest L2 norm of one client's contribution to the sum, by which the
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
      ValueError: If an argument is out of range.
    """
    if clip_norm is not None and clipping is None:
        clipping = clipping_lib.FlatClipping(clip_norm)
    elif clip_norm is not None or clipping is None:
        raise validation.UsageError(
            f"Give either clip_norm or clipping, got clip_norm={clip_norm!r} and "
            f"clipping={clipping!r}."
        )
    inner_sum = inner_sum_lib.InnerSum.of(
        sum_factory, clipping.constant_norm, stated_norm=encoded_norm
    )
    private_round = fixed_clip.FixedClipRound(
        strategy,
        noise_multiplier=noise_multiplier,
        clipping=clipping,
        clients_per_round=clients_per_round,
        encoded_norm=inner_sum.contribution_norm,
        deterministic_seed=deterministic_seed,
        noise_parties=noise_parties,
        secure_noise=secure_noise,
    )
    return DPFTRLFactory(
        private_round,
        inner_sum=inner_sum,
        report_non_finite_clients=report_non_finite_clients,
    )
