"""The columns of `metrics.csv` of a run on text, and what each of them means."""

from __future__ import annotations

from tff_dpftrl.runs import metrics_log

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
