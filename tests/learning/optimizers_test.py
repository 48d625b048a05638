"""Optimizers take the steps of their definitions, with the states and the bits of TFF's."""

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl.learning import dp_ftrl_optimizer, iterate_averaging, optimizer_restarts, optimizers

_SPECS = (tf.TensorSpec([3], tf.float32), [tf.TensorSpec([2, 2], tf.float32)])


def _rate(index):
    return 0.3 / (1.0 + tf.cast(index, tf.float32))


# Builder here, and of TFF.
_PAIRS = {
    "sgd": (lambda: optimizers.sgdm(0.3), lambda of: of.build_sgdm(0.3)),
    "momentum": (lambda: optimizers.sgdm(0.3, 0.9), lambda of: of.build_sgdm(0.3, 0.9)),
    "no momentum": (lambda: optimizers.sgdm(0.3, 0.0), lambda of: of.build_sgdm(0.3, 0.0)),
    "adam": (lambda: optimizers.adam(0.03), lambda of: of.build_adam(0.03)),
    "adam's epsilon": (
        lambda: optimizers.adam(0.03, 1e-3),
        lambda of: of.build_adam(0.03, epsilon=1e-3),
    ),
    "scheduled": (
        lambda: optimizers.scheduled(optimizers.sgdm(0.3, 0.9), _rate),
        lambda of: of.schedule_learning_rate(of.build_sgdm(0.3, 0.9), _rate),
    ),
    "scheduled adam": (
        lambda: optimizers.scheduled(optimizers.adam(0.3), _rate),
        lambda of: of.schedule_learning_rate(of.build_adam(0.3), _rate),
    ),
}


def _normal(rng):
    return tf.nest.map_structure(
        lambda s: tf.constant(rng.normal(size=s.shape), s.dtype.name), _SPECS
    )


def _states_and_weights(optimizer, traced, num_steps=4):
    """All states and weights of a few steps; hyperparameters become tensors, as in TFF."""
    rng = np.random.default_rng(1)
    step = tf.function(optimizer.next) if traced else optimizer.next
    state = tf.nest.map_structure(tf.convert_to_tensor, optimizer.initialize(_SPECS))
    weights = _normal(rng)
    found = [(state, weights)]
    for _ in range(num_steps):
        state, weights = step(state, weights, _normal(rng))
        found.append((state, weights))
    return found


@pytest.fixture(name="tff")
def _tff():
    return pytest.importorskip("tensorflow_federated")


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("name", _PAIRS)
def test_states_and_steps_are_those_of_tff(name, traced, tff):
    ours, theirs = _PAIRS[name]
    found = _states_and_weights(ours(), traced)
    expected = _states_and_weights(theirs(tff.learning.optimizers), traced)
    tf.nest.assert_same_structure(found, expected)
    for (state, _), (other, _) in zip(found, expected, strict=True):
        assert list(state) == list(other)
    for one, other in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", _PAIRS)
def test_hyperparameters_are_those_of_tff(name, tff):
    ours, theirs = _PAIRS[name]
    ours, theirs = ours(), theirs(tff.learning.optimizers)
    found = ours.get_hparams(ours.initialize(_SPECS))
    expected = theirs.get_hparams(theirs.initialize(_SPECS))
    assert list(found) == list(expected)
    np.testing.assert_array_equal(
        np.float32(list(found.values())), np.float32(list(expected.values()))
    )


@pytest.mark.parametrize(
    "build",
    [
        lambda _: optimizers.sgdm(1.0, 0.9),
        lambda _: optimizers.scheduled(optimizers.adam(0.3), _rate),
        lambda _: dp_ftrl_optimizer.build_dp_ftrl_optimizer(1.0, 0.9),
        lambda _: iterate_averaging.average_iterates(
            optimizer_restarts.restart_at(optimizers.sgdm(1.0), [1]), 0.5
        ),
        lambda tff: iterate_averaging.average_iterates(
            optimizer_restarts.restart_at(tff.learning.optimizers.build_adam(1.0), [1]), 0.5
        ),
    ],
    ids=["momentum", "scheduled adam", "dp-ftrl", "wrapped", "TFF's, wrapped"],
)
def test_tff_takes_the_optimizers_as_its_own(build, tff):
    optimizer = build(tff)
    assert isinstance(optimizer, tff.learning.optimizers.Optimizer)
    weights = tff.learning.models.ModelWeights(((np.float32, [3]), [(np.float32, [2, 2])]), ())
    finalizer = tff.learning.templates.build_apply_optimizer_finalizer(
        optimizer, tff.types.to_type(weights)
    )
    state = tf.nest.map_structure(tf.convert_to_tensor, optimizer.initialize(_SPECS))
    assert tff.types.type_to_tf_tensor_specs(
        finalizer.initialize.type_signature.result.member
    ) == tf.nest.map_structure(lambda tensor: tf.TensorSpec(tensor.shape, tensor.dtype), state)


