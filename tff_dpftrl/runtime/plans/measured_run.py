"""Runs a device plan in a process that does nothing else, perhaps with another TensorFlow.

Like a device, the process has TensorFlow and no TFF. The first run in it is measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import IO, Any, NamedTuple

import numpy as np
import tensorflow as tf
from typing_extensions import Self

import tff_dpftrl
from tff_dpftrl import validation
from tff_dpftrl.runtime.plans import (
    device_work,
    plan_pb2,
    signing,
    tensor_values,
    verification,
)

_NEEDED = ("tensorflow", "numpy", "google.protobuf", "cryptography", "typing_extensions")
_CHECK_SECONDS = 60.0
# The interpreter gets this package by its place, and everything else from its own environment.
_START = """
import importlib.util, pathlib, sys
path = pathlib.Path(sys.argv[1])
spec = importlib.util.spec_from_file_location(
    "tff_dpftrl", path / "__init__.py", submodule_search_locations=[str(path)]
)
sys.modules["tff_dpftrl"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
from tff_dpftrl.runtime.plans import measured_run
measured_run.serve()
"""
_FIND_MISSING = f"""
import importlib.util
def is_missing(name):
    try:
        return importlib.util.find_spec(name) is None
    except ModuleNotFoundError:
        return True
print("missing:", *(name for name in {_NEEDED} if is_missing(name)))
"""
_LONGEST_LINE = 200


class Cost(NamedTuple):
    """Cost of a plan on a device that has imported TensorFlow."""

    load_seconds: float  # Seconds from the plan's bytes to a function.
    seconds: float  # Seconds of the first run, which is the only one on a device.
    memory_bytes: int  # Peak memory of loading and running, in bytes, beyond that of TensorFlow.


def measure(
    plan: plan_pb2.DevicePlan, examples: Sequence[bytes], broadcast: Sequence[np.ndarray]
) -> Cost:
    """Runs a device plan once, in a separate process."""
    with DeviceProcess(plan) as process:
        return process.measure(examples, broadcast)


def check_interpreter(python: str | os.PathLike[str]) -> None:
    """Refuses an interpreter that cannot run plans."""
    remedy = (
        "name the Python of an environment with TensorFlow, such as .venv-tff/bin/python "
        "(docs/reference/environments.md)."
    )
    try:
        done = subprocess.run(
            [*_command(python), _FIND_MISSING],
            capture_output=True,
            text=True,
            check=False,
            timeout=_CHECK_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise validation.UsageError(
            f"test_python {str(python)!r} cannot be started ({type(error).__name__}): {remedy}"
        ) from None
    said, *missing = done.stdout.split() or [""]
    if done.returncode or said != "missing:":
        raise validation.UsageError(f"test_python {str(python)!r} is no Python: {remedy}")
    if missing:
        raise validation.UsageError(
            f"test_python {str(python)!r} has no {', '.join(missing)}: {remedy}"
        )


class DeviceProcess:
    """Device plan in a separate process, with the given TensorFlow. Use it as a context manager."""

    def __init__(self, plan: plan_pb2.DevicePlan, python: str | os.PathLike[str] = sys.executable):
        """Starts the process and loads the plan there, after it verifies it as a device does.

        The interpreter's environment has TensorFlow; this package comes from here.
        """
        self._plan = plan
        self._errors: IO[bytes] = tempfile.TemporaryFile()
        folder = pathlib.Path(tff_dpftrl.__file__).parent
        self._process = subprocess.Popen(
            [*_command(python), _START, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        try:
            loaded, _ = self._call({}, plan.SerializeToString())
        except BaseException:
            self.close()
            raise
        self.tensorflow: str = loaded["tensorflow"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # Nobody reads what was not sent.
                    stream.close()

    def run(
        self,
        examples: Sequence[bytes],
        broadcast: Sequence[np.ndarray],
        *,
        seed: tuple[int, int] | None = None,
    ) -> list[np.ndarray]:
        """Computes an update; arguments and result are those of `device_work.DeviceWork.run`."""
        _, content = self._run(examples, broadcast, seed)
        return tensor_values.from_bytes(content, self._plan.graph.outputs, "update")

    def measure(self, examples: Sequence[bytes], broadcast: Sequence[np.ndarray]) -> Cost:
        """Measures the cost of a run, which has to be the first one."""
        reply, _ = self._run(examples, broadcast, None)
        return Cost(**reply["cost"])

    def _run(
        self,
        examples: Sequence[bytes],
        broadcast: Sequence[np.ndarray],
        seed: tuple[int, int] | None,
    ) -> tuple[dict[str, Any], bytes]:
        header = {"examples": [example.hex() for example in examples], "seed": seed}
        return self._call(header, tensor_values.to_bytes(broadcast))

    def _call(self, header: dict[str, Any], content: bytes) -> tuple[dict[str, Any], bytes]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            _send(self._process.stdin, header, content)
            reply = _receive(self._process.stdout)
        except OSError:
            reply = None
        if reply is None:
            self._process.wait()
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
            ended = lines[-1][:_LONGEST_LINE] if lines else ""
            raise device_work.WorkFailedError(
                "A process that runs the plan failed: "
                f"{ended or f'it ended with {self._process.returncode}'}"
            )
        if "error" in reply[0]:
            raise device_work.WorkFailedError(reply[0]["error"])
        return reply


def _command(python: str | os.PathLike[str]) -> list[str]:
    """Begins a command of an interpreter; another one gets no paths of this one's environment."""
    isolated = [] if os.fspath(python) == sys.executable else ["-I"]
    return [os.fspath(python), *isolated, "-c"]


def _send(stream: IO[bytes], header: dict[str, Any], content: bytes) -> None:
    line = json.dumps({**header, "num_bytes": len(content)})
    stream.write(line.encode() + b"\n" + content)
    stream.flush()


def _receive(stream: IO[bytes]) -> tuple[dict[str, Any], bytes] | None:
    """Reads a message; returns None at the end."""
    line = stream.readline()
    if not line:
        return None
    header = json.loads(line)
    content = stream.read(header.pop("num_bytes"))
    return header, content


def serve() -> None:
    """Loads the plan and runs it as often as is asked, in the process of a `DeviceProcess`."""
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # Other output must not look like a reply.
    started = _receive(requests)
    assert started is not None
    tf.zeros([]).numpy()  # Initializes TensorFlow, which is not part of the cost.
    before, begun = _resident_bytes("VmRSS"), time.monotonic()
    try:
        plan = plan_pb2.DevicePlan.FromString(started[1])
        verification.check_device_plan(plan)
        work = device_work.DeviceWork(plan)
    except signing.PlanRefusedError as error:
        _send(replies, {"error": str(error)}, b"")
        return
    load_seconds = time.monotonic() - begun
    _send(replies, {"tensorflow": tf.__version__}, b"")
    while (request := _receive(requests)) is not None:
        header, content = request
        examples = [bytes.fromhex(example) for example in header["examples"]]
        begun = time.monotonic()
        try:
            broadcast = tensor_values.from_bytes(content, work.broadcast, "broadcast")
            update = work.run(examples, broadcast, seed=header["seed"])
        except (ValueError, device_work.WorkFailedError) as error:
            _send(replies, {"error": str(error)}, b"")
            continue
        seconds = time.monotonic() - begun
        cost = Cost(load_seconds, seconds, _resident_bytes("VmHWM") - before)
        _send(replies, {"cost": cost._asdict()}, tensor_values.to_bytes(update))


def _resident_bytes(field: str) -> int:
    """Reads `VmRSS` (now) or `VmHWM` (peak); `getrusage` would include the parent's peak."""
    status = pathlib.Path("/proc/self/status").read_text()
    (kilobytes,) = re.findall(rf"^{field}:\s+(\d+) kB$", status, re.MULTILINE)
    return 1024 * int(kilobytes)
