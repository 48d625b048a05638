"""Plots of plans and extrapolations; needs Matplotlib."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tff_dpftrl import pictures, validation
from tff_dpftrl.accounting import extrapolation, planner

if TYPE_CHECKING:
    from matplotlib import axes as axes_lib


def draw_curves(
    axes: axes_lib.Axes, curves: Sequence[extrapolation.Curve], *, x_label: str, quantity: str
) -> None:
    """Draws the `quantity` of extrapolated curves, "rho" or "epsilon"."""
    for curve in curves:
        axes.plot(curve.x, getattr(curve, quantity), label=curve.label)
    axes.set_xlabel(x_label)
    axes.set_ylabel({"rho": "ρ (zCDP)", "epsilon": "ε"}[quantity])
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def draw_plans(axes: axes_lib.Axes, plans: Sequence[planner.Plan]) -> None:
    """Draws noise against report goal, or epsilon if all plans have the same noise."""
    noises = [plan.noise_in_sum for plan in plans]
    same_noise = max(noises) <= min(noises) * (1 + 1e-6)
    for name in dict.fromkeys(plan.mechanism for plan in plans):
        chosen = [plan for plan in plans if plan.mechanism == name]
        axes.plot(
            [plan.report_goal for plan in chosen],
            [plan.guarantee.epsilon if same_noise else plan.noise_in_sum for plan in chosen],
            marker="o",
            label=name,
        )
    axes.set_xlabel("report goal (clients a round)")
    axes.set_ylabel("ε" if same_noise else "noise in the sum of averaged updates / clip norm")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def format_of(path: str | os.PathLike[str]) -> str:
    """Returns the format that the suffix of a plot's path chooses; PNG if it has none."""
    path = pathlib.Path(path)
    form = path.suffix[1:].lower() or "png"
    known = pictures.new_figure(1, 1).canvas.get_supported_filetypes()
    if form not in known:
        raise validation.UsageError(
            f"Cannot write the plot to {path}: {form!r} is no format of Matplotlib. Let the "
            f"name end in one of {', '.join(sorted(known))}."
        )
    return form


def save_plans(path: str | os.PathLike[str], plans: Sequence[planner.Plan], title: str) -> None:
    """Writes the plot of `draw_plans` to a file in one step; the suffix of `path` is its format."""
    form, figure = format_of(path), pictures.new_figure(7, 4.5)
    import matplotlib

    with matplotlib.rc_context({"font.size": 9}):
        axes = figure.subplots()
        draw_plans(axes, plans)
        axes.set_title(title)
        figure.text(0.01, 0.005, "Utility at equal noise is a hypothesis.", fontsize=7)
        try:
            pictures.write(path, figure, form=form)
        except OSError as error:
            raise validation.UsageError(
                f"Cannot write the plot to {path}: {error.strerror}."
            ) from error
