"""The privacy plan of correlated noise with secret samples: amplified matrix factorisation.

One party holds everybody's data and draws, in secret, who is in which round. Correlated noise then
needs less noise than either alone: than independent noise with secret samples, and than correlated
noise under a participation schema (Choquette-Choo et al. 2023, 2024). Devices that check in by
themselves draw no such samples: for them there is `dp_ftrl_privacy`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.accounting import (
    amplified_banded,
    calibrate,
    cyclic_optimize,
    noise_search,
    parts,
    samplings,
    statement,
)
from tff_dpftrl.accounting import facts as facts_lib
from tff_dpftrl.accounting import statement_sentences as sentences
from tff_dpftrl.accounting.amplification import balls_in_bins
from tff_dpftrl.mechanisms import serialization, table, zoo
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.mechanisms import workload as workload_lib
from tff_dpftrl.participation import cohorts, observed
from tff_dpftrl.participation import sampling as sampling_lib
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.runs import privacy, simulated_run

SAMPLINGS = tuple(
    one.kind
    for one in (sampling_lib.CyclicPoisson, sampling_lib.BallsInBins, sampling_lib.MinSepPoisson)
)
"""Names of the samplings."""
_CYCLIC, _BINS, _MIN_SEP = SAMPLINGS

_BANDED = ("bandtoep", "bandmf", "bandfhu", "identity")
"""Mechanisms with a banded C: one unit's rounds share no noise if they are as far apart."""

CHOSEN = "bandtoep"
"""Mechanism whose number of bands can be chosen."""


@dataclasses.dataclass(frozen=True)
class Pool:
    """Examples of all clients, each sampled and clipped by itself at its client's turn.

    `of_client` is the largest number of examples of one client.
    """

    size: int
    of_client: int


def accounted(
    sampling: sampling_lib.Sampling,
    strategy: strategy_lib.Strategy,
    *,
    noise_multiplier: float,
    num_rounds: int,
    pool: Pool | None = None,
) -> parts.Bounded:
    """Accounts for the first rounds of a run, as `samplings.zero_out`; with a pool, of examples."""
    return samplings.zero_out(
        sampling,
        strategy,
        noise_multiplier=noise_multiplier,
        num_rounds=num_rounds,
        units_per_client=1 if pool is None else pool.of_client,
    )


