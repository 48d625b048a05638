"""Tests of the proof that rows are computed by themselves."""

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl.models import graph_uses

_STATE = tf.Variable(0.0, trainable=False)
_FROZEN = tf.Variable(np.arange(12.0).reshape([3, 4]), dtype=tf.float32, trainable=False)


def _tokens(function, shape=(4,), dtype=tf.float32):
    """Reads a model of one trained matrix after a function of its rows or of its scores."""

    def losses(weights, rows):
        return tf.reduce_sum(tf.square(function(rows) @ weights[0]), axis=1)

    rows = tf.TensorSpec([None, *shape], dtype)
    return graph_uses.tokens_of_rows(losses, [tf.TensorSpec([4, 3], tf.float32)], rows)


def _number(x):
    return tf.shape(x)[0]


@tf.custom_gradient
def _backwards_in_the_gradient(x):
    return tf.identity(x), lambda gradient: gradient[::-1]


def _carried(x):
    def step(i, states, total):
        total = 0.5 * total + x[i]
        return i + 1, states.write(i, total), total

    states = tf.TensorArray(tf.float32, _number(x))
    states = tf.while_loop(lambda i, *_: i < _number(x), step, (0, states, tf.zeros([4])))[1]
    return tf.ensure_shape(states.stack(), [None, 4])


def _written(x):
    _STATE.assign(tf.reduce_mean(x))
    return x - _STATE


def _as_layer_norm(x):
    """Batch normalisation over the channels, of which the rows are a part of the others."""
    ones, zeros = tf.ones([4]), tf.zeros([4])
    return tf.compat.v1.nn.fused_batch_norm(x[:, None, None], ones, zeros)[0][:, 0, 0]


_MIXING = {
    "roll": (lambda x: tf.roll(tf.roll(x, 1, 0), -1, 0), "Roll"),
    "shift": (lambda x: tf.concat([x[1:], x[:1]], 0), "StridedSlice"),
    "slice": (lambda x: tf.concat([tf.slice(x, [1, 0], [-1, 4]), x[:1]], 0), "Slice"),
    "joined": (lambda x: tf.reshape(tf.concat([x, x], 0), [-1, 8])[:, 2:6], "ConcatV2"),
    "permuted": (lambda x: tf.gather(x, tf.argsort(x[:, 0])), "TopKV2"),
    "ids-of-rows": (lambda x: tf.gather(x, tf.cast(x[:, 0], tf.int32)), "GatherV2"),
    "ids-of-all": (lambda x: x + tf.gather(x, [0]), "GatherV2"),
    "by-number": (lambda x: tf.gather(x, _number(x) - 1 - tf.range(_number(x))), "Sub"),
    "position": (lambda x: x * tf.cast(tf.range(_number(x)), tf.float32)[:, None], "Range"),
    "size": (lambda x: x / tf.cast(_number(x), tf.float32), "Cast"),
    "size-of-table": (lambda x: x + tf.gather([9.0] * 30000, _number(x)), "GatherV2"),
    "sum-of-ones": (lambda x: x + tf.reduce_sum(tf.ones([_number(x)])), "Sum"),
    "cumsum": (lambda x: tf.cumsum(x, axis=0), "Cumsum"),
    "reverse": (lambda x: tf.reverse(x, [0]), "ReverseV2"),
    "negative-step": (lambda x: x[::-1], "StridedSlice"),
    "sort": (lambda x: tf.sort(x, axis=0), "TopKV2"),
    "contraction": (lambda x: x @ tf.matmul(x, x, transpose_a=True), "MatMul"),
    "einsum": (lambda x: tf.einsum("bi,ci->bc", x, x) @ x, "Einsum"),
    "permutation": (lambda x: tf.one_hot(tf.argsort(x[:, 0]), _number(x)) @ x, "TopKV2"),
    "pairs": (lambda x: tf.reduce_max(x[:, None] - x[None], axis=1), "Sub"),
    "copies": (lambda x: tf.reduce_sum(tf.tile(x[None], [_number(x), 1, 1]), axis=1), "Tile"),
    "transpose": (lambda x: tf.reshape(tf.transpose(x), tf.shape(x)), "Reshape"),
    "transposed-softmax": (lambda x: tf.transpose(tf.nn.softmax(tf.transpose(x))), "Softmax"),
    "shifted-entries": (lambda x: tf.reshape(tf.roll(tf.reshape(x, [-1]), 1, 0), [-1, 4]), "Roll"),
    "padded": (lambda x: tf.pad(x, [[1, 0], [0, 0]])[:-1], "Pad"),
    "loop": (
        lambda x: tf.while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, x + x[::-1]), (0, x))[1],
        "StatelessWhile",
    ),
    "carried": (_carried, "TensorListReserve"),
    "map": (lambda x: tf.map_fn(lambda row: row + x[0], x), "TensorListReserve"),
    "condition": (lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: x, lambda: -x), "Sum"),
    "function": (lambda x: tf.function(lambda y: y[::-1], autograph=False)(x), "PartitionedCall"),
    "mean": (lambda x: x - tf.reduce_mean(x, axis=0), "Mean"),
    "mean-of-all": (lambda x: x - tf.reduce_mean(x), "Mean"),
    "stopped": (lambda x: x - tf.stop_gradient(tf.reduce_mean(x, 0, keepdims=True)), "Mean"),
    "norm": (lambda x: tf.math.l2_normalize(x), "Sum"),
    "batch-norm": (_as_layer_norm, "FusedBatchNormV3"),
    "segments": (
        lambda x: tf.math.unsorted_segment_sum(x, tf.cast(x[:, 0], tf.int32), _number(x)),
        "UnsortedSegmentSum",
    ),
    "partition": (
        lambda x: tf.ensure_shape(
            tf.concat(tf.dynamic_partition(x, tf.cast(x[:, 0] > 0, tf.int32), 2), 0), x.shape
        ),
        "DynamicPartition",
    ),
    "mask": (lambda x: tf.boolean_mask(x, x[:, 0] > 0), "Where"),
    "state": (_written, "ReadVariableOp"),
    "random": (lambda x: x + tf.random.normal([_number(x), 1]), "RandomStandardNormal"),
    "gradient": (_backwards_in_the_gradient, "StridedSlice"),
}


