"""Optimises BLTs for a participation schema, in milliseconds.

McMahan, Xu & Zhang 2024, section 3.3, minimise an O(n) loss by L-BFGS, automatic
differentiation and log barriers. Here the loss is closed-form (`blt_objective`),
and every point of the search space is a valid BLT, so no barrier is needed:
the chain 0 < log increments of -log(1 - θ_1), -log(1 - θ̂_1), ... is a share of a
largest value, and shares are a softmax of free variables.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
from scipy import optimize

from tff_dpftrl import validation
from tff_dpftrl.mechanisms import blt, defaults, strategy
from tff_dpftrl.mechanisms import workload as workload_lib
from tff_dpftrl.mechanisms.numerics import blt_losses, blt_objective, damped_newton, model_errors
from tff_dpftrl.participation import schema as schema_lib

MAX_BUFFERS = 8

_LOGIT_LIMIT = 40.0
_SMALLEST_COMPLEMENT = 1e-12
_SURPLUS_LOSS = 1e-8


@dataclasses.dataclass(frozen=True)
class BltResult:
    """Optimised BLT with its sensitivity under `schema` and errors, for the optimised workload.

    `surplus_buffers` counts the requested buffers that are left out, because the loss without them
    is the same within a relative 1e-8. If `decay_at_bound`, the loss would fall a little further
    with a decay closer to 1 than is allowed.
    """

    strategy: blt.Blt
    schema: schema_lib.MinSep
    minimize_rms: bool
    sensitivity: strategy.Sensitivity
    max_error: float
    rms_error: float
    surplus_buffers: int
    decay_at_bound: bool

    @property
    def max_loss(self) -> float:
        """MaxError times sensitivity."""
        return self.sensitivity.value * self.max_error

    @property
    def rms_loss(self) -> float:
        """RmsError times sensitivity."""
        return self.sensitivity.value * self.rms_error

    @property
    def loss(self) -> float:
        """Loss that was minimised."""
        return self.rms_loss if self.minimize_rms else self.max_loss


def optimize_blt(
    schema: schema_lib.MinSep,
    *,
    num_buffers: int | None = None,
    minimize_rms: bool = False,
    max_decay: float | None = None,
    monotonicity_margin: float = 0.0,
    auto_tolerance: float = 1e-3,
    workload: workload_lib.Workload | None = None,
) -> blt.Blt:
    """Minimises MaxLoss, or RmsLoss, over BLTs with positive, decreasing coefficients.

    The result is deterministic. The time does not depend on the number of rounds, and on
    the number of participations k only as log k.

    By default the largest decay is bounded by 1 - 1 / num_rounds, so that the BLT may
    run longer than planned. That costs 0.2 % of the loss, 0.3 % in short runs. Without a
    bound the best MaxLoss often has one decay extremely close to 1, which ties C to
    its number of rounds. If such a BLT runs longer, its noise grows faster.

    Args:
      schema: Participation schema to optimise for.
      num_buffers: Number d of buffers, 1 to 8. If None, the smallest d for which
        one more buffer lowers the loss by less than a relative `auto_tolerance`.
      minimize_rms: Whether to minimise RmsLoss (the mean over rounds); if False, MaxLoss.
      max_decay: Largest allowed buffer decay; 1 - 1 / max(2, num_rounds) if None. 1
        stands for no bound, as in the paper: then it is 1 - 1e-7 / num_rounds, but no
        more than 1 - 1e-12.
      monotonicity_margin: Margin m of the condition c_{t+1} ≤ (1 - m) · c_t for all t. As
        c_1 < θ_1 and c_{t+1} ≤ θ_1 c_t, it is a bound on the largest decay.
      auto_tolerance: Relative reduction of the loss below which a buffer is not added, if
        `num_buffers` is None.
      workload: Workload of the schema's rounds, whose models' error is minimised; None for the
        prefix sums. If it is not Toeplitz, time and memory grow with num_rounds².

    Returns:
      The strategy, perhaps with fewer buffers than requested; `search` also returns its
      figures.

    Raises:
      ValueError: If an argument is out of range.
    """
    return search(
        schema,
        num_buffers=num_buffers,
        minimize_rms=minimize_rms,
        max_decay=max_decay,
        monotonicity_margin=monotonicity_margin,
        auto_tolerance=auto_tolerance,
        workload=workload,
    ).strategy


def search(
    schema: schema_lib.MinSep,
    *,
    num_buffers: int | None = None,
    minimize_rms: bool = False,
    max_decay: float | None = None,
    monotonicity_margin: float = 0.0,
    auto_tolerance: float = 1e-3,
    workload: workload_lib.Workload | None = None,
) -> BltResult:
    """Optimises a BLT like `optimize_blt`, and returns its sensitivity and errors, too."""
    margin = validation.number("monotonicity_margin", monotonicity_margin, at_least=0, below=1)
    bound = _largest_decay(schema, max_decay)
    bound = min(bound, 1 - margin)
    if num_buffers is not None:
        validation.integer("num_buffers", num_buffers, minimum=1)
        if num_buffers > MAX_BUFFERS:
            raise validation.UsageError(
                f"num_buffers must be at most {MAX_BUFFERS}, got {num_buffers!r}."
            )
        return _optimize(schema, num_buffers, minimize_rms, bound, workload)
    validation.positive("auto_tolerance", auto_tolerance)
    best = _optimize(schema, 1, minimize_rms, bound, workload)
    for more in range(2, MAX_BUFFERS + 1):
        longer = _optimize(schema, more, minimize_rms, bound, workload)
        if longer.loss > best.loss * (1 - auto_tolerance):
            break
        best = longer
    return best


def _largest_decay(schema: schema_lib.MinSep, max_decay: float | None) -> float:
    if max_decay is None:
        max_decay = defaults.max_decay(schema.num_rounds)
    validation.number("max_decay", max_decay, above=0, at_most=1)
    return min(max_decay, 1 - max(_SMALLEST_COMPLEMENT, 1e-7 / schema.num_rounds))


def _optimize(
    schema: schema_lib.MinSep,
    num_buffers: int,
    minimize_rms: bool,
    max_decay: float,
    workload: workload_lib.Workload | None,
) -> BltResult:
    longest = -math.log(1.0 - max_decay)
    # C has num_rounds - 1 free coefficients, a BLT two parameters a buffer.
    useful_buffers = min(num_buffers, max(1, schema.num_rounds // 2))
    errors, *polishing = [None] if workload is None else model_errors.stages(workload, minimize_rms)

    def function(
        logits: np.ndarray, errors: model_errors.ModelErrors | None = errors
    ) -> tuple[np.ndarray, np.ndarray]:
        chain, shares = _chain(logits, longest)
        value, by_chain = blt_objective.log_loss(chain, schema, minimize_rms, errors)
        by_share = np.zeros(shares.shape)
        by_share[:, 1:] = -longest * np.cumsum(by_chain, axis=1)
        mean = np.sum(shares * by_share, axis=1, keepdims=True)
        return value, shares * (by_share - mean)

    with np.errstate(all="ignore"):  # Points that overflow have the value inf.
        points, values = damped_newton.minimize(
            function, _starts(schema, useful_buffers, longest), limit=_LOGIT_LIMIT
        )
        best_point = points[[np.argmin(values)]]
        for errors in polishing:
            best_point = _polished(functools.partial(function, errors=errors), best_point)
        chain, _ = _chain(best_point, longest)
        chain = _without_surplus(chain[0], schema, minimize_rms, errors)
    poles, zeros = np.exp(chain[0::2]), np.exp(chain[1::2])
    decay = np.minimum(1.0 - poles, max_decay)
    scale = blt_losses.pole_residues(poles, zeros)
    best = blt.Blt(tuple(decay.tolist()), tuple(scale.tolist()))
    result = BltResult(
        strategy=best,
        schema=schema,
        minimize_rms=minimize_rms,
        sensitivity=best.sensitivity(schema),
        max_error=best.max_error(schema.num_rounds, workload),
        rms_error=best.rms_error(schema.num_rounds, workload),
        surplus_buffers=num_buffers - best.num_buffers,
        decay_at_bound=bool(chain[0] < -longest * (1 - 1e-6)),
    )
    if workload is None:
        return result
    for_sums = _optimize(schema, num_buffers, minimize_rms, max_decay, None)
    for_sums = dataclasses.replace(
        for_sums,
        max_error=for_sums.strategy.max_error(schema.num_rounds, workload),
        rms_error=for_sums.strategy.rms_error(schema.num_rounds, workload),
    )
    return min(result, for_sums, key=lambda one: one.loss)


def _polished(function: damped_newton.Function, point: np.ndarray) -> np.ndarray:
    """Descends from one point, shape [1, p], where Hessians take too long."""

    def one(logits: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = function(logits[np.newaxis])
        return float(value[0]), gradient[0]

    bounds = [(-_LOGIT_LIMIT, _LOGIT_LIMIT)] * point.shape[1]
    optimum = optimize.minimize(one, point[0], jac=True, method="L-BFGS-B", bounds=bounds)
    return optimum.x[np.newaxis]


def _chain(logits: np.ndarray, longest: float) -> tuple[np.ndarray, np.ndarray]:
    """Computes the chain of log complements, [s, 2 d], and the shares, [s, 2 d + 1].

    Share 0 is the slack between the largest decay and its bound. The other shares are
    the increments from one entry of the chain to the next, and from the last one to log 1.
    """
    shares = np.exp(logits - np.max(logits, axis=1, keepdims=True))
    shares /= np.sum(shares, axis=1, keepdims=True)
    return -longest * np.cumsum(shares[:, :0:-1], axis=1)[:, ::-1], shares


def _starts(schema: schema_lib.MinSep, num_buffers: int, longest: float) -> np.ndarray:
    """Makes log-spaced chains for several time scales, with and without a pole at the bound.

    Local optima are of these two kinds. With a pole at the bound the first zero is near
    1 / num_rounds, and the other poles and zeros are as without.
    """
    size = 2 * num_buffers
    n, b = float(schema.num_rounds), float(min(schema.min_sep, schema.num_rounds))
    scales = [b, 0.1 * b, math.sqrt(n * b), n]
    busy = b * schema.effective_participations
    if busy < 0.1 * n:  # Clients may come back only in a small part of the run.
        scales.append(busy)
    logits = []
    for scale in scales:
        reach = min(math.log(max(scale, 3.0)), 0.9 * longest)
        even = np.full(size, reach / size)
        logits.append(np.log(np.concatenate([[longest - reach], even])))
        first_zero = min(max(math.log(n), 1.05 * reach), 0.95 * longest)
        rest = np.full(size - 2, reach / (size - 1))
        rest[:1] *= 2.0
        increments = np.concatenate([[longest - first_zero], [first_zero - np.sum(rest)], rest])
        logits.append(np.concatenate([[-_LOGIT_LIMIT], np.log(increments)]))
    return np.array(logits)


def _without_surplus(
    chain: np.ndarray,
    schema: schema_lib.MinSep,
    minimize_rms: bool,
    errors: model_errors.ModelErrors | None,
) -> np.ndarray:
    """Drops neighbouring poles and zeros that cancel, while the loss stays the same."""
    while len(chain) > 2:
        shorter = np.array([np.delete(chain, [i, i + 1]) for i in range(len(chain) - 1)])
        values, _ = blt_objective.log_loss(shorter, schema, minimize_rms, errors)
        value, _ = blt_objective.log_loss(chain[np.newaxis], schema, minimize_rms, errors)
        best = np.nanargmin(values)
        if not values[best] <= value[0] + _SURPLUS_LOSS:
            break
        chain = shorter[best]
    return chain
