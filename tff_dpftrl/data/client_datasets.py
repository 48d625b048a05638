"""Client datasets of next-word prediction, of ids that were tokenised on the host."""

from __future__ import annotations

import dataclasses

import numpy as np
import tensorflow as tf

from tff_dpftrl import validation
from tff_dpftrl.data import sequences


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
