"""DP-FTRL on top of secure aggregation, as TFF aggregation factories.

Clients send clipped, rotated and rounded updates as integers; the server sees
nothing but their sum modulo M, decodes it, and adds the correlated noise
(Xu et al. 2023, Algorithm 2). Rounding may lengthen an update, so the noise is
scaled by the inflated clip norm.

Only execution contexts with an implementation of secure sums can run this. For
simulations TFF has one that computes the same sums in the clear:

    with tff_dpftrl.execution.secure_sum_simulation():
        ...
"""

from __future__ import annotations

from tff_dpftrl import execution, validation
from tff_dpftrl.aggregators import adaptive_clipping, dp_ftrl, secagg_sum
from tff_dpftrl.discretization import grid
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.private_round import adaptive_clipping as adaptive_clipping_lib


def build_secagg_dp_ftrl_aggregator(
    strategy: strategy_lib.Strategy,
    *,
    noise_multiplier: float,
    clip_norm: float,
    clients_per_round: float,
    encoding: grid.GridEncoding,
    deterministic_seed: int | None = None,
    rotation_seed: int | None = None,
) -> dp_ftrl.DPFTRLFactory:
    """Builds DP-FTRL whose server sees only secure sums of encoded updates.

    It is `dp_ftrl.build_dp_ftrl_aggregator` with a noise of standard deviation
    `noise_multiplier · encoding.inflated_clip_norm(clip_norm)`. The guarantee of
    ρ-zCDP with ρ = S² / (2 noise_multiplier²) holds unchanged.

    Args:
      strategy: Strategy C that correlates the noise of different rounds.
      noise_multiplier: Standard deviation of z for an inflated clip norm of 1.
      clip_norm: L2 norm that one client's update is clipped to, before rounding.
      clients_per_round: Report goal, by which the noised sum is divided.
      encoding: Grid of the encoded updates, from `grid.for_bits` or `grid.for_inflation`.
      deterministic_seed: Seed of all noise, an integer in [0, 2^128), for tests only: a
        run with a known seed is not private. From the operating system if None.
      rotation_seed: Public seed of the rotations, an integer in [0, 2^128) other than the
        seed of the noise. From the operating system if None.

    Returns:
      The factory.

    Raises:
      ValueError: If an argument is out of range, or `encoding.max_clients` is below
        `clients_per_round`.
      RuntimeError: If the current execution context has no secure sums.
    """
    _check(encoding, clients_per_round)
    return dp_ftrl.build_dp_ftrl_aggregator(
        strategy,
        noise_multiplier=noise_multiplier,
        clip_norm=clip_norm,
        clients_per_round=clients_per_round,
        deterministic_seed=deterministic_seed,
        sum_factory=secagg_sum.SecAggSumFactory(encoding, clip_norm, rotation_seed=rotation_seed),
    )


def build_secagg_adaptive_dp_ftrl_aggregator(
    strategy: strategy_lib.Strategy,
    *,
    noise_multiplier: float,
    clients_per_round: float,
    encoding: grid.GridEncoding,
    clipping: adaptive_clipping_lib.AdaptiveClipping = adaptive_clipping_lib.DEFAULT_CLIPPING,
    deterministic_seed: int | None = None,
    rotation_seed: int | None = None,
) -> adaptive_clipping.AdaptiveDPFTRLFactory:
    """Builds DP-FTRL with adaptive clipping whose server sees only secure sums.

    It is `adaptive_clipping.build_adaptive_dp_ftrl_aggregator` with a noise on the
    updates that is larger by `encoding.inflation`. The guarantee of ρ-zCDP with
    ρ = S² / (2 noise_multiplier²) holds unchanged. The grid step is a fixed fraction
    of the active clip norm, so bits and inflation never change. The clients' bits are
    summed securely too, and exactly.

    Args:
      strategy: Strategy C of both streams; its restarts take over the estimate.
      noise_multiplier: Noise multiplier z of both streams together.
      clients_per_round: Report goal, by which both noised sums are divided.
      encoding: Grid of the encoded updates, from `grid.for_bits` or `grid.for_inflation`.
      clipping: Settings of the estimation of the clip norm.
      deterministic_seed: Seed of all noise, an integer in [0, 2^128), for tests only: a
        run with a known seed is not private. From the operating system if None.
      rotation_seed: Public seed of the rotations, an integer in [0, 2^128) other than the
        seed of the noise. From the operating system if None.

    Returns:
      The factory.

    Raises:
      ValueError: If an argument is out of range, or `encoding.max_clients` is below
        `clients_per_round`.
      RuntimeError: If the current execution context has no secure sums.
    """
    _check(encoding, clients_per_round)
    return adaptive_clipping.build_adaptive_dp_ftrl_aggregator(
        strategy,
        noise_multiplier=noise_multiplier,
        clients_per_round=clients_per_round,
        clipping=clipping,
        deterministic_seed=deterministic_seed,
        sum_factory=secagg_sum.SecAggSumFactory(encoding, 1.0, rotation_seed=rotation_seed),
        count_sum_factory=secagg_sum.SecAggHalfBitFactory(),
    )


def _check(encoding: grid.GridEncoding, clients_per_round: float) -> None:
    """Checks that the encoding has room for a round, and that secure sums can be run."""
    if encoding.max_clients < clients_per_round:
        raise validation.UsageError(
            f"encoding.max_clients {encoding.max_clients} is below clients_per_round "
            f"{clients_per_round}: build the encoding for the largest number of clients that can "
            "report in one round."
        )
    execution.check_secure_sums()
