"""What a run has to say, at any time, from what it has committed.

Nothing is trained and no data is read: manifest, ledger, last checkpoint and metrics
are enough for the privacy statement, the curves and the model. TFF is not needed.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tff_dpftrl import durable_files, json_text, validation
from tff_dpftrl.accounting import display
from tff_dpftrl.accounting import facts as facts_lib
from tff_dpftrl.accounting import statement as statement_lib
from tff_dpftrl.accounting import statement_sentences as sentences
from tff_dpftrl.models import export, table
from tff_dpftrl.runs import committed_rounds, curves, manifest, metrics_log, privacy
from tff_dpftrl.training import options as options_lib
from tff_dpftrl.training import own_models, released_model, stopping

EVALUATION_METRICS = {
    "loss": "cross-entropy, nats per word",
    "perplexity": "exp of the cross-entropy",
    "top1_in_vocab": "share of next words guessed right, among words of the vocabulary, which all "
    "guesses are from",
    "top1_oov_wrong": "the same among all words; those outside the vocabulary count as wrong",
    "top3_in_vocab": "share of next words among the first three guesses",
    "top5_in_vocab": "share of next words among the first five guesses",
    "top3_oov_wrong": "the first three guesses, words outside the vocabulary counted as wrong",
    "top5_oov_wrong": "the first five guesses, words outside the vocabulary counted as wrong",
}
"""Metrics of `models.metrics` that are recorded for held-out users, and their meaning."""

COLUMNS = (
    metrics_log.Column("round", "number of the round, from 1; of fine-tuning, of the step"),
    metrics_log.Column(
        "loss",
        "cross-entropy on the round's training cohort; of fine-tuning, mean over the step's "
        "sampled examples, each the mean over its words, or over its users, each the mean over "
        "their examples",
        is_exact=True,
    ),
    metrics_log.Column(
        "top1",
        "accuracy on the round's training cohort; empty in fine-tuning, which does not measure it",
        is_exact=True,
    ),
    metrics_log.Column(
        "epsilon",
        "ε that all rounds so far spent at the run's δ, with the participation that was declared. "
        "Quote the privacy statement instead: it is of what was observed, and charges all rounds "
        "that might have been run where the data, or somebody, decided when to end",
    ),
    *(
        metrics_log.Column(f"eval_{name}", f"held-out users, who never train: {meaning}")
        for name, meaning in EVALUATION_METRICS.items()
    ),
    metrics_log.Column(
        "clients",
        "size of the cohort; empty where it is secret, as with sampled cohorts, and in fine-tuning "
        "with sampled examples or users",
        is_exact=True,
    ),
    metrics_log.Column(
        "seconds",
        "wall-clock time of the round, which grows with the cohort and its text",
        is_exact=True,
    ),
)
"""Columns of `metrics.csv`."""

_HELD_OUT_NOTE = (
    "Exact figures of held-out users, who never train: no privacy statement covers them. Row 10 of "
    "the histograms, say, has the shares of words where 0, 1, 2 ... of the model's likeliest words "
    "are among the 10 most frequent words of these users."
)
_BASELINES = pathlib.PurePath("private", "baselines.json")
_HELD_OUT = "held_out.json"
# What comes of reading JSON that has other values than were written.
_NOT_AS_WRITTEN = (ArithmeticError, AttributeError, KeyError, TypeError, ValueError)


class ReportedConfig(stopping.StoppingConfig, Protocol):
    """What a report has to know of the options of a run, besides when it ends.

    Attributes:
      data: The corpus of the users who are protected.
      vocabulary: Source of the words; "private" if they were counted on these users.
      iterate_averaging: Decay of the average of the models that is kept; None if the last one
        is.
    """

    data: str
    vocabulary: str
    iterate_averaging: float | None

    def statement_parameters(self) -> dict[str, statement_lib.Scalar]:
        """What the statement says of the options, besides what the plan says."""


@dataclasses.dataclass(frozen=True)
class TrainingResults:
    """What a run has to say.

    Attributes:
      rows: One row of metrics for each committed round.
      baselines: Top-1 accuracy of n-gram models on the same held-out users; empty if
        the run has not ended yet.
      held_out: What `LanguageTask.examine` measured on the held-out users after the last
        round; None if the run has not ended yet.
      statement: The privacy statement.
      summary: The outcome in a few lines.
    """

    rows: Sequence[Mapping[str, Any]]
    baselines: Mapping[str, float]
    held_out: Mapping[str, Any] | None
    statement: statement_lib.PrivacyStatement
    summary: str


def report(output: pathlib.Path) -> TrainingResults:
    """Writes statement, curves and model of what a run has committed so far.

    The run may be interrupted or finished, but not under way. It can be resumed
    afterwards.

    Args:
      output: Folder of the run; `privacy_statement.json` and `.md`, `curves.png` and
        `model.npz` in it are replaced.

    Returns:
      What was written, and a summary.

    Raises:
      ValueError: If there is no run, another process has it open, its files were
        changed, or none of its rounds has been committed yet.
      OSError: If a file cannot be written.
    """
    known = manifest.read(output)
    config = options_lib.of_begun_run(known.config, str(output / "config.json"))
    plan = config.privacy().resumed(
        known.facts["training_users"], known.facts["num_parameters"], known.derived
    )
    go_on = own_models.how_to_go_on(config.model, output)
    return of_rounds(output, known, config, plan, go_on=go_on)


def of_rounds(
    output: pathlib.Path,
    known: manifest.Manifest,
    config: ReportedConfig,
    plan: privacy.PrivacyPlan,
    *,
    go_on: str,
    whole: released_model.Whole = list,
) -> TrainingResults:
    """Does what `report` says for a run of whatever kind; arguments as for `write`."""
    with committed_rounds.CommittedRounds.open(
        output / "private", plan.declared, binding=known.digest
    ) as rounds:
        durable_files.remove_leftovers(output)
        return write(output, known, config, plan, rounds, go_on=go_on, whole=whole)


def write(
    output: pathlib.Path,
    known: manifest.Manifest,
    config: ReportedConfig,
    plan: privacy.PrivacyPlan,
    rounds: committed_rounds.CommittedRounds,
    *,
    go_on: str,
    whole: released_model.Whole = list,
) -> TrainingResults:
    """Does what `report` says for a run, of whatever kind, that this process has open.

    Args:
      output: Folder of the run.
      known: Its manifest.
      config: Its options.
      plan: Its privacy.
      rounds: Its rounds.
      go_on: The command, or the call, that goes on with the run.
      whole: From the weights that the run trains to its model's; the same by default.

    Returns:
      See `report`.

    Raises:
      ValueError: If no round has been committed yet.
      OSError: If a file cannot be written.
    """
    done = rounds.rounds_done
    if done == 0:
        raise validation.UsageError(
            f"The run in {output} has not committed a round yet: there is nothing to report. Go on "
            f"with {go_on}."
        )
    snapshot, saved = rounds.restore()
    rows = metrics_log.read_rows(output, done)
    if not rows or rows[-1]["round"] < done:  # The crash came between the commit and the row.
        rows.append({column.name: saved.get(column.name) for column in COLUMNS})
    ended = stopping.reason(config, plan, rows, done)
    statement = plan.statement(
        rounds.observed(),
        _facts(config, known),
        # When a run ends at an accuracy, or because somebody who has seen its metrics ends it,
        # depends on the data: then all rounds are charged that it might have run.
        charge_all_rounds=config.stop_at_accuracy is not None or ended is None,
    )
    write_statement(output, statement)
    model = table.from_description(known.facts["model"])
    weights = released_model.weights(config.iterate_averaging, snapshot, whole=whole)
    export.write(output / "model.npz", model, weights)
    baselines = _read_baselines(output)
    curves.write(
        output / "curves.png",
        rows,
        title=_title(config, statement),
        baselines=baselines,
        unit=config.unit,
    )
    held_out = _read_held_out(output, done)
    summary = [
        _accuracy(rows, baselines, config.unit),
        _on_held_out_users(held_out) if held_out else None,
        ended
        or f"{done} of {config.num_rounds} {config.unit}s are done; go on with {go_on}. The "
        "statement charges all of them: whoever ends a run early has seen how it went.",
        stopping.failure(rows, known.facts["vocabulary_size"], baselines),
        _promise(statement),
    ]
    return TrainingResults(rows, baselines, held_out, statement, "\n".join(filter(None, summary)))


def write_statement(output: pathlib.Path, statement: statement_lib.PrivacyStatement) -> None:
    """Writes a run's privacy statement, for programs and for people.

    Args:
      output: Folder of the run.
      statement: The statement.

    Raises:
      OSError: If a file cannot be written.
    """
    for name, text in (
        ("privacy_statement.json", statement.to_json() + "\n"),
        ("privacy_statement.md", statement.to_markdown()),
    ):
        durable_files.write(output / name, text.encode("utf-8"))


def write_baselines(output: pathlib.Path, baselines: Mapping[str, float]) -> None:
    """Keeps the accuracies of simpler models for the curves, with the run's secrets."""
    text = json.dumps(dict(baselines), indent=2) + "\n"
    durable_files.write(output / _BASELINES, text.encode("utf-8"), private=True)


