"""Kills a run before each of its durable events, goes on with it, and compares what was public."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator
from unittest import mock

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


class Killed(BaseException):
    """Stands for the death of the process: no later event happens, clean-up included."""


@contextlib.contextmanager
def dying(kill_at: int | str) -> Iterator[list[str]]:
    """Lets the process die before an event; yields the names of the events that happened.

    Args:
      kill_at: Number of the event, from 0, or its name, such as "replace config.json".
    """
    events: list[str] = []
    dead: list[str] = []

    def watched(name: str, original: Callable[..., object]) -> Callable[..., object]:
        def step(*args, **options):
            event = f"{name} {pathlib.PurePath(str(args[-1])).name}"
            if not dead and kill_at in (len(events), event):
                dead.append(event)
                if name == "append":  # A part of the content may be on the disk.
                    original(args[0], args[1][: len(args[1]) // 2])
            if dead:
                raise Killed
            events.append(event)
            return original(*args, **options)

        return step

    with contextlib.ExitStack() as stack:
        for owner, name in _DURABLE:
            step = watched(name, getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, step))
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
) -> Iterator[pathlib.Path]:
    """Kills a run before each event, goes on, and asserts that what was public never changes.

    Args:
      folder: Empty folder.
      run: Function that begins a run in a folder, or goes on with it.
      at: Events, as for `dying`; all of them if None.

    Yields:
      The folder of each run after its end.
    """
    for kill_at in itertools.count() if at is None else at:
        output, is_killed = folder / str(kill_at), False
        with dying(kill_at) as events:
            try:
                run(output)
            except Killed:
                is_killed = True
        seen = published(output)
        _assert_charged(output, seen)
        run(output)
        last = published(output)
        for name, content in seen.items():
            where = f"{name}, killed after {events[-1:]}"
            if name.endswith(".csv"):
                whole = content[: content.rfind(b"\n") + 1]
                assert last[name].startswith(whole), where
            elif name == "privacy_statement.json":
                said, stated = (json.loads(files[name])["epsilon"] for files in (seen, last))
                assert said >= stated, where
            elif name not in _RENEWED:
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
    if not seen.keys().isdisjoint(("model.npz", "best_model.npz", "weights.npz")):
        assert committed
