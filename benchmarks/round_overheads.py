"""What a run of `tff-dpftrl train` spends its time on beside training, part by part.

    python benchmarks/round_overheads.py [--rounds 12] [--repeats 1] [--against CHECKOUT]
        [--processor] [--option=--mechanism=tree ...]
    python benchmarks/round_overheads.py --state 4 [--buffers 4] [--rounds 12]

The first form runs the real command on `--config quickstart`, in a process of its own,
with a clock around the functions of each part and around the import of each package. It
prints a table in seconds of what comes before, in and after the rounds, and one of a round in
milliseconds and as a share of the median round. A part's time is its own, without the parts that it
calls. A round's parts are medians over the calls, times the calls a round, from the third
round on: the first ones compile. With `--against`, another checkout of this repository
does the same, in turns, and has a second column. `--processor` counts the processor's time,
of all threads of this process but not of TFF's worker, which a busy machine disturbs
less.

The second form commits rounds of a state of so many million parameters, in as many
tensors as a small model has: weights, one moment of the optimizer, and buffers of the
noise. It prints the ratio of a commit's time to that of three named peers, in turns: one
BLAKE2b hash of the same bytes, one durable write of them, and NumPy's `savez` of the same
tensors, which is not durable.
"""

from __future__ import annotations

import argparse
import collections
import functools
import hashlib
import importlib.machinery
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_WARM_UP = 2  # Rounds that compile.
_ROUND = "rest of the round"
_TRAINING = "training and aggregation"
_REST = "the rest of the command"

_PARTS: Mapping[str, Mapping[str, str]] = {
    "tff_dpftrl.accounting.guarantee": {"epsilon_so_far": "ε"},
    "tff_dpftrl.data.client_datasets": {"batches": "client data"},
    "tff_dpftrl.data.docstrings": {"_cached": "corpus: read", "_package_roots": "corpus: read"},
    "tff_dpftrl.data.sequences": {
        "SequenceCorpus.sample": "client data",
        "SequenceCorpus.pooled": "corpus: pool sequences",
        "SequenceCorpus.sequences": "corpus: split into words",
    },
    "tff_dpftrl.data.split": {"by_user": "corpus: split users"},
    "tff_dpftrl.data.vocabulary": {"most_frequent": "corpus: vocabulary"},
    "tff_dpftrl.execution.compiled_process": {
        "CompiledProcess.__init__": "compile the rounds",
        "CompiledProcess.initialize": "initial state",
    },
    "tff_dpftrl.learning.functional_model": {"build": "build the computations"},
    "tff_dpftrl.mechanisms.table": {"build": "mechanism"},
    "tff_dpftrl.models.evaluation": {
        "Evaluator.__init__": "evaluation",
        "Evaluator.__call__": "evaluation",
    },
    "tff_dpftrl.models.export": {"write": "write the model"},
    "tff_dpftrl.models.ngrams": {
        "NgramModel.__init__": "n-grams",
        "NgramModel.evaluate": "n-grams",
    },
    "tff_dpftrl.participation.cohorts": {"MinSepSampler.cohort": "cohort"},
    "tff_dpftrl.participation.ledger": {
        "Ledger.create": "ledger",
        "Ledger.begin_round": "ledger: begin",
        "Ledger.commit_round": "ledger: commit",
    },
    "tff_dpftrl.runs.checkpoint": {
        "CheckpointFolder.save": "checkpoint: write",
        "CheckpointFolder.keep_only": "checkpoint: remove the last one",
        "Snapshot.of": "checkpoint: take the state apart",
        "Snapshot.fingerprint": "checkpoint: hash",
    },
    "tff_dpftrl.runs.curves": {"write": "curves"},
    "tff_dpftrl.runs.loop": {
        "Loop._check_finite": "finite check",
        "Loop._restore": "checkpoint: read",
        "Loop._run_round": _ROUND,
        "Loop._run_rounds": "progress bar",
    },
    "tff_dpftrl.runs.metrics_log": {"MetricsLog.append": "metrics.csv"},
    "tff_dpftrl.runs.reporting": {"write": "statement"},
    "tff_dpftrl.runs.stopping": {"Schedule.reason_to_end": "stopping rule"},
    "tff_dpftrl.runs.tensorboard_log": {"TensorBoardLog.append": "TensorBoard"},
    "tff_dpftrl.training.federated_trainer": {},
    "tff_dpftrl.training.options": {"read_toml": "options"},
    "tff_dpftrl.training.process": {"build_round": "build the computations"},
    "tff_dpftrl.training.run": {"train": _REST},
    "tff_dpftrl.training.startup": {"describe_task": "count the training text"},
    "tff_dpftrl.training.task": {
        "LanguageTask.client_dataset": "client data",
        "LanguageTask.client_rows": "client data",
    },
    "tff_dpftrl.training.text_task": {"TextTask.baselines": "n-grams"},
}
"""Which part a function's time belongs to: module → qualified name → part."""


