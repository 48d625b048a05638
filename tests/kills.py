"""Kills a run before each of its durable and visible events, and goes on with it.

What was public may not change, and nothing of a round may be shown before its commit.
"""

import contextlib
import csv
import io
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np

from tff_dpftrl import durable_files
from tff_dpftrl.participation import ledger, recount

# Each is one step from one state of the disk to the next one.
_DURABLE = (
    (os, "replace"),
    (os, "rename"),
    (pathlib.Path, "unlink"),
    (durable_files, "append"),
    (ledger.Ledger, "begin_round"),
    (ledger.Ledger, "commit_round"),
)
# Written anew by every report, with a date.
_RENEWED = ("README.md", "privacy_statement.md")
_MODELS = ("model.npz", "best_model.npz", "weights.npz")


class Killed(BaseException):
    """Stands for the death of the process: no later event happens, clean-up included."""


class Shown:
    """What the processes of a run have shown of each round; it is never something else."""

    def __init__(self):
        self._rounds_done = 0
        self._seen: dict[tuple[str, int], dict[Any, Any]] = {}

    def commit(self, round_index: int) -> None:
        """Notes a commit."""
        self._rounds_done = round_index + 1

    def show(self, name: str, content: Any) -> None:
        """Notes what is shown: a row of metrics, or the tensors of a model."""
        if isinstance(content, dict):
            assert content["round"] == self._rounds_done, f"{name} before the commit"
            new = {column: value for column, value in content.items() if value is not None}
        else:
            new = {place: np.asarray(tensor).tobytes() for place, tensor in enumerate(content)}
        before = self._seen.setdefault((name, self._rounds_done), {})
        for key, value in new.items():
            assert before.setdefault(key, value) == value, f"{name} of {self._rounds_done}, {key}"


@contextlib.contextmanager
def dying(
    kill_at: int | str | None, visible: Sequence[tuple[Any, str]] = (), shown: Shown | None = None
) -> Iterator[list[str]]:
    """Lets the process die before an event; yields the names of the events that happened.

    Args:
      kill_at: Number of the event, from 0, or its name, such as "replace config.json"; None to
        live.
      visible: Owners and names of functions that show their last argument, a row of metrics or the
        tensors of a model. Each call is an event, too.
      shown: What the run has shown before.
    """
    events: list[str] = []
    dead: list[str] = []
    shown = Shown() if shown is None else shown

    def watched_show(name: str, original: Callable[..., object]) -> Callable[..., object]:
        def show(*args, **options):
            happens(name)
            shown.show(name, args[-1])
            return original(*args, **options)

        return show

    def happens(event: str) -> None:
        if not dead and kill_at in (len(events), event):
            dead.append(event)
        if dead:
            raise Killed
        events.append(event)

    def watched(name: str, original: Callable[..., object]) -> Callable[..., object]:
        def step(*args, **options):
            was_alive = not dead
            try:
                happens(f"{name} {pathlib.PurePath(str(args[-1])).name}")
            except Killed:
                if was_alive and name == "append":  # A part of the content may be on the disk.
                    original(args[0], args[1][: len(args[1]) // 2])
                raise
            result = original(*args, **options)
            if name == "commit_round":
                shown.commit(args[1])
            return result

        return step

    with contextlib.ExitStack() as stack:
        for owner, name in _DURABLE:
            step = watched(name, getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, step))
        for owner, name in visible:
            show = watched_show(name, getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, show))
        yield events


def published(output: pathlib.Path) -> dict[str, bytes]:
    """Returns the content of each file of a run's folder outside of `private/`."""
    found = {path.relative_to(output): path for path in output.rglob("*") if path.is_file()}
    return {
        str(name): path.read_bytes()
        for name, path in found.items()
        if name.parts[0] != "private" and not durable_files.is_leftover(path)
    }


def everywhere(
    folder: pathlib.Path,
    run: Callable[[pathlib.Path], object],
    at: Iterable[int | str] | None = None,
    visible: Sequence[tuple[Any, str]] = (),
) -> Iterator[pathlib.Path]:
    """Kills a run before each event, goes on, and asserts that what was public never changes.

    Args:
      folder: Empty folder.
      run: Function that begins a run in a folder, or goes on with it.
      at: Events, as for `dying`; all of them if None.
      visible: Functions that show something, as for `dying`; those that write models, too, which
        later rounds replace.

    Yields:
      The folder of each run after its end.
    """
    for kill_at in itertools.count() if at is None else at:
        output, is_killed, shown = folder / str(kill_at), False, Shown()
        with dying(kill_at, visible, shown) as events:
            try:
                run(output)
            except Killed:
                is_killed = True
        seen = published(output)
        _assert_charged(output, seen)
        with dying(None, visible, shown):
            run(output)
        last = published(output)
        for name, content in seen.items():
            where = f"{name}, killed after {events[-1:]}"
            if name.endswith(".csv"):
                whole = content[: content.rfind(b"\n") + 1]
                assert last[name].startswith(whole), where
            elif name == "privacy_statement.json":
                said, stated = (json.loads(files[name])["epsilon"] for files in (seen, last))
                assert said == stated or said >= stated, where
            elif name not in _RENEWED and not (visible and name in _MODELS):
                assert last[name] == content, where
        assert not any(path.name.endswith(".unfinished") for path in output.rglob("*"))
        yield output
        if not is_killed:
            return


def _assert_charged(output: pathlib.Path, seen: dict[str, bytes]) -> None:
    """Asserts that the secret records have whatever was public when the process died."""
    if not seen:
        return
    assert json.loads((output / "private" / "manifest.json").read_text())
    committed = recount.recount(output / "private" / "ledger.sqlite").committed_rounds
    rows = list(csv.DictReader(io.StringIO(seen.get("metrics.csv", b"").decode())))
    assert committed >= len(rows)
    if not seen.keys().isdisjoint(_MODELS):
        assert committed
