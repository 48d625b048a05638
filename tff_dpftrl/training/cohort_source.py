"""Lets TFF's programs train on the cohorts of a sampler.

`tff.program.DatasetDataSource` draws clients at random, anew after every restart;
DP-FTRL needs cohorts that respect a participation schema and come back unchanged when
a round is repeated. The only state of the iterator here, which TFF's program state
saves, is the number of rounds it has handed out and a hash of the last cohort.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl import validation
from tff_dpftrl.data import user_ids
from tff_dpftrl.execution import tff_names
from tff_dpftrl.participation import cohorts

_STATE = struct.Struct("!Q32s")


class CohortDataSource(tff.program.FederatedDataSource):
    """The datasets of each round's cohort, in the order of the rounds.

    Example:
      ```
      sampler = cohorts.MinSepSampler(
          num_clients=len(client_data.client_ids), clients_per_round=20, min_sep=10,
          num_rounds=500, seed=0)
      source = CohortDataSource.from_client_data(client_data, sampler)
      tff.learning.programs.train_model(
          train_data_source=source, train_per_round_clients=20, ...)
      ```
    """

    def __init__(
        self,
        client_ids: Sequence[str],
        client_dataset: Callable[[str, int], tf.data.Dataset],
        element_spec: Any,
        sampler: cohorts.CohortSampler,
        *,
        on_cohort: Callable[[int, Sequence[str]], None] | None = None,
    ):
        """Connects clients and their data with a sampler.

        Args:
          client_ids: Id of every client, in an order that does not change between runs.
          client_dataset: Gives the dataset of a client (id) in a round (0, 1, ...).
          element_spec: The `element_spec` of all these datasets.
          sampler: Chooses the clients, by their position in `client_ids`.
          on_cohort: Called with the round and the ids of its cohort before any data is
            handed out, also when a round is repeated; what it raises stops the round.

        Raises:
          ValueError: If `client_ids` and `sampler` disagree on the number of clients, or ids write
            one number in several ways.
        """
        user_ids.check(client_ids, "client_ids")
        if len(client_ids) != sampler.num_clients:
            raise validation.UsageError(
                f"client_ids lists {len(client_ids)} clients, but the sampler has "
                f"num_clients={sampler.num_clients}: make it with num_clients={len(client_ids)}."
            )
        self._client_ids = list(client_ids)
        self._client_dataset = client_dataset
        self._sampler = sampler
        self._on_cohort = on_cohort
        self._federated_type = tff_names.FederatedType(
            tff_names.SequenceType(tff_names.tensorflow_to_type(element_spec)), tff_names.CLIENTS
        )

    @classmethod
    def from_client_data(
        cls,
        client_data: tff.simulation.datasets.ClientData,
        sampler: cohorts.CohortSampler,
        *,
        on_cohort: Callable[[int, Sequence[str]], None] | None = None,
    ) -> CohortDataSource:
        """Connects a TFF `ClientData`, already preprocessed, with a sampler.

        Args:
          client_data: The clients and their datasets, the same in every round.
          sampler: Draws the cohorts.
          on_cohort: Callback for a round and the ids of its clients, before their data is read.

        Returns:
          The data source.

        Raises:
          ValueError: If `client_data` and `sampler` disagree on the number of clients.
        """
        return cls(
            client_data.client_ids,
            lambda client_id, round_index: client_data.create_tf_dataset_for_client(client_id),
            client_data.element_type_structure,
            sampler,
            on_cohort=on_cohort,
        )

    @property
    def federated_type(self) -> tff_names.FederatedType:
        """The type of what `select` returns: one sequence of elements a client."""
        return self._federated_type

    def iterator(self) -> CohortIterator:
        """Returns an iterator that begins at round 0."""

        class BoundCohortIterator(CohortIterator):
            """TFF restores an iterator by its class alone, so the class knows the data."""

            source = self

        return BoundCohortIterator()

    def cohort_ids(self, round_index: int) -> list[str]:
        """Returns the ids of the clients of a round."""
        return [self._client_ids[i] for i in self._sampler.cohort(round_index)]

    def select(self, round_index: int, size: int | None) -> list[tf.data.Dataset]:
        """Returns the datasets of a round's cohort.

        Args:
          round_index: The round.
          size: Number of clients that the caller expects; None for any.

        Returns:
          One dataset a client.

        Raises:
          ValueError: If there is no such round, or `size` is not the cohort's size.
        """
        fixed = self._sampler.clients_per_round
        if size is not None and size != fixed:
            raise validation.UsageError(
                f"k={size} clients were asked for, but the sampler has "
                f"clients_per_round={fixed}: pass {fixed}."
            )
        ids = self.cohort_ids(round_index)
        if self._on_cohort is not None:
            self._on_cohort(round_index, ids)
        return [self._client_dataset(client_id, round_index) for client_id in ids]


class CohortIterator(tff.program.FederatedDataSourceIterator):
    """Hands out one cohort after another; make it with `CohortDataSource.iterator`."""

    source: ClassVar[CohortDataSource]

    def __init__(self, next_round: int = 0):
        """Starts at a round."""
        self.next_round = next_round

    @property
    def federated_type(self) -> tff_names.FederatedType:
        """The type of what `select` returns."""
        return self.source.federated_type

    def select(self, k: int | None = None) -> list[tf.data.Dataset]:
        """Returns the datasets of the next round's cohort.

        Args:
          k: The size of the cohort; None accepts any, as Poisson sampling needs.

        Returns:
          One dataset a client.

        Raises:
          ValueError: If all rounds have been handed out, or `k` is another size.
        """
        selected = self.source.select(self.next_round, k)
        self.next_round += 1
        return selected

    def to_bytes(self) -> bytes:
        """Returns the number of rounds handed out, and a hash of the last cohort."""
        return _STATE.pack(self.next_round, self._last_cohort_hash())

    @classmethod
    def from_bytes(cls, buffer: bytes) -> CohortIterator:
        """Goes on where `to_bytes` was called.

        Args:
          buffer: What `to_bytes` returned, possibly in an earlier process.

        Returns:
          An iterator over the same cohorts.

        Raises:
          ValueError: If the cohorts of this source are different ones.
        """
        next_round, cohort_hash = _STATE.unpack(buffer)
        iterator = cls(next_round)
        if iterator._last_cohort_hash() != cohort_hash:
            raise validation.UsageError(
                f"The program state was saved after round {next_round - 1} with another cohort "
                "than the one of this data source: resume with the clients, the sampler and the "
                "seed of the first run."
            )
        return iterator

    def _last_cohort_hash(self) -> bytes:
        ids = self.source.cohort_ids(self.next_round - 1) if self.next_round else []
        # Lengths keep lists of ids apart that only look the same when joined.
        message = b"".join(
            struct.pack("!Q", len(encoded)) + encoded
            for encoded in (client_id.encode("utf-8", "surrogatepass") for client_id in ids)
        )
        return hashlib.blake2b(message, digest_size=32).digest()

    def __deepcopy__(self, memo: dict[int, Any]) -> CohortIterator:
        """Returns a second iterator over the same data, at the same round."""
        return type(self)(self.next_round)
