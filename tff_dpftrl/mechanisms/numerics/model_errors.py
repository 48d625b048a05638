"""Errors of the models under a workload, for Toeplitz strategies, with gradients.

With B = A C⁻¹ and the first column c' of C⁻¹, column s of B is A[:, s:] c'[: n − s]. So the mean
squared error is a quadratic form c'ᵀ H c' with H[i, j] = Σ_s (AᵀA)[s + i, s + j] / n, which is
computed once. If A is Toeplitz, too, B is, and its first column is all that is needed.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from tff_dpftrl.mechanisms import workload as workload_lib

MAX_POWERS = (16.0, 256.0)
"""Powers of the p-norms that are minimised in turn for the maximum over rounds.

The last norm differs from the maximum by a factor below num_rounds^(1/512), usually much less.
"""


class ModelErrors:
    """Error of the models as a function of the first column of C⁻¹.

    `power` is the p of the norm over rounds of the models' variances: 1 for the mean, infinity for
    the maximum. If the workload A is Toeplitz, it must be one of the two, else finite.
    """

    def __init__(self, workload: workload_lib.Workload, power: float):
        self._workload = workload
        self._power = power
        if workload.coefficients is None:
            workload_lib.check_size(workload.num_rounds)

    @functools.cached_property
    def _form(self) -> np.ndarray:
        """Matrix H of the mean squared error, shape [n, n]."""
        workload = self._workload
        num_rounds = workload.num_rounds
        gram = workload.apply_transposed(workload.matrix())
        for distance in range(num_rounds):
            diagonal = np.cumsum(np.diagonal(gram, distance)[::-1])[::-1] / num_rounds
            index = np.arange(num_rounds - distance)
            gram[index, index + distance] = gram[index + distance, index] = diagonal
        return gram

    def squared(self, inverse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Computes squared errors and their gradients, for first columns c' of C⁻¹, shape [s, n].

        The error is the p-norm over rounds of the variances (with a mean in place of a sum), or
        their maximum.
        """
        workload = self._workload
        if workload.coefficients is not None:
            num_rounds = workload.num_rounds
            models = workload.apply(inverse.T).T
            is_mean = self._power == 1.0
            weighted = np.arange(num_rounds, 0, -1) / num_rounds * models if is_mean else models
            # The transposed of a Toeplitz matrix is the matrix with time reversed.
            gradient = workload.apply(2.0 * weighted.T[::-1])[::-1].T
            return np.sum(weighted * models, axis=1), gradient
        if self._power == 1.0:
            product = inverse @ self._form
            return np.sum(product * inverse, axis=1), 2.0 * product
        results = [self._p_norm(column) for column in inverse]
        return np.array([value for value, _ in results]), np.array([slope for _, slope in results])

    def _p_norm(self, inverse: np.ndarray) -> tuple[float, np.ndarray]:
        """Computes the p-norm of the variances and its gradient, by the matrix B."""
        workload, power = self._workload, self._power
        num_rounds = workload.num_rounds
        columns = np.zeros((num_rounds, num_rounds))
        for s in range(num_rounds):
            columns[s:, s] = inverse[: num_rounds - s]
        models = workload.apply(columns)
        variances = np.sum(np.square(models), axis=1)
        value, weights = p_norm(variances, power)
        by_columns = workload.apply_transposed(2.0 * weights[:, np.newaxis] * models)
        # Entry k adds up the diagonal k below the main one.
        rows = np.zeros((num_rounds, num_rounds))
        for s in range(num_rounds):
            rows[s, : num_rounds - s] = by_columns[s:, s]
        return value, rows.sum(axis=0)


def stages(workload: workload_lib.Workload, minimize_rms: bool) -> list[ModelErrors]:
    """Returns the errors to minimise one after the other, each from the optimum before."""
    powers = (1.0,) if minimize_rms else (1.0, *MAX_POWERS)
    if workload.coefficients is not None and not minimize_rms:
        powers = (math.inf,)
    return [ModelErrors(workload, power) for power in powers]


def p_norm(variances: np.ndarray, power: float) -> tuple[float, np.ndarray]:
    """Computes (mean_t v_t^p)^(1/p) and its gradient, both without overflow."""
    largest = variances.max()
    relative = variances / largest
    mean = np.mean(relative**power)
    value = largest * mean ** (1.0 / power)
    return float(value), value / largest * relative ** (power - 1.0) / (mean * len(variances))


def inverse_gradient(by_inverse: np.ndarray, inverse: np.ndarray) -> np.ndarray:
    """Converts a gradient by the first column of C⁻¹ into that by c_0 ... c_{n−1} of C.

    As power series, ∂(1 / C(x)) / ∂c_s = −x^s / C(x)².
    """
    from scipy import signal  # It takes long to import.

    square = signal.fftconvolve(inverse, inverse)[: len(inverse)]
    return -1.0 * signal.fftconvolve(by_inverse[::-1], square)[: len(inverse)][::-1]
