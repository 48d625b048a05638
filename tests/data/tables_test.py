"""Tests of tff_dpftrl.data.tables and of how tff_dpftrl.data.sources reads them."""

import bz2
import csv
import gzip
import io
import json
import lzma
import shutil
import struct
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import feather, parquet

from tff_dpftrl import validation
from tff_dpftrl.data import grouping, sources, table_files, tables, user_text, vocabulary

_ROWS = [
    ("ann", "hello, world"),
    ("bob", 'she said "no"'),
    ("ann", "a line\nand another"),
    ("çem", "für Ünal"),
    ("bob", "hello, world"),
]
_USERS = {
    "ann": ["hello, world", "a line\nand another"],
    "bob": ['she said "no"', "hello, world"],
    "çem": ["für Ünal"],
}


def _separated(rows=_ROWS, names=("id", "user", "text"), delimiter=","):
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=delimiter)
    writer.writerow(names)
    writer.writerows([i, *row] for i, row in enumerate(rows))
    return text.getvalue()


def _lines(rows=_ROWS, names=("user", "text")):
    return "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows)


def _arrow(rows=_ROWS):
    return pa.table({"user": [user for user, _ in rows], "text": [text for _, text in rows]})


def _read(path, content=None, **options):
    """Returns the corpus of a file, and the lines that were said of it."""
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    said = []
    table = tables.TableOptions(**options)
    return sources.load_user_text(str(path), table=table, notice=said.append), said


def _texts(corpus):
    return {user: corpus.examples(user) for user in corpus.user_ids}


_SEPARATED = _separated().encode()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.csv", _SEPARATED),
        ("t.csv", _separated().replace("\r\n", "\n").encode()),
        ("byte_order_mark.csv", b"\xef\xbb\xbf" + _SEPARATED),
        ("semicolons.csv", _separated(delimiter=";").encode()),
        (
            "comma_in_a_name.csv",
            _separated(delimiter=";").replace("id", '"id, of the ""row"""', 1).encode(),
        ),
        ("t.tsv", _separated(delimiter="\t").encode()),
        ("t.jsonl", _lines().encode()),
        ("byte_order_mark.ndjson", b"\xef\xbb\xbf" + _lines().encode()),
        ("T.CSV.GZ", gzip.compress(_SEPARATED, mtime=0)),
        ("t.csv.bz2", bz2.compress(_SEPARATED)),
        ("t.json.xz", lzma.compress(_lines().encode())),
    ],
)
def test_text_files_are_read(tmp_path, name, content):
    corpus, said = _read(tmp_path / name, content)
    assert _texts(corpus) == _USERS
    assert list(corpus.user_ids) == list(_USERS)
    assert "users are in the column 'user', texts in 'text'" in said[0]
    assert said[-1].endswith("5 texts of 3 users were read.")
    assert len(said) == 2


def _write_stream(path, table):
    """Writes Arrow's stream format, as `save_to_disk` of Hugging Face's datasets does."""
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)


def test_parquet_and_feather_are_read(tmp_path):
    parquet.write_table(_arrow(), tmp_path / "t.parquet", row_group_size=2)
    feather.write_feather(_arrow(), tmp_path / "t.feather")
    _write_stream(tmp_path / "t.arrow", _arrow())
    for name in ("t.parquet", "t.feather", "t.arrow"):
        assert _texts(_read(tmp_path / name)[0]) == _USERS


def test_several_files_are_one_table(tmp_path, monkeypatch):
    folder = tmp_path / "parts" / "of"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    (folder / "1.csv").write_text(_separated(_ROWS[:2]))
    (folder / "2.jsonl").write_text(_lines(_ROWS[2:4]))
    parquet.write_table(_arrow(_ROWS[4:]), folder / "3.parquet")
    for other in ("_SUCCESS", ".1.csv.crc", "notes.txt", "._1.csv"):
        (folder / other).write_text("nothing")
    names = ["parts", "parts/*/[123].*", "parts/of/1.csv, parts/of/2.jsonl,parts/of/3.parquet"]
    for name in names:
        assert _texts(sources.load_user_text(name, notice=lambda line: None)) == _USERS
    (tmp_path / "a,b.csv").write_text(_separated())
    assert _texts(_read(tmp_path / "a,b.csv")[0]) == _USERS
    (folder / "4.csv").write_text(_separated(names=("id", "who", "text")))
    with pytest.raises(ValueError, match=r"4.csv has no column 'user' .* 'id', 'who', 'text'"):
        sources.load_user_text("parts")
    with pytest.raises(ValueError, match="nothing/[*] has no file of a table"):
        sources.load_user_text("nothing/*")


