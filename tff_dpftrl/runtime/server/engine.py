"""Runs the server's actors on asyncio, in one process.

Selectors run on the event loop, where each device's message is a few microseconds. The other
actors wait for disk, TensorFlow or the accountant, and run in threads; since a hop to a
thread is dearer than most steps, one takes along all that has come to the mailbox meanwhile.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import logging
import os
import random
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

from tff_dpftrl.runtime.actors import actor, events, factory, messages, roles
from tff_dpftrl.runtime.store import interface

_logger = logging.getLogger(__name__)

_LONGEST_HOP = 0.02  # Seconds after which a thread hands over what its steps have said.
_BETWEEN_HOPS = 0.002  # Seconds between two hops of an actor that is busy.
_LONGEST_TURN = 256  # Messages that an actor handles on the loop before others have a turn.
_RESTART_SECONDS = 1.0
# What devices are owed an answer to, whether or not there is somebody to give it.
_OF_DEVICES = frozenset({messages.Report, messages.SecureSumMessage})
_ABANDONED = "the round was abandoned"

Receive = Callable[[Any], None]
"""Takes a message for a device, on the event loop; must not block."""


class Elsewhere:
    """What is beyond an engine: actors and devices of other processes. This one is nothing.

    All methods are called on the engine's event loop, and must not block.
    """

    def send(self, to: str, message: Any) -> bool:
        """Passes a message on.

        Args:
          to: An address that is nobody's here.
          message: The message.

        Returns:
          Whether the address belongs elsewhere; if not, nobody has it.
        """
        del to, message
        return False

    def spawn(self, parent: str, address: str, role: Any) -> bool:
        """Hears of each `Spawn`, and has actors made that belong elsewhere.

        Args:
          parent: Who spawns.
          address: The actor's address.
          role: Its role.

        Returns:
          Whether it belongs elsewhere; if not, it is made here.
        """
        del parent, address, role
        return False

    def end(self, address: str) -> None:
        """Has an actor ended that is not here."""


class _Member:
    """An actor, its mailbox, and where it runs."""

    __slots__ = (
        "address",
        "build",
        "actor",
        "parent",
        "threads",
        "mailbox",
        "is_busy",
        "is_gone",
        "hop_ended",
        "timers",
    )

    def __init__(
        self,
        address: str,
        build: Callable[[], actor.Actor],
        parent: str,
        threads: futures.Executor | None,
    ):
        self.address = address
        self.build = build
        self.actor: actor.Actor | None = None
        self.parent = parent
        self.threads = threads
        self.mailbox: collections.deque[Any] = collections.deque()
        self.is_busy = True  # Until it has started.
        self.is_gone = False
        self.hop_ended = 0.0
        self.timers: dict[int, asyncio.TimerHandle] = {}


class Engine:
    """Carries messages between actors, devices and the observer.

    All methods are for the event loop it was started on.
    """

    def __init__(
        self,
        actors: factory.ActorFactory,
        store: interface.Store | None,
        *,
        hear: Callable[[float, Any], None],
        permanent: Sequence[str] | None = None,
        elsewhere: Elsewhere | None = None,
        clock: Callable[[], float] = time.time,
        randomness: random.Random | None = None,
        selector_lost: Callable[[str], None] = lambda address: None,
        is_gone: Callable[[str], None] = lambda address: None,
    ):
        """Says what is to run.

        Args:
          actors: Builds the actors.
          store: The population's store; used in one thread only. None where no StoreActor runs.
          hear: Told the time and what actors send to `events.OBSERVER`, on the event loop.
          permanent: Addresses of the StoreActor and Selectors that run here; all of them if None.
          elsewhere: Has the actors that are not here; nobody if None.
          clock: Seconds since 1970.
          randomness: Of Selectors, Coordinators and Aggregators; the operating system's if
            None. Used by several threads.
          selector_lost: Told the address of a Selector that is gone, with all that it knew
            of its devices; another one follows.
          is_gone: Told the address of any other actor that has ended, or is lost: whoever waits
            for an answer of it gets none.
        """
        self._factory = actors
        self._store = store
        self._hear = hear
        self._clock = clock
        self._random = random.SystemRandom() if randomness is None else randomness
        self._selector_lost = selector_lost
        self._is_gone = is_gone
        if permanent is None:
            permanent = (actors.store_address, *actors.selectors)
        self._permanent = tuple(permanent)
        self._elsewhere = Elsewhere() if elsewhere is None else elsewhere
        self._members: dict[str, _Member] = {}
        self._coordinators: set[str] = set()  # Those that live.
        self._owners: set[str] = set()  # All that there were.
        self._connections: dict[str, Receive] = {}
        self._timer_numbers = itertools.count()
        self._is_stopping = False
        # One thread for the store, for it may be one that knows no other; one for whoever
        # leads, so that the lease is renewed while others compute.
        self._storing = futures.ThreadPoolExecutor(1, "store")
        self._leading = futures.ThreadPoolExecutor(1, "coordinator")
        self._summing = futures.ThreadPoolExecutor(max(2, os.cpu_count() or 1), "aggregator")

    def start(self) -> None:
        """Starts the permanent actors, on the running event loop."""
        self._loop = asyncio.get_running_loop()
        for address in self._permanent:
            self._begin_permanent(address)

    def _begin_permanent(self, address: str) -> None:
        if self._is_stopping:
            return
        if address == self._factory.store_address:
            self._begin(
                _Member(address, lambda: self._factory.store_actor(self._store), "", self._storing)
            )
        else:
            self._begin(
                _Member(address, lambda: self._factory.selector(address, self._random), "", None)
            )

    @property
    def coordinators(self) -> frozenset[str]:
        """Addresses of the Coordinators that live here."""
        return frozenset(self._coordinators)

    def has(self, address: str) -> bool:
        """Whether an actor lives here."""
        return address in self._members

    def has_led(self, owner: str) -> bool:
        """Whether the holder of a lease is, or was, a Coordinator of this engine."""
        return owner in self._owners

    async def in_store_thread(self, question: Callable[[], Any]) -> Any:
        """Asks the store something in the thread in which it is used."""
        return await asyncio.get_running_loop().run_in_executor(self._storing, question)

    async def stop(self, seconds: float = 10.0) -> None:
        """Has the Coordinator give its lease back, and ends all actors.

        An attempt that runs is abandoned; a commit that is on its way is made before.

        Args:
          seconds: How long it may take; after that the lease ends by itself.
        """
        self._is_stopping = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        for address in self._coordinators:
            self.deliver(address, messages.Shutdown())
        storing = self._members.get(self._factory.store_address)
        while loop.time() < deadline and (
            self._coordinators or (storing is not None and not storing.is_gone and storing.is_busy)
        ):
            await asyncio.sleep(0.01)
        for member in list(self._members.values()):
            self._end(member)
        if self._store is not None:
            with contextlib.suppress(interface.StoreError):
                await self.in_store_thread(self._give_back)
        for threads in (self._leading, self._summing, self._storing):
            # Not on the loop: a step of TensorFlow may still run.
            await loop.run_in_executor(None, threads.shutdown)

    def _give_back(self) -> None:
        """Gives back a lease that a Coordinator could not: it failed, or was granted it late."""
        name = self._factory.served.name
        lease = self._store.lease(name)
        if lease is not None and lease.owner in self._owners:
            self._store.release(name, lease.owner, lease.epoch)

    # Messages.

    def connect(self, device: str, receive: Receive) -> None:
        """Gives a device's connection an address.

        Args:
          device: The address; new.
          receive: Takes what is sent to it.
        """
        self._connections[device] = receive

    def disconnect(self, device: str) -> None:
        """Forgets a connection; nothing happens if there is none."""
        self._connections.pop(device, None)

    def deliver(self, to: str, message: Any) -> None:
        """Puts a message into a mailbox, or hands it to a connection or the observer."""
        member = self._members.get(to)
        if member is not None:
            member.mailbox.append(message)
            if not member.is_busy:
                self._call_soon(member)
            return
        receive = self._connections.get(to)
        if receive is not None:
            receive(message)
        elif to == events.OBSERVER:
            self._tell_observer(message)
        elif not self._elsewhere.send(to, message):
            self.undeliverable(message)

    def undeliverable(self, message: Any) -> None:
        """Does what is owed for a message to somebody who is not there any more."""
        if type(message) in _OF_DEVICES:
            self._refuse_late(message)
        elif type(message) is messages.Configure:  # It went away between two messages.
            self.deliver(message.report_to, messages.DeviceGone(message.device))
        elif type(message) is messages.DevicesForwarded:  # They would wait for nothing.
            for device in message.devices:
                self.deliver(device, messages.ComeBack(device, (0.0,), _ABANDONED))

    def _refuse_late(self, report: messages.Report | messages.SecureSumMessage) -> None:
        late = messages.ReportRefused(report.device, report.attempt, messages.Refusal.LATE)
        self.deliver(report.device, late)

    def _tell_observer(self, event: Any) -> None:
        try:
            self._hear(self._clock(), event)
        except Exception as error:  # Whoever watches must not stop what it watches.
            _logger.error("the observer failed with %s", type(error).__name__)

    # Steps.

    def _begin(self, member: _Member) -> None:
        self._members[member.address] = member
        if member.threads is None:
            self._loop.call_soon(self._turn, member)
        else:
            self._loop.call_soon(self._hop, member)

    def _call_soon(self, member: _Member) -> None:
        member.is_busy = True
        if member.threads is None:
            self._loop.call_soon(self._turn, member)
        else:
            wait = member.hop_ended + _BETWEEN_HOPS - self._loop.time()
            if wait > 0:
                self._loop.call_later(wait, self._hop, member)
            else:
                self._hop(member)

    def _turn(self, member: _Member) -> None:
        """Steps on the event loop."""
        try:
            if member.actor is None:
                member.actor = member.build()
                self._carry_out(member, member.actor.start(self._clock()))
            for _ in range(min(len(member.mailbox), _LONGEST_TURN)):
                if member.is_gone:
                    return
                effects = member.actor.step(self._clock(), member.mailbox.popleft())
                if effects:
                    self._carry_out(member, effects)
        except Exception as error:
            self._lose(member, type(error).__name__)
            return
        if member.mailbox and not member.is_gone:
            self._loop.call_soon(self._turn, member)
        else:
            member.is_busy = False

    def _hop(self, member: _Member) -> None:
        if not member.is_gone:
            member.threads.submit(self._steps_in_thread, member)

    def _steps_in_thread(self, member: _Member) -> None:
        effects: list[actor.Effect] = []
        failure = ""
        message = None
        deadline = time.monotonic() + _LONGEST_HOP
        try:
            if member.actor is None:
                member.actor = member.build()
                effects += member.actor.start(self._clock())
            while member.mailbox and not member.is_gone:
                message = member.mailbox.popleft()
                said = member.actor.step(self._clock(), message)
                effects += said
                if time.monotonic() >= deadline or _ends(member.address, said):
                    break
        except Exception as error:
            # Its text may quote what is not released: noise, sums, somebody's report.
            failure = type(error).__name__
            if message is not None:
                member.mailbox.appendleft(message)  # If it was a report, it will be refused.
        self._loop.call_soon_threadsafe(self._after_hop, member, effects, failure)

    def _after_hop(self, member: _Member, effects: list[actor.Effect], failure: str) -> None:
        self._carry_out(member, _without_old_counts(effects))
        if member.is_gone:
            self._refuse_rest(member)
        elif failure:
            self._lose(member, failure)
        else:
            member.hop_ended = self._loop.time()
            member.is_busy = False
            if member.mailbox:
                self._call_soon(member)

    def _carry_out(self, member: _Member, effects: list[actor.Effect]) -> None:
        for effect in effects:
            kind = type(effect)
            if kind is actor.Send:
                self.deliver(effect.to, effect.message)
            elif kind is actor.After:
                self._after(member, effect)
            elif kind is actor.Spawn:
                self._spawn(member, effect)
            else:
                self.end(effect.address)

    def _after(self, member: _Member, effect: actor.After) -> None:
        if member.is_gone:
            return
        number = next(self._timer_numbers)
        # No closure that knows its own timer: it would be garbage in a cycle.
        member.timers[number] = self._loop.call_later(
            effect.seconds, self._ring, member, number, effect.message
        )

    def _ring(self, member: _Member, number: int, message: Any) -> None:
        del member.timers[number]
        member.mailbox.append(message)
        if not member.is_busy:
            self._call_soon(member)

    def _spawn(self, parent: _Member, effect: actor.Spawn) -> None:
        if parent.is_gone or self._is_stopping:
            return
        if not self._elsewhere.spawn(parent.address, effect.address, effect.role):
            self.spawn(effect.address, effect.role, parent.address)

    def spawn(self, address: str, role: Any, parent: str) -> None:
        """Makes an actor here, and starts it.

        Args:
          address: Its address; nothing happens if there is one.
          role: Its role.
          parent: Who is told when it is lost.
        """
        if self._is_stopping or address in self._members:
            return
        leads = isinstance(role, roles.CoordinatorRole)
        if leads:
            self._coordinators.add(address)
            self._owners.add(address)
        made = _Member(
            address,
            lambda: self._factory.build(address, role, self._random),
            parent,
            self._leading if leads else self._summing,
        )
        self._begin(made)

    # Ends.

    def end(self, address: str) -> None:
        """Ends an actor, here or elsewhere; nothing happens if there is none."""
        member = self._members.get(address)
        if member is None:
            self._elsewhere.end(address)
        else:
            self._end(member)

    def end_children(self, of: Callable[[str], bool]) -> None:
        """Ends all actors whose parents, by their address, are gone."""
        for child in [one for one in self._members.values() if one.parent and of(one.parent)]:
            self._end(child)

    def _end(self, member: _Member) -> None:
        """Ends an actor; its step, if one runs, is its last one."""
        member.is_gone = True
        if self._members.get(member.address) is member:
            del self._members[member.address]
            self._coordinators.discard(member.address)
        for timer in member.timers.values():
            timer.cancel()
        member.timers.clear()
        self._refuse_rest(member)
        if member.parent:
            self._is_gone(member.address)

    def _refuse_rest(self, member: _Member) -> None:
        while member.mailbox:
            try:
                message = member.mailbox.popleft()
            except IndexError:  # Its thread has taken the last one.
                return
            if type(message) in _OF_DEVICES:
                self._refuse_late(message)

    def _lose(self, member: _Member, failure: str) -> None:
        """Ends an actor that has failed, and tells whoever is to know."""
        _logger.error("%s failed with %s and is gone", member.address, failure)
        leads = member.address in self._coordinators
        self._end(member)
        if member.address in self._permanent:
            if member.threads is None:
                self._selector_lost(member.address)
            self._loop.call_later(_RESTART_SECONDS, self._begin_permanent, member.address)
            return
        for address in self._factory.selectors if leads else (member.parent,):
            self.deliver(address, messages.Lost(member.address))
        if not leads:  # Nobody asks its Aggregators for their sums any more.
            self.end_children(lambda parent: parent == member.address)


def _without_old_counts(effects: list[actor.Effect]) -> list[actor.Effect]:
    """Leaves out what a later count takes the place of; nobody else gets so many messages."""
    kept = []
    is_counted = False
    for effect in reversed(effects):
        if type(effect) is actor.Send and type(effect.message) is messages.ReportsCounted:
            if is_counted:
                continue
            is_counted = True
        kept.append(effect)
    kept.reverse()
    return kept


def _ends(address: str, effects: list[actor.Effect]) -> bool:
    return any(type(effect) is actor.Stop and effect.address == address for effect in effects)
