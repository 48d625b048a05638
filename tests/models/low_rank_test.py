"""Tests of tff_dpftrl.models.low_rank, against the model with the products in its kernels."""

import re

import numpy as np
import pytest
import tensorflow as tf

from tests.models import small_models
from tff_dpftrl.models import low_rank, table, transformer

_MODEL = transformer.Transformer(
    vocabulary_size=11,
    sequence_length=5,
    embedding_size=6,
    num_layers=2,
    num_heads=3,
    feed_forward_size=7,
)
_WORDS = np.array([[9, 1, 2, 3, 8], [9, 4, 10, 0, 0], [9, 7, 0, 0, 0]], np.int32)
_RANK = 2


def _pretrained():
    rng = np.random.default_rng(0)
    return [
        (weight + rng.normal(0, 0.3, weight.shape)).astype(np.float32)
        for weight in _MODEL.initial_weights(0)
    ]


def _adapters(adapted):
    """Moved away from the first ones, whose B is zero."""
    rng = np.random.default_rng(1)
    return [
        (weight + rng.normal(0, 0.1, weight.shape)).astype(np.float32)
        for weight in adapted.initial_weights(0)
    ]


def _with_products(pretrained, adapters, scale):
    """The kernels with α / R · A B, added up by hand."""
    products = iter([scale * np.einsum("ir,ro->io", *adapters[i : i + 2]) for i in range(0, 16, 2)])
    return [
        weight + next(products) if name.endswith("_kernel") else weight
        for name, weight in zip(_MODEL.weight_shapes, pretrained, strict=True)
    ]


def test_the_first_adapters_leave_the_model_as_it_is():
    pretrained = _pretrained()
    adapted = low_rank.LowRank(_MODEL, pretrained, _RANK)
    first = adapted.initial_weights(3)
    for merged, weight in zip(adapted.merged(first), pretrained, strict=True):
        np.testing.assert_array_equal(merged, weight)
    expected, positions = _MODEL.compact_logits(pretrained, _WORDS)
    found, found_positions = adapted.compact_logits(first, _WORDS)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(found_positions, positions)
    a, b = first[0::2], first[1::2]
    assert all(not x.any() for x in b)
    wide = low_rank.LowRank(
        transformer.Transformer(11, 5, 64, 1, 1, 256), [np.zeros(1)], 50
    ).initial_weights(0)[0::2]
    for x in (*a, *wide):
        # The standard error of a standard deviation of n Gaussians is 1/√(2n) of it.
        tolerance = 6 / np.sqrt(2 * x.size)
        assert x.std() == pytest.approx(1 / np.sqrt(x.shape[0]), rel=tolerance)


def test_merged_weights_and_adapters_give_the_scores_of_kernels_with_their_products():
    pretrained = _pretrained()
    adapted = low_rank.LowRank(_MODEL, pretrained, _RANK)
    adapters = _adapters(adapted)
    expected_weights = _with_products(pretrained, adapters, 32 / _RANK)
    for merged, weight in zip(adapted.merged(adapters), expected_weights, strict=True):
        assert merged.dtype == np.float32
        np.testing.assert_allclose(merged, weight, rtol=1e-5, atol=1e-6)
    expected = _MODEL.logits(expected_weights, _WORDS)
    assert np.abs(expected - _MODEL.logits(pretrained, _WORDS)).max() > 0.1
    np.testing.assert_allclose(adapted.logits(adapters, _WORDS), expected, rtol=1e-4, atol=1e-4)
    found, positions = adapted.compact_logits(adapters, _WORDS)
    compact = tf.gather(tf.reshape(expected, [-1, 11]), positions)
    np.testing.assert_allclose(found, compact, rtol=1e-4, atol=1e-4)


def test_gradients_are_those_through_the_products():
    pretrained = _pretrained()
    adapted = low_rank.LowRank(_MODEL, pretrained, _RANK)
    adapters = [tf.constant(adapter) for adapter in _adapters(adapted)]
    gradients = []
    for scores in (adapted.compact_logits, adapted.logits):
        with tf.GradientTape() as tape:
            tape.watch(adapters)
            found = scores(adapters, _WORDS)
            if scores == adapted.logits:
                found = tf.boolean_mask(found, _WORDS != 0)
            else:
                found, _ = found
            loss = tf.reduce_sum(tf.square(tf.nn.log_softmax(found)))
        gradients.append(tape.gradient(loss, adapters))
    for one, other in zip(*gradients, strict=True):
        assert np.abs(one).max() > 0.1
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3 * np.abs(other).max())


def test_few_weights_are_trained_and_only_of_kernels():
    model = transformer.Transformer(50, 10, 64, 2, 4, 256)
    adapted = low_rank.LowRank(model, [np.zeros(1)], 4)
    # Inputs and outputs of the kernels of a block, in widths of 64.
    assert adapted.num_parameters == 2 * 4 * 64 * ((1 + 3) + (1 + 1) + (1 + 4) + (4 + 1))
    kernels = {re.sub("_adapter_[ab]$", "", name) for name in adapted.weight_shapes}
    assert kernels == {name for name in model.weight_shapes if name.endswith("kernel")}


def test_what_cannot_be_adapted_is_refused():
    for name in table.MODELS:
        model = small_models.build(name, vocabulary_size=11, sequence_length=5)
        weights = model.initial_weights(0)
        if name in ("gpt2", "llama"):
            assert low_rank.LowRank(model, weights, 2).num_parameters < model.num_parameters
        elif name == "transformer":
            low_rank.LowRank(model, weights, 6)
            with pytest.raises(ValueError, match="adapter_rank=7 exceeds 6, the smaller side of"):
                low_rank.LowRank(model, weights, 7)
            with pytest.raises(ValueError, match="adapter_rank must be at least 1, got 0"):
                low_rank.LowRank(model, weights, 0)
        else:
            with pytest.raises(ValueError, match="adapter_rank=2 is for models .* is WordLstm: le"):
                low_rank.LowRank(model, weights, 2)