class _Clock:
    """Time of each part, without what it calls, call by call.

    Attributes:
      calls: (round, part, seconds), in the order in which calls ended; the round is 0
        before the first one, and counts on from the last one afterwards.
    """

    def __init__(self, now: Callable[[], float]):
        self._now = now
        self.calls: list[tuple[int, str, float]] = []
        self._round = 0
        self._within: list[float] = []  # Seconds of the callees, for each open call.
        self._thread = threading.get_ident()

    def timed(self, part: str, function: Callable) -> Callable:
        """The function with a clock around it; other threads' calls do not count."""

        @functools.wraps(function)
        def wrapped(*args, **kwargs):
            if threading.get_ident() != self._thread:
                return function(*args, **kwargs)
            self._round += part == _ROUND
            self._within.append(0.0)
            start = self._now()
            try:
                return function(*args, **kwargs)
            finally:
                seconds = self._now() - start
                self.calls.append((self._round, part, seconds - self._within.pop()))
                if self._within:
                    self._within[-1] += seconds

        return wrapped

    def install(self) -> None:
        """Puts clocks around imports, and into modules as soon as they are imported."""
        for loader in (
            importlib.machinery.SourceFileLoader,
            importlib.machinery.ExtensionFileLoader,
        ):
            for name in ("create_module", "exec_module"):
                setattr(loader, name, self._timed_import(getattr(loader, name)))

    def _timed_import(self, load: Callable) -> Callable:
        @functools.wraps(load)
        def wrapped(loader, subject):
            name = getattr(subject, "__name__", None) or subject.name
            result = self.timed(f"import {name.partition('.')[0]}", load)(loader, subject)
            if load.__name__ == "exec_module" and name in _PARTS:
                self._enter(subject, _PARTS[name])
            return result

        return wrapped

    def _enter(self, module, parts: Mapping[str, str]) -> None:
        for qualified, part in parts.items():
            owner, _, name = qualified.rpartition(".")
            holder = getattr(module, owner, None) if owner else module
            found = None if holder is None else vars(holder).get(name)
            if found is None:  # Another version of the package, without this function.
                continue
            if isinstance(found, (classmethod, staticmethod)):
                setattr(holder, name, type(found)(self.timed(part, found.__func__)))
            else:
                setattr(holder, name, self.timed(part, found))
        if module.__name__ == "tff_dpftrl.training.federated_trainer":
            self._enter_process(module.FederatedTrainer)

    def _enter_process(self, run: type) -> None:
        """A clock around what a run asks of its learning process, whichever it is."""
        initialize, clock = run.__init__, self

        class Timed:
            def __init__(self, process):
                self._process = process
                self.next = clock.timed(_TRAINING, process.next)
                self.get_model_weights = clock.timed(
                    "weights of the state", process.get_model_weights
                )

            def __getattr__(self, name):
                return getattr(self._process, name)

        @functools.wraps(initialize)
        def wrapped(self, *args, **kwargs):
            initialize(self, *args, **kwargs)
            self._process = Timed(self._process)

        run.__init__ = wrapped


def _child(result: str, options: list[str], processor: bool) -> None:
    """Runs the command with clocks, and writes what they say."""
    clock = _Clock(time.process_time if processor else time.perf_counter)
    clock.install()

    def command() -> None:
        from tff_dpftrl.cli import main

        status = main.main(["train", *options])
        if status:
            raise SystemExit(status)

    clock.timed(_REST, command)()
    pathlib.Path(result).write_text(json.dumps(clock.calls))


def _measure(checkout: pathlib.Path, rounds: int, options: list[str], processor: bool) -> list:
    with tempfile.TemporaryDirectory() as folder:
        result, log = pathlib.Path(folder, "calls.json"), pathlib.Path(folder, "log")
        config = checkout / "tff_dpftrl" / "training" / "configs" / "quickstart.toml"
        if not config.exists():  # A checkout of an earlier version.
            config = checkout / "configs" / "quickstart.toml"
        command = [sys.executable, __file__, "--child", str(result), f"--option=--config={config}"]
        command += [f"--option=--rounds={rounds}", f"--option=--output={folder}/run"]
        command += [f"--option={option}" for option in options]
        command += ["--processor"] if processor else []
        environment = {**os.environ, "PYTHONPATH": str(checkout), "TF_CPP_MIN_LOG_LEVEL": "3"}
        with log.open("w") as output:
            status = subprocess.run(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=folder
            ).returncode
        if status:
            raise SystemExit(f"the run in {checkout} failed:\n{log.read_text()[-2000:]}")
        return json.loads(result.read_text())


def _round_parts(calls: list, rounds: int) -> dict[str, float]:
    """Milliseconds a round of each part."""
    by_part = collections.defaultdict(list)
    for number, part, seconds in calls[: _end(calls)]:
        if number > _WARM_UP:
            by_part[part].append(1e3 * seconds)
    return {
        # The first call of a part may compile something, too.
        part: statistics.median(times[1:] or times) * len(times) / (rounds - _WARM_UP)
        for part, times in by_part.items()
    }


def _end(calls: list) -> int:
    """Where the calls after the last round begin."""
    return 1 + max(index for index, (_, part, _) in enumerate(calls) if part == _ROUND)


