"""Who holds shares of whose secrets in a group, and what that allows when devices are gone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Set

from tff_dpftrl.secure_sums import neighbours, parameters

_ROUNDING = 1e-9  # 0.57 of 100 shares are 57, though not in binary fractions.


def threshold(num_members: int, threat_model: parameters.ThreatModel, fraction: float) -> int:
    """How many of the shares of a secret recover it.

    Args:
      num_members: How many devices hold one, its owner included.
      threat_model: Sets the least that devices accept.
      fraction: The threshold is above this fraction of the members, in [0, 1).

    Returns:
      The threshold; all members at most.
    """
    above = math.floor(fraction * num_members + _ROUNDING) + 1
    return min(max(above, threat_model.least_threshold(num_members)), num_members)


class Shareholders:
    """Each device's members, its neighbours and itself, and the threshold of its shares.

    Attributes:
      members: By index, the indices of all that hold shares of that device's secrets.
      points: By index, the points of that device's shares by the index of who holds them: 1 for
        the lowest, 2 for the next.
      thresholds: By index, how many of these shares recover a secret.
    """

    def __init__(
        self,
        num_devices: int,
        num_neighbours: int | None,
        threat_model: parameters.ThreatModel,
        threshold_fraction: float,
    ):
        """Draws a graph of neighbours.

        Args:
          num_devices: In the group, at least 2.
          num_neighbours: Of each device, or as close as there is a graph; None for all.
          threat_model: Sets the least thresholds.
          threshold_fraction: Thresholds are above this fraction of the members, in [0, 1).
        """
        degree = num_devices - 1 if num_neighbours is None else num_neighbours
        degree += degree % 2 * (num_devices % 2)  # No graph has an odd number of odd degrees.
        if degree < num_devices - 1:
            graph = neighbours.random_neighbours(num_devices, degree)
            self.members = [frozenset((*others, i)) for i, others in enumerate(graph)]
            self.points = [_points(members) for members in self.members]
        else:
            self.members = [frozenset(range(num_devices))] * num_devices
            self.points = [_points(range(num_devices))] * num_devices
        self.thresholds = [
            threshold(len(members), threat_model, threshold_fraction) for members in self.members
        ]

    def with_enough(self, present: Set[int]) -> set[int]:
        """The largest part of some devices in which each has its threshold of members."""
        staying, to_check = set(present), set(present)
        while to_check:
            leaving = {index for index in to_check if not self.recoverable(index, staying)}
            staying -= leaving
            to_check = staying & set().union(*(self.members[index] for index in leaving))
        return staying

    def recoverable(self, owner: int, holders: Set[int]) -> bool:
        """Whether some devices hold enough shares of one's secrets."""
        return len(self.members[owner] & holders) >= self.thresholds[owner]

    def with_present_neighbours(self, owners: Iterable[int], present: Set[int]) -> list[int]:
        """Those of some devices that have a member among others, by index."""
        return sorted(owner for owner in owners if self.members[owner] & present)

    def is_connected(self, present: Set[int]) -> bool:
        """Whether some devices, at least one, hang together as neighbours of neighbours."""
        reached: set[int] = set()
        edge = {min(present)}
        while edge:
            reached |= edge
            edge = (set().union(*(self.members[index] for index in edge)) & present) - reached
        return reached == present


def _points(members: Iterable[int]) -> dict[int, int]:
    return {member: point for point, member in enumerate(sorted(members), start=1)}
