"""The recount of a served task, from its report with records: without server and store.

The report is what `tff-dpftrl task report --records` wrote. Numbers are computed anew from the
signed terms, as for runs in folders. What devices did is known from their reports alone.
"""

from __future__ import annotations

import dataclasses
import pathlib
import types
from collections.abc import Callable, Mapping
from typing import Any

from tff_dpftrl import json_text, validation
from tff_dpftrl.accounting import privacy_statement
from tff_dpftrl.auditing import audit_report
from tff_dpftrl.auditing.recount import (
    arithmetic,
    file_checks,
    findings,
    record_checks,
    records,
    statement_checks,
)
from tff_dpftrl.auditing.recount import terms as terms_lib
from tff_dpftrl.runs import statement_subject
from tff_dpftrl.runtime import participation_histograms
from tff_dpftrl.runtime.plans import tensor_values
from tff_dpftrl.runtime.store import digests, interface
from tff_dpftrl.runtime.tasks import task_folder, task_privacy, task_records
from tff_dpftrl.runtime.tasks import task_state as task_state_lib

NOT_HANDED_OVER = "private/ (rows of the store, and the last state)"
_GONE = "there is no private/rows.json"
_NO_ROUND = "no round is committed"
_REPORTED = ("round", "epoch", "committed_at", "attempt", "skipped")
_MAY_BE_PUBLISHED = ("privacy/", "participation/", "devices/")
# The columns of a task that the checks of runs look at, under the names that runs have.
_COLUMNS = {"epsilon": "privacy/epsilon"}
_FILES = (
    *("metrics.csv", "metrics_README.md", "curves.png", "vocabulary.json", "counts.csv"),
    *("private/metrics.csv", "private/curves.png", "private/sessions.md"),
    "sessions.md",  # Of an earlier version.
    *("model.npz", "privacy_statement.json", "privacy_statement.md", "privacy.png"),
    *("audit.md", "audit.json", "README.md", "report.html", "private/report.html"),
)
_NOT_READ = ("curves.png", "metrics_README.md", "privacy.png", "sessions.md", "vocabulary.json")
_NOT_READ += ("counts.csv",)


@dataclasses.dataclass(frozen=True, eq=False)
class TaskRecords(records.Records):
    """Records of a served task, in the form that the checks of runs take.

    The signatures of the folder `task` are verified. `rows` are those of the store; None if they
    were not handed over. `others` has ρ that other tasks of the population had spent, by name.
    `state` is that of the last commit; None without `rows`.
    """

    task: task_folder.TaskFolder | None = None
    rows: interface.TaskRows | None = None
    others: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    state: task_state_lib.TaskState | None = None

    @property
    def rounds_done(self) -> int | None:
        """Number of committed rounds; None if that is not known."""
        return None if self.rows is None else self.rows.commit.rounds_done

    @property
    def declared(self) -> tuple[int, int, int] | None:
        """Declared number of rounds, stride and participations, by the signed terms."""
        schema = self.task.terms.schema
        return schema.num_rounds, schema.min_sep, schema.max_participations

    @property
    def seen(self) -> participation_histograms.ObservedRounds:
        """Participation that devices reported: by the last state, or else by the statement."""
        if self.state is not None:
            return self.state.observed
        stated = self.statement
        reported, parameters = stated["observed"], stated["parameters"]
        return participation_histograms.ObservedRounds(
            num_rounds=parameters["num_rounds_done"],
            min_sep=reported["min_sep"],
            max_participations=reported["max_participations"],
            contradicting_reports=parameters["contradicting_reports"],
            contradicting_rounds=parameters["contradicting_rounds"],
            unknown_rounds=parameters["unknown_rounds"],
            skipped_rounds=parameters["num_rounds_skipped"],
        )


def read(folder: pathlib.Path) -> TaskRecords:
    """Reads a task's records from its report's folder; refuses one changed since it was signed."""
    task = task_folder.read(folder / task_records.TASK)
    if task.terms.kind == "evaluation":
        raise validation.UsageError(
            f"The task {task.name!r} evaluates only: it promises nothing that could be audited."
        )
    known = task_records.read(folder)
    terms = json_text.parse(task.terms.to_bytes())
    derived = {name: terms[name] for name in ("schema", "strategy", "noise_multiplier")}
    state = None
    if known.rows is not None:
        state = task_state_lib.TaskState.from_bytes(known.rows.commit.state, task.terms.digest())
    unreadable: list[str] = []
    published = records.read_rows(folder, "metrics.csv", unreadable)
    metrics = records.read_rows(folder, "private/metrics.csv", unreadable)
    metrics = published if metrics is None else metrics
    for row in metrics or ():
        row.update({name: row.get(column) or "" for name, column in _COLUMNS.items()})
    return TaskRecords(
        folder=folder,
        public={
            "config": task.config.to_dict(),
            "derived": derived | {"clip_norm": task.terms.clip_norm},
            "facts": {"training_users": task.terms.num_devices},
        },
        manifest=None,
        ledger=None,
        checkpoint=None if state is None else _checkpoint(task, state),
        statement=records.read_json(folder, "privacy_statement.json", unreadable),
        statement_text=records.read_text(folder, "privacy_statement.md", unreadable),
        metrics=metrics,
        published_metrics=published,
        unreadable=tuple(unreadable),
        task=task,
        rows=known.rows,
        others=known.others,
        state=state,
    )


