"""What a run asks of privacy, before its population is known: a request makes the plan.

There are three: `DpFtrl` for correlated noise under a participation schema, or for none;
`DpFedAvg` for independent noise and secret cohorts; and `Amplified` for both at once. One party
holds everybody's data then and draws, in secret, who is in which round. Correlated noise then
needs less noise than either alone: than independent noise with secret samples, and than correlated
noise under a participation schema (Choquette-Choo et al. 2023, 2024). Devices that check in by
themselves draw no such samples: for them there is `DpFtrl`.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.accounting import amplified_banded, cyclic_optimize, parts, statement
from tff_dpftrl.discretization import grid
from tff_dpftrl.mechanisms import identity, restarts, serialization, table, zoo
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.mechanisms import workload as workload_lib
from tff_dpftrl.participation import cohorts
from tff_dpftrl.participation import sampling as sampling_lib
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.runs import mechanism_plan, participants, simulated_run

SAMPLINGS = (sampling_lib.CyclicPoisson.kind, sampling_lib.BallsInBins.kind)
"""Names of the samplings."""
_CYCLIC, _BINS = SAMPLINGS

_BANDED = ("bandtoep", "bandmf", "bandfhu", "identity")
"""Mechanisms with a banded C: one unit's rounds share no noise if they are as far apart."""

CHOSEN = "bandtoep"
"""Mechanism whose number of bands can be chosen."""


