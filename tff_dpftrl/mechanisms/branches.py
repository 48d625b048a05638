"""Sensitivity of a run whose state is continued several times.

N branches go on from the state after round T - 1. They share the noise of the rounds before, and
each has independent noise after it. With the rows of C whose noise is drawn in these rounds first,

    C = [[P, 0], [F, L]],

for the contributions x of the first T rounds and y of the later ones, the branches release P x + z
and, for each branch i, F x + L y_i + z_i, with independent z. This is one Gaussian mechanism. Its
squared sensitivity is the maximum of

    ‖P x‖² + Σ_i ‖F x + L y_i‖²

over the contributions of one client that keep to the schema in every branch. Given x, all terms
of the sum have the same largest value. So the maximum is that of ‖P x‖² + N ‖F x + L y‖² over
the contributions of one run: N branches cost what one run costs whose later rows are √N times as
large.
"""

from __future__ import annotations

import numpy as np

from tff_dpftrl import validation
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.mechanisms.numerics import banded_sensitivity
from tff_dpftrl.participation import schema as schema_lib

_MAX_ROUNDS = 4096  # Of a dense CᵀC: 0.8 GB.


def sensitivity(
    strategy: strategy_lib.Strategy,
    schema: schema_lib.MinSep,
    *,
    num_branches: int,
    fork_at: int,
) -> strategy_lib.Sensitivity:
    """Computes the sensitivity of all branches of a run together, never understated.

    The first `fork_at` rounds, T, are shared by all N branches. Each client keeps to the schema in
    them and one branch, whichever it is. The result is S of one run if T is the number of all
    rounds, √N S if T is 0. In between it is the least of several bounds. For runs of more than
    4,096 rounds it is √N S.
    """
    validation.integer("num_branches", num_branches, minimum=1)
    validation.integer("fork_at", fork_at, minimum=0)
    if fork_at > schema.num_rounds:
        raise validation.UsageError(
            f"fork_at must be at most {schema.num_rounds}, the number of rounds, got {fork_at}."
        )
    strategy.noise_recipe()  # Refuses one whose noise depends on later rounds.
    once = strategy.sensitivity(schema)
    if num_branches == 1 or fork_at == schema.num_rounds:
        return once
    apart = strategy_lib.Sensitivity(
        num_branches * once.squared, once.exact and fork_at == 0, "as if nothing were shared"
    )
    if fork_at == 0 or schema.num_rounds > _MAX_ROUNDS:
        return apart
    matrix = strategy.strategy_matrix(schema.num_rounds)
    shared, later = np.split(matrix, [len(strategy.strategy_matrix(fork_at))])
    shared, later = map(banded_sensitivity.gram_diagonals, (shared, later))
    together = banded_sensitivity.from_gram(shared + num_branches * later, schema)
    of_others = banded_sensitivity.from_gram((num_branches - 1) * later, schema)
    added = strategy_lib.Sensitivity(
        once.squared + of_others.squared, False, "upper bound: one run, and the others' later rows"
    )
    return min(together, added, apart, key=lambda bound: bound.squared)
