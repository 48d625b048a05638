"""Custom language models: models of the caller behind the interface of this package.

The scores of a custom model are traced once, with the weights as arguments. From then on it is a
graph and a tuple of weights like any other, whatever happens to the objects it was made of. Trials
check what training and evaluation rely on: the shapes, that a score depends on earlier words only,
and that it is the same in training.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.models import language_model

Scores = Callable[[tuple[tf.Tensor, ...], tf.Tensor, bool], Any]
"""Function from weights, ids [batch, T] and whether it is training to scores [batch, T, V]."""

_PROBE_SEED = 20261122
_NUM_PROBED = 8
# Relative to a large score: other machines round otherwise, another model differs by far more.
_PROBE_TOLERANCE = 1e-2
_SAME = 1e-4
_NOT_HERE = (
    "The run's model is a custom one, which only its author's code can compute: give it as the "
    "argument `model`."
)


@dataclasses.dataclass(frozen=True)
class Fingerprint(language_model.LanguageModel):
    """The record of a custom model in a results folder: enough to tell whether one is the same.

    Attributes:
      vocabulary_size: Number of ids V, special tokens included.
      sequence_length: Number of positions T in a batch.
      shapes: Names and shapes of the weights, in order.
      probe: Some scores of the model, for weights and ids that are always the same.
    """

    vocabulary_size: int
    sequence_length: int
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    probe: tuple[float, ...]

    @property
    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Names and shapes of the weights, in order."""
        return collections.OrderedDict(self.shapes)

    def initial_weights(self, seed: int) -> tuple[np.ndarray, ...]:
        """Raises `UsageError`: a fingerprint has no weights."""
        raise validation.UsageError(_NOT_HERE)

    def logits(self, weights: Sequence[tf.Tensor], words: tf.Tensor) -> tf.Tensor:
        """Raises `UsageError`: a fingerprint cannot compute."""
        raise validation.UsageError(_NOT_HERE)

    def description(self) -> dict[str, Any]:
        """Returns what `table.describe` records besides the name of the model, fit for JSON."""
        return {
            "vocabulary_size": self.vocabulary_size,
            "sequence_length": self.sequence_length,
            "shapes": [[name, list(shape)] for name, shape in self.shapes],
            "probe": list(self.probe),
        }

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> Fingerprint:
        """Builds the fingerprint that `description` described."""
        try:
            return cls(
                vocabulary_size=int(description["vocabulary_size"]),
                sequence_length=int(description["sequence_length"]),
                shapes=tuple((name, tuple(shape)) for name, shape in description["shapes"]),
                probe=tuple(map(float, description["probe"])),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise validation.UsageError(
                f"the description of a custom model is incomplete: {error}."
            ) from error

    def check_same(self, model: CustomModel) -> None:
        """Refuses a model with other sizes, names or shapes, or that computes something else."""
        remedy = "build the model as it was when the run began."
        for name in ("vocabulary_size", "sequence_length"):
            then, now = getattr(self, name), getattr(model, name)
            if then != now:
                raise validation.UsageError(
                    f"model has {name} {now}, that of the run {then}: {remedy}"
                )
        for then, now in zip(self.shapes, model.shapes, strict=False):
            if then != now:
                raise validation.UsageError(
                    f"model has the weight {now[0]} of shape {list(now[1])} where that of the run "
                    f"has {then[0]} of shape {list(then[1])}: {remedy}"
                )
        if len(self.shapes) != len(model.shapes):
            raise validation.UsageError(
                f"model has {len(model.shapes)} weights, that of the run {len(self.shapes)}: "
                f"{remedy}"
            )
        size = max(map(abs, self.probe))
        if not np.allclose(self.probe, model.probe, rtol=0, atol=_PROBE_TOLERANCE * size):
            raise validation.UsageError(
                "model has the weights of that of the run, but computes something else from them: "
                f"{remedy}"
            )


@dataclasses.dataclass(frozen=True, eq=False)
class CustomModel(Fingerprint):
    """A custom model.

    Attributes:
      first_weights: Initial weights, as the caller gave them.
      function: Function from weights and ids to scores, without variables or other state.
    """

    first_weights: tuple[np.ndarray, ...] = dataclasses.field(repr=False)
    function: Callable[..., tf.Tensor] = dataclasses.field(repr=False)

    def initial_weights(self, seed: int) -> tuple[np.ndarray, ...]:
        """Returns the weights that the caller gave, whatever the seed."""
        del seed
        return self.first_weights

    @override
    def logits(self, weights: Sequence[tf.Tensor], words: tf.Tensor) -> tf.Tensor:
        words = language_model.checked_words(words, self.sequence_length)
        weights = [tf.convert_to_tensor(weight) for weight in weights]
        return self.function(*weights, tf.cast(words, tf.int32))


def build(
    scores: Scores,
    weights: Mapping[str, np.ndarray],
    *,
    vocabulary_size: int,
    sequence_length: int,
    trace_in: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> CustomModel:
    """Traces a model's scores, and checks that it can be trained and evaluated.

    The weights' names must not depend on what else the process has built. `vocabulary_size` counts
    special tokens. `trace_in` makes the context to trace in.
    """
    _check_weights(weights)
    specs = [tf.TensorSpec(weight.shape, tf.float32) for weight in weights.values()]
    specs.append(tf.TensorSpec([None, sequence_length], tf.int32))
    wanted = f"[batch, {sequence_length}, {vocabulary_size}]"

    def trace(training: bool) -> Callable[..., tf.Tensor]:
        with trace_in():
            return tf.function(
                lambda *arguments: scores(arguments[:-1], arguments[-1], training)
            ).get_concrete_function(*specs)

    try:
        traced = trace(training=False)
    except Exception as error:
        raise validation.UsageError(
            f"model cannot be applied to word ids, int32 of shape [batch, {sequence_length}]: "
            f"{error}"
        ) from error
    _check_output(traced.structured_outputs, wanted, sequence_length, vocabulary_size)
    function = without_captures(traced)
    trial = _Trial(function, weights, vocabulary_size, sequence_length)
    trial.check_scores()
    _check_repeats(trial, trace)
    trial.check_order()
    trial.check_gradient()
    return CustomModel(
        vocabulary_size=vocabulary_size,
        sequence_length=sequence_length,
        shapes=tuple((name, tuple(weight.shape)) for name, weight in weights.items()),
        probe=trial.probe(),
        first_weights=tuple(np.array(weight) for weight in weights.values()),
        function=function,
    )


def _check_weights(weights: Mapping[str, np.ndarray]) -> None:
    if not weights:
        raise validation.UsageError("model has no trainable weight: give one that can be trained.")
    for name, weight in weights.items():
        if weight.dtype != np.float32:
            raise validation.UsageError(
                f"model must have weights of float32, but {name} is of {weight.dtype}: build it in "
                "single precision (in Keras, without a mixed-precision policy)."
            )
        if not np.all(np.isfinite(weight)):
            raise validation.UsageError(
                f"model has the weight {name}, which is not finite: give finite ones."
            )


def _check_output(output: Any, wanted: str, sequence_length: int, vocabulary_size: int) -> None:
    if not isinstance(output, tf.Tensor):
        raise validation.UsageError(
            f"model must return one tensor of scores, {wanted}, got {type(output).__name__}: give "
            "one that returns nothing else."
        )
    shape = output.shape
    if shape.rank == 2:
        raise validation.UsageError(
            f"model must score the next word at every position, {wanted}, got {shape}: let it "
            "return whole sequences (in Keras' recurrent layers: return_sequences=True)."
        )
    if not shape.is_compatible_with([None, sequence_length, vocabulary_size]):
        raise validation.UsageError(
            f"model must return scores of shape {wanted}, got {shape}: {vocabulary_size} ids are "
            f"the {vocabulary_size - 4} words of the vocabulary and four special ones, and "
            f"{sequence_length} is the config's sequence_length."
        )
    if output.dtype != tf.float32:
        raise validation.UsageError(
            f"model must return scores of float32, got {output.dtype.name}: build it in single "
            "precision (in Keras, without a mixed-precision policy)."
        )


def without_captures(traced: Any) -> Callable[..., Any]:
    """Makes the captures of a concrete function constants, in place, so that any graph can call it.

    Captured variables and tables are refused.
    """
    captures = list(traced.graph.captures)
    if not captures:
        return traced
    if any(outside.dtype == tf.resource for outside, _ in captures):
        raise validation.UsageError(
            "model reads something that is not one of its trainable weights, such as another "
            "variable or a table: make its scores a function of those weights and the ids alone."
        )
    for outside, _ in captures:
        traced.replace_capture_with_deferred_capture(
            outside,
            functools.partial(tf.constant, outside.numpy()),
            tf.TensorSpec(outside.shape, outside.dtype),
        )
    return traced


class _Trial:
    """A trial of a model with weights and ids that are always the same."""

    def __init__(
        self,
        function: Callable[..., tf.Tensor],
        weights: Mapping[str, np.ndarray],
        vocabulary_size: int,
        sequence_length: int,
    ):
        rng = np.random.Generator(np.random.Philox(_PROBE_SEED))
        self.function = function
        self._names = list(weights)
        self.weights = []
        for weight in weights.values():
            scale = weight.shape[-1] ** -0.5 if weight.ndim > 1 else 0.5
            drawn = rng.standard_normal(weight.shape) * scale
            self.weights.append(tf.constant(drawn, tf.float32))
        ids = rng.integers(1, vocabulary_size, [2, sequence_length])
        ids[0, 0] = vocabulary_size - 1
        ids[1, sequence_length // 2 + 1 :] = language_model.PAD
        self.ids = tf.constant(ids, tf.int32)
        self._is_word = ids != language_model.PAD
        self._vocabulary_size = vocabulary_size

    def check_scores(self) -> None:
        """Checks that the model returns finite scores, and no probabilities."""
        try:
            self.scores = self.function(*self.weights, self.ids).numpy()
        except tf.errors.OpError as error:
            raise validation.UsageError(
                f"model fails on ids from 0 to {self._vocabulary_size - 1}: {error.message}"
            ) from error
        if self.scores.shape != (*self.ids.shape, self._vocabulary_size):
            raise validation.UsageError(
                f"model must return scores of shape {[*self.ids.shape, self._vocabulary_size]} for "
                f"ids of shape {self.ids.shape}, got {list(self.scores.shape)}."
            )
        scores = self.scores[self._is_word]
        if not np.all(np.isfinite(scores)):
            raise validation.UsageError(
                "model has scores that are not finite for weights of moderate size, where a "
                "sequence has padding (id 0) at its end or without: let padding not lead to a "
                "division by zero."
            )
        if np.all(scores >= 0) and np.allclose(scores.sum(axis=-1), 1, rtol=0, atol=1e-3):
            raise validation.UsageError(
                "model returns probabilities, but training needs scores (logits): leave out the "
                "softmax at its end."
            )

    def check_order(self) -> None:
        """Checks that scores depend neither on words to predict nor on other sequences."""
        alone = self.function(*self.weights, self.ids[:1]).numpy()
        if not self._equal(alone[0], self.scores[0]):
            raise validation.UsageError(
                "model scores a sequence differently beside other sequences: a sequence's scores "
                "must depend on that sequence only."
            )
        for first in range(1, self.ids.shape[1]):
            changed = self.ids.numpy()
            changed[:, first:] = 1 + changed[:, first:] % (self._vocabulary_size - 1)
            scores = self.function(*self.weights, changed).numpy()
            before = self._is_word[:, :first]
            if not self._equal(scores[:, :first][before], self.scores[:, :first][before]):
                raise validation.UsageError(
                    "model looks ahead: its scores at a position change with the words after it, "
                    "which are what it is to predict. Let it see earlier words only (a causal "
                    "mask; no bidirectional layer)."
                )

    def check_gradient(self) -> None:
        """Checks that the scores depend on all weights."""
        with tf.GradientTape() as tape:
            tape.watch(self.weights)
            scores = tf.boolean_mask(self.function(*self.weights, self.ids), self._is_word)
            total = tf.reduce_sum(tf.sin(scores))
        gradients = tape.gradient(total, self.weights)
        unused = [n for n, g in zip(self._names, gradients, strict=True) if g is None]
        if unused:
            raise validation.UsageError(
                f"model has scores that do not depend on its weight {unused[0]}, or have no "
                "gradient in it: leave out layers that are not used."
            )

    def is_same(self, function: Callable[..., tf.Tensor]) -> bool:
        """Returns whether another function has the same scores."""
        return self._equal(function(*self.weights, self.ids).numpy(), self.scores)

    def probe(self) -> tuple[float, ...]:
        """Returns some scores, which tell models with the same weights apart."""
        scores = self.scores[self._is_word].reshape(-1)
        chosen = np.linspace(0, len(scores) - 1, _NUM_PROBED).astype(int)
        return tuple(float(scores[i]) for i in chosen)

    def _equal(self, scores: np.ndarray, expected: np.ndarray) -> bool:
        size = max(float(np.abs(self.scores[self._is_word]).max()), 1e-30)
        return np.allclose(scores, expected, rtol=0, atol=_SAME * size, equal_nan=True)


def _check_repeats(trial: _Trial, trace: Callable[[bool], Callable[..., tf.Tensor]]) -> None:
    """Checks that the model computes the same at another call, and in training."""
    reason = None
    try:
        repeats = trial.is_same(trial.function) and trial.is_same(without_captures(trace(True)))
    except Exception as error:
        repeats, reason = False, error
    if not repeats:
        raise validation.UsageError(
            "model computes something else in training than in evaluation, or something else at "
            "every call, which cannot be repeated when a run is resumed: leave out layers such as "
            "dropout, noise and batch normalisation, or set their rate to 0."
        ) from reason
