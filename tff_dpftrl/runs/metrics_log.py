"""`metrics.csv`, one row a round, and a note beside it on what is fit to publish."""

from __future__ import annotations

import csv
import dataclasses
import io
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from tff_dpftrl import durable_files, validation

_TABLE = "metrics.csv"
_NOTE = "metrics_README.md"

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of the table.

    Attributes:
      name: Name of the column, in the header.
      meaning: Meaning of the column, in a few words.
      is_exact: Whether it is an exact figure of data that the run protects, computed
        without noise, which no privacy statement covers.
    """

    name: str
    meaning: str
    is_exact: bool = False


class MetricsLog:
    """Table of the metrics of one run, a row for each round.

    The first row after opening rewrites the table atomically, without rows beyond the last
    committed round. Each later row is appended. A line that a crash cut short has no end of
    line, and readers leave it out.

    Attributes:
      rows: The rows, by round; values by column, None where there is none.
    """

    def __init__(self, folder: pathlib.Path, columns: Sequence[Column], rounds_done: int):
        """Opens the log.

        Args:
          folder: Folder of the run.
          columns: The columns; "round" comes first and counts from 1.
          rounds_done: Rows of later rounds, of a run that was interrupted before
            it could commit them, are dropped.

        Raises:
          OSError: If the note cannot be written.
        """
        self._path = folder / _TABLE
        self._columns = tuple(column.name for column in columns)
        self.rows = read_rows(folder, rounds_done)
        self._is_written = False  # Whether the file holds `rows` and nothing else.
        durable_files.write(folder / _NOTE, _note(columns).encode("utf-8"))

    def append(self, row: Mapping[str, Any]) -> Row:
        """Adds the row of the next round, or replaces the last row if it is of the same round.

        Args:
          row: Values by column; columns left out stay empty.

        Returns:
          The row, with all columns.

        Raises:
          OSError: If the table cannot be written.
        """
        values = {name: row.get(name) for name in self._columns}
        if any(row["round"] == values["round"] for row in self.rows[-1:]):
            self.rows.pop()
            self._is_written = False
        self.rows.append(values)
        if self._is_written:
            self._is_written = False  # Until the whole line is in the file.
            durable_files.append(self._path, self._line(values).encode())
        else:
            header = self._line(dict(zip(self._columns, self._columns, strict=True)))
            lines = [self._line(row) for row in self.rows]
            durable_files.write(self._path, "".join([header, *lines]).encode())
        self._is_written = True
        return values

    def _line(self, row: Mapping[str, Any]) -> str:
        text = io.StringIO()
        csv.DictWriter(text, self._columns, lineterminator="\n").writerow(
            {k: repr(float(v)) if isinstance(v, float) else v for k, v in row.items()}
        )
        return text.getvalue()


def read_rows(folder: pathlib.Path, rounds_done: int) -> list[Row]:
    """Reads the rows of the committed rounds.

    Args:
      folder: Folder of a run.
      rounds_done: Number of committed rounds; later rows are left out.

    Returns:
      The rows, by round; none if there is no table yet.

    Raises:
      ValueError: If the table is damaged.
    """
    if not rounds_done or not (folder / _TABLE).exists():
        return []
    try:
        with open(folder / _TABLE, newline="", encoding="utf-8") as file:
            whole = [line for line in file if line.endswith("\n")]
        rows = [_parse(row) for row in csv.DictReader(whole)]
        return [row for row in rows if row["round"] <= rounds_done]
    except (ValueError, KeyError, TypeError, AttributeError, csv.Error) as error:
        raise validation.UsageError(
            f"{folder / _TABLE} is not the table of a run: {error!r}. Remove it; its later rows "
            "will be written again."
        ) from error


def _parse(row: Mapping[str, str]) -> Row:
    return {name: _number(text) if text else None for name, text in row.items()}


def _number(text: str) -> int | float:
    return int(text) if text.isdigit() else float(text)


def _note(columns: Sequence[Column]) -> str:
    exact = [column for column in columns if column.is_exact]
    lines = ["# metrics.csv", "", "One row a round. An empty cell: not measured in that round.", ""]
    lines += [f"- `{column.name}`: {column.meaning}" for column in columns]
    if exact:
        names = ", ".join(f"`{column.name}`" for column in exact)
        lines += [
            "",
            f"**Do not publish {names}**: they are exact figures of the users whom the run "
            "protects, without noise, for simulations. The privacy statement does not cover them, "
            "nor what shows them: the curves of training cohorts in `curves.png`, the events in "
            "`tensorboard/` and the terminal.",
        ]
    return "\n".join(lines) + "\n"
