"""The plan of a run: who takes part, how updates are clipped, what noise they get, and the promise.

Everything that concerns privacy is asked of the plan: what is claimed is what is run. Its five
parts are the participation, the clipping, the noise, all else that is released, and who is
protected. Settings that cannot change the guarantee are elsewhere.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tff_dpftrl import validation
from tff_dpftrl.accounting import display, guarantee, parts, statement
from tff_dpftrl.accounting import facts as facts_lib
from tff_dpftrl.accounting import statement_sentences as sentences
from tff_dpftrl.accounting.amplification import balls_in_bins
from tff_dpftrl.discretization import grid
from tff_dpftrl.mechanisms import dense, identity, restarts, serialization
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.mechanisms import workload as workload_lib
from tff_dpftrl.participation import cohorts, ledger, observed
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.runs import participants, simulated_run


def not_covered(exact: str, others: Sequence[parts.Part]) -> str:
    """Returns a statement's sentence on exact figures: `exact`, unless metrics are released."""
    is_released = any(part.name == parts.METRICS for part in others)
    return sentences.EXACT_BESIDE_RELEASED if is_released else exact


SWAMPED = 0.3
"""`MechanismPlan.noise_to_signal` above which a run gets a hint: clear evidence ends there.

Runs of docs/experiments.md with tree or BLT that gained clearly on their pretrained model had 0.06
to 0.3, those with banded noise and secret samples about 0.4. At 0.44 independent noise cost four
points, and above 0.7 a point was gained at best. But a pretrained model at 0.58 beat trigrams,
while toy models from random weights learned nothing from 0.2 on.
"""

_PROFILE = (0.0, 0.1, 0.3, 0.6)
"""Shares of ε at which a statement of bins has δ, too; each takes about a second."""


@dataclasses.dataclass(frozen=True)
class Clipping:
    """Clipping of the updates.

    Attributes:
      norm: L2 norm that an update is clipped to, the first one if it is learned or changes.
      adaptive: Whether the clip norm is learned under the same noise multiplier.
      per_layer: Whether each tensor of an update is clipped by itself.
      later_norms: Clip norms after `norm`, each behind the number of rounds before it. The noise is
        the noise multiplier times the sensitivity at the round's own clip norm, so that the cost of
        a round is the same (McMahan et al. 2018, section 3).
    """

    norm: float
    adaptive: bool = False
    per_layer: bool = False
    later_norms: tuple[tuple[int, float], ...] = ()

    def norms(self, num_rounds: int) -> float | tuple[float, ...]:
        """Returns the clip norm, or one for each round if it changes."""
        if not self.later_norms:
            return self.norm
        starts, norms = zip((0, self.norm), *self.later_norms, strict=True)
        return tuple(np.repeat(norms, np.diff([*starts, num_rounds])).tolist())

    @property
    def in_words(self) -> str:
        """The clip norms that follow each other."""
        later = (f"{norm:g} after {after} rounds" for after, norm in self.later_norms)
        return ", ".join([f"{self.norm:g}", *later])


@dataclasses.dataclass(frozen=True)
class Noise:
    """Noise of the sums.

    Attributes:
      strategy: The strategy matrix, restarts included; None without clipping and noise.
      multiplier: z, standard deviation of the noise per unit of sensitivity of one client's
        contribution to one round; 0 for none.
      deterministic_seed: Seed of the noise if the user gave one; the run is not private then.
      workload: Workload that the strategy was optimised for; None for the prefix sums. The
        guarantee does not depend on it.
      encoding: Grid of the secure aggregation; None without it.
      parties: Number of parties that each add the whole noise within secure sums; 0 if the server
        adds it.
    """

    strategy: strategy_lib.Strategy | None
    multiplier: float
    deterministic_seed: int | None = None
    workload: workload_lib.Workload | None = None
    encoding: grid.GridEncoding | None = None
    parties: int = 0


@functools.lru_cache(maxsize=64)
def _epsilon(rounds: parts.Weights, others: tuple[parts.Part, ...], delta: float) -> float:
    return parts.compose(rounds, others, delta)


