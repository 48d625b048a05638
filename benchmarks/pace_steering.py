"""How evenly devices check in, for populations of 200, 10,000 and a million.

    python benchmarks/pace_steering.py [--output docs/explanation/pace_steering.png] [--days 2]

Simulates `runtime.protocol.pace_steering` with devices that are available four times as
often at night as by day. At hour 0 all of them come at once, as after an outage. Each is
told its next turn; one that is not available then takes the turn after it. Prints, and plots
with Matplotlib, arrivals over need:

- a million devices, of which 5,000 are needed in every ten minutes: what is told them follows
  the curve of the day, or knows nothing of it, or is the same wait for everybody;
- ten thousand devices, of which 1,000 are needed in every round of 20 minutes: they meet;
- two hundred devices, of which 130 are needed in every round of ten minutes: of those asked to
  a rendezvous, how many are there within its window of a minute. Their clocks' alarms are late
  by two seconds in the mean, and three in a hundred do not come.
"""

from __future__ import annotations

import argparse
import math
import pathlib
from collections.abc import Callable

import numpy as np

from tff_dpftrl.participation import timer
from tff_dpftrl.runtime.protocol import pace_steering

_DAY = 86_400.0
_STEP = 600.0
_LATE_SECONDS = 2.0
_ABSENT = 0.03
_LARGE = {"num_devices": 1_000_000, "needed": 10_000, "period": 1_200.0}
_MIDDLE = {"num_devices": 10_000, "needed": 1_000, "period": 1_200.0}
_SMALL = {"num_devices": 200, "needed": 130, "period": 600.0}

Waits = Callable[[np.ndarray | float, int], np.ndarray]


def availability() -> np.ndarray:
    """Share of the devices that are available at each full hour, shape [25]."""
    curve = np.append(timer.NIGHT_AND_DAY, timer.NIGHT_AND_DAY[0])
    return curve / curve.max()


def steered(
    num_devices: int, needed: int, period: float, *, knows_the_day: bool, rng: np.random.Generator
) -> Waits:
    """Pace steering.

    Args:
      num_devices: Size of the population.
      needed: Devices that a round needs.
      period: Seconds of a round.
      knows_the_day: Whether the curve of availability is known, or only its mean.
      rng: Draws the turns.

    Returns:
      Given the time and a number of devices, the seconds that each has to wait.
    """
    curve = availability()
    pace = pace_steering.PaceSteering(
        devices_needed=needed,
        period_seconds=period,
        population_size=num_devices * (curve[1:] + curve[:-1]).mean() / 2,
        availability=timer.NIGHT_AND_DAY if knows_the_day else (1.0,) * 24,
    )
    return lambda now, count: pace.waits(now, rng.random(count), rng.random(count))


def arrivals(
    num_devices: int, waits: Waits, *, step: float, days: float, rng: np.random.Generator
) -> np.ndarray:
    """Counts who comes after all have come at time 0.

    Args:
      num_devices: Size of the population.
      waits: As `steered` makes it.
      step: Seconds of a step.
      days: Length.
      rng: Draws who is available.

    Returns:
      Devices that come in each step, those of time 0 left out.
    """
    curve = availability()
    turn = waits(0.0, num_devices)
    counts = []
    for start in np.arange(0, days * _DAY - step / 2, step):
        arrived = 0
        due = np.flatnonzero(turn < start + step)
        while due.size:
            chance = np.interp(turn[due] % _DAY / 3600, np.arange(25), curve)
            arrived += np.count_nonzero(rng.random(due.size) < chance)
            turn[due] += waits(turn[due], due.size)
            due = due[turn[due] < start + step]
        counts.append(arrived)
    return np.asarray(counts)


def rendezvous_arrivals(repetitions: int, rng: np.random.Generator) -> tuple[np.ndarray, float]:
    """The small population, told to come at any time during the round before.

    Args:
      repetitions: Number of rendezvous.
      rng: Draws who is told what, who is late, and who does not come.

    Returns:
      When those asked to a rendezvous come, in seconds after its beginning (not finite for those
      who don't), and how long its window is.
    """
    period = _SMALL["period"]
    pace = pace_steering.PaceSteering(
        devices_needed=_SMALL["needed"],
        period_seconds=period,
        population_size=_SMALL["num_devices"],
    )
    count = _SMALL["num_devices"]
    seconds = []
    for _ in range(repetitions):
        told = rng.uniform(0, period, count)
        turn = told + pace.waits(told, rng.random(count), rng.random(count))
        place = turn[turn < 2 * period] - period
        absent = rng.random(place.size) < _ABSENT
        late = rng.exponential(_LATE_SECONDS, place.size)
        seconds.append(place + np.where(absent, math.inf, late))
    return np.concatenate(seconds), pace.rendezvous_fraction * period


