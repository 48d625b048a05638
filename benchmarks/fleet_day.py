"""Three days of a fleet, as figures 5 to 9 and table 1 of Bonawitz et al. (2019) show theirs.

    PYTHONPATH=. python benchmarks/fleet_day.py [--output docs/explanation/fleet_day.png]
        [--devices 3000] [--days 3]

Real are the server's actors (Coordinator, Selector, Master Aggregator, Aggregators), its pace
steering with the curve of the day that it learns, its counters, series and tables, and the devices'
schedule, eligibility and drawn faults: the classes that `serve` and `fleet` use. Simulated are the
clock, the wire, and what a device does in a round: how long it downloads, trains and uploads. No
model is trained, and no byte travels: sizes are those of a model of 1.35M weights, 4 bytes a weight
down and 2 bytes a weight up. Devices keep the plan of an earlier session.

Assumed, not found: a fifth of the devices is always charged, and the others for 5 to 12 hours a
day, around 2 o'clock. Training takes 60 seconds in the median (log-normal). By day, a device is
taken from its charger four times as often as by night. Two in a hundred drop out in any case.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import heapq
import itertools
import math
import pathlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from tff_dpftrl.participation import schema
from tff_dpftrl.runtime import participation_histograms
from tff_dpftrl.runtime.actors import actor, events, factory, messages, population
from tff_dpftrl.runtime.device import backoff, participation_timer, scheduler, session
from tff_dpftrl.runtime.fleet import availability, behaviour
from tff_dpftrl.runtime.protocol import pace_steering, wire_pb2
from tff_dpftrl.runtime.server import day_curve
from tff_dpftrl.runtime.status import observations
from verification import memory_store

_HOUR, _DAY = 3600.0, 86_400.0
_TASK, _SELECTOR, _STORE = "training", "selector", "store"
_WEIGHTS = 1_350_000
_DOWN_BYTES, _UP_BYTES = 4 * _WEIGHTS, 2 * _WEIGHTS
_BYTES_A_SECOND = 1e6  # Median speed of a device's network; the spread is a factor of 2.
_SPREAD = 0.5  # Of training, log-normal.
_ALWAYS = 0.21  # Share of the devices that are always charged.
_INTERRUPTED_A_SECOND = 2.0e-4  # By night; four times as many by day.
_MESSAGE_SECONDS = 0.02
_MOST_TIMES = 10**6


class _Count(population.Summation):
    """Counts reports."""

    def zero(self) -> int:
        return 0

    def accumulate(self, total: int, payload: Any) -> int:
        return total + 1

    def merge(self, total: int, other: int) -> int:
        return total + other


class _NoStep(population.ServerStep):
    """Computes nothing."""

    def apply(self, total, num_reports, model, state) -> population.StepResult:
        return population.StepResult(b"model", b"state", {"devices/reports": num_reports})

    def skip(self, model, state) -> population.StepResult:
        return population.StepResult(b"model", b"state", {population.SKIPPED: True})


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a fleet and its rounds are like.

    Attributes:
      period: Seconds from one selection to the next that the server steers devices for.
      training_seconds: Median of a device's training.
      drop_outs: Probability that a chosen device drops out, besides those taken from the charger.
      stragglers: Probability that a device is slower by a minute or more.
      reporting_timeout: Seconds that devices have to report.
      min_sep: Smallest stride between two rounds of one device.
      have_nights: Whether most devices are there at night only, and taken from the charger.
      first_seconds: Seconds within which all devices come first.
      heartbeat_seconds: Interval of the Coordinator's heartbeats.
    """

    period: float = 180.0
    training_seconds: float = 60.0
    drop_outs: float = 0.02
    stragglers: float = 0.05
    reporting_timeout: float = 300.0
    min_sep: int = 1
    have_nights: bool = True
    first_seconds: float = _HOUR
    heartbeat_seconds: float = 15.0


@dataclasses.dataclass
class _Session:
    """One session of a device.

    Attributes:
      device: Number of the device.
      began: Time of its beginning.
      behaviour: Drawn faults.
      report_to: Aggregator that takes the report; empty while the device waits.
      attempt: Name of the attempt.
      round_index: Index of its round.
      shape: Events so far.
    """

    device: int
    began: float
    behaviour: behaviour.Behaviour
    report_to: str = ""
    attempt: str = ""
    round_index: int = 0
    shape: str = "-"


