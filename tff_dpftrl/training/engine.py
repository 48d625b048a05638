"""Engines that run the rounds of a run: TensorFlow functions in this process, or TFF's executor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import tensorflow_federated as tff

from tff_dpftrl import execution
from tff_dpftrl.training import placement as placement_lib
from tff_dpftrl.training import task

Process: TypeAlias = tff.learning.templates.LearningProcess | execution.CompiledProcess
ClientValue: TypeAlias = Callable[[str, int], Any]
"""Function from a user and a round to the client's data, as the process takes it."""


@contextlib.contextmanager
def open_engine(
    name: str,
    build: Callable[[], tff.learning.templates.LearningProcess],
    language_task: task.LanguageTask,
    placement: placement_lib.Placement,
    *,
    secure_sums: bool,
) -> Iterator[tuple[Process, ClientValue]]:
    """Builds the process of a run in the engine that runs it.

    Args:
      name: Name of the engine: "compiled" or "tff".
      build: Function that builds the process.
      language_task: Model and text of the run.
      placement: Placement of the clients, checked for the engine.
      secure_sums: Whether the process sums with secure aggregation.

    Yields:
      The process, with the methods of a learning process, and the function that makes its
      clients' values. Everything that was started for it is ended afterwards.
    """
    with _context(name, secure_sums), _clients(placement) as clients:
        if name == "tff":
            yield build(), language_task.client_dataset
            return
        compiled = execution.compile_process(
            build(),
            dataset_fn=language_task.batches,
            tensor_spec=language_task.rows_spec,
            clients=clients,
            memory_copies=placement.memory_copies,
        )
        try:
            yield compiled, language_task.client_rows
        finally:
            compiled.close()


def _clients(
    placement: placement_lib.Placement,
) -> contextlib.AbstractContextManager[execution.ClientRunner | None]:
    """Returns the runner of clients elsewhere, which starts while the process is built."""
    if not placement.uses_ray:
        return contextlib.nullcontext()
    return execution.RayClients(placement.ray_workers, address=placement.ray_address)


def _context(name: str, secure_sums: bool) -> contextlib.AbstractContextManager[Any]:
    if name == "compiled":
        return execution.compiled_only()
    return execution.secure_sum_simulation() if secure_sums else execution.local()
