"""DP-FedAvg and DP-FedSGD as whole learning processes, against NumPy and TFF."""

import collections
import functools

import numpy as np
import pytest
import tensorflow as tf

pytest.importorskip("tensorflow_federated", reason="makes data or processes of TFF")

import tensorflow_federated as tff

from tff_dpftrl.aggregators import dp_ftrl, sampled_gaussian
from tff_dpftrl.learning import dp_fedavg, dp_ftrl_optimizer
from tff_dpftrl.mechanisms import tree
from tff_dpftrl.private_round import clipping, estimators

_SPEC = (tf.TensorSpec([None, 3], tf.float32), tf.TensorSpec([None, 1], tf.float32))
_BATCH = 2
_RATE = 0.1
_CLIP = clipping.FlatClipping(0.2)
_NO_CLIP = clipping.FlatClipping(1e6)
_CLIP_NORMS = (1e6, 0.3, 0.1)  # Round 0 does not clip; from round 2 on it is the last.
_ITERATOR = tff.learning.LoopImplementation.DATASET_ITERATOR
_REDUCE = tff.learning.LoopImplementation.DATASET_REDUCE
_ESTIMATOR = estimators.FixedDenominator(0.5, 6)


def _keras_model():
    return tf.keras.Sequential(
        [tf.keras.layers.Dense(1, input_shape=(3,), kernel_initializer="ones")]
    )


def _model_fn():
    return tff.learning.models.from_keras_model(
        _keras_model(),
        loss=tf.keras.losses.MeanSquaredError(),
        input_spec=_SPEC,
        metrics=[tf.keras.metrics.MeanSquaredError(name="mse")],
    )


def _mse():
    return collections.OrderedDict(mse=tf.keras.metrics.MeanSquaredError())


def _functional_model():
    return tff.learning.models.functional_model_from_keras(
        _keras_model(), tf.keras.losses.MeanSquaredError(), _SPEC, metrics_constructor=_mse
    )


def _client(seed, num_examples, scale=1.0):
    rng = np.random.default_rng(seed)
    x = scale * rng.normal(size=(num_examples, 3))
    return x.astype(np.float32), rng.normal(size=(num_examples, 1)).astype(np.float32)


_CLIENTS = [_client(seed, n) for seed, n in enumerate((1, 3, 4, 7))]


def _datasets(clients):
    return [tf.data.Dataset.from_tensor_slices(c).batch(_BATCH) for c in clients]


def _weights(process, state):
    model_weights = process.get_model_weights(state)
    return np.concatenate([np.asarray(w, np.float64).ravel() for w in model_weights.trainable])


_INITIAL = np.array([1.0, 1.0, 1.0, 0.0])


def _gradient(weights, x, y):
    residual = x @ weights[:3, None] + weights[3] - y
    return np.append(2 * np.mean(residual * x, axis=0), 2 * np.mean(residual))


def _batches(client):
    x, y = (np.asarray(a, np.float64) for a in client)
    return [(x[i : i + _BATCH], y[i : i + _BATCH]) for i in range(0, len(x), _BATCH)]


def _clipped(delta, clip_norm):
    return delta * min(1, clip_norm / max(np.linalg.norm(delta), 1e-300))


def _fed_avg_delta(weights, client, clip_norm, epochs, clip_every_step):
    """UserUpdateFedAvg of the paper, with its sign: final minus initial weights."""
    local = weights.copy()
    for _ in range(epochs):
        for batch in _batches(client):
            local -= _RATE * _gradient(local, *batch)
            if clip_every_step:
                local = weights + _clipped(local - weights, clip_norm)
    return _clipped(local - weights, clip_norm)


def _with_aggregator(arguments):
    """Moves what the aggregator is made of from `arguments` into one."""
    names = ("clipping", "noise_multiplier", "estimator", "weight_cap", "deterministic_seed")
    names += ("report_non_finite_clients",)
    defaults = {"clipping": _NO_CLIP, "noise_multiplier": 0.0, "estimator": _ESTIMATOR}
    parts = {name: arguments.pop(name) for name in names if name in arguments}
    return {"aggregator": sampled_gaussian.SampledGaussianFactory(**(defaults | parts))} | arguments


def _fed_avg(model_fn=_model_fn, **changes):
    optimizer = tff.learning.optimizers.build_sgdm(_RATE)
    arguments = {"client_optimizer": optimizer} | _with_aggregator(changes)
    return dp_fedavg.build_dp_fedavg(model_fn, **arguments)


def _fed_sgd(model_fn=_model_fn, **changes):
    arguments = {"learning_rate": _RATE} | _with_aggregator(changes)
    return dp_fedavg.build_dp_fedsgd(model_fn, **arguments)


