"""A fleet: its devices made from a corpus, run in this process or in several."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import logging
import multiprocessing
import queue
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence

from cryptography.hazmat.primitives.asymmetric import ed25519

from tff_dpftrl import validation
from tff_dpftrl.data import sources, split, user_text
from tff_dpftrl.runtime.device import attester as attester_lib
from tff_dpftrl.runtime.device import (
    background_loop,
    eligibility,
    loaded_plans,
    participation_timer,
    scheduler,
    server_connection,
    watcher,
)
from tff_dpftrl.runtime.fleet import availability, runner, simulated_device, tally
from tff_dpftrl.runtime.fleet import behaviour as behaviour_lib
from tff_dpftrl.runtime.protocol import attestation
from tff_dpftrl.runtime.server import server_folder

_logger = logging.getLogger(__name__)
_QUIET_S = 5.0  # After which nobody reports for the last round any more.
_LOOK_S = 0.2


@dataclasses.dataclass(frozen=True)
class Server:
    """Where the server is, and who is believed; all of it can be sent to another process.

    Attributes:
      address: HOST:PORT, or several with commas in between.
      root_certificates: PEM, see `ServerConnection`.
      plan_keys: Raw public keys of those whose plans are run, 32 bytes each.
      issuer_key: Raw private key of the issuer of tokens, 32 bytes; None if devices have none.
      server_name: See `ServerConnection`.
      issuers: Raw public keys of issuers whose tokens devices believe of each other, 32 bytes
        each.
      folder: The server's folder, where the address is looked up again before each session;
        None if it stays.
    """

    address: str
    root_certificates: bytes
    plan_keys: tuple[bytes, ...]
    issuer_key: bytes | None = dataclasses.field(default=None, repr=False)
    server_name: str | None = None
    issuers: tuple[bytes, ...] = ()
    folder: str | None = None

    def connect(
        self, watcher_: watcher.Watcher, loop: background_loop.BackgroundLoop
    ) -> server_connection.ServerConnection:
        """A new connection, with parts that are shared."""
        return server_connection.ServerConnection(
            self.address,
            self.root_certificates,
            server_name=self.server_name,
            watcher_=watcher_,
            loop=loop,
            look=self.folder and server_folder.of(self.folder).address,
        )

    def attester(self) -> attester_lib.Attester:
        """Who vouches for devices."""
        if self.issuer_key is None:
            return attester_lib.NoAttester()
        key = ed25519.Ed25519PrivateKey.from_private_bytes(self.issuer_key)
        return attester_lib.IssuingAttester(attestation.TokenIssuer(key, clock=time.time))


@dataclasses.dataclass(frozen=True)
class Fleet:
    """What a fleet is like.

    Attributes:
      server: Its server.
      population: Name of the population.
      data: The corpus, as `sources.load_user_text` takes it. Users whom `train` holds out are
        left out.
      num_devices: Number of devices, a user each; users come again where there are too few.
      seed: Decides who the users are, how devices behave and the order of their examples.
      rates: What goes wrong.
      day_s: Length of a day after which devices may work at night only; None if they always may.
      start_within_s: Devices check in first at random in this time, in seconds.
      usual_wait_s: Seconds between sessions if the server does not say.
      num_connections: Connections that the devices share, in each process.
      max_sessions: Sessions at a time, in each process; a thread each.
      max_training: Devices that train at a time, in each process.
    """

    server: Server
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

    def __post_init__(self):
        for name in ("num_devices", "num_connections", "max_sessions", "max_training"):
            validation.integer(name, getattr(self, name), minimum=1)
        validation.integer("seed", self.seed, minimum=0)
        validation.number("start_within_s", self.start_within_s, at_least=0)
        validation.positive("usual_wait_s", self.usual_wait_s)
        if self.day_s is not None:
            validation.positive("day_s", self.day_s)

    def corpus(self) -> user_text.UserText:
        """The users who train.

        Raises:
          ValueError: If there is no such corpus, or nobody in it trains.
        """
        corpus = split.by_user(sources.load_user_text(self.data)).train
        if not len(corpus):
            raise validation.UsageError(
                f"{self.data} has no users to train on: give one with more users."
            )
        return corpus

    def run_part(
        self,
        corpus: user_text.UserText,
        devices: Sequence[int],
        *,
        hear: Callable[[tally.SessionEnd], None],
        stop: threading.Event,
    ) -> None:
        """Runs some of the devices in this process, until it is told to stop.

        Args:
          corpus: What `corpus` returns.
          devices: Numbers of the devices, from 0 to below `num_devices`.
          hear: Told of every session; called from many threads.
          stop: Ends everything.
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
            made = [
                self._device(i, corpus, connections[i % len(connections)], plans, spent, stop)
                for i in devices
            ]
            runner.Runner(
                self.population,
                made,
                hear=hear,
                stop=stop,
                clock=time.monotonic,
                waits=scheduler.Waits(
                    usual_s=self.usual_wait_s,
                    first_s=self.start_within_s,
                    after_failure_s=min(5.0, self.usual_wait_s),
                ),
                max_sessions=min(self.max_sessions, len(made)),
            ).run()

    def _device(
        self,
        number: int,
        corpus: user_text.UserText,
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
    """When a fleet has done what it was started for."""

    def __init__(
        self,
        *,
        rounds: int | None = None,
        seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Begins now.

        Args:
          rounds: After so many rounds in which a report counted; None if not by rounds.
          seconds: After so many seconds; None if not by time.
          clock: Seconds, never going back.
        """
        self._rounds = None if rounds is None else validation.integer("rounds", rounds, minimum=1)
        self._clock = clock
        self._end = None if seconds is None else clock() + validation.positive("seconds", seconds)
        self._last_report = clock()
        self._seen: set[tuple[str, int]] = set()

    def hear(self, end: tally.SessionEnd) -> None:
        """Takes note of a session."""
        if end.shape.startswith("-v[]+"):
            self._last_report = self._clock()
            if end.shape == "-v[]+^":
                self._seen.add((end.task, end.round_index))

    def is_reached(self) -> bool:
        """Whether it is time: of the last round, once its late reports have come, too."""
        now = self._clock()
        if self._end is not None and now >= self._end:
            return True
        if self._rounds is None or len(self._seen) < self._rounds:
            return False
        return len(self._seen) > self._rounds or now - self._last_report >= _QUIET_S


def run(
    fleet: Fleet,
    ending: Ending,
    *,
    stop: threading.Event,
    hear: Callable[[tally.SessionEnd], None],
    num_processes: int = 1,
) -> None:
    """Runs a fleet to its end.

    Args:
      fleet: The fleet.
      ending: When it ends by itself.
      stop: Ends it earlier; is set at the end.
      hear: Told of every session, one at a time, from this thread.
      num_processes: Number of processes; with 1, this one.

    Raises:
      ValueError: If the corpus cannot be read.
      RuntimeError: If a process ended before it should.
    """
    num_processes = validation.integer("num_processes", num_processes, minimum=1)
    if num_processes == 1:
        _run_here(fleet, ending, stop, hear)
    else:
        _run_in_processes(fleet, ending, stop, hear, num_processes)


def _run_here(
    fleet: Fleet,
    ending: Ending,
    stop: threading.Event,
    hear: Callable[[tally.SessionEnd], None],
) -> None:
    corpus = fleet.corpus()
    ends: queue.SimpleQueue[tally.SessionEnd] = queue.SimpleQueue()
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        running = threads.submit(
            fleet.run_part, corpus, range(fleet.num_devices), hear=ends.put, stop=stop
        )
        try:
            _listen(ends, ending, hear, lambda: stop.is_set() or running.done())
        finally:
            stop.set()
        running.result()
    _drain(ends, hear)


def _run_in_processes(
    fleet: Fleet,
    ending: Ending,
    stop: threading.Event,
    hear: Callable[[tally.SessionEnd], None],
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
            hear,
            lambda: stop.is_set() or not all(process.is_alive() for process in processes),
        )
        lost = [process.exitcode for process in processes if not process.is_alive()]
        stop_all.set()
        # What is in the queue keeps a process from ending.
        while any(process.is_alive() for process in processes):
            _drain(ends, hear)
            time.sleep(_LOOK_S)
        _drain(ends, hear)
    finally:
        stop.set()
        stop_all.set()
        for process in processes:
            process.join(_QUIET_S)
            process.kill()
    if lost:
        raise RuntimeError(f"{len(lost)} processes of the fleet ended with status {lost}.")


def _process(fleet: Fleet, devices: range, ends: multiprocessing.Queue, stop_all) -> None:
    """Runs a part of the fleet in a process of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The first process is told, and tells us.
    stop = threading.Event()

    def wait_for_end() -> None:
        stop_all.wait()
        stop.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    fleet.run_part(fleet.corpus(), devices, hear=ends.put, stop=stop)


def _listen(
    ends: queue.SimpleQueue | multiprocessing.Queue,
    ending: Ending,
    hear: Callable[[tally.SessionEnd], None],
    is_over: Callable[[], bool],
) -> None:
    while not is_over() and not ending.is_reached():
        with contextlib.suppress(queue.Empty):
            end = ends.get(timeout=_LOOK_S)
            ending.hear(end)
            hear(end)


def _drain(
    ends: queue.SimpleQueue | multiprocessing.Queue, hear: Callable[[tally.SessionEnd], None]
) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            hear(ends.get(timeout=0.01))
