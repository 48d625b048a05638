"""Tests of tasks of an engineer's own model and data."""

import collections
import dataclasses
import random
import threading

import numpy as np
import pytest
import tensorflow as tf
import tree

from tests.runtime.fleet import server_thread
from tests.runtime.plans import small_tasks
from tests.runtime.server import example_service
from tests.runtime.tasks import sensor_task, small_folder
from tff_dpftrl import validation
from tff_dpftrl.cli import main
from tff_dpftrl.execution import compiled_process, contexts
from tff_dpftrl.learning import own_model
from tff_dpftrl.runtime import signing_keys
from tff_dpftrl.runtime.actors import population
from tff_dpftrl.runtime.device import named_tensors
from tff_dpftrl.runtime.fleet import behaviour, fleet
from tff_dpftrl.runtime.plans import (
    device_work,
    example_pipeline,
    measured_run,
    server_work,
    tensor_values,
)
from tff_dpftrl.runtime.server import server
from tff_dpftrl.runtime.tasks import (
    definition,
    making,
    planned_task,
    task_config,
    task_folder,
    task_report,
)
from tff_dpftrl.training import process
from verification import memory_store

tff = pytest.importorskip("tensorflow_federated", reason="makes tasks with TFF")

_LOSS = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
_PREAMBLE = "from tests.runtime.tasks import sensor_task\n"


def _config(**options):
    return task_config.TaskConfig(
        **{
            "build": task_config.IN_MEMORY,
            "population": "tests",
            "num_devices": 40,
            "num_rounds": 4,
            "clients_per_round": 8,
            "min_sep": 2,
            "proxy_rounds": 2,
            "client_learning_rate": 0.5,
            "clip_norm": 1.0,
            "noise_multiplier": 0.5,
            "delta": 1e-5,
        }
        | options
    )


def _make(path, defined, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measured_run, "measure", lambda *_: measured_run.Cost(0.1, 0.2, 1000))
        return making.make(
            _config(**options),
            path,
            small_tasks.KEY,
            progress=lambda line: None,
            definition=defined,
        )


def _functional_model():
    batch = sensor_task.PIPELINE.batch_spec()
    return own_model.read(sensor_task.keras_model(), batch, loss=_LOSS)


