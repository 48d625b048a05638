"""Tests of tff_dpftrl.data.user_ids."""

import datetime
import decimal
import uuid

import numpy as np
import pyarrow as pa
import pytest

from tff_dpftrl import validation
from tff_dpftrl.data import user_ids


class _Series:
    """Cell of a list as polars has it: it compares by its entries."""

    def __init__(self, entries):
        self.shape, self.to_list = (len(entries),), lambda: entries

    def __ne__(self, other):
        return _Series(self.to_list())

    def __bool__(self):
        raise TypeError("the truth value of a Series is ambiguous")

    def __iter__(self):
        return iter(self.to_list())


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        ("7.0", "7.0"),
        ("çem".encode(), "çem"),
        (7, "7"),
        (np.int64(2**53 + 1), "9007199254740993"),
        (7.0, "7"),
        (-0.0, "0"),
        (2.0**53 - 1, "9007199254740991"),
        (np.float32(2**24 - 1), "16777215"),
        (decimal.Decimal("7E+2"), "700"),
        (uuid.UUID(int=7), "00000000-0000-0000-0000-000000000007"),
        (datetime.date(2024, 2, 29), "2024-02-29"),
    ],
)
def test_an_id_is_text(cell, text):
    assert user_ids.as_text(cell) == text


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        *[(cell, "^without a user$") for cell in (None, "", " \n", b"", float("nan"))],
        *[(cell, "^without a user$") for cell in (np.float32("nan"), np.datetime64("NaT"))],
        *[(decimal.Decimal(nan), "^without a user$") for nan in ("NaN", "sNaN")],
        (np.timedelta64("NaT"), "^without a user$"),
        pytest.param(10**5000, "more than 4300 digits", id="long"),
        (decimal.Decimal("1E+999999999999"), "more than 4300 digits"),
        (decimal.Decimal("Infinity"), "with a Decimal"),
        ("a\ud800", "lone surrogate"),
        (_Series([1.0]), "with a list"),
        (True, "with a bool"),
        (0.5, "with a fraction"),
        (float("inf"), "with a fraction"),
        (["a"], "with a list"),
        (b"\xff", "with bytes that are not UTF-8 .*hexadecimal"),
        ("a\0", "with a NUL"),
        (object(), "with a object"),
        (pa.scalar(None), "with a NullScalar"),
    ],
)
def test_what_is_no_id_is_named(cell, reason):
    with pytest.raises(user_ids.NoId, match=reason):
        user_ids.as_text(cell)


@pytest.mark.parametrize("cell", [2.0**53, -(2.0**53), 1e300, np.float32(2**24), np.float16(2048)])
def test_a_float_that_is_not_exact_is_refused(cell):
    with pytest.raises(validation.UsageError, match="float of .* or more, which is not exact"):
        user_ids.as_text(cell)


@pytest.mark.parametrize(
    "dtype",
    [np.dtype("float32"), pa.float32(), pa.list_(pa.float32()), "Float32", "float[pyarrow]"],
)
def test_floats_of_a_narrow_column_know_that_they_are(dtype):
    assert [type(c) for c in user_ids.of_column([1.0, None, 2], dtype)] == [
        np.float32,
        type(None),
        int,
    ]
    for cell in ([1.0], _Series([1.0])):
        [[inner]] = user_ids.of_column([cell], dtype)
        assert type(inner) is np.float32


@pytest.mark.parametrize("dtype", [None, np.dtype("float64"), pa.float64(), pa.string(), "object"])
def test_other_columns_stay_as_they_are(dtype):
    assert type(next(iter(user_ids.of_column([1.0], dtype)))) is float


@pytest.mark.parametrize(
    "ids",
    [
        *(["7", "7.0"], ["7.0", "7.00"], ["7", "+7"], ["7", " 7"], ["07", "7"], ["0", "00"]),
        *(["-7", "-7."], ["1.5", "1.50"]),
    ],
)
def test_one_number_in_several_ways_is_refused(ids):
    for order in (ids, ids[::-1]):
        with pytest.raises(validation.UsageError, match="^here: ids of users write one number in"):
            user_ids.check(["ann", *order], "here")


@pytest.mark.parametrize("one", ["9007199254740993.0", "1.23457E+15", "1e+16"])
def test_numbers_that_were_rounded_are_refused(one):
    with pytest.raises(validation.UsageError, match=f"the id '{one.replace('+', '.')}' .* rounded"):
        user_ids.check(["ann", one], "here")


def test_other_ids_are_taken_as_they_are():
    long = "0" * 10_000 + "."  # No time is spent on what is no number.
    user_ids.check(
        ["7", "-7", "70", "7.5", "08", "1e5", "100000", "9007199254740993", long], "here"
    )
    user_ids.check(["Ann", "ann", "7a", "7.0a", "²", "²²"], "here")
    with pytest.raises(validation.UsageError, match="must be text, got 7"):
        user_ids.check([7], "here")
    for one, reason in (("", "without a user"), ("a\0", "with a NUL"), ("\ud800", "surrogate")):
        with pytest.raises(validation.UsageError, match=f"^here has an entry .*{reason}"):
            user_ids.check(["ann", one], "here")
