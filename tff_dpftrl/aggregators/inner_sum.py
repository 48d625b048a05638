"""The sums inside a private aggregator: which are exact, and what the others may do.

Noise is scaled to the L2 norm of what one client contributes to a sum. TFF's own
`SumFactory` adds up what the clients send, so that the clip bounds it. Any other sum may
encode it, and a quantised vector can be longer than it was. Such a factory has to say
by how much, or whoever hands it over has to. It says so by an attribute

    contribution_norm: float    # L2 norm that one client adds at most, whatever it sends

and may ask by another, `sum_dtype` (np.float32 unless given), for the dtype in which it
is handed the clipped updates, and has to return their sum.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import tensorflow_federated as tff

from tff_dpftrl import validation
from tff_dpftrl.private_round import clipping, summation


@dataclasses.dataclass(frozen=True)
class InnerSum:
    """A sum over clients, with what it may do to one client's contribution.

    Attributes:
      factory: The factory of the sum.
      contribution_norm: L2 norm of what one client can add to the sum.
      is_exact: Whether it is TFF's plain sum, or another without encoding.
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
        """Takes in a factory, with the norm that it declares or that is stated for it.

        Args:
          factory: The factory; `tff.aggregators.SumFactory` if None.
          sent_norm: L2 norm that what a client hands to it does not exceed.
          stated_norm: What the caller states as `contribution_norm`; None if nothing.
          factory_name: Name of the caller's argument for `factory`.
          stated_name: Name of the caller's argument for `stated_norm`.

        Returns:
          The sum.

        Raises:
          ValueError: If the factory is not known to be exact, and neither it nor the
            caller says what a client can contribute; if what it declares is no positive
            number; if the caller states less than the factory declares, or than what
            is sent; or if the factory asks for numbers coarser than float32.
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
            at_most=clipping.MAX_CLIP_NORM,
            remedy=f"That is what one client can add to the sum of this {factory_name}.",
        )
        return cls(factory, norm, is_exact)

    @property
    def dtype(self) -> type[np.floating]:
        """In what the sum is handed contributions: `summation.DTYPE` if it is exact."""
        if self.is_exact:
            return summation.DTYPE.as_numpy_dtype
        return getattr(self.factory, "sum_dtype", np.float32)

    def create(self, summed_type: tff.Type) -> tff.templates.AggregationProcess:
        """Creates the process and checks that it returns what it is given.

        Args:
          summed_type: The type of one client's contribution.

        Returns:
          The process.

        Raises:
          ValueError: If the type of the sum differs from `summed_type`.
        """
        process = self.factory.create(summed_type)
        result_type = process.next.type_signature.result.result.member
        if not summed_type.is_equivalent_to(result_type):
            raise validation.UsageError(
                f"sum_factory must return a sum of the type it is given, {summed_type}, but "
                f"returns {result_type}."
            )
        return process


def _declared_norm(factory: tff.aggregators.UnweightedAggregationFactory) -> float | None:
    """The `contribution_norm` that a factory declares, None if there is none."""
    declared = getattr(factory, "contribution_norm", None)
    if declared is None:
        return None
    remedy = "It is the largest norm that one client can add to the sum."
    name = f"contribution_norm of {type(factory).__name__}"
    return validation.positive(name, declared, remedy=remedy)


def exact_count(
    factory: tff.aggregators.UnweightedAggregationFactory | None, largest: float
) -> InnerSum:
    """A sum of counts, in which no client counts for more than `largest`.

    Args:
      factory: The factory; `tff.aggregators.SumFactory` if None.
      largest: Absolute value that what a client hands to it does not exceed.

    Returns:
      The sum.

    Raises:
      ValueError: If a client may count for more.
    """
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
