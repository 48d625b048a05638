"""Tests of tasks of an engineer's own model and data."""

import dataclasses
import sys

import numpy as np
import pytest
import tensorflow as tf

from tests.runtime.plans import small_tasks
from tests.runtime.tasks import sensor_task, served_fleet
from tff_dpftrl import validation
from tff_dpftrl.cli import main
from tff_dpftrl.execution import compiled_process, entropy
from tff_dpftrl.learning import own_model
from tff_dpftrl.mechanisms import identity
from tff_dpftrl.runtime.device import named_tensors
from tff_dpftrl.runtime.plans import (
    device_work,
    example_pipeline,
    measured_run,
    server_work,
)
from tff_dpftrl.runtime.tasks import (
    definition,
    making,
    planned_task,
    task_config,
    task_folder,
    task_report,
)
from tff_dpftrl.training import process

_LOSS = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
_NO_LOSS = {"loss": None, "metrics": None}
_PREAMBLE = "from tests.runtime.tasks import sensor_task\n"


def _config(**options):
    return task_config.TaskConfig.of(
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


def _tff():
    return pytest.importorskip("tensorflow_federated", reason="makes tasks of TFF's own models")


def _variable_model():
    return _tff().learning.models.from_keras_model(
        sensor_task.keras_model(),
        _LOSS,
        input_spec=sensor_task.PIPELINE.batch_spec(),
        metrics=[tf.keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
    )


def _proximal(model, **aggregators):
    tff = _tff()
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
        ("build = 3", "task.py:build", "has no function of that name"),
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


def test_a_task_with_a_model_of_tff_says_how_tff_is_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_federated", None)
    (tmp_path / "task.py").write_text("import tensorflow_federated")
    with pytest.raises(validation.UsageError, match="not installed: .*-r requirements/tff.lock"):
        definition.load(str(tmp_path / "task.py:build"))


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


def _other_batch(rows):
    return rows["window"], rows["movement"]


def _fails():
    raise RuntimeError("of no use")


def _wrong_name(rows):
    return rows["windows"]


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
        ({"model": 3, **_NO_LOSS}, "model must be a tf.keras.Model, .* got a int"),
        (
            {"model": lambda: 3, **_NO_LOSS},
            "function that makes a tff.learning.models.VariableModel, got a int",
        ),
        ({"model": _fails, **_NO_LOSS}, "does not take .*: RuntimeError: of no use"),
        ({"proxies": {"window": 1}}, "proxies must be a list of devices"),
        (
            {"loss": tf.keras.losses.CategoricalCrossentropy(from_logits=True)},
            r"model does not take the pipeline's batches .*int64\[None\]",
        ),
        ({"metrics": lambda: [3]}, "metrics must return a dictionary of Keras metrics"),
        ({"metrics": lambda: {"loss": 3}}, "without 'loss', which is always there"),
        ({"loss": "mse"}, "loss must be a tf.keras.losses.Loss"),
        ({"model": _functional_model}, "loss and metrics are for a tf.keras.Model"),
        (
            {"pipeline": dataclasses.replace(sensor_task.PIPELINE, to_batch=_other_batch)},
            r"model does not take the pipeline's batches \(float32\[None, 16, 2\]",
        ),
        ({"largest_metrics": {"loss": 9.0}}, "largest_metrics has no bound of the metric 'accur"),
        (
            {"metrics": lambda: {"areas": tf.keras.metrics.MeanIoU(400, sparse_y_pred=False)}},
            "metrics of a device have up to 1280016 bytes, .*: leave out 'areas'",
        ),
        (
            {"pipeline": dataclasses.replace(sensor_task.PIPELINE, to_batch=_wrong_name)},
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


def test_the_terms_say_how_many_weights_are_not_trained():
    found = sensor_task.define(trained_on="nothing").initial_weights(1234)
    assert found.source.endswith("; 1,234 weights are not trained at all")
    assert "not trained" not in sensor_task.define(trained_on="nothing").initial_weights().source


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
    assert _config().resolved("task").to_dict()["vocabulary"] is None


def test_the_command_refuses_a_bad_definition_before_anything_is_made(tmp_path, capsys):
    (tmp_path / "task.py").write_text("def build(): return {}")
    arguments = [
        *("task", "new", "--build", str(tmp_path / "task.py:build"), "--population", "tests"),
        *("--num-devices", "100", "--noise-multiplier", "1", "--output", str(tmp_path / "made")),
    ]
    assert main.main(arguments) == 2
    assert "must return a TaskDefinition, got a dict" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "made").exists()


def _stored(device, round_index):
    features = sensor_task.define().features()
    examples = sensor_task.windows(100 * round_index + device, num_windows=5 + device)
    return named_tensors.encode_all(examples, features)


def _proximal_round(model, aggregation):
    from tff_dpftrl.execution import contexts, process_form
    from tff_dpftrl.learning import tff_rounds

    with contexts.compiled_only():
        made = _proximal(
            model,
            model_aggregator=tff_rounds.factory_of(aggregation),
            metrics_aggregator=_tff().learning.metrics.sum_then_finalize,
        )
        return process_form.round_of(made)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["keras", "functional", "variable"])
def test_rounds_of_devices_are_those_of_the_compiled_simulation(tmp_path, kind):
    if kind == "variable":
        _tff()
    own = {"keras": {}, "functional": _NO_LOSS, "variable": _NO_LOSS | {"algorithm": _proximal}}
    models = {"functional": _functional_model, "variable": lambda: _variable_model}
    largest = dict.fromkeys(("loss", "accuracy", "num_examples", "num_batches"), 480.0)
    changes = {"largest_metrics": largest, **own[kind]}
    if kind in models:
        changes["model"] = models[kind]()
    options = {"client_learning_rate": 1.0} if kind == "variable" else {}
    defined = sensor_task.define(**changes)
    made = _make(tmp_path / "task", defined, **options)
    device = device_work.DeviceWork(made.devices[0])
    repeated = entropy.Repeated()  # Both have the same noise.
    work = server_work.ServerWork(task_folder.read(tmp_path / "task").server, repeated)
    plan = made.config.request().plan(made.config.serving.num_devices, 57)
    model = own_model.read(
        defined.model, defined.pipeline.batch_spec(), loss=defined.loss, metrics=defined.metrics
    )
    if kind == "variable":
        simulated = _proximal_round(model, process.build_aggregation(made.config.rules, plan))
    else:
        simulated = process.build_round(plan, made.config.rules, model)
    compiled = compiled_process.CompiledProcess(simulated, entropy=repeated)
    reference = compiled.initialize()

    def flat(state):
        return [np.asarray(leaf) for leaf in simulated.state.flatten(state, "state")]

    state = flat(reference)
    for round_index in range(3):
        sums, broadcast, data = work.zero(), work.broadcast(state), []
        for number in range(3):
            stored = _stored(number, round_index)
            sums = work.accumulate(sums, device.run(stored, broadcast, seed=(number, 7)))
            seed = tf.constant((number, 7), tf.int64)
            data.append(defined.pipeline.batches(tf.constant(stored), seed))
        state, metrics = work.finish(state, sums)
        output = compiled.next(reference, data)
        reference = output.state
        for found, expected in zip(state, flat(reference), strict=True):
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
        loss = output.metrics["client_work"]["train"]["loss"]
        np.testing.assert_allclose(metrics["client_work/train/loss"], loss, atol=1e-6)


@pytest.mark.slow
def test_devices_cut_their_metrics_to_the_bounds_of_the_definition(tmp_path):
    made = _make(
        tmp_path / "t",
        sensor_task.define(largest_metrics={"loss": 2.0, "accuracy": 3.0}, loss_metric=""),
    )
    work = server_work.ServerWork(task_folder.read(tmp_path / "t").server)
    device = device_work.DeviceWork(made.devices[0])
    broadcast = work.broadcast(work.initialize(made.initialize()))
    update = device.run(_stored(0, 0), broadcast, seed=(0, 0))
    cut = {
        tensor.label.partition("loss")[1] or tensor.label.partition("accuracy")[1]: value
        for tensor, value in zip(work.plan.update, update, strict=True)
    }
    assert (cut["loss"], cut["accuracy"]) == (2.0, 3.0)  # Of ten rows, with a loss of 1 or so.


@pytest.mark.slow
def test_an_algorithm_that_releases_more_than_the_noised_sum_is_refused(tmp_path):
    _tff()
    from tff_dpftrl.aggregators import dp_ftrl

    def exact(model, model_aggregator, metrics_aggregator):
        del model_aggregator
        return _proximal(model, metrics_aggregator=metrics_aggregator)

    def other(model, model_aggregator, metrics_aggregator):
        # The noise multiplier of the statement, and another mechanism.
        own = dp_ftrl.build_dp_ftrl_aggregator(
            identity.Identity(), clip_norm=1.0, noise_multiplier=0.5, clients_per_round=8
        )
        return _proximal(model, model_aggregator=own, metrics_aggregator=metrics_aggregator)

    def fails(model, **aggregators):
        raise RuntimeError("of no use")

    for algorithm, message in (
        (exact, "Client values reach the server other than through a private release"),
        (other, "algorithm must release the whole update once, by the model_aggregator"),
        (fails, "algorithm raises RuntimeError: of no use"),
        (lambda model, **aggregators: 3, "must return a tff.learning.templates.LearningProcess"),
    ):
        defined = sensor_task.define(algorithm=algorithm)
        with pytest.raises(validation.UsageError, match=message):
            _make(tmp_path / "task", defined, client_learning_rate=1.0)
    with pytest.raises(validation.UsageError, match="server_momentum has no meaning with the algo"):
        _make(tmp_path / "task", defined, client_learning_rate=1.0, server_momentum=0.5)
    assert not (tmp_path / "task").exists()


@pytest.mark.slow
def test_a_fleet_trains_and_evaluates_it_with_secure_sums(tmp_path):
    defined = sensor_task.define()
    options = {
        "secagg_bits": 20,
        "secure_aggregation": "honest-but-curious",
        "least_group": 6,
        "selection_timeout": 10.0,
        "reporting_timeout": 30.0,
    }
    made = _make(tmp_path / "own", defined, num_rounds=6, min_sep=1, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measured_run, "measure", lambda *_: measured_run.Cost(0.1, 0.2, 1000))
        changed = made.config.changed(task="", num_rounds=2)
        making.make_evaluation(
            made, changed, tmp_path / "watch", small_tasks.KEY,
            progress=lambda line: None, definition=defined,
        )  # fmt: skip
    assert made.words is None and not made.server.zero.outputs
    assert "NO guarantee" not in (made.path / "README.md").read_text()
    tasks = [planned_task.load(tmp_path / name, small_tasks.KEYS) for name in ("own", "watch")]
    by_user = {
        f"d{user}": [
            {name: value.tolist() for name, value in one.items()}
            for one in sensor_task.windows(user)
        ]
        for user in range(40)
    }
    store = served_fleet.run(tmp_path, tasks, by_user, rounds=8)
    rows = task_report.rounds(store, "tests", "own")
    assert len(rows) == 6
    losses = [row["client_work/train/loss"] for row in rows if not row.get("skipped")]
    assert losses[-1] < 0.6 * losses[0]
    watched = task_report.rounds(store, "tests", "watch")
    assert {0 < row["client_work/eval/current_round_metrics/accuracy"] <= 1 for row in watched} == {
        True
    }
    found = task_report.write(tasks[0].folder, store, tmp_path / "report")
    assert found.statement.epsilon == tasks[0].privacy(store.last_commit("tests", "own")).epsilon
    assert not any("vocabulary" in text for text in found.statement.assumptions)
    assert found.statement.parameters["data"] == "windows drawn by a seed"
    with np.load(tmp_path / "report" / "model.npz") as weights:
        assert [weights[name].shape for name in weights.files] == [(18, 3), (3,)]