@dataclasses.dataclass(frozen=True)
class AmplifiedPrivacy(privacy.Privacy):
    """Request for correlated noise, amplified by secret samples.

    Attributes:
      sampling: One of `SAMPLINGS`.
      clients_per_round: Number of clients that a round expects. Bins have a whole number, so that
        with them a round may expect some more.
      clip_norm: L2 norm that a client's update is clipped to.
      mechanism: A key of `mechanisms.table.MECHANISMS`.
      strategy_file: File of a strategy, or a name of the zoo, instead of a mechanism.
      min_sep: Smallest stride of a client: the number of groups of cyclic sampling (the bands of
        the strategy if None), or the b of b-min-sep. Bins follow from `clients_per_round`. If
        neither is given, nor the bands of "bandtoep", those of least noise at `target_epsilon` are
        taken.
      noise_multiplier: z; None if `target_epsilon` is given instead.
      target_epsilon: The largest ε that the whole run may spend.
      deterministic_seed: Seed of the noise, for debugging; the run is not private then.
      deployment: Larger run to simulate; None if this run stands for itself. Noise and sampling are
        then those of the larger run.
      pool: Examples that are sampled, with cyclic sampling, so that `clients_per_round` is a number
        of examples; None if clients are.
      others: All else that the run releases about the same clients. The target is for the whole.
    """

    sampling: str
    num_rounds: int
    clients_per_round: int
    clip_norm: float
    delta: float
    mechanism: str = "bandtoep"
    options: table.Options = table.DEFAULTS
    strategy_file: str | None = None
    min_sep: int | None = None
    noise_multiplier: float | None = None
    target_epsilon: float | None = None
    deterministic_seed: int | None = None
    deployment: simulated_run.Deployment | None = None
    unit_of_privacy: statement.UnitOfPrivacy = "user"
    pool: Pool | None = None
    others: tuple[parts.Part, ...] = ()

    @override
    def check(self, num_clients: int) -> None:
        privacy.check_parts(self.others, self.deployment)
        if self.pool is not None and self.sampling != _CYCLIC:
            raise validation.UsageError(
                f"pool is for sampling {_CYCLIC!r}, not for {self.sampling!r}: leave it out."
            )
        self._drawn(num_clients)
        if self.deployment is not None:
            self.deployment.scale(self.clients_per_round)
            self._wanted(num_clients)

    @override
    def plan(self, num_clients: int, num_parameters: int) -> AmplifiedPlan:
        del num_parameters
        self.check(num_clients)
        if self._leaves_bands_open and self.min_sep is None:
            return min(self.curve(num_clients), key=self._noise)
        wanted = self._wanted(num_clients)
        strategy = self._strategy(wanted)
        noise_multiplier = self.noise_multiplier
        if noise_multiplier is None:
            if self.target_epsilon is None:
                raise validation.UsageError("Give either noise_multiplier or target_epsilon.")
            noise_multiplier = self._calibrated(wanted, strategy, self.target_epsilon)
        # Refuses what cannot be accounted for, before a run begins.
        accounted(wanted, strategy, noise_multiplier=noise_multiplier, num_rounds=self.num_rounds)
        if parts.precision_of_rounds(self.others) > 0.0:
            self._rounds(wanted, strategy, noise_multiplier).noise_of_figure()
        return self._with(num_clients, wanted, strategy, noise_multiplier)

    def curve(self, num_clients: int) -> list[AmplifiedPlan]:
        """Plans a run for each number of bands that is worth a try (`cyclic_optimize.try_bands`).

        Args:
          num_clients: Number of training users.

        Returns:
          Plans that meet the target, with growing numbers of bands, one of which is independent
          noise: up to a whole pass, or to `min_sep`.

        Raises:
          ValueError: If the population cannot keep what is asked for.
        """
        units = num_clients if self.pool is None else self.pool.size
        expected = self.clients_per_round
        if self.deployment is not None:
            units, expected = self.deployment.population, self.deployment.report_goal

        def plan(bands: int) -> AmplifiedPlan:
            mechanism, options = "identity", table.DEFAULTS
            if bands > 1:
                mechanism, options = CHOSEN, dataclasses.replace(self.options, bands=bands)
            one = dataclasses.replace(self, mechanism=mechanism, options=options)
            return one.plan(num_clients, 0)

        most = self.min_sep or units // expected
        return cyclic_optimize.try_bands(plan, self._noise, self.num_rounds, most)

    def _noise(self, plan: AmplifiedPlan) -> float:
        """Returns the noise in the sums of the rounds, or in the models of the workload."""
        error = plan.strategy.rms_error(self.num_rounds, self.options.workload)
        return plan.noise_multiplier * error

    @property
    def _leaves_bands_open(self) -> bool:
        """Whether the number of bands may be that of least noise."""
        return (
            self.mechanism == CHOSEN
            and self.strategy_file is None
            and self.options.bands is None
            and self.target_epsilon is not None
        )

    @override
    def resumed(
        self, num_clients: int, num_parameters: int, derived: Mapping[str, Any]
    ) -> AmplifiedPlan:
        del num_parameters
        asked = dataclasses.replace(self, others=parts.from_json(derived.get("others", ())))
        return asked._with(
            num_clients,
            sampling_lib.Sampling.from_dict(derived["sampling"]),
            serialization.strategy_from_dict(derived["strategy"]),
            derived["noise_multiplier"],
        )

    def _calibrated(
        self,
        wanted: sampling_lib.Sampling,
        strategy: strategy_lib.Strategy,
        target_epsilon: float,
    ) -> float:
        """Returns the smallest noise multiplier that meets a target."""
        if self.others:
            return calibrate.noise_beside(
                lambda noise: self._rounds(wanted, strategy, noise),
                self.others,
                target_epsilon=target_epsilon,
                delta=self.delta,
            )
        if isinstance(wanted, sampling_lib.CyclicPoisson):  # Quicker than by its ε alone.
            return amplified_banded.calibrate_noise_multiplier(
                strategy,
                num_rounds=self.num_rounds,
                num_groups=wanted.num_groups,
                sampling_probability=wanted.sampling_probability,
                target_epsilon=target_epsilon,
                delta=self.delta,
                units_per_client=1 if self.pool is None else self.pool.of_client,
            )
        return noise_search.smallest_noise(
            lambda noise: accounted(
                wanted, strategy, noise_multiplier=noise, num_rounds=self.num_rounds
            ).epsilon(self.delta),
            target_epsilon=target_epsilon,
        )

    def _rounds(
        self, wanted: sampling_lib.Sampling, strategy: strategy_lib.Strategy, noise: float
    ) -> parts.Weights:
        """Returns the rounds of a run with a noise multiplier."""
        return samplings.rounds_of(
            accounted(
                wanted,
                strategy,
                noise_multiplier=noise,
                num_rounds=self.num_rounds,
                pool=self.pool,
            ),
            wanted.kind,
        )

    def _wanted(self, num_clients: int) -> sampling_lib.Sampling:
        """Returns the sampling of the run that ε is wanted for."""
        if self.deployment is None:
            return self._drawn(num_clients)
        try:
            return _described(
                self.sampling,
                self.num_rounds,
                self.deployment.population,
                self.deployment.report_goal,
                self._stride(),
            )
        except ValueError as error:
            raise validation.UsageError(
                "In the run that is simulated, where clients_per_round is simulate_report_goal "
                f"and simulate_population says how many clients there are: {error}"
            ) from error

    def _drawn(self, num_clients: int) -> sampling_lib.Sampling:
        """Returns the sampling of this run, also if it simulates a larger one."""
        if self.pool is not None:
            num_clients = self.pool.size
        privacy.check_population(num_clients, self.clients_per_round)
        return _described(
            self.sampling, self.num_rounds, num_clients, self.clients_per_round, self._stride()
        )

    def _stride(self) -> int | None:
        """Returns the stride that was asked for, or that the bands need; None for bins."""
        if self.sampling == _BINS:
            if self.min_sep is not None:
                raise validation.UsageError(
                    "min_sep has no meaning with sampling 'bins', whose stride is the number of "
                    "bins, clients over clients_per_round: leave it out."
                )
            return None
        bands = self._bands()
        if self.sampling == _CYCLIC:
            if bands is None and self.strategy_file is None and self.mechanism not in _BANDED:
                raise validation.UsageError(
                    f"sampling 'cyclic' needs a banded matrix, which mechanism {self.mechanism!r} "
                    f"has not: take mechanism {', '.join(_BANDED[:-1])} with bands=8, say, or "
                    "identity; or sampling 'bins', which takes any mechanism."
                )
            if bands is not None and self.min_sep is not None and self.min_sep < bands:
                raise validation.UsageError(
                    f"min_sep={self.min_sep} groups are fewer than the {bands} bands, so that one "
                    f"client's rounds would share noise: raise min_sep to {bands}, or lower bands."
                )
        stride = bands if self.min_sep is None else self.min_sep
        if stride is None and self._leaves_bands_open:
            stride = 1  # Any population has it.
        if stride is None:
            raise validation.UsageError(
                f"sampling {self.sampling!r} needs bands of the mechanism, or min_sep, the least "
                "number of rounds from one of a client to its next: give 8, say; or, with "
                f"mechanism {CHOSEN!r}, target_epsilon, at which those of least noise are taken."
            )
        return stride

    def _bands(self) -> int | None:
        """Returns the bands that are known before the strategy is built; None if none are."""
        if self.strategy_file is not None:
            loaded = zoo.find(self.strategy_file)
            return None if self.sampling != _CYCLIC else amplified_banded.num_bands(loaded)
        if self.mechanism == "identity":
            return 1
        return self.options.bands if self.mechanism in _BANDED else None

    def _strategy(self, drawn: sampling_lib.Sampling) -> strategy_lib.Strategy:
        """Returns the strategy of least noise for the participations that cost something."""
        if self.strategy_file is not None:
            return zoo.find(self.strategy_file)
        schema, options = drawn.schema, self.options
        if self.mechanism in _BANDED and self.mechanism != "identity" and options.bands is None:
            options = dataclasses.replace(options, bands=min(schema.min_sep, schema.num_rounds))
        if self.sampling == _CYCLIC:  # Each round of a client counts by itself: one column of C.
            schema = schema_lib.MinSep(self.num_rounds, self.num_rounds, 1)
        return table.build(self.mechanism, schema, options)

    def _with(
        self,
        num_clients: int,
        wanted: sampling_lib.Sampling,
        strategy: strategy_lib.Strategy,
        noise_multiplier: float,
    ) -> AmplifiedPlan:
        """Returns the plan; sampling and noise multiplier are of the run that ε is wanted for."""
        scale, simulated, drawn = 1.0, None, wanted
        if self.deployment is not None:
            drawn, population = self._drawn(num_clients), self.deployment.population
            # Each round expects this many clients: whole bins may be larger than clients_per_round.
            scale = drawn.share_per_round * num_clients / (wanted.share_per_round * population)
            spent = accounted(
                wanted, strategy, noise_multiplier=noise_multiplier, num_rounds=self.num_rounds
            )
            simulated = simulated_run.SimulatedRun(
                deployment=self.deployment,
                num_rounds=self.num_rounds,
                participation=f"each with the sampling {self.sampling!r}, in secret",
                noise_multiplier=noise_multiplier,
                epsilon=spent.epsilon(self.delta),
                delta=self.delta,
            )
        return AmplifiedPlan(
            noise_multiplier=noise_multiplier * scale,
            clip_norm=self.clip_norm,
            clients_per_round=drawn.share_per_round
            * (num_clients if self.pool is None else self.pool.size),
            num_clients=num_clients,
            num_rounds=self.num_rounds,
            delta=self.delta,
            deterministic_seed=self.deterministic_seed,
            simulated=simulated,
            sampling=drawn,
            wanted_sampling=wanted,
            strategy=strategy,
            unit_of_privacy=self.unit_of_privacy,
            pool=self.pool,
            workload=self.options.workload,
            others=self.others,
        )


