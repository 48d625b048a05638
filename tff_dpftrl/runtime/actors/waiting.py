"""The devices that wait at a Selector, by the network address that they connect from."""

from __future__ import annotations

import collections
import random
from collections.abc import Iterator


class Waiting:
    """Waiting devices. All methods but `evenly` take a time that does not grow with the number."""

    def __init__(self, randomness: random.Random):
        """Begins without devices; all choices come from `randomness`."""
        self._random = randomness
        self._tasks: dict[str, frozenset[str]] = {}
        self._peer_of: dict[str, str] = {}
        self._of_peer: dict[str, _Bag] = collections.defaultdict(_Bag)
        self._peers_with: dict[int, _Bag] = collections.defaultdict(_Bag)
        self._most = 0  # Largest number of devices of one peer.

    def __len__(self) -> int:
        """Returns the number of waiting devices."""
        return len(self._tasks)

    def __iter__(self) -> Iterator[str]:
        """Iterates over the devices."""
        return iter(self._tasks)

    def __contains__(self, device: str) -> bool:
        """Returns whether a device waits."""
        return device in self._tasks

    def can_run(self, device: str, task: str) -> bool:
        """Returns whether a waiting device can run a task."""
        return task in self._tasks[device]

    def add(self, device: str, tasks: frozenset[str], peer: str) -> None:
        """Adds a device that does not wait yet; `peer` names its network address."""
        self._tasks[device] = tasks
        self._peer_of[device] = peer
        others = self._of_peer[peer]
        if others:
            self._peers_with[len(others)].remove(peer)
        others.add(device)
        self._peers_with[len(others)].add(peer)
        self._most = max(self._most, len(others))

    def remove(self, device: str) -> None:
        """Removes a device; does nothing if it does not wait."""
        if self._tasks.pop(device, None) is None:
            return
        peer = self._peer_of.pop(device)
        others = self._of_peer[peer]
        self._peers_with[len(others)].remove(peer)
        if not self._peers_with[self._most]:  # The peer was the only one with the most devices.
            self._most -= 1
        others.remove(device)
        if others:
            self._peers_with[len(others)].add(peer)
        else:
            del self._of_peer[peer]

    def is_crowded(self, device: str) -> bool:
        """Returns whether no peer has more devices than the peer of a waiting device."""
        return len(self._of_peer[self._peer_of[device]]) == self._most

    def crowded(self) -> str:
        """Returns a random device of those whose peers have the most devices."""
        peer = self._peers_with[self._most].choice(self._random)
        return self._of_peer[peer].choice(self._random)

    def evenly(self, count: int, task: str) -> list[str]:
        """Chooses devices in turns: one of each peer, then a second one of each, and so on.

        They are chosen at random within a peer, and among the peers in a last turn that does not
        reach all of them.
        """
        able = [device for device, tasks in self._tasks.items() if task in tasks]
        self._random.shuffle(able)
        turns: collections.Counter[str] = collections.Counter()
        turn_of = {}
        for device in able:
            peer = self._peer_of[device]
            turn_of[device] = turns[peer]
            turns[peer] += 1
        able.sort(key=turn_of.__getitem__)  # Stable: at random within a turn.
        return able[:count]


class _Bag:
    """Set that draws a random element in constant time."""

    def __init__(self):
        self._items: list[str] = []
        self._place: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._items)

    def add(self, item: str) -> None:
        self._place[item] = len(self._items)
        self._items.append(item)

    def remove(self, item: str) -> None:
        place = self._place.pop(item)
        last = self._items.pop()
        if last != item:
            self._items[place] = last
            self._place[last] = place

    def choice(self, randomness: random.Random) -> str:
        return randomness.choice(self._items)
