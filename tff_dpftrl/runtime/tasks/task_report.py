"""The report of a task, at any time, from what it has committed.

The server may run meanwhile: the store is only read. TFF is not needed.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tff_dpftrl import durable_files, validation
from tff_dpftrl.accounting import display
from tff_dpftrl.accounting import statement as statement_lib
from tff_dpftrl.data import sequences
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.models import evaluation, export, language_model, metrics, table
from tff_dpftrl.reports import readme
from tff_dpftrl.runs import checkpoint, curves, released_model, reporting, statement_subject
from tff_dpftrl.runtime.actors import population as population_lib
from tff_dpftrl.runtime.plans import tensor_values
from tff_dpftrl.runtime.status import session_table
from tff_dpftrl.runtime.store import interface
from tff_dpftrl.runtime.tasks import (
    bucket_estimates,
    summation_sentences,
    task_folder,
    task_privacy,
    task_records,
    task_state,
)
from tff_dpftrl.training import corpus, metrics_columns, text_task, trained_model

METRICS = "metrics.csv"
EXACT_METRICS = pathlib.PurePath("private", METRICS)
"""Path of the table with all columns in the folder of the results."""
SESSIONS = pathlib.PurePath("private", "sessions.md")
"""Path of the table of sessions in the folder of the results."""

_PUBLIC = ("round", "privacy/", "participation/")  # Beginnings of columns that may be published.

_RHO = "privacy/rho_zcdp"
# Names of the curves, and their columns in training and in evaluation tasks.
_CURVES = {
    "loss": "client_work/train/loss",
    "top1": "client_work/train/top1_in_vocab",
    "epsilon": "privacy/epsilon",
}
_EVALUATED = "client_work/eval/current_round_metrics"
_EVALUATION_CURVES = {"loss": f"{_EVALUATED}/loss", "top1": f"{_EVALUATED}/top1_in_vocab"}
_SIGNS = """\
`-` checked in, `v` got the plan, `[` began to train, `]` ended it, `+` began to upload, `^` upload
received; `#` refused by the server, `!` interrupted by the device, `*` error, `?` not proven to be
genuine. Devices reported all of it in the last two to four weeks, and nobody has verified it. But
of each kind, with and without a plan, no more sessions count than the server had.
"""
_NOTE = """\
# metrics.csv

One row for each committed round, for `pandas.read_csv`. An empty cell: not known in that round.

- `round`: number of the round, from 1
- `privacy/...`: what the rounds so far have spent, for the declared participation; quote the
  privacy statement instead
- `participation/...`: smallest stride and largest number of times that devices reported so far;
  number of reports that contradict the declared participation, and of rounds whose histograms
  no devices could have made

`private/metrics.csv` has more columns. **Do not publish them**, nor `private/curves.png`, which
shows some of them: they are exact figures of the devices, without noise, which the privacy
statement does not cover.

- `epoch`: of the lease the round was committed under; `committed_at`: seconds since 1970;
  `attempt`: name of the attempt that was committed
- `skipped`: true of a round that was skipped, of which nothing is released: its attempt failed,
  or too many devices had to rest; empty in all other rows
- `devices/...`: how many devices reported, dropped out or were refused
- `.../p10`, `.../median`, `.../p90`: order statistics of the devices' own values, with
  `order_statistics` only, from histograms: half the width of the widest bucket is `.../resolution`.
  Devices without examples, or whose training diverged, have no value
