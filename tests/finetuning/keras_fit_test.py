"""Tests of tff_dpftrl.private_fit: Keras models trained with DP-FTRL, against Keras' own `fit`."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import shutil

import numpy as np
import pytest
import tensorflow as tf

import tff_dpftrl
from tests.fixed_seeds import fixed_seeds  # noqa: F401
from tests.reports import listed_files
from tff_dpftrl.accounting import privacy_plot
from tff_dpftrl.auditing.recount import run_folder
from tff_dpftrl.finetuning import custom_run, keras_fit, private_steps
from tff_dpftrl.models import keras_versions
from tff_dpftrl.private_round import seeds
from tff_dpftrl.reports import page, readme
from tff_dpftrl.reports import results as reported

_DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
_NUM, _STEPS = 24, 6
_WIDTH, _LOUD = 5_000, 100.0  # Of a model and a noise beside which gradients are nothing.
_layers = tf.keras.layers
_IS_KERAS_2 = issubclass(tf.keras.Model, tf.Module)


def _data(num: int = _NUM):
    rng = np.random.default_rng(1)
    x = rng.normal(size=[num, 3]).astype(np.float32)
    return x, (x[:, 0] > 0).astype(np.int32)


def _model(*layers, loss=None, optimizer=None, last=(), kind=tf.keras.Sequential, **compiled):
    tf.keras.utils.set_random_seed(3)
    model = kind([_layers.Dense(4, "tanh"), *layers, *(last or [_layers.Dense(2)])])
    model.build([None, 3])
    if loss is None:
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = optimizer or keras_versions.SGD(0.5, momentum=0.5)
    model.compile(optimizer, loss=loss, metrics=["accuracy"], **compiled)
    return model


def _fit(model, output, x=None, y=None, **options):
    data = _data()
    options = {
        "clip_norm": 1.0,
        "batch_size": 8,
        "epochs": 2,
        "delta": 1e-4,
        "noise_multiplier": 1.0,
        "mechanism": "identity",  # Less to trace, as below.
        "trained_on": "nothing",
        "progress": lambda line: None,
        "in_one_pass": False,
        **options,
    }
    x, y = data[0] if x is None else x, data[1] if y is None else y
    names = {field.name for field in dataclasses.fields(keras_fit.FitPrivacy)}
    privacy = {name: options.pop(name) for name in names & set(options)}
    return keras_fit.private_fit(
        model, x, y, output, privacy=keras_fit.FitPrivacy(**privacy), **options
    )


class _Warmup(tf.keras.optimizers.schedules.LearningRateSchedule):
    """A schedule without `get_config`, as in TensorFlow's tutorial on transformers."""

    def __init__(self, rate):
        self._rate = rate

    def __call__(self, step):
        return self._rate * tf.minimum(1.0, (tf.cast(step, tf.float32) + 1.0) / 5.0)


class Scaled(keras_versions.SGD):  # Keras 3 makes a scope of the name.
    """An optimizer with an option of its own, which its `get_config` leaves out."""

    def __init__(self, factor=1.0, **options):
        super().__init__(**options)
        self.factor = factor

    def update_step(self, gradient, variable, *rate):
        return super().update_step(self.factor * gradient, variable, *rate)


class _Layer(_layers.Layer):
    """A layer of a function."""

    def __init__(self, function):
        super().__init__()
        self._function = function

    def call(self, inputs, training=False):
        return self._function(self, inputs, training)


class _Repeated(_layers.Layer):
    def call(self, inputs):
        for _ in tf.range(3):  # Only AutoGraph can convert it, which Keras 3 does not use.
            inputs = tf.tanh(inputs)
        return inputs


def _exponentials(targets, outputs):
    total = tf.zeros_like(outputs[:, 0])
    for power in tf.range(2) if _IS_KERAS_2 else range(2):
        total += tf.exp(outputs[:, power]) - outputs[:, 1] * targets[:, 0]
    return total


def _decaying():
    """A model whose biases would decay."""
    optimizer = keras_versions.AdamW(_Warmup(0.1), weight_decay=3.0)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return _model(optimizer=optimizer)


def _after_a_fit(optimizer=None):
    """A model whose optimizer has taken steps, also if it has forgotten how many."""
    model = _model(optimizer=optimizer)
    model.fit(*_data(), batch_size=_NUM, verbose=0)
    model.optimizer.iterations.assign(0)
    return model


