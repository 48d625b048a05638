"""`curves.png`: accuracy, loss and ε against rounds."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from tff_dpftrl import durable_files

_PANELS = (
    ("top-1 accuracy, words in the vocabulary", ("top1", "eval_top1_in_vocab")),
    ("cross-entropy (nats per word or sub-word)", ("loss", "eval_loss")),
    ("ε spent, for the declared participation", ("epsilon",)),
)
EXACT = (
    "Curves of training cohorts and dashed lines counted on training users are exact figures, "
    "without noise and not covered by the privacy statement: do not publish them."
)
"""The footnote of figures that show exact figures of the training users."""


def draw(
    rows: Sequence[Mapping[str, Any]],
    *,
    title: str,
    baselines: Mapping[str, float],
    unit: str = "round",
) -> Any:
    """Draws held-out accuracy and loss, and the ε spent, against rounds.

    Args:
      rows: Rows of `metrics_log.MetricsLog`.
      title: Title of the figure.
      baselines: Top-1 accuracies of simpler models, counted on the training users and
        measured on the same held-out users: horizontal lines, by label.
      unit: Name of a round: "round", "step" or "epoch".

    Returns:
      A `matplotlib.figure.Figure`, with the footnote `EXACT` where it is due.
    """
    from matplotlib import figure as figure_lib
    from matplotlib.backends import backend_agg

    # Without pyplot: no global state, no display, no windows left open in a notebook.
    figure = figure_lib.Figure(figsize=(11, 3.6), layout="constrained")
    backend_agg.FigureCanvasAgg(figure)
    shown = [
        panel
        for panel in _PANELS
        if panel[1] != ("epsilon",) or any("epsilon" in row for row in rows)
    ]
    panels = figure.subplots(1, len(shown))
    is_exact = bool(baselines)
    for axes, (panel, names) in zip(panels, shown, strict=True):
        for name, label, style in zip(
            names, ("training cohort", "held-out users"), ("-", "o-"), strict=False
        ):
            points = [(r["round"], r[name]) for r in rows if r.get(name) is not None]
            if points:
                axes.plot(*zip(*points, strict=True), style, label=label, markersize=3, lw=1)
                is_exact |= name in ("top1", "loss")
        axes.set_xlabel(unit)
        axes.set_title(panel, fontsize=10)
    for shade, (label, value) in enumerate(baselines.items()):
        shade = 0.7 - 0.5 * shade / max(1, len(baselines) - 1)
        panels[0].axhline(value, ls="--", lw=1, color=str(shade), label=label)
    for axes in panels[:2]:
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    figure.suptitle(title, fontsize=11)
    if is_exact:
        figure.supxlabel(EXACT, fontsize=8)
    return figure


def write(
    path: pathlib.Path,
    rows: Sequence[Mapping[str, Any]],
    *,
    title: str,
    baselines: Mapping[str, float],
    unit: str = "round",
) -> None:
    """Writes the figure of `draw` as a PNG file, in one step.

    Raises:
      OSError: If it cannot be written.
    """
    figure = draw(rows, title=title, baselines=baselines, unit=unit)
    durable_files.write_picture(path, figure, dpi=120)
