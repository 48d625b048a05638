"""Execution of a sweep's cells in other processes, ended together after a signal."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import re
import shlex
import signal
import sys
import time
import types
from collections.abc import Callable, Hashable, Iterator, Sequence

import tqdm

from tff_dpftrl.runs import manifest
from tff_dpftrl.runs import progress as progress_lib
from tff_dpftrl.sweeps import cell_worker
from tff_dpftrl.sweeps import cells as cells_lib
from tff_dpftrl.sweeps import folder as folder_lib
from tff_dpftrl.training import composed

Command = Callable[[cells_lib.Cell, pathlib.Path], Sequence[str]]
"""Function from a cell and its folder to the command line that runs it."""

PROGRAM = (sys.executable, "-m", "tff_dpftrl.cli.main")
"""Program that runs a cell, by the subcommand of its kind."""

_POLL_SECONDS = 0.1
_SECONDS_BETWEEN_COUNTS = 1.0
_SECONDS_TO_END = 30.0
_LONGEST_LINE = 500


def command_of(
    cell: cells_lib.Cell, folder: pathlib.Path, placement_flags: Sequence[str] = ()
) -> list[str]:
    """Returns the command line that begins or resumes a cell."""
    options = ["--resume"] if manifest.exists(folder) else flags(cell.config)
    return [*PROGRAM, cell.kind.command, *options, *placement_flags, f"--output={folder}"]


def flags(config: composed.Options) -> list[str]:
    """Returns the flags of a config: all but the defaults."""
    given, values = [], config.to_dict()
    for name in config.given():
        value, flag = values[name], name.replace("_", "-")
        if isinstance(value, bool):
            given.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            given.append(f"--{flag}={value}")
    return given


class Interruption:
    """Recorder of Ctrl-C and SIGTERM in place of their handlers, with their numbers in order."""

    def __init__(self):
        self.signals: list[int] = []

    @contextlib.contextmanager
    def noticing(self) -> Iterator[None]:
        """Records signals within the block; the earlier handlers are in force outside."""
        noticed = [
            number
            for number in (signal.SIGINT, signal.SIGTERM)
            if signal.getsignal(number) is not signal.SIG_IGN
        ]
        earlier = {number: signal.signal(number, self._note) for number in noticed}
        try:
            yield
        finally:
            for number, handler in earlier.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        del frame
        self.signals.append(number)


@dataclasses.dataclass(eq=False)
class _Running:
    cell: cells_lib.Cell
    folder: pathlib.Path
    worker: cell_worker.CellWorker


class _Progress:
    """A progress bar over the rounds of all cells; the rows of their metrics are counted."""

    def __init__(self, cells: Sequence[cells_lib.Cell], output: pathlib.Path, is_shown: bool):
        self._rounds = {c.name: c.kind.length(c.config) for c in cells}
        self._done = dict.fromkeys(self._rounds, 0)
        self._folders = {c.name: folder_lib.cell_folder(output, c) for c in cells}
        for name in self._rounds:
            self._count(name)
        self._bar = tqdm.tqdm(
            total=sum(self._rounds.values()),
            initial=sum(self._done.values()),
            unit=cells[0].kind.unit,
            mininterval=0.1 if sys.stderr.isatty() else 10.0,
            dynamic_ncols=True,
            disable=not is_shown,
        )
        self._counted = time.monotonic()

    def _count(self, name: str) -> None:
        folder = self._folders[name]
        if folder_lib.state(folder) == "finished":  # Perhaps before all rounds: nothing is left.
            self._done[name] = self._rounds[name]
        else:
            self._done[name] = rounds_done(folder)

    def show(self, running: Sequence[_Running], *, now: bool = False) -> None:
        """Counts the rounds of running cells, at most once a second if not `now`."""
        if not now and time.monotonic() < self._counted + _SECONDS_BETWEEN_COUNTS:
            return
        for entry in running:
            self._count(entry.cell.name)
        states = [folder_lib.state(folder) for folder in self._folders.values()]
        shown = f"{states.count('finished')}/{len(states)} cells done"
        if failed := states.count("failed"):
            shown += f", {failed} failed"
        self._bar.set_postfix_str(shown, refresh=False)
        self._bar.update(sum(self._done.values()) - self._bar.n)
        self._counted = time.monotonic()

    def close(self) -> None:
        self._bar.close()


def rounds_done(folder: pathlib.Path) -> int:
    """Counts the rounds that the run in a folder has committed to its metrics; 0 without a run."""
    try:
        with open(folder / "metrics.csv", "rb") as file:
            return max(0, sum(1 for _ in file) - 1)
    except FileNotFoundError:
        return 0


def run(
    cells: Sequence[cells_lib.Cell],
    output: pathlib.Path,
    command: Command,
    *,
    jobs: int,
    lock: int,
    interruption: Interruption,
    progress: progress_lib.Progress,
    after_each: Callable[[cells_lib.Cell, folder_lib.Ending], None],
    reuse: bool = True,
    shows_progress: bool = True,
) -> None:
    """Runs all cells that are not finished, until they are or a signal comes.

    What a cell prints goes to `sweep.log` in its folder. A cell that fails does not keep the others
    from running. After a signal the cells that run are ended: each keeps the rounds that it has
    committed. A second signal ends them without waiting. The processes inherit `lock`, from
    `folder.lock`. With `reuse`, a process may run several cells of one group, one after another
    (`kinds.RunKind.process_group`).
    """
    states = {c.name: folder_lib.state(folder_lib.cell_folder(output, c)) for c in cells}
    waiting = [cell for cell in cells if states[cell.name] != "finished"]
    running: list[_Running] = []
    idle: dict[cell_worker.CellWorker, Hashable] = {}  # With the group of their cells.
    bar = _Progress(cells, output, shows_progress)
    try:
        while (waiting or running) and not interruption.signals:
            ended = [entry for entry in running if entry.worker.status() is not None]
            endings = [_note_ending(entry) for entry in ended]
            running = [entry for entry in running if entry not in ended]
            for entry in ended:
                group = entry.cell.process_group
                if reuse and group is not None and entry.worker.can_run_another:
                    idle[entry.worker] = group
                else:
                    entry.worker.close()
            while waiting and len(running) < jobs:
                worker = _take(idle, waiting[0].process_group)
                running.append(_start(waiting.pop(0), output, command, lock, worker))
            bar.show([*running, *ended], now=bool(ended))
            for entry, ending in zip(ended, endings, strict=True):
                after_each(entry.cell, ending)
            time.sleep(_POLL_SECONDS)
    finally:
        if running and interruption.signals:
            progress("Ending the cells that run; a second signal ends them at once ...")
        _end(running, interruption)
        for entry in running:
            if entry.worker.status() == 0:
                _note_ending(entry)
        for worker in [*idle, *(entry.worker for entry in running)]:
            worker.close()
        bar.show(running, now=True)
        bar.close()


def _take(
    idle: dict[cell_worker.CellWorker, Hashable], group: Hashable | None
) -> cell_worker.CellWorker | None:
    """Takes a process that may run a cell of a group, or ends another one if there is none."""
    for worker in [worker for worker in idle if not worker.can_run_another]:
        del idle[worker]  # It was ended from outside, which is no failure of a cell.
        worker.close()
    for worker, its_group in idle.items():
        if group == its_group:
            del idle[worker]
            return worker
    if idle:
        idle.popitem()[0].close()
    return None


def _start(
    cell: cells_lib.Cell,
    output: pathlib.Path,
    command: Command,
    lock: int,
    worker: cell_worker.CellWorker | None,
) -> _Running:
    folder = folder_lib.cell_folder(output, cell)
    folder.mkdir(parents=True, exist_ok=True)
    arguments = list(command(cell, folder))
    folder_lib.forget_ending(folder)
    with open(folder / folder_lib.LOG, "ab") as log:
        log.write(f"\n$ {shlex.join(arguments)}\n".encode())
    log_path = (folder / folder_lib.LOG).absolute()
    if worker is None:
        worker = cell_worker.CellWorker(lock, log_path)
    worker.begin(arguments, log_path)
    return _Running(cell, folder, worker)


def _note_ending(entry: _Running) -> folder_lib.Ending:
    status = entry.worker.status()
    assert status is not None  # It has ended.
    ending = folder_lib.Ending(status, _why(entry.folder, status) if status else "")
    folder_lib.write_ending(entry.folder, ending)
    return ending


def _why(folder: pathlib.Path, status: int) -> str:
    if status < 0:
        name = signal.Signals(-status).name
        memory = ", perhaps for lack of memory" if -status == signal.SIGKILL else ""
        return f"killed by {name}{memory}"
    lines = re.split(r"[\r\n]+", (folder / folder_lib.LOG).read_text("utf-8", errors="replace"))
    printed = [line.strip() for line in lines if line.strip()]
    # What can be done with the folder stands below the error.
    errors = [line for line in printed if re.match(r"tff-dpftrl \w+: (?!warning: )", line)]
    return (errors or printed or [f"ended with status {status}"])[-1][:_LONGEST_LINE]


def _end(running: Sequence[_Running], interruption: Interruption) -> None:
    """Ends processes by SIGTERM, and after 30 s or a further signal by SIGKILL."""
    for entry in running:
        if entry.worker.status() is None:
            entry.worker.terminate()
    deadline, num_signals = time.monotonic() + _SECONDS_TO_END, len(interruption.signals)
    while any(entry.worker.status() is None for entry in running):
        if time.monotonic() > deadline or len(interruption.signals) > num_signals:
            for entry in running:
                entry.worker.kill()
            return
        time.sleep(_POLL_SECONDS)
