"""Checks of a run's files: their permissions and contents."""

from __future__ import annotations

import pathlib
import stat
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from typing import IO

import numpy as np

from tff_dpftrl import json_text
from tff_dpftrl.auditing import audit_report
from tff_dpftrl.auditing.recount import findings, records
from tff_dpftrl.auditing.recount import terms as terms_lib
from tff_dpftrl.data import vocabulary as words_lib
from tff_dpftrl.models import hugging_face

_STATEMENTS = ("privacy_statement.json", "privacy_statement.md")
_CHECKPOINTS = hugging_face.FOLDERS
_AT_THE_END = (
    *_STATEMENTS,
    "metrics.csv",
    "metrics_README.md",
)
_KNOWN = (
    *_AT_THE_END,
    *("config.json", "vocabulary.json", "model.npz", "weights.npz", "best_model.npz"),
    *("pretrained_model.npz", "held_out.json", "curves.png", "sweep.log", "cell.json"),
    *("audit.md", "audit.json", "trade_off.png", "privacy.png", "README.md", "report.html"),
    *("private/ledger.sqlite", "private/ledger.sqlite.key", "private/manifest.json"),
    *("private/cohort_seed", "private/metrics_seed", "private/pool.json", "private/baselines.json"),
    *("private/texts.sqlite", "private/report.html", "private/diverged.json"),
    *("private/vocabulary.json", "private/keyboard_baselines.json"),
    *hugging_face.FILES,
    *(f"{folder}/{name}" for folder in _CHECKPOINTS for name in _STATEMENTS),
    *("private/metrics.csv", "private/curves.png", "private/held_out.json"),
    "private/best_model.npz",
    "private/ledger.sqlite-journal",  # A killed process leaves one even if nothing is undone.
)
# Looked through for secrets and exact figures, but compared with nothing.
_NOT_READ = frozenset(
    {
        *("best_model.npz", "pretrained_model.npz", "held_out.json", "curves.png"),
        *("tensorboard", "metrics_README.md", "vocabulary.json", "trade_off.png"),
        *("sweep.log", "cell.json", "privacy.png"),
        *_CHECKPOINTS,
    }
)
_EVENTS = ("private/tensorboard/", "tensorboard/")  # The latter of an earlier version.
_FOLDERS = ("private", "private/checkpoints", *(name[:-1] for name in _EVENTS), *_CHECKPOINTS)
# Files of text that may be published, by docs/reference/results_folder.md.
_MAY_BE_PUBLISHED = (
    *("privacy_statement.json", "privacy_statement.md", "config.json", "vocabulary.json"),
    *("held_out.json", "metrics_README.md", "README.md", "report.html"),
    *(f"{folder}/{name}" for folder in _CHECKPOINTS for name in (*_STATEMENTS, "config.json")),
)
_EXACT = ("loss", "top1", "seconds", "clients")
_SMALLEST_SECRET = 10**9
_PART_BYTES = 1 << 20


def all_files(folder: pathlib.Path) -> Iterator[tuple[str, pathlib.Path]]:
    """Yields the name, relative to the folder, and the path of each file and folder in it."""
    for path in sorted(folder.rglob("*")):
        yield path.relative_to(folder).as_posix(), path


def permissions(test: str, run: records.Records) -> audit_report.Finding:
    """Checks that only the owner can read private/."""
    private = run.folder / "private"
    if not private.exists():
        return findings.skipped(test, "there is no private/")
    wrong = []
    for path in [private, *(path for _, path in all_files(private))]:
        mode = stat.S_IMODE(path.lstat().st_mode)
        if mode & 0o077:
            name = path.relative_to(run.folder).as_posix()
            wrong.append(f"{name} has mode {mode:04o}, open to others than its owner")
    return findings.judged(test, wrong, "No file in it is open to others than its owner")


