"""The noise of all rounds, or steps, of one run against what is claimed of it.

It takes one vector of noise after another, and keeps only some of their coordinates. So models may
be large, and runs long.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np
import scipy.linalg
from scipy import stats

from tff_dpftrl.accounting import display
from tff_dpftrl.auditing import audit_report
from tff_dpftrl.auditing.evidence import correlations

_BLOCK = 4096  # Coordinates of a large tensor whose noise is compared together.
_KEPT, _FEWEST_KEPT = 4096, 16  # Coordinates whose noise is kept: of all tensors, of each.
_MOST_TOGETHER = 2000  # Rounds whose noise is compared with each other's.
_FEWEST_VALUES = 8
"""Least number of values that are compared together. Of fewer, noise may be as small as the limit
only because floats are rounded."""


class RunNoise:
    """Noise of a run, by rounds, tensors and blocks of large tensors."""

    def __init__(
        self,
        sizes: Sequence[int],
        covariance: np.ndarray,
        *,
        most_vectors: int,
        error_rate: float,
        rounding: np.ndarray | None = None,
    ):
        """Initialises the test of the claimed covariance over rounds.

        `error_rate` is the largest chance that any finding is wrongly "violated". `rounding` is the
        largest rounding error of each coordinate.
        """
        sizes = [size for size in sizes if size]
        begins = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(int)
        self._covariance, self._each = covariance, error_rate / 3.0
        self._num_tensors, self._trials, dim = len(sizes), 0, sum(sizes)
        # Blocks of the tensors, and at last all coordinates together.
        blocks = [np.arange(b, b + size, _BLOCK) for b, size in zip(begins, sizes, strict=True)]
        self._tensors = np.repeat(np.arange(len(sizes)), [len(one) for one in blocks])
        self._starts = np.concatenate(blocks)
        self._lengths = np.append(np.diff(np.append(self._starts, dim)), dim)
        # If the claim is true, the squared norm of d values over their variance is χ² with d
        # degrees. Of m norms each may be below its own quantile of error / m: so the chance that
        # any is below it is at most the error, however they depend on each other.
        self._least = _least(self._lengths, self._each / (most_vectors * len(self._lengths)))
        rounding = np.zeros(dim) if rounding is None else rounding
        # Rounding makes the noise smaller by `_blur` at most. Where this is more than the limit,
        # noise cannot be below it, and nothing is shown.
        self._blur = self._norms(rounding)
        self._is_shown = (self._lengths >= _FEWEST_VALUES) & (
            self._blur < self._least * math.sqrt(np.min(np.diagonal(covariance)))
        )
        self._worst = (math.inf, math.inf, "")
        most = max(_FEWEST_KEPT, _KEPT // len(sizes))
        kept = [np.linspace(0, size - 1, min(size, most)).astype(int) for size in sizes]
        self._tensor_of = np.repeat(np.arange(len(sizes)), [len(one) for one in kept])
        self._kept = np.concatenate([b + one for b, one in zip(begins, kept, strict=True)])
        self._kept_rounding = rounding[self._kept]
        num_rounds = len(covariance)
        places = np.linspace(0, num_rounds - 1, min(num_rounds, _MOST_TOGETHER)).astype(int)
        self._places = {int(t): place for place, t in enumerate(places)}
        self._noise = np.zeros((len(places), len(self._kept)))

    def _norms(self, values: np.ndarray) -> np.ndarray:
        """Returns the root mean square of each block."""
        squares = np.add.reduceat(values**2, self._starts)
        return np.sqrt(np.append(squares, np.sum(squares)) / self._lengths)

    def add(self, round_index: int, noise: np.ndarray, about: str = "") -> None:
        """Adds the noise of a round, shape [coordinates]; `about` follows the round's number."""
        if round_index in self._places:
            kept = np.nan_to_num(noise[self._kept], posinf=0.0, neginf=0.0)
            self._noise[self._places[round_index]] = kept
        stddev = math.sqrt(self._covariance[round_index, round_index])
        shares = self._norms(noise) / stddev
        ratios = (shares + self._blur / stddev) / self._least
        ratios[~np.isfinite(shares)] = -1.0  # No noise at all.
        ratios[~self._is_shown] = math.inf
        self._trials += int(np.sum(self._is_shown))
        block = int(np.argmin(ratios))
        if ratios[block] < self._worst[0]:
            where = f"{round_index + 1}{about}, on {self._lengths[block]} weights"
            if block < len(self._starts):
                where += f" of tensor {self._tensors[block] + 1}"
            self._worst = float(ratios[block]), float(shares[block]), where

    def findings(self, noise: str, kind: str, total: int) -> tuple[audit_report.Finding, ...]:
        """Tests the size of the noise of each round and each tensor, and correlations of rounds.

        `total` is the number of rounds that there are, of which the first ones have been added.
        """
        together = list(self._places)
        factor = np.linalg.cholesky(self._covariance[np.ix_(together, together)])
        white = scipy.linalg.solve_triangular(factor, self._noise, lower=True)
        every = audit_report.Covered.of(f"{kind}s", range(len(self._covariance)), total)
        rounds = audit_report.Covered.of(f"{kind}s", together, total)
        return (
            self._of_rounds(f"{noise}: standard deviation of each {kind}", kind, every),
            self._of_tensors(f"{noise}: standard deviation of each tensor", white, factor, rounds),
            self._of_pairs(f"{noise}: correlation of {kind}s", kind, white, rounds),
        )

    def _covers(
        self, rounds: audit_report.Covered, tensors: Iterable[int]
    ) -> tuple[audit_report.Covered, ...]:
        return rounds, audit_report.Covered.of("tensors", map(int, tensors), self._num_tensors)

    def _of_rounds(
        self, test: str, kind: str, rounds: audit_report.Covered
    ) -> audit_report.Finding:
        hidden = self._tensors[~self._is_shown[:-1]]
        covers = self._covers(rounds, set(range(self._num_tensors)) - set(hidden))
        if not np.any(self._is_shown):
            says = "There are too few weights, or their rounding hides it."
            return audit_report.Finding(test, "not tested", says, covers=covers)
        ratio, share, where = self._worst
        lengths = self._lengths[self._is_shown]
        detectable = self._least[self._is_shown] / _least(lengths, 0.99)
        return audit_report.Finding(
            test,
            "violated" if ratio < 1.0 else "consistent",
            f"At least {display.round_down(share)} of what is claimed, in {kind} {where}.",
            error_rate=self._each,
            trials=self._trials,
            power=f"noise below {detectable[np.argmax(lengths)]:.3g} of what is claimed on "
            f"{np.max(lengths)} weights together, below {np.min(detectable):.2g} on a block of "
            f"{np.min(lengths)}",
            covers=covers,
        )

    def _of_tensors(
        self, test: str, white: np.ndarray, factor: np.ndarray, rounds: audit_report.Covered
    ) -> audit_report.Finding:
        """Tests some coordinates of each tensor in all rounds: so small tensors are tested, too."""
        counts = np.bincount(self._tensor_of)
        lengths = counts * len(white)
        shares = np.sqrt(np.bincount(self._tensor_of, np.sum(white**2, axis=0)) / lengths)
        # Upper bound of a rounding of 1 in all rounds, after whitening.
        inverse = np.abs(scipy.linalg.solve_triangular(factor, np.eye(len(factor)), lower=True))
        rounding = np.bincount(self._tensor_of, self._kept_rounding**2)
        blur = np.sqrt(np.sum(np.sum(inverse, axis=1) ** 2) * rounding / lengths)
        least = _least(lengths, self._each / len(counts))
        shown = np.flatnonzero((lengths >= _FEWEST_VALUES) & (blur < least))
        covers = self._covers(rounds, shown)
        if not len(shown):
            says = "There are too few weights, or their rounding hides it."
            return audit_report.Finding(test, "not tested", says, covers=covers)
        worst = shown[np.argmin(((shares + blur) / least)[shown])]
        detectable = (least / _least(lengths, 0.99))[shown]
        return audit_report.Finding(
            test,
            "violated" if shares[worst] + blur[worst] < least[worst] else "consistent",
            f"At least {display.round_down(shares[worst])} of what is claimed, on {counts[worst]} "
            f"weights of tensor {worst + 1} together.",
            error_rate=self._each,
            trials=len(shown),
            power=f"noise below {np.min(detectable):.2g} of what is claimed on one tensor",
            covers=covers,
        )

    def _of_pairs(
        self, test: str, kind: str, white: np.ndarray, rounds: audit_report.Covered
    ) -> audit_report.Finding:
        """Tests that noise of different rounds is correlated as it is claimed to be."""
        covers = self._covers(rounds, range(self._num_tensors))
        if len(white) < 2:
            return audit_report.Finding(test, "not tested", f"There is one {kind}.", covers=covers)
        scan = correlations.Scan()
        later = np.triu(np.ones((len(white), len(white)), bool), 1)
        of = "" if len(white) == len(self._covariance) else f" of the {len(white)} compared ones"
        scan.add(white, white, f"whitened, {kind}s {{}} and {{}}{of}", later)
        return dataclasses.replace(scan.finding("", self._each), test=test, covers=covers)


def _least(lengths: np.ndarray, chance: float) -> np.ndarray:
    """Returns the quantile of the root mean square of so many independent N(0, 1)."""
    return np.sqrt(stats.chi2.ppf(chance, lengths) / lengths)
