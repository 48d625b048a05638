"""Options of a task of a tiny language model, and its devices, for tests."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from tests.runtime.tasks import small_folder
from tests.training import toy_run
from tff_dpftrl.runtime.device import text_examples
from tff_dpftrl.runtime.tasks import planned_task, task_config

TEXTS = [f"{toy_run.WORDS[i]} {toy_run.WORDS[i + 1]} {toy_run.WORDS[i + 2]}" for i in range(20)]


def write_corpora(folder: pathlib.Path) -> None:
    """Writes the users' text, users.jsonl, public text, public.jsonl, and words.txt."""
    toy_run.write_corpus(folder)
    with open(folder / "public.jsonl", "w") as file:
        for user in range(4):
            line = {"user_id": f"p{user}", "examples": TEXTS[user : user + 12]}
            file.write(json.dumps(line) + "\n")


def config(corpora: pathlib.Path, **options: Any) -> task_config.TaskConfig:
    """Returns the options of the task."""
    return task_config.TaskConfig.of(
        **{
            "data": str(corpora / "users.jsonl"),
            "vocabulary": str(corpora / "words.txt"),
            "proxy_data": str(corpora / "public.jsonl"),
            "proxy_devices": 2,
            "proxy_rounds": 2,
            "vocabulary_size": 30,
            "sequence_length": 4,
            "batch_size": 4,
            "embedding_size": 4,
            "lstm_size": 4,
            "num_rounds": 4,
            "clients_per_round": 50,
            "num_devices": 400,
            "client_learning_rate": 0.5,
            "clip_norm": 1.0,
            "mechanism": "identity",
            "noise_multiplier": 0.5,
            "delta": 1e-5,
            "population": "tests",
        }
        | options
    )


def run_round(rounds: small_folder.Rounds, model: bytes | None = None) -> None:
    """Runs a round with three devices, whose reports the server sees."""
    device = small_folder.device_of(rounds.task)
    model = rounds.commit.model if model is None else model
    rounds.run([small_folder.report(device, model, stored) for stored in examples()])


def run_secure_round(rounds: small_folder.Rounds, model: bytes | None = None) -> None:
    """Runs a round with three devices that sum their reports securely."""
    device = small_folder.device_of(rounds.task)
    model = rounds.commit.model if model is None else model
    reports = [small_folder.secure_report_of(device, model, stored) for stored in examples()]
    survivors, total = small_folder.run_group(rounds.task, reports)
    rounds.run_groups([(total, len(survivors))])


def examples() -> list[list[bytes]]:
    """Returns the examples that three devices have stored."""
    texts = [TEXTS[i : i + 3] for i in range(3)]
    return [[text_examples.encode({"tokens": [text]}) for text in stored] for stored in texts]


def begun(folder: Any, store: Any) -> small_folder.Rounds:
    """Adds a task to a store, with no round done."""
    return small_folder.Rounds(planned_task.PlannedTask(folder), store)
