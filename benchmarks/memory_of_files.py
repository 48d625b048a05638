"""Peak memory of what reads and writes models, in copies of the model: commits, reports, devices.

    python benchmarks/memory_of_files.py [--size 10] [--cases commit report ...] [--json FILE]
        [--against CHECKOUT]

A case is one thing that is done with a model. It runs in a process of its own, first with a tiny
model, which imports and compiles what is needed, then with one of so many million weights. A line
gives the case's peak above what the process had in between, in bytes over the bytes of one copy
of the model; processor seconds of the second time; the goal; and whether it is met (PASS) or not
(MISSED). The goal of a server grows by the copies that its state has beside the weights:

    commit           beside the state, which the caller holds
    resume           reading a state, which has 3 copies: weights, momentum, a buffer of noise
    report, audit    of a run
    predict          next words
    finetune-*       two steps of ELS, ULS, and ULS with adapters (LoRA)
    server-start     reading a task, and committing its first state
    server-N         a round as the server's actors make it, with one Aggregator, from the last
                     commit to the next one. N devices send their reports from another process,
                     through a connection of this machine, and each is received as the server
                     receives them: in parts of a mebibyte
    device           a session's work, from the model's bytes to the last part of the report

With `--against`, another checkout of this repository does the same, in turns. The peak is the
kernel's `VmHWM`, which is reset through `/proc/self/clear_refs`: Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import dataclasses
import functools
import gc
import json
import math
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_WORDS = 20_000
_WIDTH = 64  # Of the tiny model: all but the embedding.
_WIDEST_TASK = 330
_TINY, _LARGE = "tiny", "large"


@dataclasses.dataclass(frozen=True)
class Case:
    """A thing to do with a model.

    Attributes:
      prepare: Function from the folder with what was made of a size to the thing to measure.
      goal: Largest number of copies.
    """

    prepare: Callable[[pathlib.Path], Callable[[], object]]
    goal: float


def _reset_peak() -> None:
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def _status(field: str) -> int:
    """Returns a field of this process's status, in bytes."""
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(field))


def _command(*arguments: str | pathlib.Path) -> None:
    """Runs a command of the package in this process."""
    from tff_dpftrl.cli import main

    with contextlib.redirect_stdout(sys.stderr):
        status = main.main(list(map(str, arguments)))
    if status not in (0, 4):  # 4: an audit that could not look at everything.
        raise SystemExit(f"{arguments} ended with {status}")


def _make(folder: pathlib.Path, num_weights: float) -> None:
    """Makes a run that trained a model for a round, and a task of such a model, if not larger."""
    from cryptography.hazmat.primitives.asymmetric import ed25519

    from tff_dpftrl.runtime.plans import measured_run
    from tff_dpftrl.runtime.tasks import making, task_config

    measured_run.measure = lambda *_: measured_run.Cost(0.1, 0.2, 1000)
    letters = "bcdfghjklm"
    words = ["a" + "".join(letters[int(digit)] for digit in f"{i:05d}") for i in range(_WORDS)]
    (folder / "words.txt").write_text("\n".join(words))
    for name, start in (("users", 0), ("public", 1)):
        with (folder / f"{name}.jsonl").open("w") as file:
            for i in range(200):
                text = " ".join(words[(97 * i + 31 * j + start) % _WORDS] for j in range(9))
                line = {"user_id": f"{name}{i}", "examples": [text] * 6}
                file.write(json.dumps(line) + "\n")
    options = {
        "data": str(folder / "users.jsonl"),
        "vocabulary": str(folder / "words.txt"),
        "vocabulary_size": _WORDS,
        "model": "transformer",
        "embedding_size": max(8, round(num_weights / _WORDS)),
        "num_layers": 1,
        "num_heads": 1,
        "feed_forward_size": 64,
        "sequence_length": 10,
        "batch_size": 4,
        "num_rounds": 1,
        "clients_per_round": 2,
        "min_sep": 1,
        "clip_norm": 1.0,
        "noise_multiplier": 1.0,
        "mechanism": "blt",
        "buffers": 2,
    }
    (folder / "options.toml").write_text(
        "".join(f"{k} = {json.dumps(v)}\n" for k, v in options.items())
    )
    _command(
        "train",
        "--config",
        folder / "options.toml",
        "--eval-sequences",
        4,
        "--output",
        folder / "run",
    )
    task = options | {
        "proxy_data": str(folder / "public.jsonl"),
        "proxy_devices": 2,
        "proxy_rounds": 2,
        "client_learning_rate": 0.02,  # The loss of public text has to fall.
        "clients_per_round": 100,
        "num_devices": 1000,
        "num_rounds": 2,
        "population": "tests",
        # More weights than 7 millions are above what devices upload.
        "embedding_size": min(options["embedding_size"], _WIDEST_TASK),
        "delta": 1e-5,
    }
    config, key = task_config.TaskConfig.of(**task), ed25519.Ed25519PrivateKey.generate()
    made = making.make(config, folder / "task", key, progress=print)
    num_weights, in_state = (
        sum(math.prod(tensor.shape) for tensor in tensors)
        for tensors in (made.server.update, made.server.prepare.inputs)
    )
    (folder / "task_bytes").write_text(str(4 * num_weights))
    (folder / "kept").write_text(str(in_state / num_weights - 1))