def _phases(calls: list, rounds: int) -> dict[str, float]:
    """Seconds of each part before the first round, in all rounds, and afterwards."""
    end = _end(calls)
    totals: collections.Counter[str] = collections.Counter()
    for index, (number, part, seconds) in enumerate(calls):
        if part == _REST:
            totals[part] += seconds
        elif number == 0:
            totals[f"before: {part}"] += seconds
        elif index >= end:
            totals[f"after: {part}"] += seconds
        elif number == 1 and part == _TRAINING:
            totals["first round: training and aggregation"] += seconds
        else:
            totals["all other rounds"] += seconds
    return dict(totals)


def _table(columns: list[list[dict[str, float]]], unit: str, smallest: float) -> None:
    """Prints the medians over the repeats, a column for each checkout."""
    found = [
        {
            part: statistics.median(run.get(part, 0.0) for run in runs)
            for part in {part for run in runs for part in run}
        }
        for runs in columns
    ]
    totals = [sum(parts.values()) for parts in found]
    names = sorted({n for parts in found for n in parts}, key=lambda n: -found[0].get(n, 0.0))
    rest = [0.0] * len(found)
    for name in names:
        values = [parts.get(name, 0.0) for parts in found]
        if max(values) < smallest:
            rest = [r + value for r, value in zip(rest, values, strict=True)]
        else:
            _line(name, values, totals)
    _line(f"all parts below {smallest:g} {unit}", rest, totals)
    _line(f"total, {unit}", totals, totals)


def _line(name: str, values: list[float], totals: list[float]) -> None:
    cells = (f"{v:10.2f} {v / t:6.1%}" for v, t in zip(values, totals, strict=True))
    print(f"{name:44}", *cells, flush=True)


def _command(args: argparse.Namespace) -> None:
    checkouts = [_ROOT] + ([args.against.resolve()] if args.against else [])
    runs: list[list[list]] = [[] for _ in checkouts]
    for _ in range(args.repeats):
        for checkout, found in zip(checkouts, runs, strict=True):
            found.append(_measure(checkout, args.rounds, args.option, args.processor))
    print("columns:", *checkouts)
    print(f"\nThe whole command of {args.rounds} rounds, seconds")
    _table([[_phases(calls, args.rounds) for calls in found] for found in runs], "s", 0.1)
    print("\nA round, milliseconds")
    _table([[_round_parts(calls, args.rounds) for calls in found] for found in runs], "ms", 0.3)


def _large_state(millions: float, buffers: int, rounds: int) -> None:
    """Commits rounds of a large state, beside its peers."""
    import numpy as np

    from tff_dpftrl import durable_files
    from tff_dpftrl.participation import schema
    from tff_dpftrl.runs import committed_rounds

    rows = max(1, round(millions * 1e6 / 4 / 512))
    rng = np.random.default_rng(0)

    def model():
        return [rng.standard_normal((rows, 512), np.float32) for _ in range(4)]

    state = {
        "global_model_weights": model(),
        "aggregator": {"round": np.int64(0), "buffers": [model() for _ in range(buffers)]},
        "finalizer": model(),
    }
    tensors = [*state["global_model_weights"], *state["finalizer"]]
    tensors += [x for buffer in state["aggregator"]["buffers"] for x in buffer]
    content = b"".join(x.tobytes() for x in tensors)
    times = collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)

        def commit(t: int) -> None:
            rounds_done.begin(t, ["a user"])
            state["aggregator"]["round"] = np.int64(t + 1)
            rounds_done.commit(t, state, {})

        parts = {
            "begin and commit": commit,
            "hash once": lambda t: hashlib.blake2b(content).digest(),
            "durable write": lambda t: durable_files.write(folder / "plain", content),
            "numpy.savez": lambda t: np.savez(folder / "plain.npz", *tensors),
        }
        declared = schema.MinSep(rounds, 1, rounds)
        with committed_rounds.CommittedRounds.create(
            folder / "private", declared, state, {}
        ) as rounds_done:
            for t in range(rounds):
                for part, run in parts.items():
                    start = time.perf_counter()
                    run(t)
                    times[part].append(time.perf_counter() - start)
    ours = times.pop("begin and commit")
    print(f"state of {len(content) / 1e6:.0f} MB: {statistics.median(ours):.3f} s a round")
    for part, peer in times.items():
        ratio = statistics.median(a / b for a, b in zip(ours, peer, strict=True))
        print(f"over {part:16} {ratio:6.2f}")


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--against", type=pathlib.Path)
    parser.add_argument("--option", action="append", default=[])
    parser.add_argument("--processor", action="store_true")
    parser.add_argument("--state", type=float)
    parser.add_argument("--buffers", type=int, default=4)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        _child(args.child, args.option, args.processor)
    elif args.state is not None:
        _large_state(args.state, args.buffers, args.rounds)
    else:
        if args.rounds <= _WARM_UP:
            parser.error(f"--rounds must be above {_WARM_UP}, the rounds that compile.")
        _command(args)


if __name__ == "__main__":
    main()
