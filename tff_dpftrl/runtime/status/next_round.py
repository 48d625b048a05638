"""Sentences for the operator: where the next round of a task stands, and what it waits for."""

from __future__ import annotations

from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.runtime.actors import events
from tff_dpftrl.runtime.status import alerts, task_figures
from tff_dpftrl.runtime.status import observations as observations_lib


def outlook(seen: observations_lib.Observations, name: str) -> list[str]:
    """Describes why a task's next round does not begin, or what a running one waits for.

    The sentences have numbers; the most important one is first.
    """
    task, now = seen.tasks[name], seen.now()
    if task.is_over:
        reason = task.stopped or f"all {task.settings.num_rounds} rounds are done"
        return [f"No further round: {reason.removesuffix('.')}."]
    sentences = [*_store(seen, now)]
    if task.attempt is None:
        sentences += _before_round(seen, name)
    else:
        sentences.append(_running(task, task.attempt, now))
    if task.last_lost:
        sentences.append(f"The last attempt was abandoned: {task.last_lost.removesuffix('.')}.")
    return sentences


def _store(seen: observations_lib.Observations, now: float) -> list[str]:
    failed_at = seen.last_store_failure_at
    if failed_at is None or now - failed_at >= 2 * seen.served.lease_seconds:
        return []
    passed = alerts.duration(now - failed_at)
    return [f"The store failed {passed} ago: no round begins or is committed until it answers."]


def _running(task: task_figures.TaskFigures, attempt: task_figures.Attempt, now: float) -> str:
    rounds = task.settings.rounds
    title = f"Round {attempt.round_index + 1}"
    if attempt.reports >= rounds.goal_count:
        return f"{title} has its {attempt.reports} reports: sum, noise and commit follow."
    have = (
        f"{title} waits for reports: {attempt.reports} of {rounds.goal_count} have come, from "
        f"{_devices(attempt.devices)}"
    )
    left = attempt.began_at + rounds.reporting_timeout - now
    if left <= 0:
        return f"{have}, and their time is over: with fewer than {rounds.least} it is abandoned."
    return f"{have}. It ends in {alerts.duration(left)} at the latest, with {rounds.least} or more."


def _before_round(seen: observations_lib.Observations, name: str) -> list[str]:
    progress = seen.selection
    if not seen.epoch:
        since = alerts.duration(seen.now() - seen.started_at)
        return [f"No server leads the population: nobody has taken its lease for {since}."]
    if progress is None:
        return ["The server has just begun to lead: Selectors have not counted devices yet."]
    if progress.pause_seconds:
        attempts = strategy_lib.counted(progress.not_stored, "attempt")
        return [
            f"Commits fail: {attempts} since the last commit could not be stored. The next one "
            f"begins in {progress.pause_seconds} seconds."
        ]
    if progress.is_reading:
        return ["The store has not answered yet what is committed."]
    for other, task in seen.tasks.items():
        if task.attempt is not None:
            index = task.attempt.round_index + 1
            return [f"Round {index} of {other} runs, and only one round runs at a time."]
    if progress.task != name:
        if not progress.task:
            return ["The server has not opened a selection of devices yet."]
        return [f"Devices are selected for {progress.task} first: {_turns(seen, progress, name)}."]
    return _selection(seen, progress)


def _turns(
    seen: observations_lib.Observations, progress: events.SelectionProgress, name: str
) -> str:
    """Describes by which rounds and weights another task comes first."""
    parts = []
    for each in (progress.task, name):
        task = seen.tasks[each]
        rounds = strategy_lib.counted(task.rounds_done or 0, "round")
        parts.append(f"{rounds} at weight {task.settings.weight:g}")
    return f"it has done {parts[0]}, this task {parts[1]}"


def _selection(
    seen: observations_lib.Observations, progress: events.SelectionProgress
) -> list[str]:
    task = seen.tasks[progress.task]
    settings = task.settings
    rounds = settings.rounds
    sentences = []
    if task.party_away is not None:
        waits = settings.wait_for_parties(task.party_away)
        what = "Rounds are skipped" if task.party_away.to_skip else "A noise party is away"
        sentences.append(f"{what}: {waits}")
    if progress.waiting >= rounds.least:
        sentences.append(
            f"{progress.waiting} of {_devices(progress.wanted)} wait: the round begins with all, "
            f"or with {rounds.least} or more when no others come, after "
            f"{alerts.duration(rounds.selection_timeout)} at the latest."
        )
    else:
        few = events.TooFewDevices(
            progress.task,
            progress.waiting,
            rounds.least,
            progress.resting,
            progress.min_sep_is_over,
            task.rounds_done or 0,
        )
        connected = int(seen.series.total("connected"))
        sentences += [
            f"Too few devices have checked in: {settings.shortage(few)}",
            f"Connected in all: {_devices(connected)}.",
        ]
        if seen.population_size is not None and not progress.resting:
            advice = settings.rests_advice(seen.population_size)
            sentences += [f"The population is too small: {advice}"] if advice else []
    if progress.silent_selectors:
        sentences.append(
            f"{progress.silent_selectors} of {progress.selectors} Selectors have not answered for "
            f"{alerts.duration(seen.served.silence_seconds)}: devices that wait there do not count."
        )
    return sentences


def _devices(count: int) -> str:
    return strategy_lib.counted(count, "device")
