"""Tests of runs that train a custom model."""

from __future__ import annotations

import collections
import json
import shutil

import numpy as np
import pytest
import tensorflow as tf

from tests.training import toy_run
from tff_dpftrl.cli import main
from tff_dpftrl.learning import model as model_lib
from tff_dpftrl.models import word_lstm
from tff_dpftrl.runs import loop
from tff_dpftrl.training import config as config_lib
from tff_dpftrl.training import (
    custom_models,
    pretraining,
    report,
    run,
    saved_model,
    trained_model,
)

_SIZES = {"embedding_size": None, "lstm_size": None}
_PEER = word_lstm.WordLstm(
    vocabulary_size=len(toy_run.WORDS) + 4, sequence_length=6, embedding_size=4, state_size=5
)


class _Bias(tf.keras.layers.Layer):
    """A layer of its own: Keras 3 takes the weights of a model itself first, Keras 2 last."""

    def build(self, shape):
        self.bias = self.add_weight(name="output_bias", shape=shape[-1:])

    def call(self, scores):
        return scores + self.bias


class _Twin(tf.keras.Model):
    """The toy run's LSTM made of Keras layers, with weights in the same layout."""

    def __init__(self):
        super().__init__()
        dense = tf.keras.layers.Dense
        self.embedding = tf.keras.layers.Embedding(_PEER.vocabulary_size, 4)
        self.of_input = dense(4 * 5, use_bias=False)
        self.of_output = dense(4 * 5)
        self.projection = dense(4, use_bias=False)
        self.bias = _Bias()

    def build(self, shape):
        """Builds the layers; Keras 3 would try `call` first, and not end its name scope."""
        sizes = (None, 4, 5, 5, _PEER.vocabulary_size)
        layers = (self.embedding, self.of_input, self.of_output, self.projection, self.bias)
        for layer, size in zip(layers, sizes, strict=True):
            layer.build([None, size])
        self.built = True

    def call(self, words):
        inputs = self.of_input(self.embedding(words))
        output = cell = tf.zeros([tf.shape(words)[0], 5])
        outputs = []
        for step in range(_PEER.sequence_length):
            gates = inputs[:, step] + self.of_output(output)
            keep, enter, leave, new = tf.split(gates, 4, axis=1)
            cell = tf.sigmoid(keep) * cell + tf.sigmoid(enter) * tf.tanh(new)
            output = tf.sigmoid(leave) * tf.tanh(cell)
            outputs.append(output)
        projected = self.projection(tf.stack(outputs, axis=1))
        return self.bias(tf.matmul(projected, self.embedding.embeddings, transpose_b=True))


def _twin(seed=0):
    """The weights that a run of the config's LSTM with that seed begins with."""
    model = _Twin()
    model(np.zeros([1, 6], np.int32))
    model.set_weights(_PEER.initial_weights(seed))
    return model


def _bigrams(activation=None):
    """A model that costs little."""
    size = _PEER.vocabulary_size
    return tf.keras.Sequential(
        [
            tf.keras.layers.Embedding(size, 4),
            tf.keras.layers.Dense(size, activation=activation),
        ]
    )


def _functional(non_trainable=()):
    @tf.function
    def predict_on_batch(model_weights, x, training):
        del training
        weights = (*model_weights[0]["first"].values(), *model_weights[0]["second"])
        return _PEER.logits(weights, tf.cast(x, tf.int32))

    def loss(output, label, sample_weight=None):
        raise NotImplementedError

    # `tf.nest` takes the keys of a mapping in alphabetical order.
    weights = _PEER.initial_weights(0)
    first = collections.OrderedDict(a=weights[0], b=weights[1])
    spec = tf.TensorSpec([None, 6], tf.int64)
    return model_lib.Model(
        initial_weights=({"first": first, "second": weights[2:]}, non_trainable),
        predict_on_batch=predict_on_batch,
        loss=loss,
        input_spec=(spec, spec),
    )


corpus = toy_run.corpus


@pytest.fixture(scope="module")
def private_run(corpus, tmp_path_factory):
    """A finished run of the small model, and its results."""
    output = tmp_path_factory.mktemp("run") / "bigrams"
    options = {
        "deterministic_noise_seed": None,
        "num_rounds": 1,
        "mechanism": "identity",
        "buffers": None,
    }
    return output, run.train(toy_run.config(corpus, **_SIZES, **options), output, model=_bigrams())


def test_results_are_those_of_every_run(private_run):
    output, results = private_run
    assert results.rows[-1]["eval_loss"] > 0
    assert results.held_out["users"] == 6 and set(results.baselines) >= {"bigrams"}
    assert {"best_model.npz", "curves.png", "held_out.json"} <= {p.name for p in output.iterdir()}
    content = json.loads((output / "config.json").read_text())
    assert content["config"]["model"] == content["facts"]["model"]["model"] == "own"
    assert content["config"]["embedding_size"] is None
    assert content["facts"]["vocabulary_is_public"] is True
    assert content["facts"]["num_parameters"] == 34 * 4 + 4 * 34 + 34
    before = (output / "model.npz").read_bytes()
    (output / "model.npz").unlink()
    assert report.report(output).statement == results.statement
    assert (output / "model.npz").read_bytes() == before


