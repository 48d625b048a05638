"""What several runs on the same people have spent together, and the sentence that says so."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tff_dpftrl.accounting import display, gaussian, parts

if TYPE_CHECKING:
    from tff_dpftrl.accounting import mixture_of_gaussians

BEGAN = "The initial weights are of the run "
"""Beginning of what a statement says of the runs that its run's initial weights come from."""
NOTHING_TOGETHER = "nothing is promised for all together."
"""End of a sentence on several runs, not all of which have a guarantee for one unit."""


# Relative difference of a stated ε from that of the steps by which it is stated.
_TOLERANCE = 1e-3


@dataclasses.dataclass(frozen=True)
class SampledSteps:
    """Steps of a run that sampled in secret, with which its privacy loss can be composed.

    σ is the noise per unit of the clip norm, `group_size` the largest number of units of one user.
    `chosen_epsilon` is ε, without a δ, of a choice that the run made before its first step.
    """

    noise_multiplier: float
    sampling_probability: float
    group_size: int
    num_steps: int
    chosen_epsilon: float = 0.0

    @classmethod
    def of_statement(
        cls, parameters: Mapping[str, Any], epsilon: float, delta: float
    ) -> SampledSteps | None:
        """Reads the steps from the parameters of a statement; None unless ε is stated by them.

        The statement may be of DP-FedAvg, ELS or ULS, or of cyclic sampling, whose steps are the
        turns of a user.
        """
        if parameters.get("sampling") == "b-min-sep":  # Its rounds are no steps like these.
            return None
        names = ("turns_charged", "num_steps_charged", "num_rounds_charged")
        number: Any = next((parameters[name] for name in names if name in parameters), None)
        of_user = parameters.get("pool_of_user", 1)
        try:
            steps = cls(
                parameters.get("noise_multiplier_of_a_turn", parameters["noise_multiplier"]),
                parameters["sampling_probability"],
                parameters["group_size"] if parameters.get("sampling") == "example" else of_user,
                operator.index(number),
                parameters.get("group_size_epsilon", 0.0),
            )
            again = steps.chosen_epsilon + steps._epsilon(delta)
        except (KeyError, TypeError, ValueError):
            return None
        return steps if math.isclose(again, epsilon, rel_tol=_TOLERANCE) else None

    def beside(self, others: Sequence[parts.Part]) -> SampledSteps:
        """Returns the steps together with the figures that they release of their samples."""
        precision = parts.precision_of_rounds(others)
        if precision == 0.0:
            return self
        noise = 1.0 / math.hypot(1.0 / self.noise_multiplier, math.sqrt(precision))
        return dataclasses.replace(self, noise_multiplier=noise)

    def run(self) -> tuple[mixture_of_gaussians.MixtureOfGaussians, int]:
        """Returns the pair of one step and the number of steps."""
        from tff_dpftrl.accounting import mixture_of_gaussians  # It takes long to import.

        pair = mixture_of_gaussians.els(
            self.noise_multiplier, self.sampling_probability, self.group_size
        )
        return pair, self.num_steps

    def _epsilon(self, delta: float) -> float:
        from tff_dpftrl.accounting import mixture_of_gaussians

        return mixture_of_gaussians.epsilon_of_runs([self.run()], delta=delta)


