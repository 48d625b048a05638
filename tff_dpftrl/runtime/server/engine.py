"""Runs the server's actors on asyncio, in one process: those of all its populations.

Selectors run on the event loop, where a device's message takes a few microseconds. The other
actors wait for disk, TensorFlow or the accountant, and run in threads. A hop to a thread costs
more than most steps, so it handles all messages that are in the mailbox by then.
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
from tff_dpftrl.runtime.store import holders, interface

_logger = logging.getLogger(__name__)

_LONGEST_HOP = 0.02  # Seconds after which a thread hands over the effects of its steps.
_BETWEEN_HOPS = 0.002  # Seconds between two hops of a busy actor.
_LONGEST_TURN = 256  # Messages that an actor handles on the loop before others have a turn.
_RESTART_SECONDS = 1.0
# Messages that a device must get an answer to, even if the actor is gone.
_OF_DEVICES = frozenset({messages.Report, messages.SecureSumMessage})
_ABANDONED = "the round was abandoned"
_ENDS_WITH_PARENT = (roles.AggregatorRole, roles.MergingAggregatorRole)

Receive = Callable[[Any], None]
"""Function that takes a message for a device, on the event loop; it must not block."""


class RemoteActors:
    """Interface to actors and devices of other processes; by default, there are none.

    All methods are called on the engine's event loop, and must not block.
    """

    def send(self, to: str, message: Any) -> bool:
        """Passes a message on, and returns whether the address belongs to another process.

        If not, the message is undeliverable.
        """
        del to, message
        return False

    def spawn(self, parent: str, address: str, role: Any) -> bool:
        """Spawns an actor in another process if it belongs there; returns whether it does.

        Otherwise the engine spawns the actor here.
        """
        del parent, address, role
        return False

    def end(self, address: str) -> None:
        """Ends an actor of another process."""


class _Member:
    """An actor, its mailbox, and where it runs."""

    __slots__ = (
        "address",
        "actors",
        "build",
        "actor",
        "parent",
        "children",
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
        actors: factory.ActorFactory,  # Factory of its population.
        build: Callable[[], actor.Actor],
        parent: str,
        threads: futures.Executor | None,  # None on the event loop.
    ):
        self.address = address
        self.actors = actors
        self.build = build
        self.actor: actor.Actor | None = None
        self.parent = parent
        self.children: list[str] = []  # Addresses of actors of this process.
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
        actors: Sequence[factory.ActorFactory],
        store: interface.Store | None,
        *,
        on_event: Callable[[float, Any, str], None],
        permanent: Sequence[str] | None = None,
        remote: RemoteActors | None = None,
        clock: Callable[[], float] = time.time,
        randomness: random.Random | None = None,
        on_selector_lost: Callable[[str], None] = lambda address: None,
        on_actor_gone: Callable[[str], None] = lambda address: None,
    ):
        """Stores the parts; nothing runs before `start`.

        There is a factory for each population; their permanent actors have distinct addresses. The
        store of all populations is used in one thread only. It is None where no StoreActor runs.
        `on_event` is called on the event loop for each event that an actor sends to
        `events.OBSERVER`, with the time in seconds, the event, and the population's name.
        `permanent` are the addresses of the StoreActors and Selectors that run here; all of them if
        None. The clock returns the seconds since 1970. Several threads use `randomness`, by default
        the operating system's.

        `on_selector_lost` is told the address of a Selector that is lost together with its list of
        waiting devices; the engine restarts the Selector. `on_actor_gone` is told the address of
        any other actor that has ended or is lost: devices that wait for its answer get none.
        """
        self._factories = {one.served.name: one for one in actors}
        self._places = {
            address: one for one in actors for address in (one.store_address, *one.selectors)
        }
        self._store = store
        self._on_event = on_event
        self._clock = clock
        self._random = random.SystemRandom() if randomness is None else randomness
        self._on_selector_lost = on_selector_lost
        self._on_actor_gone = on_actor_gone
        self._permanent = tuple(self._places if permanent is None else permanent)
        self._remote = RemoteActors() if remote is None else remote
        self._members: dict[str, _Member] = {}
        self._coordinators: set[str] = set()  # Addresses of Coordinators that live.
        self._owners: set[str] = set()  # Addresses of all Coordinators since the start.
        self._connections: dict[str, Receive] = {}
        self._timer_numbers = itertools.count()
        self._is_stopping = False
        # One thread for the store, since a store need not be thread-safe; one for each Coordinator,
        # so that its lease is renewed while other actors compute.
        self._storing = futures.ThreadPoolExecutor(1, "store")
        self._leading = futures.ThreadPoolExecutor(len(self._factories), "coordinator")
        self._summing = futures.ThreadPoolExecutor(max(2, os.cpu_count() or 1), "aggregator")

    def start(self) -> None:
        """Starts the permanent actors, on the running event loop."""
        self._loop = asyncio.get_running_loop()
        for address in self._permanent:
            self._begin_permanent(address)

    def _begin_permanent(self, address: str) -> None:
        if self._is_stopping:
            return
        actors = self._places[address]
        if address == actors.store_address:
            store = self._store
            if store is None:
                raise ValueError(f"store is None, and permanent names its actor {address!r}.")
            threads, build = self._storing, lambda: actors.store_actor(store)
        else:
            threads, build = None, lambda: actors.selector(address, self._random)
        self._begin(_Member(address, actors, build, "", threads))

    @property
    def coordinators(self) -> frozenset[str]:
        """Addresses of the Coordinators that live here."""
        return frozenset(self._coordinators)

    def has(self, address: str) -> bool:
        """Returns whether an actor lives in this process."""
        return address in self._members

    def has_led(self, owner: str) -> bool:
        """Returns whether the holder of a lease is, or was, a Coordinator of this engine."""
        return holders.owner_of(owner) in self._owners

    async def in_store_thread(self, query: Callable[[], Any]) -> Any:
        """Calls a function in the thread in which the store is used, and returns its result."""
        return await asyncio.get_running_loop().run_in_executor(self._storing, query)

    async def stop(self, seconds: float = 10.0) -> None:
        """Has the Coordinators release their leases, and ends all actors.

        A running attempt is abandoned; a commit that is on its way is made first. After `seconds`,
        the lease ends by itself.
        """
        self._is_stopping = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        for address in self._coordinators:
            self.deliver(address, messages.Shutdown())
        storing = [self._members.get(one.store_address) for one in self._factories.values()]
        while loop.time() < deadline and (
            self._coordinators
            or any(one is not None and not one.is_gone and one.is_busy for one in storing)
        ):
            await asyncio.sleep(0.01)
        for member in list(self._members.values()):
            self._end(member)
        store = self._store
        if store is not None:
            with contextlib.suppress(interface.StoreError):
                await self.in_store_thread(lambda: self._release_leases(store))
        for threads in (self._leading, self._summing, self._storing):
            # Not on the loop: a step of TensorFlow may still run.
            await loop.run_in_executor(None, threads.shutdown)

    def _release_leases(self, store: interface.Store) -> None:
        """Releases a lease that its Coordinator did not: it failed, or was granted it late."""
        for name in self._factories:
            lease = store.lease(name)
            if lease is not None and self.has_led(lease.owner):
                store.release(name, lease.owner, lease.epoch)

    # Messages.

    def connect(self, device: str, receive: Receive) -> None:
        """Registers a device's connection at a new address; `receive` takes the messages to it."""
        self._connections[device] = receive

    def disconnect(self, device: str) -> None:
        """Forgets a connection; does nothing if there is none."""
        self._connections.pop(device, None)

    def deliver(self, to: str, message: Any) -> None:
        """Delivers a message to an actor's mailbox or a connection."""
        member = self._members.get(to)
        if member is not None:
            member.mailbox.append(message)
            if not member.is_busy:
                self._call_soon(member)
            return
        receive = self._connections.get(to)
        if receive is not None:
            receive(message)
        elif not self._remote.send(to, message):
            self.undeliverable(message)

    def undeliverable(self, message: Any) -> None:
        """Notifies the actors and devices that wait for an answer to an undeliverable message."""
        if type(message) in _OF_DEVICES:
            self._refuse_late(message)
        elif type(message) is messages.Configure:  # The device disconnected in the meantime.
            self.deliver(message.report_to, messages.DeviceGone(message.device))
        elif type(message) is messages.DevicesForwarded:  # The devices would wait in vain.
            for device in message.devices:
                self.deliver(device, messages.ComeBack(device, (0.0,), _ABANDONED))

    def _refuse_late(self, report: messages.Report | messages.SecureSumMessage) -> None:
        late = messages.ReportRefused(report.device, report.attempt, messages.Refusal.LATE)
        self.deliver(report.device, late)

    def _notify_observer(self, event: Any, population: str) -> None:
        try:
            self._on_event(self._clock(), event, population)
        except Exception as error:  # A failing observer must not stop the server.
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
        """Runs steps of an actor on the event loop."""
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
        if not member.is_gone and member.threads is not None:
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
                new_effects = member.actor.step(self._clock(), message)
                effects += new_effects
                if time.monotonic() >= deadline or _ends(member.address, new_effects):
                    break
        except Exception as error:
            # The error's text may quote noise, sums or a device's report.
            failure = type(error).__name__
            if message is not None:
                member.mailbox.appendleft(message)  # A report will be refused.
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
            if isinstance(effect, actor.Send) and effect.to == events.OBSERVER:
                self._notify_observer(effect.message, member.actors.served.name)
            elif isinstance(effect, actor.Send):
                self.deliver(effect.to, effect.message)
            elif isinstance(effect, actor.After):
                self._after(member, effect)
            elif isinstance(effect, actor.Spawn):
                self._spawn(member, effect)
            else:
                self.end(effect.address)

    def _after(self, member: _Member, effect: actor.After) -> None:
        if member.is_gone:
            return
        number = next(self._timer_numbers)
        # A closure that holds its own timer would be a reference cycle.
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
        if not self._remote.spawn(parent.address, effect.address, effect.role):
            self.spawn(effect.address, effect.role, parent.address)

    def spawn(self, address: str, role: Any, parent: str) -> None:
        """Builds and starts an actor in this process; does nothing if it exists already.

        Its parent is notified when it is lost.
        """
        if self._is_stopping or address in self._members:
            return
        if isinstance(role, _ENDS_WITH_PARENT) and parent in self._members:
            self._members[parent].children.append(address)
        leads = isinstance(role, roles.CoordinatorRole)
        if leads:
            self._coordinators.add(address)
            self._owners.add(address)
        actors = self._actors_of(address)
        made = _Member(
            address,
            actors,
            lambda: actors.build(address, role, self._random),
            parent,
            self._leading if leads else self._summing,
        )
        self._begin(made)

    def _actors_of(self, address: str) -> factory.ActorFactory:
        """Returns the factory of a spawned actor's population."""
        if len(self._factories) == 1:
            return next(iter(self._factories.values()))
        return self._factories[roles.population_of(address)]

    # Ends.

    def end(self, address: str) -> None:
        """Ends an actor in any process; does nothing if there is none."""
        member = self._members.get(address)
        if member is None:
            self._remote.end(address)
        else:
            self._end(member)

    def end_children(self, is_lost: Callable[[str], bool]) -> None:
        """Ends all actors with a lost parent, as `is_lost` tells of the parent's address."""
        for child in [one for one in self._members.values() if one.parent and is_lost(one.parent)]:
            self._end(child)

    def _end(self, member: _Member) -> None:
        """Ends an actor and the Aggregators below; a step that is running is its last one."""
        if member.is_gone:
            return
        member.is_gone = True
        if self._members.get(member.address) is member:
            del self._members[member.address]
            self._coordinators.discard(member.address)
        for timer in member.timers.values():
            timer.cancel()
        member.timers.clear()
        self._refuse_rest(member)
        if member.parent:
            self._on_actor_gone(member.address)
        for child in member.children:
            if child in self._members:
                self._end(self._members[child])

    def _refuse_rest(self, member: _Member) -> None:
        while member.mailbox:
            try:
                message = member.mailbox.popleft()
            except IndexError:  # The actor's thread has taken the last message.
                return
            if type(message) in _OF_DEVICES:
                self._refuse_late(message)

    def _lose(self, member: _Member, failure: str) -> None:
        """Ends an actor that has failed, and notifies its parent, or restarts it."""
        _logger.error("%s failed with %s and is gone", member.address, failure)
        leads = member.address in self._coordinators
        self._end(member)
        if member.address in self._permanent:
            if member.threads is None:
                self._on_selector_lost(member.address)
            self._loop.call_later(_RESTART_SECONDS, self._begin_permanent, member.address)
            return
        for address in member.actors.selectors if leads else (member.parent,):
            self.deliver(address, messages.Lost(member.address))


def _without_old_counts(effects: list[actor.Effect]) -> list[actor.Effect]:
    """Drops all counts of reports but the last one: they are by far the most frequent messages."""
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