@pytest.mark.parametrize("name", _MIXING)
def test_an_operation_that_mixes_rows_is_refused_by_name(name):
    function, kind = _MIXING[name]
    with pytest.raises(graph_uses.UnknownUseError, match=rf"^{kind} \("):
        _tokens(function)


def test_rows_that_are_mixed_after_the_last_weight_are_found_as_well():
    def losses(weights, rows):
        scores = tf.reduce_sum(rows @ weights[0], axis=1)
        return scores - tf.stop_gradient(tf.reduce_max(scores))

    with pytest.raises(graph_uses.UnknownUseError, match=r"^Max \(Max\)"):
        graph_uses.tokens_of_rows(
            losses, [tf.TensorSpec([4, 3], tf.float32)], tf.TensorSpec([None, 4], tf.float32)
        )


def _steps_first(x):
    """From [n, 3, 4] to [n, 4], with the steps first on the way."""
    flat = tf.reshape(tf.transpose(x, [1, 0, 2]), [-1, 4])
    by_step = tf.reshape(tf.nn.silu(flat @ tf.eye(4)), [3, -1, 4]) + tf.zeros([_number(x), 4])
    steps = tf.unstack(by_step) + [tf.squeeze(step, [0]) for step in tf.split(by_step, 3)]
    return tf.transpose(tf.stack(steps), [1, 0, 2])[:, 4]


def _attention(x):
    x = tf.reshape(x, [_number(x), tf.shape(x)[1], 2, 2])
    scores = tf.einsum("...ihd,...jhd->...hij", x, tf.nn.relu(x)) / 2.0
    scores += tf.linalg.band_part(tf.ones([3, 3]), -1, 0)
    found = tf.matmul(tf.nn.softmax(scores), tf.transpose(x, [0, 2, 1, 3]))
    return tf.reshape(tf.transpose(found, [0, 2, 1, 3]), [-1, 3, 4])[:, -1]


def _pooled(x):
    x = tf.pad(x[..., tf.newaxis], [[0, 0], [1, 1], [0, 0], [0, 0]])
    x = tf.nn.max_pool2d(tf.nn.conv2d(x, tf.ones([2, 2, 1, 4]), 1, "SAME"), 2, 1, "VALID")
    return tf.reduce_mean(x, axis=[1, 2])


def _repeated(x):
    first = tf.tile(_FROZEN[:1, None], [_number(x), 1, 1])
    second = tf.broadcast_to(_FROZEN[1], [_number(x), 1, 4])
    return tf.cumsum(tf.concat([first, second, x[..., ::-1]], axis=1), axis=1)[:, 2]


_APART = {
    "attention": (_attention, (3, 4)),
    "pools": (_pooled, (3, 4)),
    "repeated": (_repeated, (3, 4)),
    "steps-first": (_steps_first, (3, 4)),
    "batch-dims": (
        lambda x: tf.gather(x, tf.argmax(x[:, :, 0], axis=1), axis=1, batch_dims=1),
        (3, 4),
    ),
    "tensordot": (lambda x: tf.tensordot(x, tf.eye(4), 1)[:, 1], (3, 4)),
    "frozen": (
        lambda x: tf.nn.embedding_lookup(_FROZEN, tf.cast(x[:, 0], tf.int32)) * _FROZEN[0],
        (4,),
    ),
    "frozen-norm": (
        lambda x: tf.nn.batch_normalization(x, _FROZEN[0], _FROZEN[1], None, None, 1e-3),
        (4,),
    ),
    "one-hot": (lambda x: tf.one_hot(tf.cast(x[:, 1], tf.int32), 4), (4,)),
    "sizes": (lambda x: x / tf.cast(tf.shape(x)[1], tf.float32), (4,)),
}
"""Functions that keep rows apart, and the shape of a row."""


@pytest.mark.parametrize("name", _APART)
def test_what_keeps_rows_apart_is_known(name):
    function, shape = _APART[name]
    assert _tokens(function, shape) == [("MatMul", 1)]
    rows = np.random.default_rng(0).integers(0, 3, [5, *shape]).astype(np.float32)
    together = function(tf.constant(rows))
    alone = tf.concat([function(tf.constant(rows[i : i + 1])) for i in range(5)], axis=0)
    np.testing.assert_allclose(together, alone, rtol=1e-5, atol=1e-6)
