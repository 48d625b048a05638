"""Models and n-grams as suggestions of a keyboard: `python experiments/keyboard.py RUN NAME=FILE`.

Measures each model (`model.npz`, `best_model.npz`) on the held-out users of the run in folder RUN,
which need not have ended, and n-grams counted on its training users. "With earlier text" they have
the same cache of what the same user wrote earlier. Writes results/keyboard.csv.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import finetuning_text
import numpy as np
import suggestions

from tff_dpftrl.models import export, held_out, language_model, ngrams
from tff_dpftrl.reports import results
from tff_dpftrl.runs import manifest
from tff_dpftrl.training import corpus, options, task, text_task

_TABLE = pathlib.Path(__file__).resolve().parent / "results" / "keyboard.csv"
_SHOWN = "0.3"  # The threshold in the table.
_NGRAMS = ("unigrams", "bigrams", "trigrams", "4-grams")
_AT_A_TIME = 64  # Sequences.


def _row(
    name: str, top1: float, with_cache: float | None, measured: Mapping[str, Any]
) -> dict[str, str]:
    shown = measured["thresholds"][_SHOWN]
    shares = {
        "top-1": top1,
        "top-1 with earlier text": with_cache,
        "picked at 3": measured["picked_at_3"],
        f"triggered at {_SHOWN}": shown["triggered"],
        f"accepted at {_SHOWN}": shown["accepted"],
        "triggered, half accepted": measured["triggered"],
        "decoder": measured["decoder"],
        "re-scored": measured["rescored"],
    }
    return {"model": name} | {
        column: "–" if share is None else f"{100 * share:.1f} %" for column, share in shares.items()
    }


def of_model(
    model: language_model.LanguageModel,
    weights: Sequence[np.ndarray],
    built: text_task.TextTask,
    typed: suggestions.TypedWords,
) -> dict[str, Any]:
    """Measures a model on the held-out words."""
    meter = suggestions.Meter(typed)

    def add(rows: np.ndarray, positions: np.ndarray, shares: np.ndarray) -> np.ndarray:
        meter.add(shares)
        return shares

    held_out.predict_words(
        model, weights, built.special, built.held_out, batch_size=_AT_A_TIME, mix=add
    )
    return meter.result()


def of_ngrams(
    built: text_task.TextTask, typed: suggestions.TypedWords
) -> dict[str, dict[str, Any]]:
    """Measures n-grams, counted on all training users, on the held-out words, by name."""
    counted = ngrams.NgramModel(
        built.train.pooled(), built.special, built.words.size, max_order=len(_NGRAMS)
    )
    meters = {name: suggestions.Meter(typed) for name in _NGRAMS}
    for start in range(0, len(built.held_out), _AT_A_TIME):
        rows = built.held_out[start : start + _AT_A_TIME]
        words = np.flatnonzero(built.special.is_word(rows[:, 1:]))
        for meter, shares in zip(meters.values(), counted.probabilities(rows, words), strict=True):
            meter.add(shares)
    return {name: meter.result() for name, meter in meters.items()}


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=pathlib.Path, help="Folder of a training run.")
    parser.add_argument("models", nargs="+", metavar="NAME=FILE", help="Models by their names.")
    args = parser.parse_args()
    config = options.of_manifest(manifest.read(args.run), args.run)
    text = corpus.read(config.part(corpus.TextOptions))
    built = task.build_language_task(config.part(task.TaskOptions), text)
    spelling = built.words.words if built.words.oov is not None else None
    typed = suggestions.TypedWords.create(built.held_out, built.special, spelling)
    rows = []
    for given in args.models:
        name, _, path = given.partition("=")
        _, weights = export.read(pathlib.Path(path))
        every = built.examine(weights)["earlier_text"]["all"]
        found = of_model(built.model, weights, built, typed)
        rows.append(_row(name, every["model"], every["model_and_cache"], found))
    top1 = built.baselines()
    for name, found in of_ngrams(built, typed).items():
        with_cache = top1.get(f"{name}{results.WITH_EARLIER_TEXT}")
        rows.append(_row(name, top1[name], with_cache, found))
    finetuning_text.write(_TABLE, rows)


if __name__ == "__main__":
    main()
