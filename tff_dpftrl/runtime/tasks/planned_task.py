"""A task as a server serves it: sums of reports, the server's step, and commits.

task = planned_task.load("tasks/nwp")
task.add_to(store)
...  # `task.served` is what the server takes.
task.privacy(store.last_commit(task.population, task.name))
"""

from __future__ import annotations

import abc
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ed25519
from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.models import metric_grid
from tff_dpftrl.runtime import participation_histograms
from tff_dpftrl.runtime.actors import population as population_lib
from tff_dpftrl.runtime.plans import (
    plan_pb2,
    report_size,
    secure_report,
    server_work,
    signing,
    tensor_values,
)
from tff_dpftrl.runtime.server import served_task
from tff_dpftrl.runtime.store import contents, interface
from tff_dpftrl.runtime.tasks import summations, task_folder, task_privacy, task_state
from tff_dpftrl.secure_sums import parameters

_OF_ALL_ROUNDS = "total_rounds_metrics/"  # Sums over models that differ: not shown.


class _PlanStep(population_lib.ServerStep):
    """The part that steps of both kinds of tasks share: committed states and participation."""

    def __init__(
        self,
        work: server_work.ServerWork,
        terms: str,
        privacy: task_privacy.TaskPrivacy,
    ):
        self._work = work
        self._terms = terms
        self._privacy = privacy
        self._buckets = secure_report.buckets_of(work.plan.participation)

    def first(self, initialize: plan_pb2.Graph) -> tuple[bytes, contents.Content]:
        """Makes model and state before the first round, with a new seed of the noise each time."""
        state = self._work.initialize(initialize)
        return self._model(state), self._packed(state, participation_histograms.ObservedRounds())

    @override
    def apply(
        self,
        total: summations.Total,
        num_reports: int,
        model: bytes,
        state: contents.Serialised,
    ) -> population_lib.StepResult:
        del model
        self._check_room(num_reports)
        before = task_state.observed(state, self._terms)
        tensors = task_state.tensors(state, self._terms, self._work.state)
        observed = self._observed(before, total, num_reports)
        after, metrics = self._finish(tensors, total.sums)
        metrics = self._with_quantiles(metrics)
        return population_lib.StepResult(
            model=self._model(after),
            state=self._packed(after, observed),
            metrics=self._shown(metrics, observed),
        )

    @override
    def skip(self, model: bytes, state: contents.Serialised) -> population_lib.StepResult:
        del model  # The new one follows from the state, since its clip norm may change.
        observed = task_state.observed(state, self._terms).with_skipped_round()
        after = self._work.skip(task_state.tensors(state, self._terms, self._work.state))
        return population_lib.StepResult(
            model=self._model(after),
            state=self._packed(after, observed),
            metrics=self._shown({}, observed) | {population_lib.SKIPPED: True},
        )

    def _check_room(self, num_reports: int) -> None:
        """Refuses a sum of more devices than its modulus has room for."""
        plan = self._work.plan
        most = plan.secure_aggregation.most_devices
        if secure_report.is_asked_for(plan) and num_reports > most:
            raise validation.UsageError(
                f"The sum is of {num_reports} devices: it has room for {most}."
            )

    def _observed(
        self,
        before: participation_histograms.ObservedRounds,
        total: summations.Total,
        num_reports: int,
    ) -> participation_histograms.ObservedRounds:
        try:
            if total.strides.sum() != num_reports:
                raise validation.UsageError("the histograms are of other devices than the sum")
            return before.with_round(
                self._buckets,
                total.strides,
                total.times,
                declared_min_sep=self._work.plan.participation.min_sep_rounds,
            )
        except ValueError:  # Where sums are secure, a device may hide others.
            return before.with_unknown_round()

    def _with_quantiles(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Replaces the histograms among a round's metrics by their quantiles."""
        found = dict(metrics)
        for histogram in self._work.plan.histograms:
            grid = metric_grid.MetricGrid(tuple(histogram.edges))
            quantiles = grid.quantiles(found.pop(histogram.label))
            name = histogram.label.removesuffix(metric_grid.SUFFIX)
            found |= {f"{name}/{key}": value for key, value in quantiles.items()}
        return found

    def _packed(
        self, state: server_work.State, observed: participation_histograms.ObservedRounds
    ) -> contents.Content:
        head = task_state.TaskState(self._terms, observed, b"").to_bytes()
        return contents.InMemory([head, *tensor_values.to_parts(state)])

    @abc.abstractmethod
    def _model(self, state: server_work.State) -> bytes:
        """Serialises the model that devices get."""

    @abc.abstractmethod
    def _finish(
        self, state: server_work.State, sums: server_work.Sums
    ) -> tuple[server_work.State, dict[str, np.ndarray]]:
        """Returns the state from which the next round begins, and metrics; may empty the lists."""

    @abc.abstractmethod
    def _shown(
        self,
        metrics: dict[str, Any],
        observed: participation_histograms.ObservedRounds,
    ) -> dict[str, Any]:
        """Returns the metrics of the round as JSON-compatible values."""


class TrainingStep(_PlanStep):
    """Step of a training task: noise and the optimizer's step, which give the next model."""

    def _model(self, state):
        return tensor_values.to_bytes(self._work.broadcast(state))

    def _finish(self, state, sums):
        return self._work.finish(state, sums, keeps_arguments=False)

    def _shown(self, metrics, observed):
        return _plain(metrics) | self._privacy.so_far(observed).metrics()


class EvaluationStep(_PlanStep):
    """Step of an evaluation task: metrics of another task's model, without noise."""

    def _model(self, state):
        del state
        return b""

    def _finish(self, state, sums):
        _, metrics = self._work.finish(state, sums)
        return state, metrics  # The new one differs in metrics summed over rounds only.

    def _shown(self, metrics, observed):
        del observed
        return {
            label: value for label, value in _plain(metrics).items() if _OF_ALL_ROUNDS not in label
        }


class PlannedTask:
    """A verified task, ready to be served."""

    def __init__(self, folder: task_folder.TaskFolder):
        """Takes a verified task that may be served at once; `load` gets its first round ready."""
        self.folder = folder
        """Folder of the task."""
        terms, config = folder.terms, folder.config
        self._privacy = task_privacy.TaskPrivacy(terms)
        work = self._work = server_work.ServerWork(folder.server)
        kind = TrainingStep if terms.kind == "training" else EvaluationStep
        self._digest = terms.digest()
        self._step = kind(work, self._digest, self._privacy)
        self._variants = [plan.SerializeToString() for plan in folder.signed.devices]
        task = population_lib.Task(
            name=terms.task,
            rounds=config.round_settings,
            summation=_summation(work, config.round_settings.wanted),
            server_step=self._step,
            weight=config.serving.weight,
            model_of=terms.model_of,
            num_rounds=terms.schema.num_rounds,
            pipelined=config.serving.pipelined,
            refusal=self.refusal,
            secure_sum=_secure_sum(folder),
            min_sep=folder.server.participation.min_sep_rounds,
            max_participations=terms.schema.max_participations,
            min_sep_hours=folder.server.participation.min_sep_hours,
            tested_tensorflow=tuple(folder.devices[0].tested_tensorflow),
        )
        self.served = served_task.ServedTask(
            task=task,
            plan_for=self._plan_for,
            largest_report_bytes=report_size.largest_report_bytes(folder.server),
            digest=self._digest,
        )
        """The task in the form that the server takes."""

    @property
    def name(self) -> str:
        """Name of the task."""
        return self.folder.terms.task

    @property
    def population(self) -> str:
        """Name of the population of devices."""
        return self.folder.terms.population

    def load(self) -> None:
        """Imports TensorFlow and traces the graphs, for which the first round waits otherwise."""
        self._work.load()

    def add_to(self, store: interface.Store) -> interface.Commit:
        """Adds the task to a store, or finds it there; returns its last commit.

        Raises a `StateError` if the store has a task of that name with other terms or plans.
        """
        if self.name not in store.tasks(self.population):
            model, state = self._step.first(self.folder.initialize())
            try:
                return store.add_task(self.population, self.name, model=model, state=state)
            except interface.TaskExists:  # Another server has added it meanwhile.
                pass
        commit = store.last_commit(self.population, self.name)
        self.observed(commit)
        return commit

    def observed(self, commit: interface.Commit) -> participation_histograms.ObservedRounds:
        """Reads the participation in all rounds up to a commit, quickly."""
        return task_state.observed(commit.state, self._digest)

    def privacy(self, commit: interface.Commit) -> task_privacy.PrivacySoFar:
        """Returns what the rounds up to a commit have spent; the result is cached."""
        return self._privacy.so_far(self.observed(commit))

    def headline_caveats(self, commit: interface.Commit) -> tuple[str, ...]:
        """Returns the caveats without which nobody should quote ε of the rounds up to a commit."""
        return self._privacy.headline_caveats(self.observed(commit))

    def refusal(self, commit: interface.Commit) -> str | None:
        """Returns why no further round may begin after a commit; None if one may.

        An evaluation task has no budget: only its rounds are counted.
        """
        return self._privacy.refusal(self.observed(commit))

    def _plan_for(self, runtime_version: int) -> bytes | None:
        index = signing.variant_for(self.folder.devices, runtime_version)
        return None if index is None else self._variants[index]


def load(
    path: str | os.PathLike[str], keys: Sequence[ed25519.Ed25519PublicKey] | None = None
) -> PlannedTask:
    """Reads and verifies a task, ready to be served.

    Without trusted `keys`, the key in the folder is trusted, which shows damage, but not who made
    the task. It raises ValueError if there is no task, if it was changed, or if none of the keys
    signed it.
    """
    return PlannedTask(task_folder.read(path, keys))


def _summation(work: server_work.ServerWork, most_reports: int) -> population_lib.Summation:
    if secure_report.is_asked_for(work.plan):
        return summations.SecureSummation(work)
    return summations.PlanSummation(work, most_reports)


def _secure_sum(folder: task_folder.TaskFolder) -> parameters.Parameters | None:
    """Returns what the task's plans demand of secure sums."""
    if not secure_report.is_asked_for(folder.server):
        return None
    _check_noise_parties(folder)
    return secure_report.parameters_of(folder.server)


def _check_noise_parties(folder: task_folder.TaskFolder) -> None:
    """Refuses plans whose noise nobody would add, or that are not those of the terms."""
    plan, stated = folder.server, folder.terms.secure_aggregation
    keys = tuple(key.hex() for key in plan.secure_aggregation.noise_parties)
    if keys != (() if stated is None else stated.noise_parties):
        raise validation.UsageError(
            f"The plan of the task {folder.name!r} names other noise parties than its terms: make "
            "the task anew (tff-dpftrl task new)."
        )
    if bool(keys) != plan.HasField("party_noise"):
        raise validation.UsageError(
            f"The plan of the task {folder.name!r} names {len(keys)} noise parties, and its server "
            f"{'adds' if keys else 'leaves to others'} the noise: make the task anew (tff-dpftrl "
            "task new)."
        )


def _plain(metrics: dict[str, Any]) -> dict[str, Any]:
    """Converts metrics to JSON-compatible values."""
    return {
        label: value.tolist() if isinstance(value, np.ndarray) else value
        for label, value in metrics.items()
    }