def _excluding():
    """A model with an own optimizer and loss, and a weight that does not decay."""
    optimizer = Scaled(3.0, learning_rate=0.1, weight_decay=2.0, global_clipnorm=0.01)
    model = _model(optimizer=optimizer, loss=_exponentials)
    optimizer.exclude_from_weight_decay(var_list=model.trainable_variables[:1])
    return model


def _of_vectors():
    tf.keras.utils.set_random_seed(3)
    last = [_layers.Dense(1), _layers.Reshape([])]
    repeated = [_Repeated()] if _IS_KERAS_2 else []
    return _model(
        *repeated,
        _Layer(lambda layer, x, _: _reversed(x)),
        loss="mean_squared_error",
        last=last,
        steps_per_execution=2,
        loss_weights=[1.0],
    )


@tf.custom_gradient
def _reversed(x):
    return tf.identity(x), lambda gradient: -gradient


@tf.custom_gradient
def _normalised_in_the_batch(x):
    return tf.identity(x), lambda gradient: gradient / tf.norm(gradient)


def _accumulating():
    return _model(optimizer=keras_versions.Adam(0.1, gradient_accumulation_steps=2))


_AS_IN_FIT = {
    "momentum": _model,
    "schedule-decay": _decaying,
    "own-optimizer-and-loss": _excluding,
    "outputs-of-vectors": _of_vectors,
} | ({} if _IS_KERAS_2 else {"accumulated": _accumulating})


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "schedule-decay" else [pytest.mark.slow])
        for name in _AS_IN_FIT
    ],
)
def test_without_noise_and_clipping_it_is_fit(name, tmp_path, monkeypatch):
    """In steps of all examples there is no order to differ in."""
    monkeypatch.setattr(private_steps, "_LARGE", 1)  # Tensor by tensor, where that can be.
    x, y = _data()
    if name != "momentum":  # `fit` makes float32 of them, and a column of those of Keras 2.
        x, y = x.astype(np.float64), y.astype(np.float64)
    if name == "own-optimizer-and-loss" and not _IS_KERAS_2:
        y = y[:, np.newaxis]
    ours, theirs = _AS_IN_FIT[name](), _AS_IN_FIT[name]()
    held_out = (x, y, np.arange(_NUM)) if name == "momentum" else None
    results = _fit(
        ours,
        tmp_path / "run",
        x,
        y,
        clip_norm=1e3,
        noise_multiplier=0.0,
        batch_size=_NUM,
        epochs=4,
        in_one_pass=name == "momentum",
        validation_data=held_out,
        trained_on="public data",
    )
    assert not results.statement.has_guarantee
    theirs.fit(x, y, batch_size=_NUM, epochs=4, shuffle=False, verbose=0)
    for mine, other in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5)
    if held_out is not None:
        measured = theirs.evaluate(x, y, sample_weight=held_out[2], verbose=0)
        assert results.rows[-1]["eval_loss"] == pytest.approx(measured[0], rel=1e-4)


def test_a_schedule_that_keras_cannot_write_down_is_known_by_its_rates():
    first, same, other = (
        keras_versions.optimizer_options(keras_versions.SGD(_Warmup(rate)))
        for rate in (0.1, 0.1, 0.2)
    )
    assert first == same != other
    assert first["learning_rate"]["class_name"] == "_Warmup" and first["momentum"] == 0.0


@pytest.mark.slow
def test_one_pass_and_one_by_one_are_the_same_and_it_says_which(tmp_path):
    ids = np.arange(_NUM) // 3
    users = {
        "user_ids": ids,
        "examples_per_user": 3,
        "batch_size": 4,
        "deterministic_noise_seed": 5,
    }
    models, lines = [_model(), _model(), _model(_layers.PReLU())], []
    for index, model in enumerate(models):
        results = _fit(
            model,
            tmp_path / f"{index}",
            in_one_pass=index != 1,
            clip_norm=0.1,
            progress=lines.append,
            **users,
        )
        assert results.summary.endswith(results.clipping) and results.clipping in lines
        if index == 0:
            assert results.clipping == "Gradients are clipped in one pass."
        else:
            reason = "as asked" if index == 1 else "a weight is read by Neg"
            assert results.clipping.startswith(
                f"Gradients are clipped one after the other: {reason}"
            )
    for mine, other in zip(models[0].get_weights(), models[1].get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5)
    # A run that is finished takes no step, and says nothing.
    assert _fit(_model(), tmp_path / "0", clip_norm=0.1, **users).clipping is None


