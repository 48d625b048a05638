"""Devices of a schedule: they come, wait, drop out, report twice, and lose patience."""

from __future__ import annotations

import collections
import math
import random
from collections.abc import Callable

from tff_dpftrl.runtime.actors import events, messages, population
from tff_dpftrl.secure_sums import device as participant_lib
from tff_dpftrl.secure_sums import secure_sum_pb2
from verification.schedules import faults, toy_task

PATIENCE = 25.0  # Seconds that a device waits for an answer.
_REST = 3.0
_LONGEST_TRAINING = 4.0
_LONGEST_STEP = 1.0  # Of a secure sum.


class Turn:
    """The turn to train of a device that is in several populations; see `device.session.Turn`."""

    def __init__(self):
        """Begins with the turn free."""
        self._queue: collections.deque[tuple[Device, Callable[[], None]]] = collections.deque()

    @property
    def is_taken(self) -> bool:
        """Whether the device trains."""
        return bool(self._queue)

    def take(self, whose: Device, train: Callable[[], None]) -> None:
        """Calls a function when the turn of a population comes, perhaps now."""
        self._queue.append((whose, train))
        if len(self._queue) == 1:
            train()

    def give_back(self, whose: Device) -> None:
        """Ends the turn of a population, or its wait for it."""
        was_first = bool(self._queue) and self._queue[0][0] is whose
        self._queue = collections.deque(one for one in self._queue if one[0] is not whose)
        if was_first and self._queue:
            self._queue[0][1]()


class Device:
    """One device in one population; every connection it makes has a new address.

    Attributes:
      address: Address of the device's connection; empty while it has none.
      selector: The Selector that it is connected to.
      reports_to: The Aggregator that it is to report to, or empty.
    """

    def __init__(
        self,
        name: str,
        selectors: tuple[str, ...],
        tasks: dict[str, population.Task],
        randomness: random.Random,
        send: Callable[[str, str, object], None],
        later: Callable[[float, Device, str], None],
        opening: Callable[[], events.SelectionOpened],
        turn: Turn,
    ):
        """Makes a device that is not connected.

        Args:
          name: Its name, for the addresses of its connections.
          selectors: Where it may connect.
          tasks: The tasks it can take part in, by name.
          randomness: What it draws from.
          send: Sends from an address to another.
          later: Has `wake` called with a text, after some seconds.
          opening: Returns the round that the server says devices are chosen for.
          turn: Turn to train of the device in all of its populations.
        """
        self._name = name
        self._selectors = selectors
        self._tasks = tasks
        self._random = randomness
        self._send = send
        self._later = later
        self._opening = opening
        self._turn = turn
        self._last_round: dict[str, int] = {}  # Its participation timer.
        self._connections = 0
        self.address = ""
        self.selector = ""
        self.reports_to = ""
        self._attempt = ""
        self._participant: participant_lib.Participant | None = None
        self._message = b""  # Of the secure sum, to be sent next.
        self._step = 0

    def connect(self) -> None:
        """Connects to a Selector and checks in, unless it has to rest."""
        self._connections += 1
        self.address = f"{self._name}.{self._connections}"
        self.selector = self._random.choice(self._selectors)
        opening = self._opening()
        if opening.task and self._has_to_rest(opening.task, opening.round_index):
            self._send(self.address, self.selector, messages.DeviceRests())
            self.address = self.selector = ""
            self._later(self._random.uniform(0.1, _REST), self, "connect")
            return
        self._send(
            self.address, self.selector, messages.CheckIn(self.address, frozenset(self._tasks))
        )
        self._later(PATIENCE, self, self.address)

    def _has_to_rest(self, task: str, round_index: int) -> bool:
        stride = round_index - self._last_round.get(task, -math.inf)
        return stride < self._tasks[task].min_sep

    def disconnect(self, seconds: float) -> None:
        """Closes the connection; the other side hears of it, perhaps. Comes back later."""
        gone = messages.DeviceGone(self.address)
        self._send(self.address, self.reports_to or self.selector, gone)
        self.address = self.selector = self.reports_to = ""
        self._participant = None
        self._later(seconds, self, "connect")
        self._turn.give_back(self)

    def wake(self, what: str, faults_now: faults.Faults) -> None:
        """Does a delayed action.

        Args:
          what: Name of the action, as it was given to `later`.
          faults_now: Probabilities of the device's faults.
        """
        if what == "connect":
            if not self.address and self._turn.is_taken:
                self._later(self._random.uniform(0.1, _REST), self, "connect")
            elif not self.address:
                self.connect()
        elif what == f"{self.address} reports":
            self._report(faults_now)
        elif what == self.address:  # Nobody has answered on this connection.
            self.disconnect(self._random.uniform(0, _REST))

    def receive(self, message: object) -> None:
        """Handles a message that came over its connection."""
        if isinstance(message, messages.Configure):
            if not self.reports_to:
                self.reports_to = message.report_to
                self._turn.take(self, lambda: self._train(message))
        elif isinstance(message, messages.ComeBack):
            if not self.reports_to:
                self.disconnect(message.turns[0] + self._random.uniform(0.1, _REST))
        elif isinstance(message, messages.SecureSumAnswer):
            if self._participant is not None and message.step == self._step:
                asked = secure_sum_pb2.ToDevice.FromString(message.content)
                self._message = self._participant.answer(asked).SerializeToString()
                self._step += 1
                self._later(
                    self._random.uniform(0.01, _LONGEST_STEP), self, f"{self.address} reports"
                )
        elif message.attempt == self._attempt:
            self.disconnect(self._random.uniform(0.1, _REST))

    def _train(self, message: messages.Configure) -> None:
        if self._has_to_rest(message.task, message.round_index):
            self.disconnect(self._random.uniform(0.1, _REST))
            return
        self._last_round[message.task] = message.round_index
        self._attempt = message.attempt
        self._join(message)
        self._later(self._random.uniform(0.1, _LONGEST_TRAINING), self, f"{self.address} reports")

    def _report_in(self, seconds: float) -> None:
        self._later(seconds, self, f"{self.address} reports")

    def _join(self, message: messages.Configure) -> None:
        """Begins a secure sum, if it is one."""
        demanded = self._tasks[message.task].secure_sum
        if demanded is not None:
            self._participant = toy_task.participant(demanded, message)
            self._message = self._participant.advertise().SerializeToString()
            self._step = 0

    def _report(self, faults_now: faults.Faults) -> None:
        if not self.reports_to:
            return
        self._turn.give_back(self)
        if self._random.random() < faults_now.dropped:
            self.disconnect(self._random.uniform(0, _REST))
            return
        is_malformed = self._random.random() < faults_now.malformed
        if self._participant is not None:
            content = b"\xff" if is_malformed else self._message
            report = messages.SecureSumMessage(self.address, self._attempt, self._step, content)
        else:
            payload = None if is_malformed else self.address
            report = messages.Report(self.address, self._attempt, payload)
        self._send(self.address, self.reports_to, report)
        if self._random.random() < faults_now.repeated:
            self._send(self.address, self.reports_to, report)
