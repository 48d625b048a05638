"""Pictures of docs/explanation/: `python experiments/explanation_pictures.py [--output DIR]`.

Every curve is computed by the package's own functions. The files are the same at every run.
"""

from __future__ import annotations

import argparse
import pathlib

import matplotlib
import numpy as np
from scipy import stats

from tff_dpftrl.accounting import gaussian
from tff_dpftrl.auditing.evidence import bounds
from tff_dpftrl.mechanisms import restarts, table
from tff_dpftrl.participation import cohorts, schema

matplotlib.use("Agg")
from matplotlib import patches  # noqa: E402
from matplotlib import pyplot as plt  # noqa: E402

_FOLDER = pathlib.Path(__file__).resolve().parents[1] / "docs" / "explanation"
# Okabe & Ito's colours, which colour-blind readers can tell apart, with a dash for each.
_BLUE, _ORANGE, _GREEN, _RED = "#0072b2", "#e69f00", "#009e73", "#d55e00"
_GREY = "0.85"
_SCHEMA = schema.MinSep(num_rounds=400, min_sep=100, max_participations=4)
_STYLE = {"svg.hashsalt": "tff_dpftrl", "font.size": 11, "axes.spines.top": False}
# Questions of the decision tree, the answer that leads to a leaf, and the leaf.
_QUESTIONS = (
    ("Do devices keep the texts?", "yes", "task new, serve\nnoise: blt, no sampling"),
    (
        "Is there a pretrained model,\nand one place for the texts?",
        "yes",
        "finetune\nsampling: auto",
    ),
    ("Can who takes part be drawn\nby chance and stay secret?", "no", "train\ndp-ftrl, noise: blt"),
)
_LAST_LEAF = "sweep\nover bands, sampling: cyclic"


def strategies() -> dict[str, object]:
    """Builds the strategies of the picture of errors, by their label."""
    starts = restarts.starts(_SCHEMA.num_rounds, every=100)
    return {
        "identity (independent)": table.build("identity", _SCHEMA),
        "tree": table.build("tree", _SCHEMA),
        "BLT, restart every 100": table.build("blt", _SCHEMA, starts=starts),
        "banded Toeplitz, 100 bands": table.build("bandtoep", _SCHEMA),
        "BLT": table.build("blt", _SCHEMA),
    }


def errors() -> dict[str, np.ndarray]:
    """Computes the noise of the sum of rounds 0 ... t at μ = 1, by label, shape [rounds]."""
    return {
        label: strategy.sensitivity(_SCHEMA).value
        * np.sqrt(strategy.prefix_noise_variance(_SCHEMA.num_rounds))
        for label, strategy in strategies().items()
    }


def _dp_ftrl_error() -> plt.Figure:
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    styles = ((_RED, ":"), (_ORANGE, "-"), (_BLUE, "--"), (_GREEN, "-."), (_BLUE, "-"))
    for (label, error), (colour, dash) in zip(errors().items(), styles, strict=True):
        axes.plot(np.arange(1, error.size + 1), error, dash, color=colour, label=label, linewidth=2)
    axes.set(
        xlabel="round",
        ylabel="std of the noise in the sum so far\n(clip norms, at the same ε)",
        ylim=(0, 45),
        xlim=(0, 400),
    )
    axes.legend(loc="upper left", fontsize=10, frameon=False)
    return figure


def _dp_ftrl_matrices() -> plt.Figure:
    small = schema.MinSep(num_rounds=16, min_sep=8, max_participations=2)
    figure, panels = plt.subplots(1, 4, figsize=(9.5, 3.6), layout="constrained")
    names = {"identity": "identity", "tree": "tree", "bandtoep": "banded Toeplitz", "blt": "BLT"}
    image = None
    for panel, (name, title) in zip(panels, names.items(), strict=True):
        matrix = table.build(name, small).strategy_matrix(16)
        matrix = matrix / np.abs(matrix).max()
        image = panel.imshow(matrix, cmap="cividis_r", vmin=0, vmax=1, aspect="auto")
        panel.set(title=title, xlabel="round of the update")
    panels[0].set_ylabel("row: one draw of noise")
    figure.colorbar(image, ax=panels, label="entry of C (largest = 1)", shrink=0.9)
    return figure


