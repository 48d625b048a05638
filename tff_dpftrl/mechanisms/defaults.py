"""Default parameters of the mechanisms, with reasons.

The table of mechanisms, the optimisers and the commands share them.
"""

from __future__ import annotations

from tff_dpftrl.participation import schema as schema_lib

INVERSE_BANDS = 16
"""Bands of the inverse of C (bisr, bifr, bandinv): the noise of 15 earlier rounds is drawn again.

This takes about as many draws a round as the tree, for less noise; README.md has figures.
"""


def bands(schema: schema_lib.MinSep) -> int:
    """Returns the default bands of C (bandmf, bandtoep, bandfhu): min_sep, as published.

    With more bands, columns of one client overlap. The server keeps bands - 1 copies of the
    model. Where min_sep is large, use fewer bands, which costs much of the gain, or a BLT,
    which does about as well with a few copies.
    """
    return min(schema.min_sep, schema.num_rounds)


def max_decay(num_rounds: int) -> float:
    """Returns the largest decay of a BLT by default, with which it may also run longer.

    That costs 0.2 % of the loss, 0.3 % in short runs. Without a bound the least MaxLoss often
    has one decay extremely close to 1, which ties the BLT to its number of rounds. If such a
    BLT runs longer, its noise grows faster.
    """
    return 1.0 - 1.0 / max(2, num_rounds)