def _state(run: pathlib.Path):
    """Reads the state of a run, nested as it was."""
    import numpy as np

    (path,) = (run / "private" / "checkpoints").glob("*.npz")
    state: dict = {}
    with np.load(path) as archive:
        for name in archive.files:
            *parents, last = name.split("/")[1:] or [name]
            at = state
            for parent in parents:
                at = at.setdefault(parent, {})
            at[last] = archive[name]
    return state


def _commit(folder: pathlib.Path) -> Callable[[], object]:
    from tff_dpftrl.participation import schema
    from tff_dpftrl.runs import committed_rounds

    state, output = _state(folder / "run"), folder / "committed"
    rounds = committed_rounds.CommittedRounds.create(output, schema.MinSep(9, 1, 9), state, {})
    rounds.begin(0, ["a user"])
    state["aggregator"]["round_index"] = state["aggregator"]["round_index"] + 1

    def run() -> None:
        rounds.commit(0, state, {})
        rounds.close()
        shutil.rmtree(output)

    return run


def _resume(folder: pathlib.Path) -> Callable[[], object]:
    from tff_dpftrl.participation import schema
    from tff_dpftrl.runs import committed_rounds, manifest

    known = manifest.read(folder / "run")
    declared = schema.MinSep(**known.derived["schema"])

    def run() -> object:
        with committed_rounds.CommittedRounds.open(
            folder / "run" / "private", declared, binding=known.digest
        ) as rounds:
            return rounds.restore()

    return run


def _finetune(folder: pathlib.Path, options: Sequence[str]) -> Callable[[], object]:
    output = folder / "finetuned"
    shutil.rmtree(output, ignore_errors=True)  # Of a run that was interrupted.

    def run() -> None:
        _command(
            *("finetune", "--data", folder / "users.jsonl", "--initial-weights", folder / "run"),
            *("--output", output, "--steps", "2", "--clip-norm", "1", "--noise-multiplier", "1"),
            *("--examples-at-once", "4", "--eval-sequences", "4", *options),
        )
        shutil.rmtree(output)

    return run


def _report(folder: pathlib.Path, *flags: str) -> Callable[[], object]:
    return lambda: _command("report", folder / "run", *flags)


def _audit(folder: pathlib.Path) -> Callable[[], object]:
    return lambda: _command("audit", "--run", folder / "run")


def _predict(folder: pathlib.Path) -> Callable[[], object]:
    return lambda: _command("predict", folder / "run", "abbbbb abbbbc")


def _store(folder: pathlib.Path):
    """Makes an empty store."""
    from tff_dpftrl.runtime.store import sql

    shutil.rmtree(folder / "store", ignore_errors=True)
    return sql.SqlStore(folder / "store", leaves_states=True)


def _server_start(folder: pathlib.Path) -> Callable[[], object]:
    from tff_dpftrl.runtime.tasks import planned_task

    def run() -> object:
        task = planned_task.load(folder / "task")
        with _store(folder) as store:
            task.add_to(store)
        return task

    return run


class _Context:
    """Stream of a session, as `received.read_parts` reads it, on a socket."""

    def __init__(self, connection: socket.socket):
        self._file = connection.makefile("rb")

    async def read(self) -> bytes:
        """Returns the next message."""
        size = int.from_bytes(self._file.read(8), "big")
        return self._file.read(size)


def _devices(messages: pathlib.Path, port: int) -> None:
    """Sends the messages of a report to each connection that the server makes, as devices do."""
    content = messages.read_bytes()
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.settimeout(None)
        while connection.recv(1):  # The server asks for one report after the other.
            connection.sendall(content)


