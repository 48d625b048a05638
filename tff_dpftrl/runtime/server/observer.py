"""Observer of a server: callbacks for events and counts, never for a device's identity."""

from __future__ import annotations

from typing import Any

from tff_dpftrl.runtime.protocol import wire_pb2


class Observer:
    """Callbacks on the server's event loop, which must not block; by default they do nothing."""

    def on_event(self, now: float, event: Any) -> None:
        """Handles an event (`actors.events`) that an actor sent at `now`, in seconds since 1970."""

    def session_opened(self) -> None:
        """Counts a device that has connected."""

    def session_refused(self, reason: str) -> None:
        """Counts a session that was ended with an error.

        The reason is one of a fixed set: an attestation's `Verdict` value, or a few words.
        """

    def waiting(self) -> None:
        """Counts a device that has checked in and waits to be selected."""

    def sent_away(self, reason: str, has_waited: bool) -> None:
        """Counts a device that was asked to come back, for a reason of a fixed set.

        `has_waited` tells whether the device was counted by `waiting`.
        """

    def configured(self, task: str, num_bytes: int) -> None:
        """Counts a device that takes part, and the size of its configuration."""

    def sent(self, task: str, num_bytes: int) -> None:
        """Counts what a device that takes part is sent besides its configuration."""

    def reported(self, task: str, refusal: str, num_bytes: int) -> None:
        """Counts a report of a size; `refusal` is the reason of the refusal, empty if it counts."""

    def session_closed(self, phase: str) -> None:
        """Counts a session whose stream has ended, for any reason, in its last phase.

        The phase is "refused", "sent away", "connecting", "waiting", "training" or "reported". A
        device that ends in "connecting", "waiting" or "training" has dropped out. It is "noise
        party" if the session has turned out to be that of no device, and counts no more.
        """

    def session_summarized(self, summary: wire_pb2.SessionSummary) -> None:
        """Counts a summary that a device sent of one of its sessions; its values are in range."""
