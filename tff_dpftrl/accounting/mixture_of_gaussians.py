"""User-level privacy of example-level sampling: mixtures of Gaussians.

In DP-SGD with example-level sampling (ELS) one user may have up to G examples in
the pool. Each is in a step's batch with probability p, so that N(0, σ²) becomes the
mixture of N(j, σ²) with j ~ Binomial(G, p): the pair is tight (Charles et al. 2024,
Theorem 3). User-level sampling (ULS) with probability q is the case G = 1, the
Poisson-sampled Gaussian (Theorem 2), which also accounts for DP-FedAvg.

A *double mixture* (`is_substitution`) is the pair of N(j, σ²) and N(−j, σ²), both mixed over
j: the examples are replaced by others, which point the opposite way. No other choice of
vectors is worse. The likelihoods of two mixtures with means x_S and x'_S are exponentials of a
Gaussian process whose covariances are the inner products of means. The hockey-stick divergence
is the mean of a convex function of the sum of these exponentials, with positive weights in one
mixture and negative ones in the other. By the interpolation of Kahane's inequality (1986) it
grows with the covariances of two means in one mixture, and falls with those of means in
different mixtures. They are at most |x_S| |x_T|, and at least −|x_S| |x'_T|, as on a line.
(The pairs of groups of users in Schuchardt et al. 2024, arXiv 2403.04867, are alike.)

dp_accounting composes such pairs too, in minutes and gigabytes where G / σ is large;
here it takes fractions of a second, with the same guarantee: never too small.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TypeAlias

import dp_accounting
import numpy as np
from scipy import special, stats

from tff_dpftrl import validation
from tff_dpftrl.accounting import gaussian, noise_search, privacy_loss

_COARSE_CELLS = 4000
_MAX_CELLS = 1_000_000
# Numbers in an array at a time: one for each component of the mixture and cell.
_BLOCK = 2**19
_MAX_REFINEMENTS = 8
# Relative rounding error allowed for in log Φ: several units in the last place.
_ROUNDING = 1e-15
# Relative excess of the rough and of the final epsilon.
_ROUGH_TOLERANCE, _TOLERANCE = 1e-2, 1e-5
# Share of delta that may be spent on truncating the tails of the noise.
_TAIL_SHARE = 1e-6
# Logarithm of the share that may be spent on ignoring losses far above epsilon.
_LOG_NEGLIGIBLE = -25.0
# Sensitivity in standard deviations up to which a grid of privacy losses is fine enough.
_LARGEST_SHIFT = 100.0


@dataclasses.dataclass(frozen=True)
class MixtureOfGaussians:
    """Pair of distributions: Gaussian noise plus a random sensitivity, and a reference.

    The noise is N(0, stddev²). Sensitivities are at least 0 and increase. If their probabilities
    miss a sum of 1 by up to 1e-9, the rest is given to the largest sensitivity, the worst case.
    The reference is the noise alone. With `is_substitution`, it is the noise minus the random
    sensitivity, as where a user's examples are replaced.
    """

    stddev: float
    sensitivities: tuple[float, ...]
    probabilities: tuple[float, ...]
    is_substitution: bool = False

    def __post_init__(self):
        validation.positive("stddev", self.stddev)
        values, weights = tuple(self.sensitivities), tuple(self.probabilities)
        object.__setattr__(self, "sensitivities", values)
        object.__setattr__(self, "probabilities", weights)
        if len(values) != len(weights) or not values:
            raise validation.UsageError(
                "sensitivities and probabilities must have the same length, got "
                f"{len(values)} and {len(weights)}."
            )
        if min(values) < 0.0 or any(a >= b for a, b in zip(values, values[1:], strict=False)):
            raise validation.UsageError(
                f"sensitivities must be increasing from 0 on, got {values!r}."
            )
        total = math.fsum(weights)
        if min(weights) < 0.0 or not abs(total - 1.0) <= 1e-9:
            raise validation.UsageError(
                f"probabilities must be at least 0 and sum to 1, got {weights!r}, which sum to "
                f"{total!r}."
            )
        if 1.0 - total > len(weights) * 2.0**-52:  # More than rounding.
            charged = (*weights[:-1], weights[-1] + (1.0 - total))
            object.__setattr__(self, "probabilities", charged)

    def to_dp_event(self, num_steps: int) -> dp_accounting.DpEvent:
        """Describes `num_steps` compositions for dp_accounting; refuses a double mixture."""
        if self.is_substitution:
            raise validation.UsageError("No event of dp_accounting describes a substitution.")
        return dp_accounting.SelfComposedDpEvent(
            dp_accounting.dp_event.MixtureOfGaussiansDpEvent(
                self.stddev, self.sensitivities, self.probabilities
            ),
            num_steps,
        )


def els(
    noise_multiplier: float, sampling_probability: float, group_size: int
) -> MixtureOfGaussians:
    """Builds the pair of one DP-SGD step with example-level sampling, for one user.

    σ is the noise per unit of the clip norm of an example, p the probability of an example to be in
    the batch, and G the largest number of examples of one user.
    """
    sampling_probability = validation.probability("sampling_probability", sampling_probability)
    group_size = validation.integer("group_size", group_size, minimum=1)
    counts = np.arange(group_size + 1)
    weights = stats.binom.pmf(counts, group_size, sampling_probability)
    # No probability is left out: the sum differs from 1 by rounding errors alone.
    weights /= math.fsum(weights)
    return MixtureOfGaussians(noise_multiplier, tuple(map(float, counts)), tuple(weights))


Runs: TypeAlias = Sequence[tuple[MixtureOfGaussians, int]]
"""Pairs of one step of each run, and the runs' numbers of steps."""


