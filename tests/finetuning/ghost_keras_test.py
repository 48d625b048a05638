"""Tests of clipping in one pass of Keras models, against one gradient after the other."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tests.finetuning import keras_models
from tff_dpftrl import validation
from tff_dpftrl.finetuning import (
    clipped_sums,
    custom_run,
    example_sampling,
    ghost,
    keras_losses,
    plan,
)
from tff_dpftrl.models import graph_uses
from tff_dpftrl.private_round import clipping

_SPLITS = np.array([0, 3, 4, 4, 6])  # One unit has no rows.
_LOSS = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
# The rest takes half a minute.
_IN_EVERY_RUN = ("einsum", "tied")
_SLOWLY = [
    pytest.param(name, marks=() if name in _IN_EVERY_RUN else pytest.mark.slow)
    for name in keras_models.ONE_PASS
]


def _losses_and_weights(model):
    rng = np.random.default_rng(0)
    weights = [
        tf.constant(variable.numpy() + rng.normal(0, 0.3, variable.shape).astype(np.float32))
        for variable in model.trainable_variables
    ]
    return keras_losses.row_losses(model, _LOSS), weights


def _made(make, name, num_rows=6):
    tf.keras.utils.set_random_seed(1)
    model = make()
    rows = keras_models.rows(model, name, num_rows)
    return model, rows, *_losses_and_weights(model)


def _specs(values):
    return tf.nest.map_structure(lambda x: tf.TensorSpec([None, *x.shape[1:]], x.dtype), values)


def _booked(losses, weights, rows, rows_per_unit=3, **options):
    of_weights, of_rows = [tf.TensorSpec(x.shape, x.dtype) for x in weights], _specs(rows)
    booked = ghost.booked_losses(losses, of_weights, of_rows, rows_per_unit, **options)
    others = [tf.TensorSpec([None], tf.int64), tf.TensorSpec([], tf.float64)]
    return tf.function(booked, [of_weights, of_rows, *others], autograph=False)


def _run(way, weights, rows, splits, clip_norm):
    total, units = way(
        weights, rows, tf.constant(splits, tf.int64), tf.constant(clip_norm, tf.float64)
    )
    return [x.numpy() for x in total], units.norms.numpy(), units.losses.numpy()


def _assert_same(found, expected, clip_norm):
    margin = clipping.CLIP_MARGIN / 2
    np.testing.assert_allclose(found[1], expected[1], rtol=margin, atol=margin * 1e-3)
    np.testing.assert_allclose(found[2], expected[2], rtol=1e-5, atol=1e-7)
    scale = np.minimum(expected[1], clip_norm)[np.isfinite(expected[1])].sum()
    for total, expected_total in zip(found[0], expected[0], strict=True):
        np.testing.assert_allclose(total, expected_total, rtol=0, atol=margin * scale)


@pytest.mark.parametrize("name", _SLOWLY)
def test_one_pass_is_one_gradient_after_the_other(name):
    _, rows, losses, weights = _made(keras_models.ONE_PASS[name], name)
    booked, loop = _booked(losses, weights, rows), clipped_sums.looped(losses)
    expected = _run(loop, weights, rows, _SPLITS, 1e6)
    assert np.count_nonzero(expected[1]) == 3
    # Scores do not depend on the bias of an attention's keys.
    assert sum(np.abs(x).max() < 1e-6 for x in expected[0]) <= (name == "transformer")
    _assert_same(_run(booked, weights, rows, _SPLITS, 1e6), expected, 1e6)
    clip_norm = np.median(expected[1][expected[1] > 0])
    expected = _run(loop, weights, rows, _SPLITS, clip_norm)
    _assert_same(_run(booked, weights, rows, _SPLITS, clip_norm), expected, clip_norm)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name == "part-of-a-kernel" else [])
        for name in keras_models.ONE_BY_ONE
    ],
)
def test_what_is_not_known_is_found_and_taken_one_by_one(name):
    _, rows, losses, weights = _made(keras_models.ONE_BY_ONE[name], name)
    with pytest.raises(graph_uses.UnknownUseError):
        _booked(losses, weights, rows)
    lines = []
    chosen = ghost.OfLosses(losses, 3, report=lines.append)
    found = _run(chosen, weights, rows, _SPLITS, 0.1)
    expected = _run(clipped_sums.looped(losses), weights, rows, _SPLITS, 0.1)
    for x, y in zip([*found[0], *found[1:]], [*expected[0], *expected[1:]], strict=True):
        np.testing.assert_array_equal(x, y)
    assert lines == [chosen.way] and "clipped one after the other: " in chosen.way


def test_rows_in_another_order_on_the_way_are_found_in_the_graph():
    _, rows, losses, weights = _made(keras_models.in_another_order, "in-another-order")
    with pytest.raises(graph_uses.UnknownUseError, match="ReverseV2 .* to keep rows apart"):
        _booked(losses, weights, rows)
    plain = [weight.numpy() for weight in weights]
    chosen = ghost.OfLosses(losses, 3)
    chosen.choose(plain, rows)
    assert "one after the other: ReverseV2 " in chosen.way
    unseen = ghost.OfLosses(losses, 3)
    unseen.check(plain, rows)  # The first one chooses.
    assert unseen.way == chosen.way
    same = ghost.OfLosses(losses, 3, is_wanted=False)
    same.check(plain, rows)
    assert same.way == "Gradients are clipped one after the other: as asked, or as the run began."


def _rolled(inputs, kernel):
    return tf.roll(tf.matmul(tf.roll(inputs, 1, axis=0), kernel), -1, axis=0)


def _shifted(inputs, kernel):
    outputs = tf.matmul(tf.concat([inputs[1:], inputs[:1]], 0), kernel)
    return tf.concat([outputs[-1:], outputs[:-1]], 0)


@pytest.mark.parametrize("most", [1, 2, 3, 8])
@pytest.mark.parametrize(("layer", "kind"), [(_rolled, "Roll"), (_shifted, "StridedSlice")])
def test_rows_that_come_back_to_their_places_are_not_taken_in_one_pass(layer, kind, most):
    """Norms in one pass would be those of mixtures; a trial of small units saw nothing."""

    def losses(weights, rows):
        return tf.reduce_sum(tf.square(layer(rows, weights[0])), axis=1)

    rng = np.random.default_rng(0)
    kernel, rows = rng.normal(size=[6, 4]), tf.constant(rng.normal(size=[2 * most, 6]), tf.float32)
    weights = [tf.constant(kernel, tf.float32)]
    chosen = ghost.OfLosses(losses, most)
    chosen.choose([kernel.astype(np.float32)], rows)
    assert f"one after the other: {kind} (" in chosen.way
    for splits in ([0, most, 2 * most], [0, 1, most, most]):
        given = weights, rows[: splits[-1]], splits, 0.1
        found, expected = (_run(way, *given)[1] for way in (chosen, clipped_sums.looped(losses)))
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def _changing(losses):
    """Returns losses with the batch backwards on the way, from the second graph on."""
    graphs = itertools.count()
    return lambda weights, rows: losses(
        weights, rows, -1 if not tf.executing_eagerly() and next(graphs) else 1
    )


def _backwards(weights, rows, step=-1):
    return tf.reduce_sum(tf.square(tf.tanh(rows[::step] @ weights[-1])[::step]), axis=1)


_HIDDEN = {
    "alike": (_backwards, np.ones([4, 4])),
    "one": (_backwards, np.arange(4.0)[None]),
    "overflow": (
        lambda weights, rows, step: tf.exp(1e4 + _backwards(weights, rows, step)),
        np.eye(4),
    ),
    "small": (
        lambda weights, rows, step: (
            tf.reduce_sum(tf.square(rows @ weights[0]), axis=1)
            + 1e-3 * _backwards(weights, rows, step)
        ),
        np.arange(16.0).reshape([4, 4]) % 5,
    ),
}
_TRIED = {("alike", 1), ("one", 8), ("overflow", 8), ("small", 1)}  # The rest takes ten seconds.


@pytest.mark.parametrize(
    ("name", "most"),
    [
        pytest.param(*pair, marks=[] if pair in _TRIED else [pytest.mark.slow])
        for pair in itertools.product(_HIDDEN, (1, 3, 8))
    ],
)
def test_a_trial_is_passed_by_no_luck(name, most):
    """The graph that was looked at has the rows in their order, and what is run has not."""
    losses, rows = _HIDDEN[name]
    chosen = ghost.OfLosses(_changing(losses), most)
    weights = [np.eye(4, dtype=np.float32)] * (2 if name == "small" else 1)
    chosen.choose(weights, rows.astype(np.float32))
    assert "a trial gives other norms or sums" in chosen.way


def test_what_was_chosen_before_is_not_chosen_again_but_still_checked():
    weights, rows = [np.eye(4, dtype=np.float32)], np.ones([4, 4], np.float32)

    def losses(weights, rows):
        return tf.reduce_sum(tf.square(rows @ weights[0]), axis=1)

    resumed = ghost.OfLosses(losses, 1, has_begun=True)
    resumed.check(weights, rows)  # Rows that are alike would not do to choose by.
    assert resumed.is_in_one_pass
    for losses, message in (
        (_backwards, "StridedSlice .* Begin a new run"),
        (_changing(_backwards), "may mix rows. Begin a new run"),
    ):
        resumed = ghost.OfLosses(losses, 1, has_begun=True)
        with pytest.raises(validation.UsageError, match=message):
            resumed.check(weights, np.arange(16.0, dtype=np.float32).reshape([4, 4]))


@pytest.mark.slow
def test_any_function_of_tensorflow_will_do():
    rng = np.random.default_rng(0)
    table, kernel, offset = (
        tf.constant(rng.normal(size=shape), tf.float32) for shape in ([7, 4], [4, 5], [3, 1])
    )
    ids = tf.constant(rng.integers(0, 7, [6, 3]), tf.int32)

    def losses(weights, rows):
        states = tf.gather(weights[0], rows) - weights[2]
        scores = tf.einsum("co,btc->bto", weights[1], states)
        # The transpose, a part and the whole.
        scores = tf.matmul(tf.nn.relu(scores), weights[1], transpose_b=True) * weights[2]
        return tf.reduce_sum(tf.square(scores + weights[2][::-1]), axis=[1, 2])

    for given in (losses, tf.function(losses, autograph=False)):
        weights = [table, kernel, offset]
        with pytest.raises(graph_uses.UnknownUseError, match="in several ways"):
            _booked(given, weights, ids)

    def others(weights, rows):
        states = tf.gather(weights[0], rows) - weights[2]
        scores = tf.einsum("co,...c->...o", weights[1], states)
        return tf.reduce_sum(tf.square(scores * weights[2] + weights[2][::-1]), axis=[1, 2])

    expected = _run(clipped_sums.looped(others), weights, ids, _SPLITS, 2.0)
    for given in (others, tf.function(others, autograph=False)):
        _assert_same(_run(_booked(given, weights, ids), weights, ids, _SPLITS, 2.0), expected, 2.0)


@tf.custom_gradient
def _straight_through(inputs, kernel):
    return tf.matmul(inputs, tf.round(kernel)), lambda up: (up, tf.matmul(inputs, up, True))


_PLANTED = {
    "loop": lambda x, w: tf.while_loop(lambda i, s: i < 2, lambda i, s: (i + 1, s @ w), (0, x))[1],
    "map": lambda x, w: tf.map_fn(lambda row: tf.linalg.matvec(w, row), x),
    "condition": lambda x, w: tf.cond(tf.reduce_sum(x) > 0, lambda: x @ w, lambda: x),
    "function": lambda x, w: tf.function(lambda y: y @ w, autograph=False)(x),
    "gradient": _straight_through,
    "penalty": lambda x, w: x * tf.reduce_sum(w * w),
    "norm": lambda x, w: x * tf.norm(w),
    "product": lambda x, w: x @ (w @ w),
    "transpose": lambda x, w: x @ tf.transpose(w),
    "columns": lambda x, w: tf.transpose(tf.gather(w, tf.cast(x[:, 0], tf.int32), axis=1)),
    "part": lambda x, w: x @ w[:, ::-1],
    "cast": lambda x, w: tf.cast(tf.cast(x, tf.float64) @ tf.cast(w, tf.float64), tf.float32),
    "stop": lambda x, w: x @ tf.stop_gradient(w),
    "left": lambda x, w: tf.transpose(w @ tf.transpose(x)),
    "division": lambda x, w: x / (3.0 + w[0]),
    "tile": lambda x, w: x + tf.tile(w[:1], [tf.shape(x)[0], 1]),
}


@pytest.mark.parametrize("name", _PLANTED)
def test_a_planted_use_beside_a_known_one_is_found(name):
    def losses(weights, rows):
        states = tf.matmul(rows, weights[0]) + _PLANTED[name](rows, weights[0])
        return tf.reduce_sum(tf.square(states), axis=1)

    with pytest.raises(graph_uses.UnknownUseError):
        _booked(losses, [tf.ones([4, 4])], tf.ones([6, 4]))


def test_positions_that_come_twice_are_not_taken_for_two():
    def losses(weights, rows):
        return tf.reduce_sum(tf.square(rows + tf.gather(weights[0], [1, 1, 0])), axis=1)

    with pytest.raises(graph_uses.UnknownUseError, match="read twice"):
        _booked(losses, [tf.ones([2])], tf.ones([6, 3]))


def test_gradients_that_cancel_each_other_are_taken_one_by_one():
    """Inputs are alike and targets contrary, so that rounding is as large as what is left."""
    rng = np.random.default_rng(0)
    x = np.tile(rng.normal(size=[1, 50]).astype(np.float32), [4, 1])
    weights = [tf.constant(rng.normal(size=[50, 60]), tf.float32)]
    outputs = (x[:1].astype(np.float64) @ weights[0].numpy()).astype(np.float32)
    away = rng.normal(size=[1, 60]).astype(np.float32)
    targets = np.concatenate([outputs + away, outputs - away, outputs + away, outputs])
    rows = tf.constant(x), tf.constant(targets)

    def losses(weights, rows):
        return tf.reduce_sum(tf.square(tf.matmul(rows[0], weights[0]) - rows[1]), axis=1)

    splits = np.array([0, 2, 4])
    expected = _run(clipped_sums.looped(losses), weights, rows, splits, 1e-3)
    found = _run(_booked(losses, weights, rows, 2), weights, rows, splits, 1e-3)
    assert expected[1][0] < 1e-3 * expected[1][1]
    _assert_same(found, expected, 1e-3)
    alone = _run(clipped_sums.looped(losses), weights, (x[:2], targets[:2]), [0, 2], 1e-3)
    assert found[1][0] == alone[1][0]  # It is that of the loop, bit by bit.


def test_units_that_are_not_finite_or_empty_spoil_no_others():
    _, rows, losses, weights = _made(keras_models.ONE_PASS["dense"], "dense")
    inputs = rows[0].numpy()
    inputs[0] = np.nan  # The first row stands for those that units do not have.
    booked = _booked(losses, weights, rows)
    found = _run(booked, weights, (inputs, rows[1]), _SPLITS, 0.1)
    expected = _run(
        clipped_sums.looped(losses), weights, (tf.constant(inputs), rows[1]), _SPLITS, 0.1
    )
    assert np.isinf(found[1][0]) and found[1][2] == 0.0
    _assert_same([*found[:2], expected[2]], expected, 0.1)
    none = _run(booked, weights, (inputs[:0], rows[1][:0]), [0, 0], 0.1)
    assert not any(x.any() for x in none[0]) and not none[1].any()
    with pytest.raises(tf.errors.InvalidArgumentError, match="more rows than rows_per_unit"):
        _run(booked, weights, rows, [0, 6], 0.1)


def test_no_unit_moves_the_sum_by_more_than_the_clip_norm():
    _, rows, losses, weights = _made(keras_models.ONE_PASS["dense-wide"], "dense-wide")
    booked = _booked(losses, weights, rows)
    total, norms, _ = _run(booked, weights, rows, _SPLITS, 0.1)
    assert norms[0] > 0.1
    fewer = tf.nest.map_structure(lambda x: x[3:], rows)
    without, *_ = _run(booked, weights, fewer, _SPLITS[1:] - 3, 0.1)
    moved = np.sqrt(sum(np.sum((x - y) ** 2) for x, y in zip(total, without, strict=True)))
    assert 0.1 * (1 - 2 * clipping.CLIP_MARGIN) < moved <= 0.1


@pytest.mark.slow
def test_clipped_gradients_may_be_normalised():
    _, rows, losses, weights = _made(keras_models.ONE_PASS["dense"], "dense")
    plain = _run(_booked(losses, weights, rows), weights, rows, _SPLITS, 0.1)
    normalised = _run(_booked(losses, weights, rows, normalised=True), weights, rows, _SPLITS, 0.1)
    for x, y in zip(plain[0], normalised[0], strict=True):
        np.testing.assert_allclose(x, 0.1 * y, rtol=1e-12)


def test_many_tokens_are_one_pass_only_where_gradients_are_formed():
    def losses(weights, rows):
        return tf.reduce_sum(tf.square(tf.matmul(rows, weights[0])), axis=[1, 2])

    for size, is_known in ((4, True), (900, False)):
        rows, weights = tf.ones([2, 200, size]), [tf.ones([size, size])]
        chosen = ghost.OfLosses(losses, 1)
        chosen._choose(weights, rows)
        assert (chosen.way == "Gradients are clipped in one pass.") == is_known


@pytest.mark.slow
def test_a_run_of_any_sampling_takes_a_model_of_keras(tmp_path):
    tf.keras.utils.set_random_seed(1)
    model = keras_models.ONE_PASS["dense"]()
    sizes = np.arange(40) % 4 + 1
    users = example_sampling.Users(tuple(map(str, range(40))), sizes)
    x = np.random.default_rng(0).normal(size=[40, 4, 4]).astype(np.float32)
    made = plan.make_plan(
        users, sampling="user", group_size=2, expected_units=10, num_steps=2, noise_multiplier=0.0
    )

    def read(wanted):
        inputs = np.stack([x[int(user), example] for user, example in wanted])
        return inputs, (inputs[:, 0] > 0).astype(np.int32)

    before = [variable.numpy() for variable in model.trainable_variables]
    results = custom_run.finetune(
        tmp_path,
        custom_run.Model.of_keras(model, _LOSS, trained_on="nothing"),
        custom_run.Examples(users, read),
        made,
        custom_run.Steps(clip_norm=1.0),
        progress=lambda line: None,
    )
    assert results.clipping == "Gradients are clipped in one pass."
    for old, new, kept in zip(before, results.weights, model.trainable_variables, strict=True):
        assert np.abs(old - new).max() > 1e-4
        np.testing.assert_array_equal(old, kept.numpy())


def test_a_model_of_keras_must_have_its_weights():
    with pytest.raises(validation.UsageError, match="has no weights yet"):
        custom_run.Model.of_keras(tf.keras.Sequential([tf.keras.layers.Dense(2)]), "mse")
