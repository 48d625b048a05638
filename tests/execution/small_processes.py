"""Processes of a few operations, which compile in a fraction of a second."""

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff


@tff.tensorflow.computation
def _zero():
    return tf.constant(0.0)


def build(client_fn, client_type=np.int32, aggregate=tff.federated_sum):
    """A process with a number for its state, which stays what it is.

    Args:
      client_fn: A client's work in TensorFlow, from a value of `client_type`.
      client_type: Type of a client's value.
      aggregate: From the clients' results to the process's output.

    Returns:
      The process.
    """
    client = tff.tensorflow.computation(client_fn, client_type)

    def round_fn(state, values):
        return state, aggregate(tff.federated_map(client, values))

    return build_from(round_fn, client_type)


def build_from(round_fn, client_type=np.int32, initial=_zero):
    """A process with the given round.

    Args:
      round_fn: From state and clients' values to both results of `next`.
      client_type: Type of a client's value.
      initial: Computation of the first state.

    Returns:
      The process.
    """

    @tff.federated_computation()
    def initialize():
        return tff.federated_eval(initial, tff.SERVER)

    state_type = tff.FederatedType(initial.type_signature.result, tff.SERVER)
    next_fn = tff.federated_computation(
        round_fn, state_type, tff.FederatedType(client_type, tff.CLIENTS)
    )
    return tff.templates.IterativeProcess(initialize, next_fn)
