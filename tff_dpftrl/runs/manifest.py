"""`config.json`: kind of a run, its options, what was derived from them, and versions.

A run is bound to its manifest: a copy lies with the run's secrets, and every
checkpoint's fingerprint, hence every commit in the ledger, covers the copy's digest. A
run whose `config.json` was edited afterwards would state an ε that is not the one it
spent; it is refused, with the difference named. The copy is written first, before anything that
may be published: a run whose `config.json` is missing goes on by its copy, and writes it again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from tff_dpftrl import durable_files, json_text, private_round, validation, version
from tff_dpftrl.participation import ledger_file
from tff_dpftrl.runs import checkpoint, joint_runs

FORMAT = 2
"""Raise it when a run that was begun before can no longer be resumed."""

Kind = Literal["training", "finetuning", "custom finetuning"]
"""Kind of a run: of `train`, `finetune`, or `finetuning.custom_run.finetune`."""

TRAINING: Kind = "training"
FINETUNING: Kind = "finetuning"
CUSTOM_FINETUNING: Kind = "custom finetuning"

# Commands that begin and resume the runs of each kind.
_COMMANDS: dict[Kind, tuple[str, str]] = {
    TRAINING: ("tff-dpftrl train", "tff-dpftrl train --resume --output"),
    FINETUNING: ("tff-dpftrl finetune", "tff-dpftrl finetune --resume --output"),
    CUSTOM_FINETUNING: (
        "finetuning.custom_run.finetune",
        "the same call in Python, with the folder",
    ),
}
TEXTS = "texts of the training users"
"""Name of an identity: with other texts, a run would protect others than its statement says."""
NAME = "config.json"
"""Name of the file that may be published."""

PRIVATE = "private"
"""Name of the folder of a run's secrets, in that of the run."""

# Files that show that a folder holds something else, and what to do with such a folder.
_OTHER_FOLDERS = {
    "task.pb": "a task for devices, which tff-dpftrl task report reports",
    "pretraining.json": "a model of tff-dpftrl pretrain, which --initial-weights begins with",
    "sweep.json": "a sweep, which the same tff-dpftrl sweep command goes on with",
    str(joint_runs.RECORD): "a sweep with --select, whose runs stay secret, and which the same "
    "command goes on with",
}
# Files without a manifest that a new run would replace.
_RESULTS = (
    *("model.npz", "weights.npz", "vocabulary.json", "metrics.csv", "privacy_statement.json"),
    "private/metrics.csv",
)
COPY = pathlib.PurePath("private", "manifest.json")
"""Path of the private copy, which makes a folder that of a run."""
TEXTS_CACHE = pathlib.PurePath("private", "texts.sqlite")
"""Path of the texts of a large corpus in the folder of a run, which is there before the run."""
DIVERGED = pathlib.PurePath("private", "diverged.json")
"""Path of the file that says that a run ended with weights that are not finite."""
_LEDGER = pathlib.PurePath("private", "ledger.sqlite")
_CHECKPOINTS = pathlib.PurePath("private", "checkpoints")
_CHOICE = "record of the choice among runs"  # Name of an identity.
_PACKAGES = ("tensorflow", "tensorflow-federated", "numpy", "scipy", "dp-accounting")
_SHOWN = 3
_REMEDY = "Restore this manifest of a run; without it nobody can tell what was run."


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Description of a run, fixed when it begins.

    Attributes:
      config: Resolved options of the run, JSON-compatible. Only its kind gives them a meaning.
      derived: Values that were derived from the options, as `MechanismPlan.derived` returns them.
      facts: Further facts for the run's report, such as the source of its vocabulary.
      identities: Digests of what must not change, by name; they are kept private. A digest of the
        users' names would tell somebody who knows all of them but one whether that one took part.
      recorded_kind: Kind of the run; None for a run that began before kinds were recorded.
      noise_version: `private_round.NOISE_VERSION` when the run began.
    """

    config: Mapping[str, Any]
    derived: Mapping[str, Any]
    facts: Mapping[str, Any]
    identities: Mapping[str, str]
    recorded_kind: Kind | None = None
    noise_version: int = dataclasses.field(default_factory=lambda: private_round.NOISE_VERSION)

    @property
    def kind(self) -> Kind:
        """Kind of the run, told by its options if it was not recorded."""
        if self.recorded_kind is not None:
            return self.recorded_kind
        if "own_model" in self.config:
            return CUSTOM_FINETUNING
        return FINETUNING if "num_steps" in self.config else TRAINING

    def check_kind(self, kind: Kind, output: pathlib.Path) -> None:
        """Refuses a run of another kind."""
        if self.kind != kind:
            began_with, resumed_by = _COMMANDS[self.kind]
            raise validation.UsageError(
                f"The run in {output} is one of {began_with}, not of {_COMMANDS[kind][0]}: resume "
                f"it by {resumed_by} {shlex.quote(str(output))}, or report it by tff-dpftrl "
                "report."
            )

    def bound_to_choice(self, output: pathlib.Path) -> Manifest:
        """Returns the manifest, bound to the record of the choice that its run is in, if any."""
        digest = joint_runs.record_digest(output)
        if digest is None:
            return self
        return dataclasses.replace(
            self,
            facts={**self.facts, joint_runs.IS_ONE: True},
            identities={**self.identities, _CHOICE: digest},
        )

    def _public(self) -> dict[str, Any]:
        kind = {} if self.recorded_kind is None else {"kind": self.recorded_kind}
        return {
            "format": FORMAT,
            **kind,
            "noise_version": self.noise_version,
            "config": dict(self.config),
            "derived": dict(self.derived),
            "facts": dict(self.facts),
        }

    @property
    def digest(self) -> str:
        """BLAKE2b digest (hex) of all of it, of the format and of the noise's version."""
        content = self._public() | {"identities": dict(self.identities)}
        text = json.dumps(content, sort_keys=True)
        return hashlib.blake2b(text.encode("utf-8"), digest_size=16).hexdigest()

    def keep(self, output: pathlib.Path) -> None:
        """Writes the private copy, which makes the folder a run's."""
        content = self._public() | {"versions": _versions(), "identities": dict(self.identities)}
        _write(output / COPY, content, private=True)
        durable_files.sync_folder(output)  # `private/` itself may be new.

    def publish(self, output: pathlib.Path) -> None:
        """Writes `config.json` if it is missing: the run has just begun, or it was lost."""
        if not (output / NAME).exists():
            content = json_text.read_object(output / COPY, remedy=_REMEDY)
            del content["identities"]
            _write(output / NAME, content, private=False)

    def check_identities(self, present: Mapping[str, Sequence[str]], *, remedy: str) -> None:
        """Refuses to go on with other users, words or whatever else has an identity.

        `present` has the names of the users, words and so on that there are now, by the key of
        `identities`. `remedy` begins the sentence "restore the data, or ...". Only runs that began
        before texts had an identity go on without it.
        """
        for name, names in present.items():
            if name == TEXTS and name not in self.identities:
                continue
            if self.identities.get(name) != identity(names):
                raise validation.UsageError(
                    f"The {name} are no longer those that the run began with, so its privacy "
                    f"cannot be accounted for: {remedy}, or start a new run."
                )