def _described(
    name: str, num_rounds: int, num_clients: int, clients_per_round: int, stride: int | None
) -> sampling_lib.Sampling:
    """Returns the sampling with which a round expects so many clients."""
    if stride is None:
        bins = num_clients // clients_per_round
        if bins > num_rounds:
            raise validation.UsageError(
                f"sampling 'bins' would have {bins} bins of {clients_per_round} clients and only "
                f"{num_rounds} rounds, so that some never come: raise num_rounds to {bins}, or "
                f"clients_per_round to {num_clients // (num_rounds + 1) + 1}."
            )
        return sampling_lib.BallsInBins(num_rounds, bins)
    kind = sampling_lib.CyclicPoisson if name == _CYCLIC else sampling_lib.MinSepPoisson
    most = num_clients // clients_per_round
    if stride > most:
        raise validation.UsageError(
            f"min_sep={stride} (or bands, if it is not given) rounds of {clients_per_round} "
            f"different clients need more than the {num_clients} there are: lower it to {most}, or "
            f"clients_per_round to {num_clients // stride}."
        )
    return kind.for_cohorts(
        num_rounds, stride, num_clients=num_clients, clients_per_round=clients_per_round
    )


@dataclasses.dataclass(frozen=True)
class AmplifiedPlan(privacy.FederatedPlan):
    """Plan of a run with correlated noise whose samples are secret.

    Attributes:
      wanted_sampling: Sampling of the run that was asked for: the simulated one, if there is one.
      pool: Examples that are sampled at their clients' turns; None if clients are.
      workload: Workload that the strategy was optimised for; None for the prefix sums.
    """

    sampling: sampling_lib.Sampling
    wanted_sampling: sampling_lib.Sampling
    strategy: strategy_lib.Strategy
    pool: Pool | None = None
    workload: workload_lib.Workload | None = None

    needs_secret_cohorts = True

    @property
    @override
    def memory_copies(self) -> int:
        return self.strategy.memory_copies(self.num_rounds)

    @property
    @override
    def declared(self) -> schema_lib.MinSep:
        """Participation of the client that is drawn most often, which the ledger enforces."""
        return self.sampling.schema

    @override
    def sampler(self, seed: int) -> cohorts.CohortSampler:
        return self.sampling.sampler(self.num_clients, seed)

    @override
    def epsilon_after(self, rounds_done: int) -> float | None:
        return self._epsilon_spent(rounds_done) if self.has_guarantee else None

    def _epsilon_spent(self, num_rounds: int) -> float:
        """Computes ε of the first rounds, if seeds stay secret; inf without noise."""
        if not self.has_noise:
            return math.inf
        if num_rounds == 0:
            return parts.compose(parts.GaussianRounds(0.0, 0), self.others, self.delta)
        return privacy.epsilon(self._rounds(num_rounds), self.others, self.delta)

    @property
    @override
    def rounds(self) -> parts.Weights:
        return self._rounds(self.num_rounds)

    def _rounds(self, num_rounds: int) -> parts.Weights:
        return samplings.rounds_of(self._spent(num_rounds), self.sampling.kind)

    def _spent(self, num_rounds: int) -> parts.Bounded:
        # Whole turns, so that not every round is accounted for anew. More rounds never cost less.
        turn = self.declared.min_sep
        return accounted(
            self.sampling,
            self.strategy,
            noise_multiplier=self.noise_multiplier,
            num_rounds=min(self.num_rounds, -(-num_rounds // turn) * turn),
            pool=self.pool,
        )

    @property
    def cyclic(self) -> sampling_lib.CyclicPoisson:
        """The sampling, where it is cyclic: with a pool it is. Another one is refused."""
        if not isinstance(self.sampling, sampling_lib.CyclicPoisson):
            raise validation.UsageError(f"The sampling is {self.sampling.kind!r}, not cyclic.")
        return self.sampling

    def _sentence(self) -> str:
        """Says who is in which round."""
        unit = self.unit_of_privacy
        if self.pool is None:
            return self.sampling.sentence(unit)
        of_client = strategy_lib.counted(self.pool.of_client, "example")
        return (
            f"At most {of_client} of each {unit} were put into a pool, once, at random. "
            f"{self.cyclic.sentence(unit, sampled='example in the pool')}"
        )

    def _turns(self, num_rounds: int) -> dict[str, statement.Scalar]:
        """Returns the sampled Gaussians that cyclic sampling costs, to compose them by."""
        spent = self._spent(num_rounds) if num_rounds else None
        if not isinstance(spent, amplified_banded.AmplifiedBanded):
            return {}
        return {
            "turns_charged": spent.sampled.num_rounds,
            "noise_multiplier_of_a_turn": spent.sampled.noise_multiplier,
        }

    def _profile(self, num_rounds: int) -> tuple[tuple[float, float], ...]:
        if not self.has_guarantee or num_rounds == 0:
            return ()
        rounds, epsilon = self._rounds(num_rounds), self._epsilon_spent(num_rounds)
        if isinstance(rounds, parts.SampledRounds):
            return parts.profile(rounds, self.others, epsilon)
        spent = self._spent(num_rounds)
        if self.others or not isinstance(spent, balls_in_bins.BallsInBins):
            return ()
        return tuple((share * epsilon, spent.delta(share * epsilon)) for share in _PROFILE)

    @override
    def noise_to_signal(self, num_parameters: int) -> float:
        return privacy.noise_to_signal(
            self.strategy,
            noise_multiplier=self.noise_multiplier,
            num_parameters=num_parameters,
            num_rounds=self.num_rounds,
            clients_per_round=self.clients_per_round,
            workload=self.workload,
        )

    @override
    def describe(self) -> list[str]:
        sampled = f"of {self.num_clients} {self.unit_of_privacy}s"
        if self.pool is not None:
            sampled = f"of {self.pool.size} examples in the pool"
        whose = "in secret" if self.deterministic_seed is None else "with a known seed"
        return [
            f"Participation: {self.clients_per_round:.6g} {sampled} expected in a round, drawn "
            f"{whose}. {self._sentence()}",
            *privacy.noise_lines(
                self.strategy, self.noise_multiplier, self.memory_copies, self.workload
            ),
        ]

    @override
    def statement(
        self,
        seen: observed.ObservedParticipation,
        facts: facts_lib.Facts,
        *,
        charge_all_rounds: bool,
    ) -> statement.PrivacyStatement:
        unit = self.unit_of_privacy
        charged = self.num_rounds if charge_all_rounds else seen.num_rounds
        parameters: dict[str, statement.Scalar] = {
            "clip_norm": self.clip_norm,
            "clients_per_round": self.clients_per_round,
            "noise_multiplier": self.noise_multiplier,
            "sampling": self.sampling.kind,
            **{k: v for k, v in self.sampling.to_dict().items() if k not in ("kind", "num_rounds")},
            "num_rounds": seen.num_rounds,
            "num_rounds_charged": charged,
        }
        if self.pool is not None:
            parameters |= {"pool_size": self.pool.size, "pool_of_user": self.pool.of_client}
        parameters |= self._turns(charged)
        claim = statement.SampledClaim(
            mechanism=self.strategy.name,
            epsilon=self._epsilon_spent(charged),
            delta=self.delta,
            accounting=samplings.SAMPLINGS[self.sampling.kind].sentences
            if self.pool is None
            else samplings.OF_A_POOL,
            sampling=f"{self._sentence()} {sentences.drawn_in_one_place(unit)}",
            secrecy=sentences.secret_seed(unit),
            add_or_remove=sentences.add_or_remove(
                unit, f"{unit}s" if self.pool is None else f"{unit}s and of examples in the pool"
            ),
            seed_is_known=self.deterministic_seed is not None,
            claimed_by_author=not serialization.is_built_in(self.strategy),
            profile=self._profile(charged),
            others=self.others,
            weights=self._rounds(charged) if self.others and charged and self.has_noise else None,
        )
        return statement.sampled_statement(
            claim,
            self._facts(facts, parameters),
            unit_of_privacy=unit,
            num_users=self.num_clients,
            data_in_one_place=True,
        )

    @override
    def derived(self) -> dict[str, Any]:
        return {
            "sampling": self.wanted_sampling.to_dict(),
            "noise_multiplier": self.wanted_noise_multiplier,
            "delta": self.delta,
            "strategy": self.strategy.to_dict(),
            **({} if self.pool is None else {"pool": dataclasses.asdict(self.pool)}),
            **privacy.derived_parts(self.others),
        }


_PROFILE = (0.0, 0.1, 0.3, 0.6)
"""Shares of ε at which a statement has δ, too; each takes about a second."""
