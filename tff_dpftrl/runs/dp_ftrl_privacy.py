"""The privacy plan of DP-FTRL: correlated noise and a participation schema."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.accounting import calibrate, guarantee, parts, statement
from tff_dpftrl.accounting import facts as facts_lib
from tff_dpftrl.discretization import grid
from tff_dpftrl.mechanisms import dense, identity, restarts, serialization, table, zoo
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.mechanisms import workload as workload_lib
from tff_dpftrl.participation import cohorts, observed
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.runs import privacy, simulated_run


@dataclasses.dataclass(frozen=True)
class DpFtrlPrivacy(privacy.Privacy):
    """Request for correlated noise under a participation schema, without sampling assumptions.

    Attributes:
      clip_norm: L2 norm that a client's update is clipped to, the first one if adaptive.
      mechanism: A key of `mechanisms.table.MECHANISMS`; None for no clipping and no noise.
      strategy_file: File of a strategy for a block, or a name of the zoo, instead of a mechanism.
      starts: First rounds of the blocks between restarts of the noise, the first one 0.
      noise_multiplier: z; None if `target_epsilon` is given instead, or without mechanism.
      target_epsilon: The largest ε that the whole run may spend.
      min_sep: Stride; None for the largest that the population allows.
      max_participations: Rounds of a client; None for as many as a given stride allows, or, without
        one, as few as sharing the rounds out evenly needs.
      adaptive_clipping: Whether the clip norm is learned under the same z.
      secagg_bits: Bits a parameter of secure aggregation; None without it.
      deterministic_seed: Seed of the noise, for debugging; the run is not private then.
      deployment: Larger run to simulate; None if this run stands for itself. Mechanism, noise and
        participation are then those of the larger run.
      data_in_one_place: Whether there are no clients: one party holds everybody's data.
      others: All else that the run releases about the same clients. The target is for the whole.
    """

    num_rounds: int
    clients_per_round: int
    clip_norm: float
    delta: float
    mechanism: str | None = "blt"
    options: table.Options = table.DEFAULTS
    strategy_file: str | None = None
    starts: tuple[int, ...] = (0,)
    noise_multiplier: float | None = None
    target_epsilon: float | None = None
    min_sep: int | None = None
    max_participations: int | None = None
    adaptive_clipping: bool = False
    secagg_bits: int | None = None
    deterministic_seed: int | None = None
    deployment: simulated_run.Deployment | None = None
    data_in_one_place: bool = False
    unit_of_privacy: statement.UnitOfPrivacy = "user"
    others: tuple[parts.Part, ...] = ()

    @override
    def check(self, num_clients: int) -> None:
        privacy.check_parts(self.others, self.deployment)
        self._wanted_schema(num_clients)
        _sampler(num_clients, self.clients_per_round, self._own_schema(num_clients), seed=0)
        if self.strategy_file is not None:
            zoo.find(self.strategy_file)

    @override
    def plan(self, num_clients: int, num_parameters: int) -> DpFtrlPlan:
        privacy.check_parts(self.others, self.deployment)
        schema = self._wanted_schema(num_clients)
        strategy = self._strategy(schema)
        noise_multiplier = self.noise_multiplier or 0.0
        if self.target_epsilon is not None:
            noise_multiplier = calibrate.calibrate_noise_multiplier(
                _needed(strategy),
                schema,
                target_epsilon=self.target_epsilon,
                delta=self.delta,
                others=self.others,
            )
        return self._with(num_clients, num_parameters, schema, noise_multiplier, strategy)

    @override
    def resumed(
        self, num_clients: int, num_parameters: int, derived: Mapping[str, Any]
    ) -> DpFtrlPlan:
        strategy = derived["strategy"]
        asked = dataclasses.replace(self, others=parts.from_json(derived.get("others", ())))
        return asked._with(
            num_clients,
            num_parameters,
            schema_lib.MinSep(**derived["schema"]),
            derived["noise_multiplier"],
            None if strategy is None else serialization.strategy_from_dict(strategy),
        )

    def _wanted_schema(self, num_clients: int) -> schema_lib.MinSep:
        """Returns the schema of the run that ε is wanted for."""
        if self.deployment is None:
            privacy.check_population(num_clients, self.clients_per_round)
            schema = _evenly_shared(num_clients, self.clients_per_round, self.num_rounds)
        else:
            # Devices keep to a stride; nobody shares the rounds out among them.
            self.deployment.scale(self.clients_per_round)
            num_clients = self.deployment.population
            schema = _as_often_as_fits(num_clients, self.deployment.report_goal, self.num_rounds)
        if self.min_sep is not None:
            schema = schema_lib.MinSep.as_many_as_fit(self.num_rounds, self.min_sep)
        if self.max_participations is not None:
            schema = dataclasses.replace(schema, max_participations=self.max_participations)
        if self.deployment is not None:  # No cohorts of it are ever drawn, which would check it.
            try:
                _sampler(num_clients, self.deployment.report_goal, schema, seed=0)
            except ValueError as error:
                raise validation.UsageError(
                    "In the run that is simulated, where clients_per_round is simulate_report_goal "
                    f"and simulate_population says how many clients there are: {error}"
                ) from error
        return schema

    def _own_schema(self, num_clients: int) -> schema_lib.MinSep:
        """Returns the schema of this run's cohorts, also if it simulates a larger run."""
        if self.deployment is None:
            return self._wanted_schema(num_clients)
        privacy.check_population(num_clients, self.clients_per_round)
        # No claim rests on this schema, and earlier runs have it in their ledgers.
        return _as_often_as_fits(num_clients, self.clients_per_round, self.num_rounds)

    def _strategy(self, schema: schema_lib.MinSep) -> strategy_lib.Strategy | None:
        """Returns the strategy of the whole run, restarts included."""
        if self.strategy_file is not None:
            base = zoo.find(self.strategy_file)
            return restarts.whole_run(base, self.num_rounds, self.starts)
        if self.mechanism is None:
            return None
        return table.build(self.mechanism, schema, self.options, starts=self.starts)

    def _with(
        self,
        num_clients: int,
        num_parameters: int,
        schema: schema_lib.MinSep,
        noise_multiplier: float,
        strategy: strategy_lib.Strategy | None,
    ) -> DpFtrlPlan:
        """Returns the plan; schema and noise multiplier are of the run that ε is wanted for."""
        scale, simulated = 1.0, None
        if self.deployment is not None:
            scale = self.deployment.scale(self.clients_per_round)
            simulated = self._simulated(
                self.deployment, schema, noise_multiplier, _needed(strategy)
            )
        encoding = None
        if self.secagg_bits is not None:
            encoding = grid.for_bits(num_parameters, self.clients_per_round, self.secagg_bits)
        return DpFtrlPlan(
            noise_multiplier=noise_multiplier * scale,
            clip_norm=self.clip_norm,
            clients_per_round=self.clients_per_round,
            num_clients=num_clients,
            num_rounds=self.num_rounds,
            delta=self.delta,
            deterministic_seed=self.deterministic_seed,
            simulated=simulated,
            schema=schema if simulated is None else self._own_schema(num_clients),
            wanted_schema=schema,
            strategy=strategy,
            encoding=encoding,
            adaptive_clipping=self.adaptive_clipping,
            data_in_one_place=self.data_in_one_place,
            unit_of_privacy=self.unit_of_privacy,
            workload=self.options.workload,
            others=self.others,
        )

    def _simulated(
        self,
        deployment: simulated_run.Deployment,
        schema: schema_lib.MinSep,
        noise_multiplier: float,
        strategy: strategy_lib.Strategy,
    ) -> simulated_run.SimulatedRun:
        promised = guarantee.dp_ftrl_guarantee(
            strategy, noise_multiplier=noise_multiplier, schema=schema, delta=self.delta
        )
        return simulated_run.SimulatedRun(
            deployment=deployment,
            num_rounds=schema.num_rounds,
            participation=_participation(schema),
            noise_multiplier=noise_multiplier,
            epsilon=promised.epsilon,
            delta=self.delta,
        )


