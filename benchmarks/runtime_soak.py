"""Ten thousand devices that come and go for half an hour: does a server stay as it is?

    PYTHONPATH=. python benchmarks/runtime_soak.py [--devices 10000] [--minutes 30]
        [--shape coming|waiting] [--goal N] [--fleets 2] [--report FOLDER] [--folder FOLDER]

A task is made (`tff-dpftrl task new`, a model of 734 weights) and served (`tff-dpftrl serve`):
embedded engine, gRPC over TLS, attestation, SQLite on disk, status page, all as in earnest.
Devices are in processes of their own (`soak_devices.py`), speak the real protocol over a few
connections, drop out (8 %), straggle (22 %) and attack (2 %). One who looks at the status page
asks for what a browser would.

- "coming": devices come as pace steering tells them to, one session after the other.
- "waiting": rounds want nearly all devices, which wait for the last of them with open sessions.

The server is looked at from outside (/proc, its folder, /metrics), its latency is what devices
see. MB are 10**6 bytes. Slopes are of a straight line, after the warm-up; their standard errors
take neighbouring samples for what they are, not independent (Newey and West, lags of up to two
minutes). Ctrl-C ends all of it, and shows what there is.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import datetime
import json
import math
import os
import pathlib
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import soak_devices

from tff_dpftrl.runtime.server import server_folder

_POPULATION = _TASK = "soak"
_WORDS = ("the", "a", "of", "to", "is", "and", "in", "that", "return", "if")
_DEVICES_PY = pathlib.Path(soak_devices.__file__)
_START_SECONDS = 300.0  # Until the server serves.
_END_SECONDS = 60.0
_PERCENTILES = (50.0, 90.0, 99.0, 99.9)
_CORRELATED_SECONDS = 120.0
_MALICIOUS = 0.02
_TICKS = os.sysconf("SC_CLK_TCK")
_COUNTERS = {
    "rounds": f'tff_dpftrl_rounds_done{{task="{_TASK}"}}',
    "sessions": "tff_dpftrl_sessions_total",
    "waiting": 'tff_dpftrl_devices{state="waiting"}',
    "connected": 'tff_dpftrl_devices{state="connected"}',
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """How devices come.

    Attributes:
      goal_share: Of all devices, that complete a round.
      min_sep: Rounds between two turns of a device.
      round_seconds: For pace steering, and devices without a word of the server.
      selection_timeout: Longest time until a round begins with fewer devices, in seconds.
    """

    goal_share: float
    min_sep: int
    round_seconds: float
    selection_timeout: float


SHAPES = {
    "coming": Shape(goal_share=0.02, min_sep=5, round_seconds=2.0, selection_timeout=10.0),
    "waiting": Shape(goal_share=0.75, min_sep=1, round_seconds=60.0, selection_timeout=45.0),
}


def sample_process(pid: int) -> dict[str, Any]:
    """What a process uses, as the system sees it.

    Args:
      pid: The process.

    Returns:
      Memory in MB ("rss_mb", its "anonymous_mb", "pss_mb", which shares what is shared), "fds",
      "threads" and of each name how many ("thread_names"), and "cpu_s"; None where looking is
      not allowed, as at a server's memory and files for who is not root.
    """
    folder = pathlib.Path("/proc", str(pid))
    status = dict(
        line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line
    )
    fields = (folder / "stat").read_text().rpartition(")")[2].split()
    pss = fds = None
    with contextlib.suppress(PermissionError):
        lines = (folder / "smaps_rollup").read_text().splitlines()
        pss = next(int(line.split()[1]) * 1.024e-3 for line in lines if line.startswith("Pss:"))
        fds = len(os.listdir(folder / "fd"))
    return {
        "rss_mb": int(status["VmRSS"].split()[0]) * 1.024e-3,
        "anonymous_mb": int(status["RssAnon"].split()[0]) * 1.024e-3,
        "pss_mb": pss,
        "fds": fds,
        "threads": int(status["Threads"]),
        "thread_names": _thread_names(folder),
        "cpu_s": (int(fields[11]) + int(fields[12])) / _TICKS,
    }


def _thread_names(process: pathlib.Path) -> dict[str, int]:
    """How many threads of each name; those of Python and its libraries have the process's."""
    names: collections.Counter[str] = collections.Counter()
    for thread in (process / "task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # It has ended.
            names[(thread / "comm").read_text().strip()] += 1
    return dict(sorted(names.items()))


def slope(seconds: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Slope of a straight line through a series, and its standard error.

    Args:
      seconds: Times of the samples, about evenly spaced; three at least.
      values: The samples.

    Returns:
      Both in units an hour.
    """
    hours = np.asarray(seconds, float) / 3600
    hours -= hours.mean()
    values = np.asarray(values, float)
    square = (hours**2).sum()
    found = (hours * values).sum() / square
    errors = hours * (values - values.mean() - found * hours)
    step = 3600 * np.ptp(hours) / (len(hours) - 1)
    lags = min(int(_CORRELATED_SECONDS / step), len(hours) // 4)
    variance = (errors**2).sum()
    for lag in range(1, lags + 1):
        variance += 2 * (1 - lag / (lags + 1)) * (errors[lag:] * errors[:-lag]).sum()
    variance *= len(hours) / (len(hours) - 2)
    return float(found), float(math.sqrt(max(variance, 0.0)) / square)


class _Process:
    """A program that was started, in a session of its own, which Ctrl-C does not reach."""

    def __init__(self, arguments: Sequence[str], log: pathlib.Path, **options: Any):
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
        with log.open("wb") as file:
            self.popen = subprocess.Popen(
                [sys.executable, *arguments],
                stderr=file,
                start_new_session=True,
                env=environment,
                **options,
            )
        self._log = log

    def check(self) -> None:
        """Raises RuntimeError with what it has said, if it has ended."""
        if self.popen.poll() is not None:
            text = self._log.read_text(encoding="utf-8", errors="replace")
            raise RuntimeError(f"{self.popen.args[1:4]} has ended:\n{text[-3000:]}")

    def end(self, signum: int) -> None:
        """Asks it to end, and ends it if it does not."""
        if self.popen.poll() is None:
            self.popen.send_signal(signum)
        try:
            self.popen.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()


class Fleet:
    """A process of devices, and all that they have said."""

    def __init__(self, settings: soak_devices.Settings, log: pathlib.Path):
        """Starts it.

        Args:
          settings: What it is told.
          log: File of its errors.
        """
        self.said: list[dict[str, Any]] = []
        self._process = _Process(
            [str(_DEVICES_PY)], log, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._process.popen.stdin.write(json.dumps(dataclasses.asdict(settings)) + "\n")
        self._process.popen.stdin.flush()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.popen.pid

    def check(self) -> None:
        """Raises RuntimeError if it has ended."""
        self._process.check()

    def end(self) -> None:
        """Ends it, and waits for its last words."""
        with contextlib.suppress(BrokenPipeError):
            self._process.popen.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.popen.wait(_END_SECONDS)
        self._process.end(signal.SIGKILL)
        self._thread.join(_END_SECONDS)

    def _listen(self) -> None:
        for line in self._process.popen.stdout:
            self.said.append(json.loads(line))


class _Onlooker:
    """Looks at the status page, as a browser does."""

    def __init__(self, address: str):
        self._address = address
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.latencies: list[tuple[float, float]] = []

    def _look(self) -> None:
        while not self._stop.wait(2.0):
            begin = time.monotonic()
            with contextlib.suppress(OSError):
                self.ask("")
                self.latencies.append((time.time(), time.monotonic() - begin))

    def ask(self, path: str) -> str:
        """What the page answers."""
        with urllib.request.urlopen(f"{self._address}/{path}", timeout=30) as answer:
            return answer.read().decode()

    def counters(self) -> dict[str, float]:
        """Figures of `_COUNTERS`."""
        lines = dict(line.rsplit(" ", 1) for line in self.ask("metrics").splitlines())
        return {name: float(lines.get(key, 0)) for name, key in _COUNTERS.items()}

    def __enter__(self) -> _Onlooker:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join(_END_SECONDS)


def _make_task(folder: pathlib.Path, given: argparse.Namespace) -> None:
    """A task of a small model, which has enough rounds for the whole time."""
    (folder / "words.txt").write_text("".join(f"{word}\n" for word in _WORDS))
    options = {
        "output": folder / "task",
        "population": _POPULATION,
        "task": _TASK,
        "num-devices": given.devices,
        "rounds": math.ceil(given.minutes * 120) + 1000,
        "clients-per-round": given.goal,
        "mechanism": "blt",
        "noise-multiplier": 1.0,
        "clip-norm": 0.5,
        "delta": 1e-5,
        "min-sep": given.shape.min_sep,
        "vocabulary": folder / "words.txt",
        "vocabulary-size": len(_WORDS),
        "embedding-size": 8,
        "lstm-size": 8,
        "batch-size": 4,
        "sequence-length": 5,
        "max-sequences-per-client": 8,
        "selection-timeout": given.shape.selection_timeout,
        "reporting-timeout": 30.0,
        "devices-per-aggregator": 100,
        "proxy-rounds": 2,
    }
    arguments = [f"--{name}={value}" for name, value in options.items()]
    command = ["-m", "tff_dpftrl.cli.main", "task", "new", "--pipelined", *arguments]
    process = _Process(command, folder / "task.log")
    if process.popen.wait():
        process.check()


def _write_sample(folder: pathlib.Path) -> None:
    """What the devices' reports have in common, computed as a device does; needs TensorFlow."""
    from tff_dpftrl.runtime.device import text_examples
    from tff_dpftrl.runtime.plans import allowed_ops, device_work, tensor_values
    from tff_dpftrl.runtime.tasks import planned_task, task_folder
    from verification import memory_store

    task = planned_task.load(folder / "task")
    commit = task.add_to(memory_store.MemoryStore())
    plan = task.served.plan_for(allowed_ops.RUNTIME_VERSION)
    work = device_work.load(plan, [task_folder.bundled_key(folder / "task")])
    broadcast = tensor_values.from_bytes(commit.model, work.broadcast)
    update = work.run([text_examples.encode_text(" ".join(_WORDS))], broadcast)
    (folder / "update").write_bytes(tensor_values.to_bytes(update))
    (folder / "participation").write_bytes(work.plan.participation.SerializeToString())


def _in_folder(folder: pathlib.Path) -> int:
    """Bytes of all files."""
    sizes = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # SQLite's come and go.
            sizes += path.stat().st_size
    return sizes


class Soak:
    """Server, devices and whoever looks, and what was seen of them."""

    def __init__(self, given: argparse.Namespace, folder: pathlib.Path):
        """Starts nothing yet.

        Args:
          given: The options.
          folder: Where everything is.
        """
        self._given = given
        self._folder = folder
        self.samples: list[dict[str, Any]] = []
        self.fleets: list[Fleet] = []
        self.seen: dict[str, Any] = {}
        self._begin = time.time()

    def run(self) -> None:
        """Runs until the time is over or Ctrl-C comes; leaves no process behind."""
        _progress("Making a task ...")
        if not (self._folder / "task").exists():
            _make_task(self._folder, self._given)
        command = [__file__, f"--write-sample={self._folder}"]
        process = _Process(command, self._folder / "sample.log")
        if process.popen.wait():
            process.check()
        with self._served() as server, self._looked_at() as onlooker:
            pid = server.popen.pid
            time.sleep(3.0)  # The page has been asked for everything once.
            self.seen["before"] = sample_process(pid)
            self._begin = time.time()
            try:
                self._start_fleets()
                self._watch(server, onlooker)
            except KeyboardInterrupt:
                _progress("Ending early.")
            finally:
                self.seen["seconds"] = time.time() - self._begin
                for fleet in self.fleets:
                    fleet.end()
            with contextlib.suppress(KeyboardInterrupt):
                time.sleep(self._given.quiet_seconds)
            self.seen["after"] = sample_process(pid)
            self.seen["page"] = [(at - self._begin, took) for at, took in onlooker.latencies]

    @contextlib.contextmanager
    def _served(self) -> Iterator[_Process]:
        arguments = {
            "population": _POPULATION,
            "task": self._folder / "task",
            "store": self._folder / "store",
            "population-size": self._given.devices,
            "round-seconds": self._given.shape.round_seconds,
        }
        options = [f"--{name}={value}" for name, value in arguments.items()]
        _progress("Starting the server ...")
        server = _Process(
            ["-m", "tff_dpftrl.cli.main", "serve", *options], self._folder / "serve.log"
        )
        try:
            deadline = time.monotonic() + _START_SECONDS
            while not self._served_folder.endpoint.exists():
                server.check()
                if time.monotonic() > deadline:
                    raise RuntimeError(f"The server has not begun: see {self._folder}/serve.log.")
                time.sleep(0.1)
            yield server
        finally:
            server.end(signal.SIGINT)

    @property
    def _served_folder(self) -> server_folder.ServerFolder:
        return server_folder.of(self._folder / "store" / "server")

    def _looked_at(self) -> _Onlooker:
        return _Onlooker(json.loads(self._served_folder.endpoint.read_text())["status_page"])

    def _start_fleets(self) -> None:
        given = self._given
        for number in range(given.fleets):
            share = given.devices // given.fleets + (number < given.devices % given.fleets)
            settings = soak_devices.Settings(
                server_folder=str(self._served_folder.path),
                sample=str(self._folder),
                population=_POPULATION,
                devices=share,
                connections=given.connections,
                seed=given.seed * given.fleets + number,
                within_s=min(60.0, 60 * given.minutes / 4),
                train_s=given.train_seconds,
                usual_wait_s=given.shape.round_seconds * 10,
                rates={"straggler_s": given.straggler_seconds, "malicious": _MALICIOUS},
            )
            self.fleets.append(Fleet(settings, self._folder / f"fleet{number}.log"))

    def _watch(self, server: _Process, onlooker: _Onlooker) -> None:
        end = self._begin + 60 * self._given.minutes
        due = self._begin
        while due < end:
            due += self._given.every
            time.sleep(max(0.0, due - time.time()))
            for process in (server, *self.fleets):
                process.check()
            self.samples.append(self._sample(server, onlooker))
            _progress(self._line(self.samples[-1]))

    def _sample(self, server: _Process, onlooker: _Onlooker) -> dict[str, Any]:
        return {
            "at": time.time() - self._begin,
            **sample_process(server.popen.pid),
            **onlooker.counters(),
            "store_bytes": _in_folder(self._folder / "store"),
            "open": sum(fleet.said[-1]["open"] for fleet in self.fleets if fleet.said),
            "fleets_cpu_s": sum(sample_process(fleet.pid)["cpu_s"] for fleet in self.fleets),
            "load": os.getloadavg()[0],
        }

    def _line(self, sample: Mapping[str, Any]) -> str:
        total = 60 * self._given.minutes
        return (
            f"{sample['at']:6.0f} of {total:.0f} s: {sample['rounds']:.0f} rounds, "
            f"{sample['sessions']:.0f} sessions, {sample['open']} open, "
            f"{sample['rss_mb']:.1f} MB, {sample['fds']} files, {sample['threads']} threads"
        )

    # What there is to say.

    def figures(self) -> dict[str, Any]:
        """All figures.

        Raises:
          ValueError: If it ended before there were any.
        """
        given, end = self._given, self.seen.get("seconds", 0.0)
        warm = [s for s in self.samples if s["at"] >= 60 * given.warm_up]
        if len(warm) < 8:
            raise ValueError("it ended before there was enough to say: let it run for longer")
        half = [s for s in warm if s["at"] >= (warm[0]["at"] + warm[-1]["at"]) / 2]
        first, last = warm[0], warm[-1]
        seconds = last["at"] - first["at"]
        done = last["rounds"] - first["rounds"]
        window = min(300.0, seconds / 2)
        windows = {
            "beginning": (first["at"], first["at"] + window),
            "end": (last["at"] - window, last["at"]),
        }
        said = [one for fleet in self.fleets for one in fleet.said]
        return {
            "devices": given.devices,
            "shape": given.shape_name,
            "goal": given.goal,
            "seed": given.seed,
            "seconds": end,
            "warm_up_s": 60 * given.warm_up,
            "window_s": window,
            "memory_mb_per_hour": {
                f"{name}, {part}": slope([s["at"] for s in of], [s[name] for s in of])
                for name in ("rss_mb", "anonymous_mb")
                for part, of in (("after the warm-up", warm), ("second half", half))
            },
            "before": self.seen["before"],
            "first": first,
            "last": last,
            "after": self.seen.get("after"),
            "sessions_per_second": (last["sessions"] - first["sessions"]) / seconds,
            "rounds": last["rounds"],
            "rounds_per_second": done / seconds,
            "store_bytes_per_round": (last["store_bytes"] - first["store_bytes"]) / max(done, 1),
            "server_ms_per_session": (last["cpu_s"] - first["cpu_s"])
            / max(last["sessions"] - first["sessions"], 1)
            * 1e3,
            "server_cores": (last["cpu_s"] - first["cpu_s"]) / seconds,
            "fleets_cores": (last["fleets_cpu_s"] - first["fleets_cpu_s"]) / seconds,
            "load_average": float(np.mean([s["load"] for s in warm])),
            "open_sessions": float(np.mean([s["open"] for s in warm])),
            "most_open_sessions": max(s["open"] for s in warm),
            "latency_ms": {
                part: {
                    **{name: self._percentiles(name, *of) for name in soak_devices.LATENCIES},
                    "page": _percentiles(
                        [took for at, took in self.seen.get("page", ()) if of[0] <= at < of[1]]
                    ),
                }
                for part, of in windows.items()
            },
            "shapes": counted(said, "shapes"),
            "refusals": counted(said, "refusals"),
            "failures": counted(said, "failures"),
            "samples": self.samples,
            "machine": {
                "cores": os.cpu_count(),
                "nice": os.nice(0),
                "python": platform.python_version(),
                "system": platform.platform(),
                "at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            },
        }

    def _percentiles(self, name: str, begin: float, end: float) -> dict[str, float]:
        seconds = [
            took
            for fleet in self.fleets
            for said in fleet.said
            if begin <= said["at"] - self._begin < end
            for took in said["latencies"][name]
        ]
        return _percentiles(seconds)


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """In milliseconds, and of how many; nothing of none."""
    if not len(seconds):
        return {"count": 0}
    found = np.percentile(np.asarray(seconds) * 1e3, _PERCENTILES).tolist()
    names = [f"{percentile:g}" for percentile in _PERCENTILES]
    return {"count": len(seconds), **dict(zip(names, found, strict=True))}


def counted(said: Sequence[Mapping[str, Any]], name: str) -> dict[str, int]:
    """Sums what fleets have counted.

    Args:
      said: All that they have said.
      name: "shapes", "refusals" or "failures".

    Returns:
      The counts, the largest first.
    """
    total: collections.Counter[str] = collections.Counter()
    for one in said:
        total.update(one[name])
    return dict(total.most_common())


def to_markdown(figures: Mapping[str, Any]) -> str:
    """A report in words and tables."""
    machine = figures["machine"]
    lines = [
        f"# {figures['devices']} devices for {figures['seconds'] / 60:.1f} minutes "
        f"({figures['shape']})",
        "",
        f"{machine['at']}, {machine['cores']} cores, nice {machine['nice']}, load average "
        f"{figures['load_average']:.1f}, Python {machine['python']}, {machine['system']}; seed "
        f"{figures['seed']}, goal of a round {figures['goal']}, warm-up "
        f"{figures['warm_up_s'] / 60:g} minutes.",
        "",
        f"- {figures['rounds']:.0f} rounds committed; after the warm-up "
        f"{figures['rounds_per_second']:.2f} rounds/s and "
        f"{figures['sessions_per_second']:.1f} sessions/s, {figures['open_sessions']:.0f} sessions "
        f"open (at most {figures['most_open_sessions']})",
        f"- processor time: server {figures['server_cores']:.2f} cores, "
        f"{figures['server_ms_per_session']:.2f} ms a session; fleets "
        f"{figures['fleets_cores']:.2f} cores",
        f"- store: {figures['store_bytes_per_round']:.0f} bytes a round",
        "",
        "| memory of the server | MB an hour | standard error |",
        "|---|---|---|",
    ]
    lines += [
        f"| {name.replace('_mb', '')} | {found:+.2f} | {error:.2f} |"
        for name, (found, error) in figures["memory_mb_per_hour"].items()
    ]
    moments = {
        "before any device": figures["before"],
        "after the warm-up": figures["first"],
        "at the end": figures["last"],
        "without devices again": figures["after"],
    }
    moments = {name: moment for name, moment in moments.items() if moment is not None}
    lines += ["", f"| server | {' | '.join(moments)} |", "|---" * (len(moments) + 1) + "|"]
    for name in ("rss_mb", "anonymous_mb", "pss_mb", "fds", "threads"):
        cells = [moment[name] for moment in moments.values()]
        shown = ["?" if cell is None else f"{cell:.6g}" for cell in cells]
        lines.append(f"| {name.replace('_mb', ', MB')} | {' | '.join(shown)} |")
    lines.append("")
    for when, moment in moments.items():
        threads = ", ".join(f"{count} {name}" for name, count in moment["thread_names"].items())
        lines.append(f"- threads {when}: {threads}")
    names = {**soak_devices.LATENCIES, "page": "status page, as its onlooker sees it"}
    head = " | ".join(f"{p:g} %" for p in _PERCENTILES)
    minutes = figures["window_s"] / 60
    lines += ["", f"| latency, ms, {minutes:.3g} minutes each | when | count | {head} |"]
    lines.append("|---" * (3 + len(_PERCENTILES)) + "|")
    for name, words in names.items():
        for part, of in figures["latency_ms"].items():
            found = of[name]
            cells = [f"{found[f'{p:g}']:.1f}" if found["count"] else "" for p in _PERCENTILES]
            lines.append(f"| {words} | {part} | {found['count']} | {' | '.join(cells)} |")
    for name, words in (
        ("shapes", "shapes of sessions"),
        ("refusals", "reports refused"),
        ("failures", "sessions ended with an error"),
    ):
        counted = ", ".join(f"`{what}` {count}" for what, count in figures[name].items())
        lines += ["", f"- {words}: {counted or 'none'}"]
    return "\n".join(lines) + "\n"


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--devices", type=int, default=10_000)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--shape", dest="shape_name", choices=list(SHAPES), default="coming")
    parser.add_argument("--goal", type=int, help="reports of a round; a share of devices if absent")
    parser.add_argument("--fleets", type=int, default=2, help="processes of devices")
    parser.add_argument("--connections", type=int, default=4, help="of each of them")
    parser.add_argument("--train-seconds", type=float, default=1.0, help="of every device")
    parser.add_argument("--straggler-seconds", type=float, default=2.0, help="on top, of some")
    parser.add_argument("--seed", type=int, default=0, help="of what devices do")
    parser.add_argument("--warm-up", type=float, help="minutes; a sixth of all if absent")
    parser.add_argument("--every", type=float, help="seconds from sample to sample")
    parser.add_argument(
        "--quiet-seconds", type=float, default=20.0, help="without devices before the last look"
    )
    parser.add_argument("--folder", type=pathlib.Path, help="new one for all files, which it keeps")
    parser.add_argument("--report", type=pathlib.Path, help="folder for soak.md and soak.json")
    parser.add_argument("--write-sample", type=pathlib.Path, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    given.shape = SHAPES[given.shape_name]
    if given.goal is None:
        given.goal = max(3, round(given.devices * given.shape.goal_share))
    if given.warm_up is None:
        given.warm_up = given.minutes / 6
    if given.every is None:
        given.every = min(10.0, given.minutes)
    return given


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    given = _parse(argv)
    if given.write_sample is not None:
        _write_sample(given.write_sample)
        return
    with contextlib.ExitStack() as stack:
        folder = given.folder
        if folder is None:
            folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        soak = Soak(given, folder)
        soak.run()
        figures = soak.figures()
    text = to_markdown(figures)
    print(text)
    if given.report is not None:
        given.report.mkdir(parents=True, exist_ok=True)
        (given.report / "soak.md").write_text(text, encoding="utf-8")
        (given.report / "soak.json").write_text(json.dumps(figures) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
