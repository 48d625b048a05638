"""Transcripts of the trials of distinguishing games."""

from __future__ import annotations

import dataclasses

import numpy as np

from tff_dpftrl import validation


@dataclasses.dataclass(frozen=True, eq=False)
class Transcripts:
    """Transcripts of many trials, each about one canary that took part or was zeroed out.

    If the claim is true, a trial's numbers are `clip_norm · [present and t in pattern]` plus
    Gaussian noise of the claimed covariance over the rounds, independent of other trials'.
    `released` has the noised sums before any division, projected on the unit direction of the
    trial's canary: float64, shape [trials, rounds]. `present` says whether the canary took part:
    bool, shape [trials].
    """

    released: np.ndarray
    present: np.ndarray

    def __post_init__(self):
        if self.released.ndim != 2 or self.present.shape != self.released.shape[:1]:
            raise validation.UsageError(
                "released must have shape [trials, rounds] and present [trials], got "
                f"{self.released.shape} and {self.present.shape}."
            )
        if self.present.dtype != bool:
            raise validation.UsageError(f"present must be bool, got {self.present.dtype}.")

    def __len__(self) -> int:
        return len(self.present)

    def split(self, fraction: float, seed: int) -> tuple[Transcripts, Transcripts]:
        """Splits the trials at random in two, the first part with about `fraction` of them."""
        order = np.random.default_rng(seed).permutation(len(self))
        cut = round(fraction * len(self))
        first, second = order[:cut], order[cut:]
        return (
            Transcripts(self.released[first], self.present[first]),
            Transcripts(self.released[second], self.present[second]),
        )
