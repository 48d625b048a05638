"""What was released in many trials of a distinguishing game."""

from __future__ import annotations

import dataclasses

import numpy as np

from tff_dpftrl import validation


@dataclasses.dataclass(frozen=True, eq=False)
class Transcripts:
    """All rounds of many trials, each about one canary client that took part or was zeroed out.

    If the claim is true, a trial's numbers are `clip_norm · [present and t in pattern]` plus
    Gaussian noise of the claimed covariance over the rounds, independent of other trials'.

    Attributes:
      released: float64, [trials, rounds]: the noised sums (before any division), projected
        on the unit direction of the trial's canary.
      present: bool, [trials]: whether the canary took part; else it was zeroed out.
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
        """Two disjoint parts at random, the first with about `fraction` of the trials."""
        order = np.random.default_rng(seed).permutation(len(self))
        cut = round(fraction * len(self))
        first, second = order[:cut], order[cut:]
        return (
            Transcripts(self.released[first], self.present[first]),
            Transcripts(self.released[second], self.present[second]),
        )
