"""A server on two nodes of Ray, whoever is killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.runtime.cluster import example_cluster, ray_nodes
from tests.runtime.server import example_service as example
from tff_dpftrl.runtime.actors import events

_QUICK = {"heartbeat_seconds": 0.5, "silence_seconds": 2.0, "lease_seconds": 6.0}


@pytest.fixture(scope="module")
def nodes():
    with ray_nodes.nodes() as cluster:
        yield cluster


@contextlib.asynccontextmanager
async def _running(deployed, nodes):
    from tff_dpftrl.runtime.cluster import cluster

    made = cluster.RayCluster(deployed, ray_address=nodes.address)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


def _play(deployed, nodes, story, *, device=None, folder):
    """Runs a story of a cluster, devices, and what is seen."""

    async def run():
        async with _running(deployed, nodes) as running:
            seen = ray_nodes.Seen(running)
            async with ray_nodes.Devices(folder, running, device) as devices:
                await story(running, devices, seen)
            await seen.look()
            return devices, seen

    return asyncio.run(asyncio.wait_for(run(), 300))


def _is_back(running, host, killed):
    return running.processes().get(host, killed) != killed


def test_who_lacks_ray_is_told_what_to_install():
    program = "import sys; sys.modules['ray'] = None; import tff_dpftrl.runtime.cluster.cluster"
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr.endswith("pip install 'tff_dpftrl[distributed]'.\n")


@pytest.mark.slow
def test_rounds_go_on_over_two_nodes(nodes, tmp_path):
    deployed = example_cluster.deployment(
        tmp_path, ({"goal_count": 4, "devices_per_aggregator": 2},)
    )

    async def story(running, devices, seen):
        await ray_nodes.progress(deployed, seen, 5)
        places = running.processes()
        assert set(places) == {*deployed.placement.permanent, "coordinator"}
        assert len({place.node for place in places.values()}) == 2

    devices, seen = _play(deployed, nodes, story, folder=tmp_path)
    ray_nodes.check(deployed, devices, seen)
    assert len(seen.notes.of(events.Leading)) == 1
    assert seen.notes.named("reported")
    assert ray_nodes.lease(deployed).owner == ""  # It was given back.
    for row in ray_nodes.history(deployed):
        assert sorted(devices.accepted[row["attempt"]])  # Of all rounds, none was lost.
        assert row["devices/reports"] == 4


@pytest.mark.slow
def test_secure_sums_go_on_over_two_nodes(nodes, tmp_path):
    deployed = example_cluster.secure_deployment(tmp_path)

    async def story(running, devices, seen):
        await ray_nodes.progress(deployed, seen, 3)

    _, seen = _play(deployed, nodes, story, device=ray_nodes.secure_report, folder=tmp_path)
    rows = ray_nodes.history(deployed)
    for row in rows:
        assert row["num_reports"] == row["devices/reports"] and row["total"][1:] == [
            0,
            row["num_reports"],
        ]
    assert {len(attempts) for attempts in seen.released().values()} == {1}


@pytest.mark.slow
@pytest.mark.parametrize("secure", [False, True], ids=["plain", "secure"])
@pytest.mark.parametrize("victim", ["selector-0", "coordinator", "worker-0", "worker-1"])
def test_rounds_go_on_when_a_process_is_killed(nodes, tmp_path, victim, secure):
    if secure:
        deployed = example_cluster.secure_deployment(tmp_path, times=_QUICK)
    else:
        options = {"goal_count": 4, "devices_per_aggregator": 2, "least_fraction": 0.5}
        deployed = example_cluster.deployment(tmp_path, (options,), times=_QUICK)
    took = []

    async def story(running, devices, seen):
        await ray_nodes.progress(deployed, seen, 2)
        for _ in range(2):
            killed = running.processes()[victim]
            ray_nodes.kill(killed)
            took.append(await ray_nodes.progress(deployed, seen, 3))
            await example.until(lambda killed=killed: _is_back(running, victim, killed))
        assert set(running.processes()) == {*deployed.placement.permanent, "coordinator"}

    device = ray_nodes.secure_report if secure else None
    devices, seen = _play(deployed, nodes, story, device=device, folder=tmp_path)
    print(f"{victim}: seconds to the next commit: {took}")
    if not secure:
        ray_nodes.check(deployed, devices, seen)
    leaders = len(seen.notes.of(events.Leading))
    assert leaders >= (3 if victim == "coordinator" else 1)
    assert {len(attempts) for attempts in seen.released().values()} == {1}


@pytest.mark.slow
def test_of_many_selectors_that_find_nobody_leads_one_coordinator_comes(nodes, tmp_path):
    deployed = example_cluster.deployment(tmp_path, times=_QUICK, addresses=("127.0.0.1:0",) * 5)

    def coordinators():
        from ray._private import state

        return sorted(
            actor["ActorID"]
            for actor in state.actors().values()
            if actor["Name"] == f"{example.POPULATION}/coordinator"
        )

    async def story(running, devices, seen):
        first = set(coordinators()) - before
        assert len(first) == 1
        await ray_nodes.progress(deployed, seen, 1)
        ray_nodes.kill(running.processes()["coordinator"])
        await ray_nodes.progress(deployed, seen, 2)
        assert len(set(coordinators()) - before) == 2

    with ray_nodes.connected(nodes):
        before = set(coordinators())
    _, seen = _play(deployed, nodes, story, folder=tmp_path)
    assert len(seen.notes.of(events.Leading)) == 2
    assert {row["epoch"] for row in ray_nodes.history(deployed)} == {1, 2}


@pytest.mark.slow
def test_a_coordinator_that_is_stopped_past_its_lease_is_replaced_and_fenced(nodes, tmp_path):
    deployed = example_cluster.deployment(tmp_path, times=_QUICK, answer_seconds=3.0)

    async def story():
        async with _running(deployed, nodes) as running:
            seen = ray_nodes.Seen(running)

            async def leaders():
                await seen.look()
                return len(seen.notes.of(events.Leading))

            async with (
                example.channel_to(tmp_path, running.addresses[0]) as one,
                example.channel_to(tmp_path, running.addresses[1]) as other,
            ):
                streams = [await example.connect(one), await example.connect(other)]
                for stream in streams:
                    await stream.check_in()
                told = [await stream.receive() for stream in streams]
                assert told[0].attempt == told[1].attempt
                zombie = running.processes()["coordinator"]
                ray_nodes.kill(zombie, signal.SIGSTOP)
                begun = time.monotonic()
                while await leaders() < 2:
                    assert time.monotonic() < begun + 120, "nobody leads"
                    await asyncio.sleep(0.1)
                print(f"seconds to the next leader: {time.monotonic() - begun}")
                with contextlib.suppress(ProcessLookupError):
                    ray_nodes.kill(zombie, signal.SIGCONT)
                # Its attempt goes on, and is refused when it wants to commit.
                for stream, configuration in zip(streams, told, strict=True):
                    await stream.report(configuration.attempt, b"1")
                for stream in streams:
                    await stream.receive()
            await asyncio.sleep(2.0)
            assert ray_nodes.history(deployed) == []
            async with ray_nodes.Devices(tmp_path, running) as devices:
                await ray_nodes.progress(deployed, seen, 2)
            await seen.look()
            ray_nodes.check(deployed, devices, seen)
            assert told[0].attempt not in {row["attempt"] for row in ray_nodes.history(deployed)}

    asyncio.run(asyncio.wait_for(story(), 300))


_DRIVER = """
import asyncio, pathlib, sys
from tests.runtime.cluster import example_cluster
from tff_dpftrl.runtime.cluster import cluster

