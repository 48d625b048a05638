"""Records of the uses of weights in a model's forward pass, for per-example gradients.

The gradient of each of many sequences follows from the inputs of each use of a weight and the
gradient of its outputs (Goodfellow 2015), in one pass over all sequences. A model that supports
this (`LanguageModel.reports_uses`) passes each result that a weight has a part in to a
`Recorder`, and continues with the value that this returns. `ignore` returns it as it is.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

import tensorflow as tf


class Order(enum.Enum):
    """The order of a batch's sequences and steps in the first axis of a tensor."""

    SEQUENCES = "all steps of the first sequence first"
    STEPS = "the first step of all sequences first"


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product, inputs · W.

    Attributes:
      name: Name of the kernel W, whose shape is [inputs, outputs].
      inputs: Left factor of the product, shape [n, inputs].
      transposed: Whether it is inputs · Wᵀ, and W has shape [outputs, inputs].
    """

    name: str
    inputs: tf.Tensor
    transposed: bool = False


@dataclasses.dataclass(frozen=True)
class Scale:
    """A factor for each output, inputs ∘ w.

    Attributes:
      name: Name of the weight w, whose shape is [outputs].
      inputs: Values that are scaled, shape [n, outputs].
    """

    name: str
    inputs: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Bias:
    """A weight that is added to every output.

    Attributes:
      name: Name of the weight, whose shape is [outputs].
    """

    name: str


@dataclasses.dataclass(frozen=True)
class Lookup:
    """Rows of a table.

    Attributes:
      name: Name of the table, whose shape is [ids, outputs].
      ids: Indices of the rows, integer, shape [n].
    """

    name: str
    ids: tf.Tensor


@dataclasses.dataclass(frozen=True)
class StepBias:
    """A weight that has a row for each step of a sequence, added to the outputs of that step.

    Attributes:
      name: Name of the weight, whose shape is [T, outputs].
    """

    name: str


Use: TypeAlias = Product | Scale | Bias | Lookup | StepBias


class Recorder(Protocol):
    """A callback for each result of a forward pass that weights have a part in."""

    def __call__(
        self, outputs: tf.Tensor, *uses: Use, order: Order | tf.Tensor = Order.SEQUENCES
    ) -> tf.Tensor:
        """Records uses of weights.

        Args:
          outputs: Sum of the results of `uses` and of anything else, shape [n, outputs]. It may
            be given again, with uses whose inputs are known only later.
          *uses: Uses of weights, each with n inputs in the order of the outputs.
          order: Order of sequences and steps in the first axis, if n is batch · T; else the n
            picked positions in the flattened batch [batch · T], int64, ascending.

        Returns:
          The value that the model has to use in place of `outputs`.
        """


@dataclasses.dataclass(frozen=True)
class RecorderWithWeights:
    """A recorder that has weights of its own, such as adapters, a part in what it returns.

    Attributes:
      function: Function from these weights and the arguments of a `Recorder` to what it returns.
      named: The weights by name; those of a block of the model begin with its prefix.
    """

    function: Callable[..., tf.Tensor]
    named: Mapping[str, tf.Tensor]

    def __call__(
        self, outputs: tf.Tensor, *uses: Use, order: Order | tf.Tensor = Order.SEQUENCES
    ) -> tf.Tensor:
        """Calls the function."""
        return self.function(self.named, outputs, *uses, order=order)


def ignore(outputs: tf.Tensor, *uses: Use, order: Order | tf.Tensor = Order.SEQUENCES) -> tf.Tensor:
    """Records nothing; a `Recorder`."""
    del uses, order
    return outputs
