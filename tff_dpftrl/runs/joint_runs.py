"""The runs of a sweep, and of a choice among runs (`sweep --select`), by their folders.

    OUT/cells/NAME/              runs of a sweep
    OUT/private/planned.json     digests of the users, texts and files that they were planned with
    OUT/private/cells/NAME/      runs of a choice, none of which is to be published
    OUT/private/selection.json   record of the choice, with such digests; written before any run
    OUT/winner/                  what is published of the run that was chosen

A run that begins compares its data with the digests. That of a choice is bound to the record.
"""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Mapping
from typing import Any

from tff_dpftrl import json_text, validation
from tff_dpftrl.accounting import statement_sentences as sentences

CELLS = "cells"
"""Name of the folder of the runs."""
RECORD = pathlib.PurePath("private", "selection.json")
"""Path of the record of a choice in its folder."""
PLANNED = pathlib.PurePath("private", "planned.json")
"""Path of the digests of what the runs of a sweep were planned with, in its folder."""
DIGESTS = "digests"
"""Name of the digests in that file, and in the plan of the record of a choice."""
WINNER = "winner"
"""Name of the folder of the run that was chosen, in that of the choice."""
IS_ONE = "one_of_a_choice"
"""Name of the fact that a run is one of those that a choice is made among."""
_STATEMENT = "privacy_statement.json"


def holds_choice(folder: pathlib.Path) -> bool:
    """Returns whether a folder holds a choice among runs, perhaps one whose record is lost."""
    return (folder / RECORD).exists() or (folder / "private" / CELLS).exists()


def choice_of(folder: pathlib.Path) -> pathlib.Path | None:
    """Returns the folder of the choice that a folder of a run, or of a winner, belongs to."""
    folder = folder.absolute()
    for above in folder.parents[:3]:
        if folder.relative_to(above).parts[0] in ("private", WINNER) and holds_choice(above):
            return above
    return None


def record_digest(output: pathlib.Path) -> str | None:
    """Computes the digest (hex) of the record of the choice that a run is one of.

    It binds the run to the choice; None if the run is in no choice. A missing record is refused.
    """
    if not _is_in_choice(output):
        return None
    choice = output.absolute().parents[2]
    refuse_lost_record(choice)
    return hashlib.blake2b((choice / RECORD).read_bytes(), digest_size=16).hexdigest()


def refuse_lost_record(folder: pathlib.Path) -> None:
    """Refuses a choice among runs whose record is missing."""
    if holds_choice(folder) and not (folder / RECORD).exists():
        raise validation.UsageError(
            f"{folder} has runs of a choice (sweep --select), and {folder / RECORD} is missing, "
            "without which nobody knows what was planned and drawn: restore it, or begin a new "
            "choice in another folder, which costs its own epsilon."
        )


def planned(output: pathlib.Path) -> Mapping[str, Any] | None:
    """Reads the digests, by name, of what the runs of a sweep or of a choice were planned with.

    None if the run is in neither, or in a sweep that an earlier version began. A missing record of
    a choice is refused.
    """
    file = _planned_file(output)
    if file is None or (file.name == PLANNED.name and not file.exists()):
        return None
    refuse_lost_record(file.parents[1])
    return read_digests(file)


def read_digests(file: pathlib.Path) -> Mapping[str, Any]:
    """Reads the digests from `PLANNED` or `RECORD`."""
    content = json_text.read_object(file, remedy="Restore it.")
    return content.get("plan", content).get(DIGESTS, {})


def refuse_changed(then: Mapping[str, Any], now: Mapping[str, str]) -> None:
    """Refuses to go on with other data than runs were planned with."""
    for name, digest in now.items():
        if then.get(name) != digest:
            what = f"the users and texts of {name}" if name.startswith("{") else name
            raise validation.UsageError(
                f"The runs of this sweep were planned with other data: {what} has changed since. "
                "Restore it, or name another folder."
            )


def _planned_file(output: pathlib.Path) -> pathlib.Path | None:
    cells = output.absolute().parent
    if cells.name != CELLS:
        return None
    return cells.parent / (RECORD.name if _is_in_choice(output) else PLANNED)


def _is_in_choice(output: pathlib.Path) -> bool:
    """Returns whether the place of a run is among those of a choice."""
    return output.absolute().parts[-3:-1] == ("private", CELLS)


def refuse_unreleased(folder: pathlib.Path) -> None:
    """Refuses a model of a run that a choice was made among, which is not to be published."""
    file = folder / _STATEMENT if (folder / _STATEMENT).exists() else folder / "config.json"
    content = json_text.read_object(file) if file.exists() else {}
    facts = content.get("facts")
    if (
        sentences.ONE_OF_A_CHOICE in content.get("headline_caveats", ())
        or (isinstance(facts, dict) and facts.get(IS_ONE))
        or _is_in_choice(folder)
    ):
        raise validation.UsageError(
            f"{folder} is one of the runs that sweep --select chooses among: nothing of them may "
            f"leave the sweep, and no epsilon covers further use of them. Take {WINNER}/ in the "
            "folder of the sweep, which is the run that was chosen."
        )
