"""Observer of a server: callbacks for events and counts, never for a device's identity."""

from __future__ import annotations

from typing import Any

from tff_dpftrl.runtime.protocol import wire_pb2


class Observer:
    """Callbacks on the server's event loop, which must not block; by default they do nothing."""

    def on_event(self, now: float, event: Any) -> None:
        """Handles an event that an actor has sent to `events.OBSERVER`.

        Args:
          now: Time in seconds since 1970.
          event: One of the classes in `actors.events`.
        """

    def session_opened(self) -> None:
        """Counts a device that has connected."""

    def session_refused(self, reason: str) -> None:
        """Counts a session that was ended with an error.

        Args:
          reason: One of a fixed set: an attestation's `Verdict` value, or a few words.
        """

    def waiting(self) -> None:
        """Counts a device that has checked in and waits to be selected."""

    def sent_away(self, reason: str, has_waited: bool) -> None:
        """Counts a device that was asked to come back.

        Args:
          reason: One of a fixed set.
          has_waited: Whether the device was counted by `waiting`.
        """

    def configured(self, task: str, num_bytes: int) -> None:
        """Counts a device that takes part.

        Args:
          task: Name of the task.
          num_bytes: Size of the configuration that is sent to the device.
        """

    def sent(self, task: str, num_bytes: int) -> None:
        """Counts what a device that takes part is sent besides its configuration.

        Args:
          task: Name of the task.
          num_bytes: Size of the message.
        """

    def reported(self, task: str, refusal: str, num_bytes: int) -> None:
        """Counts a report.

        Args:
          task: Name of the task.
          refusal: Reason of the refusal; empty if the report counts.
          num_bytes: Size of the report.
        """

    def session_closed(self, phase: str) -> None:
        """Counts a session whose stream has ended, for any reason.

        Args:
          phase: Last phase of the session: "refused", "sent away", "connecting", "waiting",
            "training" or "reported". A device that ends in "connecting", "waiting" or "training"
            has dropped out. "noise party" if it has turned out to be no device, and counts no more.
        """

    def session_summarized(self, summary: wire_pb2.SessionSummary) -> None:
        """Counts a summary that a device sent of one of its sessions; its values are in range."""
