"""Files of tables: which ones a name stands for, and their rows.

CSV, TSV and JSON lines are read by Python itself, line by line: only so has every row that cannot
be used a line, whatever is wrong with it. Parquet and Feather are read with pyarrow.
"""

from __future__ import annotations

import bz2
import contextlib
import csv
import glob
import gzip
import io
import itertools
import json
import lzma
import os
import pathlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, TypeAlias

from tff_dpftrl import json_text, packages, validation
from tff_dpftrl.data import tables

Choose: TypeAlias = Callable[[Sequence[str]], tables.Columns]
"""Function from the names of all columns to the columns to read."""

_SEPARATED = {".csv": ",", ".tsv": "\t"}
_LINES = (".jsonl", ".ndjson", ".json")
_ARROW = {".parquet": "parquet", ".pq": "parquet", ".feather": "feather", ".arrow": "feather"}
_COMPRESSED = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
SUFFIXES = (*_SEPARATED, *_LINES, *_ARROW)
"""Endings of the names of files of tables; text files may have one of a compression behind it."""

_MAX_FIELD = 2**24  # Characters of a cell: more are a quote that is not closed.
_HEAD = 100
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


def kind_of(path: str | os.PathLike[str]) -> str | None:
    """Returns the ending of a file of a table without its compression; None of another file."""
    path = pathlib.PurePath(path)
    suffix = path.suffix.lower()
    if suffix in _COMPRESSED:
        suffix = pathlib.PurePath(path.stem).suffix.lower()
        return suffix if suffix in (*_SEPARATED, *_LINES) else None
    return suffix if suffix in SUFFIXES else None


def parts(spec: str) -> list[str]:
    """Splits the name of a corpus at its commas, unless it is that of a file or folder."""
    if "," not in spec or os.path.exists(os.path.expanduser(spec)):
        return [spec]
    split = [part.strip() for part in spec.split(",")]
    if not all(split):
        raise validation.UsageError(
            f"{spec!r} has a comma with no name of a file before or behind it: leave it out."
        )
    return split


def absolute(spec: str) -> str:
    """Returns a name of files that can be found from every folder; other names as they are.

    Args:
      spec: Name of files, or of something in memory: a word without an ending.
    """
    names = []
    for part in parts(spec):
        path = pathlib.Path(part).expanduser()
        is_path = os.sep in part or "." in part or glob.has_magic(part) or path.exists()
        if not (part and is_path):
            names.append(part)
        elif path.is_absolute() or path.exists() or not glob.has_magic(part):
            names.append(str(path.absolute()))
        else:
            names.append(os.path.join(glob.escape(os.getcwd()), part))
    return ",".join(names)


def find(spec: str) -> list[pathlib.Path]:
    """Finds the files that a name stands for.

    Args:
      spec: Path of a file or folder, a pattern with * or ?, or several of them with commas
        between them. Of a folder, all files of tables in it and below are meant.

    Returns:
      The files; those of a folder or pattern sorted by name. Empty if a part of the name has no
      ending of a table, and is neither a folder nor a pattern.

    Raises:
      UsageError: If a folder or a pattern has no file of a table.
    """
    paths: list[pathlib.Path] = []
    for part in parts(spec):
        path = pathlib.Path(part).expanduser()
        if path.is_dir():
            below = (p.relative_to(path) for p in sorted(path.rglob("*")) if p.is_file())
            files = [path / p for p in below if not any(n[0] in "._" for n in p.parts)]
        elif not path.exists() and glob.has_magic(part):
            files = sorted(map(pathlib.Path, glob.glob(str(path), recursive=True)))
        elif kind_of(path) is None:
            return []
        else:
            paths.append(path)
            continue
        files = [file for file in files if kind_of(file) is not None]
        if not files:
            raise validation.UsageError(
                f"{part} has no file of a table, whose name ends in {', '.join(SUFFIXES)}."
            )
        paths += files
    return paths


def rows(
    path: pathlib.Path, encoding: str | None, choose: Choose
) -> tuple[tables.Columns, Iterator[tables.Row], str]:
    """Opens a file of a table.

    Args:
      path: The file.
      encoding: Encoding of a text file; UTF-8, with or without a byte-order mark, if None.
      choose: Function that chooses the columns. It is called now.

    Returns:
      The columns; the rows, with the numbers of their lines or, of Parquet and Feather, of the
      rows; and what is written before such a number.

    Raises:
      UsageError: If the file cannot be read, also while the rows are.
    """
    kind = kind_of(path)
    if kind in _ARROW:
        read, place = _arrow_rows(path, _ARROW[kind], choose), f"{path}, row "
    elif kind in _LINES:
        read, place = _json_rows(path, encoding, choose), f"{path}:"
    else:
        read, place = _separated_rows(path, encoding, _SEPARATED[kind], choose), f"{path}:"
    guarded = _guarded(path, read)
    columns = next(guarded)
    return columns, guarded, place


def _guarded(path: pathlib.Path, read: Iterator[Any]) -> Iterator[Any]:
    """Passes on what a reader yields, and says of which file an error is."""
    number = 0
    try:
        for item in read:
            yield item
            if isinstance(item, tuple):
                number = item[0]
    except validation.UsageError:
        raise
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
        # Errors of decoding, and of Arrow, are ValueErrors.
        where = f"{path}, after line or row {number}" if number else str(path)
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise validation.UsageError(f"{where}: cannot be read: {reason}.") from error


