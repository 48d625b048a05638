"""What an actor is: messages in, effects out, one at a time."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, TypeAlias


@dataclasses.dataclass(frozen=True)
class Send:
    """Gives a message to another actor, a device or an observer.

    Attributes:
      to: Its address.
      message: One of `messages`.
    """

    to: str
    message: Any


@dataclasses.dataclass(frozen=True)
class After:
    """Gives a message to the actor itself, later.

    Attributes:
      seconds: How much later.
      message: Any object.
    """

    seconds: float
    message: Any


@dataclasses.dataclass(frozen=True)
class Spawn:
    """Makes and starts another actor.

    Attributes:
      address: Its address; new.
      role: One of `roles`.
    """

    address: str
    role: Any


@dataclasses.dataclass(frozen=True)
class Stop:
    """Ends an actor, which may be the one that says so.

    Attributes:
      address: Its address; nothing happens if there is none.
    """

    address: str


Effect: TypeAlias = Send | After | Spawn | Stop


class Actor(abc.ABC):
    """A state machine; see the package for what it may expect of the engine that runs it.

    Attributes:
      address: Where its messages are sent.
      now: Time of the current step, in seconds.
    """

    def __init__(self, address: str):
        self.address = address
        self.now = 0.0
        self._effects: list[Effect] = []

    def start(self, now: float) -> list[Effect]:
        """Begins; called once, before the first message.

        Args:
          now: Seconds on the engine's clock.

        Returns:
          What the engine is to do, in order.
        """
        self.now = now
        self._begin()
        return self._taken()

    def step(self, now: float, message: Any) -> list[Effect]:
        """Handles one message.

        Args:
          now: Seconds on the engine's clock.
          message: What arrived.

        Returns:
          What the engine is to do, in order.

        Raises:
          TypeError: If this kind of actor knows no such message.
        """
        self.now = now
        self._receive(message)
        return self._taken()

    def _taken(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    @abc.abstractmethod
    def _begin(self) -> None:
        """What `start` does."""

    @abc.abstractmethod
    def _receive(self, message: Any) -> None:
        """What `step` does."""

    def _unknown(self, message: Any) -> TypeError:
        return TypeError(f"{self.address} got a message of the type {type(message).__name__}.")

    def send(self, to: str, message: Any) -> None:
        """Notes a `Send`."""
        self._effects.append(Send(to, message))

    def after(self, seconds: float, message: Any) -> None:
        """Notes an `After`."""
        self._effects.append(After(seconds, message))

    def spawn(self, address: str, role: Any) -> None:
        """Notes a `Spawn`."""
        self._effects.append(Spawn(address, role))

    def stop(self, address: str) -> None:
        """Notes a `Stop`."""
        self._effects.append(Stop(address))
