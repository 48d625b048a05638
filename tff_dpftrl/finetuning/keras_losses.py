"""Losses of the rows of a Keras model, as a function of its trainable weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tff_dpftrl import validation
from tff_dpftrl.finetuning import clipped_sums, losses_trial
from tff_dpftrl.models import keras_model, keras_versions


def row_losses(model: keras_versions.Model, loss: Any = None) -> clipped_sums.RowLosses:
    """Returns the loss of each row, a pair of inputs and targets, by itself.

    It is for `model.trainable_variables` in their order. The model has one output and its weights
    already. `loss` is one of Keras, its name, or a function of targets and outputs that returns a
    loss for each row; None for that which the model was compiled with. The loss of a row is the
    mean of what the loss returns for it, whatever the loss's own reduction.

    Models that cannot be trained privately are refused: batch normalisation, regularisers,
    constraints, no single loss. The function refuses several outputs, masked ones, and losses that
    average over the batch.
    """
    given = getattr(model, "loss", None) if loss is None else loss
    if not isinstance(given, str) and not callable(given):
        raise validation.UsageError(
            f"model must be compiled with one loss, got {given!r}: call model.compile first, or "
            "give the loss."
        )
    losses_trial.refuse_mixing_layers(model)
    outputs_of = keras_model.as_function(model, unrolled=True)
    by_row = keras_versions.with_control_flow(
        keras_versions.unreduced(given, is_compiled=loss is None)
    )
    # Keras 2 makes columns of targets, also for functions of the caller.
    makes_columns = loss is None and isinstance(model, tf.Module)

    def losses_of(weights: Sequence[tf.Tensor], rows: clipped_sums.Rows) -> tf.Tensor:
        own_inputs, targets = rows
        outputs = _traced("model", outputs_of, weights, own_inputs, True)
        if not tf.is_tensor(outputs):
            raise validation.UsageError("model must have one output, got a structure of them.")
        if getattr(outputs, "_keras_mask", None) is not None:
            raise validation.UsageError(
                "model masks a part of its output (mask_zero or a Masking layer), which `fit` "
                "leaves out of the loss: give a loss that does so, and no mask."
            )
        if outputs.shape.rank == 1:  # A loss averages over the last axis: here the rows.
            outputs = outputs[:, tf.newaxis]
        if outputs.shape.rank == targets.shape.rank + 1 and (
            outputs.shape[-1] == 1 or (makes_columns and outputs.shape.rank == 2)
        ):
            targets = targets[..., tf.newaxis]  # Or the two would be broadcast.
        losses = _traced("loss", by_row, targets, outputs)
        if losses.shape.rank == 0:
            raise validation.UsageError(
                "model is compiled with a loss that averages over the batch: let it return one "
                "loss an example."
            )
        return tf.reduce_mean(tf.reshape(losses, [tf.shape(targets)[0], -1]), axis=1)

    return tf.function(losses_of, autograph=False)


def _traced(name: str, function: Any, *args: Any) -> Any:
    """Calls what the caller has made; an error there is the caller's."""
    try:
        return function(*args)
    except Exception as error:
        raise validation.UsageError(
            f"{name} cannot be computed in a graph ({type(error).__name__}: {error}): private "
            "steps are graphs, so let it have no code for eager mode, and try it in `fit`."
        ) from error