class _Dataset:
    """What is used of a `datasets.Dataset`."""

    column_names = ("text", "user")

    def iter(self, batch_size):
        for begin in range(0, len(_ROWS), 2):
            batch = _ROWS[begin : begin + 2]
            yield {"user": [user for user, _ in batch], "text": [text for _, text in batch]}


class _Frame(dict):
    """What is used of a data frame."""

    columns = ("user", "text")


@pytest.mark.parametrize(
    "rows",
    [
        _ROWS,
        iter(_ROWS),
        _arrow(),
        _arrow().combine_chunks().to_batches()[0],
        _arrow().to_reader(max_chunksize=2),
        _Dataset(),
        _Frame(user=[u for u, _ in _ROWS], text=[t for _, t in _ROWS]),
    ],
    ids=["pairs", "iterator", "arrow", "record batch", "reader", "dataset", "frame"],
)
def test_tables_in_memory_are_read(rows):
    corpus = sources.of_rows(rows, "mine", notice=lambda line: None)
    assert _texts(corpus) == _USERS
    assert corpus.name == "mine"


@pytest.mark.parametrize("rows", ["text", 3, {"ann": ["x"]}])
def test_other_things_in_memory_are_refused(rows):
    with pytest.raises(ValueError, match="rows must be a data frame"):
        sources.of_rows(rows, "mine")


def test_columns_have_usual_names_or_are_named(tmp_path):
    for names in (("uid", "Review Text"), ("AuthorID", "body")):
        corpus, said = _read(tmp_path / "t.jsonl", _lines(names=names))
        assert _texts(corpus) == _USERS
        assert repr(names[0]) in said[0] and repr(names[1]) in said[0]
    content = _separated(names=("user", "who", "what"))
    corpus, said = _read(tmp_path / "t.csv", content, user_column="who", text_column="what")
    assert _texts(corpus) == _USERS
    assert len(said) == 1
    assert corpus.user_unit == "one value of the column 'who'"


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (
            ("id", "who", "what"),
            {},
            "known to have users: name it .user_column.; no column .* texts",
        ),
        (("user_id", "author", "text"), {}, "'user_id' or 'author': say which one .user_column."),
        (("id", "user", "text"), {"user_column": "who"}, "no column 'who' .user_column."),
        (("user", "user", "text"), {"user_column": "user"}, "2 columns 'user'"),
        (("id", "user", "text"), {"text_column": "user"}, "the same column, 'user'"),
    ],
)
def test_columns_that_are_missing_or_ambiguous_are_refused(tmp_path, names, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        _read(tmp_path / "t.csv", _separated(names=names), **options)
    assert f"Its columns are {', '.join(map(repr, names))}" in str(caught.value)
    assert str(caught.value) == sources.problem_of(
        str(tmp_path / "t.csv"), tables.TableOptions(**options)
    )


def test_ids_of_other_types_become_text_and_that_is_said(tmp_path):
    rows = [(7, "a"), (8.0, "b"), ("7", "c")]
    corpus, said = _read(tmp_path / "t.jsonl", _lines(rows))
    assert _texts(corpus) == {"7": ["a", "c"], "8": ["b"]}
    assert "ids of users that are of type int are read as text: '7'" in "".join(said)
    parquet.write_table(pa.table({"user": [7, 8, 7], "text": ["a", "b", "c"]}), tmp_path / "t.pq")
    assert _texts(_read(tmp_path / "t.pq")[0]) == {"7": ["a", "c"], "8": ["b"]}


def test_repeated_rows_are_kept_and_counted(tmp_path):
    corpus, said = _read(tmp_path / "t.csv", _separated([*_ROWS, _ROWS[0], _ROWS[0]]))
    assert corpus.examples("ann").count("hello, world") == 3
    assert "2 of 7 rows have the user and the text of an earlier row" in said[1]


@pytest.mark.parametrize("is_marked", [True, False])
def test_a_row_that_repeats_the_names_of_the_columns_is_refused(tmp_path, is_marked):
    content = _separated()
    joined = content + "\ufeff" * is_marked + content
    with pytest.raises(ValueError, match=r"t\.csv:8 repeats the names of the columns"):
        _read(tmp_path / "t.csv", joined, max_bad_rows=0.9)
    with pytest.raises(ValueError, match="row 5 repeats the names"):
        sources.of_rows(_arrow([*_ROWS, ("user", "text")]), "r")


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (["7", "7.0", "7.00", "8"], "one number in several ways, '7' and '7.0'"),
        (["7", "7.0", "8"], "one number in several ways"),
        (["9007199254740993.0", "8"], "was rounded"),
        ([9007199254740993.0, 9007199254740992.0], "row 0: .* is a float of 9,007,199,254,740,992"),
        (np.array([2**53 + 1, 2, np.nan]), "row 0: .* is a float"),
        (pa.array([2.0**24, 2], pa.float32()), "row 0: .* is a float of 16,777,216 or more"),
    ],
)
def test_ids_that_are_not_exact_or_not_written_in_one_way_are_refused(ids, message):
    texts = [f"text {i}" for i in range(len(ids))]
    given = pa.table({"user": ids, "text": texts}) if isinstance(ids, pa.Array) else None
    given = _Frame(user=ids, text=texts) if given is None else given
    with pytest.raises(ValueError, match=message):
        sources.of_rows(given, "r", table=tables.TableOptions(max_bad_rows=0.5))


