"""Weighted form of any DP-FTRL factory, for TFF's weighted learning algorithms.

A weighted mean divides by the sum of the clients' weights. That sum is data, and no guarantee
of this package covers a quotient by it. Here the denominator stays `clients_per_round`, and a
weight scales its client's update on the client. The weight leaves the client in no other form.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl import validation
from tff_dpftrl.accounting import guarantee as guarantee_lib
from tff_dpftrl.aggregators import adaptive_clipping, computations, dp_ftrl, secagg, updates
from tff_dpftrl.execution import tff_names
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.private_round import interface


class WeightedFactory(tff.aggregators.WeightedAggregationFactory):
    """TFF factory of DP-FTRL whose clients have weights.

    A client with update Δ and weight n sends clip(w Δ) with w = min(n / weight_cap, 1), and
    w = 0 if n is not positive or NaN. The noised sum is divided by `clients_per_round`. An
    update is scaled before it is clipped, so that one client adds no more than it could
    without weights: the guarantee is the same. Any inner factory can follow, with secure
    sums and adaptive clipping too.

    Attributes:
      aggregator: DP-FTRL factory that the weighted updates go through.
      weight_cap: Weight from which on a client counts in full.
    """

    def __init__(
        self,
        aggregator: dp_ftrl.DPFTRLFactory
        | adaptive_clipping.AdaptiveDPFTRLFactory
        | secagg.SecAggFactory,
        *,
        weight_cap: float = 1.0,
    ):
        """Initialises the factory.

        Args:
          aggregator: Factory from one of this package's `build_…dp_ftrl_aggregator`.
          weight_cap: Weight from which on a client counts in full; TFF's weight is a number
            of examples by default. With 1, all clients that have examples count the same.
            It must not be computed from the clients' data.

        Raises:
          ValueError: If an argument cannot be used.
        """
        if not isinstance(
            aggregator,
            dp_ftrl.DPFTRLFactory | adaptive_clipping.AdaptiveDPFTRLFactory | secagg.SecAggFactory,
        ):
            raise validation.UsageError(
                "aggregator must come from one of this package's build_…dp_ftrl_aggregator, got "
                f"{type(aggregator).__name__}. Around others a weight has no bound that the noise "
                "covers: take TFF's unweighted builder, or client_weighting=UNIFORM."
            )
        self.aggregator = aggregator
        self.weight_cap = validation.positive("weight_cap", weight_cap)

    @property
    def private_round(self) -> interface.PrivateRound:
        """The mechanism of the inner factory."""
        return self.aggregator.private_round

    def guarantee(self, schema: schema_lib.MinSep, delta: float) -> guarantee_lib.Guarantee:
        """Computes the guarantee of a run: that of the inner factory, weights zeroed out, too."""
        return self.aggregator.guarantee(schema, delta)

    def create(
        self, value_type: tff_names.Type, weight_type: tff_names.Type
    ) -> tff.templates.AggregationProcess:
        """Creates the process for updates and weights; its state is that of the inner factory.

        An update is any nesting of floating-point tensors, a weight a numeric scalar. Types of
        another kind, or that do not fit the inner factory, are refused.
        """
        if not (
            isinstance(weight_type, tff_names.TensorType)
            and weight_type.shape == ()
            and np.dtype(weight_type.dtype).kind in "iuf"
        ):
            raise validation.UsageError(f"weight_type must be a numeric scalar, got {weight_type}.")
        update = updates.UpdateType(value_type)
        inner = self.aggregator.create(value_type)

        @computations.tensorflow(value_type, weight_type)
        def weigh(value, weight):
            weight = tf.cast(weight, tf.float64) / self.weight_cap
            # NaN is not above 0 either.
            weight = tf.where(weight > 0, tf.minimum(weight, 1.0), 0.0)
            return update.pack_as_update(
                [tf.cast(weight, tensor.dtype) * tensor for tensor in update.flatten(value)]
            )

        @computations.federated(
            inner.state_type,
            tff_names.FederatedType(value_type, tff_names.CLIENTS),
            tff_names.FederatedType(weight_type, tff_names.CLIENTS),
        )
        def next_fn(state, value, weight):
            return inner.next(state, tff_names.federated_map(weigh, (value, weight)))

        return tff.templates.AggregationProcess(inner.initialize, next_fn)
