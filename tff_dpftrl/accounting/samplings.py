"""Table of samplings: builds the accounting of a run whose cohorts are drawn in secret.

The commands `account`, `calibrate` and `plan` take a sampling by its name here, with the options
that its row needs. To add one, add a row to `SAMPLINGS`. Each unit (a user, or with
`Options.group_size` an example) draws by itself and independently of the data.

The builders import what they need when they are called: `--help` needs names and summaries, and
must be quick.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from tff_dpftrl import validation
from tff_dpftrl.accounting import neighbours as neighbours_lib

if TYPE_CHECKING:
    from tff_dpftrl.mechanisms import strategy as strategy_lib
    from tff_dpftrl.participation import schema as schema_lib

ZERO_OUT = neighbours_lib.Neighbours()


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of samplings; None where a sampling has no use for one.

    Attributes:
      sampling_probability: Probability of a unit to be in a cohort: of each round (poisson,
        truncated), of its group's turn (cyclic), of a round if it was in none of the last
        min_sep − 1 (b-min-sep).
      group_size: G, largest number of units of one user, who is protected with all of them.
      sampling_groups: Number of groups that take turns.
      min_sep: Smallest stride between two rounds of one unit.
      bins: Number of bins, of which a unit has one for the whole run.
      rounds_per_client: Number of rounds of each unit.
      clients: Number of units.
      largest_cohort: Largest number of units in a round.
    """

    sampling_probability: float | None = None
    group_size: int = 1
    sampling_groups: int | None = None
    min_sep: int | None = None
    bins: int | None = None
    rounds_per_client: int | None = None
    clients: int | None = None
    largest_cohort: int | None = None


class SampledRun(Protocol):
    """Accounting of one run with secret sampling."""

    def epsilon(self, delta: float, neighbours: neighbours_lib.Neighbours = ZERO_OUT) -> float:
        """Computes an upper bound of epsilon at `delta`."""
        ...

    def how(self, neighbours: neighbours_lib.Neighbours = ZERO_OUT) -> str:
        """Returns how epsilon is computed, a noun phrase."""
        ...


_CHAIN = "group privacy from {}, or with samples that are known, whichever is less"


def _by_chain(
    epsilon_of_one: Callable[[float], float], num_changes: int, known_mu: float, delta: float
) -> float:
    """Bounds epsilon of a chain of changes, also by the Gaussian mechanism of known samples."""
    from tff_dpftrl.accounting import gaussian

    chain = neighbours_lib.epsilon_by_changes(epsilon_of_one, num_changes, delta)
    return min(chain, gaussian.epsilon(known_mu, delta))


@dataclasses.dataclass(frozen=True)
class SampledSteps:
    """Run of steps that each sample units by themselves, by privacy loss distributions.

    Attributes:
      noise_multiplier: σ, standard deviation of the noise per unit of one round's sensitivity.
      sampling_probability: Probability of a unit to be in a step.
      num_steps: Number of steps in which a unit may be.
      group_size: G, largest number of units of one user.
      known_mu: μ of one user whose samples are known, if rounds of users of different groups share
        noise. Several users are then no mixture of Gaussians: `_by_chain` bounds them. None
        otherwise.
    """

    noise_multiplier: float
    sampling_probability: float
    num_steps: int
    group_size: int = 1
    known_mu: float | None = None

    def epsilon(self, delta: float, neighbours: neighbours_lib.Neighbours = ZERO_OUT) -> float:
        """Computes an upper bound of epsilon at `delta`; inf without noise."""
        from tff_dpftrl.accounting import mixture_of_gaussians  # It takes long to import.

        validation.delta(delta)
        if self.noise_multiplier == 0.0:
            return math.inf
        chained, at_once = self._split(neighbours)
        pair = at_once.pair(self.noise_multiplier, self.sampling_probability, self.group_size)

        def epsilon_of_one(delta: float) -> float:
            return mixture_of_gaussians.epsilon(pair, num_steps=self.num_steps, delta=delta)

        if chained == 1 or self.known_mu is None:
            return epsilon_of_one(delta)
        return _by_chain(epsilon_of_one, chained, neighbours.num_changes * self.known_mu, delta)

    def how(self, neighbours: neighbours_lib.Neighbours = ZERO_OUT) -> str:
        """Returns how epsilon is computed, a noun phrase."""
        chained, at_once = self._split(neighbours)
        pair = "double mixture" if at_once.is_substitution else "mixture"
        text = f"the privacy loss distribution of a {pair} of Gaussians"
        return text if chained == 1 else _CHAIN.format(text)

    def _split(
        self, neighbours: neighbours_lib.Neighbours
    ) -> tuple[int, neighbours_lib.Neighbours]:
        """Returns the number of changes in a chain, and what one of them is."""
        if self.known_mu is None:
            return 1, neighbours
        return neighbours.group_of, dataclasses.replace(neighbours, group_of=1)


