"""Rounds of learning and evaluation against NumPy."""

import collections
import functools

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl.execution import compiled_process
from tff_dpftrl.learning import bucket_counts, local_updates, metric_sums, optimizers, rounds
from tff_dpftrl.learning import model as model_lib
from tff_dpftrl.mechanisms import identity
from tff_dpftrl.private_round import aggregation, clipping, fixed_clip

_RATE, _SERVER_RATE, _MOMENTUM, _BATCH = 0.1, 0.5, 0.9, 2
_CLIENTS_PER_ROUND, _CLIP_NORM = 5, 0.4
_CLIP_NORMS = (1e6, 0.3, 0.1)  # Of every batch: round 0 does not clip.
_INITIAL = np.array([1.0, 1.0, 1.0, 0.0])


def _client(seed, num_examples):
    rng = np.random.default_rng(seed)
    x, y = (rng.normal(size=(num_examples, size)).astype(np.float32) for size in (3, 1))
    return x, y


_CLIENTS = [_client(seed, n) for seed, n in enumerate((1, 0, 3, 4, 7))]


@functools.cache
def _model():
    """Builds the model y = x w + b, with its squared error."""

    def predict_on_batch(model_weights, x, training=True):
        (weights, bias), _ = model_weights
        return tf.matmul(x, weights) + bias

    def update_metrics(state, labels, batch_output, sample_weight=None):
        return collections.OrderedDict(
            error=state["error"] + tf.reduce_sum(tf.square(batch_output.predictions - labels)),
            examples=state["examples"] + tf.cast(batch_output.num_examples, tf.int64),
        )

    return model_lib.Model(
        initial_weights=((np.ones([3, 1], np.float32), np.zeros([1], np.float32)), ()),
        predict_on_batch=predict_on_batch,
        loss=lambda output, label, sample_weight=None: tf.reduce_mean(tf.square(output - label)),
        input_spec=(tf.TensorSpec([None, 3], tf.float32), tf.TensorSpec([None, 1], tf.float32)),
        initialize_metrics_state=lambda: collections.OrderedDict(
            error=tf.zeros([]), examples=tf.zeros([], tf.int64)
        ),
        update_metrics_state=update_metrics,
        finalize_metrics=lambda sums: collections.OrderedDict(
            mse=sums["error"] / tf.cast(sums["examples"], tf.float32), examples=sums["examples"]
        ),
    )


def _aggregation():
    private_round = fixed_clip.FixedClipRound(
        identity.Identity(),
        clipping=clipping.FlatClipping(_CLIP_NORM),
        noise_multiplier=0.0,
        clients_per_round=_CLIENTS_PER_ROUND,
    )
    return aggregation.Aggregation(private_round, report_non_finite_clients=True)


def _built(local_update, **options):
    """Builds a round that is ready to run."""
    made = rounds.build_training(
        _model(),
        local_update=local_update,
        aggregation=_aggregation(),
        server_optimizer=optimizers.sgdm(_SERVER_RATE, _MOMENTUM),
        **options,
    )
    return compiled_process.CompiledProcess(made)


def _datasets(clients):
    return [tf.data.Dataset.from_tensor_slices(one).batch(_BATCH) for one in clients]


def _weights(process, state):
    trainable = process.get_model_weights(state).trainable
    return np.concatenate([np.asarray(w, np.float64).ravel() for w in trainable])


def _batches(client):
    x, y = (np.asarray(a, np.float64) for a in client)
    return [(x[i : i + _BATCH], y[i : i + _BATCH]) for i in range(0, len(x), _BATCH)]


def _gradient(weights, x, y):
    residual = x @ weights[:3, None] + weights[3] - y
    return np.append(2 * np.mean(residual * x, axis=0), 2 * np.mean(residual))


def _clipped(delta, clip_norm):
    return delta * min(1, clip_norm / max(np.linalg.norm(delta), 1e-300))


def _fed_avg(weights, client, index):
    local = weights.copy()
    for batch in _batches(client) * 2:
        local -= _RATE * _gradient(local, *batch)
        local = weights + _clipped(local - weights, _CLIP_NORMS[index])
    return weights - local


def _fed_sgd(weights, client, index):
    batches = _batches(client)
    return _RATE * _gradient(weights, *batches[index % len(batches)]) if batches else 0 * weights


def _gradient_sum(weights, client, index):
    return sum((_gradient(weights, *batch) for batch in _batches(client)), 0 * weights)


@pytest.mark.parametrize(
    ("local_update", "expected"),
    [
        (
            local_updates.FedAvg(optimizers.sgdm(_RATE), clipping.FlatClipping(_CLIP_NORMS), 2),
            _fed_avg,
        ),
        (local_updates.FedSgd(_RATE), _fed_sgd),
        (local_updates.GradientSum(), _gradient_sum),
    ],
    ids=["FedAvg", "FedSgd", "GradientSum"],
)
def test_a_round_of_training_is_that_of_numpy(local_update, expected):
    process = _built(local_update)
    state, weights, velocity = process.initialize(), _INITIAL, np.zeros(4)
    for index in range(3):
        state, output = process.next(state, _datasets(_CLIENTS))
        updates = [_clipped(expected(weights, one, index), _CLIP_NORM) for one in _CLIENTS]
        velocity = _MOMENTUM * velocity + sum(updates) / _CLIENTS_PER_ROUND
        weights = weights - _SERVER_RATE * velocity
        # `clipping.CLIP_MARGIN` is 1e-5 of an update.
        np.testing.assert_allclose(_weights(process, state), weights, atol=5e-5)
        assert output["finalizer"]["update_non_finite"] == 0
        assert output["aggregator"]["non_finite_clients"] == 0
    assert np.abs(weights - _INITIAL).max() > 0.1