def _checkpoint(
    task: task_folder.TaskFolder, state: task_state_lib.TaskState
) -> records.Checkpoint:
    leaves = task.server.prepare.inputs
    arrays = tensor_values.from_bytes(state.tensors, leaves, "state")
    tensors = map(records.Tensor.of, arrays)
    named = zip((leaf.label for leaf in leaves), tensors, strict=True)
    return records.Checkpoint(pathlib.Path(task_records.PRIVATE), tuple(named))


def terms(task: TaskRecords) -> terms_lib.Terms:
    """Returns noise and participation by the signed terms."""
    signed = task.task.terms
    return terms_lib.Terms(
        kind=terms_lib.DP_FTRL,
        noise_multiplier=task.derived["noise_multiplier"],
        delta=signed.delta,
        strategy=task.derived["strategy"],
        probability=None,
        group_size=1,
        other_epsilon=0.0,
        num_rounds=signed.schema.num_rounds,
        is_secret=True,
    )


def checks(
    task: TaskRecords, by_terms: terms_lib.Terms
) -> dict[str, Callable[[str], audit_report.Finding]]:
    """Returns the checks of a task, by name."""
    return {
        "task: signatures of plans, terms and files": lambda test: _signatures(test, task),
        "noise multiplier: options and terms": lambda test: record_checks.noise_multiplier(
            test, task, by_terms
        ),
        "seed of the noise": lambda test: record_checks.seed(test, task, by_terms),
        "store: one chain of rounds": lambda test: _chain(test, task),
        "state: numbers and rounds": lambda test: _state(test, task),
        "noise in the state": lambda test: record_checks.noise_state(test, task, by_terms),
        "participation: reports of the devices": lambda test: _reports(test, task),
        "statement: participation": lambda test: _participation(test, task, by_terms),
        "statement: sensitivity": lambda test: statement_checks.sensitivity(test, task, by_terms),
        "statement: ε": lambda test: statement_checks.epsilon(test, task, by_terms),
        "statement: Markdown and JSON": lambda test: statement_checks.text(test, task),
        "statement: every sentence": lambda test: statement_checks.sentences(
            test, task, by_terms, _made_again
        ),
        "statement: what it is about": lambda test: statement_checks.subject(
            test, task, lambda: _subject(task), unknown=("tensorflow",)
        ),
        "metrics: ε by round": lambda test: statement_checks.metrics_epsilon(test, task, by_terms),
        "metrics: rows of the store": lambda test: _metrics(test, task),
        "metrics: noise of the released rounds": lambda test: _noise(test, task, by_terms),
        "released model and state": lambda test: file_checks.weights(
            test, task, task.folder / "model.npz"
        ),
        "permissions of private/": lambda test: file_checks.permissions(test, task),
        "secrets outside of private/": lambda test: file_checks.secrets(test, task, by_terms),
        "exact figures in files that may be published": lambda test: _exact_figures(test, task),
        "files: missing or unknown": lambda test: _complete(test, task),
    }


def _signatures(test: str, task: TaskRecords) -> audit_report.Finding:
    """Says what `read` has verified, and what no signature shows."""
    number = len(task.task.devices)
    return findings.judged(
        test,
        [],
        f"Plans of server and devices ({number}), terms, options and vocabulary are what one key "
        "signed; that devices and server run these plans is not known from them",
    )


def _chain(test: str, task: TaskRecords) -> audit_report.Finding:
    """Checks the digests of all rounds, and what the last commit holds."""
    if task.rows is None:
        return findings.skipped(test, _GONE)
    rows = task.rows
    head, commit, wrong = _row(rows.head), rows.commit, []
    try:
        digests.check_rounds(head, [_row(row) for row in rows.rounds])
        digests.check_content(head, "model", commit.model)
        digests.check_content(head, "state", commit.state)
        digests.check_epoch(head, rows.epoch)
    except digests.DamagedRow as error:
        wrong.append(str(error))
    signed = task.task.terms
    if (head.population, head.task) != (signed.population, signed.task):
        wrong.append(f"they are of the task {head.task!r} of {head.population!r}")
    epochs = [row["epoch"] for row in rows.rounds]
    if epochs != sorted(epochs):
        wrong.append("a round was committed under an older lease than the round before")
    fine = f"{len(epochs)} rounds follow each other by their digests, up to the model and the state"
    return findings.judged(test, wrong, fine, nothing=not epochs and _NO_ROUND)