def secrets(test: str, run: records.Records, terms: terms_lib.Terms) -> audit_report.Finding:
    """Checks that no file outside of private/ holds a secret of the run."""
    if not terms.is_secret:
        return findings.skipped(test, "the seed is no secret: config.json tells it")
    sought = dict(_secrets(run))
    if not sought:
        return findings.skipped(test, "there is no secret that could be read")
    wrong, looked_at = [], 0
    for name, path in all_files(run.folder):
        if name.startswith("private/") or not path.is_file():
            continue
        looked_at += 1
        found = set()
        for part in _parts(path, max(len(s) for spellings in sought.values() for s in spellings)):
            for what, spellings in sought.items():
                if any(spelling in part for spelling in spellings):
                    found.add(what)
        wrong += [f"{name} holds {what}" for what in sought if what in found]
    fine = f"None of {', '.join(sought)} is in {looked_at} files, as bytes, decimal or hexadecimal"
    return findings.judged(test, wrong, fine, nothing=not looked_at and "there is no other file")


def _secrets(run: records.Records) -> Iterator[tuple[str, tuple[bytes, ...]]]:
    """Yields each secret's description, and the encodings of it that are searched for."""
    state = run.checkpoint
    tensor = None if state is None else state.get("aggregator/seed")
    if tensor is not None and tensor.dtype == np.int64:
        seed = tensor.whole()
        words = [int(word) for word in seed.ravel() if abs(int(word)) > _SMALLEST_SECRET]
        unsigned = [word % 2**64 for word in words]
        yield (
            "the seed of the noise",
            (
                *(row.tobytes() for row in np.atleast_2d(seed)),
                *(str(word).encode() for word in (*words, *unsigned)),
                *(f"{word:016x}".encode() for word in unsigned),
            ),
        )
    for name, what in (
        ("cohort_seed", "the seed of the cohorts"),
        ("metrics_seed", "the seed of the noise of the metrics"),  # Of runs of version 0.4.
        ("ledger.sqlite.key", "the key"),
    ):
        path = run.folder / "private" / name
        content = path.read_bytes() if path.is_file() else b""
        if len(content) >= 16:
            text = content.strip() if name.endswith("_seed") else content.hex().encode()
            yield what, (content.strip(), text, str(int(text, 16)).encode())


def _parts(path: pathlib.Path, overlap: int) -> Iterator[bytes]:
    """Yields a file's bytes, and an archive's members, in parts that share `overlap` bytes."""
    with path.open("rb") as file:
        yield from _overlapping(file, overlap)
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                with archive.open(name) as member:
                    yield from _overlapping(member, overlap)


def _overlapping(stream: IO[bytes], overlap: int) -> Iterator[bytes]:
    part = b""
    while content := stream.read(_PART_BYTES):
        part = part[-overlap:] + content
        yield part


def complete(test: str, run: records.Records, terms: terms_lib.Terms) -> audit_report.Finding:
    """Checks that all files of a run exist, and no others."""
    present = {name for name, path in all_files(run.folder) if not path.is_dir()}
    required = ["config.json"] if run.has_custom_model else ["config.json", "vocabulary.json"]
    if run.rounds_done == terms.num_rounds:
        required += [*_AT_THE_END, model_of(run)]
    if (run.folder / "private").exists():
        required += ["private/ledger.sqlite", "private/ledger.sqlite.key", "private/manifest.json"]
        if terms.kind == terms_lib.SAMPLED and terms.is_secret:
            required.append("private/cohort_seed")
    wrong = [f"{name} is missing" for name in required if name not in present]
    wrong += list(run.unreadable)
    kept = None if run.checkpoint is None else f"private/checkpoints/{run.checkpoint.path.name}"
    for name in sorted(present):
        is_leftover = name.rpartition("/")[2].startswith(".") and name.endswith(".unfinished")
        if name in _KNOWN or name == kept or name.startswith(_EVENTS) or is_leftover:
            continue
        if name.startswith("private/checkpoints/") and kept is not None:
            wrong.append(f"{name} is another state than the one committed last: remove it")
        else:
            wrong.append(unknown_file(name))
    wrong += unknown_folders(run.folder, _FOLDERS)
    unread = sorted(
        {name.partition("/")[0] for name in present if name.partition("/")[0] in _NOT_READ}
    )
    named = f". Nobody has compared the content of {', '.join(unread)}" if unread else ""
    return findings.judged(test, wrong, f"All {len(present)} are those of a run{named}")


