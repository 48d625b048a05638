"""Pictures of what finetuning_text.py measured: `python experiments/finetuning_pictures.py`.

Writes docs/experiments/finetuning_text.png, and with it
experiments/results/finetuning_doubling.csv: what Estimate-and-Double and simpler rules choose
beside the best cell of the map, as in Figures 14 and 15 of Charles et al. 2024. With --data FOLDER,
of the files named below, it also draws docs/experiments/user_sizes.png, as their Figure 10.
"""

from __future__ import annotations

import argparse
import itertools
import math
import pathlib
import statistics

import finetuning_text
import numpy as np

from tff_dpftrl.data import sources, split
from tff_dpftrl.finetuning import group_size, plan
from tff_dpftrl.sweeps import plots

_HERE = pathlib.Path(__file__).resolve().parent
_RESULTS = _HERE / "results"
_PICTURE = _HERE.parent / "docs" / "experiments" / "finetuning_text.png"
_DOUBLING = _RESULTS / "finetuning_doubling.csv"
_SIZES = _PICTURE.with_name("user_sizes.png")
_CORPORA = ("commits", "irc")
_FILES = {
    "commits by author": "commits_by_author.jsonl.gz",
    "IRC by user": "ubuntu_irc_by_user.jsonl.gz",
    "Shakespeare by role": "shakespeare_by_role.jsonl.gz",
}

Rows = list[dict[str, str]]


def read(name: str) -> Rows:
    """The rows of results/finetuning_NAME.csv; none if there is no such file."""
    return finetuning_text.read(_RESULTS / f"finetuning_{name}.csv")


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


def doubling(corpus: str, figure: str) -> list[dict[str, object]]:
    """Estimate-and-Double and simpler rules against all cells of a map, by ε and compute budget."""
    facts, means = read(corpus), mean_losses(read(f"{corpus}_{figure}"), "ε", "B", "G")
    if not means:
        return []
    norms = group_size.GradientNorms(
        tuple(int(row["G"]) for row in facts), tuple(float(row["L(G)"]) for row in facts)
    )
    num_users, num_examples = int(facts[0]["users"]), int(facts[0]["examples"])
    num_steps = finetuning_text.FIGURES[figure]
    found = []
    for epsilon, budget in dict.fromkeys((key[0], key[1]) for key in means):
        sigma = plan.noise_multiplier_of_cohort(
            num_users,
            num_steps=num_steps,
            target_epsilon=float(epsilon),
            delta=plan.default_delta(num_examples),
        )
        chosen, printed = (
            group_size.estimate_and_double(
                norms, sigma, compute_budget=int(budget), num_users=num_users, as_printed=as_printed
            )
            for as_printed in (False, True)
        )
        at_epsilon = {
            (int(b), int(g)): mean for (e, b, g), (mean, _) in means.items() if e == epsilon
        }
        losses = {group: loss for (b, group), loss in at_epsilon.items() if b == int(budget)}
        if len(losses) < len(group_size.splits(int(budget), num_users=num_users)):
            continue  # Not all of its cells are measured.
        best = min(losses, key=losses.get)
        rules = {
            "Estimate-and-Double": losses[chosen.group_size],
            "Greedy Oracle": losses[_greedy(at_epsilon, int(budget))],
            "Max Cohort": losses[min(losses)],
            "Max Group": losses[max(losses)],
            "Random": statistics.fmean(losses.values()),
        }
        found.append(
            {
                "steps": num_steps,
                "ε": epsilon,
                "B": budget,
                "best G": best,
                "its loss": f"{losses[best]:.4f}",
                "G chosen": chosen.group_size,
                "G as printed": printed.group_size,
                **{
                    name: f"{100 * (loss / losses[best] - 1):.2f} %" for name, loss in rules.items()
                },
            }
        )
    return found


def _greedy(losses: dict[tuple[int, int], float], budget: int) -> int:
    """Returns G of a budget, by the losses of every smaller (B, G): doubles what is better."""
    group, spent = 1, group_size.SMALLEST_COHORT
    while spent < budget:
        spent *= 2
        group = min((group, 2 * group), key=lambda one: losses[spent, one])
    return group


