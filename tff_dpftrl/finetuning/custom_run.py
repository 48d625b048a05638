"""Fine-tuning of any TensorFlow model on any examples by user, with the ledger of a run.

    results = custom_run.finetune(
        "results/mine",
        custom_run.Model(row_losses, weights, trained_on="nothing"),
        custom_run.Examples(users, read_examples),
        made,
        custom_run.Steps(clip_norm=1.0),
    )

It is what `finetuning.run` is for text and the models of this package: every step is committed
before the next one begins, and the same call goes on with a run that was interrupted, with the
same batches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from typing_extensions import override

from tff_dpftrl import durable_files, pictures, validation
from tff_dpftrl.accounting import display, facts, statement
from tff_dpftrl.accounting import statement_sentences as sentences
from tff_dpftrl.finetuning import (
    amplified,
    clipped_sums,
    example_sampling,
    ghost,
    keras_losses,
    losses_trial,
    passes,
    private_steps,
    run_privacy,
    step_trainer,
)
from tff_dpftrl.finetuning import plan as plan_lib
from tff_dpftrl.models import keras_versions
from tff_dpftrl.runs import (
    curves,
    earlier_runs,
    manifest,
    metrics_log,
    prepared,
    released_model,
    reporting,
    stopping,
)
from tff_dpftrl.runs import progress as progress_lib
from tff_dpftrl.runs import run as run_lib

if TYPE_CHECKING:
    from matplotlib import figure as figure_lib

Noise: TypeAlias = plan_lib.Plan | passes.Passes | amplified.Amplified
"""Sampling and noise of a run: planned, or asked for."""

Evaluate = Callable[[list[np.ndarray]], Mapping[str, float]]
"""Function from weights to metrics by name, the same names each time."""

_WEIGHTS = "weights.npz"
_UNTRAINED = "untrained"
_EXACT = "; the loss is exact: do not publish it"
_EVAL_EVERY = 25


RANDOM = "nothing"
"""What weights that were drawn at random were trained on (`Model.trained_on`)."""


@dataclasses.dataclass(frozen=True)
class Model:
    """A model as a function of its weights.

    Attributes:
      row_losses: Function from weights and rows to the loss of each row by itself: without a mean
        over the batch, batch normalisation or a state of its own. It must use all the weights.
        This is tried before the first step, and now and then during the run.
      weights: Initial weights, float32.
      trained_on: Text or data that the initial weights, also those that are not trained, were
        computed from, for the statement: `RANDOM`, "nothing", if they were drawn at random; the
        folder of an earlier run, as a path, if they are that run's, with which this one is then
        composed; None if that is not known, which the statement says beside ε.
      frozen: Weights that `row_losses` uses and that are not trained: a run that is resumed must
        have the same ones.
      statistics: Names of the layers, or of other parts of `row_losses`, that keep statistics or
        words of data, such as a mean or a vocabulary. `trained_on` must say of which data.
      variables: Variables of a Keras model with the initial weights, which the steps update in
        place; if there are none, the steps have variables of their own. After an error they have
        the initial weights.
    """

    row_losses: clipped_sums.RowLosses
    weights: Sequence[np.ndarray]
    trained_on: str | os.PathLike[str] | None = None
    frozen: Sequence[np.ndarray] = ()
    statistics: Sequence[str] = ()
    variables: Sequence[Any] = ()

    def __post_init__(self) -> None:
        weights = [_checked(index, weight) for index, weight in enumerate(self.weights)]
        object.__setattr__(self, "weights", weights)
        if isinstance(self.trained_on, str) and not self.trained_on.strip():
            raise validation.UsageError(
                "trained_on must name what the weights were trained on: say 'nothing' if they are "
                "random, or leave it out if it is not known."
            )
        if self.statistics and self.trained_on in (None, RANDOM):
            raise validation.UsageError(
                f"model keeps statistics or words of data in {self.statistics[0]}, which get no "
                f"noise, and trained_on={self.trained_on!r} does not say of which data: name it, "
                "as in trained_on='nothing; the mean and variance are of public images', or, if "
                "it is the data to be protected, leave the layer out."
            )

    @property
    def untrained(self) -> str:
        """Description of what is not trained, for the statement; "" for nothing."""
        number = sum(np.size(weight) for weight in self.frozen)
        parts = [f"{number:,} weights"] if number else []
        if self.statistics:
            parts.append(f"statistics or words of data in {', '.join(self.statistics)}")
        return "; ".join(parts)

    @classmethod
    def of_keras(
        cls,
        model: keras_versions.Model,
        loss: Any = None,
        *,
        trained_on: str | os.PathLike[str] | None = None,
    ) -> Model:
        """Makes the losses of a Keras model, whose rows are pairs of inputs and targets.

        Args:
          model: Model of Keras 2 or 3 with one output that has its weights already. The weights of
            layers with `trainable = False` stay as they are.
          loss: Loss of Keras, its name, or a function of targets and outputs that returns a loss
            for each row; None for that which the model was compiled with.
          trained_on: What the weights were trained on, as of the attribute.

        Returns:
          The model, whose weights are those of `model.trainable_variables` in their order.

        Raises:
          UsageError: If the model cannot be trained privately: batch normalisation, regularisers,
            constraints; if it has layers with statistics (`Normalization`, `TextVectorization`)
            of which `trained_on` says nothing. Dropout and losses over the batch are refused by
            `finetune`.
        """
        if not model.built:
            raise validation.UsageError(
                "model has no weights yet: call it on an input of the right shape first."
            )
        return cls(
            keras_losses.row_losses(model, loss),
            [variable.numpy() for variable in model.trainable_variables],
            trained_on=trained_on,
            frozen=[variable.numpy() for variable in model.non_trainable_weights],
            statistics=keras_versions.statistics_layers(model),
        )


@dataclasses.dataclass(frozen=True)
class Examples:
    """The examples of all users.

    Attributes:
      users: Ids of the users, and how many examples each of them has.
      read: Function that reads examples. A run that is resumed must read the same ones: users
        and numbers of examples are compared, contents only by `digest`.
      name: Name of the data in the statement.
      digest: Digest (hex) of all examples, by which a run that is resumed knows them; None to
        answer for it yourself that they are the same. It is kept in `private/`.
    """

    users: example_sampling.Users
    read: step_trainer.ReadExamples
    name: str = "in memory"
    digest: str | None = None


@dataclasses.dataclass(frozen=True)
class Steps:
    """Settings of the steps.

    Attributes:
      clip_norm: L2 norm that the gradient of a unit is clipped to.
      optimizer: Function that makes the optimizer, a new one without a state.
      learning_rate: Function from a step, counted from 0, to its learning rate; the optimizer's
        own rate if None.
      normalised_clipping: Whether gradients are divided by the clip norm.
      iterate_averaging: Decay of the average of the steps' models that is evaluated and
        kept, instead of the last one; None for none.
      units_at_once: Number of units whose rows are in memory together; it may be another one when
        a run goes on.
      in_one_pass: Whether the gradients of these units are clipped in one pass where all uses of
        weights are known (`finetuning.ghost`, which says what of its rounding is proven). Else, and
        if False, they are clipped one after the other.
    """

    clip_norm: float
    optimizer: Callable[[], keras_versions.Optimizer] = keras_versions.Adam
    learning_rate: Callable[[int], float] | None = None
    normalised_clipping: bool = True
    iterate_averaging: float | None = None
    units_at_once: int = 16
    in_one_pass: bool = True

    def __post_init__(self) -> None:
        validation.clip_norm("clip_norm", self.clip_norm)
        validation.integer("units_at_once", self.units_at_once, minimum=1)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Evaluation of the released models.

    Attributes:
      evaluate: Function that measures a model on held-out data; not measured if None. It is
        called once before the first step, and later only with models whose step is committed.
      every: Number of steps between evaluations, and between renewals of the report.
    """

    evaluate: Evaluate | None = None
    every: int = _EVAL_EVERY

    def __post_init__(self) -> None:
        validation.integer("every", self.every, minimum=1)


