"""Optimises general banded strategies (BandMF).

Choquette-Choo et al. 2023; "BandMF" in McMahan, Xu & Zhang 2024, Table 3. The unknowns are
the columns of C, made unit vectors, so that the squared sensitivity is the number of
participations and minimising the loss is minimising the error. The gradient comes from
`banded_blocks` in O(n · bands²) time and O(n · bands) memory, where a dense or
automatically differentiated one costs O(n³) or O(n² · bands). L-BFGS starts from the
optimal Toeplitz columns. A column t is followed by few or many rounds, which makes the
problem ill-scaled: its entries are measured in units of one over the square root of the
weight of the rounds from t on.
"""

from __future__ import annotations

import hashlib
import operator
import os
import pathlib
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from scipy import optimize

from tff_dpftrl import array_files, durable_files, validation
from tff_dpftrl.mechanisms import banded, banded_toeplitz_optimize
from tff_dpftrl.mechanisms import workload as workload_lib
from tff_dpftrl.mechanisms.numerics import banded_blocks, banded_models, model_errors
from tff_dpftrl.participation import schema as schema_lib

_HISTORY = 10

Progress: TypeAlias = Callable[[int, float], None]
"""Callback for the number of steps and the loss, after each step."""


def _transpose(values: np.ndarray, *, to_rows: bool) -> np.ndarray:
    """Converts between columns[t, j] = C[t + j, t] and rows[t, j] = C[t, t − j]."""
    num_rounds, bands = values.shape
    result = np.zeros_like(values)
    for j in range(bands):
        if to_rows:
            result[j:, j] = values[: num_rounds - j, j]
        else:
            result[: num_rounds - j, j] = values[j:, j]
    return result


def _unit(columns: np.ndarray) -> np.ndarray:
    return columns / np.linalg.norm(columns, axis=1, keepdims=True)


def _log_error(
    columns: np.ndarray, power: float, models: banded_models.BandedModels | None = None
) -> tuple[float, np.ndarray]:
    """Computes log (mean_t variance_t^p)^(1 / (2 p)) of the errors, and its gradient by `columns`.

    `columns` are those of C by lag, shape [num_rounds, bands], of any norms: they are normalised
    first. The errors are those of `models`, or of the prefix sums if None.
    """
    norms = np.linalg.norm(columns, axis=1, keepdims=True)
    unit = columns / norms

    def weigh(variances: np.ndarray) -> np.ndarray:
        relative = variances / variances.max()
        return relative ** (power - 1) / (np.sum(relative**power) * variances.max())

    of_errors = banded_blocks if models is None else models
    variances, by_rows = of_errors.weighted_error_gradient(_transpose(unit, to_rows=True), weigh)
    gradient = 0.5 * _transpose(by_rows, to_rows=False)
    gradient -= unit * np.sum(unit * gradient, axis=1, keepdims=True)
    return _log_p_norm(variances, power), gradient / norms


def _log_p_norm(variances: np.ndarray, power: float) -> float:
    largest = variances.max()
    return 0.5 * float(np.log(largest) + np.log(np.mean((variances / largest) ** power)) / power)


def _digest(workload: workload_lib.Workload | None) -> str:
    """Returns a name of the workload that no other has, for checkpoints."""
    text = "prefix" if workload is None else repr(workload.recurrences)
    return hashlib.sha256(text.encode()).hexdigest()


def _save(
    path: pathlib.Path, columns: np.ndarray, stage: int, minimize_rms: bool, workload: str
) -> None:
    with durable_files.replacing(path) as file:
        np.savez(file, columns=columns, stage=stage, minimize_rms=minimize_rms, workload=workload)


def _load(
    path: pathlib.Path, shape: tuple[int, int], minimize_rms: bool, workload: str
) -> tuple[np.ndarray, int]:
    try:
        saved = array_files.read(path)
        columns, stage = saved["columns"], operator.index(saved["stage"][()])
        saved_workload = str(saved["workload"][()]) if "workload" in saved else _digest(None)
        same_error = bool(saved["minimize_rms"]) == minimize_rms and saved_workload == workload
        # The columns of a strategy are unit vectors, and far from singular.
        is_sound = (
            columns.dtype == np.float64
            and np.allclose(np.sum(columns**2, axis=1), 1.0)
            and np.all(np.abs(columns[:, 0]) > 1e-6)
            and 0 <= stage
        )
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise validation.UsageError(
            f"checkpoint {str(path)!r} cannot be read: {error}. Delete it, or give another path."
        ) from error
    if not (columns.shape == shape and same_error and is_sound):
        raise validation.UsageError(
            f"checkpoint {str(path)!r} belongs to another problem (rounds and bands "
            f"{columns.shape}, here {shape}, or another error or workload), or is damaged. Give "
            "another path or delete it."
        )
    return columns, stage


