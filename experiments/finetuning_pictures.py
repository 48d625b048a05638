"""Pictures of what finetuning_text.py measured: `python experiments/finetuning_pictures.py`.

Writes docs/experiments/finetuning_text.png, and with it
experiments/results/finetuning_doubling.csv: what Estimate-and-Double chooses beside the best and
the other cells of the map, as in Figures 14 and 15 of Charles et al. 2024.
"""

from __future__ import annotations

import csv
import math
import pathlib
import statistics
from collections.abc import Iterable

import finetuning_text

from tff_dpftrl.finetuning import group_size, plan
from tff_dpftrl.sweeps import plots

_HERE = pathlib.Path(__file__).resolve().parent
_RESULTS = _HERE / "results"
_PICTURE = _HERE.parent / "docs" / "experiments" / "finetuning_text.png"
_DOUBLING = _RESULTS / "finetuning_doubling.csv"
_CORPORA = ("commits", "irc")

Rows = list[dict[str, str]]


def read(name: str) -> Rows:
    """The rows of results/finetuning_NAME.csv; none if there is no such file."""
    path = _RESULTS / f"finetuning_{name}.csv"
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def mean_losses(rows: Rows, *axes: str) -> dict[tuple[str, ...], tuple[float, float]]:
    """Mean loss and its standard error over seeds, by the values of some columns."""
    losses: dict[tuple[str, ...], list[float]] = {}
    for row in rows:
        losses.setdefault(tuple(row[axis] for axis in axes), []).append(float(row["loss"]))
    return {
        key: (
            statistics.fmean(found),
            statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else math.nan,
        )
        for key, found in losses.items()
    }


def doubling(corpus: str) -> list[dict[str, object]]:
    """Estimate-and-Double against all cells of the map, for each ε and compute budget."""
    facts, means = read(corpus), mean_losses(read(f"{corpus}_map"), "ε", "B", "G")
    norms = group_size.GradientNorms(
        tuple(int(row["G"]) for row in facts), tuple(float(row["L(G)"]) for row in facts)
    )
    num_users, num_examples = int(facts[0]["users"]), int(facts[0]["examples"])
    found = []
    for epsilon, budget in dict.fromkeys((key[0], key[1]) for key in means):
        sigma = plan.noise_multiplier_of_cohort(
            num_users,
            num_steps=finetuning_text.STEPS,
            target_epsilon=float(epsilon),
            delta=plan.default_delta(num_examples),
        )
        chosen, printed = (
            group_size.estimate_and_double(
                norms, sigma, compute_budget=int(budget), num_users=num_users, as_printed=as_printed
            )
            for as_printed in (False, True)
        )
        losses = {
            int(key[2]): mean for key, (mean, _) in means.items() if key[:2] == (epsilon, budget)
        }
        best = min(losses, key=losses.get)
        found.append(
            {
                "ε": epsilon,
                "B": budget,
                "best G": best,
                "its loss": f"{losses[best]:.4f}",
                "G chosen": chosen.group_size,
                "excess": _excess(losses[chosen.group_size], losses[best]),
                "G as printed": printed.group_size,
                "excess as printed": _excess(losses[printed.group_size], losses[best]),
                "excess of a random G": _excess(statistics.fmean(losses.values()), losses[best]),
            }
        )
    return found


def _excess(loss: float, best: float) -> str:
    return f"{100 * (loss / best - 1):.2f} %"


def draw() -> None:
    """Draws the trade-off of each corpus, the group size of ELS and the map of ULS."""
    from matplotlib import figure

    picture = figure.Figure(figsize=(10.0, 7.6), layout="constrained")
    axes = picture.subplots(2, 2)
    for place, corpus in zip(axes[0], _CORPORA, strict=True):
        _draw_trade_off(place, corpus)
    _draw_groups(axes[1][0], "commits")
    _draw_map(picture, axes[1][1], "commits")
    picture.savefig(_PICTURE, dpi=110)


