"""Minimises one smooth function of a few variables from several starting points at once.

All starts, and the finite differences of the gradient that make up the Hessian, are evaluated in
one batch an iteration.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

_DIFFERENCE = 1e-5
_LARGEST_STEP = 2.0
_START_DAMPING = 1e-3

Function = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


def minimize(
    function: Function,
    starts: np.ndarray,
    *,
    limit: float,
    tolerance: float = 1e-9,
    max_iterations: int = 60,
) -> tuple[np.ndarray, np.ndarray]:
    """Minimises by Newton steps with |eigenvalues| plus damping, which failed steps raise.

    Taking absolute eigenvalues turns saddle points into directions of descent (Dauphin et al.
    2014). A start stops when its predicted decrease is below `tolerance`, or a tenth of the
    difference to the best start. `function` maps points [m, p] to values [m] and gradients [m, p];
    points are clipped to magnitude `limit`. Returned are the end points, shape [s, p], and their
    values, inf where a start's is not finite.
    """
    points = np.clip(starts, -limit, limit)
    values, gradients, hessians = _evaluate(function, points)
    damping = np.full(len(points), _START_DAMPING)
    active = np.isfinite(values)
    for _ in range(max_iterations):
        rows = np.flatnonzero(active)
        if not len(rows):
            break
        steps, decrease = _steps(gradients[rows], hessians[rows], damping[rows])
        useful = np.maximum(tolerance, 0.1 * (values[rows] - np.min(values)))
        going = decrease > useful
        active[rows[~going]] = False
        rows, steps = rows[going], steps[going]
        if not len(rows):
            break
        trial = np.clip(points[rows] + steps, -limit, limit)
        new_values, new_gradients, new_hessians = _evaluate(function, trial)
        ratio = (values[rows] - new_values) / decrease[going]
        better = ratio > 0
        accepted = rows[better]
        points[accepted], values[accepted] = trial[better], new_values[better]
        gradients[accepted], hessians[accepted] = new_gradients[better], new_hessians[better]
        factor = np.where(ratio > 0.75, 0.1, np.where(ratio > 0.1, 1.0, 10.0))
        damping[rows] = np.maximum(damping[rows] * factor, 1e-9)
    return points, values


def _evaluate(function: Function, points: np.ndarray):
    """Computes values [s], gradients [s, p] and Hessians [s, p, p] in one call of `function`."""
    count, size = points.shape
    offsets = _DIFFERENCE * np.concatenate([np.zeros((1, size)), np.eye(size)])
    values, gradients = function((points[:, np.newaxis] + offsets).reshape(-1, size))
    gradients = gradients.reshape(count, size + 1, size)
    hessians = (gradients[:, 1:] - gradients[:, :1]) / _DIFFERENCE
    finite = np.isfinite(gradients).all(axis=(1, 2))
    values = np.where(finite, values.reshape(count, size + 1)[:, 0], np.inf)
    hessians[~finite] = 0.0
    return values, gradients[:, 0], 0.5 * (hessians + np.swapaxes(hessians, 1, 2))


def _steps(gradients: np.ndarray, hessians: np.ndarray, damping: np.ndarray):
    """Computes damped steps of bounded length, and the decrease predicted for them."""
    curvature, basis = np.linalg.eigh(hessians)
    along = (np.swapaxes(basis, 1, 2) @ gradients[..., np.newaxis])[..., 0]
    scaled = along / (np.abs(curvature) + damping[:, np.newaxis])
    steps = -(basis @ scaled[..., np.newaxis])[..., 0]
    longest = np.max(np.abs(steps), axis=1, keepdims=True)
    shorten = _LARGEST_STEP / np.maximum(longest, _LARGEST_STEP)
    return steps * shorten, 0.5 * np.sum(along * scaled, axis=1)