@functools.cache
def _quiet(build, estimator):
    """A process without noise that clips, which tests share."""
    return build(estimator=estimator, clipping=_CLIP, report_non_finite_clients=True)


def _run(process, num_rounds, clients=_CLIENTS):
    state, path = process.initialize(), []
    for _ in range(num_rounds):
        state = process.next(state, _datasets(clients)).state
        path.append(_weights(process, state))
    return path


@pytest.mark.parametrize(
    "clip_every_step, loop_implementation",
    [(True, _ITERATOR), pytest.param(False, _REDUCE, marks=pytest.mark.slow)],
)
def test_fed_avg_equals_the_pseudo_code(clip_every_step, loop_implementation):
    epochs = 2
    process = _fed_avg(
        clipping=clipping.FlatClipping(_CLIP_NORMS),
        weight_cap=4.0,
        local_epochs=epochs,
        clip_every_step=clip_every_step,
        loop_implementation=loop_implementation,
    )
    expected = _INITIAL
    for t, update in enumerate(_run(process, 4)):
        clip_norm = _CLIP_NORMS[min(t, 2)]
        deltas = [_fed_avg_delta(expected, c, clip_norm, epochs, clip_every_step) for c in _CLIENTS]
        weights = [min(len(c[0]) / 4, 1) for c in _CLIENTS]
        expected = expected + np.dot(weights, deltas) / 3
        np.testing.assert_allclose(update, expected, rtol=1e-4, atol=1e-5)


def test_clipping_every_step_differs_from_clipping_at_the_end():
    # Power of the test above: with several steps the two rules part.
    ends = [
        _fed_avg_delta(_INITIAL, _CLIENTS[3], 0.3, 3, every_step) for every_step in (True, False)
    ]
    assert np.linalg.norm(ends[0] - ends[1]) > 0.01


@pytest.mark.slow
def test_fed_sgd_takes_one_batch_a_round_in_turn():
    process = _fed_sgd(
        clipping=clipping.FlatClipping(_CLIP_NORMS), weight_cap=4.0, loop_implementation=_REDUCE
    )
    expected = _INITIAL
    for t, update in enumerate(_run(process, 5)):
        clip_norm = _CLIP_NORMS[min(t, 2)]
        total = np.zeros(4)
        for client in _CLIENTS:
            batches = _batches(client)
            gradient = _gradient(expected, *batches[t % len(batches)])
            total += min(len(client[0]) / 4, 1) * _clipped(-_RATE * gradient, clip_norm)
        expected = expected + total / 3
        np.testing.assert_allclose(update, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_clipped_denominator_without_clipping_is_tff_weighted_fed_avg():
    theirs = tff.learning.algorithms.build_weighted_fed_avg(
        _model_fn, tff.learning.optimizers.build_sgdm(_RATE)
    )
    ours = _fed_avg(estimator=estimators.ClippedDenominator(0.01, 1), weight_cap=100.0)
    for mine, reference in zip(_run(ours, 2), _run(theirs, 2), strict=True):
        np.testing.assert_allclose(mine, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("build", [_fed_avg, _fed_sgd])
def test_functional_and_variable_models_agree(build):
    clip = clipping.PerLayerClipping(0.3)
    processes = [build(clipping=clip, model_fn=m) for m in (_model_fn, _functional_model())]
    outputs = [p.next(p.initialize(), _datasets(_CLIENTS)) for p in processes]
    weights = [_weights(p, output.state) for p, output in zip(processes, outputs, strict=True)]
    assert not np.allclose(weights[0], _INITIAL, atol=1e-3)
    np.testing.assert_allclose(weights[0], weights[1], rtol=1e-5, atol=1e-6)
    metrics = [output.metrics["client_work"]["train"]["mse"] for output in outputs]
    assert metrics[0] > 0
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-5)


@pytest.mark.parametrize("build", [_fed_avg, pytest.param(_fed_sgd, marks=pytest.mark.slow)])
def test_nobody_shows_up(build):
    quiet = _quiet(build, _ESTIMATOR)
    state = quiet.initialize()
    output = quiet.next(state, [])
    np.testing.assert_array_equal(_weights(quiet, output.state), _INITIAL)
    # A client without data has weight 0.
    output = quiet.next(state, _datasets([(_CLIENTS[0][0][:0], _CLIENTS[0][1][:0])]))
    np.testing.assert_array_equal(_weights(quiet, output.state), _INITIAL)


@pytest.mark.parametrize("build", [_fed_avg, pytest.param(_fed_sgd, marks=pytest.mark.slow)])
def test_the_noise_moves_the_model_when_nobody_shows_up(build):
    noisy = build(noise_multiplier=1.0, clipping=clipping.FlatClipping(1.0))
    output = noisy.next(noisy.initialize(), [])
    moved = _weights(noisy, output.state) - _INITIAL
    assert np.all(moved != 0)
    # Noise of standard deviation 1/3: 4 of them stay within six deviations.
    assert np.all(np.abs(moved) < 2)


@pytest.mark.parametrize("build", [_fed_avg, pytest.param(_fed_sgd, marks=pytest.mark.slow)])
def test_a_client_that_diverges_is_dropped(build):
    diverging = _client(9, 6, scale=1e25)
    process = _quiet(build, _ESTIMATOR)
    state = process.initialize()
    alone = process.next(state, _datasets(_CLIENTS))
    output = process.next(state, _datasets([*_CLIENTS, diverging]))
    np.testing.assert_array_equal(_weights(process, output.state), _weights(process, alone.state))
    assert output.metrics["aggregator"]["non_finite_clients"] == 1
    assert output.metrics["client_work"] == alone.metrics["client_work"]


@pytest.mark.parametrize(
    "build, estimator", [(_fed_avg, _ESTIMATOR), (_fed_sgd, estimators.ClippedDenominator(0.5, 6))]
)
def test_one_client_moves_the_model_by_the_sensitivity_at_most(build, estimator):
    adversary = _client(8, 9, scale=1e4)
    process = _quiet(build, estimator)
    state = process.initialize()
    without = process.next(state, _datasets(_CLIENTS)).state
    added = process.next(state, _datasets([*_CLIENTS, adversary])).state
    change = np.linalg.norm(_weights(process, added) - _weights(process, without))
    # 1e-6: rounding of the weights themselves, after the release.
    assert 0 < change <= 0.2 * estimator.unit_sensitivity + 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [
        tff.learning.optimizers.build_sgdm(0.5, momentum=0.9),
        tff.learning.optimizers.build_adam(0.05),
    ],
)
def test_server_optimizers_reduce_the_loss(optimizer):
    process = _fed_avg(server_optimizer=optimizer)

    def loss(weights):
        return np.mean(
            [np.mean((x @ weights[:3, None] + weights[3] - y) ** 2) for x, y in _CLIENTS]
        )

    assert loss(_run(process, 5)[-1]) < 0.9 * loss(_INITIAL)


