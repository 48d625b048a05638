"""Checks of arguments, with messages that name the argument, the value and the remedy.

Each function returns the given value as a plain Python number, or raises a `UsageError`.
`remedy`, where a function takes it, is a sentence that ends the message.
"""

from __future__ import annotations

import errno
import math
import operator
import os
import pathlib
import stat
from typing import Any


class UsageError(ValueError):
    """Error that the caller can correct: its message says what is wrong, where, and what to do.

    The command shows it in one line and exits with status 2. Any other ValueError that reaches
    the command is a defect of this package.
    """

    # TensorFlow's AutoGraph raises an error again under its own type only if it has this __init__.
    __init__ = Exception.__init__


MIN_CLIP_NORM = 1e-6
MAX_CLIP_NORM = 1e18
"""Outside these, float32 updates and noise come near the ends of their range."""

MAX_FILE_BYTES = 1 << 28
"""Largest file that is read into memory if another program, or another person, wrote it."""

_LONGEST_VALUE = 200  # Largest number of characters of a value in a message.


def _message(name: str, wanted: str, value: Any, remedy: str) -> str:
    shown = repr(value)
    if len(shown) > _LONGEST_VALUE:
        shown = shown[: _LONGEST_VALUE - 1] + "…"
    return f"{name} must be {wanted}, got {shown}." + (f" {remedy}" if remedy else "")


def integer(name: str, value: Any, *, minimum: int | None = None, remedy: str = "") -> int:
    """Returns an integer of at least `minimum`, of any type but bool with `__index__`."""
    try:
        as_int = operator.index(value)
    except TypeError:
        as_int = None
    if as_int is None or isinstance(value, bool):
        raise UsageError(_message(name, "an integer", value, remedy))
    if minimum is not None and as_int < minimum:
        raise UsageError(_message(name, f"at least {minimum}", value, remedy))
    return as_int


def number(
    name: str,
    value: Any,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    remedy: str = "",
) -> float:
    """Returns a finite real number within bounds as a float; refuses others."""
    bounds = [
        text
        for text, bound in (
            (f"at least {at_least}", at_least),
            (f"above {above}", above),
            (f"at most {at_most}", at_most),
            (f"below {below}", below),
        )
        if bound is not None
    ]
    wanted = "a finite number" + (", " + " and ".join(bounds) if bounds else "")
    try:
        as_float = float(value)
    except (TypeError, ValueError, OverflowError):
        raise UsageError(_message(name, wanted, value, remedy)) from None
    if (
        isinstance(value, (str, bytes, bool))
        or not math.isfinite(as_float)
        or (at_least is not None and as_float < at_least)
        or (above is not None and not as_float > above)
        or (at_most is not None and as_float > at_most)
        or (below is not None and not as_float < below)
    ):
        raise UsageError(_message(name, wanted, value, remedy))
    return as_float


def numbers(name: str, values: Any) -> tuple[float, ...]:
    """Returns a sequence of numbers, finite or not, each as a float; refuses others."""
    try:
        return tuple(float(value) for value in values)
    except (TypeError, ValueError, OverflowError):
        raise UsageError(_message(name, "a sequence of numbers", values, "")) from None


def positive(name: str, value: Any, *, remedy: str = "") -> float:
    """Checks for a finite number above 0; arguments and errors are those of `number`."""
    return number(name, value, above=0, remedy=remedy)


def probability(name: str, value: Any, *, remedy: str = "") -> float:
    """Checks for a number in (0, 1]; arguments and errors are those of `number`."""
    return number(name, value, above=0, at_most=1, remedy=remedy)


def learning_rate(name: str, value: Any) -> float:
    """Checks for a number above 0 that float32 holds, in which optimizers compute."""
    remedy = "Optimizers compute in float32: take a number within its range."
    return number(name, value, at_least=1e-37, at_most=1e38, remedy=remedy)


def clip_norm(name: str, value: Any) -> float:
    """Checks for a clip norm in [`MIN_CLIP_NORM`, `MAX_CLIP_NORM`]."""
    remedy = "Rescale the updates if their norms are that small or large."
    return number(name, value, at_least=MIN_CLIP_NORM, at_most=MAX_CLIP_NORM, remedy=remedy)


def noise_multiplier(value: Any, name: str = "noise_multiplier") -> float:
    """Checks for a finite number of at least 0; 0 means no noise and no privacy."""
    return number(name, value, at_least=0, remedy="0 means no noise, and no privacy.")


def delta(value: Any, name: str = "delta") -> float:
    """Checks for the δ of an (ε, δ) statement, strictly between 0 and 1."""
    return number(name, value, above=0, below=1, remedy="Try 1e-10.")


def seed(name: str, value: Any) -> int | None:
    """Checks for the seed of a run's noise: None, or an integer in [0, 2^128)."""
    if value is None:
        return None
    try:
        as_int = operator.index(value)
    except TypeError:
        as_int = -1
    if not 0 <= as_int < 1 << 128:
        wanted = "None or an integer in [0, 2**128)"
        raise UsageError(_message(name, wanted, value, "Leave it None for a private run."))
    return as_int


def float_dtype(name: str, dtype: Any) -> None:
    """Checks for a dtype, of any framework, to which real noise can be added.

    The imaginary part of a complex number would have no noise, and an integer would round it.
    """
    shown = str(getattr(dtype, "name", dtype)).rpartition(".")[2]
    if not shown.startswith(("float", "bfloat")):
        remedy = "view it as real" if shown.startswith("complex") else "cast it to float32"
        raise UsageError(
            f"{name} must have only floats, since the noise is real; got {shown}: {remedy}."
        )


def file_in(
    folder: str | os.PathLike[str],
    name: str,
    *,
    max_bytes: int | None = MAX_FILE_BYTES,
    remedy: str = "Restore it.",
) -> pathlib.Path:
    """Checks a file of a folder from outside, before anything is opened; returns its path.

    `name` is untrusted. Refused are files that are missing, larger than `max_bytes`, not regular,
    or outside of the folder. A link may lead to another file of the folder, or to where
    `huggingface_hub` keeps the files of the same repository.
    """
    path = pathlib.Path(folder, name)
    try:
        # Before Python 3.13, `resolve` has an error of its own for a loop of links.
        root, target = pathlib.Path(os.path.realpath(folder)), pathlib.Path(os.path.realpath(path))
        is_inside = target.is_relative_to(root) or target.parent in _blobs(root)
        is_inside &= pathlib.Path(os.path.abspath(path)).is_relative_to(os.path.abspath(folder))
        status = target.stat() if is_inside else None
    except OSError as error:
        is_loop = error.errno == errno.ELOOP
        problem = "is a loop of links" if is_loop else f"cannot be read ({error.strerror})"
    except ValueError:
        problem = "is no name of a file"
    else:
        if status is None:
            problem = "leads out of the folder"
        elif not stat.S_ISREG(status.st_mode):
            problem = "is no regular file"
        elif max_bytes is not None and status.st_size > max_bytes:
            problem = f"has {status.st_size} bytes, and at most {max_bytes} are read"
        else:
            return path
    raise UsageError(f"{folder}: {name!r} {problem}. {remedy}")


def _blobs(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns where the files are of a folder models--NAME/snapshots/REVISION, or of one in it."""
    repositories = [p.parent for p in folder.parents if p.name == "snapshots"]
    return [p / "blobs" for p in repositories if p.name.startswith("models--")]


def one_line(error: BaseException) -> str:
    """Writes an error of somebody else's code in one line, as in "KeyError: 'window'"."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith("in user code:"):  # TensorFlow's, of traced code.
        return lines[-1]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
