"""What a training run leaves for people to read: a table, curves, TensorBoard events."""

from __future__ import annotations

import csv
import io
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tff_dpftrl import durable_files


class MetricsLog:
    """`metrics.csv`, one row a round, and the same as TensorBoard events.

    The table is rewritten atomically from the rows in memory, so that a killed
    run leaves whole rows only; on resuming, rows beyond the last committed round
    are dropped.
    """

    def __init__(self, folder: pathlib.Path, columns: Sequence[str], rounds_done: int):
        """Opens the log.

        Args:
          folder: Folder of the run.
          columns: Names of the columns; "round" comes first and counts from 1.
          rounds_done: Rows of later rounds, of a run that was interrupted before
            it could commit them, are dropped.
        """
        self._path = folder / "metrics.csv"
        self._columns = tuple(columns)
        self.rows: list[dict[str, Any]] = []
        if rounds_done and self._path.exists():
            with open(self._path, newline="", encoding="utf-8") as file:
                rows = [_parse(row) for row in csv.DictReader(file)]
            self.rows = [row for row in rows if row["round"] <= rounds_done]
        self._writer = tf.summary.create_file_writer(str(folder / "tensorboard"))

    def append(self, row: Mapping[str, Any]) -> None:
        """Adds a round's row; a row of the same round is replaced.

        Args:
          row: Values by column; columns left out stay empty.

        Raises:
          OSError: If the table cannot be written.
        """
        values = {name: row.get(name) for name in self._columns}
        self.rows = [r for r in self.rows if r["round"] != values["round"]] + [values]
        self._write_table()
        with self._writer.as_default(step=values["round"]):
            for name, value in values.items():
                if name != "round" and value is not None:
                    tf.summary.scalar(name, value)

    def close(self) -> None:
        """Flushes the TensorBoard events."""
        self._writer.close()

    def _write_table(self) -> None:
        table = io.StringIO()
        writer = csv.DictWriter(table, self._columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            {k: repr(float(v)) if isinstance(v, float) else v for k, v in row.items()}
            for row in self.rows
        )
        durable_files.write(self._path, table.getvalue().encode())


def _parse(row: Mapping[str, str]) -> dict[str, Any]:
    return {name: _number(text) if text else None for name, text in row.items()}


def _number(text: str) -> int | float:
    return int(text) if text.isdigit() else float(text)


def plot_curves(
    path: pathlib.Path,
    rows: Sequence[Mapping[str, Any]],
    *,
    title: str,
    baselines: Mapping[str, float],
) -> None:
    """Draws held-out accuracy and loss, and the ε spent, against rounds.

    Args:
      path: PNG file to write.
      rows: Rows of `MetricsLog`.
      title: Title of the figure.
      baselines: Top-1 accuracies of simpler models on the same held-out users,
        drawn as horizontal lines, by label.
    """
    from matplotlib import figure as figure_lib
    from matplotlib.backends import backend_agg

    # Without pyplot: no global state, no display, no windows left open in a notebook.
    figure = figure_lib.Figure(figsize=(11, 3.6), layout="constrained")
    backend_agg.FigureCanvasAgg(figure)
    accuracy, loss, spent = figure.subplots(1, 3)
    for axes, panel, names in (
        (accuracy, "top-1 accuracy, words in the vocabulary", ("top1", "eval_top1_in_vocab")),
        (loss, "cross-entropy (nats per word)", ("loss", "eval_loss")),
        (spent, "ε spent", ("epsilon",)),
    ):
        for name, label, style in zip(
            names, ("training cohort", "held-out users"), ("-", "o-"), strict=False
        ):
            points = [(r["round"], r[name]) for r in rows if r.get(name) is not None]
            if points:
                axes.plot(*zip(*points, strict=True), style, label=label, markersize=3, lw=1)
        axes.set_xlabel("round")
        axes.set_title(panel, fontsize=10)
    for shade, (label, value) in enumerate(baselines.items()):
        accuracy.axhline(value, ls="--", lw=1, color=str(0.7 - 0.25 * shade), label=label)
    accuracy.legend(fontsize=8)
    loss.legend(fontsize=8)
    figure.suptitle(title, fontsize=11)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120)
    durable_files.write(path, image.getvalue())
