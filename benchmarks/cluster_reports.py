"""What a report costs a server on hosts of Ray, beside the one-process server.

    PYTHONPATH=. python benchmarks/cluster_reports.py [--num-devices 1000] [--rounds 3]
        [--parameters 0] [--selectors 1] [--workers 1] [--aggregators 0]

A server of `benchmarks.runtime_sessions` and one of hosts on this machine's Ray are put under
the same load, one after the other, both on uvloop, which Ray's processes use. Processor time is
that of the servers' processes for each device, from connection to answer; for hosts it is also
shown by kind, and that of Ray's own processes. MB/s are those of updates, one way.

With `--aggregators` two tasks of the same hosts take turns instead: all sums of so many Aggregators
go to one Master Aggregator, or through a tree of merges. Of each round, it shows the bytes that the
busiest worker received after the last report, the seconds from there to the whole sum, and the
processor time of the busiest process meanwhile: what it would take with a processor for each.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import os
import pathlib
import re
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import runtime_sessions

from tff_dpftrl.runtime import tls
from tff_dpftrl.runtime.actors import population
from tff_dpftrl.runtime.cluster import cluster, deployment, host
from tff_dpftrl.runtime.server import garbage, served_population, served_task
from tff_dpftrl.runtime.store import sql

_TICKS = os.sysconf("SC_CLK_TCK")


def _pace(now, randomness):
    return (600.0,) * 8


class _Merged(population.ServerStep):
    """Says when the sum was whole; there is no model."""

    def apply(self, total, num_reports, model, state):
        return population.StepResult(b"", state, {"merged_at": time.time()})

    def skip(self, model, state):
        return population.StepResult(b"", state, {population.SKIPPED: True})


def _fan_ins(aggregators: int) -> dict[str, int]:
    """Largest fan-in of each task that merges."""
    return {"one Master": aggregators, "tree": population.RoundSettings(1).max_fan_in}


def _build_merging(deployed: deployment.ClusterDeployment) -> deployment.Parts:
    """The parts of tasks that differ in their fan-in; notes the bytes that a host receives."""
    options = deployed.options
    take = host.Host.take

    async def noted(self, sealed):
        with open(f"{options['folder']}/{self.name}.received", "a", encoding="ascii") as file:
            file.write(f"{time.time()} {len(sealed)}\n")
        return await take(self, sealed)

    host.Host.take = noted
    made = {}
    for name, fan_in in _fan_ins(options["aggregators"]).items():
        rounds = population.RoundSettings(
            goal_count=options["goal"],
            over_selection=1.0,
            reporting_timeout=3600.0,
            exchange_timeout=300.0,
            devices_per_aggregator=options["goal"] // options["aggregators"],
            max_fan_in=fan_in,
        )
        summation = runtime_sessions._Sum(options["parameters"])
        task = population.Task(name, rounds, summation, _Merged())
        made[name] = served_task.ServedTask(
            task, lambda version: b"a plan", options["parameters"] * 8 + 1000
        )
    (whose,) = deployed.populations
    served = population.Population(whose, tuple(one.task for one in made.values()))
    return deployment.Parts([served_population.ServedPopulation(served, made, _pace)])


def build(deployed: deployment.ClusterDeployment) -> deployment.Parts:
    """The parts of a task that sums float64, like that of `runtime_sessions`."""
    if deployed.options["aggregators"]:
        return _build_merging(deployed)
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


@contextlib.asynccontextmanager
async def _hosts(
    given: argparse.Namespace, folder: pathlib.Path, models: dict[str, bytes]
) -> AsyncIterator[tuple[deployment.ClusterDeployment, cluster.RayCluster, list]]:
    """Runs hosts, with the tasks of these models, and a load for each Selector."""
    with sql.SqlStore(folder / "store") as store:
        for task, model in models.items():
            store.add_task(runtime_sessions._POPULATION, task, model=model, state=b"")
    deployed = deployment.ClusterDeployment(
        populations=(runtime_sessions._POPULATION,),
        builder="cluster_reports:build",
        store=str(folder / "store"),
        certificate=str(folder / "server.pem"),
        private_key=str(folder / "server.key"),
        addresses=("127.0.0.1:0",) * given.selectors,
        num_workers=given.workers,
        options={
            "goal": given.num_devices,
            "parameters": given.parameters,
            "aggregators": given.aggregators,
            "folder": str(folder),
        },
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
        yield deployed, running, loads
    finally:
        await running.stop()


async def _on_hosts(given: argparse.Namespace, folder: pathlib.Path) -> None:
    models = {runtime_sessions._TASK: bytes(given.parameters * 8)}
    async with _hosts(given, folder, models) as (deployed, running, loads):
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


async def _merge(given: argparse.Namespace, folder: pathlib.Path) -> None:
    """Compares merging at one Master Aggregator with merging in a tree."""
    names = list(_fan_ins(given.aggregators))
    seconds, busiest, received = (collections.defaultdict(list) for _ in range(3))
    async with _hosts(given, folder, dict.fromkeys(names, b"")) as (deployed, running, loads):
        done = dict.fromkeys(names, 0)
        for _ in range(given.rounds * len(names)):
            await asyncio.gather(*(load.rounds(1) for load in loads))
            begin = time.time()
            places = running.processes()
            before = {host: _seconds(place.pid) for host, place in places.items()}
            while not (changed := [n for n in names if len(_history(deployed, n)) > done[n]]):
                await asyncio.sleep(0.05)
            (name,) = changed
            done[name] += 1
            end = _history(deployed, name)[-1]["merged_at"]
            mb = {
                file.stem: sum(_bytes_between(file, begin, end)) / 1e6
                for file in folder.glob("worker-*.received")
            }
            used = max(_seconds(place.pid) - before[host] for host, place in places.items())
            seconds[name].append(end - begin)
            busiest[name].append(used)
            received[name].append(max(mb.values()))
            print(
                f"{name:12s} {end - begin:6.2f} s to the whole sum, {max(mb.values()):8.1f} MB to "
                f"the busiest of {len(mb)} workers, {sum(mb.values()):8.1f} MB to all, "
                f"{used:6.2f} s of processor time of the busiest process",
                flush=True,
            )
    measured = {"seconds": seconds, "processor seconds": busiest, "MB": received}
    for what, found in measured.items():
        flat, tree = (statistics.median(found[name]) for name in names)
        print(f"{what}: {flat:.2f} with one Master, {tree:.2f} in a tree, ratio {flat / tree:.2f}")


def _bytes_between(file: pathlib.Path, begin: float, end: float) -> Iterator[int]:
    for line in file.read_text(encoding="ascii").splitlines():
        at, num_bytes = line.split()
        if begin <= float(at) <= end:
            yield int(num_bytes)


def _history(
    deployed: deployment.ClusterDeployment, task: str = runtime_sessions._TASK
) -> list[dict[str, Any]]:
    with sql.SqlStore(deployed.store) as store:
        return store.history(deployed.populations[0], task)


def _show(title: str, given: argparse.Namespace, seconds: float, used: float, more: str) -> None:
    print(
        f"{title:20s} {given.num_devices / seconds:8.1f} devices/s "
        f"{given.num_devices * given.parameters * 8e-6 / seconds:8.1f} MB/s "
        f"{used / given.num_devices * 1e6:8.0f} us of processor time each{more}",
        flush=True,
    )


def _run_on_hosts(
    measure: Callable[[argparse.Namespace, pathlib.Path], Coroutine[Any, Any, None]],
    given: argparse.Namespace,
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        tls.create_self_signed(folder / "server.pem", folder / "server.key", ["127.0.0.1"])
        runtime_sessions.signing_keys.create(folder / "issuer")
        asyncio.run(measure(given, folder))


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--num-devices", type=int, default=1000, help="of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parameters", type=int, default=0, help="of an update, in float64")
    parser.add_argument("--selectors", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--aggregators", type=int, default=0, help="compares ways to merge")
    given = parser.parse_args()
    if given.aggregators:
        _run_on_hosts(_merge, given)
        return
    with runtime_sessions.started(given.num_devices, given.parameters, uvloop=True) as pair:
        for i in range(given.rounds):
            done = pair.measure("rounds", 1)
            used = done["server_us"] * 1e-6 * given.num_devices
            _show(f"one process, round {i}", given, done["seconds"], used, "")
    _run_on_hosts(_on_hosts, given)


if __name__ == "__main__":
    main()
