"""Client datasets of next-word prediction.

There are two ways to the same batches. A training round calls `client_dataset`, which makes a
dataset of ids that were tokenised on the host and kept. `create_preprocess_fn` returns a graph
from text to batches, for any `tff.simulation.datasets.ClientData` of texts, such as
`tff_dpftrl.learning.client_data.of_texts`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tff_dpftrl import validation
from tff_dpftrl.data import sequences
from tff_dpftrl.data import vocabulary as vocabulary_lib

TEXT_FEATURE = "tokens"
"""Key of the text in an element, as in TFF's Stack Overflow."""


@dataclasses.dataclass(frozen=True)
class ClientSpec:
    """Batches and caps of one client's text in one round.

    Attributes:
      batch_size: Number of sequences in a batch; the last one may be smaller.
      max_sequences: Largest number of sequences in one epoch; all if None.
      num_epochs: Number of passes over the sequences.
    """

    batch_size: int = 8
    max_sequences: int | None = 64
    num_epochs: int = 1

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None or field.name != "max_sequences":
                validation.integer(field.name, value, minimum=1)


def element_spec(sequence_length: int) -> tuple[tf.TensorSpec, tf.TensorSpec]:
    """Returns the type of a batch (x, y): int32, shape [None, sequence_length]."""
    spec = tf.TensorSpec([None, sequence_length], tf.int32)
    return spec, spec


def client_dataset(
    corpus: sequences.SequenceCorpus, user_id: str, spec: ClientSpec, seed: int
) -> tf.data.Dataset:
    """Returns one client's batches for one round.

    They are (x, y), int32, shape [≤ batch_size, sequence_length]; y is x shifted by one word. There
    is no batch if the user has no text.
    """
    return batches(client_rows(corpus, user_id, spec, seed), spec)


def client_rows(
    corpus: sequences.SequenceCorpus, user_id: str, spec: ClientSpec, seed: int
) -> np.ndarray:
    """Returns the sequences of `client_dataset`: int32, shape [n, sequence_length + 1]."""
    return corpus.sample(
        user_id, max_sequences=spec.max_sequences, num_epochs=spec.num_epochs, seed=seed
    )


def batches(rows: np.ndarray | tf.Tensor, spec: ClientSpec) -> tf.data.Dataset:
    """Returns sequences, shape [n, sequence_length + 1], as the batches of `client_dataset`."""
    return tf.data.Dataset.from_tensor_slices((rows[:, :-1], rows[:, 1:])).batch(spec.batch_size)


def create_preprocess_fn(
    vocabulary: vocabulary_lib.Vocabulary,
    sequence_spec: sequences.SequenceSpec,
    client_spec: ClientSpec,
    *,
    is_tokenized: bool = False,
    shuffle_seed: int | None = None,
    shuffle_buffer_size: int = 10_000,
) -> Callable[[tf.data.Dataset], tf.data.Dataset]:
    """Returns a graph from texts to batches, for `ClientData.preprocess`.

    It takes a dataset of `OrderedDict(tokens=text, ...)`, where the text is a scalar string
    normalised to NFC. Batches are (x, y), int32, shape [≤ batch_size, sequence_length]. Without
    `shuffle_seed`, sequences keep the texts' order.
    """
    rule = vocabulary.rule(is_tokenized)
    if not rule.is_in_graphs:
        raise validation.UsageError(
            f"vocabulary ({vocabulary.source}) has sub-words that TensorFlow has no operations "
            "for: take `client_dataset`, which tokenises outside of graphs."
        )
    length = sequence_spec.sequence_length

    def preprocess_fn(dataset: tf.data.Dataset) -> tf.data.Dataset:
        table = tf.lookup.StaticHashTable(
            tf.lookup.KeyValueTensorInitializer(
                list(vocabulary.words), tf.range(1, len(vocabulary.words) + 1, dtype=tf.int32)
            ),
            default_value=vocabulary.oov,
        )

        def text_to_sequences(element) -> tf.data.Dataset:
            words = rule.split(tf.reshape(element[TEXT_FEATURE], [1])).values
            if not sequence_spec.split_long_texts:
                words = words[:length]
            ids = tf.concat([[vocabulary.bos], table.lookup(words), [vocabulary.eos]], axis=0)
            # The PADs at the end complete the last sequence, whatever its length.
            ids = tf.pad(ids, [[0, length]], constant_values=vocabulary_lib.PAD)
            count = -(-tf.size(words) // length)
            starts = tf.range(count)[:, None] * length
            rows = tf.gather(ids, starts + tf.range(length + 1)[None, :])
            return tf.data.Dataset.from_tensor_slices(rows)

        dataset = dataset.flat_map(text_to_sequences)
        if shuffle_seed is not None:
            dataset = dataset.shuffle(shuffle_buffer_size, seed=shuffle_seed)
        if client_spec.max_sequences is not None:
            dataset = dataset.take(client_spec.max_sequences)
        dataset = dataset.repeat(client_spec.num_epochs).batch(client_spec.batch_size)
        return dataset.map(
            lambda batch: (
                tf.ensure_shape(batch[:, :-1], [None, length]),
                tf.ensure_shape(batch[:, 1:], [None, length]),
            )
        )

    return preprocess_fn
