"""What a report costs a server on hosts of Ray, beside the one-process server.

    PYTHONPATH=. python benchmarks/cluster_reports.py [--num-devices 1000] [--rounds 3]
        [--parameters 0] [--selectors 1] [--workers 1]

A server of `benchmarks.runtime_sessions` and one of hosts on this machine's Ray are put under
the same load, one after the other, both on uvloop, which Ray's processes use. Processor time is
that of the servers' processes for each device, from connection to answer; for hosts it is also
shown by kind, and that of Ray's own processes. MB/s are those of updates, one way.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import os
import pathlib
import re
import tempfile
import time

import runtime_sessions

from tff_dpftrl.runtime import tls
from tff_dpftrl.runtime.actors import population
from tff_dpftrl.runtime.cluster import cluster, deployment
from tff_dpftrl.runtime.server import garbage, served_population, served_task
from tff_dpftrl.runtime.store import sql

_TICKS = os.sysconf("SC_CLK_TCK")


def _pace(now, randomness):
    return (600.0,) * 8


def build(deployed: deployment.ClusterDeployment) -> deployment.Parts:
    """The parts of a task that sums float64, like that of `runtime_sessions`."""
    parameters = deployed.options["parameters"]
    rounds = population.RoundSettings(
        goal_count=deployed.options["goal"], over_selection=1.0, reporting_timeout=3600.0
    )
    name = runtime_sessions._TASK
    task = population.Task(
        name, rounds, runtime_sessions._Sum(parameters), runtime_sessions._Step()
    )
    served = served_task.ServedTask(task, lambda version: b"a plan", parameters * 8 + 1000)
    (whose,) = deployed.populations
    return deployment.Parts(
        [
            served_population.ServedPopulation(
                population.Population(whose, (task,)), {name: served}, _pace
            )
        ]
    )


def _seconds(pid: int) -> float:
    """Processor seconds of a process."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2]
    return sum(map(int, fields.split()[11:13])) / _TICKS


def _of_ray() -> list[int]:
    """Ray's own processes that this one has started."""
    found = []
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes()
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == os.getpid() and (b"raylet" in command or b"gcs_server" in command):
            found.append(int(entry.name))
    return found


async def _on_hosts(given: argparse.Namespace, folder: pathlib.Path) -> None:
    with sql.SqlStore(folder / "store") as store:
        store.add_task(
            runtime_sessions._POPULATION,
            runtime_sessions._TASK,
            model=bytes(given.parameters * 8),
            state=b"",
        )
    deployed = deployment.ClusterDeployment(
        populations=(runtime_sessions._POPULATION,),
        builder="cluster_reports:build",
        store=str(folder / "store"),
        certificate=str(folder / "server.pem"),
        private_key=str(folder / "server.key"),
        addresses=("127.0.0.1:0",) * given.selectors,
        num_workers=given.workers,
        options={"goal": given.num_devices, "parameters": given.parameters},
    )
    running = cluster.RayCluster(deployed)
    await running.start()
    try:
        loads = []
        for address in running.addresses:
            options = {
                "parameters": given.parameters,
                "channels": 4,
                "goal": given.num_devices // given.selectors,
                "devices": address,
                "echo": address,
                "attested": False,
            }
            loads.append(runtime_sessions._Load(argparse.Namespace(**options), folder))
        garbage.settle()
        await asyncio.sleep(1.0)
        for i in range(given.rounds):
            places = running.processes()
            before = {host: _seconds(place.pid) for host, place in places.items()}
            ray_before = sum(map(_seconds, _of_ray()))
            begin = time.perf_counter()
            await asyncio.gather(*(load.rounds(1) for load in loads))
            seconds = time.perf_counter() - begin
            while len(_history(deployed)) <= i:
                await asyncio.sleep(0.05)
            spent = collections.Counter()
            for host, place in places.items():
                spent[re.sub(r"-\d+", "", host)] += _seconds(place.pid) - before[host]
            spent["Ray"] = sum(map(_seconds, _of_ray())) - ray_before
            shares = ", ".join(
                f"{kind} {used / given.num_devices * 1e6:.0f}" for kind, used in spent.items()
            )
            _show(f"hosts, round {i}", given, seconds, sum(spent.values()), f" ({shares})")
    finally:
        await running.stop()


def _history(deployed: deployment.ClusterDeployment) -> list:
    with sql.SqlStore(deployed.store) as store:
        return store.history(deployed.populations[0], runtime_sessions._TASK)


def _show(title: str, given: argparse.Namespace, seconds: float, used: float, more: str) -> None:
    print(
        f"{title:20s} {given.num_devices / seconds:8.1f} devices/s "
        f"{given.num_devices * given.parameters * 8e-6 / seconds:8.1f} MB/s "
        f"{used / given.num_devices * 1e6:8.0f} us of processor time each{more}",
        flush=True,
    )


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--num-devices", type=int, default=1000, help="of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parameters", type=int, default=0, help="of an update, in float64")
    parser.add_argument("--selectors", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    with runtime_sessions.started(given.num_devices, given.parameters, uvloop=True) as pair:
        for i in range(given.rounds):
            done = pair.measure("rounds", 1)
            used = done["server_us"] * 1e-6 * given.num_devices
            _show(f"one process, round {i}", given, done["seconds"], used, "")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        tls.create_self_signed(folder / "server.pem", folder / "server.key", ["127.0.0.1"])
        runtime_sessions.signing_keys.create(folder / "issuer")
        asyncio.run(_on_hosts(given, folder))


if __name__ == "__main__":
    main()
