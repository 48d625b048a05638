"""Next-word prediction on a corpus: what is trained on, and how a model is judged."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tff_dpftrl.data import client_datasets, sequences
from tff_dpftrl.learning import functional_model
from tff_dpftrl.learning import model as model_lib
from tff_dpftrl.models import table
from tff_dpftrl.training import corpus, custom_models, text_task


@dataclasses.dataclass(frozen=True)
class TaskOptions:
    """Options of a `LanguageTask`; `TrainingConfig` says what each means."""

    sequence_length: int
    eval_sequences: int
    batch_size: int
    max_sequences_per_client: int
    client_epochs: int
    model: str
    model_sizes: Mapping[str, Any]
    seed: int


@dataclasses.dataclass(frozen=True, eq=False)
class LanguageTask(text_task.TextTask):
    """Text, model and client work of a federated run.

    `client_spec` has batches and epochs of a client in a round. `seed` is that of the initial
    model, if there are no initial weights, and of the order of a client's sequences.
    """

    client_spec: client_datasets.ClientSpec
    seed: int
    initial_weights: tuple[np.ndarray, ...] | None = None

    def functional_model(self) -> model_lib.Model:
        """Returns the model with its initial weights."""
        return functional_model.build(self.model, self.special, self.seed, self.initial_weights)

    def client_rows(self, user_id: str, round_index: int) -> np.ndarray:
        """Draws a client's word ids for a round, repeatably: int32, [n, sequence_length + 1]."""
        seed = int(np.random.SeedSequence([self.seed, round_index]).generate_state(1)[0])
        return client_datasets.client_rows(self.train, user_id, self.client_spec, seed)

    @property
    def rows_spec(self) -> tf.TensorSpec:
        """Shape and dtype of `client_rows`."""
        return tf.TensorSpec([None, self.model.sequence_length + 1], tf.int32)

    def batches(self, rows: np.ndarray | tf.Tensor) -> tf.data.Dataset:
        """Returns the batches of `client_rows`, which the model trains on."""
        return client_datasets.batches(rows, self.client_spec)

    def client_dataset(self, user_id: str, round_index: int) -> tf.data.Dataset:
        """Returns one client's batches for one round, the same ones if it is repeated."""
        return self.batches(self.client_rows(user_id, round_index))


def build_language_task(
    options: TaskOptions, text: corpus.RunText, model: custom_models.Model | None = None
) -> LanguageTask:
    """Builds the task of a run."""
    sizes = {"vocabulary_size": text.words.size, "sequence_length": options.sequence_length}
    if model is None:
        built = table.build(options.model, **sizes, **options.model_sizes)
    else:
        built = custom_models.read(model, **sizes)
    return LanguageTask(
        **text_task.sequences_of(
            text.train,
            text.held_out,
            text.words,
            sequences.SequenceSpec(options.sequence_length),
            max_held_out=options.eval_sequences,
        ),
        num_untouched_users=text.num_untouched,
        client_spec=client_datasets.ClientSpec(
            options.batch_size, options.max_sequences_per_client, options.client_epochs
        ),
        model=built,
        seed=options.seed,
    )
