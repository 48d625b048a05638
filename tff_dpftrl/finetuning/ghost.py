"""Sums of clipped gradients in one forward and one backward pass.

`booked` is for the language models of this package, `booked_losses` for any losses in whose graph
all uses of weights are found (`models.graph_uses`); `fastest_clipped_sum` and `OfLosses` choose.

A use of a weight, x → z, adds Σ_t x_tᵀ δ_t to the
gradient of a unit, t over the unit's tokens and δ = ∂ loss / ∂z, whose squared norm is
Σ_{t,t'} (x_t · x_t') (δ_t · δ_t') (Goodfellow 2015; Li et al. 2022, "ghost clipping"). So
one backward pass down to all z, without gradients of weights, gives the norms of all units;
then each δ is scaled by its unit's factor, and the gradients of the weights are formed once
("book-keeping", Bu et al. 2023). Where a weight is used twice, as a tied embedding, the
norm has the product of both uses, too: without it, it would be wrong, silently. Where a
gradient for each unit has not many more numbers than the tokens' inputs and outputs, it is
formed after all (`_LARGEST_FORMED`), and added up instead: that is cheaper than to compare tokens.

**Rounding.** With u = 2⁻²⁴, the norm of a formed gradient is off by a fraction of at most (`_ADDED`
+ 2) u / 2 < 4e-6, in any order of summation (`_square`). Times its scale it is what is added, so
that this part of a clipped gradient is no longer than the clip norm: the clip's margin
(`clipping.CLIP_MARGIN`) is 1e-5. The norm of a gradient whose tokens are compared is off by at most
(n + 2) u A besides, for n tokens and A = Σ_t ‖x_t‖ ‖δ_t‖ (`_compared_tokens`), and what is added is
a sum over tokens in float32. Both lose digits where the gradients of a unit's tokens cancel each
other, by the factor A / ‖gradient‖; and where a tied embedding's two uses do so, the bounds grow by
√(‖g‖² + ‖h‖²) / ‖g + h‖ of their gradients g and h. Units where the product of both factors is
large (`_CANCELLED`) are taken one after the other (`clipped_sums.looped`), and their sum, in
float64, is rounded to float32 once, together with that of the others.

For the others, and for the sum over units in float32, that the margin covers the rounding is
measured on models with random weights and text, and not proven: the proof in
`private_round.summation` is not one for this way. Roundings grow with the sum: one of 64 units with
the same text of 20 words moved it by up to 3e-6 of the clip norm more or less than in exact
arithmetic, one of 256 by 9e-6. Inputs and gradients made up so that all roundings go the same way
exceed the clip norm by 3e-5 of it in a unit of 20 tokens, and by 5e-4 in one of 256. Where that
matters, `clipped_sums.looped` is the same function in float64 for all units.

**bfloat16.** Where a model computes in bfloat16, x and δ have its 8 bits, and are cast to float32,
which is exact, before they are compared and before they are added up. So the gradient that is
clipped is Σ_t x_tᵀ δ_t of those very numbers, and all of the above holds for it as it is. What
bfloat16 changes is how far that is from the gradient of the loss: utility, not privacy.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import typing
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from tff_dpftrl import validation
from tff_dpftrl.finetuning import clipped_sums, losses_trial
from tff_dpftrl.models import graph_uses, language_model, weight_uses
from tff_dpftrl.private_round import clipping, summation

_MOST_TOKENS = 128
"""Largest number of tokens in a unit, padding included, for which one pass is chosen.

Larger units are taken one after the other, with the proof in float64, except where all gradients of
so many tokens are formed, not compared. Up to 256 tokens one pass would still be faster
(`benchmarks/clipped_sums.py`), but less of it is proven for more tokens.
"""

_LARGEST_FORMED = 2
"""Largest size of a unit's gradient that is formed, over that of its tokens' inputs and outputs.

It bounds the memory, and about at this size comparing tokens begins to be faster: the first reads
and writes the gradient a few times, the second multiplies it by the number of tokens.
"""

_ADDED = 128
"""Largest number of squares that are added in float32."""

_TINY = 1e-30
"""Squared norm that is added to the inputs of each token, so that zeros have a Cholesky factor.

It makes norms too large, never too small, where inputs are below some 1e-10.
"""

_CANCELLED = 64.0
"""Largest A / ‖gradient‖ of a unit whose gradient is taken in one pass with others.

