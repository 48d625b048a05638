"""Functional models: weights go in, scores, losses and sums of metrics come out."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf


class BatchOutput(NamedTuple):
    """Loss of a model for one batch, its predictions, and the number of examples."""

    loss: tf.Tensor
    predictions: Any
    num_examples: tf.Tensor | int | None


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A model without state, as TensorFlow functions.

    A `tff.learning.models.FunctionalModel` has the same attributes, and is taken in its place.

    Attributes:
      initial_weights: Trainable weights, and weights that are not trained: arrays.
      predict_on_batch: Function (model_weights, x, training) to predictions; `model_weights` is
        like `initial_weights`, `x` a batch's first part.
      loss: Function (output, label, sample_weight=None) to a scalar; `output` are predictions,
        `label` a batch's second part.
      input_spec: Specs of a batch: (x, y), or a dictionary with these names.
      initialize_metrics_state: Function that returns the sums of metrics over no batch, a
        structure of tensors whose first level are names.
      update_metrics_state: Function (state, labels, batch_output, sample_weight=None) to the sums
        with one batch more; `batch_output` is a `BatchOutput`.
      finalize_metrics: Function from the sums to metrics by name.
    """

    initial_weights: tuple[Sequence[np.ndarray], Sequence[np.ndarray]]
    predict_on_batch: Callable[..., Any]
    loss: Callable[..., tf.Tensor]
    input_spec: Any
    initialize_metrics_state: Callable[[], Any] = lambda: collections.OrderedDict()
    update_metrics_state: Callable[..., Any] = lambda state, *_, **__: state
    finalize_metrics: Callable[[Any], Any] = lambda state: state


def is_functional(model: Any) -> bool:
    """Returns whether a model has the attributes of `Model`, whatever its class."""
    return all(hasattr(model, field.name) for field in dataclasses.fields(Model))


def num_examples(batch: Any) -> tf.Tensor:
    """Counts the examples in a batch: the size of its first dimension, int64."""
    return tf.shape(tf.nest.flatten(batch)[0], out_type=tf.int64)[0]


def x_and_y(batch: Any) -> tuple[Any, Any]:
    """Returns both parts of a batch, or of a model's `input_spec`."""
    return (batch["x"], batch["y"]) if isinstance(batch, Mapping) else batch
