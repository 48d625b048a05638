"""Observed participation: how often, and how closely spaced, clients took part."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping

import numpy as np

from tff_dpftrl import validation
from tff_dpftrl.participation import ledger_rules
from tff_dpftrl.participation import schema as schema_lib


@dataclasses.dataclass(frozen=True)
class Participation:
    """Summary of participation: how often, and how closely spaced, clients took part.

    Attributes:
      num_rounds: Number of rounds.
      min_sep: Smallest observed **stride** j - i between two rounds i < j of one
        client; None if no client has taken part twice.
      max_participations: Largest number of rounds of one client; 0 if none.
    """

    num_rounds: int = 0
    min_sep: int | None = None
    max_participations: int = 0

    def __post_init__(self):
        validation.integer("num_rounds", self.num_rounds, minimum=0)
        validation.integer("max_participations", self.max_participations, minimum=0)
        if self.min_sep is not None:
            validation.integer("min_sep", self.min_sep, minimum=1)

    @property
    def min_sep_gap(self) -> int | None:
        """Number of rounds strictly in between, `min_sep - 1`: MinS in the Gboard tables."""
        return None if self.min_sep is None else self.min_sep - 1

    def as_schema(self) -> schema_lib.MinSep:
        """Computes the tightest schema that every client has respected.

        Returns:
          The schema for accounting. If no client has taken part twice, its `min_sep`
          is `num_rounds`, which allows one participation.

        Raises:
          ValueError: If there has been no round yet.
        """
        if self.num_rounds == 0:
            raise validation.UsageError(
                "num_rounds=0: no round has begun, so there is nothing to account."
            )
        return schema_lib.MinSep(
            num_rounds=self.num_rounds,
            min_sep=self.num_rounds if self.min_sep is None else self.min_sep,
            max_participations=max(1, self.max_participations),
        )

    def breaches(self, declared: schema_lib.MinSep) -> tuple[schema_lib.Breach, ...]:
        """Returns the limits of a declared schema that are exceeded; empty if none is."""
        return declared.breaches(
            num_rounds=self.num_rounds,
            min_sep=self.min_sep,
            max_participations=self.max_participations,
        )


@dataclasses.dataclass(frozen=True)
class ObservedParticipation(Participation):
    """Summary of participation with a histogram, to add rounds and to plot.

    Attributes:
      histogram: Number of clients by number of rounds, for clients with at least one round.
    """

    histogram: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def with_round(
        self, participations_before: np.ndarray, strides: np.ndarray
    ) -> ObservedParticipation:
        """Adds one round.

        Args:
          participations_before: Number of earlier rounds of each client of the round; int,
            shape [cohort].
          strides: Number of rounds since its last one, for each client of the round that
            has an earlier one; int, shape [at most cohort].

        Returns:
          The summary that includes the round. Time is O(cohort), whatever the population.
        """
        histogram = collections.Counter(self.histogram)
        before, clients = np.unique(participations_before, return_counts=True)
        for count, number in zip(before.tolist(), clients.tolist(), strict=True):
            histogram[count + 1] += number
            if count > 0:
                histogram[count] -= number
        smallest = [] if self.min_sep is None else [self.min_sep]
        if len(strides):
            smallest.append(int(strides.min()))
        return ObservedParticipation(
            num_rounds=self.num_rounds + 1,
            min_sep=min(smallest, default=None),
            max_participations=max([self.max_participations, *(before + 1).tolist()]),
            histogram={count: n for count, n in sorted(histogram.items()) if n > 0},
        )


class ParticipationCounter:
    """Counter of the participation of client indices, round after round, in memory.

    It is for simulations, which need not survive a crash. `ledger.Ledger` is the
    durable record of a real run.

    Attributes:
      observed: Participation so far.
    """

    def __init__(self, num_clients: int, declared: schema_lib.MinSep | None = None):
        """Starts with no participation.

        Args:
          num_clients: Size of the population; clients are 0 ... num_clients - 1.
          declared: Schema to enforce; None to enforce nothing.
        """
        self._participations = np.zeros(num_clients, np.int32)
        self._last_round = np.full(num_clients, -1, np.int32)
        self._declared = declared
        self.observed = ObservedParticipation()

    def add(self, cohort: np.ndarray) -> None:
        """Adds the next round; with `declared`, call it before any client runs.

        Args:
          cohort: Distinct client indices, shape [cohort].

        Raises:
          ledger_rules.SchemaRefusal: If the round would break the declared schema. The
            round is not added then.
          ValueError: If a client comes twice.
        """
        cohort = np.asarray(cohort, dtype=int)
        if len(np.unique(cohort)) != len(cohort):
            raise validation.UsageError(
                "cohort names a client twice: one client takes part once in a round."
            )
        this_round, before = self.observed.num_rounds, self._participations[cohort]
        last = self._last_round[cohort]
        strides = this_round - last[last >= 0]
        if self._declared is not None:
            ledger_rules.check_schema(this_round, self._declared, before, strides)
        self.observed = self.observed.with_round(before, strides)
        self._participations[cohort] += 1
        self._last_round[cohort] = this_round
