"""Tests of vocabularies of sub-words."""

import json
import pathlib
import sys

import numpy as np
import pytest

from tests.data import random_texts
from tff_dpftrl import validation
from tff_dpftrl.data import (
    sequences,
    subword_learning,
    subwords,
    user_text,
    vocabulary,
    vocabulary_file,
)

tokenizers = pytest.importorskip("tokenizers")

_TEXTS = ["the plan of the day", "Then they planned another day.", "day by day, plan by plan"] * 5


def byte_level(
    folder: pathlib.Path, end: str | None = "<|endoftext|>", size: int = 300
) -> pathlib.Path:
    """Writes a small tokenizer like GPT-2's, and returns its path."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[end] if end else [],
        show_progress=False,
    )
    library.train_from_iterator(_TEXTS, trainer)
    folder.mkdir(exist_ok=True, parents=True)
    library.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_ids_are_the_librarys_and_one(tmp_path: pathlib.Path):
    path = byte_level(tmp_path)
    words, rule = vocabulary_file.read(path)
    library = tokenizers.Tokenizer.from_file(str(path))
    for text in random_texts.strings(2000):
        ids = words.ids(rule.words(text))
        assert ids == [i + 1 for i in library.encode(text).ids], text
        assert words.text(ids) == text
    assert words.size == library.get_vocab_size() + 1
    assert words.oov is None
    assert words.bos == words.eos == library.token_to_id("<|endoftext|>") + 1


def test_a_text_has_the_same_tokens_each_time(tmp_path: pathlib.Path):
    """Dropout of BPE would give a repeated step other tokens."""
    path = byte_level(tmp_path)
    plain = subwords.read(path)
    content = json.loads(path.read_text())
    content["model"]["dropout"] = 0.5
    path.write_text(json.dumps(content), encoding="utf-8-sig")
    with pytest.warns(UserWarning, match="splits text at random .dropout 0.5.*: it is off"):
        found = subwords.read(path)
    text = "lower lowest newest" * 9
    assert found.rule().words(text) == plain.rule().words(text)


def test_special_tokens_in_a_text_are_letters(tmp_path: pathlib.Path):
    words, rule = vocabulary_file.read(byte_level(tmp_path))
    ids = words.ids(rule.words("a<|endoftext|>b"))
    assert words.eos not in ids
    assert words.text(ids) == "a<|endoftext|>b"


def test_half_a_character_is_a_replacement(tmp_path: pathlib.Path):
    words, rule = vocabulary_file.read(byte_level(tmp_path))
    assert words.text(words.ids(rule.words("a\ud800b"))) == "a\ufffdb"


def test_names_of_special_tokens_are_read_beside_the_file(tmp_path: pathlib.Path):
    path = byte_level(tmp_path)
    named = {"eos_token": {"content": "!"}, "bos_token": "?"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    words = subwords.read(path)
    assert (words.beginning, words.end) == ("?", "!")
    assert words.bos != words.eos


def test_a_tokenizer_may_be_larger_than_a_config(tmp_path: pathlib.Path):
    path = byte_level(tmp_path)
    words = subwords.read(path)
    path.write_text(path.read_text() + " " * (1 << 25))
    assert subwords.read(path).words == words.words


def test_a_file_without_an_end_is_refused(tmp_path: pathlib.Path):
    path = byte_level(tmp_path, end=None)
    with pytest.raises(validation.UsageError, match=r"no token that ends a text.*eos_token"):
        subwords.read(path)


_NO_UNKNOWN = '{"model": {"type": "Unigram", "unk_id": 5, "vocab": []}}'
# The library of tokenizers panics: a token is shorter than the prefix of all but the first.
_PANIC = (
    '{"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]], '
    '"continuing_subword_prefix": "long"}}'
)


@pytest.mark.parametrize(
    "content", ["{", "{}", "[]", '"x"', '{"model": {"type": "Magic"}}', _NO_UNKNOWN, _PANIC]
)
def test_damaged_files_are_refused(tmp_path: pathlib.Path, content: str):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(validation.UsageError, match="tokenizer.json (cannot be read|is no JSON)"):
        subwords.read(tmp_path / "tokenizer.json")


def test_vocabulary_file_has_the_whole_tokenizer(tmp_path: pathlib.Path):
    words = subwords.read(byte_level(tmp_path / "gpt2-like"))
    vocabulary_file.write(tmp_path / "vocabulary.json", words, words.rule())
    read, rule = vocabulary_file.read(tmp_path / "vocabulary.json")
    assert read == words
    assert rule == words.rule()
    assert "gpt2-like" in read.source
    assert read.is_public


@pytest.mark.parametrize(
    ("name", "value"),
    [("kind", "magic"), ("tokenizer", {}), ("end", 3), ("end", "no token"), ("is_public", "yes")],
)
def test_damaged_vocabulary_files_are_refused(tmp_path: pathlib.Path, name: str, value: object):
    words = subwords.read(byte_level(tmp_path))
    path = tmp_path / "vocabulary.json"
    vocabulary_file.write(path, words, words.rule())
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(validation.UsageError):
        vocabulary_file.read(path)


def test_sequences_begin_and_end_with_the_special_token(tmp_path: pathlib.Path):
    words = subwords.read(byte_level(tmp_path))
    corpus = user_text.UserText.from_mapping("plans", {"a": ["The plan 🙂"], "b": [""]})
    encoded = sequences.SequenceCorpus(corpus, words, sequences.SequenceSpec(30))
    (row,) = encoded.sequences("a")
    length = int(np.count_nonzero(row))
    assert row[0] == row[length - 1] == words.eos
    assert words.text(row.tolist()) == "The plan 🙂"
    assert encoded.survey.num_words == length - 2
    assert encoded.survey.num_unknown == 0
    assert len(encoded.sequences("b")) == 0


def test_words_have_the_same_interface():
    words = vocabulary.Vocabulary(("the", "plan"), "made up")
    assert words.rule().words("The plan") == ["the", "plan"]
    assert words.text([words.bos, 1, 2, words.oov, words.eos, 0]) == "the plan"
    assert words.shown(2) == "plan"


def test_an_end_that_the_file_does_not_call_special_is_letters_in_a_text(tmp_path: pathlib.Path):
    path = byte_level(tmp_path)
    content = json.loads(path.read_text())
    content["added_tokens"][0]["special"] = False
    path.write_text(json.dumps(content))
    words = subwords.read(path)
    assert words.eos not in words.ids(words.rule().words("a<|endoftext|>b"))


def test_an_empty_unknown_token_is_none(tmp_path: pathlib.Path):
    path = byte_level(tmp_path)
    content = json.loads(path.read_text())
    content["model"]["unk_token"] = ""
    path.write_text(json.dumps(content))
    assert subwords.read(path).oov is None


def test_unigrams_have_their_unknown_token(tmp_path: pathlib.Path):
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("a", -1.0), ("ab", -1.5)]
    library = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=0))
    library.save(str(tmp_path / "tokenizer.json"))
    words = subwords.read(tmp_path / "tokenizer.json")
    assert words.ids(words.rule().words("abza")) == [4, words.oov, 3]


def test_without_the_package_one_line_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    corpus = user_text.UserText.from_mapping("plans", {"a": ["The plan"]})
    with pytest.raises(validation.UsageError, match="needs tokenizers, which is not"):
        subword_learning.learn(corpus, 600, kind="wordpiece", source="plans")
