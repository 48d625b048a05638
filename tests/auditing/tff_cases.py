"""Aggregators of TFF, for `audit_aggregator`."""

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

import tff_dpftrl
from tests.auditing.planted_bugs import CLIENTS_PER_ROUND, CLIP_NORM, DELTA, SCHEMA, Case
from tff_dpftrl.accounting import guarantee
from tff_dpftrl.auditing import mechanism


def _tff_tree():
    return tff.aggregators.DifferentiallyPrivateFactory.tree_aggregation(
        noise_multiplier=2.0,
        clients_per_round=CLIENTS_PER_ROUND,
        l2_norm_clip=CLIP_NORM,
        record_specs=[tf.TensorSpec([_SIZE]), tf.TensorSpec([_SIZE])],
    )


def _tff_fixed():
    return tff.aggregators.DifferentiallyPrivateFactory.gaussian_fixed(
        noise_multiplier=2.0, clients_per_round=CLIENTS_PER_ROUND, clip=CLIP_NORM
    )


def _tff_adaptive():
    return tff.aggregators.DifferentiallyPrivateFactory.gaussian_adaptive(
        noise_multiplier=2.0,
        clients_per_round=CLIENTS_PER_ROUND,
        initial_l2_norm_clip=CLIP_NORM,
        clipped_count_stddev=2.0,
    )


def _tff_claim(strategy):
    def claim(factory):
        del factory
        return guarantee.dp_ftrl_guarantee(
            strategy, noise_multiplier=2.0, schema=SCHEMA, delta=DELTA
        )

    return claim


def _tff_numbers(strategy):
    return mechanism.Mechanism(strategy, 2.0, CLIP_NORM, CLIENTS_PER_ROUND)


_SIZE = 500
_TWO_TENSORS = {"value_type": tff.to_type([(np.float32, [_SIZE]), (np.float32, [_SIZE])])}
_TREE, _IDENTITY = tff_dpftrl.Tree(SCHEMA.num_rounds), tff_dpftrl.Identity()

OF_TFF = {
    "TFF's gaussian_fixed": Case(
        _tff_fixed, _tff_claim(_IDENTITY), _TWO_TENSORS | {"mechanism": _tff_numbers(_IDENTITY)}
    ),
    "TFF's gaussian_adaptive": Case(_tff_adaptive, _tff_claim(_IDENTITY), _TWO_TENSORS),
    "TFF's tree_aggregation": Case(
        _tff_tree, _tff_claim(_TREE), _TWO_TENSORS | {"mechanism": _tff_numbers(_TREE)}
    ),
}
"""TFF's own, by what builds them."""
