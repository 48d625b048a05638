"""The papers' extrapolations: what Figures 4, 8 and 9 are said to show."""

from __future__ import annotations

import pytest
from matplotlib import figure

from tff_dpftrl.accounting import extrapolation, guarantee, planner_plots
from tff_dpftrl.mechanisms import banded_toeplitz, zoo
from tff_dpftrl.participation import schema as schema_lib

_ROUNDS = (500, 1000, 2000, 3000)


def _blt():
    return extrapolation.TrainedMechanism(
        "BLT", lambda num_rounds: zoo.load("blt-gboard-b400"), 7.379, 6500
    )


def test_gboard_figure_4_by_report_goal():
    # "a large report goal can limit the MinS, [but] generally leads to stronger privacy
    # guarantees for reasonable population size and total rounds" (section 2.2).
    curves = extrapolation.by_rounds_and_report_goal(
        extrapolation.gboard_tree(),
        population=3_000_000,
        report_goals=(500, 3000, 12_000),
        rounds=_ROUNDS,
    )
    assert [curve.label for curve in curves] == [f"report goal {m}" for m in (500, 3000, 12_000)]
    for smaller, larger in zip(curves, curves[1:], strict=False):
        assert all(a > b for a, b in zip(smaller.rho, larger.rho, strict=True))
    for curve in curves:
        assert list(curve.rho) == sorted(curve.rho)
        assert list(curve.epsilon) == sorted(curve.epsilon)


def test_gboard_figure_4_by_min_sep():
    curves = extrapolation.by_rounds_and_min_sep(
        extrapolation.gboard_tree(), min_seps=(100, 314, 900), rounds=_ROUNDS
    )
    for smaller, larger in zip(curves, curves[1:], strict=False):
        assert all(a > b for a, b in zip(smaller.rho, larger.rho, strict=True))
    # A point of it: es-ES of 2022 but with as many participations as fit, 2000 / 314.
    expected = guarantee.dp_ftrl_guarantee(
        extrapolation.gboard_tree().strategy(2000),
        noise_multiplier=7.0,
        schema=schema_lib.MinSep(2000, 314, 7),
        delta=1e-10,
    )
    assert curves[1].rho[2] == expected.rho_zcdp
    assert curves[1].epsilon[2] == expected.epsilon


def test_blt_figure_8_by_report_goal():
    # "using larger report goal and optimizing for the largest possible min-sep achieves better
    # results"; "BLT achieves better DP guarantees" than the tree (section 5).
    goals = (1000, 3000, 6500, 13_000)
    tree, blt = extrapolation.by_report_goal(
        [extrapolation.gboard_tree(), _blt()],
        population=3_000_000,
        num_rounds=2000,
        report_goals=goals,
    )
    for curve in (tree, blt):
        assert list(curve.epsilon) == sorted(curve.epsilon, reverse=True)
    assert all(b < a for a, b in zip(tree.epsilon, blt.epsilon, strict=True))


def test_noise_grows_with_the_report_goal():
    schema = schema_lib.MinSep(1000, 400, 3)
    small = _blt().guarantee(schema, 6500, 1e-10)
    large = _blt().guarantee(schema, 13_000, 1e-10)
    assert small.noise_multiplier == 7.379
    assert large.rho_zcdp == pytest.approx(small.rho_zcdp / 4)


def test_blt_figure_9_ends_where_a_strategy_does():
    short = extrapolation.TrainedMechanism(
        "banded", lambda n: zoo.load("blt-gboard-b400") if n < 2500 else _Short(), 1.0, 6500
    )
    tree, blt, limited = extrapolation.by_rounds(
        [extrapolation.gboard_tree(), _blt(), short], min_sep=401, rounds=_ROUNDS
    )
    assert tree.x == blt.x == _ROUNDS
    assert limited.x == (500, 1000, 2000)
    assert all(b < a for a, b in zip(tree.epsilon, blt.epsilon, strict=True))


class _Short(banded_toeplitz.BandedToeplitz):
    """A strategy that ends after 2000 rounds."""

    def __init__(self):
        super().__init__((1.0,))

    @property
    def max_rounds(self):
        return 2000


def test_drawing():
    curves = extrapolation.by_rounds([_blt()], min_sep=401, rounds=_ROUNDS)
    axes = figure.Figure().subplots()
    planner_plots.draw_curves(axes, curves, x_label="rounds", quantity="epsilon")
    (line,) = axes.get_lines()
    assert tuple(line.get_ydata()) == curves[0].epsilon
    assert axes.get_ylabel() == "ε"