- all others: sums and means over the devices of the round
"""


@dataclasses.dataclass(frozen=True)
class TaskReport:
    """Results of a task."""

    rows: Sequence[Mapping[str, Any]]  # Metrics, one row for each committed round.
    statement: statement_lib.PrivacyStatement | None  # None for an evaluation task.
    held_out: Mapping[str, float] | None  # Metrics on users who never train, if measured.
    summary: str  # Outcome in a few lines.


def rounds(store: interface.Store, population: str, task: str) -> list[dict[str, Any]]:
    """Reads the metrics of the committed rounds; `pandas.DataFrame` makes a table of them.

    All rows have the same columns; rounds count from 1.
    """
    history = store.history(population, task)
    columns = dict.fromkeys(name for row in history for name in row)
    return [{**dict.fromkeys(columns), **row, "round": row["round"] + 1} for row in history]


def others(store: interface.Store, population: str, task: str) -> dict[str, float | None]:
    """Reads ρ of the other tasks that train on the same devices, None without a guarantee.

    Tasks that have committed no round are left out.
    """
    spent = {}
    for name in store.tasks(population):
        metrics_of_last = store.last_commit(population, name).metrics
        if name != task and _RHO in metrics_of_last:
            spent[name] = metrics_of_last[_RHO]
    return spent


def write(
    folder: task_folder.TaskFolder,
    store: interface.Store,
    output: pathlib.Path,
    *,
    with_held_out: bool = True,
    sessions: session_table.SessionTable | None = None,
    rows_of_store: interface.TaskRows | None = None,
) -> TaskReport:
    """Writes metrics, curves, statement and model of what a task has committed so far.

    Files in `output` are replaced: `metrics.csv`, `curves.png`, the same with exact figures in
    `private/`, `metrics_README.md` and `README.md`; for a training task also
    `privacy_statement.json` and `.md`, `model.npz` and `vocabulary.json`, or `counts.csv` in place
    of the vocabulary if the task counts; with `sessions` also `private/sessions.md`.

    A model of this package is evaluated on users of the options' data who never train, unless told
    otherwise. Rows of the store are reported and written too, for an audit, in place of the last
    commit.
    """
    terms = folder.terms
    if rows_of_store is None:
        commit = store.last_commit(terms.population, terms.task)
    elif terms.kind == "evaluation":
        raise validation.UsageError(
            f"The task {terms.task!r} evaluates only, and promises nothing that could be audited: "
            "report it without records."
        )
    else:
        commit = rows_of_store.commit
    state = task_state.TaskState.from_bytes(commit.state, terms.digest())
    rows = rounds(store, terms.population, terms.task)[: commit.rounds_done]
    released = [row for row in rows if not row.get(population_lib.SKIPPED)]
    if not released:
        raise validation.UsageError(
            f"The task {terms.task!r} has not released a round yet: there is nothing to report."
        )
    output.mkdir(parents=True, exist_ok=True)
    spent_by_others = others(store, terms.population, terms.task)
    if rows_of_store is not None:  # First, since it replaces the folder private/.
        task_records.write(output, folder.path, rows_of_store, spent_by_others)
    _write_metrics(output, rows)
    if sessions is not None and sessions.total:
        _write_sessions(output, terms.population, sessions)
    if terms.kind == "evaluation":
        shown = _shown(released, _EVALUATION_CURVES)
        title = f"{terms.task}: evaluation of {terms.model_of} on devices"
        curves.write(output, shown, title=title)
        summary = f"{len(released)} rounds evaluated {terms.model_of}. {_last(shown)}"
        summary += _with_cache(released[-1])
        summary += f"\n{summation_sentences.in_short(terms.secure_aggregation)}"
        readme.write(output)
        return TaskReport(rows, None, None, summary)
    accounting = task_privacy.TaskPrivacy(terms)
    weights = _released(folder, state)
    model = _write_model(folder, weights, output)
    counts = []
    if folder.buckets is not None:
        skipped = [bool(row.get(population_lib.SKIPPED)) for row in rows]
        counts = bucket_estimates.write(output, folder.buckets, terms, weights[0], skipped)
    name = f"{terms.population}/{terms.task}"
    statement = dataclasses.replace(
        folder.with_caveat(accounting.statement(state.observed, others=spent_by_others)),
        subject=statement_subject.of_task(name, terms.digest(), output / "model.npz"),
    )
    statement = reporting.write_statement(output, reporting.continued(output, statement))
    shown = _shown(released, _CURVES)
    held_out = None
    if with_held_out and model is not None:
        held_out = _evaluate(folder, model, weights)
        shown[-1] |= {f"eval_{name}": value for name, value in held_out.items()}
    title = f"{terms.population}/{terms.task}: {statement.mechanism}, {_epsilon(statement)}"
    curves.write(output, shown, title=title)
    readme.write(output)
    over = accounting.refusal(state.observed)
    if over:
        progress = f"The task is over: {over}."
    else:
        charged = statement.parameters["num_rounds_charged"]
        progress = (
            f"The statement charges {charged}, all that there may be: whoever ends a task early "
            "has seen how it went."
        )
    lines = [
        f"{commit.rounds_done} of {terms.schema.num_rounds} rounds are committed"
        f"{_skipped(state)}. {progress}",
        *(counts or [_last(shown)]),
        _participation(state, terms.schema),
        summation_sentences.in_short(terms.secure_aggregation),
        privacy_line(statement),
        *statement.headline_caveats,
    ]
    if folder.repeats_noise:
        lines.append(f"{terms.task}: {task_folder.REPEATS_NOISE}")
    return TaskReport(rows, statement, held_out, "\n".join(lines))


def _write_metrics(output: pathlib.Path, rows: Sequence[Mapping[str, Any]]) -> None:
    (output / "private").mkdir(mode=0o700, exist_ok=True)
    public = [name for name in rows[0] if name.startswith(_PUBLIC)]
    for path, columns in ((EXACT_METRICS, list(rows[0])), (pathlib.PurePath(METRICS), public)):
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
        content, private = text.getvalue().encode("utf-8"), path == EXACT_METRICS
        durable_files.write(output / path, content, private=private)
    durable_files.write(output / "metrics_README.md", _NOTE.encode("utf-8"))


def _write_sessions(
    output: pathlib.Path, population: str, sessions: session_table.SessionTable
) -> None:
    """Writes the table of sessions of Bonawitz et al. 2019, with a legend of its signs."""
    title = f"# Sessions of the devices of {population}, of all its tasks"
    text = f"{title}\n\n{sessions.to_markdown()}\n\n{_SIGNS}"
    durable_files.write(output / SESSIONS, text.encode("utf-8"), private=True)


def _shown(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> list[dict[str, Any]]:
    """Selects the columns of rows that `curves` takes."""
    return [
        {"round": row["round"], **{name: row.get(column) for name, column in columns.items()}}
        for row in rows
    ]


def _released(folder: task_folder.TaskFolder, state: task_state.TaskState) -> list[np.ndarray]:
    """Returns the weights to release: the last ones or their average."""
    leaves = folder.server.prepare.inputs
    snapshot = checkpoint.Snapshot(
        tuple(leaf.label for leaf in leaves),
        tuple(tensor_values.from_bytes(state.tensors, leaves, "state")),
    )
    return released_model.weights(folder.config.learning.iterate_averaging, snapshot)


def _write_model(
    folder: task_folder.TaskFolder, weights: Sequence[np.ndarray], output: pathlib.Path
) -> language_model.LanguageModel | None:
    """Writes the model, with its words; for other packages' models, the weights only."""
    path, language = output / "model.npz", folder.config.language
    if folder.words is None or folder.rule is None or folder.buckets is not None:
        with durable_files.replacing(path) as file:
            np.savez(file, **{f"weight_{index}": weight for index, weight in enumerate(weights)})
        return None
    model = table.build(
        language.model,
        vocabulary_size=folder.words.size,
        sequence_length=language.sequence_length,
        **language.model_sizes,
    )
    export.write(path, model, weights)
    trained_model.write_vocabulary(output, folder.words, folder.rule.is_tokenized)
    return model


