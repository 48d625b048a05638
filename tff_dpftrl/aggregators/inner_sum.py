"""Sums inside a private aggregator, and the bounds of one client's contribution to them.

Noise is scaled to the L2 norm of one client's contribution to a sum. TFF's `SumFactory`
adds up the clients' values as they are, so that the clip bounds a contribution. Any other
sum may encode them, and a quantised vector can be longer than the original. The caller of
such a factory gives the bound, or the factory declares it by an attribute

    contribution_norm: float    # Largest L2 norm that one client can add, whatever it sends.

An optional attribute `sum_dtype` (np.float32 by default) is the dtype of the clipped
updates that the factory receives, and of the sum that it returns.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl import validation
from tff_dpftrl.execution import tff_names
from tff_dpftrl.private_round import summation


@dataclasses.dataclass(frozen=True)
class InnerSum:
    """Sum over clients, with a bound of one client's contribution to it, an L2 norm.

    With `is_exact`, the factory is TFF's plain `SumFactory`, which encodes nothing.
    """

    factory: tff.aggregators.UnweightedAggregationFactory
    contribution_norm: float
    is_exact: bool

    @classmethod
    def of(
        cls,
        factory: tff.aggregators.UnweightedAggregationFactory | None,
        sent_norm: float,
        *,
        stated_norm: float | None = None,
        factory_name: str = "sum_factory",
        stated_name: str = "encoded_norm",
    ) -> InnerSum:
        """Wraps a factory, with the norm that it declares or that the caller states.

        `sent_norm` is the largest L2 norm of the value that a client gives to the sum;
        `stated_norm` the caller's `contribution_norm`. The names of arguments are for messages. A
        factory is refused if it is not known to be exact, and neither it nor the caller bounds a
        client's contribution; and if its `sum_dtype` is coarser than float32.
        """
        if factory is None:
            factory = tff.aggregators.SumFactory()
        # Not isinstance: a subclass may do anything.
        is_exact = type(factory) is tff.aggregators.SumFactory
        declared = sent_norm if is_exact else _declared_norm(factory)
        if declared is None and stated_norm is None:
            raise validation.UsageError(
                f"{factory_name} {type(factory).__name__} is not known to keep the norm of what a "
                f"client sends, at most {sent_norm:g}: sums that quantise or encode can lengthen "
                f"it, and the noise has to cover that. Give {stated_name}, the largest norm that "
                "one client can add to the sum, or let the factory declare it as its attribute "
                "contribution_norm."
            )
        dtype = getattr(factory, "sum_dtype", np.float32)
        if not is_exact and dtype not in (np.float32, np.float64):
            raise validation.UsageError(
                f"{factory_name} {type(factory).__name__} must have np.float32 or np.float64 as "
                f"sum_dtype, got {dtype!r}: rounding to anything coarser can make an update longer "
                "than its clip norm. Cast inside the factory, and let it declare "
                "what that adds in contribution_norm."
            )
        least = max(sent_norm, declared or 0.0)
        if stated_norm is None:
            return cls(factory, least, is_exact)
        norm = validation.number(
            stated_name,
            stated_norm,
            at_least=least,
            at_most=validation.MAX_CLIP_NORM,
            remedy=f"That is what one client can add to the sum of this {factory_name}.",
        )
        return cls(factory, norm, is_exact)

    @property
    def dtype(self) -> tf.DType:
        """Dtype in which the sum receives contributions: `summation.DTYPE` if it is exact."""
        if self.is_exact:
            return summation.DTYPE
        return tf.as_dtype(getattr(self.factory, "sum_dtype", tf.float32))

    def create(self, summed_type: tff_names.Type) -> tff.templates.AggregationProcess:
        """Creates the process of the sum, and checks the type of its result."""
        factory: Any = self.factory  # TFF's annotation of `create` excludes general types.
        process = factory.create(summed_type)
        result_type = process.next.type_signature.result.result.member
        if not summed_type.is_equivalent_to(result_type):
            raise validation.UsageError(
                f"sum_factory must return a sum of the type it is given, {summed_type}, but "
                f"returns {result_type}."
            )
        return process


def _declared_norm(factory: tff.aggregators.UnweightedAggregationFactory) -> float | None:
    """Returns the `contribution_norm` that a factory declares, None if there is none."""
    declared = getattr(factory, "contribution_norm", None)
    if declared is None:
        return None
    remedy = "It is the largest norm that one client can add to the sum."
    name = f"contribution_norm of {type(factory).__name__}"
    return validation.positive(name, declared, remedy=remedy)


def exact_count(
    factory: tff.aggregators.UnweightedAggregationFactory | None, largest: float
) -> InnerSum:
    """Wraps the factory of a sum of counts, in which no client may add more than `largest`."""
    if factory is not None and type(factory) is not tff.aggregators.SumFactory:
        declared = _declared_norm(factory)
        if declared is None or not declared <= largest:
            raise validation.UsageError(
                f"count_sum_factory {type(factory).__name__} is not known to sum the clients' bits "
                f"exactly, so that one of them may count for more than the {largest:g} that the "
                "noise covers. Use tff.aggregators.SumFactory or secagg_sum.SecAggHalfBitFactory, "
                f"or declare the attribute contribution_norm = {largest:g}."
            )
    return InnerSum.of(factory, largest, factory_name="count_sum_factory")
