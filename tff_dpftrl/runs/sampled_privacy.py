"""The privacy plan of DP-FedAvg and DP-FedSGD: independent noise, secret sampling."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.accounting import calibrate, display, parts, statement
from tff_dpftrl.accounting import facts as facts_lib
from tff_dpftrl.participation import cohorts, observed
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.runs import privacy, simulated_run

FIXED = "fixed-denominator"
CLIPPED = "clipped-denominator"
"""Names of the estimators of McMahan et al. 2018; see `private_round.estimators`."""

_ESTIMATORS = {
    FIXED: "fixed denominator: expected number of users",
    CLIPPED: "clipped denominator: number of users in the round, at least the expected one",
}


@dataclasses.dataclass(frozen=True)
class SampledPrivacy(privacy.Privacy):
    """Request for independent noise, amplified by secret Poisson sampling.

    Attributes:
      algorithm: Name of the algorithm in statements, like "dp-fedavg".
      clients_per_round: Expected number of clients in a cohort.
      noise_multiplier: z; None if `target_epsilon` is given instead.
      target_epsilon: The largest ε that the whole run may spend.
      deterministic_seed: Seed of the noise, for debugging; the run is not private then.
      deployment: Larger run to simulate; None if this run stands for itself. `noise_multiplier` or
        `target_epsilon` is then that of the larger run.
      estimator: Denominator of a cohort's sum, `FIXED` or `CLIPPED`.
      per_layer_clipping: Whether each tensor of an update is clipped by itself.
      later_clip_norms: Clip norms after `clip_norm`, each behind the number of rounds before it.
      others: All else that the run releases about the same users. The target is for the whole.
    """

    algorithm: str
    num_rounds: int
    clients_per_round: int
    clip_norm: float
    delta: float
    noise_multiplier: float | None = None
    target_epsilon: float | None = None
    deterministic_seed: int | None = None
    deployment: simulated_run.Deployment | None = None
    estimator: str = FIXED
    per_layer_clipping: bool = False
    later_clip_norms: tuple[tuple[int, float], ...] = ()
    others: tuple[parts.Part, ...] = ()

    @override
    def check(self, num_clients: int) -> None:
        privacy.check_parts(self.others, self.deployment)
        privacy.check_population(num_clients, self.clients_per_round)
        if self.deployment is not None:
            self.deployment.scale(self.clients_per_round)

    @override
    def plan(self, num_clients: int, num_parameters: int) -> SampledPlan:
        del num_parameters
        self.check(num_clients)
        noise_multiplier = self.noise_multiplier
        if noise_multiplier is None:
            if self.target_epsilon is None:
                raise validation.UsageError("Give either noise_multiplier or target_epsilon.")
            probability = self._sampling_probability(num_clients)
            noise_multiplier = calibrate.noise_beside(
                lambda noise: parts.SampledRounds(noise, probability, self.num_rounds),
                self.others,
                target_epsilon=self.target_epsilon,
                delta=self.delta,
            )
        return self._with(num_clients, noise_multiplier)

    @override
    def resumed(
        self, num_clients: int, num_parameters: int, derived: Mapping[str, Any]
    ) -> SampledPlan:
        del num_parameters
        asked = dataclasses.replace(self, others=parts.from_json(derived.get("others", ())))
        return asked._with(num_clients, derived["noise_multiplier"])

    def _sampling_probability(self, num_clients: int) -> float:
        """Returns the sampling probability of the run that ε is wanted for."""
        if self.deployment is None:
            return self.clients_per_round / num_clients
        return self.deployment.report_goal / self.deployment.population

    def _with(self, num_clients: int, noise_multiplier: float) -> SampledPlan:
        """Returns the plan; `noise_multiplier` is of the run that ε is wanted for."""
        scale, simulated = 1.0, None
        if self.deployment is not None:
            scale = self.deployment.scale(self.clients_per_round)
            probability = self._sampling_probability(num_clients)
            simulated = simulated_run.SimulatedRun(
                deployment=self.deployment,
                num_rounds=self.num_rounds,
                participation=f"each with probability {display.round_up(probability)}, in secret",
                noise_multiplier=noise_multiplier,
                epsilon=privacy.epsilon(
                    parts.SampledRounds(noise_multiplier, probability, self.num_rounds),
                    (),
                    self.delta,
                ),
                delta=self.delta,
            )
        return SampledPlan(
            noise_multiplier=noise_multiplier * scale,
            simulated=simulated,
            clip_norm=self.clip_norm,
            clients_per_round=self.clients_per_round,
            num_clients=num_clients,
            num_rounds=self.num_rounds,
            delta=self.delta,
            deterministic_seed=self.deterministic_seed,
            algorithm=self.algorithm,
            estimator=self.estimator,
            per_layer_clipping=self.per_layer_clipping,
            later_clip_norms=self.later_clip_norms,
            others=self.others,
        )


@dataclasses.dataclass(frozen=True)
class SampledPlan(privacy.FederatedPlan):
    """Plan of a run in which every client takes part in a round with one probability.

    Clients are sampled independently of each other and of other rounds. The guarantee is amplified
    by the secrecy of the cohorts (McMahan et al. 2018).

    Attributes:
      estimator: Denominator of a cohort's sum, `FIXED` or `CLIPPED`. The latter takes twice the
        noise for the same noise multiplier, which is relative to its sensitivity.
      later_clip_norms: Clip norms after `clip_norm`, each behind the number of rounds before it.
        The noise is `noise_multiplier` times the sensitivity at the round's own clip norm, so that
        the cost of a round is the same (McMahan et al. 2018, section 3).
    """

    algorithm: str
    estimator: str
    per_layer_clipping: bool
    later_clip_norms: tuple[tuple[int, float], ...] = ()

    needs_secret_cohorts = True

    @property
    def declared(self) -> schema_lib.MinSep:
        """Only the number of rounds is promised: a sampled client may be in all of them."""
        return schema_lib.MinSep.unrestricted(self.num_rounds)

    @property
    def sampling_probability(self) -> float:
        """The q of the papers: clients per round over number of clients."""
        return self.clients_per_round / self.num_clients

    @property
    def clip_norms(self) -> float | tuple[float, ...]:
        """The clip norm, or one for each round if it changes."""
        if not self.later_clip_norms:
            return self.clip_norm
        starts, norms = zip((0, self.clip_norm), *self.later_clip_norms, strict=True)
        return tuple(np.repeat(norms, np.diff([*starts, self.num_rounds])).tolist())

    def _clip_norm_in_words(self) -> str:
        later = (f"{norm:g} after {after} rounds" for after, norm in self.later_clip_norms)
        return ", ".join([f"{self.clip_norm:g}", *later])

    @override
    def sampler(self, seed: int) -> cohorts.CohortSampler:
        return cohorts.PoissonSampler(
            num_clients=self.num_clients,
            sampling_probability=self.sampling_probability,
            num_rounds=self.num_rounds,
            seed=seed,
        )

    @property
    @override
    def rounds(self) -> parts.SampledRounds:
        return self._rounds(self.num_rounds)

    def _rounds(self, num_rounds: int) -> parts.SampledRounds:
        return parts.SampledRounds(self.noise_multiplier, self.sampling_probability, num_rounds)

    @override
    def epsilon_after(self, rounds_done: int) -> float | None:
        if not self.has_guarantee:
            return None
        return privacy.epsilon(self._rounds(rounds_done), self.others, self.delta)

    @override
    def noise_to_signal(self, num_parameters: int) -> float:
        # z √(d n) over the n rounds' expected clients, each weighed by its clip norm.
        norms = np.broadcast_to(self.clip_norms, self.num_rounds)
        rounds = float(norms.sum() / np.linalg.norm(norms))
        per_round = self.noise_multiplier * math.sqrt(num_parameters) / self.clients_per_round
        per_round *= 2.0 if self.estimator == CLIPPED else 1.0
        return per_round / rounds

    @override
    def describe(self) -> list[str]:
        return [
            f"Participation: each of {self.num_clients} users is in a round's cohort with "
            f"probability {display.round_up(self.sampling_probability)}, in secret; "
            f"{self.num_rounds} rounds."
            if self.deterministic_seed is None
            else f"Participation: sampled with a known seed; {self.num_rounds} rounds.",
            f"Noise: {self.algorithm}, independent, z = {self.noise_multiplier:.6g}.",
            *(
                [f"Clip norm, which the noise follows: {self._clip_norm_in_words()}."]
                if self.later_clip_norms
                else []
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
        charged = self.num_rounds if charge_all_rounds else seen.num_rounds
        spent = self._rounds(charged)
        epsilon = privacy.epsilon(spent, self.others, self.delta)
        parameters: dict[str, statement.Scalar] = {
            "clip_norm": self.clip_norm,
            "clients_per_round": self.clients_per_round,
            "noise_multiplier": self.noise_multiplier,
            "sampling_probability": self.sampling_probability,
            "num_rounds": seen.num_rounds,
            "num_rounds_charged": charged,
            "estimator": _ESTIMATORS[self.estimator],
            "clipping": "per layer" if self.per_layer_clipping else "flat",
        }
        if self.later_clip_norms:
            parameters["clip_norm_by_round"] = (
                f"{self._clip_norm_in_words()}; the noise is noise_multiplier times its sensitivity"
            )
        claim = statement.SampledClaim(
            mechanism=self.algorithm,
            epsilon=epsilon,
            delta=self.delta,
            accounting=(
                "Privacy loss distribution of the Poisson-sampled Gaussian mechanism, composed "
                "over the rounds."
            ),
            sampling=(
                "Every user is in a round's cohort with probability "
                f"{display.round_up(self.sampling_probability, 6)}, independently of everything "
                "else."
            ),
            seed_is_known=self.deterministic_seed is not None,
            profile=parts.profile(spent, self.others, epsilon) if self.has_guarantee else (),
            others=self.others,
            weights=spent,
        )
        return statement.sampled_statement(
            claim,
            self._facts(facts, parameters),
            num_users=self.num_clients,
        )

    @override
    def derived(self) -> dict[str, Any]:
        return {
            "noise_multiplier": self.wanted_noise_multiplier,
            "sampling_probability": self.sampling_probability,
            **privacy.derived_parts(self.others),
        }
