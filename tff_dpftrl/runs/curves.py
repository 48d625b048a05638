"""`curves.png`, and `private/curves.png` with exact figures: accuracy, loss and ε by round."""

from __future__ import annotations

import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tff_dpftrl import pictures

NAME = "curves.png"
"""Name of the figure's file."""

_EXACT_COLUMNS = ("loss", "top1")  # Of the training cohorts.
_PANELS = (
    ("top-1 accuracy, words in the vocabulary", ("top1", "eval_top1_in_vocab", "noised_top1")),
    ("cross-entropy (nats per word or sub-word)", ("loss", "eval_loss", "noised_loss")),
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
    baselines: Mapping[str, float] | None = None,
    public_baselines: Mapping[str, float] | None = None,
    unit: str = "round",
) -> Any:
    """Draws held-out accuracy and loss, and the ε spent, against rounds, as a Matplotlib figure.

    Baselines are top-1 accuracies of simpler models on the same held-out users, drawn as horizontal
    lines, by label: counted on the training users, or not (`public_baselines`). `unit` is the name
    of a round: "round", "step" or "epoch". The footnote `EXACT` stands where it is due.
    """
    figure = pictures.new_figure(11, 3.6)
    shown = [
        panel
        for panel in _PANELS
        if panel[1] != ("epsilon",) or any("epsilon" in row for row in rows)
    ]
    panels = figure.subplots(1, len(shown))
    is_exact = bool(baselines)
    for axes, (panel, names) in zip(panels, shown, strict=True):
        for name, label, style in zip(
            names,
            ("training cohort", "held-out users", "training cohort, with noise"),
            ("-", "o-", "."),
            strict=False,
        ):
            points = [(r["round"], r[name]) for r in rows if r.get(name) is not None]
            if points:
                axes.plot(*zip(*points, strict=True), style, label=label, markersize=3, lw=1)
                is_exact |= name in _EXACT_COLUMNS
        axes.set_xlabel(unit)
        axes.set_title(panel, fontsize=10)
    lines = {**(public_baselines or {}), **(baselines or {})}
    for shade, (label, value) in enumerate(lines.items()):
        shade = 0.7 - 0.5 * shade / max(1, len(lines) - 1)
        panels[0].axhline(value, ls="--", lw=1, color=str(shade), label=label)
    for axes in panels[:2]:
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    figure.suptitle(title, fontsize=11)
    if is_exact:
        figure.supxlabel(EXACT, fontsize=8)
    return figure


def write(
    output: pathlib.Path,
    rows: Sequence[Mapping[str, Any]],
    *,
    title: str,
    baselines: Mapping[str, float] | None = None,
    public_baselines: Mapping[str, float] | None = None,
    unit: str = "round",
    exact: Collection[str] = (),
) -> None:
    """Writes the figure of `draw` without exact figures, and with them to `private/`.

    The folder gets `curves.png`, and `private/curves.png` if there are exact figures. `exact` names
    columns that are exact, besides those of the training cohorts.
    """
    exact = {*_EXACT_COLUMNS, *exact}
    options: dict[str, Any] = {"title": title, "public_baselines": public_baselines, "unit": unit}
    public = [{k: v for k, v in row.items() if k not in exact} for row in rows]
    pictures.write(output / NAME, draw(public, **options), dpi=120)
    if baselines or any(row.get(name) is not None for row in rows for name in exact):
        (output / "private").mkdir(mode=0o700, exist_ok=True)
        figure = draw(rows, baselines=baselines, **options)
        pictures.write(output / "private" / NAME, figure, dpi=120, private=True)