@pytest.mark.parametrize(
    ("unit", "in_one_pass"),
    [
        ("user", False),
        pytest.param("user", True, marks=pytest.mark.slow),
        pytest.param("example", True, marks=pytest.mark.slow),
    ],
)
def test_one_unit_moves_a_step_by_no_more_than_the_clip_norm(unit, in_one_pass, tmp_path):
    """Two runs differ in the data of one unit, with gradients above the clip norm."""
    x, y = _data()
    users = {"user_ids": np.arange(_NUM) // 3, "examples_per_user": 3} if unit == "user" else {}
    num = 3 if unit == "user" else 1
    size, ends = _NUM // num, []
    for factor in (1.0, -300.0):
        changed = x.copy()
        changed[:num] *= factor
        model = _model(optimizer=keras_versions.SGD(1.0))
        _fit(
            model,
            tmp_path / f"{factor}",
            changed,
            y,
            clip_norm=0.01,
            in_one_pass=in_one_pass,
            noise_multiplier=0.0,
            batch_size=size,
            epochs=1,
            **users,
        )
        ends.append(np.concatenate([w.ravel() for w in model.get_weights()]).astype(np.float64))
    moved = np.linalg.norm(ends[0] - ends[1]) * size
    # Both gradients of the unit are clipped to 0.01, and point in different directions.
    assert 0.005 < moved <= 0.02 * (1 + 1e-4)


def test_the_guarantee_is_that_of_the_order_it_keeps(tmp_path):
    model, x, y = _model(), *_data(10)
    results = _fit(model, tmp_path / "run", x, y, batch_size=4, epochs=3, mechanism="tree")
    # 7 steps of 4 in an order of 10 come to an example 3 times, at least 2 steps apart.
    schema = tff_dpftrl.MinSep(7, 2, 3)
    strategy = tff_dpftrl.build_strategy("tree", schema)
    claim = tff_dpftrl.dp_ftrl_guarantee(strategy, noise_multiplier=1.0, schema=schema, delta=1e-4)
    stated = results.statement
    assert stated.epsilon == pytest.approx(claim.epsilon, rel=1e-9)
    assert stated.declared == schema and stated.observed.max_participations == 3
    assert stated.unit_of_privacy == "example" and "per example" in results.summary
    assert "**Example-level (ε = " in (tmp_path / "run" / "privacy_statement.md").read_text()


def test_users_are_the_unit_where_they_are_known(tmp_path):
    ids = [f"user {i % 6}" for i in range(_NUM)]
    results = _fit(_model(), tmp_path / "run", user_ids=ids, examples_per_user=2, batch_size=3)
    stated = results.statement
    assert stated.unit_of_privacy == "user" and stated.parameters["num_users"] == 6
    assert stated.parameters["group_size"] == 2
    assert stated.declared == tff_dpftrl.MinSep(4, 2, 2)


@pytest.mark.slow
def test_a_target_is_met_and_the_model_learns(tmp_path):
    x, y = _data(200)
    model = _model()
    results = _fit(
        model,
        tmp_path / "run",
        x[:150],
        y[:150],
        noise_multiplier=None,
        target_epsilon=20.0,
        batch_size=50,
        epochs=8,
        validation_data=(x[150:], y[150:]),
    )
    assert 19.9 < results.statement.epsilon <= 20.0
    rows = [row for row in results.rows if row["eval_accuracy"] is not None]
    assert [row["round"] for row in rows] == list(range(3, 25, 3))
    listed_files.check(tmp_path / "run")
    found = reported.read(tmp_path / "run")
    for text in (readme.of(found), page.of(found)):
        assert not re.findall("vocabulary|n-gram|which words|nats|held-out users", text)
    assert "Training examples: 150" in readme.of(found)
    measured = model.evaluate(x[150:], y[150:], verbose=0, return_dict=True)
    assert rows[-1]["eval_accuracy"] == pytest.approx(measured["accuracy"]) and (
        measured["accuracy"] > 0.75
    )


@pytest.mark.slow
def test_the_same_call_goes_on_with_the_same_noise(tmp_path, monkeypatch):
    x, y = _data()
    options = {"deterministic_noise_seed": 5, "validation_data": (x, y), "mechanism": "tree"}
    _fit(whole := _model(), tmp_path / "whole", **options)
    crashed, times = _model(), []

    def evaluate(*args, **kwargs):
        times.append(1)
        if len(times) == 2:
            raise KeyboardInterrupt
        return {"loss": 1.0, "accuracy": 0.5}

    monkeypatch.setattr(crashed, "evaluate", evaluate)
    with pytest.raises(KeyboardInterrupt):
        _fit(crashed, tmp_path / "run", **options)
    monkeypatch.undo()
    assert crashed.optimizer.iterations == 0  # It is as it was, and so are the weights.
    resumed = crashed
    results = _fit(resumed, tmp_path / "run", **options)
    assert len(results.rows) == _STEPS
    for mine, other in zip(resumed.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, other)
    with pytest.raises(ValueError, match="began with clip_norm = 1.0, not 2.0"):
        _fit(_model(), tmp_path / "run", **options, clip_norm=2.0)
    with pytest.raises(ValueError, match="began with mechanism = 'tree', not 'blt'"):
        _fit(_model(), tmp_path / "run", **{**options, "mechanism": "blt"})
    with pytest.raises(ValueError, match="initial weights are not those"):
        _fit(resumed, tmp_path / "run", **options)


def test_branches_of_a_run_have_independent_noise_also_on_other_data(tmp_path, monkeypatch):
    """Also where Keras' random numbers are the same, as `private_fit` wants them."""
    monkeypatch.setattr(privacy_plot, "draw", lambda *args, **options: None)
    monkeypatch.setattr(seeds, "SOURCE", "/dev/urandom")  # Not the same bits again and again.
    monkeypatch.setattr(keras_fit, "_digest", lambda data: "same")  # Else, no other data goes on.
    weights = []  # At the beginning, and after each step.

    def fit(output, x, *, is_interrupted=False):
        tf.keras.utils.set_random_seed(3)
        model = tf.keras.Sequential([tf.keras.Input([3]), _layers.Dense(_WIDTH)])
        model.compile(keras_versions.SGD(1.0), loss="mse")

        def evaluate(*args, **options):
            weights.append(np.concatenate([part.ravel() for part in model.get_weights()]))
            if is_interrupted and len(weights) == 2:
                raise KeyboardInterrupt
            return {"loss": 1.0}

        monkeypatch.setattr(model, "evaluate", evaluate)
        y = np.zeros([len(x), _WIDTH], np.float32)
        once = {"batch_size": len(x), "noise_multiplier": _LOUD, "validation_data": (x, y)}
        _fit(model, output, x, y, **once)

    x, _ = _data()
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "run", x, is_interrupted=True)
    (_, before), moves = weights, []
    for name, data in (("one", x), ("other", -2.0 * x)):
        shutil.copytree(tmp_path / "run", tmp_path / name)
        weights.clear()
        fit(tmp_path / name, data)
        moves.append(weights[-1] - before)
    one, other = moves
    # Five standard errors, and what the mean of clipped gradients may add.
    tolerance = 5 / np.sqrt(2 * one.size) + 2 * _NUM / (_LOUD * np.sqrt(one.size))
    for combined in (one - other, one + other):
        assert abs(np.std(combined) / (np.sqrt(2.0) * _LOUD / _NUM) - 1) < tolerance


