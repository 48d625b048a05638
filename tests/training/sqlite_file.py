"""Writes files in the layout of TFF's simulation data sets."""

from __future__ import annotations

import pathlib
import sqlite3
from collections.abc import Mapping, Sequence

import tensorflow as tf


def write(path: pathlib.Path, users: Mapping[str, Sequence[str]], feature: str = "tokens"):
    """Writes the texts of users, in the split "train"; returns the path."""
    connection = sqlite3.connect(path)
    connection.execute(
        "CREATE TABLE examples (split_name TEXT, client_id TEXT, serialized_example_proto BLOB)"
    )
    connection.execute("CREATE TABLE client_metadata (client_id TEXT, split_name TEXT)")
    for user, texts in users.items():
        connection.execute("INSERT INTO client_metadata VALUES (?, 'train')", (user,))
        for text in texts:
            values = tf.train.BytesList(value=[text.encode()])
            features = tf.train.Features(feature={feature: tf.train.Feature(bytes_list=values)})
            proto = tf.train.Example(features=features).SerializeToString()
            connection.execute("INSERT INTO examples VALUES ('train', ?, ?)", (user, proto))
    connection.commit()
    connection.close()
    return path
