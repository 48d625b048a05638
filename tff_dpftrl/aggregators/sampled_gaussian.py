"""Aggregator of DP-FedAvg: a weighted estimate with fresh noise every round.

McMahan et al. 2018, Algorithm 1. The mechanism is `private_round.sampled_gaussian`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow_federated as tff

from tff_dpftrl.accounting import dp_fedavg
from tff_dpftrl.aggregators import adapter, inner_sum
from tff_dpftrl.execution import tff_names
from tff_dpftrl.private_round import clipping as clipping_lib
from tff_dpftrl.private_round import estimators
from tff_dpftrl.private_round import sampled_gaussian as sampled_gaussian_lib


class SampledGaussianState(NamedTuple):
    """State of the aggregator: that of the round, and the empty ones of both sums.

    It is secret: the seed reveals the noise.
    """

    round_index: Any
    seed: Any
    sum_state: Any
    weight_state: Any


class SampledGaussianFactory(tff.aggregators.WeightedAggregationFactory):
    """TFF factory of DP-FedAvg's noised average update of Poisson-sampled clients.

    A client with update Δ_k and weight n_k (a number of examples) contributes
    w_k clip(Δ_k) with w_k = min(n_k / weight_cap, 1). The estimator divides the
    sum, and Gaussian noise of standard deviation noise_multiplier · clip norm ·
    `estimator.unit_sensitivity` is added to the result, once.

    An update whose norm is not finite, or above 1.8e19, counts as absent: zero update,
    zero weight. An empty cohort gives noise only. All is computed in float64, for up to
    200,000 clients in a round (`private_round.summation`), from float32 draws; the
    estimate is cast to the dtypes of the updates at the end.

    Measurements: `clip_norm`, `noise_stddev` (of the noise in the estimate) and, with
    `report_non_finite_clients`, `non_finite_clients`.

    Attributes:
      private_round: The mechanism, with its clipping and noise multiplier. It runs without TFF
        too.
    """

    def __init__(
        self,
        *,
        clipping: clipping_lib.Clipping,
        noise_multiplier: float,
        estimator: estimators.Estimator,
        weight_cap: float = 1.0,
        deterministic_seed: int | None = None,
        secure_noise: bool = False,
        report_non_finite_clients: bool = False,
    ):
        """Initialises the factory.

        Args:
          clipping: Clipping of each update; the norm may change with the round.
          noise_multiplier: Standard deviation z of the noise per unit of
            sensitivity. 0 adds no noise and is not private.
          estimator: Rule for the divisor of the sum.
          weight_cap: Number ŵ of examples from which on a client has weight 1. With 1
            every client that has examples weighs the same.
          deterministic_seed: Seed of all noise, an integer in [0, 2^128), for tests only: a
            run with a known seed is not private. From the operating system if None.
          secure_noise: Whether a cryptographic generator, AES-256 in counter mode, draws the noise
            on a grid; else of Philox. TFF's own executor cannot draw it: compile the process.
          report_non_finite_clients: Whether the measurement "non_finite_clients" counts
            the updates dropped as not finite: an exact count, outside the privacy
            guarantee.

        Raises:
          ValueError: If an argument cannot be used.
        """
        self.private_round = sampled_gaussian_lib.SampledGaussianRound(
            clipping=clipping,
            noise_multiplier=noise_multiplier,
            estimator=estimator,
            weight_cap=weight_cap,
            deterministic_seed=deterministic_seed,
            secure_noise=secure_noise,
        )
        self._report_non_finite_clients = report_non_finite_clients

    def run_of(self, num_rounds: int) -> dp_fedavg.DpFedAvg:
        """Returns the accounting of a run with this aggregator, on secret Poisson samples.

        It compares with a run in which one client's contributions are zeroed out, the
        number of clients being the same. It holds if every client joins every round
        with the estimator's sampling probability, independently and in secret, and
        if `deterministic_seed` is None.

        Args:
          num_rounds: Number of rounds of the run.

        Returns:
          The run; `epsilon(delta)` is what it spends.

        Raises:
          ValueError: If `num_rounds` is not a positive integer.
        """
        return dp_fedavg.DpFedAvg(
            self.private_round.estimator.sampling_probability,
            self.private_round.noise_multiplier,
            num_rounds,
        )

    def create(
        self, value_type: tff_names.Type, weight_type: tff_names.Type
    ) -> tff.templates.AggregationProcess:
        """Creates the process.

        Args:
          value_type: Type of an update, a nesting of float tensors of fixed shape.
          weight_type: Type of the number of examples n_k, a numeric scalar.

        Returns:
          The aggregation process; its state is a `SampledGaussianState` and its
          result has the type of an update.

        Raises:
          ValueError: If `value_type` is empty or has other tensors.
        """
        return adapter.build_process(
            self.private_round,
            value_type,
            sums=[inner_sum.InnerSum.of(None, 1.0)] * 2,
            state_type=SampledGaussianState,
            weight_type=weight_type,
            report_non_finite_clients=self._report_non_finite_clients,
        )
