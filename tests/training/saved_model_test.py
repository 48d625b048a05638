"""Tests of tff_dpftrl.training.saved_model: what was exported, loaded with plain TensorFlow."""

from __future__ import annotations

import functools
import json
import pathlib
import random
import subprocess
import sys
import unicodedata

import numpy as np
import pytest
import tensorflow as tf

from tests import small_disk
from tests.training import toy_model
from tff_dpftrl.data import subword_learning, user_text, vocabulary, vocabulary_file
from tff_dpftrl.models import table, word_lstm
from tff_dpftrl.training import saved_model, trained_model

disk = small_disk.disk

_TRICKY = [
    "The FRONT isn't 3.5 ß.",
    "the front-end \u2028 isn't...\x85the",
    "'the' İ Σς ΑΣ a\0b \\1 中文 e\u0301 😀👍🏽",
    "one two three four five the front end isn't",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model with random weights."""
    return trained_model.find(toy_model.write(tmp_path_factory.mktemp("run"))).load()


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    """It, exported."""
    folder = tmp_path_factory.mktemp("exported") / "next_words"
    saved_model.write(folder, trained, top=3, history=True)
    return folder


@functools.cache
def _random_texts():
    characters = [
        chr(code)
        for code in range(sys.maxunicode + 1)
        if unicodedata.category(chr(code)) not in ("Cs", "Cn")
    ]
    alphabets = [characters, list("aTHEthe'.35 -\n\0Σß")]
    words = [*toy_model.WORDS.words, "The", "FRONT", "foo"]
    rng = random.Random(0)
    texts = ["x " + "".join(rng.choices(few, k=12)) for few in alphabets for _ in range(200)]
    return texts + ["".join(rng.choices([*words, " ", " ", "-"], k=9)) + "." for _ in range(200)]


def test_it_says_what_the_model_says(trained, exported):
    texts = _TRICKY + _random_texts()
    found = tf.saved_model.load(str(exported)).signatures["serving_default"](
        texts=tf.constant([text.encode() for text in texts])
    )
    expected = trained.predict(texts, top=3)
    assert found["words"].shape == [len(texts), 3]
    for i, prediction in enumerate(expected):
        words = [word.decode() for word in found["words"][i].numpy()]
        assert words == [word for word, _ in prediction.next_words], texts[i]
    for name in ("unknown_word", "end_of_text"):
        ours = [getattr(prediction, name) for prediction in expected]
        np.testing.assert_allclose(found[name], ours, rtol=1e-4)
    ours = [[p for _, p in prediction.next_words] for prediction in expected]
    np.testing.assert_allclose(found["probabilities"], ours, rtol=1e-4)
    assert len(set(found["unknown_word"].numpy().tolist())) > 20  # The texts matter.


def test_it_takes_earlier_text_of_the_user(trained, exported):
    signatures = tf.saved_model.load(str(exported)).signatures
    assert set(signatures) == {"serving_default", "ids", "with_history", "ids_with_history"}
    history = ["the FRONT end", "", "the front the front end isn't the"]
    expected = trained.predict(_TRICKY, top=3, history=history)
    found = signatures["with_history"](texts=tf.constant(_TRICKY), history=tf.constant(history))
    rows = np.zeros([len(_TRICKY), trained.model.sequence_length], np.int32)
    for row, text in zip(rows, _TRICKY, strict=True):
        ids = [trained.words.bos, *trained.words.ids(trained.rule.words(text))][-len(row) :]
        row[: len(ids)] = ids
    known = [[9, 1, 2, 3, 10, 0, 0, 0, 0], [9, 1, 2, 1, 2, 3, 4, 1, 10]]
    by_ids = signatures["ids_with_history"](ids=tf.constant(rows), history=tf.constant(known))
    for i, prediction in enumerate(expected):
        probabilities = [p for _, p in prediction.next_words]
        np.testing.assert_allclose(found["probabilities"][i], probabilities, rtol=1e-4)
        np.testing.assert_allclose(by_ids["probabilities"][i], probabilities, rtol=1e-4)
        words = [word.decode() for word in found["words"][i].numpy()]
        assert words == [word for word, _ in prediction.next_words]
    assert expected != trained.predict(_TRICKY, top=3)
    with pytest.raises(ValueError, match="history must have at least one word in it"):
        trained.predict(_TRICKY, history=["", " "])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "dp-fedavg-lstm" else [pytest.mark.slow])
        for name in table.MODELS
    ],
)
def test_every_model_can_be_exported(name, tmp_path):
    model = table.build(name, vocabulary_size=toy_model.WORDS.size, sequence_length=5)
    weights = model.initial_weights(1)
    trained = trained_model.find(
        toy_model.write(tmp_path / "run", model=model, last=weights)
    ).load()
    saved_model.write(tmp_path / "exported", trained)
    loaded = tf.saved_model.load(str(tmp_path / "exported"))
    found = loaded.predict(tf.constant(_TRICKY), 3)
    for i, prediction in enumerate(trained.predict(_TRICKY, top=3)):
        probabilities = [p for _, p in prediction.next_words]
        np.testing.assert_allclose(found["probabilities"][i], probabilities, rtol=1e-4)
        assert float(found["end_of_text"][i]) == pytest.approx(prediction.end_of_text, rel=1e-4)


@pytest.mark.slow
def test_it_loads_where_this_package_is_not(trained, exported, tmp_path):
    code = (
        "import json, sys, tensorflow as tf\n"
        "texts = tf.constant([text.encode() for text in json.loads(sys.argv[2])])\n"
        "loaded = tf.saved_model.load(sys.argv[1])\n"
        "found = loaded.signatures['serving_default'](texts=texts)\n"
        "other = loaded.predict(texts, 99)\n"
        "names = {name.partition('.')[0] for name in sys.modules}\n"
        "assert not names & {'tff_dpftrl', 'tensorflow_text', 'tensorflow_federated'}\n"
        "words = [[w.decode() for w in row] for row in found['words'].numpy().tolist()]\n"
        "print(json.dumps([words, other['probabilities'].shape.as_list()]))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, str(exported), json.dumps(_TRICKY)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING:tensorflow" not in done.stderr
    words, shape = json.loads(done.stdout)
    expected = trained.predict(_TRICKY, top=3)
    assert words == [[word for word, _ in found.next_words] for found in expected]
    assert shape == [len(_TRICKY), len(toy_model.WORDS.words)]


def test_texts_without_words_and_broken_bytes_are_answered(exported):
    predict = tf.saved_model.load(str(exported)).signatures["serving_default"]
    found = predict(texts=tf.constant([b"", b" \n", b"the \xff", "the \ufffd".encode(), b"the"]))
    words = found["words"].numpy().tolist()
    assert words[0] == words[1] and words[2] == words[3]
    np.testing.assert_array_equal(found["unknown_word"][2], found["unknown_word"][3])
    assert float(found["unknown_word"][2]) != float(found["unknown_word"][4])
    assert predict(texts=tf.constant([], tf.string))["words"].shape[0] == 0


def test_text_that_is_split_already_is_cut_at_spaces_only(tmp_path):
    words = vocabulary.Vocabulary((*toy_model.WORDS.words[:-1], "\ud83d"), "x", lower_case=False)
    run = toy_model.write(tmp_path / "run", words=words, is_tokenized=True)
    trained = trained_model.find(run).load()
    saved_model.write(tmp_path / "exported", trained)
    loaded = tf.saved_model.load(str(tmp_path / "exported"))
    texts = ["the front-end", "The front", "the front"]
    found = loaded.predict(tf.constant(texts), 2)
    for i, prediction in enumerate(trained.predict(texts, top=2)):
        np.testing.assert_allclose(
            found["probabilities"][i], [p for _, p in prediction.next_words], rtol=1e-4
        )
    assert loaded.signatures["serving_default"](tf.constant(texts))["words"].shape == [3, 7]


def test_it_says_where_its_words_are_from_and_not_who_wrote_it(exported):
    words, rule = vocabulary_file.read(exported / "assets.extra" / "vocabulary.json")
    assert words == toy_model.WORDS and not rule.is_tokenized
    assert b"PyFunc" not in (exported / "saved_model.pb").read_bytes()  # Nor does it need us.
    source = str(pathlib.Path(saved_model.__file__).parent).encode()
    for path in exported.rglob("*"):
        assert path.is_dir() or source not in path.read_bytes(), path


def test_what_is_there_is_left_alone(trained, exported, tmp_path):
    with pytest.raises(ValueError, match="there is no folder .*nowhere. Make it first"):
        saved_model.write(tmp_path / "nowhere" / "x", trained)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a").write_text("1")
    (tmp_path / "file").write_text("1")
    for name in ("mine", "file"):
        with pytest.raises(ValueError, match="is no SavedModel, so it is left alone"):
            saved_model.write(tmp_path / name, trained, overwrite=True)
    before = (exported / "saved_model.pb").read_bytes()
    with pytest.raises(ValueError, match="is a SavedModel already: add --overwrite"):
        saved_model.write(exported, trained)
    with pytest.raises(ValueError, match="top must be at least 1"):
        saved_model.write(exported, trained, top=0, overwrite=True)
    assert (exported / "saved_model.pb").read_bytes() == before


@pytest.mark.slow
def test_a_failure_leaves_the_one_before(trained, tmp_path, monkeypatch):
    folder = tmp_path / "exported"
    saved_model.write(folder, trained, top=3)
    before = {path: path.stat().st_ino for path in folder.rglob("*")}

    def disk_full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(vocabulary_file, "write", disk_full)
        with pytest.raises(OSError, match="No space left"):
            saved_model.write(folder, trained, top=2, overwrite=True)
    assert {path: path.stat().st_ino for path in folder.rglob("*")} == before
    assert list(tmp_path.iterdir()) == [folder]
    saved_model.write(folder, trained, top=2, overwrite=True)
    found = tf.saved_model.load(str(folder)).signatures["serving_default"](tf.constant(["the"]))
    assert found["words"].shape == [1, 2]
    assert list(tmp_path.iterdir()) == [folder]


def test_a_full_disk_is_one_line_and_leaves_nothing(disk, trained):
    disk.leave(1)
    with pytest.raises(OSError, match="No space left on device") as caught:
        saved_model.write(disk.folder / "exported", trained)
    assert "\n" not in str(caught.value)
    assert [path.name for path in disk.folder.iterdir()] == ["ballast"]


def _of_sub_words(folder, kind):
    text = user_text.UserText.from_mapping("book", {"a": ["the front end isn't at the end"] * 3})
    words = subword_learning.learn(text, 300, kind=kind, source="a book")
    model = word_lstm.WordLstm(words.size, sequence_length=4, embedding_size=3, state_size=5)
    rng = np.random.default_rng(3)
    drawn = [rng.normal(size=s).astype(np.float32) for s in model.weight_shapes.values()]
    return trained_model.find(toy_model.write(folder, words=words, model=model, last=drawn)).load()


@pytest.mark.parametrize("with_history", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_pieces_of_words_are_split_inside(tmp_path, with_history):
    trained = _of_sub_words(tmp_path / "run", "wordpiece")
    saved_model.write(tmp_path / "exported", trained, top=3, history=with_history)
    signatures = tf.saved_model.load(str(tmp_path / "exported")).signatures
    earlier = {"history": ["The front isn't", "at the end isn't the front"]} if with_history else {}
    texts = [*_TRICKY, *([] if earlier else _random_texts()[::5])]
    given = {
        key: tf.constant([text.encode() for text in value])
        for key, value in {"texts": texts, **earlier}.items()
    }
    found = signatures["with_history" if earlier else "serving_default"](**given)
    for i, prediction in enumerate(trained.predict(texts, top=3, **earlier)):
        ids = [trained.words.id_of[word.decode()] for word in found["words"][i].numpy()]
        shown = [trained.words.shown(index) for index in ids]
        assert shown == [word for word, _ in prediction.next_words], texts[i]


def test_other_sub_words_are_given_as_ids(tmp_path):
    trained = _of_sub_words(tmp_path / "run", "sentencepiece")
    saved_model.write(tmp_path / "exported", trained, top=3, history=True)
    loaded = tf.saved_model.load(str(tmp_path / "exported"))
    assert set(loaded.signatures) == {"serving_default", "ids", "ids_with_history"}
    words, rule = vocabulary_file.read(tmp_path / "exported" / "assets.extra" / "vocabulary.json")
    context = [words.bos, *words.ids(rule.words("end"))]
    row = (context + [0] * 4)[:4]
    history = ["the end isn't", "at the end"]
    known = [[words.bos, *words.ids(rule.words(text)), words.eos] for text in history]
    rows = tf.ragged.constant(known, dtype=tf.int32).to_tensor()
    for name, given, earlier in (
        ("serving_default", {}, {}),
        ("ids_with_history", {"history": rows}, {"history": history}),
    ):
        found = loaded.signatures[name](ids=tf.constant([row]), **given)
        (prediction,) = trained.predict(["end"], top=3, **earlier)
        shown = [words.shown(int(index)) for index in found["next_ids"][0]]
        assert shown == [word for word, _ in prediction.next_words]
        expected = [p for _, p in prediction.next_words]
        np.testing.assert_allclose(found["probabilities"][0], expected, rtol=1e-4)
        following = dict(zip(found["next_ids"][0].numpy().tolist(), expected, strict=True))
    assert max(following, key=following.get) == known[0][known[0].index(context[-1]) + 1]
