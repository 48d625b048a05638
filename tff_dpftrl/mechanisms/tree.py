"""Binary-tree aggregation as a strategy of the matrix mechanism.

Every completed node of a binary tree over the rounds has its own Gaussian draw. The
released sum of the first t rounds adds the estimates of the nodes of the dyadic
decomposition of t (Xu et al. 2023, Gboard, sections 2 and 3; Honaker 2015). Rows of
C are the nodes, columns the rounds, and an entry is 1 if the round is below the
node. C is not square: the noise matrix is a left inverse of it.

A node exists once its last round is over: only nodes completed by round n count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.mechanisms import noise_recipe, strategy
from tff_dpftrl.mechanisms.numerics import tree_sensitivity
from tff_dpftrl.participation import schema as schema_lib


def completed_nodes(num_rounds: int) -> list[tuple[int, int]]:
    """Lists the nodes (level, index) completed by round `num_rounds`, in the order of completion.

    A node's rounds are index · 2^level ... (index + 1) · 2^level − 1. In each round the lower
    levels come first. Their number is 2 n minus the number of ones in n.
    """
    return [
        (level, t >> level)
        for t in range(num_rounds)
        for level in range(((t + 1) & -(t + 1)).bit_length())
    ]


def _honaker_weights(num_levels: int) -> np.ndarray:
    """Computes the weight of a node's own draw, by level: 2^h / (2^(h+1) − 1).

    The estimate weighs the node's own draw, of variance 1, and the sum of its
    children's estimates, of variance 2 v, by their precisions. So the weight
    equals the variance v' = 1 / (1 + 1 / (2 v)) that results.
    """
    return 1.0 / (2.0 - 0.5 ** np.arange(num_levels))


def _bits(values: np.ndarray, num_levels: int) -> np.ndarray:
    """Returns binary digits, shape [num_levels, len(values)], lowest first."""
    return values[np.newaxis, :] >> np.arange(num_levels)[:, np.newaxis] & 1


class _TreeStrategy(strategy.Strategy):
    """Base of all trees: the matrix C and its sensitivity."""

    @override
    def strategy_matrix(self, num_rounds: int) -> np.ndarray:
        """Returns C, shape [m, num_rounds], with rows in the order of `completed_nodes`."""
        nodes = completed_nodes(self._check(num_rounds))
        matrix = np.zeros((len(nodes), num_rounds))
        for row, (level, index) in zip(matrix, nodes, strict=True):
            row[index << level : (index + 1) << level] = 1.0
        return matrix

    @override
    def sensitivity(self, schema: schema_lib.MinSep) -> strategy.Sensitivity:
        """Computes the sensitivity under `schema` by `tree_sensitivity`.

        It counts the nodes completed by round `schema.num_rounds`.
        """
        squared, exact = tree_sensitivity.squared(
            [self._check(schema.num_rounds)], schema.min_sep, schema.max_participations
        )
        method = "dynamic program over dyadic blocks" if exact else "bound level by level"
        return strategy.Sensitivity(float(squared), exact, method)

    def _check(self, num_rounds: int) -> int:
        return validation.integer("num_rounds", num_rounds, minimum=1)


@dataclasses.dataclass(frozen=True)
class Tree(_TreeStrategy):
    """Tree aggregation as it can be run: vanilla or with online variance reduction.

    Attributes:
      num_rounds: Number of rounds planned. It sets the number of levels, so that
        up to `max_rounds` rounds can be run.
      variance_reduction: Whether the estimate of a node combines its own draw and
        the estimates of its children by their precisions (Honaker 2015,
        bottom-up; "online" in the Gboard paper). If False, it is its own draw.
    """

    num_rounds: int
    variance_reduction: bool = True

    mechanism: ClassVar[str] = "tree"

    def __post_init__(self):
        num_rounds = validation.integer("num_rounds", self.num_rounds, minimum=1)
        object.__setattr__(self, "num_rounds", num_rounds)
        if not isinstance(self.variance_reduction, bool):
            raise validation.UsageError(
                f"variance_reduction must be True or False, got {self.variance_reduction!r}; for "
                "the full variance reduction, which cannot be run, use FullTree."
            )

    @property
    @override
    def name(self) -> str:
        return "tree" if self.variance_reduction else "tree-vanilla"

    @property
    def num_levels(self) -> int:
        """Number of levels of nodes; the tallest subtree has 2^(num_levels − 1) rounds."""
        return self.num_rounds.bit_length()

    @property
    @override
    def max_rounds(self) -> int:
        """Largest number of rounds that needs no more levels."""
        return 2**self.num_levels - 1

    @override
    def _check(self, num_rounds: int) -> int:
        num_rounds = super()._check(num_rounds)
        if num_rounds > self.max_rounds:
            raise validation.UsageError(
                f"num_rounds must be at most {self.max_rounds}, got {num_rounds}: this tree was "
                f"planned for {self.num_rounds} rounds. Build one for more."
            )
        return num_rounds

    def _own_weights(self) -> np.ndarray:
        if self.variance_reduction:
            return _honaker_weights(self.num_levels)
        return np.ones(self.num_levels)

    def _estimate_variances(self) -> np.ndarray:
        """Returns the variance of a node's estimate, by level: v = w in both variants."""
        return self._own_weights()

    @override
    def noise_matrix(self, num_rounds: int) -> np.ndarray:
        """Returns the map from draws to noise, shape [num_rounds, m]; a left inverse of C."""
        draws = iter(np.eye(len(completed_nodes(self._check(num_rounds)))))
        own_weights = self._own_weights()
        pending: list[np.ndarray] = []
        prefixes = []
        for t in range(num_rounds):
            estimate = next(draws)
            for level in range(1, ((t + 1) & -(t + 1)).bit_length()):
                children = pending.pop() + estimate
                estimate = own_weights[level] * next(draws) + (1.0 - own_weights[level]) * children
            pending.append(estimate)
            prefixes.append(sum(pending))
        return np.diff(prefixes, axis=0, prepend=0.0)

    @override
    def prefix_noise_variance(self, num_rounds: int) -> np.ndarray:
        """Computes the squared row norms of B = A · noise matrix, shape [num_rounds]."""
        prefixes = np.arange(1, self._check(num_rounds) + 1)
        return self._estimate_variances() @ _bits(prefixes, self.num_levels)

    @override
    def round_noise_variance(self, num_rounds: int) -> np.ndarray:
        """Computes the squared row norms of the noise matrix, shape [num_rounds].

        Round t completes one node on each level up to the number a of trailing
        ones of t, and the noise emitted is the topmost estimate minus those of the
        left children on the way to it. With c the coefficient of the estimate at
        hand, own weight w and children of variance v,
        V_a(c) = c² w_a² + (c (1 − w_a) − 1)² v_{a−1} + V_{a−1}(c (1 − w_a)).
        """
        after = np.arange(1, self._check(num_rounds) + 1)
        trailing_ones = np.log2(after & -after).astype(np.int64)
        return self._round_variances()[trailing_ones]

    def _round_variances(self) -> np.ndarray:
        """Computes the variances of a round's noise, by the level of its topmost node."""
        own_weights = self._own_weights()
        variances = self._estimate_variances()
        by_level = np.empty(self.num_levels)
        for top in range(self.num_levels):
            coefficient, total = 1.0, 0.0
            for level in range(top, 0, -1):
                total += (coefficient * own_weights[level]) ** 2
                coefficient *= 1.0 - own_weights[level]
                total += (coefficient - 1.0) ** 2 * variances[level - 1]
            by_level[top] = total + coefficient**2
        return by_level

    @override
    def prefix_noise(self, num_rounds: int) -> strategy.Extent:
        """Computes the extent level by level, in O(levels²)."""
        num_rounds = self._check(num_rounds)
        levels, variances = np.arange(self.num_levels), self._estimate_variances()
        # The largest is of all rounds, or of one of its ones replaced by all lower ones.
        most = [num_rounds] + [
            (num_rounds >> h << h) - 1 for h in range(self.num_levels) if num_rounds >> h & 1
        ]
        largest = np.max(variances @ _bits(np.array(most), self.num_levels))
        whole = (num_rounds + 1) >> (levels + 1)
        partial = np.maximum(0, num_rounds + 1 - (whole << levels + 1) - (1 << levels))
        uses = (whole << levels) + partial
        return strategy.Extent(float(largest), float(variances @ uses) / num_rounds)

    @override
    def round_noise(self, num_rounds: int) -> strategy.Extent:
        """Computes the extent level by level, in O(levels²)."""
        completed = self._check(num_rounds) >> np.arange(num_rounds.bit_length() + 1)
        variances = self._round_variances()[: num_rounds.bit_length()]
        mean = float(variances @ -np.diff(completed)) / num_rounds
        return strategy.Extent(float(np.max(variances)), mean)

    @override
    def noise_recipe(self) -> noise_recipe.TreeNoise:
        """Returns the number of levels and the variant."""
        return noise_recipe.TreeNoise(self.num_levels, self.variance_reduction)

    @override
    def memory_copies(self, num_rounds: int) -> int:
        """Counts the estimates that are kept, one a level; without them, nodes are drawn again."""
        self._check(num_rounds)
        return self.num_levels if self.variance_reduction else 0

    @override
    def to_dict(self) -> dict[str, Any]:
        return {
            "mechanism": self.mechanism,
            "num_rounds": self.num_rounds,
            "variance_reduction": self.variance_reduction,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Tree:
        """Reads what `to_dict` returned."""
        return cls(values["num_rounds"], values["variance_reduction"])


@dataclasses.dataclass(frozen=True)
class FullTree(_TreeStrategy):
    """Tree aggregation with full variance reduction: for evaluation only.

    Every prefix sum is estimated from all nodes of all rounds, later ones
    included: B = A C⁺ ("TreeAgg-Full" of McMahan, Xu & Zhang 2024). No server can
    run it, for the noise of a round depends on draws of later rounds.
    """

    mechanism: ClassVar[str] = "tree-full"

    @override
    def noise_matrix(self, num_rounds: int) -> np.ndarray:
        """Returns the pseudo-inverse of C, shape [num_rounds, m]; not lower triangular."""
        return np.linalg.pinv(self.strategy_matrix(num_rounds))

    @override
    def prefix_noise_variance(self, num_rounds: int) -> np.ndarray:
        """Computes the squared row norms of A C⁺, shape [num_rounds], in O(n log n).

        A complete subtree of height h estimates its sum with the Honaker variance
        v_h, and different maximal subtrees are independent. Let g be the variance
        of the sum of the first i leaves, given the exact sum of the subtree. Given
        it, the two children's sums trade off with variance v_{h−1} / 2, hence
        g_h(i) = g_{h−1}(i) + (i / 2^{h−1})² v_{h−1} / 2 for i <= 2^{h−1}, and the
        same for the mirrored remainder beyond; without it, i leaves of a maximal
        subtree have variance g_h(i) + (i / 2^h)² v_h.
        """
        num_rounds = self._check(num_rounds)
        variances = _honaker_weights(num_rounds.bit_length())
        given_sum = np.zeros(2)
        curves = []
        for level, variance in enumerate(variances):
            if level > 0:
                fraction = np.linspace(0.0, 1.0, len(given_sum))
                left = given_sum + fraction**2 * variances[level - 1] / 2
                given_sum = np.concatenate([left, left[-2::-1]])
            fraction = np.linspace(0.0, 1.0, len(given_sum))
            curves.append(given_sum + fraction**2 * variance)
        result, before = [], 0.0
        for level in reversed(range(num_rounds.bit_length())):
            if num_rounds >> level & 1:
                result.append(before + curves[level][1:])
                before += variances[level]
        return np.concatenate(result)

    @override
    def round_noise_variance(self, num_rounds: int) -> np.ndarray:
        """Computes the squared row norms of C⁺, shape [num_rounds].

        From the root down, an estimate of variance e of the parent's sum from
        everything above it makes the child's sum known with variance
        e + v_{h−1} from outside, to be combined with its own draw.
        """
        num_rounds = self._check(num_rounds)
        variances = _honaker_weights(num_rounds.bit_length())
        result = []
        for top in reversed(range(num_rounds.bit_length())):
            if num_rounds >> top & 1:
                estimate = 1.0
                for level in reversed(range(top)):
                    estimate = 1.0 / (1.0 + 1.0 / (estimate + variances[level]))
                result.append(np.full(1 << top, estimate))
        return np.concatenate(result)

    @override
    def noise_recipe(self) -> noise_recipe.NoiseRecipe:
        """Raises an error: there is nothing to stream.

        Raises:
          ValueError: Always.
        """
        raise validation.UsageError(
            "tree-full cannot be run: the noise of a round would depend on later rounds. Use "
            "Tree(num_rounds, variance_reduction=True)."
        )

    @override
    def memory_copies(self, num_rounds: int) -> int:
        """Counts the nodes: each of them is needed to the end."""
        return 2 * self._check(num_rounds) - bin(num_rounds).count("1")

    @override
    def to_dict(self) -> dict[str, Any]:
        return {"mechanism": self.mechanism}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> FullTree:
        """Reads what `to_dict` returned."""
        del values
        return cls()
