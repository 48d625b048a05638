"""A host: a process that runs some of a server's actors and sends messages to the others.

An engine runs the actors of this host; its host carries messages to actors elsewhere. If mail
does not arrive, or another host is lost, the host sends the failure messages that actors and
devices expect (`runtime.actors`): a late report, a device that is gone, an actor that is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NamedTuple

from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.runtime import tls
from tff_dpftrl.runtime.actors import factory, messages
from tff_dpftrl.runtime.cluster import mail as mail_lib
from tff_dpftrl.runtime.cluster import observed, sealing
from tff_dpftrl.runtime.cluster.deployment import ClusterDeployment, Parts
from tff_dpftrl.runtime.cluster.transport import Transport
from tff_dpftrl.runtime.server import attesting, served_population
from tff_dpftrl.runtime.server import engine as engine_lib
from tff_dpftrl.runtime.store import interface, sql

_logger = logging.getLogger(__name__)

_SMALL = 1 << 16  # Largest size in bytes that is sealed and opened on the event loop.
_SLOWEST = 1e6  # Assumed transfer rate for the timeout of an answer, in bytes a second.
_TO_START = 4  # Factor of the timeout for the first answer of a process.
_FLUSH_SECONDS = 2.0
_STORE = "store"
_ABANDONED = "the round was abandoned"


@dataclasses.dataclass(frozen=True)
class HostStatus:
    """The status of a host.

    Attributes:
      fingerprint: Fingerprint of the deployment.
      is_serving: Whether the host has started.
      failure: Reason why the host could not start; empty if it did, or has not tried yet.
      address: HOST:PORT for devices, on a Selector's host; empty on others.
      leader: Addresses of the Coordinators that a Selectors' host follows, with commas; empty
        unless all populations have one.
      store_failure: The last failure that a StoreActor reported; empty if a Coordinator leads.
      tasks: Digests of the tasks that the host has read, by population and task; empty before.
    """

    fingerprint: str
    is_serving: bool
    failure: str = ""
    address: str = ""
    leader: str = ""
    store_failure: str = ""
    tasks: Mapping[str, str] = dataclasses.field(default_factory=dict)


class _Child(NamedTuple):
    """An actor on another host: the address of its parent, and its devices."""

    parent: str
    devices: tuple[str, ...]


def _child(begin: mail_lib.Begin) -> _Child:
    return _Child(begin.parent, getattr(begin.role, "devices", ()))


class Host(engine_lib.RemoteActors):
    """Base class of all kinds of hosts (`host_kinds`).

    All methods are for one event loop.
    """

    def __init__(
        self,
        name: str,
        deployment: ClusterDeployment,
        transport: Transport,
        *,
        clock: Callable[[], float] = time.time,
    ):
        """Creates one of the deployment's hosts, which queues mail until `start`."""
        self.name = name
        # Id of this process, which is larger than the ids of former processes of the host.
        self.life = f"{time.time_ns():016x}{secrets.token_hex(4)}"
        self._deployment = deployment
        self._placement = deployment.placement
        self._transport = transport
        self._clock = clock
        self._identity = tls.load(deployment.certificate, deployment.private_key)
        self._seal = sealing.Seal(self._identity.key, deployment.name)
        self._recorders = {name: observed.Recorder(clock=clock) for name in deployment.populations}
        self._outbox = mail_lib.Outbox(self._carry, self._failed)
        self._engine: engine_lib.Engine | None = None
        self._store: interface.Store | None = None
        self._tasks: dict[str, str] = {}  # What `served_task` calls digests.
        self._has_started = False
        self._early: list[mail_lib.Batch] = []  # Before it has started.
        self._lives: dict[str, str] = {}  # Of the other hosts.
        self._numbers = itertools.count(1)  # Of the batches that this process sends.
        self._received: dict[str, int] = {}  # The last number, by the life of the sender.
        self._receivers: dict[str, str] = {}  # The life that has answered last, by host.
        self._watches: dict[str, asyncio.Task] = {}
        self._children: dict[str, dict[str, _Child]] = {}  # By host: who was begun there.
        self._jobs: set[asyncio.Task] = set()
        self._is_stopping = False

    async def start(self) -> None:
        """Builds the parts of the server, and starts the actors of this host."""
        parts = await asyncio.to_thread(self._load)
        self._tasks = {
            f"{one.name}/{name}": task.digest
            for one in parts.populations
            for name, task in one.tasks.items()
        }
        attestation = parts.attestation and attesting.LockedAttestation(parts.attestation)

        def address(place: str, name: str) -> str:
            return served_population.address(place, name, parts.populations)

        actors = [
            parts.actor_factory(
                one.population,
                selectors=tuple(address(host, one.name) for host in self._placement.selectors),
                pace=one.pace,
                store_address=address(_STORE, one.name),
                verify_identity=attesting.verifier(attestation, one.name),
            )
            for one in parts.populations
        ]
        self._engine = self._made_engine(actors)  # From now on mail may fail.
        await self._begin(parts, attestation)
        self._has_started = True
        early, self._early = self._early, []
        for batch in early:
            with contextlib.suppress(mail_lib.OtherTasks):
                self._hand_out(batch)

    def _load(self) -> Parts:
        """Builds the parts, which takes seconds; to be run in a thread."""
        parts = self._deployment.build()
        made = tuple(one.name for one in parts.populations)
        if made != self._deployment.populations:
            raise validation.UsageError(
                f"builder makes the populations {made}, and the deployment is of "
                f"{self._deployment.populations}: name the same, in the same order."
            )
        served_population.check(parts.populations)
        if self._keeps_store:
            self._store = sql.SqlStore(self._deployment.store)
        return parts

    _keeps_store = True

    def _made_engine(self, actors: list[factory.ActorFactory]) -> engine_lib.Engine:
        return engine_lib.Engine(
            actors,
            self._store,
            on_event=self._on_event,
            clock=self._clock,
            permanent=[one.store_address for one in actors],
            on_actor_gone=self._actor_gone,
            remote=self,
        )

    async def _begin(self, parts: Parts, attestation: attesting.LockedAttestation | None) -> None:
        """Starts the engine, and further services in subclasses."""
        del parts, attestation
        self._engine.start()

    async def stop(self) -> None:
        """Ends all actors and releases the leases; does nothing the second time."""
        if self._is_stopping:
            return
        self._is_stopping = True
        if self._engine is not None:
            await self._engine.stop()
        await self._outbox.flush(_FLUSH_SECONDS)
        self._outbox.close()
        for task in (*self._watches.values(), *self._jobs):
            task.cancel()
        if self._store is not None:
            self._store.close()

    def status(self) -> HostStatus:
        """Returns the status of this host."""
        fingerprint = self._deployment.fingerprint()
        return HostStatus(fingerprint, self._has_started, tasks=self._tasks)

    def take_observed(self) -> dict[str, observed.Recording]:
        """Returns the recordings of this host since the last call, by population."""
        return {name: recorder.take() for name, recorder in self._recorders.items()}

    # Mail of other hosts.

    async def take(self, sealed: bytes) -> str:
        """Takes a sealed batch, and returns the id of this process.

        An attacker on the network can replay sealed batches. So a batch names the process for
        which it is, and its number must be above those of the sender's earlier batches
        (`Replayed`). Mail for another process is dropped: the sender must seal it for this one. So
        is mail of a sender that has read other tasks (`OtherTasks`). What no host of this server
        has sealed is refused (`NotSealed`).
        """
        if len(sealed) > _SMALL:
            batch = await asyncio.to_thread(self._seal.open, sealed, self.name)
        else:
            batch = self._seal.open(sealed, self.name)
        if batch.receiver != self.life:
            return self.life
        if batch.number <= self._received.get(batch.life, 0):
            text = f"{self.name} has received batch {batch.number} of {batch.sender} before"
            _logger.error("%s: the replay is refused", text)
            raise mail_lib.Replayed(text)
        self._received[batch.life] = batch.number
        self._note_process(batch.sender, batch.life)
        if self._has_started:
            self._hand_out(batch)
        else:
            self._early.append(batch)
        return self.life

    def _hand_out(self, batch: mail_lib.Batch) -> None:
        if batch.tasks != self._tasks:
            # Otherwise reports of one plan would be summed, and accounted for, by another plan.
            text = f"{batch.sender} has read other tasks than {self.name} from the same paths"
            _logger.error("%s: its mail is refused", text)
            raise mail_lib.OtherTasks(text)
        for mail in batch.mail:
            match mail:
                case mail_lib.Deliver():
                    self._deliver(mail.to, mail.message)
                case mail_lib.Begin():
                    self._begin_actor(mail)
                case mail_lib.End():
                    self._engine.end(mail.address)
                case _:
                    self._on_notice(mail)

    def _deliver(self, to: str, message: Any) -> None:
        self._engine.deliver(to, message)

    def _begin_actor(self, begin: mail_lib.Begin) -> None:
        self._engine.spawn(begin.address, begin.role, begin.parent)

    def _on_notice(self, mail: mail_lib.Ended | mail_lib.EventNotice) -> None:
        """Handles a notice that concerns devices; only Selectors' hosts have devices."""

    # Mail to other hosts.

    @override
    def send(self, to: str, message: Any) -> bool:
        host = self._placement.host_of(to)
        if host in ("", self.name):
            return False
        self._outbox.post(host, mail_lib.Deliver(to, message))
        return True

    @override
    def spawn(self, parent: str, address: str, role: Any) -> bool:
        host = self._placement.host_of(address)
        if host in ("", self.name):
            return False
        self._outbox.post(host, mail_lib.Begin(address, role, parent))
        return True

    @override
    def end(self, address: str) -> None:
        host = self._placement.host_of(address)
        if host not in ("", self.name):
            self._outbox.post(host, mail_lib.End(address))

    def _on_event(self, now: float, event: Any, population: str) -> mail_lib.EventNotice:
        """Tells the Selectors' hosts of an event, so that it outlives this process."""
        named = self._recorders[population].note(now, event)
        notice = mail_lib.EventNotice(now, named, population)
        for selector in self._placement.selectors:
            self._outbox.post(selector, notice)
        return notice

    async def _carry(self, host: str, mail: list[mail_lib.Mail], num_bytes: int) -> None:
        life = self._receivers.get(host, "")
        for _ in range(2):  # A second time if another process than the expected one answers.
            batch = mail_lib.Batch(
                self.name, self.life, life, next(self._numbers), self._tasks, tuple(mail)
            )
            meant, life = life, await self._call(host, batch, num_bytes)
            self._receivers[host] = life
            if life == meant:
                break
        else:
            raise mail_lib.Unreachable
        self._note_process(host, life)
        children = self._children.setdefault(host, {})
        for one in mail:
            if isinstance(one, mail_lib.Begin) and self._engine.has(one.parent):
                children[one.address] = _child(one)
            elif isinstance(one, mail_lib.End):
                children.pop(one.address, None)

    async def _call(self, host: str, batch: mail_lib.Batch, num_bytes: int) -> str:
        """Seals a batch and sends it to a host; returns the id of the process that answered."""
        if num_bytes > _SMALL:
            sealed = await asyncio.to_thread(self._seal.seal, batch, host)
        else:
            sealed = self._seal.seal(batch, host)
        patience = self._patience(host) + len(sealed) / _SLOWEST
        try:
            return await asyncio.wait_for(self._transport.call(host, sealed), patience)
        except asyncio.TimeoutError:
            _logger.error("%s does not answer and is restarted", host)
            with contextlib.suppress(mail_lib.Unreachable):
                await self._transport.restart(host)
            raise mail_lib.Unreachable from None

    def _patience(self, host: str) -> float:
        """Returns the timeout of an answer in seconds; it is longer while a process starts."""
        return self._deployment.answer_seconds * (1 if host in self._watches else _TO_START)

    def _failed(self, host: str, mail: list[mail_lib.Mail]) -> None:
        """Sends the failure messages for lost mail."""
        del host
        for one in mail:
            if isinstance(one, mail_lib.Deliver):
                self._engine.undeliverable(one.message)
            elif isinstance(one, mail_lib.Begin):
                self._lose_child(one.address, _child(one))

    def _lose_child(self, address: str, child: _Child) -> None:
        self._engine.deliver(child.parent, messages.Lost(address))
        self._send_away(child.devices)

    def _send_away(self, devices: tuple[str, ...]) -> None:
        """Sends devices away that may wait for a lost actor; others ignore the message."""
        for device in devices:
            self._engine.deliver(device, messages.ComeBack(device, (0.0,), _ABANDONED))

    # Ends.

    def _actor_gone(self, address: str) -> None:
        """Handles the end of a spawned actor on this host."""
        self._forget_children(address)

    def _forget_children(self, parent: str) -> None:
        for children in self._children.values():
            for child in [one for one, child in children.items() if child.parent == parent]:
                del children[child]

    # Processes of other hosts.

    def _note_process(self, host: str, life: str) -> None:
        """Notes that a process of another host runs, and watches it."""
        known = self._lives.get(host, "")
        if life < known or self._is_stopping:
            return  # A former process that has not ended yet.
        if life == known and host in self._watches:
            return
        if known and life != known and host in self._watches:
            self._lose(host, known)
        self._lives[host] = life
        self._watches[host] = self._job(self._watch(host, life))

    async def _watch(self, host: str, life: str) -> None:
        with contextlib.suppress(mail_lib.Unreachable):
            await self._transport.watch(host, life)
        if self._watches.get(host) is asyncio.current_task():
            self._lose(host, life)

    def _lose(self, host: str, life: str) -> None:
        """Sends the failure messages for the loss of another host's process."""
        watch = self._watches.pop(host, None)
        if watch is not None and watch is not asyncio.current_task():
            watch.cancel()
        children = self._children.pop(host, {})
        if self._engine is None or self._is_stopping:
            return
        for address, child in children.items():
            self._lose_child(address, child)
        self._do_without(host, life)

    def _do_without(self, host: str, life: str) -> None:
        """Handles the loss of another host's process; subclasses extend it."""

    def _job(self, work: Coroutine[Any, Any, None]) -> asyncio.Task:
        job = asyncio.get_running_loop().create_task(work)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        return job
