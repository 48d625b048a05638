"""The corpus of a name or path of the command line or a config, or of rows in memory."""

from __future__ import annotations

import contextlib
import dataclasses
import filecmp
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from tff_dpftrl import validation
from tff_dpftrl.data import (
    docstrings,
    grouping,
    jsonl,
    owners,
    sqlite,
    table_files,
    tables,
    user_ids,
    user_text,
)

_SQLITE = (".sqlite", ".sqlite3", ".db")
_DEFAULTS = tables.TableOptions()


def load_user_text(
    spec: str,
    *,
    pretokenized: bool = False,
    sqlite_text_feature: str = "tokens",
    sqlite_split: str | None = None,
    table: tables.TableOptions = _DEFAULTS,
    cache: grouping.Cache = grouping.TEMPORARY,
    progress: docstrings.Progress | None = None,
    notice: tables.Notice = tables.to_stderr,
    rows_per_owner: int | None = None,
) -> user_text.UserText:
    """Returns the corpus that `spec` names, with at least two users.

    `spec` is "docs" for the docstrings of the installed packages; a `.sqlite` file in TFF's layout;
    or files of tables (`table_files.find`). A `.jsonl` file may also have one line a user
    (`jsonl.read`). Cached texts of a table are used as long as its options and the names, sizes and
    times of its files are the same. `rows_per_owner` is the largest number of rows of a user where
    the column of users may have lists of users, who all own the row (`owners.select`). Each
    selected row is among the texts of the first of its owners.
    """
    is_sqlite = spec.endswith(_SQLITE)
    if rows_per_owner is not None and (is_sqlite or spec == "docs"):
        raise validation.UsageError(_ONLY_TABLES.format(spec))
    if not is_sqlite:
        for name, given in (
            ("sqlite_text_feature", sqlite_text_feature != "tokens"),
            ("sqlite_split", sqlite_split is not None),
        ):
            if given:
                raise validation.UsageError(
                    f"{name} applies to SQLite files only, not to {spec!r}."
                )
    if spec == "docs":
        if pretokenized:
            raise validation.UsageError(
                "pretokenized applies to files only; 'docs' is prose: leave it out."
            )
        _refuse_given(table, spec)
        return docstrings.read(progress=progress)
    if is_sqlite:
        _refuse_given(table, spec)
        return sqlite.read(
            spec,
            split_name=sqlite_split,
            text_feature=sqlite_text_feature,
            is_tokenized=pretokenized,
        )
    files = _table_files(spec, table, notice)
    is_by_user = len(files) == 1 and table_files.is_by_user(files[0])
    if is_by_user:
        others = dataclasses.replace(table, split=None)  # By which the file was found.
        _refuse_given(others, f"{spec}, which has one line a user")
        if rows_per_owner is not None:
            raise validation.UsageError(_ONLY_TABLES.format(spec))
    fingerprint = _fingerprint(files, table, rows_per_owner)
    if fingerprint and (kept := cache.read(spec, fingerprint, pretokenized)) is not None:
        notice(f"{spec}: {len(kept)} users, as read before and kept in {cache.path}.")
        return user_text.require_several_users(kept)
    if is_by_user:
        return jsonl.read(files[0], is_tokenized=pretokenized, cache=cache, fingerprint=fingerprint)
    columns = _columns(files, table)
    if not (table.user_column and table.text_column):
        notice(
            f"{spec}: users are in the column {columns.user!r}, texts in {columns.text!r} (by "
            "their names; user_column and text_column say otherwise)."
        )

    def parts() -> Iterator[tuple[Iterator[tables.Row], str]]:
        for file in files:
            _, rows, place = table_files.rows(file, table.encoding, _same(columns, file))
            yield rows, place

    selection = None
    if rows_per_owner is not None:
        selection = owners.select(
            (
                user_ids.at(place, number, user, owners.of_cell)
                for rows, place in parts()
                for number, user, _ in rows
            ),
            rows_per_owner,
        )
    check = tables.RowCheck(spec, table, notice, columns, selection)

    def groups() -> Iterator[grouping.Group]:
        for rows, place in parts():
            yield from check.usable(rows, place)

    corpus = grouping.group(
        spec,
        groups(),
        user_unit=_unit(columns.user_unit, rows_per_owner),
        is_tokenized=pretokenized,
        finish=check.finish,
        cache=cache,
        fingerprint=fingerprint,
        co_owners=check.co_owners,
    )
    return user_text.require_several_users(corpus)


def of_rows(
    rows: Any,
    name: str,
    *,
    pretokenized: bool = False,
    table: tables.TableOptions = _DEFAULTS,
    cache: grouping.Cache = grouping.TEMPORARY,
    notice: tables.Notice = tables.to_stderr,
    rows_per_owner: int | None = None,
) -> user_text.UserText:
    """Returns the corpus of a table in memory, checked as one that is read from a file.

    `rows_per_owner` is the largest number of rows of a user where rows may have lists of users.
    """
    columns, numbered = tables.of_memory(rows, table)
    selection = None
    if rows_per_owner is not None:
        kept = list(numbered)
        named = (user_ids.at("row ", number, user, owners.of_cell) for number, user, _ in kept)
        selection = owners.select(named, rows_per_owner)
        numbered = iter(kept)
    check = tables.RowCheck(name, table, notice, columns, selection)
    corpus = grouping.group(
        name,
        check.usable(numbered, "row "),
        user_unit=_unit(
            "one user of the rows" if columns is None else columns.user_unit, rows_per_owner
        ),
        is_tokenized=pretokenized,
        finish=check.finish,
        cache=cache,
        co_owners=check.co_owners,
    )
    return user_text.require_several_users(corpus)


