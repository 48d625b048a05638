"""Plans that a device keeps, so that a server need not send them again.

A server names the SHA-256 of a plan, which its signer signed. A device that does not have the plan
asks for it. A kept plan is verified whenever it is used, as if it had just come (`loaded_plans`): a
damaged or altered one is fetched again.

**What a server learns** is one bit in a session: whether this device has had this plan in this
population. The hash does not cover what surrounds the plan in a `SignedPlan`, such as approvals: a
server could otherwise vary that, and so make a plan of its own for each device. Only the signer can
make plans. A server may have several signed plans of one population, such as those of earlier
tasks. If it sends each to some devices only, it can tell these from others later, by one bit in a
session. Models are not kept, because their hash is not signed: a server could give each device a
model of its own, and recognise the device by it.
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
    """Serialised `SignedPlan`s by population and `sha256`, the last ones used; thread-safe."""

    @abc.abstractmethod
    def get(self, population: str, sha256: bytes) -> bytes | None:
        """Returns the plan of a hash, to be verified; None if the device does not have it."""

    @abc.abstractmethod
    def add(self, population: str, sha256: bytes, content: bytes) -> None:
        """Keeps a plan that was verified."""


def _key(population: str, sha256: bytes) -> bytes:
    """Returns the key of a plan: the server of one population learns nothing of another."""
    return hashlib.sha256(hashlib.sha256(population.encode()).digest() + sha256).digest()


class MemoryPlans(KnownPlans):
    """Plans of one device in memory; the contents may be shared with other devices."""

    def __init__(self, contents: dict[bytes, bytes] | None = None, *, most_plans: int = 16):
        """Starts without plans; devices in one process may share `contents`, the plans by key."""
        self._is_shared = contents is not None
        self._contents = {} if contents is None else contents
        self._most_plans = validation.integer("most_plans", most_plans, minimum=1)
        self._own: collections.OrderedDict[bytes, None] = collections.OrderedDict()
        self._lock = threading.Lock()

    @override
    def get(self, population: str, sha256: bytes) -> bytes | None:
        key = _key(population, sha256)
        with self._lock:
            if key not in self._own:
                return None
            self._own.move_to_end(key)
            return self._contents.get(key)

    @override
    def add(self, population: str, sha256: bytes, content: bytes) -> None:
        key = _key(population, sha256)
        with self._lock:
            self._contents.setdefault(key, content)
            self._own[key] = None
            self._own.move_to_end(key)
            if len(self._own) > self._most_plans:
                oldest, _ = self._own.popitem(last=False)
                if not self._is_shared:
                    del self._contents[oldest]


class PlanFolder(KnownPlans):
    """Plans in a folder of one process at a time; an error of the disk costs a download only."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        most_plans: int = 16,
        most_bytes: int = 64_000_000,
    ):
        """Opens the folder, or makes it, for its owner only; its parent must exist."""
        self._folder = pathlib.Path(folder)
        self._most_plans = validation.integer("most_plans", most_plans, minimum=1)
        self._most_bytes = validation.integer("most_bytes", most_bytes, minimum=1)
        self._lock = threading.Lock()
        self._folder.mkdir(mode=0o700, exist_ok=True)
        durable_files.remove_leftovers(self._folder)

    @override
    def get(self, population: str, sha256: bytes) -> bytes | None:
        path = self._path(population, sha256)
        try:
            with open(path, "rb") as file:
                content = file.read(self._most_bytes)
            os.utime(path)  # The least recently used one goes first.
            return content
        except FileNotFoundError:
            return None
        except OSError as error:
            _logger.info("a kept plan cannot be read: %s", type(error).__name__)
        return None

    @override
    def add(self, population: str, sha256: bytes, content: bytes) -> None:
        if len(content) > self._most_bytes:
            return
        try:
            with self._lock:
                self._make_room(len(content))
                durable_files.write(self._path(population, sha256), content, private=True)
        except OSError as error:
            _logger.info("a plan cannot be kept: %s", type(error).__name__)

    def _path(self, population: str, sha256: bytes) -> pathlib.Path:
        return self._folder / f"{_key(population, sha256).hex()}{_SUFFIX}"

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
