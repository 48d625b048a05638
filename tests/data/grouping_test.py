"""Tests of tff_dpftrl.data.grouping: the same corpus in memory and in a file."""

import gc
import os
import pickle
import random
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

from tff_dpftrl import durable_files
from tff_dpftrl.data import grouping, jsonl, sequences, sources, split, user_text, vocabulary

_RNG = random.Random(3)
_ROWS = [
    (f"user{_RNG.randrange(60)}", " ".join(_RNG.choices("abcdefgh", k=_RNG.randint(1, 30))) + "ü\n")
    for _ in range(900)
]


@pytest.fixture
def nothing_in_memory(monkeypatch):
    """Sends a corpus to a file after its first few texts."""
    monkeypatch.setattr(grouping, "_IN_MEMORY", 1000)


def _group(cache=grouping.TEMPORARY, rows=_ROWS, **options):
    groups = ((user, (text,)) for user, text in rows)
    return grouping.group(
        "c", groups, user_unit="one user", is_tokenized=False, cache=cache, **options
    )


def _texts(corpus):
    return {user: corpus.examples(user) for user in corpus.user_ids}


def _survey(corpus):
    words = vocabulary.Vocabulary(("a", "b", "c"), "test")
    return sequences.SequenceCorpus(corpus, words, sequences.SequenceSpec(7)).survey


def test_a_corpus_in_a_file_is_the_one_in_memory(tmp_path, monkeypatch):
    counts = []
    expected = _group(finish=lambda *found: counts.append(found))
    monkeypatch.setattr(grouping, "_IN_MEMORY", 1000)
    place = grouping.Cache(tmp_path / "private" / "texts.sqlite")
    stored = _group(place, finish=lambda *found: counts.append(found), fingerprint="f")
    assert place.path.stat().st_mode & 0o777 == 0o600
    assert place.path.parent.stat().st_mode & 0o777 == 0o700
    assert counts[0] == counts[1] and counts[0][1] == len(expected) == 60
    read = place.read("c", "f", False)
    for corpus in (stored, read, pickle.loads(pickle.dumps(stored))):
        assert corpus.user_ids == expected.user_ids
        assert _texts(corpus) == _texts(expected)
        assert corpus.user_unit == "one user"
        for part in ("train", "test"):
            ours, theirs = (getattr(split.by_user(c), part) for c in (corpus, expected))
            ours, theirs = _survey(ours), _survey(theirs)
            np.testing.assert_array_equal(ours.num_sequences, theirs.num_sequences)
            assert (ours.digest, ours.num_words) == (theirs.digest, theirs.num_words)
            assert ours.num_unknown == theirs.num_unknown
    assert place.read("c", "other", False) is None
    assert place.path.parent.joinpath("texts.sqlite-journal").exists() is False


