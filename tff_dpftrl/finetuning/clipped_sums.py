"""Sums of clipped gradients, one gradient for each unit, and none of them mixed.

A *unit* is what is clipped as one: an example in example-level sampling (ELS), a user in
user-level sampling (ULS; Charles et al. 2024, Algorithms 1 and 2). It is a run of
consecutive rows, and `row_splits` says where it begins and ends: unit u has the rows from
`row_splits[u]` up to `row_splits[u + 1]`. A *row* is an example, in any structure of
tensors that have the rows as their first axis.

The loss of a unit is the mean of the losses of its rows, and its gradient is clipped
after that mean: clipping the rows and averaging them would be neither ELS nor ULS. A unit
without rows adds zero. So does one whose gradient is not finite or has a norm above
1.8e19 (`clipping.count_as_zero_if_not_finite`).

**What one unit moves.** `looped` clips as every aggregator here does, in float64 with a
margin, and adds in float64, so that the proof in `private_round.summation` holds for it:
sums with and without a unit differ by at most the clip norm. `ghost` describes its own rounding.

Sums are neither noised nor divided here. A batch that is too large for the memory is cut
into chunks of whole units (`sum_in_chunks`); the noise is added once, to the whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf

from tff_dpftrl import validation
from tff_dpftrl.models import language_model, metrics, weight_uses
from tff_dpftrl.private_round import clipping, summation

Rows: TypeAlias = Any
"""A structure of tensors with the rows as their first axis."""

RowLosses: TypeAlias = Callable[[Sequence[tf.Tensor], Rows], tf.Tensor]
"""From weights and n rows to the loss of each, float32, shape [n].

The loss of a row depends on that row and the weights only, and that of a row with nothing
to predict is 0 with gradient 0.
"""


class PerUnit(NamedTuple):
    """Measurements of the units: exact figures, neither clipped nor noised, float64, shape [units].

    Attributes:
      norms: Norms of the gradients before clipping; infinite where a gradient is not finite.
      losses: Mean losses of the units' rows, which were differentiated; 0 of a unit without rows.
    """

    norms: tf.Tensor | np.ndarray
    losses: tf.Tensor | np.ndarray


ClippedSum: TypeAlias = Callable[
    [Sequence[tf.Tensor], Rows, tf.Tensor, "tf.Tensor | float"],
    tuple[list[tf.Tensor], PerUnit],
]
"""From weights, rows, `row_splits` and `clip_norm` to the sum and the units' figures.

