"""The one table of the files in results folders: what each is, and who may see it.

docs/reference/results_folder.md explains the same files at more length; a test compares them.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Literal

from tff_dpftrl import json_text, validation

Kind = Literal[
    "training", "finetuning", "custom finetuning", "pretraining", "sweep", "task", "handed on"
]
"""Kind of a results folder; "handed on" has a statement, and not what tells the kind."""

Publish = Literal["yes", "yes, but", "no", "never"]
"""Whether a file may be published without telling more than the privacy statement allows."""


@dataclasses.dataclass(frozen=True)
class File:
    """A file or folder that commands leave in a results folder.

    Attributes:
      name: Name of the file; that of a folder ends in a slash.
      what: What it is, in a few words.
      publish: Whether it may be published.
      kinds: Kinds of folders in which it is this; empty for all.
    """

    name: str
    what: str
    publish: Publish
    kinds: tuple[Kind, ...] = ()


_WORDS = "the words of the model's ids"
_PRIVATE_WORDS = f"{_WORDS}, counted on protected users without noise: nothing covers them"
_OPTIONS = "options, what was derived from them, versions; paths of files"
_HELD_OUT = "exact figures of the held-out data"
_EXACT = "exact figures of the training users"

_RUNS: tuple[Kind, ...] = ("training", "finetuning", "custom finetuning", "handed on")

FILES = (
    File("README.md", f"which file is what; the card of the model, with {_HELD_OUT}", "yes, but"),
    File("report.html", f"the report as one page, with {_HELD_OUT}", "yes, but"),
    File("privacy_statement.md", "what is promised, and what is not: for people", "yes"),
    File("privacy_statement.json", "the same for programs", "yes"),
    File("privacy.png", "the promise as a picture", "yes"),
    File(
        "model.npz",
        "the model: what it was trained on has to be public",
        "yes, but",
        ("pretraining",),
    ),
    File("model.npz", "the model after the last committed round", "yes"),
    File("weights.npz", "the weights of a model of your own, after the last step", "yes"),
    File("best_model.npz", "the model that was best on the held-out users", "yes, but"),
    File("pretrained_model.npz", "the model that fine-tuning began with", "yes, but"),
    File(
        "hugging_face/",
        "the model after the last step in Hugging Face's layout, with its statement",
        "yes",
    ),
    File(
        "hugging_face_adapters/",
        "its adapters alone, as peft loads them; a path of a file",
        "yes, but",
    ),
    File("counts.csv", "counts over the devices' data, and the errors of their noise", "yes"),
    File("vocabulary.json", _WORDS, "yes, but"),
    File(
        "config.json",
        f"{_OPTIONS}; {_HELD_OUT} before fine-tuning",
        "yes, but",
        ("finetuning",),
    ),
    File("config.json", _OPTIONS, "yes, but"),
    File("metrics.csv", "a row for each round: ε, and the held-out data", "yes, but"),
    File("metrics_README.md", "what each column of metrics.csv is", "yes"),
    File("held_out.json", _HELD_OUT, "yes, but"),
    File("curves.png", "loss and accuracy of each epoch", "yes, but", ("pretraining",)),
    File("curves.png", "accuracy, loss and ε by round", "yes, but"),
    File("tensorboard/", f"of an earlier version: events with {_EXACT}", "no", _RUNS),
    File("pretraining.json", "text, options, metrics of each epoch", "yes, but"),
    File("text_digests.npz", "digests that tell whether a known text was in", "yes, but"),
    File("sweep.json", "options and axes of the sweep; paths of files", "yes, but"),
    File("cells/", "a results folder for each run of the sweep", "no"),
    File("cells.csv", "a row for each run, with how long it took", "no"),
    File("summary.csv", "a row for each setting, with how long it took", "no"),
    File("summary.md", "the same to read, beside n-grams counted on the training users", "no"),
    File("pareto.png", "accuracy against ε", "no"),
    File(
        "production.md",
        "of an earlier version: the noise of a target accuracy, and plans",
        "no",
    ),
    File("noise.png", "of an earlier version: accuracy against noise", "no"),
    File("plans.png", "of an earlier version: ε against report goal, population and rounds", "no"),
    File(".sweep.lock", "empty: locked while the sweep runs", "no"),
    File("sweep.log", "what the run of a sweep has printed", "no"),
    File("cell.json", "how the run of a sweep has ended", "no"),
    File("sessions.md", "of an earlier version: sessions of the devices", "no", ("task",)),
    File("other_tasks.json", "what other tasks on the same devices have spent", "yes"),
    File("task/", "the task as it was served, signed", "yes, but"),
    File("audit.md", "report of an audit", "no"),
    File("audit.json", "the same for programs", "no"),
    File("trade_off.png", "picture of an audit", "no"),
    File(
        "private/",
        f"state, record of participation, keys: with them the noise can be undone; {_EXACT}",
        "never",
    ),
)
"""The files, in the order in which they are shown."""

# Those that the statement covers, and that are for the operator only where it has no guarantee.
_COVERED = (
    *("model.npz", "weights.npz", "best_model.npz", "counts.csv"),
    *("hugging_face/", "hugging_face_adapters/"),
)


def present(
    folder: pathlib.Path, kind: Kind, *, has_guarantee: bool, may_be_published: bool = True
) -> Iterator[File]:
    """Yields the known files that a folder has, by what its kind and its guarantee allow."""
    seen = set()
    is_older = _has_exact_columns(folder)
    for file in FILES:
        if is_older and file.name in ("metrics.csv", "curves.png"):
            file = dataclasses.replace(file, what=f"of an earlier version: {_EXACT}", publish="no")
        if file.name == "vocabulary.json" and _is_of_protected_users(folder / file.name):
            file = dataclasses.replace(file, what=_PRIVATE_WORDS, publish="no")
        if not has_guarantee and kind != "pretraining" and file.name in _COVERED:
            what = f"{file.what}; no guarantee covers it"
            file = dataclasses.replace(file, what=what, publish="no")
        if not may_be_published:
            file = dataclasses.replace(file, publish="never")
        if file.name in seen or (file.kinds and kind not in file.kinds):
            continue
        if file.name == "README.md" or (folder / file.name).exists():  # The former is written last.
            seen.add(file.name)
            yield file


def _is_of_protected_users(path: pathlib.Path) -> bool:
    """Returns whether a vocabulary says that its words were counted without noise."""
    if not path.exists():
        return False
    content = json_text.read_object(path)  # Those of earlier versions say nothing.
    return content.get("is_public") is False and not content.get("is_noised")


def _has_exact_columns(folder: pathlib.Path) -> bool:
    """Returns whether a table of metrics is of an earlier version, which kept nothing apart."""
    if not (folder / "metrics.csv").exists():
        return False
    table = validation.file_in(folder, "metrics.csv", max_bytes=None)
    with open(table, encoding="utf-8", errors="replace") as file:
        columns = file.readline().strip().split(",")
    return not {"seconds", "clients", "loss", "committed_at"}.isdisjoint(columns)
