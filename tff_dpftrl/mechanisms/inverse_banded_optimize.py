"""Optimises strategies whose inverse has few bands: γ of γ-BIFR, or all coefficients.

Both are of Kalinin et al. 2025 ("Back to square roots", arXiv 2505.12128) and its successor. With
D(x) the p free coefficients of C⁻¹ and C(x) = 1 / D(x), ∂C/∂d_s = −x^s C(x)². The error is
quadratic in the coefficients. The sensitivity is exact only if the coefficients of C do not
increase. The search is therefore penalised for increases, and what is left of them is removed.
"""

from __future__ import annotations

import numpy as np
from scipy import fft, optimize

from tff_dpftrl import validation
from tff_dpftrl.mechanisms import defaults, inverse_banded
from tff_dpftrl.mechanisms import workload as workload_lib
from tff_dpftrl.mechanisms.numerics import model_errors, toeplitz
from tff_dpftrl.participation import schema as schema_lib

_GRID = 24
# Penalties for increases of the coefficients of C, used in turn.
_PENALTIES = (1e2, 1e4, 1e6)
_EXPLODED = 1e50


def optimize_bifr(
    schema: schema_lib.MinSep,
    bands: int = defaults.INVERSE_BANDS,
    *,
    minimize_rms: bool = True,
    workload: workload_lib.Workload | None = None,
) -> inverse_banded.InverseBanded:
    """Tunes γ of γ-BIFR for one schema.

    A grid search over (0, 1) is followed by a bounded search around the best grid point.
    The loss is that of the stated sensitivity, which may be an upper bound.

    Args:
      schema: Participation schema to optimise for.
      bands: Number of diagonals of C⁻¹.
      minimize_rms: Whether to minimise RmsLoss; if False, MaxLoss.
      workload: Workload of the schema's rounds, whose models' error is minimised; None for the
        prefix sums.

    Returns:
      The strategy with the least loss.

    Raises:
      ValueError: If `bands` is less than 1.
    """

    def loss(gamma: float) -> float:
        candidate = inverse_banded.InverseBanded.bifr(bands, gamma)
        if minimize_rms:
            return candidate.rms_loss(schema, workload)
        return candidate.max_loss(schema, workload)

    grid = np.arange(1, _GRID) / _GRID
    best = grid[np.argmin([loss(gamma) for gamma in grid])]
    optimum = optimize.minimize_scalar(
        loss,
        bounds=(best - 1 / _GRID + 1e-9, best + 1 / _GRID - 1e-9),
        method="bounded",
        options={"xatol": 1e-9},
    )
    return inverse_banded.InverseBanded.bifr(bands, float(optimum.x))


def optimize_inverse_banded(
    schema: schema_lib.MinSep,
    bands: int = defaults.INVERSE_BANDS,
    *,
    minimize_rms: bool = True,
    max_iterations: int = 500,
    workload: workload_lib.Workload | None = None,
) -> inverse_banded.InverseBanded:
    """Minimises RmsLoss, or MaxLoss, over all coefficients of a Toeplitz C⁻¹ with few bands.

    Args:
      schema: Participation schema to optimise for.
      bands: Number of diagonals of C⁻¹.
      minimize_rms: Whether to minimise RmsLoss; if False, MaxLoss.
      max_iterations: Largest number of steps of L-BFGS for each of three penalties.
      workload: Workload of the schema's rounds, whose models' error is minimised; None for the
        prefix sums.

    Returns:
      The strategy, with the coefficient 1 on the diagonal, an exact sensitivity, and `bands`
      diagonals, or `num_rounds` if that is less. Its loss is not above those of BISR and γ-BIFR
      with as many bands.

    Raises:
      ValueError: If `bands` is less than 1.
    """
    validation.integer("max_iterations", max_iterations, minimum=1)
    bands = min(validation.integer("bands", bands, minimum=1), schema.num_rounds)
    bifr = optimize_bifr(schema, bands, minimize_rms=minimize_rms, workload=workload)

    def loss(strategy: inverse_banded.InverseBanded) -> float:
        of_models = strategy.rms_loss if minimize_rms else strategy.max_loss
        return of_models(schema, workload)

    known = [bifr, inverse_banded.InverseBanded.bisr(bands)]
    if bands == 1:
        return bifr
    start = np.array(bifr.inverse_coefficients[1:])
    stages: list[model_errors.ModelErrors | None] = [None]
    if workload is not None:
        stages += model_errors.stages(workload, minimize_rms)
    free = start
    for errors in stages:
        objective = _Objective(schema, minimize_rms, errors)
        for penalty in (0.0,) if schema.effective_participations == 1 else _PENALTIES:
            free = optimize.minimize(
                objective,
                free,
                args=(penalty,),
                jac=True,
                method="L-BFGS-B",
                options={"maxiter": max_iterations, "maxcor": 30, "ftol": 1e-12, "gtol": 1e-9},
            ).x
            known += _exact(free, start, schema)
    return min(known, key=loss)


