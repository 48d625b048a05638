"""Corpora as TFF's `ClientData`, of texts or of batches of sequences."""

from __future__ import annotations

import abc
import collections
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
from typing_extensions import override

from tff_dpftrl.data import client_datasets, sequences, tokenizer, user_text


def of_texts(corpus: user_text.UserText) -> tff.simulation.datasets.ClientData:
    """Returns a corpus of texts as TFF's `ClientData`.

    Its elements are `OrderedDict(tokens=text)`, as in TFF's Stack Overflow, with texts normalised
    to NFC. `serializable_dataset_fn`, and so `preprocess` and `dataset_computation`, embed the
    whole corpus in a graph. For a corpus above a gigabyte, use SQLite and
    `tff.simulation.datasets.SqlClientData`.
    """
    return _TextClientData(corpus)


def of_sequences(
    corpus: sequences.SequenceCorpus, spec: client_datasets.ClientSpec, seed: int = 0
) -> tff.simulation.datasets.ClientData:
    """Returns the batches of `client_datasets.client_dataset` as TFF's `ClientData`.

    `seed` is that of the shuffling and selection of a client's sequences, for all rounds. Only
    `serializable_dataset_fn` and its callers read the whole corpus.
    """
    return _SequenceClientData(corpus, spec, seed)


class _InMemoryClientData(tff.simulation.datasets.ClientData):
    """Client datasets made from arrays on the host, or from a graph that embeds them."""

    _user_ids: Sequence[str]

    @abc.abstractmethod
    def _rows(self, user_id: str) -> np.ndarray:
        """Returns the data of a user as one array."""

    @abc.abstractmethod
    def _dataset(self, rows: Any) -> tf.data.Dataset:
        """Makes a dataset of rows, an array or a tensor."""

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


class _TextClientData(_InMemoryClientData):
    """Client data of texts."""

    def __init__(self, corpus: user_text.UserText):
        self._user_ids = corpus.user_ids
        self._corpus = corpus

    @override
    def _rows(self, user_id: str) -> np.ndarray:
        texts = map(tokenizer.normalised, self._corpus.examples(user_id))
        return np.array([text.encode("utf-8") for text in texts], object)

    @override
    def _dataset(self, rows) -> tf.data.Dataset:
        rows = tf.convert_to_tensor(rows, tf.string)
        return tf.data.Dataset.from_tensor_slices(
            collections.OrderedDict([(client_datasets.TEXT_FEATURE, rows)])
        )


class _SequenceClientData(_InMemoryClientData):
    """Client data of batches of sequences."""

    def __init__(
        self, corpus: sequences.SequenceCorpus, spec: client_datasets.ClientSpec, seed: int
    ):
        self._user_ids = corpus.user_ids
        self._corpus = corpus
        self._spec = spec
        self._seed = seed

    @override
    def _rows(self, user_id: str) -> np.ndarray:
        return client_datasets.client_rows(self._corpus, user_id, self._spec, self._seed)

    @override
    def _dataset(self, rows) -> tf.data.Dataset:
        return client_datasets.batches(rows, self._spec)
