"""Histograms of how often, and how closely, the devices of a round take part.

The server keeps no list of devices, but the statement needs MinS and MaxP. So every report has two
small integer vectors beside its update. The first has a one in the bucket of "rounds since my last
time" (or "never before"), the second in the bucket of "times so far, with this one". They are added
like the update, inside the same (secure) sum: the server learns how many devices fell into each
bucket, and nobody's history.

Buckets are declared before training and are the same for all devices. Decoding errs on the safe
side. The stride is the lower edge of the smallest bucket that is not empty. The number of times is
the upper edge of the largest one.

The histograms are evidence only: ε is that of the declared schema. A device whose software keeps to
the signed plan enforces the declared limits by its own timer, whatever other devices report. A
report below the declared stride comes from a device that lies, whose timer was wiped, or whose
software is broken. It is counted and shown beside ε, with the ε that it would mean. If ε followed
from reports, one liar could change the statement for everybody, and for good.

The evidence is incomplete. Where sums are secure, nobody can see that a vector is not one-hot: a
device that puts -1 where another has put 1 hides the other. Sums that no devices can make are
counted as unknown rounds. Where single reports can be seen, `check_one_hot` refuses such vectors. A
device whose timer was wiped reports "never before" and is not seen at all.

The sums are exact, without noise. The server should keep the few numbers that come out
(`ObservedRounds`), not the sums.
"""

from __future__ import annotations

import bisect
import dataclasses
import math

import numpy as np

from tff_dpftrl import validation
from tff_dpftrl.participation import observed as observed_lib
from tff_dpftrl.participation import schema as schema_lib

_BUCKETS_PER_OCTAVE = 4  # An edge differs from the true number by at most 19 %.


