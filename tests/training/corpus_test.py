"""Tests of tff_dpftrl.training.corpus."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tff_dpftrl.data import jsonl, subwords, tokenizer, vocabulary_file
from tff_dpftrl.data import vocabulary as vocabulary_lib
from tff_dpftrl.training import composed, corpus, language_config
from tff_dpftrl.training import config as config_lib


def _users(count=40):
    return {f"user{i}": ["the tests say so", f"word{i} the"] for i in range(count)}


def _write(path, users):
    rows = (json.dumps({"user_id": user, "examples": texts}) for user, texts in users.items())
    path.write_text("\n".join(rows) + "\n")
    return path


def _read(data, **options):
    vocabulary = data.with_name("words.txt")
    vocabulary.write_text("the\ntests\n")
    defaults = {"data": str(data), "vocabulary": str(vocabulary), "mechanism": "none"}
    config = config_lib.TrainingConfig.of(**defaults | options)
    return corpus.read(config.part(corpus.TextOptions))


def test_text_in_memory_is_not_called_the_docstrings(tmp_path):
    text = _read(_write(tmp_path / "c.jsonl", _users()))
    with pytest.raises(ValueError, match="c.jsonl', but data is 'docs' .*: set data to the name"):
        corpus.check_named(language_config.TextConfig.data, text.train)
    corpus.check_named("mine", text.train)


def test_a_run_may_take_the_words_of_ordinary_english(tmp_path):
    data = _write(tmp_path / "c.jsonl", _users())
    found = _read(data, vocabulary="english", vocabulary_size=50).words
    assert len(found.words) == 50 and found.source == vocabulary_lib.ENGLISH
    # No file of this name.
    assert composed.absolute_path("vocabulary", "english") == "english"


@pytest.mark.parametrize("is_public", [True, False])
def test_the_words_of_a_model_are_what_its_file_says(tmp_path, is_public):
    data = _write(tmp_path / "c.jsonl", _users())
    words = vocabulary_lib.Vocabulary(("tests", "the", "say"), "somewhere", True, is_public)
    path = tmp_path / vocabulary_file.NAME
    vocabulary_file.write(path, words, tokenizer.Tokenizer(True, False))
    assert _read(data, vocabulary=str(path), vocabulary_size=None).words == words
    assert _read(data, vocabulary=str(path), vocabulary_size=2).words.words == ("tests", "the")
    with pytest.raises(ValueError, match="lower_case must be true with .*vocabulary.json"):
        _read(data, vocabulary=str(path), lower_case=False)


def _read_with_noise(tmp_path, users, **options):
    data = _write(tmp_path / "c.jsonl", users)
    return _read(
        data,
        **{
            "vocabulary": "dp",
            "base_vocabulary": str(data.with_name("words.txt")),
            "vocabulary_size": 3,
            "mechanism": "blt",
            "target_epsilon": 50.0,
            "delta": 1e-3,
            "deterministic_noise_seed": 1,
        }
        | options,
    )


def test_words_of_users_are_added_with_the_noise_of_their_share(tmp_path):
    users = {user: [*texts, "often often"] for user, texts in _users(200).items()}
    found = _read_with_noise(tmp_path, users).words
    # The first half of the public words, and then what many users have; none that one user has.
    assert found.words[0] == "the" and found.is_noised and not found.is_public
    assert set(found.words) < {"the", "tests", "often", "say", "so"}
    assert found == _read_with_noise(tmp_path, users).words
    assert found != _read_with_noise(tmp_path, users, deterministic_noise_seed=2).words
    alone = _read_with_noise(tmp_path, users, base_vocabulary="none", vocabulary_size=9).words
    assert set(alone.words) == {"the", "tests", "often", "say", "so", "word"}


def test_a_check_of_the_text_counts_nothing(tmp_path):
    data = str(tmp_path / "c.jsonl")
    options = {"data": data, "vocabulary": "dp", "target_epsilon": 1.0}
    for base, words in (("none", "docs"), ("english", "english")):
        config = config_lib.TrainingConfig.of(base_vocabulary=base, **options)
        checked = config.part(corpus.TextOptions).without_noise()
        assert (checked.vocabulary, checked.data) == (words, data)
        other = config.changed(target_epsilon=2.0, delta=1e-7)
        assert other.part(corpus.TextOptions).without_noise() == checked


def test_a_list_that_is_not_public_is_no_base(tmp_path):
    words = vocabulary_lib.Vocabulary(("a", "b"), "users", is_public=False)
    path = tmp_path / vocabulary_file.NAME
    vocabulary_file.write(path, words, tokenizer.Tokenizer())
    with pytest.raises(ValueError, match="base_vocabulary .* is counted on users of another run"):
        _read_with_noise(tmp_path, _users(), base_vocabulary=str(path))
    with pytest.raises(ValueError, match="c.jsonl' is the file of the users to be protected"):
        _read_with_noise(tmp_path, _users(), base_vocabulary=str(tmp_path / "c.jsonl"))


def test_counts_of_a_task_are_a_vocabulary(tmp_path):
    counts = tmp_path / "counts.csv"
    counts.write_text(
        "histogram,bucket,estimate,standard_error,share\nwords,the,1,1,\nwords,say,9,1,\n"
    )
    data = _write(tmp_path / "c.jsonl", _users())
    found = _read(data, vocabulary=str(counts)).words
    assert found.words == ("say", "the") and found.is_noised
    with pytest.raises(ValueError, match="has counts of words, and tokenizer 'wordpiece'"):
        _read(data, vocabulary=str(counts), tokenizer="wordpiece")


@pytest.mark.parametrize("texts", [[], [""], [" \n\t"]])
def test_a_corpus_without_text_is_not_called_too_small(tmp_path, texts):
    data = _write(tmp_path / "c.jsonl", {f"user{i}": texts for i in range(100)})
    for vocabulary in ("private", "docs"):
        with pytest.raises(ValueError, match="has 100 users, none of them has a text with a word"):
            _read(data, vocabulary=vocabulary)


def test_who_has_no_text_is_said(tmp_path):
    users = _users()
    built = _read(_write(tmp_path / "c.jsonl", users))
    train = set(built.train.user_ids)
    silent = {user: [] if user in train else texts for user, texts in users.items()}
    with pytest.raises(ValueError, match=rf"has {len(train)} users to train on, none of them has"):
        _read(_write(tmp_path / "c.jsonl", silent))
    silent = {user: texts if user in train else [] for user, texts in users.items()}
    with pytest.raises(ValueError, match="users to hold out for evaluation, none of them has"):
        _read(_write(tmp_path / "c.jsonl", silent))


def test_all_users_but_those_held_out_can_be_trained_on(tmp_path):
    data = _write(tmp_path / "c.jsonl", _users())
    usual, more = _read(data), _read(data, train_on_test_users=True)
    assert usual.num_untouched > 0 == more.num_untouched
    assert more.held_out.user_ids == usual.held_out.user_ids
    assert len(more.train) == len(usual.train) + usual.num_untouched
    assert set(more.train.user_ids) == set(_users()) - set(usual.held_out.user_ids)
    in_order = [user for user in _users() if user in set(more.train.user_ids)]
    assert list(more.train.user_ids) == in_order
    assert len(_read(data, train_on_test_users=True, max_users=7).train) == 7


def test_too_few_users_are_counted(tmp_path):
    built = _read(_write(tmp_path / "c.jsonl", _users()))
    train = dict.fromkeys(built.train.user_ids[:3], ["the tests"])
    with pytest.raises(ValueError, match="too few users, 3: .* none to hold out for evaluation"):
        _read(_write(tmp_path / "c.jsonl", train))
    others = [user for user in _users() if user not in built.train.user_ids]
    with pytest.raises(ValueError, match=f"too few users, {len(others)}: .* none to train on"):
        _read(_write(tmp_path / "c.jsonl", dict.fromkeys(others, ["the tests"])))


def test_the_protected_text_is_no_public_vocabulary(tmp_path):
    users = {u: [f"what {u} says, and nobody else"] for u in _users()}
    data = _write(tmp_path / "c.jsonl", users)
    link, copy = tmp_path / "link.jsonl", tmp_path / "copy.txt"
    link.symlink_to(data)
    copy.write_bytes(data.read_bytes())
    for path in (data, link, copy, tmp_path / "sub" / ".." / "c.jsonl"):
        (tmp_path / "sub").mkdir(exist_ok=True)
        with pytest.raises(ValueError, match="is the file of the users to be protected"):
            _read(data, vocabulary=str(path))
    jsonl.write(jsonl.read(data), tmp_path / "c.jsonl.gz")
    with pytest.raises(ValueError, match="cannot be public: it has the texts of"):
        _read(data, vocabulary=str(tmp_path / "c.jsonl.gz"))
    private = _read(data, vocabulary="private")
    assert "NOT covered" in private.words.source
    others = _write(tmp_path / "others.jsonl", {"a": ["the tests"], "b": ["others say"]})
    assert "declared public" in _read(data, vocabulary=str(others)).words.source


@pytest.mark.parametrize("option", ["vocabulary", "base_vocabulary"])
def test_text_of_protected_held_out_users_is_no_public_vocabulary(tmp_path, option):
    users = {u: [f"what {u} says, and nobody else"] for u in _users()}
    data = _write(tmp_path / "c.jsonl", users)
    held_out = _read(data).held_out.user_ids
    public = _write(tmp_path / "p.jsonl", {u: users[u] for u in held_out})
    options = {option: str(public)}
    if option == "base_vocabulary":
        options |= {"vocabulary": "dp", "mechanism": "blt", "target_epsilon": 8.0}
    assert _read(data, **options).words.words  # They may be published.
    message = f"has the texts of {len(held_out)} of the .* users of .*c.jsonl who are to be prot"
    with pytest.raises(ValueError, match=message):
        _read(data, held_out_users="protected", **options)
    words = _read(data, vocabulary="private", held_out_users="protected").words.words
    assert not set(held_out) & set(words)  # They are not counted.


def test_files_are_read_without_tensorflow(tmp_path):
    data = _write(tmp_path / "c.jsonl", _users())
    program = f"""