def identity(names: Sequence[str]) -> str:
    """Returns a digest (hex) of names and their order; whoever knows them can compute it."""
    text = json.dumps(list(names))
    return hashlib.blake2b(text.encode("utf-8"), digest_size=16).hexdigest()


def identities(present: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Returns the digests that `Manifest.check_identities` compares, by name."""
    return {name: identity(names) for name, names in present.items()}


def exists(output: pathlib.Path) -> bool:
    """Returns whether a folder holds a run that can be resumed, or be refused with a reason."""
    if (output / NAME).exists():
        return True
    # A link may lead to the secrets of another run.
    return (output / COPY).exists() and not (output / PRIVATE).is_symlink()


def public(output: pathlib.Path) -> dict[str, Any]:
    """Reads `config.json` of a run; what its private copy says of it if it is lost."""
    path = output / NAME if (output / NAME).exists() else output / COPY
    return json_text.read_object(path, remedy=_REMEDY)


def check_is_free(output: pathlib.Path) -> None:
    """Refuses a folder that cannot be used for a new run.

    It is refused if it holds a run or something else, results or rounds of a run whose manifest is
    lost, is a file, or cannot be written.
    """
    if other := _other(output):
        raise validation.UsageError(f"--output {output} holds {other}: name another folder.")
    if exists(output):
        raise validation.UsageError(
            f"--output {output} already holds a run: add --resume to go on with it (and leave out "
            "the other options), or name another folder."
        )
    joint_runs.refuse_lost_record(output)
    if output.exists() and not output.is_dir():
        raise validation.UsageError(f"--output {output} is not a folder: name another one.")
    if (output / PRIVATE).is_symlink():
        raise validation.UsageError(
            f"{output / PRIVATE} is a link, perhaps to the secrets of another run: name another "
            "folder, or remove the link."
        )
    for name in _RESULTS:
        if (output / name).exists():
            raise validation.UsageError(
                f"--output {output} already holds {name}, of a model or of a run that has lost its "
                "options, which a run would replace: name another folder."
            )
    ledger = output / _LEDGER
    has_rounds = ledger.exists() and ledger_file.has_rounds(ledger)
    if has_rounds or checkpoint.has_later_rounds(output / _CHECKPOINTS):
        lost = f"{NAME} and {COPY}" if has_rounds else f"{NAME}, {COPY} and {_LEDGER}"
        raise validation.UsageError(
            f"{ledger.parent} holds the rounds of a run whose {lost} are missing: a new run would "
            f"replace its seeds and its record. Restore {COPY} from a backup and add --resume, or "
            "name another folder."
        )
    existing = next(folder for folder in (output, *output.absolute().parents) if folder.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        raise validation.UsageError(
            f"--output {output} cannot be written: {existing} is not writable."
        )


def read(output: pathlib.Path) -> Manifest:
    """Reads the manifest of a run to resume or to report.

    It is refused if it is missing or unreadable, of another format, not the one that the run began
    with, or if its noise would be another one today.
    """
    path = output / NAME
    if other := _other(output):
        raise validation.UsageError(f"There is no run in {output}: it is {other}.")
    if not exists(output):
        raise validation.UsageError(f"There is no run in {output}: {path} does not exist.")
    known = public(output)
    if known.get("format") != FORMAT:
        theirs = "1, which did not bind a run to its options"
        if "format" in known:
            theirs = repr(known["format"])
        raise validation.UsageError(
            f"The run in {output} was begun by another version of tff-dpftrl: its folder is of "
            f"format {theirs}, and this version goes on with format {FORMAT} only. Finish it with "
            "the version that began it, or start a new run."
        )
    copy = json_text.read_object(output / COPY, remedy=_REMEDY)
    no_identities = {"identities": None}  # Those are in the private copy only.
    if "versions" not in copy:  # It began before they were bound.
        known.pop("versions", None)
    differences = [
        f"{json.dumps(name)[1:-1]}: {json.dumps(then)} → {json.dumps(now)}"
        for name, then, now in _differences(copy | no_identities, known | no_identities)
    ]
    if differences:
        raise validation.UsageError(
            f"{path} is no longer what the run began with ({'; '.join(differences[:_SHOWN])}"
            f"{'; ...' if len(differences) > _SHOWN else ''}): its statement would not be that of "
            "what was run. Undo the change, or start a new run."
        )
    noise_version = copy.get("noise_version")
    known_versions = range(private_round.STATE_VERSION, private_round.NOISE_VERSION + 1)
    if not isinstance(noise_version, int) or noise_version not in known_versions:
        raise validation.UsageError(
            f"The noise of the run in {output} is of version {noise_version!r}, that of this "
            f"version of tff-dpftrl {private_round.NOISE_VERSION}: noise that later rounds "
            "cancel would be drawn otherwise. Finish it with the version that began it, or start a "
            "new run."
        )
    config, derived, facts, identities, kind = (
        copy.get(name) for name in ("config", "derived", "facts", "identities", "kind")
    )
    if (
        isinstance(config, dict)
        and isinstance(derived, dict)
        and isinstance(facts, dict)
        and isinstance(identities, dict)
        and kind in (None, *_COMMANDS)
    ):
        if identities.get(_CHOICE) != joint_runs.record_digest(output):
            raise validation.UsageError(
                f"The run in {output} and the record of a choice among runs (sweep --select), "
                f"{joint_runs.RECORD}, do not belong together: put both back to where they were "
                "made, or begin a new choice in another folder."
            )
        return Manifest(config, derived, facts, identities, kind, noise_version)
    raise validation.UsageError(
        f"{output / COPY} is not the manifest of a run of this version: a part of it is "
        "missing, or its kind is unknown. Restore it, or use the version that began the run."
    )


def _other(output: pathlib.Path) -> str | None:
    """Returns what a folder is that is not that of a run; None if that is not known."""
    if (output / COPY).exists():
        return None
    return next((what for name, what in _OTHER_FOLDERS.items() if (output / name).exists()), None)


def _write(path: pathlib.Path, content: Mapping[str, Any], *, private: bool) -> None:
    text = json.dumps(content, indent=2) + "\n"
    durable_files.write(path, text.encode("utf-8"), private=private)


def _differences(then: Any, now: Any, name: str = "") -> list[tuple[str, Any, Any]]:
    """Returns name, old and new value of each entry that differs; lists are compared as a whole."""
    if not (isinstance(then, dict) and isinstance(now, dict)):
        return [] if then == now else [(name, then, now)]
    differences = []
    for key in sorted(then.keys() | now.keys()):
        differences += _differences(then.get(key), now.get(key), f"{name}.{key}" if name else key)
    return differences


def _versions() -> dict[str, str]:
    """Versions of what it began on, for the reader; they may change while a run lasts."""
    versions = {"tff_dpftrl": version.__version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
