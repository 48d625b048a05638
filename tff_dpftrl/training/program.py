"""DP-FTRL in TFF's own training program, `tff.learning.programs.train_model`.

TFF's program saves its state asynchronously and releases the whole training state,
the noise's seed and buffers included, as "model output". Here the state of a round is
durable and committed to the ledger before the next round may begin, and only model
weights are released.

Example:
  ```
  manager = CommittedStateManager(
      folder, schema, binding=str(aggregator.guarantee(schema, delta)))
  source = cohort_source.CohortDataSource.from_client_data(
      client_data, sampler, on_cohort=manager.begin_round)
  asyncio.run(tff.learning.programs.train_model(
      train_process=process, train_data_source=source, train_per_round_clients=20,
      train_total_rounds=schema.num_rounds, program_state_manager=manager,
      model_output_manager=WeightsReleaseManager(
          tff.program.LoggingReleaseManager()),
      evaluation_manager=None, evaluation_periodicity=10))
  ```
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Coroutine, Sequence
from typing import Any

import tensorflow_federated as tff

from tff_dpftrl.participation import ledger, observed
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.runs import committed_rounds


class WeightsReleaseManager(tff.program.ReleaseManager):
    """Passes on the model weights of a training state, and nothing else.

    For `model_output_manager` of `train_model`, which gets the whole training state.
    TFF's `FilteringReleaseManager` cannot take apart a `LearningAlgorithmState`.
    """

    def __init__(self, release_manager: tff.program.ReleaseManager):
        """Wraps the manager that does the releasing.

        Args:
          release_manager: Gets a `tff.learning.models.ModelWeights` for each state.
        """
        self._release_manager = release_manager

    async def release(self, value: tff.learning.templates.LearningAlgorithmState, key: str) -> None:
        """Releases the weights of a training state: no seed, no buffers, no optimizer."""
        await self._release_manager.release(value.global_model_weights, key)


class CommittedStateManager(tff.program.ProgramStateManager):
    """Program state that is durable, and in the ledger, before the next round begins.

    Use one object as `program_state_manager` and its `begin_round` as `on_cohort` of
    the data source. A program that was interrupted at any point and is run again in
    the same folder goes on with the same cohorts and the same noise.

    The folder holds checkpoints and the ledger, and is secret.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        declared: schema_lib.MinSep,
        *,
        binding: str,
        budget_guard: ledger.BudgetGuard | None = None,
    ):
        """Opens the folder, or makes it.

        Args:
          folder: Folder of one run.
          declared: The participation schema that the run promises.
          binding: Text that identifies the noise and the claim, such as
            `str(aggregator.guarantee(schema, delta))`: with another one, or with another
            version of this package's noise, the run cannot go on.
          budget_guard: Function that is asked before every new round whether it may begin.

        Raises:
          ValueError: If the ledger in the folder is in use or declares another schema.
        """
        self._folder = pathlib.Path(folder)
        self._declared = declared
        self._options = {"binding": binding, "budget_guard": budget_guard}
        self._rounds: committed_rounds.CommittedRounds | None = None
        if committed_rounds.CommittedRounds.exist(self._folder):
            self._rounds = committed_rounds.CommittedRounds.open(
                self._folder, declared, **self._options
            )

    def close(self) -> None:
        """Closes the ledger; another process may then open it."""
        if self._rounds is not None:
            self._rounds.close()

    def observed(self) -> observed.ObservedParticipation:
        """Returns who took part how often so far, for the privacy statement."""
        return observed.ObservedParticipation() if self._rounds is None else self._rounds.observed()

    def begin_round(self, round_index: int, cohort: Sequence[str]) -> None:
        """Asks the ledger whether a round may begin; for `CohortDataSource.on_cohort`.

        Args:
          round_index: The round, from 0.
          cohort: Ids of its clients.

        Raises:
          ledger_rules.LedgerRefusal: If it may not.
        """
        self._rounds.begin(round_index, cohort)

    async def get_versions(self) -> list[int] | None:
        """Returns the number of committed rounds, the only version there is; None if new."""
        if self._rounds is None:
            return None
        return [self._rounds.rounds_done]

    async def load(self, version: int, structure: Any) -> Any:
        """Returns the program state after `version` rounds.

        Args:
          version: Number of rounds; the committed one.
          structure: A program state of the same structure.

        Returns:
          The program state.

        Raises:
          tff.program.ProgramStateNotFoundError: If it is not the committed one.
          checkpoint.CheckpointError: If it cannot be read.
        """
        if [version] != await self.get_versions():
            raise tff.program.ProgramStateNotFoundError(version)
        snapshot, saved = self._rounds.restore()
        iterator = structure.data_iterator.from_bytes(bytes.fromhex(saved["data_iterator"]))
        return structure._replace(
            state=snapshot.in_structure_of(structure.state),
            round_number=version,
            next_evaluation_timestamp_seconds=saved["next_evaluation_timestamp_seconds"],
            data_iterator=iterator,
        )

    def save(self, program_state: Any, version: int) -> Coroutine[None, None, None]:
        """Makes the state after `version` rounds durable and commits the round.

        It does so when it is called, not when the result is awaited: TFF's program
        awaits it only after it has asked for the next cohort.

        Args:
          program_state: TFF's program state, with its values materialised.
          version: Number of rounds.

        Returns:
          A coroutine with nothing left to do.

        Raises:
          tff.program.ProgramStateExistsError: If that round has been committed.
          ledger_rules.LedgerRefusal: If it is not the round that was begun.
        """
        if self._rounds is not None and version <= self._rounds.rounds_done:
            raise tff.program.ProgramStateExistsError(version)
        saved = {
            "data_iterator": program_state.data_iterator.to_bytes().hex(),
            "next_evaluation_timestamp_seconds": program_state.next_evaluation_timestamp_seconds,
        }
        if self._rounds is None:
            self._rounds = committed_rounds.CommittedRounds.create(
                self._folder,
                self._declared,
                program_state.state,
                saved,
                **self._options,
            )
        else:
            self._rounds.commit(version - 1, program_state.state, saved)
        return _done()


async def _done() -> None:
    """Returns at once: the body of a coroutine that has nothing left to do."""
