"""Client updates as flat lists of tensors, whatever their nesting and dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tff_dpftrl import validation
from tff_dpftrl.execution import tff_names


class UpdateType:
    """Type of a client's update: floating-point tensors in the order of `tf.nest.flatten`."""

    def __init__(self, value_type: tff_names.Type):
        """Flattens a nesting of at least one floating-point tensor, all with static shapes."""
        if not tff_names.is_structure_of_tensors(value_type):
            raise validation.UsageError(
                f"value_type must be a nesting of tensors, got {value_type}."
            )
        self._structure = tff_names.type_to_tf_tensor_specs(value_type)
        self.specs = tf.nest.flatten(self._structure)
        if not self.specs:
            raise validation.UsageError(
                f"value_type must have at least one tensor, got {value_type}."
            )
        for spec in self.specs:
            validation.float_dtype(f"value_type {value_type}", spec.dtype)
        if not all(spec.shape.is_fully_defined() for spec in self.specs):
            raise validation.UsageError(
                f"value_type must have static shapes, got {value_type}: the noise of a tensor of "
                "unknown size cannot be kept from round to round."
            )
        self.shapes = [tuple(spec.shape.as_list()) for spec in self.specs]

    def flatten(self, value: Any) -> list[tf.Tensor]:
        """Lists the update's tensors, inside a TensorFlow computation."""
        if isinstance(value, tff_names.Struct):
            value = tff_names.to_odict_or_tuple(value)
        return tf.nest.flatten(value)

    def pack(self, tensors: Sequence[tf.Tensor]) -> Any:
        """Nests tensors like the update, keeping their dtypes."""
        return tf.nest.pack_sequence_as(self._structure, list(tensors))

    def pack_as_update(self, tensors: Sequence[tf.Tensor]) -> Any:
        """Nests tensors like the update, cast to its dtypes."""
        return self.pack(
            [tf.cast(tensor, spec.dtype) for tensor, spec in zip(tensors, self.specs, strict=True)]
        )
