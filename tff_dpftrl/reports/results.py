"""The facts in a results folder, read from its files: what may be published, unless asked for all.

Without `private=True` nothing is read from `private/`, and exact figures of the training users are
left out of what is read elsewhere. So a page made of the facts cannot show them.
"""

from __future__ import annotations

import csv
import dataclasses
import math
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tff_dpftrl import json_text, validation
from tff_dpftrl.accounting import statement as statement_lib
from tff_dpftrl.accounting import statement_sentences as sentences
from tff_dpftrl.reports import files

ACCURACY = "eval_top1_in_vocab"
LOSS = "eval_loss"
Row = Mapping[str, float]

# The columns of `metrics.csv` that are no figures of the training users, under one name each.
_PUBLIC = {
    "round": "round",
    "epsilon": "epsilon",
    "privacy/epsilon": "epsilon",
}
_EXACT = {
    "loss": "loss",
    "top1": "top1",
    "client_work/train/loss": "loss",
    "client_work/train/top1_in_vocab": "top1",
}
_RUN_KINDS = ("training", "finetuning", "custom finetuning")
# Columns of a sweep's summary.csv that tell something of the training users, or take much room.
_NOT_OF_A_SETTING = re.compile(
    r"(seconds|eval_perplexity|eval_top1_oov.*?|eval_top[35].*|eval_decoder)(_se)?"
)


WITH_EARLIER_TEXT = " with earlier text"
"""End of the names of models that have a cache of each user's own earlier text."""

MODEL_WITH_EARLIER_TEXT = f"model{WITH_EARLIER_TEXT}"
"""Name of the run's own model with that cache among the baselines."""


@dataclasses.dataclass(frozen=True, eq=False)
class Results:
    """The facts in a results folder.

    Attributes:
      folder: The folder.
      kind: Its kind.
      is_private: Whether exact figures of the training users are among the facts.
      statement: The privacy statement; None if there is none.
      options: Options of the run, paths cut to their last part unless `is_private`.
      derived: Values that were derived from the options.
      facts: Further facts of the run's `config.json`.
      versions: Versions of packages, by name.
      rows: Metrics by round: "round", "epsilon", columns of held-out users, which begin with
        "eval_", and released with noise, which begin with "noised_"; if `is_private` also "loss"
        and "top1" of the training cohorts.
      baselines: Top-1 accuracies of simpler models on the same held-out users, by name; and
        that of the run's own model with a cache, if it was measured.
      settings: Rows of the settings of a sweep, as written.
      cells: Metrics of each run of a sweep that has some, by its name.
      audit: What a recount has reported in the folder; None if there is no such report.
      missing: Sentences on what is not there.
    """

    folder: pathlib.Path
    kind: files.Kind
    is_private: bool
    statement: statement_lib.PrivacyStatement | None
    options: Mapping[str, Any]
    derived: Mapping[str, Any]
    facts: Mapping[str, Any]
    versions: Mapping[str, Any]
    rows: Sequence[Row]
    baselines: Mapping[str, float]
    settings: Sequence[Mapping[str, str]]
    cells: Mapping[str, Sequence[Row]]
    audit: Mapping[str, Any] | None
    missing: Sequence[str]

    @property
    def data(self) -> str:
        """Name of the data, without a path; that of the folder if it is not recorded."""
        stated = self.statement.parameters.get("data") if self.statement is not None else None
        name = stated or self.options.get("data")
        return str(name) if name else self.folder.absolute().name

    @property
    def is_of_words(self) -> bool:
        """Whether the model reads words: what a custom model reads is not known."""
        is_known = self.kind == "sweep" or (self.folder / "vocabulary.json").exists()
        return is_known and self.kind != "custom finetuning"

    @property
    def held_out(self) -> str:
        """Name of the data that the columns eval_… are of."""
        return "held-out users" if self.is_of_words else "held-out data"

    @property
    def has_guarantee(self) -> bool:
        """Whether there is a statement with a guarantee that no audit has refuted."""
        stated = self.statement
        return stated is not None and stated.has_guarantee and not stated.is_refuted

    @property
    def may_be_published(self) -> bool:
        """Whether it is none of the runs that `sweep --select` chooses among."""
        stated = self.statement
        return stated is None or sentences.ONE_OF_A_CHOICE not in stated.headline_caveats

    def present_files(self) -> Iterator[files.File]:
        """Yields the files of the folder, with what each has and whether it may be published."""
        return files.present(
            self.folder,
            self.kind,
            has_guarantee=self.has_guarantee,
            may_be_published=self.may_be_published,
        )

    @property
    def is_stated(self) -> bool:
        """Whether there is a statement, and of all rounds that there are metrics of."""
        stated = self.statement
        if stated is None:
            return False
        seen, names = stated.observed, ("num_steps", "num_rounds")
        rounds = [stated.parameters.get(name) for name in names] if seen is None else []
        rounds = [seen.num_rounds] if seen is not None else [n for n in rounds if n is not None]
        return [row.get("round") for row in self.rows[-1:]] in ([], rounds)

    @property
    def evaluations(self) -> list[Row]:
        """Rows of the rounds after which the model was measured on held-out users."""
        return [row for row in self.rows if any(name.startswith("eval_") for name in row)]

    def series(self, column: str) -> list[tuple[float, float]]:
        """Returns the pairs of a round and a column's value that are there."""
        return series(self.rows, column)


