"""What participation costs at equal utility: `python experiments/participation.py`.

Nothing is trained. The noise in the sum of the averaged updates is held at that of Gboard's
production models (tree, noise multiplier 7, 6,500 devices a round; Xu et al. 2023), which by
the papers' hypothesis holds utility; what changes is how often a device takes part. Writes
experiments/results/participation.csv and docs/experiments/participation.png.
"""

from __future__ import annotations

import csv
import math
import pathlib

from tff_dpftrl.accounting import guarantee, planner
from tff_dpftrl.mechanisms import table
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.sweeps import plots

_HERE = pathlib.Path(__file__).resolve().parent
_RESULTS = _HERE / "results" / "participation.csv"
_PICTURE = _HERE.parent / "docs" / "experiments" / "participation.png"
_ROUNDS = (1000, 2000)
_STRIDES = (50, 100, 200, 314, 400, 500, 650, 1000, 2000)
_MECHANISMS = ("tree", "blt")
_REPORT_GOAL = 6500
_DELTA = 1e-10


def rows() -> list[dict[str, object]]:
    """One row for each mechanism, number of rounds and stride; a smaller stride costs more."""
    found = []
    for num_rounds in _ROUNDS:
        noise = planner.production_noise_in_sum(num_rounds)
        for stride in (stride for stride in _STRIDES if stride <= num_rounds):
            schema = schema_lib.MinSep.as_many_as_fit(num_rounds, stride)
            for name in _MECHANISMS:
                strategy = table.build(name, schema)
                one = planner.noise_in_sum(
                    strategy, num_rounds=num_rounds, noise_multiplier=1.0, report_goal=_REPORT_GOAL
                )
                promised = guarantee.dp_ftrl_guarantee(
                    strategy, noise_multiplier=noise / one, schema=schema, delta=_DELTA
                )
                found.append(
                    {
                        "rounds": num_rounds,
                        "MinS (stride)": stride,
                        "MaxP": schema.max_participations,
                        "devices needed": stride * _REPORT_GOAL,
                        "mechanism": name,
                        "noise multiplier": f"{noise / one:.4g}",
                        # Costs in privacy are rounded up.
                        "ρ-zCDP": math.ceil(promised.rho_zcdp * 1e4) / 1e4,
                        "ε (δ = 1e-10)": math.ceil(promised.epsilon * 1e2) / 1e2,
                    }
                )
    return found


def draw(found: list[dict[str, object]]) -> None:
    """Draws ρ-zCDP against the stride, a line for each mechanism and number of rounds."""
    from matplotlib import figure

    picture = figure.Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = picture.subplots()
    axes.set_prop_cycle(color=plots.COLOURS)
    for num_rounds in _ROUNDS:
        for name in _MECHANISMS:
            line = [r for r in found if (r["rounds"], r["mechanism"]) == (num_rounds, name)]
            axes.plot(
                [r["MinS (stride)"] for r in line],
                [r["ρ-zCDP"] for r in line],
                marker="o",
                linestyle="-" if name == "blt" else "--",
                label=f"{name}, {num_rounds} rounds",
            )
    axes.set(xscale="log", yscale="log", xlabel="MinS, a stride (rounds)", ylabel="ρ (zCDP)")
    axes.set_title("at the noise of Gboard's production models")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    picture.savefig(_PICTURE, dpi=120)


def main() -> None:
    """Computes, writes and draws."""
    found = rows()
    for path in (_RESULTS, _PICTURE):
        path.parent.mkdir(parents=True, exist_ok=True)
    with open(_RESULTS, "w", newline="", encoding="utf-8") as file:
        table_ = csv.DictWriter(file, found[0], lineterminator="\n")
        table_.writeheader()
        table_.writerows(found)
    draw(found)
    print(f"{_RESULTS}\n{_PICTURE}")


if __name__ == "__main__":
    main()
