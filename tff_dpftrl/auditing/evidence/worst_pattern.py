"""The participation pattern of a canary that is easiest to detect, and the covariance of noise."""

from __future__ import annotations

import dataclasses

import numpy as np

from tff_dpftrl import validation
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.participation import schema as schema_lib

_MAX_CANDIDATES = 12
_MAX_SWEEPS = 100
_ROUNDING = 1e-9


@dataclasses.dataclass(frozen=True)
class Pattern:
    """Participation pattern of one client that a schema allows, in increasing rounds.

    `signs` has +1 or −1 for each round: whether the canary sends its direction or the opposite one.
    All are +1 unless CᵀC has negative entries between these rounds. `norm` is ‖C u‖ for
    contributions u of norm 1; times clip norm over noise standard deviation it is μ.
    """

    rounds: tuple[int, ...]
    signs: tuple[int, ...]
    norm: float

    def signal(self, num_rounds: int) -> np.ndarray:
        """Returns the contributions u for clip norm 1, float64, shape [num_rounds]."""
        signal = np.zeros(num_rounds)
        signal[list(self.rounds)] = self.signs
        return signal


def worst_pattern(strategy: strategy_lib.Strategy, schema: schema_lib.MinSep) -> Pattern:
    """Searches for the allowed pattern with the largest ‖C u‖.

    The norm is attained, so it never exceeds the sensitivity. The tests compare it with
    `strategy.sensitivity(schema)`: it is the sensitivity, to 1e-6, for identity, BLT, banded
    matrices, banded inverses and trees, restarted or not, wherever that is exact; it is no
    proof that no other pattern is worse. `strongest_pattern` describes the search, and treats
    trees, which do not release all of their nodes.
    """
    matrix = strategy.strategy_matrix(schema.num_rounds)
    return _search(matrix.T @ matrix, schema)


def strongest_pattern(covariance: np.ndarray, schema: schema_lib.MinSep) -> Pattern:
    """Searches for the allowed pattern that is easiest to detect in noise of a given covariance.

    For a square C and its `noise_covariance` it is `worst_pattern`. A tree releases less than
    its nodes, so its release is a Gaussian mechanism of a smaller μ than S / z: the norm of this
    pattern over z.

    The search keeps the best pattern of j participations that ends in round t, for all j and t,
    forward in time and backward; each is improved by single moves and by ascent: the best allowed
    pattern for the linear part of the square, until none is better (the square is convex, so each
    step gains). The covariance is for clip norm and noise multiplier 1. The pattern has norm √(uᵀ
    Σ⁻¹ u).
    """
    inverse = np.linalg.inv(covariance)
    return _search((inverse + inverse.T) / 2.0, schema)


def noise_covariance(strategy: strategy_lib.Strategy, num_rounds: int) -> np.ndarray:
    """Computes the covariance over rounds of the emitted noise.

    For clip norm and noise multiplier 1 it is (CᵀC)⁻¹ for a square C, computed from C alone, and N
    Nᵀ for a tree with the noise matrix N. An N that is no left inverse of C is refused: its noise
    does not hide C x.
    """
    matrix = strategy.strategy_matrix(num_rounds)
    if matrix.shape[0] == matrix.shape[1]:
        inverse = np.linalg.inv(matrix)
        return inverse @ inverse.T
    noise = strategy.noise_matrix(num_rounds)
    error = np.max(np.abs(noise @ matrix - np.eye(num_rounds)))
    if error > 1e-8:
        raise validation.UsageError(
            f"strategy must have a noise matrix N with N C = I, got one that is {error:.2g} off: "
            f"the noise of {strategy.name} does not belong to its C."
        )
    return noise @ noise.T


def _search(gram: np.ndarray, schema: schema_lib.MinSep) -> Pattern:
    backward = _candidates(gram[::-1, ::-1], schema)
    candidates = _candidates(gram, schema) + [signal[::-1] for signal in backward]
    candidates = sorted(_distinct(candidates), key=lambda signal: -_squared(gram, signal))
    improved = [_improved(gram, signal, schema) for signal in candidates[:_MAX_CANDIDATES]]
    best = max(improved, key=lambda signal: _squared(gram, signal))
    rounds = np.flatnonzero(best)
    signs = best[rounds] * best[rounds[0]]
    return Pattern(
        tuple(rounds.tolist()),
        tuple(signs.astype(int).tolist()),
        float(np.sqrt(_squared(gram, best))),
    )


