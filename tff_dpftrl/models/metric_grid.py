"""Fixed grids for histograms of metrics, and the quantiles that are read from their sums.

Each client puts a one into the bucket of its own value. The vectors are added like everything
else, in the clear or securely, and the sum tells an order statistic up to the width of a bucket.

A histogram has one entry more than the grid has buckets. Its first entry counts the clients
without a value: without examples, or whose training diverged.
"""

from __future__ import annotations

import bisect
import dataclasses
import math

import numpy as np

from tff_dpftrl import validation

SUFFIX = "_histogram"
"""End of the name of a histogram, after the name of the metric."""
SECONDS = "seconds"
"""Name of the seconds of a device's work, which its graph cannot measure."""
QUANTILES = {"p10": 0.1, "median": 0.5, "p90": 0.9}
"""Fractions of the recorded quantiles, by name."""
RESOLUTION = "resolution"
"""Name of the largest distance of a recorded quantile from the true one."""
MOST_BUCKETS = 1000
"""Largest number of buckets of a grid."""


@dataclasses.dataclass(frozen=True)
class MetricGrid:
    """The declared buckets of a metric.

    Attributes:
      edges: Edges of the buckets, increasing. Bucket i holds the values from edge i up to, and
        without, edge i + 1. Smaller values count in the first bucket, larger ones in the last.
    """

    edges: tuple[float, ...]

    def __post_init__(self):
        edges = tuple(map(float, self.edges))
        rises = all(a < b for a, b in zip(edges, edges[1:], strict=False))
        if not (2 <= len(edges) <= MOST_BUCKETS + 1 and rises and all(map(math.isfinite, edges))):
            shown = str(list(edges[:5]))[:-1] + (", ...]" if len(edges) > 5 else "]")
            raise validation.UsageError(
                f"edges must be 2 to {MOST_BUCKETS + 1} finite numbers that increase, got {shown}."
            )
        object.__setattr__(self, "edges", edges)

    @classmethod
    def linear(cls, least: float, most: float, num_buckets: int) -> MetricGrid:
        """Makes buckets of equal width, such as for an accuracy from 0 to 1."""
        return cls(tuple(np.linspace(least, most, num_buckets + 1).tolist()))

    @classmethod
    def logarithmic(cls, least: float, most: float, *, per_octave: int = 4) -> MetricGrid:
        """Makes `per_octave` buckets for every doubling, and one from 0 to `least`.

        With 4, half a bucket is 9 % of a value at most; with 16 it is 2.2 %.
        """
        validation.positive("least", least)
        validation.number("most", most, above=least)
        octaves = math.ceil(math.log2(most / least) - 1e-9)
        steps = range(octaves * per_octave + 1)
        return cls((0.0, *(least * 2.0 ** (step / per_octave) for step in steps)))

    @property
    def size(self) -> int:
        """Number of entries of a histogram: the buckets, and one before them for no value."""
        return len(self.edges)

    def place(self, value: float) -> int:
        """Returns the index of the entry that counts a value; 0 for NaN and infinity."""
        if not math.isfinite(value):
            return 0
        return min(max(bisect.bisect_right(self.edges, value), 1), self.size - 1)

    def quantiles(self, histogram: np.ndarray) -> dict[str, float | None]:
        """Reads order statistics from the sum of clients' histograms, shape [size].

        Each is the middle of its bucket, by the names of `QUANTILES`. `RESOLUTION` is half the
        width of the widest of these buckets: the true order statistic is no farther away, unless it
        is beyond the grid. All are None without a value.
        """
        counts = np.cumsum(np.asarray(histogram, np.int64)[1:])
        if not len(counts) or counts[-1] <= 0:
            return dict.fromkeys((*QUANTILES, RESOLUTION))
        found: dict[str, float | None] = {}
        widest = 0.0
        for name, fraction in QUANTILES.items():
            # The smallest value that at least this fraction of the clients does not exceed.
            rank = max(1, math.ceil(fraction * counts[-1] - 1e-9))
            place = int(np.searchsorted(counts, rank))
            low, high = self.edges[place : place + 2]
            found[name] = (low + high) / 2
            widest = max(widest, (high - low) / 2)
        return found | {RESOLUTION: widest}
