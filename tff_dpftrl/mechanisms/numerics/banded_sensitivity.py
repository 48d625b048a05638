"""Sensitivity of any strategy from its Gram matrix CᵀC: exact, or a proven bound.

One client's contributions x_i, i in a pattern P, are vectors of norm at most 1. With
G = CᵀC, the squared sensitivity is the largest Σ_{i,j∈P} G[i, j] ⟨x_i, x_j⟩ over the
patterns P of the schema and the vectors x. Replacing G by |G| gives an upper bound. It is
attained if signs s_i with s_i s_j G[i, j] = |G[i, j]| on P exist, in particular if
CᵀC >= 0 (Denisov et al. 2022; McMahan, Xu & Zhang 2024, section 2). The indicator vector
of P alone is not enough if G has negative entries.

What is maximised over patterns t_1 < t_2 < ... < t_r is then, for G' = |G|,
Σ_i G'[t_i, t_i] + 2 Σ_i G'[t_i, t_{i+1}] + 2 Σ_{i + 2 <= j} G'[t_i, t_j]. The bound h_r(t) for r
participations, the first one in round t, follows the first two sums exactly and
bounds what t adds to the third by the r − 2 best entries of row t, spaced by b, from
distance 2b on:

h_r(t) = G'[t, t] + far_{r−2}(t) + max_{s >= t + b} (2 G'[t, s] + h_{r−1}(s)).

`far` is 0, so that nothing is bounded, if r <= 2 or if G vanishes from distance 2b on,
as it does for bands <= 2b. Otherwise the pattern behind the bound is evaluated: where its
value equals the bound, for some signs, the bound is exact.
"""

from __future__ import annotations

import numpy as np

from tff_dpftrl import validation
from tff_dpftrl.mechanisms import strategy
from tff_dpftrl.participation import schema as schema_lib

_ROUNDING = 1e-12


def gram_diagonals(matrix: np.ndarray) -> np.ndarray:
    """Computes the diagonals of CᵀC: entry [d, t] is (CᵀC)[t, t + d], and 0 if t + d >= n."""
    gram = matrix.T @ matrix
    num_rounds = gram.shape[0]
    diagonals = np.zeros_like(gram)
    for distance in range(num_rounds):
        diagonals[distance, : num_rounds - distance] = np.diagonal(gram, distance)
    return diagonals


def spaced_maximum(values: np.ndarray, schema: schema_lib.MinSep) -> float:
    """Computes the largest sum of non-negative `values` over the patterns of `schema`, exactly.

    It is the squared sensitivity of a C whose columns, if `min_sep` or more apart, are orthogonal,
    when `values` are their squared norms.
    """
    best = np.zeros(len(values) + schema.min_sep)
    for _ in range(schema.effective_participations):
        best[: len(values)] = _running_maximum(values + best[schema.min_sep :])
    return float(best[0])


def _running_maximum(values: np.ndarray) -> np.ndarray:
    """Computes the maximum over the last axis from each position on."""
    return np.maximum.accumulate(values[..., ::-1], axis=-1)[..., ::-1]


