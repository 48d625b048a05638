"""Observations of a server as Prometheus metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import prometheus_client
from prometheus_client import core
from prometheus_client.registry import Collector

from tff_dpftrl.runtime.device import session_shape
from tff_dpftrl.runtime.status import alerts, counters, task_figures
from tff_dpftrl.runtime.status import observations as observations_lib

_PREFIX = "tff_dpftrl_"


def registry(
    seen: observations_lib.Observations, privacy: Callable[[], Mapping[str, Any]] = dict
) -> prometheus_client.CollectorRegistry:
    """Creates a registry whose metrics are computed at each scrape.

    `privacy` returns the known figures by task, each with "epsilon": None without a guarantee.
    """
    created = prometheus_client.CollectorRegistry(auto_describe=False)
    created.register(_Collector(seen, privacy))
    return created


class _Collector(Collector):
    """Collector of the observations' metrics."""

    def __init__(
        self, seen: observations_lib.Observations, privacy: Callable[[], Mapping[str, Any]]
    ):
        self._seen = seen
        self._privacy = privacy

    def collect(self) -> Iterator[core.Metric]:
        """Yields all metrics with all their labels."""
        self._seen.now()
        yield from self._population()
        yield from self._devices()
        yield from self._rounds()
        yield from self._reports()
        yield from self._summaries()
        yield from self._alerts()

    def _total(self, name: str) -> float:
        return self._seen.series.total(name)

    def _population(self) -> Iterator[core.Metric]:
        seen = self._seen
        info = core.InfoMetricFamily(_PREFIX + "population", "The population that is served.")
        info.add_metric([], {"name": seen.served.name})
        yield info
        yield _gauge("start_time_seconds", "When the server started.", seen.started_at)
        text = "Epoch of the population's lease; 0 without a leader."
        yield _gauge("lease_epoch", text, seen.epoch)
        yield _counter("leaders", "Coordinators that have led the population.", seen.leaders)
        text = "Times that the store could not be read or written."
        yield _counter("store_failures", text, self._total("store_failures"))

    def _devices(self) -> Iterator[core.Metric]:
        text = "Devices that are connected, by state; connected counts all of them."
        states = {state: self._total(state) for state in observations_lib.LEVELS}
        yield _gauges("devices", text, ["state"], {(k,): v for k, v in states.items()})
        yield _counter("sessions", "Sessions that were opened.", self._total("sessions"))
        yield _counters(
            "sessions_refused",
            "Sessions that were ended with an error, by reason.",
            ["reason"],
            _labelled(self._seen.refused_sessions.items()),
        )
        yield _counters(
            "devices_sent_away",
            "Devices that were asked to come back later, by reason.",
            ["reason"],
            _labelled(self._seen.sent_away_reasons.items()),
        )
        text = "Devices that were given a plan and a model."
        yield _counter("devices_configured", text, self._total("configured"))
        phases = ("connecting", "waiting", "participating")
        yield _counters(
            "devices_dropped",
            "Devices that dropped out, by phase of their session.",
            ["phase"],
            {(phase,): self._total(f"dropped_{phase}") for phase in phases},
        )

    def _rounds(self) -> Iterator[core.Metric]:
        tasks = self._seen.tasks
        yield _of_tasks(
            tasks,
            "rounds_done",
            "Rounds of the task that are committed, before this start of the server too.",
            lambda task: task.rounds_done or 0,
        )
        text = "Rounds that were committed since the server started."
        committed = {(name,): task.committed for name, task in tasks.items()}
        yield _counters("rounds_committed", text, ["task"], committed)
        yield _counters(
            "rounds_skipped",
            "Rounds that were skipped since the server started: nothing of them is released.",
            ["task"],
            {(name,): task.skipped for name, task in tasks.items()},
        )
        yield _counters(
            "rounds_abandoned",
            "Attempts at rounds that came to nothing, by reason.",
            ["task", "reason"],
            {
                (name, reason): count
                for name, task in tasks.items()
                for reason, count in task.abandoned.items()
            },
        )
        yield _of_tasks(
            tasks,
            "last_commit_time_seconds",
            "When a round of the task was last seen to be committed; 0 if none was.",
            lambda task: task.last_commit_at or 0.0,
        )
        yield _of_tasks(
            tasks,
            "round_devices",
            "Devices that were chosen for the round that runs.",
            lambda task: task.attempt.devices if task.attempt else 0,
        )
        yield _of_tasks(
            tasks,
            "round_reports",
            "Reports that count in the round that runs.",
            lambda task: task.attempt.reports if task.attempt else 0,
        )
        yield _of_tasks(
            tasks,
            "round_goal_reports",
            "Reports after which a round of the task is complete.",
            lambda task: task.settings.rounds.goal_count,
        )
        yield _histograms(
            "round_duration_seconds",
            "From the choice of a round's devices to its commit.",
            {name: task.round_seconds for name, task in tasks.items()},
        )
        epsilons = {
            (name,): math.inf if figures.get("epsilon") is None else figures["epsilon"]
            for name, figures in self._privacy().items()
            if name in tasks and "epsilon" in figures
        }
        text = "Epsilon of what the task has released; infinite without a guarantee."
        yield _gauges("privacy_epsilon", text, ["task"], epsilons)

    def _reports(self) -> Iterator[core.Metric]:
        tasks = self._seen.tasks
        yield _counters(
            "reports",
            "Reports of devices, by outcome.",
            ["task", "outcome"],
            {
                (name, outcome): task.reports[outcome]
                for name, task in tasks.items()
                for outcome in task_figures.OUTCOMES
            },
        )
        yield _counters(
            "secure_sum_groups",
            "Groups of secure aggregation, by outcome; the reports of a lost group are lost.",
            ["task", "outcome"],
            {
                (name, outcome): task.groups[outcome]
                for name, task in tasks.items()
                if task.settings.secure_sum is not None
                for outcome in task_figures.GROUPS
            },
        )
        text = "From the choice of a round's devices to each report that counts."
        durations = {name: task.report_seconds for name, task in tasks.items()}
        yield _histograms("participation_duration_seconds", text, durations)
        sent = {(name,): task.bytes_sent for name, task in tasks.items()}
        yield _counters("sent_bytes", "Plans and models sent to devices.", ["task"], sent)
        received = {(name,): task.bytes_received for name, task in tasks.items()}
        yield _counters("received_bytes", "Reports of devices.", ["task"], received)

    def _summaries(self) -> Iterator[core.Metric]:
        counts = dict(self._seen.reported_shapes.items())
        shapes = sorted(session_shape.SHAPES) + [counters.OTHER]
        yield _counters(
            "session_shapes",
            "Sessions that devices reported, by shape.",
            ["shape"],
            {(shape,): counts.get(shape, 0) for shape in shapes},
        )
        text = "Duration of sessions that received a plan, as devices reported it."
        yield _histogram("session_duration_seconds", text, self._seen.session_seconds)
        text = "Peak memory of devices in a session, as they reported it."
        yield _histogram("device_peak_memory_bytes", text, self._seen.peak_memory)

    def _alerts(self) -> Iterator[core.Metric]:
        kinds = [alert.kind for alert in alerts.find(self._seen)]
        text = "Alerts of the status page, by kind."
        counts = {(kind,): kinds.count(kind) for kind in alerts.KINDS}
        yield _gauges("alerts", text, ["kind"], counts)


