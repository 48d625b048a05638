"""The parts of Keras that this package uses, with one interface for Keras 2 and Keras 3.

Keras is the one that TensorFlow brings as `tf.keras`: Keras 2 up to TensorFlow 2.15, Keras 3
since. Keras 3 has variables of its own class, which wrap those of TensorFlow, and its layers are no
`tf.Module`s.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tff_dpftrl import validation

if tf.keras.backend.backend() != "tensorflow":
    raise validation.UsageError(
        f"Keras computes with {tf.keras.backend.backend()!r}, but TensorFlow is needed: set the "
        "environment variable KERAS_BACKEND=tensorflow."
    )

Model = tf.keras.Model
BatchNormalization = tf.keras.layers.BatchNormalization
Optimizer = tf.keras.optimizers.Optimizer
SGD = tf.keras.optimizers.SGD
Adam = tf.keras.optimizers.Adam
AdamW = tf.keras.optimizers.AdamW
Adafactor = tf.keras.optimizers.Adafactor
Loss = tf.keras.losses.Loss
MeanMetric = tf.keras.metrics.MeanMetricWrapper
get_loss = tf.keras.losses.get
LossFunction: Any = tf.keras.losses.MeanSquaredError.__base__
"""The class of the losses that `compile` makes of functions, which Keras 2 keeps to itself."""
LossScaleOptimizer = tf.keras.mixed_precision.LossScaleOptimizer
PolynomialDecay = tf.keras.optimizers.schedules.PolynomialDecay

_SEED_STATE = "seed_generator_state"


def tensorflow_variable(variable: Any) -> tf.Variable:
    """Returns the TensorFlow variable that keeps the value of a Keras variable."""
    return variable if isinstance(variable, tf.Variable) else variable.value


def name(variable: Any) -> str:
    """Returns the name of a variable with the layers it is in, such as "dense/kernel"."""
    return getattr(variable, "path", None) or variable.name.removesuffix(":0")


def refuse_untrained(model: Model) -> None:
    """Refuses a model that has weights which are not trained.

    Keras 3 gives all layers that can drop out a seed generator, whether or not it is used. Its
    state is left out: who uses it in training is found by computing twice.
    """
    for layer in statistics_layers(model):
        raise validation.UsageError(
            f"model must have trainable weights only, and the layer {layer} keeps statistics or "
            "words of data, which get no noise: leave it out, and prepare the examples before."
        )
    names = map(name, model.non_trainable_variables)
    others = [one for one in names if not one.endswith(_SEED_STATE)]
    if others:
        raise validation.UsageError(
            f"model must have trainable weights only, but {others[0]} is not: leave out batch "
            "normalisation (layer normalisation has no such weights) and stateful layers, and let "
            "all layers be trainable."
        )


def statistics_layers(model: Model) -> list[str]:
    """Returns the names of the layers that keep statistics or words of data.

    They are found by what can learn these (`adapt`), however they were given: in weights, in a
    table, or as constants. Averages of batch normalisation are statistics, too.
    """
    return sorted(
        part.name
        for part in parts(model)
        if hasattr(part, "adapt") or isinstance(part, BatchNormalization)
    )


def refuse_ignored(model: Model) -> None:
    """Refuses a model with regularisers or constraints, which training does not know."""
    if model.losses:
        raise validation.UsageError(
            "model adds losses, such as those of a regulariser, which training does not "
            "add to its own: leave them out."
        )
    for variable in model.trainable_variables:
        if variable.constraint is not None:
            raise validation.UsageError(
                f"model has a constraint on {name(variable)}, which noise and the server's "
                "optimizer do not keep: leave it out, or let the layer normalise the weight."
            )


def with_control_flow(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function in whose graph Python loops over tensors work, as they do in `fit`.

    Keras 2 leaves the loops of layers and losses to AutoGraph, which it finds around its calls.
    """
    autograph = tf.__internal__.autograph
    return autograph.tf_convert(function, autograph.control_status_ctx())


def parts(model: Model) -> Sequence[Any]:
    """Returns a model and all its layers, also those in layers."""
    if isinstance(model, tf.Module):
        return [model, *model.submodules]
    return list(model._flatten_layers())


@contextlib.contextmanager
def unrolled(model: Model, is_wanted: bool) -> Iterator[None]:
    """Unrolls the recurrent layers of a model while its graph is traced."""
    kept = []
    layers = [x for x in parts(model) if isinstance(x, tf.keras.layers.RNN)] if is_wanted else []
    # Whether a kernel for GPUs may be taken, in Keras 2 and in Keras 3.
    options = {"unroll": True, "_could_use_gpu_kernel": False, "use_cudnn": False}
    for layer in layers:
        for name in filter(functools.partial(hasattr, layer), options):
            kept.append((layer, name, getattr(layer, name)))
            setattr(layer, name, options[name])
    try:
        yield
    finally:
        for layer, name, value in reversed(kept):
            setattr(layer, name, value)


def optimizer_state(optimizer: Optimizer) -> list[tf.Variable]:
    """Returns the variables in which an optimizer that is built keeps its state.

    Without the learning rate, which Keras 3 has in a variable too: it is an option.
    """
    variables = map(tensorflow_variable, optimizer.variables)
    rate = getattr(optimizer, "_learning_rate", None)
    return [one for one in variables if one is not getattr(rate, "value", None)]


_RATES = ("_learning_rate", "_current_learning_rate")


