"""What this package uses of Keras, the same with Keras 2 and Keras 3.

Keras is the one that TensorFlow brings as `tf.keras`: Keras 2 up to TensorFlow 2.15, Keras 3
since. Keras 3 has variables of its own class, which wrap those of TensorFlow, and its layers are no
`tf.Module`s.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

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
PolynomialDecay = tf.keras.optimizers.schedules.PolynomialDecay

_SEED_STATE = "seed_generator_state"


def tensorflow_variable(variable: Any) -> tf.Variable:
    """Returns the TensorFlow variable that keeps the value of a Keras variable.

    Args:
      variable: Variable of a layer or an optimizer.
    """
    return variable if isinstance(variable, tf.Variable) else variable.value


def name(variable: Any) -> str:
    """Returns the name of a variable with the layers it is in, such as "dense/kernel"."""
    return getattr(variable, "path", None) or variable.name.removesuffix(":0")


def refuse_untrained(model: Model) -> None:
    """Refuses a model that has weights which are not trained.

    Keras 3 gives all layers that can drop out a seed generator, whether or not it is used. Its
    state is left out: who uses it in training is found by computing twice.

    Args:
      model: Model that has its weights already.

    Raises:
      UsageError: If it has such weights, or layers with statistics; the message names one.
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

    Args:
      model: Model that has its weights already.
    """
    return sorted(
        part.name
        for part in parts(model)
        if hasattr(part, "adapt") or isinstance(part, BatchNormalization)
    )


def refuse_ignored(model: Model) -> None:
    """Refuses a model with regularisers or constraints, which training does not know.

    Args:
      model: Model that has its weights already.

    Raises:
      UsageError: If it has one.
    """
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


def parts(model: Model) -> Sequence[Any]:
    """Returns a model and all its layers, also those in layers."""
    if isinstance(model, tf.Module):
        return [model, *model.submodules]
    return list(model._flatten_layers())


@contextlib.contextmanager
def unrolled(model: Model, is_wanted: bool) -> Iterator[None]:
    """Unrolls the recurrent layers of a model while its graph is traced.

    Args:
      model: Model that has its weights already.
      is_wanted: Whether to do so; else they are left as they are.
    """
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


def is_tensorwise(optimizer: Optimizer) -> bool:
    """Returns whether a step on one weight is independent of the other weights' gradients.

    Unknown classes may do anything. Those of Keras are, unless they clip all gradients together.
    """
    is_known = type(optimizer) in (SGD, Adam, AdamW, Adafactor)
    return is_known and getattr(optimizer, "global_clipnorm", None) is None


def optimizer_options(optimizer: Optimizer) -> dict[str, Any]:
    """Returns the options of an optimizer, named after its class.

    Keras 3 counts the optimizers of a process in their names: a second "adam" is "adam_1".
    """
    return optimizer.get_config() | {"name": type(optimizer).__name__}
