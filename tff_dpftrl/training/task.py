"""Next-word prediction on a corpus: what is trained on, and how a model is judged."""

from __future__ import annotations

import dataclasses
import filecmp
import functools
import os
from collections.abc import Mapping

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
import tqdm

from tff_dpftrl.data import client_datasets, sequences, sources, split, user_text, vocabulary
from tff_dpftrl.learning import functional_model
from tff_dpftrl.models import evaluation, language_model, metrics, ngrams, table
from tff_dpftrl.training import config as config_lib

EVALUATION_METRICS = (
    "loss",
    "perplexity",
    "top1_in_vocab",
    "top1_oov_wrong",
    "top3_in_vocab",
)
"""Metrics of `models.metrics` that are recorded for held-out users."""

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
      num_held_out_users: Number of users that these are from, or were sampled from.
      words: The vocabulary.
      client_spec: What a client does with its sequences in a round.
      model: The model.
      seed: Seed of the initial model and of the order of a client's sequences.
    """

    train: sequences.SequenceCorpus
    held_out: np.ndarray
    num_held_out_users: int
    words: vocabulary.Vocabulary
    client_spec: client_datasets.ClientSpec
    model: language_model.LanguageModel
    seed: int

    @property
    def _special(self) -> metrics.SpecialIds:
        return metrics.SpecialIds(oov=self.words.oov, bos=self.words.bos, eos=self.words.eos)

    def functional_model(self) -> tff.learning.models.FunctionalModel:
        """The model, with initial weights that depend on `seed` only."""
        return functional_model.build(self.model, self._special, self.seed)

    def client_dataset(self, user_id: str, round_index: int) -> tf.data.Dataset:
        """One client's batches for one round, the same ones if it is repeated."""
        seed = int(np.random.SeedSequence([self.seed, round_index]).generate_state(1)[0])
        return client_datasets.client_dataset(self.train, user_id, self.client_spec, seed)

    @functools.cached_property
    def evaluate(self) -> evaluation.Evaluator:
        """Maps trainable weights to metrics on the held-out users."""
        return evaluation.Evaluator(self.model, self._special, self.held_out)

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


def build_language_task(config: config_lib.TrainingConfig) -> LanguageTask:
    """Reads the corpus and the vocabulary that a config names.

    Args:
      config: Options of the run.

    Returns:
      The task. Users are split by a hash of their id: about eight in ten train and
      one in ten is the held-out set (the validation part of `data.split.by_user`;
      the test part is never touched).

    Raises:
      ValueError: If corpus or vocabulary cannot be used.
    """
    corpus = _load_corpus(config)
    parts = split.by_user(corpus)
    train = parts.train
    if config.max_users is not None:
        train = train.select(train.user_ids[: config.max_users])
    _check_users(corpus, train, parts.validation)
    words = _vocabulary(config, train)
    spec = sequences.SequenceSpec(config.sequence_length)
    held_out = sequences.SequenceCorpus(parts.validation, words, spec).pooled(
        max_sequences=config.eval_sequences, seed=config.seed
    )
    return LanguageTask(
        train=sequences.SequenceCorpus(train, words, spec),
        held_out=held_out,
        num_held_out_users=len(parts.validation),
        words=words,
        client_spec=client_datasets.ClientSpec(
            config.batch_size, config.max_sequences_per_client, config.client_epochs
        ),
        model=table.build(
            config.model,
            vocabulary_size=words.size,
            sequence_length=config.sequence_length,
            embedding_size=config.embedding_size,
            state_size=config.lstm_size,
            tie_embeddings=config.tie_embeddings,
        ),
        seed=config.seed,
    )


def _check_users(
    corpus: user_text.UserText, train: user_text.UserText, held_out: user_text.UserText
) -> None:
    """Refuses a corpus that leaves nobody, or no word, to train on or to evaluate on."""
    if not corpus.has_text():
        raise ValueError(
            f"data {corpus.name!r} has {len(corpus)} users, none of them has a text with a word in "
            "it: check how the file was written."
        )
    for part, verb in ((train, "train on"), (held_out, "hold out for evaluation")):
        if len(part) == 0:
            raise ValueError(
                f"data {corpus.name!r} has too few users, {len(corpus)}: a hash of their ids gives "
                f"about eight in ten to training and one in ten to evaluation, which leaves none "
                f"to {verb}; use a larger corpus."
            )
        if not part.has_text():
            raise ValueError(
                f"data {corpus.name!r} has {len(part)} users to {verb}, none of them has a text "
                f"with a word in it (others of its {len(corpus)} users have); use a larger corpus."
            )


def _load_corpus(config: config_lib.TrainingConfig) -> user_text.UserText:
    with tqdm.tqdm(desc="Reading docstrings", unit="file", leave=False, delay=1.0) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        return sources.load_user_text(
            config.data,
            pretokenized=config.pretokenized,
            sqlite_text_feature=config.sqlite_text_feature,
            sqlite_split=config.sqlite_split,
            progress=show,
        )


def _vocabulary(
    config: config_lib.TrainingConfig, train: user_text.UserText
) -> vocabulary.Vocabulary:
    size, lower_case = config.vocabulary_size, config.lower_case
    match config.vocabulary:
        case "docs":
            return vocabulary.standard_library(size, lower_case=lower_case)
        case "private":
            return vocabulary.of_training_users(train, size, lower_case=lower_case)
        case path:
            _refuse_same_file(config.data, path)
            return vocabulary.from_file(
                path,
                size,
                lower_case=lower_case,
                is_tokenized=config.pretokenized,
                protected=train,
            )


def _refuse_same_file(data: str, path: str) -> None:
    """Refuses a vocabulary that is the protected file, under its own name or as a copy."""
    if os.path.isfile(data) and os.path.isfile(path) and filecmp.cmp(data, path, shallow=False):
        raise ValueError(
            f"vocabulary {path!r} is the file of the users to be protected, {data!r}, or a copy of "
            "it, and cannot be public: count it on other text, or pass vocabulary 'private', and "
            "the statement will say that it is not covered."
        )