def _labelled(items: Iterable[tuple[str, int]]) -> dict[tuple[str, ...], int]:
    return {(label,): count for label, count in items}


def _gauge(name: str, text: str, value: float) -> core.Metric:
    return core.GaugeMetricFamily(_PREFIX + name, text, value=value)


def _gauges(
    name: str, text: str, labels: list[str], values: Mapping[tuple[str, ...], float]
) -> core.Metric:
    return _filled(core.GaugeMetricFamily(_PREFIX + name, text, labels=labels), values)


def _of_tasks(tasks: Mapping[str, Any], name: str, text: str, value: Any) -> core.Metric:
    return _gauges(name, text, ["task"], {(each,): value(task) for each, task in tasks.items()})


def _counter(name: str, text: str, value: float) -> core.Metric:
    return core.CounterMetricFamily(_PREFIX + name, text, value=value)


def _counters(
    name: str, text: str, labels: list[str], values: Mapping[tuple[str, ...], float]
) -> core.Metric:
    return _filled(core.CounterMetricFamily(_PREFIX + name, text, labels=labels), values)


def _filled(metric: core.Metric, values: Mapping[tuple[str, ...], float]) -> core.Metric:
    for key, value in values.items():
        metric.add_metric(key, value)
    return metric


def _buckets(values: counters.Distribution) -> list[tuple[str, float]]:
    finite = [(f"{edge:g}", float(count)) for edge, count in values.octaves()]
    return [*finite, ("+Inf", float(values.count))]


def _histogram(name: str, text: str, values: counters.Distribution) -> core.Metric:
    metric = core.HistogramMetricFamily(_PREFIX + name, text)
    metric.add_metric([], _buckets(values), values.sum)
    return metric


def _histograms(name: str, text: str, values: Mapping[str, counters.Distribution]) -> core.Metric:
    metric = core.HistogramMetricFamily(_PREFIX + name, text, labels=["task"])
    for task, each in values.items():
        metric.add_metric([task], _buckets(each), each.sum)
    return metric
