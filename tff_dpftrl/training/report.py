"""The report of a run on text: statement, curves, model, and how it does on held-out users.

Nothing is trained and no data is read: manifest, ledger, last checkpoint and metrics
are enough for the privacy statement, the curves and the model. TFF is not needed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

from tff_dpftrl import durable_files, json_text, validation
from tff_dpftrl.accounting import composition, display, parts
from tff_dpftrl.accounting import facts as facts_lib
from tff_dpftrl.accounting import statement as statement_lib
from tff_dpftrl.accounting import statement_sentences as sentences
from tff_dpftrl.mechanisms import noise_recipe
from tff_dpftrl.models import export, table
from tff_dpftrl.reports import results
from tff_dpftrl.runs import (
    curves,
    earlier_runs,
    joint_runs,
    manifest,
    prepared,
    privacy,
    released_metrics,
    released_model,
    reporting,
    run,
    stopping,
)
from tff_dpftrl.training import custom_models, metrics_columns
from tff_dpftrl.training import options as options_lib

if TYPE_CHECKING:
    from tff_dpftrl.models import evaluation
    from tff_dpftrl.training import text_task

PRETRAINED = "pretrained"
"""Name of the model that fine-tuning begins with, among the baselines."""

_HELD_OUT_NOTE = (
    "Exact figures of held-out users, who never train: no privacy statement covers them. Row 10 of "
    "the histograms, say, has the shares of words where 0, 1, 2 ... of the model's likeliest words "
    "are among the 10 most frequent words of these users."
)
# Sentences of a statement on protected held-out users, who are measured in private only, or with
# noise, too.
_HELD_OUT_NOT_COVERED = (
    "What is measured on the held-out users, who never train and are protected too: exact figures "
    "in private/ and on the terminal, and the choice of private/best_model.npz by them; do not "
    "publish them."
)
_BESIDE_RELEASED = (
    "What is measured on the held-out users without noise, who never train and are protected too: "
    "exact figures in private/ and on the terminal; do not publish them."
)
_BASELINES = pathlib.PurePath("private", "baselines.json")
_HELD_OUT = "held_out.json"


@dataclasses.dataclass(frozen=True)
class ReportOptions:
    """Options that a report depends on; the config of a run says what each means."""

    statement_parameters: Mapping[str, statement_lib.Scalar]
    eval_every: int
    max_epsilon: float | None
    stop_at_accuracy: float | None
    iterate_averaging: float | None


@dataclasses.dataclass(frozen=True)
class TrainingResults:
    """Results of a run on text.

    Attributes:
      rows: One row of metrics for each committed round.
      baselines: Top-1 accuracy of n-gram models on the same held-out users; empty if
        the run has not ended yet.
      held_out: Metrics that `TextTask.examine` measured on the held-out users after the last
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
    """Writes statement, curves and model of what a training run has committed so far.

    The run may be interrupted or finished, but not under way. It can be resumed afterwards.
    """
    return run.report(output, lambda known: reportable(known, output))


def reportable(known: manifest.Manifest, output: pathlib.Path) -> prepared.Reportable:
    """Returns what the report on a training run is made of."""
    config = options_lib.of_manifest(known, output)
    plan = config.request().resumed(
        known.facts["training_users"], known.facts["num_parameters"], known.derived
    )
    return of_training_run(config.part(ReportOptions), known, plan, output)


def of_training_run(
    options: ReportOptions,
    known: manifest.Manifest,
    plan: privacy.FederatedPlan,
    output: pathlib.Path,
) -> prepared.Reportable:
    """Returns what the report on a training run is made of."""
    return of_run(
        options,
        known,
        plan,
        unit="round",
        exact=privacy.TRAINING_METRICS_NOT_COVERED,
        go_on=custom_models.resume_command(
            known.facts["model"]["model"], output, known.config["data"]
        ),
        figures=functools.partial(figures_of, known),
        evaluation=functools.partial(evaluation_of, known),
    )


