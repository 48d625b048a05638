"""A served task that goes on from copies of its disk, with other devices.

Devices train over the wire while the disk of the server is copied: a snapshot of its machine has
the same content, and so has what is left when the server is killed at that moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import random
import secrets
import shutil
import threading
import time

import numpy as np
import pytest
import tensorflow as tf

from tests.runtime.plans import small_tasks
from tests.runtime.tasks import number_devices, small_folder
from tff_dpftrl.learning import local_updates, metric_sums, optimizers, rounds
from tff_dpftrl.mechanisms import blt, identity
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.runtime import participation_histograms, serving, signing_keys
from tff_dpftrl.runtime.actors import events, population
from tff_dpftrl.runtime.device import loaded_plans, wire_session
from tff_dpftrl.runtime.plans import plan_pb2, tensor_values
from tff_dpftrl.runtime.protocol import attestation
from tff_dpftrl.runtime.server import server_folder
from tff_dpftrl.runtime.store import sql
from tff_dpftrl.runtime.tasks import planned_task, task_folder

_COLUMNS = 320
_SIZE = 3 * _COLUMNS + 1
_REPORTS = small_folder.CONFIG.learning.clients_per_round
_STDDEV = small_folder.TERMS.noise_multiplier * small_folder.TERMS.clip_norm
_SCHEMA = schema_lib.MinSep(num_rounds=40, min_sep=1, max_participations=40)
_STRATEGIES = {"identity": identity.Identity(), "blt": blt.Blt((0.9, 0.5), (0.3, 0.2))}
_SETTINGS = serving.Settings(status_address=None, round_seconds=0.5, population_size=8)


def _process(strategy, deterministic_seed):
    """A round of a model that has the same gradient in each column of its weights."""

    def predict_on_batch(model_weights, x, training=True):
        del training
        (weights, bias), _ = model_weights
        return tf.reduce_mean(tf.matmul(x, weights), axis=1, keepdims=True) + bias

    first = (np.zeros([3, _COLUMNS], np.float32), np.zeros([1], np.float32))
    model = dataclasses.replace(
        small_tasks.model(), initial_weights=(first, ()), predict_on_batch=predict_on_batch
    )
    return rounds.build_training(
        model,
        local_update=local_updates.FedAvg(optimizers.sgdm(0.1), None),
        aggregation=small_tasks.fixed(0.5, strategy, deterministic_seed=deterministic_seed),
        server_optimizer=optimizers.sgdm(1.0),
        metrics=metric_sums.build,
    )


class _Disk:
    """The folder of a store and its server, of which copies are made at durable events.

    Attributes:
      visible: What has left the server, in order: its kind, the number of rounds, and the content.
      copies: Names of events, with the copies that were made, and what was visible by then.
    """

    def __init__(self, place, is_copied=False):
        self.place = pathlib.Path(place)
        self.visible, self.copies = [], []
        self._is_copied, self._lock = is_copied, threading.RLock()

    def show(self, kind, num_rounds, content):
        self.visible.append((kind, num_rounds, content))

    def _at(self, event):
        if self._is_copied:
            visible = list(self.visible)
            to = self.place.with_name(f"{self.place.name}.{len(self.copies)}")
            shutil.copytree(self.place, to)
            self.copies.append((event, to, visible))

    @contextlib.contextmanager
    def around(self, what):
        """Copies the disk before and after something is written, and has nothing else written."""
        with self._lock:
            self._at(f"before {what}")
            yield
            self._at(f"after {what}")

    def copy(self, index):
        """Returns a disk with the content of a copy."""
        place = self.copies[index][1]
        return _Disk(shutil.copytree(place, f"{place}.{secrets.token_hex(4)}"))


class _Store(sql.SqlStore):
    """A store that tells a disk of its transactions."""

    def __init__(self, disk):
        super().__init__(disk.place)
        self.disk = disk


def _transaction(name):
    def method(self, *args, **kwargs):
        with self.disk.around(name):
            return getattr(sql.SqlStore, name)(self, *args, **kwargs)

    return method


for _name in ("add_task", "acquire", "renew", "release", "begin_attempt", "commit"):
    setattr(_Store, _name, _transaction(_name))


class _Server:
    """Serves a task from disks, one after the other, and keeps the book of the devices' sums."""

    now = None
    """The server that runs."""

    def __init__(self, task):
        self.task = task
        self.disk = None
        self.sums = {}  # By the models before and after a round.
        self._plans = loaded_plans.LoadedPlans(small_tasks.KEYS, max_running=2)
        self._ends = {}  # Last models, by disk.

    def serve(self, disk, num_rounds, first=0):
        """Serves until a number of rounds is done; returns the last commit and the history."""
        _Server.now, self.disk, folder = self, disk, server_folder.of(disk.place / "server")
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.make(None)
        with _Store(disk) as store:
            if (lease := store.lease("tests")) is not None:  # Its process has ended.
                store.release("tests", lease.owner, lease.epoch)
            asyncio.run(self._run(store, folder, num_rounds, first))
            commit, history = store.last_commit("tests", "small"), store.history("tests", "small")
        self._ends[disk.place] = ("model", commit.rounds_done, commit.model)
        return commit, history

    async def _run(self, store, folder, num_rounds, first):
        issuer = signing_keys.load_public(folder.issuer_public)
        served = serving.Serving(
            [self.task],
            store,
            folder,
            _SETTINGS,
            attestation=attestation.SignedTokens([issuer], clock=time.time),
            progress=lambda line: store.disk.show("line", None, line),
        )
        is_done, observe = asyncio.Event(), served.seen["tests"].on_event

        def on_event(now, event):
            observe(now, event)
            if isinstance(event, events.RoundReleased):
                store.disk.show("released", event.round_index + 1, dict(event.metrics))
                if event.round_index + 1 >= num_rounds:
                    is_done.set()

        served.seen["tests"].on_event = on_event
        try:
            await served.start()
            with number_devices.running(folder, first=first, plans=self._plans):
                await asyncio.wait_for(is_done.wait(), 60)
                await served.stop()  # The devices' threads end while it still answers them.
        finally:
            await served.stop()

    def noise(self, disk):
        """Noise in the released sums of a disk's rounds, by round: what the devices' sums lack."""
        shown = [*disk.visible, self._ends[disk.place]]
        models = {done: content for kind, done, content in shown if kind == "model"}
        found = {}
        for done in sorted(models):
            key = models[done], models.get(done + 1)
            if key in self.sums:  # It was not skipped, and was served from this disk.
                before, after = map(self._weights, key)
                found[done] = _REPORTS * (before - after) - self.sums[key]
        return found

    def _weights(self, model):
        tensors = self.task.folder.server.prepare.outputs
        arrays = tensor_values.from_bytes(model, tensors)
        named = zip(tensors, arrays, strict=True)
        return np.concatenate([x.ravel() for one, x in named if one.label.startswith("weights/")])


