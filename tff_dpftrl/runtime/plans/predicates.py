"""Tests that a task passes before a server accepts it: a small simulation on proxy data.

Bonawitz et al. 2019, section 7.1. The plans themselves are tested, not the process that they
were made of. All that is wrong is reported at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from tff_dpftrl import validation
from tff_dpftrl.execution import entropy as entropy_lib
from tff_dpftrl.runtime.plans import (
    allowed_ops,
    device_work,
    measured_run,
    plan_pb2,
    report_bounds,
    server_work,
    signing,
    tensor_values,
    verification,
)
from tff_dpftrl.runtime.plans import expectations as expectations_lib

UPDATE_TOLERANCE = 1e-4
"""Largest relative difference of the updates of two variants, or with two TensorFlows.

An update takes thousands of float32 operations, which add in other orders.
"""


class TaskRefusedError(validation.UsageError):
    """Raised for a task that failed its tests; `reasons` has all failures, one sentence each."""

    def __init__(self, reasons: Sequence[str]):
        """Joins the reasons, one a line."""
        super().__init__("The task is refused:\n" + "\n".join(f"- {r}" for r in reasons))
        self.reasons = tuple(reasons)


@dataclasses.dataclass(frozen=True)
class Predicates:
    """Tests that a task has to pass on proxy data."""

    num_rounds: int = 5  # Number of simulated rounds, with all proxies in each.
    # Number of devices of a real round that a proxy stands for; its update is added that often.
    # Sums are divided by the real number of devices, so fewer would change little.
    devices_per_proxy: int = 1
    # Label of the metric that must fall from the first round of training to the last, with models
    # to which no noise was added; "" for none.
    loss: str = "client_work/train/loss"
    least_change: float = 1e-9  # Smallest L2 norm of a round's change of the model, without noise.
    largest_change: float = 1e3  # Largest L2 norm of a round's change of the model, without noise.
    # Runtime versions of the devices that the task is meant for.
    runtime_versions: tuple[int, ...] = (allowed_ops.RUNTIME_VERSION,)
    expectations: Sequence[expectations_lib.Expectation] = ()  # The engineer's, on every variant.
    # Python interpreters whose environments have other versions of TensorFlow that devices of the
    # task may have.
    pythons: Sequence[str | os.PathLike[str]] = ()

    def __post_init__(self):
        validation.integer("num_rounds", self.num_rounds, minimum=2)
        validation.integer("devices_per_proxy", self.devices_per_proxy, minimum=1)
        validation.number("least_change", self.least_change, at_least=0)
        validation.number("largest_change", self.largest_change, above=self.least_change)
        if not self.runtime_versions:
            raise validation.UsageError(
                "runtime_versions must name at least one version of devices."
            )
        for expectation in self.expectations:
            if not isinstance(expectation, expectations_lib.Expectation):
                raise validation.UsageError(
                    f"expectations must be made by `expect`, `loss_below` and the like, got "
                    f"{expectation!r}."
                )


DEFAULT_PREDICATES = Predicates()


@dataclasses.dataclass(frozen=True)
class Findings:
    """Measurements of one variant of the devices' plan."""

    losses: tuple[float, ...]  # Loss in each round; empty if none was asked for.
    changes: tuple[float, ...]  # L2 norm of each round's change of the model, without noise.
    cost: measured_run.Cost  # Cost of a run on the proxy with most examples.
    tensorflow: str  # Version of TensorFlow that ran the devices' part.
    expectations: tuple[str, ...] = ()  # Expectations that were met, with the measured numbers.
    # Largest relative difference of an update from that of the first variant with this process's
    # TensorFlow; None for that one, and for plans that draw other numbers in each run.
    difference: float | None = None
    elsewhere: tuple[Findings, ...] = ()  # Findings with other versions of TensorFlow.


def check_task(
    server: plan_pb2.ServerPlan,
    devices: Sequence[plan_pb2.DevicePlan],
    proxies: Sequence[Sequence[bytes]],
    predicates: Predicates = DEFAULT_PREDICATES,
    *,
    ceiling: verification.Ceiling = verification.DEFAULT_CEILING,
) -> dict[int, Findings]:
    """Tests the plans of a task.

    Operations, loss, updates, norm, memory and seconds are tested, on each variant that a claimed
    version gets, with this TensorFlow and with others. An evaluation task must leave the model as
    it is. All variants must give the same updates with every TensorFlow, up to `UPDATE_TOLERANCE`,
    unless the plan draws other numbers in each run.
    """
    if not any(proxies):
        raise validation.UsageError("proxies must have at least one device with examples.")
    reasons: list[str] = []
    chosen: dict[int, int] = {}
    for version in predicates.runtime_versions:
        index = signing.variant_for(devices, version)
        if index is None:
            reasons.append(f"No variant of the plan runs on the claimed version {version}.")
        else:
            chosen[index] = min(version, chosen.get(index, version))
    measured, begin, reference = {}, _Beginning(server), None
    compares = len(chosen) > 1 or bool(predicates.pythons)
    for index, version in sorted(chosen.items()):
        plan, found = devices[index], []
        for python in (None, *predicates.pythons):
            trial = _Trial(begin, plan, version, predicates, ceiling, python)
            found.append(trial.run(proxies, reference, keeps_updates=compares))
            reference = reference or trial.updates
            reasons += [f"{trial.where}: {reason}" for reason in trial.reasons]
        first, *others = found
        if first is not None:
            elsewhere = tuple(findings for findings in others if findings is not None)
            measured[plan.least_runtime_version] = dataclasses.replace(first, elsewhere=elsewhere)
    if reasons:
        raise TaskRefusedError(reasons)
    return measured


