"""Cohort samplers: the clients of each round, as a pure function of (seed, round).

A run that resumes after a crash asks for the cohort of a round again and gets
the same one: no sampler keeps state that matters. All randomness is SHAKE-256
of the seed, so it does not depend on the version of NumPy or on the platform.
"""

from __future__ import annotations

import abc
import hashlib

import numpy as np
from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.participation import schema as schema_lib


def largest_feasible_min_sep(num_clients: int, clients_per_round: int) -> int:
    """Computes the largest stride that can be kept for any number of rounds.

    In any `min_sep` consecutive rounds all participants differ, so that
    `min_sep * clients_per_round <= num_clients` (Xu et al. 2023, section 2.2:
    "the maximum MinS is limited by the population size divided by the number of
    clients per round").

    It is 0 if one round needs more clients than there are.
    """
    return num_clients // clients_per_round


def implied_participations(num_clients: int, clients_per_round: int, num_rounds: int) -> int:
    """Computes the smallest possible `max_participations`: some client takes part this often.

    It is num_rounds * clients_per_round / num_clients, rounded up.
    """
    return -(-num_rounds * clients_per_round // num_clients)


class CohortSampler(abc.ABC):
    """Sampler of one cohort of client indices 0 ... num_clients - 1 for every round.

    Attributes:
      num_clients: Number of clients in the population.
      num_rounds: Number of rounds; rounds are numbered 0 ... num_rounds - 1.
      clients_per_round: Size of every cohort, or None if it varies.
      seed: Non-negative integer that, with the round, determines the cohort.
    """

    def __init__(
        self, *, num_clients: int, num_rounds: int, clients_per_round: int | None, seed: int
    ):
        self.num_clients = validation.integer("num_clients", num_clients, minimum=1)
        self.num_rounds = validation.integer("num_rounds", num_rounds, minimum=1)
        self.clients_per_round = clients_per_round
        self.seed = validation.integer("seed", seed, minimum=0)
        if clients_per_round is not None:
            self.clients_per_round = validation.integer(
                "clients_per_round", clients_per_round, minimum=1
            )
            if self.clients_per_round > self.num_clients:
                raise validation.UsageError(
                    f"clients_per_round={clients_per_round} exceeds num_clients={num_clients}: "
                    f"lower it to {num_clients} or less."
                )

    @property
    @abc.abstractmethod
    def schema(self) -> schema_lib.MinSep:
        """Participation schema that every client is certain to respect."""

    @abc.abstractmethod
    def cohort(self, round_index: int) -> np.ndarray:
        """Returns the clients of one round.

        Args:
          round_index: Number of the round, 0 ... num_rounds - 1, in any order.

        Returns:
          Distinct client indices, int64, shape [clients_per_round].

        Raises:
          ValueError: If there is no such round.
        """

    def _checked_round(self, round_index: int) -> int:
        round_index = validation.integer("round_index", round_index, minimum=0)
        if round_index >= self.num_rounds:
            raise validation.UsageError(
                f"round_index={round_index} is beyond the last round, {self.num_rounds - 1}: "
                "make the sampler with a larger num_rounds."
            )
        return round_index

    def _random_words(self, count: int, index: int) -> np.ndarray:
        """Draws independent uniform 64-bit words, shape [count], for one epoch or round."""
        label = f"tff_dpftrl/{type(self).__name__}/{self.seed}/{index}".encode()
        return np.frombuffer(hashlib.shake_256(label).digest(8 * count), dtype="<u8")

    def _uniform_numbers(self, count: int, index: int) -> np.ndarray:
        """Draws independent numbers of [0, 1), multiples of 2^-53, of those words."""
        return (self._random_words(count, index) >> np.uint64(11)) * 2.0**-53


class MinSepSampler(CohortSampler):
    """Sampler of cohorts of fixed size whose members return only after `min_sep` rounds.

    All clients are in a random circular order, and every round takes the next
    `clients_per_round` of them. After each turn of the circle (an epoch) the order
    is shuffled again, locally: within blocks of `num_clients - min_sep *
    clients_per_round + 1` neighbours, from a random offset. No client moves forward by
    more than the slack that `min_sep` leaves, hence

    - any two rounds of one client are at least `min_sep` apart, and the largest
      feasible `min_sep` is reached (the order is then the same in every epoch);
    - every client takes part equally often, up to one round: no schedule has a
      smaller largest number of participations.
    """

    clients_per_round: int

    def __init__(
        self,
        *,
        num_clients: int,
        clients_per_round: int,
        min_sep: int,
        num_rounds: int,
        max_participations: int | None = None,
        seed: int,
    ):
        """Checks that such a schedule exists.

        Args:
          num_clients: Number of clients in the population.
          clients_per_round: Number of clients in every round.
          min_sep: Smallest allowed stride j - i between two rounds i < j of a client.
          num_rounds: Number of rounds.
          max_participations: Largest allowed number of rounds of one client; the
            smallest possible number if None.
          seed: Non-negative integer. The privacy guarantee of DP-FTRL does not rest on
            its secrecy.

        Raises:
          ValueError: If the population is too small for `min_sep` or for
            `max_participations`; the message names the largest feasible values.
        """
        super().__init__(
            num_clients=num_clients,
            num_rounds=num_rounds,
            clients_per_round=clients_per_round,
            seed=seed,
        )
        least = implied_participations(num_clients, clients_per_round, num_rounds)
        if max_participations is None:
            max_participations = least
        self._schema = schema_lib.MinSep(num_rounds, min_sep, max_participations)
        # All strides of num_rounds or more mean that no client takes part twice.
        needed_sep = min(self._schema.min_sep, self.num_rounds)
        if needed_sep * clients_per_round > num_clients:
            feasible = largest_feasible_min_sep(num_clients, clients_per_round)
            raise validation.UsageError(
                f"min_sep={min_sep} is impossible with {num_clients} clients, "
                f"{clients_per_round} a round: the largest feasible min_sep is {feasible}. "
                f"Lower min_sep, lower clients_per_round, or find "
                f"{needed_sep * clients_per_round} clients."
            )
        if self._schema.max_participations < least:
            feasible = max_participations * num_clients // clients_per_round
            raise validation.UsageError(
                f"max_participations={max_participations} is impossible with {num_clients} "
                f"clients, {clients_per_round} a round, over {num_rounds} rounds: some client "
                f"must take part {least} times. Raise max_participations to {least} or lower "
                f"num_rounds to {feasible}."
            )
        self._block_size = num_clients - needed_sep * clients_per_round + 1
        self._orders: dict[int, np.ndarray] = {}  # The last two epochs, a cache.

    @property
    @override
    def schema(self) -> schema_lib.MinSep:
        """Schema given to the constructor; the observed one may be better, never worse."""
        return self._schema

    @override
    def cohort(self, round_index: int) -> np.ndarray:
        """Returns the clients of one round; the first call after a resume replays the shuffles."""
        first = self._checked_round(round_index) * self.clients_per_round
        epoch, offset = divmod(first, self.num_clients)
        members = self._order(epoch)[offset : offset + self.clients_per_round]
        missing = self.clients_per_round - len(members)
        if missing:
            members = np.concatenate([members, self._order(epoch + 1)[:missing]])
        return members.copy()

    def _order(self, epoch: int) -> np.ndarray:
        """Returns client indices in the order in which they take part in one epoch."""
        if epoch not in self._orders:
            previous = max((e for e in self._orders if e < epoch), default=None)
            if previous is None:
                order, previous = _random_order(self._random_words(self.num_clients, 0)), 0
                self._orders = {0: order}
            for e in range(previous + 1, epoch + 1):
                order = self._locally_shuffled(self._orders[e - 1], e)
                self._orders = {e - 1: self._orders[e - 1], e: order}
        return self._orders[epoch]

    def _locally_shuffled(self, order: np.ndarray, epoch: int) -> np.ndarray:
        if self._block_size == 1:
            return order
        words = self._random_words(self.num_clients + 1, epoch)
        offset = int(words[-1]) % self._block_size
        block = (np.arange(self.num_clients) + offset) // self._block_size
        return order[np.lexsort((words[:-1], block))]


class ShuffledEpochs(CohortSampler):
    """Sampler that visits the clients in a fresh random order in every epoch.

    This is the usual shuffling of centralised training. An epoch is `num_clients //
    clients_per_round` rounds, and the remaining clients skip that epoch. A client
    may take part in two consecutive rounds, where epochs meet; `MinSepSampler` is
    the better choice whenever a guarantee is wanted.
    """

    clients_per_round: int

    def __init__(self, *, num_clients: int, clients_per_round: int, num_rounds: int, seed: int):
        """Checks the arguments.

        Args:
          num_clients: Number of clients in the population.
          clients_per_round: Number of clients in every round.
          num_rounds: Number of rounds.
          seed: Non-negative integer.

        Raises:
          ValueError: If an argument is out of range.
        """
        super().__init__(
            num_clients=num_clients,
            num_rounds=num_rounds,
            clients_per_round=clients_per_round,
            seed=seed,
        )
        self._rounds_per_epoch = self.num_clients // self.clients_per_round
        self._cached: tuple[int, np.ndarray] | None = None

    @property
    @override
    def schema(self) -> schema_lib.MinSep:
        """Stride 1, at most one participation an epoch."""
        epochs = -(-self.num_rounds // self._rounds_per_epoch)
        return schema_lib.MinSep(self.num_rounds, 1, epochs)

    @override
    def cohort(self, round_index: int) -> np.ndarray:
        epoch, position = divmod(self._checked_round(round_index), self._rounds_per_epoch)
        if self._cached is None or self._cached[0] != epoch:
            self._cached = (epoch, _random_order(self._random_words(self.num_clients, epoch)))
        first = position * self.clients_per_round
        return self._cached[1][first : first + self.clients_per_round].copy()


class PoissonSampler(CohortSampler):
    """Poisson sampler: each client is in each round independently, with one probability.

    This is the sampling of DP-FedAvg (McMahan et al. 2018, Algorithm 1). Its guarantee is
    amplified by the secrecy of the sample: take `seed` from the operating system
    (`secrets.randbits(256)`) and publish neither it nor the cohorts. A cohort may be
    empty.
    """

    def __init__(
        self, *, num_clients: int, sampling_probability: float, num_rounds: int, seed: int
    ):
        """Checks the arguments.

        Args:
          num_clients: Number of clients in the population.
          sampling_probability: Probability q of a client to be in one round, in (0, 1].
          num_rounds: Number of rounds.
          seed: Non-negative integer, secret, of at least 128 random bits.

        Raises:
          ValueError: If an argument is out of range.
        """
        super().__init__(
            num_clients=num_clients, num_rounds=num_rounds, clients_per_round=None, seed=seed
        )
        self.sampling_probability = validation.probability(
            "sampling_probability", sampling_probability
        )

    @property
    @override
    def schema(self) -> schema_lib.MinSep:
        """Schema without restrictions: a client may take part in every round."""
        return schema_lib.MinSep.unrestricted(self.num_rounds)

    @override
    def cohort(self, round_index: int) -> np.ndarray:
        """Returns the clients of one round, any number of them, in increasing order."""
        uniform = self._uniform_numbers(self.num_clients, self._checked_round(round_index))
        return np.flatnonzero(uniform < self.sampling_probability)


class LazyPoissonSampler(PoissonSampler):
    """Poisson sampler at an eighth of the cost, with other cohorts than `PoissonSampler`.

    It is for populations of hundreds of thousands, like the examples of a pool. A client's
    uniform number is compared with q byte by byte. Further bytes are drawn only for
    the one client in 256 whose first byte does not decide. The probability is q rounded
    down to a multiple of 2^-72, which is q itself where q is at least 2^-19.
    """

    @override
    def cohort(self, round_index: int) -> np.ndarray:
        """Returns the clients of one round, any number of them, in increasing order."""
        label = (
            f"tff_dpftrl/{type(self).__name__}/{self.seed}/{self._checked_round(round_index)}"
        ).encode()
        if self.sampling_probability == 1.0:
            return np.arange(self.num_clients)
        numerator, denominator = self.sampling_probability.as_integer_ratio()
        first, rest = divmod((numerator << 72) // denominator, 1 << 64)
        leading = np.frombuffer(hashlib.shake_256(label).digest(self.num_clients), np.uint8)
        candidates = np.flatnonzero(leading <= np.uint8(first))
        undecided = leading[candidates] == first
        digest = hashlib.shake_256(label + b"/undecided").digest(8 * int(undecided.sum()))
        taken = ~undecided
        taken[undecided] = np.frombuffer(digest, dtype="<u8") < np.uint64(rest)
        return candidates[taken]


def _random_order(words: np.ndarray) -> np.ndarray:
    return np.argsort(words, kind="stable")