def _needed(strategy: strategy_lib.Strategy | None) -> strategy_lib.Strategy:
    if strategy is None:
        raise validation.UsageError(
            "Without a mechanism there is no noise to calibrate or to scale: name a mechanism, or "
            "leave out target_epsilon and the simulated run."
        )
    return strategy


def _evenly_shared(num_clients: int, clients_per_round: int, num_rounds: int) -> schema_lib.MinSep:
    """Returns the schema of the rounds that `cohorts.MinSepSampler` draws at the largest stride.

    The stride alone would leave room for more participations of one client.
    """
    feasible = cohorts.largest_feasible_min_sep(num_clients, clients_per_round)
    least = cohorts.implied_participations(num_clients, clients_per_round, num_rounds)
    return schema_lib.MinSep(num_rounds, min(feasible, num_rounds), least)


def _as_often_as_fits(
    num_clients: int, clients_per_round: int, num_rounds: int
) -> schema_lib.MinSep:
    """Returns the schema of clients of whom only the largest stride is known."""
    feasible = cohorts.largest_feasible_min_sep(num_clients, clients_per_round)
    return schema_lib.MinSep.as_many_as_fit(num_rounds, min(feasible, num_rounds))


def _of_parties(number: int) -> str:
    """Describes what the noise of several parties is, for the start of a run."""
    line = f"Noise parties: {number}, within the secure sums; the server adds no noise."
    if number == 1:
        return line
    return (
        f"{line} Each adds the whole noise: together {number} times the variance that ε needs, so "
        f"that the noise of one is left if the server colludes with {number - 1}."
    )