@pytest.mark.parametrize(
    "write",
    [_write_stream, lambda *a: feather.write_feather(a[1], a[0], compression="uncompressed")],
)
def test_offsets_outside_of_the_file_are_refused_and_not_followed(tmp_path, write):
    write(tmp_path / "t.arrow", _arrow([("ann", "hello"), ("bob", "hi")]))
    content = (tmp_path / "t.arrow").read_bytes()
    wrong = content.replace(struct.pack("<3i", 0, 5, 7), struct.pack("<3i", 0, 2**30, 7))
    assert content != wrong
    with pytest.raises(ValueError, match=r"t\.arrow: cannot be read: .*offset"):
        _read(tmp_path / "t.arrow", wrong)


@pytest.mark.parametrize("form", ["parquet", "stream"])
def test_ids_and_texts_of_bytes_are_text_or_named_as_bytes(tmp_path, form):
    def read(ids, texts=(b"x", b"y", b"z", b"w")):
        table = pa.table({"user": pa.array(ids, pa.binary()), "text": pa.array(texts, pa.binary())})
        path = tmp_path / ("t.arrow" if form == "stream" else "t.parquet")
        (_write_stream(path, table) if form == "stream" else parquet.write_table(table, path))
        return _read(path)[0]

    ids = [b"ann", "çem".encode(), b"ann", b"bob"]
    assert _texts(read(ids)) == {"ann": ["x", "z"], "çem": ["y"], "bob": ["w"]}
    with pytest.raises(ValueError, match="2 with bytes that are not UTF-8 as the id of the user"):
        read([b"ann", b"bob", b"\xff\xfe", b"\xff"])
    with pytest.raises(ValueError, match="1 with bytes that are not UTF-8 instead of a text"):
        read(ids, (b"x", b"y", b"z", b"\xff"))


def test_a_column_that_begins_late_is_found(tmp_path):
    early = [{"author": f"u{i % 3}", "body": "x"} for i in range(200)]
    late = [{"author": f"u{i % 3}", "reply": f"y {i}"} for i in range(10)]
    content = "".join(json.dumps(row) + "\n" for row in early + late)
    options = {"user_column": "author", "text_column": "reply"}
    corpus, said = _read(tmp_path / "t.jsonl", content, **options, max_bad_rows=0.96)
    assert sorted(corpus.texts()) == sorted(f"y {i}" for i in range(10))
    assert "columns 'author' and 'reply': 200 of 210 rows cannot be used: 200 without a" in said[0]
    with pytest.raises(ValueError, match="no column 'answer'.* 'author', 'body', 'reply'"):
        _read(tmp_path / "t.jsonl", user_column="author", text_column="answer")


def _write_splits(folder, files):
    for name, user in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        rows = [(user, "x"), (f"other {user}", "y")]
        if name.endswith(".arrow"):
            _write_stream(folder / name, _arrow(rows))
        elif name.endswith(".jsonl"):
            (folder / name).write_text(_lines(rows))
        else:
            (folder / name).write_text("{}")