def figures_of(known: manifest.Manifest) -> released_metrics.Figures:
    """Returns the figures that a training run may release of its cohorts, from its manifest."""
    return metrics_columns.figures_of_rounds(
        known.facts["vocabulary_size"], known.config["sequence_length"]
    )


def not_covered_of_held_out(held_out_users: str, *, released: bool = False) -> list[str]:
    """Returns what a statement does not cover of held-out users; nothing if they are public."""
    if held_out_users != "protected":
        return []
    return [_BESIDE_RELEASED if released else _HELD_OUT_NOT_COVERED]


def evaluation_of(known: manifest.Manifest) -> released_metrics.Figures:
    """Returns the figures that a training run may release of protected held-out users."""
    return metrics_columns.figures_of_evaluations(
        known.facts["vocabulary_size"], known.config["sequence_length"]
    )


def of_run(
    options: ReportOptions,
    known: manifest.Manifest,
    plan: privacy.PrivacyPlan,
    *,
    unit: str,
    exact: str,
    go_on: str,
    whole: released_model.Whole = list,
    figures: Callable[[], released_metrics.Figures] | None = None,
    evaluation: Callable[[], released_metrics.Figures] | None = None,
) -> prepared.Reportable:
    """Returns what the report on a run on text is made of.

    A `unit` is the name of a round, and `exact` a sentence on the exact figures of such a run,
    which no statement covers. `whole` makes the weights of the model of the trained ones. The
    figures of the training cohorts, and of protected held-out users, count only if the plan
    releases them.
    """
    stddev = released_metrics.noise_of(plan)
    released = figures() if figures is not None and stddev is not None else None
    has_evaluation = any(one.name == parts.EVALUATION for one in plan.others)
    evaluated = evaluation() if evaluation is not None and has_evaluation else None
    return prepared.Reportable(
        known=known,
        plan=plan,
        facts=_facts(known, options, plan, exact),
        schedule=stopping.Schedule(
            unit,
            options.eval_every,
            options.max_epsilon,
            options.stop_at_accuracy,
            stopping.ACCURACY if evaluated is None else stopping.NOISED_ACCURACY,
        ),
        released=functools.partial(released_model.weights, options.iterate_averaging, whole=whole),
        presentation=TextPresentation(known, unit, released, stddev, evaluated),
        go_on=go_on,
        figures=released,
        evaluation=evaluated,
    )


def _facts(
    known: manifest.Manifest, options: ReportOptions, plan: privacy.PrivacyPlan, exact: str
) -> facts_lib.Facts:
    """Returns the facts that the statement of a run on text reports."""
    generator: dict[str, statement_lib.Scalar] = {}
    if known.config.get("noise") == "secure":
        strategy = getattr(plan, "strategy", None)  # Without one, noise is independent.
        is_sum = strategy is None or noise_recipe.is_sum_of_draws(strategy.noise_recipe())
        generator[sentences.NOISE_GENERATOR] = sentences.noise_generator(is_sum)
    source = known.facts.get("initial_weights_source")
    runs, same_users = earlier_runs.parts(known.facts)
    trained_on = f"Text that the initial weights were trained on: {source}."
    return facts_lib.Facts(
        parameters={
            **options.statement_parameters,
            **generator,
            **known.facts.get("choices", {}),
            "data": _name(known),
            "user": known.facts["user_unit"],
        },
        vocabulary_source=known.facts["vocabulary_source"],
        vocabulary_is_public=_is_public(known.config, known.facts, if_not_recorded=False),
        headline_caveats=_headline_caveats(
            known.config,
            known.facts,
            runs,
            others=known.derived.get("others", ()),
        ),
        not_covered=(
            *([] if source is None else [trained_on]),
            *known.facts.get("not_covered", ()),
            privacy.not_covered(exact, plan.others),
        ),
        caveats=known.facts.get("caveats", ()),
        earlier_runs=runs,
        same_users=same_users,
        rows_have_owners=known.config.get("rows_per_owner") is not None,
    )