@dataclasses.dataclass(frozen=True)
class MechanismPlan:
    """Plan of a run's privacy: its promise, and the mechanism that keeps it.

    Attributes:
      participation: Who takes part in which round.
      clipping: How the updates are clipped.
      noise: What noise the sums get.
      delta: δ of the statement.
      others: All else that the run releases about the same users; ε is that of the whole.
      unit_of_privacy: Who is protected: neighbouring data differ in all that one of them has.
      simulated: Larger run whose noise, scaled down with the cohort, this run has; None if the run
        stands for itself. All other attributes are those of this run.
    """

    participation: participants.Participation
    clipping: Clipping
    noise: Noise
    delta: float
    others: tuple[parts.Part, ...] = ()
    unit_of_privacy: statement.UnitOfPrivacy = "user"
    simulated: simulated_run.SimulatedRun | None = None

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return self.participation.num_clients

    @property
    def clients_per_round(self) -> float:
        """Number of clients in a cohort, the expected one if it is sampled."""
        return self.participation.clients_per_round

    @property
    def declared(self) -> schema_lib.MinSep:
        """Participation schema that the ledger enforces."""
        return self.participation.declared

    @property
    def num_rounds(self) -> int:
        """Largest number of rounds."""
        return self.declared.num_rounds

    @property
    def needs_secret_cohorts(self) -> bool:
        """Whether the guarantee rests on the secrecy of who took part."""
        return self.participation.needs_secret_cohorts

    @property
    def clip_norm(self) -> float:
        """L2 norm that an update is clipped to, the first one if it changes."""
        return self.clipping.norm

    @property
    def strategy(self) -> strategy_lib.Strategy | None:
        """The strategy matrix; None without clipping and noise."""
        return self.noise.strategy

    @property
    def noise_multiplier(self) -> float:
        """The z of this run."""
        return self.noise.multiplier

    @property
    def wanted_noise_multiplier(self) -> float:
        """The z of the run that was asked for: the simulated one, if there is one."""
        return self.noise_multiplier if self.simulated is None else self.simulated.noise_multiplier

    @property
    def deterministic_seed(self) -> int | None:
        """Seed of the noise if the user gave one."""
        return self.noise.deterministic_seed

    @property
    def has_noise(self) -> bool:
        """Whether the aggregator adds any noise."""
        return self.noise_multiplier > 0.0

    @property
    def has_guarantee(self) -> bool:
        """Whether anything is promised: noise that nobody else can draw again."""
        return self.has_noise and self.deterministic_seed is None

    @property
    def memory_copies(self) -> int:
        """Model-sized tensors that the noise keeps between rounds."""
        return 0 if self.strategy is None else self.strategy.memory_copies(self.num_rounds)

    def with_noise(self, **changes: Any) -> MechanismPlan:
        """Returns the plan with other values of `Noise`."""
        return dataclasses.replace(self, noise=dataclasses.replace(self.noise, **changes))

    def calibrated(self, target_epsilon: float) -> MechanismPlan:
        """Returns the plan with the least noise with which the whole meets a target at `delta`."""
        if self.strategy is None:
            raise validation.UsageError(
                "Without a mechanism there is no noise to calibrate or to scale: name a mechanism, "
                "or leave out target_epsilon and the simulated run."
            )
        multiplier = self.participation.calibrated(
            self.strategy, self.others, target_epsilon=target_epsilon, delta=self.delta
        )
        return self.with_noise(multiplier=multiplier)

    def at_delta(self, delta: float) -> MechanismPlan:
        """Returns the same plan with another δ of the statement."""
        return dataclasses.replace(self, delta=delta)

    def sampler(self, seed: int) -> cohorts.CohortSampler:
        """Returns the sampler of the cohorts, which never break `declared`."""
        return self.participation.sampler(seed)

    @property
    def rounds(self) -> parts.Weights:
        """All rounds' updates, without what else is released, as if no seed were known."""
        return self._rounds(self.num_rounds)

    def _rounds(self, num_rounds: int) -> parts.Weights:
        if not 0 <= num_rounds <= self.num_rounds:
            raise validation.UsageError(
                f"num_rounds must be between 0 and those planned, {self.num_rounds}, got "
                f"{num_rounds}."
            )
        strategy = identity.Identity() if self.strategy is None else self.strategy
        return self.participation.rounds(strategy, self.noise_multiplier, num_rounds)

    def _spent(self, num_rounds: int) -> float:
        """Computes ε of the first rounds, if seeds stay secret; inf without noise."""
        if not self.has_noise:
            return math.inf
        return _epsilon(self._rounds(num_rounds), self.others, self.delta)

    def epsilon_after(self, rounds_done: int) -> float | None:
        """Returns ε at δ of the models of the first rounds; None without guarantee."""
        return self._spent(rounds_done) if self.has_guarantee else None

    def epsilon_of(self, seen: observed.ObservedParticipation) -> float:
        """Returns ε at δ of the rounds that were observed; inf without guarantee.

        Of secret samples only the number of rounds counts.
        """
        if isinstance(self.participation, participants.Turns):
            return self._claim(seen.as_schema()).epsilon
        epsilon = self.epsilon_after(seen.num_rounds)
        return math.inf if epsilon is None else epsilon

    def budget_guard(self, max_epsilon: float | None) -> ledger.BudgetGuard | None:
        """Returns the ledger's last check before a round begins, on the observed participation."""
        if max_epsilon is None:
            return None

        def guard(seen: observed.ObservedParticipation) -> str | None:
            epsilon = self.epsilon_of(seen)
            if epsilon <= max_epsilon:
                return None
            return (
                f"epsilon would be {display.round_up(epsilon)}, above max_epsilon={max_epsilon:g}."
            )

        return guard

    def delta_warnings(self) -> list[str]:
        """Returns why δ is too large for so many clients, if it is, for the start of a run."""
        if not self.has_guarantee:
            return []
        said = statement.large_delta(self.delta, self.num_clients, self.unit_of_privacy)
        return [f"Warning: {reason}" for reason in said]

    def noise_to_signal(self, num_parameters: int) -> float:
        """Computes the ratio of noise to signal in the sum of all rounds.

        Args:
          num_parameters: Number of trainable weights.

        Returns:
          The expected L2 norm of the noise in the sum of all rounds, over the largest
          norm that the clients' part of that sum can have: all of them clipped, and all
          pointing the same way. Real updates add up to a fraction of that.
        """
        # With adaptive clipping the noise is a little larger, since z is that of both streams.
        noise, num_rounds = self.noise, self.num_rounds
        if noise.strategy is None:
            return 0.0
        # The noise of the last model, row n - 1 of B = A C⁻¹, over what updates would make of it.
        variance = float(noise.strategy.model_noise_variance(num_rounds, noise.workload)[-1])
        weight = float(num_rounds)
        if noise.workload is not None:
            weight = float(noise.workload.apply(np.ones(num_rounds))[-1])
        if self.clipping.later_norms:  # Independent noise, and each round weighs its clip norm.
            norms = np.asarray(self.clipping.norms(num_rounds)) / self.clip_norm
            variance, weight = float(norms @ norms), float(norms.sum())
        factor = 1.0 if noise.encoding is None else noise.encoding.inflation
        factor *= math.sqrt(max(noise.parties, 1))  # Each adds the noise of all.
        if getattr(self.participation, "estimator", None) == participants.CLIPPED:
            factor *= 2.0
        stddev = noise.multiplier * factor * math.sqrt(variance * num_parameters)
        return stddev / (weight * self.clients_per_round)

    def describe(self) -> list[str]:
        """Returns mechanism, noise and participation in a few lines, for the start of a run."""
        drawn, noise = self.participation, self.noise
        lines = [drawn.describe(self.unit_of_privacy, self.deterministic_seed is not None)]
        if noise.strategy is None:
            return [*lines, "Noise: none, and no clipping."]
        if isinstance(drawn, participants.FedAvgCohorts):
            lines.append(f"Noise: {self.mechanism}, independent, z = {noise.multiplier:.6g}.")
            if self.clipping.later_norms:
                lines.append(f"Clip norm, which the noise follows: {self.clipping.in_words}.")
            return lines
        base, longest = noise.strategy, self.num_rounds
        if isinstance(base, restarts.Restarted):
            base, longest = base.base, max(base.block_lengths(self.num_rounds))
        if isinstance(base, dense.Dense):
            draws = base.draws_per_round(longest)
            lines.append(
                f"Time: the noise of a round takes the draws of {draws:.4g} rounds, on average. "
                f"rounds_at_once={base.rounds_at_once} of the strategy divides draws, and is the "
                "number of copies of the model that are kept."
            )
        if self.clipping.adaptive and not restarts.has_restarts(noise.strategy):
            lines.append(
                f"Warning: no restart lies within {self.num_rounds} rounds, so that the clip norm "
                f"stays {self.clip_norm:g}, with more noise than a fixed one has: give "
                "restart_warmup, below the number of rounds, or leave adaptive_clipping out."
            )
        if noise.parties:
            lines.append(_of_parties(noise.parties))
        optimised = (
            "" if noise.workload is None else f" Optimised for {noise.workload.description}."
        )
        copies = "copy" if self.memory_copies == 1 else "copies"
        return [
            *lines,
            f"Noise: {noise.strategy.name}, z = {noise.multiplier:.6g}.{optimised}",
            f"State: the noise keeps {self.memory_copies or 'no'} {copies} of the model between "
            "rounds.",
        ]

    @property
    def mechanism(self) -> str:
        """Name of the mechanism in statements."""
        strategy = "none" if self.strategy is None else self.strategy.name
        return getattr(self.participation, "algorithm", strategy)

    def statement(
        self,
        seen: observed.ObservedParticipation,
        facts: facts_lib.Facts,
        *,
        charge_all_rounds: bool,
    ) -> statement.PrivacyStatement:
        """Makes the statement of a run, for the participation that was observed.

        Args:
          seen: Rounds, stride and participations that the ledger recorded.
          facts: Facts of the run that the plan does not have.
          charge_all_rounds: Whether all declared rounds are charged, not only those that
            were run; necessary if the data may have decided when it ended.

        Returns:
          A statement; one that says "no guarantee" where there is none.
        """
        if isinstance(self.participation, participants.Turns):
            return self._of_turns(self.participation, seen, facts, charge_all_rounds)
        assert isinstance(self.participation, participants.Sampled)
        return self._of_samples(self.participation, seen, facts, charge_all_rounds)

    def _claim(self, schema: schema_lib.MinSep) -> guarantee.Guarantee:
        adaptive = self.clipping.adaptive
        return guarantee.dp_ftrl_guarantee(
            identity.Identity() if self.strategy is None else self.strategy,
            noise_multiplier=self.noise_multiplier,
            schema=schema,
            delta=self.delta,
            seed_is_known=self.deterministic_seed is not None,
            clip_norm=None if adaptive else self.clip_norm,
            adaptive_clipping=adaptive,
            others=self.others,
        )

    def _of_turns(
        self,
        turns: participants.Turns,
        seen: observed.ObservedParticipation,
        facts: facts_lib.Facts,
        charge_all_rounds: bool,
    ) -> statement.PrivacyStatement:
        parameters: dict[str, statement.Scalar] = {"clients_per_round": self.clients_per_round}
        if self.clipping.adaptive:
            parameters["initial_clip_norm"] = self.clip_norm
        if (encoding := self.noise.encoding) is not None:
            parameters |= {
                "secagg_norm_inflation": encoding.inflation,
                "secagg_bits_per_parameter": encoding.bits_per_parameter,
                "secagg_upload_bytes_per_client": encoding.upload_bytes,
                "noise_multiplier_is_relative_to": "clip_norm times secagg_norm_inflation",
            }
        claim = self._claim(self.declared if charge_all_rounds else seen.as_schema())
        if self.strategy is None:
            claim = dataclasses.replace(claim, mechanism=self.mechanism, clip_norm=None)
        return statement.dp_ftrl_statement(
            claim,
            self._facts(facts, parameters),
            unit_of_privacy=self.unit_of_privacy,
            num_users=self.num_clients,
            declared=self.declared,
            observed=seen,
            data_in_one_place=turns.data_in_one_place,
        )

    def _of_samples(
        self,
        drawn: participants.Sampled,
        seen: observed.ObservedParticipation,
        facts: facts_lib.Facts,
        charge_all_rounds: bool,
    ) -> statement.PrivacyStatement:
        strategy = self.strategy
        assert strategy is not None
        charged = self.num_rounds if charge_all_rounds else seen.num_rounds
        rounds, epsilon = self._rounds(charged), self._spent(charged)
        parameters: dict[str, statement.Scalar] = {
            "clip_norm": self.clip_norm,
            "clients_per_round": self.clients_per_round,
            "noise_multiplier": self.noise_multiplier,
            **drawn.parameters(),
            "num_rounds": seen.num_rounds,
            "num_rounds_charged": charged,
            **drawn.parameters_of(rounds),
        }
        if isinstance(drawn, participants.FedAvgCohorts):
            parameters["clipping"] = "per layer" if self.clipping.per_layer else "flat"
        if self.clipping.later_norms:
            parameters["clip_norm_by_round"] = (
                f"{self.clipping.in_words}; the noise is noise_multiplier times its sensitivity"
            )
        claim = statement.SampledClaim(
            mechanism=self.mechanism,
            epsilon=epsilon,
            delta=self.delta,
            **drawn.says(self.unit_of_privacy),
            seed_is_known=self.deterministic_seed is not None,
            claimed_by_author=not serialization.is_built_in(strategy),
            profile=self._profile(drawn, charged, rounds, epsilon) if self.has_guarantee else (),
            others=self.others,
            weights=None if isinstance(rounds, parts.GaussianRounds) else rounds,
        )
        return statement.sampled_statement(
            claim,
            self._facts(facts, parameters),
            unit_of_privacy=self.unit_of_privacy,
            num_users=self.num_clients,
            data_in_one_place=drawn.data_in_one_place,
        )

    def _profile(
        self, drawn: participants.Sampled, num_rounds: int, rounds: parts.Weights, epsilon: float
    ) -> tuple[tuple[float, float], ...]:
        """Returns points (ε, δ) besides the one that is stated."""
        if isinstance(rounds, parts.SampledRounds):
            return parts.profile(rounds, self.others, epsilon)
        if self.others or num_rounds == 0 or self.strategy is None:
            return ()
        spent = drawn.bounded(self.strategy, self.noise_multiplier, num_rounds)
        if not isinstance(spent, balls_in_bins.BallsInBins):
            return ()
        return tuple((share * epsilon, spent.delta(share * epsilon)) for share in _PROFILE)

    def _facts(
        self, facts: facts_lib.Facts, parameters: dict[str, statement.Scalar]
    ) -> facts_lib.Facts:
        """Adds the plan's parameters, and those of the simulated run with its caveats."""
        if self.simulated is None:
            return facts.with_plan(parameters)
        return facts.with_plan(
            parameters | self.simulated.parameters(), headline_caveats=self.simulated.caveats()
        )

    def derived(self) -> dict[str, Any]:
        """Returns what was derived, as JSON-compatible values for `Privacy.resumed`."""
        asked = self if self.simulated is None else self.simulated
        others = {"others": parts.to_json(self.others)} if self.others else {}
        found = {"noise_multiplier": asked.noise_multiplier, **others}
        if isinstance(self.participation, participants.FedAvgCohorts):
            return {**self.participation.derived(), **found}
        found |= asked.participation.derived()
        found["strategy"] = None if self.strategy is None else self.strategy.to_dict()
        if self.needs_secret_cohorts:
            return {**found, "delta": self.delta}
        encoding = self.noise.encoding
        return {**found, "secagg_encoding": None if encoding is None else encoding.to_dict()}


def _of_parties(number: int) -> str:
    """Describes what the noise of several parties is, for the start of a run."""
    line = f"Noise parties: {number}, within the secure sums; the server adds no noise."
    if number == 1:
        return line
    return (
        f"{line} Each adds the whole noise: together {number} times the variance that ε needs, so "
        f"that the noise of one is left if the server colludes with {number - 1}."
    )
