"""Corpora in the SQLite layout of TFF's `SqlClientData`, such as Stack Overflow.

Table `examples` has the columns `split_name`, `client_id` and
`serialized_example_proto`, a `tf.train.Example`; table `client_metadata` has
`client_id` and `split_name`
(tensorflow_federated/python/simulation/datasets/sql_client_data.py). TensorFlow is
imported when the first example is parsed.
"""

from __future__ import annotations

import os
import pathlib
import sqlite3

from tff_dpftrl import validation
from tff_dpftrl.data import user_text

_SHOWN = 100  # Largest number of characters of a name in a message.


def read(
    path: str | os.PathLike[str],
    *,
    split_name: str | None = None,
    text_feature: str = "tokens",
    is_tokenized: bool = False,
) -> user_text.UserText:
    """Opens a corpus; texts are read at each access.

    For the Stack Overflow file of `tff.simulation.datasets.stackoverflow.load_data`, whose words
    are separated by spaces, pass `is_tokenized=True`. `split_name` None reads all splits.
    `text_feature` names the bytes feature that holds the text, UTF-8.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise validation.UsageError(f"{path}: cannot be read: no such file.")
    reader = _ExampleReader(path, split_name, text_feature)
    corpus = user_text.UserText(
        name=str(path) if split_name is None else f"{path} (split {split_name!r})",
        user_unit="one client_id of the database",
        user_ids=reader.client_ids(),
        read_examples=reader.examples,
        is_tokenized=is_tokenized,
    )
    return user_text.require_several_users(corpus)


class _ExampleReader:
    """A reader of one database; each call opens it again, so that a reader can be copied."""

    def __init__(self, path: pathlib.Path, split_name: str | None, text_feature: str):
        self._path = path
        self._split_name = split_name
        self._text_feature = text_feature

    def _query_split(self, query: str, *values: str) -> list[tuple]:
        """Runs a query on the split that is read."""
        if self._split_name is None:
            return self._query(query, *values)
        condition = (" AND" if values else " WHERE") + " split_name = ?"
        return self._query(query + condition, *values, self._split_name)

    def _query(self, query: str, *values: str) -> list[tuple]:
        try:
            connection = sqlite3.connect(f"{self._path.resolve().as_uri()}?mode=ro", uri=True)
            try:
                return connection.execute(query, values).fetchall()
            finally:
                connection.close()
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise validation.UsageError(
                f"{self._path}: not a database in the layout of TFF's SqlClientData: {error}."
            ) from error

    def client_ids(self) -> tuple[str, ...]:
        rows = self._query_split("SELECT DISTINCT client_id FROM client_metadata")
        if not rows and self._split_name is not None:
            others = [
                name for (name,) in self._query("SELECT DISTINCT split_name FROM client_metadata")
            ]
            splits = ", ".join(sorted(str(name)[:_SHOWN] for name in others)) or "none"
            raise validation.UsageError(
                f"{self._path} has no clients in the split {self._split_name!r}; its splits are "
                f"{splits} (sqlite_split; all if not given)."
            )
        ids = [client_id for (client_id,) in rows]
        if not all(isinstance(client_id, str) for client_id in ids):
            raise validation.UsageError(f"{self._path}: a client_id is no text.")
        return tuple(sorted(ids))

    def examples(self, client_id: str) -> list[str]:
        query = "SELECT serialized_example_proto FROM examples WHERE client_id = ?"
        return [self._parse(proto, client_id) for (proto,) in self._query_split(query, client_id)]

    def _parse(self, proto: bytes, client_id: str) -> str:
        import tensorflow as tf  # Slow to import, and not needed to list the users.
        from google.protobuf import message

        where = f"{self._path}: an example of client {client_id!r}"
        try:
            features = tf.train.Example.FromString(proto).features.feature
        except (message.DecodeError, TypeError) as error:  # Other types than bytes, too.
            raise validation.UsageError(f"{where} is not a tf.train.Example.") from error
        # Not `features[name]`, which adds a feature that is missing.
        num_values = {name: len(feature.bytes_list.value) for name, feature in features.items()}
        if num_values.get(self._text_feature) != 1:
            texts = [name for name in sorted(num_values) if num_values[name] == 1]
            raise validation.UsageError(
                f"{where} has {num_values.get(self._text_feature, 0)} values of the text feature "
                f"{self._text_feature!r}, expected 1; its features with one value of bytes are "
                f"{', '.join(texts) or 'none'}. Say which one is text (sqlite_text_feature)."
            )
        return features[self._text_feature].bytes_list.value[0].decode("utf-8", errors="replace")
