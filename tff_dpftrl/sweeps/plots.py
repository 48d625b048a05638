"""Plots of a sweep's results: `curves.png` and `pareto.png`."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tff_dpftrl import pictures
from tff_dpftrl.sweeps import results as results_lib

if TYPE_CHECKING:
    from matplotlib import axes as axes_lib
    from matplotlib import figure as figure_lib

_ACCURACY = "top-1 accuracy on held-out users"
_EXACT = "Exact figures of simulations: no ε covers them."
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#666666")
"""Colours that colour-blind readers tell apart (Okabe & Ito), but yellow, which is too pale."""
_MARKERS = "osD^vPX"
_MANY = 10  # Most curves for a legend in letters of full size.


def _figure() -> tuple[figure_lib.Figure, axes_lib.Axes]:
    figure = pictures.new_figure(8.0, 4.8)
    axes = figure.subplots()
    axes.grid(alpha=0.3)
    return figure, axes


def _draw_baselines(axes: axes_lib.Axes, baselines: Mapping[str, float]) -> None:
    step = min(0.25, 0.5 / max(1, len(baselines) - 1))  # From light grey, never to black.
    for shade, (label, value) in enumerate(baselines.items()):
        axes.axhline(value, ls="--", lw=1, color=str(0.7 - step * shade), label=label)


def _name_accuracy(axes: axes_lib.Axes) -> None:
    """Labels the vertical axis, with its values in per cent."""
    from matplotlib import ticker

    axes.set_ylabel(_ACCURACY)
    axes.yaxis.set_major_formatter(ticker.PercentFormatter(1.0, symbol=" %"))


def _looks(number: int) -> list[dict[str, Any]]:
    """Returns a colour and a marker for each curve; of 49 no two have both in common.

    Colours and markers are as many, so after each turn the markers move on by one.
    """
    size = len(COLOURS)
    return [
        {"color": COLOURS[i % size], "marker": _MARKERS[(i + i // size) % size]}
        for i in range(number)
    ]


def _add_legend(axes: axes_lib.Axes, number: int) -> None:
    """Adds a legend beside the plot, where it hides nothing."""
    size = 10 if number <= _MANY else 7
    handles, labels = axes.get_legend_handles_labels()
    axes.figure.legend(handles, labels, loc="outside right upper", fontsize=size)


def curves(results: Sequence[results_lib.CellResult]) -> figure_lib.Figure:
    """Plots held-out accuracy by round: a line for each setting, with a band of ± one error."""
    figure, axes = _figure()
    settings = results_lib.settings(results)
    for setting, look in zip(settings, _looks(len(settings)), strict=True):
        points = setting.curve()
        rounds = [number for number, _, _ in points]
        means = [mean for _, mean, _ in points]
        axes.plot(rounds, means, ms=4, lw=1.2, label=setting.label, **look)
        errors = [error or 0.0 for _, _, error in points]
        if any(errors):
            low = [mean - error for mean, error in zip(means, errors, strict=True)]
            high = [mean + error for mean, error in zip(means, errors, strict=True)]
            axes.fill_between(rounds, low, high, color=look["color"], alpha=0.2, lw=0)
    _draw_baselines(axes, results_lib.common_baselines(results))
    axes.set_xlabel(results[0].cell.kind.unit)
    axes.locator_params("x", integer=True)
    _name_accuracy(axes)
    axes.set_title("mean over seeds ± standard error", fontsize=10)
    _add_legend(axes, len(settings))
    figure.supxlabel(_EXACT, fontsize=9)
    return figure


def pareto(results: Sequence[results_lib.CellResult]) -> figure_lib.Figure:
    """Plots accuracy against ε, with error bars and the Pareto front of the settings.

    ε is that of the simulated run if every setting with a guarantee has one. Settings
    without a guarantee stand apart, at the right.
    """
    figure, axes = _figure()
    settings = [
        s for s in results_lib.settings(results) if s.mean(results_lib.ACCURACY) is not None
    ]
    simulated = results_lib.uses_simulated_epsilon(settings)
    epsilons = [
        None if s.epsilon is None else s.simulated_epsilon if simulated else s.epsilon
        for s in settings
    ]
    private = [epsilon for epsilon in epsilons if epsilon]  # 0 has no place on the axis.
    edge = (
        max(private, default=1.0) * (max(private) / min(private)) ** 0.2 * 1.5 if private else 1.0
    )
    points = []
    for setting, epsilon, look in zip(settings, epsilons, _looks(len(settings)), strict=True):
        mean, error = (f(results_lib.ACCURACY) for f in (setting.mean, setting.standard_error))
        axes.errorbar(
            [edge if epsilon is None else epsilon],
            [mean],
            yerr=None if error is None else [error],
            ls="",
            ms=6,
            capsize=3,
            label=setting.label,
            **look,
        )
        if epsilon is not None:
            points.append((epsilon, mean))
    front = [points[i] for i in results_lib.pareto_front(points)]
    if front:
        axes.plot(*zip(*front, strict=True), "k-", lw=0.8, alpha=0.6, zorder=0)
        axes.plot(*zip(*front, strict=True), "ko", ms=12, mfc="none", mew=0.8, label="Pareto front")
    _draw_baselines(axes, results_lib.common_baselines(results))
    axes.set_xscale("log")
    _mark_epsilons(
        axes, private, edge, [s for s, e in zip(settings, epsilons, strict=True) if e is None]
    )
    axes.set_xlabel("ε of the simulated larger run" if simulated else "ε of the run itself")
    _name_accuracy(axes)
    axes.set_title("mean over seeds ± standard error; each ε is of one run by itself", fontsize=10)
    _add_legend(axes, len(settings))
    figure.supxlabel(_EXACT, fontsize=9)
    return figure


def _mark_epsilons(
    axes: axes_lib.Axes,
    private: Sequence[float],
    edge: float,
    others: Sequence[results_lib.Setting],
) -> None:
    """Adds ticks at values of ε, and one for settings that have none."""
    from matplotlib import ticker

    ticks = _thinned(sorted(set(private)))
    labels = [f"{tick:.3g}" for tick in ticks]
    if others:
        is_quiet = all(setting.noise_multiplier == 0.0 for setting in others)
        ticks, labels = [*ticks, edge], [*labels, "no noise" if is_quiet else "no guarantee"]
        if private:
            axes.axvline((max(private) * edge) ** 0.5, ls=":", lw=1, color="0.6")
    axes.set_xticks(ticks, labels)
    axes.xaxis.set_minor_locator(ticker.NullLocator())


def _thinned(values: Sequence[float], closest: float = 1.15) -> list[float]:
    """Returns the values without those so close to another that their labels would overlap."""
    kept: list[float] = []
    for value in values:
        if not kept or value >= kept[-1] * closest:
            kept.append(value)
    return kept


def write(output: pathlib.Path, results: Sequence[results_lib.CellResult]) -> None:
    """Writes `curves.png` and `pareto.png` if a cell is finished."""
    if any(result.state == "finished" for result in results):
        pictures.write(output / "curves.png", curves(results))
        pictures.write(output / "pareto.png", pareto(results))
