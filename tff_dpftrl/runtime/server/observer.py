"""What a server tells whoever watches it: events and counts, never who a device is."""

from __future__ import annotations

from typing import Any

from tff_dpftrl.runtime.protocol import wire_pb2


class Observer:
    """Hears of everything on the server's event loop; must not block. This one does nothing."""

    def hear(self, now: float, event: Any) -> None:
        """An event of the actors.

        Args:
          now: Seconds since 1970.
          event: What actors send to `events.OBSERVER`: `Leading`, `SelectionOpened`,
            `RoundBegan`, `RoundReleased`, `RoundSkipped`, `RoundLost`, `TooFewDevices`,
            `StoreFailed`.
        """

    def session_opened(self) -> None:
        """A device has connected."""

    def session_refused(self, reason: str) -> None:
        """A session was ended with an error.

        Args:
          reason: One of few: an attestation's `Verdict` value, or a few words.
        """

    def waiting(self) -> None:
        """A device that has checked in waits to be selected."""

    def sent_away(self, reason: str, has_waited: bool) -> None:
        """A device was told to come back.

        Args:
          reason: One of few.
          has_waited: Whether it was among those that `waiting` told of.
        """

    def configured(self, task: str, num_bytes: int) -> None:
        """A device takes part, and was sent so many bytes."""

    def reported(self, task: str, refusal: str, num_bytes: int) -> None:
        """A report came; `refusal` is empty if it counts."""

    def session_closed(self, phase: str) -> None:
        """A stream has ended, in any way.

        Args:
          phase: Where it was: "refused", "sent away", "connecting", "waiting", "training" or
            "reported". A device that ends in "connecting", "waiting" or "training" has
            dropped out.
        """

    def told(self, summary: wire_pb2.SessionSummary) -> None:
        """A device told how a session of its went; checked to be in range."""
