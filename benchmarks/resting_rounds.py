"""Attempts at rounds of devices that rest, beside those of a server that knows who can come.

    PYTHONPATH=. python benchmarks/resting_rounds.py [--output benchmarks/resting_rounds.csv]

Actors, pace steering, the devices' schedule and their participation timers are real; clock and wire
are simulated, as in `fleet_day.py`. The peer is the same server, which in addition is told by all
timers how many devices need not rest. It begins when all of them wait, or as many as it wants, and
so makes the attempts that the eligible devices allow.
"""

from __future__ import annotations

import argparse
import collections
import csv
import itertools
import pathlib
from collections.abc import Sequence
from typing import Any

import fleet_day

from tff_dpftrl.runtime.actors import coordinator, factory, population, roles

_POPULATIONS = (10, 100, 1_000, 10_000, 100_000)
_DROP_OUTS = (0.0, 0.3, 0.6)
_MIN_SEPS = (1, 2, 5, 20)
_FEW = 100  # Up to so many devices, chance decides more, and three runs are added up.
_LARGEST_GOAL = 50
_OVER_SELECTION = 1.3


class _Told(coordinator.Coordinator):
    """Coordinator that is told how many devices need not rest."""

    day: fleet_day.Day

    def _may_more_come(self, task: population.Task, waiting: int) -> bool:
        return waiting < self.day.num_eligible(self._commits[task.name].rounds_done)


class TalkativeDay(fleet_day.Day):
    """Fleet whose timers tell the server how many devices need not rest."""

    def _make_factory(self, served: population.Population) -> factory.ActorFactory:
        made = super()._make_factory(served)
        plain = made.build

        def build(address: str, role: Any, randomness: Any) -> Any:
            if not isinstance(role, roles.CoordinatorRole):
                return plain(address, role, randomness)
            told = _Told(address, served, made.selectors, made.store_address, randomness)
            told.day = self
            return told

        made.build = build
        return made


def compare(
    num_devices: int,
    drop_outs: float,
    min_sep: int,
    *,
    hours: float = 1.0,
    period: float = 60.0,
    goal: int | None = None,
    seeds: Sequence[int] = (0,),
) -> dict[str, float]:
    """Runs both servers.

    Args:
      num_devices: Number of devices, which are always there.
      drop_outs: Probability that a chosen device drops out.
      min_sep: Smallest stride between two rounds of one device.
      hours: Simulated hours.
      period: Seconds of a round that the server steers devices for; training takes a sixth.
      goal: Reports that complete a round. By default the largest that `task new` allows for so
        many devices, or 1 if it allows none, and 50 at most.
      seeds: Seeds of runs that are added up.

    Returns:
      A row of the table: the setting, then attempts, commits and skipped rounds of both, and the
      ratio of the attempts.
    """
    if goal is None:
        goal = max(1, min(_LARGEST_GOAL, int(num_devices / min_sep / _OVER_SELECTION)))
    setting = fleet_day.Setting(
        period=period,
        training_seconds=period / 6,
        drop_outs=drop_outs,
        stragglers=0.0,
        reporting_timeout=600.0,
        min_sep=min_sep,
        have_nights=False,
        first_seconds=period * max(1.0, num_devices / goal),  # As if they had come before.
        heartbeat_seconds=2.0,
    )
    row: dict[str, float] = {
        "devices": num_devices,
        "drop_outs": drop_outs,
        "min_sep": min_sep,
        "goal": goal,
    }
    for name, kind in (("", fleet_day.Day), ("told: ", TalkativeDay)):
        counts: collections.Counter[str] = collections.Counter()
        for seed in seeds:
            day = kind(num_devices, goal=goal, seed=seed, setting=setting)
            day.run(hours / 24)
            (task,) = day.seen.tasks.values()
            counts[f"{name}attempts"] += task.committed + task.abandoned.total()
            counts[f"{name}commits"] += task.committed
            counts[f"{name}skipped"] += task.skipped
        row |= counts
    return row | {"ratio": round(row["attempts"] / row["told: attempts"], 2)}


def main() -> None:
    """Prints the table, and writes it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("resting_rounds.csv"))
    parser.add_argument("--devices", type=int, nargs="+", default=_POPULATIONS)
    args = parser.parse_args()
    rows = []
    for setting in itertools.product(args.devices, _DROP_OUTS, _MIN_SEPS):
        rows.append(compare(*setting, seeds=range(3 if setting[0] <= _FEW else 1)))
        print(", ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    with args.output.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