Arguments: the weights, a list of float32 tensors; the rows; `row_splits`, integer,
ascending from 0 to the number of rows, shape [units + 1]; and the clip norm C, a positive
scalar. Results: the sum of the units' clipped gradients, one tensor for each weight, float64,
or float32 where it was added up in that, zero if there is no unit; and the units' norms and
losses.
"""


def language_rows(
    model: language_model.LanguageModel, compute_dtype: str = "float32", **options: bool
) -> RowLosses:
    """Returns the losses of rows of text.

    A row is a pair: words and targets (the words that follow them), integer, both of shape [n, T],
    as in `data.sequences`. Its loss is the mean of the cross-entropies of its own targets. Targets
    are those of training (`metrics.mean_cross_entropy`): the end of the text and words out of the
    vocabulary count, padding does not. Training averages over all targets of a batch; here each row
    counts the same, and none depends on the length of the others. `options` may have `recompute`.
    """
    return functools.partial(language_losses, model, compute_dtype=compute_dtype, **options)


def language_losses(
    model: language_model.LanguageModel,
    weights: Sequence[tf.Tensor],
    rows: Rows,
    *,
    compute_dtype: str = "float32",
    **options: weight_uses.Recorder | bool,
) -> tf.Tensor:
    """Returns the losses of rows of text, as in `language_rows`: float32, shape [n].

    `compute_dtype` is the dtype of forward and backward pass, except for the loss from the scores
    on. `options` are further arguments of `model.compact_logits`: a record of uses of weights, or
    `recompute`.
    """
    words, targets = rows
    weights = [tf.cast(weight, compute_dtype) for weight in weights]
    logits, positions = model.compact_logits(weights, words, **options)
    logits = tf.cast(logits, tf.float32)
    targets = tf.gather(tf.reshape(targets, [-1]), positions)
    # In TFF's graphs `!=` would compare objects, not values.
    is_target = tf.cast(tf.not_equal(targets, language_model.PAD), logits.dtype)
    losses = tf.math.multiply_no_nan(metrics.cross_entropy(logits, targets), is_target)
    row_of = positions // model.sequence_length
    num_rows = tf.shape(words)[0]
    sums, counts = (
        tf.math.unsorted_segment_sum(values, row_of, num_rows) for values in (losses, is_target)
    )
    return tf.math.divide_no_nan(sums, counts)


def looped(row_losses: RowLosses, *, normalised: bool = False) -> ClippedSum:
    """Takes one gradient after the other: for any model, and any number of rows in a unit.

    The memory is that of the unit with the most rows, however many units there are. With
    `normalised` the sum is divided by the clip norm: each unit then has a norm of at most 1, and
    the clip norm is no part of the learning rate (De et al. 2022). The returned function depends on
    its arguments alone, in a `tf.function` or not. It refuses `row_splits` that do not end with the
    number of rows, and losses that are no vector.
    """

    def clipped_sum(
        weights: Sequence[tf.Tensor],
        rows: Rows,
        row_splits: tf.Tensor,
        clip_norm: tf.Tensor | float,
    ) -> tuple[list[tf.Tensor], PerUnit]:
        weights = [tf.convert_to_tensor(weight) for weight in weights]
        row_splits = checked_row_splits(rows, row_splits)
        has_rows = tf.where(row_splits[1:] > row_splits[:-1])
        num_units = tf.shape(has_rows)[0]
        zero = tf.UnconnectedGradients.ZERO

        def add_unit(index, total, norms, losses):
            unit = has_rows[index, 0]
            own = tf.nest.map_structure(lambda x: x[row_splits[unit] : row_splits[unit + 1]], rows)
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(weights)
                of_rows = row_losses(weights, own)
                if of_rows.shape.rank != 1:
                    raise validation.UsageError(
                        "row_losses must return one loss a row, shape [n], got shape "
                        f"{of_rows.shape}: do not average over the rows."
                    )
                loss = tf.reduce_mean(of_rows)
            gradients = tape.gradient(loss, weights, unconnected_gradients=zero)
            clipped, norm = clipping.clip_by_norm(
                [tf.convert_to_tensor(gradient) for gradient in gradients], clip_norm
            )
            total = [x + y for x, y in zip(total, clipped, strict=True)]
            losses = losses.write(index, tf.cast(loss, tf.float64))
            return index + 1, total, norms.write(index, norm), losses

        # TensorFlow would make constants of zeros of known shapes, and keep them.
        nothing = tf.minimum(num_units, 0)
        total = [_zeros(weight.shape, nothing) for weight in weights]
        norms, losses = (
            tf.TensorArray(tf.float64, size=num_units, element_shape=[]) for _ in range(2)
        )
        _, total, norms, losses = tf.while_loop(
            lambda index, *_: index < num_units,
            add_unit,
            (tf.constant(0), total, norms, losses),
            parallel_iterations=1,  # More would be in the memory at once.
        )
        num_all = tf.shape(row_splits, out_type=tf.int64)[:1] - 1
        norms, losses = (tf.scatter_nd(has_rows, x.stack(), num_all) for x in (norms, losses))
        total = divided(total, clip_norm) if normalised else total
        return total, PerUnit(norms, losses)

    return clipped_sum


def _zeros(shape: tf.TensorShape, nothing: tf.Tensor) -> tf.Tensor:
    """Returns zeros; `nothing` is an int32 scalar that is 0, as TensorFlow does not know."""
    size = tf.convert_to_tensor(shape, tf.int32) + nothing  # pyright: ignore[reportArgumentType]
    return tf.ensure_shape(tf.fill(size, tf.zeros([], summation.DTYPE)), shape)


def checked_row_splits(rows: Rows, row_splits: tf.Tensor) -> tf.Tensor:
    """Returns `row_splits` as int64; fails when run unless they rise from 0 to the row count."""
    row_splits = tf.cast(row_splits, tf.int64)
    ends = [row_splits[0], *(row_splits[-1] for _ in tf.nest.flatten(rows))]
    wanted = [0, *(tf.shape(x, out_type=tf.int64)[0] for x in tf.nest.flatten(rows))]
    message = "row_splits must go from 0 to the number of rows: one more than the units."
    checks = [
        tf.debugging.assert_equal(tf.stack(ends), tf.stack(wanted), message),
        tf.debugging.assert_non_negative(
            row_splits[1:] - row_splits[:-1], "row_splits must be ascending."
        ),
    ]
    with tf.control_dependencies([check for check in checks if check is not None]):
        return tf.identity(row_splits)


def divided(total: Sequence[tf.Tensor], clip_norm: tf.Tensor | float) -> list[tf.Tensor]:
    """Returns sums of clipped gradients, divided by the clip norm, in float64."""
    # A float is not rounded to float32 on the way.
    divisor = tf.cast(tf.convert_to_tensor(clip_norm, dtype_hint=tf.float64), summation.DTYPE)
    return [tf.cast(x, summation.DTYPE) / divisor for x in total]


class Kept:
    """Clipped sum, a `ClippedSum` of its arguments alone, that keeps its compiled graphs.

    The graphs are those of `sum_in_chunks`, by device and shapes.
    """

    def __init__(self, function: ClippedSum):
        """Keeps its argument."""
        self.function = function
        self.graphs: dict[Any, ClippedSum] = {}

    def __call__(
        self,
        weights: Sequence[tf.Tensor],
        rows: Rows,
        row_splits: tf.Tensor,
        clip_norm: tf.Tensor | float,
    ) -> tuple[list[tf.Tensor], PerUnit]:
        """Returns the clipped sum, as a `ClippedSum` does."""
        return self.function(weights, rows, row_splits, clip_norm)


def sum_in_chunks(
    clipped_sum: ClippedSum, *, units_per_chunk: int, devices: Sequence[str] | None = None
) -> Callable[..., tuple[list[tf.Tensor], PerUnit]]:
    """Makes a function that adds up a batch of any size, chunk by chunk; nothing is left out.

    Chunks have whole units and are added in order, in float64. The memory is that of one chunk, and
    the same batch has the same bits every time. Several devices take chunks in turn, at the same
    time; the bits are those of one device if the devices round alike. All GPUs are used if
    `devices` is None. `clipped_sum` is compiled once for each device, or was before if it is
    `Kept`.

    The returned function takes `weights`, `read_rows`, `row_splits` (an array) and `clip_norm`. It
    returns what `ClippedSum` does, norms and losses as arrays. `read_rows(begin, end)` returns
    these rows of the batch, one chunk at a time; another number of rows is refused.
    """
    units_per_chunk = validation.integer("units_per_chunk", units_per_chunk, minimum=1)
    if devices is None:
        devices = [device.name for device in tf.config.list_logical_devices("GPU")]
    places = list(devices) if len(devices) > 1 else [None]
    graphs: dict[Any, ClippedSum] = clipped_sum.graphs if isinstance(clipped_sum, Kept) else {}

    def whole_sum(
        weights: Sequence[np.ndarray | tf.Tensor],
        read_rows: Callable[[int, int], Rows],
        row_splits: np.ndarray,
        clip_norm: float,
    ) -> tuple[list[tf.Tensor], PerUnit]:
        row_splits = np.asarray(row_splits, np.int64)
        if row_splits.ndim != 1 or not len(row_splits) or row_splits[0] != 0:
            raise validation.UsageError(
                f"row_splits must be a vector that begins with 0, got {row_splits}."
            )
        weights = [tf.convert_to_tensor(weight) for weight in weights]
        norm = tf.constant(validation.clip_norm("clip_norm", clip_norm), tf.float64)

        def sum_chunk(place, splits, rows):
            with tf.device(place):
                signature = _signature(weights, rows)
                key = (place, *tf.nest.flatten(signature))
                if key not in graphs:
                    graphs[key] = tf.function(clipped_sum, signature, autograph=False)
                chunk, of_chunk = graphs[key](weights, rows, splits - splits[0], norm)
            return list(chunk), PerUnit(*map(np.asarray, of_chunk))

        total: list[tf.Tensor | tf.Variable] = []
        measured = [PerUnit(np.zeros(0), np.zeros(0))]
        chunks = list(_chunks(row_splits, units_per_chunk))
        with futures.ThreadPoolExecutor(len(places)) as pool:
            for first in range(0, len(chunks), len(places)):
                splits = chunks[first : first + len(places)]
                rows = [_checked_rows(read_rows, x[0], x[-1]) for x in splits]
                run = map if len(places) == 1 else pool.map
                for chunk, of_chunk in run(sum_chunk, places, splits, rows):
                    _add(total, chunk)
                    measured.append(of_chunk)
        if not total:
            total = [tf.zeros(weight.shape, summation.DTYPE) for weight in weights]
        # A variable lends its value: nothing is copied.
        values = [x.read_value() if isinstance(x, tf.Variable) else x for x in total]
        return values, PerUnit(*map(np.concatenate, zip(*measured, strict=True)))

    return whole_sum


def _chunks(row_splits: np.ndarray, units_per_chunk: int) -> Iterator[np.ndarray]:
    """Yields the part of `row_splits` that belongs to each chunk."""
    for begin in range(0, len(row_splits) - 1, units_per_chunk):
        yield row_splits[begin : begin + units_per_chunk + 1]


def _checked_rows(read_rows: Callable[[int, int], Rows], begin: int, end: int) -> Rows:
    """Returns rows as tensors; raises UsageError if they are not as many as asked for."""
    rows = tf.nest.map_structure(tf.convert_to_tensor, read_rows(begin, end))
    lengths = {int(x.shape[0]) for x in tf.nest.flatten(rows)}
    if lengths != {end - begin}:
        raise validation.UsageError(
            f"read_rows must return the rows from {begin} up to {end}, all {end - begin} of "
            f"them; got {sorted(lengths)} rows."
        )
    return rows


def _add(total: list[Any], chunk: list[Any]) -> None:
    """Adds a chunk to the total, which is empty before the first one, and empties the chunk.

    One chunk alone keeps its dtype. Where there are more, variables have the total, since a chunk
    is added to them in place.
    """
    if not total:
        total.extend(chunk)
        chunk.clear()
        return
    for index, sums in enumerate(total):
        if not isinstance(sums, tf.Variable):
            total[index] = tf.Variable(tf.cast(sums, summation.DTYPE), trainable=False)
        total[index].assign_add(tf.cast(chunk[index], summation.DTYPE))
        sums = chunk[index] = None  # Their memory is given back at once.


def _signature(weights: Sequence[tf.Tensor], rows: Rows) -> list[Any]:
    """Returns the specs of one graph for chunks of any number of units and rows."""
    return [
        [tf.TensorSpec(weight.shape, weight.dtype) for weight in weights],
        tf.nest.map_structure(lambda x: tf.TensorSpec([None, *x.shape[1:]], x.dtype), rows),
        tf.TensorSpec([None], tf.int64),
        tf.TensorSpec([], tf.float64),
    ]
