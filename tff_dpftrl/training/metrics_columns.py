"""The columns of `metrics.csv` of a run on text, and what each of them means."""

from __future__ import annotations

import dataclasses
import math

from tff_dpftrl.runs import metrics_log, released_metrics

EVALUATION_METRICS = {
    "loss": "cross-entropy, nats per word or sub-word",
    "perplexity": "exp of the cross-entropy",
    "bits_per_character": "log-loss of all words and ends of texts, over the characters of the "
    "text; to compare vocabularies, but a word that a vocabulary lacks costs only what "
    "'unknown' costs, not its letters",
    "top1_in_vocab": "share of next words guessed right, among words of the vocabulary, which all "
    "guesses are from",
    "top1_oov_wrong": "the same among all words; those outside the vocabulary count as wrong",
    "top3_in_vocab": "share of next words among the first three guesses",
    "top5_in_vocab": "share of next words among the first five guesses",
    "top3_oov_wrong": "the first three guesses, words outside the vocabulary counted as wrong",
    "top5_oov_wrong": "the first five guesses, words outside the vocabulary counted as wrong",
}
"""Metrics of `models.metrics` that are recorded for held-out users, and their meaning."""

COLUMNS = (
    metrics_log.Column("round", "number of the round, from 1; of fine-tuning, of the step"),
    metrics_log.Column(
        "loss",
        "cross-entropy on the round's training cohort; of fine-tuning, mean over the step's "
        "sampled examples, each the mean over its words, or over its users, each the mean over "
        "their examples",
        is_exact=True,
    ),
    metrics_log.Column(
        "top1",
        "accuracy on the round's training cohort; empty in fine-tuning, which does not measure it",
        is_exact=True,
    ),
    metrics_log.Column(
        "epsilon",
        "ε that all rounds so far spent at the run's δ, with the participation that was declared. "
        "Quote the privacy statement instead: it is of what was observed, and charges all rounds "
        "that might have been run where the data, or somebody, decided when to end",
    ),
    *(
        metrics_log.Column(f"eval_{name}", f"held-out users, who never train: {meaning}")
        for name, meaning in EVALUATION_METRICS.items()
    ),
    metrics_log.Column(
        "clients",
        "size of the cohort; empty where it is secret, as with sampled cohorts, and in fine-tuning "
        "with sampled examples or users",
        is_exact=True,
    ),
    metrics_log.Column(
        "seconds",
        "wall-clock time of the round, which grows with the cohort and its text",
        is_exact=True,
    ),
)
"""Columns of `metrics.csv`."""


def of_run(*, protects_held_out: bool) -> tuple[metrics_log.Column, ...]:
    """Returns the columns of a run; protected held-out users have exact figures, too."""
    if not protects_held_out:
        return COLUMNS
    return tuple(
        dataclasses.replace(column, is_exact=column.is_exact or column.name.startswith("eval_"))
        for column in COLUMNS
    )


WHAT_IS_RELEASED = "loss and accuracy on each round's training cohort"
"""Words of a statement for `figures_of_rounds`."""


def figures_of_evaluations(vocabulary_size: int, sequence_length: int) -> released_metrics.Figures:
    """Returns the noised figures of protected held-out users, like `figures_of_rounds`."""
    of_rounds = figures_of_rounds(vocabulary_size, sequence_length)
    meaning = "held-out users, who never train, with noise and within the budget"
    means = (
        dataclasses.replace(
            mean,
            column=mean.column.replace("noised_", "noised_eval_"),
            meaning=f"{mean.meaning.partition(' on ')[0]} on {meaning}",
        )
        for mean in of_rounds.means
    )
    return dataclasses.replace(
        of_rounds, means=tuple(means), of="the held-out users", prefix="noised_eval_sum_"
    )


def figures_of_rounds(vocabulary_size: int, sequence_length: int) -> released_metrics.Figures:
    """Returns the figures that federated training releases with noise.

    A target's loss is bounded by that of a guess that takes all ids for equally likely. A user
    counts about as one sequence of targets, also with more: its vector is clipped, and its means
    stay as they are. The sums are those of `models.metrics`.
    """
    targets = float(sequence_length)
    return released_metrics.Figures(
        bounds={
            "loss_sum": targets * math.log(vocabulary_size),
            "num_targets": targets,
            "num_top1": targets,
            "num_in_vocab": targets,
        },
        means=(
            released_metrics.Mean(
                "noised_loss",
                "cross-entropy on the round's training cohort, with noise and within the budget",
                "loss_sum",
                "num_targets",
            ),
            released_metrics.Mean(
                "noised_top1",
                "accuracy on the round's training cohort, with noise and within the budget",
                "num_top1",
                "num_in_vocab",
            ),
        ),
    )