Gradients of T tokens in random directions have √T, up to 16 here. At 64, one rounding of a sum in
float32 moves a gradient by up to 64 · 6e-8, below half of the clip's margin. A sum of T terms has
up to T roundings, most of them smaller, which cancel each other unless they are made not to.
"""


_SAME = 1e-3  # What is in the wrong place differs by far more.


def fastest_clipped_sum(
    model: language_model.LanguageModel,
    rows_per_unit: int,
    *,
    normalised: bool = False,
    compute_dtype: str = "float32",
    recompute: bool = False,
) -> clipped_sums.ClippedSum:
    """Chooses how to clip gradients of a language model, for `clipped_sums.language_rows`.

    It is `booked` for short units of a model that reports its uses of weights, else
    `clipped_sums.looped`. Models of the same sizes get the same sum, with its graphs
    (`language_model.kept`). `rows_per_unit` is the most rows of a unit: 1 where units are examples,
    else G. `compute_dtype`, "float32" or "bfloat16", is that of forward and backward pass;
    gradients are clipped and added up as always. With `recompute`, gradients of long units keep
    only the states between blocks, and compute the rest again; `booked` needs inputs and gradients
    of all blocks until the norm is known, so that short units refuse it.
    """
    rows_per_unit = validation.integer("rows_per_unit", rows_per_unit, minimum=1)
    return _chosen(model, rows_per_unit, normalised, compute_dtype, recompute)


@language_model.kept
def _chosen(
    model: language_model.LanguageModel,
    rows_per_unit: int,
    normalised: bool,
    compute_dtype: str,
    recompute: bool,
) -> clipped_sums.Kept:
    num_tokens = rows_per_unit * model.sequence_length
    if recompute and (num_tokens <= _MOST_TOKENS or not model.can_recompute):
        raise validation.UsageError(
            f"gradient_checkpointing is for transformers and units of more than {_MOST_TOKENS} "
            f"tokens, and here a {type(model).__name__} has units of up to {num_tokens}: leave it "
            "out, and lower examples_at_once where memory is short."
        )
    if model.reports_uses and num_tokens <= _MOST_TOKENS:
        chosen = booked(model, rows_per_unit, normalised=normalised, compute_dtype=compute_dtype)
    else:
        _check_dtype(model, compute_dtype)
        options = {"recompute": True} if recompute else {}
        losses = clipped_sums.language_rows(model, compute_dtype, **options)
        chosen = clipped_sums.looped(losses, normalised=normalised)
    return clipped_sums.Kept(chosen)


def _check_dtype(model: language_model.LanguageModel, compute_dtype: str) -> None:
    if compute_dtype not in model.compute_dtypes:
        raise validation.UsageError(
            f"compute_dtype must be one of {', '.join(model.compute_dtypes)} for a "
            f"{type(model).__name__}, got {compute_dtype!r}."
        )


def booked(
    model: language_model.LanguageModel,
    rows_per_unit: int,
    *,
    normalised: bool = False,
    compute_dtype: str = "float32",
) -> clipped_sums.ClippedSum:
    """Takes the clipped sum of a chunk in one pass, for units of few rows.

    The model must report its uses of weights (`LanguageModel.reports_uses`). The memory is that of
    a gradient of as many rows; units with fewer than `rows_per_unit` are filled up with padding.
    The sum is for the rows of `clipped_sums.language_rows`. It refuses `row_splits` that do not fit
    the rows, or a unit of more rows.
    """
    rows_per_unit = validation.integer("rows_per_unit", rows_per_unit, minimum=1)
    if not model.reports_uses:
        raise validation.UsageError(
            f"model is {type(model).__name__}, which does not report its uses of weights as it is: "
            "use clipped_sums.looped."
        )
    _check_dtype(model, compute_dtype)

    def backward(
        weights: list[tf.Tensor], rows: clipped_sums.Rows, row_splits: tf.Tensor
    ) -> _Backward:
        num_rows = tf.cast(row_splits[1:] - row_splits[:-1], tf.float32)
        filled = _filled_up(rows, _with_padding(row_splits, rows_per_unit))
        units = _Units(tf.size(num_rows), rows_per_unit, model.sequence_length)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            record = _Record(tape, units)
            losses = clipped_sums.language_losses(
                model, weights, filled, compute_dtype=compute_dtype, record=record
            )
            shares = tf.math.reciprocal_no_nan(num_rows)
            losses = shares * tf.reduce_sum(tf.reshape(losses, [-1, rows_per_unit]), axis=1)
        # Gradients of the sum of all losses: a token affects only the loss of its own unit.
        outputs = [result.outputs for result in record.results]
        gradients = typing.cast(list[tf.Tensor], tape.gradient(losses, outputs))
        gradients = [tf.cast(gradient, tf.float32) for gradient in gradients]
        return _Backward(losses, list(map(_in_float32, record.results)), gradients)

    one_by_one = clipped_sums.looped(clipped_sums.language_rows(model, compute_dtype))
    return _in_one_pass(backward, one_by_one, list(model.weight_shapes), normalised)


def booked_losses(
    row_losses: clipped_sums.RowLosses,
    weights: Sequence[tf.TensorSpec],
    rows: typing.Any,
    rows_per_unit: int,
    *,
    normalised: bool = False,
) -> clipped_sums.ClippedSum:
    """Takes the clipped sum of a chunk in one pass, for losses of any model whose uses are found.

    The memory is that of a gradient of as many rows; units with fewer than `rows_per_unit` are
    filled up with copies of one of their rows. `rows` has the structure of the rows' specs, whose
    first axis does not matter. UnknownUseError says that a weight is used in a way that is not
    known, or that units have more than 128 tokens to compare. The sum refuses `row_splits` that do
    not fit the rows, or a unit of more rows.
    """
    rows_per_unit = validation.integer("rows_per_unit", rows_per_unit, minimum=1)
    # A function within the graph would hide what reads the weights.
    traced = getattr(row_losses, "python_function", row_losses)
    tokens = graph_uses.tokens_of_rows(traced, weights, rows)

    def backward(
        weights: list[tf.Tensor], rows: clipped_sums.Rows, row_splits: tf.Tensor
    ) -> _Backward:
        num_rows = row_splits[1:] - row_splits[:-1]
        is_row = tf.sequence_mask(num_rows, rows_per_unit)
        filled = _filled_up(rows, _with_copies(row_splits, rows_per_unit))
        weights = [tf.identity(weight) for weight in weights]  # That nothing else has read.
        of_rows = tf.reshape(traced(weights, filled), [-1, rows_per_unit])
        of_rows = tf.where(is_row, of_rows, tf.zeros_like(of_rows))
        shares = tf.math.reciprocal_no_nan(tf.cast(num_rows, tf.float32))
        losses = shares * tf.reduce_sum(of_rows, axis=1)
        results, gradients = [], []
        uses = graph_uses.find(weights, tokens)
        outputs = [found.outputs for found in uses]
        of_outputs = tf.nest.pack_sequence_as(outputs, _gradients(losses, tf.nest.flatten(outputs)))
        for found, given in zip(uses, of_outputs, strict=True):
            gradient = found.gradient(given)
            units = _Units(tf.size(num_rows), rows_per_unit, found.tokens)
            order = weight_uses.Order.SEQUENCES
            result = _Result(gradient, order, [found.use], units)
            is_short = units.num_tokens <= _MOST_TOKENS
            if not (is_short or _is_formed(found.use, result)):
                raise graph_uses.UnknownUseError(f"{units.num_tokens} tokens are too many")
            results.append(result)
            gradients.append(gradient)
        return _Backward(losses, results, gradients)

    one_by_one = clipped_sums.looped(row_losses)
    names = [str(index) for index in range(len(weights))]
    return _in_one_pass(backward, one_by_one, names, normalised)


class OfLosses:
    """Clipped sums of any model's losses: in one pass where its uses of weights are known.

    It is a `clipped_sums.ClippedSum`. Call `choose` first, or the choice is by shapes alone. `way`
    says how gradients are clipped, and why; None before the choice.
    """

    def __init__(
        self,
        row_losses: clipped_sums.RowLosses,
        rows_per_unit: int,
        *,
        is_wanted: bool = True,
        has_begun: bool = False,
        report: Callable[[str], None] = lambda line: None,
    ):
        """Keeps its arguments.

        `is_wanted` allows one pass. `has_begun` says that an earlier trial chose one pass; that
        trial is not made again. `report` gets a line about the choice.
        """
        self.way: str | None = None
        self._row_losses = row_losses
        self._rows_per_unit = validation.integer("rows_per_unit", rows_per_unit, minimum=1)
        self._is_wanted = is_wanted
        self._has_begun = has_begun
        self._report = report
        self._chosen: clipped_sums.ClippedSum | None = None
        self._loop = clipped_sums.looped(row_losses)

    @property
    def is_in_one_pass(self) -> bool:
        """Whether one pass was chosen."""
        return self._chosen not in (None, self._loop)

    def __call__(
        self,
        weights: Sequence[tf.Tensor],
        rows: clipped_sums.Rows,
        row_splits: tf.Tensor,
        clip_norm: tf.Tensor | float,
    ) -> tuple[list[tf.Tensor], clipped_sums.PerUnit]:
        """Returns the clipped sum, as a `clipped_sums.ClippedSum` does."""
        chosen = self._chosen or self._choose(weights, rows)
        return chosen(weights, rows, row_splits, clip_norm)

    def choose(self, weights: Sequence[np.ndarray], rows: clipped_sums.Rows) -> None:
        """Chooses by the shapes and by a trial on at least one row, before anything rests on it."""
        self._choose(weights, rows, trial=True)

    def check(self, weights: Sequence[np.ndarray], rows: clipped_sums.Rows) -> None:
        """Chooses if nothing was chosen; else refuses one pass that differs from the loop.

        It also refuses a run that began with one pass, if that is not chosen any more.
        """
        if self._chosen is None and not self._has_begun:
            self.choose(weights, rows)
            return
        chosen = self._chosen or self._choose(weights, rows)
        if self._has_begun and self._is_wanted and chosen is self._loop:
            raise validation.UsageError(
                "This run began with gradients clipped in one pass, and it is not shown that this "
                f"bounded what a unit moves. {self.way} Begin a new run in another folder. If you "
                "know that the loss of each row depends on that row alone, in_one_pass=False goes "
                "on with this one."
            )
        if not self._agrees(chosen, weights, rows):
            raise validation.UsageError(
                "The gradients of rows are not what one pass over all of them says: the model may "
                "mix rows. Begin a new run with in_one_pass=False, which takes one gradient after "
                "the other: the clip may not have bounded what the steps so far released."
            )

    def _choose(
        self,
        weights: Sequence[tf.Tensor | np.ndarray],
        rows: clipped_sums.Rows,
        *,
        trial: bool = False,
    ) -> clipped_sums.ClippedSum:
        chosen, reason = self._loop, "as asked, or as the run began"
        if self._is_wanted:
            try:
                booked, reason = self._booked(weights, rows), None
                if trial and not self._agrees(booked, weights, rows, must_tell=True):
                    reason = "a trial gives other norms or sums, or the rows tried are alike"
                else:
                    chosen = booked
            except graph_uses.UnknownUseError as error:
                reason = str(error)
            except Exception as error:  # The loop needs no other graph.
                reason = f"its graph cannot be made for another number of rows ({error})"
        self._chosen = chosen
        self.way = (
            "Gradients are clipped in one pass."
            if reason is None
            else f"Gradients are clipped one after the other: {reason}."
        )
        self._report(self.way)
        return chosen

    def _booked(
        self, weights: Sequence[tf.Tensor | np.ndarray], rows: clipped_sums.Rows
    ) -> clipped_sums.ClippedSum:
        """Returns the sum in one pass, traced, so that all of its uses are found."""
        of_weights = [tf.TensorSpec(x.shape, x.dtype) for x in weights]
        rows = tf.nest.map_structure(lambda x: tf.TensorSpec([None, *x.shape[1:]], x.dtype), rows)
        with tf.init_scope():
            booked = booked_losses(self._row_losses, of_weights, rows, self._rows_per_unit)
            signature = [
                of_weights,
                rows,
                tf.TensorSpec([None], tf.int64),
                tf.TensorSpec([], tf.float64),
            ]
            compiled = tf.function(booked, input_signature=signature, autograph=False)
            compiled.get_concrete_function()
        return compiled

    def _agrees(
        self,
        chosen: clipped_sums.ClippedSum,
        weights: Sequence[tf.Tensor | np.ndarray],
        rows: clipped_sums.Rows,
        *,
        must_tell: bool = False,
    ) -> bool:
        """Returns whether norms and sums are those of one gradient after the other.

        Made-up rows are tried beside the given ones: as many as units of all layouts take. With
        `must_tell`, norms that are all alike, or not finite, are no agreement.
        """
        if chosen is self._loop:
            return True
        rng = np.random.default_rng(0)
        # At initial weights, gradients in the wrong place may be zero.
        moved = [tf.constant(x + rng.normal(0.0, 0.1, np.shape(x)), tf.float32) for x in weights]
        most, rows = self._rows_per_unit, tf.nest.map_structure(tf.convert_to_tensor, rows)
        sizes = [1, 1, most, 0, most // 2, 1, 1]  # Of one row, full, empty and padded.
        while len(tf.nest.flatten(rows)[0]) < sum(sizes):
            rows = tf.nest.map_structure(lambda x: losses_trial.with_shuffled(x, rng), rows)
        rows = tf.nest.map_structure(lambda x: x[: sum(sizes)], rows)
        splits = tf.constant(np.cumsum([0, *sizes]), tf.int64)
        _, measured = self._loop(moved, rows, splits, tf.constant(1.0, tf.float64))
        norms = np.asarray(measured.norms)
        proper = norms[np.isfinite(norms) & (norms > 0.0)]
        if len(proper) < 2 or proper.max() < 1.01 * proper.min():
            return not must_tell
        # The factors differ, since sums of unclipped gradients are right in any order.
        arguments = (moved, rows, splits, tf.constant(np.median(proper) / 2.0, tf.float64))
        (found, of_units), (expected, _) = (way(*arguments) for way in (chosen, self._loop))
        rounding = 1e-6 * max(1.0, proper.max())
        return np.allclose(of_units.norms, norms, rtol=_SAME, atol=rounding) and all(
            np.allclose(x, y, rtol=0, atol=_SAME * np.abs(y).max(initial=0.0) + rounding)
            for x, y in zip(found, expected, strict=True)
        )


class _Backward(typing.NamedTuple):
    """Losses of units, and gradients of their sum for what weights have a part in."""

    losses: tf.Tensor
    results: list[_Result]
    gradients: list[tf.Tensor]


def _in_one_pass(
    backward: Callable[[list[tf.Tensor], clipped_sums.Rows, tf.Tensor], _Backward],
    one_by_one: clipped_sums.ClippedSum,
    names: Sequence[str],
    normalised: bool,
) -> clipped_sums.ClippedSum:
    """Returns the clipped sum by one pass backward, and by `one_by_one` where too much cancels."""

    def clipped_sum(
        weights: Sequence[tf.Tensor],
        rows: clipped_sums.Rows,
        row_splits: tf.Tensor,
        clip_norm: tf.Tensor | float,
    ) -> tuple[list[tf.Tensor], clipped_sums.PerUnit]:
        weights = [tf.convert_to_tensor(weight) for weight in weights]
        row_splits = clipped_sums.checked_row_splits(rows, row_splits)
        losses, results, gradients = backward(weights, rows, row_splits)
        formed = _formed(results, gradients)
        number = tf.size(losses)
        compared = _compared(results, gradients, number, formed)
        ties = _ties(results)  # Of a tied one the norm is among what was compared.
        whole = [_square(x) for name, x in formed.items() if name not in ties]
        squares = tf.add_n([compared.square, *whole])
        both = squares + compared.between
        norms = _norms(both)
        is_finite = tf.math.is_finite(norms)
        lengths = tf.sqrt(compared.length_squared)
        # This is also so where a length is no number.
        is_alone = is_finite & tf.math.logical_not(lengths * tf.sqrt(squares) <= _CANCELLED * both)
        scales = tf.where(
            is_finite & tf.math.logical_not(is_alone),
            clipping.scale_to(norms, clip_norm),
            tf.zeros_like(norms),
        )
        shapes = {
            name: typing.cast(tuple[int, ...], tuple(x.shape))
            for name, x in zip(names, weights, strict=True)
        }
        sums = _sums(results, gradients, formed, tf.cast(scales, tf.float32), shapes)
        total = [tf.reshape(sums[name], shape) for name, shape in shapes.items()]

        def with_others():
            others = _only(rows, row_splits, is_alone)
            more, measured = one_by_one(weights, *others, clip_norm)
            added = [
                tf.cast(tf.cast(x, summation.DTYPE) + y, x.dtype)
                for x, y in zip(total, more, strict=True)
            ]
            return added, tf.where(is_alone, measured.norms, norms)

        total, norms = tf.cond(tf.reduce_any(is_alone), with_others, lambda: (total, norms))
        norms = tf.where(row_splits[1:] > row_splits[:-1], norms, tf.zeros_like(norms))
        if normalised:
            total = clipped_sums.divided(total, clip_norm)
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


def _filled_up(rows: clipped_sums.Rows, indices: tf.Tensor) -> clipped_sums.Rows:
    """Returns rows by their indices, with a row of zeros after the last one."""

    def padded(x: tf.Tensor) -> tf.Tensor:
        return tf.pad(x, [[0, 1], *[[0, 0]] * (len(x.shape) - 1)])

    return tf.nest.map_structure(lambda x: tf.gather(padded(x), indices), rows)


def _with_padding(row_splits: tf.Tensor, rows_per_unit: int) -> tf.Tensor:
    """Returns indices of as many rows for each unit, the last ones that of padding."""
    indices, ends = _indices(row_splits, rows_per_unit)
    return tf.reshape(tf.where(indices < ends, indices, row_splits[-1]), [-1])


def _with_copies(row_splits: tf.Tensor, rows_per_unit: int) -> tf.Tensor:
    """Returns indices of `rows_per_unit` rows for each unit, filled up with its first row.

    A made-up row might not be finite, and spoil others.
    """
    indices, ends = _indices(row_splits, rows_per_unit)
    first = tf.where(indices[:, :1] < ends, indices[:, :1], tf.zeros_like(ends))
    return tf.reshape(tf.where(indices < ends, indices, first), [-1])


def _indices(row_splits: tf.Tensor, rows_per_unit: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns indices from the first row of each unit, and that after its last."""
    begins, ends = row_splits[:-1, None], row_splits[1:, None]
    check = tf.debugging.assert_less_equal(
        ends - begins,
        tf.constant(rows_per_unit, tf.int64),
        "row_splits has a unit of more rows than rows_per_unit, which clipping was made for.",
    )
    with tf.control_dependencies([] if check is None else [check]):
        return begins + tf.range(rows_per_unit, dtype=tf.int64), ends


