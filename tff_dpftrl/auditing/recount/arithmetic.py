"""Sensitivity and ε, computed from a strategy's parameters alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import dp_accounting
import numpy as np
import scipy.linalg
from dp_accounting import pld
from scipy import special, stats

from tff_dpftrl import validation

_MAX_PATTERNS = 20_000
_MAX_WORK = 1_500_000_000
_STARTS_OF_SEARCH = 4
_NARROWEST_CELL = 1e-7  # A PLD of such cells takes minutes and gigabytes.
_NEGLIGIBLE_EPSILON, _NEGLIGIBLE_DELTA = 3e-5, 3e-13  # Far less than what checks let pass.
_LARGEST_SHIFT = 100.0
"""Units of one user in a sample, in standard deviations, from which on a PLD takes gigabytes."""


class Schema(NamedTuple):
    """A participation schema: at most `times` times in `rounds` rounds, `stride` apart."""

    rounds: int
    stride: int
    times: int


class Bounds(NamedTuple):
    """Bounds of a squared sensitivity for clip norm 1, with their method in words.

    An allowed pattern of participation reaches `lower`. None exceeds `upper`: inf if not computed.
    """

    lower: float
    upper: float
    how: str


class UnknownMechanismError(validation.UsageError):
    """A strategy is of a mechanism, with this name, that this package does not have."""

    def __init__(self, mechanism: str):
        super().__init__(f"The mechanism {mechanism!r} is not known to the recount.")
        self.mechanism = mechanism


def strategy_matrix(parameters: Mapping[str, Any], num_rounds: int) -> np.ndarray:
    """Computes the dense C, [n, n], by definition; a tree has one row per completed node."""
    mechanism = parameters["mechanism"]
    if mechanism == "restarted":
        starts = [start for start in parameters["starts"] if start < num_rounds]
        lengths = np.diff([*starts, num_rounds])
        blocks = [strategy_matrix(parameters["base"], int(length)) for length in lengths]
        return scipy.linalg.block_diag(*blocks)
    if mechanism in ("tree", "tree-full"):
        nodes, size = [], 1
        while size <= num_rounds:
            nodes += [(first, first + size) for first in range(0, num_rounds - size + 1, size)]
            size *= 2
        t = np.arange(num_rounds)
        return np.array([(first <= t) & (t < end) for first, end in nodes], float)
    if mechanism == "banded":
        matrix = np.zeros((num_rounds, num_rounds))
        for t, row in enumerate(parameters["rows"][:num_rounds]):
            for lag, entry in enumerate(row[: t + 1]):
                matrix[t, t - lag] = entry
        return matrix
    if mechanism == "dense":
        rows = parameters["rows"][:num_rounds]
        return np.array([[*row, *[0.0] * (num_rounds - len(row))] for row in rows])
    coefficients = _coefficients(parameters, num_rounds)
    return scipy.linalg.toeplitz(coefficients, np.zeros(num_rounds))


def _coefficients(parameters: Mapping[str, Any], num_rounds: int) -> np.ndarray | None:
    """Returns the first column of a Toeplitz C; None for other strategies."""
    mechanism = parameters["mechanism"]
    column = np.zeros(num_rounds)
    column[0] = 1.0
    if mechanism == "identity":
        return column
    if mechanism == "blt":
        powers = np.arange(num_rounds - 1)
        for decay, scale in zip(parameters["buf_decay"], parameters["output_scale"], strict=True):
            column[1:] += scale * decay**powers
        return column
    if mechanism == "banded-toeplitz":
        bands = parameters["coefficients"][:num_rounds]
        column[: len(bands)] = bands
        return column
    if mechanism == "inverse-banded":
        inverse = np.zeros(num_rounds)
        bands = parameters["inverse_coefficients"][:num_rounds]
        inverse[: len(bands)] = bands
        matrix = scipy.linalg.toeplitz(inverse, np.zeros(num_rounds))
        return scipy.linalg.solve_triangular(matrix, column, lower=True)
    if mechanism in ("tree", "tree-full", "banded", "dense"):
        return None
    raise UnknownMechanismError(mechanism)


def noise_matrix(parameters: Mapping[str, Any], num_rounds: int) -> np.ndarray:
    """Computes C⁻¹ of a square C, shape [n, n]."""
    matrix = strategy_matrix(parameters, num_rounds)
    return scipy.linalg.solve_triangular(matrix, np.eye(num_rounds), lower=True)


def squared_sensitivity(parameters: Mapping[str, Any], schema: Schema) -> Bounds:
    """Computes the largest ‖C u‖² over the allowed patterns u of one client, or bounds of it.

    The bounds are equal where all patterns were tried, or a theorem says which is the worst.
    """
    worst = _worst_of_decreasing(parameters, schema)
    if worst is not None:
        return Bounds(worst, worst, "coefficients that do not increase: earliest turns are worst")
    matrix = strategy_matrix(parameters, schema.rounds)
    gram = matrix.T @ matrix
    size = np.abs(gram)  # Contributions may point in opposite directions.
    if _count(schema) <= _MAX_PATTERNS:
        squares = _all_patterns(size, schema)
        if np.all(gram >= -1e-12):
            return Bounds(squares, squares, "all patterns tried")
        lower = max(_all_patterns(gram, schema), _all_patterns(np.diag(np.diag(gram)), schema))
        return Bounds(lower, squares, "all patterns tried, with coefficients of both signs")
    return Bounds(_searched(gram, schema), _bounded(size, schema), "search, and a bound")


def _worst_of_decreasing(parameters: Mapping[str, Any], schema: Schema) -> float | None:
    """Applies McMahan, Xu & Zhang 2024, Theorem 3.1; None if it does not apply.

    For a Toeplitz C with non-negative, non-increasing coefficients, the worst participations are
    as early and as close to each other as is allowed, in each block between restarts. They also
    end earliest, so that later blocks lose nothing.
    """
    starts = [0]
    if parameters["mechanism"] == "restarted":
        starts = [start for start in parameters["starts"] if start < schema.rounds]
        parameters = parameters["base"]
    column = _coefficients(parameters, schema.rounds)
    if column is None or np.min(column) < 0.0 or np.any(np.diff(column) > 0.0):
        return None
    ends = [*starts[1:], schema.rounds]

    @functools.cache
    def block(length: int, times: int) -> float:
        total = np.zeros(length)
        for turn in range(0, times * schema.stride, schema.stride):
            total[turn:] += column[: length - turn]
        return float(total @ total)

    @functools.cache
    def from_block(number: int, earliest: int, left: int) -> float:
        if number == len(starts):
            return 0.0
        first = max(starts[number], earliest)
        best, times = from_block(number + 1, earliest, left), 1
        while times <= left and first + (times - 1) * schema.stride < ends[number]:
            after = first + times * schema.stride
            later = from_block(number + 1, after, left - times)
            best = max(best, block(ends[number] - first, times) + later)
            times += 1
        return best

    return from_block(0, 0, schema.times)


def _count(schema: Schema) -> int:
    """Returns the number of allowed patterns."""
    free = [schema.rounds - (m - 1) * (schema.stride - 1) for m in range(1, schema.times + 1)]
    return sum(math.comb(n, m) for m, n in enumerate(free, start=1) if n >= m)


def _all_patterns(gram: np.ndarray, schema: Schema) -> float:
    """Returns the largest sum of entries over the patterns, by trying all of them."""

    def extended(pattern: tuple[int, ...], value: float) -> float:
        best = value
        if len(pattern) < schema.times:
            for t in range(pattern[-1] + schema.stride if pattern else 0, schema.rounds):
                more = value + gram[t, t] + 2.0 * sum(gram[t, s] for s in pattern)
                best = max(best, extended((*pattern, t), more))
        return best

    return float(extended((), 0.0))


def _searched(gram: np.ndarray, schema: Schema) -> float:
    """Searches for the pattern with the largest sum.

    It starts from participations at the stride, and moves each of them while that helps.
    """
    rounds, stride, times = schema

    def value(pattern: Sequence[int]) -> float:
        return float(gram[np.ix_(pattern, pattern)].sum())

    regular = [
        tuple(range(first, min(rounds, first + times * stride), stride)) for first in range(rounds)
    ]
    largest = []
    for start in sorted(regular, key=value, reverse=True)[:_STARTS_OF_SEARCH]:
        pattern, before = list(start), -1.0
        while value(pattern) > before:
            before = value(pattern)
            for i in range(len(pattern)):
                low = pattern[i - 1] + stride if i else 0
                high = pattern[i + 1] - stride if i + 1 < len(pattern) else rounds - 1
                others = pattern[:i] + pattern[i + 1 :]
                gain = np.diag(gram)[low : high + 1] + 2.0 * gram[low : high + 1][:, others].sum(1)
                pattern[i] = low + int(np.argmax(gain))
        largest.append(value(pattern))
    return max(largest)


def _bounded(size: np.ndarray, schema: Schema) -> float:
    """Bounds the sum of every pattern P by the largest Σ_{i ∈ P} w_i.

    w_i is the largest Σ_{j ∈ P} |G_ij| over the patterns P that contain i.
    """
    rounds, stride, times = schema
    times = min(times, -(-rounds // stride))
    if rounds * rounds * times > _MAX_WORK:
        return math.inf
    before, after = _best_before(size, stride, times), _best_before(size[::-1, ::-1], stride, times)
    after = after[:, ::-1]
    weights = np.diag(size) + np.max(before + after[::-1], axis=0)
    (best,) = _best_sums(weights[np.newaxis], stride, times)[-1][:, -1:].T
    return float(best[0])


def _best_sums(weights: np.ndarray, stride: int, times: int) -> list[np.ndarray]:
    """Returns the largest sums of at most 0 ... `times` entries up to j, `stride` apart."""
    sums = [np.zeros_like(weights)]
    for _ in range(times):
        taken = weights.copy()
        taken[:, stride:] += sums[-1][:, :-stride] if stride < weights.shape[1] else 0.0
        sums.append(np.maximum.accumulate(np.maximum(taken, 0.0), axis=1))
    return sums


def _best_before(size: np.ndarray, stride: int, times: int) -> np.ndarray:
    """Returns the largest sums of m = 0 ... times − 1 entries of row i before i, [times, n]."""
    n = len(size)
    largest = np.zeros((times, n))
    for m, sums in enumerate(_best_sums(size, stride, times - 1)):
        if stride < n:
            largest[m, stride:] = sums[np.arange(stride, n), np.arange(n - stride)]
    return largest


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Computes ε of a Gaussian mechanism: a root of Balle & Wang 2018, Theorem 8, by bisection."""
    if mu == 0.0 or math.isinf(mu):
        return mu

    def log_delta(epsilon: float) -> float:
        first = special.log_ndtr(mu / 2.0 - epsilon / mu)
        second = epsilon + special.log_ndtr(-mu / 2.0 - epsilon / mu)
        return first + math.log1p(-math.exp(min(second - first, -1e-16)))

    target = math.log(delta)
    low, high = 0.0, mu * mu / 2.0 + mu * math.sqrt(-2.0 * target)  # Mironov 2017 bounds it.
    for _ in range(200):
        middle = (low + high) / 2.0
        if log_delta(middle) > target:
            low = middle
        else:
            high = middle
    return high


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Computes δ of a Gaussian mechanism: Balle & Wang 2018, Theorem 8."""
    if mu == 0.0 or math.isinf(mu):
        return 0.0 if mu == 0.0 else 1.0
    first = special.ndtr(mu / 2.0 - epsilon / mu)
    return float(first - math.exp(epsilon) * special.ndtr(-mu / 2.0 - epsilon / mu))


def sampled_bounds(
    noise_multiplier: float,
    probability: float,
    group_size: int,
    num_steps: int,
    delta: float,
    mu: float = 0.0,
) -> tuple[float, float]:
    """Computes bounds of ε of Gaussian noise on secret Poisson samples.

    They are 1% from `sampled_epsilon`, unless a user has so many units in a sample that ε is in the
    thousands. Then the lower one is that of a test of the steps' sum: without the user it is N(0, T
    σ²), else N(j, T σ²) with j ~ Binomial(T G, p). The upper one is that of a Gaussian mechanism,
    whose steps all have the number of units that few steps exceed. `noise_multiplier` is relative
    to the norm that one sampled unit contributes, `group_size` is the number of units of one user,
    and `mu` is of a Gaussian mechanism besides, 0 for none.
    """
    share = delta / (8.0 if mu else 4.0)  # Of each step's units, and of each run, as `accounting`.
    most = stats.binom.isf(share / max(1, num_steps), group_size, probability)
    if num_steps == 0 or most <= _LARGEST_SHIFT * noise_multiplier or noise_multiplier == 0.0:
        spent = sampled_epsilon(noise_multiplier, probability, group_size, num_steps, delta, mu)
        # Each of the two accountants rounds up, on different grids.
        return spent * 0.99 - 1e-4, spent * 1.01 + 1e-4
    root = math.sqrt(num_steps)
    high = gaussian_epsilon(math.hypot(root * most / noise_multiplier, mu), delta / 2.0)
    # With probability 1.5 δ the user has `many` units or more, and the sum is above `least`.
    many = stats.binom.isf(min(1.0, 2.0 * delta), num_steps * group_size, probability)
    least = many / (root * noise_multiplier) - special.ndtri(0.75)
    low = math.log(0.5 * delta) - float(special.log_ndtr(-least))
    return max(0.0, low), high * (1.0 + 1e-6)


@functools.lru_cache(maxsize=64)
def sampled_epsilon(
    noise_multiplier: float,
    probability: float,
    group_size: int,
    num_steps: int,
    delta: float,
    mu: float = 0.0,
) -> float:
    """Computes ε of Gaussian noise on secret Poisson samples, by dp_accounting's PLD accountant.

    It is within about 1% or 1e-4. The arguments are those of `sampled_bounds`.
    """
    if num_steps == 0:
        return gaussian_epsilon(mu, delta)
    if noise_multiplier == 0.0:
        return math.inf
    accountants = _accountants(noise_multiplier, probability, group_size, num_steps, mu)
    return _settled(([one.get_epsilon(delta)] for one in accountants), _NEGLIGIBLE_EPSILON)[0]


def sampled_deltas(
    noise_multiplier: float,
    probability: float,
    group_size: int,
    num_steps: int,
    epsilons: Sequence[float],
    mu: float = 0.0,
) -> list[float]:
    """Computes δ at each ε, within about 1 % at the smallest one; arguments as above."""
    accountants = _accountants(noise_multiplier, probability, group_size, num_steps, mu)
    deltas = ([one.get_delta(epsilon) for epsilon in epsilons] for one in accountants)
    return _settled(deltas, _NEGLIGIBLE_DELTA)


def _settled(values: Iterable[Sequence[float]], negligible: float) -> list[float]:
    """Returns the first values that are within 0.3 % of those before, or a negligible number."""
    last, is_settled = np.array(math.inf), False
    for now in map(np.asarray, values):
        is_settled, last = np.all(now >= last * 0.997 - negligible), now
        if is_settled:
            break
    return last.tolist()


def _accountants(
    noise_multiplier: float, probability: float, group_size: int, num_steps: int, mu: float
) -> Iterator[pld.PLDAccountant]:
    """Yields accountants of all steps with narrower and narrower cells.

    Wide cells can only make ε and δ too large: narrower ones are tried until these stay.
    """
    interval = min(1e-2, 0.03 / math.sqrt(num_steps))
    while True:
        yield _accountant(noise_multiplier, probability, group_size, num_steps, mu, interval)
        if interval < _NARROWEST_CELL:
            return
        interval /= 4.0


@functools.lru_cache(maxsize=4)
def _accountant(
    noise_multiplier: float,
    probability: float,
    group_size: int,
    num_steps: int,
    mu: float,
    interval: float,
) -> pld.PLDAccountant:
    """Builds the accountant of all steps with cells of a width, in seconds for a group."""
    if group_size == 1:
        step = dp_accounting.PoissonSampledDpEvent(
            probability, dp_accounting.GaussianDpEvent(noise_multiplier)
        )
    else:
        counts = np.arange(group_size + 1)
        step = dp_accounting.dp_event.MixtureOfGaussiansDpEvent(
            noise_multiplier, counts, stats.binom.pmf(counts, group_size, probability)
        )
    composed: dp_accounting.DpEvent = dp_accounting.SelfComposedDpEvent(step, num_steps)
    if mu > 0.0:
        beside = dp_accounting.GaussianDpEvent(1.0 / mu)
        composed = dp_accounting.ComposedDpEvent([composed, beside])
    return pld.PLDAccountant(value_discretization_interval=interval).compose(composed)
