"""Tests of trials of losses."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl import validation
from tff_dpftrl.finetuning import losses_trial

_RNG = np.random.default_rng(0)
_WEIGHTS = [_RNG.normal(size=3).astype(np.float32), np.float32(_RNG.normal())]
_ROWS = (
    _RNG.normal(size=(5, 3)).astype(np.float32),
    _RNG.normal(size=5).astype(np.float32),
)


def _row_losses(weights, rows):
    """Half the squared error of a linear model."""
    inputs, labels = rows
    slopes, offset = weights
    return 0.5 * tf.square(tf.linalg.matvec(inputs, slopes) + offset - labels)


def test_batch_normalisation_is_refused_unless_it_is_frozen():
    inner = tf.keras.Sequential([tf.keras.layers.BatchNormalization(name="norm")])
    model = tf.keras.Sequential([tf.keras.layers.Dense(2, input_shape=[3]), inner])
    with pytest.raises(ValueError, match="model has the layer 'norm' of batch normalisation"):
        losses_trial.refuse_mixing_layers(model)
    inner.trainable = False
    losses_trial.refuse_mixing_layers(model)
    losses_trial.refuse_mixing_layers(tf.keras.Sequential([tf.keras.layers.LayerNormalization()]))


def test_losses_that_depend_on_other_rows_are_refused():
    losses_trial.refuse_mixed_rows(_row_losses, _WEIGHTS, _ROWS)
    with pytest.raises(ValueError, match="row_losses gives row 0 the loss .* beside others"):
        losses_trial.refuse_mixed_rows(
            lambda w, r: _row_losses(w, r) - tf.reduce_mean(r[1]), _WEIGHTS, _ROWS
        )
    with pytest.raises(ValueError, match="one loss a row"):
        losses_trial.refuse_mixed_rows(
            lambda w, r: tf.reduce_mean(_row_losses(w, r)), _WEIGHTS, _ROWS
        )
    with pytest.raises(ValueError, match="rows must be at least two, for the trial; got 1"):
        losses_trial.refuse_mixed_rows(_row_losses, _WEIGHTS, tuple(x[:1] for x in _ROWS))


def _mixed(weights, rows):
    return _row_losses(weights, (rows[0] - tf.reduce_mean(rows[0], 0), rows[1]))


def _with_state():
    average = tf.Variable(0.0, trainable=False)

    def row_losses(weights, rows):
        average.assign(0.9 * average + 0.1 * tf.reduce_mean(rows[1]))
        return _row_losses(weights, (rows[0], rows[1] - average))

    return row_losses


def _batch_normalisation():
    layer = tf.keras.layers.BatchNormalization()
    layer.build([None, 3])
    return lambda weights, rows: _row_losses(weights, (layer(rows[0], training=True), rows[1]))


def _of_a_model():
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=[3])])
    return lambda weights, rows: tf.square(model(rows[0])[:, 0] - rows[1])


def _dropout(weights, rows):
    return _row_losses(weights, (tf.nn.dropout(rows[0], 0.5), rows[1]))


def _with_a_seed():
    seed = tf.Variable([1, 2])

    def row_losses(weights, rows):
        drawn = tf.random.stateless_uniform([], seed.assign_add([0, 1]))
        return _row_losses(weights, rows) * drawn

    return row_losses


def _rarely_other(weights, rows):
    return _row_losses(weights, rows) * tf.where(tf.random.uniform([]) < 1e-9, 2.0, 1.0)


def _drawn_backwards(weights, rows):
    @tf.custom_gradient
    def same(x):
        return tf.identity(x), lambda gradient: gradient * tf.random.uniform([])

    return same(_row_losses(weights, rows))


def _drawn_in_python(weights, rows):
    scale = tf.numpy_function(lambda: np.float32(_RNG.normal()), [], tf.float32)
    return _row_losses(weights, rows) * scale


@pytest.mark.parametrize(
    ("row_losses", "message"),
    [
        (_mixed, "beside others"),
        (_with_state(), "row_losses changes variables .AssignVariableOp."),
        (_batch_normalisation(), "row_losses changes variables"),
        (_of_a_model(), "row_losses does not use its argument `weights`"),
        (
            lambda weights, rows: _row_losses([weights[0], 0.0], rows),
            r"row_losses does not use weights\[1\]",
        ),
        (_dropout, "draws random numbers .RandomUniform."),
        (_with_a_seed(), "draws random numbers .StatelessRandom.* changes .*: leave dropout"),
        (_rarely_other, "draws random numbers .RandomUniform."),
        (_drawn_backwards, "draws random numbers .RandomUniform."),
        (_drawn_in_python, "other losses each time"),
        (lambda weights, rows: _row_losses(weights, rows) / 0.0 * 0.0, "row_losses gives nan"),
    ],
)
def test_losses_that_make_a_statement_false_or_a_run_vain_are_refused(row_losses, message):
    with pytest.raises(validation.UsageError, match=message):
        losses_trial.refuse(row_losses, _WEIGHTS, _ROWS)


def test_mixing_shows_where_the_initial_weights_are_zero_and_rows_are_alike():
    zeros = [np.zeros_like(weight) for weight in _WEIGHTS]
    with pytest.raises(validation.UsageError, match="beside others"):
        losses_trial.refuse(_mixed, zeros, tuple(x[:1] for x in _ROWS))


def test_good_losses_pass_also_if_some_rows_are_not_finite():
    losses_trial.refuse(_row_losses, _WEIGHTS, _ROWS)
    frozen = tf.Variable(2.0)  # A part of the model that is not trained is only read.
    rows = (_ROWS[0], np.where(np.arange(5) == 2, np.nan, _ROWS[1]).astype(np.float32))
    losses_trial.refuse(lambda w, r: frozen * _row_losses(w, r), _WEIGHTS, rows)
