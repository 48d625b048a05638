"""Counts over clients' data as a round of learning, for analytics without a model to train.

The "model" is a vector w of one number for each bucket, from zero. A client's loss is −⟨w, h⟩ with
h the histogram of its data, so that its gradient is −h, whatever w is. The server adds the noised
sum of clipped histograms to w, divided by the number of clients per round. So w times that number
is the sum of all rounds, with the noise of prefix sums, and everything that is known of a round of
learning holds: clipping, mechanisms, secure sums, accounting.
"""

from __future__ import annotations

import collections

import numpy as np
import tensorflow as tf

from tff_dpftrl.execution import federated_round
from tff_dpftrl.learning import local_updates, metric_sums, optimizers, rounds
from tff_dpftrl.learning import model as model_lib
from tff_dpftrl.private_round import aggregation as aggregation_lib

NUM_EXAMPLES = "num_examples"
"""Name of the metric: number of examples that were counted."""


def build_model(num_buckets: int) -> model_lib.Model:
    """Builds the linear model of a number of buckets.

    Batches are (x, y): sums of examples' counts, float32, [n, B], and the number of examples in
    each sum, int64, [n].
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


def build_round(
    model: model_lib.Model,
    aggregation: aggregation_lib.Aggregation,
    *,
    metrics: metric_sums.Build = metric_sums.build,
) -> federated_round.FederatedRound:
    """Builds the round that adds up clients' counts.

    The aggregation divides by the number of clients per round.
    """
    return rounds.build_training(
        model,
        local_update=local_updates.GradientSum(),
        aggregation=aggregation,
        server_optimizer=optimizers.sgdm(1.0),
        metrics=metrics,
    )
