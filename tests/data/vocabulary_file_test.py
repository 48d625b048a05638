"""Tests of tff_dpftrl.data.vocabulary_file."""

import dataclasses
import json

import pytest

from tff_dpftrl.data import tokenizer, user_text, vocabulary, vocabulary_file

_WORDS = vocabulary.Vocabulary(("the", "don't", "中文", "ß", "\ud83d", "\x00"), "a book")


@pytest.mark.parametrize("is_tokenized", [True, False])
def test_it_comes_back_as_it_was(tmp_path, is_tokenized):
    for words in (_WORDS, dataclasses.replace(_WORDS, word_rule=tokenizer.NO_MARKS)):
        rule = words.rule(is_tokenized)
        vocabulary_file.write(tmp_path / "v.json", words, rule)
        assert vocabulary_file.read(tmp_path / "v.json") == (words, rule)
    assert [path.name for path in tmp_path.iterdir()] == ["v.json"]
    ids = json.loads((tmp_path / "v.json").read_text())["ids"]
    assert list(ids.values()) == [0, 1, 7, 8, 9]


def test_a_file_of_an_earlier_version_keeps_its_rule(tmp_path):
    path = tmp_path / "v.json"
    vocabulary_file.write(path, _WORDS, _WORDS.rule())
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 1}))
    words, rule = vocabulary_file.read(path)
    assert words.word_rule == tokenizer.NO_MARKS and rule.words("में") == ["म", "\u0947", "\u0902"]


def test_words_of_protected_users_are_marked(tmp_path):
    corpus = user_text.UserText.from_mapping("m", {"u": ["Anna's secret"], "v": ["b"]})
    words = vocabulary.of_training_users(corpus, 5, lower_case=False)
    for name, found in (("private", words), ("public", _WORDS)):
        rule = tokenizer.Tokenizer(found.lower_case)
        vocabulary_file.write(tmp_path / name, found, rule)
        assert vocabulary_file.read(tmp_path / name) == (found, rule)
    private, public = (json.loads((tmp_path / n).read_text()) for n in ("private", "public"))
    assert not private["is_public"] and "do not publish this file" in private["note"]
    assert public["is_public"] and "do not publish" not in public["note"]


def test_words_counted_with_noise_are_marked(tmp_path):
    words = vocabulary.Vocabulary(("a", "b"), "somewhere", is_public=False, is_noised=True)
    vocabulary_file.write(tmp_path / "v.json", words, tokenizer.Tokenizer())
    assert vocabulary_file.read(tmp_path / "v.json")[0] == words
    content = json.loads((tmp_path / "v.json").read_text())
    assert "do not publish" not in content["note"] and "with noise" in content["note"]
    (tmp_path / "v.json").write_text(json.dumps(content | {"is_noised": "false"}))
    with pytest.raises(ValueError, match="'is_noised' must be true or false, got 'false'"):
        vocabulary_file.read(tmp_path / "v.json")
    # Files of others are as they were.
    vocabulary_file.write(tmp_path / "v.json", _WORDS, tokenizer.Tokenizer())
    assert "is_noised" not in json.loads((tmp_path / "v.json").read_text())


def test_a_rule_that_does_not_fit_the_words_is_refused(tmp_path):
    for rule in (tokenizer.Tokenizer(lower_case=False), tokenizer.Tokenizer(version=1)):
        with pytest.raises(ValueError, match="rule must be that of the words"):
            vocabulary_file.write(tmp_path / "v.json", _WORDS, rule)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "cannot be read as a vocabulary"),
        ("[1]", "cannot be read as a vocabulary"),
        ('{"format": 1}', "KeyError"),
        ({"words": "the"}, "'words' is no list of strings"),
        ({"words": ["a", 3]}, "'words' is no list of strings"),
        ({"words": ["a", "a"]}, "must be distinct"),
        ({"format": 7}, "of format 7, and this version"),
        ({"format": "sub-words 3", "tokenizer": {}}, "of format 'sub-words 3', and this version"),
    ],
)
def test_other_files_are_refused(tmp_path, content, message):
    path = tmp_path / "v.json"
    if isinstance(content, dict):
        vocabulary_file.write(path, _WORDS, tokenizer.Tokenizer())
        content = json.dumps(json.loads(path.read_text()) | content)
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        vocabulary_file.read(path)
    with pytest.raises(ValueError, match="none.json cannot be read"):
        vocabulary_file.read(tmp_path / "none.json")


@pytest.mark.parametrize("name", ["is_public", "lower_case", "is_tokenized"])
@pytest.mark.parametrize("flag", ["false", 0, None])
def test_a_flag_of_another_type_is_not_taken_for_a_yes(tmp_path, name, flag):
    path = tmp_path / "vocabulary.json"
    words = vocabulary.Vocabulary(("a", "b"), "text", lower_case=True, is_public=False)
    vocabulary_file.write(path, words, tokenizer.Tokenizer(True))
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {name: flag}))
    with pytest.raises(ValueError, match=f"'{name}' must be true or false, got {flag!r}"):
        vocabulary_file.read(path)
