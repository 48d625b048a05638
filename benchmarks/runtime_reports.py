"""What a server does with the reports of a round costs, by a task's own plans.

    PYTHONPATH=. python benchmarks/runtime_reports.py TASK [--repetitions 9]

TASK is a folder of `tff-dpftrl task new`, of reports in the clear. Processor time, without any
network: adding a report to an Aggregator's sum, adding an Aggregator's sum to the round's, noise
and the model's step, and what each device of a round costs the Coordinator, which draws from which
Selector it comes, and the Master Aggregator, which hands it on. Medians, with least and largest.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import pickle
import random
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from tff_dpftrl.runtime.actors import actor, master_aggregator, messages, population, roles
from tff_dpftrl.runtime.plans import secure_report, tensor_values
from tff_dpftrl.runtime.protocol import wire_pb2
from tff_dpftrl.runtime.store import interface
from tff_dpftrl.runtime.tasks import planned_task
from verification import memory_store

_REPORTS = 20  # In one measurement.
_SELECTORS, _DEVICES = 500, 200_000  # Of a round that is chosen.


def _report(task: planned_task.PlannedTask) -> wire_pb2.Report:
    """Of a device that takes part for the first time and has learnt nothing."""
    plan = task.folder.server
    update = [np.zeros(list(tensor.shape), tensor.dtype) for tensor in plan.update]
    strides, times = secure_report.buckets_of(plan.participation).encode(None, 1)
    return wire_pb2.Report(
        update=tensor_values.to_bytes(update), strides=strides.tolist(), times=times.tolist()
    )


def _choose() -> object:
    """Draws as `coordinator.Coordinator` does."""
    waiting = {str(i): 2 * _DEVICES // _SELECTORS for i in range(_SELECTORS)}
    drawn = random.SystemRandom().sample(list(waiting), _DEVICES, counts=waiting.values())
    return collections.Counter(drawn)


def _hand_on(task: population.Task) -> object:
    """Reads the addresses of devices, divides them, and writes the roles of the Aggregators."""
    sizes = {"goal_count": _DEVICES, "over_selection": 1.0, "devices_per_aggregator": 100}
    commit = interface.Commit(task.name, 0, 1, b"", b"")
    selectors = [f"selector-{i}" for i in range(_SELECTORS)]
    made = master_aggregator.MasterAggregator(
        "p/coordinator/00/round/1",
        "store",
        dataclasses.replace(task, rounds=population.RoundSettings(**sizes)),
        roles.MasterAggregatorRole("", 1, commit, b"", frozenset(selectors)),
    )
    made.start(0.0)
    effects: list[actor.Effect] = []
    for selector in selectors:
        devices = tuple(f"{selector}/{i:032x}" for i in range(_DEVICES // _SELECTORS))
        told = pickle.loads(pickle.dumps(messages.DevicesForwarded(selector, devices)))
        effects += made.step(0.0, told)
    spawned = [effect.role for effect in effects if isinstance(effect, actor.Spawn)]
    return [len(pickle.dumps(role)) for role in spawned]


def _measure(name: str, work: Callable[[], object], count: int, repetitions: int) -> None:
    """Prints milliseconds of processor time of one of `count` pieces of work."""
    work()
    taken = []
    for _ in range(repetitions):
        begin = time.process_time()
        work()
        taken.append((time.process_time() - begin) / count * 1e3)
    print(
        f"{name:18s} {statistics.median(taken):9.2f} ms, from {min(taken):.2f} to {max(taken):.2f}",
        flush=True,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("task", metavar="TASK", help="folder of a task")
    parser.add_argument("--repetitions", type=int, default=9)
    given = parser.parse_args(argv)
    task = planned_task.load(given.task)
    summation, step = task.served.task.summation, task.served.task.server_step
    report = _report(task)
    state = task.add_to(memory_store.MemoryStore())
    sizes = (len(report.update), len(state.model), len(state.state))
    print("bytes: update {:,}, model {:,}, state {:,}".format(*sizes))

    def add() -> object:
        total = summation.zero()
        for _ in range(_REPORTS):
            total = summation.accumulate(total, report)
        return total

    total, other = add(), add()
    _measure("adding a report", add, _REPORTS, given.repetitions)
    _measure("merging two sums", lambda: summation.merge(total, other), 1, given.repetitions)
    total = add()
    _measure(
        "noise and step",
        lambda: step.apply(
            dataclasses.replace(total, sums=list(total.sums)), _REPORTS, state.model, state.state
        ),
        1,
        given.repetitions,
    )
    few = min(given.repetitions, 3)
    _measure("1,000 chosen", _choose, _DEVICES // 1000, few)
    _measure("1,000 handed on", lambda: _hand_on(task.served.task), _DEVICES // 1000, few)


if __name__ == "__main__":
    main()
