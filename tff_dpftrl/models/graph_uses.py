"""Uses of weights found in the graph of a model's losses, for per-example gradients.

The models of this package report their uses of weights (`weight_uses`). Those of any other model
in TensorFlow, such as one of Keras, are found in its graph: a graph knows all operations that read
a tensor, so that no use is missed. Each must be one whose gradient is known here: a matrix product
(of `Dense`, `EinsumDense`, attention, the cells of an unrolled LSTM), a sum or product by entries
(biases, layer norms, positions) or a lookup (`Embedding`). Else none of the uses are returned.

**Rows.** The gradient of a result has a part for each row of the batch if the losses and
all results are computed for each row by itself, which the operations of the graph have to show
(`row_layouts`). In a result, the rows must be the first axis, or flattened with the axes after it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tff_dpftrl.models import row_layouts, weight_uses

_SAME_ORDER = ("Identity", "Reshape", "ExpandDims", "Squeeze")
_SELECTIONS = ("Transpose", "StridedSlice", "Slice", "Split", "SplitV", "Unpack", "GatherV2")
_RENAMED = {"split_dim": "axis"}  # Arguments of `tf.raw_ops`.
_BY_ENTRY = ("AddV2", "Add", "Sub", "Mul", "BiasAdd", "BroadcastTo")
_WITHOUT_GRADIENT = ("Shape", "ShapeN", "Rank", "Size")
_OTHER_GRAPH = "the graph is another one for another number of rows"

Gradients: TypeAlias = Callable[[Sequence[tf.Tensor]], tf.Tensor]


class UnknownUseError(Exception):
    """A use of a weight whose gradient is not known here."""


@dataclasses.dataclass(frozen=True)
class Found:
    """All uses of a weight of one kind, as one use of more tokens.

    Attributes:
      use: The use, named after the index of the weight. `Bias` stands for all uses by entry: what
        `gradient` returns is then the gradient of the weight itself, flat, one token a row.
      tokens: Number of tokens of a row.
      outputs: Results of the operations.
      gradient: Function from the gradients of these to that of the tokens, shape
        [batch · tokens, outputs].
    """

    use: weight_uses.Use
    tokens: int
    outputs: list[tf.Tensor]
    gradient: Gradients


def tokens_of_rows(
    losses: Callable[[Sequence[tf.Tensor], Any], tf.Tensor],
    weights: Sequence[tf.TensorSpec],
    rows: Any,
) -> list[tuple[str, int]]:
    """Finds how the rows of a batch are laid out in the results that depend on weights.

    `losses` maps weights and rows to the loss of each row. Returns the type of each operation, and
    the number of tokens of a row in the first axis of its result. A use that is not known, or whose
    rows cannot be told apart, raises UnknownUseError.
    """

    def with_gradients(given, of_rows):
        return losses(given, of_rows), row_layouts.own_gradients(tf.compat.v1.get_default_graph())

    rows = tf.nest.map_structure(lambda x: tf.TensorSpec([None, *x.shape[1:]], x.dtype), rows)
    function = tf.function(with_gradients, autograph=False)
    traced = function.get_concrete_function(list(weights), rows)
    tokens = []

    def read(*given):
        results = tf.nest.flatten(traced.structured_outputs)
        given = [tf.identity(weight) for weight in given]
        of_rows, (result, *pairs) = row_layouts.for_many_rows(traced, given, results)
        layouts = row_layouts.Layouts(result.graph, of_rows)
        reading = _Reading(layouts=layouts)
        try:
            _check(layouts, result, zip(pairs[::2], pairs[1::2], strict=True))
            reading.found(given, traced.graph)
        except (row_layouts.MixedRowsError, UnknownUseError) as error:
            raise UnknownUseError(str(error).replace(row_layouts.PREFIX, "")) from error
        tokens.extend(reading.tokens)

    tf.function(read, autograph=False).get_concrete_function(*weights)
    return tokens


def _check(
    layouts: row_layouts.Layouts,
    losses: tf.Tensor,
    gradients: Iterable[tuple[tf.Tensor, tf.Tensor]],
) -> None:
    """Refuses losses that are not shown to be those of each row, and gradients likewise."""
    if layouts.of(losses) != row_layouts.Layout(0) or losses.shape != [row_layouts.BATCH]:
        raise UnknownUseError("the losses are not one for each row, in their order")
    for inputs, gradient in gradients:
        layout = layouts.of(inputs)
        if layout is not None and layout != layouts.of(gradient):
            raise UnknownUseError(f"the gradient of {inputs.name} may mix the rows of a batch")


def find(weights: Sequence[tf.Tensor], tokens: Sequence[tuple[str, int]]) -> list[Found]:
    """Finds the uses of weights in the graph that is being made.

    Nothing but the losses may have read the weights. `tokens` is the result of `tokens_of_rows`. A
    tied embedding has two uses: a lookup and a transposed product.
    """
    return _Reading(tokens).found(weights, weights[0].graph)


@dataclasses.dataclass(frozen=True)
class _Use:
    """One operation that reads a weight.

    Attributes:
      kind: Product, with inputs or outputs first in the matrix, lookup, or bias: by entry.
      shape: Shape of the matrix or table; empty if by entry.
      inputs: Inputs or ids, shape [batch, tokens, …].
      tokens: Number of tokens of a row.
      outputs: Result of the operation.
      gradient: Function from its gradient to that of the tokens, [batch, tokens, …].
    """

    kind: str
    shape: tuple[int, ...]
    inputs: tf.Tensor | None
    tokens: int
    outputs: tf.Tensor
    gradient: Callable[[tf.Tensor], tf.Tensor]


@dataclasses.dataclass(frozen=True)
class _View:
    """A tensor that has entries of a weight.

    Attributes:
      tensor: The tensor.
      entries: Which of the flat weight's entries it has, in its shape; None for all, in order.
      size: Number of the weight's entries.
    """

    tensor: tf.Tensor
    entries: np.ndarray | None
    size: int

    def matrix(self) -> tuple[tuple[int, ...], bool]:
        """Returns the shape of the weight in memory, and whether this view is its transpose."""
        shape = tuple(self.tensor.shape)
        if len(shape) == 2 and self.entries is None:
            return shape, False
        whole = np.arange(self.size)
        if len(shape) == 2 and math.prod(shape) == self.size:
            whole = whole.reshape(shape[::-1])
            if np.array_equal(self.entries, whole.T):
                return shape[::-1], True
        raise UnknownUseError(f"a part of a weight is multiplied with ({self.tensor.name})")

    def selected(self, operation: tf.Operation, position: int) -> list[_View]:
        """Returns views of the results of an operation that selects or moves entries."""
        if operation.type in _SAME_ORDER:
            entries = self.entries
            outputs = operation.outputs
            if not outputs[0].shape.is_fully_defined():
                raise UnknownUseError(f"sizes of {outputs[0].name} are not known")
            if entries is not None:
                entries = entries.reshape(outputs[0].shape)
            return [_View(outputs[0], entries, self.size)]
        entries = self.entries
        if entries is None:
            entries = np.arange(self.size).reshape(self.tensor.shape)
        given = [entries if i == position else _constant(x) for i, x in enumerate(operation.inputs)]
        results = _evaluated(operation, given)
        if any(len(np.unique(result)) != result.size for result in results):
            raise UnknownUseError(f"a weight has entries that are read twice ({operation.name})")
        pairs = zip(operation.outputs, results, strict=True)
        return [_View(output, result, self.size) for output, result in pairs]


def _constant(tensor: tf.Tensor) -> np.ndarray:
    value = _static(tensor)
    if value is None:
        raise UnknownUseError(f"a choice of a weight's entries is not constant ({tensor.name})")
    return value


def _evaluated(operation: tf.Operation, given: Sequence[Any]) -> list[np.ndarray]:
    """Computes the result of an operation for given inputs, outside of the graph."""
    arguments = {
        _RENAMED.get(argument.name, argument.name): value
        for argument, value in zip(operation.op_def.input_arg, given, strict=True)
    }
    for attribute in operation.op_def.attr:
        if attribute.type != "type":  # Types are those of the inputs.
            arguments[attribute.name] = operation.get_attr(attribute.name)
    with tf.init_scope():
        results = getattr(tf.raw_ops, operation.type)(**arguments)
        results = results if isinstance(results, (list, tuple)) else [results]
        return [result.numpy() for result in results]


def _static(tensor: tf.Tensor) -> np.ndarray | None:
    """Returns the value of a tensor, if it is the same for all batches of the same shapes."""
    value, operation = tf.get_static_value(tensor), tensor.op
    if value is not None:
        return value
    if operation.type in ("Range", "Cast", "Identity", "Less", "AddV2", "SelectV2"):
        given = [_static(x) for x in operation.inputs]
        if any(x is None for x in given):
            return None
        if operation.type == "Cast":
            return np.asarray(given[0], tensor.dtype.as_numpy_dtype)
        return _evaluated(operation, given)[0]
    if operation.type == "StridedSlice" and operation.get_attr("shrink_axis_mask"):
        sizes, begin = operation.inputs[0], _static(operation.inputs[1])
        if sizes.op.type == "Shape":
            given = list(sizes.op.inputs[0].shape) if sizes.op.inputs[0].shape.rank else None
        else:
            given = _static(sizes)
        if given is not None and begin is not None and np.ndim(given) == np.size(begin) == 1:
            size = given[int(begin[0])]
            return None if size is None else np.asarray(size)
    return None


class _Reading:
    """A reading of a graph: the first one notes numbers of tokens, which later ones are given."""

    def __init__(
        self,
        tokens: Sequence[tuple[str, int]] = (),
        *,
        layouts: row_layouts.Layouts | None = None,
    ):
        self.tokens: list[tuple[str, int]] = []
        self._known = list(tokens)
        self._layouts = layouts

    def found(self, weights: Sequence[tf.Tensor], traced: tf.Graph) -> list[Found]:
        """Returns the uses of weights, in the order of the graph that was traced."""
        order = {operation.name: i for i, operation in enumerate(traced.get_operations())}
        found = []
        for index, weight in enumerate(weights):
            if weight.dtype != tf.float32:
                raise UnknownUseError(f"a weight is {weight.dtype.name}")
            found += _merged(str(index), weight.shape, self._uses(weight, order))
        if self._layouts is None and self._known != self.tokens:
            raise UnknownUseError(_OTHER_GRAPH)
        return found

    def _uses(self, weight: tf.Tensor, order: dict[str, int]) -> list[_Use]:
        """Returns all operations that read a weight."""
        uses, views = [], [_View(weight, None, math.prod(weight.shape))]
        while views:
            view = views.pop()
            readers = {operation.name: operation for operation in view.tensor.consumers()}
            for operation in sorted(
                readers.values(), key=lambda x: order[x.name.removeprefix(row_layouts.PREFIX)]
            ):
                if operation.type in _WITHOUT_GRADIENT:
                    continue
                places = [i for i, x in enumerate(operation.inputs) if x.name == view.tensor.name]
                if len(places) != 1 or row_layouts.has_own_gradient(operation):
                    raise UnknownUseError(
                        f"{operation.name} reads a weight twice, or has a gradient of its own"
                    )
                if _is_selection(operation, *places):
                    views += view.selected(operation, *places)
                else:
                    uses.append(self._use(view, operation, *places))
        return uses

    def _use(self, view: _View, operation: tf.Operation, position: int) -> _Use:
        kind = operation.type
        if kind in _BY_ENTRY:
            return self._by_entry(view, operation, position)
        if kind == "MatMul" and position == 1 and not operation.get_attr("transpose_a"):
            return self._product(view, operation, operation.get_attr("transpose_b"))
        if kind.startswith("BatchMatMul") and position == 1 and not operation.get_attr("adj_x"):
            return self._product(view, operation, operation.get_attr("adj_y"))
        if kind == "Einsum" and len(operation.inputs) == 2:
            return self._einsum(view, operation, position)
        if kind == "GatherV2" and position == 0:
            return self._lookup(view, operation)
        raise UnknownUseError(
            f"a weight is read by {kind} ({operation.name}), whose gradient is not known here"
        )

    def _tokens(self, operation: tf.Operation, tensor: tf.Tensor) -> int:
        """Returns the number of entries of the first axis that a row has, which are adjacent."""
        if not tensor.shape.rank or None in list(tensor.shape[1:]):
            raise UnknownUseError(f"sizes of {tensor.name} are not known")
        if self._layouts is not None:
            if self._layouts.of(tensor) != row_layouts.Layout(0):
                raise UnknownUseError(f"{tensor.name} has not all of a row side by side")
            tokens = tensor.shape[0] // row_layouts.BATCH
        elif len(self.tokens) == len(self._known):
            raise UnknownUseError(_OTHER_GRAPH)
        else:
            tokens = self._known[len(self.tokens)][1]
        self.tokens.append((operation.type, tokens))
        return tokens

    def _product(self, view: _View, operation: tf.Operation, transposed: bool) -> _Use:
        shape, turned = view.matrix()
        inputs, outputs = operation.inputs[0], operation.outputs[0]
        tokens = self._tokens(operation, outputs) * math.prod(outputs.shape[1:-1])
        return _product(shape, transposed != turned, inputs, outputs, tokens)

    def _einsum(self, view: _View, operation: tf.Operation, position: int) -> _Use:
        if view.entries is not None:
            raise UnknownUseError(f"a part of a weight is multiplied with ({operation.name})")
        other, outputs = operation.inputs[1 - position], operation.outputs[0]
        equation = operation.get_attr("equation").decode()
        of_inputs, of_outputs = equation.split("->")
        names = of_inputs.split(",")
        ranks = [view.tensor.shape.rank, other.shape.rank, outputs.shape.rank]
        matrix, rows, result = (
            row_layouts.letters(term, rank)
            for term, rank in zip(
                (names[position], names[1 - position], of_outputs), ranks, strict=True
            )
        )
        free = [x for x in result if x in rows]
        summed = [x for x in matrix if x in rows]
        made = [x for x in matrix if x in result]
        is_plain = (
            all(len(set(x)) == len(x) for x in (matrix, rows, result))
            and not set(free) & set(matrix)
            and sorted(free + summed) == sorted(rows)
            and sorted(free + made) == sorted(result)
            and sorted(summed + made) == sorted(matrix)
            and rows[0] == result[0] == free[0]
        )
        if not is_plain or list(matrix) not in ([*summed, *made], [*made, *summed]):
            raise UnknownUseError(
                f"a weight is read by {equation} ({operation.name}), which is no matrix product"
            )
        sizes = dict(zip(matrix, view.tensor.shape, strict=True))
        shape = tuple(math.prod(sizes[x] for x in letters) for letters in (summed, made))
        is_transposed = list(matrix) != [*summed, *made]
        tokens = self._tokens(operation, outputs)
        sizes = dict(zip(result, outputs.shape, strict=True))
        tokens *= math.prod(sizes[x] for x in free[1:])
        inputs = tf.transpose(other, [rows.index(x) for x in (*free, *summed)])
        turned = [result.index(x) for x in (*free, *made)]
        shape = shape[::-1] if is_transposed else shape
        return _product(shape, is_transposed, inputs, outputs, tokens, turned)

    def _lookup(self, view: _View, operation: tf.Operation) -> _Use:
        table, ids, axis = operation.inputs
        is_whole = view.entries is None and table.shape.rank == 2
        if not is_whole or operation.get_attr("batch_dims") or _constant(axis) != 0:
            raise UnknownUseError(f"a part of a weight is looked up in ({operation.name})")
        tokens = self._tokens(operation, ids) * math.prod(ids.shape[1:])
        shape = tuple(table.shape)
        return _Use(
            "lookup",
            shape,
            tf.reshape(ids, [-1, tokens]),
            tokens,
            operation.outputs[0],
            lambda gradient: tf.reshape(gradient, [-1, tokens, shape[1]]),
        )

    def _by_entry(self, view: _View, operation: tf.Operation, position: int) -> _Use:
        kind, outputs = operation.type, operation.outputs[0]
        if kind == "BiasAdd" and operation.get_attr("data_format") != b"NHWC":
            raise UnknownUseError(f"a bias is not of the last axis ({operation.name})")
        if kind == "BroadcastTo" and position != 0 or outputs.shape.rank is None:
            raise UnknownUseError(f"a weight is a size of {operation.name}")
        sizes, shape = list(outputs.shape), list(view.tensor.shape)
        shape = [1] * (len(sizes) - len(shape)) + shape
        if not shape or shape[0] != 1:
            raise UnknownUseError(f"{operation.name} is of weights alone")
        tokens = self._tokens(operation, outputs)
        repeated = [i for i in range(1, len(shape)) if shape[i] == 1 and sizes[i] != 1]
        size, entries, whole = math.prod(shape), view.entries, view.size
        factor = operation.inputs[1 - position] if kind == "Mul" else None

        def gradient_of(gradient):
            if factor is not None:
                gradient *= factor
            if kind == "Sub" and position == 1:
                gradient = -gradient
            gradient = tf.reduce_sum(gradient, axis=repeated) if repeated else gradient
            gradient = tf.reduce_sum(tf.reshape(gradient, [-1, tokens, size]), axis=1)
            if entries is not None:
                gradient = tf.transpose(gradient)
                gradient = tf.math.unsorted_segment_sum(gradient, entries.reshape(-1), whole)
                gradient = tf.transpose(gradient)
            return tf.reshape(gradient, [-1, 1, whole])

        return _Use("bias", (), None, 1, outputs, gradient_of)


def _product(
    shape: tuple[int, ...],
    transposed: bool,
    inputs: tf.Tensor,
    outputs: tf.Tensor,
    tokens: int,
    order: Sequence[int] | None = None,
) -> _Use:
    sizes = shape[::-1] if transposed else shape

    def gradient_of(gradient):
        gradient = gradient if order is None else tf.transpose(gradient, order)
        return tf.reshape(gradient, [-1, tokens, sizes[1]])

    inputs = tf.reshape(inputs, [-1, tokens, sizes[0]])
    kind = "transposed product" if transposed else "product"
    return _Use(kind, shape, inputs, tokens, outputs, gradient_of)


def _is_selection(operation: tf.Operation, position: int) -> bool:
    if operation.type == "GatherV2":
        return position == 0 and _static(operation.inputs[1]) is not None
    if operation.type == "Split":
        return position == 1
    return operation.type in (*_SAME_ORDER, *_SELECTIONS) and position == 0


def _merged(name: str, shape: tf.TensorShape, uses: Sequence[_Use]) -> list[Found]:
    """Joins the uses of a weight that are of the same kind."""
    kinds = {(use.kind, use.shape) for use in uses}
    table = tuple(shape)
    is_tied = kinds == {("lookup", table), ("transposed product", table)}
    if len(kinds) != 1 and not is_tied:
        ways = ", ".join(sorted(kind for kind, _ in kinds)) or "none"
        raise UnknownUseError(f"a weight is used in several ways: {ways}")
    return [
        _as_one(name, kind, [use for use in uses if use.kind == kind]) for kind, _ in sorted(kinds)
    ]


def _as_one(name: str, kind: str, uses: Sequence[_Use]) -> Found:
    outputs = [use.outputs for use in uses]
    if kind == "bias":

        def summed(gradients):
            parts = zip(uses, gradients, strict=True)
            total = tf.add_n([use.gradient(gradient) for use, gradient in parts])
            return total[:, 0]

        return Found(weight_uses.Bias(name), 1, outputs, summed)

    def flat(parts: Iterable[tf.Tensor | None]) -> tf.Tensor:
        joined = tf.concat([part for part in parts if part is not None], axis=1)
        return tf.reshape(joined, [-1, *joined.shape[2:]])

    def gradient(gradients):
        parts = zip(uses, gradients, strict=True)
        return flat(use.gradient(gradient) for use, gradient in parts)

    if kind == "lookup":
        of_all = [tf.cast(use.inputs, tf.int64) for use in uses]
        use = weight_uses.Lookup(name, flat(of_all))
    else:
        inputs = flat(use.inputs for use in uses)
        use = weight_uses.Product(name, inputs, transposed=kind == "transposed product")
    return Found(use, sum(use.tokens for use in uses), outputs, gradient)
