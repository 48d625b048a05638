"""A fleet: simulated devices made from a corpus, run in this process or in several."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import logging
import math
import multiprocessing
import queue
import random
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from cryptography.hazmat.primitives.asymmetric import ed25519

from tff_dpftrl import validation
from tff_dpftrl.data import sources, split, tables, user_text
from tff_dpftrl.runtime.device import attester as attester_lib
from tff_dpftrl.runtime.device import (
    background_loop,
    backoff,
    eligibility,
    known_plans,
    loaded_plans,
    named_tensors,
    participation_timer,
    server_connection,
    session,
    watcher,
)
from tff_dpftrl.runtime.fleet import availability, runner, simulated_device, tally
from tff_dpftrl.runtime.fleet import behaviour as behaviour_lib
from tff_dpftrl.runtime.protocol import attestation
from tff_dpftrl.runtime.server import server_folder

Corpus: TypeAlias = user_text.UserText | named_tensors.UserExamples
"""Texts, or serialized examples, by user."""

_logger = logging.getLogger(__name__)
_QUIET_S = 5.0  # Seconds without a report after which the last round counts as over.
_POLL_S = 0.2


@dataclasses.dataclass(frozen=True)
class ConnectionSettings:
    """Address and keys of the server, which can be pickled.

    Attributes:
      address: HOST:PORT of the server, or several of them separated by commas.
      root_certificates: Certificates in PEM that may prove the server's name.
      plan_keys: Raw public keys of the trusted plan signers, 32 bytes each.
      issuer_key: Raw private key of the issuer of attestation tokens, 32 bytes; None if the
        devices have no tokens.
      server_name: Name in the server's certificate if it is not the host of `address`.
      issuers: Raw public keys of the issuers whose tokens devices accept from each other, 32
        bytes each.
      folder: Folder of the server, from which the address is read before each session; None if
        the address is fixed.
      certified: Files of a platform's certificates and of their private key, which all devices
        share; None if they show no certificates.
    """

    address: str
    root_certificates: bytes
    plan_keys: tuple[bytes, ...]
    issuer_key: bytes | None = dataclasses.field(default=None, repr=False)
    server_name: str | None = None
    issuers: tuple[bytes, ...] = ()
    folder: str | None = None
    certified: tuple[str, str] | None = None

    def connect(
        self, shared_watcher: watcher.Watcher, loop: background_loop.BackgroundLoop
    ) -> server_connection.ServerConnection:
        """Creates a connection that shares a watcher and an event loop."""
        return server_connection.ServerConnection(
            self.address,
            self.root_certificates,
            server_name=self.server_name,
            shared_watcher=shared_watcher,
            loop=loop,
            current_address=self.folder and server_folder.of(self.folder).address,
        )

    def attester(self) -> attester_lib.Attester:
        """Creates the attester of a device."""
        if self.certified is not None:
            return attester_lib.CertificateAttester(*self.certified)
        if self.issuer_key is None:
            return attester_lib.NoAttester()
        key = ed25519.Ed25519PrivateKey.from_private_bytes(self.issuer_key)
        return attester_lib.IssuingAttester(attestation.TokenIssuer(key, clock=time.time))


@dataclasses.dataclass(frozen=True)
class Fleet:
    """Configuration of a fleet.

    Attributes:
      server: Connection settings of the server.
      population: Name of the population.
      data: Name or path of the corpus, for `sources.load_user_text`. Users whom `train` holds
        out are left out.
      num_devices: Number of devices. Each has one user; users are repeated if there are fewer.
      seed: Seed of the choice of users, the behaviour of devices and the order of examples.
      rates: Probabilities of faults.
      day_s: Length of a simulated day in seconds, of which devices are eligible at night only;
        None if they always are.
      start_within_s: Seconds within which each device checks in first, at a random time.
      usual_wait_s: Seconds between the sessions of a device if the server names no time.
      num_connections: Number of connections that the devices of each process share.
      max_sessions: Largest number of concurrent sessions, and of threads, in each process.
      max_training: Largest number of devices that train at the same time, in each process.
      table: Options of reading the corpus, if it is a table.
      features: What an example holds, by name, where `data` is a file of examples by user, for
        `named_tensors.read_users`, all of whom train; None where it is a corpus of texts.
    """

    server: ConnectionSettings
    population: str
    data: str
    num_devices: int
    seed: int = 0
    rates: behaviour_lib.Rates = behaviour_lib.Rates()
    day_s: float | None = None
    start_within_s: float = 5.0
    usual_wait_s: float = 60.0
    num_connections: int = 4
    max_sessions: int = 1000
    max_training: int = 2
    table: tables.TableOptions = tables.TableOptions()
    features: Mapping[str, named_tensors.Feature] | None = None

    def __post_init__(self):
        for name in ("num_devices", "num_connections", "max_sessions", "max_training"):
            validation.integer(name, getattr(self, name), minimum=1)
        validation.integer("seed", self.seed, minimum=0)
        validation.number("start_within_s", self.start_within_s, at_least=0)
        validation.positive("usual_wait_s", self.usual_wait_s)
        if self.day_s is not None:
            validation.positive("day_s", self.day_s)

    def corpus(self) -> Corpus:
        """Loads the users who train; there must be some (ValueError)."""
        if self.features is not None:
            return named_tensors.read_users(self.data, self.features)
        corpus = split.by_user(sources.load_user_text(self.data, table=self.table)).train
        if not len(corpus):
            raise validation.UsageError(
                f"{self.data} has no users to train on: give one with more users."
            )
        return corpus

    def run_part(
        self,
        corpus: Corpus,
        devices: Sequence[int],
        *,
        on_session_end: Callable[[tally.SessionEnd], None],
        stop: threading.Event,
    ) -> None:
        """Runs some of the devices in this process until `stop` is set.

        `on_session_end` is called from many threads.
        """
        with contextlib.ExitStack() as stack:
            shared = (
                watcher.Watcher(),
                stack.enter_context(contextlib.closing(background_loop.BackgroundLoop())),
            )
            connections = [self.server.connect(*shared) for _ in range(self.num_connections)]
            for connection in connections:
                stack.enter_context(contextlib.closing(connection))
            keys = map(ed25519.Ed25519PublicKey.from_public_bytes, self.server.plan_keys)
            plans = loaded_plans.LoadedPlans(keys, max_running=self.max_training)
            plans.load_tensorflow()
            spent = simulated_device.SpentToken()
            contents: dict[bytes, bytes] = {}
            made = [
                dataclasses.replace(
                    self._device(i, corpus, connections[i % len(connections)], plans, spent, stop),
                    known_plans=known_plans.MemoryPlans(contents),
                )
                for i in devices
            ]
            runner.Runner(
                self.population,
                made,
                on_session_end=on_session_end,
                stop=stop,
                clock=time.monotonic,
                waits=backoff.Waits(
                    usual_s=self.usual_wait_s,
                    first_s=self.start_within_s,
                    after_failure_s=min(5.0, self.usual_wait_s),
                ),
                max_sessions=min(self.max_sessions, len(made)),
            ).run()

    def _device(
        self,
        number: int,
        corpus: Corpus,
        connection: server_connection.ServerConnection,
        plans: loaded_plans.LoadedPlans,
        spent: simulated_device.SpentToken,
        stop: threading.Event,
    ) -> simulated_device.SimulatedDevice:
        generator = random.Random(f"{self.seed} device {number}")
        order = random.Random(f"{self.seed} users").sample(corpus.user_ids, len(corpus))
        may_work: eligibility.Eligibility = eligibility.SettableEligibility()
        if self.day_s is not None:
            may_work = availability.Nightly(generator, clock=time.time, day_s=self.day_s)
        return simulated_device.SimulatedDevice(
            connection=connection,
            plans=plans,
            examples=simulated_device.UserTexts(corpus, order[number % len(order)]),
            timer=participation_timer.MemoryTimer(time.time),
            attester=self.server.attester(),
            eligibility=availability.UntilStopped(may_work, stop.is_set),
            generator=generator,
            rates=self.rates,
            is_malicious=self.rates.draw_malicious(generator),
            spent=spent,
            seed=generator.getrandbits(64),
            stop=stop,
            issuers=tuple(map(ed25519.Ed25519PublicKey.from_public_bytes, self.server.issuers)),
        )


class Ending:
    """Stop rule of a fleet: the end of all tasks, and perhaps a number of rounds, or a time."""

    def __init__(
        self,
        *,
        rounds: int | None = None,
        seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Starts the time. None is no limit; rounds count if they have an accepted report."""
        self._rounds = None if rounds is None else validation.integer("rounds", rounds, minimum=1)
        self._clock = clock
        self._end = None if seconds is None else clock() + validation.positive("seconds", seconds)
        self._last_report = clock()
        self._seen: set[tuple[str, int]] = set()
        self.is_finished = False
        """Whether the server has said that no task has a further round."""

    def add(self, end: tally.SessionEnd) -> None:
        """Adds the end of a session."""
        self.is_finished |= end.outcome is session.SessionOutcome.FINISHED
        if end.shape.startswith("-v[]+"):
            self._last_report = self._clock()
            if end.shape == "-v[]+^":
                self._seen.add((end.task, end.round_index))

    def is_reached(self) -> bool:
        """Returns whether to stop; the late reports of the last round are waited for."""
        now = self._clock()
        if self._end is not None and now >= self._end:
            return True
        is_enough = self._rounds is not None and len(self._seen) >= self._rounds
        if not (is_enough or self.is_finished):
            return False
        return len(self._seen) > (self._rounds or math.inf) or now - self._last_report >= _QUIET_S