class Day:
    """Actors and devices on a simulated clock.

    Attributes:
      seen: Observations of the server.
      participation_seconds: Seconds from configuration to the end of each device's session.
    """

    def __init__(self, num_devices: int, *, goal: int, seed: int = 0, setting: Setting = Setting()):
        """Sets the stage at midnight.

        Args:
          num_devices: Number of devices.
          goal: Reports that complete a round.
          seed: Seed of all that is random.
          setting: What the fleet and its rounds are like.
        """
        self._num_devices, self._setting = num_devices, setting
        self._random = random.Random(seed)
        self._now = _DAY
        rounds = population.RoundSettings(
            goal,
            selection_timeout=600.0,
            reporting_timeout=setting.reporting_timeout,
            devices_per_aggregator=100,
        )
        task = population.Task(
            _TASK,
            rounds,
            _Count(),
            _NoStep(),
            pipelined=setting.min_sep == 1,
            rest_seconds=(setting.min_sep - 1) * setting.period,
            min_sep=setting.min_sep,
        )
        served = population.Population(
            "fleet",
            (task,),
            lease_seconds=4 * setting.heartbeat_seconds,
            heartbeat_seconds=setting.heartbeat_seconds,
            silence_seconds=3 * setting.heartbeat_seconds,
        )
        store = memory_store.MemoryStore()
        store.add_task("fleet", _TASK, model=b"model", state=b"state")
        available = num_devices / 2 if setting.have_nights else num_devices
        first = pace_steering.PaceSteering(rounds.wanted, setting.period, available)
        self._day = day_curve.DayCurve(first, self._now)
        self._factory = self._make_factory(served)
        self.seen = observations.Observations(served, clock=lambda: self._now)
        self.participation_seconds: list[float] = []
        self.device_seconds = {state: collections.Counter[int]() for state in observations.LEVELS}
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._actors: dict[str, actor.Actor] = {}
        self._sessions: dict[str, _Session] = {}
        self._rates = behaviour.Rates(
            drop_outs=setting.drop_outs, stragglers=setting.stragglers, straggler_s=120.0
        )
        clock = lambda: self._now  # noqa: E731
        self._opening = events.SelectionOpened("", 0)
        self._rule = participation_timer.ParticipationRule(setting.min_sep, _MOST_TIMES)
        self._buckets = participation_histograms.ParticipationBuckets.for_schema(
            schema.MinSep(_MOST_TIMES * setting.min_sep, setting.min_sep, _MOST_TIMES)
        )
        self._timers = [participation_timer.MemoryTimer(clock) for _ in range(num_devices)]
        self._last_rounds: dict[int, int] = {}  # Of each device that has taken part.
        self._last_in: collections.Counter[int] = collections.Counter()  # Their number, by round.
        self._eligibility = [
            None
            if not setting.have_nights or self._random.random() < _ALWAYS
            else availability.Nightly(self._random, clock=clock)
            for _ in range(num_devices)
        ]
        waits = backoff.Waits(first_s=setting.first_seconds)
        self._schedules = [
            scheduler.Schedule([_TASK], clock=clock, generator=self._random, waits=waits)
            for _ in range(num_devices)
        ]
        self._start(self._factory.store_actor(store))
        self._start(self._factory.selector(_SELECTOR, self._random))
        for device in range(num_devices):
            self._next_turn(device)

    def run(self, days: float) -> None:
        """Runs the fleet for some days."""
        end = self._now + days * _DAY
        while self._queue and self._queue[0][0] <= end:
            now, _, call = heapq.heappop(self._queue)
            self._advance(now)
            call()
        self._advance(end)
        self.seen.now()

    def _advance(self, now: float) -> None:
        """Adds up the devices in each state over time, in the hour in which the time begins."""
        hour = int(self._now // _HOUR)
        for state, seconds in self.device_seconds.items():
            seconds[hour] += self.seen.series.total(state) * (now - self._now)
        self._now = now

    def num_eligible(self, round_index: int) -> int:
        """Returns the number of devices that need not rest from a round; no server knows it."""
        rested = range(round_index - self._setting.min_sep + 1, round_index + 1)
        return self._num_devices - sum(self._last_in[index] for index in rested)

    def _make_factory(self, served: population.Population) -> factory.ActorFactory:
        return factory.ActorFactory(
            served, selectors=(_SELECTOR,), pace=self._turns, store_address=_STORE
        )

    def _turns(self, now: float, randomness: random.Random) -> tuple[float, ...]:
        return self._day.steering.turns(now, randomness, 8)

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self._now + seconds, next(self._numbers), call))

    # Actors.

    def _start(self, made: actor.Actor) -> None:
        self._actors[made.address] = made
        self._carry_out(made, made.start(self._now))

    def _carry_out(self, member: actor.Actor, effects: list[actor.Effect]) -> None:
        for effect in effects:
            match effect:
                case actor.Send():
                    self._send(effect.to, effect.message)
                case actor.After():
                    self._later(
                        effect.seconds,
                        functools.partial(self._deliver, member.address, effect.message, member),
                    )
                case actor.Spawn():
                    self._start(self._factory.build(effect.address, effect.role, self._random))
                case actor.Stop():
                    self._actors.pop(effect.address, None)

    def _send(self, to: str, message: Any) -> None:
        if to == events.OBSERVER:
            self.seen.on_event(self._now, message)
            if isinstance(message, events.SelectionOpened):
                self._opening = message
        else:
            self._later(_MESSAGE_SECONDS, functools.partial(self._deliver, to, message))

    def _deliver(self, to: str, message: Any, only: actor.Actor | None = None) -> None:
        member = self._actors.get(to)
        if member is not None and only in (None, member):
            self._carry_out(member, member.step(self._now, message))
        elif to in self._sessions:
            self._receive(to, message)
        elif isinstance(message, messages.Report):  # The round is over.
            late = messages.ReportRefused(message.device, message.attempt, messages.Refusal.LATE)
            self._send(message.device, late)

    # Devices.

    def _next_turn(self, device: int) -> None:
        self._later(self._schedules[device].next_job().seconds, lambda: self._turn(device))

    def _is_eligible(self, device: int) -> bool:
        nights = self._eligibility[device]
        return nights is None or not nights.unmet()

    def _turn(self, device: int) -> None:
        if not self._is_eligible(device):
            self._schedules[device].missed(_TASK)
            self._next_turn(device)
            return
        address = f"device/{next(self._numbers)}"
        drawn = self._rates.draw(self._random, is_malicious=False)
        self._sessions[address] = _Session(device, self._now, drawn)
        self.seen.session_opened()
        if self._opening.task and (rest := self._rest(device, self._opening.round_index)):
            self._send(_SELECTOR, messages.DeviceRests())
            self._end(address, "sent away", "-#", session.SessionOutcome.RESTING, (rest,))
            return
        self.seen.waiting()
        self._day.came(self._now)
        self._send(_SELECTOR, messages.CheckIn(address, frozenset([_TASK]), address))

    def _rest(self, device: int, round_index: int) -> float:
        """Returns the seconds that a device estimates to rest until a round; 0 if it need not."""
        try:
            self._timers[device].check("fleet", _TASK, round_index, self._rule)
        except participation_timer.TimerRefusal as refusal:
            return max(refusal.wait_s or 0.0, 1.0)
        return 0.0

    def _take_part(self, device: int, round_index: int) -> None:
        """Has a device write down that it takes part, before its report leaves."""
        self._timers[device].record("fleet", _TASK, round_index, self._rule, self._buckets)
        if (last := self._last_rounds.get(device)) is not None:
            self._last_in[last] -= 1
        self._last_rounds[device] = round_index
        self._last_in[round_index] += 1

    def _receive(self, address: str, message: Any) -> None:
        one = self._sessions[address]
        match message:
            case messages.ComeBack() if not one.report_to:
                self.seen.sent_away(message.reason, True)
                outcome = session.SessionOutcome.NOT_SELECTED
                self._end(address, "sent away", "-#", outcome, message.turns)
            case messages.Configure():
                self._train(address, one, message)
            case messages.ReportAccepted():
                self.seen.reported(_TASK, "", _UP_BYTES)
                outcome = session.SessionOutcome.COMPLETED
                self._end(address, "reported", "-v[]+^", outcome, message.turns)
            case messages.ReportRefused() if one.shape == "-v[]+":
                self.seen.reported(_TASK, message.refusal.value, _UP_BYTES)
                turns = self._turns(self._now, self._random)
                outcome = session.SessionOutcome.REPORT_REFUSED
                self._end(address, "reported", "-v[]+#", outcome, turns)

    def _train(self, address: str, one: _Session, told: messages.Configure) -> None:
        self.seen.configured(_TASK, _DOWN_BYTES)
        one.report_to, one.attempt, one.began = told.report_to, told.attempt, self._now
        one.round_index = told.round_index
        speed = _BYTES_A_SECOND * self._random.lognormvariate(0, math.log(2))
        training = self._setting.training_seconds * self._random.lognormvariate(0, _SPREAD)
        steps = {
            "-v": 0.0,  # The plan comes first.
            "-v[": _DOWN_BYTES / speed,
            "-v[]+": training + one.behaviour.delay_s,
            "report": _UP_BYTES / speed,
        }
        drops = {
            behaviour.DropOut.BEFORE_TRAINING: "-v[",
            behaviour.DropOut.TRAINING: "-v[]+",
            behaviour.DropOut.UPLOAD: "report",
        }
        self._step(address, list(steps.items()), drops.get(one.behaviour.drop_out, ""))

    def _step(self, address: str, steps: list[tuple[str, float]], drops_at: str) -> None:
        """Waits for the first of the steps, unless the device drops out before its end."""
        (name, seconds), *others = steps
        hour = self._now % _DAY / _HOUR
        rate = _INTERRUPTED_A_SECOND * (2.5 - 1.5 * math.cos(2 * math.pi * (hour - 2) / 24))
        lasts = self._random.expovariate(rate) if self._setting.have_nights else math.inf
        one = self._sessions[address]

        def ended() -> None:
            if not self._is_eligible(one.device) or lasts < seconds or name == drops_at:
                self._drop_out(address)
                return
            if name == "report":
                self._send(one.report_to, messages.Report(address, one.attempt, 1))
                return
            one.shape = name
            if name == "-v[]+":
                self._take_part(one.device, one.round_index)
                self._send(one.report_to, messages.ReportBegun(address))
            self._step(address, others, drops_at)

        self._later(min(seconds, lasts), ended)

    def _drop_out(self, address: str) -> None:
        one = self._sessions[address]
        self._send(one.report_to, messages.DeviceGone(address))
        self._end(address, "training", one.shape + "!", session.SessionOutcome.INTERRUPTED, ())

    def _end(
        self,
        address: str,
        phase: str,
        shape: str,
        outcome: session.SessionOutcome,
        turns: tuple[float, ...],
    ) -> None:
        one = self._sessions.pop(address)
        seconds = self._now - one.began
        self.seen.session_closed(phase)
        self.seen.session_summarized(wire_pb2.SessionSummary(shape=shape, seconds=seconds))
        if phase != "sent away":
            self.participation_seconds.append(seconds)
        report = session.SessionReport(shape, seconds, 0, {})
        result = session.SessionResult(outcome, turns, "", report)
        self._schedules[one.device].finished(_TASK, result)
        self._next_turn(one.device)