@pytest.mark.slow
def test_it_goes_on_with_the_same_data_and_frozen_weights_only(tmp_path):
    """In another order, an example would be in more steps than ε is stated for."""

    def fit(x, y, ids, frozen=0.0):
        model = _model()
        model.layers[0].trainable = False
        model.layers[0].set_weights([np.full([3, 4], frozen), np.zeros(4)])
        model.compile("sgd", loss=model.loss)
        users = {} if ids is None else {"user_ids": ids, "examples_per_user": 2, "batch_size": 3}
        return _fit(model, tmp_path / ("rows" if ids is None else "users"), x, y, **users)

    x, y = _data()
    ids = np.arange(_NUM) % 6
    wide = x.astype(np.float64)
    others = [(x[::-1], y, None), (x, y[::-1], None), (wide, y, None), (x, y, ids[::-1])]
    for first in (None, ids):
        begun = fit(x, y, first)
        assert fit(x.copy(order="F"), y.copy(), first).statement == begun.statement
    for other in others:
        with pytest.raises(ValueError, match="contents of the examples are not those"):
            fit(*other)
    with pytest.raises(ValueError, match="initial weights are not those"):
        fit(x, y, None, frozen=1.0)


def test_a_digest_is_of_names_shapes_and_what_texts_say():
    texts = np.array(["so", "it is"], object)
    digests = [
        keras_fit._digest(data)
        for data in (
            {"a": np.zeros(4), "b": np.ones(4)},
            {"b": np.zeros(4), "a": np.ones(4)},
            {"a": np.zeros([2, 2]), "b": np.ones(4)},
            texts,
            np.array(["so", "it was"], object),
        )
    ]
    assert len(set(digests)) == len(digests)
    assert keras_fit._digest({"b": np.ones(4), "a": np.zeros(4)}) == digests[0]
    copies = np.array(["".join(list(text)) for text in texts], object)
    assert keras_fit._digest(copies) == digests[3]