@pytest.mark.parametrize(
    "files",
    [
        {"data/train.jsonl": "a", "data/test.jsonl": "b", "dataset_infos.json": ""},
        {"data/train-00000-of-00001.jsonl": "a", "data/test-00000-of-00001-ab1.jsonl": "b"},
        {"training/0.jsonl": "a", "eval/0.jsonl": "b"},
        {
            **{"train/data-00000-of-00001.arrow": "a", "test/data-00000-of-00001.arrow": "b"},
            **{"dataset_dict.json": "", "train/state.json": "", "test/dataset_info.json": ""},
        },
    ],
)
def test_one_split_of_a_folder_is_read_and_that_is_said(tmp_path, files):
    _write_splits(tmp_path, files)
    corpus, said = _read(tmp_path)
    assert corpus.user_ids == ("a", "other a")
    assert "of several splits ('test', 'train'): only those of 'train' are read" in said[0]
    assert _read(tmp_path, split="test")[0].user_ids == ("b", "other b")
    with pytest.raises(ValueError, match="no files of the split 'validation'; its splits are 't"):
        _read(tmp_path, split="validation")
    corpus, said = _read(tmp_path, split="all")
    assert len(corpus) == 4 and len(said) == 2  # Of the columns, and of the rows.
    # All of them are the files of the folder, where it is asked whether they are public.
    assert len(table_files.find(str(tmp_path))) == 2


def test_splits_of_other_names_must_be_named(tmp_path):
    _write_splits(
        tmp_path, {"x/0.arrow": "a", "y/0.arrow": "b", "x/state.json": "", "n.jsonl": "c"}
    )
    assert len(_read(tmp_path)[0]) == 6  # Of one split and of none.
    _write_splits(tmp_path, {"y/state.json": ""})
    for problem in (_read, lambda path: _fail(sources.problem_of(str(path)))):
        with pytest.raises(ValueError, match="'train'; its splits are 'x', 'y'.* or 'all' to read"):
            problem(tmp_path)
    assert len(_read(tmp_path, split="all")[0]) == 6
    assert len(_read(tmp_path / "n.jsonl", split="all")[0]) == 2
    corpus, said = _read(tmp_path, split="y")
    assert corpus.user_ids == ("b", "other b") and "of no split are left out (1)" in said[0]
    with pytest.raises(ValueError, match="split 'y' is for folders"):
        _read(tmp_path / "n.jsonl", split="y")
    (tmp_path / "rest").mkdir()
    shutil.move(tmp_path / "n.jsonl", tmp_path / "rest")
    with pytest.raises(ValueError, match="has no files of a split: leave split 'y' out"):
        _read(tmp_path / "rest", split="y")


def _fail(problem):
    raise ValueError(problem)


_BAD_CSV = b"""user,text
ann,good
bob,too,many
few
,nobody
ann,
ann,"  "
ann,"a quote" too early
ann,\xfcber
"""
_BAD_LINES = b"""{"user": "ann", "text": "good"}
{"user": "ann", "text":
{"user": null, "text": "nobody"}
{"user": "ann"}
{"user": "ann", "text": 5}
{"user": ["ann"], "text": "x"}
{"user": 0.5, "text": "x"}
[1]
{"user": "ann", "text": "\\ud800"}
"""


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        (
            "t.csv",
            _BAD_CSV,
            [
                "7 of 207 rows cannot be used",
                "2 with more or fewer cells than the first line has names (t.csv:3, t.csv:4)",
                "1 without a user (t.csv:5)",
                "2 with an empty text (t.csv:6, t.csv:7)",
                "1 with quotes in the wrong place (t.csv:8)",
                "1 with bytes that are not in the file's encoding (if it is Latin-1, pass encoding "
                "'latin-1') (t.csv:9)",
            ],
        ),
        (
            "t.jsonl",
            _BAD_LINES,
            [
                "8 of 208 rows cannot be used",
                "1 that are not JSON (t.jsonl:2)",
                "1 without a user (t.jsonl:3)",
                "1 without a text (t.jsonl:4)",
                "1 with a int instead of a text (t.jsonl:5)",
                "1 with a list of users, which finetune takes with rows_per_owner (t.jsonl:6)",
                "1 with a fraction as the id of the user (t.jsonl:7)",
                "1 that are no JSON object (t.jsonl:8)",
            ],
        ),
    ],
)
def test_bad_rows_are_named_by_their_line(tmp_path, monkeypatch, name, content, expected):
    monkeypatch.chdir(tmp_path)
    good = [(f"user{i}", "fine") for i in range(199)]
    rest = "".join(f"{u},{t}\n" for u, t in good) if name == "t.csv" else _lines(good)
    (tmp_path / name).write_bytes(content + rest.encode())
    said = []
    table = tables.TableOptions(max_bad_rows=0.04)
    corpus = sources.load_user_text(name, table=table, notice=said.append)
    for part in expected:
        assert part in said[1]
    assert len(corpus) == 200 and list(corpus.texts()) == ["good"] + ["fine"] * 199
    with pytest.raises(ValueError, match=r"cannot be used: .*more than max_bad_rows = 1 %: mend"):
        sources.load_user_text(name, notice=said.append)