def _far_sums(diagonals: np.ndarray, min_sep: int, max_count: int) -> np.ndarray:
    """Computes the best sums of entries of a row, spaced by b, from distance 2b on.

    `diagonals` are those of |G|. Entry [m, t] of the result is for m entries or fewer of row t.
    """
    num_diagonals, num_rounds = diagonals.shape
    count = min(max_count, max(0, -(-(num_diagonals - 2 * min_sep) // min_sep)))
    # best[d % b] holds the sums from distance d on, for the last b distances done.
    best = np.zeros((min_sep, count + 1, num_rounds))
    result = np.zeros((max_count + 1, num_rounds))
    if count == 0:
        return result
    following = np.zeros((count + 1, num_rounds))
    for distance in range(num_diagonals - 1, 2 * min_sep - 1, -1):
        slot = best[distance % min_sep]
        current = following.copy()
        np.maximum(current[1:], diagonals[distance] + slot[:-1], out=current[1:])
        slot[:] = current
        following = current
    result[: count + 1] = following
    result[count + 1 :] = following[count]
    return result


def _extend(
    magnitudes: np.ndarray, min_sep: int, bounds: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Computes max_{s >= t + b} (2 G'[t, s] + h(s)) for every t, and the s that attains it."""
    num_diagonals, num_rounds = magnitudes.shape
    padded = np.full(num_rounds + num_diagonals, -np.inf)
    padded[:num_rounds] = bounds
    # Beyond the last diagonal the rounds do not interact: the best of them is as good.
    suffix = _running_maximum(padded)
    positions = np.where(padded == suffix, np.arange(len(padded)), len(padded))
    positions = np.minimum.accumulate(positions[::-1])[::-1]
    reach, chosen = suffix[num_diagonals:], positions[num_diagonals:]
    for distance in range(min_sep, num_diagonals):
        candidate = 2.0 * magnitudes[distance] + padded[distance : distance + num_rounds]
        better = candidate > reach
        reach = np.where(better, candidate, reach)
        chosen = np.where(better, np.arange(distance, distance + num_rounds), chosen)
    return reach, chosen


def _signed_value(diagonals: np.ndarray, pattern: list[int]) -> float:
    """Computes sᵀ G s on the pattern; each sign is chosen by those of the earlier rounds."""
    block = np.zeros((len(pattern), len(pattern)))
    for j, later in enumerate(pattern):
        for i, earlier in enumerate(pattern[: j + 1]):
            if later - earlier < len(diagonals):
                block[i, j] = block[j, i] = diagonals[later - earlier, earlier]
    signs = np.ones(len(pattern))
    for j in range(1, len(pattern)):
        signs[j] = 1.0 if block[j, :j] @ signs[:j] >= 0 else -1.0
    return float(signs @ block @ signs)


def from_gram(diagonals: np.ndarray, schema: schema_lib.MinSep) -> strategy.Sensitivity:
    """Computes the sensitivity of a strategy from CᵀC, for clip norm 1: exact or a proven bound.

    Entry [d, t] of `diagonals` is (CᵀC)[t, t + d], and 0 if t + d >= num_rounds, shape [D,
    num_rounds]. Diagonals from D on are 0. Time is O(D n k) and memory O(n (D + k)).
    """
    num_diagonals, num_rounds = diagonals.shape
    if num_rounds != schema.num_rounds:
        raise validation.UsageError(
            f"diagonals must have {schema.num_rounds} columns, one a round of the schema, got "
            f"{num_rounds}."
        )
    min_sep, count = schema.min_sep, schema.effective_participations
    if num_diagonals <= min_sep or count == 1:
        return strategy.Sensitivity(
            spaced_maximum(diagonals[0], schema), True, "dynamic program, orthogonal columns"
        )
    magnitudes = np.abs(diagonals)
    far = 2.0 * _far_sums(magnitudes, min_sep, count - 2)
    bounds, following = [magnitudes[0]], [np.zeros(num_rounds, dtype=np.int64)]
    for r in range(2, count + 1):
        reach, chosen = _extend(magnitudes, min_sep, bounds[-1])
        bounds.append(magnitudes[0] + far[r - 2] + reach)
        following.append(chosen)

    r = max(range(count), key=lambda i: bounds[i].max())
    squared = float(bounds[r].max())
    pattern = [int(np.argmax(bounds[r]))]
    for i in range(r, 0, -1):
        pattern.append(int(following[i][pattern[-1]]))
    attained = _signed_value(diagonals, pattern)
    if attained >= squared * (1.0 - _ROUNDING):
        return strategy.Sensitivity(squared, True, "dynamic program over pairs of rounds")
    return strategy.Sensitivity(squared, False, "upper bound over pairs of rounds")
