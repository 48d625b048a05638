"""What a device's report in the clear reaches beyond its own update: nothing."""

import numpy as np
import pytest

from tests.runtime.plans import small_tasks
from tests.runtime.tasks import small_folder, tiny_task
from tff_dpftrl.runtime.actors import population
from tff_dpftrl.runtime.plans import measured_run, plan_pb2, tensor_values
from tff_dpftrl.runtime.tasks import making, planned_task
from verification import memory_store

_LARGEST = {kind: np.finfo(kind).max for kind in ("float32", "float64")} | {
    kind: np.iinfo(kind).max for kind in ("int32", "int64")
}


class _Round:
    """The first round of a task, and what honest devices report in it."""

    def __init__(self, task, examples, model=None):
        self.task = task
        self.rounds = small_folder.Rounds(task, memory_store.MemoryStore())
        self.tensors = {tensor.label: tensor for tensor in task.folder.server.update}
        self._model = self.rounds.commit.model if model is None else model
        device = small_folder.device_of(task)
        self.honest = [small_folder.report(device, self._model, own) for own in examples]
        self.summation = task.served.task.summation.for_round(self._model)

    def changed(self, label, value):
        """The report of a device that says `value` wherever a label ends with `label`."""
        forged = type(self.honest[0])()
        forged.CopyFrom(self.honest[0])
        update = tensor_values.from_bytes(forged.update, self.task.folder.server.update)
        for place, tensor in enumerate(self.task.folder.server.update):
            if tensor.label.endswith(label):
                update[place] = np.full_like(update[place], value)
        forged.update = tensor_values.to_bytes(update)
        return forged

    def committed(self, *forged):
        """What the step makes of the honest reports, and how many others were refused."""
        total, refused = self.summation.zero(), 0
        for report in [self.honest[0], *forged, *self.honest[1:]]:
            try:
                total = self.summation.accumulate(total, report)
            except population.UnusableReport:
                refused += 1
        commit = self.rounds.commit
        step = self.task.served.task.server_step
        return step.apply(total, len(self.honest), commit.model, commit.state), refused


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    """Of a language model's task that learns its clip norm."""
    corpora = tmp_path_factory.mktemp("corpora")
    tiny_task.write_corpora(corpora)
    config = tiny_task.config(
        corpora, adaptive_clipping=True, mechanism="tree", clipped_count_stddev=5.0
    )
    with pytest.MonkeyPatch.context() as patch:  # What the plans cost is not measured.
        patch.setattr(measured_run, "measure", lambda *_: measured_run.Cost(0.1, 0.2, 1000))
        folder = making.make(config, corpora / "task", small_tasks.KEY, progress=lambda _: None)
    return _Round(planned_task.PlannedTask(folder), tiny_task.examples())


@pytest.fixture(scope="module")
def evaluation():
    """Of a task with metrics of unknown size."""
    folder = small_folder.folder_of(
        small_tasks.evaluation(),
        terms=small_folder.evaluation_of(small_folder.TERMS),
        task="watch",
        kind=plan_pb2.EVALUATION,
    )
    model = [np.zeros(list(t.shape), t.dtype) for t in folder.server.prepare.outputs]
    examples = small_folder.cohort(0)
    return _Round(planned_task.PlannedTask(folder), examples, tensor_values.to_bytes(model))


def _attacks(round_):
    """Labels and values far beyond, and just beyond, what a device can have."""
    server = round_.task.folder.server
    for bound in server.report_bounds:
        for place in bound.tensors:
            tensor = server.update[place]
            most = _LARGEST[tensor.dtype]
            yield tensor.label, most
            yield tensor.label, -most
            if bound.HasField("entries"):
                dtype = np.dtype(tensor.dtype).type
                above, below = dtype(bound.entries.largest), dtype(bound.entries.least)
                is_integer = np.dtype(tensor.dtype).kind == "i"
                yield tensor.label, above + 1 if is_integer else np.nextafter(above, dtype(most))
                yield tensor.label, below - 1 if is_integer else np.nextafter(below, dtype(-most))