def test_only_the_first_bad_rows_are_named_and_lines_count_breaks_in_cells(tmp_path):
    rows = [*_ROWS, *[("", "x")] * 4]
    with pytest.raises(ValueError, match=r"4 without a user \(\S*:8, \S*:9, \S*:10, \.\.\.\)"):
        _read(tmp_path / "t.csv", _separated(rows))


def test_empty_cells_of_arrow_and_of_data_frames_are_bad_rows(tmp_path):
    table = pa.table({"user": ["a", None, "b"], "text": [None, "x", "y"]})
    parquet.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(ValueError, match=r"t.parquet, row 1\); 1 without a user \(.*row 2\)"):
        _read(tmp_path / "t.parquet")
    frame = _Frame(user=["a", float("nan")], text=[float("nan"), "x"])
    with pytest.raises(ValueError, match=r"1 without a text \(row 0\); 1 without a user"):
        sources.of_rows(frame, "mine")


def test_encodings(tmp_path):
    for encoding in ("latin-1", "utf-16"):
        content = _separated().encode(encoding)
        assert _texts(_read(tmp_path / "t.csv", content, encoding=encoding)[0]) == _USERS
    with pytest.raises(ValueError, match="if it is Latin-1, pass encoding 'latin-1'"):
        _read(tmp_path / "t.csv", _separated().encode("latin-1"))
    for unknown in ("latin-9000", "undefined", "a\0b"):
        with pytest.raises(validation.UsageError, match="encoding '.*' is not known"):
            tables.TableOptions(encoding=unknown)


@pytest.mark.parametrize("has_mark", [True, False])
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize(("name", "write"), [("t.csv", _separated), ("t.jsonl", _lines)])
def test_other_encodings_are_refused_by_their_name_by_which_they_are_read(
    tmp_path, name, write, encoding, has_mark
):
    content = ("\ufeff" * has_mark + write()).encode(encoding)
    for given in [None, "utf-8", "latin-1"] + ["utf-16"] * encoding.startswith("utf-32"):
        with pytest.raises(ValueError, match=f"NUL characters .*pass encoding '{encoding}'"):
            _read(tmp_path / name, content, encoding=given)
    assert _texts(_read(tmp_path / name, content, encoding=encoding)[0]) == _USERS


@pytest.mark.parametrize("name", ["encoding", "split"])
@pytest.mark.parametrize("rows", [_ROWS, _arrow()], ids=["pairs", "table"])
def test_options_of_files_are_refused_for_rows_in_memory(name, rows):
    table = tables.TableOptions(**{name: "utf-8"})
    with pytest.raises(ValueError, match=f"^{name} has no meaning for rows in memory: leave it"):
        sources.of_rows(rows, "r", table=table)


