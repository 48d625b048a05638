"""A canary moves the model along its direction, and real data see the model that was wrapped."""

import collections

import numpy as np
import pytest
import tensorflow as tf

pytest.importorskip("tensorflow_federated", reason="audits processes of TFF")

import tensorflow_federated as tff

from tff_dpftrl.aggregators import dp_ftrl, sampled_gaussian
from tff_dpftrl.auditing import canaries as canaries_lib
from tff_dpftrl.auditing import directions as directions_lib
from tff_dpftrl.execution import compiled_process
from tff_dpftrl.learning import dp_fedavg, functional_model, local_model
from tff_dpftrl.mechanisms import identity
from tff_dpftrl.models import metrics, word_lstm
from tff_dpftrl.private_round import clipping, estimators

_CLIP = 0.5
_OPTIMIZERS = tff.learning.optimizers
_SPEC = (tf.TensorSpec([None, 5], tf.float32), tf.TensorSpec([None, 1], tf.float32))


def _keras_model():
    return tf.keras.Sequential(
        [
            tf.keras.layers.Dense(20, input_shape=(5,), activation="tanh"),
            tf.keras.layers.Dense(1),
        ]
    )


def _model_fn(input_spec=_SPEC):
    return tff.learning.models.from_keras_model(
        _keras_model(),
        loss=tf.keras.losses.MeanSquaredError(),
        input_spec=input_spec,
        metrics=[tf.keras.metrics.MeanSquaredError(name="mse")],
    )


def _mapping_model_fn():
    return _model_fn(collections.OrderedDict(zip("xy", _SPEC, strict=True)))


def _functional():
    def mse():
        return collections.OrderedDict(mse=tf.keras.metrics.MeanSquaredError())

    return tff.learning.models.functional_model_from_keras(
        _keras_model(), tf.keras.losses.MeanSquaredError(), _SPEC, metrics_constructor=mse
    )


def _language_model():
    model = word_lstm.WordLstm(24, sequence_length=4, embedding_size=3, state_size=5)
    return functional_model.build(model, metrics.SpecialIds(oov=21, bos=22, eos=23), seed=0)


def _fed_avg(model, client_optimizer=None):
    return tff.learning.algorithms.build_unweighted_fed_avg(
        local_model.as_tff(model),
        client_optimizer_fn=client_optimizer or _OPTIMIZERS.build_sgdm(0.1),
        server_optimizer_fn=_OPTIMIZERS.build_sgdm(1.0),
        model_aggregator=dp_ftrl.build_dp_ftrl_aggregator(
            identity.Identity(), noise_multiplier=0.0, clip_norm=_CLIP, clients_per_round=1
        ),
        loop_implementation=tff.learning.LoopImplementation.DATASET_ITERATOR,
    )


def _dp_fedavg(model, build=dp_fedavg.build_dp_fedavg, **options):
    aggregator = sampled_gaussian.SampledGaussianFactory(
        clipping=clipping.FlatClipping(_CLIP),
        noise_multiplier=0.0,
        estimator=estimators.FixedDenominator(1.0, 1),
    )
    return build(model, aggregator=aggregator, **options)


def _dp_fedavg_of_sgd(model):
    return _dp_fedavg(model, client_optimizer=_OPTIMIZERS.build_sgdm(0.1))


def _dp_fedsgd(model):
    return _dp_fedavg(model, dp_fedavg.build_dp_fedsgd, learning_rate=0.1)


def _fed_avg_of_adam(model):
    return _fed_avg(model, _OPTIMIZERS.build_adam(1e3))


def _batches(model_spec=_SPEC, seed=0):
    rng = np.random.default_rng(seed)
    rows = [
        rng.integers(0, 20, [9, *spec.shape[1:]]).astype(spec.dtype.as_numpy_dtype)
        for spec in tf.nest.flatten(model_spec)
    ]
    return tf.data.Dataset.from_tensor_slices(tf.nest.pack_sequence_as(model_spec, rows)).batch(4)


def _one_round(process, weights, datasets):
    """The weights after a round, and its metrics."""
    state = process.initialize()
    if weights is not None:
        state = process.set_model_weights(state, weights)
    output = process.next(state, datasets)
    before, after = (process.get_model_weights(one) for one in (state, output.state))
    return before, after, output.metrics


def _flat(model_weights):
    return [np.asarray(x) for x in tf.nest.flatten(model_weights.trainable)]