class _Objective:
    """Logarithm of the loss of the earliest pattern, with a penalty, and its gradient."""

    def __init__(
        self,
        schema: schema_lib.MinSep,
        minimize_rms: bool,
        errors: model_errors.ModelErrors | None = None,
    ):
        n = schema.num_rounds
        self._errors = errors  # Of the models under a workload; None for the prefix sums.
        self._round_weights = np.arange(n, 0.0, -1.0) if minimize_rms else np.ones(n)
        self._starts = np.arange(schema.effective_participations) * schema.min_sep

    def __call__(self, free: np.ndarray, penalty: float) -> tuple[float, np.ndarray]:
        """Computes the value and the gradient at C⁻¹ = (1, *free); large and 0 if C explodes.

        The value includes log(1 + penalty · s), where s is the sum of the squares of increases, and
        of negative values, of the coefficients of C.
        """
        n = len(self._round_weights)
        inverse = toeplitz.pad(np.append(1.0, free), n)
        with np.errstate(over="ignore", invalid="ignore"):
            column = toeplitz.inverse_coefficients(np.append(1.0, free), n)
        if not np.max(np.abs(column)) < _EXPLODED:
            return float(np.log(_EXPLODED)), np.zeros(len(free))
        if self._errors is None:
            prefix = np.cumsum(inverse)
            weighted = self._round_weights * prefix
            error = float(weighted @ prefix)
            by_inverse = np.cumsum(weighted[::-1])[::-1] / error
        else:
            squared_errors, gradients = self._errors.squared(inverse[np.newaxis])
            error = float(squared_errors[0])
            by_inverse = 0.5 * gradients[0] / error

        pattern = np.zeros(n)
        for first in self._starts:
            pattern[first:] += column[: n - first]
        squared = float(pattern @ pattern)
        by_column = np.zeros(n)
        for first in self._starts:
            by_column[: n - first] += pattern[first:] / squared
        increases = np.maximum(np.diff(column), 0.0)
        negative = np.minimum(column, 0.0)
        excess = 1.0 + penalty * float(increases @ increases + negative @ negative)
        by_column[1:] += 2.0 * penalty / excess * increases
        by_column[:-1] -= 2.0 * penalty / excess * increases
        by_column += 2.0 * penalty / excess * negative

        size = fft.next_fast_len(2 * n - 1, real=True)
        spectrum = np.asarray(fft.rfft(column, size))
        correlated = np.conj(spectrum) ** 2 * np.asarray(fft.rfft(by_column, size))
        by_sensitivity = np.asarray(fft.irfft(correlated, size))[:n]
        value = 0.5 * np.log(squared * error) + np.log(excess)
        return float(value), (by_inverse - by_sensitivity)[1 : len(free) + 1]


def _exact(
    free: np.ndarray, start: np.ndarray, schema: schema_lib.MinSep
) -> list[inverse_banded.InverseBanded]:
    """Changes coefficients as little as makes the sensitivity exact, in two ways.

    If the coefficients of C are positive, multiplying coefficient t of both C⁻¹ and C by r^t makes
    them decrease, with r the least ratio of a coefficient and the next. The other way is to mix in
    as little of `start`, γ-BIFR, whose sensitivity is exact, as is needed, to a factor of two.
    """
    results = []
    column = toeplitz.inverse_coefficients(np.append(1.0, free), schema.num_rounds)
    if np.min(column) > 0.0:
        ratio = min(1.0, (1.0 - 1e-9) * float(np.min(column[:-1] / column[1:])))
        damped = np.append(1.0, free) * ratio ** np.arange(len(free) + 1)
        results.append(inverse_banded.InverseBanded(tuple(damped.tolist())))
    for share in (0.0, *2.0 ** np.arange(-13, 1)):
        mixed = (1.0 - share) * free + share * start
        results.append(inverse_banded.InverseBanded((1.0, *mixed.tolist())))
        if results[-1].sensitivity(schema).exact:
            break
    return [result for result in results if result.sensitivity(schema).exact]