@dataclasses.dataclass(frozen=True)
class Results:
    """Results of a run.

    Attributes:
      weights: Weights after the last step, or their average; float32.
      rows: A row of metrics for each step, as in `metrics.csv`.
      statement: The privacy statement.
      summary: The outcome in a few lines.
      clipping: How gradients were clipped, and if one after the other, why; None if this call took
        no step.
    """

    weights: list[np.ndarray]
    rows: Sequence[Mapping[str, Any]]
    statement: statement.PrivacyStatement
    summary: str = ""
    clipping: str | None = None


def finetune(
    output: str | pathlib.Path,
    model: Model,
    examples: Examples,
    plan: Noise,
    steps: Steps,
    evaluation: Evaluation | None = None,
    *,
    max_epsilon: float | None = None,
    deterministic_noise_seed: int | None = None,
    progress: progress_lib.Progress = progress_lib.to_stderr,
) -> Results:
    """Trains any model with a user-level guarantee (Charles et al. 2024), or goes on with it.

    The folder gets `metrics.csv`, `privacy_statement.md` and `.json`, `weights.npz` and
    `curves.png`, renewed at each evaluation and at the end, and `private/`, which is secret.

    Errors about `row_losses` follow from examples of the users: they are for the operator's eyes.

    Args:
      output: Folder of the run; of one that was interrupted, to go on with it by the same call.
      model: Losses and initial weights.
      examples: The users and their examples.
      plan: Sampling and noise, as `plan.make_plan` made them for these users; or correlated noise,
        of passes, or with secret samples (`amplified`). If a private choice is in a plan, make it
        once and keep it: whoever makes it anew until it pleases pays each time.
      steps: Clip norm and optimizer.
      evaluation: Evaluation on held-out data; none by default.
      max_epsilon: ε above which no step begins; None for no such budget.
      deterministic_noise_seed: Seed of noise and samples, for debugging only: the run is not
        private then.
      progress: Callback for progress lines and warnings; prints to standard error by default.

    Returns:
      Weights, metrics and statement.

    Raises:
      UsageError: If an argument cannot be used, is not what the run in `output` began with,
        or training diverges; every committed step is kept.
      OSError: If a file cannot be written; every committed step is kept.
    """
    output = pathlib.Path(output)
    evaluation = Evaluation() if evaluation is None else evaluation
    if max_epsilon is not None:
        validation.positive("max_epsilon", max_epsilon)
    users, weights = examples.users, list(model.weights)
    private = _privacy(
        plan,
        users,
        output,
        clip_norm=steps.clip_norm,
        num_parameters=sum(weight.size for weight in weights),
        deterministic_seed=deterministic_noise_seed,
    )
    if max_epsilon is not None and not private.has_guarantee:
        raise validation.UsageError(
            "max_epsilon has no meaning without noise, or with deterministic_noise_seed, which "
            "makes the run not private: leave one of them out."
        )
    made = steps.optimizer()
    if not model.variables:  # Else `private_fit` has looked at it, before it was built.
        keras_versions.refuse_optimizer(made)
    begun = manifest.read(output) if manifest.exists(output) else None
    was_in_one_pass = begun is not None and (
        begun.identities.get(_CLIPPING) == manifest.identity([_IN_ONE_PASS])
    )
    clipped_sum = ghost.OfLosses(
        model.row_losses,
        plan.rows_per_unit,
        is_wanted=steps.in_one_pass and (begun is None or was_in_one_pass),
        has_begun=was_in_one_pass,
        report=progress,
    )
    if begun is None:
        manifest.check_is_free(output)
        _try_losses(model, examples, clipped_sum)
    if not model.variables and keras_versions.excludes_weights(made):
        raise validation.UsageError(
            "optimizer leaves weights out of its weight decay (exclude_from_weight_decay), which "
            "have no names here: use private_fit, or an optimizer without weight decay."
        )
    private_step = private_steps.PrivateSteps(
        private_steps.round_of(private, run_privacy.strategy_of(private)),
        clipped_sum,
        made,
        weights,
        units_at_once=steps.units_at_once,
        normalised=steps.normalised_clipping,
        iterate_averaging=steps.iterate_averaging,
        learning_rate=steps.learning_rate,
        variables=model.variables,
    )
    source, earlier = model.trained_on, {}
    if isinstance(source, os.PathLike):
        earlier = earlier_runs.of_caller(pathlib.Path(source), users.ids)
        source = earlier["initial_weights_source"]
    evaluator = _Evaluator(evaluation.evaluate)
    before = evaluator.evaluate(weights)
    known = manifest.Manifest(
        config={
            "own_model": True,
            "data": examples.name,
            "optimizer": json.loads(
                json.dumps(keras_versions.optimizer_options(made), default=str)
            ),
            "normalised_clipping": steps.normalised_clipping,
            "iterate_averaging": steps.iterate_averaging,
            "units_at_once": steps.units_at_once,
            "weights_source": source,
            **({_UNTRAINED: model.untrained} if model.untrained else {}),
            "metrics": sorted(name.removeprefix(_MEASURED) for name in before),
            "deterministic_noise_seed": deterministic_noise_seed,
            "max_epsilon": max_epsilon,
            **_asked(plan),
        },
        derived=json.loads(json.dumps({**private.derived(), "clip_norm": private.clip_norm})),
        facts={
            "num_parameters": sum(weight.size for weight in weights),
            **({} if isinstance(plan, plan_lib.Plan) else {"training_users": len(users)}),
            **earlier,
        },
        identities=manifest.identities(
            {
                "users": users.ids,
                "numbers of the users' examples": [str(number) for number in users.num_examples],
                "initial weights": [_digest(weight) for weight in (*weights, *model.frozen)],
                **(
                    {}
                    if examples.digest is None
                    else {"contents of the examples": [examples.digest]}
                ),
            }
        )
        | _chosen_clipping(begun, clipped_sum),
        recorded_kind=manifest.CUSTOM_FINETUNING,
    )

    def try_losses(weights: Sequence[np.ndarray], rows: clipped_sums.Rows) -> None:
        losses_trial.refuse(model.row_losses, weights, rows)
        clipped_sum.check(weights, rows)

    def prepare(begun: manifest.Manifest) -> prepared.Prepared:
        report = reportable(begun, output, evaluation.every)
        report.schedule.check_budget(private)
        return prepared.Prepared(
            report=report,
            trainer=contextlib.nullcontext(
                step_trainer.StepTrainer(
                    users.ids,
                    functools.partial(passes.batches_of, private, users, plan.group_size),
                    private_step,
                    examples.read,
                    try_losses=try_losses,
                )
            ),
            evaluator=evaluator,
            public_seed=deterministic_noise_seed or 0,
            keep=functools.partial(run_privacy.keep_pool, private, users, plan.group_size),
            announcement=[
                *private.describe(),
                *private.delta_warnings(),
                *(
                    f"Before the first step: {name.removeprefix(_MEASURED)} {value:.4g}."
                    for name, value in before.items()
                ),
            ],
        )

    def prepare_begun(begun: manifest.Manifest) -> prepared.Prepared:
        _check_is_the_same(begun, known, output)
        return prepare(begun)

    try:
        results = run_lib.train(output, begun, lambda: prepare(known), prepare_begun, progress)
    except BaseException:
        for variable, weight in zip(model.variables, weights, strict=False):
            variable.assign(weight)  # What a step left that is not committed is nobody's to see.
        raise
    if clipped_sum.way is None:
        return results
    return dataclasses.replace(
        results, summary=f"{results.summary}\n{clipped_sum.way}", clipping=clipped_sum.way
    )


