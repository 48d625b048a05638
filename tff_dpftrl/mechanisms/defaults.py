"""What a mechanism is like if nothing is said about it, and why.

One place for the table of mechanisms, the optimisers and the commands.
"""

from __future__ import annotations

from tff_dpftrl.participation import schema as schema_lib

MAX_BANDS = 32
"""Most bands of C (bandmf, bandtoep, bandfhu) that are taken without being asked for.

The server keeps bands - 1 copies of the model. Where min_sep is larger, fewer bands than
min_sep cost much of the loss (README.md has figures): ask for more if there is the memory, or
use a BLT, which does better with a few copies.
"""

INVERSE_BANDS = 4
"""Bands of the inverse of C (bisr, bifr): the noise of 3 earlier rounds is drawn again."""


def bands(schema: schema_lib.MinSep) -> int:
    """Bands of C: min_sep, beyond which columns of one client overlap, up to `MAX_BANDS`."""
    return min(schema.min_sep, schema.num_rounds, MAX_BANDS)


def max_decay(num_rounds: int) -> float:
    """Largest decay of a BLT: it then forgets within the run, and may run longer.

    That costs 0.2 % of the loss, 0.3 % in short runs. Without a bound the least MaxLoss often
    has one decay at 1 minus almost nothing, which ties the BLT to its number of rounds: run
    longer, its noise grows faster.
    """
    return 1.0 - 1.0 / max(2, num_rounds)
