"""The simulations of days show what their pictures do, on few devices and a short time."""

from __future__ import annotations

import importlib
import pathlib
import sys

import numpy as np
import pytest

from tff_dpftrl.runtime.protocol import pace_steering

_BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(str(_BENCHMARKS))


@pytest.fixture(scope="module", name="fleet")
def _fleet():
    sys.path.insert(0, str(_BENCHMARKS))
    try:
        fleet_day = importlib.import_module("fleet_day")
    finally:
        sys.path.remove(str(_BENCHMARKS))
    day = fleet_day.Day(200, goal=4)
    day.run(0.3)
    return fleet_day, day


def test_a_short_day_of_a_fleet_has_the_figures_of_the_paper(fleet):
    fleet_day, day = fleet
    hours = fleet_day.hourly(day)
    assert hours["committed"].sum() > 50 and hours["committed"].min() > 0
    # Each chosen device completes, is late, drops out, or still takes part at the end.
    ended = sum(hours[name] for name in ("reports", "refused_reports", "dropped_participating"))
    assert abs(ended.sum() - hours["configured"].sum()) <= 20
    shapes = {shape: count for shape, count, _ in day.seen.session_table.rows()}
    shapes.pop("-#", None)  # They were sent away.
    assert {"-v[]+^", "-v[]+#", "-v[!"} <= set(shapes)
    assert max(shapes, key=shapes.get) == "-v[]+^"
    assert len(day.participation_seconds) == sum(shapes.values())
    assert hours["bytes_sent"].sum() == hours["configured"].sum() * fleet_day._DOWN_BYTES


def test_the_same_seed_is_the_same_day(fleet):
    fleet_day, _ = fleet
    rows = []
    for _ in range(2):
        day = fleet_day.Day(60, goal=2, seed=1)
        day.run(0.1)
        rows.append(fleet_day.rows(day))
    assert rows[0] == rows[1]


@pytest.mark.parametrize(
    ("num_devices", "goal", "drop_outs", "min_sep"),
    [pytest.param(20, 7, 0.3, 2, marks=pytest.mark.slow), (40, 2, 0.0, 10)],
)
def test_resting_devices_cost_at_most_half_of_the_attempts(num_devices, goal, drop_outs, min_sep):
    """Rounds follow one another within seconds here, and a selection may take ten minutes."""
    resting_rounds = importlib.import_module("resting_rounds")
    row = resting_rounds.compare(num_devices, drop_outs, min_sep, goal=goal, period=5.0, hours=0.15)
    assert row["told: attempts"] > 10 and row["ratio"] >= 0.5, row
    if not drop_outs:
        assert row["skipped"] <= 1, row


def test_the_picture_is_drawn(fleet, tmp_path):
    pytest.importorskip("matplotlib")
    fleet_day, day = fleet
    fleet_day.plot(day, tmp_path / "day.png")
    assert (tmp_path / "day.png").stat().st_size > 10_000


@pytest.mark.slow  # `tests/runtime/server/day_curve_test.py` has the curve.
def test_a_learned_curve_meets_the_need_better_than_a_flat_one():
    day_curve = importlib.import_module("day_curve")
    worst = {}
    for learns in (True, False):
        devices = day_curve.Devices(4_000, have_nights=True, rng=np.random.default_rng(0))
        flat = pace_steering.PaceSteering(100, 1200.0, float(devices.available().mean()))
        ratios = day_curve.arrivals_over_need(devices, flat, days=3, learns=learns)
        worst[learns] = np.abs(ratios[48:] - 1).max()
    # 300 are needed in an hour: six standard errors are 0.35.
    assert worst[True] < 0.35 < worst[False]
