"""A host: a process that runs some of a population's actors, and what it owes the others.

An engine runs the actors that belong here; for the others it asks its host, which carries their
messages. What a host said that did not arrive, and what was on a host that is gone, becomes
what actors and devices are owed (`runtime.actors`): a late report, a device that is gone, an
actor that is lost.
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
from tff_dpftrl.runtime.server import attesting
from tff_dpftrl.runtime.server import engine as engine_lib
from tff_dpftrl.runtime.store import interface, sql

_logger = logging.getLogger(__name__)

_SMALL = 1 << 16  # Bytes that are sealed and opened on the event loop.
_SLOWEST = 1e6  # Bytes a second, for how long an answer may take.
_TO_START = 4  # Times that a host may take longer for its first answer.
_FLUSH_SECONDS = 2.0
_ABANDONED = "the round was abandoned"


@dataclasses.dataclass(frozen=True)
class HostStatus:
    """How a host is.

    Attributes:
      fingerprint: Of its deployment.
      is_serving: Whether it has started.
      failure: Why it could not; empty if it could, or has not yet.
      address: Host and port for devices, of a Selector's host.
      leader: The Coordinator that a Selector follows; empty if it has heard of none.
      store_failure: The last failure that a StoreActor reported; empty if a Coordinator leads.
      tasks: Digests of the tasks that it has read, by name; empty before it has.
    """

    fingerprint: str
    is_serving: bool
    failure: str = ""
    address: str = ""
    leader: str = ""
    store_failure: str = ""
    tasks: Mapping[str, str] = dataclasses.field(default_factory=dict)


class _Child(NamedTuple):
    """Of an actor that was begun elsewhere: who hears of its loss, and whose devices it has."""

    parent: str
    devices: tuple[str, ...]


def _child(begin: mail_lib.Begin) -> _Child:
    return _Child(begin.parent, getattr(begin.role, "devices", ()))


class Host(engine_lib.RemoteActors):
    """What all kinds of hosts (`host_kinds`) have in common.

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
        """Nothing runs before `start`, but mail is taken, and waits.

        Args:
          name: One of the deployment's hosts.
          deployment: What it is built from.
          transport: Reaches the other hosts.
          clock: Seconds since 1970.

        Raises:
          ValueError: If the certificate or key cannot be used.
          OSError: If they cannot be read.
        """
        self.name = name
        # Of two processes of a host the later one is larger.
        self.life = f"{time.time_ns():016x}{secrets.token_hex(4)}"
        self._deployment = deployment
        self._placement = deployment.placement
        self._transport = transport
        self._clock = clock
        self._identity = tls.load(deployment.certificate, deployment.private_key)
        self._seal = sealing.Seal(self._identity.key, deployment.population)
        self._recorder = observed.Recorder(clock=clock)
        self._outbox = mail_lib.Outbox(self._carry, self._failed)
        self._engine: engine_lib.Engine | None = None
        self._store: interface.Store | None = None
        self._tasks: dict[str, str] = {}  # What `served_task` calls digests, by name.
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
        """Builds and starts what runs here.

        Raises:
          binding.ServerError: If an address cannot be bound.
          ValueError: If the deployment cannot be built.
          OSError: If the store or a file cannot be used.
        """
        parts = await asyncio.to_thread(self._load)
        self._tasks = {name: task.digest for name, task in parts.tasks.items()}
        attestation = parts.attestation and attesting.LockedAttestation(parts.attestation)
        actors = parts.actor_factory(
            parts.population,
            selectors=self._placement.selectors,
            pace=parts.pace,
            verify_identity=attesting.verifier(attestation, parts.population.name),
        )
        self._engine = self._made_engine(actors)  # From now on mail may fail.
        await self._begin(parts, attestation)
        self._has_started = True
        early, self._early = self._early, []
        for batch in early:
            with contextlib.suppress(mail_lib.OtherTasks):
                self._hand_out(batch)

    def _load(self) -> Parts:
        """Imports what the builder needs, which takes seconds; in a thread."""
        parts = self._deployment.build()
        if parts.population.name != self._deployment.population:
            raise validation.UsageError(
                f"builder makes the population {parts.population.name!r}, and the deployment is "
                f"of {self._deployment.population!r}: name the same."
            )
        if self._keeps_store:
            self._store = sql.SqlStore(self._deployment.store)
        return parts

    _keeps_store = True

    def _made_engine(self, actors: factory.ActorFactory) -> engine_lib.Engine:
        return engine_lib.Engine(
            actors,
            self._store,
            on_event=self._on_event,
            clock=self._clock,
            permanent=(actors.store_address,),
            on_actor_gone=self._actor_gone,
            remote=self,
        )

    async def _begin(self, parts: Parts, attestation: attesting.LockedAttestation | None) -> None:
        """Starts the engine, and what a kind of host has besides."""
        del parts, attestation
        self._engine.start()

    async def stop(self) -> None:
        """Ends all that runs here, and gives a lease back; nothing happens the second time."""
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
        """How it is."""
        fingerprint = self._deployment.fingerprint()
        return HostStatus(fingerprint, self._has_started, tasks=self._tasks)

    def take_observed(self) -> observed.Taken:
        """What was observed here since this was last called."""
        return self._recorder.take()

    # What others say.

    async def take(self, sealed: bytes) -> str:
        """Takes a batch, unless it was sealed for another process of this host.

        Whoever reaches the network can send again what a host has sealed. So a batch names the
        process that it is for, and its number must be above those of the sender's earlier ones.

        Args:
          sealed: The batch.

        Returns:
          The life of this process. If the batch is for another life, nothing of it is handed
          out: the sender has to seal its mail for this one.

        Raises:
          sealing.NotSealed: If it does not come from a host of this population.
          mail_lib.Replayed: If it was received before.
          mail_lib.OtherTasks: If that has read other tasks; nothing of it is handed out.
        """
        if len(sealed) > _SMALL:
            batch = await asyncio.to_thread(self._seal.open, sealed, self.name)
        else:
            batch = self._seal.open(sealed, self.name)
        if batch.receiver != self.life:
            return self.life
        if batch.number <= self._received.get(batch.life, 0):
            text = f"{self.name} has received batch {batch.number} of {batch.sender} before"
            _logger.error("%s: somebody sends it again, and it is not heard", text)
            raise mail_lib.Replayed(text)
        self._received[batch.life] = batch.number
        self._see(batch.sender, batch.life)
        if self._has_started:
            self._hand_out(batch)
        else:
            self._early.append(batch)
        return self.life

    def _hand_out(self, batch: mail_lib.Batch) -> None:
        if batch.tasks != self._tasks:
            # Or reports that were made by one plan would be summed, and accounted for, by another.
            text = f"{batch.sender} has read other tasks than {self.name} from the same paths"
            _logger.error("%s: what it says is not heard", text)
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
                    self._hear_of(mail)

    def _deliver(self, to: str, message: Any) -> None:
        self._engine.deliver(to, message)

    def _begin_actor(self, begin: mail_lib.Begin) -> None:
        self._engine.spawn(begin.address, begin.role, begin.parent)

    def _hear_of(self, mail: mail_lib.Ended | mail_lib.Told) -> None:
        """Hears of what concerns devices; only Selectors' hosts have some."""

    # What is said to others.

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

    def _on_event(self, now: float, event: Any) -> mail_lib.Told:
        """Tells the Selectors of an event, so that it outlives this process."""
        told = mail_lib.Told(now, self._recorder.note(now, event))
        for selector in self._placement.selectors:
            self._outbox.post(selector, told)
        return told

    async def _carry(self, host: str, mail: list[mail_lib.Mail], num_bytes: int) -> None:
        life = self._receivers.get(host, "")
        for _ in range(2):  # The second time for the process that has answered the first time.
            batch = mail_lib.Batch(
                self.name, self.life, life, next(self._numbers), self._tasks, tuple(mail)
            )
            meant, life = life, await self._call(host, batch, num_bytes)
            self._receivers[host] = life
            if life == meant:
                break
        else:
            raise mail_lib.Unreachable
        self._see(host, life)
        children = self._children.setdefault(host, {})
        for one in mail:
            if isinstance(one, mail_lib.Begin) and self._engine.has(one.parent):
                children[one.address] = _child(one)
            elif isinstance(one, mail_lib.End):
                children.pop(one.address, None)

    async def _call(self, host: str, batch: mail_lib.Batch, num_bytes: int) -> str:
        """Seals a batch and has a host take it; returns the life that has answered."""
        if num_bytes > _SMALL:
            sealed = await asyncio.to_thread(self._seal.seal, batch, host)
        else:
            sealed = self._seal.seal(batch, host)
        patience = self._patience(host) + len(sealed) / _SLOWEST
        try:
            return await asyncio.wait_for(self._transport.call(host, sealed), patience)
        except asyncio.TimeoutError:
            _logger.error("%s does not answer and is started anew", host)
            with contextlib.suppress(mail_lib.Unreachable):
                await self._transport.restart(host)
            raise mail_lib.Unreachable from None

    def _patience(self, host: str) -> float:
        """Seconds that an answer may take; more where a process starts, also after a loss."""
        return self._deployment.answer_seconds * (1 if host in self._watches else _TO_START)

    def _failed(self, host: str, mail: list[mail_lib.Mail]) -> None:
        """Does what is owed for mail that was lost."""
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
        """Has those not wait who may not have heard of who is lost; others take no notice."""
        for device in devices:
            self._engine.deliver(device, messages.ComeBack(device, (0.0,), _ABANDONED))

    # Ends.

    def _actor_gone(self, address: str) -> None:
        """An actor that was spawned has ended here."""
        self._forget_children(address)

    def _forget_children(self, parent: str) -> None:
        for children in self._children.values():
            for child in [one for one, child in children.items() if child.parent == parent]:
                del children[child]

    # Which processes live.

    def _see(self, host: str, life: str) -> None:
        """Notes that a process of another host lives."""
        known = self._lives.get(host, "")
        if life < known or self._is_stopping:
            return  # A former one, that does not know yet that another has taken its place.
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
        """Does what is owed for the loss of another host's process."""
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
        """Does what a kind of host owes besides for the loss of another one."""

    def _job(self, work: Coroutine[Any, Any, None]) -> asyncio.Task:
        job = asyncio.get_running_loop().create_task(work)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        return job