def write_report(output: str | pathlib.Path) -> Results:
    """Writes statement, curves and weights of what a run has committed so far.

    The run may be interrupted or finished, but not under way. It can be resumed afterwards.

    Args:
      output: Folder of the run.

    Returns:
      Weights, metrics and statement.

    Raises:
      UsageError: If there is no such run, another process has it open, its files were changed,
        or none of its steps has been committed yet.
      OSError: If a file cannot be written.
    """
    output = pathlib.Path(output)
    return run_lib.report(output, lambda known: reportable(known, output))


_MEASURED = "eval_"  # Prefix of the columns that an evaluation fills.


class _Evaluator(prepared.Evaluator):
    """Evaluator that calls the caller's function."""

    def __init__(self, function: Evaluate | None):
        self._function = function

    @override
    def evaluate(self, weights):
        if self._function is None:
            return {}
        return {f"{_MEASURED}{k}": float(value) for k, value in self._function(weights).items()}


class _Presentation(prepared.Presentation):
    """Weights and curves of a custom model."""

    has_events = False
    is_renewed = True
    model_file = _WEIGHTS

    def __init__(self, metrics: Sequence[str]):
        names = [f"{_MEASURED}{name}" for name in metrics]
        self._measured = names
        self._shown = ("loss", *names, "epsilon")
        self.columns = (
            metrics_log.Column("round", "number of the step, from 1"),
            metrics_log.Column("loss", "mean loss of the step's users or examples", is_exact=True),
            metrics_log.Column("epsilon", "ε that all steps so far spent at the run's δ"),
            *(
                metrics_log.Column(name, "measured by the caller's function, on data of the caller")
                for name in names
            ),
        )

    @override
    def write_model(self, output, weights):
        archive = io.BytesIO()
        np.savez(archive, *weights)
        durable_files.write(output / self.model_file, archive.getvalue())

    @override
    def write(self, output: pathlib.Path, outcome: prepared.Outcome) -> Results:
        exact = _drawn(outcome.rows, self._shown, outcome.statement, _EXACT)
        path = output / "private" / curves.NAME
        pictures.write(path, exact, dpi=100, private=True)
        public = [name for name in self._shown if name != "loss"]
        picture = _drawn(outcome.rows, public, outcome.statement)
        pictures.write(output / curves.NAME, picture, dpi=100)
        lines = [outcome.progress, reporting.promise(outcome.statement)]
        evaluated = [row for row in outcome.rows if any(row[n] is not None for n in self._measured)]
        if evaluated:
            last = evaluated[-1]
            values = (f"{name.removeprefix(_MEASURED)} {last[name]:.4g}" for name in self._measured)
            lines.insert(0, f"After {last['round']} steps: {', '.join(values)}.")
        summary = "\n".join(lines)
        return Results(outcome.weights, outcome.rows, outcome.statement, summary)