def _variable_model():
    return tff.learning.models.from_keras_model(
        sensor_task.keras_model(),
        _LOSS,
        input_spec=sensor_task.PIPELINE.batch_spec(),
        metrics=[tf.keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
    )


def _proximal(model, **aggregators):
    return tff.learning.algorithms.build_unweighted_fed_prox(
        model,
        proximal_strength=0.1,
        client_optimizer_fn=tff.learning.optimizers.build_sgdm(0.5),
        server_optimizer_fn=tff.learning.optimizers.build_sgdm(1.0),
        **aggregators,
    )


@pytest.mark.parametrize(
    ("code", "named", "message"),
    [
        ("", "other.py:build", "there is no such file"),
        ("", "task.py", "must be a file and a function of it"),
        ("", "task.py:", "must be a file and a function of it"),
        ("build = 3", "task.py:build", "has no such function"),
        ("def build(): pass", "task.py:build", "must return a TaskDefinition, got a NoneType"),
        ("def build(x): pass", "task.py:build", "raises TypeError: build"),
        ("def build(): return 1 / 0", "task.py:build", "raises ZeroDivisionError: division"),
        ("import neighbour, missing_one", "task.py:build", "raises ModuleNotFoundError: .*missing"),
        ("def build(", "task.py:build", "raises SyntaxError"),
        (
            _PREAMBLE + "def build(): return sensor_task.define(pipeline=3)",
            "task.py:build",
            "pipeline must be a plans.example_pipeline.ExamplePipeline, got a int",
        ),
        (
            _PREAMBLE + "def build(): return sensor_task.define(largest_metrics={'loss': -1})",
            "task.py:build",
            r"largest_metrics\['loss'\] must be",
        ),
    ],
)
def test_a_function_that_defines_no_task_is_refused_in_one_line(tmp_path, code, named, message):
    (tmp_path / "task.py").write_text(code)
    (tmp_path / "neighbour.py").write_text("")
    with pytest.raises(validation.UsageError, match=message) as caught:
        definition.load(str(tmp_path / named))
    assert len(str(caught.value).splitlines()) == 1


def test_a_function_of_a_file_defines_a_task(tmp_path):
    (tmp_path / "task.py").write_text(_PREAMBLE + "def build(): return sensor_task.define()")
    made = definition.load(str(tmp_path / "task.py:build"))
    assert made.features() == {
        "movement": named_tensors.Feature("int", ()),
        "window": named_tensors.Feature("float", (16, 2)),
    }
    examples = tf.io.parse_example(made.encoded_proxies()[0], sensor_task.PIPELINE.features)
    stored = sensor_task.windows(1001)
    np.testing.assert_array_equal(examples["window"], [one["window"] for one in stored])
    np.testing.assert_array_equal(examples["movement"], [one["movement"] for one in stored])


def _broken(**changes):
    return [[sensor_task.windows(1)[0] | changes]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"proxies": [[], []]}, "proxies must have at least one device with examples"),
        ({"proxies": [[3]]}, r"proxies\[0\]: example 1: it is a int"),
        ({"proxies": _broken(window=[[1.0]])}, r"has the shape \[1, 1\], .* takes \[16, 2\]"),
        ({"proxies": _broken(movement=1.5)}, "'movement' is of float64, and the task takes int"),
        ({"proxies": _broken(other=1)}, "it has 'other', and the task's features are"),
        ({"proxies": [[{"movement": 1}]]}, "it has no 'window'"),
        ({"model": 3}, "model must be a tf.keras.Model, .* got a int"),
        ({"model": lambda: 3}, "must make a tff.learning.models.VariableModel; it made a int"),
        ({"loss": "mse"}, "loss must be a tf.keras.losses.Loss"),
        ({"model": _functional_model}, "loss and metrics are for a tf.keras.Model"),
        (
            {"model": tf.keras.Sequential([tf.keras.layers.Dense(3, input_shape=[5])])},
            r"model does not take the pipeline's batches \(float32\[None, 18\]",
        ),
        ({"largest_metrics": {"loss": 9.0}}, "largest_metrics has no bound of the metric 'accur"),
        (
            {
                "pipeline": dataclasses.replace(
                    sensor_task.PIPELINE, to_batch=lambda rows: rows["windows"]
                )
            },
            "pipeline fails on the features .'movement', 'window'.: .*KeyError",
        ),
        (
            {
                "pipeline": example_pipeline.ExamplePipeline(
                    {"x": tf.io.FixedLenFeature([], tf.float64)}, lambda rows: rows, batch_size=1
                )
            },
            "has the dtype float64",
        ),
    ],
)
def test_a_definition_whose_parts_do_not_fit_is_refused_in_one_line(tmp_path, changes, message):
    with pytest.raises(validation.UsageError, match=message) as caught:
        _make(tmp_path / "task", sensor_task.define(**changes))
    assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "task").exists()


def test_models_of_tff_must_take_the_batches_of_the_pipeline():
    model, batch = _functional_model(), sensor_task.PIPELINE.batch_spec()
    assert own_model.read(model, batch) is model
    assert own_model.num_parameters(model) == 18 * 3 + 3
    assert own_model.read(_variable_model, batch) is _variable_model
    assert own_model.num_parameters(_variable_model) == 18 * 3 + 3
    assert set(own_model.metric_specs(_variable_model)) > {"loss/0", "accuracy/1"}
    for other in (batch[::-1], batch[0], (tf.TensorSpec([None, 17]), batch[1])):
        with pytest.raises(validation.UsageError, match="and the pipeline makes"):
            own_model.read(model, other)


def test_secure_sums_must_have_room_for_metrics(tmp_path):
    defined = sensor_task.define(largest_metrics={"loss": 2e6, "accuracy": 24.0})
    options = {"secagg_bits": 20, "secure_aggregation": "honest-but-curious"}
    with pytest.raises(validation.UsageError, match=r"=2e\+06 is more than .* room for: 1.04858e"):
        _make(tmp_path / "task", defined, **options)


@pytest.mark.parametrize(
    "name", ["data", "batch_size", "vocabulary", "shuffle", "proxy_data", "lstm_size"]
)
def test_options_that_a_definition_has_itself_are_refused(name):
    value = {"batch_size": 3, "lstm_size": 3, "shuffle": False}.get(name, "english")
    with pytest.raises(validation.UsageError, match=f"{name} has no meaning with build"):
        _config(**{name: value})
    assert _config().resolved("task").vocabulary is None


def test_the_command_refuses_a_bad_definition_before_anything_is_made(tmp_path, capsys):
    (tmp_path / "task.py").write_text("def build(): return {}")
    arguments = [
        *("task", "new", "--build", str(tmp_path / "task.py:build"), "--population", "tests"),
        *("--num-devices", "100", "--noise-multiplier", "1", "--output", str(tmp_path / "made")),
    ]
    assert main.main(arguments) == 2
    assert "must return a TaskDefinition, got a dict" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "made").exists()
