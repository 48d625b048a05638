"""Measures the cost of one run of a device plan, in a process that does nothing else.

Like a device, the process has TensorFlow and no TFF.
"""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tff_dpftrl.runtime.plans import device_work, plan_pb2, tensor_values

_PLAN, _BROADCAST, _EXAMPLES = "plan", "broadcast", "examples"


class Cost(NamedTuple):
    """Cost of a plan on a device that has imported TensorFlow.

    Attributes:
      load_seconds: Seconds from the plan's bytes to a function.
      seconds: Seconds of the first run, which is the only one on a device.
      memory_bytes: Peak memory of loading and running, in bytes, beyond that of TensorFlow.
    """

    load_seconds: float
    seconds: float
    memory_bytes: int


def measure(
    plan: plan_pb2.DevicePlan, examples: Sequence[bytes], broadcast: Sequence[np.ndarray]
) -> Cost:
    """Runs a device plan once, in a separate process.

    Args:
      plan: Device plan.
      examples: Serialized `tf.train.Example`s.
      broadcast: Values of the tensors that the server would send.

    Returns:
      The cost of the run.

    Raises:
      device_work.WorkFailedError: If the process ended without a result.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / _PLAN).write_bytes(plan.SerializeToString())
        (folder / _BROADCAST).write_bytes(tensor_values.to_bytes(broadcast))
        (folder / _EXAMPLES).write_text("\n".join(example.hex() for example in examples))
        command = [sys.executable, "-m", __name__, name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"it ended with {done.returncode}"]
        raise device_work.WorkFailedError(f"A process that runs the plan failed: {last[0]}")
    return Cost(**json.loads(done.stdout.splitlines()[-1]))


def _main(folder: pathlib.Path) -> None:
    plan = plan_pb2.DevicePlan.FromString((folder / _PLAN).read_bytes())
    lines = (folder / _EXAMPLES).read_text().split("\n")
    examples = [bytes.fromhex(line) for line in lines] if lines != [""] else []
    tf.zeros([]).numpy()  # Initializes TensorFlow, which is not part of the cost.
    before = _resident_bytes("VmRSS")
    started = time.monotonic()
    work = device_work.DeviceWork(plan)
    loaded = time.monotonic()
    content = (folder / _BROADCAST).read_bytes()
    work.run(examples, tensor_values.from_bytes(content, work.broadcast, "broadcast"))
    ended = time.monotonic()
    cost = Cost(loaded - started, ended - loaded, _resident_bytes("VmHWM") - before)
    print(json.dumps(cost._asdict()))


def _resident_bytes(field: str) -> int:
    """Reads `VmRSS` (now) or `VmHWM` (peak); `getrusage` would include the parent's peak."""
    status = pathlib.Path("/proc/self/status").read_text()
    (kilobytes,) = re.findall(rf"^{field}:\s+(\d+) kB$", status, re.MULTILINE)
    return 1024 * int(kilobytes)


if __name__ == "__main__":
    _main(pathlib.Path(sys.argv[1]))