def draw() -> None:
    """Draws the trade-off of each corpus, the group size of ELS and the map of ULS."""
    from matplotlib import figure

    picture = figure.Figure(figsize=(10.0, 11.2), layout="constrained")
    axes = picture.subplots(3, 2)
    for place, corpus in zip(axes[0], _CORPORA, strict=True):
        _draw_trade_off(place, corpus)
    _draw_groups(axes[1][0], "commits", "group", "60 steps, B = 256")
    _draw_groups(axes[1][1], "commits_800", "long", "1,000 steps, B = 64")
    axes[1][1].set_ylim(3.6, 4.05)  # Without noise G = 1 is far above.
    _draw_map(picture, axes[2][0], "commits_small", "large_map")
    _draw_rules(axes[2][1], "commits_small", "large_map")
    picture.savefig(_PICTURE, dpi=110)


def draw_sizes(folder: pathlib.Path) -> None:
    """Draws how many examples the training users of each corpus have."""
    from matplotlib import figure

    picture = figure.Figure(figsize=(10.0, 2.9), layout="constrained")
    for place, (title, name) in zip(picture.subplots(1, 3), _FILES.items(), strict=True):
        train = split.by_user(sources.load_user_text(str(folder / name))).train
        sizes = np.array([len(train.examples(user)) for user in train.user_ids])
        bins = 2.0 ** np.arange(math.ceil(math.log2(sizes.max())) + 1)
        place.hist(sizes, bins, color=plots.COLOURS[0])
        median = float(np.median(sizes))
        label = f"median {median:g}, mean {sizes.mean():.0f}, largest {sizes.max():,}"
        place.axvline(median, color=plots.COLOURS[1], linestyle=":", label=label)
        place.set_xscale("log", base=2)
        place.set(xlabel="examples of a user", ylabel="users", title=f"{title}: {len(sizes):,}")
        place.margins(y=0.25)
        place.legend(fontsize=7)
    picture.savefig(_SIZES, dpi=110)


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


def _draw_groups(axes, corpus: str, figure: str, setting: str) -> None:
    means = mean_losses(read(f"{corpus}_{figure}"), "ε", "G")
    axes.set_prop_cycle(color=plots.COLOURS)
    for epsilon in sorted({key[0] for key in means}, key=float):
        line = sorted((int(g), *found) for (e, g), found in means.items() if e == epsilon)
        xs, ys, errors = zip(*line, strict=True)
        axes.errorbar(xs, ys, errors, marker="o", markersize=3, label=f"ε = {epsilon}")
    median = float(read(corpus)[0]["median"])
    axes.axvline(median, color="grey", linestyle=":", label=f"median of the users, {median:g}")
    axes.set_xscale("log", base=2)
    axes.set(
        xlabel="group size of ELS (examples)",
        ylabel="loss, nats a word",
        title=f"{corpus.partition('_')[0]}, ELS, {setting}",
    )
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)


def _draw_map(picture, axes, corpus: str, figure: str) -> None:
    means = mean_losses(read(f"{corpus}_{figure}"), "ε", "G", "B")
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
            fontsize=7,
        )
    axes.set_xticks(range(len(cohorts)), cohorts)
    axes.set_yticks(range(len(groups)), groups)
    axes.set(
        xlabel="cohort M (users)",
        ylabel="group size G (examples)",
        title=f"{corpus.partition('_')[0]}, ULS, ε = {epsilon}: loss",
    )
    picture.colorbar(image, ax=axes, label="nats a word")


def _draw_rules(axes, corpus: str, figure: str) -> None:
    rows = doubling(corpus, figure)
    names = ("Estimate-and-Double", "Greedy Oracle", "Max Cohort", "Max Group", "Random")
    styles = dict(zip(dict.fromkeys(row["ε"] for row in rows), ("-", "--"), strict=False))
    for (epsilon, line), (name, colour) in itertools.product(
        styles.items(), zip(names, plots.COLOURS, strict=False)
    ):
        found = [row for row in rows if row["ε"] == epsilon]
        xs = [int(row["B"]) for row in found]
        if len(xs) < 2:
            continue  # Hardly begun.
        ys = [float(str(row[name]).removesuffix(" %")) for row in found]
        axes.plot(xs, ys, line, color=colour, label=f"{name}, ε = {epsilon}")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="compute budget B", ylabel="loss above the best, %", title="rules for (G, M)")
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3)


def main() -> None:
    """Draws and writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=pathlib.Path, metavar="FOLDER")
    args = parser.parse_args()
    if args.data is not None:
        draw_sizes(args.data)
        print(_SIZES)
    draw()
    maps = doubling("commits", "map") + doubling("commits_small", "large_map")
    finetuning_text.write(_DOUBLING, maps)
    print(f"{_PICTURE}\n{_DOUBLING}")


if __name__ == "__main__":
    main()
