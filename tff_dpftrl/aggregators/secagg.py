"""DP-FTRL on top of secure aggregation, as TFF aggregation factories.

Clients send clipped, rotated and rounded updates as integers; the server sees
nothing but their sum modulo M, decodes it, and adds the correlated noise
(Xu et al. 2023, Algorithm 2). Rounding may lengthen an update, so the noise is
scaled by the inflated clip norm.

Compiled processes compute the sums in the clear. So does TFF's executor in a context that has
secure sums, for simulations:

    with tff_dpftrl.execution.secure_sum_simulation():
        ...

In other contexts, a round of TFF's executor fails with a line that says so.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import tensorflow_federated as tff
from typing_extensions import Unpack

from tff_dpftrl import validation
from tff_dpftrl.accounting import guarantee as guarantee_lib
from tff_dpftrl.aggregators import dp_ftrl, secagg_sum, updates
from tff_dpftrl.discretization import grid
from tff_dpftrl.execution import tff_names
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.private_round import adaptive_clipping, interface


class SecAggFactory(tff.aggregators.UnweightedAggregationFactory):
    """TFF factory of DP-FTRL over secure sums; the builder of this module makes it.

    Unless the grid of the encoded updates was given, it follows from their number of
    parameters, which `create` knows.
    """

    def __init__(
        self,
        build: Callable[[grid.GridEncoding], dp_ftrl.DPFTRLFactory],
        encoding: grid.GridEncoding | Callable[[int], grid.GridEncoding],
    ):
        """Initialises the factory.

        Args:
          build: Function from the grid to the factory of DP-FTRL on it.
          encoding: Grid of the encoded updates, or a function from their number of parameters.

        Raises:
          ValueError: If `build` or `encoding` refuses an argument.
        """
        self._build, self._encoding = build, encoding
        # Arguments are refused here. What the dimension changes is the noise, not the guarantee.
        self._for_any = build(encoding(1) if callable(encoding) else encoding)

    @property
    def private_round(self) -> interface.PrivateRound:
        """The mechanism, if the grid was given.

        Raises:
          ValueError: If the grid follows from the updates; use `for_updates`.
        """
        if callable(self._encoding):
            raise validation.UsageError(
                "The noise is scaled to the grid, which follows from the updates: take "
                "for_updates(value_type).private_round, or give encoding."
            )
        return self._for_any.private_round

    def guarantee(self, schema: schema_lib.MinSep, delta: float) -> guarantee_lib.Guarantee:
        """Computes the guarantee of a run as `DPFTRLFactory` does, the same for every grid."""
        return self._for_any.guarantee(schema, delta)

    def for_updates(self, value_type: tff_names.Type) -> dp_ftrl.DPFTRLFactory:
        """Builds the factory on the grid for updates of one type.

        Args:
          value_type: Type of an update, a floating-point tensor or any nesting of such
            tensors.

        Returns:
          The factory, whose `inner_sum.factory.encoding` is the grid.

        Raises:
          ValueError: If the type has no tensors, other dtypes or unknown shapes.
        """
        if not callable(self._encoding):
            return self._for_any
        shapes = updates.UpdateType(value_type).shapes
        dim = sum(math.prod(shape) for shape in shapes)
        with warnings.catch_warnings():  # The builder has warned already.
            warnings.simplefilter("ignore", adaptive_clipping.ExpensiveClippingWarning)
            return self._build(self._encoding(dim))

    def create(self, value_type: tff_names.Type) -> tff.templates.AggregationProcess:
        """Creates the process for updates of one type, as `for_updates(value_type)` does."""
        return self.for_updates(value_type).create(value_type)


def build_secagg_dp_ftrl_aggregator(
    strategy: strategy_lib.Strategy,
    *,
    noise_multiplier: float,
    clip_norm: float | adaptive_clipping.AdaptiveClipping,
    clients_per_round: float,
    bits: int = 24,
    max_clients: int | None = None,
    encoding: grid.GridEncoding | None = None,
    rotation_seed: int | None = None,
    **noise: Unpack[interface.NoiseOptions],
) -> SecAggFactory:
    """Builds DP-FTRL whose server sees only secure sums of encoded updates.

    With a fixed clip norm it works like `build_dp_ftrl_aggregator`, and the noise has the
    standard deviation `noise_multiplier · encoding.inflated_clip_norm(clip_norm)`. With adaptive
    clipping it works like `build_adaptive_dp_ftrl_aggregator`, and the noise on
    the updates is larger by the factor `encoding.inflation`. The guarantee of ρ-zCDP with
    ρ = S² / (2 noise_multiplier²) holds unchanged. With adaptive clipping the grid step is a
    fixed fraction of the active clip norm, so bits and inflation never change. The clients' bits
    are summed securely too, and exactly.

    Args:
      strategy: Strategy C that correlates the noise of different rounds. Its restarts take over
        an estimated clip norm.
      noise_multiplier: Standard deviation of z for an inflated clip norm of 1; with adaptive
        clipping, that of both streams together.
      clip_norm: L2 norm that one client's update is clipped to, before rounding; or, for
        adaptive clipping, the settings of its estimation.
      clients_per_round: Report goal: the fixed number that noised sums are divided by.
      bits: Largest number of bits that a client sends for each parameter, at most 31. Fewer
        bits cost more noise.
      max_clients: Largest number of clients that can report in one round, with
        over-selection: a round with more fails. The report goal if None.
      encoding: Grid of the encoded updates in place of `bits` and `max_clients`, from
        `grid.for_bits` or `grid.for_inflation`. If None, `create` makes the finest one for the
        number of parameters.
      rotation_seed: Public seed of the rotations, an integer in [0, 2^128) other than the
        seed of the noise. From the operating system if None.
      **noise: `deterministic_seed` and `secure_noise`, see `interface.NoiseOptions`.

    Returns:
      The factory.

    Raises:
      ValueError: If an argument is out of range, or `max_clients` is below
        `clients_per_round`.
    """
    if encoding is not None and max_clients is not None:
        raise validation.UsageError(
            "max_clients and encoding exclude each other: encoding.max_clients holds."
        )
    validation.positive("clients_per_round", clients_per_round)
    name = "max_clients" if encoding is None else "encoding.max_clients"
    most = math.ceil(clients_per_round) if max_clients is None else max_clients
    most = most if encoding is None else encoding.max_clients
    if most < clients_per_round:
        raise validation.UsageError(
            f"{name} {most} is below clients_per_round {clients_per_round}: give the largest "
            "number of clients that can report in one round."
        )

    def build(used: grid.GridEncoding) -> dp_ftrl.DPFTRLFactory:
        common: dict[str, Any] = dict(
            noise_multiplier=noise_multiplier, clients_per_round=clients_per_round, **noise
        )
        if isinstance(clip_norm, adaptive_clipping.AdaptiveClipping):
            return dp_ftrl.build_adaptive_dp_ftrl_aggregator(
                strategy,
                clipping=clip_norm,
                sum_factory=secagg_sum.SecAggSumFactory(used, 1.0, rotation_seed=rotation_seed),
                count_sum_factory=secagg_sum.SecAggHalfBitFactory(),
                **common,
            )
        return dp_ftrl.build_dp_ftrl_aggregator(
            strategy,
            clip_norm=clip_norm,
            sum_factory=secagg_sum.SecAggSumFactory(used, clip_norm, rotation_seed=rotation_seed),
            **common,
        )

    return SecAggFactory(build, encoding or (lambda dim: grid.for_bits(dim, most, bits)))