@pytest.mark.slow  # `dp_ftrl_optimizer_test` has the optimizers alone.
def test_dp_ftrl_update_equals_sgd_on_the_residuals_of_tree_aggregation():
    paths = []
    for build in (tff.learning.optimizers.build_sgdm, dp_ftrl_optimizer.build_dp_ftrl_optimizer):
        aggregator = dp_ftrl.build_dp_ftrl_aggregator(
            tree.Tree(4),
            noise_multiplier=1.0,
            clip_norm=1.0,
            clients_per_round=4,
            deterministic_seed=6,
        )
        process = tff.learning.algorithms.build_unweighted_fed_avg(
            _model_fn,
            tff.learning.optimizers.build_sgdm(_RATE),
            server_optimizer_fn=build(0.5, momentum=0.9),
            model_aggregator=aggregator,
        )
        paths.append(_run(process, 4))
    np.testing.assert_allclose(paths[0], paths[1], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_state_round_trip():
    process = _fed_avg(
        noise_multiplier=1.0,
        clipping=clipping.FlatClipping([0.4, 0.3, 0.2]),
        server_optimizer=tff.learning.optimizers.build_sgdm(1.0, 0.9),
    )
    state = process.next(process.initialize(), _datasets(_CLIENTS)).state
    leaves = [np.array(leaf) for leaf in tf.nest.flatten(state)]
    restored = tf.nest.pack_sequence_as(state, leaves)
    for _ in range(2):
        output = process.next(state, _datasets(_CLIENTS))
        again = process.next(restored, _datasets(_CLIENTS))
        np.testing.assert_array_equal(
            _weights(process, again.state), _weights(process, output.state)
        )
        assert again.metrics == output.metrics
        state, restored = output.state, again.state


def test_refuses_unusable_arguments():
    for name, bad in (("local_epochs", 0), ("noise_multiplier", -1.0), ("clipping", 1.0)):
        with pytest.raises(ValueError, match=name):
            _fed_avg(**{name: bad})
    with pytest.raises(ValueError, match="learning_rate"):
        _fed_sgd(learning_rate=0.0)
    with pytest.raises(ValueError, match="aggregator must be a SampledGaussianFactory"):
        _fed_avg(aggregator=dp_ftrl.build_dp_ftrl_aggregator)
    with pytest.raises(ValueError, match="model_fn"):
        _fed_avg(model_fn="a model")
    with pytest.raises(ValueError, match="proportions has 3 entries"):
        _fed_avg(clipping=clipping.PerLayerClipping(1.0, (1, 1, 1)))
