"""Counts over clients' data as a learning process, for analytics without a model to train.

The "model" is a vector w of one number for each bucket, from zero. A client's loss is −⟨w, h⟩ with
h the histogram of its data, so that its gradient is −h, whatever w is. The server adds the noised
sum of clipped histograms to w, divided by the number of clients per round. So w times that number
is the sum of all rounds, with the noise of prefix sums, and everything that is known of a learning
process holds: clipping, mechanisms, secure sums, accounting.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

from tff_dpftrl.learning import model as model_lib

if TYPE_CHECKING:
    import tensorflow_federated as tff

    from tff_dpftrl.execution import tff_names

NUM_EXAMPLES = "num_examples"
"""Name of the metric: number of examples that were counted."""


def build_model(num_buckets: int) -> model_lib.Model:
    """Builds the linear model of a number of buckets.

    Args:
      num_buckets: Number B of buckets.

    Returns:
      The model. Batches are (x, y): sums of examples' counts, float32, [n, B], and the number of
      examples in each sum, int64, [n].
    """

    @tf.function(autograph=False)
    def predict_on_batch(model_weights, x, training=True):
        del training
        (trainable,), _ = model_weights
        return tf.reduce_sum(x * trainable, axis=1)

    def loss(output, label, sample_weight=None):
        del label, sample_weight
        return -tf.reduce_sum(output)

    @tf.function(autograph=False)
    def initialize_metrics():
        return collections.OrderedDict([(NUM_EXAMPLES, tf.zeros([], tf.int64))])

    @tf.function(autograph=False)
    def update_metrics(state, labels, batch_output, sample_weight=None):
        del batch_output, sample_weight
        return collections.OrderedDict(
            [(NUM_EXAMPLES, state[NUM_EXAMPLES] + tf.reduce_sum(labels))]
        )

    return model_lib.Model(
        initial_weights=((np.zeros([num_buckets], np.float32),), ()),
        predict_on_batch=predict_on_batch,
        loss=loss,
        input_spec=(
            tf.TensorSpec([None, num_buckets], tf.float32),
            tf.TensorSpec([None], tf.int64),
        ),
        initialize_metrics_state=initialize_metrics,
        update_metrics_state=update_metrics,
    )


def build_process(
    model: model_lib.Model,
    *,
    model_aggregator: tff.aggregators.UnweightedAggregationFactory,
    metrics_aggregator: Callable[..., tff_names.Computation],
) -> tff.learning.templates.LearningProcess:
    """Builds the process of TFF that adds up clients' counts.

    Args:
      model: Model that `build_model` returned.
      model_aggregator: Factory of the private sum, divided by the number of clients per round.
      metrics_aggregator: Function that builds the aggregation of the metrics.

    Returns:
      A learning process with the methods of `build_unweighted_fed_avg`'s.
    """
    import tensorflow_federated as tff

    from tff_dpftrl.learning import client_work, local_model

    initial_weights = local_model.build_initial_weights(model)
    weights_type = initial_weights.type_signature.result
    work = client_work.build_gradient_sum_client_work(model, metrics_aggregator=metrics_aggregator)
    result_type = work.next.type_signature.result.result.member
    aggregator = tff.aggregators.as_weighted_aggregator(model_aggregator)
    return tff.learning.templates.compose_learning_process(
        initial_weights,
        tff.learning.templates.build_broadcast_process(weights_type),
        work,
        aggregator.create(weights_type.trainable, result_type.update_weight),
        tff.learning.templates.build_apply_optimizer_finalizer(
            tff.learning.optimizers.build_sgdm(learning_rate=1.0), weights_type
        ),
    )
