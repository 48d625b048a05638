"""Values of TFF types as flat lists of tensors, and back."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tff_dpftrl import array_tensors, validation
from tff_dpftrl.execution import federated_round, tff_names


def member(type_spec: tff_names.Type) -> tff_names.Type:
    """Returns the member type of a federated type, or the type itself."""
    return type_spec.member if isinstance(type_spec, tff_names.FederatedType) else type_spec


def specs(type_spec: tff_names.Type | None) -> list[tf.TensorSpec]:
    """Returns the specs of a type's leaves, in TFF's order; a sequence is a variant."""
    if type_spec is None:
        return []
    if isinstance(type_spec, tff_names.StructType):
        return [
            spec for _, element in tff_names.iter_elements(type_spec) for spec in specs(element)
        ]
    if isinstance(type_spec, tff_names.SequenceType):
        return [federated_round.VARIANT]
    return [tf.TensorSpec(type_spec.shape, tf.dtypes.as_dtype(type_spec.dtype.type))]


def paths(type_spec: tff_names.Type | None) -> list[str]:
    """Returns the path of each leaf, such as "train/loss" or "0/1"; "" if the type is a leaf."""
    if not isinstance(type_spec, tff_names.StructType):
        return [] if type_spec is None else [""]
    return [
        "/".join(filter(None, [str(index) if name is None else name, path]))
        for index, (name, element) in enumerate(tff_names.iter_elements(type_spec))
        for path in paths(element)
    ]


def flatten(
    value: Any, type_spec: tff_names.Type, name: str, *, shares_arrays: bool = False
) -> list[tf.Tensor]:
    """Flattens a value to tensors.

    The value has containers as TFF takes them, of arrays or tensors, datasets or lists of elements.
    Tensors of this process are not copied; with `shares_arrays`, arrays need not be either.
    """
    if isinstance(type_spec, tff_names.SequenceType):
        return [_dataset_variant(value, type_spec, name)]
    if isinstance(type_spec, tff_names.StructType):
        return _flatten_struct(value, type_spec, name, shares_arrays=shares_arrays)
    (spec,) = specs(type_spec)
    if shares_arrays and isinstance(value, np.ndarray) and value.dtype == spec.dtype:
        value = array_tensors.tensor(value)
    return [federated_round.to_tensor(value, spec, name)]


def _flatten_struct(
    value: Any, type_spec: tff_names.StructType, name: str, *, shares_arrays: bool
) -> list[tf.Tensor]:
    elements = list(tff_names.iter_elements(type_spec))
    try:
        given = tff_names.from_container(value)
    except TypeError as error:
        raise validation.UsageError(
            f"{name} must be of type {type_spec}, got {type(value)}."
        ) from error
    if len(given) != len(elements):
        raise validation.UsageError(
            f"{name} must have {len(elements)} elements, as its type {type_spec}, got {len(given)}."
        )
    has_names = bool(dir(given))
    if has_names and set(dir(given)) != {key for key, _ in elements}:
        wanted = [key for key, _ in elements]
        raise validation.UsageError(f"{name} must have the elements {wanted}, got {dir(given)}.")
    leaves = []
    for index, (key, element_type) in enumerate(elements):
        element = given[key if has_names else index]
        path = f"{name}.{index if key is None else key}"
        leaves += flatten(element, element_type, path, shares_arrays=shares_arrays)
    return leaves


def _dataset_variant(value: Any, type_spec: tff_names.SequenceType, name: str) -> tf.Tensor:
    if not isinstance(value, tf.data.Dataset):
        value = _dataset_of_elements(value, type_spec, name)
    check_elements(value, type_spec, name)
    return federated_round.as_variant(value)


def check_elements(dataset: tf.data.Dataset, type_spec: tff_names.SequenceType, name: str) -> None:
    """Checks that the elements of a dataset have the type of a sequence's elements."""
    element_type = tff_names.tensorflow_to_type(dataset.element_spec)
    if not type_spec.element.is_assignable_from(element_type):
        raise validation.UsageError(
            f"{name} must be a dataset with elements of type {type_spec.element}, got "
            f"{element_type}."
        )


