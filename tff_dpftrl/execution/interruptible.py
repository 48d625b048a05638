"""Calls of TensorFlow functions that another thread can end.

This needs two names of TensorFlow that are not public, `eager.execute` and
`eager.cancellation`: the public way, with a context manager, is one for all threads, so that
a call could be ended in the place of another.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf
from tensorflow.python.eager import cancellation, context, execute


class InterruptibleCall:
    """One call of a function."""

    def __init__(self):
        """Begins nothing."""
        self._manager = cancellation.CancellationManager()
        self._is_interrupted = False  # The manager says so of a call that fails, too.

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
        """Calls a function and waits for it.

        Args:
          function: A function of tensors to a list of tensors, which captures nothing.
          tensors: Its arguments.

        Returns:
          Its results.

        Raises:
          tf.errors.OpError: If it fails, or was interrupted before it ended.
        """
        return execute.execute_with_cancellation(
            function.name,
            num_outputs=len(function.outputs),
            inputs=list(tensors),
            attrs=("config_proto", context.context().function_call_options.config_proto_serialized),
            ctx=context.context(),
            cancellation_manager=self._manager,
        )
