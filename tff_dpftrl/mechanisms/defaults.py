"""What a mechanism is like if nothing is said about it, and why.

One place for the table of mechanisms, the optimisers and the commands.
"""

from __future__ import annotations

from tff_dpftrl.participation import schema as schema_lib

INVERSE_BANDS = 16
"""Bands of the inverse of C (bisr, bifr): the noise of 15 earlier rounds is drawn again.

About as many draws a round as the tree's, for less noise; README.md has figures.
"""


def bands(schema: schema_lib.MinSep) -> int:
    """Bands of C (bandmf, bandtoep, bandfhu): min_sep, as published.

    With more, columns of one client overlap. The server keeps bands - 1 copies of the
    model: where min_sep is large, a run asks for fewer bands, at much of the loss, or uses
    a BLT, which does about as well with a few copies.
    """
    return min(schema.min_sep, schema.num_rounds)


def max_decay(num_rounds: int) -> float:
    """Largest decay of a BLT: it then forgets within the run, and may run longer.

    That costs 0.2 % of the loss, 0.3 % in short runs. Without a bound the least MaxLoss often
    has one decay at 1 minus almost nothing, which ties the BLT to its number of rounds: run
    longer, its noise grows faster.
    """
    return 1.0 - 1.0 / max(2, num_rounds)
