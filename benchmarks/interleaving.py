"""Contenders that take turns: how benchmarks run them, time them, and compare them.

A ratio is the median over the rounds of the ratio within a round, so that a busy machine disturbs
it little. Other programs change that of processor time, of all cores, less than that of the clock,
but waiting threads may add to it. How much of the cores other programs took is measured along
(`Times.others`).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

PEERS = pathlib.Path(__file__).resolve().parent / "peers"
sys.path.insert(0, str(PEERS))  # What peers read has to stand apart from the package.

import round_server  # noqa: E402

_ROOT = PEERS.parents[1]


@dataclasses.dataclass(frozen=True)
class Contender:
    """Who takes part in a comparison.

    Attributes:
      run_round: Runs the round with the cohort of an index and returns its seconds.
      pid: The process that it runs in.
    """

    run_round: Callable[[int], float]
    pid: int = dataclasses.field(default_factory=os.getpid)


@dataclasses.dataclass(frozen=True)
class Times:
    """What rounds took, one entry for each.

    Attributes:
      seconds: Seconds by the clock.
      cpu: Processor time of all cores together, in the contender's process and in its worker.
      others: Share of all cores that programs that take no part had meanwhile.
    """

    seconds: np.ndarray
    cpu: np.ndarray
    others: float


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A line of a table.

    Attributes:
      contender: Whose seconds are divided.
      peer: By whose.
      goal: The largest ratio that is wanted; none if None.
      of_processor: Whether the goal is for the ratio of processor time; else of the clock.
    """

    contender: str
    peer: str
    goal: float | None = None
    of_processor: bool = False


def take_turns(
    contenders: Mapping[Any, Contender], num_rounds: int, *, num_warm_up: int = 2
) -> dict[Any, Times]:
    """Times of every round, by contender, who take turns; the first rounds compile."""
    taken = collections.defaultdict(list)
    start, own = _core_seconds(), _cpu_seconds(os.getpid())
    for index in range(num_warm_up + num_rounds):
        for name, contender in contenders.items():
            before = _cpu_seconds(contender.pid)
            seconds = contender.run_round(index)
            taken[name].append((seconds, _cpu_seconds(contender.pid) - before))
    busy, every = np.subtract(_core_seconds(), start)
    others = max(0.0, float((busy - (_cpu_seconds(os.getpid()) - own)) / every))
    return {
        name: Times(*np.asarray(rows[num_warm_up:]).reshape(-1, 2).T, others)
        for name, rows in taken.items()
    }


def print_table(
    title: str,
    times: Mapping[str, Times],
    comparisons: Sequence[Comparison],
    versions: Mapping[str, str],
) -> dict[str, Any]:
    """Prints what each contender took, then the ratios with their goals.

    Args:
      title: Name, colon, and what was done.
      times: By contender.
      comparisons: Those of contenders that did not take part are left out.
      versions: Versions of packages, by name.

    Returns:
      The table, as `figures.record` takes it.
    """
    print(f"\n{title}\n{'seconds a round':<44}{'median':>10}{'least':>10}{'CPU':>10}")
    for name, t in times.items():
        print(
            f"{name:<44}{np.median(t.seconds):>10.3f}{t.seconds.min():>10.3f}{t.cpu.mean():>10.3f}"
        )
    print(f"{'ratio':<58}{'median':>7}{'quartiles':>12}{'CPU':>7}{'quartiles':>12}{'goal':>7}")
    rows = []
    for line in comparisons:
        if line.contender not in times or line.peer not in times:
            continue
        own, peer = times[line.contender], times[line.peer]
        row: dict[str, Any] = {"what": line.contender, "over": line.peer}
        shown = ""
        for unit, ratios in (
            ("wall", own.seconds / peer.seconds),
            ("processor", own.cpu / peer.cpu),
        ):
            low, ratio, high = (round(float(x), 3) for x in np.percentile(ratios, [25, 50, 75]))
            row |= {unit: ratio, f"{unit} quartiles": [low, high]}
            shown += f"{ratio:>7.2f}{f'{low:.2f}-{high:.2f}':>12}"
        judged = row["processor" if line.of_processor else "wall"]
        name = f"{line.contender} / {line.peer}"
        print(f"{name:<58}{shown}{verdict(judged, line.goal)}", flush=True)
        rows.append(row)
    first = next(iter(times.values()))
    print(f"other programs had {first.others:.0%} of the cores", flush=True)
    return {
        "title": title,
        "date": datetime.date.today().isoformat(),
        "cores": len(os.sched_getaffinity(0)),
        "rounds": len(first.seconds),
        "others": round(first.others, 3),
        "versions": dict(versions),
        "rows": rows,
    }


