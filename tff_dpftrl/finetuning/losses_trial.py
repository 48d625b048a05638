"""Trials of a model's losses of rows, before they are trusted with a privacy statement.

What `clipped_sums.RowLosses` asks for cannot be proven of a caller's function, but what breaks it
in practice can be seen: the loss of a row that depends on rows beside it, variables that change
from unit to unit (moving averages), weights that the loss does not use, losses that are not finite.

The clip bounds a unit without this where its gradient is computed from its own rows alone
(`clipped_sums.looped`): rows are then mixed within the unit at most. In one pass over many units it
does not, and there the operations of the graph have to show that no row has a part in the losses of
another (`models.row_layouts`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tff_dpftrl import validation
from tff_dpftrl.finetuning import clipped_sums
from tff_dpftrl.models import keras_versions

_SAME = 1e-4  # Relative; losses in float32 in batches of different sizes differ by less.
_WITHOUT_DROPOUT = (
    "leave dropout and other randomness out; a step that is repeated after a "
    "crash must be the same, and the noise of the guarantee regularises too."
)
# Operations of TensorFlow that return other numbers at each call.
_DRAWS = re.compile(
    r"Random|Stateful(Random|Standard|Truncated|Uniform)|(Parameterized)?TruncatedNormal"
    r"|Multinomial|Rng|NonDeterministic|SampleDistorted|\w*CandidateSampler"
)
# Operations with a seed: the numbers change only if the seed is a variable that changes.
_SEEDED_DRAWS = re.compile(r"Stateless(Random|Truncated|Parameterized|Multinomial|Shuffle)")
_PERTURBATION = 0.1  # Standard deviation of made-up weights around the given ones.


def refuse(
    row_losses: clipped_sums.RowLosses,
    weights: Sequence[np.ndarray],
    rows: clipped_sums.Rows,
) -> None:
    """Refuses losses that the trial shows to be unfit for clipped sums.

    Unfit losses mix rows, change variables, or leave weights without a gradient; or none is finite.
    The rows are tried as they are and with their values shuffled, the weights as they are and
    moved: mixing may not show where a weight is zero.
    """
    rows = tf.nest.map_structure(tf.convert_to_tensor, rows)
    given = [tf.convert_to_tensor(weight) for weight in weights]
    refuse_state(row_losses, given, rows)
    refuse_unused_weights(row_losses, given, rows)
    refuse_randomness(row_losses, given, rows)
    rng = np.random.default_rng(0)
    moved = [
        weight + tf.constant(rng.normal(0.0, _PERTURBATION, np.shape(array)), tf.float32)
        for weight, array in zip(given, weights, strict=True)
    ]
    pairs = tf.nest.map_structure(lambda x: with_shuffled(x, rng), rows)
    for tried in (given, moved):
        refuse_mixed_rows(row_losses, tried, pairs)
    losses = np.asarray(row_losses(given, rows))
    if not np.isfinite(losses).any():
        raise validation.UsageError(
            f"row_losses gives {losses[0]} for all of {len(losses)} rows that were tried with the "
            "initial weights: look for a division by zero or a logarithm of zero in the loss, and "
            "for values in the examples that are not finite."
        )


def refuse_state(
    row_losses: clipped_sums.RowLosses, weights: Sequence[tf.Tensor], rows: clipped_sums.Rows
) -> None:
    """Refuses losses that change variables or draw random numbers, by looking at their graph.

    It is the graph of the losses and of their gradients, and nothing is computed. With the moving
    averages of batch normalisation, for example, one unit's rows would change the gradients of the
    units after it, which clipping does not bound. What is drawn rarely shows in a trial. State that
    Python code keeps cannot be seen.
    """

    def backwards(weights: Any, rows: Any) -> Any:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(weights)
            losses = tf.reduce_sum(row_losses(weights, rows))
        return losses, tape.gradient(losses, weights)

    graph = tf.function(backwards, autograph=False).get_concrete_function(weights, rows).graph
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(node for f in definition.library.function for node in f.node_def)]
    operations = sorted({node.op for node in nodes})
    changes = list(filter(_changes_state, operations))
    drawn = list(filter(_DRAWS.match, operations))
    seeded = list(filter(_SEEDED_DRAWS.match, operations))
    if changes and seeded:
        raise validation.UsageError(
            f"row_losses draws random numbers ({', '.join(seeded)}) and changes variables "
            f"({', '.join(changes)}), as dropout does with its seed in Keras 3: {_WITHOUT_DROPOUT}"
        )
    if changes:
        raise validation.UsageError(
            f"row_losses changes variables ({', '.join(changes)}), as batch normalisation does: "
            "the rows of one unit would change the gradients of others, and no ε would hold. "
            "Replace the layer by layer or group normalisation, or freeze it."
        )
    if drawn:
        raise validation.UsageError(
            f"row_losses draws random numbers ({', '.join(drawn)}): {_WITHOUT_DROPOUT}"
        )


def _changes_state(op: str) -> bool:
    return op.startswith(("Assign", "Resource")) and not op.startswith("ResourceGather")


def refuse_unused_weights(
    row_losses: clipped_sums.RowLosses, weights: Sequence[tf.Tensor], rows: clipped_sums.Rows
) -> None:
    """Refuses losses that do not depend on all weights, which would get noise alone."""
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(weights)
        loss = tf.reduce_sum(row_losses(weights, rows))
    unused = [i for i, x in enumerate(tape.gradient(loss, weights)) if x is None]
    if len(unused) == len(weights):
        raise validation.UsageError(
            "row_losses does not use its argument `weights`, so nothing but noise would be "
            "learnt: compute the losses from this argument, not from the variables of a model."
        )
    if unused:
        raise validation.UsageError(
            f"row_losses does not use weights{unused}, which would get noise alone: leave them "
            "out of the weights."
        )


def refuse_randomness(
    row_losses: clipped_sums.RowLosses, weights: Sequence[tf.Tensor], rows: clipped_sums.Rows
) -> None:
    """Refuses losses that are drawn at random: a resumed run could not repeat its steps."""
    first, second = (np.asarray(row_losses(weights, rows)) for _ in range(2))
    if not np.allclose(first, second, rtol=_SAME, atol=_SAME, equal_nan=True):
        raise validation.UsageError(
            f"row_losses gives the same rows other losses each time: {_WITHOUT_DROPOUT}"
        )


def with_shuffled(values: tf.Tensor, rng: np.random.Generator) -> tf.Tensor:
    """Returns rows and made-up ones: the same values in another order."""
    array = values.numpy()
    return tf.concat([values, rng.permutation(array.reshape(-1)).reshape(array.shape)], axis=0)


def refuse_mixing_layers(model: keras_versions.Model) -> None:
    """Refuses a Keras model with layers that mix rows, so that clipping bounds nobody.

    It sees batch normalisation that is not frozen. It cannot see, for example, a mean over the
    batch in a custom function; `refuse_mixed_rows` may.
    """
    for layer in keras_versions.parts(model):
        # Keras' other batch normalisations are its subclasses.
        if isinstance(layer, keras_versions.BatchNormalization) and layer.trainable:
            raise validation.UsageError(
                f"model has the layer {layer.name!r} of batch normalisation, which mixes the rows "
                "of different units: replace it by layer or group normalisation, or freeze it "
                "(trainable = False)."
            )


def refuse_mixed_rows(
    row_losses: clipped_sums.RowLosses, weights: Sequence[tf.Tensor], rows: clipped_sums.Rows
) -> None:
    """Refuses losses of rows that depend on the rows beside them, by trying at least two."""
    num_rows = int(tf.nest.flatten(rows)[0].shape[0])
    if num_rows < 2:
        raise validation.UsageError(f"rows must be at least two, for the trial; got {num_rows}.")
    together = np.asarray(row_losses(weights, rows))
    for row in range(num_rows):
        own = tf.nest.map_structure(lambda x, row=row: x[row : row + 1], rows)
        alone = np.asarray(row_losses(weights, own))
        if alone.shape != (1,) or together.shape != (num_rows,):
            raise validation.UsageError(
                "row_losses must return one loss a row, shape [n], got shapes "
                f"{list(alone.shape)} of one row and {list(together.shape)} of {num_rows}: do not "
                "average over the rows."
            )
        if not np.allclose(alone[0], together[row], rtol=_SAME, atol=_SAME, equal_nan=True):
            raise validation.UsageError(
                f"row_losses gives row {row} the loss {alone[0]:.6g} when it is alone and "
                f"{together[row]:.6g} beside others: the loss of a row must depend on that row "
                "only (no batch normalisation, no mean over the batch)."
            )