def _participation(schema: schema_lib.MinSep) -> str:
    times = strategy_lib.counted(schema.effective_participations, "time")
    return f"each at most {times}, {schema.min_sep} rounds apart (stride)"


def _sampler(
    num_clients: int, clients_per_round: int, schema: schema_lib.MinSep, seed: int
) -> cohorts.MinSepSampler:
    return cohorts.MinSepSampler(
        num_clients=num_clients,
        clients_per_round=clients_per_round,
        min_sep=schema.min_sep,
        max_participations=schema.max_participations,
        num_rounds=schema.num_rounds,
        seed=seed,
    )


@dataclasses.dataclass(frozen=True)
class DpFtrlPlan(privacy.FederatedPlan):
    """Plan of DP-FTRL: correlated noise and a participation schema, no sampling assumption.

    Attributes:
      wanted_schema: Participation schema of the run that was asked for: the simulated run, if there
        is one.
      strategy: The strategy matrix, restarts included; None without clipping and noise.
      encoding: Grid of the secure aggregation; None without it.
      workload: Workload that the strategy was optimised for; None for the prefix sums. The
        guarantee does not depend on it.
      noise_parties: Number of parties that each add the whole noise within secure sums; 0 if the
        server adds it.
    """

    clients_per_round: int
    schema: schema_lib.MinSep
    wanted_schema: schema_lib.MinSep
    strategy: strategy_lib.Strategy | None
    encoding: grid.GridEncoding | None
    adaptive_clipping: bool
    data_in_one_place: bool = False
    workload: workload_lib.Workload | None = None
    noise_parties: int = 0

    needs_secret_cohorts = False

    @property
    @override
    def memory_copies(self) -> int:
        return 0 if self.strategy is None else self.strategy.memory_copies(self.num_rounds)

    @property
    @override
    def declared(self) -> schema_lib.MinSep:
        return self.schema

    @override
    def sampler(self, seed: int) -> cohorts.CohortSampler:
        return _sampler(self.num_clients, self.clients_per_round, self.schema, seed)

    @property
    @override
    def rounds(self) -> parts.GaussianRounds:
        return self._claim(self.schema).weights

    @override
    def epsilon_after(self, rounds_done: int) -> float | None:
        if not self.has_guarantee or self.strategy is None:
            return None
        return guarantee.epsilon_so_far(
            self.strategy,
            noise_multiplier=self.noise_multiplier,
            schema=self.schema,
            rounds_released=rounds_done,
            delta=self.delta,
            others=self.others,
        )

    @override
    def epsilon_of(self, seen: observed.ObservedParticipation) -> float:
        return self._claim(seen.as_schema()).epsilon

    @override
    def noise_to_signal(self, num_parameters: int) -> float:
        # With adaptive clipping the noise is a little larger, since z is that of both streams.
        if self.strategy is None:
            return 0.0
        inflation = 1.0 if self.encoding is None else self.encoding.inflation
        inflation *= math.sqrt(max(self.noise_parties, 1))  # Each adds the noise of all.
        return privacy.noise_to_signal(
            self.strategy,
            noise_multiplier=self.noise_multiplier * inflation,
            num_parameters=num_parameters,
            num_rounds=self.schema.num_rounds,
            clients_per_round=self.clients_per_round,
            workload=self.workload,
        )

    @override
    def describe(self) -> list[str]:
        schema = self.schema
        lines = [
            f"Participation: each of {self.num_clients} {self.unit_of_privacy}s at most "
            f"{strategy_lib.counted(schema.effective_participations, 'time')} in "
            f"{schema.num_rounds} rounds, "
            f"{schema.min_sep} apart (stride)."
        ]
        if self.strategy is None:
            return [*lines, "Noise: none, and no clipping."]
        base, longest = self.strategy, self.num_rounds
        if isinstance(base, restarts.Restarted):
            base, longest = base.base, max(base.block_lengths(self.num_rounds))
        if isinstance(base, dense.Dense):
            draws = base.draws_per_round(longest)
            lines.append(
                f"Time: the noise of a round takes the draws of {draws:.4g} rounds, on average. "
                f"rounds_at_once={base.rounds_at_once} of the strategy divides draws, and is the "
                "number of copies of the model that are kept."
            )
        if self.adaptive_clipping and not restarts.has_restarts(self.strategy):
            lines.append(
                f"Warning: no restart lies within {self.num_rounds} rounds, so that the clip norm "
                f"stays {self.clip_norm:g}, with more noise than a fixed one has: give "
                "restart_warmup, below the number of rounds, or leave adaptive_clipping out."
            )
        if self.noise_parties:
            lines.append(_of_parties(self.noise_parties))
        return [
            *lines,
            *privacy.noise_lines(
                self.strategy, self.noise_multiplier, self.memory_copies, self.workload
            ),
        ]

    def _claim(self, schema: schema_lib.MinSep) -> guarantee.Guarantee:
        return guarantee.dp_ftrl_guarantee(
            identity.Identity() if self.strategy is None else self.strategy,
            noise_multiplier=self.noise_multiplier,
            schema=schema,
            delta=self.delta,
            seed_is_known=self.deterministic_seed is not None,
            clip_norm=None if self.adaptive_clipping else self.clip_norm,
            adaptive_clipping=self.adaptive_clipping,
            others=self.others,
        )

    @override
    def statement(
        self,
        seen: observed.ObservedParticipation,
        facts: facts_lib.Facts,
        *,
        charge_all_rounds: bool,
    ) -> statement.PrivacyStatement:
        parameters: dict[str, statement.Scalar] = {"clients_per_round": self.clients_per_round}
        if self.adaptive_clipping:
            parameters["initial_clip_norm"] = self.clip_norm
        if self.encoding is not None:
            parameters |= {
                "secagg_norm_inflation": self.encoding.inflation,
                "secagg_bits_per_parameter": self.encoding.bits_per_parameter,
                "secagg_upload_bytes_per_client": self.encoding.upload_bytes,
                "noise_multiplier_is_relative_to": "clip_norm times secagg_norm_inflation",
            }
        claim = self._claim(self.schema if charge_all_rounds else seen.as_schema())
        if self.strategy is None:
            claim = dataclasses.replace(claim, mechanism="none", clip_norm=None)
        return statement.dp_ftrl_statement(
            claim,
            self._facts(facts, parameters),
            unit_of_privacy=self.unit_of_privacy,
            num_users=self.num_clients,
            declared=self.schema,
            observed=seen,
            data_in_one_place=self.data_in_one_place,
        )

    @override
    def derived(self) -> dict[str, Any]:
        return {
            "schema": dataclasses.asdict(self.wanted_schema),
            "noise_multiplier": self.wanted_noise_multiplier,
            "strategy": None if self.strategy is None else self.strategy.to_dict(),
            "secagg_encoding": None if self.encoding is None else self.encoding.to_dict(),
            **privacy.derived_parts(self.others),
        }
