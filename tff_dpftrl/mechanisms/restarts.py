"""Strategies that start anew at given rounds (Gboard, Algorithm 1).

At a restart the tree, or the buffers, begin again with fresh draws, so C is block
diagonal. The squared sensitivity adds up over the blocks, but one participation schema
runs across all of them: the distance and the number of a client's participations know
no restarts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np
import scipy.linalg
from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.mechanisms import (
    banded,
    banded_toeplitz,
    blt,
    identity,
    inverse_banded,
    noise_recipe,
    strategy,
    tree,
)
from tff_dpftrl.mechanisms.numerics import banded_sensitivity, toeplitz, tree_sensitivity
from tff_dpftrl.participation import schema as schema_lib

_MAX_WORK = 20_000_000
_MAX_ROUNDS = 10_000_000  # Of a run with restarts: each block is looked at.
_NESTED_RESTARTS = "base must not have restarts of its own; give all starts at once."

_ToeplitzStrategy: TypeAlias = (
    identity.Identity | blt.Blt | banded_toeplitz.BandedToeplitz | inverse_banded.InverseBanded
)


@dataclasses.dataclass(frozen=True)
class Restarted(strategy.Strategy):
    """Strategy that runs another strategy anew from each of `starts`.

    Attributes:
      base: Strategy within each block; its round 0 is the block's first round.
      starts: First rounds of the blocks, increasing, the first one 0.
    """

    base: strategy.Strategy
    starts: tuple[int, ...]

    mechanism: ClassVar[str] = "restarted"

    def __post_init__(self):
        strategy.check_strategy(self.base, "base")
        starts = tuple(int(start) for start in self.starts)
        if starts != tuple(self.starts) or not starts or starts[0] != 0:
            raise validation.UsageError(
                f"starts must be integers, the first one 0, got {self.starts!r}."
            )
        if any(later <= earlier for earlier, later in zip(starts, starts[1:], strict=False)):
            raise validation.UsageError(f"starts must increase, got {starts}.")
        if isinstance(self.base, Restarted):
            raise validation.UsageError(_NESTED_RESTARTS)
        limit = self.base.max_rounds
        longest = max(np.diff(starts), default=0)
        if limit is not None and longest > limit:
            raise validation.UsageError(
                f"starts must be at most {limit} rounds apart, the length of base, got {longest}: "
                "build base for more rounds."
            )
        object.__setattr__(self, "starts", starts)

    @property
    @override
    def name(self) -> str:
        return f"{self.base.name}, restarted {strategy.counted(len(self.starts) - 1, 'time')}"

    @property
    @override
    def max_rounds(self) -> int | None:
        """Largest number of rounds that the base allows in the last block; None if any."""
        limit = self.base.max_rounds
        return None if limit is None else self.starts[-1] + limit

    def block_lengths(self, num_rounds: int) -> list[int]:
        """Computes the numbers of rounds of the blocks begun within `num_rounds` rounds.

        Raises:
          ValueError: If `num_rounds` is less than 1 or more than `max_rounds`.
        """
        if num_rounds < 1 or (self.max_rounds is not None and num_rounds > self.max_rounds):
            raise validation.UsageError(
                f"num_rounds must be in 1 ... {self.max_rounds}, got {num_rounds}. Restart once "
                "more or build base for more rounds."
            )
        begun = [start for start in self.starts if start < num_rounds]
        return np.diff([*begun, num_rounds]).tolist()

    @override
    def strategy_matrix(self, num_rounds: int) -> np.ndarray:
        lengths = self.block_lengths(num_rounds)
        return scipy.linalg.block_diag(*(self.base.strategy_matrix(n) for n in lengths))

    @override
    def noise_matrix(self, num_rounds: int) -> np.ndarray:
        lengths = self.block_lengths(num_rounds)
        return scipy.linalg.block_diag(*(self.base.noise_matrix(n) for n in lengths))

    @override
    def sensitivity(self, schema: schema_lib.MinSep) -> strategy.Sensitivity:
        """Computes the sensitivity under a schema that runs across the restarts.

        * Trees: the dynamic program of `tree_sensitivity` over all blocks.
        * Toeplitz: the norms of columns that do not overlap, or the monotone
          theorem within blocks and a dynamic program across them. The result is an upper
          bound if the coefficients increase somewhere or the search would be long.
        * Others: `banded_sensitivity.from_gram`.
        """
        lengths = self.block_lengths(schema.num_rounds)
        if isinstance(self.base, tree.Tree | tree.FullTree):
            squared, exact = tree_sensitivity.squared(
                lengths, schema.min_sep, schema.max_participations
            )
            method = "dynamic program over dyadic blocks" if exact else "bound level by level"
            return strategy.Sensitivity(float(squared), exact, f"{method}, across restarts")
        if isinstance(self.base, _ToeplitzStrategy):
            return _toeplitz_sensitivity(_first_column(self.base, max(lengths)), lengths, schema)
        if isinstance(self.base, banded.Banded):
            rows = np.concatenate([self.base.rows[:n] for n in lengths])
            return banded.Banded(rows[:, : schema.num_rounds]).sensitivity(schema)
        diagonals = np.zeros((max(lengths), schema.num_rounds))
        start = 0
        for length in lengths:
            block = banded_sensitivity.gram_diagonals(self.base.strategy_matrix(length))
            diagonals[:length, start : start + length] = block
            start += length
        return banded_sensitivity.from_gram(diagonals, schema)

    @override
    def prefix_noise_variance(self, num_rounds: int) -> np.ndarray:
        variances, before = [], 0.0
        for length in self.block_lengths(num_rounds):
            variances.append(before + self.base.prefix_noise_variance(length))
            before = variances[-1][-1]
        return np.concatenate(variances)

    @override
    def round_noise_variance(self, num_rounds: int) -> np.ndarray:
        lengths = self.block_lengths(num_rounds)
        return np.concatenate([self.base.round_noise_variance(n) for n in lengths])

    @override
    def noise_recipe(self) -> noise_recipe.RestartedNoise:
        recipe = self.base.noise_recipe()
        if isinstance(recipe, noise_recipe.RestartedNoise):
            raise validation.UsageError(_NESTED_RESTARTS)
        return noise_recipe.RestartedNoise(recipe, self.starts)

    @override
    def memory_copies(self, num_rounds: int) -> int:
        """Counts the tensors of the base in its largest block: a restart drops the old ones."""
        return max(self.base.memory_copies(n) for n in self.block_lengths(num_rounds))

    @override
    def to_dict(self) -> dict[str, Any]:
        return {
            "mechanism": self.mechanism,
            "base": self.base.to_dict(),
            "starts": list(self.starts),
        }

    @classmethod
    def from_dict(
        cls,
        values: Mapping[str, Any],
        read_base: Callable[[Mapping[str, Any]], strategy.Strategy],
    ) -> Restarted:
        """Reads what `to_dict` returned.

        Args:
          values: Values that `to_dict` returned.
          read_base: Function that builds the base, of any class, from its part of the values.

        Returns:
          The strategy.
        """
        return cls(read_base(values["base"]), tuple(values["starts"]))


def starts(num_rounds: int, *, every: int, first: int | None = None) -> tuple[int, ...]:
    """Computes the first rounds of the blocks of a run that restarts on a schedule; the first is 0.

    The first restart is in round `first`, `every` if None. Gboard's adaptive clipping restarts in
    round 128, and then every 1024 rounds.
    """
    validation.integer("num_rounds", num_rounds, minimum=1)
    validation.integer("every", every, minimum=1)
    if num_rounds > _MAX_ROUNDS:
        raise validation.UsageError(
            f"num_rounds must be at most {_MAX_ROUNDS} with restarts, got {num_rounds}: leave the "
            "restarts out."
        )
    first = every if first is None else validation.integer("first", first, minimum=1)
    return (0, *range(first, num_rounds, every))


def longest_block(num_rounds: int, starts: Sequence[int]) -> int:
    """Computes the number of rounds of the longest block between `starts`."""
    return int(np.max(np.diff([*starts, num_rounds])))


def has_restarts(strategy: strategy.Strategy) -> bool:
    """Returns whether a strategy runs anew in some round after the first."""
    return isinstance(strategy, Restarted) and len(strategy.starts) > 1


def whole_run(
    base: strategy.Strategy, num_rounds: int, starts: Sequence[int] = (0,)
) -> strategy.Strategy:
    """Builds the strategy of a whole run from that of a block; `base` itself for one block.

    `base` must be for at least as many rounds as the longest block.
    """
    longest, limit = longest_block(num_rounds, starts), strategy.check_strategy(base).max_rounds
    if limit is not None and limit < longest:
        raise validation.UsageError(
            f"the strategy is for at most {limit} rounds, got {longest}: optimise one for more "
            "rounds (`tff-dpftrl optimize --rounds`), or restart it more often."
        )
    return base if len(starts) == 1 else Restarted(base, tuple(starts))


def _first_column(base: _ToeplitzStrategy, num_rounds: int) -> np.ndarray:
    """Computes the coefficients of a Toeplitz base, without trailing zeros if banded."""
    if isinstance(base, identity.Identity):
        return np.ones(1)
    if isinstance(base, banded_toeplitz.BandedToeplitz):
        return np.array(base.coefficients[:num_rounds])
    return base.coefficients(num_rounds)


def _toeplitz_sensitivity(
    column: np.ndarray, lengths: Sequence[int], schema: schema_lib.MinSep
) -> strategy.Sensitivity:
    """Computes the sensitivity of Toeplitz blocks with the coefficients `column`."""
    if len(column) <= schema.min_sep or schema.effective_participations == 1:
        norms = np.cumsum(column**2)
        norms = np.pad(norms, (0, max(lengths) - len(norms)), mode="edge")
        norms = np.concatenate([norms[:n][::-1] for n in lengths])
        return strategy.Sensitivity(
            banded_sensitivity.spaced_maximum(norms, schema),
            True,
            "dynamic program, orthogonal columns",
        )
    count = schema.effective_participations
    if len(lengths) * count * min(count, -(-max(lengths) // schema.min_sep)) > _MAX_WORK:
        # Without restarts every entry of CᵀC is at least as large, or so is its bound.
        whole = toeplitz.sensitivity(column, schema).squared
        return strategy.Sensitivity(whole, False, "upper bound: as if there were no restarts")
    if toeplitz.is_non_increasing(column):
        squared = _monotone_squared(column, lengths, schema)
        return strategy.Sensitivity(squared, True, "non-increasing Toeplitz theorem, by blocks")
    # Entries of CᵀC are at most, in magnitude, those for this larger, falling column.
    envelope = np.maximum.accumulate(np.abs(column)[::-1])[::-1]
    return strategy.Sensitivity(
        _monotone_squared(envelope, lengths, schema),
        False,
        "upper bound: non-increasing envelope of the coefficients, by blocks",
    )


def _monotone_squared(
    column: np.ndarray, lengths: Sequence[int], schema: schema_lib.MinSep
) -> float:
    """Computes S² of non-increasing, non-negative Toeplitz blocks, exactly.

    Within a block, j participations from the offset p on are worst, and leave most
    room to later blocks, at p, p + b, p + 2 b, ...: entries of CᵀC grow with
    every shift to the front and every shorter distance. So it is enough to choose
    their number in each block, and to keep, for every (number used, earliest
    offset in the next block), the largest value.
    """
    min_sep = schema.min_sep
    known: dict[int, list[float]] = {}
    best = {(0, 0): 0.0}
    for length in lengths:
        reached: dict[tuple[int, int], float] = {}
        for (used, offset), before in best.items():
            room = max(0, length - offset)
            if room not in known:
                known[room] = _earliest_norms(column, room, schema)
            most = schema.max_participations - used
            for count, value in enumerate(known[room][: most + 1]):
                last = offset + (count - 1) * min_sep
                following = max(0, offset - length) if count == 0 else last + min_sep - length
                state = (used + count, max(0, following))
                reached[state] = max(before + value, reached.get(state, 0.0))
        best = _undominated(reached)
    return max(best.values())


def _earliest_norms(column: np.ndarray, room: int, schema: schema_lib.MinSep) -> list[float]:
    """Computes ‖Σ_{i<j} C[:, i b]‖² for j = 0, 1, ... participations in `room` rounds."""
    total, norms = np.zeros(room), [0.0]
    for start in range(0, room, schema.min_sep):
        if len(norms) > schema.max_participations:
            break
        end = min(start + len(column), room)
        total[start:end] += column[: end - start]
        norms.append(float(total @ total))
    return norms


def _undominated(states: dict[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    """Drops states that another state with as many uses beats in offset and value."""
    kept: dict[tuple[int, int], float] = {}
    highest: dict[int, float] = {}
    for (used, offset), total in sorted(states.items()):
        if total > highest.get(used, -1.0):
            kept[used, offset] = highest[used] = total
    return kept
