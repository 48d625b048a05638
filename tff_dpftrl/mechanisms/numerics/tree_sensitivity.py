"""Exact sensitivity of tree aggregation, in milliseconds.

The published dynamic program (Xu et al. 2023, appendix; TensorFlow Privacy) runs
over all rounds. This one runs over dyadic blocks, and only over those that are too
large to be trivial. It rests on four facts. Write b for the minimum separation
and B for the largest power of two with B <= b < 2 B.

1. S² = max over patterns of Σ_nodes (participations below the node)²: the entries of
   the tree's C are 0 or 1, so CᵀC >= 0 and indicator vectors are the worst case.
2. A node of at most B leaves holds at most one participation. One that falls into
   a complete block of B rounds adds log2(B) + 1 for the nodes inside that block,
   wherever in the block it is. So within such a block the earliest allowed round
   is at least as good as any other, whatever follows.
3. A block depends on the rounds before it through one number: the earliest allowed
   offset p. The rounds after it depend on the block, besides its value, through the
   earliest allowed offset q in the next block. Smaller q is never worse. So for
   (size of the block, participations in it, p) it is enough to keep the pairs
   (q, value) that no other pair beats in both, and two halves are merged by trying
   every split of the participations: the parent adds its own (j1 + j2)².
4. Offsets reached by the rule of 2 are multiples of b modulo B, counted from the
   last slack, so there are few of them: the work does not depend on n but for the
   number of levels.

Rounds after the last complete block of B rounds are fewer than b, hence hold at most
one participation, and no node joins it with another: it adds the height of the
dyadic block it is in, which is largest for the earliest allowed round.
"""

from __future__ import annotations

from collections.abc import Sequence

# (earliest allowed offset in the next block, value), offsets and values increasing.
_Frontier = list[tuple[int, int]]

_MAX_WORK = 8_000_000


class _OutOfBudgetError(Exception):
    """Signal that the exact search needs more work than allowed."""


def _pareto(pairs: list[tuple[int, int]]) -> _Frontier:
    """Keeps the pairs that no other pair beats: smaller offset, larger value."""
    pairs.sort(key=lambda pair: (pair[0], -pair[1]))
    kept: _Frontier = []
    for offset, value in pairs:
        if not kept or value > kept[-1][1]:
            kept.append((offset, value))
    return kept


class _Blocks:
    """Best values of complete dyadic blocks of B · 2^height rounds."""

    def __init__(self, min_sep: int, max_work: int):
        self.min_sep = min_sep
        self.base_level = min_sep.bit_length() - 1
        self._work_left = max_work
        self._memo: dict[tuple[int, int, int], _Frontier] = {}

    def capacity(self, height: int, offset: int) -> int:
        """Computes the most participations in a block, the first one at `offset` or later."""
        last = (1 << (self.base_level + height)) - 1
        return 0 if offset > last else 1 + (last - offset) // self.min_sep

    def frontier(self, height: int, count: int, offset: int) -> _Frontier:
        """Computes pairs (next offset, value) for exactly `count` participations."""
        length = 1 << (self.base_level + height)
        if count == 0:
            return [(max(0, offset - length), 0)]
        if height == 0:
            return [(offset + self.min_sep - length, self.base_level + 1)]
        key = (height, count, offset)
        if key not in self._memo:
            self._memo[key] = self._merge(height, count, offset)
        return self._memo[key]

    def _merge(self, height: int, count: int, offset: int) -> _Frontier:
        pairs = []
        half = height - 1
        for left in range(min(count, self.capacity(half, offset)) + 1):
            right = count - left
            for middle, left_value in self.frontier(half, left, offset):
                if right <= self.capacity(half, middle):
                    value = left_value + count * count
                    right_frontier = self.frontier(half, right, middle)
                    pairs.extend((end, value + more) for end, more in right_frontier)
        self.spend(len(pairs) + count)
        return _pareto(pairs)

    def spend(self, work: int) -> None:
        """Counts merged pairs; raises _OutOfBudgetError if they are too many."""
        self._work_left -= work
        if self._work_left < 0:
            raise _OutOfBudgetError