def _participation_timeline() -> plt.Figure:
    sampler = cohorts.MinSepSampler(
        num_clients=8, clients_per_round=2, num_rounds=16, min_sep=3, seed=1
    )
    rounds = [[t for t in range(16) if user in sampler.cohort(t)] for user in range(8)]
    figure, axes = plt.subplots(figsize=(8, 3.8), layout="constrained")
    for user, taken in enumerate(rounds):
        axes.axhline(user, color=_GREY, zorder=0)
        axes.plot(taken, [user] * len(taken), "o", color=_BLUE, markersize=9)
    user = min(range(8), key=lambda user: int(np.diff(rounds[user]).min()))
    at = int(np.diff(rounds[user]).argmin())
    first, second = rounds[user][at : at + 2]
    axes.plot([first, second], [user, user], "o", color=_RED, markersize=9)
    axes.annotate(
        "",
        (second, user + 0.35),
        (first, user + 0.35),
        arrowprops={"arrowstyle": "<->", "color": _RED},
    )
    axes.text(
        (first + second) / 2,
        user + 0.42,
        f"stride {second - first} = gap {second - first - 1} + 1",
        ha="center",
        va="bottom",
        color=_RED,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
    )
    axes.set(
        xlabel="round",
        ylabel="user",
        xticks=range(16),
        yticks=range(8),
        yticklabels=[f"{user} ({len(taken)} times)" for user, taken in enumerate(rounds)],
        ylim=(-0.6, 8.2),
    )
    return figure


def _neighbours() -> plt.Figure:
    figure, panels = plt.subplots(1, 4, figsize=(9.5, 3.2), layout="constrained", sharey=True)
    titles = ("the data", "zero-out", "add or remove", "substitution")
    for panel, title in zip(panels, titles, strict=True):
        panel.set(title=title, xlim=(0, 4), ylim=(4, 0), xticks=[], yticks=[])
        panel.spines[:].set_visible(False)
        for user in range(4):
            changed = user == 2
            if changed and title == "add or remove":
                continue
            for t in range(4):
                there = (user + t) % 2 == 0
                colour, hatch = (_BLUE if there else "white"), ""
                if changed and there and title == "zero-out":
                    colour = "white"
                if changed and there and title == "substitution":
                    colour, hatch = _ORANGE, "///"
                panel.add_patch(
                    patches.Rectangle(
                        (t + 0.08, user + 0.15),
                        0.84,
                        0.7,
                        facecolor=colour,
                        edgecolor="0.4",
                        hatch=hatch,
                    )
                )
                if changed and there and title == "zero-out":
                    panel.text(
                        t + 0.5,
                        user + 0.5,
                        "0",
                        ha="center",
                        va="center",
                        fontweight="bold",
                        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
                    )
        panel.set_xlabel("rounds →")
    panels[0].set_yticks(np.arange(4) + 0.5, [f"user {user}" for user in range(4)])
    return figure


def _trade_off() -> plt.Figure:
    alarms = np.linspace(0, 1, 1001)
    figure, axes = plt.subplots(figsize=(5.6, 4.8), layout="constrained")
    axes.plot(alarms, 1 - alarms, ":", color="black", label="chance: right 50 %", linewidth=2)
    styles = ((_GREEN, "--"), (_BLUE, "-"), (_RED, "-."))
    for epsilon, (colour, dash) in zip((1.0, 3.0, 8.0), styles, strict=True):
        mu = gaussian.mu(epsilon, 1e-6)
        missed = stats.norm.cdf(stats.norm.isf(alarms) - mu)
        right = 100 * stats.norm.cdf(mu / 2)
        label = f"ε = {epsilon:g} (μ = {mu:.2f}): {right:.0f} %"
        axes.plot(alarms, missed, dash, color=colour, label=label, linewidth=2)
    axes.set(
        xlabel="false alarms (share of those who did not take part)",
        ylabel="missed (share of those who took part)",
        xlim=(0, 1),
        ylim=(0, 1),
    )
    axes.legend(frameon=False, fontsize=10)
    return figure