def reportable(
    known: manifest.Manifest, output: pathlib.Path, eval_every: int = _EVAL_EVERY
) -> prepared.Reportable:
    """Returns what the report on a custom run is made of; refuses another kind of run."""
    known.check_kind(manifest.CUSTOM_FINETUNING, output)
    config = known.config
    is_known = config["weights_source"] is not None
    runs, same_users = earlier_runs.parts(known.facts)
    plan = _resumed(known)
    return prepared.Reportable(
        known=known,
        plan=plan,
        facts=facts.Facts(
            parameters={
                "data": config["data"],
                "optimizer": config["optimizer"].get("name", "own"),
                "normalised_clipping": config["normalised_clipping"],
                **_group_size(known, plan),
                "clip_norm_source": "given",
            },
            headline_caveats=() if is_known else (sentences.INITIAL_WEIGHTS,),
            not_covered=(
                *_not_covered(config["weights_source"], config.get(_UNTRAINED)),
                run_privacy.METRICS_OF_OWN_MODEL_NOT_COVERED,
            ),
            earlier_runs=runs,
            same_users=same_users,
        ),
        # Older runs had no budget.
        schedule=stopping.Schedule("step", eval_every, max_epsilon=config.get("max_epsilon")),
        released=functools.partial(released_model.weights, config["iterate_averaging"]),
        presentation=_Presentation(config["metrics"]),
        go_on=f"the call of finetuning.custom_run.finetune({str(output)!r}, ...) that began it",
    )


