"""Files of tables: which ones a name stands for, and their rows.

CSV, TSV and JSON lines are read by Python itself, line by line: so every row that cannot be
used has a line number, whatever is wrong with it. Parquet and Feather are read with pyarrow.
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
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Any, TypeAlias

from tff_dpftrl import json_text, packages, validation
from tff_dpftrl.data import tables

Choose: TypeAlias = Callable[[Sequence[str]], tables.Columns]
"""Function from the names of all columns to the columns to read."""

_SEPARATED = {".csv": ",", ".tsv": "\t"}
_LINES = (".jsonl", ".ndjson", ".json")
ARROW = {".parquet": "parquet", ".pq": "parquet", ".feather": "arrow", ".arrow": "arrow"}
_ARROW_FILE = b"ARROW1"  # Else it is a stream.
_COMPRESSED = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
ALL = "all"
"""Split by which all files of a folder are read."""

SUFFIXES = (*_SEPARATED, *_LINES, *ARROW)
"""Endings of the names of files of tables; text files may have one of a compression behind it."""

_MAX_FIELD = 2**24  # Characters of a cell, so that a quote that is not closed fits into memory.
_HEAD = 100  # Lines that mostly show all columns.
_WIDE = ("utf-32-le", "utf-32-be", "utf-16-le", "utf-16-be")  # UTF-32's mark begins as UTF-16's.
_SEEN = 4096  # Bytes by which an encoding is recognised.
# Names of splits in the names of files and folders, as Hugging Face's datasets finds them.
_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
# What describes a data set of Hugging Face in its folder.
_NO_TABLES = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")


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
    """Returns a name of files that can be found from every folder; other names as they are."""
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


def find(
    spec: str, *, split: str | None = None, notice: tables.Notice | None = None
) -> list[pathlib.Path]:
    """Finds the files that a name stands for: a file, a folder, a pattern, or several with commas.

    Returns the files of a folder or pattern by name. Returns none if a part has no ending of a
    table, and is neither a folder nor a pattern. `split` is that of a folder whose files are of
    several, or `ALL`; "train" if None. Without `notice`, the files of all splits are found.
    """
    paths: list[pathlib.Path] = []
    for part in parts(spec):
        path = pathlib.Path(part).expanduser()
        if split not in (None, ALL) and not path.is_dir():
            raise validation.UsageError(
                f"split {split!r} is for folders with files of several splits, not for {part!r}: "
                "leave it out."
            )
        if path.is_dir():
            below = (p.relative_to(path) for p in sorted(path.rglob("*")) if p.is_file())
            files = [path / p for p in below if not any(n[0] in "._" for n in p.parts)]
            files = [file for file in files if file.name not in _NO_TABLES and kind_of(file)]
            if notice is not None and split != ALL:
                files = _of_split(path, files, split, notice)
        elif not path.exists() and glob.has_magic(part):
            files = sorted(map(pathlib.Path, glob.glob(str(path), recursive=True)))
            files = [file for file in files if kind_of(file)]
        elif kind_of(path) is None:
            return []
        else:
            paths.append(path)
            continue
        if not files:
            raise validation.UsageError(
                f"{part} has no file of a table, whose name ends in {', '.join(SUFFIXES)}."
            )
        paths += files
    return paths


def _of_split(
    folder: pathlib.Path, files: list[pathlib.Path], split: str | None, notice: tables.Notice
) -> list[pathlib.Path]:
    """Returns the files of one split, or all of them if they are not of several."""
    by_split: dict[str | None, list[pathlib.Path]] = {}
    for file in files:
        by_split.setdefault(_split_of(folder, file), []).append(file)
    of_none = len(by_split.pop(None, ()))
    if split is None and len(by_split) < 2:
        return files
    splits = ", ".join(map(repr, sorted(by_split, key=str)))
    wanted = _SPLITS.get(split or "train", split)
    if wanted not in by_split:
        raise validation.UsageError(
            f"{folder} has no files of the split {wanted!r}; its splits are {splits}. Name one of "
            f"them (split), or {ALL!r} to read all files."
            if by_split
            else f"{folder} has no files of a split: leave split {split!r} out."
        )
    rest = f" Files of no split are left out ({of_none})." if of_none else ""
    notice(
        f"{folder} has files of several splits ({splits}): only those of {wanted!r} are read. "
        f"Name another one (split), or {ALL!r} to read all files.{rest}"
    )
    return by_split[wanted]


def _split_of(folder: pathlib.Path, file: pathlib.Path) -> str | None:
    """Returns the split that the name of a file, or of a folder above it, tells."""
    parts = file.relative_to(folder).parts
    for part in reversed(parts):
        words = re.split(r"[-._ \d]+", part.lower())
        if found := [_SPLITS[word] for word in words if word in _SPLITS]:
            return found[0]
    if len(parts) > 1 and file.with_name("state.json").exists():  # From `save_to_disk`.
        return parts[-2]
    shard = re.match(r"(.+)-\d{5}-of-\d{5}", parts[-1])
    return shard[1] if shard and shard[1] != "data" else None


def rows(
    path: pathlib.Path, encoding: str | None, choose: Choose
) -> tuple[tables.Columns, Iterator[tables.Row], str]:
    """Opens a file of a table, and has `choose` choose its columns.

    Returns the columns; the rows, with the numbers of their lines or, of Parquet and Feather, of
    the rows; and what is written before such a number. `encoding` is UTF-8 by default, with or
    without a byte-order mark.
    """
    kind = kind_of(path)
    if kind in ARROW:
        read, place = _arrow_rows(path, ARROW[kind], choose), f"{path}, row "
    elif kind in _LINES:
        read, place = _json_rows(path, encoding, choose), f"{path}:"
    else:
        read, place = _separated_rows(path, encoding, _SEPARATED[kind], choose), f"{path}:"
    guarded = _guarded(path, read)
    columns = next(guarded)
    return columns, guarded, place


def _guarded(path: pathlib.Path, read: Iterator[Any]) -> Iterator[Any]:
    """Passes on what a reader yields, and adds the file's name to its errors."""
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
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        reason = reason.splitlines()[0]
        raise validation.UsageError(f"{where}: cannot be read: {reason}.") from error