@pytest.mark.slow
def test_ids_may_be_bytes(tmp_path):
    ids = np.array([f"zoë {i % 6}".encode() for i in range(_NUM)])
    results = _fit(_model(), tmp_path / "run", user_ids=ids, examples_per_user=2, batch_size=3)
    assert results.statement.parameters["num_users"] == 6


def test_an_optimizer_of_old_keras_is_refused(tmp_path):
    legacy = getattr(tf.keras.optimizers, "legacy", None)
    try:
        optimizer = legacy.SGD(0.1)
    except (AttributeError, ImportError):
        pytest.skip("This Keras has no legacy optimizers.")
    with pytest.raises(ValueError, match=r"legacy optimizer SGD.*tf\.keras\.optimizers\.SGD\("):
        _fit(_model(optimizer=optimizer), tmp_path / "run")


def test_frozen_layers_stay_as_they_are_and_a_recount_comes_to_the_statement(tmp_path):
    model = _model()
    model.layers[0].trainable = False
    model.compile("sgd", loss=model.loss)
    before = model.get_weights()
    results = _fit(model, tmp_path / "run")
    after = model.get_weights()
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        assert np.array_equal(old, new) == (index < 2)
    report = run_folder.recount_run(tmp_path / "run")
    assert not report.is_violated, report.to_text()
    assert (
        "What was not trained, and has no noise: 16 weights. Computed from: nothing, they were "
        "drawn at random (so the operator says)."
    ) in results.statement.not_covered


