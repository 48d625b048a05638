"""Proof, from the operations of a graph, that each row of a batch is computed by itself.

A tensor is *by rows* if it has a part for each row of the batch, the same function of this row for
all rows and batches; its `Layout` says which part. Operations keep this if they are known here and
do not move, pick, sort, scan or reduce along the axis of the rows. All others are refused, with
functions, loops and conditions, and what follows from them: the reason names the first one.
Integers that are computed from the number of rows may be sizes of tensors, and nothing else.

If the losses are by rows, so is the gradient of their sum, by the chain rule. It does not hold for
operations with a gradient of their own (`tf.custom_gradient`): `own_gradients` makes these
gradients part of the graph, where they are looked at like everything else.

The graph is the one that was traced for batches of any size, imported for `BATCH` rows
(`for_many_rows`), so that TensorFlow knows all sizes.
"""

from __future__ import annotations

import math
import string
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import tensorflow as tf

BATCH = 10007
"""Rows of the batch where shapes are read off: a prime, so that widths do not multiply to it."""

PREFIX = "for_many_rows/"
"""What names of operations begin with where they were imported."""

_BY_ENTRY = """
    Abs Add AddN AddV2 BiasAdd Cast Ceil ClipByValue Cos Div DivNoNan Elu Equal Erf Erfc
    Exp Expm1 Floor FloorDiv FloorMod Greater GreaterEqual Identity IsFinite IsInf IsNan LeakyRelu
    Less LessEqual Log Log1p LogicalAnd LogicalNot LogicalOr Maximum Minimum Mul MulNoNan Neg
    NotEqual OnesLike Pow RealDiv Reciprocal Relu Relu6 Round Rsqrt SelectV2 Selu Sigmoid Sign Sin
    Softplus Softsign Sqrt Square SquaredDifference StopGradient Sub Tanh Xdivy Xlogy ZerosLike
    """
# Operations that multiply sizes or join them, and those that pick some of their first input.
_OF_SIZES = ["ConcatV2", "Mul", "Pack"]
_OF_FIRST = """
    Cast ExpandDims GatherV2 Identity Prod Reshape Slice Squeeze StridedSlice Unpack
    """.split()

_SIZE_INPUTS = {
    **{"Reshape": (1,), "BroadcastTo": (1,), "Tile": (1,), "Fill": (0,)},
    **{"Slice": (1, 2), "StridedSlice": (1, 2, 3)},
}
_READS = {"ReadVariableOp", "ResourceGather"}  # The same for all batches if nothing is written.


class MixedRowsError(Exception):
    """An operation of which it is not shown that it keeps the rows of a batch apart."""


class Layout(NamedTuple):
    """Which part of a tensor is whose.

    Attributes:
      axis: The axis that has the rows; what it has of a row lies side by side.
      repeats: How often all rows follow each other along this axis.
    """

    axis: int
    repeats: int = 1


class _Size:
    """The value of integers that are computed from the number of rows."""


_Value: TypeAlias = Layout | _Size | MixedRowsError | None
_T = TypeVar("_T")
_Given: TypeAlias = Sequence[Layout | None]


def own_gradients(graph: tf.Graph) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Returns pairs of an input and its gradient, of operations that have a gradient of their own.

    The gradient is computed from the outputs, in place of their gradients.
    """
    pairs = []
    for operation in graph.get_operations():
        if has_own_gradient(operation):
            outputs = [x for x in operation.outputs if x.dtype.is_floating]
            inputs = [x for x in operation.inputs if x.dtype.is_floating]
            found = tf.gradients(outputs, inputs, grad_ys=outputs)
            pairs += [(x, y) for x, y in zip(inputs, found, strict=True) if y is not None]
    return [(x, tf.convert_to_tensor(y)) for x, y in pairs]


def has_own_gradient(operation: tf.Operation) -> bool:
    """Returns whether an operation has another gradient than others of its type."""
    try:
        operation.get_attr("_gradient_op_type")
    except ValueError:
        return False
    return True


def for_many_rows(
    traced: Any, weights: Sequence[tf.Tensor], results: Sequence[tf.Tensor]
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Imports a graph for `BATCH` rows into the one that is being traced.

    Returns the tensors in place of its rows, and of `results`.
    """
    captured = [tf.compat.v1.get_default_graph().capture(x) for x in traced.captured_inputs]
    own = traced.inputs[len(weights) : len(traced.inputs) - len(captured)]
    rows = [tf.compat.v1.placeholder(x.dtype, [BATCH, *x.shape[1:]]) for x in own]
    given = [*weights, *rows, *captured]
    inputs = {x.name: y for x, y in zip(traced.inputs, given, strict=True)}
    imported = tf.graph_util.import_graph_def(
        traced.graph.as_graph_def(),
        input_map=inputs,
        return_elements=[x.name for x in results],
        name=PREFIX,
    )
    return rows, [inputs.get(x.name, y) for x, y in zip(results, imported, strict=True)]


