"""Participation schemas: how often, and how closely spaced, one client may take part.

The guarantee of DP-FTRL rests on a *participation schema* instead of on random
sampling. `MinSep` is the schema of all five papers ("(k, b)-participation" in
McMahan, Xu & Zhang 2024, section 2).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tff_dpftrl import validation


class Breach(NamedTuple):
    """Limit of a schema, an attribute of `MinSep`, that participation exceeds."""

    limit: str
    allowed: int
    observed: int

    def __str__(self) -> str:
        excess = {
            "num_rounds": "{} rounds exceed",
            "min_sep": "a stride of {} rounds is below",
            "max_participations": "{} participations of one client exceed",
        }[self.limit].format(self.observed)
        return f"{excess} {self.limit}={self.allowed}"


_MOST = 2**53  # Larger numbers of rounds are not exact in the float64 of the accounting.


@dataclasses.dataclass(frozen=True)
class MinSep:
    """Schema: each client takes part at most `max_participations` times, `min_sep` apart.

    `min_sep` is a **stride**: any two rounds i < j of one client satisfy
    `j - i >= min_sep`, as in the BLT paper and in jax_privacy. TensorFlow
    Privacy, and the tables of the Gboard paper, count the rounds *in between*
    (`j - i - 1`, here called the gap): use `MinSep.from_gap` for those numbers.

    Attributes:
      num_rounds: Number of rounds n; rounds are numbered 0 ... n - 1.
      min_sep: Smallest allowed stride b between two rounds of one client.
      max_participations: Largest number k of rounds of one client.
    """

    num_rounds: int
    min_sep: int
    max_participations: int

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = validation.integer(field.name, getattr(self, field.name), minimum=1)
            if value > _MOST:
                raise validation.UsageError(
                    f"{field.name} must be at most 2^53, the largest exact float64, got {value}."
                )
            object.__setattr__(self, field.name, value)

    @classmethod
    def from_gap(cls, num_rounds: int, min_sep_gap: int, max_participations: int) -> MinSep:
        """Builds the schema from a *gap*, the number of rounds in between.

        Args:
          num_rounds: Number of rounds n.
          min_sep_gap: Smallest number of rounds strictly between two rounds of
            one client (`j - i - 1`); 0 allows consecutive rounds.
          max_participations: Largest number of rounds of one client.

        Returns:
          The schema with `min_sep = min_sep_gap + 1`.

        Raises:
          ValueError: If an argument is not an integer or out of range.
        """
        gap = validation.integer("min_sep_gap", min_sep_gap, minimum=0)
        return cls(num_rounds, gap + 1, max_participations)

    @classmethod
    def as_many_as_fit(cls, num_rounds: int, min_sep: int) -> MinSep:
        """Builds the schema in which only the stride limits how often a client takes part.

        Args:
          num_rounds: Number of rounds n.
          min_sep: Smallest allowed stride b between two rounds of one client.

        Returns:
          The schema with `max_participations = ⌈n / b⌉`.

        Raises:
          ValueError: If an argument is not an integer or out of range.
        """
        effective = cls(num_rounds, min_sep, num_rounds).effective_participations
        return cls(num_rounds, min_sep, effective)

    @classmethod
    def unrestricted(cls, num_rounds: int) -> MinSep:
        """Builds the schema that allows every client in every round.

        It is for runs whose guarantee rests on random sampling instead.
        """
        return cls(num_rounds, 1, num_rounds)

    @property
    def min_sep_gap(self) -> int:
        """Number of rounds strictly between two rounds of one client, `min_sep - 1`."""
        return self.min_sep - 1

    @property
    def effective_participations(self) -> int:
        """`max_participations`, or fewer if `num_rounds` has no room for them."""
        return min(self.max_participations, -(-self.num_rounds // self.min_sep))

    def allows(self, rounds: Sequence[int]) -> bool:
        """Returns whether one client may take part in exactly these rounds."""
        ordered = sorted(rounds)
        return (
            len(ordered) <= self.max_participations
            and all(0 <= t < self.num_rounds for t in ordered)
            and all(j - i >= self.min_sep for i, j in itertools.pairwise(ordered))
        )

    def breaches(
        self, *, num_rounds: int, min_sep: int | None, max_participations: int
    ) -> tuple[Breach, ...]:
        """Returns the limits of this schema that some participation exceeds.

        Args:
          num_rounds: Number of rounds that took place.
          min_sep: Smallest stride between two rounds of one client; None if no client
            took part twice.
          max_participations: Largest number of rounds of one client.

        Returns:
          At most one `Breach` for each limit; empty if the schema is kept.
        """
        breaches = []
        if num_rounds > self.num_rounds:
            breaches.append(Breach("num_rounds", self.num_rounds, num_rounds))
        if min_sep is not None and min_sep < self.min_sep:
            breaches.append(Breach("min_sep", self.min_sep, min_sep))
        if max_participations > self.max_participations:
            breaches.append(
                Breach("max_participations", self.max_participations, max_participations)
            )
        return tuple(breaches)

    def patterns(self) -> Iterator[tuple[int, ...]]:
        """Yields every allowed, non-empty set of rounds; exponentially many."""

        def extend(prefix: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
            start = prefix[-1] + self.min_sep if prefix else 0
            for t in range(start, self.num_rounds):
                pattern = (*prefix, t)
                yield pattern
                if len(pattern) < self.max_participations:
                    yield from extend(pattern)

        return extend(())
