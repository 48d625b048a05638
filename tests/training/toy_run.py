"""A corpus of 60 users and a config of a few rounds, for tests of whole runs."""

import csv
import json
import pathlib
import random
from typing import Any

import numpy as np
import pytest

from tests import shared_folders
from tff_dpftrl.data import jsonl, user_text
from tff_dpftrl.models import export
from tff_dpftrl.training import config as config_lib

WORDS = [a + b for a in "bdfgk" for b in ("ao", "ee", "iu", "oo", "ua", "ya")]
NUM_ROUNDS = 6


def write_corpus(folder: pathlib.Path) -> None:
    """Writes users.jsonl and words.txt."""
    rng = random.Random(1)
    with open(folder / "users.jsonl", "w") as file:
        for user in range(60):
            start = rng.randrange(30)
            texts = [
                " ".join(WORDS[(start + i * 7) % 30] for i in range(rng.randint(3, 12)))
                for _ in range(rng.randint(2, 6))
            ]
            file.write(json.dumps({"user_id": f"user{user}", "examples": texts}) + "\n")
    (folder / "words.txt").write_text("\n".join(WORDS))


def write_public_corpus(folder: pathlib.Path) -> None:
    """Writes public.jsonl: the words of forty users, by others, and nobody's sentence."""
    users = jsonl.read(folder / "users.jsonl")
    texts = {
        user.replace("user", "author"): [
            " ".join(reversed(text.split())) for text in users.examples(user)
        ]
        for user in users.user_ids[:40]
    }
    jsonl.write(user_text.UserText.from_mapping("public", texts), folder / "public.jsonl")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """The folder of the toy corpus: users.jsonl, public.jsonl and lists of words; only read."""

    def make(folder):
        folder.mkdir()
        write_corpus(folder)
        write_public_corpus(folder)
        (folder / "base_words.txt").write_text("of\nbao\n")

    return shared_folders.made_once(tmp_path_factory, "toy_corpus", make)


def config(corpus: pathlib.Path, **options: Any) -> config_lib.TrainingConfig:
    """A run of a second or two a round; its noise can be drawn again."""
    return config_lib.TrainingConfig(
        **{
            "data": str(corpus / "users.jsonl"),
            "vocabulary": str(corpus / "words.txt"),
            "vocabulary_size": 30,
            "sequence_length": 6,
            "batch_size": 4,
            "embedding_size": 4,
            "lstm_size": 5,
            "num_rounds": NUM_ROUNDS,
            "clients_per_round": 5,
            "min_sep": 3,
            "client_learning_rate": 0.5,
            "server_learning_rate": 0.5,
            "clip_norm": 1.0,
            "mechanism": "blt",
            "buffers": 2,
            "noise_multiplier": 0.5,
            "eval_every": 3,
            "deterministic_noise_seed": 7,
        }
        | options
    )


def weights(output: pathlib.Path) -> tuple[np.ndarray, ...]:
    """The final weights."""
    _, found = export.read(output / "model.npz")
    return found


def rows(output: pathlib.Path) -> list[dict[str, str]]:
    """The rows of private/metrics.csv, without the times."""
    with open(output / "private" / "metrics.csv", newline="") as file:
        found = list(csv.DictReader(file))
    for row in found:
        del row["seconds"]
    return found


class Crash(BaseException):
    """Stands for the death of the process at a given place."""