@dataclasses.dataclass(frozen=True)
class ParticipationBuckets:
    """The declared buckets of both histograms.

    Attributes:
      stride_edges: Smallest stride (rounds since the last time, j - i) of each bucket, increasing
        from 1; the last bucket has no end. One more bucket, the first of the vector, is for devices
        that have never taken part.
      times_edges: Largest number of times of each bucket, increasing from 1; the last is the number
        after which a device takes part no more.
    """

    stride_edges: tuple[int, ...]
    times_edges: tuple[int, ...]

    def __post_init__(self):
        for field in dataclasses.fields(self):
            edges = tuple(
                validation.integer(field.name, edge, minimum=1)
                for edge in getattr(self, field.name)
            )
            if edges[:1] != (1,) or any(b <= a for a, b in zip(edges, edges[1:], strict=False)):
                raise validation.UsageError(f"{field.name} must increase, from 1, got {edges}.")
            object.__setattr__(self, field.name, edges)

    @classmethod
    def for_schema(cls, declared: schema_lib.MinSep) -> ParticipationBuckets:
        """Chooses buckets with edges at the declared limits, and four an octave elsewhere.

        These are about 40 for 2,000 rounds.
        """
        strides = {*_octaves(declared.num_rounds), min(declared.min_sep, declared.num_rounds)}
        return cls(tuple(sorted(strides)), tuple(_octaves(declared.max_participations)))

    @property
    def shapes(self) -> tuple[tuple[int], tuple[int]]:
        """Shapes of the two vectors."""
        return (len(self.stride_edges) + 1,), (len(self.times_edges),)

    def below(self, stride: int) -> int:
        """Returns how many of the first stride buckets hold only strides below `stride`."""
        return max(bisect.bisect_right(self.stride_edges, stride) - 1, 0)

    def encode(self, stride: int | None, times: int) -> tuple[np.ndarray, np.ndarray]:
        """Encodes the participation of one device as two one-hot vectors, int32, of `shapes`.

        `stride` is the number of rounds since the last time, None if there was none; `times`
        includes this time. It raises ValueError if they are out of range or contradict each other.
        """
        times = validation.integer("times", times, minimum=1)
        if times > self.times_edges[-1]:
            raise validation.UsageError(
                f"times={times} is above the declared {self.times_edges[-1]}: the device should "
                "have refused to take part."
            )
        if (stride is None) != (times == 1):
            raise validation.UsageError(f"stride={stride} contradicts times={times}.")
        strides, counts = (np.zeros(shape, np.int32) for shape in self.shapes)
        if stride is None:
            strides[0] = 1
        else:
            stride = validation.integer("stride", stride, minimum=1)
            strides[bisect.bisect_right(self.stride_edges, stride)] = 1
        counts[bisect.bisect_left(self.times_edges, times)] = 1
        return strides, counts

    def check_one_hot(self, strides: np.ndarray, times: np.ndarray) -> None:
        """Raises ValueError for vectors of one device that `encode` could not have made."""
        summed = self._checked(strides, times)
        if summed[0].sum() != 1:
            raise validation.UsageError(f"strides must be one-hot, sums to {summed[0].sum()}.")

    def decode(self, strides: np.ndarray, times: np.ndarray) -> tuple[int | None, int]:
        """Returns a lower bound of the smallest stride and an upper bound of the number of times.

        The arguments are sums over all devices whose update was summed. The stride is None if all
        took part for the first time; the number of times is 0 if there was no device. It raises
        ValueError if no devices could have made these sums. Nothing is known about the round then:
        add it by `ObservedRounds.with_unknown_round`.
        """
        strides, times = self._checked(strides, times)
        filled_strides, filled_times = np.flatnonzero(strides[1:]), np.flatnonzero(times)
        return (
            self.stride_edges[filled_strides[0]] if len(filled_strides) else None,
            self.times_edges[filled_times[-1]] if len(filled_times) else 0,
        )

    def _checked(self, strides: np.ndarray, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        arrays = []
        for name, values, shape in zip(
            ("strides", "times"), (strides, times), self.shapes, strict=True
        ):
            values = np.asarray(values)
            if values.shape != shape or not np.issubdtype(values.dtype, np.integer):
                raise validation.UsageError(
                    f"{name} must be integers of shape {shape}, got {values.dtype} of shape "
                    f"{values.shape}."
                )
            if (values < 0).any():
                raise validation.UsageError(f"{name} must not be negative, got {values.min()}.")
            arrays.append(values.astype(np.int64))
        strides, times = arrays
        if strides.sum() != times.sum() or strides[0] != times[0]:
            raise validation.UsageError(
                f"strides and times contradict each other: {strides.sum()} and {times.sum()} "
                f"devices, {strides[0]} and {times[0]} of them for the first time."
            )
        return strides, times


@dataclasses.dataclass(frozen=True)
class ObservedRounds:
    """Summary of the histograms of all committed rounds, which the task's state keeps."""

    num_rounds: int = 0
    # Lower bound of the smallest stride that was reported in rounds that are not unknown; None if
    # no device reported a second time.
    min_sep: int | None = None
    max_participations: int = 0  # Upper bound of the largest number of times in these rounds.
    unknown_rounds: int = 0  # Number of rounds whose sums no devices could have made.
    contradicting_reports: int = 0  # Number of reports with a stride below the declared one.
    contradicting_rounds: int = 0  # Number of rounds with such a report.
    skipped_rounds: int = 0  # Number of skipped rounds, of which nothing was released.

    def __post_init__(self):
        self.participation()  # Checks them.
        counts = "unknown_rounds", "contradicting_reports", "contradicting_rounds", "skipped_rounds"
        for name in counts:
            validation.integer(name, getattr(self, name), minimum=0)

    def with_round(
        self,
        buckets: ParticipationBuckets,
        strides: np.ndarray,
        times: np.ndarray,
        *,
        declared_min_sep: int,
    ) -> ObservedRounds:
        """Adds a round that is about to be committed; O(number of buckets).

        The vectors are sums over the devices whose update was summed. Strides below
        `declared_min_sep` are counted as contradicting. A number of times above the declared one
        has no bucket. It raises ValueError if no devices could have made these sums.
        """
        stride, most = buckets.decode(strides, times)
        contradicting = int(np.sum(strides[1 : 1 + buckets.below(declared_min_sep)]))
        smallest = [s for s in (self.min_sep, stride) if s is not None]
        num_rounds = self.num_rounds + 1
        # Devices also count abandoned rounds, but no device was in more rounds than there were.
        most = min(most, num_rounds)
        return dataclasses.replace(
            self,
            num_rounds=num_rounds,
            min_sep=min(smallest, default=None),
            max_participations=max(self.max_participations, most),
            contradicting_reports=self.contradicting_reports + contradicting,
            contradicting_rounds=self.contradicting_rounds + (contradicting > 0),
        )

    def with_unknown_round(self) -> ObservedRounds:
        """Adds a round whose histograms show nothing: any device may have been in it.

        The evidence of the other rounds stays, so that one dishonest device cannot hide it.
        """
        return dataclasses.replace(
            self, num_rounds=self.num_rounds + 1, unknown_rounds=self.unknown_rounds + 1
        )

    def with_skipped_round(self) -> ObservedRounds:
        """Adds a skipped round, of which nothing is released."""
        return dataclasses.replace(
            self, num_rounds=self.num_rounds + 1, skipped_rounds=self.skipped_rounds + 1
        )

    def participation(self) -> observed_lib.Participation:
        """Converts the summary to what statements take."""
        return observed_lib.Participation(self.num_rounds, self.min_sep, self.max_participations)


def _octaves(largest: int) -> list[int]:
    """Returns distinct integers from 1 up to `largest`, about four for every doubling."""
    steps = math.ceil(math.log2(largest) * _BUCKETS_PER_OCTAVE) + 1 if largest > 1 else 1
    return sorted({min(largest, round(2 ** (step / _BUCKETS_PER_OCTAVE))) for step in range(steps)})
