"""What a round's devices say together about how often, and how closely, they take part.

The server keeps no list of devices, and the statement needs MinS and MaxP all the same. So
every report carries two small vectors of integers beside its update: in the first a one at
the bucket of "rounds since my last time" (or "never before"), in the second a one at the
bucket of "times so far, with this one". They are added like the update, inside the same
(secure) sum: the server learns how many devices fell into each bucket and nobody's history.

Buckets are declared before training and the same for all. What is decoded errs on the safe
side: the lower edge of the smallest bucket that is not empty for the stride, the upper edge
of the largest for the number of times.

The histograms are evidence, and nothing is charged by them. A device whose software keeps to
the signed plan enforces the declared limits by its own timer, whatever other devices report; so
ε is that of the declared schema, for every such device. A report below the declared stride
therefore comes from a device that lies, or whose timer was wiped or whose software is broken:
it is counted and shown beside ε, with the ε that it would mean. Charging by it would let one
liar change the statement for everybody, and for good.

The evidence is incomplete. Where sums are secure, nobody can see that a vector is no one-hot: a
device that puts -1 where another has put 1 hides the other. Sums that no devices can make are
counted as unknown rounds. `check_one_hot` refuses such vectors wherever single reports can be
seen. A device whose timer was wiped reports "never before" and is not seen at all.

The sums are exact, and no noise is added to them. The server should keep the few numbers
that come out (`ObservedRounds`), not the sums.
"""

from __future__ import annotations

import bisect
import dataclasses
import math

import numpy as np

from tff_dpftrl import validation
from tff_dpftrl.participation import observed as observed_lib
from tff_dpftrl.participation import schema as schema_lib

_BUCKETS_PER_OCTAVE = 4  # An edge is at most 19 % beside the truth.


@dataclasses.dataclass(frozen=True)
class ParticipationBuckets:
    """The declared buckets of both histograms.

    Attributes:
      stride_edges: Smallest stride (rounds since the last time, j - i) of each bucket,
        increasing from 1; the last bucket has no end. One more bucket, the first of the
        vector, is for devices that have never taken part.
      times_edges: Largest number of times of each bucket, increasing from 1; the last is
        the number after which a device takes part no more.
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
        """Buckets that are exact where the declared limits are, and fine between.

        Args:
          declared: The participation schema that the task promises.

        Returns:
          Buckets with an edge at `min_sep` and at `max_participations`, and four an octave
          elsewhere: 40 or so for 2,000 rounds.
        """
        strides = {*_octaves(declared.num_rounds), min(declared.min_sep, declared.num_rounds)}
        return cls(tuple(sorted(strides)), tuple(_octaves(declared.max_participations)))

    @property
    def shapes(self) -> tuple[tuple[int], tuple[int]]:
        """Shapes of the two vectors."""
        return (len(self.stride_edges) + 1,), (len(self.times_edges),)

    def below(self, stride: int) -> int:
        """How many of the first buckets of strides hold smaller ones only."""
        return max(bisect.bisect_right(self.stride_edges, stride) - 1, 0)

    def encode(self, stride: int | None, times: int) -> tuple[np.ndarray, np.ndarray]:
        """The two vectors of one device.

        Args:
          stride: Rounds since it last took part; None if it never did.
          times: How often it has taken part, this time included.

        Returns:
          Both one-hot, int32, of `shapes`.

        Raises:
          ValueError: If `stride` or `times` is below 1, `times` is above the last edge, or
            the two contradict each other.
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
        """Refuses the vectors of one device unless `encode` could have made them.

        Args:
          strides: The first vector, integers.
          times: The second.

        Raises:
          ValueError: If one has another shape or is no one-hot, or they contradict each other.
        """
        summed = self._checked(strides, times)
        if summed[0].sum() != 1:
            raise validation.UsageError(f"strides must be one-hot, sums to {summed[0].sum()}.")

    def decode(self, strides: np.ndarray, times: np.ndarray) -> tuple[int | None, int]:
        """Smallest stride and largest number of times of a round, erring on the safe side.

        Args:
          strides: Sum of the first vectors of all devices whose update was summed.
          times: Sum of the second.

        Returns:
          A lower bound of the smallest stride, None if all took part for the first time; and
          an upper bound of the largest number of times, 0 if there was no device.

        Raises:
          ValueError: If no devices could have added up to this. Nothing is known about the
            round then; see `ObservedRounds.with_unknown_round`.
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
    """What the sums of all committed rounds have shown; for the task's state.

    Attributes:
      num_rounds: Number of committed rounds.
      min_sep: Lower bound of the smallest stride that was reported in rounds that are not
        unknown; None if nobody reported a second time.
      max_participations: Upper bound of the largest number of times reported in these rounds.
      unknown_rounds: Number of rounds whose sums no devices could have made.
      contradicting_reports: Number of reports with a stride below the declared one.
      contradicting_rounds: Number of rounds with such a report.
      skipped_rounds: Number of rounds that were skipped: nothing of them was released.
    """

    num_rounds: int = 0
    min_sep: int | None = None
    max_participations: int = 0
    unknown_rounds: int = 0
    contradicting_reports: int = 0
    contradicting_rounds: int = 0
    skipped_rounds: int = 0

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

        Args:
          buckets: The declared buckets.
          strides: Sum of the first vectors of the devices whose update was summed.
          times: Sum of the second.
          declared_min_sep: Smallest stride that the plan allows; smaller ones are counted. No
            number of times above the declared one can be reported: it has no bucket.

        Returns:
          The summary that includes the round.

        Raises:
          ValueError: If no devices could have added up to this.
        """
        stride, most = buckets.decode(strides, times)
        contradicting = int(np.sum(strides[1 : 1 + buckets.below(declared_min_sep)]))
        smallest = [s for s in (self.min_sep, stride) if s is not None]
        num_rounds = self.num_rounds + 1
        # Devices also count rounds that were abandoned; nobody was in more than there were.
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
        """Adds a round whose histograms show nothing: anybody may have been in it.

        Returns:
          The summary, with one unknown round more. What the other rounds have shown stays, so
          that one dishonest device cannot hide it.
        """
        return dataclasses.replace(
            self, num_rounds=self.num_rounds + 1, unknown_rounds=self.unknown_rounds + 1
        )

    def with_skipped_round(self) -> ObservedRounds:
        """Adds a round of which nothing is released: no report is in any sum of it."""
        return dataclasses.replace(
            self, num_rounds=self.num_rounds + 1, skipped_rounds=self.skipped_rounds + 1
        )

    def participation(self) -> observed_lib.Participation:
        """The same as statements take it."""
        return observed_lib.Participation(self.num_rounds, self.min_sep, self.max_participations)


def _octaves(largest: int) -> list[int]:
    """Distinct integers from 1 up to `largest`, about four for every doubling."""
    steps = math.ceil(math.log2(largest) * _BUCKETS_PER_OCTAVE) + 1 if largest > 1 else 1
    return sorted({min(largest, round(2 ** (step / _BUCKETS_PER_OCTAVE))) for step in range(steps)})
