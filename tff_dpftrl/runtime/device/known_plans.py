"""Plans that a device keeps, so that a server need not send them again.

A server names the SHA-256 of a plan, and the device asks for the plan if it does not have it. What
it has is compared with that hash whenever it is used, and verified as if it had just come
(`loaded_plans`): a damaged or altered one is fetched again.

**What a server learns** is one bit: whether this device has had the plan before. All devices of a
population get the same signed plans, so that nothing else is in it, unless the signer of plans
makes one for a single device. Models are not kept: their hash is not signed. A server could give
each device one of its own, and know the device by it.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import hashlib
import logging
import os
import pathlib
import threading

from typing_extensions import override

from tff_dpftrl import durable_files, validation

_logger = logging.getLogger(__name__)

_SUFFIX = ".plan"


class KnownPlans(abc.ABC):
    """Serialised signed plans by their SHA-256, the most recently used ones; thread-safe."""

    @abc.abstractmethod
    def get(self, sha256: bytes) -> bytes | None:
        """Returns the plan of a hash, or None if the device does not have it."""

    @abc.abstractmethod
    def add(self, content: bytes) -> None:
        """Keeps a plan that was verified."""


class MemoryPlans(KnownPlans):
    """Plans of one device in memory; the contents may be shared with other devices."""

    def __init__(self, contents: dict[bytes, bytes] | None = None, *, most_plans: int = 16):
        """Starts without plans.

        Args:
          contents: Contents by hash, to which the device adds its own: devices in one process share
            them. None for a dictionary of its own.
          most_plans: Largest number of plans that the device has.
        """
        self._contents = {} if contents is None else contents
        self._most_plans = validation.integer("most_plans", most_plans, minimum=1)
        self._own: collections.OrderedDict[bytes, None] = collections.OrderedDict()
        self._lock = threading.Lock()

    @override
    def get(self, sha256: bytes) -> bytes | None:
        with self._lock:
            if sha256 not in self._own:
                return None
            self._own.move_to_end(sha256)
            return self._contents.get(sha256)

    @override
    def add(self, content: bytes) -> None:
        sha256 = hashlib.sha256(content).digest()
        with self._lock:
            self._contents.setdefault(sha256, content)
            self._own[sha256] = None
            self._own.move_to_end(sha256)
            if len(self._own) > self._most_plans:
                self._own.popitem(last=False)


class PlanFolder(KnownPlans):
    """Plans in a folder of one process at a time; an error of the disk costs a download only."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        most_plans: int = 16,
        most_bytes: int = 64_000_000,
    ):
        """Opens the folder, or makes it, for its owner only.

        Args:
          folder: The folder; its parent must exist.
          most_plans: Largest number of plans that are kept.
          most_bytes: Largest size of all plans together, in bytes.

        Raises:
          ValueError: If a number is below 1.
          OSError: If there is no folder, and it cannot be made.
        """
        self._folder = pathlib.Path(folder)
        self._most_plans = validation.integer("most_plans", most_plans, minimum=1)
        self._most_bytes = validation.integer("most_bytes", most_bytes, minimum=1)
        self._lock = threading.Lock()
        self._folder.mkdir(mode=0o700, exist_ok=True)
        durable_files.remove_leftovers(self._folder)

    @override
    def get(self, sha256: bytes) -> bytes | None:
        path = self._path(sha256)
        try:
            with open(path, "rb") as file:
                content = file.read(self._most_bytes + 1)
            if hashlib.sha256(content).digest() == sha256:
                os.utime(path)  # The least recently used one goes first.
                return content
            path.unlink()
        except FileNotFoundError:
            return None
        except OSError as error:
            _logger.info("a kept plan cannot be read: %s", type(error).__name__)
        return None

    @override
    def add(self, content: bytes) -> None:
        if len(content) > self._most_bytes:
            return
        try:
            with self._lock:
                self._make_room(len(content))
                path = self._path(hashlib.sha256(content).digest())
                durable_files.write(path, content, private=True)
        except OSError as error:
            _logger.info("a plan cannot be kept: %s", type(error).__name__)

    def _path(self, sha256: bytes) -> pathlib.Path:
        return self._folder / f"{sha256.hex()}{_SUFFIX}"

    def _make_room(self, num_bytes: int) -> None:
        """Deletes the least recently used plans until there is room for another one."""
        kept = []
        for path in self._folder.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                found = path.stat()
                kept.append((found.st_mtime_ns, found.st_size, path))
        kept.sort()
        total = sum(size for _, size, _ in kept) + num_bytes
        while kept and (len(kept) >= self._most_plans or total > self._most_bytes):
            _, size, path = kept.pop(0)
            total -= size
            path.unlink(missing_ok=True)
