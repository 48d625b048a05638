"""What must have held in a campaign, judged by what it has left.

Nothing of the server is used: the log is what the database has noted by itself, the rows are
read by SQL, sums and noise are computed anew from the devices' vectors, the seed and what the noise
was drawn with.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from verification.campaign import database_log, devices, memory_search, supervisor, tiny_tasks


class Law(enum.Enum):
    """Laws that hold, whatever happens."""

    ONE_COMMIT = "no round is committed twice, or out of order"
    KEPT = "no committed round is lost: what anybody was told is in the store"
    ONE_MODEL = "a round has one model, for everybody and for good"
    EXACT_SUM = "every model is the sum of its devices' reports, and its noise"
    OWN_REPORTS = "every sum holds reports that were sent to it, each once, all that were accepted"
    GROWING_EPOCHS = "every leader has an epoch of its own, larger than all before"
    FRESH_EPOCH = "no stale epoch has committed"
    NO_VECTOR = "no vector of a device is where it must not be"
    SEPARATION = f"released rounds of one honest device are at least {tiny_tasks.MIN_SEP} apart"
    PROGRESS = "a round is released in time after every fault, and of every task in the end"


@dataclasses.dataclass(frozen=True)
class Told:
    """Result of a round, as it left the server.

    Attributes:
      who: A device or a server's observer.
      task: The task.
      rounds: Rounds that were done by then.
      model: SHA-256 of the model after them.
    """

    who: str
    task: str
    rounds: int
    model: str


@dataclasses.dataclass
class Evidence:
    """Evidence that is judged.

    Attributes:
      seed: Seed of the devices' vectors and of the noise.
      lines: The log.
      rounds: Rows of the store's history: task, round, epoch, metrics.
      commits: Rows of the tasks: task, rounds done, epoch, model.
      told: What left the servers.
      leading: Population that somebody said to lead, and under which epoch.
      records: The devices' own.
      outcomes: Outcomes of the faults, in order.
      found: Devices' vectors that were found, by place.
      num_pieces: Pieces of vectors that were looked for.
      hostile: Numbers of the hostile devices, which keep no timer.
      after_faults: Number of the last line of the log when the last fault was over.
      populations: Tasks by population.
    """

    seed: int
    lines: Sequence[database_log.Line]
    rounds: Sequence[tuple[str, int, int, dict]]
    commits: Sequence[tuple[str, int, int, bytes]]
    told: Sequence[Told]
    leading: Sequence[tuple[str, int]]
    records: Sequence[devices.Record]
    outcomes: Sequence[supervisor.Outcome] = ()
    found: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    num_pieces: int = 0
    hostile: Collection[int] = ()
    after_faults: int = 0
    populations: Mapping[str, Sequence[str]] = dataclasses.field(
        default_factory=lambda: tiny_tasks.ONE_POPULATION
    )

    @property
    def released(self) -> list[tuple[str, int, dict]]:
        """Rounds that were not skipped: task, round, metrics."""
        return [
            (task, number, metrics)
            for task, number, _, metrics in self.rounds
            if "model" in metrics
        ]


@dataclasses.dataclass
class Verdict:
    """Verdict on the evidence.

    Attributes:
      broken: Laws that were broken, and how.
      looked_at: How many things each law was held against.
      num_released: Rounds that were released.
      num_skipped: Rounds that were skipped.
    """

    broken: list[tuple[Law, str]] = dataclasses.field(default_factory=list)
    looked_at: collections.Counter[Law] = dataclasses.field(default_factory=collections.Counter)
    num_released: int = 0
    num_skipped: int = 0

    def note(self, law: Law, holds: bool, what: str) -> None:
        """Notes that a law was held against something."""
        self.looked_at[law] += 1
        if not holds:
            self.broken.append((law, what))


def collect(left: supervisor.Campaign) -> Evidence:
    """Reads what a campaign has left, and searches it for devices' vectors.

    Args:
      left: The campaign.

    Returns:
      The evidence.
    """
    read = database_log.Reader(left.place.store)
    try:
        lines = read.lines_after(0)
        rounds = read.rows("SELECT task, round, epoch, metrics FROM rounds ORDER BY task, round")
        commits = [
            (task, rounds_done, epoch, bytes(model))
            for task, rounds_done, epoch, model in read.rows(
                "SELECT task, rounds_done, epoch, model FROM commits ORDER BY task"
            )
        ]
    finally:
        read.close()
    events = [
        (path.stem, json.loads(line))
        for path in sorted(left.place.events.glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    told = [
        Told(f"device {record.device}", record.task, record.round_index, record.model)
        for record in left.records
        if record.what == devices.TOLD
    ] + [
        Told(f"observer of {name}", event["task"], event["round_index"] + 1, event["model"])
        for name, event in events
        if event["kind"] == "released"
    ]
    found, num_pieces = _search(left)
    return Evidence(
        left.seed,
        lines,
        [(task, number, epoch, json.loads(text)) for task, number, epoch, text in rounds],
        commits,
        told,
        [
            (event["population"], event["epoch"])
            for _, event in events
            if event["kind"] == "leading"
        ],
        left.records,
        left.outcomes,
        found,
        num_pieces,
        left.hostile,
        left.after_faults,
        left.place.populations,
    )


def _search(left: supervisor.Campaign) -> tuple[dict[str, Sequence[str]], int]:
    """Searches all files, for all devices; memory was searched when processes stopped."""
    found = {
        f"memory after fault {outcome.fault.number}": outcome.found
        for outcome in left.outcomes
        if outcome.found
    }
    wanted = memory_search.pieces_of(
        {
            f"{task}, device {device}": tiny_tasks.sentinel(left.seed, task, device)
            for task in tiny_tasks.TASKS
            for device in range(tiny_tasks.NUM_DEVICES)
        }
    )
    in_files = memory_search.found_in(memory_search.files(left.place.folder), wanted)
    if in_files:
        found["files"] = sorted(in_files)
    return found, len(wanted) + sum(outcome.looked_for for outcome in left.outcomes)


def judge(evidence: Evidence) -> Verdict:
    """Holds every law against the evidence.

    Args:
      evidence: What a campaign has left.

    Returns:
      What came out.
    """
    num_released = len(evidence.released)
    verdict = Verdict(num_released=num_released, num_skipped=len(evidence.rounds) - num_released)
    _check_order(evidence, verdict)
    _check_epochs(evidence, verdict)
    _check_told(evidence, verdict)
    _check_sums(evidence, verdict)
    _check_reports(evidence, verdict)
    verdict.looked_at[Law.NO_VECTOR] += evidence.num_pieces
    for place, names in evidence.found.items():
        verdict.broken.append((Law.NO_VECTOR, f"{place}: {', '.join(names)}"))
    _check_separation(evidence, verdict)
    _check_progress(evidence, verdict)
    return verdict


def _check_order(evidence: Evidence, verdict: Verdict) -> None:
    law = Law.ONE_COMMIT
    done = {database_log.COMMIT: collections.Counter(), database_log.ROUND: collections.Counter()}
    for line in evidence.lines:
        if line.kind == database_log.CHANGED:
            verdict.note(law, False, f"line {line.number}: {line.task} were changed")
        elif line.kind in done:
            done[line.kind][line.task] += 1
            is_next = line.rounds == done[line.kind][line.task]
            verdict.note(law, is_next, f"line {line.number}: {line.kind} {line.rounds}")
    rows = collections.Counter(task for task, *_ in evidence.rounds)
    for task, rounds_done, *_ in evidence.commits:
        counts = {rounds_done, rows[task], *(counted[task] for counted in done.values())}
        verdict.note(law, len(counts) == 1, f"{task}: numbers of rounds {sorted(counts)}")


def _check_epochs(evidence: Evidence, verdict: Verdict) -> None:
    population_of = {task: name for name, tasks in evidence.populations.items() for task in tasks}
    latest, owner = collections.Counter(), {}
    for line in evidence.lines:
        if line.kind == database_log.LEASE:
            name = line.task
            is_new = bool(line.owner) and line.owner != owner.get(name)
            holds = line.epoch > latest[name] if is_new else line.epoch == latest[name]
            what = f"line {line.number}: epoch {line.epoch} of {line.owner} after {latest[name]}"
            verdict.note(Law.GROWING_EPOCHS, holds, what)
            latest[name] = max(latest[name], line.epoch)
            owner[name] = line.owner or owner.get(name)
        elif line.kind == database_log.ROUND:
            last = latest[population_of[line.task]]
            what = f"line {line.number}: epoch {line.epoch} commits under {last}"
            verdict.note(Law.FRESH_EPOCH, line.epoch == last, what)
    for (name, epoch), count in collections.Counter(evidence.leading).items():
        what = f"{count} leaders of {name} under epoch {epoch}"
        verdict.note(Law.GROWING_EPOCHS, count == 1, what)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _models(evidence: Evidence) -> dict[tuple[str, int], str]:
    """Digests of the models that the store has, by task and rounds done, the first included."""
    models = {(task, 0): _digest(f"{task}|0|".encode()) for task in tiny_tasks.TASKS}
    for task, number, _, metrics in evidence.rounds:
        models[task, number + 1] = metrics.get("model", models[task, number])  # If it is skipped.
    return models


def _check_told(evidence: Evidence, verdict: Verdict) -> None:
    models = _models(evidence)
    versions = {key: {model} for key, model in models.items()}
    for told in evidence.told:
        key = told.task, told.rounds
        versions.setdefault(key, set()).add(told.model)
        verdict.note(Law.KEPT, models.get(key) == told.model, f"{told.who} was told of {key}")
    for line in evidence.lines:
        if line.kind == database_log.COMMIT:
            versions.setdefault((line.task, line.rounds), set()).add(_digest(line.content))
    for task, rounds_done, _, model in evidence.commits:
        versions.setdefault((task, rounds_done), set()).add(_digest(model))
    for key, models_of_round in versions.items():
        what = f"{len(models_of_round)} models after {key}"
        verdict.note(Law.ONE_MODEL, len(models_of_round) == 1, what)


def _check_sums(evidence: Evidence, verdict: Verdict) -> None:
    vectors = {
        (task, str(device)): tiny_tasks.sentinel(evidence.seed, task, device).astype(np.int64)
        for task in tiny_tasks.TASKS
        for device in range(tiny_tasks.NUM_DEVICES)
    }
    for task, number, metrics in evidence.released:
        total = sum(vectors[task, device] for device in metrics["whose"])
        seed = tiny_tasks.noise_seed(evidence.seed, task)
        noised = total + tiny_tasks.noise(seed, number, metrics["drawn"])
        model = (
            f"{task}|{number + 1}|".encode() + (noised % tiny_tasks.MODULUS).astype("<u2").tobytes()
        )
        holds = metrics["model"] == _digest(model)
        verdict.note(Law.EXACT_SUM, holds, f"round {number} of {task}")


def _check_reports(evidence: Evidence, verdict: Verdict) -> None:
    law = Law.OWN_REPORTS
    sent: dict[str, set] = collections.defaultdict(set)
    accepted: dict[str, set] = collections.defaultdict(set)
    for record in evidence.records:
        of_kind = {devices.SENT: sent, devices.ACCEPTED: accepted}.get(record.what)
        if of_kind is not None:
            key = record.task, record.round_index, str(record.device), record.number
            of_kind[record.attempt].add(key)
    seen = set()
    for task, number, metrics in evidence.released:
        attempt, where = metrics["attempt"], f"round {number} of {task}"
        held = {(task, number, device, report) for device, report in metrics["whose"].items()}
        verdict.note(law, held <= sent[attempt], f"{where} holds what was not sent to it")
        counted = metrics["devices/reports"]
        verdict.note(law, counted == len(held), f"{where} counts {counted} of {len(held)}")
        reports = {(device, report) for _, _, device, report in held}
        verdict.note(law, not reports & seen, f"{where} holds a report of another round")
        seen |= reports
        if not metrics["devices/lost_aggregators"]:
            verdict.note(law, accepted[attempt] <= held, f"{where} lacks an accepted report")


def _check_separation(evidence: Evidence, verdict: Verdict) -> None:
    last: dict[tuple[str, str], int] = {}
    for task, number, metrics in evidence.released:
        for device in metrics["whose"]:
            before = last.get((task, device))
            last[task, device] = number
            if before is not None and int(device) not in evidence.hostile:
                what = f"device {device} is in rounds {before} and {number} of {task}"
                verdict.note(Law.SEPARATION, number - before >= tiny_tasks.MIN_SEP, what)


def _check_progress(evidence: Evidence, verdict: Verdict) -> None:
    for outcome in evidence.outcomes:
        if outcome.has_struck:
            what = f"none after fault {outcome.fault.number}"
            verdict.note(Law.PROGRESS, outcome.progress is not None, what)
    last = {
        line.task
        for line in evidence.lines
        if line.number > evidence.after_faults and line.is_release
    }
    for task in tiny_tasks.TASKS:
        verdict.note(Law.PROGRESS, task in last, f"no round of {task} after all faults")


def lines_of(verdict: Verdict) -> Iterable[str]:
    """Describes a verdict in words."""
    yield f"{verdict.num_released} rounds were released, and {verdict.num_skipped} skipped."
    broken = collections.Counter(law for law, _ in verdict.broken)
    for law in Law:
        yield f"{law.value}: held against {verdict.looked_at[law]}, broken {broken[law]} times"
    for law, what in verdict.broken:
        yield f"BROKEN: {law.value}: {what}"
