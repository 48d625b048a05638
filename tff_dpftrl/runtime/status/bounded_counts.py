"""Counters by label, with a bounded number of labels."""

from __future__ import annotations

import collections
from collections.abc import Iterable

OTHER = "other"
_MAX_LENGTH = 60


class BoundedCounts:
    """Counters of known labels and of the first further ones; all others count as "other"."""

    def __init__(self, known: Iterable[str] = (), *, room: int = 0):
        """Starts all counters at zero.

        Args:
          known: Labels that always have a counter.
          room: Largest number of further labels.
        """
        self._known = frozenset(known)
        self._room = room
        self._counts: collections.Counter[str] = collections.Counter()

    def add(self, label: str, count: int = 1) -> None:
        """Counts a label; a long one counts as "other"."""
        if label not in self._counts and label not in self._known:
            if self._room and len(label) <= _MAX_LENGTH and label != OTHER:
                self._room -= 1
            else:
                label = OTHER
        self._counts[label] += count

    def items(self) -> list[tuple[str, int]]:
        """Returns labels and counts, the most frequent first."""
        return sorted(self._counts.items(), key=lambda item: (-item[1], item[0]))

    def total(self) -> int:
        """Returns the sum of all counters."""
        return self._counts.total()
