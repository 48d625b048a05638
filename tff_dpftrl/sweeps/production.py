"""Choice of the noise for production from a sweep over noise (Xu et al. 2023, section 2.5).

The choice is the largest noise whose mean accuracy still meets a target. `accounting.planner` then
computes the report goal, the population and the ε that go with this noise.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence

from tff_dpftrl import json_text, validation
from tff_dpftrl.accounting import planner
from tff_dpftrl.mechanisms import serialization
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.sweeps import axes as axes_lib
from tff_dpftrl.sweeps import cells as cells_lib
from tff_dpftrl.sweeps import folder as folder_lib
from tff_dpftrl.sweeps import results as results_lib

_NOISE = ("noise_multiplier", "target_epsilon")


@dataclasses.dataclass(frozen=True)
class Point:
    """One setting of a noise sweep.

    Attributes:
      noise_multiplier: Noise multiplier z.
      accuracy: Mean top-1 accuracy on the held-out users.
      standard_error: Standard error of `accuracy`; None for one seed.
      setting: Finished cells of the setting.
    """

    noise_multiplier: float
    accuracy: float
    standard_error: float | None
    setting: results_lib.Setting


@dataclasses.dataclass(frozen=True)
class Family:
    """Settings that differ in their noise only.

    Attributes:
      values: Values of the other axes.
      points: Settings by increasing noise multiplier.
    """

    values: Mapping[str, axes_lib.Value]
    points: Sequence[Point]

    @property
    def label(self) -> str:
        """The name of the family for people."""
        return (
            axes_lib.label(self.values) or self.points[0].setting.results[0].cell.config.mechanism
        )


@dataclasses.dataclass(frozen=True)
class Choice:
    """The most noise with which a family meets the target.

    Attributes:
      family: Family of settings.
      point: Setting with the largest noise multiplier that meets the target.
      report_goal: Clients per round that the noise multiplier is relative to.
      num_rounds: Number of rounds of the cells.
      num_parameters: Number of parameters of the cells' model.
      delta: δ of the cells.
      noise_in_sum: Noise in the sum of the averaged updates so far (see
        `planner.noise_in_sum`).
      missed: Smaller noise multipliers that do not meet the target.
    """

    family: Family
    point: Point
    report_goal: int
    num_rounds: int
    num_parameters: int
    delta: float
    noise_in_sum: float
    missed: tuple[float, ...]


def check(cells: Sequence[cells_lib.Cell]) -> None:
    """Refuses a sweep from which no noise multiplier can be chosen.

    Its cells must differ in noise, and be of algorithm 'dp-ftrl' without sampling. They must not
    end before their last round, whose noise the plan includes.
    """
    for cell in cells:
        sampled = cell.config.sampling
        if cell.config.algorithm != "dp-ftrl" or sampled is not None:
            raise validation.UsageError(
                "--target-accuracy plans for algorithm 'dp-ftrl' without sampling, and the cell "
                f"{axes_lib.label(cell.values)} has {sampled or cell.config.algorithm!r}: leave "
                "one of them out."
            )
        for name in ("stop_at_accuracy", "max_epsilon"):
            if getattr(cell.config, name) is not None:
                raise validation.UsageError(
                    "--target-accuracy plans with the noise of all rounds, and the cell "
                    f"{axes_lib.label(cell.values)} may end earlier by {name}: leave one of them "
                    "out."
                )
    if not any(name in cell.values for cell in cells for name in _NOISE):
        raise validation.UsageError(
            "--target-accuracy looks for the largest noise multiplier that meets it: add an axis, "
            "as in --over noise_multiplier=0.5,1,2."
        )


def families(results: Sequence[results_lib.CellResult]) -> list[Family]:
    """Groups the finished settings with noise into families."""
    grouped: dict[str, tuple[dict[str, axes_lib.Value], list[Point]]] = {}
    for setting in results_lib.settings(results):
        accuracy = setting.mean(results_lib.ACCURACY)
        if accuracy is None or not setting.noise_multiplier:
            continue
        others = {name: value for name, value in setting.values.items() if name not in _NOISE}
        point = Point(
            setting.noise_multiplier,
            accuracy,
            setting.standard_error(results_lib.ACCURACY),
            setting,
        )
        grouped.setdefault(json.dumps(others), (others, []))[1].append(point)
    return [
        Family(others, sorted(points, key=lambda point: point.noise_multiplier))
        for others, points in grouped.values()
    ]


def choose(
    families: Sequence[Family], target_accuracy: float, output: pathlib.Path
) -> list[Choice]:
    """Chooses, for each family that meets a target accuracy, the most noise with which it does.

    The choices with most noise in the sum come first.
    """
    choices = []
    for family in families:
        sufficient = [point for point in family.points if point.accuracy >= target_accuracy]
        if not sufficient:
            continue
        best = sufficient[-1]
        result = best.setting.results[0]
        config = result.cell.config
        report_goal = config.simulate_report_goal or config.clients_per_round
        strategy, num_parameters = _read(folder_lib.cell_folder(output, result.cell))
        noise = result.clip_norm_inflation * planner.noise_in_sum(
            strategy,
            num_rounds=config.num_rounds,
            noise_multiplier=best.noise_multiplier,
            report_goal=report_goal,
        )
        missed = [
            point.noise_multiplier
            for point in family.points
            if point.accuracy < target_accuracy and point.noise_multiplier < best.noise_multiplier
        ]
        choices.append(
            Choice(
                family=family,
                point=best,
                report_goal=report_goal,
                num_rounds=config.num_rounds,
                num_parameters=num_parameters,
                delta=config.delta,
                noise_in_sum=noise,
                missed=tuple(missed),
            )
        )
    return sorted(choices, key=lambda choice: -choice.noise_in_sum)


def _read(folder: pathlib.Path) -> tuple[strategy_lib.Strategy, int]:
    """Reads the strategy of a run, and the number of parameters of its model."""
    path = folder / "config.json"
    try:
        content = json_text.read_object(path)
        strategy = serialization.strategy_from_dict(content["derived"]["strategy"])
        return strategy, content["facts"]["num_parameters"]
    except (ValueError, KeyError, TypeError) as error:
        raise validation.UsageError(
            f"{path} does not say which strategy its run had: {error!r}."
        ) from error


def nearest(families: Sequence[Family]) -> Point | None:
    """Returns the most accurate setting with noise; None if none is finished."""
    points = [point for family in families for point in family.points]
    return max(points, key=lambda point: point.accuracy, default=None)
