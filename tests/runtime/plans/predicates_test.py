"""Tasks that pass their tests, and those that are refused, with all reasons."""

import dataclasses
import sys

import pytest
import tensorflow as tf

from tests import other_python
from tests.runtime.plans import small_tasks
from tff_dpftrl.execution import graph_function
from tff_dpftrl.private_round import aggregation as aggregation_lib
from tff_dpftrl.runtime.plans import (
    allowed_ops,
    device_work,
    expectations,
    measured_run,
    plan_pb2,
    predicates,
    verification,
)

_PROXIES = [small_tasks.examples(seed, 8) for seed in range(3)]
_ON = f"On version {allowed_ops.RUNTIME_VERSION}"
_PREDICATES = predicates.Predicates(num_rounds=4, loss="client_work/train/mse", largest_change=10.0)


@pytest.fixture(scope="module")
def plans():
    """With hardly any noise: the cohort is small."""
    made = small_tasks.fixed(0.05)
    return small_tasks.plans(
        small_tasks.federated_averaging(made), private_round=made.private_round
    )


@pytest.fixture(scope="module")
def evaluation():
    return small_tasks.plans(small_tasks.evaluation(), kind=plan_pb2.EVALUATION)


@pytest.fixture
def costs_little(monkeypatch):
    """A run is not measured in another process."""
    cost = measured_run.Cost(load_seconds=0.1, seconds=0.2, memory_bytes=1000)
    monkeypatch.setattr(measured_run, "measure", lambda *_: cost)


def _changed(plan, **fields):
    changed = plan_pb2.DevicePlan()
    changed.CopyFrom(plan)
    changed.MergeFrom(plan_pb2.DevicePlan(**fields))
    return changed


def _reasons(plans, device=None, **options):
    with pytest.raises(predicates.TaskRefusedError) as caught:
        predicates.check_task(
            plans.server,
            [device or plans.devices[0]],
            _PROXIES,
            dataclasses.replace(_PREDICATES, **options),
        )
    assert all(f"- {reason}" in str(caught.value) for reason in caught.value.reasons)
    return list(caught.value.reasons)


