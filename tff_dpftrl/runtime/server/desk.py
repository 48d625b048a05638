"""State that the sessions of one population share, in a service of several populations."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from tff_dpftrl.runtime.actors import events, messages
from tff_dpftrl.runtime.protocol import attestation as attestation_lib
from tff_dpftrl.runtime.server import admission, served_population, summaries
from tff_dpftrl.runtime.server import limits as limits_lib


class Desk:
    """Shared state of the sessions of a population.

    Attributes:
      selector: Address of the Selector that gets its devices.
      opening: Its open selection, as far as known; the challenge of each session names it.
    """

    def __init__(
        self,
        served: served_population.ServedPopulation,
        selector: str,
        *,
        attestation: attestation_lib.Attestation | None,
        server_names: Sequence[str],
        limits: limits_lib.Limits,
        clock: Callable[[], float],
        randomness: random.Random,
    ):
        """Begins without sessions.

        With `attestation` None, every connection counts as a device. `server_names` are those under
        which devices may know the server, for their tokens. The clock returns the seconds since
        1970; the pace is drawn from `randomness`.
        """
        self.name = served.name
        self.tasks = served.tasks
        self.selector = selector
        self.observer = served.observer
        self.admission = admission.Admission(served.name, served.tasks, attestation, server_names)
        longest = max(task.task.longest for task in served.tasks.values())
        self.summaries = summaries.Shares(limits.waiting_seconds + longest, time.monotonic)
        self.has_secure_sums = any(task.task.secure_sum for task in served.tasks.values())
        self.opening = events.SelectionOpened("", 0)
        self._pace, self._clock, self._random = served.pace, clock, randomness

    def turns(self) -> tuple[float, ...]:
        """Draws when a device is to check in again, in seconds from now."""
        return self._pace(self._clock(), self._random)

    def come_back(self, device: str, reason: str) -> messages.ComeBack:
        """Makes the message that sends a device away."""
        return messages.ComeBack(device, self.turns(), reason)