def _dyadic_levels(num_rounds: int) -> list[int]:
    """Lists the levels of the maximal completed subtrees, in the order of time."""
    return [h for h in range(num_rounds.bit_length() - 1, -1, -1) if num_rounds >> h & 1]


def _exact(lengths: Sequence[int], min_sep: int, max_participations: int, max_work: int) -> int:
    """Runs the dynamic program over consecutive forests of the given lengths."""
    blocks = _Blocks(min_sep, max_work)
    frontiers: dict[int, _Frontier] = {0: [(0, 0)]}
    for length in lengths:
        for level in _dyadic_levels(length):
            successors: dict[int, list[tuple[int, int]]] = {}
            for used, frontier in frontiers.items():
                for offset, value in frontier:
                    options = _options(blocks, level, max_participations - used, offset)
                    blocks.spend(len(options))
                    for added, end, more in options:
                        successors.setdefault(used + added, []).append((end, value + more))
            frontiers = {used: _pareto(pairs) for used, pairs in successors.items()}
    return max(frontier[-1][1] for frontier in frontiers.values())


def _options(
    blocks: _Blocks, level: int, max_count: int, offset: int
) -> list[tuple[int, int, int]]:
    """Lists (participations, next offset, value) of one complete subtree."""
    if level < blocks.base_level:
        length = 1 << level
        options = [(0, max(0, offset - length), 0)]
        if offset < length and max_count > 0:
            options.append((1, offset + blocks.min_sep - length, level + 1))
        return options
    height = level - blocks.base_level
    return [
        (count, end, value)
        for count in range(min(max_count, blocks.capacity(height, offset)) + 1)
        for end, value in blocks.frontier(height, count, offset)
    ]


def earliest_pattern_squared(num_rounds: int, min_sep: int, max_participations: int) -> int:
    """Computes Σ_nodes count² of the pattern 0, b, 2b, ...: a lower bound of S².

    It is often taken for the squared sensitivity; for trees it is too low.
    """
    count = min(max_participations, -(-num_rounds // min_sep))
    total = 0
    for level in range(num_rounds.bit_length()):
        # Nodes that end before the pattern does have `least` participations, or one more.
        nodes, least = min(num_rounds, count * min_sep) >> level, (1 << level) // min_sep
        used = -(-(nodes << level) // min_sep)
        more = used - nodes * least
        total += (nodes - more) * least**2 + more * (least + 1) ** 2
        if nodes < num_rounds >> level:
            total += (count - used) ** 2
    return total


def upper_bound_squared(lengths: Sequence[int], min_sep: int, max_participations: int) -> int:
    """Computes a proven upper bound of S² for clip norm 1, level by level, in O(levels).

    `lengths` are the numbers of rounds of the trees. A node with 2^h leaves holds at most
    c_h = ⌈2^h / b⌉ participations, and the counts of one level sum to at most k. A sum of squares
    is convex, so under those two constraints it is largest when as many nodes as possible are full.
    """
    total = 0
    for level in range(max(lengths).bit_length()):
        completed = sum(length >> level for length in lengths)
        capacity = -(-(1 << level) // min_sep)
        full = min(completed, max_participations // capacity)
        total += full * capacity**2
        if full < completed:
            total += (max_participations - full * capacity) ** 2
    return total


def squared(
    lengths: Sequence[int], min_sep: int, max_participations: int, max_work: int = _MAX_WORK
) -> tuple[int, bool]:
    """Computes S² of trees of `lengths` rounds for clip norm 1, and whether it is exact.

    The schema runs across restarts: a client's participations keep their distance from one tree to
    the next, and their number is limited over all. If the search needs more than `max_work` merged
    pairs, the result is the bound of `upper_bound_squared`.
    """
    num_rounds = sum(lengths)
    count = min(max_participations, -(-num_rounds // min_sep))
    if count == 1:
        return max(lengths).bit_length(), True
    bound = upper_bound_squared(lengths, min_sep, count)
    if len(lengths) == 1 and earliest_pattern_squared(num_rounds, min_sep, count) == bound:
        return bound, True
    try:
        return _exact(lengths, min_sep, count, max_work), True
    except _OutOfBudgetError:
        return bound, False
