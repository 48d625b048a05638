"""Folder of a task of a few weights, its devices and their reports, for tests."""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np

from tests.runtime.plans import small_tasks
from tests.secure_sums import conversations
from tff_dpftrl.data import tokenizer, vocabulary
from tff_dpftrl.mechanisms import blt
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.runtime import participation_histograms
from tff_dpftrl.runtime.device import named_tensors
from tff_dpftrl.runtime.plans import (
    allowed_ops,
    device_work,
    plan_pb2,
    secure_report,
    tensor_values,
)
from tff_dpftrl.runtime.protocol import wire_pb2
from tff_dpftrl.runtime.tasks import planned_task, secure_groups, task_config, task_folder
from tff_dpftrl.runtime.tasks import terms as terms_lib
from tff_dpftrl.secure_sums import group, parameters, vectors

SCHEMA = schema_lib.MinSep(num_rounds=6, min_sep=2, max_participations=3)
CONFIG = task_config.TaskConfig.of(
    population="tests",
    task="small",
    num_devices=100,
    num_rounds=SCHEMA.num_rounds,
    clients_per_round=3,
    noise_multiplier=0.5,
    clip_norm=1.0,
)
TERMS = terms_lib.Terms(
    server_plan="",
    files={},
    kind="training",
    population="tests",
    task="small",
    num_devices=100,
    schema=SCHEMA,
    delta=1e-5,
    strategy=blt.Blt((0.9, 0.5), (0.3, 0.2)),
    noise_multiplier=0.5,
    clip_norm=1.0,
    adaptive_clipping=False,
    max_epsilon=None,
    data="numbers",
    vocabulary_source="nothing",
    vocabulary_is_public=True,
    initial_weights_source=None,
    initial_weights_are_public=False,
    parameters={"clients_per_round": 3},
)
SECURE_TERMS = dataclasses.replace(
    TERMS,
    secure_aggregation=secure_groups.SecureGroups(
        "honest-but-curious",
        least_group=small_tasks.SECURE_AGGREGATION.least_devices,
        threshold=0.5,
    ),
)


def evaluation_of(terms: terms_lib.Terms) -> terms_lib.Terms:
    """Makes the terms of a task that evaluates the model of another task."""
    return dataclasses.replace(
        terms, kind="evaluation", task="watch", model_of=terms.task, strategy=None
    )


_WORDS = vocabulary.Vocabulary(("a", "b"), "nothing")
_BUCKETS = participation_histograms.ParticipationBuckets.for_schema(SCHEMA)


def plans(process, **options):
    """Builds the plans of a process, with the participation of `SCHEMA`."""
    participation = plan_pb2.Participation(
        min_sep_rounds=SCHEMA.min_sep,
        stride_edges=_BUCKETS.stride_edges,
        times_edges=_BUCKETS.times_edges,
    )
    return small_tasks.plans(process, **({"participation": participation} | options))


def write(path, process, *, key=small_tasks.KEY, **options):
    """Writes the task of a process to a new folder."""
    write_plans(path, plans(process), key=key, **options)


def write_plans(path, built, *, key=small_tasks.KEY, terms=TERMS, config=CONFIG):
    """Writes the task of plans to a new folder."""
    task_folder.write(
        path,
        signed=built.sign(key),
        terms=terms,
        options=config.to_dict(),
        features={"text": named_tensors.Feature("text", None)},
        words=_WORDS,
        rule=tokenizer.Tokenizer(),
        key=key,
        readme="A test.\n",
    )


def folder_of(process, *, terms=TERMS, config=CONFIG, **options) -> task_folder.TaskFolder:
    """Makes the task of a process in memory, without files."""
    built = plans(process, **options)
    signed = built.sign(small_tasks.KEY)
    server = plan_pb2.ServerPlan.FromString(signed.server.plan)
    terms = dataclasses.replace(terms, server_plan=signed.server.sha256.hex())
    path, rule = pathlib.Path("in memory"), tokenizer.Tokenizer()
    return task_folder.TaskFolder(path, signed, server, built.devices, terms, config, _WORDS, rule)