def _patch(patching):
    """Has this process tell the running server what it writes, sends and sums."""
    replace, fetch = os.replace, wire_session.WireSession.fetch
    apply = planned_task.TrainingStep.apply

    def replacing(source, target):
        target, around = pathlib.Path(target), contextlib.nullcontext()
        if _Server.now is not None and _Server.now.disk.place in target.parents:
            around = _Server.now.disk.around(target.name.partition("-")[0])
        with around:
            replace(source, target)

    def fetching(session, keep_going):
        got = session._configuration
        _Server.now.disk.show("model", got.round_index, got.broadcast)
        return fetch(session, keep_going)

    def applying(step, total, num_reports, model, state):
        labels = [tensor.label for tensor in step._work.plan.update]
        places = [i for i, label in enumerate(labels) if "/update/" in label]
        sums = np.concatenate([total.sums[i].ravel() for i in places])
        result = apply(step, total, num_reports, model, state)
        _Server.now.sums[model, result.model] = sums
        return result

    quick = functools.partial(population.Population, heartbeat_seconds=0.2)
    patching.setattr(population, "Population", quick)
    patching.setattr(os, "replace", replacing)
    patching.setattr(wire_session.WireSession, "fetch", fetching)
    patching.setattr(planned_task.TrainingStep, "apply", applying)


@pytest.fixture(scope="module", name="server_of")
def _server_of(tmp_path_factory):
    """Function that makes the server of a task."""
    buckets = participation_histograms.ParticipationBuckets.for_schema(_SCHEMA)
    participation = plan_pb2.Participation(
        min_sep_rounds=_SCHEMA.min_sep,
        stride_edges=buckets.stride_edges,
        times_edges=buckets.times_edges,
    )
    config = small_folder.CONFIG.changed(
        num_rounds=_SCHEMA.num_rounds,
        over_selection=1.0,
        least_fraction=1.0,
        selection_timeout=5.0,
    )
    with pytest.MonkeyPatch.context() as patching:
        _patch(patching)

        def made(name, deterministic_seed=None):
            path, strategy = tmp_path_factory.mktemp("tasks") / name, _STRATEGIES[name]
            process = _process(strategy, deterministic_seed)
            small_folder.write_plans(
                path,
                small_folder.plans(process, participation=participation),
                terms=dataclasses.replace(small_folder.TERMS, schema=_SCHEMA, strategy=strategy),
                config=config,
            )
            return _Server(planned_task.load(path))

        yield made


@pytest.fixture(scope="module", name="main")
def _main(server_of, tmp_path_factory):
    """A server, and the disk of its first rounds."""
    server, disk = server_of("blt"), _Disk(tmp_path_factory.mktemp("main") / "disk", True)
    server.serve(disk, 5)
    return server, disk


def _num_released(visible):
    return max((done for kind, done, _ in visible if kind == "released"), default=0)


def _differences(server, main, branch, forked_at):
    """Noise of a disk minus that of a branch, by the rounds that both released after the fork."""
    one, other = server.noise(main), server.noise(branch)
    both = sorted(done for done in set(one) & set(other) if done >= forked_at)
    return {done: one[done] - other[done] for done in both}


