"""The learned curve of the day, with populations whose check-ins are expectations or drawn.

A device is available with the probability of the hour, at each of its turns anew. Its turns follow
the estimate under which it was told, whatever the server has learned since.
"""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from tff_dpftrl.participation import timer
from tff_dpftrl.runtime.protocol import pace_steering
from tff_dpftrl.runtime.server import day_curve

HOUR, DAY = 3600.0, 86_400.0
CURVE = np.asarray(timer.NIGHT_AND_DAY) / max(timer.NIGHT_AND_DAY)  # Four times as many at night.


def first_steering(**changes):
    given = {"devices_needed": 10_000, "period_seconds": 1200.0, "population_size": 250_000}
    return pace_steering.PaceSteering(**{**given, **changes})


class Population:
    """Devices that have been told under one estimate or another; those never told are none."""

    def __init__(self, size, rng=None, curve=CURVE):
        self.size, self.curve, self.rng = size, curve, rng
        self.told = []  # Pairs of steering and the number of devices.

    def available(self, now):
        curve = np.append(self.curve, self.curve[0])
        return float(np.interp(now % DAY / HOUR, np.arange(25), curve))

    def all_come(self, learner, now):
        self.told = [[learner.steering, self.size]]
        learner.came(now, int(self.size))

    def come(self, begin, end):
        """Returns how many come between two times, and takes them from those who are told."""
        share, total = self.available((begin + end) / 2), 0.0
        for one in self.told:
            came = one[1] * min(1.0, share * one[0].expected_turns(begin, end))
            if self.rng is not None:
                came = self.rng.binomial(int(one[1]), min(1.0, came / max(one[1], 1)))
            one[1] -= came
            total += came
        return total

    def tell(self, steering, count):
        least = 1 if self.rng is None else 0  # Fractions of a device that none will be.
        self.told = [one for one in self.told if one[1] > least]
        if not self.told or self.told[-1][0] is not steering:
            self.told.append([steering, 0.0])
        self.told[-1][1] += count


def served(population, learner, begin, end, step=1200.0):
    """Serves a population, and returns arrivals over need by the hour."""
    needed = learner.steering.devices_needed * step / learner.steering.period_seconds
    ratios = []
    for now in np.arange(begin, end, step):
        came = population.come(now, now + step)
        learner.came(now + step / 2, came)
        population.tell(learner.steering, came)
        learner.advance(now + step)
        ratios.append(came / needed)
    return np.reshape(ratios, (-1, round(HOUR / step))).mean(1)


def started(population, **changes):
    """Begins a step before the second day, at which all devices come at once."""
    first = first_steering(**changes)
    learner = day_curve.DayCurve(first, DAY - first.period_seconds)
    population.all_come(learner, DAY - first.period_seconds)
    learner.advance(DAY)
    return learner


def learned(population, guess, days=2.0, **changes):
    learner = started(population, population_size=guess, **changes)
    served(population, learner, DAY, (1 + days) * DAY)
    return learner


@pytest.mark.parametrize("guess", [250_000.0, 20_000.0])
def test_after_two_days_arrivals_meet_the_need(guess):
    population = Population(400_000)
    learner = learned(population, guess)
    ratios = served(population, learner, 3 * DAY, 5 * DAY)
    assert np.abs(ratios - 1).max() < 0.1
    np.testing.assert_allclose(learner.available, 400_000 * CURVE, rtol=0.1)


def test_without_learning_they_do_not():
    population = Population(400_000)
    learner = started(population)
    learner.advance = lambda now: False  # Then the steering stays as it was.
    ratios = served(population, learner, DAY, 4 * DAY)[24:]
    assert ratios.min() < 0.5 and ratios.max() > 1.5


def test_a_given_curve_is_right_from_the_first_day_on():
    population = Population(400_000)
    learner = learned(population, 400_000 * CURVE.mean(), 0.25, availability=tuple(CURVE))
    ratios = served(population, learner, 1.25 * DAY, 3 * DAY)
    assert np.abs(ratios - 1).max() < 0.1


def test_two_hundred_devices_are_estimated_within_a_tenth():
    rng = np.random.default_rng(0)
    population = Population(200, rng)
    few = {"devices_needed": 20, "period_seconds": 600.0}
    learner = started(population, population_size=1_000, **few)
    served(population, learner, DAY, 4 * DAY, step=600.0)
    # 120 come in an hour; with half of those of the days before, six standard errors are 0.4.
    np.testing.assert_allclose(learner.available, 200 * CURVE, rtol=0.4)
    assert abs(learner.available.mean() / (200 * CURVE.mean()) - 1) < 0.1
    ratios = served(population, learner, 4 * DAY, 5 * DAY, step=600.0)
    assert abs(ratios.mean() - 1) < 0.1


def test_fewer_devices_than_are_needed_are_all_asked():
    population = Population(200, np.random.default_rng(0))
    few = {"devices_needed": 130, "period_seconds": 600.0}
    learner = started(population, population_size=1_000, **few)
    served(population, learner, DAY, 3 * DAY, step=600.0)
    np.testing.assert_allclose(learner.available, 200 * CURVE, rtol=0.15)


def test_it_follows_a_population_that_grows():
    population = Population(400_000)
    learner = learned(population, 250_000)
    for day in range(3, 7):  # By a tenth a day; those who are new are told when they come.
        served(population, learner, day * DAY, (day + 1) * DAY)
        population.tell(learner.steering, 0.1 * population.size)
        population.size *= 1.1
    np.testing.assert_allclose(learner.available, population.size * CURVE, rtol=0.2)