def device_of(task: planned_task.PlannedTask) -> device_work.DeviceWork:
    """Loads the work of a device of the task."""
    return device_work.load(task.served.plan_for(allowed_ops.RUNTIME_VERSION), small_tasks.KEYS)


def report(
    device: device_work.DeviceWork,
    model: bytes,
    examples: list[bytes],
    *,
    stride: int | None = None,
    times: int = 1,
) -> wire_pb2.Report:
    """Makes the report of a device, as it comes over the wire."""
    broadcast = tensor_values.from_bytes(model, device.broadcast)
    buckets = secure_report.buckets_of(device.plan.participation)
    strides, counts = buckets.encode(stride, times)
    sent = wire_pb2.Report(
        attempt="attempt",
        update=tensor_values.to_bytes(device.run(examples, broadcast)),
        strides=strides,
        times=counts,
    )
    return wire_pb2.Report.FromString(sent.SerializeToString())


def secure_report_of(
    device: device_work.DeviceWork,
    model: bytes,
    examples: list[bytes],
    *,
    stride: int | None = None,
    times: int = 1,
) -> vectors.Vector:
    """Makes the vector that a device adds to a secure sum instead of a report."""
    broadcast = tensor_values.from_bytes(model, device.broadcast)
    participation = secure_report.buckets_of(device.plan.participation).encode(stride, times)
    return secure_report.vector_of(device.plan, device.run(examples, broadcast), participation)


def run_group(
    task: planned_task.PlannedTask, reports: list[vectors.Vector], drop_outs=None
) -> tuple[list[int], vectors.Vector]:
    """Sums reports by the protocol.

    Args:
      task: Task with secure aggregation.
      reports: Reports of the devices of a group.
      drop_outs: Indices of the devices that drop out, by phase.

    Returns:
      Indices of the devices whose reports are in the sum, and the sum.
    """
    demanded, session = task.served.task.secure_sum, parameters.new_session()
    server = group.Group(demanded, session)
    devices = {
        index: conversations.make_participant(demanded, session, report)
        for index, report in enumerate(reports)
    }
    conversations.run(server, devices, drop_outs=drop_outs)
    return sorted(server.survivors), server.total()


class Rounds:
    """Rounds of a task in a store, without a server."""

    def __init__(self, task: planned_task.PlannedTask, store):
        self.task = task
        self.store = store
        self.commit = task.add_to(store)
        self._epoch = store.acquire(task.population, "tests", now=0.0, duration=1e9).epoch

    def run(self, reports, *, num_reports=None):
        """Sums reports and commits the round."""
        summation = self.task.served.task.summation.for_round(self.commit.model)
        total = summation.zero()
        for one in reports:
            total = summation.accumulate(total, one)
        return self.step(total, len(reports) if num_reports is None else num_reports)

    def run_groups(self, sums):
        """Commits a round of groups' sums, each given with the number of its devices."""
        summation = self.task.served.task.summation
        total = summation.zero()
        for vector, num_devices in sums:
            total = summation.merge(total, summation.decode_group(vector, num_devices))
        return self.step(total, sum(num_devices for _, num_devices in sums))

    def step(self, total, num_reports):
        """Commits a round of a total."""
        step, last = self.task.served.task.server_step, self.commit
        return self.add(step.apply(total, num_reports, last.model, last.state))

    def add(self, result):
        """Commits the result of a round."""
        self.commit = self.store.commit(
            self.task.population,
            self.task.name,
            round_index=self.commit.rounds_done,
            epoch=self._epoch,
            model=result.model,
            state=result.state,
            metrics=result.metrics,
            now=0.0,
        )
        return self.commit


def examples(seed: int, num_examples: int = 4) -> list[bytes]:
    """Returns the examples that a device has stored."""
    return small_tasks.examples(seed, num_examples)


def cohort(round_index: int) -> list[list[bytes]]:
    """Returns the examples of each device of a round."""
    return [examples(10 * round_index + device, device) for device in (1, 0, 5)]


def same(one, other) -> bool:
    """Checks whether two lists of arrays are equal bit for bit."""
    pairs = zip(one, other, strict=True)
    return all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in pairs)
