"""Compiled processes compute what TFF computes, round after round."""

import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
import tree

from tff_dpftrl import aggregators
from tff_dpftrl.execution import client_part, compiled_process, contexts
from tff_dpftrl.learning import dp_fedavg
from tff_dpftrl.mechanisms import blt
from tff_dpftrl.mechanisms import tree as tree_mechanism
from tff_dpftrl.private_round import clipping, estimators

_SPEC = (tf.TensorSpec([None, 3], tf.float32), tf.TensorSpec([None, 1], tf.float32))
_BLT = blt.Blt((0.9, 0.5), (0.3, 0.2))
_SGD = tff.learning.optimizers.build_sgdm(0.1)
_ITERATOR = tff.learning.LoopImplementation.DATASET_ITERATOR  # The faster one.
_SEED = 7
_COMMON = {"noise_multiplier": 0.5, "clients_per_round": 3, "deterministic_seed": _SEED}
# Both compute in float32: a few rounds of a small linear model, each with rounding errors.
_CLOSE = 2e-6


def _keras_model():
    layers = [
        tf.keras.layers.Dense(2, input_shape=(3,), kernel_initializer="ones"),
        tf.keras.layers.BatchNormalization(),
        tf.keras.layers.Dense(1, kernel_initializer="ones"),
    ]
    return tf.keras.Sequential(layers)


def _model_fn():
    return tff.learning.models.from_keras_model(
        _keras_model(),
        loss=tf.keras.losses.MeanSquaredError(),
        input_spec=_SPEC,
        metrics=[tf.keras.metrics.MeanSquaredError(name="mse")],
    )


def _functional_model():
    def mse():
        return collections.OrderedDict(mse=tf.keras.metrics.MeanSquaredError())

    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(3,))])
    return tff.learning.models.functional_model_from_keras(
        model, tf.keras.losses.MeanSquaredError(), _SPEC, metrics_constructor=mse
    )


def _fed_avg(aggregator=None, model=_model_fn, loop=_ITERATOR):
    return tff.learning.algorithms.build_unweighted_fed_avg(
        model, client_optimizer_fn=_SGD, model_aggregator=aggregator, loop_implementation=loop
    )


def _gaussian_without_noise():
    return tff.aggregators.DifferentiallyPrivateFactory.gaussian_fixed(0.0, 3, 1.0)


def _tff_tree_without_noise():
    shapes = [[3, 2], [2], [2], [2], [2, 1], [1]]
    specs = [tf.TensorSpec(shape, tf.float32) for shape in shapes]
    return tff.aggregators.DifferentiallyPrivateFactory.tree_aggregation(
        noise_multiplier=0.0, clients_per_round=3, l2_norm_clip=1.0, record_specs=specs
    )


def _adaptive():
    return aggregators.build_adaptive_dp_ftrl_aggregator(
        _BLT,
        clipping=aggregators.AdaptiveClipping(
            initial_clip_norm=1.0, clipped_count_stddev=1.0, only_estimates=True
        ),
        **_COMMON,
    )


def _dp_fedavg():
    aggregator = aggregators.SampledGaussianFactory(
        clipping=clipping.FlatClipping(1.0),
        noise_multiplier=0.5,
        estimator=estimators.FixedDenominator(0.5, 6),
        deterministic_seed=_SEED,
    )
    return dp_fedavg.build_dp_fedavg(_model_fn, aggregator=aggregator, client_optimizer=_SGD)


def _fixed(strategy):
    return aggregators.build_dp_ftrl_aggregator(strategy, clip_norm=1.0, **_COMMON)


