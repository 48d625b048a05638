"""A cache of the plans that a device has verified and loaded.

Loading takes a second, and a server sends the same plan for many rounds: a plan whose bytes
are known is not loaded again. TensorFlow, which takes seconds to import, is imported with the
first plan.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import importlib
import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives.asymmetric import ed25519

from tff_dpftrl import validation
from tff_dpftrl.runtime.device import session
from tff_dpftrl.runtime.plans import approvals, plan_pb2

if TYPE_CHECKING:
    from tff_dpftrl.runtime.plans import device_work

_POLL_S = 0.5


class LoadedPlan:
    """A verified plan, which sessions in several threads may share."""

    def __init__(self, work: device_work.DeviceWork, max_running: int):
        """Internal; use `LoadedPlans.load`."""
        self.plan: plan_pb2.DevicePlan = work.plan
        self.broadcast: Sequence[plan_pb2.Tensor] = work.broadcast
        """Descriptions of the broadcast tensors, for `tensor_values.from_bytes`."""
        self._free: queue.SimpleQueue[device_work.DeviceWork] = queue.SimpleQueue()
        self._free.put(work)
        self._to_make = threading.Semaphore(max_running - 1)

    @contextlib.contextmanager
    def borrow(self, keep_going: session.KeepGoing) -> Iterator[device_work.DeviceWork]:
        """Waits for exclusive use of an executable of the plan, within the block.

        `keep_going` is called while waiting; it raises to end the waiting.
        """
        work = self._take()
        while work is None:
            keep_going()
            with contextlib.suppress(queue.Empty):
                work = self._free.get(timeout=_POLL_S)
        try:
            yield work
        finally:
            self._free.put(work)

    def _take(self) -> device_work.DeviceWork | None:
        with contextlib.suppress(queue.Empty):
            return self._free.get_nowait()
        if self._to_make.acquire(blocking=False):
            from tff_dpftrl.runtime.plans import device_work

            return device_work.DeviceWork(self.plan)
        return None


class LoadedPlans:
    """Cache of the most recently used plans; thread-safe."""

    def __init__(
        self,
        keys: Iterable[ed25519.Ed25519PublicKey],
        reviewers: approvals.Reviewers | None = None,
        *,
        max_plans: int = 4,
        max_running: int = 1,
    ):
        """Creates an empty cache of plans that one of the trusted `keys` signed.

        With `reviewers`, they must have approved a plan's task. `max_running` is the largest number
        of concurrent executions of one plan: 1 on a real device.
        """
        self._keys = tuple(keys)
        if not self._keys:
            raise validation.UsageError(
                "keys is empty: give the public key of at least one plan signer."
            )
        self._reviewers = reviewers
        self._max_plans = validation.integer("max_plans", max_plans, minimum=1)
        self._max_running = validation.integer("max_running", max_running, minimum=1)
        self._lock = threading.Lock()
        self._is_warm = False
        self._loaded: collections.OrderedDict[bytes, LoadedPlan] = collections.OrderedDict()

    def load_tensorflow(self) -> None:
        """Imports TensorFlow, which takes seconds."""
        self._is_warm = True
        _import_tensorflow()

    def warm_up(self) -> None:
        """Starts to import TensorFlow in a thread, while the device waits to be selected."""
        with self._lock:
            is_first, self._is_warm = not self._is_warm, True
        if is_first:
            # Not a daemon: a process that ends during the import could crash.
            threading.Thread(target=_import_tensorflow, name="warm-up").start()

    def load(self, content: bytes) -> LoadedPlan:
        """Verifies and loads an untrusted `SignedPlan`, unless it is in the cache.

        It raises `signing.PlanRefusedError` if the plan must not be run.
        """
        digest = hashlib.sha256(content).digest()
        with self._lock:
            if digest not in self._loaded:
                from tff_dpftrl.runtime.plans import device_work

                work = device_work.load(content, self._keys, self._reviewers)
                self._loaded[digest] = LoadedPlan(work, self._max_running)
                if len(self._loaded) > self._max_plans:
                    self._loaded.popitem(last=False)
            self._loaded.move_to_end(digest)
            return self._loaded[digest]


def _import_tensorflow() -> None:
    with contextlib.suppress(ImportError):  # Loading a plan raises it again.
        importlib.import_module("tff_dpftrl.runtime.plans.device_work")
