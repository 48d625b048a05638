"""The results of a sweep's cells, and of settings as means over their seeds."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tff_dpftrl import json_text
from tff_dpftrl.accounting import privacy_statement
from tff_dpftrl.reports import results as reported
from tff_dpftrl.runs import metrics_log
from tff_dpftrl.sweeps import axes as axes_lib
from tff_dpftrl.sweeps import cells as cells_lib
from tff_dpftrl.sweeps import folder as folder_lib

ACCURACY = "eval_top1_in_vocab"
"""The metric that settings are plotted by: top-1 accuracy on the held-out users."""

LOSS, BITS = "eval_loss", "eval_bits_per_character"
"""Metrics that settings are ranked by: held-out loss a token, and in bits a character of the text.

Only the second one compares different tokens, such as words and sub-words.
"""

_EVALUATED = "eval_"


@dataclasses.dataclass(frozen=True)
class CellResult:
    """The results of a cell so far.

    Attributes:
      failure: Last line of a cell that failed; empty if it did not.
      rows: Metrics of the committed rounds.
      epsilon: ε of the privacy statement; None without a guarantee, or before the end.
      simulated_epsilon: ε of the larger run that is simulated, if any.
      delta: δ of the privacy statement, before the end of the options; None if it is not known.
      noise_multiplier: Noise multiplier z, in a simulation that of the larger run; 0 for no
        noise. None before the end if it is calibrated.
      baselines: Accuracies of n-gram models, by name.
      code_version: Version of this package that began the run; None if it has not begun.
      of_last_model: Further metrics of the model after the last round, by name: the accuracy with
        a cache of each user's earlier text. Empty before the end, and of protected held-out users.
    """

    cell: cells_lib.Cell
    state: folder_lib.State
    failure: str
    rows: Sequence[Mapping[str, Any]]
    epsilon: float | None
    simulated_epsilon: float | None
    delta: float | None
    noise_multiplier: float | None
    baselines: Mapping[str, float]
    code_version: str | None = None
    of_last_model: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def evaluations(self) -> list[Mapping[str, Any]]:
        """The rows of rounds after which the model was evaluated on held-out users."""
        return [row for row in self.rows if row.get(ACCURACY) is not None]

    @property
    def metrics(self) -> dict[str, float]:
        """The last evaluation, the best accuracy of all of them, and the time of all rounds."""
        metrics = {}
        if self.evaluations:
            last = self.evaluations[-1]
            metrics = {
                name: value
                for name, value in last.items()
                if name.startswith(_EVALUATED) and value is not None
            }
            metrics["best_" + ACCURACY] = max(row[ACCURACY] for row in self.evaluations)
        metrics |= {f"{_EVALUATED}{name}": value for name, value in self.of_last_model.items()}
        if self.rows:
            metrics["seconds"] = math.fsum(row.get("seconds") or 0.0 for row in self.rows)
        return metrics


def read(output: pathlib.Path, cell: cells_lib.Cell) -> CellResult:
    """Reads the results of a cell from its files; a cell that has not begun has no rows."""
    folder = folder_lib.cell_folder(output, cell)
    state, ending = folder_lib.state(folder), folder_lib.read_ending(folder)
    path = folder / "privacy_statement.json"
    statement = _json(folder, path.name) if state == "finished" else {}
    privacy_statement.refuse_edited(statement, path)
    parameters = statement.get("parameters", {})
    options = cell.config.to_dict()
    noise_multiplier = 0.0 if options["mechanism"] == "none" else options["noise_multiplier"]
    if noise_multiplier is None:
        calibrated = parameters.get("noise_multiplier")
        noise_multiplier = parameters.get("simulated_noise_multiplier", calibrated)
    return CellResult(
        cell=cell,
        state=state,
        failure=ending.last_line if ending is not None else "",
        rows=metrics_log.read_rows(folder, cell.kind.length(cell.config)),
        epsilon=statement.get("epsilon"),
        simulated_epsilon=parameters.get("simulated_epsilon"),
        delta=statement.get("delta", options["delta"]),
        noise_multiplier=noise_multiplier,
        baselines=_json(folder, "private/baselines.json"),
        code_version=_json(folder, "config.json").get("versions", {}).get("tff_dpftrl"),
        of_last_model=_of_last_model(folder) if state == "finished" else {},
    )


def _of_last_model(folder: pathlib.Path) -> dict[str, float]:
    return reported.with_earlier_text(_json(folder, "held_out.json"), "top1_with_earlier_text")


def _json(folder: pathlib.Path, name: str) -> dict[str, Any]:
    path = folder / name
    return json_text.read_object(path, folder=folder) if path.exists() else {}


@dataclasses.dataclass(frozen=True)
class Setting:
    """Finished cells that differ in their seed only, with the values of the other axes."""

    values: Mapping[str, axes_lib.Value]
    results: Sequence[CellResult]

    @property
    def label(self) -> str:
        """The name of the setting for people."""
        return axes_lib.label(self.values) or "all seeds"

    @property
    def epsilon(self) -> float | None:
        """The largest ε of its cells; None if one of them has no guarantee."""
        return _largest(result.epsilon for result in self.results)

    @property
    def simulated_epsilon(self) -> float | None:
        """The largest simulated ε of its cells; None if one of them has none."""
        return _largest(result.simulated_epsilon for result in self.results)

    @property
    def noise_multiplier(self) -> float | None:
        """The smallest noise multiplier of its cells (calibrated ones may differ)."""
        noise_multipliers = [result.noise_multiplier for result in self.results]
        return None if None in noise_multipliers else min(noise_multipliers)

    def mean(self, metric: str) -> float | None:
        """Returns the mean of a metric over the cells; None if none of them has it."""
        values = self._values(metric)
        return float(np.mean(values)) if values else None

    def standard_error(self, metric: str) -> float | None:
        """Returns the standard error S / √n of a metric over the n cells; None for n < 2."""
        values = self._values(metric)
        if len(values) < 2 or not np.all(np.isfinite(values)):
            return None
        return float(np.std(values, ddof=1) / math.sqrt(len(values)))

    def _values(self, metric: str) -> list[float]:
        return [r.metrics[metric] for r in self.results if metric in r.metrics]

    def curve(self) -> list[tuple[int, float, float | None]]:
        """Returns round, mean accuracy and its standard error for rounds that all evaluated."""
        points = []
        by_cell = [{row["round"]: row[ACCURACY] for row in r.evaluations} for r in self.results]
        for number in sorted(set.intersection(*map(set, by_cell))):
            values = [cell[number] for cell in by_cell]
            error = None
            if len(values) > 1:
                error = float(np.std(values, ddof=1) / math.sqrt(len(values)))
            points.append((number, float(np.mean(values)), error))
        return points


def _largest(values: Iterable[float | None]) -> float | None:
    listed = list(values)
    return None if None in listed or not listed else max(listed)


def settings(results: Sequence[CellResult]) -> list[Setting]:
    """Returns the settings that have a finished cell, in the order of the cells."""
    pooled: dict[str, list[CellResult]] = {}
    for result in results:
        if result.state == "finished":
            pooled.setdefault(json.dumps(result.cell.setting), []).append(result)
    return [Setting(cells[0].cell.setting, cells) for cells in pooled.values()]


def ranked(settings: Sequence[Setting]) -> tuple[str, list[Setting]]:
    """Ranks settings by their means on held-out users; those without a mean come last.

    Returns the metric, `BITS` if all settings have it and else `LOSS`, and the settings by its
    increasing mean.
    """
    metric = LOSS if any(setting.mean(BITS) is None for setting in settings) else BITS

    def rank(setting: Setting) -> float:
        mean = setting.mean(metric)
        return math.inf if mean is None or math.isnan(mean) else mean

    return metric, sorted(settings, key=rank)


def uses_simulated_epsilon(settings: Sequence[Setting]) -> bool:
    """Returns whether every setting with a guarantee has the ε of a simulated run, too."""
    private = [setting for setting in settings if setting.epsilon is not None]
    return bool(private) and all(s.simulated_epsilon is not None for s in private)


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Returns the points (cost, gain) that no other beats: their indices by increasing cost.

    Equal points are all on the front.
    """

    def is_beaten(cost: float, gain: float) -> bool:
        return any(
            other_cost <= cost and other_gain >= gain and (other_cost, other_gain) != (cost, gain)
            for other_cost, other_gain in points
        )

    front = [i for i, point in enumerate(points) if not is_beaten(*point)]
    return sorted(front, key=lambda i: points[i])


def common_baselines(results: Iterable[CellResult]) -> dict[str, float]:
    """Returns the mean accuracies of n-gram models over seeds; none if they differ by setting."""
    by_seed: dict[int, Mapping[str, float]] = {}
    for result in results:
        baselines = result.baselines
        if baselines and by_seed.setdefault(result.cell.config.seed, baselines) != baselines:
            return {}
    names = dict.fromkeys(name for baselines in by_seed.values() for name in baselines)
    means = {
        name: float(np.mean([one[name] for one in by_seed.values() if name in one]))
        for name in names
    }
    return reported.levels(means)
