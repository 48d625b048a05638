"""What happened in a session, as the string of events of paper 004 (section 5, table 1).

`-v[]+^` is a session that did all it should; `-v[!` one that was interrupted while it
trained. Devices send the shape of their last session and servers count them: a new shape, or
more of a bad one, tells where something is wrong, and nothing of who it happened to.
"""

from __future__ import annotations

import enum

from tff_dpftrl import validation


class Event(str, enum.Enum):
    """One event; the value is its character."""

    CHECKED_IN = "-"
    PLAN_DOWNLOADED = "v"
    TRAINING_STARTED = "["
    TRAINING_ENDED = "]"
    UPLOAD_STARTED = "+"
    UPLOAD_COMPLETED = "^"
    REFUSED = "#"  # By the server: no work for this device, or its report did not count.
    INTERRUPTED = "!"  # By the device: it may not work any more, or not for this round.
    ERROR = "*"
    ATTESTATION_FAILED = "?"


_STEPS = "-v[]+^"
# Which end may follow each step. A session may end before it begins, by the device.
_ENDS = {"": "!", "-": "#!*?", "-v": "!*", "-v[": "!*", "-v[]": "!*", "-v[]+": "#!*"}

SHAPES = frozenset({_STEPS, *(done + end for done, ends in _ENDS.items() for end in ends)})
"""Every shape that a session can have: what a server counts, and whatever else it is told
(by a device of another version, or a hostile one) it counts as "other"."""


class SessionShape:
    """Collects the events of one session, which can only come in their order."""

    def __init__(self):
        """Starts with no event."""
        self._events = ""

    def __str__(self) -> str:
        return self._events

    @property
    def is_complete(self) -> bool:
        """Whether the session has ended."""
        return self._events in SHAPES

    def add(self, event: Event) -> None:
        """Adds the next event.

        Args:
          event: What happened.

        Raises:
          ValueError: If it cannot come next.
        """
        events = self._events + event.value
        if events not in SHAPES and not _STEPS.startswith(events):
            raise validation.UsageError(
                f"event {event.name} cannot follow {self._events!r} in a session."
            )
        self._events = events
