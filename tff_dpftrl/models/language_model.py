"""The interface of language models: shapes, initial weights and scores."""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
import tensorflow as tf

from tff_dpftrl import validation

PAD = 0
"""Id of padding: such inputs are never scored."""


class LanguageModel(abc.ABC):
    """A model that scores the next word at every position of a batch of sequences.

    A model is a frozen dataclass of its sizes. Its weights are kept apart from it, as a tuple of
    float32 arrays in the order of `weight_shapes`, all of them trainable.

    Attributes:
      vocabulary_size: Number of ids V, special tokens included.
      sequence_length: Number of positions T in a batch.
    """

    vocabulary_size: int
    sequence_length: int

    @property
    def reports_uses(self) -> bool:
        """Whether `compact_logits` takes a `weight_uses.Recorder` as its argument `record`."""
        return False

    @property
    def adaptable_kernels(self) -> Sequence[str]:
        """Names of the matrices that low-rank adapters can be added to (`low_rank`).

        Each is used in one `weight_uses.Product`, reported before anything depends on it.
        """
        return ()

    @property
    def compute_dtypes(self) -> Sequence[str]:
        """Dtypes in which `compact_logits` can compute: those that weights may be given in."""
        return ("float32",)

    @property
    def can_recompute(self) -> bool:
        """Whether `compact_logits` takes the argument `recompute`.

        With that, gradients keep the states between blocks, and compute the rest again.
        """
        return False

    @property
    @abc.abstractmethod
    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Names and shapes of the weights, in order."""

    @property
    def weight_specs(self) -> list[tf.TensorSpec]:
        """Specs of the weights, in order, for graphs that take them as an argument."""
        return [tf.TensorSpec(shape) for shape in self.weight_shapes.values()]

    @property
    def num_parameters(self) -> int:
        """Number of trainable weights."""
        return sum(math.prod(shape) for shape in self.weight_shapes.values())

    @abc.abstractmethod
    def initial_weights(self, seed: int) -> tuple[np.ndarray, ...]:
        """Draws the weights.

        Args:
          seed: Non-negative seed; the same seed gives the same weights everywhere.

        Returns:
          One float32 array for each entry of `weight_shapes`.
        """

    @abc.abstractmethod
    def logits(self, weights: Sequence[tf.Tensor], words: tf.Tensor) -> tf.Tensor:
        """Returns scores of every next word at every position.

        Args:
          weights: Weights in the order of `weight_shapes`.
          words: Ids, integer, shape [batch, T].

        Returns:
          Unnormalised log-probabilities, float32, shape [batch, T, V].

        Raises:
          ValueError: If `words` has another number of positions.
        """

    def compact_logits(
        self, weights: Sequence[tf.Tensor], words: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns scores at the positions that hold a word, without padding.

        Targets belong to it as `tf.gather(tf.reshape(targets, [-1]), positions)`. A model
        that can leave the padding out before its largest product should do so here.

        Args:
          weights: Weights in the order of `weight_shapes`.
          words: Ids, integer, shape [batch, T].

        Returns:
          Scores, float32, shape [n, V]; and the n positions where `words` is not
          padding, int64, ascending, in the flattened batch of shape [batch · T].

        Raises:
          ValueError: If `words` has another number of positions.
        """
        positions = word_positions(words)
        scores = tf.reshape(self.logits(weights, words), [-1, self.vocabulary_size])
        return tf.gather(scores, positions), positions


def word_positions(words: tf.Tensor) -> tf.Tensor:
    """Returns the positions in the flattened `words` without padding, int64, [n], ascending."""
    # In TFF's graphs `!=` would compare objects, not values.
    return tf.where(tf.not_equal(tf.reshape(words, [-1]), PAD))[:, 0]


def checked_words(words: tf.Tensor, sequence_length: int) -> tf.Tensor:
    """Returns ids, shape [batch, T], as a tensor, and refuses another number of positions."""
    words = tf.convert_to_tensor(words)
    if words.shape[1] != sequence_length:
        raise validation.UsageError(
            f"words must have shape [batch, {sequence_length}], got {words.shape}; make "
            "sequences of the model's sequence_length."
        )
    return words


_Options = ParamSpec("_Options")
_Graph = TypeVar("_Graph")


def kept(
    make: Callable[Concatenate[LanguageModel, _Options], _Graph],
) -> Callable[Concatenate[LanguageModel, _Options], _Graph]:
    """Keeps the last graphs that a function makes, so that the next run need not trace them again.

    The graphs of a model that is described by its sizes are kept for all models equal to it. Those
    of other models are not, because their graphs have more in them, such as the weights that
    adapters are added to. The graphs must depend on the model and hashable options only.
    """
    keeping = functools.lru_cache(maxsize=4)(make)

    @functools.wraps(make)
    def made(model: LanguageModel, *options: _Options.args, **named: _Options.kwargs) -> _Graph:
        sizes = vars(model).values()
        has_sizes_only = type(model).__eq__ is not object.__eq__ and all(
            isinstance(size, int | float | str | None) for size in sizes
        )
        return (keeping if has_sizes_only else make)(model, *options, **named)

    return made