def _privacy(
    plan: Noise,
    users: example_sampling.Users,
    output: pathlib.Path,
    *,
    clip_norm: float,
    num_parameters: int,
    deterministic_seed: int | None,
) -> run_privacy.FinetuningPlan:
    """Returns the privacy of a run; of one that has begun, with its strategy and noise."""
    if isinstance(plan, plan_lib.Plan):
        plan.contributions(users, 0)  # Refuses users for whom the plan was not made.
        return run_privacy.SampledFinetuning.of(
            plan, clip_norm=clip_norm, deterministic_seed=deterministic_seed
        )
    begun = None
    if manifest.exists(output):
        known = manifest.read(output)
        known.check_kind(manifest.CUSTOM_FINETUNING, output)
        if known.config.get("sampling") == _asked(plan)["sampling"]:  # Else it will be refused.
            begun = known.derived
    if isinstance(plan, amplified.Amplified):
        chosen = plan if begun is not None else plan.with_bands(users)
        asked = chosen.asked(users, clip_norm=clip_norm, deterministic_seed=deterministic_seed)
    else:
        asked = plan.asked(clip_norm=clip_norm, deterministic_seed=deterministic_seed)
    if begun is not None:
        return asked.resumed(len(users), num_parameters, begun)
    return asked.plan(len(users), num_parameters)


def _asked(plan: Noise) -> dict[str, Any]:
    """Returns the options of correlated noise for a manifest."""
    if isinstance(plan, plan_lib.Plan):
        return {}
    return {"sampling": "passes", **dataclasses.asdict(plan)}


def _resumed(known: manifest.Manifest) -> run_privacy.FinetuningPlan:
    """Returns the privacy of a run that has begun, from its manifest."""
    config, facts, derived = known.config, known.facts, known.derived
    seed = config["deterministic_noise_seed"]
    if "plan" in derived:
        return run_privacy.SampledFinetuning.resumed(derived, deterministic_seed=seed)
    if "sampling" in derived:
        return amplified.resumed(
            derived,
            facts["training_users"],
            deterministic_seed=seed,
            unit_of_privacy=config["unit_of_privacy"],
        )
    fields = dataclasses.fields(passes.Passes)
    plan = passes.Passes(**{field.name: config[field.name] for field in fields})
    asked = plan.asked(clip_norm=derived["clip_norm"], deterministic_seed=seed)
    return asked.resumed(facts["training_users"], facts["num_parameters"], derived)


