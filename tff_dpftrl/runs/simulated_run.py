"""Small cohorts standing for large ones: the run whose noise a simulation has.

With R clients a round and noise multiplier z, the noise on the averaged update has standard
deviation z · clip norm / R. A simulation with n < R clients a round that uses the noise
multiplier z · n / R has the same noise on its average. By the hypothesis of the papers (Xu et
al. 2023, section 2.2; McMahan et al. 2018, section 3) its utility is then at most that
of the run it stands for: the clients' own differences average out less. Its privacy is another
matter: its own users are protected by the small noise multiplier only.
"""

from __future__ import annotations

import dataclasses
import math

from tff_dpftrl import validation
from tff_dpftrl.accounting import display, statement
from tff_dpftrl.accounting import statement_sentences as sentences
from tff_dpftrl.runs import participants


@dataclasses.dataclass(frozen=True)
class Deployment:
    """Size of the run that a simulation stands for.

    `report_goal` is R, the number of clients in a round; the expected number if they are sampled.
    """

    report_goal: int
    population: int

    def __post_init__(self):
        validation.integer("report_goal", self.report_goal, minimum=1)
        validation.integer("population", self.population, minimum=self.report_goal)

    def scale(self, clients_per_round: int) -> float:
        """Returns the factor n / R of the noise multiplier for a cohort, which must be smaller."""
        if clients_per_round > self.report_goal:
            raise validation.UsageError(
                f"clients_per_round={clients_per_round} exceeds the report goal that is "
                f"simulated, {self.report_goal}: lower it, or do not simulate."
            )
        return clients_per_round / self.report_goal


@dataclasses.dataclass(frozen=True)
class SimulatedRun:
    """The run that a simulation stands for, and what it would promise.

    `epsilon` is that of all rounds at `delta`; inf if the run would have no guarantee.
    """

    deployment: Deployment
    participation: participants.Participation
    noise_multiplier: float
    epsilon: float
    delta: float

    def promise(self) -> str:
        """Returns the guarantee that the simulated run would have, as a clause."""
        would_have = (
            display.epsilon_at(self.epsilon, self.delta)
            if math.isfinite(self.epsilon)
            else "no privacy guarantee"
        )
        drawn = self.participation
        return (
            f"a run of {drawn.num_rounds} rounds with {self.deployment.report_goal} users a round "
            f"out of {self.deployment.population}, {drawn.clause}, and noise multiplier "
            f"{display.round_down(self.noise_multiplier, 6)} would have {would_have}"
        )

    def caveats(self) -> tuple[str, ...]:
        """Returns the caveats that belong to every quote of the simulation's ε or accuracy."""
        return (
            sentences.SIMULATION.format(promise=self.promise()),
            *statement.delta_caveats(self.delta, self.deployment.population, "user"),
        )

    def parameters(self) -> dict[str, statement.Scalar]:
        """Returns the parameters that the statement reports of the simulated run."""
        return {
            "simulated_report_goal": self.deployment.report_goal,
            "simulated_population": self.deployment.population,
            "simulated_participation": self.participation.clause,
            "simulated_noise_multiplier": self.noise_multiplier,
            "simulated_epsilon": self.epsilon if math.isfinite(self.epsilon) else None,
        }
