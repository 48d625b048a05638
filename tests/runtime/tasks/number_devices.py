"""Devices of the task in `small_folder`, which take part again and again."""

from __future__ import annotations

import contextlib
import random
import threading
import time

from tests.runtime.plans import small_tasks
from tests.runtime.tasks import small_folder
from tff_dpftrl.runtime import signing_keys
from tff_dpftrl.runtime.device import (
    attester,
    backoff,
    device_runtime,
    eligibility,
    example_store,
    loaded_plans,
    participation_timer,
    scheduler,
    server_connection,
)
from tff_dpftrl.runtime.protocol import attestation


class Numbers(example_store.ExampleStore):
    """Examples of `small_folder`, others for each seed."""

    def __init__(self, seed):
        self._seed = seed

    def select(self, collection, *, max_examples, recorded_since=None):
        return small_folder.examples(self._seed)[:max_examples]


class _Quick:
    """A clock for devices that come as soon as they may, whatever the server says."""

    def __init__(self):
        self._begin = time.monotonic()

    def __call__(self):
        return 1e6 * (time.monotonic() - self._begin)


@contextlib.contextmanager
def running(folder, count=8, populations=("tests",), *, first=0, plans=None):
    """Devices that come again and again to all populations, and rest when they have to.

    `first` is the seed of the first one's examples.
    """
    plans = plans or loaded_plans.LoadedPlans(small_tasks.KEYS, max_running=2)
    key = signing_keys.load_private(folder.issuer)
    connection = server_connection.ServerConnection(
        folder.address(), folder.certificate.read_bytes()
    )
    stop = threading.Event()

    def run(seed):
        own = device_runtime.DeviceRuntime(
            connection,
            plans,
            Numbers(seed),
            participation_timer.MemoryTimer(time.time),
            attester.IssuingAttester(attestation.TokenIssuer(key, clock=time.time)),
            eligibility.SettableEligibility(),
            generator=random.Random(seed),
        )
        schedule = scheduler.Schedule(
            populations,
            clock=_Quick(),
            generator=own.generator,
            waits=backoff.Waits(first_s=0.0),
        )
        try:
            scheduler.run_jobs(
                schedule,
                lambda population: own.run_session(population).result,
                own.eligibility,
                wait=lambda seconds: stop.wait(min(seconds, 0.05)) and None,
                should_stop=stop.is_set,
                turn=own.turn,
            )
        except RuntimeError:  # Of a session that the closed connection ended.
            if not stop.is_set():
                raise

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(first, first + count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        connection.close()
        for thread in threads:
            thread.join(30)
