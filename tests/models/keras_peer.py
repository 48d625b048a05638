"""Compares a model with an independent one made of Keras layers, in float64."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from tff_dpftrl.models import language_model

# Ten thousand roundings of float64, and more than the sums here have.
_MARGIN = 1e-12


@dataclasses.dataclass
class Peer:
    """A Keras model.

    Attributes:
      logits: Maps ids, [batch, T], to scores, [batch, T, V].
      variables: Its variables, and what each is of the model's weights by name. These are
        linear functions: gradients go the same way.
    """

    logits: Callable[[np.ndarray], tf.Tensor]
    variables: Sequence[tuple[tf.Variable, Callable[[Mapping[str, np.ndarray]], np.ndarray]]]


def noisy_weights(model: language_model.LanguageModel, dtype=np.float64) -> list[tf.Tensor]:
    """Initial weights, moved so that none is zero, as a bias is, and nothing is symmetric."""
    rng = np.random.default_rng(0)
    return [
        tf.constant(weight + rng.normal(0, 0.5, weight.shape), dtype)
        for weight in model.initial_weights(0)
    ]


def assert_same(model: language_model.LanguageModel, peer: Peer, words: np.ndarray) -> None:
    """Scores everywhere, and gradients of a function of those of words, are the peer's."""
    weights = noisy_weights(model)
    named = dict(zip(model.weight_shapes, map(np.asarray, weights), strict=True))
    for variable, of_weights in peer.variables:
        variable.assign(of_weights(named))
    np.testing.assert_allclose(
        model.logits(weights, words), peer.logits(words), rtol=_MARGIN, atol=_MARGIN
    )
    with tf.GradientTape() as tape:
        tape.watch(weights)
        total = tf.reduce_sum(tf.sin(model.compact_logits(weights, words)[0]))
    found = dict(zip(named, map(np.asarray, tape.gradient(total, weights)), strict=True))
    variables = [variable for variable, _ in peer.variables]
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(tf.boolean_mask(tf.sin(peer.logits(words)), words != 0))
    expected = tape.gradient(total, variables)
    assert sum(variable.shape.num_elements() for variable in variables) == model.num_parameters
    for gradient, (variable, of_weights) in zip(expected, peer.variables, strict=True):
        gradient = tf.convert_to_tensor(gradient)
        assert np.abs(gradient).max() > 1e-3, variable.name
        np.testing.assert_allclose(
            of_weights(found), gradient, rtol=_MARGIN, atol=_MARGIN, err_msg=variable.name
        )