def open_bytes(path: pathlib.Path) -> IO[bytes]:
    """Opens a file, compressed or not."""
    return _COMPRESSED.get(path.suffix.lower(), open)(path, "rb")


@contextlib.contextmanager
def open_text(path: pathlib.Path, encoding: str | None, newline: str) -> Iterator[IO[str]]:
    """Opens a text file, compressed or not; bytes that cannot be decoded become surrogates."""
    with open_bytes(path) as file, io.BufferedReader(file) as buffered:  # type: ignore
        used = encoding or "utf-8"
        head = buffered.peek(_SEEN)[:_SEEN]
        if "\0" in re.split("[\r\n]", head.decode(used, "ignore"))[0]:
            raise validation.UsageError(
                f"{path} has NUL characters in its first line, so that it is not {used}: "
                f"{_encoding_of(head)}."
            )
        mark = "\ufeff".encode(used, "ignore")
        if head.startswith(mark):
            buffered.read(len(mark))
        with io.TextIOWrapper(buffered, used, errors="surrogateescape", newline=newline) as text:
            yield text


def _encoding_of(head: bytes) -> str:
    """Returns the advice for a text whose first line has NUL characters in another encoding."""

    def num_readable(encoding: str) -> int:
        text = head.decode(encoding, "ignore")
        return 0 if "\0" in text else sum(" " <= one < "\x7f" for one in text)

    best = max(_WIDE, key=num_readable)
    if not num_readable(best):
        return "name its encoding, or give a text file"
    return f"pass encoding {best!r}"


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
        unquoted = re.sub('"[^"]*("|$)', "", first)
        if delimiter not in unquoted and delimiter == ",":  # As spreadsheets write it in Europe.
            delimiter = next((d for d in ";\t" if d in unquoted), delimiter)
        before = csv.field_size_limit(_MAX_FIELD)
        try:
            reader = csv.reader(itertools.chain([first], text), delimiter=delimiter, strict=True)
            names, line = [], 1
            user = other = width = 0
            while True:
                try:
                    for cells in reader:
                        if not names:
                            names, width = cells, len(cells)
                            if not names:
                                break
                            columns = choose(names)
                            yield columns
                            user, other = names.index(columns.user), names.index(columns.text)
                        elif len(cells) == width:
                            yield line, cells[user], cells[other]
                        elif cells:
                            yield line, _RAGGED, None
                        line = reader.line_num + 1
                    break
                except csv.Error as error:
                    problem = _problem(str(error), line, reader.line_num)
                    if problem is None and not names:
                        problem = "quotes are in the wrong place in the names of the columns"
                    if problem is not None:
                        raise validation.UsageError(f"{path}:{line}: {problem}.") from error
                    # Every line that the quotes have swallowed is lost, and is counted.
                    reason = _NUL if "NUL" in str(error) else _MISQUOTED  # NUL in Python 3.10.
                    for lost in range(line, reader.line_num + 1):
                        yield lost, reason, None
                    line = reader.line_num + 1
            if not names:
                raise validation.UsageError(f"{path} is empty, or its first line is.")
        finally:
            csv.field_size_limit(before)