def _group_size(
    known: manifest.Manifest, plan: run_privacy.FinetuningPlan
) -> dict[str, statement.Scalar]:
    """Returns what the statement says of the group size."""
    if isinstance(plan, run_privacy.SampledFinetuning):
        return {"group_size_source": plan.plan.group_size_source}
    return {name: known.config[name] for name in ("sampling", "group_size")}


def _not_covered(trained_on: str | None, untrained: str | None) -> tuple[str, ...]:
    """Returns what a statement says of data in the initial weights, and in those never trained."""
    source, said = "not recorded" if trained_on is None else trained_on, ()
    if trained_on != RANDOM:
        said = (f"What the initial weights were trained on: {source}.",)
    if untrained:  # Older runs did not record it.
        if trained_on == RANDOM:
            source = "nothing, they were drawn at random (so the operator says)"
        said += (f"What was not trained, and has no noise: {untrained}. Computed from: {source}.",)
    return said


_CLIPPING, _IN_ONE_PASS = "way of clipping", "in one pass"


def _chosen_clipping(begun: manifest.Manifest | None, chosen: ghost.OfLosses) -> dict[str, str]:
    """Returns a digest of how a run began to clip, so that no other trial chooses anew.

    It is kept private: the trial is of the users' examples. Older runs clipped one gradient after
    the other and have none.
    """
    if begun is not None:
        return {name: begun.identities[name] for name in {_CLIPPING} & set(begun.identities)}
    way = _IN_ONE_PASS if chosen.is_in_one_pass else "one after the other"
    return manifest.identities({_CLIPPING: [way]})


_TRIED_ROWS = 4


def _try_losses(model: Model, examples: Examples, clipped_sum: ghost.OfLosses) -> None:
    """Tries the losses on rows of the first users, before anything is written."""
    users = examples.users
    tried = [
        (user, 0) for user, number in zip(users.ids, users.num_examples, strict=True) if number
    ][:_TRIED_ROWS]
    rows = examples.read(tried)
    losses_trial.refuse(model.row_losses, list(model.weights), rows)
    clipped_sum.choose(model.weights, rows)


def _drawn(
    rows: Sequence[Mapping[str, Any]],
    columns: Sequence[str],
    promised: statement.PrivacyStatement,
    note: str = "",
) -> figure_lib.Figure:
    """Returns a figure of metrics against steps, with ε and a note above it."""
    picture = pictures.new_figure(3.6 * len(columns), 3.4)
    panels = picture.subplots(1, len(columns), squeeze=False)
    for axes, column in zip(panels[0], columns, strict=True):
        points = [(row["round"], row[column]) for row in rows if row[column] is not None]
        if points:
            axes.plot(*zip(*points, strict=True), "o-", markersize=2, lw=1)
        axes.set(xlabel="step", title=column)
    promise = "no guarantee"
    if promised.epsilon is not None:
        promise = f"ε = {display.round_up(promised.epsilon, 3)}"
    picture.suptitle(f"{promised.mechanism}: {promise}{note}")
    return picture


def _check_is_the_same(
    begun: manifest.Manifest, asked: manifest.Manifest, output: pathlib.Path
) -> None:
    """Refuses to go on with a run that began with something else."""
    for what in ("config", "derived", "facts"):
        kept, given = dict(getattr(begun, what)), dict(getattr(asked, what))
        # Untrained weights are compared by their digests, which older runs have, too.
        for name in sorted({*kept, *given} - {"units_at_once", _UNTRAINED}):
            if kept.get(name) != given.get(name):
                raise validation.UsageError(
                    f"The run in {output} began with {name} = {kept.get(name)!r}, not "
                    f"{given.get(name)!r}: go on with what it began with, or name another folder."
                )
    for name, digest in begun.identities.items():
        if digest != asked.identities.get(name):
            raise validation.UsageError(
                f"The {name} are not those that the run in {output} began with: restore them, or "
                "name another folder."
            )


def _checked(index: int, weight: np.ndarray) -> np.ndarray:
    weight = np.asarray(weight)
    if weight.dtype != np.float32 or not np.all(np.isfinite(weight)):
        raise validation.UsageError(
            f"weights[{index}] must be finite and float32, got {weight.dtype}: convert it."
        )
    return weight


def _digest(weight: np.ndarray) -> str:
    content = np.ascontiguousarray(weight).tobytes()
    return f"{weight.shape} {hashlib.sha256(content).hexdigest()}"
