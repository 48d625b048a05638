"""Noise parties of a schedule: their noise is the number of its row, which a sum shows."""

from __future__ import annotations

import random
from collections.abc import Callable

from cryptography.hazmat.primitives.asymmetric import ed25519

from tff_dpftrl.runtime.actors import messages, population
from tff_dpftrl.runtime.protocol import session_stream
from tff_dpftrl.secure_sums import noise_party as noise_party_lib
from tff_dpftrl.secure_sums import refusals, secure_sum_pb2, vectors
from verification.schedules import faults

PATIENCE = 40.0  # Seconds that a party waits for an answer.
_AWAY = 3.0
_LONGEST_STEP = 1.0


def key(number: int) -> ed25519.Ed25519PrivateKey:
    """Returns the private key of a party by its number."""
    return ed25519.Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)


def public_keys(count: int) -> tuple[bytes, ...]:
    """Returns the raw public keys of the first parties."""
    return tuple(key(number).public_key().public_bytes_raw() for number in range(count))


class Party:
    """One noise party. It dies now and then, and keeps nothing but its ledger: the next row.

    Attributes:
      address: Address of its connection; empty while it has none.
      selector: The Selector that it is connected to.
      reports_to: The Aggregator that it answers, or empty.
    """

    def __init__(
        self,
        number: int,
        name: str,
        task: population.Task,
        selectors: tuple[str, ...],
        randomness: random.Random,
        send: Callable[[str, str, object], None],
        later: Callable[[float, Party, str], None],
    ):
        """Makes a party that is not connected.

        Args:
          number: Its number among the parties of the task.
          name: Its name, for the addresses of its connections.
          task: Its task.
          selectors: Where it may connect.
          randomness: What it draws from.
          send: Sends from an address to another.
          later: Has `wake` called with a text, after some seconds.
        """
        self._number, self._name, self._task = number, name, task
        self._selectors, self._random = selectors, randomness
        self._send, self._later = send, later
        self._next_row = 0  # The ledger.
        self._connections = 0
        self.address = self.selector = self.reports_to = ""
        self._asked: messages.Configure | None = None
        self._half: noise_party_lib.NoiseParty | None = None
        self._answers: list[secure_sum_pb2.ToServer] = []

    def wake(self, what: str, faults_now: faults.Faults) -> None:
        """Does a delayed action: connects, answers, or gives a connection up.

        Args:
          what: Name of the action, as it was given to `later`.
          faults_now: Probabilities of its faults.
        """
        if what == "connect":
            if not self.address:
                self._connect()
        elif what == f"{self.address} answers" and self.reports_to:
            if self._random.random() < faults_now.dropped / 4:
                self.disconnect(self._random.uniform(0, _AWAY))  # Its row is used up.
            else:
                self._answer()
        elif what == self.address:
            self.disconnect(0.1)

    def _connect(self) -> None:
        self._connections += 1
        self.address = f"{self._name}.{self._connections}"
        self.selector = self._random.choice(self._selectors)
        public = public_keys(self._number + 1)[-1]
        ready = messages.PartyReady(self.address, public, self._task.name, self._next_row)
        self._send(self.address, self.selector, ready)
        self._later(PATIENCE, self, self.address)

    def disconnect(self, seconds: float) -> None:
        """Closes the connection; the other side hears of it, perhaps. Comes back later."""
        gone = messages.DeviceGone(self.address)
        self._send(self.address, self.reports_to or self.selector, gone)
        self.address = self.selector = self.reports_to = ""
        self._asked = self._half = None
        self._answers.clear()
        self._later(seconds, self, "connect")

    def receive(self, message: object) -> None:
        """Handles a message that came over its connection."""
        if isinstance(message, messages.Configure):
            if not self.reports_to:
                self._begin(message)
        elif isinstance(message, messages.SecureSumAnswer):
            if self._half is not None and message.step == 0:
                self._give(message)
        elif self.reports_to or isinstance(message, messages.ComeBack):
            self.disconnect(self._random.uniform(0, 1))

    def _begin(self, message: messages.Configure) -> None:
        self._send(self.address, self.selector, messages.DeviceGone(self.address))
        self.reports_to, self._asked = message.report_to, message
        if message.round_index < self._next_row:  # It refuses.
            self.disconnect(self._random.uniform(0, 1))
            return
        demanded = self._task.secure_sum
        assert demanded is not None
        self._half = noise_party_lib.NoiseParty(
            demanded,
            message.secure_sum_session,
            key(self._number),
            lambda: self._noise(message.round_index),
            context=session_stream.secure_sum_context(
                message.task, message.round_index, message.model
            ),
        )
        self._answers.append(self._half.advertise())
        self._later(self._random.uniform(0.01, _LONGEST_STEP), self, f"{self.address} answers")

    def _noise(self, row: int) -> vectors.Vector:
        """Makes the noise of a row, which the ledger has from then on."""
        self._next_row = row + 1
        demanded = self._task.secure_sum
        assert demanded is not None
        vector = vectors.zeros(demanded.layout)
        vector[2][self._number] = row + 1
        return vector

    def _give(self, message: messages.SecureSumAnswer) -> None:
        assert self._half is not None
        asked = secure_sum_pb2.ToDevice.FromString(message.content)
        try:
            self._answers.append(self._half.answer(asked))
        except refusals.ProtocolRefusedError:
            self.disconnect(self._random.uniform(0, 1))
            return
        self._half = None
        self._later(self._random.uniform(0.01, _LONGEST_STEP), self, f"{self.address} answers")

    def _answer(self) -> None:
        if self._answers:
            assert self._asked is not None
            step = 0 if self._half is not None else 1
            content = self._answers.pop(0).SerializeToString()
            sent = messages.SecureSumMessage(self.address, self._asked.attempt, step, content)
            self._send(self.address, self.reports_to, sent)