class TextPresentation(prepared.Presentation):
    """Model, curves and summary of a run on text."""

    def __init__(
        self,
        known: manifest.Manifest,
        unit: str,
        figures: released_metrics.Figures | None = None,
        stddev: float | None = None,
        evaluation: released_metrics.Figures | None = None,
    ):
        self._protects_held_out = _protects_held_out(known)
        self.columns = metrics_columns.of_run(protects_held_out=self._protects_held_out)
        self.columns += () if figures is None else figures.columns
        self.columns += () if evaluation is None else evaluation.columns
        self._keeps_best_private = self._protects_held_out and evaluation is None
        self._figures = figures
        self._stddev = stddev or 0.0
        self._known = known
        self._unit = unit
        self._model = table.from_description(known.facts["model"])

    @override
    def write_best(self, output, weights):
        private = self._keeps_best_private
        folder = output / manifest.PRIVATE if private else output
        export.write(folder / "best_model.npz", self._model, weights, private=private)

    @override
    def write_model(self, output, weights):
        export.write(output / self.model_file, self._model, weights)

    @override
    def write(self, output: pathlib.Path, outcome: prepared.Outcome) -> TrainingResults:
        rows, statement, unit = outcome.rows, outcome.statement, self._unit
        baselines = _read_baselines(output)
        drawn = results.levels(baselines)
        title = _title(_name(self._known), statement)
        known_before = {name: baselines[name] for name in baselines if name == PRETRAINED}
        if self._protects_held_out:
            known_before = {}
        curves.write(
            output,
            rows,
            title=title,
            baselines={name: drawn[name] for name in drawn if name not in known_before},
            public_baselines=known_before,
            unit=unit,
            exact=[column.name for column in self.columns if column.is_exact],
        )
        held_out = _read_held_out(output, rows[-1]["round"])
        summary = [
            _accuracy(rows, baselines, unit),
            _loss(rows, self._known.facts),
            _noised_accuracy(rows, unit),
            self._figures.of_last_rounds(rows, self._stddev, unit) if self._figures else None,
            _on_held_out_users(held_out) if held_out else None,
            outcome.progress,
            failure(rows, self._known.facts["vocabulary_size"], baselines),
            reporting.promise(statement),
        ]
        text = "\n".join(filter(None, summary))
        return TrainingResults(rows, baselines, held_out, statement, text)


class TextEvaluator(prepared.Evaluator):
    """Evaluator of language models on held-out users, and against simpler models."""

    def __init__(
        self,
        task: text_task.TextTask,
        baselines: Mapping[str, float] | None = None,
        *,
        protects_held_out: bool = False,
        counts_of_users: evaluation.CountsOfUsers | None = None,
    ):
        self._protects_held_out = protects_held_out
        self._task = task
        self._baselines = baselines or {}
        self._counts_of_users = counts_of_users

    @override
    def bounded_sums(self, weights, figures):
        assert self._counts_of_users is not None  # It is there if there are figures.
        return figures.bounded_sums(self._counts_of_users(weights, list(figures.bounds)))

    @override
    def evaluate(self, weights: list[np.ndarray]) -> dict[str, float]:
        measured = self._task.evaluate(weights)
        return {f"eval_{name}": measured[name] for name in metrics_columns.EVALUATION_METRICS}

    @override
    def examine(self, output, rounds_done, weights):
        measured, private = self._task.examine(weights), self._protects_held_out
        write_held_out(output, rounds_done, measured, private=private)
        # These are counted on the training users, and so belong to the run's secrets.
        add_baselines(output, {**self._baselines, **self._task.baselines()})


def _protects_held_out(known: manifest.Manifest) -> bool:
    return known.config.get("held_out_users") == "protected"  # Older runs had no such option.


def write_held_out(
    output: pathlib.Path, rounds_done: int, measured: Mapping[str, Any], *, private: bool = False
) -> None:
    """Writes what `TextTask.examine` measured after the last round."""
    text = json.dumps({"note": _HELD_OUT_NOTE, "round": rounds_done, **measured}, indent=2) + "\n"
    folder = output / manifest.PRIVATE if private else output
    durable_files.write(folder / _HELD_OUT, text.encode("utf-8"), private=private)