def series(rows: Sequence[Row], column: str) -> list[tuple[float, float]]:
    """Returns the pairs of a round and a column's value that are there."""
    return [(row["round"], row[column]) for row in rows if "round" in row and column in row]


def kind_of(folder: pathlib.Path) -> files.Kind:
    """Tells the kind of a results folder by its files."""
    if (folder / "config.json").exists():
        kind = _object(folder, "config.json").get("kind")
        return kind if kind in _RUN_KINDS else "training"
    if (folder / "sweep.json").exists():
        return "sweep"
    if (folder / "pretraining.json").exists():
        return "pretraining"
    columns = _table(folder, "metrics.csv")[0]
    has_statement = (folder / "privacy_statement.json").exists()
    if {"committed_at", "privacy/epsilon"} & set(columns) or (columns and not has_statement):
        return "task"
    if has_statement:
        return "handed on"
    what = "does not exist" if not folder.is_dir() else "has no results of tff-dpftrl"
    raise validation.UsageError(
        f"{folder} {what}: name a folder that train, finetune, pretrain, sweep or task report "
        "wrote."
    )


def read(folder: pathlib.Path, *, private: bool = False) -> Results:
    """Reads the facts in a results folder; `private`: also exact figures of training users."""
    kind = kind_of(folder)
    config = _object(folder, "config.json")
    pretraining = _object(folder, "pretraining.json") if kind == "pretraining" else {}
    sweep = _object(folder, "sweep.json") if kind == "sweep" else {}
    options = _mapping(config, "config") or _mapping(sweep, "options")
    options = options or {**_mapping(pretraining, "pretraining"), **_mapping(pretraining, "model")}
    facts = _mapping(config, "facts")
    rows = _epochs(pretraining) or _rows(folder, private)
    held_out = _held_out(folder, private, rows[-1].get("round") if rows else None)
    return Results(
        folder=folder,
        kind=kind,
        is_private=private,
        statement=_statement(folder),
        options=options if private else _without_paths(options),
        derived=_mapping(config, "derived"),
        facts=facts or pretraining,
        versions=_mapping(config, "versions")
        or {name: pretraining[name] for name in ("tff_dpftrl",) if name in pretraining},
        rows=rows,
        baselines=_baselines(folder, facts, private)
        | with_earlier_text(held_out, MODEL_WITH_EARLIER_TEXT),
        settings=_settings(folder, sweep, private) if kind == "sweep" else (),
        cells=_cells(folder, private) if kind == "sweep" else {},
        audit=_object(folder, "audit.json") or None,
        missing=_missing(folder, kind),
    )


def _object(folder: pathlib.Path, name: str) -> dict[str, Any]:
    path = folder / name
    return json_text.read_object(path, folder=folder) if path.exists() else {}


