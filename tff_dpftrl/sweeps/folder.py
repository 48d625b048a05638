"""The folder of a sweep: its definition, its lock, and the state of each cell.

    sweep.json          options, axes and kind of the runs
    private/            planned.json: digests of the users, texts and files of the cells
    cells/NAME/         what `tff-dpftrl train` or `finetune` writes, sweep.log and cell.json
    cells.csv, summary.csv, summary.md, curves.png, pareto.png

The state of a cell is read from its files each time: a sweep that was killed can be resumed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from tff_dpftrl import durable_files, json_text, validation
from tff_dpftrl.runs import joint_runs, manifest
from tff_dpftrl.sweeps import axes as axes_lib
from tff_dpftrl.sweeps import cells as cells_lib
from tff_dpftrl.sweeps import kinds
from tff_dpftrl.training import composed

FORMAT = 1
"""Raise it when a sweep that was begun before can no longer be continued."""

State = Literal["new", "begun", "failed", "finished"]

LOG = "sweep.log"
"""Name of the file in a cell's folder that has what its processes printed."""

_DEFINITION = "sweep.json"
_LOCK = ".sweep.lock"
_OUTCOME = "cell.json"
_SECONDS_TO_WAIT = 60.0
_SHOWN = 3


def exists(output: pathlib.Path) -> bool:
    """Returns whether a folder holds a sweep that can be resumed."""
    return (output / _DEFINITION).exists()


def cell_folder(output: pathlib.Path, cell: cells_lib.Cell) -> pathlib.Path:
    """Returns the folder of a cell's results."""
    return output / joint_runs.CELLS / cell.name


def check(
    output: pathlib.Path,
    options: Mapping[str, Any],
    axes: axes_lib.Axes,
    kind: kinds.RunKind = kinds.TRAINING,
) -> axes_lib.Axes:
    """Checks that a folder is free, or holds this sweep, to whose axes values may have been added.

    Returns the axes in the order of the sweep in the folder, so that cells keep their names.
    """
    if not exists(output):
        if manifest.exists(output):
            raise validation.UsageError(
                f"--output {output} holds a single run, not a sweep: name another folder."
            )
        manifest.check_is_free(output)
        if (output / joint_runs.CELLS).exists():
            raise validation.UsageError(
                f"--output {output} has a folder cells, but no {_DEFINITION} that says of which "
                "sweep: name another folder."
            )
        return axes
    then_options, then_axes, then_kind = read(output)
    differences = (
        _differences(then_options, _absolute(_fixed(options, axes)), kind)
        if then_kind is kind
        else [f"its runs: {then_kind.command} → {kind.command}"]
    ) or _missing(then_axes, axes)
    if differences:
        raise validation.UsageError(
            f"--output {output} holds another sweep ({'; '.join(differences[:_SHOWN])}"
            f"{'; ...' if len(differences) > _SHOWN else ''}): undo that to go on with it, or name "
            "another folder. Values can be added to an axis, but neither taken away nor moved "
            "to a new axis."
        )
    return {name: axes[name] for name in then_axes}


