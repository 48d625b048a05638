import sys

import numpy as np
import pytest

from tff_dpftrl.runtime.status import time_series

START = 1_699_999_200.0  # A full hour.


def series(now=START):
    return time_series.TimeSeries(["events"], ["devices"], now)


def test_the_end_of_a_full_hour_is_one():
    assert START % 3600 == 0


def test_counts_lie_in_the_steps_in_which_they_were():
    kept = series()
    for second in range(60):
        kept.advance(START + second)
        kept.add("events", second)
    kept.advance(START + 60)
    window = kept.window("minutes")
    assert window.end == START + 60
    expected = np.arange(60).reshape(12, 5).sum(1)
    np.testing.assert_array_equal(window.values["events"], expected)
    assert kept.total("events") == expected.sum()


def test_a_step_that_has_not_ended_is_not_shown():
    kept = series()
    kept.advance(START + 6)
    kept.add("events")
    assert kept.window("minutes").values["events"].tolist() == [0]
    kept.advance(START + 9.99)
    assert kept.window("minutes").values["events"].tolist() == [0]
    kept.advance(START + 10)
    assert kept.window("minutes").values["events"].tolist() == [0, 1]


def test_levels_are_means_over_time():
    kept = series()
    kept.advance(START + 1)
    kept.shift("devices", 10)
    kept.advance(START + 3)
    kept.shift("devices", -4)
    kept.advance(START + 12)
    assert kept.total("devices") == 6
    means = kept.window("minutes").values["devices"]
    np.testing.assert_allclose(means, [(2 * 10 + 2 * 6) / 5, 6])


def test_levels_go_on_while_nothing_happens():
    kept = series()
    kept.shift("devices", 3)
    kept.advance(START + 2 * 3600)
    np.testing.assert_allclose(kept.window("week").values["devices"], [3, 3])
    np.testing.assert_allclose(kept.window("minutes").values["devices"], np.full(120, 3.0))


def test_a_level_stays_above_0():
    kept = series()
    kept.shift("devices", -1)
    kept.shift("devices", 2)
    assert kept.total("devices") == 2


@pytest.mark.parametrize("name", time_series.RESOLUTIONS)
def test_windows_keep_so_much_and_no_more(name):
    kept = series()
    resolution = time_series.RESOLUTIONS[name]
    steps = resolution.num_steps + 20
    for i in range(steps):
        kept.advance(START + i * resolution.step)
        kept.add("events", i)
    kept.advance(START + steps * resolution.step)
    counts = kept.window(name).values["events"]
    np.testing.assert_array_equal(counts, np.arange(20, steps))


def test_the_longest_window_is_a_week():
    spans = [each.step * each.num_steps for each in time_series.RESOLUTIONS.values()]
    assert spans == [600, 86_400, 7 * 86_400]


def test_a_jump_of_years_costs_nothing_and_leaves_zeros():
    kept = series()
    kept.add("events", 7)
    kept.advance(START + 10 * 365 * 86_400)
    for name, resolution in time_series.RESOLUTIONS.items():
        assert kept.window(name).values["events"].tolist() == [0] * resolution.num_steps


def test_a_clock_that_goes_back_a_little_stands():
    kept = series()
    assert kept.advance(START + 100) == START + 100
    assert kept.advance(START + 60) == START + 100
    kept.add("events")
    kept.advance(START + 105)
    assert kept.window("minutes").values["events"][-1] == 1


def test_a_clock_that_is_set_back_begins_anew_with_the_same_totals():
    kept = series()
    kept.shift("devices", 2)
    kept.add("events", 5)
    kept.advance(START + 86_400)
    assert kept.advance(START + 7) == START + 7
    assert (kept.total("events"), kept.total("devices")) == (5, 2)
    kept.add("events")
    kept.advance(START + 10)
    window = kept.window("minutes")
    assert window.end == START + 10
    assert window.values["events"].tolist() == [1]
    # From second 7 on.
    np.testing.assert_allclose(window.values["devices"], [2 * 3 / 5])


def test_channels_have_different_names():
    with pytest.raises(ValueError, match="different names"):
        time_series.TimeSeries(["a"], ["a"], START)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
