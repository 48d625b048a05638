"""Peak memory of a run, in copies of the model, by phase and case.

    python benchmarks/memory.py [--sizes 4 10 30] [--cases fixed adaptive ...] [--rounds 3]
        [--clients 4] [--json FILE]

A case is one way to train a model. It runs in a process of its own, through the same function as
the command, with text in memory, on a word LSTM whose embedding has nearly all weights. First a
tiny model, of 0.1 million weights, tells what the program itself takes. A line gives, in copies of
the model (4 bytes a weight), above the same phase of the tiny model's run:

    build        until the process's computations are compiled
    initialize   the first state
    commit       of a state, the largest of all commits
    first        the first round, which compiles
    later        all other rounds
    peak         the whole process, from start to end
    import       the same above what importing TensorFlow and TFF takes
    kept         copies that the mechanism keeps between rounds, beside the weights

The goal is a peak of at most 14 copies, and those that are kept: PASS or MISSED.

The peak of a phase is the kernel's `VmHWM`, which is reset at its beginning through
`/proc/self/clear_refs`: Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_GOAL = 14.0
_TINY = 0.1  # Million weights.
_WORDS = 20_000
_STATE_SIZE = 64
_PHASES = ("build", "initialize", "commit", "first", "later")


class Meter:
    """Peak resident memory of this process, phase by phase.

    Attributes:
      peaks: Largest resident size in bytes, by phase; "all" is the whole process.
      num_weights: Number of weights of the model; set by the case.
      kept: Copies of the model in the state, beside the weights; set by the case.
    """

    def __init__(self) -> None:
        """Begins the first phase."""
        self.peaks: dict[str, float] = {}
        self.num_weights = 0
        self.kept = 0.0
        self._phases = ["other"]
        _reset_peak()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts what happens within to a phase, and not to the phase around it."""
        self._end()
        self._phases.append(name)
        try:
            yield
        finally:
            self._end()
            self._phases.pop()

    def wrap(self, owner: Any, name: str, phase: str | Callable[[], str]) -> None:
        """Puts a phase around a function of a module or a class."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def wrapped(*args, **kwargs):
            with self.phase(phase if isinstance(phase, str) else phase()):
                return function(*args, **kwargs)

        is_bound = isinstance(vars(owner).get(name), classmethod)
        setattr(owner, name, staticmethod(wrapped) if is_bound else wrapped)

    def _end(self) -> None:
        peak = _status("VmHWM")
        for phase in (self._phases[-1], "all"):
            self.peaks[phase] = max(self.peaks.get(phase, 0), peak)
        _reset_peak()


def _reset_peak() -> None:
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def _status(field: str) -> int:
    """Returns a field of this process's status, in bytes."""
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(field))