def read(output: pathlib.Path) -> tuple[dict[str, Any], axes_lib.Axes, kinds.RunKind]:
    """Reads the options and axes of the sweep in a folder, and the kind of its runs."""
    path = output / _DEFINITION
    try:
        known = json_text.read_object(path)
        known_format = known["format"]
        options = dict(known["options"])
        if options.get("engine") == "compiled":  # Earlier versions had another one, too.
            del options["engine"]
        axes = {name: tuple(values) for name, values in known["axes"].items()}
        kind = kinds.KINDS[known.get("kind", kinds.TRAINING.name)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise validation.UsageError(
            f"{path} cannot be read as a sweep: {error!r}. Restore it, or name another folder."
        ) from error
    if known_format != FORMAT:
        raise validation.UsageError(
            f"The sweep in {output} was begun by another version of tff-dpftrl: its folder is of "
            f"format {known_format!r}, and this version goes on with format {FORMAT} only. Name "
            "another folder."
        )
    return options, axes, kind


def _fixed(options: Mapping[str, Any], axes: axes_lib.Axes) -> dict[str, Any]:
    """Returns the options that no axis overrules."""
    return {name: value for name, value in options.items() if name not in axes}


def _absolute(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: composed.absolute_path(name, value) for name, value in options.items()}


def _differences(then: Mapping[str, Any], now: Mapping[str, Any], kind: kinds.RunKind) -> list[str]:
    known = composed.options_of(kind.config_class)
    differences = []
    for name in sorted(then.keys() | now.keys()):
        default = known[name].field.default if name in known else None
        old, new = then.get(name, default), now.get(name, default)
        if old != new:
            differences.append(f"{name}: {axes_lib.shown(old)} → {axes_lib.shown(new)}")
    return differences


def _missing(then: axes_lib.Axes, now: axes_lib.Axes) -> list[str]:
    if then.keys() != now.keys():
        return [f"axes: {', '.join(then)} → {', '.join(now)}"]
    missing = []
    for name, values in then.items():
        lost = [axes_lib.shown(value) for value in values if value not in now[name]]
        if lost:
            missing.append(f"{name} without {', '.join(lost)}")
    return missing


def definition(
    options: Mapping[str, Any], axes: axes_lib.Axes, kind: kinds.RunKind
) -> dict[str, Any]:
    """Returns the definition of a sweep, JSON-compatible; the arguments are those of `write`."""
    return {
        **({} if kind is kinds.TRAINING else {"kind": kind.name}),  # Earlier sweeps have none.
        "options": _absolute(_fixed(options, axes)),
        "axes": {name: list(values) for name, values in axes.items()},
    }


def write(
    output: pathlib.Path,
    options: Mapping[str, Any],
    axes: axes_lib.Axes,
    kind: kinds.RunKind = kinds.TRAINING,
) -> None:
    """Writes the definition of a sweep to its folder, or adds values to its axes."""
    (output / joint_runs.CELLS).mkdir(parents=True, exist_ok=True)
    content = {"format": FORMAT, **definition(options, axes, kind)}
    text = json.dumps(content, indent=2) + "\n"
    durable_files.write(output / _DEFINITION, text.encode("utf-8"))


def bind(output: pathlib.Path, digests: Mapping[str, str]) -> None:
    """Binds a sweep to the digests of what its cells read, and refuses other digests later."""
    path = output / joint_runs.PLANNED
    is_begun = exists(output) and path.exists()
    then = joint_runs.read_digests(path) if is_begun else {}
    joint_runs.refuse_changed(then, {n: digests[n] for n in digests.keys() & then.keys()})
    path.parent.mkdir(mode=0o700, exist_ok=True)
    content = json.dumps({joint_runs.DIGESTS: {**then, **digests}}, indent=2) + "\n"
    durable_files.write(path, content.encode("utf-8"), private=True)


@contextlib.contextmanager
def lock(
    output: pathlib.Path,
    progress: Callable[[str], None],
    seconds_to_wait: float = _SECONDS_TO_WAIT,
) -> Iterator[int]:
    """Locks a sweep, so that no other process runs its cells.

    The cells' processes inherit the lock. It is free when the last of them has ended, even if the
    sweep's process was killed.
    """
    descriptor = os.open(output / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        deadline, has_spoken = time.monotonic() + seconds_to_wait, False
        while not _try_lock(descriptor):
            if time.monotonic() >= deadline:
                raise validation.UsageError(
                    f"Another sweep runs in {output}, or a cell of it has not ended yet: wait for "
                    "it, or end it."
                )
            if not has_spoken:
                progress(f"Waiting for another sweep in {output}, or a cell of it, to end ...")
                has_spoken = True
            time.sleep(0.1)
        yield descriptor
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@dataclasses.dataclass(frozen=True)
class Ending:
    """End of the last process of a cell: exit status (0: finished), and last line if it failed."""

    status: int
    last_line: str = ""


def write_ending(folder: pathlib.Path, ending: Ending) -> None:
    """Writes how a cell's process ended to the cell's folder."""
    text = json.dumps(dataclasses.asdict(ending), indent=2) + "\n"
    durable_files.write(folder / _OUTCOME, text.encode("utf-8"))


def read_ending(folder: pathlib.Path) -> Ending | None:
    """Reads how the last process of a cell ended; None if it is not known, as after a kill."""
    try:
        return Ending(**json_text.read_object(folder / _OUTCOME))
    except (ValueError, TypeError):
        return None  # A finished run that is started again only ends again.


def forget_ending(folder: pathlib.Path) -> None:
    """Removes the ending of a cell, before a further process of it begins."""
    (folder / _OUTCOME).unlink(missing_ok=True)


def state(folder: pathlib.Path) -> State:
    """Returns the state of the cell in a folder."""
    ending = read_ending(folder)
    if ending is not None:
        return "failed" if ending.status else "finished"
    return "begun" if manifest.exists(folder) else "new"


def check_cells(output: pathlib.Path, cells: Sequence[cells_lib.Cell]) -> None:
    """Checks that no cell's folder holds a run with other options."""
    for cell in cells:
        folder = cell_folder(output, cell)
        if not manifest.exists(folder):
            continue
        path = folder / "config.json"
        try:  # Not the whole manifest: the private part of a finished run may be gone.
            then = manifest.public(folder)["config"]
            then = cell.kind.begun_config(then, str(path)).with_defaults().to_dict()
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise validation.UsageError(
                f"{path} is not of a run that this version can go on with: {error} Move {folder} "
                "away."
            ) from error
        now = cell.config.with_defaults().to_dict()
        differences = _differences(then, now, cell.kind)
        if differences:
            raise validation.UsageError(
                f"{folder} holds a run with other options than the cell's "
                f"({'; '.join(differences[:_SHOWN])}): move it away."
            )