def _problem(error: str, first: int, last: int) -> str | None:
    """Returns the problem that ends the reading of a file; None if the error is another one."""
    open_quote = 'a quote is opened and not closed: double the quotes that are part of a text ("")'
    if "field larger" in error:
        long = f"a cell has more than {_MAX_FIELD:,} characters: split it, or write JSON lines"
        return long if first == last else f"{long}; or {open_quote}"
    return open_quote if "end of data" in error else None


_RAGGED = tables.Broken("with more or fewer cells than the first line has names")
_MISQUOTED = tables.Broken("with quotes in the wrong place")
_NUL = tables.Broken("with a NUL character")
_NO_JSON = tables.Broken("that are not JSON")
_NO_OBJECT = tables.Broken("that are no JSON object")


def _json_rows(path: pathlib.Path, encoding: str | None, choose: Choose) -> Iterator[Any]:
    with open_text(path, encoding, "\n") as lines:
        parsed = _parsed(path, lines)
        keys: dict[str, None] = {}
        while True:
            lines_read = [row for _, row in itertools.islice(parsed, _HEAD)]
            keys |= dict.fromkeys(k for row in lines_read if isinstance(row, dict) for k in row)
            if not keys:
                raise validation.UsageError(
                    f"{path}: none of the first {len(lines_read)} lines is a JSON object."
                    if lines_read
                    else f"{path} is empty."
                )
            try:
                columns = choose(list(keys))
                break
            except tables.NoColumnError:
                if len(lines_read) < _HEAD:  # A column may begin late, and the file ends here.
                    raise
    yield columns
    with open_text(path, encoding, "\n") as lines:
        for number, row in _parsed(path, lines):
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
    import pyarrow
    from pyarrow import dataset, ipc

    with path.open("rb") as file:
        try:
            if form == "parquet":
                table = dataset.dataset(path, format=form)
                columns = choose(table.schema.names)
                batches = table.to_batches(
                    columns=[columns.user, columns.text],
                    batch_size=4096,
                    batch_readahead=1,
                    use_threads=False,
                )
            else:
                is_stream = file.read(len(_ARROW_FILE)) != _ARROW_FILE  # As `save_to_disk` writes.
                file.seek(0)
                reader = ipc.open_stream(file) if is_stream else ipc.open_file(file)
                columns = choose(reader.schema.names)
                batches = (
                    reader if is_stream else map(reader.get_batch, range(reader.num_record_batches))
                )
                batches = _validated(batches)
            yield columns
            for number, (user, text) in enumerate(tables.of_arrow(batches, columns), start=1):
                yield number, user, text
        except (pyarrow.ArrowException, ArithmeticError, LookupError) as error:
            # Times out of range, unknown time zones, and errors of Arrow that are no ValueErrors.
            raise ValueError(str(error)) from error
        except MemoryError as error:
            raise ValueError("a batch of its rows does not fit into memory") from error


def _validated(batches: Iterable[Any]) -> Iterator[Any]:
    """Checks record batches of a file: Arrow does not, and damaged ones crash it."""
    for batch in batches:
        batch.validate(full=True)
        yield batch
