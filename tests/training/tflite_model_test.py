"""Tests of tff_dpftrl.training.tflite_model: what was exported, run by TensorFlow's interpreter."""

from __future__ import annotations

import json
import pathlib
import re
import unicodedata

import numpy as np
import pytest
import tensorflow as tf

from tests.training import toy_model
from tff_dpftrl.data import vocabulary
from tff_dpftrl.models import custom_model, table
from tff_dpftrl.training import saved_model, tflite_model, trained_model

pytestmark = pytest.mark.filterwarnings("ignore:.*tf.lite.Interpreter is deprecated")

_LENGTH = 5
_SCRIPTS = pathlib.Path(__file__).parents[3] / "shared" / "cases" / "scripts.tsv"


def _trained(folder: pathlib.Path, name: str = "transformer") -> trained_model.TrainedModel:
    model = table.build(name, vocabulary_size=toy_model.WORDS.size, sequence_length=_LENGTH)
    rng = np.random.default_rng(1)
    shapes = model.weight_shapes.values()
    last = [(rng.normal(size=s) * s[0] ** -0.5).astype(np.float32) for s in shapes]
    return trained_model.find(toy_model.write(folder, model=model, last=last)).load()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A transformer with random weights."""
    return _trained(tmp_path_factory.mktemp("run"))


def _custom(scores, words=toy_model.WORDS) -> trained_model.TrainedModel:
    """A custom model, with the words of the toy model."""
    rng, shapes = np.random.default_rng(2), {"embedding": (words.size, 3), "kernel": (3, 3)}
    weights = {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}
    model = custom_model.build(scores, weights, vocabulary_size=words.size, sequence_length=_LENGTH)
    return trained_model.TrainedModel(model, list(weights.values()), words, words.rule())


def _inputs(weights, ids):
    return tf.matmul(tf.gather(weights[0], ids), weights[1])


def _looped(weights, ids, training):
    """A recurrent model with a loop, as those of Keras have."""

    def step(state, inputs):
        return tf.tanh(inputs + state)

    inputs = tf.transpose(_inputs(weights, ids), [1, 0, 2])
    states = tf.scan(step, inputs, tf.zeros_like(inputs[0]))
    return tf.matmul(tf.transpose(states, [1, 0, 2]), weights[0], transpose_b=True)


def _bigrams(weights, ids, training):
    return tf.matmul(_inputs(weights, ids), weights[0], transpose_b=True)


def _bags(weights, ids, training):
    inputs = tf.cumsum(_inputs(weights, ids), axis=1)
    return tf.matmul(inputs, weights[0], transpose_b=True)


def _not_built_in(weights, ids, training):
    inputs = _inputs(weights, ids)
    return tf.matmul(tf.math.igamma(tf.exp(inputs), tf.exp(inputs)), weights[0], transpose_b=True)


def _ids(num: int) -> np.ndarray:
    """Sequences of all lengths, padded at the end."""
    rng = np.random.default_rng(num)
    ids = rng.integers(1, toy_model.WORDS.size, [num, _LENGTH])
    ids[np.arange(_LENGTH) >= 1 + np.arange(num)[:, np.newaxis] % _LENGTH] = 0
    return ids.astype(np.int32)


def _last_scores(trained: trained_model.TrainedModel, ids: np.ndarray) -> np.ndarray:
    scores = trained.model.logits([tf.constant(w) for w in trained.weights], tf.constant(ids))
    return scores.numpy()[np.arange(len(ids)), (ids != 0).sum(axis=1) - 1]


def _probabilities(trained: trained_model.TrainedModel, scores: np.ndarray) -> np.ndarray:
    scores = scores.astype(np.float64)
    scores[:, [0, trained.words.bos]] = -np.inf
    odds = np.exp(scores - scores.max(axis=1, keepdims=True))
    return odds / odds.sum(axis=1, keepdims=True)


def _check(found, trained, ids, top):
    scores = _last_scores(trained, ids)
    np.testing.assert_allclose(found["scores"], scores, rtol=1e-5, atol=1e-5)
    expected = _probabilities(trained, scores)
    words = expected[:, 1 : trained.words.oov]
    best = np.argsort(-words, axis=1, kind="stable")[:, :top]
    np.testing.assert_array_equal(found["next_ids"], best + 1)
    np.testing.assert_allclose(
        found["probabilities"], np.take_along_axis(words, best, axis=1), atol=1e-5
    )
    np.testing.assert_allclose(found["unknown_word"], expected[:, trained.words.oov], atol=1e-5)
    np.testing.assert_allclose(found["end_of_text"], expected[:, trained.words.eos], atol=1e-5)


def _operations(interpreter: tf.lite.Interpreter) -> set[str]:
    return {operation["op_name"] for operation in interpreter._get_ops_details()}


def _open(folder: pathlib.Path) -> tf.lite.Interpreter:
    return tf.lite.Interpreter(str(folder / "model.tflite"))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("word-lstm", "llama") else [pytest.mark.slow])
        for name in table.MODELS
    ],
)
def test_every_model_of_the_table_gives_its_scores_on_a_device(name, tmp_path):
    trained = _trained(tmp_path / "run", name)
    tflite_model.write(tmp_path / "lite", trained, top=3)
    interpreter = _open(tmp_path / "lite")
    assert not [op for op in _operations(interpreter) if op.startswith(("Flex", "CUSTOM"))]
    run = interpreter.get_signature_runner()
    for num in (1, 7):
        _check(run(ids=_ids(num)), trained, _ids(num), top=3)


def test_a_custom_model_gives_its_scores_on_a_device(tmp_path):
    trained = _custom(_bigrams)
    tflite_model.write(tmp_path / "lite", trained, top=99)
    ids = _ids(4)
    _check(_open(tmp_path / "lite").get_signature_runner()(ids=ids), trained, ids, top=7)


@pytest.mark.parametrize("scores", [_looped, _not_built_in])
def test_a_custom_model_that_needs_other_operations_is_refused_in_one_line(scores, tmp_path):
    with pytest.raises(
        ValueError, match="of built-in operations only .*: export a SavedModel"
    ) as e:
        tflite_model.write(tmp_path / "lite", _custom(scores))
    assert "\n" not in str(e.value)
    assert not list(tmp_path.iterdir())


def test_the_signature_of_a_saved_model_can_be_converted(trained, tmp_path):
    saved_model.write(tmp_path / "saved", trained, top=3)
    loaded = tf.saved_model.load(str(tmp_path / "saved"))
    ids = _ids(6)
    _check(loaded.signatures["ids"](ids=tf.constant(ids)), trained, ids, top=3)
    converter = tf.lite.TFLiteConverter.from_saved_model(
        str(tmp_path / "saved"), signature_keys=["ids"]
    )
    interpreter = tf.lite.Interpreter(model_content=converter.convert())
    _check(interpreter.get_signature_runner("ids")(ids=ids), trained, ids, top=3)


def test_ids_made_as_the_folder_says_predict_what_the_model_predicts(trained, tmp_path):
    tflite_model.write(tmp_path / "lite", trained, top=2)
    content = json.loads((tmp_path / "lite" / "vocabulary.json").read_text())
    words, special = content["words"], content["ids"]
    text = "the FRONT isn't over"
    ids = [special["beginning"]]
    for word in text.lower().split():
        ids.append(words.index(word) + 1 if word in words else special["out of vocabulary"])
    ids = ids[-_LENGTH:] + [special["padding"]] * (_LENGTH - len(ids))
    found = _open(tmp_path / "lite").get_signature_runner()(ids=np.array([ids], np.int32))
    (expected,) = trained.predict([text], top=2)
    assert [words[i - 1] for i in found["next_ids"][0]] == [w for w, _ in expected.next_words]
    assert float(found["end_of_text"][0]) == pytest.approx(expected.end_of_text, rel=1e-4)


def test_words_of_all_scripts_are_known_wherever_the_model_runs(tmp_path):
    if not _SCRIPTS.exists():
        pytest.skip("../shared/cases is not there")
    rows = [line.split("\t") for line in _SCRIPTS.read_text(encoding="utf-8").splitlines()[1:]]
    texts, spoken = (
        [unicodedata.normalize("NFC", row[column]) for row in rows] for column in (0, 1)
    )
    words = dict.fromkeys(word for one in spoken for word in one.split(" "))
    trained = _custom(_bags, vocabulary.Vocabulary(tuple(words), "scripts"))
    expected = trained.predict([text for text, _ in rows], top=1)
    assert not any(prediction.unknown_in_text for prediction in expected)
    best = [prediction.next_words[0][0] for prediction in expected]
    assert len(set(best)) > 1
    saved_model.write(tmp_path / "saved", trained)
    loaded = tf.saved_model.load(str(tmp_path / "saved"))
    found = loaded.predict(tf.constant(texts), tf.constant(1))["words"]
    assert [word.decode() for (word,) in found.numpy()] == best
    tflite_model.write(tmp_path / "lite", trained, top=1)
    ids = np.zeros([len(rows), _LENGTH], np.int32)
    for row, one in zip(ids, spoken, strict=True):
        known = [trained.words.bos, *trained.words.ids(one.split(" "))]
        row[: len(known)] = known
    found = _open(tmp_path / "lite").get_signature_runner()(ids=ids)["next_ids"]
    assert [trained.words.shown(index) for (index,) in found] == best
    assert "Normalise the text to Unicode" in (tmp_path / "lite" / "README.md").read_text()


def test_earlier_text_of_the_user_counts_on_a_device(tmp_path):
    trained = _custom(_bigrams)
    tflite_model.write(tmp_path / "lite", trained, top=3, history=True)
    texts, history = ["the front", "isn't"], ["the front end", "the front the front end isn't the"]
    ids, rows = np.zeros([2, _LENGTH], np.int32), np.zeros([2, 9], np.int32)
    for row, text in zip([*ids, *rows], [*texts, *history], strict=True):
        known = [trained.words.bos, *trained.words.ids(text.split())]
        known += [trained.words.eos] * (text in history)
        row[: len(known)] = known
    interpreter = _open(tmp_path / "lite")
    assert not [op for op in _operations(interpreter) if op.startswith(("Flex", "CUSTOM"))]
    run = interpreter.get_signature_runner()
    found = run(ids=ids, history=rows)
    np.testing.assert_allclose(found["scores"], _last_scores(trained, ids), rtol=1e-5, atol=1e-5)
    for i, expected in enumerate(trained.predict(texts, 3, history=history)):
        assert [p for _, p in expected.next_words] == pytest.approx(found["probabilities"][i])
        assert expected.end_of_text == pytest.approx(found["end_of_text"][i])
    _check(run(ids=ids, history=rows[:, :1]), trained, ids, top=3)  # Nothing was written.
    text = (tmp_path / "lite" / "README.md").read_text()
    assert "`history` (input) | int32, [h, w]" in text and "ids=ids, history=history" in text


def test_the_folder_says_what_ids_mean(trained, tmp_path):
    tflite_model.write(tmp_path / "lite", trained)
    text = (tmp_path / "lite" / "README.md").read_text()
    size = toy_model.WORDS.size
    assert f"`ids` (input) | int32, [n, {_LENGTH}]" in text
    assert f"has the id {size - 3}. {size - 2} begins a text, {size - 1} ends it, 0 is" in text
    assert "Lower-case the text" in text and f"`{trained.rule.pattern}`" in text
    source = re.escape(str(pathlib.Path(tflite_model.__file__).parent)).encode()
    for path in (tmp_path / "lite").iterdir():
        assert not re.search(source, path.read_bytes()), path


def test_words_of_the_users_are_said_to_be_theirs(tmp_path):
    words = vocabulary.Vocabulary(toy_model.WORDS.words, "users", lower_case=False, is_public=False)
    run = toy_model.write(tmp_path / "run", words=words, is_tokenized=True)
    tflite_model.write(tmp_path / "lite", trained_model.find(run).load())
    text = (tmp_path / "lite" / "README.md").read_text()
    assert "No privacy statement covers which words these are" in text.replace("\n", " ")
    assert "Leave capitals as they are" in text


@pytest.mark.slow
def test_what_is_there_is_left_alone(trained, tmp_path):
    (tmp_path / "mine").mkdir()
    with pytest.raises(ValueError, match="is no folder of a TensorFlow Lite model"):
        tflite_model.write(tmp_path / "mine", trained, overwrite=True)
    with pytest.raises(ValueError, match="top must be at least 1"):
        tflite_model.write(tmp_path / "lite", trained, top=0)
    tflite_model.write(tmp_path / "lite", trained, top=1)
    with pytest.raises(ValueError, match="already: add --overwrite"):
        tflite_model.write(tmp_path / "lite", trained, top=2)
    tflite_model.write(tmp_path / "lite", trained, top=2, overwrite=True)
    run = _open(tmp_path / "lite").get_signature_runner()
    assert run(ids=_ids(1))["next_ids"].shape == (1, 2)
