"""Tests of tff_dpftrl.models.transformer, against Keras layers."""

import dataclasses
import functools
import math
import operator

import numpy as np
import pytest
import tensorflow as tf

from tests.models import keras_peer
from tff_dpftrl.models import transformer

_SMALL = transformer.Transformer(
    vocabulary_size=11,
    sequence_length=5,
    embedding_size=6,
    num_layers=2,
    num_heads=3,
    feed_forward_size=7,
)
_VARIANTS = [
    _SMALL,
    dataclasses.replace(_SMALL, num_layers=1, num_heads=1),
    # Six is no multiple of four: heads of width two.
    dataclasses.replace(_SMALL, num_layers=3, num_heads=4),
]
_WORDS = np.array([[9, 1, 2, 3, 8], [9, 4, 10, 0, 0], [9, 7, 0, 0, 0]], np.int32)


def _peer(model):
    """Keras' attention, dense layers, GELU and layer norms; embeddings are variables."""
    dense = functools.partial(tf.keras.layers.Dense, dtype=tf.float64)
    norm = functools.partial(tf.keras.layers.LayerNormalization, epsilon=1e-5, dtype=tf.float64)
    head_size = math.ceil(model.embedding_size / model.num_heads)
    blocks = [
        {
            "attention_norm": norm(),
            "attention": tf.keras.layers.MultiHeadAttention(
                model.num_heads, head_size, use_bias=False, dtype=tf.float64
            ),
            "feed_forward_norm": norm(),
            "feed_forward": dense(model.feed_forward_size, activation="gelu"),
            "feed_forward_output": dense(model.embedding_size),
        }
        for _ in range(model.num_layers)
    ]
    output_norm = norm()
    own = {
        name: tf.Variable(tf.zeros(model.weight_shapes[name], tf.float64), name=name)
        for name in ("embedding", "position_embedding", "output_bias")
    }

    def logits(words):
        states = tf.gather(own["embedding"], words) + own["position_embedding"]
        for block in blocks:
            inputs = block["attention_norm"](states)
            # Asked for its scores, Keras 3 computes the softmax in float64 too; it rounds a
            # number of Python to float32.
            block["attention"]._inverse_sqrt_key_dim = tf.constant(head_size**-0.5, tf.float64)
            states += block["attention"](
                inputs, inputs, use_causal_mask=True, return_attention_scores=True
            )[0]
            inputs = block["feed_forward_norm"](states)
            states += block["feed_forward_output"](block["feed_forward"](inputs))
        scores = tf.matmul(output_norm(states), own["embedding"], transpose_b=True)
        return scores + own["output_bias"]

    logits(_WORDS)  # Makes the layers' variables.
    variables = [(variable, operator.itemgetter(name)) for name, variable in own.items()]
    variables += _of_norm("output_norm", output_norm)
    for index, block in enumerate(blocks):
        prefix = f"layer_{index}_"
        for name in ("attention_norm", "feed_forward_norm"):
            variables += _of_norm(prefix + name, block[name])
        for name in ("feed_forward", "feed_forward_output"):
            variables += [
                (block[name].kernel, operator.itemgetter(f"{prefix}{name}_kernel")),
                (block[name].bias, operator.itemgetter(f"{prefix}{name}_bias")),
            ]
        # Kernels have an axis for the heads: queries', keys', values', output's.
        *inner, outer = block["attention"].trainable_variables
        for part, kernel in enumerate(inner):
            name = f"{prefix}query_key_value_kernel"
            variables.append((kernel, functools.partial(_third, name, part, kernel.shape)))
        name = f"{prefix}attention_output_kernel"
        variables.append((outer, functools.partial(_reshaped, name, outer.shape)))
    return keras_peer.Peer(logits, variables)


def _third(name, part, shape, named):
    return np.split(named[name], 3, axis=1)[part].reshape(shape)


def _reshaped(name, shape, named):
    return named[name].reshape(shape)


def _of_norm(name, layer):
    return [
        (layer.gamma, operator.itemgetter(f"{name}_scale")),
        (layer.beta, operator.itemgetter(f"{name}_bias")),
    ]


@pytest.mark.parametrize("model", _VARIANTS)
def test_scores_and_gradients_are_those_of_keras_layers(model):
    keras_peer.assert_same(model, _peer(model), _WORDS)


def test_initial_weights_have_the_stated_scales():
    model = transformer.Transformer(500, 40, 80, num_layers=2, num_heads=4, feed_forward_size=300)
    for name, weight in zip(model.weight_shapes, model.initial_weights(0), strict=True):
        if weight.ndim == 1:
            assert set(weight) == {1.0 if name.endswith("scale") else 0.0}, name
            continue
        stddev = 0.02 if name.endswith("embedding") else 1 / np.sqrt(weight.shape[0])
        if name.endswith("output_kernel"):
            stddev /= 2  # The square root of two additions in each of two blocks.
        # The standard error of a standard deviation of n Gaussians is 1/√(2n) of it.
        assert weight.std() == pytest.approx(stddev, rel=6 / np.sqrt(2 * weight.size)), name


def test_a_block_has_twelve_squares_of_its_width():
    # The usual count of a block with a feed-forward layer of four times the width.
    one, three = (
        transformer.Transformer(50, 10, 64, layers, 4, 256).num_parameters for layers in (1, 3)
    )
    biases_and_norms = (4 + 1) * 64 + 2 * 2 * 64
    assert three - one == 2 * (12 * 64**2 + biases_and_norms)


# Charles et al. 2024 fine-tune 350M weights at sequence length 128 and name no other size: these
# are GPT-2 medium's (Radford et al. 2019), with 32,000 words. No weight is drawn.
@pytest.mark.parametrize(
    "sizes, millions",
    [
        ((4_096, 32, 128, 2, 4, 512), 0.93),
        ((4_096, 64, 384, 8, 6, 1_536), 15.8),
        pytest.param((32_000, 128, 1_024, 24, 16, 4_096), 335.2, marks=pytest.mark.slow),
    ],
)
def test_sizes_up_to_that_of_the_paper_make_a_graph(sizes, millions):
    model = transformer.Transformer(*sizes)
    assert model.num_parameters / 1e6 == pytest.approx(millions, rel=1e-2)
    weights = [tf.TensorSpec(shape) for shape in model.weight_shapes.values()]
    words = tf.TensorSpec([None, model.sequence_length], tf.int32)
    graph = tf.function(model.logits, autograph=False).get_concrete_function(weights, words)
    assert graph.output_shapes.as_list() == [None, model.sequence_length, model.vocabulary_size]


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(_SMALL)])
def test_bad_sizes_are_refused(field):
    with pytest.raises(ValueError, match=f"{field} must be at least 1, got 0"):
        dataclasses.replace(_SMALL, **{field: 0})