def letters(term: str, rank: int) -> str:
    """Returns a letter for each axis of a term of an equation, a digit where it has an ellipsis."""
    hidden = rank - len(term) + 3 if "..." in term else 0
    return term.replace("...", string.digits[len(string.digits) - hidden :])


class Layouts:
    """Layouts of the tensors of a graph that `for_many_rows` imported."""

    def __init__(self, graph: tf.Graph, rows: Sequence[tf.Tensor]):
        """Reads the graph."""
        self._values: dict[str, _Value] = {x.name: Layout(0) for x in rows}
        operations = graph.get_operations()  # Those that make inputs come before.
        stateful = {x.type for x in operations if x.op_def.is_stateful} - {"Assert"}
        self._reads = _READS if stateful <= _READS else set()
        for operation in operations:
            try:
                values = self._of_outputs(operation)
            except MixedRowsError as error:
                values = [error] * len(operation.outputs)
            for output, value in zip(operation.outputs, values, strict=True):
                self._values.setdefault(output.name, value)

    def of(self, tensor: tf.Tensor) -> Layout | None:
        """Returns the layout of a tensor; None if it is the same for all batches."""
        value = self._values[tensor.name]
        if isinstance(value, MixedRowsError):
            raise value
        if isinstance(value, _Size):
            raise _counts(tensor.op)
        return value

    def _of_outputs(self, operation: tf.Operation) -> Sequence[_Value]:
        kind, outputs = operation.type, operation.outputs
        if kind in ("Shape", "ShapeN", "Rank"):
            return [None if kind == "Rank" else _of_size(_sizes(x)) for x in operation.inputs]
        given = [self._values.get(x.name, _mixed(operation)) for x in operation.inputs]
        for value in given:
            if isinstance(value, MixedRowsError):
                raise value
        if operation.op_def.is_stateful and kind not in self._reads:
            raise _mixed(operation)
        if not any(given):
            return [None] * len(outputs)
        places = [index for index, value in enumerate(given) if isinstance(value, _Size)]
        if places and not any(isinstance(value, Layout) for value in given):
            if kind in _OF_SIZES or (kind in _OF_FIRST and places == [0]):
                return _of_sizes(operation)
        if set(places) - set(_SIZE_INPUTS.get(kind, ())):
            raise _counts(operation)
        layouts = [value if isinstance(value, Layout) else None for value in given]
        found = _RULES[kind](operation, layouts) if kind in _RULES else None
        found = [found] * len(outputs) if isinstance(found, Layout) else found
        if found is None:
            raise _mixed(operation)
        return [
            value if value is None or _is_in(value, output) else _mixed(operation)
            for value, output in zip(found, outputs, strict=True)
        ]


def _mixed(operation: tf.Operation) -> MixedRowsError:
    return MixedRowsError(f"{operation.type} ({operation.name}) is not known to keep rows apart")


def _counts(operation: tf.Operation) -> MixedRowsError:
    return MixedRowsError(f"{operation.type} ({operation.name}) computes with the number of rows")


def _is_of_batch(size: int | None) -> bool:
    return size is None or (size != 0 and size % BATCH == 0)


def _sizes(tensor: tf.Tensor) -> list[int | None]:
    """Returns the sizes, one that is not known if their number is not."""
    return [None] if tensor.shape.rank is None else tensor.shape.as_list()


def _axes_of_batch(tensor: tf.Tensor) -> list[int]:
    """Returns the axes in whose sizes the number of rows may have a part."""
    return [axis for axis, size in enumerate(_sizes(tensor)) if _is_of_batch(size)]


