"""Accounting of runs whose cohorts are drawn in secret, by the description of their sampling.

`SAMPLINGS` has the samplings by name. To add one, add its description (`participation.sampling`), a
row here and a case in `zero_out`. Each unit (a user, or an example of one) draws by itself and
independently of the data.

Functions import what they need when they are called: `--help` must be quick.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from tff_dpftrl import validation
from tff_dpftrl.accounting import neighbours as neighbours_lib

if TYPE_CHECKING:
    from tff_dpftrl.accounting import parts
    from tff_dpftrl.mechanisms import strategy as strategy_lib
    from tff_dpftrl.participation import sampling as sampling_lib

ZERO_OUT = neighbours_lib.Neighbours()


@dataclasses.dataclass(frozen=True)
class Row:
    """Row of the table of samplings; `needs` and `allows` are names of options.

    `method` is the method of epsilon, a noun phrase; empty if `SampledSteps` says it. `sentences`
    explain it in a statement; empty if no run with correlated noise has this sampling. With
    `independent_noise`, the accounting is for independent noise only.
    """

    summary: str
    needs: tuple[str, ...]
    method: str = ""
    sentences: str = ""
    allows: tuple[str, ...] = ()
    independent_noise: bool = False


SAMPLINGS = {
    "poisson": Row(
        summary="each round draws each unit with the same probability",
        needs=("sampling_probability",),
        allows=("group_size",),
        independent_noise=True,
    ),
    "cyclic": Row(
        summary="groups take turns, and each draws each of its units with the same probability",
        needs=("sampling_groups", "sampling_probability"),
        sentences=(
            "No two rounds of a group share a row of the banded strategy. So ε is that of one "
            "Poisson-sampled Gaussian for each turn of the group, whose noise is divided by the "
            "largest norm of a column. It is computed by their privacy loss distribution "
            "(Choquette-Choo et al. 2023, Theorem 4). No gain from the secrecy of the groups is "
            "counted."
        ),
    ),
    "bins": Row(
        summary="each unit draws one bin, once, and takes part in rounds bin, bin + bins, ...",
        needs=("bins",),
        method="a bound of the mixture over bins",
        sentences=(
            "The run is dominated by a mixture of as many Gaussians as there are bins, against one "
            "(Choquette-Choo et al. 2024, Lemma 3.2). ε is an upper bound of its own, by the law "
            "of the likelihood ratio of some of the bins, with their correlations raised."
        ),
    ),
    "b-min-sep": Row(
        summary="as poisson, but no unit takes part again within --min-sep rounds",
        needs=("min_sep", "sampling_probability"),
        method="a bound by the number of a client's rounds, or by slots",
        sentences=(
            "ε is the smallest of its upper bounds. One takes the number of rounds in which a "
            "client takes part, and these rounds, as known. Another is for a strategy with no more "
            "bands than the stride. It takes some rounds as known, in each of which the client "
            "takes part with one probability, as Poisson-sampled Gaussians."
        ),
    ),
}
"""Samplings by their names: those of `participation.sampling`, and "poisson", cyclic in one group.

