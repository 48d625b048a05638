"""Rounds of federated learning, as the kernel of a run trains them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from typing_extensions import override

from tff_dpftrl import execution
from tff_dpftrl.execution import federated_round
from tff_dpftrl.learning import metric_sums
from tff_dpftrl.participation import cohorts
from tff_dpftrl.runs import mechanism_plan, prepared
from tff_dpftrl.runs import progress as progress_lib
from tff_dpftrl.training import placement as placement_lib
from tff_dpftrl.training import task


class FederatedTrainer(prepared.Trainer):
    """Trainer of rounds with cohorts of clients."""

    too_fast = "client_learning_rate or server_learning_rate"
    unit = "clients"

    def __init__(
        self,
        user_ids: Sequence[str],
        plan: mechanism_plan.MechanismPlan,
        process: execution.CompiledProcess,
        client_value: Callable[[str, int], Any],
    ):
        self._user_ids = user_ids
        self._plan = plan
        self._process = process
        self._client_value = client_value
        self._sampler: cohorts.CohortSampler | None = None

    @override
    def initial_state(self) -> Any:
        state = self._process.initialize()
        self._process.drop_initialization()
        return state

    @override
    def restored(self, state: Any) -> Any:
        return self._process.as_tensors(state)

    @override
    def sample_with(self, seed: int) -> None:
        self._sampler = self._plan.sampler(seed)

    @override
    def members(self, round_index: int) -> list[str]:
        if self._sampler is None:
            raise RuntimeError("sample_with was not called.")
        return [self._user_ids[index] for index in self._sampler.cohort(round_index)]

    @override
    def train(self, state: Any, round_index: int, members: Sequence[str]) -> prepared.Trained:
        client_data = [self._client_value(user, round_index) for user in members]
        output = self._process.next(state, client_data)
        trained = output.metrics["client_work"]["train"]
        aggregated = output.metrics["aggregator"]
        # A cohort without text has no loss and no accuracy, though quotients of nothing are 0.
        return prepared.Trained(
            state=output.state,
            loss=float(trained["loss"]) if trained["num_targets"] else None,
            top1=float(trained["top1_in_vocab"]) if trained["num_in_vocab"] else None,
            num_not_finite=int(aggregated.get("non_finite_clients", 0)),
            bounded_sums=trained.get(metric_sums.BOUNDED_SUMS),
        )


@contextlib.contextmanager
def open_trainer(
    build: Callable[[], federated_round.FederatedRound],
    plan: mechanism_plan.MechanismPlan,
    language_task: task.LanguageTask,
    *,
    placement: placement_lib.Placement,
    progress: progress_lib.Progress,
) -> Iterator[FederatedTrainer]:
    """Builds the rounds of a run where they will run; ends afterwards what was started for it."""
    progress("Building the computations ...")
    with _clients(placement) as clients:
        process = execution.CompiledProcess(
            build(),
            dataset_fn=language_task.batches,
            tensor_spec=language_task.rows_spec,
            clients=clients,
        )
        with contextlib.closing(process):
            users = language_task.train.user_ids
            yield FederatedTrainer(users, plan, process, language_task.client_rows)


def _clients(
    placement: placement_lib.Placement,
) -> contextlib.AbstractContextManager[execution.ClientRunner | None]:
    """Returns the runner of clients elsewhere, which starts while the process is built."""
    if not placement.uses_ray:
        return contextlib.nullcontext()
    return execution.RayClients(placement.ray_workers, address=placement.ray_address)