def _mapping(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = content.get(name)
    return value if isinstance(value, dict) else {}


def _without_paths(value: Any) -> Any:
    """Cuts paths to their last part: their folders may name people and machines."""
    if isinstance(value, dict):
        return {name: _without_paths(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_without_paths(one) for one in value]
    if isinstance(value, str):
        return re.split(r"[\\/]", value.rstrip("\\/"))[-1]
    return value


def _statement(folder: pathlib.Path) -> statement_lib.PrivacyStatement | None:
    path = folder / "privacy_statement.json"
    remedy = "tff-dpftrl report writes it again."
    return statement_lib.PrivacyStatement.read(path, remedy=remedy) if path.exists() else None


def _table(folder: pathlib.Path, name: str) -> tuple[Sequence[str], list[dict[str, str]]]:
    """Reads the header and rows of a table; lines that a crash cut short are left out."""
    path = folder / name
    if not path.exists():
        return [], []
    validation.file_in(folder, name, max_bytes=None, remedy="Move it back into the folder.")
    try:
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(line for line in file if line.endswith("\n"))
            rows = list(reader)
    except (OSError, ValueError, csv.Error) as error:
        raise validation.UsageError(f"{path} cannot be read: {error}. Remove it.") from error
    known = [{k: v for k, v in row.items() if isinstance(k, str) and v} for row in rows]
    return reader.fieldnames or [], known


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    found = {}
    for name, value in row.items():
        try:
            number = float(value)
        except (TypeError, ValueError):
            continue
        if math.isfinite(number):
            found[name] = number
    return found


def _rows(folder: pathlib.Path, private: bool) -> list[Row]:
    names = _PUBLIC | _EXACT if private else _PUBLIC
    rows = []
    exact = "private/metrics.csv"  # Of an older run, metrics.csv has all columns.
    name = exact if private and (folder / exact).exists() else "metrics.csv"
    for row in map(_numbers, _table(folder, name)[1]):
        kept = {new: row[old] for old, new in names.items() if old in row}
        rows.append(kept | {n: row[n] for n in row if n.startswith(("eval_", "noised_"))})
    return rows


def _epochs(pretraining: Mapping[str, Any]) -> list[Row]:
    epochs = pretraining.get("epochs")
    rows = [_numbers(one) for one in epochs if isinstance(one, dict)] if epochs else []
    return [row | {"round": row.get("epoch", 0.0)} for row in rows]


def levels(baselines: Mapping[str, float]) -> dict[str, float]:
    """Returns the accuracies for a chart of models that have no cache of earlier text."""
    return {k: v for k, v in baselines.items() if not k.endswith(WITH_EARLIER_TEXT)}


def _baselines(folder: pathlib.Path, facts: Mapping[str, Any], private: bool) -> dict[str, float]:
    found = _numbers({"pretrained": facts.get("pretrained_top1", "")})
    if private:
        found |= _numbers(_object(folder, "private/baselines.json"))
    return found


def _held_out(folder: pathlib.Path, private: bool, last: float | None) -> dict[str, Any]:
    held_out = _object(folder, "held_out.json")
    if private:
        held_out |= _object(folder, "private/held_out.json")
    is_of_last = last is not None and held_out.get("round") == last
    return held_out if is_of_last else {}  # Otherwise it is of an earlier model.


def with_earlier_text(held_out: Mapping[str, Any], name: str) -> dict[str, float]:
    """Reads a run's accuracy with a cache of each user's earlier text, on all words."""
    every = _mapping(_mapping(held_out, "earlier_text"), "all")
    return _numbers({name: every.get("model_and_cache", "")})


def protects_held_out(sweep: Mapping[str, Any]) -> bool:
    """Returns whether a run of a sweep, by its `sweep.json`, protects its held-out users."""
    values = [_mapping(sweep, "options").get("held_out_users")]
    values += _mapping(sweep, "axes").get("held_out_users", ())
    return "protected" in values


def _settings(
    folder: pathlib.Path, sweep: Mapping[str, Any], private: bool
) -> list[dict[str, str]]:
    left_out = _NOT_OF_A_SETTING
    if not private and protects_held_out(sweep):
        left_out = re.compile(rf"{left_out.pattern}|eval_.*")
    rows = [
        {name: value for name, value in row.items() if not left_out.fullmatch(name)}
        for row in _table(folder, "summary.csv")[1]
    ]
    return rows if private else _without_paths(rows)


def _cells(folder: pathlib.Path, private: bool) -> dict[str, list[Row]]:
    paths = sorted((folder / "cells").glob("*/metrics.csv"))
    found = {path.parent.name: _rows(path.parent, private) for path in paths}
    return {name: rows for name, rows in found.items() if rows}


def _missing(folder: pathlib.Path, kind: files.Kind) -> list[str]:
    if kind in ("sweep", "pretraining"):
        return []
    missing = []
    if not (folder / "privacy_statement.json").exists() and kind != "task":
        missing.append("There is no privacy_statement.json: nothing is known of a promise.")
    if not (folder / "private").exists() and kind != "task":
        missing.append(
            "There is no private/: statement and model are as they were handed on, a recount can "
            "derive nothing again, and the run cannot go on."
        )
    if not (folder / "metrics.csv").exists():
        missing.append("There is no metrics.csv: accuracy and loss are not known.")
    return missing