def test_directions_are_orthogonal_units():
    directions = directions_lib.Directions([[30, 7], [], [50]], number=10, seed=1)
    matrix = np.stack(
        [np.concatenate([x.numpy().ravel() for x in directions.of(i)]) for i in range(10)]
    )
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(10), atol=1e-6)
    values = [np.random.default_rng(0).normal(size=shape) for shape in directions.shapes]
    flat = np.concatenate([x.ravel() for x in values])
    np.testing.assert_allclose(directions.project(values), matrix @ flat, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(directions.of(13)[0], -directions.of(3)[0])


def test_directions_belong_to_their_seed():
    def first(seed):
        return directions_lib.Directions([[100]], number=2, seed=seed).of(0)[0].numpy()

    np.testing.assert_array_equal(first(5), first(5))
    assert np.any(first(5) != first(6))
    assert np.any(first(None) != first(None))


@pytest.mark.slow  # `training_test` plays canaries by default.
@pytest.mark.parametrize("build", [_fed_avg, _fed_avg_of_adam, _dp_fedavg_of_sgd, _dp_fedsgd])
def test_a_canary_moves_the_model_along_its_direction_by_the_clip_norm(build):
    canaries = canaries_lib.Canaries(_functional(), number=5, seed=2)
    process = compiled_process.compile_process(build(canaries.model))
    for sign in (1, -1):
        before, after, metrics_ = _one_round(process, None, [canaries.client(3, sign)])
        moved = [x - y for x, y in zip(_flat(after), _flat(before), strict=True)]
        for found, direction in zip(moved, canaries.directions.of(3), strict=True):
            # CLIP_MARGIN of the clip norm, and roundings of weights below 2 in float32.
            np.testing.assert_allclose(found, sign * _CLIP * direction, rtol=1.2e-5, atol=3e-7)
        assert metrics_["client_work"]["train"]["mse"] == 0.0


@pytest.mark.slow
def test_a_canary_of_a_model_with_variables_moves_it_too():
    canaries = canaries_lib.Canaries(_mapping_model_fn, number=5, seed=2)
    process = compiled_process.compile_process(_fed_avg(canaries.model))
    before, after, metrics_ = _one_round(process, None, [canaries.client(4)])
    moved = [x - y for x, y in zip(_flat(after), _flat(before), strict=True)]
    expected = np.zeros(5)
    expected[4] = _CLIP
    np.testing.assert_allclose(canaries.directions.project(moved), expected, rtol=1.2e-5, atol=1e-6)
    assert np.linalg.norm([np.linalg.norm(x) for x in moved]) <= _CLIP * (1 + 1e-6)
    assert metrics_["client_work"]["train"]["num_examples"] == 0


def _after_real_data(own, data):
    """Weights before a round, after it with canaries in the model, without; both metrics."""
    canaries = canaries_lib.Canaries(own, number=2, seed=2)
    wrapped = compiled_process.compile_process(_fed_avg(canaries.model))
    plain = compiled_process.compile_process(_fed_avg(own))
    weights, after, found = _one_round(wrapped, None, [canaries.real(data)])
    _, expected, expected_metrics = _one_round(plain, weights, [data])
    assert any(np.any(x != y) for x, y in zip(_flat(expected), _flat(weights), strict=True))
    found, wanted = (dict(x["client_work"]["train"]) for x in (found, expected_metrics))
    return _flat(after), _flat(expected), found, wanted


@pytest.mark.slow
@pytest.mark.parametrize("build", [_functional, _language_model])
def test_real_data_train_the_model_that_was_wrapped_to_the_bit(build):
    model = build()
    after, expected, found, wanted = _after_real_data(model, _batches(model.input_spec))
    for one, other in zip(after, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_equal(found, wanted)


@pytest.mark.slow
def test_real_data_train_a_model_with_variables_that_was_wrapped():
    data = _batches().map(lambda x, y: collections.OrderedDict(x=x, y=y))
    after, expected, found, wanted = _after_real_data(_mapping_model_fn, data)
    for one, other in zip(after, expected, strict=True):
        # TensorFlow may fuse the operations of a branch differently.
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["mse"], wanted["mse"], rtol=1e-5)
    assert found["num_examples"] == wanted["num_examples"] == 9


@pytest.mark.slow
def test_tff_runs_it_too():
    canaries = canaries_lib.Canaries(_functional(), number=5, seed=2)
    tff.backends.native.set_sync_local_cpp_execution_context()
    data = [canaries.real(_batches()), canaries.client(1)]
    before, after, _ = _one_round(_fed_avg(canaries.model), None, data)
    process = compiled_process.compile_process(_fed_avg(canaries.model))
    _, expected, _ = _one_round(process, before, data)
    for found, one in zip(_flat(after), _flat(expected), strict=True):
        np.testing.assert_allclose(found, one, atol=1e-3)  # Sums in another order.


def test_predictions_are_those_of_the_wrapped_model():
    model = _language_model()
    canaries = canaries_lib.Canaries(model, number=3, seed=2)
    (x, y) = next(iter(_batches(model.input_spec)))
    (marked, _) = next(iter(canaries.real(_batches(model.input_spec))))
    np.testing.assert_array_equal(marked["values"], x)
    found = canaries.model.predict_on_batch(model.initial_weights, marked, training=False)
    expected = model.predict_on_batch(model.initial_weights, x, training=False)
    tf.nest.map_structure(np.testing.assert_array_equal, found, expected)


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="take 7 at most"):
        canaries_lib.Canaries(_functional(), number=8)
    with pytest.raises(ValueError, match="FunctionalModel or a function"):
        canaries_lib.Canaries(None, number=2)
    with pytest.raises(ValueError, match="gradient_norm"):
        canaries_lib.Canaries(_functional(), number=2, gradient_norm=0.0)
    canaries = canaries_lib.Canaries(_functional(), number=2)
    with pytest.raises(ValueError, match="canary=2 does not exist"):
        canaries.client(2)
    with pytest.raises(ValueError, match="sign must be"):
        canaries.client(1, 0)