def open_bytes(path: pathlib.Path) -> IO[bytes]:
    """Opens a file, compressed or not."""
    return _COMPRESSED.get(path.suffix.lower(), open)(path, "rb")


@contextlib.contextmanager
def open_text(path: pathlib.Path, encoding: str | None, newline: str) -> Iterator[IO[str]]:
    """Opens a text file, compressed or not; bytes that cannot be decoded become surrogates."""
    with open_bytes(path) as file, io.BufferedReader(file) as buffered:  # type: ignore
        if encoding is None and buffered.peek(2)[:2] in _UTF16:
            raise validation.UsageError(f"{path} is UTF-16: pass encoding 'utf-16'.")
        with io.TextIOWrapper(
            buffered, encoding or "utf-8-sig", errors="surrogateescape", newline=newline
        ) as text:
            yield text


def is_by_user(path: pathlib.Path) -> bool:
    """Returns whether a file of JSON lines has one line a user: {"user_id", "examples"}."""
    if kind_of(path) != ".jsonl":
        return False
    try:
        with open_text(path, "utf-8", "\n") as lines:
            parsed = itertools.islice(_parsed(path, lines), _HEAD)
            first = next((row for _, row in parsed if isinstance(row, dict)), {})
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError):
        return False  # The reader of tables says what is wrong.
    return "examples" in first


def _separated_rows(
    path: pathlib.Path, encoding: str | None, delimiter: str, choose: Choose
) -> Iterator[Any]:
    with open_text(path, encoding, "") as text:
        first = text.readline()
        if delimiter not in first and delimiter == ",":  # As spreadsheets write it in Europe.
            delimiter = next((d for d in ";\t" if d in first), delimiter)
        before = csv.field_size_limit(_MAX_FIELD)
        try:
            reader = csv.reader(itertools.chain([first], text), delimiter=delimiter, strict=True)
            names = next(reader, None)
            if not names:
                raise validation.UsageError(f"{path} is empty, or its first line is.")
            columns = choose(names)
            yield columns
            user, other, width = names.index(columns.user), names.index(columns.text), len(names)
            line = reader.line_num + 1
            while True:
                try:
                    for cells in reader:
                        if len(cells) == width:
                            yield line, cells[user], cells[other]
                        elif cells:
                            yield line, _RAGGED, None
                        line = reader.line_num + 1
                    break
                except csv.Error as error:
                    if "end of data" in str(error) or "field larger" in str(error):
                        raise validation.UsageError(
                            f"{path}:{line}: a quote is opened and not closed: double the quotes "
                            'that are part of a text ("").'
                        ) from error
                    # Every line that the quotes have swallowed is lost, and is counted.
                    for lost in range(line, reader.line_num + 1):
                        yield lost, _MISQUOTED, None
                    line = reader.line_num + 1
        finally:
            csv.field_size_limit(before)


_RAGGED = tables.Broken("with more or fewer cells than the first line has names")
_MISQUOTED = tables.Broken("with quotes in the wrong place")
_NO_JSON = tables.Broken("that are not JSON")
_NO_OBJECT = tables.Broken("that are no JSON object")


def _json_rows(path: pathlib.Path, encoding: str | None, choose: Choose) -> Iterator[Any]:
    with open_text(path, encoding, "\n") as lines:
        parsed = _parsed(path, lines)
        head = list(itertools.islice(parsed, _HEAD))
        keys = dict.fromkeys(k for _, row in head if isinstance(row, dict) for k in row)
        if not keys:
            raise validation.UsageError(
                f"{path}: none of the first {len(head)} lines is a JSON object."
                if head
                else f"{path} is empty."
            )
        columns = choose(list(keys))
        yield columns
        for number, row in itertools.chain(head, parsed):
            if isinstance(row, dict):
                yield number, row.get(columns.user), row.get(columns.text)
            else:
                yield number, row, None


def _parsed(path: pathlib.Path, lines: IO[str]) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json_text.parse(line)
        except json.JSONDecodeError:
            if number == 1 and line.lstrip()[0] == "[":
                raise _an_array(path) from None
            row = _NO_JSON
        except ValueError:
            row = _NO_JSON
        if isinstance(row, list) and number == 1:
            raise _an_array(path)
        yield number, row if isinstance(row, (dict, tables.Broken)) else _NO_OBJECT


def _an_array(path: pathlib.Path) -> validation.UsageError:
    return validation.UsageError(
        f"{path} is one JSON array: write one object a line (in pandas, "
        "to_json(path, orient='records', lines=True))."
    )


def _arrow_rows(path: pathlib.Path, form: str, choose: Choose) -> Iterator[Any]:
    packages.require(str(path), "pyarrow")
    from pyarrow import dataset

    table = dataset.dataset(path, format=form)
    columns = choose(table.schema.names)
    yield columns
    number = 0
    for batch in table.to_batches(
        columns=[columns.user, columns.text], batch_size=4096, batch_readahead=1, use_threads=False
    ):
        users, texts = batch.column(0).to_pylist(), batch.column(1).to_pylist()
        for user, text in zip(users, texts, strict=True):
            number += 1
            if isinstance(text, bytes):
                text = text.decode("utf-8", "surrogateescape")
            yield number, user, text
