"""Updates of the tables, pictures and README of a sweep while its cells run."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from tff_dpftrl.reports import readme
from tff_dpftrl.sweeps import axes as axes_lib
from tff_dpftrl.sweeps import cells as cells_lib
from tff_dpftrl.sweeps import plots, tables
from tff_dpftrl.sweeps import results as results_lib


class ResultsWriter:
    """A writer of the results of a sweep so far."""

    def __init__(self, cells: Sequence[cells_lib.Cell], axes: axes_lib.Axes, output: pathlib.Path):
        """Initialises the writer; nothing is read yet."""
        self._cells = cells
        self._title = f"Sweep over {', '.join(axes)}"
        self._output = output
        self._finished: dict[str, results_lib.CellResult] = {}  # They do not change any more.

    def read(self) -> list[results_lib.CellResult]:
        """Reads the results of all cells."""
        results = []
        for cell in self._cells:
            result = self._finished.get(cell.name) or results_lib.read(self._output, cell)
            if result.state == "finished":
                self._finished[cell.name] = result
            results.append(result)
        return results

    def write(self) -> list[results_lib.CellResult]:
        """Writes tables and pictures."""
        results = self.read()
        tables.write(self._output, results, self._title)
        plots.write(self._output, results)
        readme.write(self._output)
        return results
