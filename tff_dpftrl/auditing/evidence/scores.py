"""Scores of trials: one number each, larger where the canary seems to have taken part."""

from __future__ import annotations

import numpy as np
import scipy.linalg

from tff_dpftrl import validation
from tff_dpftrl.auditing.evidence import transcripts as transcripts_lib

_NUM_FOLDS = 5
_SHRINKAGE = 1e-3
# Thresholds, in standard errors, for a round's difference of means: the best one is kept.
_THRESHOLDS = (0.0, 2.0, 3.0, 4.0)


def likelihood_ratio_scores(
    transcripts: transcripts_lib.Transcripts, signal: np.ndarray, covariance: np.ndarray
) -> np.ndarray:
    """Computes likelihood ratios, the best test if the claim is true and the noise Gaussian.

    The logarithm of the likelihood ratio of N(u, Σ) and N(0, Σ) is linear in the release r, so uᵀ
    Σ⁻¹ r orders transcripts in the same way (Neyman & Pearson). It is divided by its standard
    deviation μ = √(uᵀ Σ⁻¹ u). The signal u includes the clip norm. If the claim is true, scores are
    N(μ, 1) where the canary took part and N(0, 1) where it did not.
    """
    rounds = transcripts.released.shape[1]
    if np.shape(signal) != (rounds,) or np.shape(covariance) != (rounds, rounds):
        raise validation.UsageError(
            f"signal and covariance must be for the {rounds} rounds of the transcripts, got "
            f"shapes {np.shape(signal)} and {np.shape(covariance)}."
        )
    weights = scipy.linalg.solve(covariance, signal, assume_a="pos")
    squared = float(np.dot(signal, weights))
    if not squared > 0.0:
        raise validation.UsageError(
            "signal must not be 0 in all rounds: give one of worst_pattern."
        )
    return transcripts.released @ weights / np.sqrt(squared)


def learned_scores(
    train: transcripts_lib.Transcripts, test: transcripts_lib.Transcripts
) -> np.ndarray:
    """Computes scores of a classifier that knows nothing of the mechanism: Fisher's discriminant.

    Two discriminants are learned from `train`. One is linear in what was released: the signal is
    often in few rounds, so a round's difference of means counts only from some standard errors on,
    by cross-validation. The other is linear in the squares of what was released, whitened by the
    covariance of all trials, and their sum: it finds noise whose scale depends on the canary. They
    are joined by a third on their scores out of fold. Scores are zeros if nothing varies. `train`
    needs 20 trials of either kind.
    """
    fewest = min(int(train.present.sum()), int((~train.present).sum()))
    if fewest < 20:
        raise validation.UsageError(
            f"train must have at least 20 trials of either kind, got {fewest}: play more trials."
        )
    location, scale = train.released.mean(axis=0), train.released.std(axis=0)
    kept = scale > 0.0  # A round that releases the same in every trial says nothing.
    if not np.any(kept):
        return np.zeros(len(test))
    features = _Features(train.released[:, kept], location[kept], scale[kept])
    seen, unseen = features(train.released[:, kept]), features(test.released[:, kept])
    parts = []
    for first, second in zip(seen, unseen, strict=True):
        held_out = {
            threshold: _out_of_fold(first, train.present, threshold) for threshold in _THRESHOLDS
        }
        best = max(held_out, key=lambda key: _separation(held_out[key], train.present))
        weights = _discriminant(first, train.present, best)
        parts.append((held_out[best], second @ weights))
    joint = np.stack([learned for learned, _ in parts], axis=1)
    weights = np.maximum(0.0, _discriminant(joint, train.present, 2.0))
    return np.stack([other for _, other in parts], axis=1) @ weights


class _Features:
    """Features of releases: standardised ones, and squares of whitened ones, both centred."""

    def __init__(self, released: np.ndarray, location: np.ndarray, scale: np.ndarray):
        self._location, self._scale = location, scale
        standard = (released - location) / scale
        covariance = standard.T @ standard / len(standard)
        covariance[np.diag_indices_from(covariance)] += _SHRINKAGE
        self._factor = np.linalg.cholesky(covariance)

    def __call__(self, released: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        standard = (released - self._location) / self._scale
        white = scipy.linalg.solve_triangular(self._factor, standard.T, lower=True).T
        squares = white**2 - 1.0
        total = squares.sum(axis=1, keepdims=True) / np.sqrt(squares.shape[1])
        return standard, np.concatenate([squares, total], axis=1)


def _discriminant(features: np.ndarray, present: np.ndarray, threshold: float) -> np.ndarray:
    """Computes Σ⁻¹ (m₁ − m₀), scaled, without differences below `threshold` standard errors.

    Scores with these weights have variance 1 within each kind of trials.
    """
    first, second = features[present], features[~present]
    difference = first.mean(axis=0) - second.mean(axis=0)
    errors = np.sqrt(first.var(axis=0) / len(first) + second.var(axis=0) / len(second))
    difference = np.where(np.abs(difference) >= threshold * errors, difference, 0.0)
    centred = np.concatenate([first - first.mean(axis=0), second - second.mean(axis=0)])
    covariance = centred.T @ centred / max(1, len(centred) - 2)
    diagonal = np.diagonal(covariance).copy()
    covariance[np.diag_indices_from(covariance)] += _SHRINKAGE * diagonal + 1e-12
    weights = scipy.linalg.solve(covariance, difference, assume_a="pos")
    variance = float(weights @ covariance @ weights)
    return weights / np.sqrt(variance) if variance > 0.0 else weights


def _out_of_fold(features: np.ndarray, present: np.ndarray, threshold: float) -> np.ndarray:
    """Scores every trial by a discriminant that was learned without its fold."""
    fold = np.empty(len(present), int)
    for kind in (present, ~present):
        fold[kind] = np.arange(kind.sum()) % _NUM_FOLDS
    scores = np.empty(len(present))
    for index in range(_NUM_FOLDS):
        out = fold == index
        weights = _discriminant(features[~out], present[~out], threshold)
        scores[out] = features[out] @ weights
    return scores


def _separation(scores: np.ndarray, present: np.ndarray) -> float:
    """Returns the difference of means over the standard deviation; 0 if that is 0."""
    spread = np.sqrt((scores[present].var() + scores[~present].var()) / 2.0)
    return float((scores[present].mean() - scores[~present].mean()) / spread) if spread else 0.0