class _Bounded(Protocol):
    """Run of which an upper bound of epsilon is known, in both directions of a zero-out."""

    def epsilon(self, delta: float) -> float:
        """Computes an upper bound of epsilon at `delta`."""
        ...


@dataclasses.dataclass(frozen=True)
class BoundedRun:
    """Run whose zero-out of one user has a bound; other neighbours are chains of these.

    Attributes:
      zero_out: Run with a method `epsilon`.
      method: How its epsilon is computed, a noun phrase.
      known_mu: μ of one user whose samples are known.
      is_replaced: Whether another user takes the place of one who is removed: with known samples,
        too, the sum then changes by both.
    """

    zero_out: _Bounded
    method: str
    known_mu: float
    is_replaced: bool = False

    def epsilon(self, delta: float, neighbours: neighbours_lib.Neighbours = ZERO_OUT) -> float:
        """Computes an upper bound of epsilon at `delta`."""
        changes = neighbours.num_changes
        if changes == 1:
            return self.zero_out.epsilon(delta)
        both = self.is_replaced and neighbours.relation == "add-or-remove"
        known_mu = changes * self.known_mu * (2 if both else 1)
        return _by_chain(self.zero_out.epsilon, changes, known_mu, delta)

    def how(self, neighbours: neighbours_lib.Neighbours = ZERO_OUT) -> str:
        """Returns how epsilon is computed, a noun phrase."""
        return self.method if neighbours.num_changes == 1 else _CHAIN.format(self.method)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Row of the table of samplings.

    Attributes:
      summary: Description of the sampling in one line.
      needs: Names of the options that it needs.
      build: Function from strategy, noise multiplier, number of rounds and options to the run.
      schema: Function from number of rounds and options to the schema that every outcome keeps.
      allows: Names of the options that it takes besides.
      independent_noise: Whether it is accounted for with independent noise only.
    """

    summary: str
    needs: tuple[str, ...]
    build: Callable[[strategy_lib.Strategy, float, int, Options], SampledRun]
    schema: Callable[[int, Options], schema_lib.MinSep]
    allows: tuple[str, ...] = ()
    independent_noise: bool = False


def _once(strategy: strategy_lib.Strategy, num_rounds: int) -> float:
    """Returns the sensitivity of one round: the largest column norm of C."""
    from tff_dpftrl.participation import schema as schema_lib

    return strategy.sensitivity(schema_lib.MinSep(num_rounds, num_rounds, 1)).value


def _known_mu(
    name: str,
    strategy: strategy_lib.Strategy,
    noise_multiplier: float,
    num_rounds: int,
    options: Options,
) -> float:
    """Returns μ of a unit whose samples are known: the run is then one Gaussian mechanism."""
    if noise_multiplier == 0.0:
        return math.inf
    schema = SAMPLINGS[name].schema(num_rounds, options)
    return strategy.sensitivity(schema).value / noise_multiplier


def _poisson(
    strategy: strategy_lib.Strategy, noise_multiplier: float, num_rounds: int, options: Options
) -> SampledRun:
    assert options.sampling_probability is not None
    return SampledSteps(
        noise_multiplier / _once(strategy, num_rounds),
        options.sampling_probability,
        num_rounds,
        options.group_size,
    )


def _cyclic(
    strategy: strategy_lib.Strategy, noise_multiplier: float, num_rounds: int, options: Options
) -> SampledRun:
    from tff_dpftrl.accounting import amplified_banded

    assert options.sampling_probability is not None and options.sampling_groups is not None
    sampled = amplified_banded.AmplifiedBanded.from_strategy(
        strategy,
        noise_multiplier=noise_multiplier,
        num_rounds=num_rounds,
        num_groups=options.sampling_groups,
        sampling_probability=options.sampling_probability,
    ).sampled
    return SampledSteps(
        sampled.noise_multiplier,
        sampled.sampling_probability,
        sampled.num_rounds,
        known_mu=_known_mu("cyclic", strategy, noise_multiplier, num_rounds, options)
        if amplified_banded.num_bands(strategy) > 1
        else None,
    )


def _bins(
    strategy: strategy_lib.Strategy, noise_multiplier: float, num_rounds: int, options: Options
) -> SampledRun:
    from tff_dpftrl.accounting.amplification import balls_in_bins

    assert options.bins is not None
    run = balls_in_bins.BallsInBins.from_strategy(
        strategy, noise_multiplier=noise_multiplier, num_rounds=num_rounds, num_bins=options.bins
    )
    mu = _known_mu("bins", strategy, noise_multiplier, num_rounds, options)
    return BoundedRun(run, "a bound of the mixture over bins", mu)


def _b_min_sep(
    strategy: strategy_lib.Strategy, noise_multiplier: float, num_rounds: int, options: Options
) -> SampledRun:
    from tff_dpftrl.accounting.amplification import min_sep_poisson

    assert options.min_sep is not None and options.sampling_probability is not None
    run = min_sep_poisson.MinSepPoisson.from_strategy(
        strategy,
        noise_multiplier=noise_multiplier,
        num_rounds=num_rounds,
        min_sep=options.min_sep,
        sampling_probability=options.sampling_probability,
    )
    mu = _known_mu("b-min-sep", strategy, noise_multiplier, num_rounds, options)
    return BoundedRun(run, "a bound by the number of a client's rounds, or by slots", mu)


def _allocation(
    strategy: strategy_lib.Strategy, noise_multiplier: float, num_rounds: int, options: Options
) -> SampledRun:
    from tff_dpftrl.accounting.amplification import random_allocation

    assert options.rounds_per_client is not None
    run = random_allocation.RandomAllocation(
        noise_multiplier, num_rounds, options.rounds_per_client
    )
    mu = _known_mu("allocation", strategy, noise_multiplier, num_rounds, options)
    return BoundedRun(run, "the privacy loss distribution of random allocation", mu)


def _truncated(
    strategy: strategy_lib.Strategy, noise_multiplier: float, num_rounds: int, options: Options
) -> SampledRun:
    from tff_dpftrl.accounting.amplification import truncated_poisson

    assert options.sampling_probability is not None
    assert options.clients is not None and options.largest_cohort is not None
    run = truncated_poisson.TruncatedPoisson(
        options.sampling_probability,
        noise_multiplier,
        num_rounds,
        options.clients,
        options.largest_cohort,
    )
    mu = _known_mu("truncated", strategy, noise_multiplier, num_rounds, options)
    method = "Poisson sampling's privacy loss distribution and a part of δ"
    return BoundedRun(run, method, mu, is_replaced=True)


def _unrestricted(num_rounds: int, options: Options) -> schema_lib.MinSep:
    from tff_dpftrl.participation import schema as schema_lib

    del options
    return schema_lib.MinSep.unrestricted(num_rounds)


def _few(num_rounds: int, options: Options) -> schema_lib.MinSep:
    from tff_dpftrl.participation import schema as schema_lib

    return schema_lib.MinSep(num_rounds, 1, options.rounds_per_client or num_rounds)


def _apart(name: str) -> Callable[[int, Options], schema_lib.MinSep]:
    """Returns the schema of units that come again after as many rounds as an option says."""

    def schema(num_rounds: int, options: Options) -> schema_lib.MinSep:
        from tff_dpftrl.participation import schema as schema_lib

        stride = validation.integer(name, getattr(options, name), minimum=1)
        return schema_lib.MinSep.as_many_as_fit(num_rounds, min(stride, num_rounds))

    return schema


SAMPLINGS = {
    "poisson": Sampling(
        summary="each round draws each unit with the same probability",
        needs=("sampling_probability",),
        allows=("group_size",),
        build=_poisson,
        schema=_unrestricted,
        independent_noise=True,
    ),
    "cyclic": Sampling(
        summary="groups take turns, and each draws its units with the same probability",
        needs=("sampling_groups", "sampling_probability"),
        build=_cyclic,
        schema=_apart("sampling_groups"),
    ),
    "bins": Sampling(
        summary="each unit draws a bin, once, and comes in its rounds: bin, bin + bins, ...",
        needs=("bins",),
        build=_bins,
        schema=_apart("bins"),
    ),
    "b-min-sep": Sampling(
        summary="as poisson, but nobody comes again within --min-sep rounds",
        needs=("min_sep", "sampling_probability"),
        build=_b_min_sep,
        schema=_apart("min_sep"),
    ),
    "allocation": Sampling(
        summary="each unit draws its rounds, as many as all others, once",
        needs=("rounds_per_client",),
        build=_allocation,
        schema=_few,
        independent_noise=True,
    ),
    "truncated": Sampling(
        summary="as poisson, but cohorts have a largest size",
        needs=("sampling_probability", "clients", "largest_cohort"),
        build=_truncated,
        schema=_unrestricted,
        independent_noise=True,
    ),
}


def build(
    name: str,
    strategy: strategy_lib.Strategy,
    noise_multiplier: float,
    num_rounds: int,
    options: Options,
) -> SampledRun:
    """Builds the accounting of a run with secret sampling.

    Args:
      name: Name of the sampling in `SAMPLINGS`.
      strategy: Strategy of the run.
      noise_multiplier: z, standard deviation of the noise per unit clip norm.
      num_rounds: Number of rounds of the run.
      options: Options of the sampling, with those that it needs.

    Returns:
      The run.

    Raises:
      UsageError: If the strategy or an option does not fit.
    """
    row = SAMPLINGS[name]
    if row.independent_noise and strategy.mechanism != "identity":
        raise validation.UsageError(
            f"The sampling {name} is accounted for with independent noise only, not with the "
            f"mechanism {strategy.mechanism!r}: take the mechanism identity, or the sampling "
            "cyclic with a banded mechanism."
        )
    noise_multiplier = validation.noise_multiplier(noise_multiplier)
    num_rounds = validation.integer("num_rounds", num_rounds, minimum=1)
    return row.build(strategy, noise_multiplier, num_rounds, options)