def _check_noise(differences, strategy, forked_at):
    """Checks that no combination of rounds has less noise than both branches' new draws have."""
    rows, found = np.array(list(differences)), np.array(list(differences.values()))
    # Both branches have the draws before the fork, and each has its own after it.
    new = strategy.noise_matrix(rows[-1] + 1)[rows][:, forked_at:]
    expected = np.sqrt(2) * _STDDEV * np.linalg.cholesky(new @ new.T)

    # The smallest singular value of an n × k matrix of Gaussians is below √n - √k - 6 once in 10⁸
    # times (Davidson & Szarek 2001, theorem II.13).
    def least(k):
        return np.sqrt(_SIZE) - np.sqrt(k) - 6

    for row in found:  # The new draw of a round has the weight 1 in its noise.
        assert np.linalg.norm(row) >= np.sqrt(2) * _STDDEV * least(1)
        assert np.count_nonzero(row == 0) <= 1  # float32 numbers of one size may be equal.
    white = np.linalg.solve(expected, found)
    singular = np.linalg.svd(white, compute_uv=False)
    assert singular[-1] >= least(len(rows))
    assert singular[0] <= np.sqrt(_SIZE) + np.sqrt(len(rows)) + 6


def _branch(server, main, index, num_rounds):
    """Goes on from a copy with other devices; returns the branch and the rounds of the copy."""
    branch, done = main.copy(index), 0
    with sql.SqlStore(branch.place) as store:
        if store.tasks("tests"):
            done = store.last_commit("tests", "small").rounds_done
    server.serve(branch, done + num_rounds, first=1000 * (index + 1))
    return branch, done


def _check_branches(server, main, generator, num_pairs):
    strategy, pairs = server.task.folder.terms.strategy, 0
    last = _num_released(main.visible) - 3
    usable = [i for i, copy in enumerate(main.copies) if 1 <= _num_released(copy[2]) <= last]
    while pairs < num_pairs:
        branch, done = _branch(server, main, generator.choice(usable), 3)
        differences = _differences(server, main, branch, done)
        if differences:
            _check_noise(differences, strategy, done)
            pairs += len(differences)


def test_the_difference_of_branches_has_the_noise_of_both(main):
    assert not main[0].task.folder.repeats_noise
    _check_branches(*main, random.Random(1), num_pairs=6)


@pytest.mark.slow
@pytest.mark.parametrize("name", _STRATEGIES)
def test_the_difference_of_a_hundred_branches_has_the_noise_of_both(name, server_of, tmp_path):
    server, disk = server_of(name), _Disk(tmp_path / "disk", True)
    server.serve(disk, 20)
    _check_branches(server, disk, random.Random(2), num_pairs=100)


@pytest.mark.slow
def test_noise_that_follows_from_the_state_has_no_branches(server_of, tmp_path):
    """As in tasks of version 0.4, which go on as they were made: the difference has no noise."""
    server, disk = server_of("blt", deterministic_seed=7), _Disk(tmp_path / "disk", True)
    server.serve(disk, 4)
    index = [event for event, *_ in disk.copies].index("after commit")
    branch, done = _branch(server, disk, index, 3)
    differences = _differences(server, disk, branch, done)
    # Sums and models are float32.
    assert len(differences) >= 2 and np.max(np.abs(list(differences.values()))) < 1e-4
    said = f"small: {task_folder.REPEATS_NOISE}"
    assert all(("line", None, said) in one.visible for one in (disk, branch))


def _check_visible(server, main, index):
    """Goes on from a copy: what was visible when it was made stays, and is charged."""
    branch, _ = _branch(server, main, index, 1)
    with sql.SqlStore(branch.place) as store:
        commit, history = store.last_commit("tests", "small"), store.history("tests", "small")
    contents = {}
    for kind, done, content in [*main.copies[index][2], *branch.visible]:
        if kind != "line":
            assert contents.setdefault((kind, done), content) == content
    for (kind, done), content in contents.items():
        assert done <= commit.rounds_done
        if kind == "released":
            assert history[done - 1] == {**history[done - 1], **content}
        elif done == commit.rounds_done:
            assert content == commit.model
    assert server.task.observed(commit).num_rounds == commit.rounds_done == len(history)
    spent = server.task.privacy(commit)
    assert (spent.num_rounds, spent.epsilon) == (len(history), history[-1]["privacy/epsilon"])
    counted = json.loads((branch.place / "server/rounds.json").read_text())
    assert counted["tests/small"][1] <= commit.rounds_done


def test_what_was_visible_stays_when_a_server_is_killed_at_a_durable_event(main):
    server, disk = main
    third = {
        event: index
        for index, (event, _, visible) in enumerate(disk.copies)
        if _num_released(visible) == 2
    }
    for event in ("after begin_attempt", "before commit", "after commit", "after rounds.json"):
        _check_visible(server, disk, third[event])


@pytest.mark.slow
def test_what_was_visible_stays_when_a_server_is_killed_at_any_durable_event(main):
    server, disk = main
    for index in range(len(disk.copies)):
        _check_visible(server, disk, index)
