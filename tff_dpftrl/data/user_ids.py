"""Ids of users as text: the one place where a column of ids becomes users, whatever it came from.

A float that is too large to be exact would be the id of several users. A number that is written in
several ways would make several users of one. In both cases the unit of privacy would not be
the user.
"""

from __future__ import annotations

import datetime
import decimal
import numbers
import re
import uuid
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np

from tff_dpftrl import validation

_EXACT_BELOW = {np.float16: 2**11, np.float32: 2**24}
_EXACT_DOUBLE = 2**53
_DIGITS = 16  # Of that number.
_NARROW = re.compile(r"(half_?float|float16)|(float(?:32)?)\b")
_PLAIN = (numbers.Integral, uuid.UUID, datetime.date, datetime.time, datetime.timedelta)
_NUMBER = re.compile(r"\s*\+?(-?)0*(\d+)(?:\.(\d*?)0*)?(e\+\d+)?\s*", re.ASCII | re.IGNORECASE)
_LONGEST_NUMBER = 100  # Characters, so that no text takes the expression long.
_MAX_DIGITS = 4300  # As Python writes them of an integer.

_Read = TypeVar("_Read")


class NoId(Exception):
    """Error that a cell is no id. Its message is what rows of this kind are: "without a user"."""


def of_column(cells: Iterable[Any], dtype: Any) -> Iterable[Any]:
    """Returns the cells of a column; floats of fewer than 64 bits as those of NumPy."""
    found = _NARROW.search(str(dtype).lower())
    if found is None:
        return cells
    kind = np.float16 if found[1] else np.float32

    def narrow(cell: Any) -> Any:
        if is_list(cell):
            return [narrow(one) for one in cell]
        return kind(cell) if isinstance(cell, float) else cell

    return map(narrow, cells)


def is_list(cell: Any) -> bool:
    """Returns whether a cell is a list; data frames make arrays and series of these."""
    if isinstance(cell, np.ndarray) or hasattr(cell, "to_list"):
        return len(getattr(cell, "shape", ())) == 1
    return isinstance(cell, (list, tuple))


def surrogate_in(text: str) -> str | None:
    """Returns the description of rows whose text cannot be encoded; None if it can."""
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        if not "\udc80" <= error.object[error.start] <= "\udcff":
            return "with a part of a character (a lone surrogate)"
        return (
            "with bytes that are not in the file's encoding (if it is Latin-1, pass encoding "
            "'latin-1')"
        )
    return None


def as_text(cell: Any) -> str:
    """Returns the id in a cell as text.

    A cell is text, UTF-8 bytes, an integer, a whole float, which stands for the integer, a decimal
    number, a UUID, a date or a time. An empty cell raises NoId; a float that is too large to be
    exact raises UsageError.
    """
    if isinstance(cell, bytes):
        try:
            cell = cell.decode()
        except UnicodeDecodeError:
            raise NoId(
                "with bytes that are not UTF-8 as the id of the user (write ids as text, such as "
                "hexadecimal)"
            ) from None
    if isinstance(cell, str):
        if not cell or cell.isspace():
            raise NoId("without a user")
        if "\0" in cell:
            raise NoId("with a NUL character in the id of the user")
        if reason := surrogate_in(cell):
            raise NoId(reason)
        return str(cell)
    if cell is None or type(cell).__name__ in ("NAType", "NaTType"):
        raise NoId("without a user")
    if isinstance(cell, (bool, np.bool_)):
        raise NoId("with a bool as the id of the user")
    if isinstance(cell, (dict, np.ndarray)) or is_list(cell):
        raise NoId("with a list or an object as the id of the user")
    if isinstance(cell, (np.datetime64, np.timedelta64)) and np.isnat(cell):
        raise NoId("without a user")
    if isinstance(cell, (float, np.floating)):
        if np.isnan(cell):
            raise NoId("without a user")
        if not float(cell).is_integer():
            raise NoId("with a fraction as the id of the user")
        limit = _EXACT_BELOW.get(type(cell), _EXACT_DOUBLE)  # type: ignore
        if abs(float(cell)) >= limit:
            raise validation.UsageError(
                f"the id {float(cell)!r} of a user is a float of {limit:,} or more, which is not "
                "exact, so that different users may have the same one: write ids as text or as "
                "integers (pandas makes floats of integers beside an empty cell: read the column "
                "with dtype=str)."
            )
        return str(int(cell))
    if isinstance(cell, decimal.Decimal) and not cell.is_infinite():
        if cell.is_nan():
            raise NoId("without a user")
        if abs(cell.adjusted()) < _MAX_DIGITS:
            return format(cell, "f")
        raise NoId(_LONG)
    if isinstance(cell, (*_PLAIN, np.datetime64)):
        try:
            return str(cell)
        except ValueError:
            raise NoId(_LONG) from None
    raise NoId(f"with a {type(cell).__name__} as the id of the user")


_LONG = f"with a number of more than {_MAX_DIGITS} digits as the id of the user"


def at(place: str, number: int, cell: Any, read: Callable[[Any], _Read] = as_text) -> _Read:
    """Reads the ids in a cell; the message of an id that is not exact names the cell."""
    try:
        return read(cell)
    except validation.UsageError as error:
        raise validation.UsageError(f"{place}{number}: {error}") from None


def check(ids: Iterable[str], where: str) -> None:
    """Refuses ids that differ only in how they write a number, and what is no id or not exact."""
    ids = frozenset(ids)
    for one in ids:
        if not isinstance(one, str):
            raise validation.UsageError(f"{where}: ids of users must be text, got {one!r}.")
        try:
            as_text(one)
        except NoId as error:
            raise validation.UsageError(
                f"{where} has an entry {error}, {one!r}: leave it out, or give it an id."
            ) from None
    found = [
        (one, number)
        for one in ids
        # Most ids are seen to be no such number without the expression, which is slow.
        if not (one[-1:].isalpha() or one[:1].isalpha() or (one.isdecimal() and one[0] != "0"))
        if len(one) <= _LONGEST_NUMBER and (number := _NUMBER.fullmatch(one))
    ]
    usual: dict[str, str] = {}
    for one, number in sorted(found, key=lambda pair: pair[0]):  # So that one message is chosen.
        sign, whole, fraction, exponent = number.groups()
        is_large = len(whole) > _DIGITS or int(whole) >= _EXACT_DOUBLE
        if exponent or (fraction == "" and is_large):
            raise validation.UsageError(
                f"{where}: the id {one!r} of a user is a number that was rounded when it was "
                "written, so that different users may have the same one: export them again, as "
                "text or integers, from where they are exact."
            )
        value = sign + whole + ("." + fraction if fraction else "")
        other = value if value in ids else usual.setdefault(value, one)
        if other != one:
            raise validation.UsageError(
                f"{where}: ids of users write one number in several ways, {other!r} and {one!r}, "
                "so that one user would count as two: write ids in one way. If these are "
                "different users, put a letter before each id."
            )
