"""Rounds of clients that are counted, in memory."""

import numpy as np
import tensorflow as tf

from tff_dpftrl.execution import compiled_process
from tff_dpftrl.learning import bucket_counts
from tff_dpftrl.mechanisms import blt
from tff_dpftrl.private_round import aggregation, clipping, fixed_clip

CLIENTS, CLIP_NORM, STRATEGY = 10, 5.0, blt.Blt((0.9, 0.5), (0.3, 0.2))


def released(num_buckets, noise_multiplier, rounds):
    """Runs rounds of clients, each a list of batches' counts; returns sums and metrics."""
    private_round = fixed_clip.FixedClipRound(
        STRATEGY,
        clipping=clipping.FlatClipping(CLIP_NORM),
        noise_multiplier=noise_multiplier,
        clients_per_round=CLIENTS,
        deterministic_seed=7,
    )
    round_ = bucket_counts.build_round(
        bucket_counts.build_model(num_buckets), aggregation.Aggregation(private_round)
    )
    compiled = compiled_process.CompiledProcess(round_)
    state, metrics = compiled.initialize(), None
    for clients in rounds:
        state, metrics = compiled.next(state, [_batches(num_buckets, one) for one in clients])
    weights = compiled.get_model_weights(state).trainable[0]
    return np.asarray(weights, np.float64) * CLIENTS, metrics


def _batches(num_buckets, counts):
    rows = np.reshape(np.array(counts, np.float32), [-1, num_buckets])
    return tf.data.Dataset.from_tensor_slices(rows).map(
        lambda row: (row[None], tf.constant([2], tf.int64))
    )
