"""Training of a compiled Keras model with DP-FTRL, in place of its `fit`.

It is a run of its own and no `train_step`, because a promise needs what Keras' `fit` leaves open.
`fit` draws another order in every epoch, so that an example's steps may lie side by side; it loses
its place when it is interrupted, and steps that are taken again would not be counted; its callbacks
see models whose step is not on record yet. And a Keras optimizer sees a mean gradient, which is too
late to clip. Here the order keeps a participation schema, and every step is committed first.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tff_dpftrl import validation
from tff_dpftrl.data import user_ids as user_ids_lib
from tff_dpftrl.finetuning import (
    clipped_sums,
    custom_run,
    example_sampling,
    losses_trial,
    passes,
    private_steps,
)
from tff_dpftrl.models import keras_versions
from tff_dpftrl.runs import progress as progress_lib

_ROWS_AT_ONCE = 256


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FitPrivacy:
    """Promise of a `private_fit`: how much noise, and for whom.

    Attributes:
      clip_norm: L2 norm that the gradient of a unit is clipped to.
      delta: δ of the (ε, δ) statement, far below one over the number of units.
      target_epsilon: The largest ε that the run may spend; None if `noise_multiplier` is given.
      noise_multiplier: Standard deviation of the noise per unit of the clip norm; None if
        `target_epsilon` is given.
      mechanism: A key of `mechanisms.table.MECHANISMS`, such as "blt", "tree" or "identity".
      user_ids: The user of each example, so that the guarantee is for all examples of a user:
        texts or integers, none of them missing. If None, the guarantee is for single examples.
      examples_per_user: Largest number of examples of one user in a step, drawn at random, whose
        mean gradient is clipped. It must be given with `user_ids`, and is not to be read off them.
      max_epsilon: ε above which no step begins; None for no such budget.
      in_one_pass: Whether gradients are clipped in one pass, where that is known how
        (`custom_run.Steps`).
      deterministic_noise_seed: Seed of the noise, for debugging only: the run is not private then.
    """

    clip_norm: float
    delta: float
    target_epsilon: float | None = None
    noise_multiplier: float | None = None
    mechanism: str = "blt"
    user_ids: Sequence[Any] | np.ndarray | None = None
    examples_per_user: int | None = None
    max_epsilon: float | None = None
    in_one_pass: bool = True
    deterministic_noise_seed: int | None = None


def private_fit(
    model: keras_versions.Model,
    x: Any,
    y: Any,
    output: str | pathlib.Path,
    *,
    privacy: FitPrivacy,
    batch_size: int,
    epochs: int,
    validation_data: Sequence[Any] | None = None,
    trained_on: str | os.PathLike[str] | None = None,
    progress: progress_lib.Progress = progress_lib.to_stderr,
) -> custom_run.Results:
    """Trains a compiled Keras model privately, or goes on with an interrupted run by the same call.

    Gradients are clipped, of each example or of each user, and the noise is correlated over the
    steps (Kairouz et al. 2021). Optimizer, loss and metrics are those that the model was compiled
    with: without noise and clipping a step is that of `fit`, and what private steps cannot do as
    `fit` does is refused. The optimizer must be a new one, without a state of an earlier `fit`, and
    is as new afterwards. The folder is that of `custom_run.finetune`: metrics, privacy statement,
    weights, and secrets in `private/`.

    The last part of an epoch that is smaller than a batch is made up from the next epoch. To go on
    with a run, `x`, `y` and `privacy.user_ids` must be the same, in the same order. The model must
    have the same initial weights, trained or not: call `tf.keras.utils.set_random_seed` before it
    is built. A digest of the data is kept in `private/`, and anything else is refused.

    Args:
      model: Compiled model with one output. The weights of layers with `trainable = False` stay
        as they are. After the run it has the weights of the last step; after an error, those from
        before.
      x: Inputs: an array with the examples as its first axis, or a structure of such arrays.
      y: Targets: an array with the examples as its first axis.
      output: Folder of the run; of one that was interrupted, to go on with it.
      privacy: What is promised, and to whom.
      batch_size: Number of units in every step. A unit is an example, or a user.
      epochs: Number of passes over all units, and largest number of steps with the same unit.
      validation_data: Held-out inputs and targets, and weights of the examples if a third is
        given, measured after each epoch and not protected; None for none.
      trained_on: What the initial weights were trained on, as of `custom_run.Model`: "nothing" if
        they are random. If None, the statement says that it is not known. For a model with layers
        that keep statistics or words of data (`Normalization`, `TextVectorization`), it must say
        of which data; the statement quotes it.
      progress: Callback for progress lines and warnings; prints to standard error by default.

    Returns:
      Weights, metrics and statement.

    Raises:
      UsageError: If an argument cannot be used, the model cannot be trained privately (batch
        normalisation, dropout, regularisers, several outputs) or as `fit` does it (a `train_step`
        of its own, loss weights, an average of the weights), it keeps statistics of which
        `trained_on` says nothing, its optimizer has a state already, or the run in `output` began
        with something else.
      OSError: If a file cannot be written; every committed step is kept.
    """
    inputs, targets = _arrays("x", x), _arrays("y", y)
    if not isinstance(targets, np.ndarray):
        raise validation.UsageError("y must be a single array: models have one output here.")
    users, rows = _units(
        _num_examples(inputs, targets), privacy.user_ids, privacy.examples_per_user
    )
    batch_size = validation.integer("batch_size", batch_size, minimum=1)
    epochs = validation.integer("epochs", epochs, minimum=1)
    if batch_size > len(users):
        what = "examples" if privacy.user_ids is None else "users"
        raise validation.UsageError(
            f"batch_size={batch_size} exceeds the {len(users)} {what}: lower it."
        )
    if validation_data is not None and (
        not isinstance(validation_data, (tuple, list)) or len(validation_data) not in (2, 3)
    ):
        raise validation.UsageError(
            "validation_data must be (inputs, targets) or (inputs, targets, weights of the "
            f"examples), got {type(validation_data).__name__}: give arrays."
        )

    def rows_at(index: Any) -> clipped_sums.Rows:
        return tf.nest.map_structure(lambda array: _as_in_fit(array[index]), (inputs, targets))

    few = rows_at(np.linspace(0, len(targets) - 1, _TRIED_ROWS, dtype=int))
    # The call makes the weights. A layer might keep its inputs.
    model(tf.nest.map_structure(lambda array: tf.zeros_like(array[:1]), few[0]), training=False)
    _refuse_ignored(model)
    made = custom_run.Model.of_keras(model, trained_on=trained_on)
    _refuse_another_objective(model, made, few)
    variables = model.trainable_variables
    optimizer: Any = model.optimizer
    if not getattr(optimizer, "built", False):
        optimizer.build(variables)
    state = keras_versions.optimizer_state(optimizer)
    state_before = [private_steps.kept(variable) for variable in state]

    def read(wanted: Sequence[tuple[str, int]]) -> clipped_sums.Rows:
        return rows_at([rows[user][example] for user, example in wanted])

    def assign(weights: Sequence[np.ndarray]) -> None:
        for variable, weight in zip(variables, weights, strict=True):
            variable.assign(weight)

    def evaluate(weights: list[np.ndarray]) -> Mapping[str, float]:
        assign(weights)
        held_out = dict(zip(("x", "y", "sample_weight"), validation_data or (), strict=False))
        measured: Any = model.evaluate(**held_out, verbose=0, return_dict=True)
        return measured

    group_size = 1 if privacy.examples_per_user is None else privacy.examples_per_user
    try:
        results = custom_run.finetune(
            output,
            dataclasses.replace(made, variables=variables),
            custom_run.Examples(
                users,
                read,
                # Ids, numbers of examples and rows together tell which example belongs to whom.
                digest=_digest((inputs, targets, np.concatenate(list(rows.values())))),
            ),
            passes.Passes(
                users_per_step=batch_size,
                num_steps=epochs * len(users) // batch_size,
                delta=privacy.delta,
                group_size=group_size,
                mechanism=privacy.mechanism,
                noise_multiplier=privacy.noise_multiplier,
                target_epsilon=privacy.target_epsilon,
                unit_of_privacy="example" if privacy.user_ids is None else "user",
            ),
            custom_run.Steps(
                privacy.clip_norm,
                optimizer=lambda: optimizer,
                normalised_clipping=False,  # With a large clip norm and no noise it is `fit`.
                in_one_pass=privacy.in_one_pass,
                units_at_once=max(1, _ROWS_AT_ONCE // max(1, group_size)),
            ),
            custom_run.Evaluation(
                None if validation_data is None else evaluate, every=len(users) // batch_size
            ),
            max_epsilon=privacy.max_epsilon,
            deterministic_noise_seed=privacy.deterministic_noise_seed,
            progress=progress,
        )
    finally:
        for variable, value in zip(state, state_before, strict=True):
            variable.assign(value)
    assign(results.weights)
    return results


def _arrays(name: str, values: Any) -> Any:
    if isinstance(values, tf.data.Dataset) or callable(values) or hasattr(values, "__next__"):
        raise validation.UsageError(
            f"{name} must be arrays, got {type(values).__name__}: the order of the examples is "
            "part of the guarantee, so that it cannot be left to a data set."
        )
    return tf.nest.map_structure(np.asarray, values)


def _num_examples(inputs: Any, targets: np.ndarray) -> int:
    lengths = {len(array) if array.ndim else 0 for array in (*tf.nest.flatten(inputs), targets)}
    if len(lengths) != 1 or lengths == {0}:
        raise validation.UsageError(
            f"x and y must have the same number of examples, at least 1; got {sorted(lengths)}."
        )
    return lengths.pop()


def _digest(data: Any) -> str:
    """Returns a digest (hex) of a structure of arrays: names, dtypes, shapes and values."""

    def plain(array: np.ndarray) -> np.ndarray:  # Objects, such as texts, are addresses in memory.
        return array.astype(str) if array.dtype.hasobject else array

    data = tf.nest.map_structure(plain, data)
    described = tf.nest.map_structure(lambda array: [array.dtype.str, array.shape], data)
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode("utf-8"))
    for array in tf.nest.flatten(data):
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _units(
    num_examples: int, user_ids: Any, examples_per_user: int | None
) -> tuple[example_sampling.Users, Mapping[str, np.ndarray]]:
    """Returns the users, each example being one if there are no ids, and their rows by user."""
    if user_ids is None:
        if examples_per_user is not None:
            raise validation.UsageError("examples_per_user is for user_ids: leave it out.")
        rows = {str(index): np.array([index]) for index in range(num_examples)}
    else:
        if examples_per_user is None:
            raise validation.UsageError(
                "user_ids need examples_per_user, the largest number of examples of one user in a "
                "step: give it, without a look at these users."
            )
        # NumPy would make an array of texts of a list with numbers and None.
        cells = user_ids if isinstance(user_ids, (list, tuple)) else np.asarray(user_ids)
        shape = [len(cells)] if isinstance(cells, (list, tuple)) else list(cells.shape)
        if shape != [num_examples]:
            raise validation.UsageError(
                f"user_ids must be one id for each of {num_examples} examples, got shape {shape}."
            )
        names, user_of_row = np.unique(_names(cells), return_inverse=True)
        order = np.argsort(user_of_row, kind="stable")
        ends = np.cumsum(np.bincount(user_of_row))[:-1]
        rows = dict(zip(names.tolist(), np.split(order, ends), strict=True))
    sizes = np.array([len(of_user) for of_user in rows.values()])
    return example_sampling.Users(tuple(rows), sizes), rows


def _names(cells: Iterable[Any]) -> list[str]:
    """Returns the ids of users as text."""
    names = []
    for index, cell in enumerate(cells):
        try:
            names.append(user_ids_lib.at("user_ids of example ", index, cell))
        except user_ids_lib.NoId as error:
            raise validation.UsageError(
                f"user_ids must have an id for each example, but example {index} is {error}, "
                f"{repr(cell)[:60]}: give one, or leave the example out of x, y and user_ids."
            ) from None
    return names


def _as_in_fit(array: np.ndarray) -> np.ndarray:
    """Returns numbers as `fit` reads them: those of floating point as float32."""
    return array.astype(np.float32) if array.dtype.kind == "f" else array


_OF_FIT = ("fit", "train_step", "make_train_function", "compute_loss")
_OF_OPTIMIZER = ("minimize", "compute_gradients", "scale_loss", "finalize_variable_values")


def _refuse_ignored(model: keras_versions.Model) -> None:
    """Refuses what `fit` would do and private steps do not."""
    optimizer: Any = getattr(model, "optimizer", None)
    own = keras_versions.overridden(model, _OF_FIT)
    weighted = keras_versions.loss_options(model)
    own_steps = keras_versions.overridden(optimizer, _OF_OPTIMIZER)
    reduction = getattr(getattr(model, "loss", None), "reduction", None)
    for is_so, what, remedy in (
        (
            own,
            f"its own {', '.join(own)}, which private steps do not call",
            "leave it out, and compile the model with a loss",
        ),
        (
            model.run_eagerly,
            "run_eagerly=True, but private steps are graphs, whose Python code runs once",
            "compile it without",
        ),
        (not model.trainable_variables, "no trainable weights", "set trainable = True for some"),
        (
            reduction in ("sum", "none"),
            f"a loss with reduction={reduction!r}, whose step grows with the batch",
            "leave the reduction out: the loss of a batch is its mean",
        ),
        (
            optimizer is not None and not keras_versions.trains_as_compiled(model),
            "layers whose attribute trainable was set after compile, which `fit` does not heed",
            "compile it again",
        ),
        (
            weighted,
            f"a loss with {', '.join(f'{key}={value!r}' for key, value in weighted.items())}, "
            "which divides by another number than that of the examples",
            f"leave out {' and '.join(weighted)}",
        ),
        (
            getattr(optimizer, "use_ema", False),
            "an optimizer with use_ema=True, whose average would be left out of the folder",
            "leave it out, or use finetuning.custom_run with iterate_averaging",
        ),
        (
            optimizer is not None and own_steps,
            f"an optimizer with its own {', '.join(own_steps)}, which private steps do not call",
            "override update_step or apply_gradients, which get the gradient with its noise",
        ),
    ):
        if is_so:
            raise validation.UsageError(f"model has {what}: {remedy}.")
    if optimizer is not None:
        keras_versions.refuse_optimizer(optimizer)


_TRIED_ROWS = 4
_SAME = 1e-2  # Relative; on a GPU, products of matrices are rounded to three digits.
_NOTHING = 1e-6  # A weight's gradient in a saturated model, where all digits are rounding.


def _refuse_another_objective(
    model: keras_versions.Model, made: custom_run.Model, rows: clipped_sums.Rows
) -> None:
    """Refuses a model whose gradient in `fit` is not the mean of those of single rows."""
    rows = inputs, targets = tf.nest.map_structure(tf.convert_to_tensor, rows)
    weights = [tf.convert_to_tensor(weight) for weight in made.weights]
    # This comes first: the caller must not see what the model would keep of these rows.
    losses_trial.refuse_state(made.row_losses, weights, rows)
    total, norms = [tf.zeros_like(weight) for weight in weights], []
    for row in range(len(targets)):
        one = tf.nest.map_structure(lambda values, row=row: values[row : row + 1], rows)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(weights)
            own_loss = made.row_losses(weights, one)
        gradient = _gradient(tape, own_loss, weights)
        norms.append(tf.linalg.global_norm(gradient))
        total = [old + new for old, new in zip(total, gradient, strict=True)]
    with tf.GradientTape() as tape:
        outputs = model(inputs, training=True)
        keras_versions.refuse_ignored(model)  # Some losses are added in training only.
        try:
            loss = model.compute_loss(x=inputs, y=targets, y_pred=outputs)
        finally:
            model.reset_metrics()  # Keras 2 adds the exact loss to one.
    variables = map(keras_versions.tensorflow_variable, model.trainable_variables)
    in_fit = _gradient(tape, loss, list(variables))
    gap = [mine - each / len(targets) for mine, each in zip(in_fit, total, strict=True)]
    size = sum(weight.size for weight in made.weights)
    if tf.linalg.global_norm(gap) > _SAME * np.mean(norms) + _NOTHING * size**0.5:
        losses_trial.refuse(made.row_losses, made.weights, rows)  # It knows some of the reasons.
        raise validation.UsageError(
            "model has another gradient in `fit` than the mean of the examples' own, by which "
            "private steps go: let loss and layers treat each example by itself, also in the "
            "gradients that they define."
        )


def _gradient(tape: tf.GradientTape, loss: Any, weights: list[Any]) -> list[tf.Tensor]:
    zero = tf.UnconnectedGradients.ZERO
    gradient = tape.gradient(loss, weights, unconnected_gradients=zero)
    return [tf.convert_to_tensor(each) for each in gradient]
