"""A device's work in a plan: from its examples and a broadcast to an update.

Needs TensorFlow, and no Python code of the plan's maker.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import tensorflow as tf
from cryptography.hazmat.primitives.asymmetric import ed25519

from tff_dpftrl import validation
from tff_dpftrl.execution import graph_function, interruptible, lent_arrays
from tff_dpftrl.models import metric_grid
from tff_dpftrl.runtime.plans import (
    allowed_ops,
    approvals,
    graphs,
    plan_pb2,
    signing,
    tensor_values,
    verification,
)


class WorkFailedError(RuntimeError):
    """Raised if the work of a device fails. The message reveals nothing about its examples."""


class WorkInterruptedError(WorkFailedError):
    """Raised if the work was interrupted, or took longer than its plan allows."""


def load(
    content: bytes,
    keys: Iterable[ed25519.Ed25519PublicKey],
    reviewers: approvals.Reviewers | None = None,
    *,
    ceiling: verification.Ceiling = verification.DEFAULT_CEILING,
    runtime_version: int = allowed_ops.RUNTIME_VERSION,
) -> DeviceWork:
    """Verifies a signed device plan, and only then loads it."""
    plan = verification.read_device_plan(
        content, keys, reviewers, ceiling=ceiling, runtime_version=runtime_version
    )
    return DeviceWork(plan)


class DeviceWork:
    """The work of a verified device plan, which `load` makes. Runs one at a time."""

    def __init__(self, plan: plan_pb2.DevicePlan, *, clock: Callable[[], float] = time.monotonic):
        """Traces the graph, which takes a fraction of a second; `clock` measures a run."""
        self.plan = plan
        """Verified plan; its `selection` tells what to take from the example store."""
        try:
            self._num_own = 1 + (plan.seed_policy == plan_pb2.DEVICE_DRAWS)
            self._function = graphs.function_of(plan.graph, variables_from=self._num_own)
        except (ValueError, TypeError, tf.errors.OpError) as error:
            if isinstance(error, graph_function.UnsupportedGraphError):
                raise signing.PlanRefusedError(f"The plan cannot be loaded: {error}") from None
            raise signing.PlanRefusedError(
                f"The plan cannot be loaded: TensorFlow raises {type(error).__name__}."
            ) from None
        self._clock = clock
        self._lock = threading.Lock()
        self._running: interruptible.InterruptibleCall | None = None

    @property
    def broadcast(self) -> Sequence[plan_pb2.Tensor]:
        """Tensors that the server sends, without values; for `tensor_values.from_bytes`."""
        return self.plan.graph.inputs[self._num_own :]

    def run(
        self,
        examples: Sequence[bytes],
        broadcast: list[np.ndarray],
        *,
        seed: tuple[int, int] | None = None,
        keeps_broadcast: bool = True,
    ) -> list[np.ndarray]:
        """Computes an update; its tensors that are summed securely come last.

        There may be no examples. If `seed` is None, and the plan needs one, the operating system
        draws it. Unless `keeps_broadcast`, the list is emptied, so that its memory is free as soon
        as it is not needed. It raises `WorkInterruptedError` after `interrupt`, or when the plan's
        seconds are over.
        """
        limits = self.plan.limits
        if len(examples) > self.plan.selection.max_examples:
            raise validation.UsageError(
                f"examples has {len(examples)} entries; the plan takes the newest "
                f"{self.plan.selection.max_examples}."
            )
        tensor_values.check(broadcast, self.broadcast, "broadcast")
        with tf.device("/CPU:0"):
            inputs = [tf.constant(list(examples), tf.string, shape=[len(examples)])]
            if self._num_own > 1:
                words = np.frombuffer(os.urandom(16), np.int64) if seed is None else seed
                inputs.append(tf.constant(words, tf.int64, shape=[2]))
        given = list(broadcast)
        if not keeps_broadcast:
            broadcast.clear()
        inputs += lent_arrays.lent(given)
        begin = self._clock()
        update = [np.asarray(tensor) for tensor in self._call(inputs)]  # No copy.
        self._count_seconds(update, self._clock() - begin)
        num_bytes = sum(array.nbytes for array in update)
        if num_bytes > limits.upload_bytes:
            raise WorkFailedError(
                f"The update has {num_bytes} bytes; the plan allows {limits.upload_bytes}."
            )
        return update

    def _count_seconds(self, update: list[np.ndarray], seconds: float) -> None:
        """Puts the seconds of a run into the histogram that the plan has for them, if any."""
        if not self.plan.HasField("seconds"):
            return
        asked, labels = self.plan.seconds, [tensor.label for tensor in self.plan.graph.outputs]
        grid = metric_grid.MetricGrid(tuple(asked.edges))
        counts = np.zeros(grid.size, np.int32)
        counts[grid.place(seconds)] = 1
        update[labels.index(asked.label)] = counts

    def interrupt(self) -> None:
        """Ends the run in another thread as soon as its current operation or loop step ends."""
        with self._lock:
            if self._running is not None:
                self._running.interrupt()

    def _call(self, tensors: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        running = interruptible.InterruptibleCall()
        with self._lock:
            if self._running is not None:
                raise RuntimeError("This work runs already: wait for it, or load the plan again.")
            self._running = running
        timer = threading.Timer(self.plan.limits.seconds, running.interrupt)
        timer.daemon = True
        timer.start()
        try:
            return running.run(self._function, tensors)
        except tf.errors.OpError as error:
            if running.is_interrupted:
                raise WorkInterruptedError("The work was interrupted, or took too long.") from None
            # TensorFlow's message may quote an example.
            raise WorkFailedError(f"The work failed: {type(error).__name__}.") from None
        finally:
            timer.cancel()
            with self._lock:
                self._running = None