def test_nul_characters_are_refused(tmp_path):
    rows = [*_ROWS, ("dan\0", "hi"), ("dan", "h\0i")]
    said = []
    table = tables.TableOptions(max_bad_rows=0.5)
    assert _texts(sources.of_rows(rows, "r", table=table, notice=said.append)) == _USERS
    assert "1 with a NUL character in the id of the user (row 5)" in said[0]
    assert "1 with a NUL character in the text (row 6)" in said[0]
    with pytest.raises(ValueError, match="NUL character in the name of a column"):
        _read(tmp_path / "t.jsonl", _lines(names=("user", "te\0xt")))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", b'user,text\nann,x\n\nbob,"open\nann,y\n', "t.csv:4: a quote is opened"),
        ("t.csv", b'user,"text\nann,x\n', "t.csv:1: a quote is opened"),
        ("t.csv", b'user,"te"xt\nann,x\n', "t.csv:1: quotes are in the wrong place in the names"),
        ("t.csv", b"", "is empty"),
        ("t.csv", b"user,text\n", "has no rows"),
        ("t.csv", b"user,text\nann,x\n", "single user, 'ann'"),
        (
            "t.jsonl",
            b'[{"user": "ann", "text": "x"}]',
            "is one JSON array: write one object a line",
        ),
        ("t.jsonl", b'[\n{"user": "ann", "text": "x"}\n]', "is one JSON array"),
        ("t.jsonl", b"\n", "is empty"),
        ("t.jsonl", b"nothing\n", "none of the first 1 lines is a JSON object"),
        ("t.csv.gz", b"nothing", "t.csv.gz: cannot be read: Not a gzipped file"),
        (
            "t.csv.gz",
            gzip.compress(_SEPARATED, mtime=0)[:-9],
            "t.csv.gz.*: cannot be read: Compressed file",
        ),
        ("t.parquet", b"nothing", "t.parquet: cannot be read"),
        ("t.feather", b"nothing", "t.feather: cannot be read"),
    ],
)
def test_files_that_cannot_be_read_are_refused(tmp_path, name, content, message):
    with pytest.raises(ValueError, match=message):
        _read(tmp_path / name, content)


def test_a_cell_that_is_too_long_is_named_as_such(tmp_path, monkeypatch):
    monkeypatch.setattr(table_files, "_MAX_FIELD", 2000)
    with pytest.raises(ValueError, match=r"t\.csv:3: a cell has more than 2,000 .* JSON lines\.$"):
        _read(tmp_path / "t.csv", "user,text\nbob,x\nann," + "word " * 500 + "\n")
    with pytest.raises(ValueError, match=r"t\.csv:3: a cell has more .*; or a quote is opened"):
        _read(tmp_path / "t.csv", 'user,text\nbob,x\nann,"' + "word\n" * 500 + "\n")


def test_every_line_that_a_stray_quote_swallows_is_counted(tmp_path):
    lines = ["user,text", *(f"u{i},text {i}" for i in range(30)), 'ann,"open']
    lines += [f"v{i},text {i}" for i in range(20)] + ['bob,"next"', "eve,last"]
    content = "\n".join(lines).encode()
    with pytest.raises(
        ValueError, match="22 of 53 rows cannot be used: 22 with quotes in the wrong"
    ):
        _read(tmp_path / "t.csv", content)


def test_a_comma_too_many_does_not_mean_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.csv", "other.csv"):
        (tmp_path / name).write_text(_separated())
    for spec in ("a.csv,", ",a.csv", "a.csv,,other.csv"):
        with pytest.raises(ValueError, match="has a comma with no name"):
            table_files.find(spec)


def test_a_pattern_is_found_from_folders_with_brackets(tmp_path, monkeypatch):
    folder = tmp_path / "x[1]y"
    folder.mkdir()
    (folder / "a.csv").write_text(_separated())
    monkeypatch.chdir(folder)
    spec = table_files.absolute("*.csv")
    monkeypatch.chdir(tmp_path)
    assert [path.name for path in table_files.find(spec)] == ["a.csv"]


@pytest.mark.parametrize("encoding", ["hex", "rot13", "base64"])
def test_codecs_that_are_not_of_text_are_refused(encoding):
    with pytest.raises(ValueError, match=f"encoding '{encoding}' is not known"):
        tables.TableOptions(encoding=encoding)


class NAType:
    """What is used of pandas' NA."""

    def __bool__(self):
        raise TypeError("boolean value of NA is ambiguous")

    def __eq__(self, other):
        return self

    __hash__ = None


def test_missing_cells_of_pandas_are_missing():
    rows = [("ann", "x"), ("bob", "y"), (NAType(), "z"), ("ann", NAType()), (np.float32(1), "w")]
    said = []
    options = tables.TableOptions(max_bad_rows=0.5)
    frame = _Frame(user=[u for u, _ in rows], text=[t for _, t in rows])
    for given in (rows, frame):
        corpus = sources.of_rows(given, "mine", table=options, notice=said.append)
        assert _texts(corpus) == {"ann": ["x"], "bob": ["y"], "1": ["w"]}
    assert "1 without a user" in said[0] + said[1] and "1 without a text" in said[0] + said[1]