_PROCESSES = {
    "plain": _fed_avg,
    "reduce": lambda: _fed_avg(loop=tff.learning.LoopImplementation.DATASET_REDUCE),
    "functional": lambda: _fed_avg(model=_functional_model()),
    "weighted": lambda: tff.learning.algorithms.build_weighted_fed_avg(
        _model_fn, client_optimizer_fn=_SGD
    ),
    "fed_prox": lambda: tff.learning.algorithms.build_unweighted_fed_prox(
        _model_fn, proximal_strength=0.3, client_optimizer_fn=_SGD
    ),
    "fed_sgd": lambda: tff.learning.algorithms.build_fed_sgd(_model_fn),
    "mime_lite": lambda: tff.learning.algorithms.build_unweighted_mime_lite(
        _model_fn, base_optimizer=_SGD
    ),
    "tff_gaussian": lambda: _fed_avg(_gaussian_without_noise()),
    "tff_tree": lambda: _fed_avg(_tff_tree_without_noise()),
    "robust": lambda: _fed_avg(tff.learning.robust_aggregator(weighted=False)),
    "blt": lambda: _fed_avg(_fixed(_BLT)),
    "functional blt": lambda: _fed_avg(_fixed(_BLT), model=_functional_model()),
    "tree": lambda: _fed_avg(_fixed(tree_mechanism.Tree(8))),
    "adaptive": lambda: _fed_avg(_adaptive()),
    "dp_fedavg": _dp_fedavg,
}


def _dataset(seed, num_examples):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_examples, 3)).astype(np.float32)
    y = rng.normal(size=(num_examples, 1)).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(2)


def _cohort(round_index):
    return [_dataset(10 * round_index + client, client) for client in (1, 0, 5)]


def _assert_close(one, other, atol):
    tree.assert_same_structure(one, other, check_types=True)
    for (path, a), (_, b) in zip(
        tree.flatten_with_path(one), tree.flatten_with_path(other), strict=True
    ):
        a, b = np.asarray(a), np.asarray(b)
        if b.dtype.kind == "S":
            assert a == b, path
            continue
        assert a.dtype == b.dtype and a.shape == b.shape, path
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=atol, err_msg=str(path))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "functional blt" else pytest.mark.slow)
        for name in _PROCESSES
    ],
)
def test_rounds_are_those_of_tff(name):
    process = _PROCESSES[name]()
    compiled = compiled_process.compile_process(process)
    reference = state = process.initialize()
    tree.assert_same_structure(state, compiled.initialize(), check_types=True)
    for round_index in range(2):
        expected = process.next(reference, _cohort(round_index))
        output = compiled.next(state, _cohort(round_index))
        assert type(output) is type(expected)
        _assert_close(output.state, expected.state, _CLOSE)
        _assert_close(output.metrics, expected.metrics, _CLOSE)
        reference, state = expected.state, output.state
    _assert_close(compiled.get_model_weights(state), process.get_model_weights(reference), _CLOSE)


@pytest.mark.slow
def test_number_of_threads_changes_no_bit():
    process = _fed_avg(_fixed(_BLT))
    cohort = [_dataset(seed, 1 + seed % 7) for seed in range(23)]
    states = []
    for num_threads in (1, 2, 5):
        clients = client_part.ThreadedClients(num_threads)
        compiled = compiled_process.compile_process(process, clients=clients)
        state = process.initialize()
        for _ in range(2):
            state = compiled.next(state, cohort).state
        states.append(state)
        compiled.close()
    for other in states[1:]:
        tree.map_structure(np.testing.assert_array_equal, states[0], other)


@pytest.mark.slow
def test_secure_sums_are_those_of_tffs_test_context():
    process = _fed_avg(tff.learning.secure_aggregator(weighted=False))
    with contexts.secure_sum_simulation():
        reference = state = process.initialize()
        compiled = compiled_process.compile_process(process)
        for round_index in range(3):
            reference = process.next(reference, _cohort(round_index)).state
            state = compiled.next(state, _cohort(round_index)).state
            _assert_close(state, reference, _CLOSE)


def test_every_initialisation_draws_its_own_seed():
    aggregator = aggregators.build_dp_ftrl_aggregator(
        _BLT, clip_norm=1.0, noise_multiplier=0.5, clients_per_round=3
    )
    compiled = compiled_process.compile_process(_fed_avg(aggregator, _functional_model()))
    seeds = {tuple(compiled.initialize().aggregator.seed.numpy()) for _ in range(3)}
    assert len(seeds) == 3
