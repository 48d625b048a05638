"""What a device does with a plan: from its examples and a broadcast to an update.

Needs TensorFlow, and no Python of whoever made the plan.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence

import numpy as np
import tensorflow as tf
from cryptography.hazmat.primitives.asymmetric import ed25519

from tff_dpftrl import validation
from tff_dpftrl.execution import graph_function, interruptible, lent_arrays
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
    """Verifies a signed device plan, and only then loads it.

    Args:
      content: A serialized `SignedPlan`.
      keys: Public keys that are trusted.
      reviewers: Reviewers who must have approved the plan's task; None if nobody must.
      ceiling: Upper limits of what this device gives to any task.
      runtime_version: Version of this device's runtime.

    Returns:
      The work, ready to run.

    Raises:
      signing.PlanRefusedError: If it must not be run; the message says why.
    """
    plan = verification.read_device_plan(
        content, keys, reviewers, ceiling=ceiling, runtime_version=runtime_version
    )
    return DeviceWork(plan)


class DeviceWork:
    """The work of a verified device plan, which `load` makes. Runs one at a time."""

    def __init__(self, plan: plan_pb2.DevicePlan):
        """Traces the graph, which takes a fraction of a second.

        Args:
          plan: Device plan that `verification.read_device_plan` returned.

        Raises:
          signing.PlanRefusedError: If TensorFlow cannot load the graph.
        """
        self.plan = plan
        """What it runs; what to take from the example store is in its `selection`."""
        try:
            self._num_own = 1 + (plan.seed_policy == plan_pb2.DEVICE_DRAWS)
            self._function = graphs.function_of(plan.graph, variables_from=self._num_own)
        except (ValueError, TypeError, tf.errors.OpError) as error:
            if isinstance(error, graph_function.UnsupportedGraphError):
                raise signing.PlanRefusedError(f"The plan cannot be loaded: {error}") from None
            raise signing.PlanRefusedError(
                f"The plan cannot be loaded: TensorFlow raises {type(error).__name__}."
            ) from None
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
        """Computes an update.

        Args:
          examples: Serialized `tf.train.Example`s, as the plan's selection says; there may
            be none.
          broadcast: Values of the tensors that the server sent.
          seed: Seed of the examples' order, for tests. If None, and the plan wants one, it is
            drawn from the operating system.
          keeps_broadcast: Whether `broadcast` stays as it is; if not, it is emptied, and its memory
            is free as soon as it is not needed.

        Returns:
          The tensors of the update; those that are summed securely come last.

        Raises:
          tensor_values.ValuesError: If the broadcast is not as the plan says.
          ValueError: If there are more examples than the plan takes.
          WorkInterruptedError: After `interrupt`, or when the plan's seconds are over.
          WorkFailedError: If the computation fails, or the update is larger than the plan says.
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
        update = [np.asarray(tensor) for tensor in self._call(inputs)]  # No copy.
        num_bytes = sum(array.nbytes for array in update)
        if num_bytes > limits.upload_bytes:
            raise WorkFailedError(
                f"The update has {num_bytes} bytes; the plan allows {limits.upload_bytes}."
            )
        return update

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