@dataclasses.dataclass(frozen=True)
class Spent:
    """Privacy that one run has spent; `delta` and `epsilon` are None if it has no guarantee.

    `rho_zcdp` is ρ if the run is a Gaussian mechanism with μ = √(2ρ). `steps` are known only of
    runs that sampled in secret. `others` is what the run released besides its weights, if it is
    known by its losses; ρ and steps are then of the weights alone.
    """

    name: str
    delta: float | None = None
    epsilon: float | None = None
    rho_zcdp: float | None = None
    unit_of_privacy: str = "user"
    steps: SampledSteps | None = None
    others: tuple[parts.Part, ...] = ()

    def __post_init__(self):
        if isinstance(self.steps, Mapping):  # As `to_json` wrote it.
            object.__setattr__(self, "steps", SampledSteps(**self.steps))
        if not isinstance(self.others, tuple):
            object.__setattr__(self, "others", parts.from_json(self.others))

    @classmethod
    def from_json(cls, name: str, statement: Mapping[str, Any]) -> Spent:
        """Reads it from a privacy statement in JSON."""
        values = {key: statement[key] for key in ("delta", "epsilon", "rho_zcdp")}
        for key, value in values.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (is_number and value >= 0.0):
                raise TypeError(f"{key} is {value!r}, which is no privacy cost")
        unit = statement.get("unit_of_privacy", "user")  # Older statements were of users.
        if not isinstance(unit, str):
            raise TypeError(f"unit_of_privacy is {unit!r}, which is no unit")
        if values["epsilon"] is None:
            return cls(name, unit_of_privacy=unit)
        steps = None
        if values["rho_zcdp"] is None and statement.get("parts"):
            return cls._of_parts(name, unit, statement)
        if values["rho_zcdp"] is None and isinstance(statement.get("parameters"), Mapping):
            steps = SampledSteps.of_statement(
                statement["parameters"], values["epsilon"], values["delta"]
            )
        return cls(name, unit_of_privacy=unit, steps=steps, **values)

    @classmethod
    def _of_parts(cls, name: str, unit: str, statement: Mapping[str, Any]) -> Spent:
        """Reads a run with other parts, by their losses if these come to what is stated."""
        epsilon, delta = statement["epsilon"], statement["delta"]
        stated = cls(name, delta, epsilon, unit_of_privacy=unit)
        rows = [
            parts.Cost(**{key: row[key] for key in vars(_NO_COST)})
            for row in statement["parts"]
            if not str(row["name"]).startswith(parts.EARLIER)
        ]
        weights = next((row for row in rows if row.name == parts.WEIGHTS), _NO_COST)
        others = tuple(row.part for row in rows if row.name in parts.NAMES)
        rho, steps = weights.rho_zcdp, None
        if rho is not None:  # Figures of rounds cost as much, each time that a unit is there.
            times = (statement.get("accounted") or {}).get("max_participations", math.nan)
            precision = parts.precision_of_rounds(others)
            rho += times * precision / 2.0 if precision else 0.0
            others = tuple(dataclasses.replace(p, noise_multiplier_of_round=None) for p in others)
        elif weights.epsilon_alone is not None:
            # The choice of a group size is one of the parts.
            parameters = {**statement["parameters"], "group_size_epsilon": 0.0}
            steps = SampledSteps.of_statement(parameters, weights.epsilon_alone, delta)
        if rho is None and steps is None:
            return stated
        found = dataclasses.replace(stated, rho_zcdp=rho, steps=steps, others=others)
        again = _composed([found], delta)
        return found if math.isclose(again, epsilon, rel_tol=_TOLERANCE) else stated

    def to_json(self) -> dict[str, Any]:
        """Returns JSON-compatible values, of which `Spent(**values)` is the same again."""
        values = dataclasses.asdict(self)
        if not self.others:
            del values["others"]
        return values

    @property
    def says(self) -> str:
        """Name and guarantee, for a sentence."""
        if self.epsilon is None or self.delta is None:
            return f"{self.name!r} (without a guarantee)"
        return f"{self.name!r} ({display.epsilon_at(self.epsilon, self.delta)})"


@dataclasses.dataclass(frozen=True)
class Total:
    """Privacy that runs have spent together; `how` is the method of composition, a clause."""

    epsilon: float
    delta: float
    how: str


def of_one_unit(runs: Sequence[Spent]) -> bool:
    """Returns whether runs all protect users (or their devices), or all protect single examples.

    A user may have many examples: ε for one of them says little of ε for the user.
    """
    units = {run.unit_of_privacy == "example" for run in runs if run.epsilon is not None}
    return len(units) <= 1


