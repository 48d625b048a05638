"""A client part of plain TensorFlow, whose sums depend on their order."""

import numpy as np
import tensorflow as tf

from tff_dpftrl.execution import client_part, graph_function

NEGATIVE = "the first number is negative"
_VECTOR = tf.TensorSpec([3], tf.float32)


def build(scale: float = 1.0) -> client_part.ClientPart:
    """Clients multiply what they have with what is broadcast; the first number is positive."""
    trace = graph_function.GraphFunction.trace

    def work(value, factor):
        with tf.control_dependencies([tf.debugging.assert_non_negative(value[0], NEGATIVE)]):
            return [value * factor * scale]

    return client_part.ClientPart(
        data=None,
        work=trace(work, [_VECTOR, _VECTOR]),
        zero=trace(lambda: [tf.zeros([3])], []),
        accumulate=trace(lambda total, result: [total + result], [_VECTOR, _VECTOR]),
        merge=trace(lambda one, other: [one + other], [_VECTOR, _VECTOR]),
        num_broadcast=1,
        secure_sums=(),
    )


def values(num_clients: int) -> list[list[tf.Tensor]]:
    """Numbers of many magnitudes, so that another order of their sum is another sum."""
    rng = np.random.default_rng(5)
    return [
        [tf.constant(np.exp(rng.normal(scale=6.0, size=3)), tf.float32)] for _ in range(num_clients)
    ]


def broadcast() -> list[tf.Tensor]:
    """What all clients get."""
    return [tf.constant([0.1, 1.0, 10.0])]
