import math

import numpy as np
import pytest

from tff_dpftrl.runtime.status import counters

START = 1_699_999_200.0  # A full hour.
WINDOWS = {"minutes": (5, 120), "day": (300, 288), "week": (3600, 168)}


def totals():
    return counters.Totals(["events", "others"], ["devices"], START)


def test_only_so_many_labels_get_a_place():
    counts = counters.BoundedCounts(["known"], room=2)
    for label in ("a", "b", "c", "known", "a", "d" * 61, "other"):
        counts.add(label)
    assert counts.items() == [("other", 3), ("a", 2), ("b", 1), ("known", 1)]
    assert counts.total() == 7


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.5, 0.9, 0.99])
def test_quantiles_are_off_by_half_a_bucket_at_most(fraction):
    values = np.random.default_rng(0).lognormal(3, 1.5, 20_000)
    kept = counters.Distribution(0.125, 2**20)
    for value in values:
        kept.add(value)
    assert abs(math.log2(kept.quantile(fraction) / np.quantile(values, fraction))) < 1 / 8
    assert kept.count == 20_000
    assert kept.sum == pytest.approx(values.sum())


def test_what_lies_outside_counts_at_the_ends_and_what_is_not_finite_is_left_out():
    kept = counters.Distribution(1, 8)
    for value in (math.nan, math.inf):
        kept.add(value)
    assert (kept.count, kept.quantile(0.5)) == (0, None)
    for value in (0.0, -3.0, 1e9):
        kept.add(value)
    assert (kept.counts[0], kept.counts[-1]) == (2, 1)
    assert (kept.quantile(0.1), kept.quantile(1.0)) == (1, 8)


def test_octaves_count_what_is_at_most_so_large():
    kept = counters.Distribution(1, 8)
    for value in (0.5, 1, 1.1, 2, 2.1, 8, 9):
        kept.add(value)
    assert kept.octaves() == [(1, 2), (2, 4), (4, 5), (8, 6)]


def test_counts_lie_in_the_steps_in_which_they_were():
    kept = totals()
    for second in range(60):
        kept.advance(START + second)
        kept.add("events", second)
    kept.advance(START + 62)
    kept.add("events", 9)  # In a step that has not ended.
    expected = np.arange(60).reshape(12, 5).sum(1)
    np.testing.assert_array_equal(kept.window("minutes").values["events"], expected)
    assert not kept.window("minutes").values["others"].any()
    assert kept.total("events") == kept.recent("events", "day") == expected.sum() + 9


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_keep_so_much_and_no_more(name):
    kept = totals()
    step, num_steps = WINDOWS[name]
    for i in range(num_steps + 20):
        kept.advance(START + i * step)
        kept.add("events", i)
    kept.advance(START + (num_steps + 20) * step)
    expected = np.arange(20, num_steps + 20)
    np.testing.assert_array_equal(kept.window(name).values["events"], expected)
    assert kept.recent("events", name) == expected.sum()


def test_a_jump_of_years_costs_nothing_and_leaves_zeros():
    kept = totals()
    kept.add("events", 7)
    kept.advance(START + 10 * 365 * 86_400)
    for name, (_, num_steps) in WINDOWS.items():
        assert kept.window(name).values["events"].tolist() == [0] * num_steps
        assert kept.recent("events", name) == 0


def test_a_level_stays_above_0():
    kept = totals()
    kept.shift("devices", -1)
    kept.shift("devices", 2)
    assert kept.total("devices") == 2


def test_a_clock_that_goes_back_a_little_stands():
    kept = totals()
    assert kept.advance(START + 100) == START + 100
    assert kept.advance(START + 60) == START + 100
    kept.add("events")
    kept.advance(START + 105)
    assert kept.window("minutes").values["events"][-1] == 1


def test_a_clock_that_is_set_back_begins_anew_with_the_same_totals():
    kept = totals()
    kept.add("events", 5)
    kept.advance(START + 86_400)
    assert kept.advance(START + 7) == START + 7
    assert kept.total("events") == 5
    kept.add("events")
    kept.advance(START + 10)
    assert kept.window("minutes").values["events"].tolist() == [1]
    assert kept.recent("events", "week") == 1
