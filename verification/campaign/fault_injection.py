"""Parts of a server that fail where they are told to: actors, store and server step.

They are handed to a server from outside. What is armed is a file in the campaign's folder, which
whichever process comes to the point first takes away: so a fault strikes once, however many
processes there are.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import pathlib
import random
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import sqlalchemy
from sqlalchemy import event
from typing_extensions import override

from tff_dpftrl.runtime.actors import actor, factory, messages, population, selector
from tff_dpftrl.runtime.store import interface

KILL, STOP, RAISE, TELL = "kill", "stop", "raise", "tell"
_ARMED, _STRIKES = "armed.json", "strikes.jsonl"


# The store's transaction for each message to a StoreActor.
TRANSACTIONS = {"CommitRound": "commit", "RenewLease": "renew", "AcquireLease": "acquire"}

_storing = threading.local()  # The message that the StoreActor in this thread handles.


class StruckError(RuntimeError):
    """Failure that a fault makes a part raise."""


class Trigger:
    """Strikes at a point, if one is armed."""

    def __init__(self, folder: str | os.PathLike[str]):
        """Looks for what is armed in a folder.

        Args:
          folder: The campaign's.
        """
        self._folder = pathlib.Path(folder)
        self._file = self._folder / _ARMED
        self._read = (0, 0)
        self._armed: dict[str, Any] = {}
        self._passed = 0
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple:
        return Trigger, (self._folder,)

    def arm(self, number: int, point: str, how: str, skip: int = 0) -> None:
        """Has a point strike.

        Args:
          number: Number of the fault in its campaign.
          point: Its name.
          how: `KILL`, `STOP` or `RAISE`; `TELL` only says that it was reached.
          skip: How often it is passed before, in one process.
        """
        new = self._folder / f"{_ARMED}.new"
        new.write_text(json.dumps({"number": number, "point": point, "how": how, "skip": skip}))
        new.rename(self._file)

    def disarm(self) -> bool:
        """Has nothing strike any more; returns whether something was armed still."""
        try:
            self._file.unlink()
        except FileNotFoundError:
            return False
        return True

    def strike_of(self, number: int) -> dict[str, Any] | None:
        """Returns the record of a fault that has struck: "pid", and "at", seconds since 1970."""
        try:
            lines = (self._folder / _STRIKES).read_text().splitlines()
        except FileNotFoundError:
            return None
        found = [one for one in map(json.loads, lines) if one["number"] == number]
        return found[-1] if found else None

    def reach(self, point: str) -> None:
        """Strikes if it is this point's turn.

        Raises:
          StruckError: If that is what is to happen.
        """
        how = self._take(point)
        if how == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)  # The signal may come to another thread first.
        elif how == STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how == RAISE:
            raise StruckError(point)

    def _take(self, point: str) -> str:
        try:
            found = os.stat(self._file)
        except FileNotFoundError:
            return ""
        with self._lock:
            if self._read != (found.st_ino, found.st_mtime_ns):
                try:
                    self._armed = json.loads(self._file.read_text())
                except FileNotFoundError:
                    return ""
                self._read, self._passed = (found.st_ino, found.st_mtime_ns), 0
            armed = self._armed
            if armed["point"] != point:
                return ""
            self._passed += 1
            if self._passed <= armed["skip"] or not self.disarm():
                return ""
        line = {"number": armed["number"], "point": point, "pid": os.getpid(), "at": time.time()}
        with open(self._folder / _STRIKES, "ab", buffering=0) as file:
            file.write(json.dumps(line).encode() + b"\n")
        return armed["how"]

    @contextlib.contextmanager
    def around(self, what: str) -> Iterator[None]:
        """Returns the points before and after something."""
        self.reach(f"{what}: before")
        yield
        self.reach(f"{what}: after")


def label(message: Any) -> str:
    """Returns the name of a message in points."""
    if isinstance(message, messages.SecureSumMessage):
        return f"SecureSumMessage {message.step}"
    if isinstance(message, enum.Enum):
        return f"time for {message.name.lower()}"
    return message if isinstance(message, str) else type(message).__name__


class ArmedActor(actor.Actor):
    """An actor that may fail before and after each of its steps."""

    def __init__(self, inner: actor.Actor, trigger: Trigger):
        """Takes the actor's place.

        Args:
          inner: The actor.
          trigger: What strikes.
        """
        super().__init__(inner.address)
        self._inner, self._trigger = inner, trigger
        self._kind = type(inner).__name__

    @override
    def start(self, now: float) -> list[actor.Effect]:
        with self._trigger.around(f"{self._kind}: start"):
            return self._inner.start(now)

    @override
    def step(self, now: float, message: Any) -> list[actor.Effect]:
        with self._trigger.around(f"{self._kind}: {label(message)}"):
            _storing.message = label(message) if self._kind == "StoreActor" else ""
            try:
                return self._inner.step(now, message)
            finally:
                _storing.message = ""

    def _begin(self) -> None:
        raise AssertionError("the actor begins")

    def _receive(self, message: Any) -> None:
        raise AssertionError("the actor receives")


class ArmedFactory(factory.ActorFactory):
    """Builds the same actors as another factory, armed."""

    def __init__(
        self,
        trigger: Trigger,
        actor_factory: type[factory.ActorFactory],
        served: population.Population,
        *,
        selectors: tuple[str, ...],
        pace: selector.Pace,
        **options: Any,
    ):
        """Takes the place of a factory.

        Args:
          trigger: What strikes.
          actor_factory: Type of the factory whose actors are armed.
          served: The population.
          selectors: Addresses of the population's Selectors.
          pace: Function that draws when a device is to check in again.
          **options: Further arguments of `factory.ActorFactory`.
        """
        super().__init__(served, selectors=selectors, pace=pace, **options)
        self._inner = actor_factory(served, selectors=selectors, pace=pace, **options)
        self._trigger = trigger

    @override
    def selector(self, address: str, randomness: random.Random) -> actor.Actor:
        return ArmedActor(self._inner.selector(address, randomness), self._trigger)

    @override
    def store_actor(self, store: interface.Store) -> actor.Actor:
        return ArmedActor(self._inner.store_actor(store), self._trigger)

    @override
    def build(self, address: str, role: Any, randomness: random.Random) -> actor.Actor:
        return ArmedActor(self._inner.build(address, role, randomness), self._trigger)


def watch_transactions(trigger: Trigger) -> None:
    """Makes the StoreActors' transactions in this process fail before they are committed."""

    def before_commit(connection: sqlalchemy.engine.Connection) -> None:
        del connection
        message = getattr(_storing, "message", "")
        if message in TRANSACTIONS:
            trigger.reach(f"Store: {TRANSACTIONS[message]}: inside")

    event.listen(sqlalchemy.engine.Engine, "commit", before_commit)


class ArmedStep(population.ServerStep):
    """A server step that may fail before it draws noise, and after."""

    def __init__(self, inner: population.ServerStep, trigger: Trigger):
        """Takes the place of a step.

        Args:
          inner: The step.
          trigger: What strikes.
        """
        self._inner, self._trigger = inner, trigger

    @override
    def apply(
        self, total: Any, num_reports: int, model: bytes, state: bytes
    ) -> population.StepResult:
        with self._trigger.around("ServerStep: apply"):
            return self._inner.apply(total, num_reports, model, state)

    @override
    def skip(self, model: bytes, state: bytes) -> population.StepResult:
        return self._inner.skip(model, state)