@pytest.mark.parametrize("is_measured", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_good_task_passes_and_says_what_it_costs(plans, request, is_measured):
    if not is_measured:
        request.getfixturevalue("costs_little")
    found = predicates.check_task(plans.server, plans.devices, _PROXIES, _PREDICATES)
    (findings,) = found.values()
    assert len(findings.losses) == 4 and findings.losses[-1] < findings.losses[0]
    assert all(0 < change < 10 for change in findings.changes)
    assert 0 < findings.cost.seconds < 60 and findings.cost.memory_bytes > 0


@pytest.mark.slow
@pytest.mark.usefixtures("costs_little")
def test_proxies_stand_for_many_devices(plans):
    changes = []
    for count in (1, 2, 5):
        predicate = dataclasses.replace(_PREDICATES, devices_per_proxy=count, loss="")
        found = predicates.check_task(plans.server, plans.devices, _PROXIES, predicate)
        changes.append(found[1].changes[0])
    assert changes[1] == pytest.approx(2 * changes[0], rel=1e-4)
    assert changes[2] == pytest.approx(5 * changes[0], rel=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("costs_little")
def test_the_loss_is_of_models_without_noise(plans):
    drowned = small_tasks.plans(small_tasks.federated_averaging(small_tasks.fixed(1e4)))
    findings = [
        predicates.check_task(made.server, made.devices, _PROXIES, _PREDICATES)[1]
        for made in (plans, drowned)
    ]
    assert findings[1].losses == pytest.approx(findings[0].losses, rel=1e-2)


@pytest.mark.slow
@pytest.mark.usefixtures("costs_little")
def test_an_evaluation_leaves_the_model_as_it_is(evaluation, plans):
    found = predicates.check_task(evaluation.server, evaluation.devices, _PROXIES, _PREDICATES)
    assert set(found[1].changes) == {0.0}
    device = _changed(plans.devices[0], kind=plan_pb2.EVALUATION)
    (reason,) = _reasons(plans, device)
    assert "An evaluation changes the model by" in reason


@pytest.mark.usefixtures("costs_little")
def test_a_process_that_repeats_its_noise_is_refused():
    class Forgetful(aggregation_lib.Aggregation):
        def release(self, state, plain, secure, shapes):
            return state, *super().release(state, plain, secure, shapes)[1:]

    private_round = small_tasks.fixed(0.05).private_round
    made = small_tasks.plans(
        small_tasks.federated_averaging(Forgetful(private_round)), private_round=private_round
    )
    (reason,) = _reasons(made)
    assert "aggregator/round_index as it was, so that the next one would be noised as" in reason


@pytest.mark.usefixtures("costs_little")
def test_an_update_that_changes_nothing_is_refused(evaluation):
    device = _changed(evaluation.devices[0], kind=plan_pb2.TRAINING)
    (reason,) = _reasons(evaluation, device, loss="")
    assert "The update is zero" in reason


def test_all_reasons_are_told_at_once(plans, monkeypatch):
    cost = measured_run.Cost(load_seconds=0.1, seconds=61.0, memory_bytes=600_000_000)
    monkeypatch.setattr(measured_run, "measure", lambda *_: cost)
    reasons = _reasons(plans, loss="aggregator/clip_norm", largest_change=1e-6)
    wanted = ("does not fall: 1 in", "norm is between", "takes 61 seconds", "takes 600000000 bytes")
    assert len(reasons) == 4
    for reason, part in zip(reasons, wanted, strict=True):
        assert reason.startswith(f"{_ON}: ") and part in reason


@pytest.mark.usefixtures("costs_little")
def test_a_metric_that_is_not_there_is_named(plans):
    (reason,) = _reasons(plans, loss="client_work/train/loss")
    assert "no metric 'client_work/train/loss'; the task has ['aggregator/" in reason
    assert "'client_work/train/mse'" in reason


@pytest.mark.usefixtures("costs_little")
def test_expectations_of_the_engineer_are_tested(plans):
    """Batches of two make the order of examples matter, and the task has no accuracy."""
    met = [
        expectations.metric_below("mse", 6.0),
        expectations.same_in_every_run(),
        expectations.unknown_features_are_ignored(),
        expectations.expect("two entries", lambda trial: len(trial.update_of([])) == 4),
    ]
    options = dataclasses.replace(_PREDICATES, expectations=met)
    findings = predicates.check_task(plans.server, plans.devices, _PROXIES, options)[1]
    assert len(findings.expectations) == 4
    assert findings.expectations[0].startswith("mse < 6 (mse ")
    reasons = _reasons(
        plans,
        expectations=[
            *met,
            *expectations.from_text("mse < 1e-3, accuracy > 0.1"),
            expectations.update_norm_between(5.0, 6.0),
            expectations.order_of_examples_is_ignored(),
        ],
    )
    wanted = (
        "'mse < 0.001' is not met; measured: mse ",
        "'accuracy > 0.1' cannot be evaluated: there is no metric 'accuracy'; the task has ['ag",
        "'5 <= update <= 6' is not met; measured: update ",
        "'the order of examples is ignored' is not met; measured: relative difference of two",
    )
    assert len(reasons) == 4
    for reason, part in zip(reasons, wanted, strict=True):
        assert reason.startswith(f"{_ON}: The expectation {part}")


def test_what_a_device_refuses_is_refused(plans):
    (reason,) = _reasons(plans, _changed(plans.devices[0], ops=["ReadFile"]))
    assert "declares other operations" in reason
    limits = plan_pb2.Limits(memory_bytes=100)
    (reason,) = _reasons(plans, _changed(plans.devices[0], limits=limits))
    assert "constants need" in reason
    (reason,) = _reasons(plans, _changed(plans.devices[0], limits=plan_pb2.Limits(seconds=1e-7)))
    assert "took too long" in reason


def _rewritten(plan, ops, version):
    """A variant for runtime version 1, with other operations in the place of some."""
    changed = _changed(plan)
    graph_def = tf.compat.v1.GraphDef.FromString(plan.graph.graph_def)
    for node in graph_function.nodes_of(graph_def):
        is_float = "T" in node.attr and node.attr["T"].type == tf.float32.as_datatype_enum
        node.op = ops.get((node.op, "float") if is_float else "", ops.get(node.op, node.op))
    changed.graph.graph_def = graph_def.SerializeToString()
    changed.ops[:] = verification.operations(graph_def)
    changed.least_runtime_version = version
    return changed


@pytest.fixture
def variants(plans, monkeypatch):
    """A plan of runtime version 2, the first one with `AddV2`, and its variant for version 1."""
    everything = allowed_ops.allowed(allowed_ops.RUNTIME_VERSION)
    since = {1: everything - {"AddV2"}, 2: everything}
    monkeypatch.setattr(allowed_ops, "OPS_SINCE", since)
    device = plans.devices[0]
    return [_rewritten(device, {}, 2), _rewritten(device, {"AddV2": "Add"}, 1)]


def _check(plans, devices, **options):
    options = dataclasses.replace(_PREDICATES, runtime_versions=(2, 1), **options)
    return predicates.check_task(plans.server, devices, _PROXIES, options)


@pytest.mark.usefixtures("costs_little")
def test_variants_must_give_the_same_updates(plans, variants):
    found = _check(plans, variants)
    assert found.keys() == {1, 2} and found[2].difference is None
    assert found[1].difference == 0
    # The steps of training go up.
    wrong = _rewritten(plans.devices[0], {"AddV2": "Add", ("Sub", "float"): "Add"}, 1)
    with pytest.raises(predicates.TaskRefusedError) as caught:
        _check(plans, [variants[0], wrong], loss="", largest_change=1e9)
    (reason,) = caught.value.reasons
    assert reason.startswith("On version 1: The update differs by ")
    assert "from that of the first variant with TensorFlow 2" in reason


@pytest.mark.usefixtures("costs_little")
def test_a_plan_that_draws_anew_is_not_compared(plans, variants, monkeypatch):
    monkeypatch.setattr(allowed_ops, "DRAWS_ANEW", frozenset(["MatMul"]))
    assert _check(plans, variants)[1].difference is None


@pytest.mark.slow
@pytest.mark.usefixtures("costs_little")
def test_a_task_is_tested_in_another_process(plans):
    options = dataclasses.replace(
        _PREDICATES, pythons=[sys.executable], expectations=[expectations.same_in_every_run()]
    )
    (found,) = predicates.check_task(plans.server, plans.devices, _PROXIES, options).values()
    (there,) = found.elsewhere
    assert (there.tensorflow, there.difference) == (found.tensorflow, 0)
    assert there.losses == found.losses and len(there.expectations) == 1


@pytest.mark.usefixtures("costs_little")
def test_what_fails_with_another_tensorflow_is_refused(plans, monkeypatch):
    class Other(device_work.DeviceWork):
        """Its loss is the same, and the devices' updates are half as large."""

        tensorflow = "9.9.9"

        def __init__(self, plan, python):
            super().__init__(plan)

        def run(self, *arguments, **options):
            return [one / 2 if one.ndim else one for one in super().run(*arguments, **options)]

        def measure(self, examples, broadcast):
            return measured_run.Cost(0.1, 61.0, 1000)

        __enter__ = __exit__ = lambda self, *_: self

    monkeypatch.setattr(measured_run, "DeviceProcess", Other)
    reasons = _reasons(plans, pythons=["other"])
    assert len(reasons) == 2 and f"{_ON}, TensorFlow 9.9.9: A run takes 61 s" in reasons[1]
    assert reasons[0].startswith(
        f"{_ON}, TensorFlow 9.9.9: The update differs by 0.5, relative to its norm, from that"
    )


@pytest.mark.usefixtures("costs_little")
def test_an_interpreter_that_fails_is_named(plans):
    (reason,) = _reasons(plans, pythons=["/bin/true"])
    assert reason.startswith(f"{_ON}, /bin/true: A process that runs the plan failed")


@pytest.mark.slow
@pytest.mark.usefixtures("costs_little")
def test_variants_run_with_another_tensorflow(plans, variants):
    found = _check(plans, variants, pythons=[other_python.path()])
    for findings in found.values():
        (there,) = findings.elsewhere
        assert there.tensorflow != findings.tensorflow
        assert there.difference < 1e-6
        assert there.losses == pytest.approx(findings.losses, rel=1e-5)


def test_every_claimed_version_must_have_a_variant(plans):
    reasons = _reasons(
        plans, _changed(plans.devices[0], least_runtime_version=4), runtime_versions=(1, 2)
    )
    assert reasons == [f"No variant of the plan runs on the claimed version {v}." for v in (1, 2)]


def test_proxies_must_have_examples(plans):
    with pytest.raises(ValueError, match="at least one device with examples"):
        predicates.check_task(plans.server, plans.devices, [[], []])


@pytest.mark.parametrize(
    "options",
    [
        {"num_rounds": 1},
        {"devices_per_proxy": 0},
        {"least_change": -1.0},
        {"largest_change": 0.0},
        {"runtime_versions": ()},
        {"expectations": ["loss < 3"]},
    ],
)
def test_bad_predicates_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        predicates.Predicates(**options)
