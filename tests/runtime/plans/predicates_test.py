"""Tasks that pass their tests, and those that are refused, with all reasons."""

import dataclasses
import sys

import pytest

from tests.runtime.plans import small_tasks
from tff_dpftrl.runtime.plans import expectations, measured_run, plan_pb2, predicates

_PROXIES = [small_tasks.examples(seed, 8) for seed in range(3)]
_PREDICATES = predicates.Predicates(num_rounds=4, loss="client_work/train/mse", largest_change=10.0)


@pytest.fixture(scope="module")
def plans():
    """With hardly any noise: the cohort is small."""
    return small_tasks.plans(small_tasks.federated_averaging(small_tasks.fixed(0.05)))


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


def test_a_good_task_passes_and_says_what_it_costs(plans):
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
        assert reason.startswith("On version 2: ") and part in reason


@pytest.mark.usefixtures("costs_little")
def test_a_metric_that_is_not_there_is_named(plans):
    (reason,) = _reasons(plans, loss="client_work/train/loss")
    assert "no metric 'client_work/train/loss'; the task has ['client_work/train/mse'" in reason


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
        "'accuracy > 0.1' cannot be evaluated: there is no metric 'accuracy'; the task has ['cl",
        "'5 <= update <= 6' is not met; measured: update ",
        "'the order of examples is ignored' is not met; measured: relative difference of two",
    )
    assert len(reasons) == 4
    for reason, part in zip(reasons, wanted, strict=True):
        assert reason.startswith(f"On version 2: The expectation {part}")


def test_what_a_device_refuses_is_refused(plans):
    (reason,) = _reasons(plans, _changed(plans.devices[0], ops=["ReadFile"]))
    assert "declares other operations" in reason
    limits = plan_pb2.Limits(memory_bytes=100)
    (reason,) = _reasons(plans, _changed(plans.devices[0], limits=limits))
    assert "constants need" in reason
    (reason,) = _reasons(plans, _changed(plans.devices[0], limits=plan_pb2.Limits(seconds=1e-7)))
    assert "took too long" in reason


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


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
