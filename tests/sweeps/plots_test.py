"""Tests of the pictures of a sweep: what is drawn where."""

import itertools

import pytest

from tests.sweeps import made_up
from tff_dpftrl.sweeps import plots


def _results(**fields):
    found = []
    for seed, off in ((0, -0.01), (1, 0.01)):
        for noise, accuracy, epsilon in ((0.5, 0.2, 8.0), (1.0, 0.15, 9.0), (2.0, 0.1, 2.0)):
            values = {"noise_multiplier": noise, "seed": seed}
            found.append(made_up.result(values, accuracy + off, epsilon, **fields))
    return found


def _labels(figure):
    (axes,) = figure.axes
    return axes.get_legend_handles_labels()[1]


def test_curves_have_a_line_and_a_band_for_each_setting():
    figure = plots.curves(_results())
    (axes,) = figure.axes
    assert [f"noise_multiplier={z}" for z in ("0.5", "1", "2")] == _labels(figure)[:3]
    assert len(axes.collections) == 3  # Bands.
    assert axes.lines[0].get_xydata().tolist() == [[2, 0.1], [4, pytest.approx(0.2)]]
    low, high = axes.collections[0].get_datalim(axes.transData).intervaly
    assert (low, high) == (pytest.approx(0.1 - 0.005), pytest.approx(0.21))
    assert "bigrams" in _labels(figure)


def test_curves_are_told_apart_by_colour_and_marker_and_read_in_per_cent():
    found = [made_up.result({"noise_multiplier": z}, 0.1) for z in range(1, 20)]
    (axes,) = plots.curves(found).axes
    lines = [line for line in axes.lines if "noise_multiplier" in line.get_label()]
    looks = [(line.get_color(), line.get_marker()) for line in lines]
    assert len(set(looks)) == len(looks) == 19
    assert {colour for colour, _ in looks[: len(plots.COLOURS)]} == set(plots.COLOURS)
    assert len({marker for _, marker in looks[: len(plots.COLOURS)]}) == len(plots.COLOURS)
    assert axes.yaxis.get_major_formatter().format_pct(0.2, 0.5) == "20 %"


def test_any_number_of_baselines_has_greys_that_differ():
    names = ("pretrained", "unigrams", "bigrams", "trigrams", "words alone")
    found = made_up.result({"noise_multiplier": 1.0}, 0.1, baselines=dict.fromkeys(names, 0.2))
    (axes,) = plots.curves([found]).axes
    greys = [float(line.get_color()) for line in axes.lines if line.get_label() in names]
    assert len(greys) == 5 and greys[0] == 0.7
    assert all(first > second >= 0.19 for first, second in itertools.pairwise(greys))


def test_one_seed_has_no_band():
    figure = plots.curves([made_up.result({"noise_multiplier": 1.0}, 0.1)])
    assert not figure.axes[0].collections


def test_the_front_is_marked_and_what_has_no_noise_stands_apart():
    figure = plots.pareto([*_results(), made_up.result({"mechanism": "none"}, 0.3, None)])
    (axes,) = figure.axes
    (marked,) = (line for line in axes.lines if line.get_label() == "Pareto front")
    assert marked.get_xydata().tolist() == [
        [2.0, pytest.approx(0.1)],
        [8.0, pytest.approx(0.2)],
    ]
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels == ["2", "8", "no noise"]  # 9 is too close to 8 for a label of its own.
    assert axes.get_xticks()[-1] > 9.0
    assert axes.get_xlabel() == "ε of the run itself"
    bars = [bar for bar in axes.containers if bar.has_yerr]
    assert len(bars) == 3


def test_the_axis_says_that_epsilon_is_simulated():
    figure = plots.pareto(_results(simulated_epsilon=0.5))
    (axes,) = figure.axes
    assert axes.get_xlabel() == "ε of the simulated larger run"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0.5"]


def test_noise_without_guarantee_is_not_called_none():
    figure = plots.pareto(
        [made_up.result({"noise_multiplier": 1.0, "deterministic_noise_seed": 7}, 0.3, None)]
    )
    assert [t.get_text() for t in figure.axes[0].get_xticklabels()] == ["no guarantee"]


def test_what_has_no_guarantee_has_no_place_on_the_axis():
    figure = plots.pareto(
        [
            *_results(simulated_epsilon=0.5),
            made_up.result(
                {"noise_multiplier": 1.0, "deterministic_noise_seed": 7},
                0.3,
                None,
                simulated_epsilon=0.6,
            ),
            made_up.result({"noise_multiplier": 1e9}, 0.1, 0.0, simulated_epsilon=0.0),
        ]
    )
    labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert labels == ["0.5", "no guarantee"]


@pytest.mark.pictures
def test_pictures_are_written(tmp_path):
    plots.write(tmp_path, [made_up.result({"noise_multiplier": 1.0}, 0.1)])
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "pareto.png").read_bytes()[:4] == b"\x89PNG"


def test_nothing_is_drawn_before_a_cell_is_finished(tmp_path):
    plots.write(tmp_path, [made_up.result({"noise_multiplier": 1.0}, 0.1, state="begun")])
    assert not list(tmp_path.iterdir())