def test_a_restart_keeps_what_was_learned(tmp_path):
    population = Population(400_000)
    learner = learned(population, 250_000)
    learner.save(tmp_path / "day_curve.json")
    again = day_curve.DayCurve.load(tmp_path / "day_curve.json", first_steering(), 3 * DAY + 30.0)
    np.testing.assert_allclose(again.available, learner.available)
    np.testing.assert_allclose(
        np.asarray(again.steering.availability), learner.available, rtol=1e-9
    )
    ratios = served(population, again, 3 * DAY, 5 * DAY)
    assert np.abs(ratios - 1).max() < 0.1


def test_the_file_holds_nothing_but_counts_by_hour(tmp_path):
    learned(Population(400_000), 250_000).save(tmp_path / "day_curve.json")
    kept = json.loads((tmp_path / "day_curve.json").read_text())
    assert set(kept) == {"version", "looked_at", "hour", "arrivals", "turns"}
    assert len(kept["arrivals"]) == len(kept["turns"]) == 24


@pytest.mark.parametrize("is_restart", [True, False])
def test_an_outage_is_no_evidence_of_absence(tmp_path, is_restart):
    population = Population(400_000)
    learner = learned(population, 250_000)
    before = learner.available
    if is_restart:
        learner.save(tmp_path / "day_curve.json")
        learner = day_curve.DayCurve.load(tmp_path / "day_curve.json", first_steering(), 3.25 * DAY)
    else:  # The server runs on, but no device reaches it.
        for now in np.arange(3 * DAY, 3.25 * DAY, 1200.0):
            learner.advance(now)
    # Devices that found no server come in the next hours, as they back off, and untold.
    for now in np.arange(3.25 * DAY, 3.5 * DAY, 1200.0):
        learner.came(now, 50_000)
    np.testing.assert_allclose(learner.available, before, rtol=0.1)
    population.told = [[learner.steering, population.size]]
    ratios = served(population, learner, 3.5 * DAY, 5 * DAY)
    assert np.abs(ratios - 1).max() < 0.1


def test_devices_that_come_untold_do_not_raise_it_beyond_those_who_were_told():
    learner = day_curve.DayCurve(first_steering(population_size=1_000.0), 0.0)
    for minute in range(60):  # A fleet starts, within an hour.
        learner.came(minute * 60.0, 1_000)
    learner.advance(2 * HOUR)
    assert learner.available.max() <= 2 * 60_000


def test_a_failed_load_is_one_clear_line(tmp_path):
    path = tmp_path / "day_curve.json"
    learned(Population(400_000), 250_000, 0.5).save(path)
    good = json.loads(path.read_text())
    for bad in (
        "no JSON",
        "[]",
        json.dumps({**good, "version": 2}),
        json.dumps({**good, "arrivals": [1.0] * 23}),
        json.dumps({**good, "turns": [-1.0] * 24}),
        json.dumps({**good, "turns": [1e308] * 24}),
        json.dumps({**good, "arrivals": [10**400] * 24}),
        json.dumps({**good, "hour": 1.5}),
        json.dumps({name: good[name] for name in good if name != "hour"}),
        json.dumps({**good, "looked_at": None}),
    ):
        path.write_text(bad)
        with pytest.raises(ValueError, match=r"day_curve\.json holds no curve of the day"):
            day_curve.DayCurve.load(path, first_steering(), DAY)
    fresh = day_curve.DayCurve.load(tmp_path / "none", first_steering(), DAY)
    assert fresh.available == pytest.approx(250_000)


def test_a_source_of_turns_follows_the_curve_that_its_file_keeps(tmp_path):
    now, path = [DAY], tmp_path / "day_curve.json"
    pace = pace_steering.TurnsAhead(first_steering(population_size=1_000.0))
    learned_pace = day_curve.LearnedPace(pace, path, lambda: now[0])
    for _ in range(7):  # Of 1,000 devices ten times as many would come as are needed.
        now[0] += 600.0
        for _ in range(5_000):
            learned_pace.checked_in()
    learned_pace.learn()
    size = pace.steering.population_size
    assert size > 2_000
    learned_pace.save()
    again = pace_steering.TurnsAhead(first_steering(population_size=1_000.0))
    day_curve.LearnedPace(again, path, lambda: now[0])
    assert again.steering.population_size == pytest.approx(size, rel=0.05)


def test_hours_without_devices_and_a_clock_that_is_set_back_have_an_end():
    learner = day_curve.DayCurve(first_steering(availability=(0.0,) * 23 + (1.0,)), 10 * DAY)
    learner.came(10 * DAY, 100)
    assert not learner.advance(9 * DAY)
    learner.advance(20 * DAY)
    assert (learner.available > 0).all() and math.isfinite(learner.available.sum())


def test_a_clock_that_was_a_year_ahead_stops_the_learning_for_a_day_at_most():
    learner = day_curve.DayCurve(first_steering(), 10 * DAY)
    learner.advance(375 * DAY)
    learner.advance(10 * DAY)
    before = learner.available
    for step in range(2 * 72):
        learner.came(10 * DAY + step * 1200.0, 20_000)
    assert learner.available.max() > 1.1 * before.max()