def optimize_banded(
    schema: schema_lib.MinSep,
    bands: int | None = None,
    *,
    minimize_rms: bool = True,
    max_iterations: int = 200,
    tolerance: float = 1e-8,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 10,
    progress: Progress | None = None,
    workload: workload_lib.Workload | None = None,
) -> banded.Banded:
    """Minimises RmsLoss, or MaxLoss, over banded strategies with unit columns.

    The result is deterministic for a given number of threads. MaxLoss is minimised by way
    of p-norms.

    Args:
      schema: Participation schema to optimise for.
      bands: Number of diagonals; `min_sep` if None.
      minimize_rms: Whether to minimise RmsLoss; if False, MaxLoss.
      max_iterations: Largest number of steps of L-BFGS (for each p-norm).
      tolerance: Relative reduction of the loss below which a step is the last one.
      checkpoint: File (NumPy's npz) to which the state is written; the search resumes from
        it if it exists. L-BFGS then collects its history anew.
      checkpoint_every: Number of steps between two checkpoints.
      progress: Callback for the number of steps and the loss, after every step. The loss
        is RmsLoss, or the p-norm that stands for MaxLoss.
      workload: Workload of the schema's rounds, whose models' error is minimised; None for the
        prefix sums.

    Returns:
      The strategy; its columns are unit vectors.

    Raises:
      ValueError: If `bands` is less than 1, or more than `min_sep` with more than
        one participation; if the checkpoint belongs to another problem or has no folder.
    """
    start = banded_toeplitz_optimize.optimize_banded_toeplitz(
        schema, bands, minimize_rms=minimize_rms, workload=workload
    )
    models = None if workload is None else banded_models.BandedModels(workload, start.bands)
    shape = (schema.num_rounds, start.bands)
    stages = (1.0,) if minimize_rms else model_errors.MAX_POWERS
    path = None if checkpoint is None else pathlib.Path(checkpoint)
    if path is not None and not path.parent.is_dir():
        raise validation.UsageError(
            f"checkpoint {str(path)!r} is in a folder that does not exist: make it, or give "
            "another path."
        )
    if path is not None and path.exists():
        columns, first_stage = _load(path, shape, minimize_rms, _digest(workload))
    else:
        inside = np.add.outer(np.arange(shape[0]), np.arange(shape[1])) < shape[0]
        columns, first_stage = _unit(np.where(inside, start.coefficients, 0.0)), 0

    steps = 0
    for stage in range(first_stage, len(stages)):

        def after_step(columns: np.ndarray, log_error: float, stage=stage) -> None:
            nonlocal steps
            steps += 1
            if path is not None and steps % checkpoint_every == 0:
                _save(path, _unit(columns), stage, minimize_rms, _digest(workload))
            if progress is not None:
                loss = np.sqrt(schema.effective_participations) * np.exp(log_error)
                progress(steps, float(loss))

        columns = _descend(columns, stages[stage], models, max_iterations, tolerance, after_step)
        if path is not None:
            _save(path, columns, stage, minimize_rms, _digest(workload))
    return banded.Banded(_transpose(columns, to_rows=True))


def _descend(
    columns: np.ndarray,
    power: float,
    models: banded_models.BandedModels | None,
    max_iterations: int,
    tolerance: float,
    after_step: Callable[[np.ndarray, float], None],
) -> np.ndarray:
    """Runs L-BFGS on scaled columns; returns unit columns."""
    num_rounds = len(columns)
    rows = _transpose(columns, to_rows=True)
    variances = banded_blocks.noise_variances(rows)[1] if models is None else models.variances(rows)
    weights = (variances / variances.max()) ** (power - 1)
    remaining = np.cumsum(weights[::-1])[::-1] / np.sum(weights)
    scale = 1.0 / np.sqrt(np.maximum(remaining, 1.0 / num_rounds))[:, np.newaxis]

    latest = np.inf

    def objective(scaled: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal latest
        latest, gradient = _log_error(scaled.reshape(columns.shape) * scale, power, models)
        return latest, (gradient * scale).ravel()

    def callback(scaled: np.ndarray) -> None:
        # The accepted point is the one that was evaluated last.
        after_step(scaled.reshape(columns.shape) * scale, latest)

    optimum = optimize.minimize(
        objective,
        (columns / scale).ravel(),
        jac=True,
        method="L-BFGS-B",
        callback=callback,
        options={
            "maxiter": max_iterations,
            "maxfun": 3 * max_iterations,
            "maxcor": _HISTORY,
            "ftol": tolerance,
            "gtol": 0.0,
        },
    )
    return _unit(optimum.x.reshape(columns.shape) * scale)
