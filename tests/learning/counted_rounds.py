"""Rounds of clients that are counted, in memory."""

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl.aggregators import dp_ftrl
from tff_dpftrl.execution import compiled_process
from tff_dpftrl.learning import bucket_counts
from tff_dpftrl.mechanisms import blt

CLIENTS, CLIP_NORM, STRATEGY = 10, 5.0, blt.Blt((0.9, 0.5), (0.3, 0.2))


def released(num_buckets, noise_multiplier, rounds):
    """Runs rounds of clients, each a list of batches' counts; returns sums and metrics."""
    process = bucket_counts.build_process(
        bucket_counts.build_model(num_buckets),
        model_aggregator=dp_ftrl.build_dp_ftrl_aggregator(
            STRATEGY,
            clip_norm=CLIP_NORM,
            noise_multiplier=noise_multiplier,
            clients_per_round=CLIENTS,
            deterministic_seed=7,
        ),
        metrics_aggregator=tff.learning.metrics.sum_then_finalize,
    )
    compiled = compiled_process.compile_process(process)
    state, metrics = compiled.initialize(), None
    for clients in rounds:
        state, metrics = compiled.next(state, [_batches(num_buckets, one) for one in clients])
    weights = process.get_model_weights(state).trainable[0]
    return np.asarray(weights, np.float64) * CLIENTS, metrics


def _batches(num_buckets, counts):
    rows = np.reshape(np.array(counts, np.float32), [-1, num_buckets])
    return tf.data.Dataset.from_tensor_slices(rows).map(
        lambda row: (row[None], tf.constant([2], tf.int64))
    )
