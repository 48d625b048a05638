"""How evenly devices check in while the server learns the curve of the day, and after an outage.

    python benchmarks/day_curve.py [--output docs/explanation/day_curve.png] [--devices 400000]

Simulates devices one by one, and `runtime.protocol.pace_steering` with `runtime.server.day_curve`.
At hour 0 all devices come at once. Each gets eight turns and takes the first at which it is
available; with no turn left, it draws one. Times are of a clock that is simulated, too.

Four times as many devices are available at night as by day, in one of two ways: at each turn anew
with the probability of the hour, or a fifth of them always and the others in nights of their own,
of 5 to 12 hours around 2 o'clock (`fleet.availability.Nightly`). Prints, and plots with Matplotlib,
arrivals over need:

- with the curve told, with a flat one of the right mean, and learned, beginning with the flat one;
- learned, with an outage of ten hours on the fourth day after which the server starts again with
  the file that it kept. Devices back off meanwhile, from 30 seconds to a day;
- learned, with 200 devices, of which 130 are needed in ten minutes if so many are available.
"""

from __future__ import annotations

import argparse
import math
import pathlib
import tempfile

import numpy as np

from tff_dpftrl.participation import timer
from tff_dpftrl.runtime.protocol import pace_steering
from tff_dpftrl.runtime.server import day_curve

_HOUR, _DAY = 3600.0, 86_400.0
_TURNS = 8
_USUAL_SECONDS, _LONGEST_TURN, _LONGEST_BACKOFF, _FIRST_BACKOFF = 3600.0, 3 * _DAY, _DAY, 30.0
_ALWAYS = 0.21  # Share of the devices that are always available, where others have nights.
_ROWS = 50_000  # Devices that are told at once, for memory.


class Devices:
    """Devices with the turns that they were told.

    Attributes:
      next: Time of each device's next turn, in seconds, shape [devices].
    """

    def __init__(self, count: int, *, have_nights: bool, rng: np.random.Generator):
        """Begins with all devices due within a minute.

        Args:
          count: Number of devices.
          have_nights: Whether each has a night of its own.
          rng: Draws all that is random.
        """
        self._rng, self._have_nights = rng, have_nights
        self._is_always = rng.random(count) < _ALWAYS
        self._middle, self._hours = rng.normal(2, 3, count), rng.uniform(5, 12, count)
        self._turns = np.full((count, _TURNS), math.inf)
        self._place = np.full(count, _TURNS)
        self._spacing = np.zeros(count)
        self._failures = np.zeros(count, int)
        self.next = rng.uniform(0, 60, count)

    def are_available(self, which: np.ndarray, now: np.ndarray | float) -> np.ndarray:
        """Returns, or draws, which devices are available, each at its time."""
        hour = now % _DAY / _HOUR
        if self._have_nights:
            distance = (hour - self._middle[which] + 12) % 24 - 12
            return self._is_always[which] | (np.abs(distance) <= self._hours[which] / 2)
        curve = np.append(timer.NIGHT_AND_DAY, timer.NIGHT_AND_DAY[0]) / max(timer.NIGHT_AND_DAY)
        return self._rng.random(which.size) < np.interp(hour, np.arange(25), curve)

    def available(self) -> np.ndarray:
        """Returns the number of available devices at each full hour, shape [24]."""
        every = np.arange(self.next.size)
        return np.array([self.are_available(every, h * _HOUR).sum() for h in range(24)])

    def come(self, end: float, steering: pace_steering.PaceSteering | None) -> int:
        """Has all devices come that are due and available, and tells them their next turns.

        Args:
          end: Time up to which they come.
          steering: Pace steering; None while the server is away.

        Returns:
          Number of check-ins.
        """
        came = 0
        while (due := np.flatnonzero(self.next < end)).size:
            is_there = self.are_available(due, self.next[due])
            self._skip(due[~is_there])
            there = due[is_there]
            if steering is None:
                self._fail(there)
                continue
            came += there.size
            for start in range(0, there.size, _ROWS):
                self._tell(there[start : start + _ROWS], steering)
        return came

    def _skip(self, which: np.ndarray) -> None:
        self._place[which] = np.minimum(self._place[which] + 1, _TURNS)
        turns = np.append(self._turns[which], np.full((which.size, 1), math.inf), 1)
        following = turns[np.arange(which.size), self._place[which]]
        longest = np.maximum(_USUAL_SECONDS, 2 * self._spacing[which])
        drawn = self.next[which] + longest * (1 - self._rng.random(which.size))
        self.next[which] = np.where(np.isfinite(following), following, drawn)

    def _fail(self, which: np.ndarray) -> None:
        self._failures[which] += 1
        limit = _FIRST_BACKOFF * 2.0 ** np.minimum(self._failures[which] - 1, 20)
        jitter = self._rng.uniform(0.5, 1, which.size)
        self.next[which] += np.minimum(limit, _LONGEST_BACKOFF) * jitter
        self._place[which] = _TURNS

    def _tell(self, which: np.ndarray, steering: pace_steering.PaceSteering) -> None:
        now, waits, last = self.next[which], [], np.zeros(which.size)
        for _ in range(_TURNS):
            draws = self._rng.random((2, which.size))
            last = last + steering.waits(now + last, draws[0], draws[1])
            waits.append(last)
        turns = np.stack(waits, 1)
        turns[:, 0] = np.where(
            turns[:, 0] > _LONGEST_TURN,
            _LONGEST_TURN * self._rng.uniform(0.5, 1, which.size),
            turns[:, 0],
        )
        counted = (turns <= _LONGEST_TURN).sum(1)
        self._spacing[which] = turns[np.arange(which.size), counted - 1] / counted
        turns[turns > _LONGEST_TURN] = math.inf
        self._turns[which] = now[:, None] + turns
        self._place[which], self._failures[which] = 0, 0
        self.next[which] = self._turns[which, 0]


