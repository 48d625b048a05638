"""Sums of clipped gradients of language models in one forward and one backward pass.

A use of a weight, x → z, adds Σ_t x_tᵀ δ_t to the
gradient of a unit, t over the unit's tokens and δ = ∂ loss / ∂z, whose squared norm is
Σ_{t,t'} (x_t · x_t') (δ_t · δ_t') (Goodfellow 2015; Li et al. 2022, "ghost clipping"). So
one backward pass down to all z, without gradients of weights, gives the norms of all units;
then each δ is scaled by its unit's factor, and the gradients of the weights are formed once
("book-keeping", Bu et al. 2023). Where a weight is used twice, as a tied embedding, the
norm has the product of both uses, too: without it, it would be wrong, silently. Where a
gradient for each unit is no larger than the tokens' products, it is formed after all.

Norms are sums over pairs of tokens, in float64. The gradients that are added up are sums over
tokens in float32. Both lose digits where the gradients of a unit's tokens cancel each other, by
the factor A / ‖gradient‖ with A = Σ_t ‖x_t‖ ‖δ_t‖: in units where that is large (`_CANCELLED`),
one gradient is taken after the other (`clipped_sums.looped`). For the others it is measured, not
proven, that the margin of the clip (`clipping.CLIP_MARGIN`) covers the rounding of the sum: the
proof in `private_round.summation` is not one for this way. Where that matters,
`clipped_sums.looped` is the same function in float64 for all units.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import typing
from collections.abc import Mapping, Sequence

import tensorflow as tf

from tff_dpftrl import validation
from tff_dpftrl.finetuning import clipped_sums
from tff_dpftrl.models import language_model, weight_uses
from tff_dpftrl.private_round import clipping, summation

_MOST_TOKENS = 128
"""Tokens in a unit, padding included, up to which this is no slower than a gradient for each.

`benchmarks/clipped_sums.py` has the comparison.
"""

_CANCELLED = 64.0
"""Largest A / ‖gradient‖ of a unit whose gradient is taken in one pass with others.

