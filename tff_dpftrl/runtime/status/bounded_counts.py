"""Counts by label, of which there can only be so many."""

from __future__ import annotations

import collections
from collections.abc import Iterable

OTHER = "other"
_LONGEST = 60


class BoundedCounts:
    """Counts labels that are known, a number of others as they come, and the rest as "other"."""

    def __init__(self, known: Iterable[str] = (), *, room: int = 0):
        """Starts with nothing counted.

        Args:
          known: Labels that always have a place.
          room: How many others get one.
        """
        self._known = frozenset(known)
        self._room = room
        self._counts: collections.Counter[str] = collections.Counter()

    def add(self, label: str, count: int = 1) -> None:
        """Counts a label; a long one counts as "other"."""
        if label not in self._counts and label not in self._known:
            if self._room and len(label) <= _LONGEST and label != OTHER:
                self._room -= 1
            else:
                label = OTHER
        self._counts[label] += count

    def items(self) -> list[tuple[str, int]]:
        """Labels and counts, the most frequent first."""
        return sorted(self._counts.items(), key=lambda item: (-item[1], item[0]))

    def total(self) -> int:
        """All that was counted."""
        return self._counts.total()
