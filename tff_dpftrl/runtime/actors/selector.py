"""The Selector: chooses among waiting devices, and makes sure that a Coordinator leads."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeAlias

from tff_dpftrl.runtime.actors import actor, messages, population, roles, waiting

Pace: TypeAlias = Callable[[float, random.Random], tuple[float, ...]]
"""Pace steering: a function of the time and a source of randomness that draws when a device is to
check in again. It returns increasing seconds from now; the device takes the first time that it
can. It is called from any thread."""

_CHECK = "check that a Coordinator leads"


class Selector(actor.Actor):
    """Chooser among the devices that connect to it: evenly among addresses, then at random.

    At most as many devices wait as the next round wants. A further device then takes the place of
    one whose network address has more waiting devices. Among addresses with equally many, reservoir
    sampling decides: all devices that came since the last round are equally likely to be among
    those that wait. No privacy guarantee rests on this choice: DP-FTRL holds for any choice of
    devices.

    The Coordinator sends heartbeats. When they stop, the Selector spawns another Coordinator. All
    Selectors may do so at the same time: the lease decides which one leads.
    """

    def __init__(
        self,
        address: str,
        served: population.Population,
        randomness: random.Random,
        pace: Pace,
    ):
        """Begins without devices; `factory.ActorFactory` documents the arguments."""
        super().__init__(address)
        self._served = served
        self._random = randomness
        self._pace = pace
        self._heartbeat_at = 0.0
        self._wish = messages.SelectDevices(0, "", "", 0, False)
        self._last_serial = (0, 0)
        self._devices = waiting.Waiting(randomness)
        self._parties: dict[str, messages.PartyReady] = {}  # By address.
        self._came = 0
        self._resting = 0

    def _begin(self) -> None:
        self._heartbeat_at = -self._served.silence_seconds  # No Coordinator is known to lead.
        self.after(self._random.uniform(0, self._served.heartbeat_seconds), _CHECK)

    def _receive(self, message: object) -> None:
        match message:
            case messages.CheckIn():
                self._check_in(message)
            case messages.SelectDevices():
                self._follow(message)
            case messages.ForwardDevices():
                self._forward(message)
            case messages.PartyReady():
                self._parties[message.address] = message
                self._tell_of_parties()
            case messages.DeviceGone():
                self._devices.remove(message.device)
                if self._parties.pop(message.device, None) is not None:
                    self._send_count()
            case messages.DeviceRests():
                self._resting += 1
            case messages.Lost():
                if message.address == self._wish.coordinator:
                    self._spawn_coordinator()
            case str() if message == _CHECK:
                if self.now - self._heartbeat_at >= self._served.silence_seconds:
                    self._spawn_coordinator()
                self.after(self._served.heartbeat_seconds, _CHECK)
            case _:
                raise self._unknown(message)

    def _spawn_coordinator(self) -> None:
        # No earlier start of this process, and no other one, has used the name.
        name = f"{self._random.getrandbits(64):016x}"
        address = roles.coordinator_address(self._served.name, name)
        self.spawn(address, roles.CoordinatorRole())
        self._heartbeat_at = self.now

    def _check_in(self, message: messages.CheckIn) -> None:
        device = message.device
        if device in self._devices:
            return
        if not self._wish.accepting:
            self._send_away(device, self._no_round)
        elif self._wish.task not in message.tasks:
            self._send_away(device, "the next round is not for this version")
        else:
            self._came += 1
            self._devices.add(device, message.tasks, message.peer)
            if len(self._devices) == self._wish.wanted:
                self._send_count()
            elif len(self._devices) > self._wish.wanted:
                self._turn_away(self._surplus(device))

    def _tell_of_parties(self) -> None:
        """Counts the noise parties, or sends them away if no round follows."""
        if self._wish.is_finished:
            for party in self._parties:
                self._send_away(party, self._no_round)
            self._parties.clear()
        self._send_count()

    def _surplus(self, newcomer: str) -> str:
        """Chooses the device to send away, where one more waits than is wanted."""
        if self._devices.is_crowded(newcomer):
            if self._random.randrange(self._came) >= self._wish.wanted:
                return newcomer
        surplus = newcomer
        while surplus == newcomer:
            surplus = self._devices.crowded()
        return surplus

    def _turn_away(self, device: str, reason: str = "enough devices are waiting") -> None:
        self._devices.remove(device)
        self._send_away(device, reason)

    def _send_away(self, device: str, reason: str) -> None:
        turns = self._pace(self.now, self._random)
        finished = self._wish.is_finished
        self.send(device, messages.ComeBack(device, turns, reason, finished))

    @property
    def _no_round(self) -> str:
        """Reason to send a device away while none is accepted."""
        if self._wish.is_finished:
            return "all rounds of all tasks are done"
        return "no round is waiting for devices"

    def _follow(self, wish: messages.SelectDevices) -> None:
        if wish.epoch < self._wish.epoch:
            return  # A former Coordinator that does not know yet that it has lost its lease.
        self._heartbeat_at = self.now
        before, self._wish = self._wish, wish
        if not wish.accepting:
            self._keep_only(lambda device: False, self._no_round)
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
        self._tell_of_parties()

    def _keep_only(self, keeps: Callable[[str], bool], reason: str) -> None:
        for device in [device for device in self._devices if not keeps(device)]:
            self._turn_away(device, reason)

    def _send_count(self) -> None:
        if not self._wish.coordinator:
            return
        epoch, serial = self._last_serial
        count = messages.DevicesWaiting(
            self.address,
            self._wish.epoch,
            self._wish.task,
            serial if epoch == self._wish.epoch else 0,
            len(self._devices),
            self._resting,
            tuple(self._parties.values()),
        )
        self.send(self._wish.coordinator, count)

    def _forward(self, message: messages.ForwardDevices) -> None:
        serial = (message.epoch, message.serial)
        if message.epoch < self._wish.epoch or serial <= self._last_serial:
            return  # A former Coordinator's message, or a duplicate.
        self._last_serial = serial
        chosen = self._devices.evenly(message.count, message.task)
        for device in chosen:
            self._devices.remove(device)
        self._came = len(self._devices)
        self.send(message.attempt, messages.DevicesForwarded(self.address, tuple(chosen)))
        self._follow(message.then)
