"""What runs the rounds of a run: its process, compiled or in TFF's executor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import tensorflow_federated as tff

from tff_dpftrl import execution
from tff_dpftrl.runs import privacy
from tff_dpftrl.training import config as config_lib
from tff_dpftrl.training import placement as placement_lib
from tff_dpftrl.training import process, task

Process: TypeAlias = tff.learning.templates.LearningProcess | execution.CompiledProcess
ClientValue: TypeAlias = Callable[[str, int], Any]
"""From a user and a round to what the process takes as that client's data."""


@contextlib.contextmanager
def open_engine(
    config: config_lib.TrainingConfig,
    plan: privacy.PrivacyPlan,
    language_task: task.LanguageTask,
    placement: placement_lib.Placement,
) -> Iterator[tuple[Process, ClientValue]]:
    """Builds the process of a run where it will run.

    Args:
      config: Options of the run; `engine` says what runs it.
      plan: The run's privacy.
      language_task: Model and data.
      placement: Where clients work, checked for the engine.

    Yields:
      The process, with the methods of a learning process, and what makes its clients'
      values. What was started for it is ended afterwards.
    """
    with _context(config), _clients(placement) as clients:
        built = process.build_process(plan, config.learning, language_task.functional_model())
        if config.engine == "tff":
            yield built, language_task.client_dataset
            return
        compiled = execution.compile_process(
            built,
            dataset_fn=language_task.batches,
            tensor_spec=language_task.rows_spec,
            clients=clients,
        )
        try:
            yield compiled, language_task.client_rows
        finally:
            compiled.close()


def _clients(
    placement: placement_lib.Placement,
) -> contextlib.AbstractContextManager[execution.ClientRunner | None]:
    """What runs clients elsewhere; it starts while the process is built."""
    if not placement.uses_ray:
        return contextlib.nullcontext()
    return execution.RayClients(placement.ray_workers, address=placement.ray_address)


def _context(config: config_lib.TrainingConfig) -> contextlib.AbstractContextManager[Any]:
    secure_sums = config.secagg_bits is not None
    if config.engine == "compiled":
        return execution.compiled_only()
    return execution.secure_sum_simulation() if secure_sums else execution.local()