Gradients of T tokens in random directions have √T, up to 11 here. At 64 the rounding of a sum in
float32 moves a gradient by some 64 · 6e-8, below half of the clip's margin.
"""


def fastest_clipped_sum(
    model: language_model.LanguageModel, rows_per_unit: int, *, normalised: bool = False
) -> clipped_sums.ClippedSum:
    """Chooses how to clip gradients of a language model.

    Args:
      model: The model.
      rows_per_unit: The most rows a unit has: 1 where units are examples, else G.
      normalised: Whether the clipped gradients are divided by the clip norm.

    Returns:
      `booked` for short units of a model that reports its uses of weights, else
      `clipped_sums.looped`, for `clipped_sums.language_rows`.

    Raises:
      ValueError: If `rows_per_unit` is less than 1.
    """
    rows_per_unit = validation.integer("rows_per_unit", rows_per_unit, minimum=1)
    if model.reports_uses and rows_per_unit * model.sequence_length <= _MOST_TOKENS:
        return booked(model, rows_per_unit, normalised=normalised)
    return clipped_sums.looped(clipped_sums.language_rows(model), normalised=normalised)


def booked(
    model: language_model.LanguageModel, rows_per_unit: int, *, normalised: bool = False
) -> clipped_sums.ClippedSum:
    """Takes the clipped sum of a chunk in one pass, for units of few rows.

    The memory is that of a gradient of as many rows, where units that have fewer than
    `rows_per_unit` are filled up with padding.

    Args:
      model: A model that reports its uses of weights (`LanguageModel.reports_uses`).
      rows_per_unit: The most rows a unit has.
      normalised: Whether the clipped gradients are divided by the clip norm.

    Returns:
      The function, for the rows of `clipped_sums.language_rows`. It raises
      `tf.errors.InvalidArgumentError` for `row_splits` that do not fit the rows or have a
      unit of more rows.

    Raises:
      ValueError: If the model does not report its uses of weights, or `rows_per_unit` is
        less than 1.
    """
    rows_per_unit = validation.integer("rows_per_unit", rows_per_unit, minimum=1)
    if not model.reports_uses:
        raise validation.UsageError(
            f"model is {type(model).__name__}, which does not report its uses of weights as it is: "
            "use clipped_sums.looped."
        )
    one_by_one = clipped_sums.looped(clipped_sums.language_rows(model))

    def clipped_sum(
        weights: Sequence[tf.Tensor],
        rows: clipped_sums.Rows,
        row_splits: tf.Tensor,
        clip_norm: tf.Tensor | float,
    ) -> tuple[list[tf.Tensor], clipped_sums.PerUnit]:
        weights = [tf.convert_to_tensor(weight) for weight in weights]
        row_splits = clipped_sums.checked_row_splits(rows, row_splits)
        num_rows = tf.cast(row_splits[1:] - row_splits[:-1], tf.float32)
        filled = _filled_up(rows, row_splits, rows_per_unit)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            record = _Record(tape)
            losses = clipped_sums.language_losses(model, weights, filled, record=record)
            shares = tf.math.reciprocal_no_nan(num_rows)
            losses = shares * tf.reduce_sum(tf.reshape(losses, [-1, rows_per_unit]), axis=1)
        results = record.results
        # Of the sum of all losses: a token has a part in that of its own unit only.
        outputs = [result.outputs for result in results]
        gradients = typing.cast(list[tf.Tensor], tape.gradient(losses, outputs))
        units = _Units(tf.size(num_rows), rows_per_unit, model.sequence_length)
        formed = _formed(results, gradients, units)
        squares, lengths = _squares(results, gradients, units)
        norms = _norms(squares + list(map(_square, formed.values())))
        is_finite = tf.math.is_finite(norms)
        # Where a length is no number, too.
        is_alone = is_finite & tf.math.logical_not(lengths <= _CANCELLED * norms)
        scales = tf.where(
            is_finite & tf.math.logical_not(is_alone),
            clipping.scale_to(norms, clip_norm),
            tf.zeros_like(norms),
        )
        shapes = model.weight_shapes
        sums = _sums(results, gradients, units, formed, tf.cast(scales, tf.float32), shapes)
        total = [tf.cast(sums[name], summation.DTYPE) for name in shapes]

        def with_others():
            others = _only(rows, row_splits, is_alone)
            more, measured = one_by_one(weights, *others, clip_norm)
            added = [x + y for x, y in zip(total, more, strict=True)]
            return added, tf.where(is_alone, measured.norms, norms)

        total, norms = tf.cond(tf.reduce_any(is_alone), with_others, lambda: (total, norms))
        total = clipped_sums.divided(total, clip_norm, normalised)
        return total, clipped_sums.PerUnit(norms, tf.cast(losses, tf.float64))

    return clipped_sum


def _only(
    rows: clipped_sums.Rows, row_splits: tf.Tensor, is_kept: tf.Tensor
) -> tuple[clipped_sums.Rows, tf.Tensor]:
    """Returns the rows of some units, and row splits by which the other units have none."""
    num_rows = row_splits[1:] - row_splits[:-1]
    of_row = tf.repeat(is_kept, num_rows)
    kept = tf.cumsum(tf.where(is_kept, num_rows, tf.zeros_like(num_rows)))
    rows = tf.nest.map_structure(lambda x: tf.boolean_mask(x, of_row), rows)
    return rows, tf.pad(kept, [[1, 0]])


def _filled_up(
    rows: clipped_sums.Rows, row_splits: tf.Tensor, rows_per_unit: int
) -> clipped_sums.Rows:
    """Returns as many rows for each unit, the last ones padding."""
    begins, ends = row_splits[:-1, None], row_splits[1:, None]
    check = tf.debugging.assert_less_equal(
        ends - begins,
        tf.constant(rows_per_unit, tf.int64),
        "row_splits has a unit of more rows than rows_per_unit, which clipping was made for.",
    )
    with tf.control_dependencies([] if check is None else [check]):
        indices = begins + tf.range(rows_per_unit, dtype=tf.int64)
    indices = tf.reshape(tf.where(indices < ends, indices, row_splits[-1]), [-1])
    # The last row stands for all that there are not.
    return tf.nest.map_structure(lambda x: tf.gather(tf.pad(x, [[0, 1], [0, 0]]), indices), rows)


@dataclasses.dataclass
class _Result:
    """Part of the computation that weights had a part in, and how."""

    outputs: tf.Tensor
    order: weight_uses.Order | tf.Tensor
    uses: list[weight_uses.Use]


class _Record:
    """A `weight_uses.Recorder` whose results get gradients."""

    def __init__(self, tape: tf.GradientTape):
        self._tape = tape
        self._results = {}

    def __call__(
        self,
        outputs: tf.Tensor,
        *uses: weight_uses.Use,
        order: weight_uses.Order | tf.Tensor = weight_uses.Order.SEQUENCES,
    ) -> tf.Tensor:
        self._tape.watch(outputs)
        result = self._results.setdefault(outputs.ref(), _Result(outputs, order, []))
        result.uses.extend(uses)
        return outputs

    @property
    def results(self) -> list[_Result]:
        return list(self._results.values())


@dataclasses.dataclass(frozen=True)
class _Units:
    """Units that have as many rows each, and how their tokens lie in a tensor."""

    number: tf.Tensor
    rows_per_unit: int
    sequence_length: int

    @property
    def num_tokens(self) -> int:
        """Tokens of a unit, padding included."""
        return self.rows_per_unit * self.sequence_length

    def apart(self, values: tf.Tensor, order: weight_uses.Order | tf.Tensor) -> tf.Tensor:
        """Reshapes from [n, …] to [units, tokens, …]."""
        shape = values.shape[1:]
        if order is weight_uses.Order.STEPS:
            values = tf.reshape(values, [self.sequence_length, -1, *shape])
            values = tf.transpose(values, [1, 0, *range(2, 2 + len(shape))])
        return tf.reshape(values, [-1, self.num_tokens, *shape])

    def of_tokens(self, values: tf.Tensor, order: weight_uses.Order | tf.Tensor) -> tf.Tensor:
        """Repeats a value of each unit for its tokens, shape [n]."""
        if order is weight_uses.Order.SEQUENCES:
            return tf.repeat(values, self.num_tokens)
        if order is weight_uses.Order.STEPS:
            return tf.tile(tf.repeat(values, self.rows_per_unit), [self.sequence_length])
        return tf.gather(values, order // self.num_tokens)

    def sum_of_tokens(self, values: tf.Tensor, order: weight_uses.Order | tf.Tensor) -> tf.Tensor:
        """Sums the tokens of each unit: from shape [n, outputs] to [units, outputs]."""
        if isinstance(order, weight_uses.Order):
            return tf.reduce_sum(self.apart(values, order), axis=1)
        return tf.math.unsorted_segment_sum(values, order // self.num_tokens, self.number)

    def splits(self, positions: tf.Tensor) -> tf.Tensor:
        """Returns where the tokens of each unit begin among picked ones, shape [units + 1]."""
        begins = tf.range(self.number + 1) * self.num_tokens
        return tf.searchsorted(positions, tf.cast(begins, positions.dtype))


def _last_size(values: tf.Tensor) -> int:
    size = values.shape[-1]
    if size is None:
        raise ValueError(f"The last axis of {values} has no fixed size.")
    return size


def _is_formed(use: weight_uses.Use, result: _Result, units: _Units) -> bool:
    """Returns whether it is cheaper to form all units' gradients than to compare tokens."""
    if isinstance(use, weight_uses.Product):
        sizes = _last_size(use.inputs), _last_size(result.outputs)
        is_picked = not isinstance(result.order, weight_uses.Order)
        return not is_picked and units.num_tokens * sum(sizes) > math.prod(sizes)
    if isinstance(use, weight_uses.Bias):
        # Nothing is added to the cost of comparing the tokens for another use.
        others = [x for x in result.uses if not isinstance(x, weight_uses.Bias)]
        return all(_is_formed(x, result, units) for x in others)
    return not isinstance(use, weight_uses.Lookup)


