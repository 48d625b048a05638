"""`metrics.csv`, one row a round, and the same with exact figures in `private/`.

Older runs have one table with all columns outside of `private/`: it is still read.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from tff_dpftrl import durable_files, validation

_TABLE = "metrics.csv"
EXACT_TABLE = pathlib.PurePath("private", "metrics.csv")
"""Path of the table with the exact figures, too, in the folder of a run."""
_NOTE = "metrics_README.md"

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Column:
    """Column of the table.

    `is_exact` marks an exact figure of data that the run protects, computed without noise, which no
    privacy statement covers.
    """

    name: str
    meaning: str
    is_exact: bool = False


class MetricsLog:
    """Tables of the metrics of one run, a row for each round.

    `private/metrics.csv` has all columns, `metrics.csv` those that are not exact. The first row
    after opening rewrites both tables atomically, without rows beyond the last committed round.
    Each later row is appended. A line that a crash cut short has no end of line, and readers leave
    it out.

    Attributes:
      rows: The rows, by round; values by column, None where there is none.
    """

    def __init__(self, folder: pathlib.Path, columns: Sequence[Column], rounds_done: int):
        """Opens the log; rows after `rounds_done`, which were never committed, are dropped."""
        self._columns = tuple(column.name for column in columns)
        published = tuple(column.name for column in columns if not column.is_exact)
        # The table that is read is written first: a crash between the two leaves no row out.
        self._tables = {folder / EXACT_TABLE: self._columns, folder / _TABLE: published}
        self.rows = read_rows(folder, rounds_done)
        self._is_written = False  # Whether the files hold `rows` and nothing else.
        (folder / EXACT_TABLE).parent.mkdir(mode=0o700, exist_ok=True)
        durable_files.write(folder / _NOTE, _note(columns).encode("utf-8"))

    def append(self, row: Mapping[str, Any]) -> Row:
        """Adds the row of the next round, or replaces that of the same round; returns it whole."""
        values = {name: row.get(name) for name in self._columns}
        if any(row["round"] == values["round"] for row in self.rows[-1:]):
            self.rows.pop()
            self._is_written = False
        self.rows.append(values)
        is_written, self._is_written = self._is_written, False  # Until all lines are whole.
        for path, columns in self._tables.items():
            if is_written:
                durable_files.append(path, _line(values, columns))
            else:
                header = _line(dict(zip(columns, columns, strict=True)), columns)
                lines = [_line(row, columns) for row in self.rows]
                private = path.parent.name == EXACT_TABLE.parent.name
                durable_files.write(path, b"".join([header, *lines]), private=private)
        self._is_written = True
        return values


def _line(row: Mapping[str, Any], columns: Sequence[str]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    shown = {name: row.get(name) for name in columns}
    writer.writerow({k: repr(float(v)) if isinstance(v, float) else v for k, v in shown.items()})
    return text.getvalue().encode()


def table(folder: pathlib.Path) -> pathlib.Path:
    """Returns the path of the table with all columns; older runs have none in `private/`."""
    exact = folder / EXACT_TABLE
    return exact if exact.exists() else folder / _TABLE


def is_of_earlier_version(folder: pathlib.Path) -> bool:
    """Returns whether the only table of a run has all columns, the exact ones included."""
    return table(folder) == folder / _TABLE and (folder / _TABLE).exists()


def read_rows(folder: pathlib.Path, rounds_done: int) -> list[Row]:
    """Reads the rows of the committed rounds; none if there is no table, damaged ones refused."""
    path = table(folder)
    if not rounds_done or not path.exists():
        return []
    name = path.relative_to(folder).as_posix()
    validation.file_in(folder, name, max_bytes=None, remedy="Move it back into the folder.")
    try:
        with open(path, newline="", encoding="utf-8") as file:
            whole = [line for line in file if line.endswith("\n")]
        rows = [_parse(row) for row in csv.DictReader(whole)]
        return [row for row in rows if row["round"] <= rounds_done]
    except (ValueError, KeyError, TypeError, AttributeError, csv.Error) as error:
        raise validation.UsageError(
            f"{path} is not the table of a run: {error!r}. Remove it; its later rows "
            "will be written again."
        ) from error


def _parse(row: Mapping[str, str]) -> Row:
    return {name: _number(text) if text else None for name, text in row.items()}


def _number(text: str) -> int | float:
    return int(text) if text.isdigit() else float(text)


def _note(columns: Sequence[Column]) -> str:
    lines = ["# metrics.csv", "", "One row a round. An empty cell: not measured in that round.", ""]
    lines += [f"- `{one.name}`: {one.meaning}" for one in columns if not one.is_exact]
    exact = [one for one in columns if one.is_exact]
    if exact:
        lines += [
            "",
            f"`{EXACT_TABLE}` has these columns too, exact figures of the users whom the run "
            "protects, without noise, which the privacy statement does not cover. **Do not "
            "publish** them, nor what shows them: the other files in `private/`, and the terminal.",
            "",
            *(f"- `{one.name}`: {one.meaning}" for one in exact),
        ]
    return "\n".join(lines) + "\n"