def test_names_of_columns_may_be_numbers():
    class Numbered(dict):
        columns = (0, 1)

    options = tables.TableOptions(user_column="0", text_column="1")
    frame = Numbered({0: ["ann", "bob"], 1: ["x", "y"]})
    corpus = sources.of_rows(frame, "mine", table=options, notice=lambda line: None)
    assert _texts(corpus) == {"ann": ["x"], "bob": ["y"]}


@pytest.mark.parametrize("suffix", [".bz2", ".xz", ".GZ"])
def test_one_line_a_user_may_be_compressed_in_every_way(tmp_path, suffix):
    compress = {".bz2": bz2.compress, ".xz": lzma.compress, ".GZ": gzip.compress}[suffix]
    lines = b'{"user_id": "ann", "examples": ["x"]}\n{"user_id": "bob", "examples": ["y"]}\n'
    corpus, _ = _read(tmp_path / f"t.jsonl{suffix}", compress(lines))
    assert _texts(corpus) == {"ann": ["x"], "bob": ["y"]}


def test_a_journal_that_a_killed_process_left_does_no_harm(tmp_path, monkeypatch):
    monkeypatch.setattr(grouping, "_IN_MEMORY", 10)
    cache = grouping.Cache(tmp_path / "texts.sqlite")

    def read():
        groups = [("ann", ["x" * 20]), ("bob", ["y"])]
        return cache.read("t", "f", False) or grouping.group(
            "t", groups, user_unit="u", is_tokenized=False, cache=cache, fingerprint="f"
        )

    read()
    code = (
        "import os, sqlite3, sys\n"
        "database = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "database.execute('PRAGMA cache_size = 1')\n"
        "database.execute('BEGIN')\n"
        "database.execute('INSERT INTO kept VALUES (?, ?)', ('a', b'0' * 10**6))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(cache.path)])
    assert cache.path.with_name("texts.sqlite-journal").exists()
    assert _texts(read()) == {"ann": ["x" * 20], "bob": ["y"]}
    assert not cache.path.with_name("texts.sqlite-journal").exists()


def test_a_table_is_a_vocabulary_and_is_refused_if_it_has_protected_texts(tmp_path):
    (tmp_path / "t.csv").write_text(_separated())
    path = str(tmp_path / "t.csv")
    words = vocabulary.from_file(path, 3)
    assert words.words == ('"', ",", "hello")
    protected = user_text.UserText.from_mapping("p", {"bob": ["Hello,  world"], "x": []})
    with pytest.raises(ValueError, match="it has the texts of 1 of the 2 users of p"):
        vocabulary.from_file(path, 3, protected=protected)


def test_copies_of_tables_are_recognised_by_their_texts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, names in (("one.csv", ("id", "user", "text")), ("own.csv", ("id", "who", "what"))):
        (tmp_path / name).write_text(_separated(names=names))
    own = tables.TableOptions(user_column="who", text_column="what")
    assert sources.share_texts("one.csv", "own.csv", own)
    assert not sources.share_texts("one.csv", "docs")
    (tmp_path / "a.csv").write_text(_separated(_ROWS[:2]))
    (tmp_path / "b.csv").write_text(_separated(_ROWS[2:]))
    shutil.copytree(".", "copies")
    assert sources.are_same_file("a.csv,b.csv", "copies/a.csv, copies/b.csv")
    assert not sources.are_same_file("a.csv,b.csv", "copies/a.csv,copies/a.csv")
    assert not sources.are_same_file("a.csv", "nowhere.csv")
    assert table_files.absolute("a.csv, b.csv,mine") == f"{tmp_path}/a.csv,{tmp_path}/b.csv,mine"


def test_options_of_tables_are_for_tables_only(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"user_id": "a", "examples": ["x"]}\n' * 2)
    for name in ("docs", str(tmp_path / "t.jsonl"), "t.sqlite"):
        with pytest.raises(ValueError, match="user_column applies to tables"):
            sources.load_user_text(name, table=tables.TableOptions(user_column="who"))
