"""Tests of `reports.line_chart`."""

import re
import sys
from xml.etree import ElementTree

import pytest

from tests.reports import made_up
from tff_dpftrl.reports import line_chart


def test_a_curve_is_drawn_to_scale_and_said_in_words():
    drawn = line_chart.chart("Loss", {"a": [(0, 0.0), (5, 10.0), (10, 5.0)]}, x="round", y="nats")
    figure = ElementTree.fromstring(drawn)
    (path,) = [one for one in figure.iter("path") if one.get("d", "").count("L") == 2]
    points = [tuple(map(float, pair.split())) for pair in path.get("d")[1:].split("L")]
    (x0, y0), (x1, y1), (x2, y2) = points
    assert x1 - x0 == pytest.approx(x2 - x1) and x0 < x1
    assert y2 - y1 == pytest.approx((y0 - y1) / 2) and y1 < y0  # SVG counts downwards.
    said = figure.find("svg").get("aria-label")
    assert "a: from 0 at round 0 to 5 at round 10" in said and "nats by round" in said


@pytest.mark.parametrize(
    "points", [[(1, 0.0)], [(1, 2.0), (2, 2.0)], [(1, -1.0), (2, 1e-9)], [(1, 1e300), (2, 0.0)]]
)
def test_any_finite_values_are_inside_of_the_picture(points):
    drawn = line_chart.chart("t", {"a": points}, x="x", y="y", levels={"level": 0.5})
    figure = ElementTree.fromstring(drawn)
    for circle in figure.iter("circle"):
        assert 0 <= float(circle.get("cx")) <= 420 and 0 <= float(circle.get("cy")) <= 230
    assert "nan" not in drawn and "inf" not in drawn


def test_no_points_make_no_chart_and_too_many_curves_are_counted():
    assert line_chart.chart("t", {"a": []}, x="x", y="y") == ""
    curves = {f"run {i}": [(1, i), (2, i)] for i in range(line_chart.MOST_SERIES + 3)}
    drawn = line_chart.chart("t", curves, x="x", y="y")
    assert "3 more are not drawn." in drawn
    colours = set(re.findall(r'class="curve (c\d)"', drawn))
    assert len(colours) == line_chart.MOST_SERIES


def test_long_curves_keep_their_last_point():
    drawn = line_chart.chart("t", {"a": [(i, i) for i in range(5000)]}, x="x", y="y")
    assert len(drawn) < 20_000 and "at x 4999" in drawn


def test_labels_are_escaped():
    drawn = line_chart.chart(
        made_up.IMAGE, {made_up.SCRIPT: [(1, 1)]}, x=made_up.IMAGE, y=made_up.SCRIPT
    )
    assert "<script" not in drawn and "<img" not in drawn


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
