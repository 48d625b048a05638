"""Tests of tff_dpftrl.data.sqlite, on files in TFF's Stack Overflow schema."""

import collections
import sqlite3

import pytest
import tensorflow as tf

from tff_dpftrl.data import sqlite


def _write(path, rows, feature="tokens"):
    """Writes (client, split, text) rows in the layout of TFF's SqlClientData."""
    connection = sqlite3.connect(path)
    connection.execute(
        "CREATE TABLE examples (split_name TEXT, client_id TEXT, serialized_example_proto BLOB)"
    )
    connection.execute(
        "CREATE TABLE client_metadata (client_id TEXT, split_name TEXT, num_examples INTEGER)"
    )
    for client, split_name, text in rows:
        features = {
            feature: tf.train.Feature(bytes_list=tf.train.BytesList(value=[text])),
            "score": tf.train.Feature(int64_list=tf.train.Int64List(value=[1])),
        }
        for other in ("creation_date", "tags", "title", "type"):
            features[other] = tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"x"]))
        proto = tf.train.Example(features=tf.train.Features(feature=features))
        connection.execute(
            "INSERT INTO examples VALUES (?, ?, ?)", (split_name, client, proto.SerializeToString())
        )
    for (client, split_name), count in collections.Counter(row[:2] for row in rows).items():
        connection.execute(
            "INSERT INTO client_metadata VALUES (?, ?, ?)", (client, split_name, count)
        )
    connection.commit()
    connection.close()


@pytest.fixture(name="stack_overflow")
def _stack_overflow(tmp_path):
    """A file like TFF's synthetic Stack Overflow, and what it should read as."""
    expected = {
        f"synthetic_{client}": [f"question {client}, part {part} ?" for part in range(client + 1)]
        for client in range(1, 4)
    }
    rows = [
        (client, "test" if index else "train", text.encode())
        for client, texts in expected.items()
        for index, text in enumerate(texts)
    ]
    path = tmp_path / "stackoverflow.sqlite"
    _write(path, rows)
    return path, expected


def test_reads_all_splits_of_stack_overflow(stack_overflow):
    path, expected = stack_overflow
    corpus = sqlite.read(path)
    assert list(corpus.user_ids) == sorted(expected)
    assert {user: corpus.examples(user) for user in corpus.user_ids} == expected
    assert not corpus.is_tokenized
    assert sqlite.read(path, is_tokenized=True).is_tokenized


def test_reads_one_split(stack_overflow):
    path, expected = stack_overflow
    corpus = sqlite.read(path, split_name="train")
    assert {user: corpus.examples(user) for user in corpus.user_ids} == {
        user: texts[:1] for user, texts in expected.items()
    }
    assert "train" in corpus.name
    with pytest.raises(
        ValueError, match="no clients in the split 'heldout'; its splits are test, train"
    ):
        sqlite.read(path, split_name="heldout")


def test_agrees_with_tffs_own_reader(stack_overflow):
    tff = pytest.importorskip("tensorflow_federated", reason="compares with TFF")
    path, _ = stack_overflow
    corpus = sqlite.read(path)
    theirs = tff.simulation.datasets.SqlClientData(str(path))
    assert list(corpus.user_ids) == theirs.client_ids
    for client in theirs.client_ids:
        protos = theirs.create_tf_dataset_for_client(client).as_numpy_iterator()
        texts = [
            tf.train.Example.FromString(proto).features.feature["tokens"].bytes_list.value[0]
            for proto in protos
        ]
        assert [text.encode() for text in corpus.examples(client)] == texts


def test_ids_are_values_not_sql(tmp_path):
    odd = "x' OR '1'='1"
    _write(tmp_path / "c.sqlite", [(odd, "train", b"mine"), ("b", "train", b"theirs")])
    assert sqlite.read(tmp_path / "c.sqlite").examples(odd) == ["mine"]


def test_reading_does_not_write(stack_overflow):
    path, _ = stack_overflow
    path.chmod(0o400)
    sqlite.read(path).examples("synthetic_1")
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_bad_files_are_named(tmp_path):
    missing = tmp_path / "none.sqlite"
    with pytest.raises(ValueError, match="none.sqlite: cannot be read: no such file"):
        sqlite.read(missing)
    assert not missing.exists()
    text = tmp_path / "text.sqlite"
    text.write_text("not a database, but text that is long enough" * 50)
    with pytest.raises(ValueError, match="text.sqlite: not a database"):
        sqlite.read(text)
    sqlite3.connect(tmp_path / "empty.sqlite").execute("CREATE TABLE t (x)").connection.close()
    with pytest.raises(ValueError, match="no such table: client_metadata"):
        sqlite.read(tmp_path / "empty.sqlite")


def test_a_corpus_needs_two_users(tmp_path):
    _write(tmp_path / "one.sqlite", [("a", "train", b"x")])
    with pytest.raises(ValueError, match="single user, 'a'"):
        sqlite.read(tmp_path / "one.sqlite")
    _write(tmp_path / "zero.sqlite", [])
    with pytest.raises(ValueError, match="empty"):
        sqlite.read(tmp_path / "zero.sqlite")


def test_a_missing_feature_is_named(tmp_path):
    _write(tmp_path / "c.sqlite", [("a", "train", b"x"), ("b", "train", b"y")], feature="words")
    with pytest.raises(ValueError, match="client 'a' has 0 values of the text feature") as error:
        sqlite.read(tmp_path / "c.sqlite").examples("a")
    message = str(error.value)
    assert "of bytes are creation_date, tags, title, type, words. Say which" in message
    assert sqlite.read(tmp_path / "c.sqlite", text_feature="words").examples("a") == ["x"]


def test_a_bad_example_is_named(tmp_path):
    path = tmp_path / "c.sqlite"
    _write(path, [("a", "train", b"x"), ("b", "train", b"y")])
    connection = sqlite3.connect(path)
    connection.execute("UPDATE examples SET serialized_example_proto = ?", (b"\xff\xff",))
    connection.commit()
    connection.close()
    with pytest.raises(ValueError, match="client 'b' is not a tf.train.Example"):
        sqlite.read(path).examples("b")
