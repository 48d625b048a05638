"""The score of trained models on a public text: bits per character, the fewer the better.

It is computed from what a run releases, and from nothing about the users that the run protects.
`python -m` reads the folders in JSON and prints the scores and the digest of the text, so that its
caller needs no TensorFlow.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from tff_dpftrl import json_text, validation
from tff_dpftrl.data import docstrings, sequences, sources, user_text
from tff_dpftrl.models import evaluation
from tff_dpftrl.training import language_config, pretraining, trained_model

_MOST_SEQUENCES = 4096
_SEED = 0  # Of the choice of sequences: the same ones for all models of one vocabulary.


def read(name: str, protected: language_config.TextConfig) -> user_text.UserText:
    """Reads the standard library's docstrings, or a file with no text of the runs' users."""
    if sources.share_texts(name, protected.data, protected.table):
        raise validation.UsageError(
            f"The text that scores the runs, {name!r}, is the text that they protect, a copy of "
            "it, or has texts of its users: score them on public text."
        )
    if name == pretraining.STANDARD_LIBRARY:
        return docstrings.read_standard_library()
    text = sources.load_user_text(
        name,
        pretokenized=protected.pretokenized,
        sqlite_text_feature=protected.sqlite_text_feature,
        sqlite_split=protected.sqlite_split,
    )
    if not text.has_text():
        raise validation.UsageError(f"The text that scores the runs, {name!r}, has no word in it.")
    return text


def bits_per_character(folder: pathlib.Path, text: user_text.UserText) -> float:
    """Computes a finished run's score over all words of the text; NaN if it is not finite."""
    trained = trained_model.find(folder, is_published=False).load()
    rows = sequences.SequenceCorpus(
        text, trained.words, sequences.SequenceSpec(trained.model.sequence_length)
    )
    ids, users, _ = rows.pooled_with_users(max_sequences=_MOST_SEQUENCES, seed=_SEED)
    measured = [rows.user_ids[index] for index in sorted(set(users.tolist()))]
    evaluate = evaluation.Evaluator(
        trained.model,
        trained.special,
        ids,
        targets_per_character=rows.targets_per_character(measured),
    )
    return evaluate(trained.weights)["bits_per_character"]


def _main(folders: Sequence[str], text: str, protected: dict[str, Any]) -> None:
    public = read(text, language_config.TextConfig(**protected))
    scores = [bits_per_character(pathlib.Path(folder), public) for folder in folders]
    print(json.dumps({"scores": scores, "digest": public.digest()}))


if __name__ == "__main__":
    _main(**json_text.parse(sys.stdin.read()))
