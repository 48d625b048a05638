"""How fast a task's rounds come, as a device sees them: how long to rest when none may follow soon.

A device that has taken part must let `min_sep` rounds pass. If it came back before, the server
would choose it, send plan and model, and lose it: so it reckons when they will have passed,
from the rounds that it has seen, and lets its turns before that go. The server hears nothing.
"""

from __future__ import annotations

import threading

from tff_dpftrl.runtime.device import participation_timer

_MARGIN = 1.1
_ROUND_PER_SESSION = 2.0  # A device is chosen at any time of a selection, and waits for its end.
_HOUR_S = 3600.0


class RoundPace:
    """What one device has seen of rounds, since its process began."""

    def __init__(self):
        """Has seen none."""
        self._seen: dict[tuple[str, str], tuple[tuple[int, float], tuple[int, float]]] = {}
        self._lock = threading.Lock()

    def see(self, population: str, task: str, round_index: int, now: float) -> None:
        """Notes that the device was chosen for a round.

        Args:
          population: Name of the population.
          task: Name of the task.
          round_index: The round.
          now: Seconds, never going back.
        """
        with self._lock:
            key, latest = (population, task), (round_index, now)
            before, last = self._seen.get(key, (latest, latest))
            if round_index < last[0]:  # A task that began anew.
                self._seen[key] = (latest, latest)
            elif round_index > last[0]:
                self._seen[key] = (last, latest)
            else:
                self._seen[key] = (before, last)

    def rest_s(
        self,
        population: str,
        task: str,
        rule: participation_timer.ParticipationRule,
        *,
        session_s: float,
    ) -> float:
        """Seconds to rest after the latest round that was seen.

        Args:
          population: Name of the population.
          task: Name of the task.
          rule: What its plan asks.
          session_s: Seconds that the session took, waiting included: half a round or so, to
            whom has seen no other.

        Returns:
          Seconds, a little more than it should take; 0 if the population has other tasks, for
          which the device need not rest.
        """
        with self._lock:
            if {key for key in self._seen if key[0] == population} != {(population, task)}:
                return 0.0
            (first, began), (last, latest) = self._seen[population, task]
        if last == first:
            round_s = _ROUND_PER_SESSION * session_s
        else:
            round_s = (latest - began) / (last - first)
        return max(_MARGIN * rule.min_sep * round_s, rule.min_hours * _HOUR_S)