def _draw_trade_off(axes, corpus: str) -> None:
    means = mean_losses(read(f"{corpus}_epsilon"), "method", "B", "ε")
    budgets = sorted({key[1] for key in means}, key=int)
    colours = dict(zip(("64", "256", "1024"), plots.COLOURS, strict=False))
    styles = {finetuning_text.ULS: "-", finetuning_text.ELS: "--", finetuning_text.PASSES: ":"}
    for budget in budgets:
        for method, style in styles.items():
            line = sorted(
                (float(e), *found)
                for (m, b, e), found in means.items()
                if (m, b) == (method, budget)
            )
            if line:
                xs, ys, errors = zip(*line, strict=True)
                axes.errorbar(
                    xs,
                    ys,
                    errors,
                    color=colours[budget],
                    linestyle=style,
                    marker="o",
                    markersize=3,
                    label=f"{method}, B = {budget}",
                )
    axes.axhline(float(read(corpus)[0]["pretrained loss"]), color="grey", label="pretrained")
    axes.set(xscale="log", xlabel="ε", ylabel="loss on held-out users, nats a word", title=corpus)
    axes.set_xticks([1, 4, 16], ["1", "4", "16"])
    axes.minorticks_off()
    axes.legend(fontsize=8, ncols=2)
    axes.grid(alpha=0.3)


def _draw_groups(axes, corpus: str) -> None:
    means = mean_losses(read(f"{corpus}_group"), "ε", "G")
    axes.set_prop_cycle(color=plots.COLOURS)
    for epsilon in dict.fromkeys(key[0] for key in means):
        line = sorted((int(g), *found) for (e, g), found in means.items() if e == epsilon)
        xs, ys, errors = zip(*line, strict=True)
        axes.errorbar(xs, ys, errors, marker="o", markersize=3, label=f"ε = {epsilon}")
    median = float(read(corpus)[0]["median"])
    axes.axvline(median, color="grey", linestyle=":", label=f"median of the users, {median:g}")
    axes.set_xscale("log", base=2)
    axes.set(
        xlabel="group size of ELS (examples)",
        ylabel="loss, nats a word",
        title=f"{corpus}, ELS, B = 256",
    )
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)


def _draw_map(picture, axes, corpus: str) -> None:
    means = mean_losses(read(f"{corpus}_map"), "ε", "G", "B")
    epsilon = min({key[0] for key in means}, key=float)
    cells = {
        (int(g), int(b) // int(g)): mean for (e, g, b), (mean, _) in means.items() if e == epsilon
    }
    groups, cohorts = (sorted(set(values)) for values in zip(*cells, strict=True))
    grid = [[cells.get((group, cohort), math.nan) for cohort in cohorts] for group in groups]
    image = axes.imshow(grid, origin="lower", aspect="auto", cmap="Blues")
    for (group, cohort), loss in cells.items():
        axes.text(
            cohorts.index(cohort),
            groups.index(group),
            f"{loss:.3f}",
            ha="center",
            va="center",
            color="white" if image.norm(loss) > 0.6 else "black",
            fontsize=8,
        )
    axes.set_xticks(range(len(cohorts)), cohorts)
    axes.set_yticks(range(len(groups)), groups)
    axes.set(
        xlabel="cohort M (users)",
        ylabel="group size G (examples)",
        title=f"{corpus}, ULS, ε = {epsilon}: loss",
    )
    picture.colorbar(image, ax=axes, label="nats a word")


def _write(path: pathlib.Path, rows: Iterable[dict[str, object]]) -> None:
    rows = list(rows)
    with open(path, "w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, rows[0], lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def main() -> None:
    """Draws and writes."""
    draw()
    _write(_DOUBLING, doubling("commits"))
    print(f"{_PICTURE}\n{_DOUBLING}")


if __name__ == "__main__":
    main()