def test_what_its_weights_may_tell_is_stated(private_run):
    output, results = private_run
    assert results.statement.has_guarantee
    caveat = "may have been trained on the same people"
    assert any(caveat in line for line in results.statement.headline_caveats)
    text = (output / "privacy_statement.md").read_text()
    assert "initial weights were trained on: not recorded; they are those of the caller's" in text
    facts = custom_models.weights_facts("nothing", [])
    assert "nothing (so the operator says" in facts["initial_weights_source"]
    assert report._headline_caveats({"vocabulary": "docs"}, facts) == ()


def _assert_trained_as_the_config_s_model(corpus, folder, output):
    run.train(toy_run.config(corpus), folder)
    for ours, theirs in zip(toy_run.rows(output), toy_run.rows(folder), strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            assert bool(value) == bool(theirs[name]), name
            if value:
                assert float(value) == pytest.approx(float(theirs[name]), rel=1e-4), name
    for ours, theirs in zip(toy_run.weights(output), toy_run.weights(folder), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)
    names = [{p.name for p in of.iterdir()} for of in (output, folder)]
    assert names[0] == names[1]


@pytest.mark.slow
def test_a_keras_model_trains_as_the_config_s_and_resumes_to_the_same_weights(
    corpus, tmp_path, monkeypatch
):
    config = toy_run.config(corpus, **_SIZES)
    run.train(config, tmp_path / "twin", model=_twin())
    _assert_trained_as_the_config_s_model(corpus, tmp_path / "run", tmp_path / "twin")
    output, calls = tmp_path / "resumed", []

    def crash(self, *args):
        calls.append(args)
        if len(calls) == 3:
            raise toy_run.Crash

    with monkeypatch.context() as patch:
        patch.setattr(loop.Loop, "_warn_of_dropped", crash)
        with pytest.raises(toy_run.Crash):
            run.train(config, output, model=_twin())
    reported = report.report(output)
    assert len(reported.rows) == 2
    assert f"go on with tff_dpftrl.train(None, '{output}', model=...)" in reported.summary
    run.train(None, output, model=_twin(seed=1))  # The weights are the checkpoint's.
    for ours, theirs in zip(
        toy_run.weights(output), toy_run.weights(tmp_path / "twin"), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    assert toy_run.rows(output) == toy_run.rows(tmp_path / "twin")


def test_a_run_goes_on_with_the_same_model_only(private_run):
    output, _ = private_run
    with pytest.raises(ValueError, match=r"tff_dpftrl.train\(None, '.*', model=..."):
        run.train(None, output)
    with pytest.raises(ValueError, match="computes something else"):
        run.train(None, output, model=_bigrams("tanh"))
    with pytest.raises(ValueError, match="model has .*that of the run"):
        run.train(None, output, model=_twin())
    with pytest.raises(ValueError, match="model_trained_on is recorded when a run begins"):
        run.train(None, output, model=_bigrams(), model_trained_on="nothing")


@pytest.mark.slow
def test_a_functional_model_trains_as_the_config_s(corpus, tmp_path):
    config = toy_run.config(corpus, **_SIZES)
    run.train(config, tmp_path / "own", model=_functional())
    _assert_trained_as_the_config_s_model(corpus, tmp_path / "run", tmp_path / "own")
    trained = trained_model.find(tmp_path / "own").load(model=_functional())
    assert trained.predict([toy_run.WORDS[0]])


def test_its_model_predicts_in_python_and_is_refused_elsewhere(private_run, tmp_path, capsys):
    output, _ = private_run
    for name in ("model.npz", "vocabulary.json"):
        shutil.copy(output / name, tmp_path)
    for command in (["predict", str(tmp_path), "x"], ["export", str(tmp_path), str(output / "e")]):
        assert main.main(command) == 2
        assert ".load(model=...)" in capsys.readouterr().err
    assert main.main(["train", "--resume", "--output", str(output)]) == 2
    assert f"tff_dpftrl.train(None, '{output}', model=...)" in capsys.readouterr().err
    new = ["train", "--model", "own", "--noise-multiplier", "1", "--output", str(tmp_path / "new")]
    assert main.main(new) == 2
    assert "tff_dpftrl.train(config, output, model=...)" in capsys.readouterr().err
    theirs = _bigrams()
    trained = trained_model.find(tmp_path).load(model=theirs)
    text = f"{toy_run.WORDS[0]} {toy_run.WORDS[7]}"
    (found,) = trained.predict([text], top=3)
    # The same with Keras alone.
    theirs.set_weights(toy_run.weights(output))
    ids = [trained.words.bos, *trained.words.ids(text.split()), 0, 0, 0]
    scores = theirs(np.array([ids]))[0, 2].numpy()
    scores[[0, trained.words.bos]] = -np.inf
    probabilities = tf.nn.softmax(scores).numpy()
    best = np.argsort(-probabilities[1 : trained.words.oov])[:3]
    assert [word for word, _ in found.next_words] == [trained.words.words[i] for i in best]
    np.testing.assert_allclose([p for _, p in found.next_words], probabilities[1 + best], rtol=1e-4)
    with pytest.raises(ValueError, match="computes something else"):
        trained_model.find(tmp_path).load(model=_bigrams("tanh"))


@pytest.mark.slow
def test_its_model_predicts_the_same_where_it_is_exported(private_run, tmp_path):
    trained = trained_model.find(private_run[0]).load(model=_bigrams())
    text = f"{toy_run.WORDS[0]} {toy_run.WORDS[7]}"
    (found,) = trained.predict([text], top=3)
    saved_model.write(tmp_path / "exported", trained, top=3, history=True)
    exported = tf.saved_model.load(str(tmp_path / "exported")).signatures
    words = exported["serving_default"](texts=tf.constant([text]))["words"].numpy()[0]
    assert [word.decode() for word in words] == [word for word, _ in found.next_words]
    earlier = [f"{text} {toy_run.WORDS[3]}"] * 2
    mixed = exported["with_history"](texts=tf.constant([text]), history=tf.constant(earlier))
    (expected,) = trained.predict([text], top=3, history=earlier)
    words = [word.decode() for word in mixed["words"].numpy()[0]]
    assert words == [word for word, _ in expected.next_words] and words[0] == toy_run.WORDS[3]


@pytest.mark.parametrize(
    "options, arguments, message",
    [
        ({}, {"model": _bigrams}, "embedding_size is for the model .*, not for own"),
        ({**_SIZES, "model": "transformer"}, {"model": _bigrams}, "config names .*'transformer'"),
        ({**_SIZES, "model": "own"}, {}, r"tff_dpftrl.train\(config, output, model=...\)"),
        (_SIZES, {"model": lambda: _Twin}, "must be a tf.keras.Model or .*, got ABCMeta|type"),
        (_SIZES, {"model": lambda: _functional((np.zeros(2),))}, "1 weights that are not trained"),
        (_SIZES, {"model_trained_on": lambda: "nothing"}, "give model too"),
        (_SIZES, {"model": _bigrams, "model_trained_on": str}, "must name a text"),
        (
            {**_SIZES, "vocabulary_size": 29},
            {"model": _bigrams},
            r"\[batch, 6, 33\], got .*34.*: 33 ids are the 29 words",
        ),
        ({**_SIZES, "sequence_length": 7}, {"model": _functional}, r"\[batch, 7\]"),
    ],
)
def test_user_errors_leave_nothing_behind(corpus, tmp_path, options, arguments, message):
    with pytest.raises(ValueError, match=message):
        run.train(
            toy_run.config(corpus, **options),
            tmp_path / "run",
            **{name: make() for name, make in arguments.items()},
        )
    assert not (tmp_path / "run").exists()


def test_a_model_beside_a_run_of_the_config_s_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is of the model 'word-lstm': leave it out"):
        custom_models.check_resumed("word-lstm", _bigrams(), None, tmp_path)
    with pytest.raises(ValueError, match="initial_weights has no meaning with a custom model"):
        config_lib.TrainingConfig.of(mechanism="none", model="own", initial_weights="folder")
    own = config_lib.TrainingConfig.of(mechanism="none", model="own")
    with pytest.raises(ValueError, match="'own' can be trained in Python only"):
        pretraining.read(pretraining.PretrainingConfig(), own.language)


@pytest.mark.slow
def test_a_model_that_tff_made_of_keras_can_be_given(corpus, tmp_path):
    tff = pytest.importorskip("tensorflow_federated", reason="trains a model of TFF")
    layers = [tf.keras.layers.Input([6], dtype=tf.int32), *_bigrams().layers]
    keras = tf.keras.Sequential(layers)
    spec = tf.TensorSpec([None, 6], tf.int32)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = tff.learning.models.functional_model_from_keras(keras, loss, (spec, spec))
    config = toy_run.config(corpus, **_SIZES, num_rounds=2)
    results = run.train(config, tmp_path / "run", model=model, model_trained_on="nothing")
    assert results.rows[-1]["eval_loss"] > 0
    trained = trained_model.find(tmp_path / "run").load(model=model)
    embedding, kernel, bias = trained.weights
    ids = np.array([[32, 1, 2, 3, 0, 0]], np.int32)
    np.testing.assert_allclose(
        trained.model.logits(trained.weights, ids), embedding[ids] @ kernel + bias, rtol=1e-4
    )