def _row(values: Mapping[str, Any]) -> Any:
    """Returns a row as the digests take it: values as attributes, and as a mapping."""
    return types.SimpleNamespace(**values, _mapping=values)


def _state(test: str, task: TaskRecords) -> audit_report.Finding:
    """Checks that the last state is that of the last round, with numbers that are finite."""
    state = task.checkpoint
    if state is None:
        return findings.skipped(test, _GONE)
    wrong = record_checks.state_faults(state, task.rounds_done)
    counted = task.seen.num_rounds
    if counted != task.rounds_done:
        wrong.append(f"it counts {counted} rounds, of {task.rounds_done} committed")
    return findings.judged(test, wrong, f"It is that of {task.rounds_done} rounds, and finite")


def _metrics_of(row: Mapping[str, Any]) -> Mapping[str, Any]:
    return json_text.parse(row["metrics"])


def _reports(test: str, task: TaskRecords) -> audit_report.Finding:
    """Checks that what devices reported only adds up, to what the last state says."""
    if task.rows is None:
        return findings.skipped(test, _GONE)
    names = {
        "min_sep": "participation/min_sep",
        "max_participations": "participation/max_participations",
        "contradicting_reports": "participation/contradicting_reports",
        "unknown_rounds": "participation/unknown_rounds",
    }
    rounds = [_metrics_of(row) for row in task.rows.rounds]
    wrong = [
        f"{name} is {rounds[-1].get(column)!r} after the last round and "
        f"{getattr(task.seen, name)!r} in the state"
        for name, column in names.items()
        if rounds and rounds[-1].get(column) != getattr(task.seen, name)
    ]
    skipped = sum(bool(row.get("skipped")) for row in rounds)
    if skipped != task.seen.skipped_rounds:
        wrong.append(
            f"{skipped} rounds were skipped, and the state counts {task.seen.skipped_rounds}"
        )
    for column, sign in ((c, -1 if n == "min_sep" else 1) for n, c in names.items()):
        values = [sign * row[column] for row in rounds if row.get(column) is not None]
        if values != sorted(values):
            wrong.append(f"{column} goes back, where it can only grow or stay")
    seen = task.seen
    fine = (
        f"By their own reports devices came at most {seen.max_participations} times"
        + (f", {seen.min_sep} rounds apart" if seen.min_sep is not None else "")
        + "; a device that lies, or whose timer was wiped, is not seen"
    )
    return findings.judged(test, wrong, fine, nothing=not rounds and _NO_ROUND)


def _charged(task: TaskRecords, by_terms: terms_lib.Terms) -> set[int]:
    """Computes how many rounds the statement may charge: one number, or two next to the budget."""
    schema = arithmetic.Schema(*task.declared)
    done, budget = task.seen.num_rounds, task.task.terms.max_epsilon
    if done >= schema.rounds or not by_terms.has_guarantee or budget is None:
        return {max(done, schema.rounds)}
    budget *= 1 + 1e-9

    def affordable(bound: int) -> int:
        low, high = done, schema.rounds
        while low < high:
            middle = (low + high + 1) // 2
            spent = by_terms.epsilon(schema._replace(rounds=middle), by_terms.delta)[bound]
            low, high = (middle, high) if spent <= budget else (low, middle - 1)
        return low

    return set(range(affordable(1), affordable(0) + 1))


def _participation(test: str, task: TaskRecords, by_terms: terms_lib.Terms) -> audit_report.Finding:
    """Checks that the statement is of the declared participation in the rounds to be charged."""
    stated = task.statement
    if stated is None:
        return findings.skipped(test, "there is no privacy_statement.json")
    declared, seen = arithmetic.Schema(*task.declared), task.seen
    allowed = _charged(task, by_terms)
    charged = stated["parameters"].get("num_rounds_charged")
    wrong = []
    if charged not in allowed:
        wrong.append(f"{charged!r} rounds are charged, and it must be {min(allowed)}")
    expected = {
        "declared": declared,
        "observed": arithmetic.Schema(seen.num_rounds, seen.min_sep, seen.max_participations),
        "accounted": declared._replace(rounds=charged),
    }
    for name, schema in expected.items():
        if stated.get(name) != statement_checks.as_json(schema):
            wrong.append(f"{name} is {stated.get(name)} in the statement and {tuple(schema)} here")
    done = stated["parameters"].get("num_rounds_done")
    if done != seen.num_rounds:
        wrong.append(f"{done!r} rounds are done by the statement and {seen.num_rounds} by records")
    fine = f"It charges the declared participation in {charged} rounds, of which {done} are done"
    return findings.judged(test, wrong, fine)


