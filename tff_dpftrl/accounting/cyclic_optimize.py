"""Chooses bands, groups and noise for cyclic Poisson sampling.

The cost of a run depends on one number of C, its largest column norm (`amplified_banded`). For
given numbers of bands and groups, the C of least loss for *one* participation therefore has the
least error at any target epsilon. More bands cancel noise over more rounds. But they need as many
groups, whose clients are sampled more often when it is their turn, which amplifies less. One band
is DP-SGD; with as many as a pass has rounds, every client of a group takes part and nothing is
amplified.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection
from typing import TypeVar

from tff_dpftrl import validation
from tff_dpftrl.accounting import amplified_banded, dp_fedavg, noise_search
from tff_dpftrl.mechanisms import banded_toeplitz_optimize
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.participation import schema as schema_lib

# Numbers of turns of a group whose numbers of bands are tried besides powers of two.
_FEW_TURNS = range(1, 5)
# Largest number of turns of a group at which larger groups and one turn fewer are tried.
_TURNS_THAT_COUNT = 32
# Relative improvement of the error below which the search around the best ends.
_SMALLEST_GAIN = 1e-3


_Run = TypeVar("_Run")


@dataclasses.dataclass(frozen=True)
class CyclicRun:
    """Run of a banded strategy with cyclic Poisson sampling that meets a target epsilon.

    `sampling_probability` is that of a client whose group has its turn. `error` is z · RmsError of
    C: the root mean square over rounds of the standard deviation of the noise in the sum of all
    rounds so far, for clip norm 1.
    """

    strategy: strategy_lib.Strategy
    num_rounds: int
    num_groups: int
    sampling_probability: float
    noise_multiplier: float
    error: float

    @property
    def num_bands(self) -> int:
        """Number of bands of C; 1 is DP-SGD's independent noise."""
        return amplified_banded.num_bands(self.strategy)

    def accountant(self) -> amplified_banded.AmplifiedBanded:
        """Returns the run as its accountant sees it."""
        return amplified_banded.AmplifiedBanded.from_strategy(
            self.strategy,
            noise_multiplier=self.noise_multiplier,
            num_rounds=self.num_rounds,
            num_groups=self.num_groups,
            sampling_probability=self.sampling_probability,
        )


@dataclasses.dataclass(frozen=True)
class CyclicChoice:
    """Run of least error for a target epsilon; `curve` has a run for each number of bands tried."""

    best: CyclicRun
    curve: tuple[CyclicRun, ...]


class _Search:
    """Runs of one problem by their number of bands."""

    def __init__(
        self,
        num_rounds: int,
        share: float,
        target_epsilon: float,
        delta: float,
    ):
        self._schema = schema_lib.MinSep(num_rounds, num_rounds, 1)
        self._share, self._target, self._delta = share, target_epsilon, delta
        self.largest = min(num_rounds, max(1, math.floor((1 + 1e-9) / share)))
        self._noises: dict[int, float] = {}

    def run(self, bands: int) -> CyclicRun:
        """Returns the run of the best strategy, its smallest noise, of which epsilon is checked."""
        strategy = banded_toeplitz_optimize.optimize_banded_toeplitz(self._schema, bands)
        num_groups, n = self._groups(bands), self._schema.num_rounds
        error = strategy.rms_error(n)
        noise = self._noise(num_groups) * strategy.sensitivity(self._schema).value
        step = 1e-12  # The product may be rounded down.
        while True:
            run = CyclicRun(
                strategy, n, num_groups, self._probability(num_groups), noise, noise * error
            )
            if run.accountant().epsilon(self._delta) <= self._target:
                return run
            noise *= 1.0 + step
            step *= 2.0

    def _groups(self, bands: int) -> int:
        """Returns the number of groups: `bands`, or more if one turn fewer needs less noise."""
        turns = math.ceil(self._schema.num_rounds / bands)
        if not 1 < turns <= _TURNS_THAT_COUNT:
            return bands
        fewer = min(math.ceil(self._schema.num_rounds / (turns - 1)), self.largest)
        return min((bands, fewer), key=self._noise)

    def _probability(self, num_groups: int) -> float:
        return min(1.0, self._share * num_groups)

    def _noise(self, num_groups: int) -> float:
        """Computes the noise multiplier of a group's sampled Gaussians, column norm 1."""
        if num_groups not in self._noises:
            near = min(self._noises, key=lambda known: abs(known - num_groups), default=None)
            probability = self._probability(num_groups)
            turns = math.ceil(self._schema.num_rounds / num_groups)
            self._noises[num_groups] = noise_search.smallest_noise(
                lambda noise: dp_fedavg.DpFedAvg(probability, noise, turns).epsilon(self._delta),
                target_epsilon=self._target,
                initial=1.0 if near is None else self._noises[near],
            )
        return self._noises[num_groups]