def main() -> None:
    """Prints the numbers and writes the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("pace_steering.png"))
    parser.add_argument("--days", type=float, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)

    def ratios(size: dict, waits: Waits, step: float) -> np.ndarray:
        counts = arrivals(size["num_devices"], waits, step=step, days=args.days, rng=rng)
        return counts / (size["needed"] * step / size["period"])

    print("Arrivals over need after all came at hour 0:   mean  least   most")

    def tell(name: str, values: np.ndarray) -> None:
        print(f"{name:<44} {values.mean():>6.2f} {values.min():>6.2f} {values.max():>6.2f}")

    same = _DAY / 4
    large = {
        "steered along the day": steered(**_LARGE, knows_the_day=True, rng=rng),
        "steered, day unknown": steered(**_LARGE, knows_the_day=False, rng=rng),
        "the same wait for all": lambda now, count: np.full(count, same),
    }
    of_large = {}
    for name, waits in large.items():
        of_large[name] = ratios(_LARGE, waits, _STEP)
        tell(f"1,000,000 devices, {name}", of_large[name])
    middle = steered(**_MIDDLE, knows_the_day=True, rng=rng)
    of_middle = ratios(_MIDDLE, middle, _MIDDLE["period"])[
        1:
    ]  # The first rendezvous is the second.
    tell("10,000 devices, one rendezvous a round", of_middle)
    seconds, window = rendezvous_arrivals(200, rng)
    present = np.count_nonzero(seconds <= window) / seconds.size
    asked = seconds.size / 200
    print(
        f"200 devices: {asked:.0f} asked to a rendezvous ({_SMALL['needed']} needed), "
        f"{100 * present:.1f} % of them there within {window:.0f} s"
    )
    plot(of_large, of_middle, seconds, window, args.output)
    print(f"Plot: {args.output}")


def plot(
    of_large: dict[str, np.ndarray],
    of_middle: np.ndarray,
    seconds: np.ndarray,
    window: float,
    output: pathlib.Path,
) -> None:
    """Draws the three populations.

    Args:
      of_large: Arrivals over need of the large population, by what it is told.
      of_middle: The same of the middle one, a rendezvous each.
      seconds: When devices of the small one come, from the beginning of a rendezvous.
      window: How long it lasts.
      output: File to write; its suffix decides the format.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.9))
    for panel in (left, middle):
        panel.axhspan(0.9, 1.1, color="0.88", zorder=0)
        panel.set_xlabel("hours since all came at once")
        panel.set_ylabel("arrivals over need")
    for (name, values), style in zip(of_large.items(), ("C0-", "C1--", "C3:"), strict=True):
        hours = (np.arange(values.size) + 1) * _STEP / 3600
        left.plot(hours, np.maximum(values, 0.1), style, label=name, linewidth=1.4)
    left.set_yscale("log")
    left.set_ylim(0.1, 5_000)
    left.set_yticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
    left.minorticks_off()
    left.set_title("1,000,000 devices, 5,000 needed in ten minutes", fontsize=10)
    left.legend(fontsize=8, loc="upper left")
    hours = (np.arange(of_middle.size) + 1) * _MIDDLE["period"] / 3600
    middle.plot(hours, of_middle, "C0.", markersize=4)
    middle.set_ylim(0, 2)
    middle.set_title("10,000 devices, 1,000 needed in each rendezvous", fontsize=10)
    right.hist(seconds[np.isfinite(seconds)], np.arange(0, 121, 5), color="C0")
    right.axvspan(0, window, color="0.88", zorder=0, label="the window of the rendezvous")
    right.set_xlim(0, 120)
    right.set_xlabel("seconds after the beginning of a round")
    right.set_ylabel("arrivals in 200 rounds, every 5 s")
    right.set_title("200 devices, 130 needed in each rendezvous", fontsize=10)
    right.legend(fontsize=8)
    figure.suptitle(
        "Grey: need ± 10 %. Four times as many devices are available at night as by day.",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(output, dpi=110)


if __name__ == "__main__":
    main()
