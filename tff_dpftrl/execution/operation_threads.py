"""Number of TensorFlow's threads for one operation, beside clients in threads."""

from __future__ import annotations

import os

import tensorflow as tf

from tff_dpftrl import validation

_ENVIRONMENT = "TF_NUM_INTRAOP_THREADS"


def limit_operation_threads(clients_per_round: int) -> None:
    """Limits TensorFlow's threads for one operation, so that clients in threads use the cores.

    By default TensorFlow cuts every operation into a piece for each core. Where as many
    clients as cores run at the same time, the pieces only wait for each other: the
    quickstart's compiled round took 1.5 times as long on two cores. It is a setting of the
    whole program, which TensorFlow reads once: call this before its first operation.
    TensorFlow's environment variable TF_NUM_INTRAOP_THREADS, if set, takes precedence.

    Args:
      clients_per_round: Number of clients in a round.

    Raises:
      ValueError: If `clients_per_round` is not positive.
      RuntimeError: If TensorFlow has already started with another number of threads.
    """
    validation.integer("clients_per_round", clients_per_round, minimum=1)
    if os.environ.get(_ENVIRONMENT):
        return
    num_threads = max(1, len(os.sched_getaffinity(0)) // clients_per_round)
    if tf.config.threading.get_intra_op_parallelism_threads() == num_threads:
        return
    try:
        tf.config.threading.set_intra_op_parallelism_threads(num_threads)
    except RuntimeError as error:
        raise RuntimeError(
            "TensorFlow has started, and cannot change its threads any more: call "
            "limit_operation_threads at the start of the program."
        ) from error