def _server(folder: pathlib.Path, num_devices: int) -> Callable[[], object]:
    """Prepares a round as the actors of a server make it, with one Aggregator."""
    import numpy as np

    from tff_dpftrl.runtime.plans import secure_report, tensor_values
    from tff_dpftrl.runtime.protocol import session_stream, wire_pb2
    from tff_dpftrl.runtime.server import received
    from tff_dpftrl.runtime.tasks import planned_task

    task = planned_task.load(folder / "task")
    store = _store(folder)
    task.add_to(store)
    lease = store.acquire("tests", "owner", now=0.0, duration=1e6)
    plan = task.folder.server
    # A device that has learnt nothing.
    update = [np.zeros(list(tensor.shape), tensor.dtype) for tensor in plan.update]
    strides, times = secure_report.buckets_of(plan.participation).encode(None, 1)
    report = wire_pb2.Report(strides=strides.tolist(), times=times.tolist())
    with (folder / "messages").open("wb") as file:
        for message in session_stream.report_messages(report, tensor_values.to_parts(update)):
            content = message.SerializeToString()
            file.write(len(content).to_bytes(8, "big") + content)
    del update
    most_bytes = 1 << 30

    def read(context: _Context) -> wire_pb2.Report | received.LargeReport:
        async def of_device() -> wire_pb2.Report | received.LargeReport:
            kinds = ("report", "update_part")
            first = received.parse(await context.read(), kinds, most_bytes)
            if first.WhichOneof("message") == "report":
                return first.report
            last, update = await received.read_parts(
                context, first.update_part, most_bytes, "report"
            )
            return received.LargeReport(update, last.report.strides, last.report.times)

        return asyncio.run(of_device())

    def run() -> None:
        commit = store.last_commit("tests", task.name)
        summation = task.served.task.summation.for_round(commit.model)
        total = summation.zero()
        with socket.create_server(("127.0.0.1", 0)) as listening:
            listening.settimeout(60)
            port = str(listening.getsockname()[1])
            command = [sys.executable, __file__, "--devices", str(folder / "messages"), port]
            with subprocess.Popen(command) as devices:
                connection, _ = listening.accept()
                with connection:
                    connection.settimeout(60)
                    context = _Context(connection)
                    for _ in range(num_devices):
                        connection.sendall(b"n")
                        total = summation.accumulate(total, read(context))
                    connection.shutdown(socket.SHUT_WR)
                    devices.wait(60)
        total = summation.merge(summation.zero(), total)
        step = task.served.task.server_step
        result = step.apply(total, num_devices, commit.model, commit.state)
        del total
        store.commit(
            "tests",
            task.name,
            round_index=0,
            epoch=lease.epoch,
            model=result.model,
            state=result.state,
            metrics=result.metrics,
            now=0.0,
        )
        store.close()

    return run


def _device(folder: pathlib.Path) -> Callable[[], object]:
    """Prepares a session of a device, from the model's bytes to the parts of its report."""
    from tff_dpftrl.runtime.device import text_examples
    from tff_dpftrl.runtime.plans import allowed_ops, device_work, plan_pb2, tensor_values
    from tff_dpftrl.runtime.protocol import session_stream, wire_pb2
    from tff_dpftrl.runtime.tasks import planned_task
    from verification import memory_store

    task = planned_task.load(folder / "task")
    commit = task.add_to(memory_store.MemoryStore())
    plan = task.served.plan_for(allowed_ops.RUNTIME_VERSION)
    sent = wire_pb2.Configuration(plan=plan, broadcast=commit.model).SerializeToString()
    (folder / "configuration").write_bytes(sent)
    texts = json.loads((folder / "users.jsonl").read_text().splitlines()[0])["examples"]
    examples = [text_examples.encode({"tokens": texts})]
    work = device_work.DeviceWork(
        plan_pb2.DevicePlan.FromString(plan_pb2.SignedPlan.FromString(plan).plan)
    )

    def model() -> list:
        configuration = wire_pb2.Configuration.FromString((folder / "configuration").read_bytes())
        return tensor_values.from_bytes(configuration.broadcast, work.broadcast)

    def run() -> int:
        update = tensor_values.to_parts(work.run(examples, model(), keeps_broadcast=False))
        messages = session_stream.report_messages(wire_pb2.Report(), update)
        return sum(message.ByteSize() for message in messages)

    return run


