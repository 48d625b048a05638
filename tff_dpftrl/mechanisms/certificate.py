"""Certificates: the losses of a strategy under one participation schema."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from tff_dpftrl import validation
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.mechanisms import workload as workload_lib
from tff_dpftrl.participation import schema as schema_lib


@dataclasses.dataclass(frozen=True)
class Certificate:
    """Sensitivity, errors and losses of a strategy, for clip norm and noise multiplier 1.

    If not `sensitivity_exact`, the L2 sensitivity is an upper bound. A loss is sensitivity times
    error.
    """

    num_rounds: int
    min_sep: int
    max_participations: int
    sensitivity: float
    sensitivity_exact: bool
    sensitivity_method: str
    max_error: float
    rms_error: float
    max_loss: float
    rms_loss: float

    @property
    def schema(self) -> schema_lib.MinSep:
        """Participation schema for which the numbers hold."""
        return schema_lib.MinSep(self.num_rounds, self.min_sep, self.max_participations)

    def to_dict(self) -> dict[str, Any]:
        """Returns the attributes as JSON-compatible values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Certificate:
        """Reads what `to_dict` returned."""
        try:
            return cls(**values)
        except TypeError as error:
            raise validation.UsageError(f"This is not a certificate: {error}.") from None

    def verify(self, strategy: strategy_lib.Strategy, tolerance: float = 1e-9) -> None:
        """Computes all numbers anew; refuses relative differences above `tolerance`."""
        fresh = certify(strategy, self.schema)
        for field in dataclasses.fields(self):
            claimed, computed = getattr(self, field.name), getattr(fresh, field.name)
            if isinstance(claimed, float):
                same = math.isclose(claimed, computed, rel_tol=tolerance)
            else:
                same = claimed == computed
            if not same:
                raise validation.UsageError(
                    f"The certificate claims {field.name} = {claimed!r}, but it is {computed!r}; "
                    "do not use this file, optimise the strategy anew."
                )


def certify(
    strategy: strategy_lib.Strategy,
    schema: schema_lib.MinSep,
    workload: workload_lib.Workload | None = None,
) -> Certificate:
    """Computes sensitivity, errors and losses; those of the prefix sums without a workload."""
    sensitivity = strategy_lib.check_strategy(strategy).sensitivity(schema)
    max_error = strategy.max_error(schema.num_rounds, workload)
    rms_error = strategy.rms_error(schema.num_rounds, workload)
    return Certificate(
        num_rounds=schema.num_rounds,
        min_sep=schema.min_sep,
        max_participations=schema.max_participations,
        sensitivity=sensitivity.value,
        sensitivity_exact=sensitivity.exact,
        sensitivity_method=sensitivity.method,
        max_error=max_error,
        rms_error=rms_error,
        max_loss=sensitivity.value * max_error,
        rms_loss=sensitivity.value * rms_error,
    )
