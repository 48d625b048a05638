"""The sensitivity of branches against the enumeration of every pattern of all branches."""

import functools
import itertools

import numpy as np
import pytest

from tests.mechanisms import examples
from tff_dpftrl.mechanisms import branches, identity, tree
from tff_dpftrl.participation import schema as schema_lib

_ROUNDS = 6
_ROUNDING = 1e-11
_BLT = examples.ALL["blt"]
_RISING = "rising banded Toeplitz"
_STRATEGIES = (
    "identity", "blt", "tree", "vanilla tree", "two-banded", "fhu", "bisr", "dense", _RISING,
    "signed dense", "oscillating inverse", "restarted tree", "restarted blt",
)  # fmt: skip


def _joined(blocks, fork_at, num_branches):
    """Joins rows of one run, split into those before the fork and those after it."""
    shared, later = blocks
    before, after = np.hsplit(later, [fork_at])
    own = np.kron(np.eye(num_branches), after)
    return np.block(
        [
            [shared[:, :fork_at], np.zeros((len(shared), own.shape[1]))],
            [np.tile(before, (num_branches, 1)), own],
        ]
    )


@functools.cache
def _patterns(schema, fork_at, num_branches):
    """Participation of one client in the shared rounds and in each branch, as rows of 0 and 1."""
    by_past = {}
    for pattern in [(), *schema.patterns()]:
        row = np.zeros(schema.num_rounds)
        row[list(pattern)] = 1.0
        by_past.setdefault(tuple(row[:fork_at]), []).append(row[fork_at:])
    return np.array(
        [
            np.concatenate([past, *laters])
            for past, rows in by_past.items()
            for laters in itertools.product(rows, repeat=num_branches)
        ]
    )


def _largest(matrix, rows, signs):
    """Returns max ‖C x‖² over rows x, whose entries may have random signs."""
    tried = [rows]
    if signs:
        rng = np.random.default_rng(0)
        tried += [rows * rng.choice([1.0, -1.0], rows.shape) for _ in range(20)]
    return max(np.sum((vectors @ matrix.T) ** 2, axis=1).max() for vectors in tried)


@pytest.mark.parametrize("fork_at", range(_ROUNDS + 1))
@pytest.mark.parametrize("name", _STRATEGIES)
def test_never_below_the_joint_mechanism_and_exact_where_it_says_so(name, fork_at):
    strategy = examples.ALL[name]
    matrix = strategy.strategy_matrix(_ROUNDS)
    num_shared = len(strategy.strategy_matrix(fork_at)) if fork_at else 0
    signed = np.min(matrix.T @ matrix) < 0
    num_exact = 0
    for min_sep, count in itertools.product((1, 2, 3), (1, 2, 3, 6)):
        schema = schema_lib.MinSep(_ROUNDS, min_sep, count)
        for num_branches in (2, 3) if min_sep > 1 else (2,):
            bound = branches.sensitivity(
                strategy, schema, num_branches=num_branches, fork_at=fork_at
            )
            joint = _joined(np.split(matrix, [num_shared]), fork_at, num_branches)
            truth = _largest(joint, _patterns(schema, fork_at, num_branches), signed)
            assert bound.squared >= truth * (1 - _ROUNDING), schema
            assert bound.squared <= num_branches * strategy.sensitivity(schema).squared
            if bound.exact and not signed:
                assert bound.squared == pytest.approx(truth, rel=_ROUNDING), schema
                num_exact += 1
    assert num_exact or signed or name == _RISING


@pytest.mark.parametrize("fork_at", range(1, _ROUNDS))
@pytest.mark.parametrize("name", _STRATEGIES)
def test_never_below_what_the_noise_of_the_branches_hides(name, fork_at):
    # Of the released sums x + noise, without C: the largest xᵀ Σ⁻¹ x.
    strategy, num_branches = examples.ALL[name], 2
    noise = strategy.noise_matrix(_ROUNDS)
    num_shared = len(strategy.strategy_matrix(fork_at))
    assert not np.any(noise[:fork_at, num_shared:])
    columns_first = np.split(noise, [fork_at])
    shared, later = (rows[:, :num_shared] for rows in columns_first)
    own = np.kron(np.eye(num_branches), columns_first[1][:, num_shared:])
    whole = np.block(
        [[shared, np.zeros((fork_at, own.shape[1]))], [np.tile(later, (num_branches, 1)), own]]
    )
    precision = np.linalg.inv(whole @ whole.T)
    for min_sep, count in itertools.product((1, 2, 3), (1, 2, 6)):
        schema = schema_lib.MinSep(_ROUNDS, min_sep, count)
        rows = _patterns(schema, fork_at, num_branches)
        truth = np.einsum("ri,ij,rj->r", rows, precision, rows).max()
        bound = branches.sensitivity(strategy, schema, num_branches=num_branches, fork_at=fork_at)
        assert bound.squared >= truth * (1 - _ROUNDING), schema


def test_a_fork_costs_less_the_later_it_is():
    schema = schema_lib.MinSep(200, 20, 10)
    once = _BLT.sensitivity(schema)
    squared = [
        branches.sensitivity(_BLT, schema, num_branches=3, fork_at=t).squared
        for t in (0, 60, 100, 150, 199, 200)
    ]
    assert squared[0] == 3 * once.squared and squared[-1] == once.squared
    assert all(np.diff(squared) < 0)
    one = branches.sensitivity(_BLT, schema, num_branches=1, fork_at=60)
    assert one == once


def test_long_runs_are_charged_as_many_runs_as_there_are_branches():
    schema = schema_lib.MinSep(10**9, 10**6, 5)
    bound = branches.sensitivity(identity.Identity(), schema, num_branches=4, fork_at=10**8)
    assert bound.squared == 20.0 and not bound.exact


@pytest.mark.parametrize(
    "strategy, values, message",
    [
        (_BLT, {"num_branches": 0, "fork_at": 1}, "num_branches must be at least 1"),
        (_BLT, {"num_branches": 2, "fork_at": -1}, "fork_at must be at least 0"),
        (_BLT, {"num_branches": 2, "fork_at": 7}, "at most 6, the number of rounds, got 7"),
        (tree.FullTree(), {"num_branches": 2, "fork_at": 1}, "tree-full cannot be run"),
    ],
)
def test_what_is_no_fork_is_refused(strategy, values, message):
    with pytest.raises(ValueError, match=message):
        branches.sensitivity(strategy, schema_lib.MinSep(_ROUNDS, 2, 2), **values)