_ELS = ("--sampling", "example", "--group-size", "4", "--compute-budget", "8")
_LORA = ("--adapter-rank", "4")
_ULS = ("--sampling", "user", "--group-size", "4", "--cohort", "8")
CASES: Mapping[str, Case] = {
    "commit": Case(_commit, 0.1),
    "resume": Case(_resume, 3.1),
    "report": Case(_report, 2.0),
    "audit": Case(_audit, 2.0),
    "predict": Case(_predict, 2.0),
    "finetune-els": Case(functools.partial(_finetune, options=_ELS), 14.0),
    "finetune-uls": Case(functools.partial(_finetune, options=_ULS), 14.0),
    "finetune-lora": Case(functools.partial(_finetune, options=(*_ULS, *_LORA)), 14.0),
    "server-start": Case(_server_start, 4.0),
    "server-1": Case(functools.partial(_server, num_devices=1), 5.0),
    "server-10": Case(functools.partial(_server, num_devices=10), 5.0),
    "server-100": Case(functools.partial(_server, num_devices=100), 5.0),
    "device": Case(_device, 6.0),
}
"""What is measured, by name."""


def _child(made: pathlib.Path, name: str, result: pathlib.Path) -> None:
    """Measures one case in this process."""
    case = CASES[name]
    case.prepare(made / _TINY)()
    measured = case.prepare(made / _LARGE)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = _status("VmRSS")
    _reset_peak()
    begin = time.process_time()
    kept = measured()
    peak, seconds = _status("VmHWM"), time.process_time() - begin
    del kept
    result.write_text(json.dumps({"bytes": peak - before, "seconds": seconds}))


def _copy_bytes(made: pathlib.Path, name: str) -> int:
    """Returns the bytes of one copy of the model that a case is about."""
    if name.startswith(("server", "device")):
        return int((made / "task_bytes").read_text())
    return 4 * json.loads((made / "run" / "config.json").read_text())["facts"]["num_parameters"]


def _kept(made: pathlib.Path, name: str) -> float:
    """Returns the copies that a task's state has beside the weights; 0 for other cases."""
    return float((made / "kept").read_text()) if name.startswith("server") else 0.0


def _subprocess(checkout: pathlib.Path, *arguments: str) -> None:
    """Runs this program in a process of its own, on the package of a checkout."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "TF_CPP_MIN_LOG_LEVEL": "3"}
    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, __file__, *arguments]
        if subprocess.run(command, stdout=log, stderr=log, env=environment).returncode:
            log.seek(0)
            raise SystemExit(f"{arguments} failed:\n{log.read()[-3000:]}")


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", type=float, default=10.0, help="million weights")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--against", type=pathlib.Path)
    parser.add_argument("--made", type=pathlib.Path, help="folder that keeps models between calls")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--make", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--devices", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--child", type=pathlib.Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.devices is not None:
        _devices(pathlib.Path(args.devices[0]), int(args.devices[1]))
        return
    if args.make is not None:
        _make(args.make, 1e6 * args.size)
        return
    if args.child is not None:
        _child(args.made, args.cases[0], args.child)
        return
    checkouts = [_ROOT] + ([args.against.resolve()] if args.against else [])
    found, passes = [], True
    with tempfile.TemporaryDirectory() as temporary:
        for number, checkout in enumerate(checkouts):
            made = (args.made or pathlib.Path(temporary)) / str(number)
            for name, size in ((_TINY, 0.2), (_LARGE, args.size)):
                if not (made / name).exists():
                    (made / name).mkdir(parents=True)
                    _subprocess(checkout, "--make", str(made / name), "--size", str(size))
        for name in args.cases:
            for number, checkout in enumerate(checkouts):
                made = (args.made or pathlib.Path(temporary)) / str(number)
                result = pathlib.Path(temporary, "result.json")
                _subprocess(checkout, "--made", str(made), "--child", str(result), "--cases", name)
                copy = _copy_bytes(made / _LARGE, name)
                one = {"case": name, "checkout": str(checkout), "copy_bytes": copy}
                one |= json.loads(result.read_text())
                one["copies"] = one["bytes"] / copy
                one["goal"] = CASES[name].goal + _kept(made / _LARGE, name)
                ok = one["copies"] <= one["goal"]
                passes &= ok or number > 0
                found.append(one)
                print(
                    f"{name:14} {checkout.name:10} {copy / 4e6:5.1f}M {one['copies']:6.2f} copies,"
                    f" goal {one['goal']:4.1f} {'PASS' if ok else 'MISSED'}"
                    f" {one['seconds']:7.2f} s",
                    flush=True,
                )
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    if not passes:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
