"""The records of a task that an auditor takes away: signed files, and rows of the store.

`tff-dpftrl task report --records` adds them to the folder of the report:

    task/                the task's folder: plans and terms with signatures, options, vocabulary
    other_tasks.json     ρ that the population's other training tasks had spent
    private/rows.json    each committed round with its digests, and the last commit
    private/model        the model of the last commit, as devices get it
    private/state        the state of the last commit; it holds the seed of the noise

Needs no TensorFlow.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

from tff_dpftrl import durable_files, json_text, validation
from tff_dpftrl.runtime.store import interface
from tff_dpftrl.runtime.tasks import task_folder

TASK, PRIVATE = "task", "private"
"""Names of the two folders."""

OTHERS = "other_tasks.json"
"""Name of the file with other tasks' privacy costs."""

_ROWS, _MODEL, _STATE = "rows.json", "model", "state"
FILES = (_ROWS, _MODEL, _STATE)
"""Names of the files in the folder `PRIVATE`."""


@dataclasses.dataclass(frozen=True)
class TaskRecords:
    """Records that the store had of a task."""

    rows: interface.TaskRows | None  # Rows of the task; None if the folder `PRIVATE` is not there.
    # ρ that the other training tasks of the population had spent, by name; None for a task without
    # guarantee.
    others: Mapping[str, float | None]


def write(
    output: pathlib.Path,
    folder: pathlib.Path,
    rows: interface.TaskRows,
    others: Mapping[str, float | None],
) -> None:
    """Writes the records into the folder of a report; earlier ones are replaced."""
    with durable_files.new_folder(output / TASK, replace=True) as copy:
        for name in filter(lambda name: (folder / name).exists(), task_folder.FILES):
            shutil.copyfile(folder / name, copy / name)
    durable_files.write(output / OTHERS, _as_json(dict(others)))
    content = {
        "head": dict(rows.head),
        "rounds": [dict(row) for row in rows.rounds],
        "epoch": rows.epoch,
    }
    with durable_files.new_folder(output / PRIVATE, replace=True) as private:
        private.chmod(0o700)
        durable_files.write(private / _STATE, bytes(rows.commit.state), private=True)
        durable_files.write(private / _MODEL, rows.commit.model, private=True)
        durable_files.write(private / _ROWS, _as_json(content), private=True)


def _as_json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, allow_nan=False) + "\n").encode()


def read(output: pathlib.Path) -> TaskRecords:
    """Reads the records in the folder of a report; nothing in them is verified."""
    private = output / PRIVATE
    try:
        others = json_text.read_object(output / OTHERS)
        rows = None
        if private.exists():
            content = json_text.read_object(private / _ROWS, folder=output)
            head = content["head"]
            for name in (_MODEL, _STATE):
                validation.file_in(output, f"{PRIVATE}/{name}", max_bytes=None)
            commit = interface.Commit(
                task=head["task"],
                rounds_done=head["rounds_done"],
                epoch=head["epoch"],
                model=(private / _MODEL).read_bytes(),
                state=(private / _STATE).read_bytes(),
                metrics=json_text.parse(head["metrics"]),
            )
            rows = interface.TaskRows(commit, head, content["rounds"], content["epoch"])
        return TaskRecords(rows, dict(others))
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise validation.UsageError(
            f"The records in {output} cannot be read: {error!r}. Write them again with "
            "tff-dpftrl task report --records."
        ) from None
