"""Tasks that meet the expectations of their definition, and those that do not."""

import pytest

from tests.runtime.plans import small_tasks
from tests.runtime.tasks import sensor_task
from tff_dpftrl import validation
from tff_dpftrl.runtime.plans import expectations, measured_run, predicates
from tff_dpftrl.runtime.tasks import making, task_config


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Makes a task of sensor windows, with expectations."""
    monkeypatch.setattr(measured_run, "measure", lambda *_: measured_run.Cost(0.1, 0.2, 1000))

    def made(wanted, **options):
        config = task_config.TaskConfig.of(
            build=task_config.IN_MEMORY,
            population="tests",
            num_devices=40,
            num_rounds=4,
            clients_per_round=8,
            min_sep=2,
            client_learning_rate=0.5,
            noise_multiplier=0.5,
            delta=1e-5,
            **options,
        )
        return making.make(
            config,
            tmp_path / "task",
            small_tasks.KEY,
            progress=lambda line: None,
            definition=sensor_task.define(expectations=wanted),
        )

    return made


def test_what_is_no_expectation_is_refused_before_plans_are_built(make):
    with pytest.raises(validation.UsageError, match="expectations must be made by `expect`, "):
        make([lambda trial: True])
    with pytest.raises(validation.UsageError, match="expectations must be a list, got a Expect"):
        make(expectations.loss_below(1.0))


@pytest.mark.slow
def test_a_task_that_meets_its_expectations_says_so(make):
    met = [
        expectations.metric_above("accuracy", 0.2),
        expectations.unknown_features_are_ignored(),
        expectations.same_in_every_run(),
    ]
    readme = (make(met, expect="update < 5").path / "README.md").read_text()
    assert readme.count("As expected: ") == 4 and "accuracy > 0.2 (accuracy 0." in readme


@pytest.mark.slow
def test_a_task_that_misses_its_expectations_is_refused_with_the_numbers(make, tmp_path):
    unmet = [
        expectations.metric_above("accuracy", 1.5),
        expectations.expect("tenth round", lambda trial: trial.metrics[9]),
    ]
    with pytest.raises(predicates.TaskRefusedError) as caught:
        make(unmet)
    first, second = caught.value.reasons
    assert "'accuracy > 1.5' is not met; measured: accuracy 0." in first
    assert "'tenth round' cannot be evaluated: it raises IndexError" in second
    assert not (tmp_path / "task").exists()
