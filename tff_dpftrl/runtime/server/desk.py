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
      name: Name of the population.
      tasks: Tasks of the population by name.
      selector: Address of the Selector that gets its devices.
      observer: Callbacks for its sessions.
      admission: Checks of its devices when they check in.
      summaries: Bounds on the summaries of its sessions.
      has_secure_sums: Whether a task of it has secure sums.
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

        Args:
          served: The population.
          selector: Address of the Selector that gets its devices.
          attestation: Verifier of devices' tokens; with None, every connection counts as a device.
          server_names: Names under which devices may know the server, for their tokens.
          limits: Limits on what devices may use.
          clock: Function that returns the seconds since 1970.
          randomness: Source of randomness for the pace.
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
