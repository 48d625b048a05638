"""The strategy matrix that a config names, for the schema of a run."""

from __future__ import annotations

from tff_dpftrl.mechanisms import (
    bandtoep_optimize,
    blt_optimize,
    identity,
    inverse_banded,
    restarts,
    serialization,
    tree,
)
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.training import config as config_lib

_BANDS = 32
"""Bands of the banded strategies, or fewer: as many model copies, or draws a round."""


def for_config(
    config: config_lib.TrainingConfig, schema: schema_lib.MinSep
) -> strategy_lib.Strategy | None:
    """Makes, optimises or reads the strategy of a run.

    Args:
      config: Names the mechanism or the file; says when adaptive clipping restarts.
      schema: The declared participation schema.

    Returns:
      The strategy, restarts included; None for the mechanism "none".

    Raises:
      ValueError: If the file cannot be read, or the strategy has too few rounds.
    """
    starts = _restarts(config)
    longest = max(b - a for a, b in zip(starts, [*starts[1:], config.num_rounds], strict=True))
    block = schema_lib.MinSep(
        longest, min(schema.min_sep, longest), min(schema.max_participations, longest)
    )
    base = _one_block(config, block)
    if base is not None and base.max_rounds is not None and base.max_rounds < longest:
        raise ValueError(
            f"The strategy in {config.strategy} is for {base.max_rounds} rounds, but {longest} are "
            "to be run: optimise one for more with `tff-dpftrl optimize --rounds`."
        )
    return base if len(starts) == 1 or base is None else restarts.Restarted(base, starts)


def _restarts(config: config_lib.TrainingConfig) -> tuple[int, ...]:
    """First rounds of the blocks."""
    if not config.adaptive_clipping:
        return (0,)
    return (0, *range(config.restart_warmup, config.num_rounds, config.restart_every))


def _one_block(
    config: config_lib.TrainingConfig, block: schema_lib.MinSep
) -> strategy_lib.Strategy | None:
    if config.strategy is not None:
        return serialization.load(config.strategy)
    bands = min(_BANDS, block.min_sep)
    match config.mechanism:
        case "none":
            return None
        case "identity":
            return identity.Identity()
        case "tree":
            return tree.Tree(block.num_rounds)
        case "blt":
            # Without the bound, the best buffer never forgets and ties C to this very number of
            # rounds; it costs about 0.2 % of the loss.
            bound = 1.0 - 1.0 / max(2, block.num_rounds)
            return blt_optimize.optimize_blt(
                block, num_buffers=config.buffers, max_decay=bound
            ).strategy
        case "bandtoep":
            return bandtoep_optimize.optimize_banded_toeplitz(block, bands)
        case "bisr":
            return inverse_banded.InverseBanded.bisr(bands)