@dataclasses.dataclass(frozen=True)
class Case:
    """A way to use the package that is measured.

    Attributes:
      run: Function that does it, within a meter, from the size in weights, the number of rounds
        and clients, the folder for its files, and the options.
      options: Options of `run`.
    """

    run: Callable[..., None]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def _train(
    meter: Meter,
    num_weights: float,
    rounds: int,
    clients: int,
    folder: pathlib.Path,
    *,
    own: bool = False,
    **options: Any,
) -> None:
    """Trains as `tff-dpftrl train` does."""
    import tensorflow as tf

    from tff_dpftrl import execution
    from tff_dpftrl.execution import compiled_process
    from tff_dpftrl.runs import committed_rounds
    from tff_dpftrl.training import config as config_lib
    from tff_dpftrl.training import federated_trainer, run

    num_rounds_begun = 0

    def of_round() -> str:
        nonlocal num_rounds_begun
        num_rounds_begun += 1
        return "first" if num_rounds_begun == 1 else "later"

    text = _text()
    # Embedding V E, LSTM 4 H (E + H), projection H E, biases.
    embedding_size = round(num_weights / (text.words.size + 5 * _STATE_SIZE))
    build = federated_trainer.open_trainer

    @contextlib.contextmanager
    def open_trainer(*args, **kwargs):
        with contextlib.ExitStack() as stack:
            with meter.phase("build"):
                opened = stack.enter_context(build(*args, **kwargs))
            yield opened

    federated_trainer.open_trainer = open_trainer
    meter.wrap(compiled_process.CompiledProcess, "initialize", "initialize")
    meter.wrap(compiled_process.CompiledProcess, "next", of_round)
    meter.wrap(committed_rounds.CommittedRounds, "create", "commit")
    meter.wrap(committed_rounds.CommittedRounds, "commit", "commit")
    sizes = {"embedding_size": embedding_size, "lstm_size": _STATE_SIZE}
    model = None
    if own:
        sizes = {}
        execution.give_back_memory()  # Before the program's first tensor, as the docs say.
        ids = tf.keras.Input([10], dtype=tf.int32)
        table = tf.keras.layers.Embedding(text.words.size, embedding_size // 2)(ids)
        states = tf.keras.layers.LSTM(_STATE_SIZE, return_sequences=True)(table)
        states = tf.keras.layers.Dense(embedding_size // 2)(states)
        model = tf.keras.Model(ids, tf.keras.layers.Dense(text.words.size)(states))
    config = config_lib.TrainingConfig.of(
        **{
            "data": "made up",
            "sequence_length": 10,
            "batch_size": 4,
            "num_rounds": rounds,
            "clients_per_round": clients,
            "min_sep": 1,
            "noise_multiplier": 1.0,
            "clip_norm": 1.0,
            "eval_every": rounds,
            "eval_sequences": 4,
        }
        | sizes
        | options
    )
    trained_on = "nothing" if own else None
    results = run.train(config, folder / "run", text=text, model=model, model_trained_on=trained_on)
    del results
    meter.num_weights, meter.kept = _state(folder / "run")


def _state(run: pathlib.Path) -> tuple[int, float]:
    """Returns the number of weights of a run, and the copies that its state has beside them."""
    known = json.loads((run / "config.json").read_text())
    num_weights = _find(known, "num_parameters")
    (checkpoint,) = (run / "private" / "checkpoints").glob("*.npz")
    return num_weights, checkpoint.stat().st_size / (4 * num_weights) - 1


def _find(tree: Any, name: str) -> Any:
    """Returns the entry of a name in nested dictionaries."""
    if name in tree:
        return tree[name]
    for value in tree.values():
        if isinstance(value, dict) and (found := _find(value, name)) is not None:
            return found
    return None


def _text():
    """Users of a few words each, and a vocabulary of all words."""
    from tff_dpftrl.data import split, user_text, vocabulary
    from tff_dpftrl.training import corpus

    letters = "bcdfghjklm"
    words = ["a" + "".join(letters[int(digit)] for digit in f"{i:05d}") for i in range(_WORDS)]
    users = {
        f"user {i}": [" ".join(words[(97 * i + 31 * j) % _WORDS] for j in range(9))] * 6
        for i in range(200)
    }
    parts = split.by_user(user_text.UserText.from_mapping("made up", users))
    return corpus.RunText(
        parts.train, parts.validation, vocabulary.Vocabulary(tuple(words), "made up")
    )


CASES: Mapping[str, Case] = {
    "fixed": Case(_train, {"mechanism": "blt", "buffers": 2}),
    "tree": Case(_train, {"mechanism": "tree"}),
    "bandmf": Case(_train, {"mechanism": "bandmf", "bands": 3, "min_sep": 3}),
    "adaptive": Case(
        _train,
        {
            "mechanism": "blt",
            "buffers": 2,
            "adaptive_clipping": True,
            "clipped_count_stddev": 1.0,
        },
    ),
    "secagg": Case(_train, {"mechanism": "blt", "buffers": 2, "secagg_bits": 20}),
    "dp-fedavg": Case(_train, {"algorithm": "dp-fedavg", "min_sep": None}),
    "own": Case(_train, {"mechanism": "blt", "buffers": 2, "own": True}),
    "adam": Case(_train, {"mechanism": "blt", "buffers": 2, "server_optimizer": "adam"}),
}
"""What is measured, by name."""


def _child(args: argparse.Namespace) -> None:
    """Measures one case in this process."""
    import tensorflow_federated  # noqa: F401

    from tff_dpftrl.training import run  # noqa: F401

    at_import = _status("VmRSS")
    meter = Meter()
    case, begin = CASES[args.cases[0]], time.process_time()
    with tempfile.TemporaryDirectory() as folder, meter.phase("other"):
        case.run(
            meter,
            1e6 * args.sizes[0],
            args.rounds,
            args.clients,
            pathlib.Path(folder),
            **case.options,
        )
    found = {
        "case": args.cases[0],
        "weights": meter.num_weights,
        "import_bytes": at_import,
        "kept": meter.kept,
        "seconds": time.process_time() - begin,
        "peak_bytes": meter.peaks,
    }
    args.child.write_text(json.dumps(found))


def _measure(case: str, millions: float, args: argparse.Namespace) -> dict[str, Any]:
    """Runs a case in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        result, log = pathlib.Path(folder, "result.json"), pathlib.Path(folder, "log")
        command = [sys.executable, __file__, "--child", str(result), "--cases", case]
        command += ["--sizes", str(millions), "--rounds", str(args.rounds)]
        command += ["--clients", str(args.clients)]
        environment = {"PYTHONPATH": str(_ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", **os.environ}
        with log.open("w") as output:
            status = subprocess.run(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=folder
            ).returncode
        if status:
            raise SystemExit(
                f"{case} with {millions:g}M weights failed:\n{log.read_text()[-3000:]}"
            )
        return json.loads(result.read_text())


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", type=float, nargs="+", default=[4, 10, 30])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--child", type=pathlib.Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        _child(args)
        return
    print(f"{'case':10}{'weights':>9}", *(f"{name:>10}" for name in _PHASES), end=" ")
    print(f"{'peak':>8}{'import':>8}{'kept':>6}{'GB':>6}{'s':>6}  goal: {_GOAL:g} and those kept")
    tiny = functools.cache(lambda case: _measure(case, _TINY, args)["peak_bytes"])
    found = []
    for millions in args.sizes:
        for case in args.cases:
            one = _measure(case, millions, args)
            found.append(one)
            copy, peaks = 4 * one["weights"], one["peak_bytes"]
            one["tiny_bytes"] = tiny(case)
            one["copies"] = {
                phase: (peak - one["tiny_bytes"].get(phase, peak)) / copy
                for phase, peak in peaks.items()
            }
            copies, peak = one["copies"], one["copies"]["all"]
            one["passes"] = peak <= _GOAL + one["kept"]
            print(f"{case:10}{one['weights'] / 1e6:8.1f}M", end=" ")
            print(*(f"{copies.get(name, 0):10.1f}" for name in _PHASES), end=" ")
            above_import = (peaks["all"] - one["import_bytes"]) / copy
            print(f"{peak:8.1f}{above_import:8.1f}{one['kept']:6.1f}", end="")
            print(f"{peaks['all'] / 1e9:6.2f}{one['seconds']:6.0f}", end="  ")
            print("PASS" if one["passes"] else "MISSED", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    if not all(one["passes"] for one in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
