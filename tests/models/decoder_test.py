"""Tests of tff_dpftrl.models.decoder, .gpt2 and .llama at the sizes of checkpoints.

What they compute is compared with transformers in `hugging_face_test`.
"""

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl.models import gpt2, language_model, llama

# One id more than the checkpoints have tokens.
_GPT2 = {"vocabulary_size": 50_258, "sequence_length": 64, "num_positions": 1_024}
_SMOL = {"vocabulary_size": 49_153, "sequence_length": 64}


# Numbers of weights as the hub shows them for these checkpoints.
@pytest.mark.parametrize(
    "model, expected",
    [
        (
            gpt2.Gpt2(
                **_GPT2, embedding_size=768, num_layers=12, num_heads=12, feed_forward_size=3_072
            ),
            124_439_808,
        ),
        (
            gpt2.Gpt2(
                **_GPT2, embedding_size=768, num_layers=6, num_heads=12, feed_forward_size=3_072
            ),
            81_912_576,
        ),
        pytest.param(
            gpt2.Gpt2(
                **_GPT2, embedding_size=1_024, num_layers=24, num_heads=16, feed_forward_size=4_096
            ),
            354_823_168,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            llama.Llama(
                **_SMOL,
                embedding_size=576,
                num_layers=30,
                num_heads=9,
                num_key_value_heads=3,
                feed_forward_size=1_536,
            ),
            134_515_008,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            llama.Llama(
                **_SMOL,
                embedding_size=960,
                num_layers=32,
                num_heads=15,
                num_key_value_heads=5,
                feed_forward_size=2_560,
            ),
            361_821_120,
            marks=pytest.mark.slow,
        ),
        (
            llama.Llama(
                32_001,
                64,
                embedding_size=2_048,
                num_layers=22,
                num_heads=32,
                num_key_value_heads=4,
                feed_forward_size=5_632,
                tie_embeddings=False,
            ),
            1_100_048_384,
        ),
    ],
    ids=["gpt2", "distilgpt2", "gpt2-medium", "SmolLM2-135M", "SmolLM2-360M", "TinyLlama"],
)
def test_checkpoints_have_as_many_weights_and_make_a_graph(model, expected):
    assert model.num_parameters == expected
    weights = [tf.TensorSpec(shape) for shape in model.weight_shapes.values()]
    words = tf.TensorSpec([None, model.sequence_length], tf.int32)
    graph = tf.function(model.logits, autograph=False).get_concrete_function(weights, words)
    assert graph.output_shapes.as_list() == [None, model.sequence_length, model.vocabulary_size]


@pytest.mark.parametrize(
    "model", [gpt2.Gpt2(9, 4, 6, 1, 3, 7), llama.Llama(9, 4, 6, 1, 3, 1, 7)], ids=["gpt2", "llama"]
)
def test_padding_has_neither_probability_nor_gradient(model):
    weights = [tf.constant(weight) for weight in model.initial_weights(0)]
    words = np.array([[8, 1, 2, 0], [3, 0, 0, 0]], np.int32)
    with tf.GradientTape() as tape:
        tape.watch(weights)
        scores, positions = model.compact_logits(weights, words)
        loss = tf.reduce_sum(tf.nn.softmax(scores)[:, language_model.PAD])
    assert positions.numpy().tolist() == [0, 1, 2, 4]
    assert loss == 0.0
    assert not any(tf.convert_to_tensor(x).numpy().any() for x in tape.gradient(loss, weights))


def test_the_token_that_stands_in_for_padding_gets_nothing_from_it():
    model = llama.Llama(9, 5, 6, 2, 3, 1, 7, tie_embeddings=False)
    weights = [tf.constant(weight) for weight in model.initial_weights(0)]
    words = np.array([[8, 3, 2, 0, 0], [5, 0, 0, 0, 0]], np.int32)  # Without id 1, token 0.
    with tf.GradientTape() as tape:
        tape.watch(weights)
        loss = tf.reduce_sum(tf.sin(model.compact_logits(weights, words)[0][:, 1:]))
    gradient = tf.convert_to_tensor(tape.gradient(loss, weights)[0]).numpy()
    assert gradient.any(axis=1).tolist() == [i + 1 in (2, 3, 5, 8) for i in range(8)]


@pytest.mark.parametrize(
    "make, sizes, message",
    [
        (gpt2.Gpt2, {"embedding_size": 7, "num_heads": 2}, "embedding_size must be a multiple of"),
        (gpt2.Gpt2, {"num_positions": 3}, "sequence_length must be at most 3, .* got 20"),
        (gpt2.Gpt2, {"num_layers": 0}, "num_layers must be at least 1, got 0"),
        (gpt2.Gpt2, {"norm_epsilon": 0.0}, "norm_epsilon must be"),
        (llama.Llama, {"num_key_value_heads": 3}, "num_heads must be a multiple of num_key_value_"),
        (llama.Llama, {"embedding_size": 12}, "the width of a head must be even, .* got 3"),
        (llama.Llama, {"embedding_size": 13}, "embedding_size must be a multiple of num_heads=4"),
        (llama.Llama, {"head_size": 3}, "the width of a head must be even, .* got 3"),
        (llama.Llama, {"vocabulary_size": 1}, "vocabulary_size must be at least 2, got 1"),
    ],
)
def test_bad_sizes_are_refused(make, sizes, message):
    with pytest.raises(ValueError, match=message):
        make(**{"vocabulary_size": 9, **sizes})