async def run(folder, address):
    deployed = example_cluster.deployment(folder, times={times!r})
    await cluster.RayCluster(deployed, ray_address=address).start()
    print("serves", flush=True)
    await asyncio.sleep(600)

asyncio.run(run(pathlib.Path(sys.argv[1]), sys.argv[2]))
"""


@pytest.mark.slow
def test_another_program_goes_on_with_the_hosts_of_one_that_was_killed(nodes, tmp_path):
    from tff_dpftrl.runtime.cluster import cluster
    from tff_dpftrl.runtime.server import server

    deployed = example_cluster.deployment(tmp_path, times=_QUICK)
    with subprocess.Popen(
        [sys.executable, "-c", _DRIVER.format(times=_QUICK), str(tmp_path), nodes.address],
        stdout=subprocess.PIPE,
        text=True,
    ) as driver:
        assert driver.stdout.readline() == "serves\n"
        driver.kill()
    with ray_nodes.connected(nodes):
        from tff_dpftrl.runtime.cluster import ray_hosts

        before = ray_hosts.places(example.POPULATION)

    async def refused():
        other = example_cluster.deployment(tmp_path, times=_QUICK, num_workers=1)
        with pytest.raises(server.ServerError, match="run already with other settings"):
            await cluster.RayCluster(other, ray_address=nodes.address).start()

    async def story(running, devices, seen):
        assert running.processes() == before
        await ray_nodes.progress(deployed, seen, 2)
        ray_nodes.kill(running.processes()["coordinator"])
        await ray_nodes.progress(deployed, seen, 2)

    asyncio.run(refused())
    devices, seen = _play(deployed, nodes, story, folder=tmp_path)
    ray_nodes.check(deployed, devices, seen)


@pytest.mark.slow
def test_rounds_go_on_when_a_node_is_lost(nodes, tmp_path):
    options = {"goal_count": 4, "devices_per_aggregator": 2, "least_fraction": 0.5}
    deployed = example_cluster.deployment(tmp_path, (options,), times=_QUICK)
    lost = nodes.add_node(**ray_nodes.NODE)

    async def story(running, devices, seen):
        await ray_nodes.progress(deployed, seen, 2)
        there = {host for host, place in running.processes().items() if place.node == lost.node_id}
        assert there  # Or the test would show nothing.
        nodes.remove_node(lost, allow_graceful=False)
        took = await ray_nodes.progress(deployed, seen, 3)
        print(f"seconds to the next commit without {sorted(there)}: {took}")
        everybody = {*deployed.placement.permanent, "coordinator"}
        await example.until(lambda: set(running.processes()) == everybody)
        assert lost.node_id not in {place.node for place in running.processes().values()}
        await ray_nodes.progress(deployed, seen, 3)

    devices, seen = _play(deployed, nodes, story, folder=tmp_path)
    ray_nodes.check(deployed, devices, seen)
