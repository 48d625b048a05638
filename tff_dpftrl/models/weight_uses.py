"""Where a model's forward pass uses its weights, told to whoever wants to know.

The gradients of many sequences, one by one, follow from what went into each use of a weight
and the gradient of what came out of it (Goodfellow 2015), in one pass over all of them. A
model that can be asked (`LanguageModel.reports_uses`) hands each result that a weight has a
part in to a `Record`, and goes on with what that returns. `ignore` returns it as it is.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Protocol, TypeAlias

import tensorflow as tf


class Order(enum.Enum):
    """How the sequences and steps of a batch lie in the first axis of a tensor."""

    SEQUENCES = "all steps of the first sequence first"
    STEPS = "the first step of all sequences first"


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product, inputs · W.

    Attributes:
      name: Of the weight W, shape [inputs, outputs].
      inputs: What W is multiplied with, shape [n, inputs].
      transposed: Whether it is inputs · Wᵀ, and W has shape [outputs, inputs].
    """

    name: str
    inputs: tf.Tensor
    transposed: bool = False


@dataclasses.dataclass(frozen=True)
class Scale:
    """A factor for each output, inputs ∘ w.

    Attributes:
      name: Of the weight w, shape [outputs].
      inputs: What w is multiplied with, shape [n, outputs].
    """

    name: str
    inputs: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Bias:
    """A weight that is added to every output.

    Attributes:
      name: Of the weight, shape [outputs].
    """

    name: str


@dataclasses.dataclass(frozen=True)
class Lookup:
    """Rows of a table.

    Attributes:
      name: Of the weight, shape [ids, outputs].
      ids: Whose rows, integer, shape [n].
    """

    name: str
    ids: tf.Tensor


@dataclasses.dataclass(frozen=True)
class StepBias:
    """A weight that has a row for each step of a sequence, added to the outputs of that step.

    Attributes:
      name: Of the weight, shape [T, outputs].
    """

    name: str


Use: TypeAlias = Product | Scale | Bias | Lookup | StepBias


class Record(Protocol):
    """Is told of a result and the weights that have a part in it."""

    def __call__(
        self, outputs: tf.Tensor, *uses: Use, order: Order | tf.Tensor = Order.SEQUENCES
    ) -> tf.Tensor:
        """Takes note of uses of weights.

        Args:
          outputs: A sum, shape [n, outputs], of what `uses` stand for and of anything
            else. It may be given again, with uses whose inputs are known only later.
          *uses: The uses, each with n inputs in the order of the outputs.
          order: How sequences and steps lie in the first axis: n is batch · T, or n
            positions were picked, int64, ascending, in the flattened batch [batch · T].

        Returns:
          What the model is to use as `outputs` from now on.
        """


def ignore(outputs: tf.Tensor, *uses: Use, order: Order | tf.Tensor = Order.SEQUENCES) -> tf.Tensor:
    """A `Record` that keeps none."""
    del uses, order
    return outputs
