"""Tables with a user and a text in each row: their columns, and rows that cannot be used.

A row that cannot be used is left out, counted, and named by its file and line. The table is refused
if too large a share of its rows cannot be used.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from tff_dpftrl import validation
from tff_dpftrl.data import owners, user_ids

Notice: TypeAlias = Callable[[str], None]
"""Callback for a line about what was found in a table."""

Row: TypeAlias = tuple[int, Any, Any]
"""Number of a line or row, the user's cell and the text's; a `Broken` in place of the user."""

_USERS = frozenset(
    "user userid useridentifier uid username author authorid authorname reviewer reviewerid "
    "customer customerid client clientid account accountid member memberid speaker speakerid "
    "sender senderid writer writerid".split()
)
_TEXTS = frozenset(
    "text texts body message messagetext review reviewtext reviewbody comment commenttext "
    "commentbody content post posttext tweet sentence utterance".split()
)
_SHOWN_COLUMNS = 20
_SHOWN_PLACES = 3
_SHOWN_FORMS = 200  # Largest number of characters of the columns in a message.
_MARKS = '\ufeff"'


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableOptions:
    """Options for reading a table.

    Attributes:
      user_column: Name of the column of users. Default: the one with a usual name.
      text_column: Name of the column of texts. Default: the one with a usual name.
      encoding: Python's name of the encoding of CSV, TSV and JSON lines. Default: UTF-8.
      max_bad_rows: Largest share of unusable rows, which are left out. With more, the table is
        refused.
      split: Name of the split to read, or "all", in a folder with files of several splits, such
        as train.csv and test.csv. Default: "train".
    """

    user_column: str | None = None
    text_column: str | None = None
    encoding: str | None = None
    max_bad_rows: float = 0.01
    split: str | None = None

    def __post_init__(self):
        validation.number("max_bad_rows", self.max_bad_rows, at_least=0, below=1)
        if self.encoding is not None:
            try:
                "".encode(self.encoding)  # Codecs that are not of text, like hex, are refused, too.
            except (LookupError, ValueError):
                raise validation.UsageError(
                    f"encoding {self.encoding!r} is not known: give one such as 'latin-1', "
                    "'cp1252' or 'utf-16'."
                ) from None

    @property
    def given(self) -> list[str]:
        """Names of the options that differ from their defaults."""
        return [
            field.name
            for field in dataclasses.fields(TableOptions)
            if getattr(self, field.name) != field.default
        ]


@dataclasses.dataclass(frozen=True)
class Broken:
    """A row that could not be parsed, with a clause about rows like it: "that are not JSON"."""

    reason: str


def to_stderr(line: str) -> None:
    """Prints a line to standard error."""
    print(line, file=sys.stderr, flush=True)


class NoColumnError(validation.UsageError):
    """Error that a column is not there, which might be in another row of the table."""


@dataclasses.dataclass(frozen=True)
class Columns:
    """Names of the two columns that are read."""

    user: str
    text: str

    @property
    def user_unit(self) -> str:
        """Description of one user, for the privacy statement."""
        return f"one value of the column {self.user!r}"

    @classmethod
    def choose(cls, names: Sequence[str], where: str, options: TableOptions) -> Columns:
        """Chooses the columns by the options, or else by usual names."""
        if any("\0" in name for name in names):
            raise validation.UsageError(
                f"{where} has a NUL character in the name of a column: rename it, or pass the "
                "file's own encoding."
            )
        chosen, problems = [], []
        kind = NoColumnError
        for option, given, usual, what in (
            ("user_column", options.user_column, _USERS, "users"),
            ("text_column", options.text_column, _TEXTS, "texts"),
        ):
            matches = [n for n in names if (n == given if given else _plain(n) in usual)]
            if len(matches) == 1:
                chosen.append(matches[0])
                continue
            if matches:
                kind = validation.UsageError
            if given:
                number = "no column" if not matches else f"{len(matches)} columns"
                problems.append(f"{number} {given!r} ({option})")
            elif matches:
                either = " or ".join(map(repr, matches))
                problems.append(f"{what} in {either}: say which one ({option})")
            else:
                problems.append(f"no column that is known to have {what}: name it ({option})")
        if not problems and chosen[0] == chosen[1]:
            kind = validation.UsageError
            problems.append(f"users and texts in the same column, {chosen[0]!r}")
        if problems:
            listed = ", ".join(repr(name) for name in names[:_SHOWN_COLUMNS])[:_SHOWN_FORMS]
            more = f" and {len(names) - _SHOWN_COLUMNS} more" if len(names) > _SHOWN_COLUMNS else ""
            raise kind(
                f"{where} has {'; '.join(problems)}. Its columns are {listed or 'none'}{more} "
                "(the first line of a CSV file names them)."
            )
        return cls(*chosen)


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


class RowCheck:
    """Check that counts the unusable rows of one table.

    `co_owners` has the further owners of the rows that were yielded, by the first owner.
    """

    def __init__(
        self,
        name: str,
        options: TableOptions,
        notice: Notice,
        columns: Columns | None,
        selection: owners.Selection | None = None,
    ):
        """Initialises; `columns` is None if unnamed, `selection` is for rows of many owners."""
        self._name, self._options, self._notice = name, options, notice
        self._columns, self._selection = columns, selection
        self.co_owners: dict[str, set[str]] = {}
        self._num_rows = 0
        self._places: dict[str, list[str]] = {}
        self._bad: collections.Counter[str] = collections.Counter()
        self._converted: dict[str, str] = {}

    def usable(self, rows: Iterable[Row], place: str) -> Iterator[tuple[str, tuple[str]]]:
        """Yields (first) user and text of usable rows; `place` is a prefix like "reviews.csv:"."""
        for number, user, text in rows:
            self._num_rows += 1
            try:
                names = user_ids.at(place, number, user, self._owners)
            except user_ids.NoId as error:
                reason = str(error)
            else:
                if self._is_header(names[0], text):
                    raise validation.UsageError(
                        f"{place}{number} repeats the names of the columns, as where two files "
                        "were joined: remove the row."
                    )
                if self._selection and not self._selection.is_selected[self._num_rows - 1]:
                    continue
                if isinstance(text, bytes):
                    text = _decoded(text)
                reason = text.reason if isinstance(text, Broken) else _reason(text)
                if reason is None:
                    if self._selection:
                        self.co_owners.setdefault(names[0], set()).update(names[1:])
                    yield names[0], (text,)
                    continue
            self._bad[reason] += 1
            places = self._places.setdefault(reason, [])
            if len(places) < _SHOWN_PLACES:
                places.append(f"{place}{number}")

    def finish(self, num_repeated: int, num_users: int) -> None:
        """Reports what was found, and refuses a table with too many rows that cannot be used."""
        if self._num_rows == 0:
            raise validation.UsageError(f"{self._name} has no rows.")
        num_bad, limit = sum(self._bad.values()), self._options.max_bad_rows
        if num_bad:
            kinds = []
            for reason, count in self._bad.most_common():
                more = ", ..." if count > len(self._places[reason]) else ""
                kinds.append(f"{count} {reason} ({', '.join(self._places[reason])}{more})")
            read = self._columns
            of = "" if read is None else f", columns {read.user!r} and {read.text!r}"
            summary = (
                f"{self._name}{of}: {num_bad} of {self._num_rows} rows cannot be used: "
                + "; ".join(kinds)
            )
            if num_bad > limit * self._num_rows:
                raise validation.UsageError(
                    f"{summary}. That is more than max_bad_rows = {100 * limit:g} %: mend them, or "
                    "raise max_bad_rows to leave them out."
                )
            self._notice(f"{summary}. They are left out.")
        for kind, example in self._converted.items():
            self._notice(
                f"{self._name}: ids of users that are of type {kind} are read as text: {example!r}."
            )
        if num_repeated:
            self._notice(
                f"{self._name}: {num_repeated} of {self._num_rows} rows have the user and the text "
                "of an earlier row, word for word. They are kept: people do repeat themselves, and "
                "the guarantee is for all rows of a user together."
            )
        if self._selection is not None:
            self._notice(f"{self._name}: {self._selection.summary}. The others are never used.")
            return
        self._notice(
            f"{self._name}: {self._num_rows - num_bad} texts of {num_users} users were read."
        )

    def _owners(self, cell: Any) -> tuple[str, ...]:
        """Returns the owners of a row: one user, unless rows may have several."""
        if isinstance(cell, Broken):
            raise user_ids.NoId(cell.reason)
        if self._selection is not None:
            names = owners.of_cell(cell)
            if names is None:
                raise user_ids.NoId("without a user or a list of users")
            return names
        if user_ids.is_list(cell) and owners.of_cell(cell):
            raise user_ids.NoId("with a list of users, which finetune takes with rows_per_owner")
        name = user_ids.as_text(cell)
        if not isinstance(cell, (str, bytes)):
            self._converted.setdefault(type(cell).__name__, name)
        return (name,)

    def _is_header(self, user: str, text: Any) -> bool:
        """Returns whether a row has the names of the columns, as where two files were joined."""
        columns = self._columns
        if columns is None or not isinstance(text, str):
            return False
        # The second file's byte-order mark is before the first name, quotes or not.
        return (user.strip(_MARKS), text.strip(_MARKS)) == (columns.user, columns.text)


def _reason(text: Any) -> str | None:
    """Returns why a row with a text cannot be used; None if it can."""
    if not isinstance(text, str):
        if text is None or text != text:
            return "without a text"
        return f"with a {type(text).__name__} instead of a text"
    if not text or text.isspace():
        return "with an empty text"
    return damage(text)


def damage(text: str) -> str | None:
    """Returns the description of rows with characters that no corpus takes; None without one."""
    if "\0" in text:
        return "with a NUL character in the text"
    return user_ids.surrogate_in(text)


def of_memory(rows: Any, options: TableOptions) -> tuple[Columns | None, Iterator[Row]]:
    """Returns the columns of a table in memory, None for pairs, and the rows, numbered from 0."""
    _refuse(options, ("encoding", "split"), "rows in memory")
    is_reader = hasattr(rows, "read_next_batch")  # Arrow's.
    names = _names(rows.schema.names if is_reader else getattr(rows, "column_names", None))
    if names is None:
        names = _names(getattr(rows, "columns", None))
    if names is None:
        if isinstance(rows, (str, bytes, dict)) or not isinstance(rows, Iterable):
            raise validation.UsageError(
                "rows must be a data frame, an Arrow table, a Dataset or an iterable of (user, "
                f"text) pairs, got {type(rows).__name__}."
            )
        _refuse(options, ("user_column", "text_column"), "rows that are pairs")
        return None, (_pair(number, row) for number, row in enumerate(rows))
    if hasattr(rows, "collect"):  # polars' LazyFrame.
        raise validation.UsageError("rows is a lazy frame: give rows.collect().")
    columns = Columns.choose([str(name) for name in names], "rows", options)
    if is_reader or hasattr(rows, "to_struct_array"):  # Arrow.
        if not is_reader:
            rows = rows.to_batches(4096) if hasattr(rows, "to_batches") else [rows]
        pairs = of_arrow(rows, columns)
    elif hasattr(rows, "iter"):  # datasets.
        kind = getattr(rows, "features", {}).get(columns.user)
        pairs = itertools.chain.from_iterable(
            zip(user_ids.of_column(batch[columns.user], kind), batch[columns.text], strict=True)
            for batch in rows.iter(4096)
        )
    else:
        key = {str(name): name for name in names}  # pandas' names may be numbers.
        ids = rows[key[columns.user]]
        ids = user_ids.of_column(ids, getattr(ids, "dtype", None))
        pairs = zip(ids, rows[key[columns.text]], strict=True)
    return columns, (
        (number, user, _plain_value(text)) for number, (user, text) in enumerate(pairs)
    )


def _refuse(options: TableOptions, names: Sequence[str], what: str) -> None:
    for name in names:
        if getattr(options, name) is not None:
            raise validation.UsageError(f"{name} has no meaning for {what}: leave it out.")


def of_arrow(batches: Iterable[Any], columns: Columns) -> Iterator[tuple[Any, Any]]:
    """Yields the cells of users and texts of Arrow's record batches."""
    for batch in batches:
        users, texts = batch.column(columns.user), batch.column(columns.text)
        ids = user_ids.of_column(users.to_pylist(), users.type)
        yield from zip(ids, texts.to_pylist(), strict=True)


def _names(names: Any) -> list[Any] | None:
    if names is None or callable(names) or isinstance(names, (str, dict)):
        return None
    return list(names)


def _pair(number: int, row: Any) -> Row:
    if isinstance(row, (tuple, list)) and len(row) == 2:
        return number, row[0], _plain_value(row[1])
    return number, Broken("that are no pairs of a user and a text"), None


def _decoded(text: bytes) -> str | Broken:
    try:
        return text.decode()
    except UnicodeDecodeError:
        return Broken("with bytes that are not UTF-8 instead of a text")


def _plain_value(value: Any) -> Any:
    """Converts NumPy's scalars to Python's, and pandas' NA, which has no truth value, to None."""
    if type(value).__name__ in ("NAType", "NaTType"):
        return None
    return value.tolist() if type(value).__module__ == "numpy" else value