def uls(noise_multiplier: float, sampling_probability: float) -> MixtureOfGaussians:
    """Builds the pair of one step with user-level sampling, `els` with group size 1.

    σ is the noise per unit of the clip norm of a user's gradient.
    """
    return els(noise_multiplier, sampling_probability, 1)


def _log_cell_masses(edges: np.ndarray) -> np.ndarray:
    """Returns log(Φ(edges[1:]) − Φ(edges[:-1])) on the last axis, without cancellation."""
    left, right = edges[..., :-1], edges[..., 1:]
    flip = left + right > 0.0
    near = special.log_ndtr(np.where(flip, -left, right))
    far = special.log_ndtr(np.where(flip, -right, left))
    return near + np.log(-np.expm1(far - near))


def _step(mixture: MixtureOfGaussians, tail: float, cells: int, remove: bool) -> privacy_loss.Step:
    """Computes a finite pair that dominates one step in one direction.

    The line is cut into cells. Within a cell the loss lies between its values at the edges; the
    cell's masses under both distributions are exact, and moving them to the edges so that both stay
    what they are can only add privacy loss. Each cut-off may give an infinite loss with probability
    `tail`. With `remove`, the upper distribution is the mixture, otherwise the centred Gaussian; a
    double mixture is the same in both directions.
    """
    remove = remove or mixture.is_substitution
    shifts = np.asarray(mixture.sensitivities) / mixture.stddev
    weights = np.asarray(mixture.probabilities)
    used = (np.cumsum(weights[::-1])[::-1] > tail) & (weights > 0.0)
    infinity_mass = tail + (float(weights[~used].sum()) if remove else 0.0)
    shifts, log_weights = shifts[used], np.log(weights[used])

    reach = -float(special.ndtri(tail))
    edges = np.linspace(-reach, reach + (shifts[-1] if remove else 0.0), cells + 1)
    log_weights, shifts = log_weights[:, None], shifts[:, None]
    loss, mixed = np.empty(cells + 1), np.empty(cells)
    base = np.empty(cells) if mixture.is_substitution else _log_cell_masses(edges)
    block = max(1, _BLOCK // len(shifts))
    for begin in range(0, cells, block):
        here = edges[begin : begin + block + 1]
        end = begin + len(here)
        loss[begin:end] = special.logsumexp(log_weights + shifts * (here - shifts / 2.0), axis=0)
        masses = _log_cell_masses(here - shifts)
        mixed[begin : end - 1] = special.logsumexp(log_weights + masses, axis=0)
        if mixture.is_substitution:
            masses = _log_cell_masses(here + shifts)
            base[begin : end - 1] = special.logsumexp(log_weights + masses, axis=0)
            mirrored = shifts * (-here - shifts / 2.0)
            loss[begin:end] -= special.logsumexp(log_weights + mirrored, axis=0)
    if remove:
        low, high, upper, lower = loss[:-1], loss[1:], mixed, base
    else:
        low, high, upper, lower = -loss[1:], -loss[:-1], base, mixed
    width = np.maximum(high - low, 1e-300)
    log_ratio = lower + low - upper
    # A cell's log mass is a difference of log Φ ~ x²/2 over a change of ~ x times its width.
    cell = edges[1] - edges[0]
    farthest = np.maximum(np.abs(edges[1:]), np.abs(edges[1:] - shifts[-1, 0]))
    if mixture.is_substitution:
        farthest = np.maximum(farthest, np.abs(edges[1:] + shifts[-1, 0]))
    rounding = _ROUNDING * ((1.0 + farthest) / cell + np.abs(low))
    to_high = np.clip((rounding - np.expm1(log_ratio)) / -np.expm1(-width), 0.0, 1.0)
    masses = np.exp(upper)
    losses = np.concatenate([low, high, [low[0] if remove else low[-1]]])
    # What lies beyond the end of small losses has a smaller loss than there.
    return privacy_loss.Step(
        losses, np.concatenate([masses * (1.0 - to_high), masses * to_high, [tail]]), infinity_mass
    )


def _steps(runs: Runs, tail: float, cells: int, remove: bool) -> privacy_loss.Steps:
    """Computes finite pairs that dominate the steps of all runs in one direction, as `_step`."""
    return [(_step(mixture, tail, cells, remove), number) for mixture, number in runs]


def _total_steps(runs: Runs) -> int:
    return sum(number for _, number in runs)


def _composed(
    runs: Runs,
    tail: float,
    remove: bool,
    epsilon: float,
    coarse: privacy_loss.Steps,
    log_delta: float | None = None,
) -> privacy_loss.ComposedLoss:
    """Composes all steps, on a grid that is fine enough for losses near `epsilon`.

    `log_delta` is the logarithm of the given delta; None if delta is to be computed.
    """
    saddle = privacy_loss.saddle_for_epsilon(coarse, epsilon)
    interval = privacy_loss.resolution(saddle, _total_steps(runs), _TOLERANCE)
    fine = []
    for (mixture, number), (step, _) in zip(runs, coarse, strict=True):
        # Cells that decide the tail must be as narrow, in privacy loss, as the grid.
        low, high = step.losses[:_COARSE_CELLS], step.losses[_COARSE_CELLS:-1]
        widths = np.concatenate([high - low, high - low, [0.0]])
        width = math.sqrt(privacy_loss.tilted_mean_of_square(step, saddle.tilt, widths))
        cells = min(max(_COARSE_CELLS, math.ceil(_COARSE_CELLS * width / interval)), _MAX_CELLS)
        fine.append((_step(mixture, tail, cells, remove), number))
    saddle = privacy_loss.saddle_for_epsilon(fine, epsilon)
    if log_delta is None:
        # Delta may lie far below its Chernoff bound.
        cumulant = privacy_loss.total_cumulant(fine, saddle.cumulants)
        log_delta = cumulant - saddle.tilt * epsilon + 2 * _LOG_NEGLIGIBLE
    return privacy_loss.ComposedLoss(fine, saddle, interval, log_delta + _LOG_NEGLIGIBLE)


def _rough_epsilon(runs: Runs, delta: float, remove: bool) -> tuple[privacy_loss.Steps, float]:
    """Computes an epsilon that is about 1% too large in one direction, and its coarse steps.

    The direction is a user's zero-out if `remove`, else its opposite.
    """
    log_delta, num_steps = math.log(delta), _total_steps(runs)
    coarse = _steps(runs, _TAIL_SHARE * delta / num_steps, _COARSE_CELLS, remove)
    # The Chernoff bound leaves out infinite losses: at most twice the share of the tails.
    chernoff = math.log1p(-2.0 * _TAIL_SHARE) + log_delta
    saddle = privacy_loss.saddle_for_delta(coarse, chernoff)
    interval = privacy_loss.resolution(saddle, num_steps, _ROUGH_TOLERANCE)
    loss = privacy_loss.ComposedLoss(coarse, saddle, interval, log_delta + _LOG_NEGLIGIBLE)
    return coarse, min(saddle.epsilon, loss.epsilon(delta))


def _one_sided_epsilon(runs: Runs, delta: float, remove: bool, at_least: float = 0.0) -> float:
    """Computes epsilon of a user's zero-out (or its opposite), refining it from above.

    The refinement ends at a bound of `at_least` or less.
    """
    coarse, answer = _rough_epsilon(runs, delta, remove)
    tail = _TAIL_SHARE * delta / _total_steps(runs)
    for _ in range(_MAX_REFINEMENTS):
        if answer <= at_least:
            break
        loss = _composed(runs, tail, remove, answer, coarse, math.log(delta))
        better = loss.epsilon(delta)
        settled = better > 0.5 * answer
        answer = min(answer, better)
        if settled:
            break
    return answer


def _one_sided_delta(
    runs: Runs, tail: float, remove: bool, epsilon: float, at_least: float
) -> float:
    """Computes delta of a user's zero-out (or its opposite); `at_least` if it is not above that."""
    coarse = _steps(runs, tail, _COARSE_CELLS, remove)
    if at_least and privacy_loss.chernoff_delta(coarse, epsilon) <= at_least:
        return at_least
    return _composed(runs, tail, remove, epsilon, coarse).delta(epsilon)


def _largest_shift(mixture: MixtureOfGaussians, tail: float) -> float:
    """Finds the distance of means over stddev that is exceeded with probability `tail` at most."""
    at_least = np.cumsum(mixture.probabilities[::-1])[::-1]
    largest = float(np.asarray(mixture.sensitivities)[at_least > tail][-1]) / mixture.stddev
    return 2.0 * largest if mixture.is_substitution else largest


def _epsilon_by_counting(runs: Runs, delta: float) -> float:
    """Bounds epsilon by the number of steps that concern the user; loose, for any noise.

    If it is fixed which steps concern a user, and if none has more than the largest
    sensitivity, the runs are a Gaussian mechanism. Delta is convex, so the probabilities of
    more steps and of larger sensitivities add to it. A quarter of delta is spent on each.
    """
    share = delta / 4.0 / len(runs)
    mus = []
    for mixture, num_steps in runs:
        largest = _largest_shift(mixture, share / num_steps)
        values, weights = np.asarray(mixture.sensitivities), np.asarray(mixture.probabilities)
        concerned = min(1.0, float(weights[values > 0.0].sum()))
        steps = int(stats.binom.isf(share, num_steps, concerned))
        while steps < num_steps and stats.binom.sf(steps, num_steps, concerned) > share:
            steps += 1
        mus.append(math.sqrt(steps) * largest if steps else 0.0)
    return gaussian.epsilon(math.hypot(*mus), delta / 2.0)


def epsilon(mixture: MixtureOfGaussians, *, num_steps: int, delta: float) -> float:
    """Bounds epsilon of `num_steps` steps from above, the larger one of both directions.

    The bound is within a relative 1e-4 of the smallest epsilon (an absolute 1e-7 if it is below
    1e-3; looser if it is beyond a million, or `stddev` below a hundredth of a sensitivity that
    matters); inf if no float can hold it. Delta must not be below 1e-280.
    """
    return epsilon_of_runs([(mixture, num_steps)], delta=delta)


def epsilon_of_runs(runs: Runs, *, delta: float) -> float:
    """Bounds epsilon of several runs on the same users together, in any order.

    Each may depend on the results of those before it: pairs that dominate the steps dominate their
    composition (Zhu, Dong & Wang 2022, theorem 10). A Gaussian mechanism is the run of one step
    with one sensitivity. The bound is as close as that of `epsilon`.
    """
    return _epsilon(_checked(runs), validation.delta(delta))


def _checked(runs: Runs) -> tuple[tuple[MixtureOfGaussians, int], ...]:
    """Returns runs as a key of a cache: statements and plans ask for the same many times."""
    return tuple(
        (mixture, validation.integer("num_steps", number, minimum=1)) for mixture, number in runs
    )


@functools.lru_cache(maxsize=256)
def _epsilon(runs: tuple[tuple[MixtureOfGaussians, int], ...], delta: float) -> float:
    """Computes `epsilon_of_runs`."""
    counted = _epsilon_by_counting(runs, delta)
    tail = delta / _total_steps(runs)
    if max(_largest_shift(mixture, tail) for mixture, _ in runs) > _LARGEST_SHIFT:
        return counted
    removal = _one_sided_epsilon(runs, delta, True)
    if all(mixture.is_substitution for mixture, _ in runs):
        return min(removal, counted)
    addition = _one_sided_epsilon(runs, delta, False, at_least=removal)
    return min(max(removal, addition), counted)


def delta(mixture: MixtureOfGaussians, *, num_steps: int, epsilon: float) -> float:
    """Bounds delta of `num_steps` steps from above, the larger one of both directions.

    The bound is never below 1e-50.
    """
    return delta_of_runs([(mixture, num_steps)], epsilon=epsilon)


def delta_of_runs(runs: Runs, *, epsilon: float) -> float:
    """Bounds delta of several runs on the same users together; the bound is never below 1e-50."""
    return _delta(_checked(runs), validation.number("epsilon", epsilon, at_least=0))


@functools.lru_cache(maxsize=256)
def _delta(runs: tuple[tuple[MixtureOfGaussians, int], ...], epsilon: float) -> float:
    """Computes `delta_of_runs`."""
    tail = 1e-50 / _total_steps(runs)
    # An upper bound: every step concerns the user, with the largest sensitivity.
    largest = [math.sqrt(number) * _largest_shift(mixture, 0.0) for mixture, number in runs]
    unsampled = gaussian.delta(math.hypot(*largest), epsilon)
    too_large = max(_largest_shift(mixture, tail) for mixture, _ in runs) > _LARGEST_SHIFT
    if unsampled <= 1e-50 or too_large:
        return max(1e-50, unsampled)
    if all(mixture.is_substitution for mixture, _ in runs):
        directions = (True,)
    else:  # At epsilon = 0 both have the same delta, and addition has the smaller losses.
        directions = (True, False) if epsilon > 0.0 else (False,)
    by_loss = 0.0
    for remove in directions:
        by_loss = max(by_loss, _one_sided_delta(runs, tail, remove, epsilon, by_loss))
    return min(by_loss, unsampled)


def calibrate_els(
    *,
    sampling_probability: float,
    group_size: int,
    num_steps: int,
    target_epsilon: float,
    delta: float,
) -> float:
    """Computes the smallest σ, to a relative 1e-4, with which ELS or ULS meets a target.

    `group_size` is 1 for ULS. Epsilon of the result was evaluated and is not above the target.
    """
    validation.positive("target_epsilon", target_epsilon)
    validation.delta(delta)
    num_steps = validation.integer("num_steps", num_steps, minimum=1)
    els(1.0, sampling_probability, group_size)  # Checks the arguments.
    return _calibrated(
        float(sampling_probability), int(group_size), num_steps, float(target_epsilon), float(delta)
    )


@functools.lru_cache(maxsize=4096)
def _calibrated(
    sampling_probability: float,
    group_size: int,
    num_steps: int,
    target_epsilon: float,
    delta: float,
) -> float:
    """Caches `calibrate_els` within a process: tables repeat the same arguments."""

    def rough(noise: float) -> float:
        pair = els(noise, sampling_probability, group_size)
        if _largest_shift(pair, delta / num_steps) > _LARGEST_SHIFT:
            return math.inf
        return max(
            _rough_epsilon([(pair, num_steps)], delta, remove)[1] for remove in (True, False)
        )

    def precise(noise: float) -> float:
        pair = els(noise, sampling_probability, group_size)
        return epsilon(pair, num_steps=num_steps, delta=delta)

    # Rough epsilons are several times quicker, and their noise is only a percent too large.
    try:
        near = noise_search.smallest_noise(
            rough, target_epsilon=target_epsilon, relative_tolerance=_ROUGH_TOLERANCE
        )
    except ValueError:  # No noise has a finite rough epsilon; the loose bound may have one.
        near = 1.0
    return noise_search.smallest_noise(precise, target_epsilon=target_epsilon, initial=near)
