"""Changes to valid inputs, by what they are made of: bytes, protobuf, JSON, TOML, zip, SQLite, PEM.

Each function takes a valid input, another one of its kind, and a generator of random numbers,
and returns what a damaged disk or a malicious writer might have left. Most changes keep to the
structure, so that they reach the code behind the parser.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import random
import re
import sqlite3
import struct
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Callable
from typing import Any, TypeAlias

Mutation: TypeAlias = Callable[[bytes, bytes, random.Random], bytes]

_VARINTS = (
    *(b"\0", b"\x01", b"\x7f", b"\x80\x01", b"\xff\xff\x03", b"\xff\xff\xff\xff\x07"),
    *(b"\xff\xff\xff\xff\x0f", b"\xff" * 9 + b"\x01", b"\xff" * 10, b"\x80" * 12),
)
# As text of JSON: among them what Python's parser takes and the standard does not know.
_JSON_VALUES = (
    *("null", "true", "0", "-1", "1", "0.5", "-0.0", "1e999", "-1e999", "NaN", "1e-400"),
    *(str(2**31), str(2**63), str(-(2**63) - 1), "1" + "0" * 400, "9" * 5000),
    *('""', '"\\ud800"', '"\\u0000"', '"\\n"', '"../../evil"', '"' + "x" * 5000 + '"'),
    *("[]", "{}", "[[]]", '{"":null}', "[" * 90 + "]" * 90, "[" * 600 + "]" * 600),
    "[" * 100_000 + "]" * 100_000,
)
_CELLS = (
    *('"', '""', ",", '","', ";", "\t", "\n", "\r", "\0", "\ufeff", " ", "", "\u2028", "ß", "\x1c"),
    *("7", "7.0", "1e+16", "9007199254740993.0", "nan", "-0", "user", "text", "x" * 5000),
    *("{", "}", "[", "]", "null", '{"user": 1.0, "text": "x"}\n', "'", "\\", "\\u0000"),
)
_TOML_VALUES = (
    *("true", "0", "-1", "1", "nan", "inf", "-inf", "1e999", "0.5", '""', '"\\u0000"'),
    *(str(2**63), "9" * 400, "9" * 5000, "1979-05-27", "[]", "[1, 2]", "{}", "{ a = 1 }"),
    *("'x'", '"' + "x" * 5000 + '"', "[" * 600 + "]" * 600, "[" * 50_000 + "]" * 50_000),
)
_SQL_VALUES = (
    *("NULL", "-1", "0", "1", "9223372036854775807", "1e308", "-1e999", "'text'", "x'00ff'"),
    *("''", "zeroblob(100000)", "'{}'", "'[1]'", "'{\"a\": 1'", "'NaN'"),
)


def scattered(content: bytes, other: bytes, drawn: random.Random) -> bytes:
    """A few changes to bytes anywhere."""
    changed = bytearray(content)
    for _ in range(drawn.choice((1, 1, 1, 2, 4))):
        at = drawn.randrange(len(changed) + 1)
        end = min(len(changed), at + drawn.choice((1, 2, 4, 8, 64)))
        match drawn.randrange(9):
            case 0 if at < len(changed):
                changed[at] ^= 1 << drawn.randrange(8)
            case 1 if at < len(changed):
                changed[at] = drawn.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 2:
                del changed[at:]
            case 3:
                changed[at:at] = drawn.randbytes(drawn.choice((1, 2, 8, 100)))
            case 4:
                del changed[at:end]
            case 5:
                changed[at:at] = changed[at:end]
            case 6:
                changed[at:] = other[drawn.randrange(len(other) + 1) :]
            case 7:
                changed[at:end] = drawn.choice(_VARINTS)
            case _:
                changed[at:end] = bytes(end - at)
    return bytes(changed)


# Protobuf.


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _fields(content: bytes) -> list[tuple[int, bytes]] | None:
    """Tags and what follows them, lengths left out; None if it is no message."""
    found, at = [], 0

    def read() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = content[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value
            if shift > 63:
                raise IndexError

    try:
        while at < len(content):
            tag = read()
            begin = at
            match tag & 7:
                case 0:
                    read()
                case 1:
                    at += 8
                case 2:
                    length = read()
                    begin = at
                    at += length
                case 5:
                    at += 4
                case _:
                    return None
            if not tag >> 3 or at > len(content):
                return None
            found.append((tag, content[begin:at]))
    except IndexError:
        return None
    return found


def _field(tag: int, content: bytes, length: bytes | None = None) -> bytes:
    if tag & 7 == 2:
        return _varint(tag) + (_varint(len(content)) if length is None else length) + content
    return _varint(tag) + content


def protobuf(content: bytes, other: bytes, drawn: random.Random) -> bytes:
    """Changes to fields of a message, at any depth."""
    fields = _fields(content)
    if not fields or drawn.random() < 0.15:
        return scattered(content, other, drawn)
    parts = [_field(*field) for field in fields]
    at = drawn.randrange(len(fields))
    tag, value = fields[at]
    inner = value if tag & 7 == 2 else b""
    if inner and drawn.random() < 0.6:
        parts[at] = _field(tag, protobuf(inner, other, drawn))
        return b"".join(parts)
    others = _fields(other) or fields
    match drawn.randrange(11):
        case 0:  # The last one counts, or they are merged, or there are two.
            parts.insert(drawn.randrange(len(parts) + 1), _field(*drawn.choice(fields)))
        case 1:
            del parts[at]
        case 2:
            parts.insert(at, _field(*drawn.choice(others)))
        case 3:
            parts[at] = _varint(tag & ~7 | drawn.choice((0, 1, 2, 5, 3, 4))) + value
        case 4:
            parts[at] = _field(
                drawn.choice((1, 2, 3, 7, 15, 1000, 2**29 - 1)) << 3 | tag & 7, value
            )
        case 5 if tag & 7 == 2:
            parts[at] = _field(tag, value, drawn.choice(_VARINTS))
        case 6:
            parts[at] = _varint(tag & ~7) + drawn.choice(_VARINTS)
        case 7:
            parts[at] = parts[at] * drawn.choice((2, 3, 100))
        case 8:  # Messages in messages in messages.
            nested = value
            for _ in range(drawn.choice((1, 30, 101, 400))):
                nested = _field(tag & ~7 | 2, nested)
            parts[at] = nested
        case 9:
            parts[at] = _field(tag & ~7 | 2, drawn.choice((b"", b"\xff\xfe", drawn.randbytes(40))))
        case _:
            parts[at] = _field(tag, scattered(value, other, drawn))
    return b"".join(parts)


# Text.


def json_text(content: bytes, other: bytes, drawn: random.Random) -> bytes:
    """Changes to values and keys of a JSON document."""
    try:
        document = json.loads(content)
    except ValueError:
        return scattered(content, other, drawn)
    if drawn.random() < 0.1:
        return scattered(content, other, drawn)
    places = list(_places(document))
    raw: dict[str, str] = {}

    def text(value: str) -> str:
        """Stands for a text of JSON that `json` would not write."""
        raw[f"raw {len(raw)}"] = value
        return f"raw {len(raw) - 1}"

    for _ in range(drawn.choice((1, 1, 2, 3))):
        if not places:
            return drawn.choice(_JSON_VALUES).encode()
        where, key = drawn.choice(places)
        if (
            isinstance(where, list)
            and not key < len(where)
            or (isinstance(where, dict) and key not in where)
        ):
            continue
        match drawn.randrange(8):
            case 0:
                del where[key]
            case 1 if isinstance(where, dict):
                where[drawn.choice(("", "x", key + " ", key.upper(), "\ud800"))] = where.pop(key)
            case 2 if isinstance(where, dict):  # Twice, and the second one counts.
                where[text(f'{json.dumps(key)}: {drawn.choice(_JSON_VALUES)}, "{key}"')] = where[
                    key
                ]
            case 3 if isinstance(where, list):
                where[key:key] = [where[key]] * drawn.choice((1, 100))
            case 4:
                there, other_key = drawn.choice(places)
                with contextlib.suppress(KeyError, IndexError):
                    where[key] = json.loads(json.dumps(there[other_key]))
            case 5 if isinstance(where[key], (int, float)):
                where[key] = where[key] * drawn.choice((-1, 2, 10**6)) + drawn.choice((0, 1))
            case _:
                where[key] = text(drawn.choice(_JSON_VALUES))
    written = json.dumps(document)
    for name, value in raw.items():
        written = written.replace(f'"{name}"', value)
    return written.encode()


def _places(value: Any):
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


def json_lines(content: bytes, other: bytes, drawn: random.Random) -> bytes:
    """Changes to a line of JSON lines, or to the lines."""
    lines = content.splitlines() or [b""]
    at = drawn.randrange(len(lines))
    match drawn.randrange(6):
        case 0:
            del lines[at]
        case 1:
            lines.insert(at, drawn.choice(lines))
        case 2:
            return scattered(content, other, drawn)
        case _:
            lines[at] = json_text(lines[at], other, drawn)
    return b"\n".join(lines)


def toml_text(content: bytes, other: bytes, drawn: random.Random) -> bytes:
    """Changes to lines and values of a TOML document."""
    lines = content.decode().splitlines()
    for _ in range(drawn.choice((1, 1, 2))):
        at = drawn.randrange(len(lines))
        name = lines[at].partition("=")[0]
        match drawn.randrange(7):
            case 0:
                return scattered(content, other, drawn)
            case 1:
                lines.insert(at, drawn.choice(lines))
            case 2:
                lines[at] = drawn.choice(("[a]", "[[a]]", "[a.b]", "=", name + "= {}", "\0"))
            case 3:
                lines[at] = name.strip() + "x = 1"
            case _:
                lines[at] = f"{name}= {drawn.choice(_TOML_VALUES)}"
    return "\n".join(lines).encode()


def lines_of_text(content: bytes, other: bytes, drawn: random.Random) -> bytes:
    """Changes to lines and cells of a table, or of a list of words."""
    lines = content.decode().splitlines() or [""]
    at = drawn.randrange(len(lines))
    cells = lines[at].split(",")
    match drawn.randrange(6):
        case 0:
            return scattered(content, other, drawn)
        case 1:
            del lines[at]
        case 2:
            lines.insert(at, drawn.choice(lines))
        case 3:
            del cells[drawn.randrange(len(cells))]
            lines[at] = ",".join(cells)
        case _:
            values = ("", "x", "-1", "nan", "1e999", "²", "9" * 5000, '"', "\0", "x" * 200_000)
            cells[drawn.randrange(len(cells))] = drawn.choice(values)
            lines[at] = ",".join(cells)
    return "\n".join(lines).encode()


def table(content: bytes, other: bytes, drawn: random.Random) -> bytes:
    """Changes to lines and cells of a table, to what separates them, and to the encoding."""
    for _ in range(drawn.choice((1, 1, 2, 3))):
        text = content.decode("utf-8", "surrogateescape")
        lines = text.splitlines(keepends=True) or [""]
        at = drawn.randrange(len(lines))
        match drawn.randrange(9):
            case 0:
                content = scattered(content, other, drawn)
                continue
            case 1:
                content = json_lines(content, other, drawn)
                continue
            case 2:  # Two files that were joined.
                lines[at:at] = drawn.choice(([lines[0]], other.decode().splitlines(True)))
            case 3:
                lines = [text.replace(",", drawn.choice(";\t|\n\r\0"))]
            case 4:
                encodings = ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "latin-1")
                return text.encode(drawn.choice(encodings), "ignore")
            case _:
                place = drawn.randrange(len(lines[at]) + 1)
                end = place + drawn.choice((0, 0, 1, 3, 100))
                lines[at] = lines[at][:place] + drawn.choice(_CELLS) + lines[at][end:]
        content = "".join(lines).encode("utf-8", "surrogateescape")
    return content


def pem(content: bytes, other: bytes, drawn: random.Random) -> bytes:
    """Changes to what a PEM block encodes."""
    found = re.search(rb"(-----BEGIN [^-]+-----\n)(.*?)(-----END)", content, re.DOTALL)
    if found is None or drawn.random() < 0.3:
        return scattered(content, other, drawn)
    inside = scattered(base64.b64decode(found[2]), other, drawn)
    return content[: found.start(2)] + base64.encodebytes(inside) + content[found.start(3) :]


# Archives.


def safetensors(content: bytes, other: bytes, drawn: random.Random) -> bytes:
    """Changes to the header of a file of tensors, which is JSON, or to any bytes."""
    length = int.from_bytes(content[:8], "little")
    if drawn.random() < 0.3:
        return scattered(content, other, drawn)
    header = json_text(content[8 : 8 + length], other, drawn)
    stated = drawn.choice((len(header),) * 8 + (0, len(header) - 1, 2**40, 2**64 - 1))
    return stated.to_bytes(8, "little") + header + content[8 + length :]


_NPY = b"\x93NUMPY\x01\x00"


def _npy(header: str, content: bytes) -> bytes:
    encoded = header.encode() + b"\n"
    return _NPY + struct.pack("<H", len(encoded)) + encoded + content


_HEADERS = (
    "{'descr': '|O', 'fortran_order': False, 'shape': (1,), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (-1,), }",
    "{'descr': '<f4', 'fortran_order': True, 'shape': (2, 1), }",
    "{'descr': '<U1000000000', 'fortran_order': False, 'shape': (), }",
    "{'descr': [('a', '<f4'), ('a', '<f4')], 'fortran_order': False, 'shape': (1,), }",
    "{'descr': 'no dtype', 'fortran_order': 0, 'shape': 1, }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (" + "9" * 5000 + ",), }",
    "(" * 5000,
    "{'descr': __import__('os').system('true'), 'fortran_order': False, 'shape': (1,), }",
)
# Pickled: an object that creates a file when it is read.
_PICKLE = b"cos\nsystem\n(S'touch unpickled'\ntR."


def archive(content: bytes, other: bytes, drawn: random.Random) -> bytes:
    """Changes to entries of an archive of arrays, and to what it says of them."""
    if drawn.random() < 0.3:
        return scattered(content, other, drawn)
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as opened:
            entries = [(name, opened.read(name)) for name in opened.namelist()]
    except (ValueError, OSError, zipfile.BadZipFile):
        return scattered(content, other, drawn)
    at = drawn.randrange(len(entries))
    name, data = entries[at]
    method = zipfile.ZIP_STORED
    match drawn.randrange(9):
        case 0:
            entries[at] = drawn.choice(("../../evil.npy", "/evil.npy", "", "a/b", "\0")), data
        case 1:
            del entries[at]
        case 2:
            entries.append((name, drawn.choice(entries)[1]))
        case 3:
            entries[at] = name, _npy(drawn.choice(_HEADERS), drawn.choice((_PICKLE, bytes(8))))
        case 4:
            entries[at] = name, scattered(data, other, drawn)
        case 5:
            method = drawn.choice((zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
        case 6 if drawn.random() < 0.1:  # A bomb of 64 MB.
            method = zipfile.ZIP_DEFLATED
            shape = "{'descr': '<f4', 'fortran_order': False, 'shape': (16000000,), }"
            entries[at] = name, _npy(shape, bytes(64_000_000))
        case _:
            return _other_directory(content, drawn)
    buffer = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w", method, compresslevel=1) as made:
        warnings.simplefilter("ignore")  # Two entries of one name.
        for entry, written in entries:
            made.writestr(zipfile.ZipInfo(entry or "x"), written, method)
    return buffer.getvalue()


def _other_directory(content: bytes, drawn: random.Random) -> bytes:
    """Another flag, method, size or place in what the central directory says of an entry."""
    begins = [found.start() for found in re.finditer(b"PK\x01\x02", content)]
    if not begins:
        return content
    at = drawn.choice(begins) + drawn.choice((6, 8, 10, 16, 20, 24, 28, 30, 42))
    value = drawn.choice((b"\0\0", b"\1\0", b"\x08\0", b"\x63\0", b"\xff\xff\xff\xff", b"\0\0\0\0"))
    return content[:at] + value + content[at + len(value) :]


def compressed(mutate: Mutation) -> Mutation:
    """Changes to what is compressed by gzip, or to how it is."""

    def changed(content: bytes, other: bytes, drawn: random.Random) -> bytes:
        if drawn.random() < 0.5:
            return scattered(content, other, drawn)
        inside, of_other = (zlib.decompress(one, 31) for one in (content, other))
        packer = zlib.compressobj(1, wbits=31)
        return packer.compress(mutate(inside, of_other, drawn)) + packer.flush()

    return changed


# SQLite.


def sqlite(content: bytes, other: bytes, drawn: random.Random) -> bytes:
    """Changes to a database: its header, its pages, its tables, its rows."""
    match drawn.randrange(5):
        case 0:
            at = drawn.choice(
                (16, 18, 19, 20, 21, 24, 28, 36, 40, 44, 52, 56, 60, 68, 96, 100, 103)
            )
            changed = bytearray(content)
            changed[at : at + 2] = drawn.randbytes(2)
            return bytes(changed)
        case 1:
            return scattered(content, other, drawn)
        case 2:  # Pages of two databases.
            changed = bytearray(content)
            page = 4096 * drawn.randrange(max(1, len(content) // 4096))
            changed[page : page + 4096] = other[:4096] if drawn.random() < 0.3 else other[-4096:]
            return bytes(changed)
        case _:
            return _other_rows(content, drawn)


def _other_rows(content: bytes, drawn: random.Random) -> bytes:
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        with contextlib.closing(sqlite3.connect(file.name, isolation_level=None)) as connection:
            for _ in range(drawn.choice((1, 1, 2))):
                with contextlib.suppress(sqlite3.Error):
                    connection.execute("PRAGMA journal_mode = MEMORY")
                    connection.execute(_statement(connection, drawn))
        with open(file.name, "rb") as changed:
            return changed.read()


def _statement(connection: sqlite3.Connection, drawn: random.Random) -> str:
    for (trigger,) in connection.execute(
        "SELECT name FROM sqlite_master WHERE type = 'trigger'"
    ).fetchall():
        connection.execute(f'DROP TRIGGER "{trigger}"')
    tables = connection.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY 1"
    ).fetchall()
    if not tables:
        return "SELECT 1"
    [table] = drawn.choice(tables)
    columns = [row[1] for row in connection.execute(f'PRAGMA table_info("{table}")')]
    column, value = drawn.choice(columns), drawn.choice(_SQL_VALUES)
    return drawn.choice(
        (
            f'DROP TABLE "{table}"',
            f'DELETE FROM "{table}"',
            f'ALTER TABLE "{table}" RENAME COLUMN "{column}" TO other',
            f'ALTER TABLE "{table}" ADD COLUMN other',
            f'INSERT INTO "{table}" SELECT * FROM "{table}"',
            f'CREATE TRIGGER t AFTER INSERT ON "{table}" BEGIN SELECT RAISE(ABORT, "no"); END',
            f"PRAGMA user_version = {drawn.choice((0, -1, 7))}",
            f"PRAGMA application_id = {drawn.choice((0, 7))}",
            *[f'UPDATE "{table}" SET "{column}" = {value}'] * 8,
            *[f'INSERT INTO "{table}" ("{column}") VALUES ({value})'] * 2,
        )
    )