def _dataset_of_elements(
    elements: Any, type_spec: tff_names.SequenceType, name: str
) -> tf.data.Dataset:
    """Makes a dataset of the elements of a list, as TFF does."""
    if not isinstance(elements, list | tuple):
        raise validation.UsageError(
            f"{name} must be a tf.data.Dataset or a list, got {type(elements)}."
        )
    element = type_spec.element
    rows = [flatten(one, element, f"{name}, element {i}") for i, one in enumerate(elements)]

    def slices(columns: Iterable[tf.Tensor]) -> tf.data.Dataset:
        packed = _packed(iter(columns), element, reads_texts=False)
        structure = tff_names.type_to_py_container(packed, element)
        return tf.data.Dataset.from_tensor_slices(_without_lists(structure))

    # Nothing that TensorFlow would have to trace for each client.
    datasets = [
        slices([tf.stack(column) for column in zip(*same, strict=True)])
        for _, same in itertools.groupby(rows, key=lambda row: [leaf.shape for leaf in row])
    ]
    if not datasets:
        shapes = [(s, s.shape if s.shape.rank is not None else ()) for s in specs(element)]
        return slices([tf.zeros([0, *(size or 0 for size in dims)], s.dtype) for s, dims in shapes])
    while len(datasets) > 1:  # A tree: through a chain, each element would be read by all links.
        pairs = itertools.zip_longest(datasets[::2], datasets[1::2])
        datasets = [one if other is None else one.concatenate(other) for one, other in pairs]
    return datasets[0]


def _without_lists(structure: Any) -> Any:
    """Replaces lists by tuples: tf.data takes a list for a tensor."""
    if isinstance(structure, dict):
        return type(structure)((key, _without_lists(one)) for key, one in structure.items())
    return tuple(map(_without_lists, structure)) if isinstance(structure, list) else structure


def pack(tensors: Sequence[tf.Tensor], type_spec: tff_names.Type) -> Any:
    """Packs leaves to a value of a type.

    Texts, and what stands beside them in a structure, become bytes and NumPy arrays: they
    describe something, like the serialized `DpEvent` in a state, and are read in Python.
    """
    return tff_names.type_to_py_container(_packed(iter(tensors), type_spec), type_spec)


def _packed(
    tensors: Iterator[tf.Tensor], type_spec: tff_names.Type, *, reads_texts: bool = True
) -> Any:
    """Packs the next leaves; no closure, which would keep all of them until a collection."""
    if isinstance(type_spec, tff_names.StructType):
        inner_types = list(tff_names.iter_elements(type_spec))
        parts = [
            (key, _packed(tensors, inner, reads_texts=reads_texts)) for key, inner in inner_types
        ]
        if reads_texts and any(_is_text(inner) for _, inner in inner_types):
            parts = [(key, _as_numpy(part)) for key, part in parts]
        return tff_names.Struct(parts)
    leaf = next(tensors)
    return _as_numpy(leaf) if reads_texts and _is_text(type_spec) else leaf


def _is_text(type_spec: tff_names.Type) -> bool:
    if isinstance(type_spec, tff_names.StructType | tff_names.SequenceType):
        return False
    (spec,) = specs(type_spec)
    return spec.dtype == tf.string


def _as_numpy(leaf: Any) -> Any:
    return leaf.numpy() if isinstance(leaf, tf.Tensor) else leaf


def spread(type_spec: tff_names.Type, over: tff_names.Type) -> list[int]:
    """Finds the leaf of `type_spec` that stands for each leaf of `over`, by position.

    One leaf stands for all leaves in its place, as one modulus does for a sum of several tensors.
    """
    position = iter(range(len(specs(type_spec))))

    def visit(element: tff_names.Type, other: tff_names.Type) -> list[int]:
        if not isinstance(element, tff_names.StructType):
            return [next(position)] * len(specs(other))
        inner = tff_names.iter_elements(element)
        others = tff_names.iter_elements(other)
        return [
            index
            for (_, one), (_, another) in zip(inner, others, strict=True)
            for index in visit(one, another)
        ]

    return visit(type_spec, over)


class TffStructure(federated_round.Structure):
    """Structure of a type of TFF, which may be None for nothing."""

    def __init__(self, type_spec: tff_names.Type | None):
        """Reads a type, not federated."""
        self._type = type_spec
        self.labels, self.specs = tuple(paths(type_spec)), tuple(specs(type_spec))

    @override
    def flatten(self, value, name, *, shares_arrays=False):
        return flatten(value, self._type, name, shares_arrays=shares_arrays)

    @override
    def pack(self, tensors):
        return pack(tensors, self._type)
