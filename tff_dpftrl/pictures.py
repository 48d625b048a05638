"""Figures of Matplotlib that are written to files: without pyplot, windows and backends."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from tff_dpftrl import durable_files

if TYPE_CHECKING:
    from matplotlib import figure as figure_lib


def new_figure(width: float, height: float) -> figure_lib.Figure:
    """Makes an empty figure, sizes in inches, which no window of pyplot shows."""
    if "matplotlib" not in sys.modules:  # Its import refuses an unknown MPLBACKEND.
        backend = os.environ.pop("MPLBACKEND", None)
        try:
            import matplotlib

            if backend:
                matplotlib.rcParams["backend"] = backend
        except ValueError:  # No backend, or one of an older version.
            backend = None
        finally:
            if backend is not None:
                os.environ["MPLBACKEND"] = backend
    from matplotlib import figure as figure_lib
    from matplotlib.backends import backend_agg

    figure = figure_lib.Figure(figsize=(width, height), layout="constrained")
    backend_agg.FigureCanvasAgg(figure)
    return figure


def write(
    path: str | os.PathLike[str],
    figure: figure_lib.Figure,
    *,
    dpi: int = 150,
    form: str = "png",
    private: bool = False,
) -> None:
    """Writes a figure in one step; after an error an existing file is unchanged.

    `form` is a format that Matplotlib knows. With `private`, only the owner may read the file.
    """
    with durable_files.replacing(path, private=private) as file:
        figure.savefig(file, format=form, dpi=dpi)