@dataclasses.dataclass(frozen=True)
class Privacy(abc.ABC):
    """Request for privacy, before the population of the run is known.

    Attributes:
      num_rounds: Number of rounds.
      clients_per_round: Number of clients in a cohort, the expected one if it is sampled.
      clip_norm: L2 norm that a client's update is clipped to, the first one if it changes.
      delta: δ of the statement.
      noise_multiplier: z; None if `target_epsilon` is given instead, or without mechanism.
      target_epsilon: The largest ε that the whole run may spend.
      deterministic_seed: Seed of the noise, for debugging; the run is not private then.
      deployment: Larger run to simulate; None if this run stands for itself. Mechanism, noise and
        participation are then those of the larger run.
      unit_of_privacy: Who is protected.
      others: All else that the run releases about the same clients. The target is for the whole.
    """

    num_rounds: int
    clients_per_round: int
    clip_norm: float
    delta: float
    _: dataclasses.KW_ONLY
    noise_multiplier: float | None = None
    target_epsilon: float | None = None
    deterministic_seed: int | None = None
    deployment: simulated_run.Deployment | None = None
    unit_of_privacy: statement.UnitOfPrivacy = "user"
    others: tuple[parts.Part, ...] = ()

    def check(self, num_clients: int) -> None:
        """Refuses, without long computations, a population that `plan` would refuse.

        Args:
          num_clients: Number of training users.

        Raises:
          ValueError: If they cannot keep what is asked for, or a file that is named
            holds no strategy.
        """
        if self.others and self.deployment is not None:
            raise validation.UsageError(
                f"The {self.others[0].name} of a run with simulate_report_goal cannot be a part of "
                "its budget, which is that of the larger run: leave one of them out."
            )
        self._own(num_clients)
        self._wanted(num_clients)

    def plan(self, num_clients: int, num_parameters: int) -> mechanism_plan.MechanismPlan:
        """Chooses mechanism and noise for a new run.

        Args:
          num_clients: Number of training users.
          num_parameters: Number of trainable weights.

        Returns:
          The plan; its ε is not above the target, if there is one.

        Raises:
          ValueError: If the population cannot keep what is asked for.
        """
        Privacy.check(self, num_clients)  # No cohorts of a task's devices are drawn.
        wanted = self._wanted(num_clients)
        made = self._of(wanted, self._strategy(wanted.declared), self.noise_multiplier or 0.0)
        if self.target_epsilon is not None:
            made = made.calibrated(self.target_epsilon)
        elif self.noise_multiplier is None and made.strategy is not None:
            raise validation.UsageError("Give either noise_multiplier or target_epsilon.")
        # Refuses what cannot be accounted for, before a run begins.
        rounds = made.rounds
        if parts.precision_of_rounds(self.others) > 0.0:
            rounds.noise_of_figure()
        return self._scaled(made, num_clients, num_parameters)

    def resumed(
        self, num_clients: int, num_parameters: int, derived: Mapping[str, Any]
    ) -> mechanism_plan.MechanismPlan:
        """Makes the plan of a run that has begun.

        Args:
          num_clients: Number of training users.
          num_parameters: Number of trainable weights.
          derived: Values that `MechanismPlan.derived` recorded when the run began.

        Returns:
          The plan.
        """
        asked = dataclasses.replace(self, others=parts.from_json(derived.get("others", ())))
        population = num_clients if self.deployment is None else self.deployment.population
        participation = asked._recorded(population, derived)
        recorded = derived.get("strategy")
        if recorded is not None:
            strategy = serialization.strategy_from_dict(recorded)
        else:  # Independent noise, or none.
            strategy = asked._strategy(participation.declared)
        made = asked._of(participation, strategy, derived["noise_multiplier"])
        return asked._scaled(made, num_clients, num_parameters)

    def _wanted(self, num_clients: int) -> participants.Participation:
        """Returns the participation of the run that ε is wanted for."""
        if self.deployment is None:
            return self._own(num_clients)
        self.deployment.scale(self.clients_per_round)
        try:
            drawn = self._drawn(self.deployment.population, self.deployment.report_goal)
            if isinstance(drawn, participants.Turns):
                drawn.sampler(seed=0)  # No cohorts of it are ever drawn, which would check it.
        except ValueError as error:
            raise validation.UsageError(
                "In the run that is simulated, where clients_per_round is simulate_report_goal "
                f"and simulate_population says how many clients there are: {error}"
            ) from error
        return drawn

    @property
    def _wanted_per_round(self) -> int:
        """The cohort of the run that ε is wanted for."""
        return self.deployment.report_goal if self.deployment else self.clients_per_round

    def _own(self, num_clients: int) -> participants.Participation:
        """Returns the participation of this run, also if it simulates a larger one."""
        if self.clients_per_round > num_clients:
            raise validation.UsageError(
                f"clients_per_round={self.clients_per_round} exceeds the {num_clients} training "
                f"users: lower it to {num_clients} or less."
            )
        return self._drawn(num_clients, self.clients_per_round)

    @abc.abstractmethod
    def _drawn(self, num_clients: int, clients_per_round: int) -> participants.Participation:
        """Returns the participation as asked for, of so many clients."""

    @abc.abstractmethod
    def _strategy(self, schema: schema_lib.MinSep) -> strategy_lib.Strategy | None:
        """Returns the strategy of the whole run, restarts included."""

    @abc.abstractmethod
    def _recorded(self, num_clients: int, derived: Mapping[str, Any]) -> participants.Participation:
        """Returns the participation that a run recorded."""

    @property
    def _clipping(self) -> mechanism_plan.Clipping:
        return mechanism_plan.Clipping(self.clip_norm)

    @property
    def _workload(self) -> workload_lib.Workload | None:
        return None

    def _of(
        self,
        participation: participants.Participation,
        strategy: strategy_lib.Strategy | None,
        noise_multiplier: float,
    ) -> mechanism_plan.MechanismPlan:
        """Returns a plan that stands for itself."""
        return mechanism_plan.MechanismPlan(
            participation,
            self._clipping,
            mechanism_plan.Noise(
                strategy, noise_multiplier, self.deterministic_seed, self._workload
            ),
            self.delta,
            others=self.others,
            unit_of_privacy=self.unit_of_privacy,
        )

    def _scaled(
        self, wanted: mechanism_plan.MechanismPlan, num_clients: int, num_parameters: int
    ) -> mechanism_plan.MechanismPlan:
        """Returns the plan of this run, with noise scaled down if it simulates the wanted one."""
        del num_parameters
        if self.deployment is None:
            return wanted
        secret = wanted.with_noise(deterministic_seed=None)
        own, epsilon = self._own(num_clients), secret.epsilon_after(self.num_rounds)
        # Each round expects this many clients: whole bins may be larger than clients_per_round.
        scale = own.clients_per_round / wanted.clients_per_round
        simulated = simulated_run.SimulatedRun(
            deployment=self.deployment,
            participation=wanted.participation,
            noise_multiplier=wanted.noise_multiplier,
            epsilon=math.inf if epsilon is None else epsilon,
            delta=self.delta,
        )
        made = dataclasses.replace(wanted, participation=own, simulated=simulated)
        return made.with_noise(multiplier=wanted.noise_multiplier * scale)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DpFtrl(Privacy):
    """Request for correlated noise under a participation schema, without sampling assumptions.

    Attributes:
      mechanism: A key of `mechanisms.table.MECHANISMS`; None for no clipping and no noise.
      strategy_file: File of a strategy for a block, or a name of the zoo, instead of a mechanism.
      starts: First rounds of the blocks between restarts of the noise, the first one 0.
      min_sep: Stride; None for the largest that the population allows.
      max_participations: Rounds of a client; None for as many as a given stride allows, or, without
        one, as few as sharing the rounds out evenly needs.
      adaptive_clipping: Whether the clip norm is learned under the same z.
      secagg_bits: Bits a parameter of secure aggregation; None without it.
      data_in_one_place: Whether there are no clients: one party holds everybody's data.
    """

    mechanism: str | None = "blt"
    options: table.Options = table.DEFAULTS
    strategy_file: str | None = None
    starts: tuple[int, ...] = (0,)
    min_sep: int | None = None
    max_participations: int | None = None
    adaptive_clipping: bool = False
    secagg_bits: int | None = None
    data_in_one_place: bool = False

    @override
    def check(self, num_clients: int) -> None:
        super().check(num_clients)
        self._own(num_clients).sampler(seed=0)
        if self.strategy_file is not None:
            zoo.find(self.strategy_file)

    @override
    def _own(self, num_clients: int) -> participants.Participation:
        if self.deployment is None:
            return super()._own(num_clients)
        # No claim rests on this schema, and earlier runs have it in their ledgers.
        free = dataclasses.replace(self, min_sep=None, max_participations=None)
        return super(DpFtrl, free)._own(num_clients)

    @override
    def _drawn(self, num_clients: int, clients_per_round: int) -> participants.Turns:
        stride = cohorts.largest_feasible_min_sep(num_clients, clients_per_round)
        stride = min(stride, self.num_rounds) if self.min_sep is None else self.min_sep
        schema = schema_lib.MinSep.as_many_as_fit(self.num_rounds, stride)
        most = self.max_participations
        if most is None and self.min_sep is None and self.deployment is None:
            # The rounds are shared out evenly: the stride alone would leave room for more of them.
            # Devices keep to a stride, and nobody shares the rounds out among them.
            most = cohorts.implied_participations(num_clients, clients_per_round, self.num_rounds)
        if most is not None:
            schema = dataclasses.replace(schema, max_participations=most)
        return participants.Turns(num_clients, clients_per_round, schema, self.data_in_one_place)

    @override
    def _strategy(self, schema: schema_lib.MinSep) -> strategy_lib.Strategy | None:
        if self.strategy_file is not None:
            base = zoo.find(self.strategy_file)
            return restarts.whole_run(base, self.num_rounds, self.starts)
        if self.mechanism is None:
            return None
        return table.build(self.mechanism, schema, self.options, starts=self.starts)

    @override
    def _recorded(self, num_clients: int, derived: Mapping[str, Any]) -> participants.Turns:
        schema = schema_lib.MinSep(**derived["schema"])
        expected = self._wanted_per_round
        return participants.Turns(num_clients, expected, schema, self.data_in_one_place)

    @property
    @override
    def _clipping(self) -> mechanism_plan.Clipping:
        return mechanism_plan.Clipping(self.clip_norm, adaptive=self.adaptive_clipping)

    @property
    @override
    def _workload(self) -> workload_lib.Workload | None:
        return self.options.workload

    @override
    def _scaled(
        self, wanted: mechanism_plan.MechanismPlan, num_clients: int, num_parameters: int
    ) -> mechanism_plan.MechanismPlan:
        made = super()._scaled(wanted, num_clients, num_parameters)
        if self.secagg_bits is None:
            return made
        encoding = grid.for_bits(num_parameters, self.clients_per_round, self.secagg_bits)
        return made.with_noise(encoding=encoding)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DpFedAvg(Privacy):
    """Request for independent noise, amplified by secret Poisson sampling.

    Attributes:
      algorithm: Name of the algorithm in statements, like "dp-fedavg".
      estimator: Denominator of a cohort's sum, `participants.FIXED` or `participants.CLIPPED`.
      per_layer_clipping: Whether each tensor of an update is clipped by itself.
      later_clip_norms: Clip norms after `clip_norm`, each behind the number of rounds before it.
    """

    algorithm: str
    estimator: str = participants.FIXED
    per_layer_clipping: bool = False
    later_clip_norms: tuple[tuple[int, float], ...] = ()

    @override
    def _drawn(self, num_clients: int, clients_per_round: int) -> participants.FedAvgCohorts:
        probability = clients_per_round / num_clients
        return participants.FedAvgCohorts(
            num_clients,
            clients_per_round,
            sampling_lib.CyclicPoisson(self.num_rounds, 1, probability),
            algorithm=self.algorithm,
            estimator=self.estimator,
        )

    @override
    def _strategy(self, schema: schema_lib.MinSep) -> strategy_lib.Strategy:
        return identity.Identity()

    @override
    def _recorded(self, num_clients: int, derived: Mapping[str, Any]) -> participants.Participation:
        expected = (
            self.clients_per_round if self.deployment is None else self.deployment.report_goal
        )
        return self._drawn(num_clients, expected)

    @property
    @override
    def _clipping(self) -> mechanism_plan.Clipping:
        return mechanism_plan.Clipping(
            self.clip_norm, per_layer=self.per_layer_clipping, later_norms=self.later_clip_norms
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Amplified(Privacy):
    """Request for correlated noise, amplified by secret samples.

    Bins have a whole number of clients, so that with them a round may expect some more.

    Attributes:
      sampling: One of `SAMPLINGS`.
      mechanism: A key of `mechanisms.table.MECHANISMS`.
      strategy_file: File of a strategy, or a name of the zoo, instead of a mechanism.
      min_sep: Number of groups of cyclic sampling, and so the smallest stride of a client; the
        bands of the strategy if None. Bins follow from `clients_per_round`. If neither is given,
        nor the bands of "bandtoep", those of least noise at `target_epsilon` are taken.
      pool: Examples that are sampled, with cyclic sampling, so that `clients_per_round` is a number
        of examples; None if clients are.
    """

    sampling: str
    mechanism: str = CHOSEN
    options: table.Options = table.DEFAULTS
    strategy_file: str | None = None
    min_sep: int | None = None
    pool: participants.Pool | None = None

    def __post_init__(self):
        if self.pool is not None and self.sampling != _CYCLIC:
            raise validation.UsageError(
                f"pool is for sampling {_CYCLIC!r}, not for {self.sampling!r}: leave it out."
            )

    @override
    def plan(self, num_clients: int, num_parameters: int) -> mechanism_plan.MechanismPlan:
        if self._leaves_bands_open and self.min_sep is None:
            self.check(num_clients)
            return min(self.curve(num_clients), key=self._noise)
        return super().plan(num_clients, num_parameters)

    def curve(self, num_clients: int) -> list[mechanism_plan.MechanismPlan]:
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
        units = self.deployment.population if self.deployment else units

        def plan(bands: int) -> mechanism_plan.MechanismPlan:
            mechanism, options = "identity", table.DEFAULTS
            if bands > 1:
                mechanism, options = CHOSEN, dataclasses.replace(self.options, bands=bands)
            one = dataclasses.replace(self, mechanism=mechanism, options=options)
            return one.plan(num_clients, 0)

        most = self.min_sep or units // self._wanted_per_round
        return cyclic_optimize.try_bands(plan, self._noise, self.num_rounds, most)

    def _noise(self, plan: mechanism_plan.MechanismPlan) -> float:
        """Returns the noise in the sums of the rounds, or in the models of the workload."""
        assert plan.strategy is not None
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
    def _own(self, num_clients: int) -> participants.Participation:
        if self.pool is None:
            return super()._own(num_clients)
        drawn = super()._own(self.pool.size)
        return dataclasses.replace(drawn, num_clients=num_clients, pool=self.pool)

    @override
    def _drawn(self, num_clients: int, clients_per_round: int) -> participants.Sampled:
        stride, most = self._stride(), num_clients // clients_per_round
        if stride is None:
            if most > self.num_rounds:
                raise validation.UsageError(
                    f"sampling 'bins' would have {most} bins of {clients_per_round} clients and "
                    f"only {self.num_rounds} rounds, so that some never come: raise num_rounds to "
                    f"{most}, or clients_per_round to {num_clients // (self.num_rounds + 1) + 1}."
                )
            bins = sampling_lib.BallsInBins(self.num_rounds, most)
            return participants.Sampled.of(bins, num_clients)
        if stride > most:
            raise validation.UsageError(
                f"min_sep={stride} (or bands, if it is not given) rounds of {clients_per_round} "
                f"different clients need more than the {num_clients} there are: lower it to "
                f"{most}, or clients_per_round to {num_clients // stride}."
            )
        drawn = sampling_lib.CyclicPoisson.for_cohorts(
            self.num_rounds, stride, num_clients=num_clients, clients_per_round=clients_per_round
        )
        return participants.Sampled.of(drawn, num_clients)

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
            return amplified_banded.num_bands(zoo.find(self.strategy_file))
        if self.mechanism == "identity":
            return 1
        return self.options.bands if self.mechanism in _BANDED else None

    @override
    def _strategy(self, schema: schema_lib.MinSep) -> strategy_lib.Strategy:
        """Returns the strategy of least noise for the participations that cost something."""
        if self.strategy_file is not None:
            return zoo.find(self.strategy_file)
        options = self.options
        if self.mechanism in _BANDED and self.mechanism != "identity" and options.bands is None:
            options = dataclasses.replace(options, bands=min(schema.min_sep, schema.num_rounds))
        if self.sampling == _CYCLIC:  # Each round of a client counts by itself: one column of C.
            schema = schema_lib.MinSep(self.num_rounds, self.num_rounds, 1)
        return table.build(self.mechanism, schema, options)

    @override
    def _recorded(self, num_clients: int, derived: Mapping[str, Any]) -> participants.Sampled:
        drawn = sampling_lib.Sampling.from_dict(derived["sampling"])
        return participants.Sampled.of(drawn, num_clients, self.pool)

    @property
    @override
    def _workload(self) -> workload_lib.Workload | None:
        return self.options.workload
