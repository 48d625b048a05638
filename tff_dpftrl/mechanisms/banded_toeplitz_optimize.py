"""Optimises banded Toeplitz strategies (BandToep) for up to millions of rounds.

McKenna 2024, "Scaling up the banded matrix factorization mechanism", with the gradient
written out. As power series, B(x) = 1 / ((1 − x) C(x)), so ∂B/∂c_s = −x^s D(x) with
D(x) = 1 / ((1 − x) C(x)²): one reciprocal and two convolutions an evaluation, O(n log n).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import fft, optimize

from tff_dpftrl import validation
from tff_dpftrl.mechanisms import banded_toeplitz, defaults
from tff_dpftrl.mechanisms import workload as workload_lib
from tff_dpftrl.mechanisms.numerics import model_errors, toeplitz
from tff_dpftrl.participation import schema as schema_lib

_DIRECT_PRODUCTS = 5_000_000
_EXPLODED = 1e100


def _product(a: np.ndarray, b: np.ndarray, length: int) -> np.ndarray:
    """Computes the first `length` coefficients of the product of two power series."""
    size = fft.next_fast_len(len(a) + len(b) - 1, real=True)
    spectrum = fft.rfft(a, size) * fft.rfft(b, size)  # pyright: ignore[reportOperatorIssue]
    product: np.ndarray = fft.irfft(spectrum, size)  # pyright: ignore[reportAssignmentType]
    return product[:length]


def _reciprocal(coefficients: np.ndarray, length: int) -> np.ndarray:
    """Computes the first `length` coefficients of 1 / C(x), by Newton's iteration if long."""
    if len(coefficients) * length <= _DIRECT_PRODUCTS:
        return toeplitz.inverse_coefficients(coefficients, length)
    short = -(-length // 2)
    half = _reciprocal(coefficients[:short], short)
    excess = _product(coefficients[:length], half, length)
    excess[:short] = 0.0
    correction = _product(half, excess, length)
    return toeplitz.pad(half, length) - correction


def _log_loss(
    free: np.ndarray, uses: np.ndarray, round_weights: np.ndarray
) -> tuple[float, np.ndarray]:
    """Computes the logarithm of the loss, and its gradient, at c = (1, *free).

    `uses[s]` is the number of columns of the earliest pattern that reach the entry c_s;
    `round_weights` are the weights of B_t². If the noise explodes, the value is large and the
    gradient zero.
    """
    c = np.append(1.0, free)
    with np.errstate(over="ignore", invalid="ignore"):
        inverse = _reciprocal(c, len(round_weights))
        prefix = np.cumsum(inverse)
        weighted = round_weights * prefix
        error = weighted @ prefix
    if not error < _EXPLODED:
        return np.log(_EXPLODED), np.zeros(len(free))
    squared = uses @ c**2
    by_inverse_square = _product(prefix, inverse, len(prefix))
    correlation = _product(weighted[::-1], by_inverse_square, len(weighted))[::-1]
    gradient = uses * c / squared - correlation[: len(c)] / error
    return 0.5 * np.log(squared * error), gradient[1:]


def _log_model_loss(
    free: np.ndarray, uses: np.ndarray, errors: model_errors.ModelErrors, num_rounds: int
) -> tuple[float, np.ndarray]:
    """Computes the logarithm of the loss under a workload like `_log_loss`."""
    c = np.append(1.0, free)
    with np.errstate(over="ignore", invalid="ignore"):
        inverse = _reciprocal(c, num_rounds)
        if not inverse @ inverse < _EXPLODED:
            return np.log(_EXPLODED), np.zeros(len(free))
        squared_errors, by_inverse = errors.squared(inverse[np.newaxis])
    error, squared = float(squared_errors[0]), uses @ c**2
    if not error < _EXPLODED:
        return np.log(_EXPLODED), np.zeros(len(free))
    by_error = model_errors.inverse_gradient(by_inverse[0], inverse)[: len(c)]
    gradient = uses * c / squared + 0.5 * by_error / error
    return 0.5 * np.log(squared * error), gradient[1:]


def optimize_banded_toeplitz(
    schema: schema_lib.MinSep,
    bands: int | None = None,
    *,
    minimize_rms: bool = True,
    max_iterations: int = 1000,
    workload: workload_lib.Workload | None = None,
) -> banded_toeplitz.BandedToeplitz:
    """Minimises RmsLoss, or MaxLoss, over banded Toeplitz strategies.

    The search starts from BandFHU. The columns of a pattern do not overlap, so that the
    sensitivity is exact whatever the signs of the coefficients.

    Args:
      schema: Participation schema to optimise for.
      bands: Number of diagonals; `min_sep` if None.
      minimize_rms: Whether to minimise RmsLoss; if False, MaxLoss.
      max_iterations: Largest number of steps of L-BFGS.
      workload: Workload of the schema's rounds, whose models' error is minimised; None for the
        prefix sums. If it is not Toeplitz, time and memory grow with num_rounds².

    Returns:
      The strategy, with c_0 = 1.

    Raises:
      ValueError: If `bands` is less than 1, or more than `min_sep` with more than
        one participation.
    """
    if bands is None:
        bands = defaults.bands(schema)
    validation.integer("bands", bands, minimum=1)
    if bands > schema.num_rounds:
        raise validation.UsageError(
            f"bands must be at most {schema.num_rounds}, the number of rounds, got {bands!r}."
        )
    if bands > schema.min_sep and schema.effective_participations > 1:
        raise validation.UsageError(
            f"bands must be at most min_sep = {schema.min_sep}, got {bands}: beyond that the "
            "columns of one participant overlap. Use fewer bands."
        )
    num_rounds = schema.num_rounds
    reaching = -(-(num_rounds - np.arange(bands)) // schema.min_sep)
    uses = np.minimum(schema.effective_participations, reaching)
    round_weights = np.arange(num_rounds, 0.0, -1.0) if minimize_rms else np.ones(num_rounds)
    start = banded_toeplitz.BandedToeplitz.fhu(bands)
    if bands == 1:
        return start
    uses = uses.astype(np.float64)
    found = _descend(start, _log_loss, (uses, round_weights), max_iterations)
    if workload is None:
        return found
    candidates = [found]
    for errors in model_errors.stages(workload, minimize_rms):
        found = _descend(found, _log_model_loss, (uses, errors, num_rounds), max_iterations)
        candidates.append(found)

    def loss(one: banded_toeplitz.BandedToeplitz) -> float:
        return one.rms_loss(schema, workload) if minimize_rms else one.max_loss(schema, workload)

    return min(candidates, key=loss)


def _descend(
    start: banded_toeplitz.BandedToeplitz,
    function: Callable[..., tuple[float, np.ndarray]],
    args: tuple[Any, ...],
    max_iterations: int,
) -> banded_toeplitz.BandedToeplitz:
    optimum = optimize.minimize(
        function,
        np.array(start.coefficients[1:]),
        args=args,
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": max_iterations, "maxcor": 30, "ftol": 1e-14, "gtol": 1e-9},
    )
    return banded_toeplitz.BandedToeplitz((1.0, *optimum.x.tolist()))