def run(
    fleet: Fleet,
    ending: Ending,
    *,
    stop: threading.Event,
    on_session_end: Callable[[tally.SessionEnd], None],
    num_processes: int = 1,
) -> None:
    """Runs a fleet until its stop rule is reached, or `stop` is set.

    `stop` is set when the call returns. `on_session_end` is called from this thread. With one
    process, the fleet runs in this one.
    """
    num_processes = validation.integer("num_processes", num_processes, minimum=1)
    if num_processes == 1:
        _run_here(fleet, ending, stop, on_session_end)
    else:
        _run_in_processes(fleet, ending, stop, on_session_end, num_processes)


def _run_here(
    fleet: Fleet,
    ending: Ending,
    stop: threading.Event,
    on_session_end: Callable[[tally.SessionEnd], None],
) -> None:
    corpus = fleet.corpus()
    ends: queue.SimpleQueue[tally.SessionEnd] = queue.SimpleQueue()
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        running = threads.submit(
            fleet.run_part, corpus, range(fleet.num_devices), on_session_end=ends.put, stop=stop
        )
        try:
            _listen(ends, ending, on_session_end, lambda: stop.is_set() or running.done())
        finally:
            stop.set()
        running.result()
    _drain(ends, on_session_end)


def _run_in_processes(
    fleet: Fleet,
    ending: Ending,
    stop: threading.Event,
    on_session_end: Callable[[tally.SessionEnd], None],
    num_processes: int,
) -> None:
    context = multiprocessing.get_context("spawn")
    ends, stop_all = context.Queue(), context.Event()
    processes = [
        context.Process(
            target=_process,
            args=(fleet, range(part, fleet.num_devices, num_processes), ends, stop_all),
            daemon=True,
        )
        for part in range(num_processes)
    ]
    for process in processes:
        process.start()
    try:
        _listen(
            ends,
            ending,
            on_session_end,
            lambda: stop.is_set() or not all(process.is_alive() for process in processes),
        )
        lost = [process.exitcode for process in processes if not process.is_alive()]
        stop_all.set()
        # A process cannot end while it has items in the queue.
        while any(process.is_alive() for process in processes):
            _drain(ends, on_session_end)
            time.sleep(_POLL_S)
        _drain(ends, on_session_end)
    finally:
        stop.set()
        stop_all.set()
        for process in processes:
            process.join(_QUIET_S)
            process.kill()
    if lost:
        raise RuntimeError(f"{len(lost)} processes of the fleet ended with status {lost}.")


def _process(fleet: Fleet, devices: range, ends: multiprocessing.Queue, stop_all) -> None:
    """Runs a part of the fleet in a child process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent handles it, and sets `stop_all`.
    stop = threading.Event()

    def wait_for_end() -> None:
        stop_all.wait()
        stop.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    fleet.run_part(fleet.corpus(), devices, on_session_end=ends.put, stop=stop)


def _listen(
    ends: queue.SimpleQueue | multiprocessing.Queue,
    ending: Ending,
    on_session_end: Callable[[tally.SessionEnd], None],
    is_over: Callable[[], bool],
) -> None:
    while not is_over() and not ending.is_reached():
        with contextlib.suppress(queue.Empty):
            end = ends.get(timeout=_POLL_S)
            ending.add(end)
            on_session_end(end)


def _drain(
    ends: queue.SimpleQueue | multiprocessing.Queue,
    on_session_end: Callable[[tally.SessionEnd], None],
) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            on_session_end(ends.get(timeout=0.01))
