"""Pipelines from serialized examples on a device to batches, which become part of a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import tensorflow as tf

from tff_dpftrl import validation


@dataclasses.dataclass(frozen=True)
class PaddedSequence:
    """A feature with any number of entries in each example, cut or padded to one length.

    Attributes:
      length: Number of entries that are kept; shorter features are padded at the end.
      dtype: Type of the entries: tf.int64, tf.float32 or tf.string.
      padding: Value that is added at the end.
    """

    length: int
    dtype: tf.DType = tf.int64
    padding: Any = 0


@dataclasses.dataclass(frozen=True)
class Values:
    """A feature with any number of entries in each example, for `ExamplePipeline.to_rows`.

    Attributes:
      dtype: Type of the entries: tf.int64, tf.float32 or tf.string.
    """

    dtype: tf.DType


@dataclasses.dataclass(frozen=True)
class ExamplePipeline:
    """Parsing, order, epochs and batches of a device's examples.

    Attributes:
      features: Features by their names in a `tf.train.Example`.
      to_batch: Function from the features of a batch, each of shape [batch, ...], to the batch
        that the process takes.
      batch_size: Number of rows in a batch; the last one may be smaller.
      epochs: Number of passes over the rows; a batch can hold rows of two passes.
      shuffle: Whether every pass has a new order, from a seed that the device draws.
      to_rows: Function from the features of all examples to any number of rows, such as from
        texts to their sequences. Rows are then ordered and batched. None if an example is a row.
      max_rows: Largest number of rows used, random ones with `shuffle`; None for all.
      whole: Names of what `to_rows` returns, but not the first, that `to_batch` gets whole with
        every batch, whichever rows are in it.
    """

    features: Mapping[str, tf.io.FixedLenFeature | PaddedSequence | Values]
    to_batch: Callable[[Mapping[str, tf.Tensor]], Any]
    batch_size: int
    epochs: int = 1
    shuffle: bool = False
    to_rows: Callable[[Mapping[str, Any]], Mapping[str, tf.Tensor]] | None = None
    max_rows: int | None = None
    whole: Collection[str] = ()

    def __post_init__(self):
        if self.to_rows is None and any(isinstance(f, Values) for f in self.features.values()):
            raise validation.UsageError("features with any number of entries need to_rows.")
        if not self.features:
            raise validation.UsageError("features must name at least one feature of the examples.")
        validation.integer("batch_size", self.batch_size, minimum=1)
        validation.integer("epochs", self.epochs, minimum=1)
        if self.max_rows is not None:
            validation.integer("max_rows", self.max_rows, minimum=1)

    def batches(self, examples: tf.Tensor, seed: tf.Tensor | None = None) -> tf.data.Dataset:
        """Makes the batches of serialized examples, string, [n], inside of a traced function.

        With `shuffle`, `seed` is int64, [2].
        """
        rows = self._parse(examples)
        num_rows = tf.shape(examples)[0]
        if self.to_rows is not None:
            rows = self.to_rows(rows)
            num_rows = tf.shape(next(iter(rows.values())))[0]
        order = self._order(num_rows, seed)

        def batch(indices: tf.Tensor) -> Any:
            chosen = {
                k: row if k in self.whole else tf.gather(row, indices) for k, row in rows.items()
            }
            return self.to_batch(chosen)

        return tf.data.Dataset.from_tensor_slices(order).batch(self.batch_size).map(batch)

    def batch_spec(self) -> Any:
        """Returns the structure of `tf.TensorSpec` of a batch."""
        try:
            with tf.Graph().as_default():
                examples = tf.compat.v1.placeholder(tf.string, [None])
                seed = tf.compat.v1.placeholder(tf.int64, [2]) if self.shuffle else None
                return self.batches(examples, seed).element_spec
        except Exception as error:  # Anybody's functions may raise anything.
            raise validation.UsageError(
                f"pipeline fails on the features {sorted(self.features)}: "
                f"{validation.one_line(error)}"
            ) from error

    def _parse(self, examples: tf.Tensor) -> dict[str, Any]:
        wanted = {
            name: tf.io.RaggedFeature(feature.dtype, row_splits_dtype=tf.int64)
            if isinstance(feature, PaddedSequence | Values)
            else feature
            for name, feature in self.features.items()
        }
        parsed = tf.io.parse_example(examples, wanted)
        for name, feature in self.features.items():
            if isinstance(feature, PaddedSequence):
                padding = tf.constant(feature.padding, feature.dtype)
                parsed[name] = parsed[name].to_tensor(padding, shape=[None, feature.length])
        return parsed

    def _order(self, num_rows: tf.Tensor, seed: tf.Tensor | None) -> tf.Tensor:
        one = tf.range(num_rows)
        if not self.shuffle:
            return tf.tile(one[: self.max_rows], [self.epochs])
        passes = []
        for epoch in range(self.epochs):
            # Later passes shuffle the rows that the first one kept.
            one = tf.random.experimental.stateless_shuffle(
                one, tf.random.experimental.stateless_fold_in(seed, epoch)
            )[: self.max_rows]
            passes.append(one)
        return tf.concat(passes, axis=0)
