"""A corpus of 60 users, a config of a few rounds, and finished runs, for tests of whole runs."""

import csv
import functools
import json
import os
import pathlib
import pickle
import random
import shutil
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests import shared_folders
from tff_dpftrl import pictures
from tff_dpftrl.data import jsonl, user_text
from tff_dpftrl.models import export
from tff_dpftrl.runs import committed_rounds, loop, tensorboard_log
from tff_dpftrl.training import config as config_lib
from tff_dpftrl.training import report

WORDS = [a + b for a in "bdfgk" for b in ("ao", "ee", "iu", "oo", "ua", "ya")]
NUM_ROUNDS = 6
DONE_WHEN_KILLED = 4
VISIBLE = (
    (tensorboard_log.TensorBoardLog, "append"),
    (loop, "_shown"),  # The progress bar.
    (report.TextPresentation, "write_best"),
    (report.TextPresentation, "write_model"),
)
"""What shows something of a round, for `kills.everywhere`."""
_draw = pictures.write  # Before any test has pictures left empty.


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
    return config_lib.TrainingConfig.of(
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


class Finished(NamedTuple):
    """A finished run, only read: whoever opens its ledger, or writes, copies its folder first.

    Attributes:
      output: Its folder, written under a strict umask.
      killed: The same when its process was killed in the fifth round, before its commit.
      results: What it returned.
      lines: What it said.
    """

    output: pathlib.Path
    killed: pathlib.Path
    results: report.TrainingResults
    lines: list[str]


@pytest.fixture(scope="session")
def trained(corpus, tmp_path_factory):
    """A run with a secret seed, `fixed_seeds`; its 48 users are back after three rounds."""
    options = {"clients_per_round": 15, "eval_every": 2, "deterministic_noise_seed": None}
    return _finished(corpus, tmp_path_factory, "trained", **options)


@pytest.fixture(scope="session")
def seeded(corpus, tmp_path_factory):
    """The run of `config`, whose noise can be drawn again."""
    return _finished(corpus, tmp_path_factory, "seeded")


def _finished(corpus, tmp_path_factory, name, **options):
    make = functools.partial(_train, corpus, options)
    folder = shared_folders.made_once(tmp_path_factory, name, make)
    said = pickle.loads((folder / "said.pickle").read_bytes())
    return Finished(folder / "run", folder / "killed", *said)


def _train(corpus, options, folder):
    """Trains with paths that are relative to another folder."""
    from tests import fixed_seeds
    from tff_dpftrl.training import run

    commit = committed_rounds.CommittedRounds.commit
    lines = []

    def kept(rounds, round_index, *args):
        if round_index == DONE_WHEN_KILLED:
            shutil.copytree(folder / "run", folder / "killed")
        return commit(rounds, round_index, *args)

    before = os.umask(0o077)
    try:
        with pytest.MonkeyPatch.context() as patch:
            fixed_seeds.fix(patch)
            patch.setattr(pictures, "write", _draw)
            patch.setattr(committed_rounds.CommittedRounds, "commit", kept)
            patch.chdir(corpus)
            own = config(pathlib.Path("."), **options)
            assert own.language.data == "users.jsonl"
            results = run.train(own, folder / "run", progress=lines.append)
    finally:
        os.umask(before)
    (folder / "said.pickle").write_bytes(pickle.dumps((results, lines)))


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