def _read_baselines(output: pathlib.Path) -> dict[str, float]:
    path = output / _BASELINES
    if not path.exists():
        return {}
    try:
        found = json_text.parse(path.read_text(encoding="utf-8"))
        return {name: float(accuracy) for name, accuracy in found.items()}
    except _NOT_AS_WRITTEN:
        raise _damaged(path) from None


def _damaged(path: pathlib.Path) -> ValueError:
    return ValueError(f"{path} is damaged: restore it, or remove it to report without it.")


def write_held_out(output: pathlib.Path, rounds_done: int, found: Mapping[str, Any]) -> None:
    """Keeps what `LanguageTask.examine` measured after the last round.

    Args:
      output: Folder of the run.
      rounds_done: Number of rounds after which it was measured.
      found: What was measured.

    Raises:
      OSError: If the file cannot be written.
    """
    text = json.dumps({"note": _HELD_OUT_NOTE, "round": rounds_done, **found}, indent=2) + "\n"
    durable_files.write(output / _HELD_OUT, text.encode("utf-8"))


def _read_held_out(output: pathlib.Path, rounds_done: int) -> dict[str, Any] | None:
    path = output / _HELD_OUT
    if not path.exists():
        return None
    try:
        found = json_text.parse(path.read_text(encoding="utf-8"))
        if found["round"] != rounds_done:
            return None
        _on_held_out_users(found)  # It reads all that is needed.
    except _NOT_AS_WRITTEN:
        raise _damaged(path) from None
    return found