PACKAGE_WORDS = ("english", "docs")
"""Vocabularies whose words this package has, or counts in Python's documentation."""


def vocabulary(test: str, run: records.Records) -> audit_report.Finding:
    """Checks that a vocabulary that is said to be of this package is."""
    name, unreadable = run.config["vocabulary"], []
    content = records.read_json(run.folder, "vocabulary.json", unreadable)
    if content is None:
        return findings.skipped(test, "there is no vocabulary.json that could be read")
    if "words" not in content:
        return findings.skipped(test, "sub-words are not learned again")
    words, lower_case = content["words"], content["lower_case"]
    make = words_lib.english if name == "english" else words_lib.standard_library
    unknown = len({*words} - {*make(len(words), lower_case=lower_case).words})
    if unknown and name == "docs":
        why = f"{unknown} of {len(words)} words are not in this Python's docstrings, whose words"
        return findings.skipped(test, f"{why} differ from those of other versions")
    wrong = [f"{unknown} of {len(words)} words are not in its list {name!r}"] if unknown else []
    fine = f"All {len(words)} words are of its list {name!r}"
    return findings.judged(test, wrong, fine, nothing=not words and "it has no words")


def unknown_file(name: str) -> str:
    """Describes a file that no run writes."""
    return f"{name} is no file of a run, and what it gives away is not known"


def unknown_folders(folder: pathlib.Path, known: Iterable[str]) -> list[str]:
    """Describes each folder that no run makes."""
    return [
        f"{name}/ is no folder of a run, and what it gives away is not known"
        for name, path in all_files(folder)
        if path.is_dir() and name not in known
    ]


def model_of(run: records.Records) -> str:
    """Returns the name of the file of a run's model."""
    return "weights.npz" if run.has_custom_model else "model.npz"


def exact_figures(test: str, run: records.Records) -> audit_report.Finding:
    """Checks that no file that may be published holds figures of the training cohorts."""
    if not run.metrics:
        return findings.skipped(test, "there is no metrics.csv, or no row in it")
    # A share such as 1/9 may be that of the held-out users, too, which may be published.
    published = {
        text
        for row in run.published_metrics or ()
        for column, text in row.items()
        if column.startswith("eval_")
    }
    exact = _EXACT
    if run.config.get("held_out_users") == "protected":
        exact += tuple(column for column in run.metrics[0] if column.startswith("eval_"))
    figures = {
        (column, row[column])
        for row in run.metrics
        for column in exact
        if len(row.get(column) or "") >= 8  # Shorter numbers may be there by chance.
        and row[column] not in published
    }
    # Older runs have exact figures in metrics.csv, and say so.
    is_apart = (run.folder / "private" / "metrics.csv").exists()
    names = (*_MAY_BE_PUBLISHED, "metrics.csv") if is_apart else _MAY_BE_PUBLISHED
    wrong, looked_at = holds_figures(run.folder, names, figures)
    columns = run.published_metrics[0] if is_apart and run.published_metrics else ()
    wrong += [f"metrics.csv has the column {column}" for column in exact if column in columns]
    note = run.folder / "metrics_README.md"
    if note.is_file():
        warning = note.read_text(encoding="utf-8", errors="replace").partition("Do not publish")[2]
        wrong += [
            f"metrics_README.md does not say that the column {column} is exact"
            for column in _EXACT
            if column in run.metrics[0] and f"`{column}`" not in warning
        ]
    return no_figures(test, wrong, figures, looked_at)