_ONLY_TABLES = "rows_per_owner applies to tables with a text in each row, not to {}: leave it out."


def _unit(user_unit: str, rows_per_owner: int | None) -> str:
    """Returns the description of one user, for the privacy statement."""
    if rows_per_owner is None:
        return user_unit
    return (
        f"{user_unit}, or one name in a list there, with all rows that name it: at most "
        f"{rows_per_owner} of them are used"
    )


def problem_of(spec: str, table: tables.TableOptions = _DEFAULTS) -> str | None:
    """Returns what is wrong with the name of a corpus or its columns; None if nothing is.

    Only the beginning of each file is read.
    """
    if spec == "docs":
        return None
    try:
        if spec.endswith(_SQLITE):
            return None if os.path.isfile(spec) else f"{spec}: cannot be read: no such file."
        files = _table_files(spec, table, _ignore)
        if not (len(files) == 1 and table_files.is_by_user(files[0])):
            _columns(files, table)
    except ValueError as error:
        return str(error)
    return None


def needs_arrow(spec: str) -> bool:
    """Returns whether a name of a corpus stands for files that PyArrow reads."""
    try:
        files = table_files.find(spec)
    except ValueError:  # Whoever reads them says what is wrong.
        return False
    return any(table_files.kind_of(file) in table_files.ARROW for file in files)


def is_on_disk(spec: str) -> bool:
    """Returns whether all files that a name of a corpus stands for exist."""
    try:
        files = table_files.find(spec)
    except ValueError:
        return False
    return all(map(os.path.isfile, files or [spec]))


def is_in_memory(spec: str) -> bool:
    """Returns whether a name in the config of a run is that of text in memory, not a path."""
    return spec != "docs" and not os.path.isabs(table_files.absolute(spec))


def _fingerprint(files: list[Any], table: tables.TableOptions, rows_per_owner: int | None) -> str:
    """Returns what changes when files or options of a table do; "" if a file is missing."""
    try:
        stats = [(os.path.abspath(file), os.stat(file)) for file in files]
    except OSError:
        return ""
    stamps = [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]
    options = [getattr(table, field.name) for field in dataclasses.fields(tables.TableOptions)]
    owned = [] if rows_per_owner is None else [rows_per_owner]
    return json.dumps([stamps, options, *owned])


def _table_files(spec: str, table: tables.TableOptions, notice: tables.Notice) -> list[Any]:
    files = table_files.find(spec, split=table.split, notice=notice) if spec else []
    if not files:
        raise validation.UsageError(
            "data must be 'docs' or files, a folder or a pattern of files that end in "
            f"{', '.join(table_files.SUFFIXES)} or .sqlite (text may be compressed: .csv.gz), got "
            f"{spec!r}."
        )
    return files


def _columns(files: list[Any], table: tables.TableOptions) -> tables.Columns:
    """Chooses the columns by the first file, and checks that the others have them, too."""
    columns = None
    for file in files:
        choose = (
            (lambda names, file=file: tables.Columns.choose(names, str(file), table))
            if columns is None
            else _same(columns, file)
        )
        columns, rows, _ = table_files.rows(file, table.encoding, choose)
        rows.close()
    assert columns is not None
    return columns


def _same(columns: tables.Columns, file: Any) -> Any:
    given = tables.TableOptions(user_column=columns.user, text_column=columns.text)
    return lambda names: tables.Columns.choose(names, str(file), given)


def _refuse_given(table: tables.TableOptions, spec: str) -> None:
    if table.given:
        raise validation.UsageError(
            f"{table.given[0]} applies to tables with a text in each row, not to {spec}: leave it "
            "out."
        )


def are_same_file(one: str, other: str) -> bool:
    """Returns whether two corpora are the same by name, or as files and their copies."""
    if one == other:
        return True
    if not (is_on_disk(one) and is_on_disk(other)):
        return False
    pairs = table_files.find(one) or [one], table_files.find(other) or [other]
    return len(pairs[0]) == len(pairs[1]) and all(
        filecmp.cmp(a, b, shallow=False) for a, b in zip(*pairs, strict=True)
    )


def share_texts(
    one: str,
    other: str,
    table: tables.TableOptions = _DEFAULTS,
    *,
    one_table: tables.TableOptions = _DEFAULTS,
    users: Sequence[user_text.UserText] = (),
) -> bool:
    """Returns whether two corpora are the same, or users of the second have texts in the first.

    Names, bytes, or else the texts of files that can be read as they are, are compared
    (`user_text.shared_users`). Texts that were changed are not recognised. `users` are users of the
    second corpus that are read already.
    """
    if are_same_file(one, other):
        return True
    if not (is_on_disk(one) and (users or is_on_disk(other))):
        return False
    try:
        public = load_user_text(one, table=one_table, notice=_ignore)
    except ValueError:  # Who uses the file says what is wrong with it.
        return False
    return any(user_text.shared_users(public, part) for part in parts_of(other, table, users))


def parts_of(
    spec: str, table: tables.TableOptions, users: Sequence[user_text.UserText]
) -> Iterator[user_text.UserText]:
    """Yields the parts of a corpus that are known, for a comparison.

    A name that is no file, and a file that cannot be read, have no parts.
    """
    yield from users
    if is_on_disk(spec):
        with contextlib.suppress(ValueError):  # Who uses the file says what is wrong with it.
            yield load_user_text(spec, table=table, notice=_ignore)


def _ignore(line: str) -> None:
    """Drops a notice, which is given when the corpus is read for a run."""
