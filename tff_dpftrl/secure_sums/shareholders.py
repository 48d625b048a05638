"""Holders of the shares of each device's secrets in a group, and what they can recover."""

from __future__ import annotations

import math
from collections.abc import Iterable, Set

from tff_dpftrl.secure_sums import neighbours, parameters

_ROUNDING = 1e-9  # 0.57 of 100 shares are 57, though not in binary fractions.


def threshold(num_members: int, threat_model: parameters.ThreatModel, fraction: float) -> int:
    """Computes the number of shares, at most `num_members`, that recover a secret.

    The threat model sets the least threshold. It is above `fraction`, in [0, 1), of the holders,
    the secret's owner included.
    """
    above = math.floor(fraction * num_members + _ROUNDING) + 1
    return min(max(above, threat_model.least_threshold(num_members)), num_members)


class Shareholders:
    """Members of each device (its neighbours and itself), and the threshold of its shares.

    Attributes:
      members: Indices of the holders of a device's shares, by the index of the device.
      points: Points of a device's shares, by the index of the device and of the holder: 1 for the
        lowest holder, 2 for the next.
      thresholds: Numbers of shares that recover a device's secret, by the index of the device.
    """

    def __init__(
        self,
        num_devices: int,
        num_neighbours: int | None,
        threat_model: parameters.ThreatModel,
        threshold_fraction: float,
    ):
        """Draws a graph of neighbours.

        Where the number of neighbours is not possible, the next one is taken; None for all other
        devices. Thresholds are above `threshold_fraction`, in [0, 1), of the members.
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
        """Returns the largest subset in which each device has its threshold of members."""
        staying, to_check = set(present), set(present)
        while to_check:
            leaving = {index for index in to_check if not self.recoverable(index, staying)}
            staying -= leaving
            to_check = staying & set().union(*(self.members[index] for index in leaving))
        return staying

    def recoverable(self, owner: int, holders: Set[int]) -> bool:
        """Checks whether some holders have enough shares of an owner's secrets."""
        return len(self.members[owner] & holders) >= self.thresholds[owner]

    def with_present_neighbours(self, owners: Iterable[int], present: Set[int]) -> list[int]:
        """Returns the owners that have a member among the present devices, by index."""
        return sorted(owner for owner in owners if self.members[owner] & present)

    def is_connected(self, present: Set[int]) -> bool:
        """Checks whether the graph of some devices, at least one, is connected."""
        reached: set[int] = set()
        edge = {min(present)}
        while edge:
            reached |= edge
            edge = (set().union(*(self.members[index] for index in edge)) & present) - reached
        return reached == present


def _points(members: Iterable[int]) -> dict[int, int]:
    return {member: point for point, member in enumerate(sorted(members), start=1)}