@pytest.mark.parametrize("name", [pytest.param("training", marks=pytest.mark.slow), "evaluation"])
def test_every_tensor_beyond_its_bound_costs_its_device_its_own_report(name, request):
    round_ = request.getfixturevalue(name)
    honest, _ = round_.committed()
    attacks = list(_attacks(round_))
    assert {label for label, _ in attacks} == round_.tensors.keys()
    forged = [round_.changed(label, value) for label, value in attacks]
    result, refused = round_.committed(*forged)
    assert (refused, result) == (len(attacks), honest)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("label", "value"),
    [
        ("loss_sum", 3e38),
        ("num_targets", 2**63 - 1),
        ("num_targets", -1),
        ("non_finite_clients", 2**31 - 1),
        ("update/bit", -1e5),  # Of adaptive clipping.
        ("update/bit", 5e5),
        ("update/bit", 0.6),
        ("update/update/0", 2.0**20),  # Part of the update; the clip norm is 1.
    ],
)
def test_the_attacks_that_spoilt_a_task_change_no_bit_of_it(training, label, value):
    assert any(name.endswith(label) for name in training.tensors)
    honest, _ = training.committed()
    result, refused = training.committed(training.changed(label, value))
    assert (refused, result) == (1, honest)
    found = result.metrics
    assert 0 < found["client_work/train/loss"] < 10
    assert 0 < found["client_work/train/num_targets"] < 100
    assert found["aggregator/non_finite_clients"] == 0
    assert 0.1 < found["aggregator/estimated_clip_norm"] < 10


@pytest.mark.slow
def test_the_most_that_a_device_can_report_is_finite_and_adds_up(training):
    """A device that lies within the bounds, in all metrics at once, does no more than that."""
    forged = training.changed("sum", 0)
    update = tensor_values.from_bytes(forged.update, training.task.folder.server.update)
    largest = {}
    for bound in training.task.folder.server.report_bounds:
        if bound.HasField("entries"):
            (place,) = bound.tensors
            update[place] = np.full_like(update[place], bound.entries.largest)
            largest[training.task.folder.server.update[place].label] = bound.entries.largest
    forged.update = tensor_values.to_bytes(update)
    total = training.summation.zero()
    for _ in range(training.task.served.task.rounds.wanted):
        total = training.summation.accumulate(total, forged)
    commit = training.rounds.commit
    reports = training.task.served.task.rounds.wanted
    found = training.task.served.task.server_step.apply(total, reports, commit.model, commit.state)
    options = training.task.folder.config.definition
    rows = options.max_sequences_per_client * options.client_epochs
    targets = rows * options.sequence_length
    assert found.metrics["client_work/train/num_targets"] == reports * targets
    assert found.metrics["client_work/train/loss"] == pytest.approx(100.0, rel=1e-5)
    assert found.metrics["aggregator/non_finite_clients"] == reports


@pytest.mark.slow
@pytest.mark.parametrize("weight", [1e6, 1e30, np.nan])
def test_a_device_whose_training_diverges_is_never_refused_for_its_metrics(training, weight):
    """Its update is clipped or counts as zero, and its metrics are cut by the plan."""
    task = training.task
    tensors = task.folder.server.prepare.outputs
    model = tensor_values.from_bytes(training.rounds.commit.model, tensors)
    for place, tensor in enumerate(tensors):
        if "trainable" in tensor.label:
            signs = np.resize([1, -1, 1], tensor.shape).astype(tensor.dtype)
            model[place] = signs * np.float32(weight)
    content = tensor_values.to_bytes(model)
    report = small_folder.report(small_folder.device_of(task), content, tiny_task.examples()[0])
    summation = task.served.task.summation.for_round(content)
    total = summation.accumulate(summation.zero(), report)
    assert all(np.isfinite(part).all() for part in total.sums)
