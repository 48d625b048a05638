"""A `tf.keras.Model` as a language model of this package."""

from __future__ import annotations

import collections
import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tff_dpftrl import validation
from tff_dpftrl.models import custom_model, keras_versions

_UNROLLED = 128

_Variable = type(tf.Variable(0.0, trainable=False))


def read(
    model: keras_versions.Model, *, vocabulary_size: int, sequence_length: int
) -> custom_model.CustomModel:
    """Reads a Keras model of any kind: functional, sequential, subclassed, with shared layers.

    It maps ids, int32, [batch, T], to scores (logits), float32, [batch, T, V]; V counts special
    tokens. Its optimizer, loss and metrics are not used. The model is left as it is; one that has
    no weights yet gets them. Refused are weights that are not trained (batch normalisation,
    stateful or frozen layers), dropout, regularisers and constraints.
    """
    try:
        model(tf.zeros([1, sequence_length], tf.int32), training=False)
    except Exception as error:
        raise validation.UsageError(
            f"model cannot be applied to word ids, int32 of shape [batch, {sequence_length}]: "
            f"{error}"
        ) from error
    keras_versions.refuse_untrained(model)
    return custom_model.build(
        as_function(model),
        _named(model.trainable_variables),
        vocabulary_size=vocabulary_size,
        sequence_length=sequence_length,
    )


def as_function(
    model: keras_versions.Model, *, unrolled: bool = False
) -> Callable[[Sequence[tf.Tensor], Any, bool], Any]:
    """Returns a Keras model as a function of trainable weights, inputs, and whether it is training.

    It is for graphs only: in eager mode, TensorFlow reads the variables behind its back. Weights
    that are not trained are what they are at the time of the call. `unrolled`: whether recurrent
    layers of at most `_UNROLLED` steps are unrolled, so that the graph has all that they read.
    """
    _check(model)
    variables = [keras_versions.tensorflow_variable(v) for v in model.trainable_variables]
    call = keras_versions.with_control_flow(model)

    def outputs(weights, inputs, training):
        # Keras 3 opens a scope of the model's name; one that begins with "_" must be in another.
        steps = max(
            (x.shape[1] or 0 for x in tf.nest.flatten(inputs) if len(x.shape) > 1), default=0
        )
        loops = keras_versions.unrolled(model, unrolled and 0 < steps <= _UNROLLED)
        with tf.name_scope("model"), replaced(variables, weights), loops:
            return call(inputs, training=training)

    return outputs


def _check(model: keras_versions.Model) -> None:
    keras_versions.refuse_ignored(model)
    for part in keras_versions.parts(model):
        dtype = getattr(part, "compute_dtype", None)
        if dtype != getattr(part, "variable_dtype", dtype):
            raise validation.UsageError(
                f"model has the layer {part.name}, which computes in {dtype}: build it without a "
                "mixed-precision policy."
            )
    for owner in {owner for part in keras_versions.parts(model) for owner in type(part).__mro__}:
        if owner.__module__.partition(".")[0] in ("keras", "tensorflow"):
            continue
        for name, value in vars(owner).items():
            if isinstance(value, tf.types.experimental.GenericFunction):
                raise validation.UsageError(
                    f"model has the method {owner.__name__}.{name}, which is a tf.function and "
                    "keeps the weights that it was traced with: leave out @tf.function, which "
                    "training adds itself."
                )
    for variable in model.trainable_variables:
        kept, name = keras_versions.tensorflow_variable(variable), keras_versions.name(variable)
        if type(kept) is not _Variable:
            raise validation.UsageError(
                f"model has the weight {name} of type {type(kept).__name__}: build it "
                "without a mixed-precision policy and outside of a distribution strategy."
            )


def _named(variables: Sequence[Any]) -> Mapping[str, np.ndarray]:
    """Returns the values by names that are the same if the process builds the model again.

    Keras numbers layers of a kind through all models of a process: a second "dense" is
    "dense_1".
    """
    named, times = collections.OrderedDict(), collections.Counter()
    for variable in variables:
        name = re.sub(r"_\d+(?=/|$)", "", keras_versions.name(variable))
        name = name if "/" in name else f"weight/{name}"  # "model" and "file" have a meaning.
        times[name] += 1
        named[name if times[name] == 1 else f"{name}#{times[name]}"] = variable.numpy()
    return named


@contextlib.contextmanager
def replaced(
    variables: Sequence[tf.Variable], tensors: Sequence[Any], *, may_change: bool = False
) -> Iterator[list[Any]]:
    """Replaces the values of variables by tensors while a graph is traced, and yields the values.

    Keras 2 has no call with weights as arguments. Cloning a model under a variable creator, as
    TFF's `functional_model_from_keras` does, gives shared layers separate weights and needs
    `get_config` of every layer. Here reading a variable returns a tensor. An assignment replaces
    the value, or raises an error unless `may_change`.
    """
    values = list(tensors)
    place_of = {id(variable): place for place, variable in enumerate(variables)}

    class Replaced(_Variable):
        @property
        def handle(self):
            raise AttributeError(f"{self.name} stands for a tensor and cannot be changed")

        def value(self):
            found = values[place_of[id(self)]]
            return found() if callable(found) else found

        read_value = value

        def _read_variable_op(self, no_copy=False):
            return self.value()

        def _dense_var_to_tensor(self, dtype=None, name=None, as_ref=False):
            return self.value()

        def sparse_read(self, indices, name=None):
            return tf.gather(self.value(), indices, name=name)

        def gather_nd(self, indices, name=None):
            return tf.gather_nd(self.value(), indices, name=name)

    class Changing(Replaced):
        def assign(self, value, use_locking=None, name=None, read_value=True):
            value = tf.identity(tf.convert_to_tensor(value, self.dtype), name)
            value.set_shape(self.shape)
            values[place_of[id(self)]] = value
            return value

        def assign_add(self, delta, use_locking=None, name=None, read_value=True):
            return self.assign(self.value() + delta, name=name)

        def assign_sub(self, delta, use_locking=None, name=None, read_value=True):
            return self.assign(self.value() - delta, name=name)

    for variable in variables:
        variable.__class__ = Changing if may_change else Replaced
    try:
        yield values
    finally:
        for variable in variables:
            variable.__class__ = _Variable
