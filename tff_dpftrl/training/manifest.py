"""`config.json`: what a run was told, what it derived, and what it ran on.

A resumed run takes mechanism and noise from here, and refuses to go on if its
users or its vocabulary are no longer the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
from collections.abc import Mapping, Sequence
from typing import Any

from tff_dpftrl import durable_files, version
from tff_dpftrl.training import config as config_lib
from tff_dpftrl.training import privacy, task

_NAME = "config.json"
_FINGERPRINTS = pathlib.PurePath("private", "fingerprints.json")
_PACKAGES = ("tensorflow", "tensorflow-federated", "numpy", "scipy", "dp-accounting")


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Content of a `config.json`, and fingerprints that are kept private.

    Attributes:
      config: The resolved options.
      derived: What was derived from the options; see `PrivacyPlan.derived`.
      users: Fingerprint of the training users' ids.
      vocabulary: Fingerprint of the words.
    """

    config: config_lib.TrainingConfig
    derived: Mapping[str, Any]
    users: str
    vocabulary: str

    def check_task(self, language_task: task.LanguageTask) -> None:
        """Refuses a task with other users or words than the run began with.

        Raises:
          ValueError: If they differ.
        """
        for name, then, now in (
            ("training users", self.users, _digest(language_task.train.user_ids)),
            ("words of the vocabulary", self.vocabulary, _digest(language_task.words.words)),
        ):
            if then != now:
                raise ValueError(
                    f"The {name} are no longer those that the run began with, so its privacy "
                    "cannot be accounted for: restore the data"
                    + (
                        " (with data 'docs': the same installed packages)"
                        if self.config.data == "docs"
                        else ""
                    )
                    + " or start a new run."
                )


def check_is_free(output: pathlib.Path) -> None:
    """Refuses a folder that cannot be used for a new run.

    Raises:
      ValueError: If it holds a run already, is a file, or cannot be written.
    """
    if (output / _NAME).exists():
        raise ValueError(
            f"--output {output} already holds a run: add --resume to go on with it (and leave out "
            "the other options), or name another folder."
        )
    if output.exists() and not output.is_dir():
        raise ValueError(f"--output {output} is not a folder: name another one.")
    existing = next(folder for folder in (output, *output.absolute().parents) if folder.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"--output {output} cannot be written: {existing} is not writable.")


def write(
    output: pathlib.Path,
    config: config_lib.TrainingConfig,
    plan: privacy.PrivacyPlan,
    language_task: task.LanguageTask,
) -> None:
    """Writes `config.json`, last of all files: from then on the folder holds a run."""
    content = {
        "config": config.to_dict(),
        "derived": plan.derived()
        | {
            "training_users": len(language_task.train.user_ids),
        },
        "versions": {
            "tff_dpftrl": version.__version__,
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in _PACKAGES},
        },
    }
    # A digest of the users would tell who knows all of them but one whether that one took part.
    fingerprints = {
        "users": _digest(language_task.train.user_ids),
        "vocabulary": _digest(language_task.words.words),
    }
    for name, values, private in ((_FINGERPRINTS, fingerprints, True), (_NAME, content, False)):
        text = json.dumps(values, indent=2) + "\n"
        durable_files.write(output / name, text.encode("utf-8"), private=private)


def read(output: pathlib.Path) -> Manifest:
    """Reads the manifest of a run to resume.

    Raises:
      ValueError: If there is none in the folder, or it cannot be read.
    """
    path = output / _NAME
    if not path.exists():
        raise ValueError(f"There is no run to resume in {output}: {path} does not exist.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        fingerprints = json.loads((output / _FINGERPRINTS).read_text(encoding="utf-8"))
        config = config_lib.config_from_mapping(content["config"], str(path))
        return Manifest(
            config,
            content["derived"],
            fingerprints["users"],
            fingerprints["vocabulary"],
        )
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read as the config of a run: {error!r}.") from error


def _digest(names: Sequence[str]) -> str:
    return hashlib.blake2b("\n".join(names).encode("utf-8"), digest_size=16).hexdigest()