def refuse_hidden_state(optimizer: Optimizer) -> None:
    """Refuses an optimizer that is built and has variables that it does not list."""
    kinds = (tf.Variable, *map(type, optimizer.variables))
    known = set(map(id, optimizer.variables))
    for attribute, value in vars(optimizer).items():
        if isinstance(value, kinds) and id(value) not in known and attribute not in _RATES:
            raise validation.UsageError(
                f"optimizer {type(optimizer).__name__} keeps the variable {attribute} beside its "
                "`variables`, which a run that goes on would not find again: take another "
                "optimizer, or make the variable by a method of Keras' optimizers."
            )


def refuse_optimizer(optimizer: Any) -> None:
    """Refuses an optimizer that cannot take private steps, or that has a state already.

    The state has no noise: its moments of protected data would enter the first steps.
    """
    kind = type(optimizer).__name__
    if isinstance(optimizer, LossScaleOptimizer) or getattr(optimizer, "loss_scale_factor", None):
        raise validation.UsageError(
            "optimizer scales losses, so that gradients would be clipped and noised at another "
            "scale: take one that does not, and build the model without a mixed-precision policy."
        )
    if not isinstance(optimizer, Optimizer):
        raise validation.UsageError(
            f"optimizer is the legacy optimizer {kind}, which cannot take private steps: take "
            f"tf.keras.optimizers.{kind}(...)."
        )
    begins_with = getattr(optimizer, "initial_accumulator_value", 0.0)
    for variable in optimizer_state(optimizer):
        value = np.asarray(variable)
        if not np.all((value == 0) | (value == value.dtype.type(begins_with))):
            raise validation.UsageError(
                f"optimizer {kind} has a state already ({name(variable)}), such as that of an "
                "earlier `fit`, which no ε covers: take a new one (compile a Keras model anew)."
            )


def is_tensorwise(optimizer: Optimizer) -> bool:
    """Returns whether a step on one weight is independent of the other weights' gradients.

    Unknown classes may do anything. Those of Keras are, unless they clip all gradients together.
    """
    is_known = type(optimizer) in (SGD, Adam, AdamW, Adafactor)
    coupled = ("global_clipnorm", "gradient_accumulation_steps")
    return is_known and all(getattr(optimizer, option, None) is None for option in coupled)


_EXCLUDED = ("", "_names", "_pattern")  # Variables; their names in Keras 2, and in Keras 3.


def excludes_weights(optimizer: Optimizer) -> bool:
    """Returns whether an optimizer knows weights, by name or as objects, that do not decay."""
    kept = (getattr(optimizer, f"_exclude_from_weight_decay{x}", None) for x in _EXCLUDED)
    return bool(optimizer.weight_decay) and any(kept)


def trains_as_compiled(model: Model) -> bool:
    """Returns whether the trainable weights are still those that `fit` would train.

    Keras 2 trains those that `compile` found, Keras 3 those that its optimizer was built for.
    """
    if isinstance(model, tf.Module):
        compiled, now = model._compiled_trainable_state, model._get_trainable_state()
        return all(compiled.get(layer, each) == each for layer, each in now.items())
    known = getattr(model.optimizer, "_trainable_variables", None)
    return not known or list(map(id, known)) == list(map(id, model.trainable_variables))


def overridden(thing: Any, methods: Sequence[str]) -> list[str]:
    """Returns the methods of an object that override Keras' own."""
    keras = Model.__module__.partition(".")[0]
    found = ((name, getattr(thing, name, None)) for name in methods)
    return [
        name
        for name, method in found
        if method is not None and getattr(method, "__module__", "").partition(".")[0] != keras
    ]


def loss_options(model: Model) -> dict[str, Any]:
    """Returns the options of a compiled model that change how examples weigh in its loss."""
    compiled = getattr(model, "_compile_loss", None) or getattr(model, "compiled_loss", None)
    weights = tf.nest.flatten(getattr(compiled, "_user_loss_weights", None))
    ignored = getattr(getattr(model, "loss", None), "_fn_kwargs", {}).get("ignore_class")
    return {
        **({} if all(each in (None, 1) for each in weights) else {"loss_weights": weights}),
        **({} if ignored is None else {"ignore_class": ignored}),
    }


def unreduced(loss: Any, *, is_compiled: bool) -> Any:
    """Returns a loss as a function of targets and outputs that does not average over rows.

    `is_compiled`: whether a function is called as `fit` calls the loss that a model is compiled
    with.
    """
    found = get_loss(loss)
    if isinstance(found, Loss):
        given, found = found, object.__new__(type(found))  # Keras 3 copies what it can write down.
        vars(found).update(vars(given), reduction="none")
    elif is_compiled:
        found = LossFunction(found, reduction="none")
    return found


_TRIED_STEPS = (0, 1, 10, 100, 1000, 10_000)


def optimizer_options(optimizer: Optimizer) -> dict[str, Any]:
    """Returns the options of an optimizer, named after its class.

    Keras 3 counts the optimizers of a process in their names: a second "adam" is "adam_1". A
    schedule that Keras cannot write down is described by its class and by some of its rates.
    """
    rate: Any = getattr(optimizer, "_learning_rate", None)
    try:
        options = optimizer.get_config()
    except NotImplementedError:  # The schedule has no `get_config`.
        optimizer._learning_rate = 0.0
        try:
            options = optimizer.get_config()
        finally:
            optimizer._learning_rate = rate
        rates = [float(rate(tf.constant(step, tf.int64))) for step in _TRIED_STEPS]
        options["learning_rate"] = {"class_name": type(rate).__name__, "rates": rates}
    return options | {"name": type(optimizer).__name__}
