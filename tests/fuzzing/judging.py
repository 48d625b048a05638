"""The law for any input: it is taken, or refused in one line, soon, and nothing else happens.

No exception but those that are documented; no code that the input brings along; no file
changed or left behind but those that the reader owns; no memory or time out of proportion.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import os
import pathlib
import random
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tff_dpftrl import validation

LONGEST_SECONDS = 20.0
"""Far more than any of these small inputs takes on a busy machine."""
MOST_MEMORY = 512 << 20
"""Bytes by which one input may raise the process's peak."""
_LONGEST_LINE = 20_000  # These inputs have values of some thousand characters.
_MESSAGES_A_SEED = 10**9
_UNFINISHED = (".unfinished", "-journal")  # What is left of a file that is half written.
# What SQLite makes for who reads a file in WAL mode, and leaves if it may not write to that.
_OF_READERS = ("-shm", "-wal")
# Python tells what it is about to do: none of this is reading.
_FORBIDDEN = ("pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Violation(AssertionError):
    """An input did what none may do."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One input.

    Attributes:
      read: Takes it.
      folder: Where the reader may write; None if nowhere.
      kept: Files in it that no reader may change.
      makes: Whether it may leave new files.
    """

    read: Callable[[], Any]
    folder: pathlib.Path | None = None
    kept: tuple[str, ...] = ()
    makes: bool = False


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of input.

    Attributes:
      name: Its name.
      prepare: Given an empty folder of its own, makes valid inputs; returns what makes a case of
        random numbers.
      refusals: What its reader is documented to raise.
      read: Its reader, if the input is bytes.
    """

    name: str
    prepare: Callable[[pathlib.Path], Callable[[random.Random], Case]]
    refusals: tuple[type[Exception], ...] = (validation.UsageError, OSError)
    read: Callable[[bytes], Any] | None = None


@dataclasses.dataclass
class Tally:
    """What came of the inputs of one kind.

    Attributes:
      outcomes: How often each.
      slowest: Seconds of the slowest.
      failures: What violates the law: seed of the input, and what happened.
    """

    outcomes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    slowest: float = 0.0
    failures: list[tuple[int, str]] = dataclasses.field(default_factory=list)


class _TooLong(BaseException):
    pass


_watched: pathlib.Path | None = None
_is_watching = False
_seen: list[str] = []


def _hear(event: str, arguments: tuple) -> None:
    if not _is_watching:
        return
    if event in _FORBIDDEN:
        _seen.append(f"{event}{arguments[:2]}")
    elif event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES:
        path = os.fspath(arguments[0]) if not isinstance(arguments[0], int) else ""
        path = os.fsdecode(path)
        if (
            path
            and not path.startswith(("/dev/", "/proc/"))
            and (_watched is None or not os.path.realpath(path).startswith(str(_watched)))
        ):
            _seen.append(f"open({path!r}) for writing")


@functools.cache
def _listen() -> None:
    sys.dont_write_bytecode = True  # Of modules that are imported as late as this.
    sys.addaudithook(_hear)  # It stays for good.


@contextlib.contextmanager
def _watching(folder: pathlib.Path | None) -> Iterator[None]:
    global _watched, _is_watching
    _listen()
    _seen.clear()
    _watched, _is_watching = folder and folder.resolve(), True
    try:
        yield
    finally:
        _is_watching = False


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Ends what takes far too long, and has what takes far too much memory fail at once."""

    def over(*unused: Any) -> None:
        raise _TooLong

    used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = used + 4 * MOST_MEMORY  # Of addresses, which threads reserve as they begin.
    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, LONGEST_SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def one_line(text: str) -> None:
    """Refuses what is no message for a user.

    Raises:
      Violation: If it is none.
    """
    if not text.strip() or len(text.splitlines()) > 1:
        raise Violation(f"the message is not one line: {text[:300]!r}")
    if len(text) > _LONGEST_LINE:
        raise Violation(f"the message has {len(text)} characters: {text[:300]!r}")


def judge(case: Case, refusals: tuple[type[Exception], ...]) -> str:
    """Reads one input.

    Args:
      case: The input.
      refusals: What its reader is documented to raise.

    Returns:
      "accepted", or the name of the refusal.

    Raises:
      Violation: If it does what none may do.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        with _watching(case.folder), _limited():
            outcome = case.read()
            outcome = outcome if isinstance(outcome, str) else "accepted"
    except refusals as error:
        outcome = type(error).__name__
        # `OSError` of the operating system is shown as `strerror` and path.
        one_line(str(error))
    except _TooLong:
        raise Violation(f"it has taken {LONGEST_SECONDS:g} seconds") from None
    except Exception as error:
        where = "".join(traceback.format_exception(error)[-4:])
        raise Violation(f"{type(error).__name__}: {where[-1500:]}") from error
    if _seen:
        raise Violation(f"it has done this: {_seen[:3]}")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) << 10
    if grown > MOST_MEMORY:
        raise Violation(f"it has taken {grown >> 20} MiB")
    return outcome


def run(kind: Kind, folder: pathlib.Path, seeds: Iterable[int]) -> Tally:
    """Reads inputs of a kind.

    Args:
      kind: The kind.
      folder: An empty folder.
      seeds: Of the inputs, each of which is made of its own seed alone.

    Returns:
      What came of them.
    """
    tally = Tally()
    make = kind.prepare(folder)
    for seed in seeds:
        case = make(random.Random(f"{kind.name} {seed}"))
        begin = time.perf_counter()
        before = _contents(case)
        try:
            outcome = judge(case, kind.refusals)
            if _contents(case) != before:
                raise Violation("files were changed that are to be read only, or left behind")
            tally.outcomes[outcome] += 1
        except Violation as violation:
            tally.outcomes["VIOLATED"] += 1
            tally.failures.append((seed, str(violation)))
        tally.slowest = max(tally.slowest, time.perf_counter() - begin)
    return tally


def _contents(case: Case) -> dict[str, bytes | None]:
    """Files that must stay as they are, and names of all others."""
    if case.folder is None:
        return {}
    return {
        str(path.relative_to(case.folder)): path.read_bytes()
        if path.name in case.kept and path.is_file()
        else None
        for path in case.folder.rglob("*")
        if not path.name.endswith(_OF_READERS)
        if not case.makes or path.name.endswith(_UNFINISHED)
    }


def seeds_of(seed: int, number: int) -> range:
    """Seeds of so many inputs, which no other seed's inputs have."""
    return range(seed * _MESSAGES_A_SEED, seed * _MESSAGES_A_SEED + number)


def empty(folder: pathlib.Path) -> None:
    """Removes all that is in a folder."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