def _formed(
    results: Sequence[_Result], gradients: Sequence[tf.Tensor], units: _Units
) -> dict[tuple[int, int], tf.Tensor]:
    """Returns gradients of all units, [units, …], by the indices of result and use."""
    formed = {}
    for i, (result, gradient) in enumerate(zip(results, gradients, strict=True)):
        for j, use in enumerate(result.uses):
            if not _is_formed(use, result, units):
                continue
            if isinstance(use, weight_uses.Product):
                given, by = (
                    units.apart(use.inputs, result.order),
                    units.apart(gradient, result.order),
                )
                first, second = (by, given) if use.transposed else (given, by)
                formed[i, j] = tf.matmul(first, second, transpose_a=True)
            elif isinstance(use, weight_uses.Scale):
                formed[i, j] = units.sum_of_tokens(use.inputs * gradient, result.order)
            elif isinstance(use, weight_uses.Bias):
                formed[i, j] = units.sum_of_tokens(gradient, result.order)
            else:
                by = units.apart(gradient, result.order)
                steps = [units.rows_per_unit, units.sequence_length, by.shape[-1]]
                formed[i, j] = tf.reduce_sum(tf.reshape(by, [-1, *steps]), axis=1)
    return formed


def _square(values: tf.Tensor) -> tf.Tensor:
    """Returns the squared norm over all but the first axis, float64; nothing cancels here."""
    squares = tf.reduce_sum(tf.square(values), axis=list(range(1, values.shape.rank)))
    return tf.cast(squares, tf.float64)