def no_figures(
    test: str, wrong: Sequence[str], figures: set[tuple[str, str]], looked_at: int
) -> audit_report.Finding:
    """Makes the finding of a search for exact figures in files that may be published."""
    nothing = (
        "no figure has the eight characters or more by which it is known"
        if not figures
        else not looked_at and "there is no file that may be published"
    )
    fine = f"None of {len(figures)} figures is in {looked_at} files"
    return findings.judged(test, wrong, fine, nothing=nothing)


def holds_figures(
    folder: pathlib.Path, names: Iterable[str], figures: set[tuple[str, str]]
) -> tuple[list[str], int]:
    """Looks for figures, pairs of a column and a value as written, in files of text.

    Returns a clause for each column with a value in a file, and the number of files that exist.
    """
    wrong, looked_at = [], 0
    for path in filter(pathlib.Path.is_file, map(folder.joinpath, names)):
        looked_at += 1
        content = path.read_text(encoding="utf-8", errors="replace")
        columns = sorted({column for column, figure in figures if figure in content})
        wrong += [
            f"{path.relative_to(folder).as_posix()} holds values of the column {column}"
            for column in columns
        ]
    return wrong, looked_at


def model(test: str, run: records.Records, terms: terms_lib.Terms) -> audit_report.Finding:
    """Checks that the model file holds the weights of the committed state, and nothing else."""
    path = run.folder / model_of(run)
    if not path.is_file():
        return findings.skipped(test, f"there is no {path.name}")
    if run.checkpoint is not None and run.rounds_done != terms.num_rounds:
        return findings.skipped(test, "the run has not done all rounds: its model may be older")
    if run.config.get("adapter_rank") is not None:
        return findings.skipped(test, "it is the sum of a public model and of adapters")
    return weights(test, run, path)


def _other_description(run: records.Records, texts: dict[str, str]) -> list[str]:
    """Lists what a model file says in words that is not the description of the run's model."""
    wrong = [f"it holds the text {name!r}" for name in texts if name != "model"]
    described = run.facts.get("model")
    if described is not None and not run.has_custom_model:
        try:
            is_same = json_text.parse(texts.get("model", "")) == described
        except ValueError:
            is_same = False
        if not is_same:
            wrong.append("the model that it describes is another one than config.json does")
    return wrong


def weights(test: str, run: records.Records, path: pathlib.Path) -> audit_report.Finding:
    """Checks that a model file holds the weights of the committed state, and nothing else."""
    state = run.checkpoint
    if state is None:
        return findings.skipped(test, "there is no checkpoint of it that could be read")
    averaged = run.config.get("iterate_averaging") is not None
    part = "finalizer/average/" if averaged else "global_model_weights/trainable/"
    expected = [tensor for name, tensor in state.tensors if name.startswith(part)]
    texts, same = {}, []
    try:
        with np.load(path, allow_pickle=False) as archive:
            for name in archive.files:
                array = archive[name]
                if array.dtype.kind == "U":
                    texts[name] = str(array)
                else:
                    same.append(len(same) < len(expected) and _is(array, expected[len(same)]))
                del array  # Before the next one is read.
    except Exception as error:  # NumPy and zipfile raise a dozen kinds.
        return findings.judged(test, [f"{path.name} cannot be read: {error}"], "")
    wrong = _other_description(run, texts)
    if not all(same) or len(same) != len(expected):
        wrong.append(f"the weights in {path.name} are not those of the committed state")
    fine = f"Its {len(same)} tensors are those of the state"
    return findings.judged(test, wrong, fine, nothing=not same and f"{path.name} has no tensors")


def _is(array: np.ndarray, tensor: records.Tensor) -> bool:
    """Returns whether an array has the shape and the entries of a tensor."""
    if array.shape != tensor.shape:
        return False
    flat, at = array.reshape(-1), 0
    for part in tensor.parts():
        if not np.array_equal(flat[at : at + len(part)], part):
            return False
        at += len(part)
    return True