def add_baselines(output: pathlib.Path, baselines: Mapping[str, float]) -> None:
    """Adds accuracies of simpler models to those in `private/`."""
    if baselines:
        text = json.dumps({**_read_baselines(output), **baselines}, indent=2) + "\n"
        durable_files.write(output / _BASELINES, text.encode("utf-8"), private=True)


def _read(path: pathlib.PurePath, output: pathlib.Path, check: Callable[[Any], Any]) -> Any:
    """Returns what a check makes of the JSON of a file in a run's folder; None if it is missing."""
    file = output / path
    if not file.exists():
        return None
    try:
        return check(json_text.read_outside(file, folder=output))
    # Errors of reading JSON that has other values than were written.
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
        raise validation.UsageError(
            f"{file} is damaged: restore it, or remove it to report without it."
        ) from None


def _read_baselines(output: pathlib.Path) -> dict[str, float]:
    def check(baselines: Any) -> dict[str, float]:
        return {name: float(accuracy) for name, accuracy in baselines.items()}

    return _read(_BASELINES, output, check) or {}


def _read_held_out(output: pathlib.Path, rounds_done: int) -> dict[str, Any] | None:
    def check(measured: Any) -> dict[str, Any] | None:
        if measured["round"] != rounds_done:
            return None
        _on_held_out_users(measured)  # They read all that is needed.
        head = measured["head_words"]
        if any(len(shares) != head["top"] + 1 for shares in head["histograms"].values()):
            raise ValueError
        return measured

    is_public = (output / _HELD_OUT).exists()
    path = _HELD_OUT if is_public else manifest.PRIVATE / pathlib.PurePath(_HELD_OUT)
    return _read(path, output, check)


def _on_held_out_users(measured: Mapping[str, Any]) -> str:
    """Returns how accuracy differs between users, and how many proposals are frequent words."""
    lines = []
    by_user = measured["accuracy_by_user"]["top1_in_vocab"]
    if by_user["users"]:
        low, _, middle, _, high = (f"{q:.1%}" for q in by_user["quantiles"].values())
        lines.append(
            f"Of {by_user['users']} held-out users, half have a top-1 accuracy above {middle}, one "
            f"in twenty below {low}, one in twenty above {high}."
        )
    if "earlier_text" in measured:  # Older runs did not measure it.
        lines += _with_earlier_text(measured["earlier_text"])
    head = measured["head_words"]
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