def _evaluate(
    folder: task_folder.TaskFolder,
    model: language_model.LanguageModel,
    weights: Sequence[np.ndarray],
) -> dict[str, float]:
    """Measures what `train` measures on held-out users, on the same sequences."""
    config, words = folder.config, folder.words
    assert words is not None  # A language model has some.
    parts = corpus.read_users(config.language.text)
    text = text_task.sequences_of(
        parts.train,
        parts.validation,
        words,
        sequences.SequenceSpec(config.language.sequence_length),
        max_held_out=config.evaluation.eval_sequences,
    )
    special = metrics.SpecialIds(oov=words.oov, bos=words.bos, eos=words.eos)
    evaluate = evaluation.Evaluator(
        model,
        special,
        text["held_out"],
        targets_per_character=text["targets_per_character"],
    )
    measured = evaluate(weights)
    return {name: measured[name] for name in metrics_columns.EVALUATION_METRICS}


def _last(shown: Sequence[Mapping[str, Any]]) -> str:
    last = shown[-1]
    parts = []
    if last.get("loss") is not None:
        parts.append(f"loss {last['loss']:.4g} on the devices of the last round")
    if last.get("top1") is not None:
        parts.append(f"top-1 accuracy {last['top1']:.2%} there")
    if last.get("eval_top1_in_vocab") is not None:
        parts.append(f"top-1 accuracy on held-out users {last['eval_top1_in_vocab']:.2%}")
    return ("; ".join(parts) or "No loss or accuracy is known") + "."


def _with_cache(row: Mapping[str, Any]) -> str:
    """Describes what a cache of each device's earlier text gave in a round; "" if unknown."""
    num_words = row.get(f"{_EVALUATED}/earlier_text_num_in_vocab")
    if not num_words:  # Earlier versions and custom models report none; or there is no such text.
        return ""
    every, part, alone = (
        row[f"{_EVALUATED}/{name}"]
        for name in (
            "top1_in_vocab_with_cache",
            "earlier_text_top1_in_vocab_with_cache",
            "earlier_text_top1_in_vocab",
        )
    )
    share = num_words / row[f"{_EVALUATED}/num_in_vocab"]
    return (
        f"\nWith a cache of each device's own earlier text: top-1 accuracy {every:.2%}; on the "
        f"{share:.1%} of words that have such text {part:.2%}, and {alone:.2%} without the cache."
    )


def _skipped(state: task_state.TaskState) -> str:
    skipped = state.observed.skipped_rounds
    return f", of which {skipped} were skipped and released nothing" if skipped else ""


def _participation(state: task_state.TaskState, declared: Any) -> str:
    seen = state.observed
    stride = "no device took part twice"
    if seen.min_sep is not None:
        stride = f"a device's turns are {seen.min_sep} rounds apart or more"
    return (
        f"By the devices' reports, {stride} (declared: {declared.min_sep}), and none took part "
        f"more than {strategy_lib.counted(seen.max_participations, 'time')} (declared: "
        f"{declared.max_participations})."
    )


def privacy_line(statement: statement_lib.PrivacyStatement) -> str:
    """Returns the line of a summary that says what a task promises."""
    unit = ", per device" if statement.has_guarantee else ""
    return f"Privacy: {_epsilon(statement)}{unit}; see privacy_statement.md."


def _epsilon(statement: statement_lib.PrivacyStatement) -> str:
    if not statement.has_guarantee:
        return "NO guarantee: " + " ".join(statement.no_guarantee).removesuffix(".")
    return display.epsilon_at(statement.epsilon, statement.delta)