def _gradients(losses: tf.Tensor, outputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the gradients of the sum of losses, zero where there is none."""
    found = tf.gradients(losses, outputs, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    return [tf.convert_to_tensor(gradient) for gradient in found]


@dataclasses.dataclass
class _Result:
    """Part of the computation that weights had a part in, and how."""

    outputs: tf.Tensor
    order: weight_uses.Order | tf.Tensor
    uses: list[weight_uses.Use]
    units: _Units


class _Record:
    """A `weight_uses.Recorder` whose results get gradients."""

    def __init__(self, tape: tf.GradientTape, units: _Units):
        self._tape = tape
        self._units = units
        self._results = {}

    def __call__(
        self,
        outputs: tf.Tensor,
        *uses: weight_uses.Use,
        order: weight_uses.Order | tf.Tensor = weight_uses.Order.SEQUENCES,
    ) -> tf.Tensor:
        by_step = [x for x in uses if isinstance(x, (weight_uses.Lookup, weight_uses.StepBias))]
        if by_step and not isinstance(order, weight_uses.Order):
            raise NotImplementedError(
                f"the weight {by_step[0].name} is looked up, or added by step, at picked positions."
            )
        self._tape.watch(outputs)
        result = self._results.setdefault(outputs.ref(), _Result(outputs, order, [], self._units))
        result.uses.extend(uses)
        return outputs

    @property
    def results(self) -> list[_Result]:
        return list(self._results.values())


def _in_float32(result: _Result) -> _Result:
    """Returns a result with all inputs of its uses in float32: what is measured, and added."""
    uses = [
        dataclasses.replace(use, inputs=tf.cast(use.inputs, tf.float32))
        if isinstance(use, weight_uses.Product | weight_uses.Scale)
        else use
        for use in result.uses
    ]
    return dataclasses.replace(result, uses=uses)


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
        spec = tf.TensorSpec(values.shape[1:], values.dtype)
        return self.map(lambda x: tf.reduce_sum(x, axis=1), [values], order, [], spec)

    def map(
        self,
        function: Callable[..., typing.Any],
        tokens: Sequence[tf.Tensor],
        order: weight_uses.Order | tf.Tensor,
        others: Sequence[tf.Tensor],
        result: typing.Any,
    ) -> typing.Any:
        """Calls a function of units, of all at once if they have as many tokens each.

        The function takes tensors of shape [units, tokens, …], and those of `others`, with units as
        their first axis. It returns a structure of tensors that have units as their first axis;
        `result` has their specs for one unit. `tokens` have shape [n, …], in the given order of
        sequences and steps.
        """

        def together():
            return function(*(self.apart(x, order) for x in tokens), *others)

        if isinstance(order, weight_uses.Order):
            return together()

        def one_by_one():
            splits = self.splits(order)

            def of_unit(index):
                own = [x[None, splits[index] : splits[index + 1]] for x in tokens]
                found = function(*own, *(x[index : index + 1] for x in others))
                return tf.nest.map_structure(lambda x: x[0], found)

            return tf.map_fn(of_unit, tf.range(self.number), fn_output_signature=result)

        is_full = tf.equal(tf.size(order), self.number * self.num_tokens)
        return tf.cond(is_full, together, one_by_one)

    def splits(self, positions: tf.Tensor) -> tf.Tensor:
        """Returns where the tokens of each unit begin among picked ones, shape [units + 1]."""
        begins = tf.range(self.number + 1) * self.num_tokens
        return tf.searchsorted(positions, tf.cast(begins, positions.dtype))


def _last_size(values: tf.Tensor) -> int:
    size = values.shape[-1]
    if size is None:
        raise ValueError(f"The last axis of {values} has no fixed size.")
    return size


def _is_formed(use: weight_uses.Use, result: _Result) -> bool:
    """Returns whether it is cheaper to form all units' gradients than to compare tokens."""
    if isinstance(use, weight_uses.Product):
        sizes = _last_size(use.inputs), _last_size(result.outputs)
        return math.prod(sizes) <= _LARGEST_FORMED * result.units.num_tokens * sum(sizes)
    if isinstance(use, weight_uses.Bias):
        # The tokens are compared for another use anyway, so that this costs nothing.
        others = [x for x in result.uses if not isinstance(x, weight_uses.Bias)]
        return all(_is_formed(x, result) for x in others)
    return not isinstance(use, weight_uses.Lookup)


def _outer_products(first: tf.Tensor, second: tf.Tensor) -> tf.Tensor:
    """Returns the sums of tokens' outer products: from shapes [units, tokens, …]."""
    return tf.matmul(first, second, transpose_a=True)


def _formed(results: Sequence[_Result], gradients: Sequence[tf.Tensor]) -> dict[str, tf.Tensor]:
    """Returns gradients of all units by name of the weight, [units, …], for some weights."""
    formed = {}
    for result, gradient in zip(results, gradients, strict=True):
        units = result.units
        for use in result.uses:
            if not _is_formed(use, result):
                continue
            if isinstance(use, weight_uses.Product):
                given, order = use.inputs, result.order
                pair = (gradient, given) if use.transposed else (given, gradient)
                spec = tf.TensorSpec([_last_size(x) for x in pair], tf.float32)
                of_use = units.map(_outer_products, pair, order, [], spec)
            elif isinstance(use, weight_uses.Scale):
                of_use = units.sum_of_tokens(use.inputs * gradient, result.order)
            elif isinstance(use, weight_uses.Bias):
                of_use = units.sum_of_tokens(gradient, result.order)
            else:
                by = units.apart(gradient, result.order)
                steps = [units.rows_per_unit, units.sequence_length, by.shape[-1]]
                of_use = tf.reduce_sum(tf.reshape(by, [-1, *steps]), axis=1)
            formed[use.name] = of_use
    return formed


def _square(values: tf.Tensor) -> tf.Tensor:
    """Returns the squared norm over all but the first axis, float64; nothing cancels here."""
    size = typing.cast(int, values.shape[1:].num_elements())
    return _squares(tf.reshape(values, [tf.shape(values)[0], size]))


def _squares(values: tf.Tensor) -> tf.Tensor:
    """Returns the squared norms over the last axis, float64, for any order of summation."""
    size = _last_size(values)
    at_once = max(n for n in range(1, _ADDED + 1) if size % n == 0)
    shape = tf.concat([tf.shape(values)[:-1], [size // at_once, at_once]], axis=0)
    return tf.reduce_sum(tf.square(_lengths(tf.reshape(values, shape))), axis=-1)


def _lengths(values: tf.Tensor) -> tf.Tensor:
    """Returns the norms over the last axis, summed in float32, as float64."""
    return tf.cast(tf.math.reduce_euclidean_norm(values, axis=-1), tf.float64)


def _norms(squares: tf.Tensor) -> tf.Tensor:
    """Returns the root; infinite if the square is NaN or above the largest float32."""
    # Rounding may make the difference negative.
    norms = tf.sqrt(tf.maximum(squares, 0.0))
    return tf.where(squares <= tf.float32.max, norms, tf.constant(math.inf, tf.float64))


class _Compared(typing.NamedTuple):
    """Parts of squared norms that a comparison of tokens finds, float64, shape [units].

    Attributes:
      square: Squared norms of the gradients of uses, summed.
      between: Twice the inner products of the gradients of two uses of the same weight.
      length_squared: A², summed: A is the norm if all tokens' terms had the same direction.
    """

    square: tf.Tensor
    between: tf.Tensor
    length_squared: tf.Tensor

    @classmethod
    def none(cls, number: tf.Tensor) -> _Compared:
        """Returns zeros."""
        return cls(*(tf.zeros([number], tf.float64) for _ in range(3)))

    def plus(self, other: _Compared) -> _Compared:
        return _Compared(*(x + y for x, y in zip(self, other, strict=True)))


def _compared(
    results: Sequence[_Result],
    gradients: Sequence[tf.Tensor],
    number: tf.Tensor,
    formed: Mapping[str, tf.Tensor],
) -> _Compared:
    """Compares the tokens of gradients that are not formed, and looks at all lookups."""
    compared, ties = _Compared.none(number), _ties(results)
    for result, gradient in zip(results, gradients, strict=True):
        units = result.units
        lookups = [use for use in result.uses if isinstance(use, weight_uses.Lookup)]
        for use in lookups:
            words, of_words = (units.apart(x, result.order) for x in (use.ids, gradient))
            found = _looked_up(words, of_words, number, formed.get(use.name))
            compared = compared.plus(found)
        uses = [use for use in result.uses if use not in lookups and use.name not in formed]
        if not uses:
            continue
        tied = []
        for use in uses:
            if use.name in ties:
                index, words = ties[use.name]
                looked_up = results[index]
                tied = [
                    looked_up.units.apart(x, looked_up.order) for x in (words, gradients[index])
                ]
        inputs = [use.inputs for use in uses if isinstance(use, weight_uses.Product)]
        # All others are biases.
        of_tokens = functools.partial(_compared_tokens, float(len(uses) - len(inputs)))
        specs = tf.nest.map_structure(lambda x: tf.TensorSpec([], x.dtype), compared)
        found = units.map(of_tokens, [gradient, *inputs], result.order, tied, specs)
        compared = compared.plus(found)
    return compared


def _looked_up(
    words: tf.Tensor, gradient: tf.Tensor, number: tf.Tensor, of_product: tf.Tensor | None
) -> _Compared:
    """Returns squared norms of the gradients of an embedding that is looked up.

    `words` are ids, shape [units, words]; `gradient` has shape [units, words, size]. `of_product`
    has formed gradients of the same embedding from another use, shape [units, ids, size].
    """
    of_word = tf.range(number)[:, None] + tf.zeros_like(words, tf.int32)
    keys = tf.cast(words, tf.int64) * tf.cast(number, tf.int64) + tf.cast(of_word, tf.int64)
    distinct, index = tf.unique(tf.reshape(keys, [-1]))
    size = _last_size(gradient)
    rows = tf.reshape(gradient, [-1, size])
    rows = tf.math.unsorted_segment_sum(rows, index, tf.size(distinct))
    length_squared = tf.square(tf.reduce_sum(_lengths(gradient), axis=1))
    if of_product is None:
        of_row = distinct % tf.cast(number, tf.int64)
        square = tf.math.unsorted_segment_sum(_squares(rows), of_row, number)
    else:
        squares = _squares(of_product)
        length_squared += tf.reduce_sum(squares, axis=1)
        rows = tf.reshape(tf.gather(rows, index), tf.shape(gradient))
        rows += tf.gather(of_product, words, batch_dims=1)
        indices = tf.stack([of_word, tf.cast(words, tf.int32)], axis=-1)
        squares = tf.tensor_scatter_nd_update(squares, indices, _squares(rows))
        square = tf.reduce_sum(squares, axis=1)
    return _Compared(square, tf.zeros_like(square), length_squared)


def _ties(results: Sequence[_Result]) -> dict[str, tuple[int, tf.Tensor]]:
    """Returns where, and for which ids, an embedding is looked up that is also multiplied with."""
    uses_of = collections.defaultdict(list)
    for index, result in enumerate(results):
        for use in result.uses:
            uses_of[use.name].append((index, use))
    ties = {}
    for name, uses in uses_of.items():
        if len(uses) == 1:
            continue
        lookups = [(i, use.ids) for i, use in uses if isinstance(use, weight_uses.Lookup)]
        products = [use for _, use in uses if getattr(use, "transposed", False)]
        if len(uses) != 2 or len(lookups) != 1 or len(products) != 1:
            raise NotImplementedError(
                f"the weight {name} is used in {len(uses)} places that are not a lookup and the "
                "product with its transpose: add the inner product of their gradients to the norms."
            )
        ties[name] = lookups[0]
    return ties


def _compared_tokens(num_biases: float, gradient: tf.Tensor, *others: tf.Tensor) -> _Compared:
    """Compares the tokens of one result.

    Σ_{t,t'} (x_t · x_t') (δ_t · δ_t') is ‖Lᵀ δ‖² for the Cholesky factor L of the inner products
    x_t · x_t', taken in float64. Lᵀ δ in float32 is off by at most γ A, where γ = (n + 2) u for n
    tokens and u = 2⁻²⁴: column t of Lᵀ has the norm of x_t. Comparing δ in float32, too, would be
    off by the square of A / ‖gradient‖, and by as many roundings as there are outputs.

    `gradient` is δ, shape [units, tokens, outputs]; `num_biases` biases have the same result.
    `others` are inputs x of the products with this result, shape [units, tokens, …]. Where the
    weight of the only product is looked up, too, the ids w, shape [units, words], and the gradient
    δ' of what was looked up, shape [units, words, inputs], follow. `between` is then 2 Σ_{t,t'}
    δ_t[w_t'] (x_t · δ'_t'), t' over the words.
    """
    given = list(others)
    tied = [given.pop(-2), given.pop()] if len(given) > 2 and given[-2].dtype.is_integer else []
    inputs = [tf.cast(x, tf.float64) for x in given]
    alike = tf.add_n([tf.matmul(x, x, transpose_b=True) for x in inputs]) + num_biases
    sizes = tf.sqrt(tf.linalg.diag_part(alike)) * _lengths(gradient)
    length = tf.reduce_sum(sizes, axis=1)
    added = sum(map(_last_size, inputs)) + int(num_biases)
    factor = tf.cast(_factor(alike, added), gradient.dtype)
    product = tf.matmul(factor, gradient, transpose_a=True)
    # Where the factor belongs to another matrix, the length is infinite or no number.
    square = tf.reduce_sum(_squares(product), axis=1)
    square += tf.where(tf.math.is_finite(length), tf.zeros_like(length), length)
    between = tf.zeros_like(square)
    if tied:
        (states,), (words, of_words) = inputs, tied
        picked = tf.cast(tf.gather(gradient, words, axis=2, batch_dims=1), tf.float64)
        picked *= tf.matmul(states, tf.cast(of_words, tf.float64), transpose_b=True)
        between = 2.0 * tf.reduce_sum(picked, axis=[1, 2])
    return _Compared(square, between, tf.square(length))


def _factor(alike: tf.Tensor, added: int) -> tf.Tensor:
    """Returns Cholesky factors L with L Lᵀ a little above matrices that may be singular.

    Inner products that are sums of m products (`added`), in float64, are off by a fraction of m u
    of the norms, u = 2⁻⁵³. For the factors to exist, the diagonal of n tokens has to grow by a
    fraction of n (n + m + 1) u (Higham 2002, theorem 10.7). Here it grows by twice that. With all
    roundings it moves the squared norm by at most 4 n (n + m + 1) u A². Where an inner product is
    not finite, the factor is that of another matrix. Float64, shape [units, tokens, tokens].
    """
    tokens = tf.cast(tf.shape(alike)[1], tf.float64)
    grown = 2.0 * tokens * (tokens + float(added + 1)) * 2.0**-53
    diagonal = tf.linalg.diag_part(alike)
    finite = tf.reduce_all(tf.math.is_finite(diagonal), axis=1)[:, None]
    diagonal = diagonal * (1.0 + grown) + _TINY
    alike = tf.where(finite[:, :, None], alike, tf.zeros_like(alike))
    diagonal = tf.where(finite, diagonal, tf.ones_like(diagonal))
    return tf.linalg.cholesky(tf.linalg.set_diag(alike, diagonal))


def _sums(
    results: Sequence[_Result],
    gradients: Sequence[tf.Tensor],
    formed: Mapping[str, tf.Tensor],
    scales: tf.Tensor,
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, tf.Tensor]:
    """Returns the sum of the units' gradients, each times its scale, by name of the weight.

    What belongs to a unit of scale zero is not looked at: it may not be finite, and zero
    times that would be no number.
    """
    kept, ties = scales > 0.0, _ties(results)

    def add_up(zeroed):
        sums = {name: [] for name in shapes}
        tied = []
        for name, of_units in formed.items():
            sums[name].append(tf.tensordot(scales, zeroed(of_units, kept), 1))
        for result, gradient in zip(results, gradients, strict=True):
            kept_tokens = result.units.of_tokens(kept, result.order)
            scale = result.units.of_tokens(scales, result.order)[:, None]
            by = zeroed(gradient, kept_tokens)
            for use in result.uses:
                if use.name in formed and not isinstance(use, weight_uses.Lookup):
                    continue
                if isinstance(use, weight_uses.Product):
                    of_use = _of_product(use, zeroed(use.inputs, kept_tokens), by, scale)
                elif isinstance(use, weight_uses.Bias):
                    of_use = tf.matmul(scale, by, transpose_a=True)[0]
                else:
                    lookup = typing.cast(weight_uses.Lookup, use)  # All others are formed.
                    if lookup.name in ties:
                        tied.append((lookup.name, lookup.ids, by * scale))
                        continue
                    num_ids = shapes[lookup.name][0]
                    of_use = tf.math.unsorted_segment_sum(by * scale, lookup.ids, num_ids)
                sums[use.name].append(of_use)
        added = {name: tf.add_n(of_uses) for name, of_uses in sums.items()}
        for name, ids, rows in tied:
            # Few rows of a large table change, in place.
            distinct, index = tf.unique(ids)
            rows = tf.math.unsorted_segment_sum(rows, index, tf.size(distinct))
            added[name] = tf.tensor_scatter_nd_add(added[name], distinct[:, None], rows)
        return added

    # Zeros are hardly ever needed, and would double the numbers to copy.
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
    # The gradient of the scores is by far the largest tensor. It is not copied.
    if _last_size(inputs) < _last_size(gradient):
        inputs *= scale
    else:
        gradient *= scale
    first, second = (gradient, inputs) if use.transposed else (inputs, gradient)
    return tf.matmul(first, second, transpose_a=True)
