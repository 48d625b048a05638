"""What models gain on users' own text: `python experiments/personalisation.py NAME=RUNS ...`.

RUNS is a pattern of results folders that differ in their seed only. Eighty held-out users of the
commit messages each train a copy of the model by SGD on the first half of their examples, and are
asked how well it predicts the other half, before and after (Charles et al. 2024, appendix G.2).

Writes results/personalisation.csv: means over the runs with their standard errors, and the largest
standard error of a run's mean gain over the users. These are exact figures of the users who are
measured: no privacy statement covers them.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import math
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import finetuning_text
import numpy as np

from tff_dpftrl.data import sequences, user_text
from tff_dpftrl.training import corpus, language_config, trained_model

_TABLE = pathlib.Path(__file__).resolve().parent / "results" / "personalisation.csv"
_DATA = "commits_by_author.jsonl.gz"


class Config(NamedTuple):
    """Training of a user. The same users take part whatever the model is."""

    learning_rate: float = 0.03
    epochs: int = 4
    batch_size: int = 8
    min_examples: int = 8
    max_users: int = 80


class Mean(NamedTuple):
    """A mean over users or runs, each of which counts the same.

    The standard error is NaN for a single one.
    """

    value: float
    standard_error: float

    @classmethod
    def of(cls, values: Sequence[float] | np.ndarray) -> Mean:
        """Returns the mean of values, shape [n]."""
        mean = float(np.mean(values))
        if len(values) < 2 or not math.isfinite(mean):
            return cls(mean, math.nan)
        return cls(mean, float(np.std(values, ddof=1)) / math.sqrt(len(values)))


@dataclasses.dataclass(frozen=True)
class Personalisation:
    """Mean losses of the second halves over users, in nats per word or sub-word."""

    num_users: int
    before: Mean
    after: Mean
    gain: Mean


def personalise(
    trained: trained_model.TrainedModel, text: user_text.UserText, config: Config
) -> Personalisation:
    """Trains and measures for one user after the other.

    An example is a text with a word in it. What is longer than the model's sequences is cut off.
    """
    import local_training

    spec = sequences.SequenceSpec(trained.model.sequence_length, split_long_texts=False)
    encoded = sequences.SequenceCorpus(text, trained.words, spec)
    local = local_training.LocalTraining(trained.model, trained.weights, trained.special)
    losses = []
    for user in choose(encoded, config):
        rows = encoded.sequences(user)
        own, others = rows[: len(rows) // 2], rows[len(rows) // 2 :]
        local.restart()
        before = local.measure(others).loss
        local.train(
            own,
            learning_rate=config.learning_rate,
            num_epochs=config.epochs,
            batch_size=config.batch_size,
            rng=np.random.default_rng(_key(user)),
        )
        losses.append((before, local.measure(others).loss))
    first, last = np.array(losses, np.float64).T
    if not np.all(np.isfinite(last)):
        raise ValueError(f"Training diverged at learning rate {config.learning_rate}: lower it.")
    return Personalisation(len(losses), Mean.of(first), Mean.of(last), Mean.of(first - last))


def choose(encoded: sequences.SequenceCorpus, config: Config) -> list[str]:
    """Chooses users with enough examples, in an order that depends on their ids only."""
    chosen = []
    for user in sorted(encoded.user_ids, key=_key):
        if len(chosen) == config.max_users:
            break
        if len(encoded.sequences(user)) >= config.min_examples:
            chosen.append(user)
    if not chosen:
        raise ValueError(f"No user has min_examples = {config.min_examples} examples with a word.")
    return chosen


def _key(user_id: str) -> int:
    return int.from_bytes(hashlib.sha256(f"0/{user_id}".encode()).digest()[:16], "big")


def _held_out_users() -> user_text.UserText:
    config = language_config.TextConfig(data=_DATA)
    return corpus.read_users(config.text).validation


def _mean(values: list[float]) -> str:
    mean = Mean.of(values)
    error = f" ± {mean.standard_error:.3f}" if len(values) > 1 else ""
    return f"{mean.value:.3f}{error}"


def _row(name: str, runs: list[Personalisation]) -> dict[str, str]:
    return {
        "model": name,
        "seeds": str(len(runs)),
        "loss before": _mean([run.before.value for run in runs]),
        "loss after": _mean([run.after.value for run in runs]),
        "gain": _mean([run.gain.value for run in runs]),
        "over users": f"± {max(run.gain.standard_error for run in runs):.3f}",
    }


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="NAME=RUNS", help="Patterns by name.")
    runs = {}
    for given in parser.parse_args().models:
        name, _, pattern = given.partition("=")
        runs[name] = sorted(pathlib.Path().glob(pattern))
        if not runs[name]:
            parser.error(f"NAME=RUNS {given}: there is no such folder.")
    text = _held_out_users()
    rows = []
    for name, folders in runs.items():
        models = (trained_model.find(folder, "last").load() for folder in folders)
        rows.append(_row(name, [personalise(trained, text, Config()) for trained in models]))
    finetuning_text.write(_TABLE, rows)


if __name__ == "__main__":
    main()
