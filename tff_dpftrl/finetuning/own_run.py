"""A run with its books for any TensorFlow model and any examples by user.

    results = own_run.finetune(
        "results/mine", users, made, row_losses, weights, read_examples, clip_norm=1.0
    )

It is what `finetuning.run` is for text and the models of this package: every step is committed
before the next one begins, and the same call goes on with a run that was interrupted, with the
same batches and the same noise.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tqdm

from tff_dpftrl import durable_files, validation
from tff_dpftrl.accounting import display, facts, statement
from tff_dpftrl.finetuning import (
    clipped_sums,
    contributions,
    private_steps,
    run_privacy,
    step_trainer,
)
from tff_dpftrl.finetuning import plan as plan_lib
from tff_dpftrl.mechanisms import identity
from tff_dpftrl.runs import checkpoint, committed_rounds, manifest, metrics_log
from tff_dpftrl.training import committed_run, released_model, report

Evaluate = Callable[[list[np.ndarray]], Mapping[str, float]]
"""From weights to metrics by name, the same names each time."""

_WEIGHTS = "weights.npz"
_CURVES = "curves.png"


@dataclasses.dataclass(frozen=True)
class Results:
    """What a run came to.

    Attributes:
      weights: Those after the last step, or their average; float32.
      rows: A row of metrics for each step, as in `metrics.csv`.
      statement: The privacy statement.
    """

    weights: list[np.ndarray]
    rows: Sequence[Mapping[str, Any]]
    statement: statement.PrivacyStatement


def finetune(
    output: str | pathlib.Path,
    users: contributions.Users,
    plan: plan_lib.Plan,
    row_losses: clipped_sums.RowLosses,
    weights: Sequence[np.ndarray],
    read_examples: step_trainer.ReadExamples,
    *,
    clip_norm: float,
    optimizer: Callable[[], tf.keras.optimizers.Optimizer] = tf.keras.optimizers.Adam,
    learning_rate: Callable[[int], float] | None = None,
    normalised_clipping: bool = True,
    iterate_averaging: float | None = None,
    units_at_once: int = 16,
    evaluate: Evaluate | None = None,
    eval_every: int = 25,
    weights_source: str | None = None,
    data: str = "in memory",
    deterministic_noise_seed: int | None = None,
    progress: committed_run.Progress = committed_run.to_stderr,
) -> Results:
    """Trains any model with a user-level guarantee (Charles et al. 2024), or goes on with it.

    The folder gets `metrics.csv`, `privacy_statement.md` and `.json`, `weights.npz` and
    `curves.png`, renewed at each evaluation and at the end, and `private/`, which is secret.

    Args:
      output: Folder of the run; of one that was interrupted, to go on with it by the same
        call.
      users: Who has how many examples.
      plan: What is sampled and noised, as `plan.make_plan` made it for these users. If a
        private choice is in it, make it once and keep it: whoever makes it anew until it
        pleases pays each time.
      row_losses: The loss of each row by itself; no mean over the batch, no batch
        normalisation (`clipped_sums.refuse_mixed_rows` tries that on made-up rows).
      weights: Where the model begins, float32.
      read_examples: Reads examples.
      clip_norm: L2 norm that the gradient of a unit is clipped to.
      optimizer: Makes the optimizer.
      learning_rate: From a step, from 0, to its rate; the optimizer's own if None.
      normalised_clipping: Whether gradients are divided by the clip norm.
      iterate_averaging: Decay of the average of the steps' models that is evaluated and
        kept, instead of the last one; None for none.
      units_at_once: Units whose rows are in memory together.
      evaluate: Measures a model on held-out data; not measured if None. It is called once
        before the first step.
      eval_every: Steps between evaluations.
      weights_source: What the weights were trained on, for the statement; None if they are
        random.
      data: What the statement calls the data.
      deterministic_noise_seed: For debugging only: the run is not private then.
      progress: Receives the facts of the run, and warnings.

    Returns:
      Weights, metrics and statement.

    Raises:
      ValueError: If an argument cannot be used, is not what the run in `output` began with,
        or training diverges; every committed step is kept.
      OSError: If a file cannot be written; every committed step is kept.
    """
    output = pathlib.Path(output)
    validation.integer("eval_every", eval_every, minimum=1)
    weights = [_checked(index, weight) for index, weight in enumerate(weights)]
    private = run_privacy.SampledFinetuning.of(
        plan,
        clip_norm=validation.positive("clip_norm", clip_norm),
        deterministic_seed=deterministic_noise_seed,
    )
    made = optimizer()
    steps = private_steps.PrivateSteps(
        private_steps.round_of(private, identity.Identity()),
        clipped_sums.looped(row_losses),
        made,
        weights,
        units_at_once=validation.integer("units_at_once", units_at_once, minimum=1),
        normalised=normalised_clipping,
        iterate_averaging=iterate_averaging,
        learning_rate=learning_rate,
    )
    before = {} if evaluate is None else _measured(evaluate, weights)
    known = manifest.Manifest(
        config={
            "own_model": True,
            "data": data,
            "optimizer": json.loads(json.dumps(made.get_config(), default=str)),
            "normalised_clipping": normalised_clipping,
            "iterate_averaging": iterate_averaging,
            "units_at_once": units_at_once,
            "weights_source": weights_source,
            "metrics": sorted(before),
            "deterministic_noise_seed": deterministic_noise_seed,
        },
        derived=json.loads(json.dumps(private.derived())),
        facts={"num_parameters": sum(weight.size for weight in weights)},
        identities={
            "users": manifest.identity(users.ids),
            "numbers of the users' examples": manifest.identity(
                [str(number) for number in users.num_examples]
            ),
            "initial weights": manifest.identity([_digest(weight) for weight in weights]),
        },
    )
    is_new = not manifest.exists(output)
    if is_new:
        manifest.check_is_free(output)
    else:
        _check_is_the_same(manifest.read(output), known, output)
    state = steps.initial_state()
    with committed_run.open_rounds(
        output, private, known, state, max_epsilon=None, is_new=is_new
    ) as rounds:
        durable_files.remove_leftovers(output)
        seed = committed_run.sampling_seed(output, private, deterministic_noise_seed or 0)
        trainer = step_trainer.StepTrainer(
            users.ids, plan.contributions(users, seed).batch, steps, read_examples
        )
        for line in private.describe():
            progress(line)
        for name, value in before.items():
            progress(f"Before the first step: {name} {value:.4g}.")
        return _Run(output, known, private, trainer, rounds, evaluate, eval_every, progress).run(
            state
        )


class _Run:
    """The steps of one process of a run."""

    def __init__(self, output, known, private, trainer, rounds, evaluate, eval_every, progress):
        self._output: pathlib.Path = output
        self._known: manifest.Manifest = known
        self._private: run_privacy.SampledFinetuning = private
        self._trainer: step_trainer.StepTrainer = trainer
        self._rounds: committed_rounds.CommittedRounds = rounds
        self._evaluate: Evaluate | None = evaluate
        self._eval_every: int = eval_every
        self._progress: committed_run.Progress = progress

    def run(self, template: Any) -> Results:
        snapshot, row = self._rounds.restore()
        state = snapshot.in_structure_of(template)
        names = self._known.config["metrics"]
        self._log = metrics_log.MetricsLog(self._output, _columns(names), self._rounds.rounds_done)
        if row:  # The crash may have come between the commit and the row.
            self._log.append(row)
        num_steps = self._private.num_rounds
        with tqdm.tqdm(total=num_steps, initial=self._rounds.rounds_done, unit="step") as bar:
            for step in range(self._rounds.rounds_done, num_steps):
                state = self._step(state, step)
                bar.update()
        return self._report()

    def _step(self, state: Any, step: int) -> Any:
        members = self._trainer.members(step)
        self._rounds.begin(step, members)
        trained = self._trainer.train(state, step, members)
        if trained.num_not_finite:
            self._progress(
                f"Step {step + 1}: some {self._trainer.unit} had a gradient that is not finite "
                "(NaN, Inf), which counts as zero."
            )
        snapshot = checkpoint.Snapshot.of(trained.state)
        if not all(np.all(np.isfinite(w)) for w in released_model.last_weights(snapshot)):
            raise validation.UsageError(
                f"Training diverged: the weights after step {step + 1} are not finite. Lower the "
                "learning rate and start a new run."
            )
        row = {
            "round": step + 1,
            "loss": trained.loss,
            "epsilon": self._private.epsilon_after(step + 1),
        }
        is_last = step + 1 == self._private.num_rounds
        is_evaluated = is_last or (step + 1) % self._eval_every == 0
        if self._evaluate is not None and is_evaluated:
            found = _measured(self._evaluate, self._weights(snapshot))
            row |= {f"eval_{name}": found[name] for name in self._known.config["metrics"]}
        self._rounds.commit(step, trained.state, row)
        self._log.append(row)
        if is_evaluated and not is_last:  # `run` ends with a report.
            self._report()
        return trained.state

    def _weights(self, snapshot: checkpoint.Snapshot) -> list[np.ndarray]:
        return released_model.weights(self._known.config["iterate_averaging"], snapshot)

    def _report(self) -> Results:
        """Writes what the committed steps have to say."""
        snapshot, _ = self._rounds.restore()
        config = self._known.config
        source = config["weights_source"]
        told = self._private.statement(
            self._rounds.observed(),
            facts.Facts(
                parameters={
                    "data": config["data"],
                    "optimizer": config["optimizer"].get("name", "own"),
                    "normalised_clipping": config["normalised_clipping"],
                    "group_size_source": self._private.plan.group_size_source,
                    "clip_norm_source": "given",
                },
                not_covered=()
                if source is None
                else (f"What the initial weights were trained on: {source}.",),
            ),
            # Whoever ends a run early has seen how it went.
            charge_all_rounds=self._rounds.rounds_done < self._private.num_rounds,
        )
        weights = self._weights(snapshot)
        archive = io.BytesIO()
        np.savez(archive, *weights)
        report.write_statement(self._output, told)
        for name, content in (
            (_WEIGHTS, archive.getvalue()),
            (_CURVES, _drawn(self._log.rows, config["metrics"], told)),
        ):
            durable_files.write(self._output / name, content)
        return Results(weights, list(self._log.rows), told)


def _columns(names: Sequence[str]) -> tuple[metrics_log.Column, ...]:
    return (
        metrics_log.Column("round", "number of the step, from 1"),
        metrics_log.Column("loss", "mean loss of the step's users or examples", is_exact=True),
        metrics_log.Column("epsilon", "ε that all steps so far spent at the run's δ"),
        *(
            metrics_log.Column(f"eval_{name}", "measured by the caller's function")
            for name in names
        ),
    )


def _drawn(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str], told: statement.PrivacyStatement
) -> bytes:
    """Loss, metrics and ε against steps, as PNG."""
    from matplotlib import figure

    columns = ["loss", *(f"eval_{name}" for name in names), "epsilon"]
    picture = figure.Figure(figsize=(3.6 * len(columns), 3.4), layout="constrained")
    for axes, column in zip(picture.subplots(1, len(columns)), columns, strict=True):
        points = [(row["round"], row[column]) for row in rows if row[column] is not None]
        if points:
            axes.plot(*zip(*points, strict=True), "o-", markersize=2, lw=1)
        axes.set(xlabel="step", title=column)
    promise = f"ε = {display.round_up(told.epsilon, 3)}" if told.has_guarantee else "no guarantee"
    picture.suptitle(f"{told.mechanism}: {promise}; the loss is exact: do not publish it")
    image = io.BytesIO()
    picture.savefig(image, format="png", dpi=100)
    return image.getvalue()


def _check_is_the_same(
    begun: manifest.Manifest, asked: manifest.Manifest, output: pathlib.Path
) -> None:
    """Refuses to go on with a run that began with something else."""
    for what in ("config", "derived", "facts"):
        kept, given = dict(getattr(begun, what)), dict(getattr(asked, what))
        for name in sorted({*kept, *given}):
            if kept.get(name) != given.get(name):
                raise validation.UsageError(
                    f"The run in {output} began with {name} = {kept.get(name)!r}, not "
                    f"{given.get(name)!r}: go on with what it began with, or name another folder."
                )
    for name, digest in begun.identities.items():
        if digest != asked.identities[name]:
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


def _measured(evaluate: Evaluate, weights: list[np.ndarray]) -> dict[str, float]:
    return {name: float(value) for name, value in evaluate(weights).items()}
