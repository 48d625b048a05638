"""What ELS and ULS cost before any gradient (Charles et al. 2024, Figures 1, 2 and 9).

`python experiments/finetuning_noise.py` computes ε against the group size by three accountings,
and the noise of the averaged gradient against group size and compute budget. Nothing is
trained. Writes experiments/results/finetuning_epsilon.csv, experiments/results/finetuning_noise.csv
and docs/experiments/finetuning_noise.png.
"""

from __future__ import annotations

import csv
import math
import pathlib

import els_comparison

from tff_dpftrl.accounting import mixture_of_gaussians
from tff_dpftrl.finetuning import example_sampling, plan
from tff_dpftrl.sweeps import plots

_HERE = pathlib.Path(__file__).resolve().parent
_EPSILONS = _HERE / "results" / "finetuning_epsilon.csv"
_NOISE = _HERE / "results" / "finetuning_noise.csv"
_PICTURE = _HERE.parent / "docs" / "experiments" / "finetuning_noise.png"
# Figure 1: T = 2000, p = 0.01, δ = 1e-6.
_STDDEVS, _GROUPS = (0.5, 1.0, 2.0), (1, 2, 4, 8, 16, 32)
_SETTING = {"sampling_probability": 0.01, "num_steps": 2000, "delta": 1e-6}
_ACCOUNTINGS = ("tight", "Rényi", "black box")
# Figures 2 and 9: N = 1024 users with K = 32 examples, T = 1000, δ = 1e-6, L = 10.
_USERS, _ROWS, _NORM = 1024, 32, 10.0
_TARGETS, _COHORTS, _USER_GROUPS = (1.0, 4.0, 16.0), (16, 64), (1, 2, 4, 8, 16, 32)
_BUDGETS = (16, 32, 64, 128, 256, 512, 1024)


def epsilons(
    groups: tuple[int, ...] = _GROUPS, stddevs: tuple[float, ...] = _STDDEVS
) -> list[dict[str, object]]:
    """Figure 1: ε of ELS by the tight accounting and two looser ones; empty if there is none."""
    found = []
    for stddev in stddevs:
        for group in groups:
            kwargs = _SETTING | {"noise_multiplier": stddev, "group_size": group}
            pair = mixture_of_gaussians.els(stddev, _SETTING["sampling_probability"], group)
            values = (
                mixture_of_gaussians.epsilon(pair, num_steps=2000, delta=_SETTING["delta"]),
                els_comparison.renyi_epsilon(**kwargs),
                els_comparison.black_box_epsilon(**kwargs),
            )
            found.append(
                {"σ": stddev, "G": group}
                | {
                    name: f"{value:.5g}" if math.isfinite(value) else ""
                    for name, value in zip(_ACCOUNTINGS, values, strict=True)
                }
            )
    return found


def noise(targets: tuple[float, ...] = _TARGETS) -> list[dict[str, object]]:
    """Figures 2 and 9: the noise's standard deviation in the averaged gradient.

    Examples are clipped to L and means of G of them to L (users whose gradients are all equal)
    or to L / √G (diverse ones, whose gradients are orthogonal).
    """
    users = example_sampling.of_sizes([_ROWS] * _USERS)
    found = []

    def add(figure: str, epsilon: float, sampling: str, group: int, units: int) -> None:
        made = plan.make_plan(
            users,
            sampling=sampling,
            group_size=group,
            expected_units=units,
            num_steps=1000,
            target_epsilon=epsilon,
            delta=1e-6,
        )
        rows_of_unit = 1 if sampling == plan.EXAMPLE else group
        found.append(
            {
                "figure": figure,
                "ε": epsilon,
                "method": "ELS" if sampling == plan.EXAMPLE else "ULS",
                "G": group,
                "units a step": units,
                "B": units * rows_of_unit,
                "σ": f"{made.noise_multiplier:.4g}",
                "noise, equal examples": f"{_NORM * made.noise_of_average:.4g}",
                "noise, diverse examples": (
                    f"{_NORM / math.sqrt(rows_of_unit) * made.noise_of_average:.4g}"
                ),
            }
        )

    for epsilon in targets:
        for group in _GROUPS:
            add("2a", epsilon, plan.EXAMPLE, group, 64)
        for budget in _BUDGETS:
            add("2b, 9", epsilon, plan.EXAMPLE, _ROWS, budget)
        for cohort in _COHORTS:
            for group in _USER_GROUPS:
                add("2b, 9", epsilon, plan.USER, group, cohort)
    return found


def draw(by_accounting: list[dict[str, object]], by_budget: list[dict[str, object]]) -> None:
    """Draws ε against G, and noise against the compute budget for each ε."""
    from matplotlib import figure

    picture = figure.Figure(figsize=(9.0, 7.0), layout="constrained")
    first, *others = picture.subplots(2, 2).flat  # The first, and one for each of _TARGETS.
    for color, stddev in enumerate(_STDDEVS):
        for name, line in zip(_ACCOUNTINGS, ("-", "--", ":"), strict=True):
            points = [row for row in by_accounting if row["σ"] == stddev and row[name]]
            first.plot(
                [row["G"] for row in points],
                [float(row[name]) for row in points],
                line,
                color=plots.COLOURS[color],
                label=f"σ = {stddev:g}, {name}",
            )
    first.set(xscale="log", yscale="log", xlabel="G of ELS (examples of a user)", ylabel="ε")
    first.set_ylim(top=3e5)  # Room for the legend.
    first.legend(fontsize=8)
    for axes, epsilon in zip(others, _TARGETS, strict=True):
        lines = [row for row in by_budget if row["figure"] == "2b, 9" and row["ε"] == epsilon]
        points = [row for row in lines if row["method"] == "ELS"]
        axes.plot(
            [row["B"] for row in points],
            [float(row["noise, equal examples"]) for row in points],
            "k--",
            label="ELS",
        )
        for color, cohort in enumerate(_COHORTS):
            points = [r for r in lines if (r["method"], r["units a step"]) == ("ULS", cohort)]
            for kind, line in (("equal", "-"), ("diverse", ":")):
                axes.plot(
                    [row["B"] for row in points],
                    [float(row[f"noise, {kind} examples"]) for row in points],
                    line,
                    color=plots.COLOURS[color],
                    label=f"ULS, M = {cohort}, {kind}",
                )
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="compute budget B (gradients a step)",
            ylabel="standard deviation",
        )
        axes.set_title(f"noise of the average, ε = {epsilon:g}", fontsize=10)
    others[-1].legend(fontsize=8)
    for axes in (first, *others):
        axes.grid(alpha=0.3, which="both")
    picture.savefig(_PICTURE, dpi=120)


def main() -> None:
    """Computes, writes and draws."""
    by_accounting, by_budget = epsilons(), noise()
    for path in (_EPSILONS, _PICTURE):
        path.parent.mkdir(parents=True, exist_ok=True)
    for path, found in ((_EPSILONS, by_accounting), (_NOISE, by_budget)):
        with open(path, "w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, found[0], lineterminator="\n")
            table.writeheader()
            table.writerows(found)
    draw(by_accounting, by_budget)
    print(f"{_EPSILONS}\n{_NOISE}\n{_PICTURE}")


if __name__ == "__main__":
    main()
