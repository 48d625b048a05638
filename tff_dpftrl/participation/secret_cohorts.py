"""Samplers of secret cohorts, where each client's rounds are drawn independently of all others'.

`sampling` describes them. Privacy rests on the seed's secrecy: take it from the operating system
(`secrets.randbits(256)`) and publish neither it nor the cohorts. A cohort may be empty.
"""

from __future__ import annotations

import numpy as np
from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.participation import cohorts
from tff_dpftrl.participation import schema as schema_lib


class _PartOfPoisson(cohorts.CohortSampler):
    """Sampler whose cohorts are parts of those of a `cohorts.LazyPoissonSampler`."""

    def __init__(
        self, *, num_clients: int, sampling_probability: float, num_rounds: int, seed: int
    ):
        super().__init__(
            num_clients=num_clients, num_rounds=num_rounds, clients_per_round=None, seed=seed
        )
        self._poisson = cohorts.LazyPoissonSampler(
            num_clients=num_clients,
            sampling_probability=sampling_probability,
            num_rounds=num_rounds,
            seed=seed,
        )


def stationary_share(min_sep: int, sampling_probability: float) -> float:
    """Computes the expected share of the clients in a round of b-min-sep sampling.

    Args:
      min_sep: Least stride b of a client.
      sampling_probability: Probability q of a client that was in none of the last b − 1 rounds.

    Returns:
      q / (1 + (b − 1) q), in (0, 1].
    """
    return sampling_probability / (1.0 + (min_sep - 1) * sampling_probability)


class CyclicPoissonSampler(_PartOfPoisson):
    """Sampler that divides the clients into groups, which take turns with Poisson sampling.

    Each client draws its group once, uniformly. Round t takes each client of group t mod
    num_groups with probability q. With one group this is `cohorts.LazyPoissonSampler`, and has
    its cohorts; with q = 1 it is balls in bins: all of a group come at each of its turns.
    """

    def __init__(
        self,
        *,
        num_clients: int,
        num_groups: int,
        sampling_probability: float,
        num_rounds: int,
        seed: int,
    ):
        """Draws the groups.

        Args:
          num_clients: Number of clients in the population.
          num_groups: Number of groups.
          sampling_probability: Probability q of a client to be in a round of its group, in (0, 1].
          num_rounds: Number of rounds.
          seed: Non-negative integer, secret, of at least 128 random bits.

        Raises:
          ValueError: If an argument is out of range.
        """
        super().__init__(
            num_clients=num_clients,
            sampling_probability=sampling_probability,
            num_rounds=num_rounds,
            seed=seed,
        )
        self.num_groups = validation.integer("num_groups", num_groups, minimum=1)
        # A remainder is uniform up to num_groups · 2^-64.
        words = self._random_words(self.num_clients, 0)
        self.groups = (words % np.uint64(self.num_groups)).astype(np.int64)

    @property
    @override
    def schema(self) -> schema_lib.MinSep:
        """A stride of `num_groups`."""
        return schema_lib.MinSep.as_many_as_fit(self.num_rounds, self.num_groups)

    @override
    def cohort(self, round_index: int) -> np.ndarray:
        """Returns the clients of one round, any number of them, in increasing order."""
        sampled = self._poisson.cohort(round_index)
        return sampled[self.groups[sampled] == round_index % self.num_groups]


class MinSepPoissonSampler(_PartOfPoisson):
    """Poisson sampler that leaves out who came in the last `min_sep` − 1 rounds (b-min-sep).

    Before round 0 each client is as it would be after infinitely many rounds, so that all rounds
    expect the same number of clients. Rounds in increasing order cost as much as Poisson
    sampling; an earlier round than the last one asked for is found by going through all before.
    """

    def __init__(
        self,
        *,
        num_clients: int,
        min_sep: int,
        sampling_probability: float,
        num_rounds: int,
        seed: int,
    ):
        """Checks the arguments.

        Args:
          num_clients: Number of clients in the population.
          min_sep: Least stride b between two rounds of a client.
          sampling_probability: Probability q of a client to be in a round, given that it was in
            none of the last b − 1, in (0, 1].
          num_rounds: Number of rounds.
          seed: Non-negative integer, secret, of at least 128 random bits.

        Raises:
          ValueError: If an argument is out of range.
        """
        super().__init__(
            num_clients=num_clients,
            sampling_probability=sampling_probability,
            num_rounds=num_rounds,
            seed=seed,
        )
        self.min_sep = validation.integer("min_sep", min_sep, minimum=1)
        self._last_round, self._last_cohort = -1, np.zeros(0, np.int64)
        self._free_from = self._first_free()

    @property
    @override
    def schema(self) -> schema_lib.MinSep:
        """A stride of `min_sep`."""
        return schema_lib.MinSep.as_many_as_fit(self.num_rounds, self.min_sep)

    @override
    def cohort(self, round_index: int) -> np.ndarray:
        """Returns the clients of one round, any number of them, in increasing order."""
        if self._checked_round(round_index) < self._last_round:
            self._last_round, self._free_from = -1, self._first_free()
        for index in range(self._last_round + 1, round_index + 1):
            sampled = self._poisson.cohort(index)
            self._last_cohort = sampled[self._free_from[sampled] <= index]
            self._free_from[self._last_cohort] = index + self.min_sep
            self._last_round = index
        return self._last_cohort.copy()

    def _first_free(self) -> np.ndarray:
        """Draws the first round in which each client can be, in the stationary distribution."""
        # A round before the first was a client's with the stationary share, and of the last b − 1
        # rounds at most one was: round −j, which frees it from b − j on.
        share = stationary_share(self.min_sep, self._poisson.sampling_probability)
        uniform = self._uniform_numbers(self.num_clients, 0)
        wait = np.floor(uniform / share).astype(np.int64) + 1
        return np.where(wait < self.min_sep, wait, 0)
