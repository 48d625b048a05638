"""Accuracy with updates of 16 bits beside that with updates as they are, in one process.

    PYTHONPATH=. python benchmarks/rounded_accuracy.py TASK [--seed 0] [--rounds 50]

TASK is a folder of `tff-dpftrl task new`, such as `make serve-demo` makes. Both runs have the same
initial model, noise, cohorts and orders of examples, so that they differ by rounding alone. The
devices are those of `fleet --data docs --devices 300`, fifty a round, without drop-outs.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import struct

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ed25519

from tff_dpftrl.data import sources, split
from tff_dpftrl.models import table
from tff_dpftrl.runtime import signing_keys
from tff_dpftrl.runtime.fleet import simulated_device
from tff_dpftrl.runtime.plans import (
    device_work,
    plan_pb2,
    report_bounds,
    rounded_updates,
    server_work,
    tensor_values,
)
from tff_dpftrl.runtime.tasks import task_folder, task_report

_DEVICES, _COHORT = 300, 50


class _Rounds:
    """Rounds of a task with both kinds of updates."""

    def __init__(
        self, folder: task_folder.TaskFolder, key: ed25519.Ed25519PublicKey, data: str, seed: int
    ):
        plan = plan_pb2.ServerPlan()
        plan.CopyFrom(folder.server)
        plan.rounded[:] = rounded_updates.places_in(plan.report_bounds, plan.update)
        self._plan, self._seed = plan, seed
        self._work = server_work.ServerWork(plan)
        self._bounds = report_bounds.ReportBounds(plan, _COHORT)
        self._device = device_work.load(folder.signed.devices[0].SerializeToString(), [key])
        self._corpus = split.by_user(sources.load_user_text(data)).train
        generator = random.Random(seed)
        order = generator.sample(self._corpus.user_ids, len(self._corpus))
        self._users = [order[i % len(order)] for i in range(_DEVICES)]
        self._queue = generator.sample(range(_DEVICES), _DEVICES)
        self._generator = generator
        first = self._work.initialize(folder.initialize())
        self.states = {is_rounded: [a.copy() for a in first] for is_rounded in (False, True)}
        self.errors: list[float] = []

    def run(self, index: int) -> None:
        """Runs a round; devices come in turn, so that each has rested when it comes again."""
        cohort, self._queue = self._queue[:_COHORT], self._queue[_COHORT:]
        for is_rounded, state in self.states.items():
            sums, model = self._work.zero(), self._work.broadcast(state)
            for number in cohort:
                update = self._update(index, number, model)
                if is_rounded:
                    update = self._sent(update)
                self._bounds.check(update)
                sums = self._work.accumulate(sums, update)
            self.states[is_rounded], _ = self._work.finish(state, sums)
        self._queue += self._generator.sample(cohort, len(cohort))

    def _update(self, index: int, number: int, model: list[np.ndarray]) -> list[np.ndarray]:
        selection = self._device.plan.selection
        texts = simulated_device.UserTexts(self._corpus, self._users[number])
        examples = texts.select(selection.collection, max_examples=selection.max_examples)
        digest = hashlib.sha256(f"{self._seed} {index} {number}".encode()).digest()
        return self._device.run(examples, model, seed=struct.unpack("<qq", digest[:16]))

    def _sent(self, update: list[np.ndarray]) -> list[np.ndarray]:
        sent, scales = rounded_updates.rounded(update, self._plan.rounded)
        read = rounded_updates.read(tensor_values.to_bytes(sent), scales, self._plan)
        moved, norm = (
            np.sqrt(sum(np.sum(np.square(each(place))) for place in self._plan.rounded))
            for each in (lambda place: read[place] - update[place], lambda place: update[place])
        )
        self.errors.append(moved / max(norm, 1e-30))
        return read

    def weights(self, is_rounded: bool) -> list[np.ndarray]:
        """Returns the trainable weights."""
        weights = self._work.weights(self.states[is_rounded])
        return [array for label, array in weights.items() if label.startswith("trainable")]

    def distance(self) -> float:
        """Returns the distance between both models, relative to the norm of the exact one."""
        exact, rounded = (
            np.concatenate([w.ravel() for w in self.weights(k)]) for k in (False, True)
        )
        return float(np.linalg.norm(rounded - exact) / np.linalg.norm(exact))


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--data", default="docs")
    given = parser.parse_args()
    key = signing_keys.load_public(f"{given.task}/signing_key.pub")
    folder = task_folder.read(given.task, [key])
    config = folder.config
    model = table.build(
        config.language.model,
        vocabulary_size=folder.words.size,
        sequence_length=config.language.sequence_length,
        **config.language.model_sizes,
    )
    rounds = _Rounds(folder, key, given.data, given.seed)
    for index in range(given.rounds):
        rounds.run(index)
    for is_rounded in (False, True):
        measured = task_report._evaluate(folder, model, rounds.weights(is_rounded))
        print(
            f"seed {given.seed}, {given.rounds} rounds, {'16 bits' if is_rounded else 'exact'}: "
            f"top-1 accuracy {measured['top1_in_vocab']:.4%}, loss {measured['loss']:.5f}"
        )
    print(
        f"rounding moved updates by {np.mean(rounds.errors):.2e} of their norm, "
        f"{np.max(rounds.errors):.2e} at most, and the model by {rounds.distance():.2e}"
    )


if __name__ == "__main__":
    main()
