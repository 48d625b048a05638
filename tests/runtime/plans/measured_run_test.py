"""Plans in other processes: their updates and costs, other TensorFlows, and what goes wrong."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from tests import other_python
from tests.runtime.plans import plain_plans
from tff_dpftrl.runtime.plans import device_work, measured_run, plan_pb2


@pytest.fixture(scope="module")
def process():
    with measured_run.DeviceProcess(plain_plans.plan()) as started:
        yield started


def test_a_process_gives_the_updates_and_the_costs_of_its_plan(process):
    assert process.tensorflow == tf.__version__
    examples = plain_plans.examples(1, 2.5)
    cost = process.measure(examples, plain_plans.SCALE)
    assert cost.load_seconds > 0 and cost.seconds > 0 and cost.memory_bytes > 0
    expected = device_work.DeviceWork(plain_plans.plan()).run(examples, plain_plans.SCALE)
    found = process.run(examples, plain_plans.SCALE, seed=(1, 2))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert process.run([], plain_plans.SCALE)[0] == 0


def test_a_process_goes_on_after_work_that_failed(process):
    with pytest.raises(device_work.WorkFailedError, match="6 entries; the plan takes the newest 5"):
        process.run(plain_plans.examples(*range(6)), plain_plans.SCALE)
    with pytest.raises(device_work.WorkFailedError, match="work failed: InvalidArgumentError"):
        process.run([b"junk"], plain_plans.SCALE)
    assert process.run([], plain_plans.SCALE)[1] == 0


@pytest.mark.slow
def test_a_plan_that_a_device_refuses_is_refused_there():
    with pytest.raises(device_work.WorkFailedError, match="declares other operations"):
        measured_run.DeviceProcess(plain_plans.plan(ops=["ReadFile"]))


def test_a_process_that_ends_is_told():
    with pytest.raises(device_work.WorkFailedError, match="runs the plan failed: it ended with 0"):
        measured_run.DeviceProcess(plan_pb2.DevicePlan(), "/bin/true")


@pytest.mark.parametrize(
    ("python", "message"),
    [
        ("/nowhere/python", r"'/nowhere/python' cannot be started \(FileNotFoundError\): name the"),
        ("/bin/true", "'/bin/true' is no Python: name the Python of an environment with"),
        ("/bin/ls", "'/bin/ls' is no Python"),
    ],
)
def test_what_is_no_interpreter_is_refused(python, message):
    with pytest.raises(ValueError, match=message):
        measured_run.check_interpreter(python)


def test_an_environment_without_tensorflow_is_refused(monkeypatch):
    measured_run.check_interpreter(sys.executable)
    monkeypatch.setattr(
        measured_run, "_FIND_MISSING", measured_run._FIND_MISSING.replace("tensorflow", "tensor_no")
    )
    with pytest.raises(ValueError, match="has no tensor_no: name the Python of an environment"):
        measured_run.check_interpreter(sys.executable)


@pytest.mark.slow
def test_another_tensorflow_gives_the_same_update():
    python = other_python.path()
    measured_run.check_interpreter(python)
    examples = plain_plans.examples(1, 2.5)
    expected = device_work.DeviceWork(plain_plans.plan()).run(examples, plain_plans.SCALE)
    with measured_run.DeviceProcess(plain_plans.plan(), python) as process:
        assert process.tensorflow != tf.__version__
        for one, other in zip(process.run(examples, plain_plans.SCALE), expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)