def test_the_steps_are_those_of_the_definitions():
    rng = np.random.default_rng(1)
    gradients = rng.normal(size=[5, 4]).astype(np.float32)
    velocity, first, second = np.zeros([3, 4])
    momentum, adam = np.ones([2, 4])
    for index, g in enumerate(gradients):
        velocity = 0.9 * velocity + g
        momentum = momentum - 0.3 * velocity
        first = 0.9 * first + 0.1 * g
        second = 0.999 * second + 0.001 * g**2
        root = np.sqrt(second) / np.sqrt(1 - 0.999 ** (index + 1))
        adam = adam - 0.03 * first / (1 - 0.9 ** (index + 1)) / root
    for optimizer, expected in (
        (optimizers.sgdm(0.3, 0.9), momentum),
        (optimizers.adam(0.03), adam),
    ):
        state, weights = optimizer.initialize(tf.TensorSpec([4])), tf.ones([4])
        for g in gradients:
            state, weights = optimizer.next(state, weights, tf.constant(g))
        np.testing.assert_allclose(weights, expected, rtol=1e-4)


def test_gradients_are_taken_as_a_tape_has_them():
    weights = (tf.ones([3, 2]), tf.ones([2]))
    with tf.GradientTape() as tape:
        tape.watch(weights)
        loss = tf.reduce_sum(tf.gather(weights[0], [1, 1]))
    gradients = tape.gradient(loss, weights)
    assert isinstance(gradients[0], tf.IndexedSlices) and gradients[1] is None
    optimizer = optimizers.sgdm(0.5, 0.9)
    state = optimizer.initialize(tf.nest.map_structure(tf.TensorSpec.from_tensor, weights))
    _, moved = optimizer.next(state, weights, gradients)
    np.testing.assert_array_equal(moved[0], [[1, 1], [0, 0], [1, 1]])
    np.testing.assert_array_equal(moved[1], [1, 1])


@pytest.mark.parametrize("wrong", [tf.ones([1]), tf.ones([3], tf.float64), [tf.ones([3])]])
def test_refuses_gradients_unlike_the_weights(wrong):
    optimizer = optimizers.sgdm(0.5)
    with pytest.raises((ValueError, TypeError)):
        optimizer.next(optimizer.initialize(tf.TensorSpec([3])), tf.ones([3]), wrong)


def test_half_precision_keeps_its_dtype():
    spec = tf.TensorSpec([3], tf.bfloat16)
    for optimizer in (optimizers.sgdm(0.5, 0.5), optimizers.adam(0.5)):
        state, weights = optimizer.initialize(spec), tf.ones([3], tf.bfloat16)
        new_state, weights = optimizer.next(state, weights, weights)
        assert weights.dtype == tf.bfloat16
        for before, after in zip(tf.nest.flatten(state), tf.nest.flatten(new_state), strict=True):
            assert before.dtype == after.dtype


def test_hyperparameters_that_were_set_keep_their_dtype():
    optimizer = optimizers.sgdm(0.5)
    state = optimizer.initialize(tf.TensorSpec([3]))
    for rate in (0.25, np.float64(0.25), tf.constant(0.25)):
        changed = optimizer.set_hparams(state, {"learning_rate": rate})
        assert changed["learning_rate"].dtype == tf.float32
        _, weights = optimizer.next(changed, tf.zeros([3]), tf.ones([3]))
        np.testing.assert_array_equal(weights, [-0.25] * 3)


@pytest.mark.parametrize("bad", [-1.0, float("nan")])
def test_refuses_unusable_arguments(bad):
    for build, word in (
        (optimizers.sgdm, "learning_rate"),
        (optimizers.adam, "learning_rate"),
        (lambda value: optimizers.sgdm(0.1, value), "momentum"),
        (lambda value: optimizers.adam(0.1, value), "epsilon"),
    ):
        with pytest.raises(ValueError, match=word):
            build(bad)
    with pytest.raises(ValueError, match="momentum"):
        optimizers.sgdm(0.1, 1.1)


def test_refuses_to_schedule_what_hides_its_learning_rate():
    averaged = iterate_averaging.average_iterates(optimizers.sgdm(0.3), 0.5)
    with pytest.raises(ValueError, match="learning_rate in its state"):
        optimizers.scheduled(averaged, _rate).initialize(_SPECS)