Options are `sampling_groups`, `min_sep`, `bins`, `group_size` (largest number of units of a user)
and `sampling_probability`. The last is a unit's probability to be in a cohort: of each round, of
its group's turn, or of a round if the unit was in none of the last min_sep − 1.
"""

OF_A_POOL = (
    "No two rounds of a group share a row of the banded strategy. So ε is that of one mixture of "
    "Gaussians N(j, σ²), j ~ Binomial(examples of a user in the pool, sampling probability), for "
    "each turn of the group, whose noise is divided by the largest norm of a column. It is "
    "computed by their privacy loss distribution (Choquette-Choo et al. 2023, Theorem 4; Charles "
    "et al. 2024, Theorem 3). No gain from the secrecy of the groups is counted."
)
"""Sentences for a statement of cyclic sampling of examples in a pool."""

FIELDS = {"sampling_groups": "num_groups", "bins": "num_bins"}
"""Attributes of descriptions whose options have other names."""


def described(name: str, num_rounds: int, options: Mapping[str, Any]) -> sampling_lib.Sampling:
    """Describes a sampling by options."""
    from tff_dpftrl.participation import sampling as sampling_lib

    if name == "poisson":
        return sampling_lib.CyclicPoisson(num_rounds, 1, options["sampling_probability"])
    fields = {FIELDS.get(option, option): options[option] for option in SAMPLINGS[name].needs}
    return sampling_lib.KINDS[name](num_rounds, **fields)


def zero_out(
    sampling: sampling_lib.Sampling,
    strategy: strategy_lib.Strategy,
    *,
    noise_multiplier: float,
    num_rounds: int | None = None,
    units_per_client: int = 1,
) -> parts.Bounded:
    """Accounts for zeroing out one client in the first `num_rounds` rounds (all if None) of a run.

    A client has at most `units_per_client` units, each sampled by itself; several only if cyclic.
    """
    from tff_dpftrl.accounting import amplified_banded
    from tff_dpftrl.accounting.amplification import balls_in_bins, min_sep_poisson
    from tff_dpftrl.participation import sampling as sampling_lib

    noise_multiplier = validation.noise_multiplier(noise_multiplier)
    num_rounds = sampling.num_rounds if num_rounds is None else num_rounds
    run = {"noise_multiplier": noise_multiplier, "num_rounds": num_rounds}
    match sampling:
        case sampling_lib.CyclicPoisson():
            return amplified_banded.AmplifiedBanded.from_strategy(
                strategy,
                **run,
                num_groups=sampling.num_groups,
                sampling_probability=sampling.sampling_probability,
                units_per_client=units_per_client,
            )
        case sampling_lib.BallsInBins():
            return balls_in_bins.BallsInBins.from_strategy(
                strategy, **run, num_bins=sampling.num_bins
            )
        case sampling_lib.MinSepPoisson():
            return min_sep_poisson.MinSepPoisson.from_strategy(
                strategy,
                **run,
                min_sep=sampling.min_sep,
                sampling_probability=sampling.sampling_probability,
            )
    raise validation.UsageError(f"Nothing accounts for the sampling {sampling.kind!r}.")


def rounds_of(run: parts.Bounded, sampling: str) -> parts.Weights:
    """Returns the rounds of `zero_out` as part of a budget: sampled steps if cyclic, else by ε."""
    from tff_dpftrl.accounting import amplified_banded, parts

    if isinstance(run, amplified_banded.AmplifiedBanded):
        return run.rounds
    return parts.BoundedRounds(run, sampling)


def check_noise(name: str, strategy: strategy_lib.Strategy) -> None:
    """Refuses correlated noise with a sampling that is accounted for with independent noise."""
    if SAMPLINGS[name].independent_noise and strategy.mechanism != "identity":
        raise validation.UsageError(
            f"The sampling {name} is accounted for with independent noise only, not with the "
            f"mechanism {strategy.mechanism!r}: take the mechanism identity, or the sampling "
            "cyclic with a banded mechanism."
        )


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

    σ is the noise per unit of one round's sensitivity; a unit may be in `num_steps` steps.
    `known_mu` is μ of one user whose samples are known, if rounds of users of different groups
    share noise. Several users are then no mixture of Gaussians: `_by_chain` bounds them.
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


@dataclasses.dataclass(frozen=True)
class BoundedRun:
    """Run whose zero-out of one user has a bound; other neighbours are chains of these.

    `known_mu` is μ of one user whose samples are known. With `is_replaced`, another user takes the
    place of one who is removed: with known samples, too, the sum then changes by both.
    """

    zero_out: parts.Bounded
    method: str
    known_mu: float

    def epsilon(self, delta: float, neighbours: neighbours_lib.Neighbours = ZERO_OUT) -> float:
        """Computes an upper bound of epsilon at `delta`."""
        changes = neighbours.num_changes
        if changes == 1:
            return self.zero_out.epsilon(delta)
        return _by_chain(self.zero_out.epsilon, changes, changes * self.known_mu, delta)

    def how(self, neighbours: neighbours_lib.Neighbours = ZERO_OUT) -> str:
        """Returns how epsilon is computed, a noun phrase."""
        return self.method if neighbours.num_changes == 1 else _CHAIN.format(self.method)


def account(
    sampling: sampling_lib.Sampling,
    strategy: strategy_lib.Strategy,
    *,
    noise_multiplier: float,
    units_per_client: int = 1,
) -> SampledRun:
    """Accounts for a run with secret sampling, for any neighbouring data sets.

    A client has at most `units_per_client` units, each sampled by itself; several only if cyclic.
    """
    from tff_dpftrl.accounting import amplified_banded

    run = zero_out(
        sampling,
        strategy,
        noise_multiplier=noise_multiplier,
        units_per_client=units_per_client,
    )
    # A unit whose samples are known: the run is then one Gaussian mechanism.
    known_mu = math.inf
    if noise_multiplier > 0.0:
        known = strategy.sensitivity(sampling.schema).value
        known_mu = units_per_client * known / noise_multiplier
    if not isinstance(run, amplified_banded.AmplifiedBanded):
        return BoundedRun(run, SAMPLINGS[sampling.kind].method, known_mu)
    return SampledSteps(
        run.sampled.noise_multiplier,
        run.sampled.sampling_probability,
        run.sampled.num_rounds,
        units_per_client,
        known_mu if amplified_banded.num_bands(strategy) > 1 else None,
    )
