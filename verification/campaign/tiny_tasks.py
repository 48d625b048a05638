"""A population whose results tell what is in them: whose reports, and which noise.

A report is a vector of three parts: a one, which is counted; the number of the report in its
device's place; and integers that no other device has (`memory_search` looks for them). What a round
commits, its sum and a mask that stands for noise, can be computed anew by whoever knows the
vectors, the seed and what the mask was drawn with (`checks` does). One task is summed in the
clear, and one securely.
"""

from __future__ import annotations

import hashlib
import json
import random
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from typing_extensions import override

from tff_dpftrl.runtime.actors import population
from tff_dpftrl.runtime.plans import plan_pb2
from tff_dpftrl.runtime.protocol import wire_pb2
from tff_dpftrl.runtime.server import limits, served_task
from tff_dpftrl.runtime.server import served_population as served_population_lib
from tff_dpftrl.secure_sums import parameters, vectors

POPULATION = "campaign"
CLEAR, SECURE = "clear", "secure"
TASKS = (CLEAR, SECURE)
ONE_POPULATION = {POPULATION: TASKS}
TWO_POPULATIONS = {POPULATION: (CLEAR,), "second": (SECURE,)}
NUM_DEVICES = 16
MIN_SEP = 2  # Rounds from one participation of a device in a task to its next one.
SIZE = 48  # Of what no other device has.
MODULUS = 1000
LAYOUT = (
    vectors.Segment(1, 2**32),
    vectors.Segment(NUM_DEVICES, 2**32),
    vectors.Segment(SIZE, MODULUS),
)
SECURE_SUM = parameters.Parameters(
    LAYOUT,
    parameters.ThreatModel.ACTIVE_SERVER,  # That has the most steps.
    least_devices=2,
    most_devices=NUM_DEVICES,
)
ROUNDS = population.RoundSettings(
    secure_step_timeout=2.5,
    goal_count=6,
    over_selection=4 / 3,
    least_fraction=0.5,
    selection_timeout=1.0,
    reporting_timeout=3.0,
    devices_per_aggregator=2,  # Four Aggregators, or three groups, below a tree of merges.
    exchange_timeout=1.0,
    max_fan_in=2,
)
LIMITS = limits.Limits(keepalive_seconds=2.0, check_in_seconds=2.0)
_RUNTIME_VERSION = 1
_BYTES = vectors.packed_bytes(LAYOUT)


def sentinel(seed: int, task: str, device: int) -> np.ndarray:
    """Returns the values that mark a device: always the same for it and a task, [SIZE]."""
    rng = np.random.default_rng([seed, TASKS.index(task), device])
    return rng.integers(0, MODULUS, SIZE).astype(np.uint16)


def vector(own: np.ndarray, device: int, number: int) -> vectors.Vector:
    """Returns a device's report.

    Args:
      own: What `sentinel` returned.
      device: Its number, from 0.
      number: The number of this report among all of its reports, from 1.

    Returns:
      The vector.
    """
    made = vectors.zeros(LAYOUT)
    made[0][0] = 1
    made[1][device] = number
    made[2][:] = own
    return made


def packed(report: vectors.Vector) -> bytes:
    """Returns a report of the task in the clear, as it travels."""
    return vectors.pack(report, LAYOUT)


class VectorSum(population.Summation):
    """Sums vectors, one by one or by groups."""

    @override
    def zero(self) -> vectors.Vector:
        return vectors.zeros(LAYOUT)

    @override
    def accumulate(self, total: vectors.Vector, payload: Any) -> vectors.Vector:
        if not isinstance(payload, wire_pb2.Report):
            raise population.UnusableReport("it is no report")
        try:
            own = vectors.unpack(payload.update, LAYOUT)
        except ValueError:
            raise population.UnusableReport("it is no vector") from None
        if int(own[0][0]) != 1 or np.count_nonzero(own[1]) != 1:
            raise population.UnusableReport("it counts other devices")
        return self.merge(total, own)

    @override
    def merge(self, total: vectors.Vector, other: vectors.Vector) -> vectors.Vector:
        return [
            ((one.astype(np.uint64) + two) % segment.modulus).astype(segment.dtype)
            for one, two, segment in zip(total, other, LAYOUT, strict=True)
        ]

    @override
    def decode_group(self, vector: vectors.Vector, num_devices: int) -> vectors.Vector:
        if int(vector[0][0]) != num_devices:
            raise population.UnusableReport("it counts other devices")
        return vector