def _normalised(**options):
    """Returns a model that divides by the exact variance of the examples, deep within."""
    normalise = _layers.Normalization(name="normalise", **options)
    if not options:
        normalise.adapt(_data()[0])
    tf.keras.utils.set_random_seed(3)
    inner = tf.keras.Sequential([normalise, _layers.Dense(4)])
    model = tf.keras.Sequential(
        [tf.keras.Input([3]), tf.keras.Sequential([inner]), _layers.Dense(2)]
    )
    model.compile("sgd", loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def test_the_statement_says_where_statistics_come_from(tmp_path):
    source = "nothing; the mean is of public images"
    results = _fit(_normalised(), tmp_path / "run", trained_on=source)
    assert (
        "What was not trained, and has no noise: 7 weights; statistics or words of data in "
        f"normalise. Computed from: {source}."
    ) in results.statement.not_covered


@pytest.mark.slow
def test_inputs_may_be_a_structure(tmp_path):
    tf.keras.utils.set_random_seed(3)
    first, second = tf.keras.Input([3], name="a"), tf.keras.Input([1], name="b")
    output = _layers.Dense(1)(_layers.Concatenate()([first, second]))
    model = tf.keras.Model([first, second], output)
    model.compile(keras_versions.SGD(0.1), loss="mse")
    x, y = _data()
    before = model.get_weights()
    _fit(model, tmp_path / "run", [x, x[:, :1]], y.astype(np.float32), batch_size=12)
    assert not np.array_equal(before[0], model.get_weights()[0])


def _users(ids):
    return {"user_ids": ids, "examples_per_user": 1}


def test_ids_that_are_whole_floats_are_those_of_the_integers():
    users, rows = keras_fit._units(4, np.array([7.0, 8.0, 7.0, 8.0]), 2)
    same, of_same = keras_fit._units(4, [7, "8", np.int64(7), 8.0], 2)
    assert users.ids == same.ids == ("7", "8")
    assert [rows["7"].tolist(), of_same["8"].tolist()] == [[0, 2], [1, 3]]


_METHODS = ("fit", "train_step", "make_train_function", "compute_loss")


def _own_method(name):
    own = {name: lambda self, *args, **options: None}
    return _model(kind=type("_Own", (tf.keras.Sequential,), own))


class _OwnSteps(keras_versions.SGD):
    def minimize(self, loss, var_list, tape=None):
        """As in Keras 2."""

    def scale_loss(self, loss):
        """As in Keras 3."""


class Hiding(keras_versions.SGD):
    """An optimizer with a variable that it does not tell of."""

    def build(self, var_list):
        super().build(var_list)
        vars(self)["count"] = tf.Variable(0.0)


def _adds_in_training(layer, inputs, training):
    if training:
        layer.add_loss(tf.reduce_mean(inputs))
    return inputs


def _frozen(of_model, **compiled):
    model = _model()
    model.fit(*_data(), verbose=0)  # Keras 3 looks at the layers until then.
    part = of_model(model)
    part.trainable = False
    if compiled:
        model.compile(**compiled)
    return model


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: _model(_layers.BatchNormalization()), {}, "mixes the rows"),
        (lambda: _model(_layers.Dropout(0.5)), {}, "draws random numbers .*dropout"),
        (lambda: _model(_layers.Dense(4, kernel_regularizer="l2")), {}, "adds losses"),
        (lambda: tf.keras.Sequential([_layers.Dense(2)]), {}, "must be compiled with one loss"),
        (
            lambda: _model(loss=lambda y, z: tf.reduce_mean(z)),
            {},
            "a loss that averages over the batch",
        ),
        (lambda: _model(loss=lambda y, z: z - tf.reduce_mean(z)), {}, "beside others"),
        (_model, {"batch_size": 25}, "batch_size=25 exceeds the 24 examples"),
        (_model, {"y": np.zeros(3)}, "the same number of examples"),
        (_model, {"x": tf.data.Dataset.range(3)}, "x must be arrays, got"),
        (_model, {"user_ids": [1] * _NUM}, "user_ids need examples_per_user"),
        (_model, {"user_ids": [1], "examples_per_user": 1}, "one id for each of 24 examples"),
        (_model, {"examples_per_user": 2}, "is for user_ids"),
        (_model, {"target_epsilon": 3.0}, "exactly one of target_epsilon"),
        (_model, {"mechanism": None}, "mechanism must be one of"),
        (_model, _users([b"\xff"] * _NUM), "not UTF-8"),
        (_model, _users(["u"] * (_NUM - 1) + [None]), "example 23 is without a user, None: give"),
        (_model, _users(["u"] * (_NUM - 1) + [np.nan]), "example 23 is without a user, nan"),
        (_model, _users(np.where(np.arange(_NUM) == 9, np.nan, 1.0)), "example 9 is without"),
        (_model, _users([0.5] * _NUM), "example 0 is with a fraction"),
        (_model, _users(np.full(_NUM, 2.0**53)), "user_ids of example 0: .* a float .* not exact"),
        (_model, _users(np.full(_NUM, 2**24, np.float32)), "of example 0: .* a float"),
        (_model, _users(["7", "7.0", *"8" * (_NUM - 2)]), "one number in several ways"),
        (_model, {"epochs": 0}, "epochs must be at least 1"),
        *((lambda name=name: _own_method(name), {}, f"its own {name}, which") for name in _METHODS),
        (
            lambda: _model(optimizer=_OwnSteps(0.1)),
            {},
            "an optimizer with its own (minimize|scale_loss)",
        ),
        (lambda: _model(optimizer=keras_versions.SGD(0.1, use_ema=True)), {}, "use_ema=True"),
        (
            lambda: _model(optimizer=keras_versions.LossScaleOptimizer(keras_versions.SGD(0.1))),
            {},
            "optimizer scales losses",
        ),
        (lambda: _model(run_eagerly=True), {}, "run_eagerly=True"),
        (lambda: _model(loss_weights=[1.005]), {}, "loss_weights=.1.005., which divides"),
        (
            lambda: _model(
                loss=tf.keras.losses.SparseCategoricalCrossentropy(True, ignore_class=-1)
            ),
            {},
            "leave out ignore_class",
        ),
        (lambda: _model(optimizer=Hiding(0.1)), {}, "optimizer Hiding keeps the variable count"),
        (
            lambda: _model(loss=tf.keras.losses.MeanSquaredError(reduction="sum")),
            {},
            "reduction='sum'",
        ),
        (lambda: _model(loss=lambda y, z: z.numpy()), {}, "loss cannot be computed in a graph"),
        (
            lambda: _model(_Layer(lambda layer, x, _: _normalised_in_the_batch(x))),
            {},
            "each example by itself, also in the gradients",
        ),
        (lambda: _model(_Layer(_adds_in_training)), {}, "adds losses"),
        (lambda: _model(_layers.GaussianNoise(1e-6)), {}, "draws random numbers"),
        (lambda: _model(_layers.Dense(4, dtype="mixed_bfloat16")), {}, "mixed-precision policy"),
        (lambda: _model(_layers.Reshape([4, 1]), _layers.Masking()), {}, "masks a part"),
        (lambda: _frozen(lambda model: model, loss="mse"), {}, "no trainable weights"),
        (lambda: _frozen(lambda model: model.layers[0]), {}, "trainable was set after compile"),
        (_after_a_fit, {}, "optimizer SGD has a state already"),
        (_after_a_fit, {"trained_on": None}, "optimizer SGD has a state already"),
        (
            lambda: _after_a_fit(tf.keras.optimizers.Adagrad()),
            {"trained_on": pathlib.Path("earlier")},
            "optimizer Adagrad has a state already",
        ),
        (_model, {"validation_data": tf.data.Dataset.range(3)}, "validation_data must be"),
        (_normalised, {}, "words of data in normalise.*trained_on='nothing' does not say"),
        (_normalised, {"trained_on": None}, "trained_on=None does not say of which data"),
        (lambda: _normalised(mean=[1.0] * 3, variance=[1.0] * 3), {}, "data in normalise"),
    ],
)
def test_what_would_break_the_promise_is_refused_before_a_folder_is_made(
    make, options, message, tmp_path
):
    with pytest.raises(ValueError, match=message):
        _fit(make(), tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


class _Keeping(_layers.Layer):
    """A layer that keeps the mean of what it was called with last."""

    def build(self, shape):
        self.mean = self.add_weight(name="mean", initializer="zeros", trainable=False)

    def call(self, inputs):
        self.mean.assign(tf.reduce_mean(inputs))
        return inputs


def test_the_trial_leaves_nothing_of_the_rows_that_it_tries(tmp_path):
    model = _model(_Keeping())
    with pytest.raises(ValueError, match="changes variables"):
        _fit(model, tmp_path / "run")
    assert not model.layers[1].mean.numpy()
    _fit(model := _model(), tmp_path / "run", epochs=1, batch_size=_NUM)
    assert not any(np.any(variable) for metric in model.metrics for variable in metric.variables)


def test_rounding_in_a_saturated_model_is_no_other_objective():
    model = _model(loss="mse")
    inputs = tf.constant(_data(4)[0])
    rows = inputs, model(inputs)
    keras_fit._refuse_another_objective(model, custom_run.Model.of_keras(model), rows)


@pytest.mark.slow
def test_the_example_of_the_docs_runs(tmp_path, monkeypatch):
    text = (_DOCS / "how_to" / "finetuning.md").read_text(encoding="utf-8")
    examples = [
        block
        for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
        if "private_fit" in block
    ]
    assert len(examples) == 2
    monkeypatch.chdir(tmp_path)
    names = {}
    for example in examples:  # The second one goes on with the imports of the first.
        exec(compile(example, "finetuning.md", "exec"), names)
    for run in ("mine", "users"):
        assert (tmp_path / "results" / run / "privacy_statement.md").exists()