def _secure_sums() -> plt.Figure:
    modulus, devices, size = 256, 5, 12
    rng = np.random.default_rng(0)
    reports = np.clip(
        np.round(
            128 + 30 * np.sin(np.arange(size) / 2) + 12 * rng.standard_normal((devices, size))
        ),
        0,
        255,
    ).astype(int)
    masks = np.zeros((devices, size), int)
    for one in range(devices):
        for other in range(one):
            pair = rng.integers(modulus, size=size)  # Cancels in the sum.
            masks[one] += pair
            masks[other] -= pair
    total = reports.sum(axis=0)
    figure, panels = plt.subplots(1, 3, figsize=(9.5, 3.2), layout="constrained")
    shown = {
        "without: each report": reports,
        "with: masked vectors": (reports + masks) % modulus,
        "their sum, in either case": total[None] / devices,
    }
    image = None
    for panel, (title, values) in zip(panels, shown.items(), strict=True):
        image = panel.imshow(values, cmap="cividis", vmin=0, vmax=255, aspect="auto")
        panel.set(title=title, xlabel="entry of the update", xticks=range(0, size, 3))
        panel.set_yticks(range(len(values)), range(1, devices + 1) if len(values) > 1 else ["sum"])
    panels[0].set_ylabel("device")
    figure.colorbar(image, ax=panels, label="value modulo 256\n(of the sum: divided by 5)")
    return figure


def _audit_power() -> plt.Figure:
    claim, trials = 1.0, np.unique(np.logspace(2, 5, 13).astype(int))
    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    cases = {
        "noise as claimed": (1.0, _BLUE, "o-"),
        "noise × 0.9": (1 / 0.9, _GREEN, "^--"),
        "noise × 0.7": (1 / 0.7, _RED, "s-."),
    }
    for label, (mu, colour, style) in cases.items():
        found = []
        for number in trials:
            rng = np.random.default_rng(number)
            present = np.arange(number) % 2 == 0
            scores = rng.standard_normal(number) + mu * present
            bound = bounds.from_counts(
                scores, present, delta=1e-6, error_rate=0.05, seed=int(number)
            )
            found.append(bound.mu_at_least)
        axes.semilogx(trials, found, style, color=colour, label=label)
    axes.axhline(claim, color="black", linestyle=":")
    axes.text(100, claim + 0.02, "claim: above this line it is refuted", va="bottom")
    axes.set(xlabel="games played", ylabel="lower bound of μ (95 % confidence)", ylim=(0, 1.5))
    axes.legend(frameon=False, loc="lower right")
    return figure


def _which_mechanism() -> plt.Figure:
    figure, axes = plt.subplots(figsize=(8.5, 5.4), layout="constrained")
    axes.set(xlim=(0, 10), ylim=(1.6, 10.2))
    axes.axis("off")

    def box(x: float, y: float, text: str, colour: str) -> None:
        axes.text(
            x,
            y,
            text,
            ha="center",
            va="center",
            fontsize=11,
            bbox={"boxstyle": "round,pad=0.5", "facecolor": colour, "edgecolor": "0.3"},
        )

    def arrow(start: tuple[float, float], end: tuple[float, float], text: str) -> None:
        axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": "0.3"})
        x, y = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
        axes.text(
            x,
            y,
            text,
            ha="center",
            va="center",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
        )

    for place, (question, answer, leaf) in enumerate(_QUESTIONS):
        y = 9.4 - 2.3 * place
        arrow((4.4, y), (6.4, y), answer)
        box(2.6, y, question, "#dceaf5")
        box(8.1, y, leaf, "#fdf0d5")
        on = "no" if answer == "yes" else "yes"
        arrow((2.6, y - 0.5), (2.6, y - 1.75), on)
    box(2.6, 9.4 - 2.3 * len(_QUESTIONS), _LAST_LEAF, "#fdf0d5")
    return figure


PICTURES = {
    "dp_ftrl_error": _dp_ftrl_error,
    "dp_ftrl_matrices": _dp_ftrl_matrices,
    "participation_timeline": _participation_timeline,
    "neighbours": _neighbours,
    "trade_off": _trade_off,
    "secure_sums": _secure_sums,
    "audit_power": _audit_power,
    "which_mechanism": _which_mechanism,
}


def draw(name: str, folder: pathlib.Path) -> pathlib.Path:
    """Draws a picture.

    Args:
      name: Key of `PICTURES`.
      folder: Folder for the file.

    Returns:
      The path of the SVG file.
    """
    path = folder / f"{name}.svg"
    with plt.rc_context(_STYLE):
        figure = PICTURES[name]()
        figure.savefig(path, metadata={"Date": None, "Creator": None})
        plt.close(figure)
    # Matplotlib leaves blanks at the ends of lines.
    lines = path.read_text("utf-8").splitlines()
    path.write_text("".join(f"{line.rstrip()}\n" for line in lines), "utf-8")
    return path


def main() -> None:
    """Draws all pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=pathlib.Path, default=_FOLDER)
    folder = parser.parse_args().output
    for name in PICTURES:
        print(draw(name, folder))


if __name__ == "__main__":
    main()
