"""Next-word prediction on a corpus: what is trained on, and how a model is judged."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl.data import client_datasets, sequences, vocabulary
from tff_dpftrl.learning import functional_model
from tff_dpftrl.models import evaluation, held_out, language_model, metrics, ngrams, table
from tff_dpftrl.training import config as config_lib
from tff_dpftrl.training import corpus, own_models

_EVALUATION_SEED = 0
"""Of the choice of held-out sequences: the same for all seeds of a run, which are compared."""

_BY_USER = {"top1_in_vocab": False, "top1_oov_wrong": True}
_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_NGRAM_ORDERS = {"unigrams": 1, "bigrams": 2, "trigrams": 3}


@dataclasses.dataclass(frozen=True)
class TextFacts:
    """Exact figures of the text of the users who are protected: for the operator's eyes only.

    Attributes:
      num_users: Number of training users.
      num_users_without_text: Number of those who have no word, and so train on nothing.
      num_sequences: Number of their sequences.
      num_words: Number of words in the sequences.
      oov_share: Share of the words that are not in the vocabulary.
    """

    num_users: int
    num_users_without_text: int
    num_sequences: int
    num_words: int
    oov_share: float


@dataclasses.dataclass(frozen=True, eq=False)
class LanguageTask:
    """Training users, held-out text, model and baselines of one run.

    Attributes:
      train: Sequences of the training users, the ones who are protected.
      held_out: Word ids of users who never train, int32, [n, sequence_length + 1].
      held_out_users: Number of the user whom each of these rows is from, int64, [n].
      num_held_out_users: Number of users that these are from, or were sampled from.
      num_untouched_users: Number of users who are kept for a test, and not used.
      words: The vocabulary.
      client_spec: What a client does with its sequences in a round.
      model: The model.
      seed: Seed of the initial model and of the order of a client's sequences.
      initial_weights: Where the model begins; drawn with `seed` if None.
    """

    train: sequences.SequenceCorpus
    held_out: np.ndarray
    held_out_users: np.ndarray
    num_held_out_users: int
    num_untouched_users: int
    words: vocabulary.Vocabulary
    client_spec: client_datasets.ClientSpec
    model: language_model.LanguageModel
    seed: int
    initial_weights: tuple[np.ndarray, ...] | None = None

    @property
    def _special(self) -> metrics.SpecialIds:
        return metrics.SpecialIds(oov=self.words.oov, bos=self.words.bos, eos=self.words.eos)

    def functional_model(self) -> tff.learning.models.FunctionalModel:
        """The model, with its initial weights."""
        return functional_model.build(self.model, self._special, self.seed, self.initial_weights)

    def client_rows(self, user_id: str, round_index: int) -> np.ndarray:
        """One client's sequences for one round, the same ones if it is repeated.

        Args:
          user_id: One of the training users.
          round_index: The round.

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
        """The batches of `client_rows`, which the model trains on."""
        return client_datasets.batches(rows, self.client_spec)

    def client_dataset(self, user_id: str, round_index: int) -> tf.data.Dataset:
        """One client's batches for one round, the same ones if it is repeated."""
        return self.batches(self.client_rows(user_id, round_index))

    @functools.cached_property
    def evaluate(self) -> evaluation.Evaluator:
        """Maps trainable weights to metrics on the held-out users."""
        return evaluation.Evaluator(self.model, self._special, self.held_out)

    def examine(self, weights: Sequence[np.ndarray]) -> dict[str, Any]:
        """Measures on held-out users what is measured once, after training.

        Args:
          weights: Trainable weights.

        Returns:
          Fit for JSON. `users`, `sequences` and `words`: what it was measured on;
          `accuracy_by_user`: for the two ways to count words out of the vocabulary, the
          number of users who have words, and quantiles of their top-1 accuracies;
          `head_words`: the histogram of Table 3 of McMahan et al. 2018.
        """
        predictions = held_out.predict_words(self.model, weights, self._special, self.held_out)
        by_user = {
            name: held_out.accuracy_by_user(
                predictions, self.held_out_users, self._special, count_oov=count_oov
            )
            for name, count_oov in _BY_USER.items()
        }
        histogram = held_out.head_word_histogram(predictions, self._special)
        return {
            "users": len(np.unique(self.held_out_users)),
            "sequences": len(self.held_out),
            "words": len(predictions.targets),
            "accuracy_by_user": {
                name: {"users": len(accuracies), "quantiles": _quantiles(accuracies)}
                for name, accuracies in by_user.items()
            },
            "head_words": {
                "top": predictions.likeliest.shape[1],
                "histograms": dict(
                    zip(map(str, held_out.HEAD_SIZES), histogram.tolist(), strict=True)
                ),
            },
        }

    @functools.cached_property
    def training_text(self) -> TextFacts:
        """Counts the training users' text; the first time, all of it is split into words."""
        lengths, words, unknown = [], 0, 0
        for user_id in self.train.user_ids:
            rows = self.train.sequences(user_id)
            targets = rows[:, 1:]
            lengths.append(len(rows))
            words += int(np.sum((targets != vocabulary.PAD) & (targets <= self.words.oov)))
            unknown += int(np.sum(targets == self.words.oov))
        return TextFacts(
            num_users=len(lengths),
            num_users_without_text=lengths.count(0),
            num_sequences=sum(lengths),
            num_words=words,
            oov_share=unknown / words if words else 0.0,
        )

    def baselines(self) -> Mapping[str, float]:
        """Top-1 accuracy of n-gram counts over the training users' pooled text.

        For comparison in a simulation: these counts are not private.
        """
        ngram_model = ngrams.NgramModel(self.train.pooled(), self._special)
        return {
            name: ngram_model.evaluate(self.held_out, order).top1_in_vocab
            for name, order in _NGRAM_ORDERS.items()
        }


def _quantiles(values: np.ndarray) -> dict[str, float]:
    """Quantiles by their level; none of no values."""
    if len(values) == 0:
        return {}
    found = np.quantile(values, _QUANTILES).tolist()
    return dict(zip(map(str, _QUANTILES), found, strict=True))


def build_language_task(
    config: config_lib.TrainingConfig,
    text: corpus.RunText | None = None,
    model: own_models.Own | None = None,
) -> LanguageTask:
    """Builds the task of a config.

    Args:
      config: Options of the run.
      text: What `corpus.read` returned for it; read now if None.
      model: The caller's own model, if the config names none of ours.

    Returns:
      The task.

    Raises:
      ValueError: If corpus, vocabulary or model cannot be used.
    """
    if text is None:
        text = corpus.read(config)
    words, spec = text.words, sequences.SequenceSpec(config.sequence_length)
    rows, users = sequences.SequenceCorpus(text.held_out, words, spec).pooled_with_users(
        max_sequences=config.eval_sequences, seed=_EVALUATION_SEED
    )
    return LanguageTask(
        train=sequences.SequenceCorpus(text.train, words, spec),
        held_out=rows,
        held_out_users=users,
        num_held_out_users=len(text.held_out),
        num_untouched_users=text.num_untouched,
        words=words,
        client_spec=client_datasets.ClientSpec(
            config.batch_size, config.max_sequences_per_client, config.client_epochs
        ),
        model=_build_model(config, model, words.size),
        seed=config.seed,
    )


def _build_model(
    config: config_lib.TrainingConfig, own: own_models.Own | None, vocabulary_size: int
) -> language_model.LanguageModel:
    sizes = {"vocabulary_size": vocabulary_size, "sequence_length": config.sequence_length}
    if own is not None:
        return own_models.read(own, **sizes)
    return table.build(config.model, **sizes, **config.model_sizes)