def test_texts_are_read_by_several_threads(nothing_in_memory):
    corpus, found = _group(), []
    threads = [threading.Thread(target=lambda: found.append(_texts(corpus))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [_texts(corpus)] * 3


def test_a_survey_is_computed_once(nothing_in_memory, tmp_path, monkeypatch):
    place = grouping.Cache(tmp_path / "texts.sqlite")
    first = _survey(_group(place, fingerprint="f"))
    monkeypatch.setattr(sequences.SequenceCorpus, "_count", None)
    again = _survey(place.read("c", "f", False))
    assert again.digest == first.digest
    np.testing.assert_array_equal(again.num_sequences, first.num_sequences)
    users = first.num_sequences.shape[0]
    monkeypatch.undo()
    some = place.read("c", "f", False)
    assert len(_survey(some.select(some.user_ids[1:])).num_sequences) == users - 1


def test_repeated_texts_are_counted_by_user(nothing_in_memory):
    rows, counts = [*_ROWS, _ROWS[0], _ROWS[0], ("nobody", _ROWS[0][1])], []
    _group(rows=rows, finish=lambda *found: counts.append(found))
    assert counts == [(len(rows) - len(set(rows)), 61)]


def test_users_without_texts_and_half_characters_are_kept(nothing_in_memory, tmp_path):
    texts = {"a": ["x" * 2000, "\ud800"], "b": [], "c": ["y"]}
    groups = iter(texts.items())
    corpus = grouping.group("c", groups, user_unit="one user", is_tokenized=True)
    assert corpus.remember is not None and _texts(corpus) == texts


def test_a_temporary_file_goes_with_its_corpus(nothing_in_memory):
    corpus = _group()
    path = corpus.read_examples.__self__.path
    part = corpus.select(corpus.user_ids[:2])
    del corpus
    gc.collect()
    assert path.exists() and part.examples(part.user_ids[0])
    del part
    gc.collect()
    assert not path.parent.exists()


def test_an_error_while_reading_leaves_no_file(nothing_in_memory, tmp_path):
    def failing():
        yield from _ROWS
        raise ValueError("broken")

    def refuse(*found):
        raise ValueError("refused")

    place = grouping.Cache(tmp_path / "texts.sqlite")
    with pytest.raises(ValueError, match="broken"):
        _group(place, failing())
    with pytest.raises(ValueError, match="refused"):
        _group(place, finish=refuse)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"", b"no database", None])
def test_a_damaged_file_is_made_again(nothing_in_memory, tmp_path, content):
    place = grouping.Cache(tmp_path / "texts.sqlite")
    if content is None:
        sqlite3.connect(place.path).execute("CREATE TABLE about (name, value)")
    else:
        place.path.write_bytes(content)
    assert place.read("c", "f", False) is None
    assert _texts(_group(place)) == _texts(_group())


_KILLED = """
import sys
from tff_dpftrl.data import grouping
import pathlib, time

grouping._IN_MEMORY = 1000

def groups():
    for i in range(50_000):
        yield f"user{i % 100}", (f"text {i}",)
    print("writing", flush=True)
    time.sleep(60)

place = grouping.Cache(pathlib.Path(sys.argv[1]))
grouping.group("c", groups(), user_unit="u", is_tokenized=False, cache=place, fingerprint="f")
"""


def test_a_writer_that_is_killed_leaves_nothing_that_counts(nothing_in_memory, tmp_path):
    place = grouping.Cache(tmp_path / "texts.sqlite")
    command = [sys.executable, "-c", textwrap.dedent(_KILLED), str(place.path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as writer:
        assert writer.stdout.readline() == "writing\n"
        writer.send_signal(signal.SIGKILL)
    (leftover,) = tmp_path.iterdir()
    assert durable_files.is_leftover(leftover)  # A run removes it when it begins or goes on.
    assert place.read("c", "f", False) is None
    _group(place, fingerprint="f")
    assert _texts(place.read("c", "f", False)) == _texts(_group())


@pytest.mark.parametrize("form", ["t.csv", "t.jsonl"])
def test_a_table_is_read_again_if_it_or_the_options_changed(
    nothing_in_memory, tmp_path, monkeypatch, form
):
    path, place = tmp_path / form, grouping.Cache(tmp_path / "texts.sqlite")

    def write(rows):
        if form == "t.csv":
            lines = [f'{user},"{text}"' for user, text in rows]
            path.write_text("\n".join(["user,text", *lines]))
        else:
            jsonl.write(user_text.UserText.from_rows("c", rows), path)

    def read():
        said = []
        corpus = sources.load_user_text(str(path), cache=place, notice=said.append)
        return corpus, "as read before" in said[0] if said else False

    write(_ROWS)
    first, was_kept = read()
    assert not was_kept
    with monkeypatch.context() as patch:
        patch.setattr(grouping, "group", None)
        again, was_kept = read()
    assert was_kept and _texts(again) == _texts(first)
    write([*_ROWS, ("new", "text")])
    changed, was_kept = read()
    assert not was_kept and changed.examples("new") == ["text"]
    os.utime(path, ns=(1, time.time_ns()))
    assert not read()[1]