def _norms(squares: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the root of the sum; infinite if the sum is NaN or above the largest float32."""
    total = tf.add_n(squares)
    # Rounding may leave less than nothing.
    norms = tf.sqrt(tf.maximum(total, 0.0))
    return tf.where(total <= tf.float32.max, norms, tf.constant(math.inf, tf.float64))


def _squares(
    results: Sequence[_Result], gradients: Sequence[tf.Tensor], units: _Units
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Compares the tokens of gradients that are not formed.

    Returns:
      Squared norms, [units], and what ties add; and A of all of them together, [units].
    """
    squares, lengths, ties = [], [tf.zeros([units.number], tf.float64)], _ties(results)
    for result, gradient in zip(results, gradients, strict=True):
        uses = [use for use in result.uses if not _is_formed(use, result, units)]
        if not uses:
            continue
        tied = None
        for use in uses:
            if isinstance(use, weight_uses.Product) and use.name in ties:
                index, words = ties[use.name]
                order = results[index].order
                tied = units.apart(words, order), units.apart(gradients[index], order)
        given = [getattr(use, "ids", getattr(use, "inputs", None)) for use in uses]
        if isinstance(result.order, weight_uses.Order):
            given = [None if x is None else _wide(units.apart(x, result.order)) for x in given]
            by = _wide(units.apart(gradient, result.order))
            if tied is not None:
                tied = tied[0], _wide(tied[1])
            square, length = _compared(uses, given, by, tied)
        else:
            square, length = _compared_each(uses, given, gradient, tied, units, result.order)
        squares.append(square)
        lengths.append(tf.square(length))
    return squares, tf.sqrt(tf.add_n(lengths))


def _wide(values: tf.Tensor) -> tf.Tensor:
    """Casts to float64, but for ids."""
    return tf.cast(values, tf.float64) if values.dtype.is_floating else values


def _ties(results: Sequence[_Result]) -> dict[str, tuple[int, tf.Tensor]]:
    """Returns where, and for which ids, an embedding is looked up that is also multiplied with."""
    uses_of = collections.defaultdict(list)
    for index, result in enumerate(results):
        for use in result.uses:
            uses_of[use.name].append((index, use, result.order))
    ties = {}
    for name, uses in uses_of.items():
        if len(uses) == 1:
            continue
        lookups = [(i, use.ids) for i, use, _ in uses if isinstance(use, weight_uses.Lookup)]
        picked = [
            use
            for _, use, order in uses
            if getattr(use, "transposed", False) and not isinstance(order, weight_uses.Order)
        ]
        if len(uses) != 2 or not lookups or not picked:
            raise NotImplementedError(
                f"the weight {name} is used in {len(uses)} places that are not a lookup and the "
                "product with its transpose at picked positions: add the inner product of their "
                "gradients to the norms."
            )
        ties[name] = lookups[0]
    return ties


def _compared(
    uses: Sequence[weight_uses.Use],
    given: Sequence[tf.Tensor | None],
    gradient: tf.Tensor,
    tied: tuple[tf.Tensor, tf.Tensor] | None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns Σ_{t,t'} (x_t · x_t') (δ_t · δ_t') of each unit, the sum of it over uses, and A.

    Args:
      uses: Products, lookups and biases with the same result.
      given: Inputs or ids, shape [units, tokens, …]; None of a bias.
      gradient: δ, shape [units, tokens, outputs].
      tied: Words and gradients where the weight of the product is looked up, too, shape
        [units, words] and [units, words, inputs].

    Returns:
      Both of shape [units] and the gradient's dtype. With `tied`, the first has also twice the
      inner product of both gradients of the embedding: 2 Σ_{t,t'} δ_t[w_t'] (x_t · δ'_t'), t' over
      the words. A is the sum of the roots of the terms with t = t': the norm if all tokens had
      the same direction.
    """
    alike = []
    for use, x in zip(uses, given, strict=True):
        if x is None:
            continue
        if isinstance(use, weight_uses.Product):
            alike.append(tf.matmul(x, x, transpose_b=True))
        elif isinstance(use, weight_uses.Lookup):
            alike.append(tf.cast(tf.equal(x[:, :, None], x[:, None, :]), gradient.dtype))
    biases = float(sum(isinstance(use, weight_uses.Bias) for use in uses))
    both = (tf.add_n(alike) + biases) * tf.matmul(gradient, gradient, transpose_b=True)
    square = tf.reduce_sum(both, axis=[1, 2])
    length = tf.reduce_sum(tf.sqrt(tf.linalg.diag_part(both)), axis=1)
    if tied is not None:
        words, by_rows = tied
        (states,) = (x for x in given if x is not None)
        of_words = tf.gather(gradient, words, axis=2, batch_dims=1)
        of_words *= tf.matmul(states, by_rows, transpose_b=True)
        square += 2.0 * tf.reduce_sum(of_words, axis=[1, 2])
    return square, length


def _compared_each(
    uses: Sequence[weight_uses.Use],
    given: Sequence[tf.Tensor | None],
    gradient: tf.Tensor,
    tied: tuple[tf.Tensor, tf.Tensor] | None,
    units: _Units,
    positions: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Calls `_compared` for each unit's picked positions, whose numbers differ."""
    splits = units.splits(positions)

    def of_unit(index):
        def own(values):
            return tf.cast(values[None, splits[index] : splits[index + 1]], tf.float64)

        tied_to = None
        if tied is not None:
            words, by_rows = (x[index : index + 1] for x in tied)
            tied_to = words, tf.cast(by_rows, tf.float64)
        inputs = [None if x is None else own(x) for x in given]
        square, length = _compared(uses, inputs, own(gradient), tied_to)
        return square[0], length[0]

    both = (tf.float64, tf.float64)
    return tf.map_fn(of_unit, tf.range(units.number), fn_output_signature=both)


def _sums(
    results: Sequence[_Result],
    gradients: Sequence[tf.Tensor],
    units: _Units,
    formed: dict[tuple[int, int], tf.Tensor],
    scales: tf.Tensor,
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, tf.Tensor]:
    """Returns the sum of the units' gradients, each times its scale, by name of the weight.

    What belongs to a unit of scale zero is not looked at: it may not be finite, and zero
    times that would be no number.
    """
    kept = scales > 0.0

    def add_up(zeroed):
        sums = {name: [] for name in shapes}
        for i, (result, gradient) in enumerate(zip(results, gradients, strict=True)):
            kept_tokens = units.of_tokens(kept, result.order)
            scale = units.of_tokens(scales, result.order)[:, None]
            by = zeroed(gradient, kept_tokens)
            for j, use in enumerate(result.uses):
                if (i, j) in formed:
                    of_use = tf.tensordot(scales, zeroed(formed[i, j], kept), 1)
                elif isinstance(use, weight_uses.Product):
                    of_use = _of_product(use, zeroed(use.inputs, kept_tokens), by, scale)
                elif isinstance(use, weight_uses.Bias):
                    of_use = tf.matmul(scale, by, transpose_a=True)[0]
                else:
                    lookup = typing.cast(weight_uses.Lookup, use)  # All others are formed.
                    num_ids = shapes[lookup.name][0]
                    of_use = tf.math.unsorted_segment_sum(by * scale, lookup.ids, num_ids)
                sums[use.name].append(of_use)
        return {name: tf.add_n(of_uses) for name, of_uses in sums.items()}

    # Zeros are hardly ever needed, and as many numbers to copy as there are.
    return tf.cond(
        tf.reduce_all(kept), lambda: add_up(lambda values, kept: values), lambda: add_up(_zeroed)
    )


def _zeroed(values: tf.Tensor, kept: tf.Tensor) -> tf.Tensor:
    """Sets the entries of the first axis that are not kept to zero."""
    kept = tf.reshape(kept, [-1, *[1] * (values.shape.rank - 1)])
    return tf.where(kept, values, tf.zeros_like(values))


def _of_product(
    use: weight_uses.Product, inputs: tf.Tensor, gradient: tf.Tensor, scale: tf.Tensor
) -> tf.Tensor:
    """Returns the gradient of a matrix, each token times its scale."""
    # The scores' gradient is much the largest tensor, and is not copied.
    if _last_size(inputs) < _last_size(gradient):
        inputs *= scale
    else:
        gradient *= scale
    first, second = (gradient, inputs) if use.transposed else (inputs, gradient)
    return tf.matmul(first, second, transpose_a=True)
