"""MinS against the timer on the device, for several populations and report goals.

    python benchmarks/timer_simulation.py [--output timer.png] [--num-rounds 2000]

Simulates `participation.timer.TimerModel` with its default rates, prints the observed
MinS (a gap, as in the tables of the Gboard paper) beside its bound, and plots it with
Matplotlib: one panel for each report goal, one line for each population, dotted lines for
`population / report goal`, a dashed one for the number of rounds. Then the two published
runs of es-ES, and the processor time of one simulation of 2,000 rounds with 4M devices.
"""

from __future__ import annotations

import argparse
import pathlib
import time
from collections.abc import Mapping, Sequence

from tff_dpftrl.participation import cohorts, timer
from tff_dpftrl.sweeps import plots

_ES_ES = ((24, 2_000, 313), (144, 1_900, 526))  # Timer in hours, rounds, published MinS.


def observe_gaps(
    populations: Sequence[int],
    report_goals: Sequence[int],
    timer_hours: Sequence[float],
    num_rounds: int,
    seed: int,
) -> dict[tuple[int, int], list[int]]:
    """Simulates every combination.

    Args:
      populations: Numbers of devices.
      report_goals: Numbers of devices in a round.
      timer_hours: Timers.
      num_rounds: Number of rounds of every run.
      seed: Seed of every run.

    Returns:
      For each (report goal, population) the observed gaps, one for each timer; that of a
      run in which no device took part twice is `num_rounds - 1`.
    """
    found = {}
    for goal in report_goals:
        for population in populations:
            models = (timer.TimerModel(population, goal, hours) for hours in timer_hours)
            gaps = [timer.simulate(model, num_rounds, seed).min_sep - 1 for model in models]
            bound = min(num_rounds, cohorts.largest_feasible_min_sep(population, goal)) - 1
            print(f"{population:>10,} {goal:>7,} {bound:>6,}  " + _row(gaps), flush=True)
            found[goal, population] = gaps
    return found


def plot(
    found: Mapping[tuple[int, int], Sequence[int]],
    timer_hours: Sequence[float],
    num_rounds: int,
    output: pathlib.Path,
) -> None:
    """Draws what `observe_gaps` returned.

    Args:
      found: Gaps for each (report goal, population).
      timer_hours: Timers, the horizontal axis.
      num_rounds: Number of rounds of every run.
      output: File to write; its suffix decides the format.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    goals = sorted({goal for goal, _ in found})
    populations = sorted({population for _, population in found})
    figure, panels = plt.subplots(
        1, len(goals), figsize=(3.2 * len(goals), 4.0), sharey=True, squeeze=False
    )
    for panel, goal in zip(panels[0], goals, strict=True):
        for i, population in enumerate(populations):
            colour, marker = plots.COLOURS[i % len(plots.COLOURS)], "osD^vPX"[i % 7]
            panel.plot(
                timer_hours,
                found[goal, population],
                color=colour,
                marker=marker,
                markersize=4,
                label=f"{population / 1e6:g}M devices",
            )
            panel.axhline(population / goal - 1, color=colour, linestyle=":", linewidth=1)
        panel.axhline(num_rounds - 1, color="black", linestyle="--", linewidth=1)
        panel.set_title(f"report goal {goal:,}")
        panel.set_xlabel("timer (hours)")
        panel.set_xscale("log")
        panel.set_xticks(timer_hours, [f"{hours:g}" for hours in timer_hours])
        panel.minorticks_off()
        panel.set_yscale("log")
    panels[0][0].set_ylabel(f"MinS (gap) in {num_rounds:,} rounds")
    panels[0][0].legend(loc="lower right", fontsize=8)
    figure.suptitle("Dotted: population / report goal. Dashed: number of rounds.", fontsize=10)
    figure.tight_layout()
    figure.savefig(output, dpi=120)


def _row(values: Sequence[float]) -> str:
    return " ".join(f"{value:>6,g}" for value in values)


def main() -> None:
    """Prints the tables and writes the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("timer.png"))
    parser.add_argument("--num-rounds", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--populations", type=float, nargs="+", default=[1e6, 2e6, 4e6, 8e6, 16e6])
    parser.add_argument("--report-goals", type=int, nargs="+", default=[500, 2_000, 6_500])
    parser.add_argument(
        "--timer-hours", type=float, nargs="+", default=[6, 12, 24, 48, 72, 96, 144, 240]
    )
    args = parser.parse_args()

    print("population    goal  bound  MinS with a timer of, in hours:")
    print(" " * 27 + _row(args.timer_hours))
    found = observe_gaps(
        [int(population) for population in args.populations],
        args.report_goals,
        args.timer_hours,
        args.num_rounds,
        args.seed,
    )
    plot(found, args.timer_hours, args.num_rounds, args.output)
    print(f"\nPlot: {args.output}\n\nes-ES, 4.21M devices, report goal 6,500: MinS at most 646")
    for hours, num_rounds, published in _ES_ES:
        model = timer.TimerModel(4_210_000, 6_500, hours)
        seen = timer.simulate(model, num_rounds, args.seed).observed
        print(
            f"  timer {hours} h, {num_rounds:,} rounds: MinS {seen.min_sep_gap} "
            f"(published {published}), MaxP {seen.max_participations}"
        )
    start = time.process_time()
    timer.simulate(timer.TimerModel(4_000_000, 6_500, 144), 2_000, args.seed)
    print(f"2,000 rounds with 4M devices: {time.process_time() - start:.1f} s of one core")


if __name__ == "__main__":
    main()
