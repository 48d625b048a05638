"""Directions of canaries: random signs on disjoint random coordinates of a model's weights.

Every coordinate of the weights belongs to one canary, drawn at random, and has a random
sign. The direction of a canary has these signs on the canary's coordinates, all of one size, and
norm 1 over all tensors together. Directions are orthogonal: no canary is mistaken for another,
and one pass projects a tensor on all of them. Under noise that is independent between
coordinates, the projections on different canaries are independent.

A stateless generator draws everything from one seed, in a graph where necessary: nothing of
the size of a model is kept.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tff_dpftrl import validation
from tff_dpftrl.private_round import seeds

REAL = -1
"""The canary number of examples that are real data."""

VALUES, CANARY = "values", "canary"
"""Names of a batch's own values, and of the number of the canary beside them."""

COORDINATES_EACH = 20
"""Least number of coordinates per canary on average: some has none with chance < m·e^-20."""


def canary_of(rows: Mapping[str, Any]) -> tf.Tensor:
    """Returns the canary of a part of a batch for `Directions.of`; −1 for real data or no rows."""
    return tf.reduce_max(tf.concat([rows[CANARY], [REAL]], 0))


class Directions:
    """Orthogonal unit directions of canaries 0 ... number - 1, over weights of some shapes."""

    def __init__(self, shapes: Sequence[Sequence[int]], *, number: int, seed: int | None = None):
        """Draws which canary owns which coordinates."""
        self.number = validation.integer("number", number, minimum=1)
        self.shapes = tuple(tuple(int(size) for size in shape) for shape in shapes)
        num_weights = sum(int(np.prod(shape)) for shape in self.shapes)
        if num_weights < COORDINATES_EACH * self.number:
            raise validation.UsageError(
                f"number={number} canaries are too many for a model of {num_weights} weights: "
                f"take {num_weights // COORDINATES_EACH} at most."
            )
        if seed is None:
            seed = secrets.randbits(128)
        self._root = seeds.root_seed(seed).numpy()
        counts = sum(
            np.bincount(self._owners_and_signs(index)[0].numpy().ravel(), minlength=self.number)
            for index in range(len(self.shapes))
        )
        self._sizes = (1.0 / np.sqrt(np.maximum(counts, 1))).astype(np.float32)
        self._project = tf.function(self._projected, autograph=False)

    def _owners_and_signs(self, tensor: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the owners, int32, and "is negative", bool, of one tensor's coordinates."""
        words = tf.random.stateless_uniform(
            self.shapes[tensor],
            seeds.derive(tf.constant(self._root), tensor),
            minval=None,
            maxval=None,
            dtype=tf.int32,
            alg="philox",
        )
        owners = tf.bitwise.bitwise_and(words, np.int32(2**31 - 1)) % self.number
        return owners, words < 0

    def of(self, canary: tf.Tensor | int) -> list[tf.Tensor]:
        """Returns the direction of a canary, of norm 1; from `number` on, the opposite ones."""
        size = tf.gather(tf.constant([*self._sizes, *-self._sizes], tf.float32), canary)
        canary = tf.cast(canary, tf.int32) % self.number
        tensors = []
        for index in range(len(self.shapes)):
            owners, negative = self._owners_and_signs(index)
            values = tf.where(negative, -size, size)
            tensors.append(tf.where(tf.equal(owners, canary), values, tf.zeros_like(values)))
        return tensors

    def project(self, tensors: Sequence[np.ndarray | tf.Tensor]) -> np.ndarray:
        """Projects tensors on each direction: inner products, float64, shape [number]."""
        tensors = [tf.cast(tensor, tf.float64) for tensor in tensors]
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        if shapes != self.shapes:
            raise validation.UsageError(f"tensors must have shapes {self.shapes}, got {shapes}.")
        return self._project(tensors).numpy()

    def _projected(self, tensors: list[tf.Tensor]) -> tf.Tensor:
        total = tf.zeros([self.number], tf.float64)
        for index, tensor in enumerate(tensors):
            owners, negative = self._owners_and_signs(index)
            total += tf.math.unsorted_segment_sum(
                tf.where(negative, -tensor, tensor), owners, self.number
            )
        return total * tf.constant(self._sizes, tf.float64)

    def attach(
        self, weights: Sequence[tf.Tensor], canary: tf.Tensor, gradient_norm: float
    ) -> list[tf.Tensor]:
        """Returns the same weights, with a canary's gradient instead of the loss's.

        For a canary, anything computed from the returned weights has the gradient −gradient_norm ·
        direction with respect to `weights`; for real data, the true one. The values are the same
        bits. A canary has its number, plus `number` for the opposite direction; real data has a
        negative one.
        """

        @tf.custom_gradient
        def identity(*values):
            def gradient(*upstream):
                return tf.cond(
                    canary >= 0,
                    functools.partial(of_canary, values),
                    lambda: [tf.convert_to_tensor(one) for one in upstream],
                )

            return [tf.identity(value) for value in values], gradient

        def of_canary(values):
            return [
                tf.cast(-gradient_norm * tensor, value.dtype)
                for tensor, value in zip(self.of(canary), values, strict=True)
            ]

        return identity(*weights)
