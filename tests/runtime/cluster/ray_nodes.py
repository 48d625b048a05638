"""Two nodes of Ray on this machine, and simulated devices that take part until something is so."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal

import grpc
import pytest

from tests.runtime.server import example_secure_task
from tests.runtime.server import example_service as example
from tff_dpftrl.runtime.actors import events, population
from tff_dpftrl.runtime.cluster import observed
from tff_dpftrl.runtime.protocol import wire_pb2
from tff_dpftrl.runtime.store import sql

# A node that is gone is found out within two seconds.
_QUICK = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 3,
    "kill_worker_timeout_milliseconds": 60_000,  # Who is stopped may return.
}
NODE = {"num_cpus": 1, "object_store_memory": 2**27, "node_ip_address": "127.0.0.2"}


@contextlib.contextmanager
def nodes(config=_QUICK):
    """A cluster of two nodes, of which one may be removed; `config` is Ray's own."""
    pytest.importorskip("ray", reason="Ray is not installed: run `make test-distributed`.")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    from ray import cluster_utils

    head = {**NODE, "include_dashboard": False, "_system_config": dict(config)}
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.second = cluster.add_node(**NODE)
        yield cluster
    finally:
        cluster.shutdown()


@contextlib.contextmanager
def connected(cluster):
    """This process as one that looks at a cluster."""
    import ray

    ray.init(cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()


class Devices:
    """Devices that take part again and again, at one Selector after the other."""

    def __init__(self, folder, running, story=None):
        self._folder = folder
        self._running = running
        self._story = story or self._report
        self._numbers = itertools.count(1)
        self.accepted: dict[str, list[int]] = {}  # Reports by attempt.
        self._tasks: list[asyncio.Task] = []

    async def _report(self, channel, number):
        configuration, answer = await example.take_part(channel, str(number).encode())
        if answer is not None and answer.accepted:
            self.accepted.setdefault(configuration.attempt, []).append(number)

    async def _live(self, place):
        while True:
            address = self._running.addresses[place % len(self._running.addresses)]
            try:
                async with example.channel_to(self._folder, address) as channel:
                    await asyncio.wait_for(self._story(channel, next(self._numbers)), 60)
            except (grpc.aio.AioRpcError, EOFError, asyncio.TimeoutError):
                await asyncio.sleep(0.1)
            await asyncio.sleep(0.01)
            place += 1

    async def __aenter__(self):
        self._tasks = [asyncio.ensure_future(self._live(i)) for i in range(8)]
        return self

    async def __aexit__(self, *unused):
        for task in self._tasks:
            task.cancel()
        for ended in await asyncio.gather(*self._tasks, return_exceptions=True):
            if not isinstance(ended, asyncio.CancelledError):
                raise ended


async def secure_report(channel, number):
    """The story of a device of `example_secure_task`."""
    stream = await example.connect(channel)
    await stream.check_in()
    told = await stream.receive()
    if isinstance(told, wire_pb2.Configuration):
        await example_secure_task.SecureDevice(stream, told, (number % 100, 0, 1)).finish()


class Seen:
    """What the hosts of a cluster have observed."""

    def __init__(self, running):
        self._running = running
        self._reader = observed.Reader()
        self.notes = example.Notes()

    async def look(self):
        (recordings,) = (await self._running.observed()).values()
        await self._reader.replay(recordings, self.notes)

    def released(self):
        """Attempts by round, of all rounds that were released."""
        attempts: dict[int, set[str]] = {}
        for event in self.notes.of(events.RoundReleased):
            attempts.setdefault(event.round_index, set()).add(event.attempt)
        return attempts


def commits(deployed, task="sum"):
    """Rows of all committed rounds, skipped ones included."""
    with sql.SqlStore(deployed.store) as store:
        return store.history(deployed.populations[0], task)


def history(deployed, task="sum"):
    """Rows of the released rounds."""
    return [row for row in commits(deployed, task) if not row.get(population.SKIPPED)]


def lease(deployed):
    with sql.SqlStore(deployed.store) as store:
        return store.lease(deployed.populations[0])


async def progress(deployed, seen, rounds=2, seconds=120.0):
    """Waits for so many further rounds, and returns how long the first one took."""
    loop = asyncio.get_running_loop()
    begun, done = loop.time(), len(history(deployed))
    first = None
    while len(history(deployed)) < done + rounds:
        assert loop.time() < begun + seconds, "there is no progress"
        if first is None and len(history(deployed)) > done:
            first = loop.time() - begun
        await asyncio.sleep(0.05)
        await seen.look()
    return (loop.time() - begun) if first is None else first


def check(deployed, devices, seen):
    """The laws that hold whoever was killed."""
    committed, rows = commits(deployed), history(deployed)
    attempts = {row["round"]: row["attempt"] for row in rows}
    assert [row["round"] for row in committed] == list(range(len(committed)))
    assert len(set(attempts.values())) == len(rows)
    assert [row["epoch"] for row in committed] == sorted(row["epoch"] for row in committed)
    with sql.SqlStore(deployed.store) as store:
        commit = store.last_commit(deployed.populations[0], "sum")
    assert commit.rounds_done == len(committed)
    # The example step adds each round's sum and 1000: no round is in the model twice.
    assert int(commit.model) == sum(row["total"] for row in rows) + 1000 * len(rows)
    for row in rows:
        # A device may not have heard that its report was in the sum; none is in it twice.
        heard = devices.accepted.get(row["attempt"], [])
        assert len(heard) == len(set(heard)) <= row["devices/reports"] + row.get("lost", 0)
        if len(heard) == row["devices/reports"]:
            assert row["total"] == sum(heard)
    for round_index, released in seen.released().items():
        assert released == {attempts[round_index]}


def kill(place, sign=signal.SIGKILL):
    logging.getLogger(__name__).info("%s to %s", sign, place)
    os.kill(place.pid, sign)