def _on_held_out_users(found: Mapping[str, Any]) -> str:
    """How accuracy differs between users, and how many proposals are frequent words."""
    lines = []
    by_user = found["accuracy_by_user"]["top1_in_vocab"]
    if by_user["users"]:
        low, _, middle, _, high = (f"{q:.1%}" for q in by_user["quantiles"].values())
        lines.append(
            f"Of {by_user['users']} held-out users, half have a top-1 accuracy above {middle}, one "
            f"in twenty below {low}, one in twenty above {high}."
        )
    head = found["head_words"]
    means = {
        size: sum(count * share for count, share in enumerate(shares))
        for size, shares in head["histograms"].items()
    }
    frequent = ", ".join(f"{mean:.1f} among the {size}" for size, mean in means.items())
    lines.append(
        f"Of its {head['top']} likeliest next words, on average {frequent} most frequent words of "
        f"their text (histograms: {_HELD_OUT})."
    )
    return "\n".join(lines)


def _facts(config: ReportedConfig, known: manifest.Manifest) -> facts_lib.Facts:
    return facts_lib.Facts(
        parameters={
            **config.statement_parameters(),
            **known.facts.get("choices", {}),
            "data": pathlib.PurePath(config.data).name,
            "user": known.facts["user_unit"],
        },
        vocabulary_source=known.facts["vocabulary_source"],
        # Older runs did not record it.
        vocabulary_is_public=known.facts.get("vocabulary_is_public", False),
        headline_caveats=_headline_caveats(config, known.facts),
        not_covered=_not_covered(known),
    )


def _headline_caveats(config: ReportedConfig, facts: Mapping[str, Any]) -> tuple[str, ...]:
    # Text in memory brings its own words, whatever the config says; older runs did not record it.
    is_public = config.vocabulary != "private" and facts.get("vocabulary_is_public", True)
    caveats = () if is_public else (sentences.PRIVATE_VOCABULARY,)
    if facts.get("initial_weights_source") and not facts.get("initial_weights_are_public"):
        caveats += (sentences.INITIAL_WEIGHTS,)
    return caveats


def _not_covered(known: manifest.Manifest) -> tuple[str, ...]:
    source = known.facts.get("initial_weights_source")
    weights = (
        () if source is None else (f"Text that the initial weights were trained on: {source}.",)
    )
    return (*weights, *known.facts.get("not_covered", ()))


def _title(config: ReportedConfig, statement: statement_lib.PrivacyStatement) -> str:
    promised = (
        f"ε = {display.round_up(statement.epsilon, 3)} at δ = {statement.delta:g}"
        if statement.has_guarantee
        else "no privacy guarantee"
    )
    if statement.has_guarantee and statement.headline_caveats:
        promised += ", with a caveat: see privacy_statement.md"
    return f"{pathlib.PurePath(config.data).name}: {statement.mechanism}, {promised}"


def _accuracy(rows: Sequence[Mapping[str, Any]], baselines: Mapping[str, float], unit: str) -> str:
    evaluated = [row for row in rows if row[stopping.ACCURACY] is not None]
    if not evaluated:
        return "The model has not been evaluated yet."
    others = ", ".join(f"{name} {value:.2%}" for name, value in baselines.items())
    return (
        f"After {evaluated[-1]['round']} {unit}s: top-1 accuracy on held-out users "
        f"{evaluated[-1][stopping.ACCURACY]:.2%}{f' ({others})' if others else ''}."
    )


def _promise(statement: statement_lib.PrivacyStatement) -> str:
    if not statement.has_guarantee:
        return "Privacy: NO guarantee. " + " ".join(statement.no_guarantee)
    rho = statement.rho_zcdp
    promise = (
        f"Privacy: ε = {display.round_up(statement.epsilon)} at δ = {statement.delta:g}, "
        + (f"ρ-zCDP {display.round_up(rho)}, " if rho is not None else "")
        + "per user; see privacy_statement.md."
    )
    return " ".join([promise, *statement.headline_caveats])