def test_training_metrics_are_those_of_all_batches():
    process = _built(local_updates.GradientSum())
    _, output = process.next(process.initialize(), _datasets(_CLIENTS))
    found = output["client_work"]["train"]
    assert list(found) == ["mse", "examples"] and found["examples"] == 15
    np.testing.assert_allclose(found["mse"], _mse(_INITIAL), rtol=1e-6)


def _mse(weights):
    x, y = (np.concatenate(parts).astype(np.float64) for parts in zip(*_CLIENTS, strict=True))
    return np.mean((x @ weights[:3, None] + weights[3] - y) ** 2)


def test_metrics_can_be_summed_securely_and_within_bounds():
    build = functools.partial(
        metric_sums.build, is_secure=True, bounds={"error": 1000.0, "examples": 10.0}
    )
    process = _built(local_updates.GradientSum(), metrics=build)
    _, output = process.next(process.initialize(), _datasets(_CLIENTS))
    found = output["client_work"]["train"]
    np.testing.assert_allclose(found["mse"], _mse(_INITIAL), rtol=1e-5)  # Multiples of 2⁻²⁰.
    assert found["examples"] == 15
    errors, examples = found[metric_sums.BOUNDED_SUMS]
    assert examples == pytest.approx(1.5, rel=1e-6)  # No client is beyond the norm of 1.
    assert errors == pytest.approx(15 * _mse(_INITIAL) / 1000, rel=1e-5)


def test_a_round_of_evaluation_is_that_of_numpy_and_keeps_the_weights():
    process = compiled_process.CompiledProcess(rounds.build_evaluation(_model()))
    weights = np.array([0.5, -1.0, 2.0, 0.25])
    new = rounds.ModelWeights((weights[:3, None].astype(np.float32), weights[3:].astype("f4")), ())
    state = process.set_model_weights(process.initialize(), new)
    after, output = process.next(state, _datasets(_CLIENTS))
    found = output["client_work"]["eval"]["current_round_metrics"]
    np.testing.assert_allclose(found["mse"], _mse(weights), rtol=1e-6)
    assert found["examples"] == 15
    np.testing.assert_array_equal(_weights(process, after), weights)


def test_a_client_that_is_not_finite_is_counted_and_has_no_part_in_anything_else():
    process = _built(local_updates.GradientSum())
    state = process.initialize()
    x, y = _client(9, 3)
    bad = np.where(np.arange(3)[:, None] == 1, np.float32(np.inf), x), y
    expected, wanted = process.next(state, _datasets(_CLIENTS))
    after, found = process.next(state, _datasets([*_CLIENTS, bad]))
    np.testing.assert_allclose(_weights(process, after), _weights(process, expected), rtol=1e-6)
    train, alone = (one["client_work"]["train"] for one in (found, wanted))
    assert train["examples"] == alone["examples"] and train["mse"] == alone["mse"]
    assert found["aggregator"]["non_finite_clients"] == 1


class _Overflowing(aggregation.PlainMean):
    """Mean that is infinite with more than one client."""

    def release(self, state, plain, secure, shapes):
        after, average, measured = super().release(state, plain, secure, shapes)
        infinite = tf.where(plain["clients"] > 1, np.float32(np.inf), np.float32(1.0))
        return after, [infinite * one for one in average], measured


def test_an_average_that_is_not_finite_changes_neither_weights_nor_optimizer():
    made = rounds.build_training(
        bucket_counts.build_model(2),
        local_update=local_updates.GradientSum(),
        aggregation=_Overflowing(),
        server_optimizer=optimizers.sgdm(1.0, _MOMENTUM),
    )
    process = compiled_process.CompiledProcess(made)
    batch = tf.ones([1, 2]), tf.ones([1], tf.int64)
    client = tf.data.Dataset.from_tensors(batch)
    state, _ = process.next(process.initialize(), [client])
    after, output = process.next(state, [client] * 2)
    assert output["finalizer"]["update_non_finite"] == 1
    assert output["client_work"]["train"]["num_examples"] == 2
    for field in ("global_model_weights", "finalizer"):
        one, other = getattr(after, field), getattr(state, field)
        tf.nest.map_structure(np.testing.assert_array_equal, one, other)
    assert state.global_model_weights.trainable[0].numpy().tolist() == [1.0, 1.0]
    assert state.finalizer["accumulator"][0].numpy().tolist() == [-1.0, -1.0]


@pytest.mark.parametrize("count", [0, 1, 4])
def test_a_loop_over_batches_carries_its_state(count):
    dataset = tf.data.Dataset.range(1, count + 1)

    @tf.function
    def total():
        return local_updates.iterate(
            lambda state, batch: (state[0] * 10 + batch, state[1] + 1),
            dataset,
            lambda: (tf.constant(0, tf.int64), tf.constant(5)),
        )

    digits, steps = total()
    assert (int(digits), int(steps)) == (int("01234"[: count + 1]), 5 + count)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: local_updates.FedAvg(optimizers.sgdm(1.0), local_epochs=0), "local_epochs"),
        (lambda: local_updates.FedSgd(0.0), "learning_rate must be a finite number, above 0"),
    ],
)
def test_options_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
