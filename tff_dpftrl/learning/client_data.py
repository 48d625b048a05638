"""Corpora of texts as TFF's `ClientData`."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl.data import client_datasets, tokenizer, user_text


def of_texts(corpus: user_text.UserText) -> tff.simulation.datasets.ClientData:
    """Returns a corpus of texts as TFF's `ClientData`.

    Its elements are `OrderedDict(tokens=text)`, as in TFF's Stack Overflow, with texts normalised
    to NFC. `serializable_dataset_fn`, and so `preprocess` and `dataset_computation`, embed the
    whole corpus in a graph. For a corpus above a gigabyte, use SQLite and
    `tff.simulation.datasets.SqlClientData`.
    """
    return _TextClientData(corpus)


class _TextClientData(tff.simulation.datasets.ClientData):
    """Client datasets made from texts on the host, or from a graph that embeds them."""

    def __init__(self, corpus: user_text.UserText):
        self._user_ids = corpus.user_ids
        self._corpus = corpus

    @property
    def client_ids(self) -> list[str]:
        return list(self._user_ids)

    def create_tf_dataset_for_client(self, client_id: str) -> tf.data.Dataset:
        return self._dataset(self._rows(client_id))

    @property
    def serializable_dataset_fn(self) -> Callable[[tf.Tensor], tf.data.Dataset]:
        rows = [self._rows(user_id) for user_id in self._user_ids]
        values = np.concatenate(rows)
        ends = np.cumsum([len(part) for part in rows])

        def create_dataset(client_id: tf.Tensor) -> tf.data.Dataset:
            index_of = tf.lookup.StaticHashTable(
                tf.lookup.KeyValueTensorInitializer(
                    list(self._user_ids), tf.range(len(rows), dtype=tf.int64)
                ),
                default_value=-1,
            )
            index = index_of.lookup(tf.convert_to_tensor(client_id))
            message = tf.strings.join([client_id, "is not a client"], separator=" ")
            with tf.control_dependencies([tf.debugging.Assert(index >= 0, [message])]):
                index = tf.identity(index)
            starts = tf.constant(np.concatenate([[0], ends[:-1]]))
            client_rows = tf.constant(values)[starts[index] : tf.constant(ends)[index]]
            return self._dataset(client_rows)

        return create_dataset

    @property
    def element_type_structure(self):
        return self._dataset(self._rows(self._user_ids[0])).element_spec

    def _rows(self, user_id: str) -> np.ndarray:
        texts = map(tokenizer.normalised, self._corpus.examples(user_id))
        return np.array([text.encode("utf-8") for text in texts], object)

    def _dataset(self, rows: Any) -> tf.data.Dataset:
        rows = tf.convert_to_tensor(rows, tf.string)
        return tf.data.Dataset.from_tensor_slices(
            collections.OrderedDict([(client_datasets.TEXT_FEATURE, rows)])
        )
