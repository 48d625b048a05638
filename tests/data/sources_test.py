"""Tests of tff_dpftrl.data.sources."""

import gzip
import pathlib
import sqlite3

import pytest

from tff_dpftrl.data import jsonl, sources, user_text


@pytest.mark.parametrize("name", ["c.jsonl", "c.jsonl.gz"])
def test_jsonl_is_recognised(tmp_path, name):
    jsonl.write(user_text.UserText.from_mapping("m", {"a": ["x"], "b": []}), tmp_path / name)
    assert sources.load_user_text(str(tmp_path / name)).user_ids == ("a", "b")


def test_sqlite_is_recognised(tmp_path):
    connection = sqlite3.connect(tmp_path / "c.sqlite")
    connection.execute("CREATE TABLE client_metadata (client_id TEXT, split_name TEXT)")
    connection.executemany("INSERT INTO client_metadata VALUES (?, 'train')", [("b",), ("a",)])
    connection.commit()
    connection.close()
    assert sources.load_user_text(str(tmp_path / "c.sqlite")).user_ids == ("a", "b")


def test_the_same_text_is_recognised_by_name_and_as_a_copy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, texts in (("one", ["x"]), ("copy", ["x"]), ("other", ["y"])):
        corpus = user_text.UserText.from_mapping("m", {"a": texts, "b": []})
        jsonl.write(corpus, tmp_path / f"{name}.jsonl")
    for other in ("one.jsonl", str(tmp_path / "one.jsonl"), "copy.jsonl"):
        assert sources.share_texts("one.jsonl", other)
    assert sources.share_texts("docs", "docs")
    for other in ("other.jsonl", "nowhere.jsonl", "docs", ""):
        assert not sources.share_texts("one.jsonl", other)


def test_texts_of_a_protected_user_are_recognised_in_any_file(tmp_path):
    long = [f"a sentence of the {i}th kind that nobody else would write" for i in range(3)]
    users = {"ann": long, "bob": ["short", "thanks"], "cy": []}

    def written(name, texts):
        jsonl.write(user_text.UserText.from_mapping("m", texts), tmp_path / name)
        return str(tmp_path / name)

    protected = written("protected.jsonl", users)
    compressed = tmp_path / "compressed.jsonl.gz"
    compressed.write_bytes(gzip.compress(pathlib.Path(protected).read_bytes()))
    same = [
        str(compressed),
        written("renamed.jsonl", {"x": long[::-1], "y": ["other text"]}),
        written("one_text.jsonl", {"ann": ["other", long[1].upper()], "y": ["other text"]}),
    ]
    assert [sources.share_texts(file, protected) for file in same] == [True] * 3
    others = [
        written("by_chance.jsonl", {"x": ["short", "Thanks"], "y": [long[0]]}),
        str(tmp_path / "empty.jsonl"),
    ]
    (tmp_path / "empty.jsonl").write_text("")
    assert [sources.share_texts(file, protected) for file in others] == [False] * 2


def test_options_that_do_not_apply_are_refused(tmp_path):
    jsonl.write(user_text.UserText.from_mapping("m", {"a": ["x"], "b": []}), tmp_path / "c.jsonl")
    data = str(tmp_path / "c.jsonl")
    assert sources.load_user_text(data, pretokenized=True).is_tokenized
    assert not sources.load_user_text(data).is_tokenized
    with pytest.raises(ValueError, match="sqlite_text_feature applies to SQLite files only"):
        sources.load_user_text(data, sqlite_text_feature="body")
    with pytest.raises(ValueError, match="sqlite_split applies to SQLite files only"):
        sources.load_user_text("docs", sqlite_split="train")
    with pytest.raises(ValueError, match="pretokenized applies to files only"):
        sources.load_user_text("docs", pretokenized=True)


@pytest.mark.parametrize("spec", ["", "doc", "text.txt", "folder/"])
def test_other_data_are_refused(spec):
    with pytest.raises(ValueError, match="data must be 'docs' or files.* that end in .csv"):
        sources.load_user_text(spec)


def test_a_missing_file_is_named():
    with pytest.raises(ValueError, match="nowhere.jsonl.gz: cannot be read: No such file"):
        sources.load_user_text("nowhere.jsonl.gz")
