"""Actors: state machines that take one message at a time and return effects."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, TypeAlias


@dataclasses.dataclass(frozen=True)
class Send:
    """Effect: a message (one of `messages`) for another actor, a device or the observer."""

    to: str
    message: Any


@dataclasses.dataclass(frozen=True)
class After:
    """Effect: a timer, after which the actor receives a message of its own (any object)."""

    seconds: float
    message: Any


@dataclasses.dataclass(frozen=True)
class Spawn:
    """Effect: another actor is built from one of `roles`, at a new address, and started."""

    address: str
    role: Any


@dataclasses.dataclass(frozen=True)
class Stop:
    """Effect: an actor is ended, perhaps the sender itself; nothing happens if there is none."""

    address: str


Effect: TypeAlias = Send | After | Spawn | Stop


class Actor(abc.ABC):
    """State machine that an engine runs; the package's docstring says what the engine must do.

    In a step, `now` is its time in seconds on the engine's clock.
    """

    def __init__(self, address: str):
        self.address = address
        self.now = 0.0
        self._effects: list[Effect] = []

    def start(self, now: float) -> list[Effect]:
        """Starts the actor before its first message; returns effects for the engine, in order."""
        self.now = now
        self._begin()
        return self._taken()

    def step(self, now: float, message: Any) -> list[Effect]:
        """Handles one message; returns the effects that the engine carries out, in order.

        It raises TypeError if this kind of actor handles no such message.
        """
        self.now = now
        self._receive(message)
        return self._taken()

    def _taken(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    @abc.abstractmethod
    def _begin(self) -> None:
        """Does the work of `start`."""

    @abc.abstractmethod
    def _receive(self, message: Any) -> None:
        """Does the work of `step`."""

    def _unknown(self, message: Any) -> TypeError:
        return TypeError(f"{self.address} got a message of the type {type(message).__name__}.")

    def send(self, to: str, message: Any) -> None:
        """Adds a `Send` to the step's effects."""
        self._effects.append(Send(to, message))

    def after(self, seconds: float, message: Any) -> None:
        """Adds an `After` to the step's effects."""
        self._effects.append(After(seconds, message))

    def spawn(self, address: str, role: Any) -> None:
        """Adds a `Spawn` to the step's effects."""
        self._effects.append(Spawn(address, role))

    def stop(self, address: str) -> None:
        """Adds a `Stop` to the step's effects."""
        self._effects.append(Stop(address))