@functools.lru_cache(maxsize=64)
def best_cyclic(
    num_rounds: int,
    num_clients: int,
    clients_per_round: float,
    target_epsilon: float,
    delta: float,
    *,
    max_bands: int | None = None,
) -> CyclicChoice:
    """Chooses bands, groups, coefficients and noise of least error at a target epsilon.

    All compared runs have the same expected cohort, so that their sums have the same denominator. A
    group's clients are sampled with q = clients_per_round · num_groups / num_clients when it is
    their turn. Epsilon of the best run was computed and is not above the target. Results are
    cached.

    `max_bands` limits the memory to `max_bands − 1` copies of the model; with None, only q ≤ 1
    does.
    """
    validation.integer("num_rounds", num_rounds, minimum=1)
    validation.integer("num_clients", num_clients, minimum=1)
    validation.positive("clients_per_round", clients_per_round)
    validation.positive("target_epsilon", target_epsilon)
    validation.delta(delta)
    if clients_per_round > num_clients:
        raise validation.UsageError(
            f"clients_per_round must be at most num_clients = {num_clients}, got "
            f"{clients_per_round!r}: sample fewer."
        )
    search = _Search(
        num_rounds,
        clients_per_round / num_clients,
        target_epsilon,
        delta,
    )
    largest = search.largest
    if max_bands is not None:
        largest = min(largest, validation.integer("max_bands", max_bands, minimum=1))
    runs = try_bands(search.run, lambda run: run.error, num_rounds, largest)
    best = min(runs, key=lambda run: run.error)
    return CyclicChoice(best, tuple(runs))


def try_bands(
    make_run: Callable[[int], _Run],
    error: Callable[[_Run], float],
    num_rounds: int,
    largest: int,
) -> list[_Run]:
    """Searches for the number of bands with the lowest error; returns the runs made, by bands.

    The error may have several minima: it falls where one more band saves a group's turn. Tried are
    powers of two, bands of few turns, and the middles beside the best until that gains little.
    `make_run` is called once for each number of bands.
    """
    largest = min(largest, num_rounds)
    runs: dict[int, _Run] = {}
    errors: dict[int, float] = {}
    candidates = {2**power for power in range(largest.bit_length())}
    candidates |= {math.ceil(num_rounds / turns) for turns in _FEW_TURNS} | {largest}
    last = math.inf
    while candidates:
        for bands in sorted(candidates):
            if bands <= largest:
                runs[bands] = make_run(bands)
                errors[bands] = error(runs[bands])
        best = min(errors, key=errors.__getitem__)
        if errors[best] > last * (1 - _SMALLEST_GAIN):
            break
        last = errors[best]
        candidates = _around(best, runs)
    return [runs[bands] for bands in sorted(runs)]


def _around(best: int, known: Collection[int]) -> set[int]:
    """Returns the middles between the best number of bands and its known neighbours."""
    below = max((bands for bands in known if bands < best), default=best)
    above = min((bands for bands in known if bands > best), default=best)
    return {(below + best) // 2, (best + above) // 2} - set(known)
