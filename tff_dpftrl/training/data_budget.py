"""What all runs on one corpus have spent together, by the statements in their folders."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Sequence

from tff_dpftrl import validation
from tff_dpftrl.accounting import composition
from tff_dpftrl.data import sources
from tff_dpftrl.runs import earlier_runs, manifest
from tff_dpftrl.training import warm_start


@dataclasses.dataclass(frozen=True)
class Budget:
    """Privacy that the runs on a corpus have spent.

    Attributes:
      runs: The runs, and models that were pretrained on it without a guarantee, by folder.
      without_statement: Folders of runs on the corpus that have no statement yet.
      not_compared: Folders of runs whose corpus is not where it was, or was in memory.
      not_found: Names of runs that others began with and that are in none of the folders.
    """

    runs: dict[pathlib.Path, composition.Spent]
    without_statement: tuple[pathlib.Path, ...]
    not_compared: tuple[pathlib.Path, ...]
    not_found: tuple[str, ...]

    @property
    def total(self) -> composition.Total | None:
        """All runs composed; None if one of them has no guarantee or no statement."""
        if self.without_statement or not self.runs:
            return None
        return composition.compose(list(self.runs.values()))


def of_corpus(data: str, folders: Sequence[str | os.PathLike[str]]) -> Budget:
    """Finds the runs on a corpus in folders, and composes them.

    Args:
      data: The corpus, as `train --data` names it.
      folders: Folders in which, and below which, results folders of runs are.

    Returns:
      The runs. A run is on the corpus if its options name the same one, or a copy of the file.

    Raises:
      UsageError: If a folder does not exist, or the files of a run cannot be read.
    """
    spent: dict[pathlib.Path, composition.Spent] = {}
    without, not_compared, began_with = [], [], set()
    begun = {folder.parent for folder in _folders_with(str(manifest.COPY), folders)}
    for folder in sorted({*_folders_with(manifest.NAME, folders), *begun}):
        content = manifest.public(folder)
        config = content.get("config")
        named = config.get("data") if isinstance(config, dict) else None
        if not isinstance(named, str):
            continue  # Options of something else.
        if not _is_same(data, named):
            if named != "docs" and not sources.is_on_disk(named):
                not_compared.append(folder)
            continue
        statement = earlier_runs.statement_of(folder)
        if statement is None:
            without.append(folder)
        else:
            spent[folder] = statement
        chain, _ = earlier_runs.parts(content.get("facts", {}))
        began_with.update(run.name for run in chain)
    for folder in _folders_with(warm_start.RECORD, folders):
        named = warm_start.pretrained_on(folder)
        if named is not None and _is_same(data, named):
            spent[folder] = composition.Spent(folder.name)
    known = {run.name for run in spent.values()} | {folder.name for folder in without}
    return Budget(spent, tuple(without), tuple(not_compared), tuple(sorted(began_with - known)))


def _folders_with(name: str, folders: Sequence[str | os.PathLike[str]]) -> list[pathlib.Path]:
    with_name = set()
    for folder in map(pathlib.Path, folders):
        if not folder.is_dir():
            raise validation.UsageError(
                f"{folder} is no folder: name those that results folders are in."
            )
        with_name.update(path.parent.resolve() for path in folder.rglob(name))
    return sorted(with_name)


def _is_same(data: str, named: str) -> bool:
    if os.path.exists(data) and os.path.exists(named) and os.path.samefile(data, named):
        return True
    return sources.are_same_file(data, named)
