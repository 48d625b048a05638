"""ELS and ULS on synthetic means, Figure 3 of Charles et al. 2024.

`python experiments/mean_estimation.py` makes one curve for ELS (G = K) and one for each group size
of ULS, against ε, compute budget and the spread of a user's examples; everything else is the
paper's default. Writes experiments/results/mean_estimation.csv and
docs/experiments/mean_estimation.png.
"""

from __future__ import annotations

import csv
import dataclasses
import pathlib

import gaussian_means

from tff_dpftrl.finetuning import plan
from tff_dpftrl.sweeps import plots

_HERE = pathlib.Path(__file__).resolve().parent
_RESULTS = _HERE / "results" / "mean_estimation.csv"
_PICTURE = _HERE.parent / "docs" / "experiments" / "mean_estimation.png"
# Field of the task, its label, and the values that it takes while all else is as by default.
_VARIED = (
    ("epsilon", "ε", (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)),
    ("compute_budget", "compute budget B, gradients a step", (16, 32, 64, 128, 256, 512)),
    ("within_user", "σ₂, spread of a user's examples", (0.0, 1.0, 2.0, 4.0, 8.0)),
)
_METHODS = (
    gaussian_means.Method(plan.EXAMPLE, 16),
    *(gaussian_means.Method(plan.USER, group_size) for group_size in (1, 2, 4, 8, 16)),
)


def rows(num_trials: int = 128) -> list[dict[str, object]]:
    """One row for each method and value of each of the three axes of Figure 3."""
    default = gaussian_means.Task()
    found, known = [], {}
    for varied, _, values in _VARIED:
        for value in values:
            task = dataclasses.replace(default, **{varied: value})
            for method in _METHODS:
                try:
                    method.check(task)
                except ValueError:  # Fewer users than the budget asks for.
                    continue
                if (task, method) not in known:
                    known[task, method] = gaussian_means.best(task, method, num_trials=num_trials)
                best = known[task, method]
                found.append(
                    {
                        "varied": varied,
                        "ε": task.epsilon,
                        "B": task.compute_budget,
                        "σ₂": task.within_user,
                        "method": "ELS" if method.sampling == plan.EXAMPLE else "ULS",
                        "G": method.group_size,
                        "σ": f"{best.noise_multiplier:.4g}",
                        "loss": f"{best.loss:.4g}",
                        "standard error": f"{best.standard_error:.2g}",
                        "learning rate": f"{best.learning_rate:.3g}",
                        "clip norm": f"{best.clip_norm:g}",
                    }
                )
    return found


def draw(found: list[dict[str, object]]) -> None:
    """Draws loss against each axis, a line for each method."""
    from matplotlib import figure

    picture = figure.Figure(figsize=(9.0, 3.6), layout="constrained")
    for axes, (varied, label, _) in zip(picture.subplots(1, 3), _VARIED, strict=True):
        axes.set_prop_cycle(color=plots.COLOURS)
        column = {"epsilon": "ε", "compute_budget": "B", "within_user": "σ₂"}[varied]
        for method, marker in zip(_METHODS, "osD^vP", strict=False):
            name = "ELS" if method.sampling == plan.EXAMPLE else "ULS"
            line = [
                row
                for row in found
                if (row["varied"], row["method"], row["G"]) == (varied, name, method.group_size)
            ]
            axes.errorbar(
                [row[column] for row in line],
                [float(row["loss"]) for row in line],
                [float(row["standard error"]) for row in line],
                marker=marker,
                markersize=4,
                linestyle="--" if name == "ELS" else "-",
                color="black" if name == "ELS" else None,
                label=f"{name}, G = {method.group_size}",
            )
        if varied != "within_user":
            axes.set_xscale("log", base=2)
        axes.set(yscale="log", xlabel=label, ylabel="squared error ‖θ − μ‖²")
        axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    picture.savefig(_PICTURE, dpi=120)


def main() -> None:
    """Computes, writes and draws."""
    found = rows()
    for path in (_RESULTS, _PICTURE):
        path.parent.mkdir(parents=True, exist_ok=True)
    with open(_RESULTS, "w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, found[0], lineterminator="\n")
        table.writeheader()
        table.writerows(found)
    draw(found)
    print(f"{_RESULTS}\n{_PICTURE}")


if __name__ == "__main__":
    main()
