"""Calls of TensorFlow functions that another thread can interrupt.

This needs two private modules of TensorFlow, `eager.execute` and `eager.cancellation`: the public
context manager holds for all threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf
from tensorflow.python.eager import cancellation, context, execute


class InterruptibleCall:
    """Call of a function that `interrupt` can end."""

    def __init__(self):
        """Prepares a call, which `run` makes."""
        self._manager = cancellation.CancellationManager()
        self._is_interrupted = False  # The manager is cancelled by a call that fails, too.

    @property
    def is_interrupted(self) -> bool:
        """Whether `interrupt` was called."""
        return self._is_interrupted

    def interrupt(self) -> None:
        """Ends the call, now or when it begins: loops and waiting operations stop."""
        self._is_interrupted = True
        self._manager.start_cancel()

    def run(
        self, function: tf.types.experimental.ConcreteFunction, tensors: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Calls a function and waits for it."""
        return execute.execute_with_cancellation(
            function.name,
            num_outputs=len(function.outputs),
            inputs=list(tensors),
            attrs=("config_proto", context.context().function_call_options.config_proto_serialized),
            ctx=context.context(),
            cancellation_manager=self._manager,
        )