class NoisyStep(population.ServerStep):
    """Adds a mask that is drawn anew in each call. The state is seed and round, as JSON."""

    @override
    def apply(
        self, total: vectors.Vector, num_reports: int, model: bytes, state: bytes
    ) -> population.StepResult:
        del model, num_reports
        kept, drawn = json.loads(state), secrets.token_hex(8)
        noised = (total[2] + noise(kept["seed"], kept["round"], drawn)) % MODULUS
        made = f"{kept['task']}|{kept['round'] + 1}|".encode() + noised.astype("<u2").tobytes()
        whose = {str(i): int(total[1][i]) for i in np.flatnonzero(total[1])}
        return population.StepResult(
            model=made,
            state=first_state(kept["task"], kept["seed"], kept["round"] + 1),
            metrics={"whose": whose, "model": hashlib.sha256(made).hexdigest(), "drawn": drawn},
        )

    @override
    def skip(self, model: bytes, state: bytes) -> population.StepResult:
        kept = json.loads(state)
        after = first_state(kept["task"], kept["seed"], kept["round"] + 1)
        return population.StepResult(model, after, {population.SKIPPED: True})


def first_state(task: str, seed: str, round_index: int = 0) -> bytes:
    """Returns a committed state of a task."""
    return json.dumps({"task": task, "seed": seed, "round": round_index}).encode()


def first_model(task: str) -> bytes:
    """Returns the model before the first round."""
    return f"{task}|0|".encode()


def noise_seed(seed: int, task: str) -> str:
    """Returns the seed of a task's noise."""
    return f"noise of {task}, {seed}"


def noise(seed: str, round_index: int, drawn: str) -> np.ndarray:
    """Returns the mask of one call of a step, integers of shape [SIZE]."""
    content = hashlib.shake_256(f"{seed}|{round_index}|{drawn}".encode()).digest(2 * SIZE)
    return np.frombuffer(content, "<u2").astype(np.uint32)


def served_tasks(step: population.ServerStep | None = None) -> dict[str, served_task.ServedTask]:
    """Returns both tasks, as a server takes them.

    Args:
      step: What makes models of sums; `NoisyStep` if None.

    Returns:
      The tasks by name.
    """
    made = {}
    for name in TASKS:
        task = population.Task(
            name,
            ROUNDS,
            VectorSum(),
            step or NoisyStep(),
            secure_sum=SECURE_SUM if name == SECURE else None,
            min_sep=MIN_SEP,
        )
        plan = f"plan of {name}".encode()
        signed = plan_pb2.SignedPlan(plan=plan, sha256=hashlib.sha256(plan).digest())
        plans = {_RUNTIME_VERSION: signed.SerializeToString()}
        made[name] = served_task.ServedTask(task, plans.get, _BYTES)
    return made


def served_population(
    tasks: dict[str, served_task.ServedTask], name: str = POPULATION
) -> population.Population:
    """Returns a population: its leases are short, since they are what faults are about."""
    return population.Population(
        name,
        tuple(task.task for task in tasks.values()),
        lease_seconds=2.5,
        heartbeat_seconds=0.5,
        silence_seconds=1.5,
    )


def served_populations(
    populations: Mapping[str, Sequence[str]], step: population.ServerStep
) -> list[served_population_lib.ServedPopulation]:
    """Returns populations as a server takes them.

    Args:
      populations: Names of the tasks by population.
      step: What makes models of sums.
    """
    all_tasks = served_tasks(step)
    served = []
    for name, own in populations.items():
        tasks = {task: all_tasks[task] for task in own}
        made = served_population(tasks, name)
        served.append(served_population_lib.ServedPopulation(made, tasks, pace))
    return served


def pace(now: float, randomness: random.Random) -> tuple[float, ...]:
    """Returns when a device is to come back: soon."""
    del now
    return (randomness.uniform(0.02, 0.2),)


def check_in(
    protocol_version: int, token: bytes, population_name: str = POPULATION
) -> wire_pb2.CheckIn:
    """Returns the check-in of a device of a population."""
    return wire_pb2.CheckIn(
        population=population_name,
        protocol_version=protocol_version,
        runtime_version=_RUNTIME_VERSION,
        token=token,
    )