def _made_again(task: TaskRecords, by_terms: terms_lib.Terms) -> privacy_statement.PrivacyStatement:
    del by_terms
    made = task_privacy.TaskPrivacy(task.task.terms).statement(task.seen, others=task.others)
    return task.task.with_caveat(made)


def _subject(task: TaskRecords) -> dict[str, str]:
    terms = task.task.terms
    name = f"{terms.population}/{terms.task}"
    return statement_subject.of_task(name, terms.digest(), task.folder / "model.npz")


def _metrics(test: str, task: TaskRecords) -> audit_report.Finding:
    """Checks that the rows of the metrics are those of the store, and published as they are."""
    if task.metrics is None:
        return findings.skipped(test, "there is no metrics.csv")
    if task.rows is None:
        return findings.skipped(test, _GONE)
    wrong = statement_checks.otherwise_published(task)
    committed = task.rows.rounds
    if len(task.metrics) != len(committed):
        wrong.append(f"it has {len(task.metrics)} rows, and {len(committed)} rounds are committed")
    for row, record in zip(task.metrics, committed, strict=False):
        expected = _metrics_of(record) | {"round": record["round"] + 1, "epoch": record["epoch"]}
        for name, value in expected.items():
            if row.get(name) != ("" if value is None else str(value)):
                wrong.append(f"{name} of round {record['round'] + 1} is another one than committed")
    fine = f"Its {len(committed)} rows are those of the store"
    return findings.judged(test, wrong, fine, nothing=not committed and _NO_ROUND)


def _noise(test: str, task: TaskRecords, by_terms: terms_lib.Terms) -> audit_report.Finding:
    """Checks that each released round drew noise of z times its clip norm, by its metrics."""
    name, clip = "aggregator/noise_stddev", "aggregator/clip_norm"
    rounds = [row for row in task.metrics or () if row.get("skipped") != "True"]
    if rounds and name not in rounds[0]:
        return findings.skipped(test, "there is no private/metrics.csv")
    if not by_terms.has_guarantee or not rounds:
        return findings.skipped(test, "no round was released with noise")
    least = by_terms.noise_multiplier * (1.0 - 1e-5)  # Metrics are of single precision.
    wrong = [
        f"round {row['round']} had noise of {row[name] or None} at a clip norm of {row[clip]}"
        for row in rounds
        if not float(row[name] or 0.0) >= least * float(row[clip])
    ]
    fine = f"In {len(rounds)} rounds its standard deviation is z times the clip norm, or more"
    return findings.judged(test, wrong, fine)


def _exact_figures(test: str, task: TaskRecords) -> audit_report.Finding:
    """Checks that no file that may be published holds exact figures of the devices."""
    if not task.metrics:
        return findings.skipped(test, "there is no metrics.csv, or no row in it")
    figures = {
        (column, value)
        for row in task.metrics
        for column, value in row.items()
        if column not in (*_REPORTED, *_COLUMNS)
        and not column.startswith(_MAY_BE_PUBLISHED)
        and len(value or "") >= 8
    }
    names = ["privacy_statement.json", "privacy_statement.md", "vocabulary.json"]
    names += ["metrics_README.md", "README.md", "report.html", "counts.csv"]
    names += [*(f"{task_records.TASK}/{name}" for name in task_folder.FILES)]
    wrong, looked_at = file_checks.holds_figures(task.folder, names, figures)
    return file_checks.no_figures(test, wrong, figures, looked_at)


def _complete(test: str, task: TaskRecords) -> audit_report.Finding:
    """Checks that all files of a report exist, and no others."""
    present = {name for name, path in file_checks.all_files(task.folder) if not path.is_dir()}
    required = {
        task_records.OTHERS,
        "metrics.csv",
        "model.npz",
        "privacy_statement.json",
        "privacy_statement.md",
    }
    known = {*required, *_FILES, *(f"task/{name}" for name in task_folder.FILES)}
    known |= {f"private/{name}" for name in task_records.FILES}
    wrong = [f"{name} is missing" for name in sorted(required - present)]
    wrong += [*task.unreadable, *map(file_checks.unknown_file, sorted(present - known))]
    folders = (task_records.TASK, task_records.PRIVATE)
    wrong += file_checks.unknown_folders(task.folder, folders)
    unread = sorted(present & set(_NOT_READ))
    fine = (
        f"All {len(present)} are those of a report. Nobody has compared the content of "
        f"{', '.join(unread)}"
    )
    return findings.judged(test, wrong, fine)