def _squared(gram: np.ndarray, signal: np.ndarray) -> float:
    """Computes uᵀ G u for a signal with few rounds."""
    rounds = np.flatnonzero(signal)
    return float(signal[rounds] @ gram[np.ix_(rounds, rounds)] @ signal[rounds])


def _distinct(signals: list[np.ndarray]) -> list[np.ndarray]:
    return list({signal.tobytes(): signal for signal in signals}.values())


def _candidates(gram: np.ndarray, schema: schema_lib.MinSep) -> list[np.ndarray]:
    """Builds the best patterns for each number of participations, round by round."""
    num_rounds, min_sep = len(gram), schema.min_sep
    values = np.diagonal(gram).copy()
    signals = np.eye(num_rounds)
    products = gram.copy()  # products[t] is G u for the pattern u that ends in round t.
    best = [signals[np.argmax(values)]]
    positions = np.arange(num_rounds)
    for _ in range(1, schema.effective_participations):
        gains = values[:, np.newaxis] + 2.0 * np.abs(products)
        gains[positions[np.newaxis, :] - positions[:, np.newaxis] < min_sep] = -np.inf
        before = np.argmax(gains, axis=0)
        reached = gains[before, positions]
        signs = np.where(products[before, positions] < 0.0, -1.0, 1.0)
        values = reached + np.diagonal(gram)
        signals = signals[before]
        signals[positions, positions] = signs
        signals[~np.isfinite(values)] = 0.0
        products = products[before] + signs[:, np.newaxis] * gram
        if not np.any(np.isfinite(values)):
            break
        for end in np.argsort(values)[-3:]:
            if np.isfinite(values[end]):
                best.append(signals[end].copy())
    return best


def _improved(gram: np.ndarray, signal: np.ndarray, schema: schema_lib.MinSep) -> np.ndarray:
    """Improves a signal by ascent and single moves, by turns, until neither gains."""
    value = _squared(gram, signal)
    for _ in range(_MAX_SWEEPS):
        gained = _best_linear(gram @ signal, schema)
        if _squared(gram, gained) <= value * (1.0 + _ROUNDING):
            gained = _best_move(gram, signal, schema)
        reached = _squared(gram, gained)
        if reached <= value * (1.0 + _ROUNDING):
            break
        signal, value = gained, reached
    return signal


def _best_linear(slope: np.ndarray, schema: schema_lib.MinSep) -> np.ndarray:
    """Returns the pattern with the largest Σ |slope| over its rounds, with the slope's signs."""
    num_rounds, min_sep, count = len(slope), schema.min_sep, schema.effective_participations
    best = np.zeros((count + 1, num_rounds + min_sep))
    for j in range(1, count + 1):
        taken = np.abs(slope) + best[j - 1, min_sep:]
        best[j, :num_rounds] = np.maximum.accumulate(taken[::-1])[::-1]
    signal, t = np.zeros(num_rounds), 0
    for j in range(count, 0, -1):
        if t >= num_rounds:
            break
        taken = np.abs(slope[t:]) + best[j - 1, t + min_sep :]
        t += int(np.argmax(taken >= best[j, t] * (1.0 - 1e-15)))
        signal[t] = -1.0 if slope[t] < 0.0 else 1.0
        t += min_sep
    return signal


def _best_move(gram: np.ndarray, signal: np.ndarray, schema: schema_lib.MinSep) -> np.ndarray:
    """Returns the best pattern with one round moved or added, or first or last ones shifted."""
    rounds = np.flatnonzero(signal)
    options = [signal]
    for skip in [*range(len(rounds)), None]:
        kept = rounds if skip is None else np.delete(rounds, skip)
        if len(kept) >= schema.effective_participations:
            continue
        rest = np.zeros_like(signal)
        rest[kept] = signal[kept]
        free = np.ones(len(signal), bool)
        for t in kept:
            free[max(0, t - schema.min_sep + 1) : t + schema.min_sep] = False
        if free.any():
            product = gram @ rest
            gains = np.where(free, 2.0 * np.abs(product) + np.diagonal(gram), -np.inf)
            t = int(np.argmax(gains))
            rest[t] = -1.0 if product[t] < 0.0 else 1.0
            options.append(rest)
    for cut in range(len(rounds)):
        for first, last in ((cut, len(rounds)), (0, cut + 1)):
            for shift in range(-schema.min_sep, schema.min_sep + 1):
                moved = rounds.copy()
                moved[first:last] += shift
                if schema.allows(moved.tolist()):
                    option = np.zeros_like(signal)
                    option[moved] = signal[rounds]
                    options.append(option)
    return max(options, key=lambda option: _squared(gram, option))
