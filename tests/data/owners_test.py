"""Rows of several owners: the bound of each owner, the greedy guarantee, and reading of tables."""

import itertools
import json
import uuid

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from tff_dpftrl.data import grouping, owners, sources, tables


def _cells(random, num_rows, num_users, most):
    return [
        [f"u{user}" for user in random.choice(num_users, random.integers(1, most + 1), False)]
        for _ in range(num_rows)
    ]


def _owned(cells, is_selected):
    """Returns the numbers of selected rows by owner, counted cell by cell."""
    counts = {}
    for cell, selected in zip(cells, is_selected, strict=True):
        for owner in set(cell):
            counts[owner] = counts.get(owner, 0) + bool(selected)
    return counts


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rows_per_owner", [1, 2])
def test_the_bound_holds_nothing_can_be_added_and_greed_is_good(seed, rows_per_owner):
    random = np.random.default_rng(seed)
    cells = _cells(random, 11, 6, 3)
    selected = owners.select(cells, rows_per_owner)
    counts = _owned(cells, selected.is_selected)
    assert max(counts.values()) <= rows_per_owner
    for row in np.flatnonzero(~selected.is_selected):
        assert any(counts[owner] == rows_per_owner for owner in cells[row])
    # Brute force over all subsets of rows.
    best = max(
        sum(subset)
        for subset in itertools.product((0, 1), repeat=len(cells))
        if max(_owned(cells, subset).values()) <= rows_per_owner
    )
    number = int(selected.is_selected.sum())
    assert best / max(map(len, cells)) <= number <= best
    assert (selected.num_owned, selected.num_owners) == (11, len(counts))
    again = owners.select(cells, rows_per_owner)
    np.testing.assert_array_equal(again.is_selected, selected.is_selected)


def test_cells():
    assert owners.of_cell("ann") == owners.of_cell(["ann", "ann"]) == ("ann",)
    assert owners.of_cell(["ann", 7]) == ("ann", "7")
    assert owners.of_cell([b"ann", 7.0]) == ("ann", "7")
    assert owners.of_cell(np.array(["ann", "bob"], object)) == ("ann", "bob")
    for cell in (None, [], ["ann", None], [" "], {"a": 1}, True, 1.5):
        assert owners.of_cell(cell) is None
    assert owners.select([None, []], 1).is_selected.tolist() == [False, False]
    with pytest.raises(ValueError, match="rows_per_owner must be at least 1"):
        owners.select(["ann"], 0)


def test_an_owner_that_is_not_exact_is_named_by_its_place(tmp_path):
    rows = [{"user": ["ann"], "text": "x"}, {"user": ["bob", 2.0**53], "text": "y"}]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=f"^{path}:2: .* not exact"):
        sources.load_user_text(str(path), rows_per_owner=2)
    with pytest.raises(ValueError, match="^row 1: .* not exact"):
        sources.of_rows([tuple(row.values()) for row in rows], "rows", rows_per_owner=2)


_ROWS = [(["ann", "bob"], "hi bob"), ("ann", "alone"), (["bob", "cid"], ""), (["dan"], "hello")]


@pytest.mark.parametrize("form", ["lines", "parquet", "rows"])
def test_tables_with_lists_of_users(form, tmp_path):
    said = []
    rows = [([user] if isinstance(user, str) else user, text) for user, text in _ROWS]
    path = tmp_path / ("t.jsonl" if form == "lines" else "t.parquet")
    table = tables.TableOptions(max_bad_rows=0.3)
    if form == "rows":
        corpus = sources.of_rows(rows, "r", table=table, notice=said.append, rows_per_owner=2)
    else:
        if form == "lines":
            lines = (json.dumps({"user": user, "text": text}) for user, text in _ROWS)
            path.write_text("\n".join(lines))
        else:
            users, texts = zip(*rows, strict=True)
            parquet.write_table(pa.table({"user": users, "text": texts}), path)
        corpus = sources.load_user_text(
            str(path), table=table, notice=said.append, rows_per_owner=2
        )
    # The row without a text is selected all the same: texts have no say.
    assert {user: corpus.examples(user) for user in corpus.user_ids} == {
        "ann": ["hi bob", "alone"],
        "dan": ["hello"],
    }
    assert "4 of 4 rows of 4 owners are selected, so that nobody owns more than 2" in said[-1]
    assert "or one name in a list there, with all rows that name it: at most 2" in corpus.user_unit


def test_a_row_that_was_not_counted_is_never_used():
    # Whatever else could be read as the id of a user: as bytes, as pandas' floats, or by `str`.
    cells = [["1", "ann"], b"ann", "ann", 1.0, [1], uuid.UUID(int=0), None, "cid"]
    said = []
    corpus = sources.of_rows(
        [(cell, f"text {row}") for row, cell in enumerate(cells)],
        "r",
        table=tables.TableOptions(max_bad_rows=0.5),
        notice=said.append,
        rows_per_owner=1,
    )
    used = {int(text.removeprefix("text ")) for text in corpus.texts()}
    owned = [set(owners.of_cell(cell) or ()) for cell in cells]
    assert all(sum(name in owned[row] for row in used) == 1 for name in ("1", "ann", "cid"))
    assert "1 without a user or a list of users (row 6)" in said[0]


@pytest.mark.parametrize("in_file", [False, True])
def test_owners_are_counted_who_are_first_in_no_row(in_file, tmp_path, monkeypatch):
    if in_file:
        monkeypatch.setattr(grouping, "_IN_MEMORY", 0)
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(json.dumps({"user": u, "text": t}) for u, t in _ROWS))

    def read():
        return sources.load_user_text(
            str(path),
            table=tables.TableOptions(max_bad_rows=0.3),
            cache=grouping.Cache(tmp_path / "texts.sqlite"),
            notice=lambda line: None,
            rows_per_owner=2,
        )

    for corpus in (read(), read()):  # The second one is of the file, where there is one.
        # The row of cid has no text.
        assert corpus.count_owners(["ann", "dan"]) == 3
        assert corpus.select(["dan"]).count_owners(["dan"]) == 1


def test_the_texts_have_no_say_in_the_selection(tmp_path):
    random = np.random.default_rng(0)
    cells = _cells(random, 60, 12, 2)
    kept = []
    for empty in ((), (0, 3, 7, 11, 20)):
        texts = ["" if row in empty else f"text {row}" for row in range(60)]
        corpus = sources.of_rows(
            list(zip(cells, texts, strict=True)),
            "r",
            table=tables.TableOptions(max_bad_rows=0.5),
            notice=lambda line: None,
            rows_per_owner=3,
        )
        kept.append(set(corpus.texts()))
    assert kept[1] == kept[0] - {f"text {row}" for row in (0, 3, 7, 11, 20)}


def test_lists_without_the_option_and_the_option_without_a_table_are_refused(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(json.dumps({"user": u, "text": t}) for u, t in _ROWS))
    with pytest.raises(ValueError, match="3 with a list of users, which finetune takes"):
        sources.load_user_text(str(path), notice=lambda line: None)
    path.write_text('{"user_id": "a", "examples": ["x"]}\n{"user_id": "b", "examples": ["y"]}\n')
    for spec in (str(path), "docs"):
        with pytest.raises(ValueError, match="rows_per_owner applies to tables"):
            sources.load_user_text(spec, notice=lambda line: None, rows_per_owner=2)
