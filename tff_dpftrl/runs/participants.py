"""Who takes part in which round of a run: the part of a plan that draws the cohorts.

`Turns` promise a participation schema, and nobody need keep secret who takes part (DP-FTRL).
`Sampled` cohorts are drawn in secret by the one party that holds all data, which amplifies the
guarantee. Poisson sampling with independent noise is the case of one group and of the identity as
strategy; `FedAvgCohorts` are those of DP-FedAvg (McMahan et al. 2018).
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any, ClassVar

from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.accounting import amplified_banded, calibrate, display, parts, samplings, statement
from tff_dpftrl.accounting import statement_sentences as sentences
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.participation import cohorts
from tff_dpftrl.participation import sampling as sampling_lib
from tff_dpftrl.participation import schema as schema_lib

FIXED = "fixed-denominator"
CLIPPED = "clipped-denominator"
"""Names of the estimators of McMahan et al. 2018; see `private_round.estimators`."""

_ESTIMATORS = {
    FIXED: "fixed denominator: expected number of users",
    CLIPPED: "clipped denominator: number of users in the round, at least the expected one",
}


@dataclasses.dataclass(frozen=True)
class Pool:
    """Examples of all clients, each sampled and clipped by itself at its client's turn.

    `of_client` is the largest number of examples of one client.
    """

    size: int
    of_client: int


@dataclasses.dataclass(frozen=True)
class Participation(abc.ABC):
    """Participation: who is in which round.

    Attributes:
      num_clients: Number of clients.
      clients_per_round: Number of clients in a cohort, the expected one if it is sampled.
      needs_secret_cohorts: Whether the guarantee rests on the secrecy of who took part.
    """

    needs_secret_cohorts: ClassVar[bool]

    num_clients: int
    clients_per_round: float

    @property
    @abc.abstractmethod
    def declared(self) -> schema_lib.MinSep:
        """Schema that the ledger enforces: that of the client that takes part most often."""

    @property
    def num_rounds(self) -> int:
        """Largest number of rounds."""
        return self.declared.num_rounds

    @property
    @abc.abstractmethod
    def clause(self) -> str:
        """Clause on how often a client takes part."""

    @abc.abstractmethod
    def sampler(self, seed: int) -> cohorts.CohortSampler:
        """Returns the sampler of the cohorts, which never break `declared`."""

    @abc.abstractmethod
    def rounds(
        self, strategy: strategy_lib.Strategy, noise_multiplier: float, num_rounds: int
    ) -> parts.Weights:
        """Returns the updates of the first rounds, to be composed with all else."""

    def calibrated(
        self,
        strategy: strategy_lib.Strategy,
        others: tuple[parts.Part, ...],
        *,
        target_epsilon: float,
        delta: float,
    ) -> float:
        """Returns the smallest noise multiplier with which rounds and `others` meet a target."""
        return calibrate.noise_beside(
            lambda noise: self.rounds(strategy, noise, self.num_rounds),
            others,
            target_epsilon=target_epsilon,
            delta=delta,
        )

    @abc.abstractmethod
    def describe(self, unit: str, seed_is_known: bool) -> str:
        """Returns a line for the start of a run."""

    @abc.abstractmethod
    def derived(self) -> dict[str, Any]:
        """Returns what a run records of it, as JSON-compatible values."""


@dataclasses.dataclass(frozen=True)
class Turns(Participation):
    """Clients whose rounds keep to a schema, without sampling assumptions.

    With `data_in_one_place` there are no clients: one party holds everybody's data.
    """

    needs_secret_cohorts = False

    schema: schema_lib.MinSep
    data_in_one_place: bool = False

    @property
    @override
    def declared(self) -> schema_lib.MinSep:
        return self.schema

    @property
    @override
    def clause(self) -> str:
        return f"each at most {self._times}, {self.schema.min_sep} rounds apart (stride)"

    @property
    def _times(self) -> str:
        return strategy_lib.counted(self.schema.effective_participations, "time")

    @override
    def sampler(self, seed: int) -> cohorts.MinSepSampler:
        return cohorts.MinSepSampler(
            num_clients=self.num_clients,
            clients_per_round=int(self.clients_per_round),
            min_sep=self.schema.min_sep,
            max_participations=self.schema.max_participations,
            num_rounds=self.num_rounds,
            seed=seed,
        )

    @override
    def rounds(
        self, strategy: strategy_lib.Strategy, noise_multiplier: float, num_rounds: int
    ) -> parts.GaussianRounds:
        if num_rounds == 0:
            return parts.GaussianRounds(0.0, 0)
        schema = dataclasses.replace(self.schema, num_rounds=num_rounds)
        sensitivity = strategy.sensitivity(schema).value
        mu = sensitivity / noise_multiplier if noise_multiplier else math.inf
        return parts.GaussianRounds(mu, schema.effective_participations)

    @override
    def calibrated(
        self,
        strategy: strategy_lib.Strategy,
        others: tuple[parts.Part, ...],
        *,
        target_epsilon: float,
        delta: float,
    ) -> float:
        return calibrate.calibrate_noise_multiplier(
            strategy, self.schema, target_epsilon=target_epsilon, delta=delta, others=others
        )

    @override
    def describe(self, unit: str, seed_is_known: bool) -> str:
        return (
            f"Participation: each of {self.num_clients} {unit}s at most {self._times} in "
            f"{self.num_rounds} rounds, {self.schema.min_sep} apart (stride)."
        )

    @override
    def derived(self) -> dict[str, Any]:
        return {"schema": dataclasses.asdict(self.schema)}


@dataclasses.dataclass(frozen=True)
class Sampled(Participation):
    """Clients, or examples of a pool, that one party draws in secret."""

    needs_secret_cohorts = True
    data_in_one_place = True
    searches_by_steps: ClassVar[bool] = True

    sampling: sampling_lib.Sampling
    pool: Pool | None = None

    @property
    @override
    def declared(self) -> schema_lib.MinSep:
        return self.sampling.schema

    @property
    @override
    def clause(self) -> str:
        return f"each with the sampling {self.sampling.kind!r}, in secret"

    @property
    def cyclic(self) -> sampling_lib.CyclicPoisson:
        """The sampling, where it is cyclic: with a pool it is. Another one is refused."""
        if not isinstance(self.sampling, sampling_lib.CyclicPoisson):
            raise validation.UsageError(f"The sampling is {self.sampling.kind!r}, not cyclic.")
        return self.sampling

    @override
    def sampler(self, seed: int) -> cohorts.CohortSampler:
        return self.sampling.sampler(self.num_clients, seed)

    def bounded(
        self, strategy: strategy_lib.Strategy, noise_multiplier: float, num_rounds: int
    ) -> parts.Bounded:
        """Accounts for the first rounds, as `samplings.zero_out`; with a pool, of examples."""
        # Whole turns, so that not every round is accounted for anew. More rounds never cost less.
        turn = self.declared.min_sep
        return samplings.zero_out(
            self.sampling,
            strategy,
            noise_multiplier=noise_multiplier,
            num_rounds=min(self.num_rounds, -(-num_rounds // turn) * turn),
            units_per_client=1 if self.pool is None else self.pool.of_client,
        )

    @override
    def rounds(
        self, strategy: strategy_lib.Strategy, noise_multiplier: float, num_rounds: int
    ) -> parts.Weights:
        run = self.bounded(strategy, noise_multiplier, max(num_rounds, 1))
        rounds = samplings.rounds_of(run, self.sampling.kind)
        if num_rounds > 0:
            return rounds
        if isinstance(rounds, parts.SampledRounds):
            return dataclasses.replace(rounds, num_rounds=0)
        return parts.GaussianRounds(0.0, 0)

    @override
    def calibrated(
        self,
        strategy: strategy_lib.Strategy,
        others: tuple[parts.Part, ...],
        *,
        target_epsilon: float,
        delta: float,
    ) -> float:
        target = {"target_epsilon": target_epsilon, "delta": delta}
        is_cyclic = isinstance(self.sampling, sampling_lib.CyclicPoisson)
        if is_cyclic and self.searches_by_steps and not others:  # Quicker than by ε alone.
            return amplified_banded.calibrate_noise_multiplier(
                strategy,
                num_rounds=self.num_rounds,
                num_groups=self.cyclic.num_groups,
                sampling_probability=self.cyclic.sampling_probability,
                units_per_client=1 if self.pool is None else self.pool.of_client,
                **target,
            )
        return super().calibrated(strategy, others, **target)

    @override
    def describe(self, unit: str, seed_is_known: bool) -> str:
        sampled = f"of {self.num_clients} {unit}s"
        if self.pool is not None:
            sampled = f"of {self.pool.size} examples in the pool"
        whose = "with a known seed" if seed_is_known else "in secret"
        return (
            f"Participation: {self.clients_per_round:.6g} {sampled} expected in a round, drawn "
            f"{whose}. {self._sentence(unit)}"
        )

    def _sentence(self, unit: str) -> str:
        """Says who is in which round."""
        if self.pool is None:
            return self.sampling.sentence(unit)
        of_client = strategy_lib.counted(self.pool.of_client, "example")
        drawn = self.cyclic.sentence(unit, sampled="example in the pool")
        return sentences.IN_A_POOL.format(of_client=of_client, unit=unit, drawn=drawn)

    def says(self, unit: statement.UnitOfPrivacy) -> dict[str, Any]:
        """Returns the sentences of a `statement.SampledClaim`."""
        has_pool = self.pool is not None
        return {
            "accounting": sentences.OF_SAMPLING["pool" if has_pool else self.sampling.kind],
            "sampling": f"{self._sentence(unit)} {sentences.DRAWN_IN_ONE_PLACE.format(unit=unit)}",
            "secrecy": sentences.SECRET_SEED.format(unit=unit),
            "add_or_remove": sentences.ADD_OR_REMOVE.format(
                unit=unit, what=f"{unit}s and of examples in the pool" if has_pool else f"{unit}s"
            ),
        }

    def parameters(self) -> dict[str, statement.Scalar]:
        """Returns the parameters that a statement has before the number of rounds."""
        described = self.sampling.to_dict()
        del described["num_rounds"]
        return {"sampling": described.pop("kind"), **described}

    def parameters_of(self, rounds: parts.Weights) -> dict[str, statement.Scalar]:
        """Returns those behind it: the pool, and sampled Gaussians to compose the rounds by."""
        found: dict[str, statement.Scalar] = {}
        if self.pool is not None:
            found |= {"pool_size": self.pool.size, "pool_of_user": self.pool.of_client}
        if isinstance(rounds, parts.SampledRounds) and rounds.num_rounds:
            found |= {
                "turns_charged": rounds.num_rounds,
                "noise_multiplier_of_a_turn": rounds.noise_multiplier,
            }
        return found

    @override
    def derived(self) -> dict[str, Any]:
        pool = {} if self.pool is None else {"pool": dataclasses.asdict(self.pool)}
        return {"sampling": self.sampling.to_dict(), **pool}

    @classmethod
    def of(
        cls, sampling: sampling_lib.Sampling, num_clients: int, pool: Pool | None = None
    ) -> Sampled:
        """Returns the participation of which the sampling says how many a round expects."""
        num_units = num_clients if pool is None else pool.size
        return Sampled(num_clients, sampling.share_per_round * num_units, sampling, pool)


@dataclasses.dataclass(frozen=True)
class FedAvgCohorts(Sampled):
    """Cohorts of DP-FedAvg: each client is in a round's cohort with one probability.

    Attributes:
      algorithm: Name of the algorithm in statements, like "dp-fedavg".
      estimator: Denominator of a cohort's sum, `FIXED` or `CLIPPED`. The latter takes twice the
        noise for the same noise multiplier, which is relative to its sensitivity.
    """

    data_in_one_place = False
    searches_by_steps = False  # DP-FedAvg keeps the search that its runs have had.

    algorithm: str = "dp-fedavg"
    estimator: str = FIXED

    @property
    def sampling_probability(self) -> float:
        """The q of the papers: clients per round over number of clients."""
        return self.cyclic.sampling_probability

    @property
    @override
    def clause(self) -> str:
        return f"each with probability {display.round_up(self.sampling_probability)}, in secret"

    @override
    def sampler(self, seed: int) -> cohorts.PoissonSampler:
        # Not that of cyclic sampling: runs that have begun go on with these cohorts.
        return cohorts.PoissonSampler(
            num_clients=self.num_clients,
            sampling_probability=self.sampling_probability,
            num_rounds=self.num_rounds,
            seed=seed,
        )

    @override
    def describe(self, unit: str, seed_is_known: bool) -> str:
        if seed_is_known:
            return f"Participation: sampled with a known seed; {self.num_rounds} rounds."
        return (
            f"Participation: each of {self.num_clients} {unit}s is in a round's cohort with "
            f"probability {display.round_up(self.sampling_probability)}, in secret; "
            f"{self.num_rounds} rounds."
        )

    @override
    def says(self, unit: statement.UnitOfPrivacy) -> dict[str, Any]:
        return {
            "accounting": sentences.SAMPLED_ROUNDS,
            "sampling": sentences.IN_A_COHORT.format(
                unit=unit, chance=display.round_up(self.sampling_probability, 6)
            ),
        }

    @override
    def parameters(self) -> dict[str, statement.Scalar]:
        return {"sampling_probability": self.sampling_probability}

    @override
    def parameters_of(self, rounds: parts.Weights) -> dict[str, statement.Scalar]:
        return {"estimator": _ESTIMATORS[self.estimator]}

    @override
    def derived(self) -> dict[str, Any]:
        return {"sampling_probability": self.sampling_probability}
