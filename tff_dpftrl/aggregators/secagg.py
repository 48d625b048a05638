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

import tensorflow_federated as tff

from tff_dpftrl import validation
from tff_dpftrl.accounting import guarantee as guarantee_lib
from tff_dpftrl.aggregators import adaptive_clipping, dp_ftrl, secagg_sum, updates
from tff_dpftrl.discretization import grid
from tff_dpftrl.execution import tff_names
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.private_round import adaptive_clipping as adaptive_clipping_lib
from tff_dpftrl.private_round import interface

_BuiltFactory = dp_ftrl.DPFTRLFactory | adaptive_clipping.AdaptiveDPFTRLFactory


class SecAggFactory(tff.aggregators.UnweightedAggregationFactory):
    """TFF factory of DP-FTRL over secure sums; the builders of this module make it.

    Unless the grid of the encoded updates was given, it follows from their number of
    parameters, which `create` knows.
    """

    def __init__(
        self,
        build: Callable[[grid.GridEncoding], _BuiltFactory],
        *,
        clients_per_round: float,
        bits: int,
        max_clients: int | None,
        encoding: grid.GridEncoding | None,
    ):
        """Initialises the factory.

        Args:
          build: Function from the grid to the factory of DP-FTRL on it.
          clients_per_round: Report goal.
          bits: Largest number of bits of an integer modulo M.
          max_clients: Largest number of clients in one sum; the report goal if None.
          encoding: Grid in place of `bits` and `max_clients`; None for the finest one that fits.

        Raises:
          ValueError: If an argument is out of range, or a round has no room for the report goal.
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
        self._build, self._bits, self._max_clients = build, bits, most
        self._encoding = encoding
        # Arguments are refused here. What the dimension changes is the noise, not the guarantee.
        self._for_any = build(encoding or grid.for_bits(1, most, bits))

    @property
    def private_round(self) -> interface.PrivateRound:
        """The mechanism, if the grid was given.

        Raises:
          ValueError: If the grid follows from the updates; use `for_updates`.
        """
        if self._encoding is None:
            raise validation.UsageError(
                "The noise is scaled to the grid, which follows from the updates: take "
                "for_updates(value_type).private_round, or give encoding."
            )
        return self._for_any.private_round

    def guarantee(self, schema: schema_lib.MinSep, delta: float) -> guarantee_lib.Guarantee:
        """Computes the guarantee of a run as `DPFTRLFactory` does, the same for every grid."""
        return self._for_any.guarantee(schema, delta)

    def for_updates(self, value_type: tff_names.Type) -> _BuiltFactory:
        """Builds the factory on the grid for updates of one type.

        Args:
          value_type: Type of an update, a floating-point tensor or any nesting of such
            tensors.

        Returns:
          The factory, whose `inner_sum.factory.encoding` is the grid.

        Raises:
          ValueError: If the type has no tensors, other dtypes or unknown shapes.
        """
        if self._encoding is not None:
            return self._for_any
        shapes = updates.UpdateType(value_type).shapes
        dim = sum(math.prod(shape) for shape in shapes)
        with warnings.catch_warnings():  # The builder has warned already.
            warnings.simplefilter("ignore", adaptive_clipping.ExpensiveClippingWarning)
            return self._build(grid.for_bits(dim, self._max_clients, self._bits))

    def create(self, value_type: tff_names.Type) -> tff.templates.AggregationProcess:
        """Creates the process for updates of one type, as `for_updates(value_type)` does."""
        return self.for_updates(value_type).create(value_type)


def build_secagg_dp_ftrl_aggregator(
    strategy: strategy_lib.Strategy,
    *,
    noise_multiplier: float,
    clip_norm: float | adaptive_clipping_lib.AdaptiveClipping,
    clients_per_round: float,
    bits: int = 24,
    max_clients: int | None = None,
    encoding: grid.GridEncoding | None = None,
    deterministic_seed: int | None = None,
    secure_noise: bool = False,
    rotation_seed: int | None = None,
    noise_parties: int = 0,
) -> SecAggFactory:
    """Builds DP-FTRL whose server sees only secure sums of encoded updates.

    With a fixed clip norm it works like `dp_ftrl.build_dp_ftrl_aggregator`, and the noise has the
    standard deviation `noise_multiplier · encoding.inflated_clip_norm(clip_norm)`. With adaptive
    clipping it works like `adaptive_clipping.build_adaptive_dp_ftrl_aggregator`, and the noise on
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
      deterministic_seed: Seed of all noise, an integer in [0, 2^128), for tests only: a
        run with a known seed is not private. From the operating system if None.
      secure_noise: Whether a cryptographic generator, AES-256 in counter mode, draws the noise on
        a grid (`numpy_noise.secure_draws`); else of Philox. TFF's own executor cannot draw it:
        compile the process (`tff_dpftrl.compile_process`).
      rotation_seed: Public seed of the rotations, an integer in [0, 2^128) other than the
        seed of the noise. From the operating system if None.
      noise_parties: Number of parties that each add the whole noise within the sums; `encoding`
        must have room for it (its `noise_ratio`). This factory then adds none. Default: 0, the
        factory adds the noise.

    Returns:
      The factory.

    Raises:
      ValueError: If an argument is out of range, or `max_clients` is below
        `clients_per_round`.
    """

    def build(used: grid.GridEncoding) -> _BuiltFactory:
        if isinstance(clip_norm, adaptive_clipping_lib.AdaptiveClipping):
            return adaptive_clipping.build_adaptive_dp_ftrl_aggregator(
                strategy,
                noise_multiplier=noise_multiplier,
                clients_per_round=clients_per_round,
                clipping=clip_norm,
                deterministic_seed=deterministic_seed,
                secure_noise=secure_noise,
                sum_factory=secagg_sum.SecAggSumFactory(used, 1.0, rotation_seed=rotation_seed),
                count_sum_factory=secagg_sum.SecAggHalfBitFactory(has_noise=noise_parties > 0),
                noise_parties=noise_parties,
            )
        return dp_ftrl.build_dp_ftrl_aggregator(
            strategy,
            noise_multiplier=noise_multiplier,
            clip_norm=clip_norm,
            clients_per_round=clients_per_round,
            deterministic_seed=deterministic_seed,
            secure_noise=secure_noise,
            sum_factory=secagg_sum.SecAggSumFactory(used, clip_norm, rotation_seed=rotation_seed),
            noise_parties=noise_parties,
        )

    return SecAggFactory(
        build,
        clients_per_round=clients_per_round,
        bits=bits,
        max_clients=max_clients,
        encoding=encoding,
    )
