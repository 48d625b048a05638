"""Tests of tff_dpftrl.data.jsonl."""

import gzip
import json
import pathlib
import subprocess
import sys

import pytest

from tff_dpftrl.data import jsonl, user_text

_GOOD = b'{"user_id": "a", "examples": ["one", "two"]}\n'


def test_reads_plain_and_compressed(tmp_path):
    content = _GOOD + '\n{"user_id": "ü", "examples": [], "note": 1}'.encode()
    plain, packed = tmp_path / "c.jsonl", tmp_path / "c.jsonl.gz"
    plain.write_bytes(content)
    packed.write_bytes(gzip.compress(content))
    for path in (plain, str(packed)):
        corpus = jsonl.read(path)
        assert corpus.user_ids == ("a", "ü")
        assert corpus.examples("a") == ["one", "two"]
        assert corpus.name == str(path)


def test_what_was_written_is_read(tmp_path):
    corpus = user_text.UserText.from_mapping("m", {"z": ["ü\n…", ""], "a": ["x"]})
    for name in ("c.jsonl", "deep/er/c.jsonl.gz"):
        path = tmp_path / name
        jsonl.write(corpus, path)
        jsonl.write(corpus, path)
        again = jsonl.read(path)
        assert {user: again.examples(user) for user in again.user_ids} == {
            "z": ["ü\n…", ""],
            "a": ["x"],
        }
        assert again.user_ids == corpus.user_ids
        assert [entry.name for entry in path.parent.glob("*.partial")] == []


def test_a_failed_write_leaves_nothing(tmp_path):
    def read_examples(user_id):
        raise ValueError("cannot read")

    corpus = user_text.UserText("broken", "one user", ("a", "b"), read_examples)
    with pytest.raises(ValueError, match="cannot read"):
        jsonl.write(corpus, tmp_path / "c.jsonl")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not JSON"),
        (b"\xff", "not UTF-8|not JSON"),
        (b'{"user_id": "\xff", "examples": []}', "not UTF-8"),
        (b"[]", "must be an object .* got list"),
        (b'{"examples": []}', "user_id must be a string, got None"),
        (b'{"user_id": "", "examples": []}', "without a user"),
        (b'{"user_id": " ", "examples": []}', "without a user"),
        (b'{"user_id": "b\\u0000", "examples": []}', "NUL character in the id of the user"),
        (b'{"user_id": "b\\ud800", "examples": []}', "lone surrogate"),
        (b'{"user_id": "b", "examples": ["x", "\\ud800"]}', "lone surrogate"),
        (b'{"user_id": 3, "examples": []}', "got 3"),
        (b'{"user_id": "b"}', "examples must be a list of strings, got 'None'"),
        (b'{"user_id": "b", "examples": "text"}', "got 'text'"),
        (b'{"user_id": "b", "examples": ["x", null]}', "list of strings"),
        (b'{"user_id": "b", "examples": ["x", "\\u0000"]}', "with a NUL character in the text"),
        (b'{"user_id": "a", "examples": []}', "user_id 'a' was already on line 1"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "c.jsonl"
    path.write_bytes(_GOOD + b"\n" + line + b"\n")
    with pytest.raises(ValueError, match=message) as error:
        jsonl.read(path)
    assert str(error.value).startswith(f"{path}:3: ")
    assert "\n" not in str(error.value)


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(ValueError, match="none.jsonl: cannot be read: No such file"):
        jsonl.read(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="cannot be read"):
        jsonl.read(tmp_path)
    (tmp_path / "plain.jsonl.gz").write_bytes(_GOOD)
    with pytest.raises(ValueError, match="plain.jsonl.gz: cannot be read: Not a gzipped"):
        jsonl.read(tmp_path / "plain.jsonl.gz")


def test_a_truncated_file_is_not_read_in_part(tmp_path):
    rows = b"".join(
        json.dumps({"user_id": str(i), "examples": [str(i * 7919)]}).encode() + b"\n"
        for i in range(5000)
    )
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(gzip.compress(rows)[:-100])
    with pytest.raises(ValueError, match=r"after line \d+: cannot be read"):
        jsonl.read(path)


@pytest.mark.parametrize(
    ("content", "message"), [(b"", "empty"), (b"\n \n", "empty"), (_GOOD, "single")]
)
def test_a_corpus_needs_two_users(tmp_path, content, message):
    path = tmp_path / "c.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        jsonl.read(path)


def test_it_does_not_import_tensorflow():
    modules = "jsonl, docstrings, vocabulary, sequences, split, sqlite, sources, tokenizer"
    program = (
        f"import sys; from tff_dpftrl.data import {modules}; sys.exit('tensorflow' in sys.modules)"
    )
    root = pathlib.Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", program], cwd=root).returncode == 0
