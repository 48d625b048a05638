"""The shape of a session: its events as a string, as in paper 004 (section 5, table 1).

`-v[]+^` is a complete session; `-v[!` is one that was interrupted during training. Devices send
the shape of their last session and servers count them. A new shape, or more sessions of a bad
one, shows where something is wrong, without identifying a device.
"""

from __future__ import annotations

import enum

from tff_dpftrl import validation


class Event(str, enum.Enum):
    """Event of a session; the value is its character."""

    CHECKED_IN = "-"
    PLAN_DOWNLOADED = "v"
    TRAINING_STARTED = "["
    TRAINING_ENDED = "]"
    UPLOAD_STARTED = "+"
    UPLOAD_COMPLETED = "^"
    REFUSED = "#"  # The server has no work for this device, or refused its report.
    INTERRUPTED = "!"  # The device is not eligible, or its timer refused the round.
    ERROR = "*"
    ATTESTATION_FAILED = "?"


_STEPS = "-v[]+^"
# Events that may end a session after each step. The device may end it before it begins.
_ENDS = {"": "!", "-": "#!*?", "-v": "!*", "-v[": "!*", "-v[]": "!*", "-v[]+": "#!*"}

SHAPES = frozenset({_STEPS, *(done + end for done, ends in _ENDS.items() for end in ends)})
"""All possible shapes. A server counts any other text, which a device of another version or a
hostile one may send, as "other"."""


class SessionShape:
    """The events of one session so far, in their only possible order."""

    def __init__(self):
        """Starts with no event."""
        self._events = ""

    def __str__(self) -> str:
        return self._events

    def add(self, event: Event) -> None:
        """Adds the next event; raises ValueError if it cannot follow the events so far."""
        events = self._events + event.value
        if events not in SHAPES and not _STEPS.startswith(events):
            raise validation.UsageError(
                f"event {event.name} cannot follow {self._events!r} in a session."
            )
        self._events = events