class _Beginning:
    """Server's part of a task, and the state that all trials begin with."""

    def __init__(self, server: plan_pb2.ServerPlan):
        # Two rounds from one state have the same noise here, which their difference is without.
        self.work = server_work.ServerWork(server, entropy_lib.Repeated())
        self.bounds = report_bounds.ReportBounds(server, 1)
        self.state = self.work.initialize()
        self.broadcast = self.work.broadcast(self.state)


class _Trial:
    """The tests of one variant with one TensorFlow."""

    def __init__(
        self,
        begin: _Beginning,
        plan: plan_pb2.DevicePlan,
        version: int,
        predicates: Predicates,
        ceiling: verification.Ceiling,
        python: str | os.PathLike[str] | None,
    ):
        self.reasons: list[str] = []
        self.updates: list[list[np.ndarray]] | None = None
        self.where = f"On version {version}"
        self._begin = begin
        self._server = begin.work
        self._plan = plan
        self._version = version
        self._predicates = predicates
        self._ceiling = ceiling
        self._python = python

    def run(
        self,
        proxies: Sequence[Sequence[bytes]],
        reference: Sequence[Sequence[np.ndarray]] | None,
        *,
        keeps_updates: bool,
    ) -> Findings | None:
        """Runs all tests; returns None if the plan cannot even be run.

        Each proxy's update of the first model is compared with that of `reference`, if there is
        one, and kept as the reference of other trials with `keeps_updates`.
        """
        with contextlib.ExitStack() as stack:
            try:
                verification.check_device_plan(
                    self._plan, ceiling=self._ceiling, runtime_version=self._version
                )
                most = max(proxies, key=len)
                if self._python is None:
                    device = device_work.DeviceWork(self._plan)
                    trial = self._simulate(device, proxies)
                    cost = measured_run.measure(self._plan, most, self._begin.broadcast)
                    tensorflow = tf.__version__
                else:
                    self.where += f", {os.fspath(self._python)}"
                    device = measured_run.DeviceProcess(self._plan, self._python)
                    stack.enter_context(device)
                    tensorflow = device.tensorflow
                    self.where = f"On version {self._version}, TensorFlow {tensorflow}"
                    cost = device.measure(most, self._begin.broadcast)
                    trial = self._simulate(device, proxies)
                difference = None
                if keeps_updates and not allowed_ops.DRAWS_ANEW.intersection(self._plan.ops):
                    self.updates = [list(trial.update_of(examples)) for examples in proxies]
                    difference = self._check_difference(reference)
            except (ValueError, device_work.WorkFailedError) as error:
                self.reasons.append(str(error))
                return None
            losses = [
                float(metrics[self._predicates.loss])
                for metrics in trial.metrics
                if self._predicates.loss in metrics
            ]
            self._check_losses(losses)
            self._check_changes(trial.changes)
            self._check_cost(cost)
            met = self._check_expectations(trial)
        return Findings(tuple(losses), tuple(trial.changes), cost, tensorflow, met, difference)

    def _check_difference(self, reference: Sequence[Sequence[np.ndarray]] | None) -> float | None:
        """Compares the updates with those of the first trial; returns the largest difference."""
        if reference is None or self.updates is None:
            return None
        apart = max(
            expectations_lib.largest_difference(one, other, self._plan, steps=1)
            for one, other in zip(reference, self.updates, strict=True)
        )
        if apart > UPDATE_TOLERANCE:
            self.reasons.append(
                f"The update differs by {apart:.3g}, relative to its norm, from that of the first "
                f"variant with TensorFlow {tf.__version__}; at most {UPDATE_TOLERANCE:g} is "
                "allowed. Give devices of this version a variant that computes the same."
            )
        return apart

    def _simulate(
        self,
        device: device_work.DeviceWork | measured_run.DeviceProcess,
        proxies: Sequence[Sequence[bytes]],
    ) -> expectations_lib.Trial:
        """Runs rounds whose model takes the devices' changes without the noise.

        The noise is scaled for all rounds of a task. In a few rounds from a good model it can
        outweigh what is learned, and chance would decide.
        """
        metrics_of_rounds, changes = [], []
        state, first = self._begin.state, self._begin.broadcast
        model = self._server.weights(state)
        for _ in range(self._predicates.num_rounds):
            broadcast = self._server.broadcast(state)
            bounds = self._begin.bounds.for_round(tensor_values.to_bytes(broadcast))
            sums = self._server.zero()
            for index, examples in enumerate(proxies):
                # The same examples in every round, in the same order: losses can be compared.
                update = device.run(examples, broadcast, seed=(index, 0))
                bounds.check(update)
                sums = self._server.accumulate(sums, update)
            total = self._times(sums, self._predicates.devices_per_proxy)
            # Their difference is what the devices changed.
            without, _ = self._server.finish(state, self._server.zero())
            self._check_noise(state, without)
            state, metrics = self._server.finish(state, total)
            change = self._difference(state, without)
            changes.append(_norm(change))
            model = {
                name: (model[name] + change[name]).astype(w.dtype) for name, w in model.items()
            }
            state = self._server.with_weights(state, model)
            metrics_of_rounds.append(metrics)
        return expectations_lib.Trial(
            plan=self._plan,
            proxies=proxies,
            metrics=metrics_of_rounds,
            changes=changes,
            update_of=lambda examples: device.run(examples, first, seed=(0, 0)),
        )

    def _check_noise(self, before: server_work.State, after: server_work.State) -> None:
        """Refuses a finished round whose state would give the next round the same noise.

        Skipping a round moves the seeds of the noise on; so must finishing one.
        """
        tensors = zip(self._server.state, before, self._server.skip(before), after, strict=True)
        for tensor, old, skipped, new in tensors:
            if np.array_equal(old, skipped):
                continue
            counts = np.issubdtype(new.dtype, np.integer)
            if not np.array_equal(new, skipped) if counts else np.array_equal(new, old):
                raise validation.UsageError(
                    f"A round leaves {tensor.label} as it was, so that the next one would be "
                    "noised as this one: the process must keep the state that its aggregator "
                    "returns."
                )

    def _times(self, sums: server_work.Sums, count: int) -> server_work.Sums:
        """Returns the sums of `count` equal sets of updates, by doubling."""
        if count == 1:
            return sums
        half = self._times(sums, count // 2)
        double = self._server.merge(half, half)
        return self._server.merge(double, sums) if count % 2 else double

    def _difference(
        self, one: server_work.State, other: server_work.State
    ) -> dict[str, np.ndarray]:
        """Returns the weights in a state, minus those in another."""
        taken = self._server.weights(other)
        return {
            name: np.subtract(weight, taken[name], dtype=float)
            for name, weight in self._server.weights(one).items()
        }

    def _check_losses(self, losses: Sequence[float]) -> None:
        label = self._predicates.loss
        if not label or self._plan.kind == plan_pb2.EVALUATION:
            return
        if not losses:
            known = [tensor.label for tensor in self._server.metrics]
            self.reasons.append(f"There is no metric {label!r}; the task has {known}.")
        elif not np.isfinite(losses).all() or not losses[-1] < losses[0]:
            self.reasons.append(
                f"The loss {label!r} does not fall: {losses[0]:.6g} in the first of {len(losses)} "
                f"rounds, {losses[-1]:.6g} in the last."
            )

    def _check_changes(self, changes: Sequence[float]) -> None:
        least, largest = self._predicates.least_change, self._predicates.largest_change
        smallest, greatest = min(changes), max(changes)
        if self._plan.kind == plan_pb2.EVALUATION:
            if greatest != 0:
                self.reasons.append(
                    f"An evaluation changes the model by {greatest:.3g}: it must leave it as it is."
                )
        elif not np.isfinite(changes).all():
            self.reasons.append("The update makes weights that are not finite.")
        elif smallest == 0:
            self.reasons.append(
                f"The update is zero in round {changes.index(0) + 1} of {len(changes)} tested: "
                "devices change nothing of the model. Raise the clients' and the server's learning "
                "rates, and give proxies texts with words of the vocabulary; a decay needs as many "
                "rounds as the test has."
            )
        elif smallest < least or greatest > largest:
            self.reasons.append(
                f"The update's norm is between {smallest:.3g} and {greatest:.3g}, outside "
                f"[{least:g}, {largest:g}]."
            )

    def _check_expectations(self, trial: expectations_lib.Trial) -> tuple[str, ...]:
        """Evaluates the engineer's expectations; returns those that are met, with numbers."""
        met = []
        for expectation in self._predicates.expectations:
            description = expectation.description
            try:
                holds, measured = expectation.outcome(trial)
            except expectations_lib.CannotEvaluateError as error:
                self.reasons.append(
                    f"The expectation {description!r} cannot be evaluated: {error}."
                )
                continue
            if holds:
                met.append(f"{description} ({measured})")
            else:
                self.reasons.append(
                    f"The expectation {description!r} is not met; measured: {measured}."
                )
        return tuple(met)

    def _check_cost(self, cost: measured_run.Cost) -> None:
        limits = self._plan.limits
        if cost.seconds > limits.seconds:
            self.reasons.append(
                f"A run takes {cost.seconds:.3g} seconds; the plan declares {limits.seconds:g}."
            )
        if cost.memory_bytes > limits.memory_bytes:
            self.reasons.append(
                f"A run takes {cost.memory_bytes} bytes of memory; the plan declares "
                f"{limits.memory_bytes}."
            )


def _norm(weights: Mapping[str, np.ndarray]) -> float:
    """Returns the L2 norm of all entries."""
    return float(np.sqrt(sum(np.sum(np.square(weight)) for weight in weights.values())))
