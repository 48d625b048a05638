"""A real server, in a thread, of a task that counts letters of texts; made without TFF."""

from __future__ import annotations

import json
import random
import time

import numpy as np
import tensorflow as tf

from tests.runtime.fleet import server_thread
from tests.runtime.plans import plain_plans
from tests.runtime.server import example_service
from tff_dpftrl.runtime import participation_histograms, signing_keys
from tff_dpftrl.runtime.actors import population
from tff_dpftrl.runtime.plans import plan_pb2, secure_report, signing, tensor_values
from tff_dpftrl.runtime.protocol import attestation
from tff_dpftrl.runtime.server import served_task, server
from verification import memory_store

POPULATION = "tests"
BUCKETS = participation_histograms.ParticipationBuckets((1, 2, 4, 8), (1, 2, 4, 100))


def _letters(examples, scale):
    texts = tf.io.parse_example(examples, {"tokens": tf.io.FixedLenFeature([], tf.string)})
    lengths = tf.strings.length(texts["tokens"])
    return [tf.cast(tf.reduce_sum(lengths), tf.float32) * scale, tf.size(lengths)[None]]


def _letters_counted(examples, scale):
    texts = tf.io.parse_example(examples, {"tokens": tf.io.FixedLenFeature([], tf.string)})
    letters = tf.reduce_sum(tf.strings.length(texts["tokens"])) * tf.cast(scale, tf.int32)
    return [letters[None], tf.size(texts["tokens"])[None]]


class Total(population.Summation):
    """Sums of both tensors, and of the histograms."""

    def __init__(self, tensors):
        self._tensors = tensors

    def zero(self):
        return [np.float32(0), np.zeros([1], np.int32), 0]

    def accumulate(self, total, payload):
        try:
            BUCKETS.check_one_hot(np.array(payload.strides, int), np.array(payload.times, int))
            update = tensor_values.from_bytes(payload.update, self._tensors)
            if not np.isfinite(update[0]):
                raise ValueError("not finite")
        except ValueError as error:
            raise population.UnusableReport(str(error)) from None
        return [total[0] + update[0], total[1] + update[1], total[2] + 1]

    def merge(self, total, other):
        return [a + b for a, b in zip(total, other, strict=True)]


class SecureTotal(population.Summation):
    """The same of groups, whose devices sum them securely."""

    def zero(self):
        return [0, np.zeros([1], np.int64), 0]

    def accumulate(self, total, payload):
        raise AssertionError("No report is ever looked at.")

    def merge(self, total, other):
        return [a + b for a, b in zip(total, other, strict=True)]

    def decode_group(self, vector, num_devices):
        counted, _, _, letters, texts = (part.astype(np.int64) for part in vector)
        if counted[0] != num_devices:
            raise population.UnusableReport("it is of other devices")
        return [letters[0], texts, num_devices]


class Step(population.ServerStep):
    """The model stays; what was summed is a metric."""

    def apply(self, total, num_reports, model, state):
        assert total[2] == num_reports
        metrics = {"letters": float(total[0]), "texts": int(total[1][0]), "reports": num_reports}
        return population.StepResult(model=model, state=state, metrics=metrics)

    def skip(self, model, state):
        return population.StepResult(model, state, {population.SKIPPED: True})


def plan(min_sep=1, threat_model=None):
    """The plan; of reports that are summed securely if there is a threat model."""
    fields = {}
    if threat_model is not None:
        fields = {
            "least_runtime_version": 2,
            "secure_sums": [plan_pb2.SecureSum(largest_entry=10_000)] * 2,
            "secure_aggregation": plan_pb2.SecureAggregation(
                threat_model=threat_model, least_devices=3, most_devices=20
            ),
        }
    participation = plan_pb2.Participation(
        min_sep_rounds=min_sep, stride_edges=BUCKETS.stride_edges, times_edges=BUCKETS.times_edges
    )
    return plain_plans.plan(
        _letters if threat_model is None else _letters_counted,
        population=POPULATION,
        task="letters",
        participation=participation,
        selection=plan_pb2.Selection(collection="text", max_examples=20),
        **fields,
    )


def _secure_sum(made):
    if not made.HasField("secure_aggregation"):
        return None
    return secure_report.parameters_of(made)


def write_corpus(folder, num_users=40):
    path = folder / "users.jsonl"
    rows = [
        {"user_id": f"user {i}", "examples": [f"text {i} " + j * "x" for j in range(i % 7)]}
        for i in range(num_users)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Served:
    """The running server, and what it keeps."""

    def __init__(
        self, folder, *, pace=(0.3,), min_sep=1, threat_model=None, store=None, **settings
    ):
        self.store = memory_store.MemoryStore() if store is None else store
        self.observer = example_service.Notes()
        model = tensor_values.to_bytes(plain_plans.SCALE)
        self.store.add_task(POPULATION, "letters", model=model, state=b"-")
        if not (folder / "plans.pem").exists():
            signing_keys.create(folder / "plans.pem")
            signing_keys.create(folder / "issuer.pem")
        made = plan(min_sep, threat_model)
        signed = signing.sign(made, signing_keys.load_private(folder / "plans.pem"))
        content = signed.SerializeToString()
        rounds = {
            "goal_count": 6,
            "over_selection": 1.5,
            "least_fraction": 0.5,
            "selection_timeout": 5.0,
            "reporting_timeout": 5.0,
            "exchange_timeout": 5.0,
            "secure_step_timeout": 2.0,
        }
        task = population.Task(
            "letters",
            population.RoundSettings(**(rounds | settings)),
            Total(made.graph.outputs) if threat_model is None else SecureTotal(),
            Step(),
            secure_sum=_secure_sum(made),
            min_sep=min_sep,
        )
        issuer = signing_keys.load_public(folder / "issuer.pem.pub")
        self._options = {
            "population": population.Population(
                POPULATION, (task,), heartbeat_seconds=0.5, silence_seconds=30.0, lease_seconds=60.0
            ),
            "tasks": {"letters": served_task.ServedTask(task, lambda version: content, 2000)},
            "store": self.store,
            "endpoint": example_service.endpoint(
                folder, attestation.SignedTokens([issuer], clock=time.time)
            ),
            "pace": lambda now, randomness: tuple(
                seconds * (0.5 + randomness.random()) for seconds in pace
            ),
            "observer": self.observer,
            "randomness": random.Random(1),
        }

    def released(self):
        """Rows of the rounds that were not skipped."""
        return [row for row in self.rows() if not row.get(population.SKIPPED)]

    def rows(self):
        """Rows of all committed rounds."""
        return self.store.history(POPULATION, "letters")

    def running(self):
        """Runs the server in a thread; yields its address."""
        return server_thread.running(lambda: server.Server.of(**self._options))
