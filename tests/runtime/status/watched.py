"""A population whose server is made up: observations of events that a test tells."""

from __future__ import annotations

from tff_dpftrl.runtime.actors import events, population
from tff_dpftrl.runtime.protocol import wire_pb2
from tff_dpftrl.runtime.status import observations

START = 1_699_999_200.0  # A full hour.
GOAL = 4


class Clock:
    def __init__(self, now=START):
        self.now = now

    def __call__(self):
        return self.now


class Watched:
    """Observations, and the events of whole rounds."""

    def __init__(self, *names, clock=None, selection_timeout=30.0, **changes):
        self.clock = Clock() if clock is None else clock
        rounds = changes.pop("rounds", None) or population.RoundSettings(
            GOAL, least_fraction=1.0, selection_timeout=selection_timeout, reporting_timeout=60.0
        )
        tasks = tuple(
            population.Task(name, rounds, None, None, **changes) for name in names or ("train",)
        )
        self.seen = observations.Observations(
            population.Population("keyboard", tasks), clock=self.clock
        )
        self.rounds = dict.fromkeys(self.seen.tasks, 0)
        self.attempts = 0

    @property
    def attempt(self):
        return f"attempt {self.attempts}"

    def on_event(self, event):
        self.seen.on_event(self.clock(), event)

    def lead(self, epoch=1):
        self.on_event(events.Leading("keyboard", epoch))

    def begin(self, task="train", devices=5):
        """Devices connect, wait, and are chosen for the next round."""
        self.attempts += 1
        for _ in range(devices):
            self.seen.session_opened()
            self.seen.waiting()
        self.on_event(events.RoundBegan(task, self.rounds[task], self.attempt, devices))
        for _ in range(devices):
            self.seen.configured(task, 1000)

    def report(self, task="train", count=1, refusal=""):
        for _ in range(count):
            self.seen.reported(task, refusal, 100)
            self.seen.session_closed("reported")

    def drop(self, count=1):
        for _ in range(count):
            self.seen.session_closed("training")

    def commit(self, task="train"):
        released = events.RoundReleased(task, self.rounds[task], self.attempt, {"loss": 1.0})
        self.on_event(released)
        self.rounds[task] += 1

    def lose(self, task="train", reason="too few reports"):
        self.on_event(events.RoundLost(task, self.rounds[task], self.attempt, reason, {}))

    def round(self, task="train", seconds=2.0, dropped=1):
        """A whole round: reports of the goal, and others drop out."""
        self.begin(task, GOAL + dropped)
        self.clock.now += seconds / 2
        self.report(task, GOAL)
        self.drop(dropped)
        self.clock.now += seconds / 2
        self.commit(task)

    def tell(self, shape="-v[]+^", seconds=3.0, versions=None):
        self.seen.session_summarized(
            wire_pb2.SessionSummary(
                population="keyboard",
                shape=shape,
                seconds=seconds,
                peak_memory_bytes=300_000_000,
                versions=versions or {},
            )
        )
