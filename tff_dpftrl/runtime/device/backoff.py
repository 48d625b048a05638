"""How long a device waits between sessions, and its back-off after failures."""

from __future__ import annotations

import dataclasses
import random

from tff_dpftrl import validation
from tff_dpftrl.runtime import exponential_backoff


@dataclasses.dataclass(frozen=True)
class Waits:
    """Waiting times of a device, in seconds."""

    # Time between sessions if the server assigns no turns. A device that has missed all its turns
    # tries again after a random time up to this, or up to twice the mean time between its turns if
    # that is longer.
    usual_s: float = 3600.0
    # Largest time before the first session. The time is random, so that devices that start together
    # (an update, the end of a power cut) do not check in together.
    first_s: float = 60.0
    after_failure_s: float = 30.0  # Back-off after the first failure, or after an interruption.
    longest_s: float = 24 * 3600.0  # Largest back-off.
    # Largest time of a turn that the server can assign. In a large population turns of a day and
    # more are usual.
    longest_turn_s: float = 3 * 24 * 3600.0

    def __post_init__(self):
        validation.positive("usual_s", self.usual_s)
        validation.number("first_s", self.first_s, at_least=0)
        validation.positive("after_failure_s", self.after_failure_s)
        validation.number("longest_s", self.longest_s, at_least=self.after_failure_s)
        validation.positive("longest_turn_s", self.longest_turn_s)

    def back_off_s(self, failures: int, generator: random.Random) -> float:
        """Draws the back-off in seconds: half to all of the exponential one after `failures`."""
        limit = exponential_backoff.exponential_s(failures, self.after_failure_s, self.longest_s)
        return exponential_backoff.jittered_s(limit, generator)