def arrivals_over_need(
    devices: Devices,
    steering: pace_steering.PaceSteering,
    *,
    days: float,
    learns: bool,
    outage: tuple[float, float] = (math.inf, math.inf),
) -> np.ndarray:
    """Simulates a population.

    Args:
      devices: Devices of the population.
      steering: Pace steering to begin with.
      days: Length.
      learns: Whether the server learns the curve of the day.
      outage: Begin and end of a time in which the server is away, in seconds. It starts again
        with the file that it kept.

    Returns:
      Arrivals over need of each hour.
    """
    period = steering.period_seconds
    curve = day_curve.DayCurve(steering, 0.0)
    counts = []
    with tempfile.TemporaryDirectory() as folder:
        kept = pathlib.Path(folder, "day_curve.json")
        was_away = False
        for begin in np.arange(0, days * _DAY, period):
            is_away = outage[0] <= begin < outage[1]
            if is_away and not was_away:
                curve.save(kept)
            elif was_away and not is_away:
                curve = day_curve.DayCurve.load(kept, steering, begin)
            was_away = is_away
            now_steering = curve.steering if learns else steering
            counts.append(devices.come(begin + period, None if is_away else now_steering))
            if not is_away:
                curve.came(begin + period / 2, counts[-1])
                curve.advance(begin + period)
    per_hour = round(_HOUR / period)
    return np.reshape(counts, (-1, per_hour)).mean(1) / steering.devices_needed


def main() -> None:
    """Prints the numbers and writes the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("day_curve.png"))
    parser.add_argument("--devices", type=int, default=400_000)
    parser.add_argument("--days", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    def tell(name: str, ratios: np.ndarray) -> np.ndarray:
        days = ratios.reshape(-1, 24)
        ranges = "  ".join(f"{day.min():.2f}-{day.max():5.2f}" for day in days)
        print(f"{name:<34} {ranges}", flush=True)
        return ratios

    print("Arrivals over need by the hour, least and most of each day")
    large: dict[str, np.ndarray] = {}
    needed = args.devices / 40
    for have_nights in (False, True):
        kind = "own nights" if have_nights else "by the hour"

        def devices(have_nights: bool = have_nights) -> Devices:
            rng = np.random.default_rng(args.seed)
            return Devices(args.devices, have_nights=have_nights, rng=rng)

        available = devices().available()
        flat = pace_steering.PaceSteering(needed, 1200.0, float(available.mean()))
        told = pace_steering.PaceSteering(
            needed, 1200.0, float(available.mean()), tuple(available.tolist())
        )
        ten_hours = (3 * _DAY + 8 * _HOUR, 3 * _DAY + 18 * _HOUR)
        for name, steering, options in (
            ("told", told, {"learns": False}),
            ("flat", flat, {"learns": False}),
            ("learned", flat, {"learns": True}),
            ("learned, outage", flat, {"learns": True, "outage": ten_hours}),
        ):
            ratios = arrivals_over_need(devices(), steering, days=args.days, **options)
            large[f"{name}, {kind}"] = tell(f"{args.devices:,}, {name}, {kind}", ratios)
    few = Devices(200, have_nights=True, rng=np.random.default_rng(args.seed))
    available = few.available()
    start = pace_steering.PaceSteering(130, 600.0, 1_000.0)
    small = arrivals_over_need(few, start, days=args.days, learns=True)
    tell("200, learned, own nights", small)
    possible = np.tile(np.minimum(available, 130) / 130, args.days)
    print(
        f"200: arrivals over what can come {(small / possible)[48:].min():.2f}-"
        f"{(small / possible)[48:].max():.2f} after two days"
    )
    plot(large, small, possible, args.output)
    print(f"Plot: {args.output}")


def plot(
    large: dict[str, np.ndarray], small: np.ndarray, possible: np.ndarray, output: pathlib.Path
) -> None:
    """Draws arrivals over need.

    Args:
      large: Those of the large population by the hour, by name.
      small: Those of 200 devices.
      possible: Available devices over need, at most 1, of these.
      output: File to write; its suffix decides the format.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(13, 3.9), sharey=True)
    styles = {"told": "C0-", "flat": "C1--", "learned": "C2-", "learned, outage": "C3:"}
    for panel, kind in zip(panels, ("by the hour", "own nights"), strict=False):
        for name, style in styles.items():
            values = large[f"{name}, {kind}"]
            panel.plot(np.arange(values.size) / 24, values, style, label=name, linewidth=1.4)
        panel.set_title(f"{'Available ' if kind == 'by the hour' else ''}{kind}", fontsize=10)
    panels[0].set_ylabel("arrivals over need")
    panels[0].set_ylim(0, 2.2)
    panels[0].legend(fontsize=8, loc="upper right")
    days = np.arange(small.size) / 24
    panels[2].plot(days, small, "C2-", label="learned", linewidth=1.4)
    panels[2].plot(days, possible, "k:", label="available over need, at most 1", linewidth=1)
    panels[2].set_title("200 devices, 130 needed in ten minutes", fontsize=10)
    panels[2].legend(fontsize=8, loc="upper right")
    for panel in panels:
        panel.axhspan(0.9, 1.1, color="0.88", zorder=0)
        panel.set_xlabel("days since all came at once")
    figure.tight_layout()
    figure.savefig(output, dpi=110)


if __name__ == "__main__":
    main()
