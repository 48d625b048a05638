"""The Selector: holds the devices that wait, and sees to it that somebody leads."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeAlias

from tff_dpftrl.runtime.actors import actor, messages, population, roles, waiting

Pace: TypeAlias = Callable[[float, random.Random], tuple[float, ...]]
"""Given the time and randomness, says when a device is to check in again: seconds from now,
growing, of which the device takes the first one that it can. Called from any thread."""

_CHECK = "check that somebody leads"


class Selector(actor.Actor):
    """Chooses among the devices that connect to it: evenly among addresses, then at random.

    At most as many devices wait as the next round wants. Once so many wait, a further one takes
    the place of one whose network address has more devices waiting. Among addresses with equally
    many, reservoir sampling decides: a further device takes the place of a random one with the
    probability that makes all that came since the last round equally likely to be among those that
    wait. No guarantee of privacy rests on the choice: DP-FTRL holds for any choice of devices.

    It hears from the Coordinator again and again; when it does not, it spawns another one.
    All Selectors may do so at the same time: the lease decides which one leads.
    """

    def __init__(
        self,
        address: str,
        served: population.Population,
        randomness: random.Random,
        pace: Pace,
    ):
        """See `factory.ActorFactory.selector`."""
        super().__init__(address)
        self._served = served
        self._random = randomness
        self._pace = pace
        self._heard_at = 0.0
        self._wish = messages.SelectDevices(0, "", "", 0, False)
        self._last_serial = (0, 0)
        self._devices = waiting.Waiting(randomness)
        self._came = 0
        self._resting = 0

    def _begin(self) -> None:
        self._heard_at = -self._served.silence_seconds  # Nobody leads as far as it knows.
        self.after(self._random.uniform(0, self._served.heartbeat_seconds), _CHECK)

    def _receive(self, message: object) -> None:
        match message:
            case messages.CheckIn():
                self._check_in(message)
            case messages.SelectDevices():
                self._follow(message)
            case messages.ForwardDevices():
                self._forward(message)
            case messages.DeviceGone():
                self._devices.remove(message.device)
            case messages.DeviceRests():
                self._resting += 1
            case messages.Lost():
                if message.address == self._wish.coordinator:
                    self._spawn_coordinator()
            case str() if message == _CHECK:
                if self.now - self._heard_at >= self._served.silence_seconds:
                    self._spawn_coordinator()
                self.after(self._served.heartbeat_seconds, _CHECK)
            case _:
                raise self._unknown(message)

    def _spawn_coordinator(self) -> None:
        # No earlier start of this process, and no other one, has used the name.
        name = f"{self._served.name}/coordinator/{self._random.getrandbits(64):016x}"
        self.spawn(name, roles.CoordinatorRole())
        self._heard_at = self.now

    def _check_in(self, message: messages.CheckIn) -> None:
        device = message.device
        if device in self._devices:
            return
        if not self._wish.accepting:
            self._send_away(device, "no round is waiting for devices")
        elif self._wish.task not in message.tasks:
            self._send_away(device, "the next round is not for this version")
        else:
            self._came += 1
            self._devices.add(device, message.tasks, message.peer)
            if len(self._devices) == self._wish.wanted:
                self._tell_waiting()
            elif len(self._devices) > self._wish.wanted:
                self._turn_away(self._unlucky(device))

    def _unlucky(self, newcomer: str) -> str:
        """Chooses who does not wait any longer, where one more waits than is wanted."""
        if self._devices.is_crowded(newcomer):
            if self._random.randrange(self._came) >= self._wish.wanted:
                return newcomer
        unlucky = newcomer
        while unlucky == newcomer:
            unlucky = self._devices.crowded()
        return unlucky

    def _turn_away(self, device: str, reason: str = "enough devices are waiting") -> None:
        self._devices.remove(device)
        self._send_away(device, reason)

    def _send_away(self, device: str, reason: str) -> None:
        turns = self._pace(self.now, self._random)
        self.send(device, messages.ComeBack(device, turns, reason))

    def _follow(self, wish: messages.SelectDevices) -> None:
        if wish.epoch < self._wish.epoch:
            return  # A former Coordinator that does not know yet.
        self._heard_at = self.now
        before, self._wish = self._wish, wish
        if not wish.accepting:
            self._keep_only(lambda device: False, "no round is waiting for devices")
        elif wish.task != before.task:
            self._keep_only(
                lambda device: self._devices.can_run(device, wish.task),
                "the next round is not for this version",
            )
            self._came = len(self._devices)
        if len(self._devices) > wish.wanted:
            kept = set(self._devices.evenly(wish.wanted, wish.task))
            self._keep_only(kept.__contains__, "enough devices are waiting")
        self._came = max(self._came, len(self._devices))
        self._tell_waiting()

    def _keep_only(self, keeps: Callable[[str], bool], reason: str) -> None:
        for device in [device for device in self._devices if not keeps(device)]:
            self._turn_away(device, reason)

    def _tell_waiting(self) -> None:
        epoch, serial = self._last_serial
        told = messages.DevicesWaiting(
            self.address,
            self._wish.epoch,
            self._wish.task,
            serial if epoch == self._wish.epoch else 0,
            len(self._devices),
            self._resting,
        )
        self.send(self._wish.coordinator, told)

    def _forward(self, message: messages.ForwardDevices) -> None:
        serial = (message.epoch, message.serial)
        if message.epoch < self._wish.epoch or serial <= self._last_serial:
            return  # Of a former Coordinator, or a second time.
        self._last_serial = serial
        chosen = self._devices.evenly(message.count, message.task)
        for device in chosen:
            self._devices.remove(device)
        self._came = len(self._devices)
        self.send(message.attempt, messages.DevicesForwarded(self.address, tuple(chosen)))
        self._follow(message.then)
