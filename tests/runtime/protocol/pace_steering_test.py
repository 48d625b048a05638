import math
import random

import numpy as np
import pytest

from tff_dpftrl.participation import timer
from tff_dpftrl.runtime.protocol import pace_steering

DAY = 86_400.0


def steering(**changes):
    given = {"devices_needed": 130, "period_seconds": 600.0, "population_size": 200}
    return pace_steering.PaceSteering(**{**given, **changes})


def arrivals_over_need(num_devices, needed, period, *, days, step=600.0, is_steered=True):
    """A population whose devices are available by the hour, and that all come at time 0.

    Returns:
      Arrivals in each step over those needed in it.
    """
    rng = np.random.default_rng(5)
    curve = np.append(timer.NIGHT_AND_DAY, timer.NIGHT_AND_DAY[0]) / max(timer.NIGHT_AND_DAY)
    assert curve.max() / curve.min() == pytest.approx(4)
    mean = (curve[1:] + curve[:-1]).mean() / 2
    pace = steering(
        devices_needed=needed,
        period_seconds=period,
        population_size=num_devices * mean,
        availability=timer.NIGHT_AND_DAY if is_steered else (1.0,) * 24,
    )
    turn = pace.waits(0.0, rng.random(num_devices), rng.random(num_devices))
    ratios = []
    for start in np.arange(0, days * DAY, step):
        arrived = 0
        due = np.flatnonzero(turn < start + step)
        while due.size:
            hours = turn[due] % DAY / 3600
            arrived += np.count_nonzero(rng.random(due.size) < np.interp(hours, range(25), curve))
            # A device that arrives gets the next turn; one that is not available takes it too.
            now = start + step / 2
            turn[due] = now + pace.waits(now, rng.random(due.size), rng.random(due.size))
            due = due[turn[due] < start + step]
        ratios.append(arrived / (needed / period * step))
    return np.asarray(ratios)


def test_a_large_population_meets_the_need_day_and_night_and_after_an_outage():
    ratios = arrivals_over_need(10**6, 10_000, 1200.0, days=1)
    # 5,000 are needed in each step: six standard errors are 0.085.
    assert np.abs(ratios - 1).max() < 0.1
    # In the first ten minutes after all have come at once, too.
    assert abs(ratios[0] - 1) < 0.1


def test_rendezvous_of_a_population_in_between_follow_the_curve():
    ratios = arrivals_over_need(10**4, 1000, 1200.0, days=2)
    hourly = ratios.reshape(48, 6).mean(1)[1:]  # Of three rendezvous; the first is at 00:20.
    # 3,000 are needed in each hour: six standard errors are 0.11.
    assert np.abs(hourly - 1).max() < 0.11


def test_without_the_curve_arrivals_follow_the_day():
    ratios = arrivals_over_need(10**5, 1000, 1200.0, days=1, is_steered=False)
    hourly = ratios.reshape(24, 6).mean(1)
    assert hourly.max() / hourly.min() > 3


@pytest.mark.parametrize("population_size", [100, 200, 1000])
def test_a_small_population_comes_together(population_size):
    rng = np.random.default_rng(1)
    pace = steering(population_size=population_size)
    repetitions, present, asked, period = 100, 0, [], pace.period_seconds
    for i in range(repetitions):
        # They are sent away at any time, and meet at the next multiples of the period.
        turn = np.array(
            [
                at + pace.waits(at, *rng.random(2))
                for at in i * period * 7 + rng.uniform(0, period, 20)
            ]
        )
        place = turn % period
        assert (place <= pace.rendezvous_fraction * period + 1e-6).all()
        # Timers of devices are late by two seconds, and three in a hundred are not there.
        late = rng.exponential(2.0, 20) + np.where(rng.random(20) < 0.03, math.inf, 0)
        present += np.count_nonzero(place + late <= pace.rendezvous_fraction * period)
        asked.append(np.count_nonzero(np.floor(turn / period) == i * 7 + 1))
    assert present / (repetitions * 20) >= 0.9
    chance = min(1.0, pace.devices_needed / population_size)
    error = math.sqrt(chance * (1 - chance) / (repetitions * 20))
    assert abs(sum(asked) / (repetitions * 20) - chance) <= 6 * error


def test_rendezvous_bring_as_many_as_are_needed_again_and_again():
    rng = np.random.default_rng(2)
    pace = steering(population_size=1000)
    turn = pace.waits(0.0, rng.random(1000), rng.random(1000))
    for rendezvous in range(1, 60):
        came = np.flatnonzero(turn // 600 == rendezvous)
        assert abs(came.size - 130) < 6 * math.sqrt(1000 * 0.13 * 0.87)
        now = rendezvous * 600 + 60.0
        turn[came] = now + pace.waits(now, rng.random(came.size), rng.random(came.size))


def test_waits_are_exponential_in_a_large_population():
    draws = (np.arange(10_000) + 0.5) / 10_000
    waits = steering(population_size=130_000).waits(1e9, draws, draws)
    mean = 1000 * 600.0
    np.testing.assert_allclose(waits, -np.log1p(-draws) * mean, rtol=1e-6, atol=1e-3)


def test_turns_follow_one_another():
    pace = steering(population_size=5000, availability=timer.NIGHT_AND_DAY)
    turns = pace.turns(1e9, random.Random(0), 5)
    assert len(turns) == 5 and (np.diff(turns) > 0).all() and turns[0] > 0
    assert turns[0] == pace(1e9, random.Random(0))


def test_turns_of_many_devices_are_those_of_each():
    pace = steering(population_size=1500, availability=timer.NIGHT_AND_DAY)  # Small at night only.
    draws = np.random.default_rng(3).random((2, 20, 8))
    together = pace.successive(1e9, *draws)
    for device in range(20):
        seconds = 0.0
        for i in range(8):
            seconds += float(pace.waits(1e9 + seconds, *draws[:, device, i]))
            assert together[device, i] == pytest.approx(seconds)


def test_turns_drawn_ahead_lose_the_time_that_has_passed_and_are_never_given_twice():
    pace = steering(population_size=200)  # Meetings, at multiples of 600 seconds.
    ahead = pace_steering.TurnsAhead(pace, 3)
    drawn = [ahead(1000.0 + i / 100, random.Random(0)) for i in range(150)]
    assert len(set(drawn)) == 150
    for i, turns in enumerate(drawn):
        assert len(turns) == 3 and (np.diff(turns) > 0).all()
        places = (1000.0 + i / 100 + np.array(turns)) % 600
        assert (places <= 60 + 1e-6).all()
    assert ahead(5000.0, random.Random(0))[0] + 5000.0 >= 5400.0  # Nothing of an hour ago.


def test_hours_without_devices_have_an_end():
    pace = steering(population_size=10**6, availability=(0.0,) * 23 + (1.0,))
    assert (pace.waits(1e9, np.linspace(0, 0.999, 50), 0.0) < 3000 * DAY).all()


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("devices_needed", 0),
        ("period_seconds", float("nan")),
        ("population_size", -1),
        ("rendezvous_fraction", 0.0),
        ("small_population", -1),
        ("availability", (1.0,) * 23),
        ("availability", (0.0,) * 24),
        ("availability", (-1.0,) + (1.0,) * 23),
    ],
)
def test_senseless_settings_are_refused_by_name(argument, value):
    with pytest.raises(ValueError, match=argument):
        steering(**{argument: value})
