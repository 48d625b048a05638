"""Lower-triangular Toeplitz matrices, given by their first column.

Everything here takes the coefficients c_0, c_1, ... of C[i, j] = c_{i - j} as a
float64 vector. Coefficients beyond the end of the vector are zero, so a banded
matrix is given by its bands.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tff_dpftrl import validation
from tff_dpftrl.mechanisms import strategy
from tff_dpftrl.participation import schema as schema_lib

_NEGLIGIBLE = 2.0**-60
_SHORTEST, _LONGEST = 4096, 2**24  # Entries of a column that is computed until it has decayed.


def pad(coefficients: np.ndarray, num_rounds: int) -> np.ndarray:
    """Returns the first `num_rounds` coefficients, zeros beyond the end of the vector."""
    coefficients = np.asarray(coefficients, dtype=np.float64)
    if len(coefficients) >= num_rounds:
        return coefficients[:num_rounds]
    return np.pad(coefficients, (0, num_rounds - len(coefficients)))


def checked_column(name: str, values: Sequence[float]) -> tuple[float, ...]:
    """Checks the entries of a first column: finite, at least one, the first one positive."""
    column = validation.numbers(name, values)
    if not column or not np.all(np.isfinite(column)) or column[0] <= 0:
        raise validation.UsageError(
            f"{name} must be finite, at least one, and the first one positive, got {column}."
        )
    return column


def matrix(coefficients: np.ndarray, num_rounds: int) -> np.ndarray:
    """Builds the dense matrix, float64, shape [num_rounds, num_rounds]."""
    column = pad(coefficients, num_rounds)
    lag = np.subtract.outer(np.arange(num_rounds), np.arange(num_rounds))
    return np.where(lag >= 0, column[np.maximum(lag, 0)], 0.0)


def inverse_coefficients(coefficients: np.ndarray, num_rounds: int) -> np.ndarray:
    """Computes the first `num_rounds` entries, n, of C⁻¹'s first column, by forward substitution.

    It costs n · min(n, p) multiplications. c_0 must not be zero.
    """
    column = pad(coefficients, min(len(coefficients), num_rounds))
    if column[0] == 0:
        raise validation.UsageError(
            "coefficients[0] is 0, so C has no inverse; it must be non-zero."
        )
    from scipy import signal  # It takes long to import.

    impulse = np.zeros(num_rounds)
    impulse[0] = 1.0
    return np.asarray(signal.lfilter([1.0], column, impulse))


def decayed_inverse(coefficients: np.ndarray, num_rounds: int) -> np.ndarray:
    """Computes the first column of C⁻¹ as far as it is not negligible, by forward substitution.

    Entry t ≥ m is Σ_s c'_{t-m-s} u_s, where u holds what the p - 1 entries before m leave behind,
    ‖u‖₁ ≤ Σ_{j≥1} |c_j| · Σ_{i<p} |c'_{m-i}|. So each m further entries are smaller by this factor.
    The entries left out add up to less than 2⁻⁶⁰ of the largest. More than 2²⁴ entries that are not
    negligible, of even more rounds, are refused.
    """
    carried = np.sum(np.abs(coefficients[1:]))
    length = max(_SHORTEST, 2 * len(coefficients))
    while length < num_rounds:
        if length > _LONGEST:
            raise validation.UsageError(
                f"num_rounds={num_rounds} is too many for this strategy, whose noise depends on "
                f"that of more than {_LONGEST} rounds before: take mechanism blt, tree or identity."
            )
        column = inverse_coefficients(coefficients, length)
        left = carried * np.sum(np.abs(column[length + 1 - len(coefficients) :]))
        if length * left <= _NEGLIGIBLE:
            return column
        length *= 2
    return inverse_coefficients(coefficients, num_rounds)


def exponential_sums(
    decay: np.ndarray, scale: np.ndarray, length: int, first: float | None = None
) -> np.ndarray:
    """Evaluates Σ_i scale[i] · decay[i]^t for t = 0 ... length - 1, after `first` if given.

    The exponent is split as t = r · width + s with width ≈ √length, so that only O(d √length)
    powers are computed; the rest is a matrix product, in which rows leave out the terms that have
    decayed below the rounding error. Decays have magnitudes up to about 1.
    """
    width = max(1, int(np.sqrt(length)))
    rows = -(-length // width)
    order = np.argsort(-np.abs(decay))
    decay, scale = np.asarray(decay, dtype=np.float64)[order], np.asarray(scale)[order]
    coarse = _powers(decay, width, rows) * scale[:, np.newaxis]
    fine = _powers(decay, 1, width)
    before = 0 if first is None else 1
    result = np.empty(before + rows * width)
    result[:before] = first
    table = result[before:].reshape(rows, width)

    slowest = np.maximum.accumulate(np.abs(coarse), axis=0)
    needed_rows = np.count_nonzero(np.abs(coarse) > _NEGLIGIBLE * slowest, axis=1)
    end = rows
    for terms in range(1, len(decay) + 1):
        start = int(np.max(needed_rows[terms:], initial=0))
        if start >= end:
            continue
        left, right = coarse[:terms, start:end], fine[:terms]
        if terms <= 2:  # BLAS is slower for so few.
            np.einsum("ki,kj->ij", left, right, out=table[start:end])
        else:
            np.matmul(left.T, right, out=table[start:end])
        end = start
    return result[: before + length]


def _powers(base: np.ndarray, step: int, count: int) -> np.ndarray:
    """Computes base[i]^(step · t) for t < count, shape [d, count]."""
    exponents = step * np.arange(count, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):  # Zero to the power of zero is set below.
        result = np.exp(np.log(np.abs(base))[:, np.newaxis] * exponents)
    result[:, :1] = 1.0
    if np.any(base < 0):
        result[base < 0] *= np.where(exponents % 2 == 1, -1.0, 1.0)
    return result


def prefix_noise_variance(inverse: np.ndarray) -> np.ndarray:
    """Computes the squared row norms of B = A C⁻¹ (McMahan, Xu & Zhang 2024, Prop. 3.3).

    `inverse` is the first column of C⁻¹. The norms do not decrease.
    """
    return np.cumsum(np.square(np.cumsum(inverse)))


def round_noise_variance(inverse: np.ndarray) -> np.ndarray:
    """Computes the squared row norms of C⁻¹ from its first column, shape [n]."""
    return np.cumsum(np.square(inverse))


def prefix_noise(inverse: np.ndarray, num_rounds: int) -> strategy.Extent:
    """Computes the extent of `prefix_noise_variance` from the entries of C⁻¹ that are not zero."""
    return _extent(np.cumsum(inverse), num_rounds)


def round_noise(inverse: np.ndarray, num_rounds: int) -> strategy.Extent:
    """Computes the extent of `round_noise_variance` from the entries of C⁻¹ that are not zero."""
    return _extent(pad(inverse, min(len(inverse) + 1, num_rounds)), num_rounds)


def _extent(column: np.ndarray, num_rounds: int) -> strategy.Extent:
    """Computes largest and mean squared row norms, where the last entry of a column repeats."""
    squares, left = np.square(column[:num_rounds]), max(0, num_rounds - len(column))
    weights = num_rounds - np.arange(len(squares), dtype=np.float64)
    largest = float(np.sum(squares)) + left * float(squares[-1])
    total = float(weights @ squares) + 0.5 * left * (left + 1) * float(squares[-1])
    return strategy.Extent(largest, total / num_rounds)


def is_non_increasing(coefficients: np.ndarray) -> bool:
    """Returns whether c_0 ≥ c_1 ≥ ... ≥ 0, the premise of the sensitivity theorem."""
    return bool(coefficients[-1] >= 0 and np.all(np.diff(coefficients) <= 0))


def earliest_pattern_norm_squared(coefficients: np.ndarray, schema: schema_lib.MinSep) -> float:
    """Computes ‖Σ_j C[:, j · min_sep]‖², for a client as early and often as allowed.

    Once as many columns overlap as can, the sums repeat from one participation to the next.
    """
    column = pad(coefficients, min(len(coefficients), schema.num_rounds))
    stride, overlapping = schema.min_sep, -(-len(column) // schema.min_sep)
    repeats = max(0, schema.effective_participations - overlapping)
    total = np.zeros(min(schema.num_rounds - repeats * stride, len(column) + overlapping * stride))
    for start in range(0, (schema.effective_participations - repeats) * stride, stride):
        end = min(start + len(column), len(total))
        total[start:end] += column[: end - start]
    squared = float(total @ total)
    if repeats:
        each = np.sum(pad(column, overlapping * stride).reshape(overlapping, stride), axis=0)
        squared += repeats * float(each @ each)
    return squared


def sensitivity(coefficients: np.ndarray, schema: schema_lib.MinSep) -> strategy.Sensitivity:
    """Computes the sensitivity of a lower-triangular Toeplitz C; exact where a theorem allows.

    * One participation, or no more bands than `min_sep`: the columns of a pattern
      do not overlap, the first ones are longest: exact.
    * c non-increasing and non-negative: the earliest pattern is the worst
      (McMahan, Xu & Zhang 2024, Thm. 3.1): exact.
    * Otherwise an upper bound: m_t = max_{s ≥ t} |c_s| is non-increasing and
      m_t ≥ |c_t|, so every entry of CᵀC is at most that of MᵀM in magnitude, and
      the theorem applied to M bounds the sensitivity of C for contributions of
      any direction.
    """
    column = pad(coefficients, min(len(coefficients), schema.num_rounds))
    if not np.all(np.isfinite(column)):
        raise validation.UsageError(
            "coefficients has entries that are not finite; all must be numbers."
        )
    if schema.effective_participations == 1 or len(np.trim_zeros(column, "b")) <= schema.min_sep:
        return strategy.Sensitivity(
            earliest_pattern_norm_squared(column, schema), True, "columns do not overlap"
        )
    if is_non_increasing(column):
        return strategy.Sensitivity(
            earliest_pattern_norm_squared(column, schema), True, "non-increasing Toeplitz theorem"
        )
    envelope = np.maximum.accumulate(np.abs(column)[::-1])[::-1]
    return strategy.Sensitivity(
        earliest_pattern_norm_squared(envelope, schema),
        False,
        "upper bound: non-increasing envelope of the coefficients",
    )
