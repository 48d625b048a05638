"""Next-word prediction on a corpus: what is trained on, and how a model is judged."""

from __future__ import annotations

import dataclasses

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl.data import client_datasets, sequences
from tff_dpftrl.learning import functional_model
from tff_dpftrl.models import language_model, table
from tff_dpftrl.training import config as config_lib
from tff_dpftrl.training import corpus, own_models, text_task


@dataclasses.dataclass(frozen=True, eq=False)
class LanguageTask(text_task.TextTask):
    """Text, model and client work of a federated run.

    Attributes:
      client_spec: Batches and epochs of a client in a round.
      seed: Seed of the initial model and of the order of a client's sequences.
      initial_weights: Initial weights of the model; drawn with `seed` if None.
    """

    client_spec: client_datasets.ClientSpec
    seed: int
    initial_weights: tuple[np.ndarray, ...] | None = None

    def functional_model(self) -> tff.learning.models.FunctionalModel:
        """Returns the model with its initial weights."""
        return functional_model.build(self.model, self.special, self.seed, self.initial_weights)

    def client_rows(self, user_id: str, round_index: int) -> np.ndarray:
        """Draws one client's sequences for one round, the same ones if it is repeated.

        Args:
          user_id: Id of a training user.
          round_index: Number of the round, from 0.

        Returns:
          Word ids, int32, shape [n, sequence_length + 1].
        """
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
    config: config_lib.TrainingConfig,
    text: corpus.RunText | None = None,
    model: own_models.Own | None = None,
) -> LanguageTask:
    """Builds the task of a config.

    Args:
      config: Options of the run.
      text: Text and vocabulary of the run; read now if None.
      model: The caller's own model; None if the config names one of this package.

    Returns:
      The task.

    Raises:
      ValueError: If corpus, vocabulary or model cannot be used.
    """
    if text is None:
        text = corpus.read(config)
    return LanguageTask(
        **text_task.sequences_of(
            text.train,
            text.held_out,
            text.words,
            sequences.SequenceSpec(config.sequence_length),
            max_held_out=config.eval_sequences,
        ),
        num_untouched_users=text.num_untouched,
        client_spec=client_datasets.ClientSpec(
            config.batch_size, config.max_sequences_per_client, config.client_epochs
        ),
        model=_build_model(config, model, text.words.size),
        seed=config.seed,
    )


def _build_model(
    config: config_lib.TrainingConfig, own: own_models.Own | None, vocabulary_size: int
) -> language_model.LanguageModel:
    sizes = {"vocabulary_size": vocabulary_size, "sequence_length": config.sequence_length}
    if own is not None:
        return own_models.read(own, **sizes)
    return table.build(config.model, **sizes, **config.model_sizes)
