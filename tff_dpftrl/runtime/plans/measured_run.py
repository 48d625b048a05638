"""What one run of a device plan costs, measured in a process that does nothing else.

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
    """What a device spends on a plan, once it has TensorFlow.

    Attributes:
      load_seconds: From the plan's bytes to a function.
      seconds: Of the first run, which is the only one on a device.
      memory_bytes: Peak of loading and running, over what TensorFlow takes.
    """

    load_seconds: float
    seconds: float
    memory_bytes: int


def measure(
    plan: plan_pb2.DevicePlan, examples: Sequence[bytes], broadcast: Sequence[np.ndarray]
) -> Cost:
    """Runs a device plan once, in a process of its own.

    Args:
      plan: The plan.
      examples: Serialized `tf.train.Example`s.
      broadcast: What the server would send.

    Returns:
      What it cost.

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
    tf.zeros([]).numpy()  # Starts what TensorFlow starts in every process.
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
    """`VmRSS`, now, or `VmHWM`, at its peak; `getrusage` would tell that of the parent, too."""
    status = pathlib.Path("/proc/self/status").read_text()
    (kilobytes,) = re.findall(rf"^{field}:\s+(\d+) kB$", status, re.MULTILINE)
    return 1024 * int(kilobytes)


if __name__ == "__main__":
    _main(pathlib.Path(sys.argv[1]))