def compose(runs: Sequence[Spent]) -> Total | None:
    """Bounds the cost of runs, each of which may depend on the results of those before.

    The squared μ of Gaussian mechanisms add up (Dong et al. 2022, corollary 2). Privacy loss
    distributions of runs whose sampled steps are known are convolved with theirs (Zhu, Dong & Wang
    2022, theorem 10). To ε and δ of these together, ε and δ of every other run are added (Dwork &
    Roth 2014, theorem 3.16).

    The bound is for users who take part in all runs. Runs of the same unit of privacy must have the
    same neighbouring data sets. The result is None if a run has no guarantee, or their units
    differ.
    """
    if not of_one_unit(runs):
        return None
    epsilon, delta, how = 0.0, 0.0, []
    rhos, sampled, others = [], [], []
    for run in runs:
        if run.epsilon is None or run.delta is None or math.isinf(run.epsilon):
            return None
        if run.rho_zcdp is not None:
            rhos.append(run)
        elif run.steps is not None:
            sampled.append(run)
        else:
            others.append(run)
    if len(sampled) + bool(rhos) == 1:  # What is stated of the run is as exact.
        others += sampled
        sampled = []
    if rhos or sampled:
        delta = max(run.delta for run in (*rhos, *sampled))
        # What parts spend of δ is within the largest one, as long as it leaves half of it.
        lost = math.fsum(part.delta for run in (*rhos, *sampled) for part in run.others)
        if lost > 0.5 * delta:
            delta += lost
        epsilon = _composed([*rhos, *sampled], delta)
        by_loss = "privacy loss distributions convolved"
        how.append(by_loss if sampled else "ρ of the Gaussian mechanisms added up")
    if others:
        epsilon += math.fsum(run.epsilon for run in others)
        delta += math.fsum(run.delta for run in others)
        how.append("ε and δ of sampled runs added up")
    return Total(epsilon, delta, ", ".join(how))


_NO_COST = parts.Cost("", "", None)


def _composed(runs: Sequence[Spent], delta: float) -> float:
    """Composes Gaussian mechanisms, sampled steps and what was released beside them, at δ."""
    others = [part for run in runs for part in run.others]
    steps = [run.steps.beside(run.others) for run in runs if run.steps is not None]
    rho = math.fsum((*(run.rho_zcdp or 0.0 for run in runs), *(part.rho_zcdp for part in others)))
    chosen = math.fsum((*(one.chosen_epsilon for one in steps), parts.added_epsilon(others)))
    left = parts.remaining_delta(others, delta)
    mu = gaussian.mu_from_rho(rho)
    return chosen + parts.epsilon_of_losses(mu, [one.run() for one in steps], left)


def with_earlier_runs(
    this: Spent, earlier: Sequence[Spent], same_users: bool | None
) -> tuple[str, Total | None]:
    """Describes what a run and the runs that its initial weights come from have spent together.

    `earlier` begins with the run whose model `this` began with, then its predecessor, and so on.
    `same_users` is None if it is not known whether all trained on the same users. The result is a
    few sentences for the headline, and the total; None if there is none (`compose`).
    """
    chain = ", which began with those of the run ".join(run.says for run in earlier)
    text = f"{BEGAN}{chain}. "
    if not of_one_unit([this, *earlier]):
        return (
            f"{text}Some of these runs protect single examples, others all that is of a user or "
            f"device: {NOTHING_TOGETHER}",
            None,
        )
    units, who_is = "users", "who is"
    if this.unit_of_privacy == "example":
        units, who_is = "examples", "what is"
    who = {
        True: "All of these runs trained on the same users. For all of them together",
        False: "The runs have other users, some of whom may be in several. For who is in all of "
        "these runs",
        None: f"Whether they trained on the same {units} is not known. For {who_is} in all of "
        "these runs",
    }[same_users]
    total = compose([this, *earlier])
    if total is None:
        reason = f"not all of these have a guarantee: {NOTHING_TOGETHER}"
        return f"{text}{who}, {reason}", None
    return (
        f"{text}{who}, {display.epsilon_at(total.epsilon, total.delta)} ({total.how}).",
        total,
    )