import sys
from tff_dpftrl.training import config, corpus
options = {{"data": {str(data)!r}, "vocabulary": "private", "mechanism": "none"}}
options = config.TrainingConfig.of(**options).part(corpus.TextOptions)
assert len(corpus.read(options).train) > 20
assert "tensorflow" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.parametrize("kind", ["wordpiece", "sentencepiece"])
def test_sub_words_are_learned_on_the_vocabulary(tmp_path, kind):
    data = _write(tmp_path / "c.jsonl", _users())
    public = {f"other{i}": ["plans of the public", "a planned plan"] for i in range(20)}
    named = {"vocabulary": str(_write(tmp_path / "public.jsonl", public)), "vocabulary_size": 330}
    words = _read(data, tokenizer=kind, **named).words
    assert isinstance(words, subwords.Subwords) and words.kind == kind
    assert words.is_public and words.source == (
        "counted on public.jsonl, declared public by the operator"
    )
    rule = words.rule()
    assert len(rule.words("planned")) < 4 < len(rule.words("dobulet"))
    path = tmp_path / vocabulary_file.NAME
    vocabulary_file.write(path, words, rule)
    again = {"vocabulary": str(path), "vocabulary_size": None}
    assert _read(data, **again).words == _read(data, tokenizer=kind, **again).words == words
    with pytest.raises(ValueError, match=f"tokenizer must be '{kind}' with .*got 'words'"):
        _read(data, tokenizer="words", **again)
    with pytest.raises(ValueError, match="vocabulary_size must be left out"):
        _read(data, vocabulary=str(path), vocabulary_size=7)
    with pytest.raises(ValueError, match="lower_case must be true with"):
        _read(data, lower_case=False, **again)


def test_sub_words_of_the_users_are_not_covered(tmp_path):
    data = _write(tmp_path / "c.jsonl", _users())
    words = _read(data, tokenizer="wordpiece", vocabulary="private", vocabulary_size=80).words
    assert not words.is_public and "NOT covered" in words.source


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocabulary": "english"}, "'english' is a list of words, and tokenizer 'wordpiece'"),
        ({}, "words.txt is a list of words, and sub-words are learned on text"),
        ({"vocabulary": "private", "vocabulary_size": 5}, "vocabulary_size must be more than"),
        ({"tokenizer": "checkpoint"}, "must be a tokenizer.json with tokenizer 'checkpoint'"),
        ({"tokenizer": "checkpoint", "vocabulary": None}, "needs a tokenizer: name the tokenizer"),
    ],
)
def test_sub_words_that_cannot_be_are_refused(tmp_path, options, message):
    data = _write(tmp_path / "c.jsonl", _users())
    with pytest.raises(ValueError, match=message):
        _read(data, **{"tokenizer": "wordpiece", **options})