def verdict(value: float, goal: float | None) -> str:
    """Says whether a value is within its goal, for the end of a line."""
    return "" if goal is None else f"{goal:>7g}  {'PASS' if value <= goal else 'MISS'}"


@dataclasses.dataclass(frozen=True)
class Command:
    """How to start a contender that lives in a process of its own.

    Attributes:
      script: File in `benchmarks/peers`.
      arguments: Its arguments, but for the workload.
      python: The interpreter of its environment.
      checkout: Where it imports this package from, if it does.
    """

    script: str = "tff_dpftrl_rounds.py"
    arguments: tuple[str, ...] = ()
    python: str = sys.executable
    checkout: str | os.PathLike[str] = _ROOT


class Child:
    """A process of `benchmarks/peers` that runs rounds when it is told to."""

    def __init__(self, command: Command, workload: str):
        """Starts it; returns when it is ready.

        Args:
          command: What to start.
          workload: File of the workload.
        """
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [command.python, str(PEERS / command.script), workload, *command.arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=os.environ | {"PYTHONPATH": str(command.checkout), "TF_CPP_MIN_LOG_LEVEL": "3"},
        )
        self.facts = self._answer()

    def _answer(self) -> dict:
        for line in self._process.stdout:
            if line.startswith(round_server.PREFIX):
                return json.loads(line.removeprefix(round_server.PREFIX))
        self._errors.seek(0)
        raise RuntimeError(f"{self._process.args} ended:\n{self._errors.read()[-3000:]}")

    def _ask(self, command: str) -> dict:
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._answer()

    def run_round(self, index: int) -> float:
        """Seconds of the round `index`."""
        return self._ask(f"round {index}")["seconds"]

    def weights(self) -> list[np.ndarray]:
        """The model's weights, or what stands for them."""
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, "weights.npz")
            self._ask(f"weights {path}")
            file = np.load(path)
            return [file[name] for name in file.files]

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def peak_megabytes(self) -> float:
        """Peak resident memory so far, TFF's worker included."""
        total = 0.0
        for pid in _with_children(self._process.pid):
            with contextlib.suppress(OSError):  # It may end meanwhile.
                status = pathlib.Path(f"/proc/{pid}/status").read_text(encoding="ascii")
                peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
                total += int(peak.split()[1]) / 1024
        return total

    def close(self) -> None:
        """Ends it."""
        self._process.stdin.close()
        self._process.wait()


def _stat(pid: int | str) -> list[str]:
    """Fields of /proc/PID/stat after the name: state, parent and so on."""
    text = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return text.rpartition(")")[2].split()


def _with_children(pid: int) -> list[int]:
    """A process, its children, theirs, and so on."""
    children = collections.defaultdict(list)
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # It may end meanwhile.
            children[int(_stat(entry)[1])].append(int(entry))
    found = [pid]
    for member in found:
        found.extend(children[member])
    return found


def _core_seconds() -> tuple[float, float]:
    """Time of all cores since the machine started: that they were busy, and all of it."""
    with open("/proc/stat", encoding="ascii") as file:
        ticks = np.array(file.readline().split()[1:9], float) / os.sysconf("SC_CLK_TCK")
    idle, waiting = ticks[3:5]
    return ticks.sum() - idle - waiting, ticks.sum()


def _cpu_seconds(pid: int) -> float:
    """What a process and its children have used so far."""
    total = 0.0
    for member in _with_children(pid):
        with contextlib.suppress(OSError):  # It may end meanwhile.
            total += time.clock_gettime(~member << 3 | 2)  # Linux's clock of another process.
    return total


class Saved(Protocol):
    """What all contenders compute."""

    def save(self, path: str) -> None:
        """Writes it to a file."""


@contextlib.contextmanager
def started(work: Saved, commands: Mapping[str, Command]) -> Iterator[dict[str, Child]]:
    """Starts a process for each contender, one after the other, and ends them."""
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        path = os.path.join(directory, "workload.npz")
        work.save(path)
        children = {}
        for name, command in commands.items():
            children[name] = Child(command, path)
            stack.callback(children[name].close)
        yield children
