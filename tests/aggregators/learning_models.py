"""A linear model and datasets, for tests that need a learning process but no learning."""

import collections

import tensorflow as tf
import tensorflow_federated as tff

_SPEC = collections.OrderedDict(x=tf.TensorSpec([None, 2]), y=tf.TensorSpec([None, 1]))


def linear_model():
    """A `VariableModel` of 3 parameters."""
    return tff.learning.models.from_keras_model(
        tf.keras.Sequential([tf.keras.layers.InputLayer([2]), tf.keras.layers.Dense(1)]),
        loss=tf.keras.losses.MeanSquaredError(),
        input_spec=_SPEC,
    )


def reconstruction_model():
    """Two layers; the second never leaves the client."""
    model = tf.keras.Sequential(
        [tf.keras.layers.InputLayer([2]), tf.keras.layers.Dense(2), tf.keras.layers.Dense(1)]
    )
    return tff.learning.models.ReconstructionModel.from_keras_model_and_layers(
        keras_model=model,
        global_layers=[model.layers[0]],
        local_layers=[model.layers[1]],
        input_spec=_SPEC,
    )
