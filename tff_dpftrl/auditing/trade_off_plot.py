"""Plot of trade-off curves, `trade_off.png`: tests that the claim allows, and that were found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tff_dpftrl import pictures
from tff_dpftrl.accounting import privacy_plot

Curve = privacy_plot.Curve
_FOOTNOTE = (
    "Tests below the claimed curve refute the claim, where chance cannot explain them;\n"
    "tests above it prove nothing."
)


def draw(
    *,
    claimed: Curve,
    empirical: tuple[Sequence[float], Sequence[float]],
    shown: Curve | None,
    title: str,
) -> Any:
    """Draws false negative over false positive rates of tests; `shown` is the found lower bound."""
    figure = pictures.new_figure(5.5, 5.2)
    axes = figure.subplots()
    curves = [("claimed", privacy_plot.RUN, claimed)]
    if shown is not None:
        curves.append(("lower bound found", privacy_plot.OTHER, shown))
    privacy_plot.draw_trade_off(axes, curves, chance="guessing")
    colour, style = privacy_plot.TESTS
    axes.plot(*empirical, style, color=colour, markersize=2.5, lw=1, label="tests that were tried")
    axes.set_xlabel("false positive rate: says “took part” of one who did not")
    axes.set_ylabel("false negative rate: says “did not” of one who did")
    axes.legend(fontsize=8)
    axes.set_title(title, fontsize=9, wrap=True)
    figure.supxlabel(_FOOTNOTE, fontsize=7)
    return figure