def _with_earlier_text(measured: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Returns what a cache of each user's own text gives, if any word has earlier text."""
    every, part = measured["all"], measured["with"]
    if not part["words"]:
        return []
    share = part["words"] / every["words"]
    return [
        "With a cache of the same user's earlier text: top-1 accuracy "
        f"{every['model_and_cache']:.2%}; on the {share:.1%} of words that have such text "
        f"{part['model_and_cache']:.2%}, and {part['model']:.2%} without the cache."
    ]


def failure(
    rows: Sequence[Mapping[str, Any]],
    vocabulary_size: int,
    baselines: Mapping[str, float] | None = None,
) -> str | None:
    """Returns a warning if the model is worse than no training at all.

    That is so if the last held-out accuracy is below that of the pretrained model, one of the
    baselines, or the loss above that of a guess that takes all words for equally likely, which is
    what an untrained model makes.
    """
    accuracies = [row[stopping.ACCURACY] for row in rows if row.get(stopping.ACCURACY) is not None]
    before = (baselines or {}).get(PRETRAINED)
    if before is not None and accuracies and accuracies[-1] < before:
        return (
            "Warning: the model is less accurate than the one it began with: "
            f"{accuracies[-1]:.2%}, which was {before:.2%}. Either the noise outweighs what is "
            "learned (more steps, a larger compute_budget or a larger ε help), or the learning "
            "rate is too large."
        )
    losses = [row["eval_loss"] for row in rows if row.get("eval_loss") is not None]
    guess = math.log(vocabulary_size)
    if not losses or losses[-1] <= guess:
        return None
    return (
        f"Warning: the model is worse than before training: its held-out loss is "
        f"{losses[-1]:.4g}, that of taking all words for equally likely is {guess:.4g}. Either "
        "the noise outweighs what the clients send (more clients a round, more rounds or a larger "
        "ε help), or a learning rate is too large."
    )


def _is_public(
    config: Mapping[str, Any], facts: Mapping[str, Any], *, if_not_recorded: bool
) -> bool:
    """Returns whether neither options nor facts say that the words are of protected users.

    Text in memory brings its own words, whatever the options say; older runs did not record it.
    """
    recorded = facts.get("vocabulary_is_public", if_not_recorded)
    return recorded and config.get("vocabulary") != "private"


def _headline_caveats(
    config: Mapping[str, Any],
    facts: Mapping[str, Any],
    runs: Sequence[composition.Spent] = (),
    others: Sequence[Mapping[str, Any]] = (),
) -> tuple[str, ...]:
    is_public = _is_public(config, facts, if_not_recorded=True)
    caveats: tuple[str, ...] = ()
    is_part = any(part["name"] == parts.VOCABULARY for part in others)
    if not is_public and not is_part:
        is_noised = facts.get("vocabulary_is_noised")
        caveats = (sentences.NOISED_ELSEWHERE if is_noised else sentences.PRIVATE_VOCABULARY,)
    is_unknown = facts.get("initial_weights_source") and not facts.get("initial_weights_are_public")
    if is_unknown and not runs:  # What earlier runs have spent is stated as a number.
        caveats += (sentences.INITIAL_WEIGHTS,)
    if facts.get(joint_runs.IS_ONE):
        caveats += (sentences.ONE_OF_A_CHOICE,)
    return caveats


def _name(known: manifest.Manifest) -> str:
    """Returns the name of the run's data."""
    return pathlib.PurePath(known.config["data"]).name


def _title(data: str, statement: statement_lib.PrivacyStatement) -> str:
    promised = "no privacy guarantee"
    if statement.epsilon is not None:
        promised = (
            f"ε = {display.round_up(statement.epsilon, 3)} at δ = {display.delta(statement.delta)}"
        )
        if statement.headline_caveats:
            promised += ", with a caveat: see privacy_statement.md"
    return f"{data}: {statement.mechanism}, {promised}"


def _accuracy(rows: Sequence[Mapping[str, Any]], baselines: Mapping[str, float], unit: str) -> str:
    evaluated = [row for row in rows if row[stopping.ACCURACY] is not None]
    if not evaluated:
        return "The model has not been evaluated yet."
    others = ", ".join(f"{name} {value:.2%}" for name, value in baselines.items())
    bits = evaluated[-1].get("eval_bits_per_character")
    return (
        f"After {evaluated[-1]['round']} {unit}s: top-1 accuracy on held-out users "
        f"{evaluated[-1][stopping.ACCURACY]:.2%}{f' ({others})' if others else ''}"
        f"{'' if bits is None else f', {bits:.3f} bits per character'}."
    )


def _noised_accuracy(rows: Sequence[Mapping[str, Any]], unit: str) -> str | None:
    """Returns the last accuracy on protected users that is released, if there is one."""
    known = [row for row in rows if row.get(stopping.NOISED_ACCURACY) is not None]
    if not known:
        return None
    accuracy, error = (known[-1][f"{stopping.NOISED_ACCURACY}{name}"] for name in ("", "_se"))
    return (
        f"With noise, after {known[-1]['round']} {unit}s: top-1 accuracy on held-out users "
        f"{accuracy:.2%} ± {error:.1%} (one standard error)."
    )


def _loss(rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> str | None:
    """Returns the held-out loss after and before fine-tuning; None if one is not known."""
    losses = [row["eval_loss"] for row in rows if row.get("eval_loss") is not None]
    before = facts.get("pretrained_loss")
    if before is None or not losses:
        return None
    after, first = (
        f"{loss:.3f} nats a {facts['loss_unit']} (perplexity {math.exp(min(loss, 700.0)):.4g})"
        for loss in (losses[-1], before)
    )
    return f"Held-out loss: {after}; before fine-tuning {first}."