def hourly(day: Day) -> dict[str, np.ndarray]:
    """Returns the counts and mean levels of each hour, by name; the first hour is left out."""
    found = {name: values[1:] for name, values in day.seen.series.window("week").values.items()}
    last = int(day.seen.now() // _HOUR)
    hours = range(last - found["sessions"].size, last)
    for state, seconds in day.device_seconds.items():
        found[state] = np.array([seconds[hour] / _HOUR for hour in hours])
    return found


def rows(day: Day) -> list[str]:
    """Returns lines that say what the figures show."""
    hours = hourly(day)
    chosen = max(hours["configured"].sum(), 1.0)
    dropped = hours["dropped_participating"] / np.maximum(hours["configured"], 1)
    of_day = [dropped[hour::24].mean() for hour in range(min(24, dropped.size))]
    last = min(23, dropped.size - 1)  # Of the first day; the first hour is left out.
    first, later = hours["committed"][: max(last, 1)], hours["committed"][last:]
    rounds, devices = day.seen.tasks[_TASK].round_seconds, np.asarray(day.participation_seconds)
    ratio = hours["bytes_sent"].sum() / max(hours["bytes_received"].sum(), 1)
    return [
        f"rounds an hour on the first day: {first.min():.0f}-{first.max():.0f}, afterwards: "
        f"{later.min():.0f}-{later.max():.0f}; abandoned attempts: {hours['abandoned'].sum():.0f}",
        f"of the chosen devices: {hours['reports'].sum() / chosen:.1%} completed, "
        f"{hours['refused_reports'].sum() / chosen:.1%} were late, {dropped.mean():.1%} dropped out"
        f" ({min(of_day):.1%} to {max(of_day):.1%} by hour)",
        f"seconds of a round: {rounds.quantile(0.5):.0f} in the median, {rounds.quantile(0.9):.0f} "
        f"at the 90th percentile; of a device: {np.median(devices):.0f} and "
        f"{np.quantile(devices, 0.9):.0f}",
        f"bytes down over bytes up: {ratio:.2f}",
    ]


def plot(day: Day, output: pathlib.Path) -> None:
    """Draws the figures.

    Args:
      day: The fleet, after its run.
      output: File to write; its suffix decides the format.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    hours = hourly(day)
    days = (np.arange(hours["sessions"].size) + 1.5) / 24
    rounds = np.maximum(hours["committed"] + hours["abandoned"], 1)
    figure, panels = plt.subplots(2, 3, figsize=(13, 7))
    devices, rate, outcomes, seconds, traffic, availability_panel = panels.flat
    devices.plot(days, hours["participating"], "C0-", label="participating")
    devices.plot(days, hours["waiting"], "C4-", label="waiting")
    devices.set_title("connected devices (figure 6)", fontsize=10)
    rate.plot(days, hours["committed"], "C2-", label="committed")
    rate.plot(days, hours["abandoned"], "C3-", label="abandoned")
    rate.set_title("rounds an hour (figures 5 and 6)", fontsize=10)
    for name, label, style in (
        ("reports", "completed", "C2-"),
        ("refused_reports", "late", "C1-"),
        ("dropped_participating", "dropped out", "C3-"),
    ):
        outcomes.plot(days, hours[name] / rounds, style, label=label)
    outcomes.set_title("devices of a round (figure 7)", fontsize=10)
    measured = day.seen.tasks[_TASK].round_seconds
    bins = np.arange(0, 400, 10)
    seconds.hist(day.participation_seconds, bins, density=True, alpha=0.6, label="device")
    edges = np.asarray(measured.edges)
    density = np.asarray(measured.counts[1:-1]) / np.diff(edges) / max(measured.count, 1)
    seconds.stairs(density, edges, color="C3", label="round")
    seconds.set_xlim(0, 400)
    seconds.set_xlabel("seconds")
    seconds.set_title("round and participation time (figure 8)", fontsize=10)
    traffic.plot(days, hours["bytes_sent"] / 1e9, "C0-", label="to devices")
    traffic.plot(days, hours["bytes_received"] / 1e9, "C1-", label="from devices")
    traffic.set_title("GB an hour (figure 9)", fontsize=10)
    availability_panel.plot(
        days, hours["sessions"] - hours["configured"], "C4-", label="not chosen"
    )
    availability_panel.plot(days, hours["sessions"], "C0-", label="check-ins")
    availability_panel.set_title("check-ins an hour", fontsize=10)
    for panel in panels.flat:
        panel.set_ylim(bottom=0)
        panel.legend(fontsize=8)
        if panel is not seconds:
            panel.set_xlabel("days")
    figure.tight_layout()
    figure.savefig(output, dpi=110)


def main() -> None:
    """Runs the fleet, prints table and numbers, and writes the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("fleet_day.png"))
    parser.add_argument("--devices", type=int, default=3_000)
    parser.add_argument("--goal", type=int, default=25)
    parser.add_argument("--days", type=float, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    day = Day(args.devices, goal=args.goal, seed=args.seed)
    day.run(args.days)
    print(day.seen.session_table.to_markdown())
    print("\n".join(rows(day)))
    plot(day, args.output)
    print(f"Plot: {args.output}")


if __name__ == "__main__":
    main()