def _is_in(layout: Layout, tensor: tf.Tensor) -> bool:
    """Returns whether a tensor can have this layout, with no other use of the number of rows."""
    if _axes_of_batch(tensor) != [layout.axis]:
        return False
    size = tensor.shape[layout.axis]
    return bool(size) and not size % (BATCH * layout.repeats) and not _is_of_batch(size // BATCH)


def _of_size(sizes: Iterable[Any] | None) -> _Size | None:
    return _Size() if sizes is None or any(map(_is_of_batch, sizes)) else None


def _of_sizes(operation: tf.Operation) -> Sequence[_Value]:
    """Returns the values of outputs that are made of sizes."""
    if not all(x.dtype in (tf.int32, tf.int64) for x in operation.outputs):
        raise _counts(operation)
    if operation.type in ("Mul", "Prod"):
        factors = [_numbers(x) for x in operation.inputs[: 1 if operation.type == "Prod" else 2]]
        known = [abs(int(x)) for factor in factors if factor is not None for x in factor.flat]
        is_large = math.prod(x for x in known if x) >= 2**31  # It might overflow.
        if is_large or any(x is None for x in factors):
            return [_Size()]
    values = [_numbers(x) for x in operation.outputs]
    return [_of_size(None if value is None else value.flat) for value in values]


def _numbers(tensor: tf.Tensor) -> np.ndarray | None:
    """Returns the value of a tensor if TensorFlow knows it when it infers shapes."""
    value = tf.get_static_value(tensor)
    if value is None and tensor.dtype in (tf.int32, tf.int64) and tensor.shape.rank in (0, 1):
        anything = tf.compat.v1.placeholder(tf.int32)
        shape = tf.reshape(anything, tf.reshape(tensor, [-1])).shape
        if shape.is_fully_defined():
            value = shape.as_list() if tensor.shape.rank else shape[0]
    return None if value is None else np.asarray(value)


# Rules return the layout of all outputs, a value for each of them, or None if rows may be mixed.
_Found: TypeAlias = Layout | Sequence[Layout | None] | None


def _at(layout: Layout, axis: int) -> Layout:
    return layout._replace(axis=axis)


def _the_same(layouts: Iterable[_T | None]) -> _T | None:
    """Returns the only layout of the given ones, None left out; None if there are others."""
    found = {layout for layout in layouts if layout is not None}
    return found.pop() if len(found) == 1 else None


def _is_one(tensor: tf.Tensor, axis: int) -> bool:
    """Returns whether a tensor is broadcast along an axis, which is counted from the last one."""
    return axis < -len(tensor.shape) or tensor.shape[axis] == 1


def _by_entry(operation: tf.Operation, given: _Given) -> _Found:
    rank = len(_sizes(operation.outputs[0]))
    if operation.type == "BiasAdd" and operation.get_attr("data_format") != b"NHWC":
        return None
    pairs = list(zip(operation.inputs, given, strict=True))
    found = _the_same(x and _at(x, x.axis - len(tensor.shape)) for tensor, x in pairs)
    if found and all(x or _is_one(tensor, found.axis) for tensor, x in pairs):
        return _at(found, found.axis + rank)
    return None


def _along_axes(operation: tf.Operation, given: _Given) -> _Found:
    """Lays out reductions and the like, along axes that an input names."""
    place = _AXES.get(operation.type, 1)
    layout, axes = _the_same(given), _numbers(operation.inputs[place])
    if layout is None or given[place] or axes is None:
        return None
    rank = len(operation.inputs[given.index(layout)].shape)
    used = {int(axis) % rank for axis in axes.flat}
    if layout.axis in used:
        return None
    is_kept = len(_sizes(operation.outputs[0])) == rank
    return layout if is_kept else _at(layout, layout.axis - sum(x < layout.axis for x in used))


def _along_last(operation: tf.Operation, given: _Given) -> _Found:
    (layout,) = given
    return None if layout is None or layout.axis == len(operation.inputs[0].shape) - 1 else layout


def _along_others(operation: tf.Operation, given: _Given) -> _Found:
    """Lays out convolutions and pools, which act along all axes but the first."""
    layout, *others = given
    return None if any(others) or layout is None or layout.axis else layout


def _cross_entropy(operation: tf.Operation, given: _Given) -> _Found:
    return given[0] if given[0] == given[1] and given[0] and not given[0].axis else None


def _normalised(operation: tf.Operation, given: _Given) -> _Found:
    """Keeps batch normalisation as layers use it by channel, or with what was learnt before."""
    layout, *others = given
    if layout is None:
        return None
    is_first = operation.get_attr("data_format").startswith(b"NC")
    if layout.axis == (1 if is_first else len(operation.inputs[0].shape) - 1):
        # By channels, which are of rows.
        pairs = zip(operation.inputs[1:], others, strict=True)
        is_apart = all(x == _at(layout, 0) if x else tensor.shape == [0] for tensor, x in pairs)
    else:
        is_apart = not any(others) and not operation.get_attr("is_training")
    return layout if is_apart else None


def _product(operation: tf.Operation, given: _Given) -> _Found:
    if operation.type == "Einsum":
        equation = operation.get_attr("equation").decode()
    else:
        names = ("transpose_a", "transpose_b") if operation.type == "MatMul" else ("adj_x", "adj_y")
        first, second = (
            term[::-1] if operation.get_attr(name) else term
            for term, name in zip(("ab", "bc"), names, strict=True)
        )
        equation = f"...{first},...{second}->...ac"
    of_inputs, of_output = equation.split("->")
    terms = [
        letters(term, len(tensor.shape))
        for term, tensor in zip(of_inputs.split(","), operation.inputs, strict=True)
    ]
    output = letters(of_output, len(_sizes(operation.outputs[0])))
    rows = _the_same(x and (term[x.axis], x.repeats) for term, x in zip(terms, given, strict=True))
    if rows is None:
        return None
    letter, repeats = rows
    for term, layout, tensor in zip(terms, given, operation.inputs, strict=True):
        is_broadcast = letter not in term or tensor.shape[term.index(letter)] == 1
        if term.count(letter) > 1 or not (layout or is_broadcast):
            return None
    return Layout(output.index(letter), repeats) if output.count(letter) == 1 else None


def _reshaped(operation: tf.Operation, given: _Given) -> _Found:
    """Finds the rows in entries that keep their order."""
    layout, axes = given[0], _axes_of_batch(operation.outputs[0])
    is_any = operation.type == "Squeeze" and not operation.get_attr("squeeze_dims")
    if layout is None or any(given[1:]) or len(axes) != 1 or is_any:
        return None
    before, inner = (
        math.prod(typing.cast(list[int], _sizes(x)[:axis]))
        for x, axis in ((operation.inputs[0], layout.axis), (operation.outputs[0], axes[0]))
    )
    before *= layout.repeats
    return None if not inner or before % inner else Layout(axes[0], before // inner)


def _transposed(operation: tf.Operation, given: _Given) -> _Found:
    layout, order = given[0], _numbers(operation.inputs[1])
    if layout is None or given[1] or order is None:
        return None
    return _at(layout, order.tolist().index(layout.axis))


def _sliced(operation: tf.Operation, given: _Given) -> _Found:
    """Keeps all rows, and any part of the other axes."""
    layout, shape = given[0], operation.inputs[0].shape
    begins, ends, *steps = map(_numbers, operation.inputs[1:])
    if layout is None or any(given[1:]) or begins is None or ends is None:
        return None
    if operation.type == "Slice":
        is_whole = not begins[layout.axis] and ends[layout.axis] in (-1, shape[layout.axis])
        return layout if is_whole else None
    if steps[0] is None:
        return None
    masks = {
        name: operation.get_attr(f"{name}_mask")
        for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    axis = found = 0
    for place, (begin, end, step) in enumerate(zip(begins, ends, steps[0], strict=True)):
        is_set = {name for name, mask in masks.items() if mask & 1 << place}
        if "ellipsis" in is_set:
            later = range(place + 1, len(begins))
            taken = sum(not masks["new_axis"] & 1 << i for i in later)
            skipped = len(shape) - axis - taken
            if layout.axis < axis + skipped:
                break
            axis, found = axis + skipped, found + skipped
        elif "new_axis" in is_set:
            found += 1
        elif axis == layout.axis:
            is_whole = ("begin" in is_set or begin == 0) and ("end" in is_set or end == shape[axis])
            if not is_whole or step != 1 or "shrink_axis" in is_set:
                return None
            break
        else:
            axis, found = axis + 1, found + ("shrink_axis" not in is_set)
    return _at(layout, layout.axis - axis + found)


def _packed(operation: tf.Operation, given: _Given) -> _Found:
    """Moves the rows behind a new axis."""
    layout, rank = _the_same(given), len(operation.inputs[0].shape)
    axis = operation.get_attr("axis") % (rank + 1)
    return layout and _at(layout, layout.axis + (axis <= layout.axis))


def _unpacked(operation: tf.Operation, given: _Given) -> _Found:
    (layout,), rank = given, len(operation.inputs[0].shape)
    axis = operation.get_attr("axis") % rank
    if layout is None or axis == layout.axis:
        return None
    return _at(layout, layout.axis - (axis < layout.axis))


def _gathered(operation: tf.Operation, given: _Given) -> _Found:
    """Lays out parts of a table by ids of rows, or parts of rows by ids that all rows share."""
    (table, ids), axis, inner = given[:2], np.asarray(0), operation.get_attr("batch_dims")
    rank = len(operation.inputs[1].shape)
    if operation.type == "GatherV2":
        axis = _numbers(operation.inputs[2])
    if axis is None or any(given[2:]):
        return None
    axis = int(axis) + (len(operation.inputs[0].shape) if axis < 0 else 0)
    if inner:
        inner += rank if inner < 0 else 0
        is_inner = table is not None and table == ids and table.axis < inner <= axis
        return table if is_inner else None
    if table is None:
        return ids and _at(ids, ids.axis + axis)
    if ids or axis == table.axis:
        return None
    return table if table.axis < axis else _at(table, table.axis - 1 + rank)


def _padded(operation: tf.Operation, given: _Given) -> _Found:
    layout, widths = given[0], _numbers(operation.inputs[1])
    if layout is None or any(given[1:]) or widths is None or widths[layout.axis].any():
        return None
    return layout


def _repeated(operation: tf.Operation, given: _Given) -> _Found:
    """Lays out values repeated along axes; those repeated along the rows' axis belong to no row."""
    data = 1 if operation.type == "Fill" else 0
    layout, tensor, sizes = given[data], operation.inputs[data], _sizes(operation.outputs[0])
    axes = _axes_of_batch(operation.outputs[0])
    if given[1 - data] or len(axes) != 1:
        return None
    from_last = axes[0] - len(sizes)
    if layout is None:
        is_same = operation.type == "Tile" or _is_one(tensor, from_last)
        return Layout(axes[0]) if is_same else None
    is_same = sizes[axes[0]] == tensor.shape[layout.axis]
    return (
        _at(layout, axes[0]) if is_same and from_last == layout.axis - len(tensor.shape) else None
    )


_AXES = {"ConcatV2": -1, "Roll": 2, "Split": 0, "SplitV": 2}
"""Which input names the axes, if it is not the second one."""

_RULES: dict[str, Callable[[tf.Operation, _Given], _Found]] = {
    name: rule
    for rule, names in (
        (_by_entry, _BY_ENTRY),
        (_along_axes, "All Any ArgMax ArgMin EuclideanNorm Max Mean Min Prod Sum Cumsum"),
        (_along_axes, "ConcatV2 ReverseV2 Roll Split SplitV"),
        (_along_last, "LogSoftmax Softmax"),
        (_along_others, "AvgPool AvgPool3D Conv2D Conv3D DepthwiseConv2dNative MaxPool MaxPool3D"),
        (_cross_entropy, "SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits"),
        (_gathered, "GatherV2 ResourceGather"),
        (_normalised, "FusedBatchNormV3"),
        (_packed, "OneHot Pack"),
        (_padded, "MirrorPad Pad PadV2"),
        (_product, "BatchMatMul BatchMatMulV2 BatchMatMulV3 Einsum MatMul"),
        (_repeated, "BroadcastTo Fill Tile"),
        (_reshaped, "ExpandDims Reshape Squeeze"),
        (_sliced, "Slice StridedSlice"),
        (_transposed, "Transpose"),
        (_unpacked, "Unpack"),
        (lambda operation, given: given, "IdentityN"),
    )
    for name in names.split()
}
"""What is known of operations by their type."""
