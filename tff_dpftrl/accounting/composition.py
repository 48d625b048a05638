"""What several runs on the same people have spent together, and the sentence that says so."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tff_dpftrl.accounting import display, gaussian

BEGAN = "The initial weights are of the run "
"""Beginning of what a statement says of the runs that its run's initial weights come from."""


@dataclasses.dataclass(frozen=True)
class Spent:
    """Privacy that one run has spent.

    Attributes:
      name: Name of the run.
      delta: δ of its guarantee; None if it has no guarantee.
      epsilon: ε of its guarantee; None if it has none.
      rho_zcdp: ρ if the run is a Gaussian mechanism with μ = √(2ρ); None otherwise.
      unit_of_privacy: Unit that its guarantee protects: "user", "device" or "example".
    """

    name: str
    delta: float | None = None
    epsilon: float | None = None
    rho_zcdp: float | None = None
    unit_of_privacy: str = "user"

    @classmethod
    def from_json(cls, name: str, statement: Mapping[str, Any]) -> Spent:
        """Reads it from a privacy statement in JSON.

        Raises:
          KeyError: If an entry is missing.
          TypeError: If an entry is no number.
        """
        values = {key: statement[key] for key in ("delta", "epsilon", "rho_zcdp")}
        for key, value in values.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (is_number and value >= 0.0):
                raise TypeError(f"{key} is {value!r}, which is no privacy cost")
        unit = statement.get("unit_of_privacy", "user")  # Older statements were of users.
        if not isinstance(unit, str):
            raise TypeError(f"unit_of_privacy is {unit!r}, which is no unit")
        spent = {} if values["epsilon"] is None else values
        return cls(name, unit_of_privacy=unit, **spent)

    @property
    def says(self) -> str:
        """Name and guarantee, for a sentence."""
        if self.epsilon is None:
            return f"{self.name!r} (without a guarantee)"
        return f"{self.name!r} (ε = {display.round_up(self.epsilon)} at δ = {self.delta:g})"


@dataclasses.dataclass(frozen=True)
class Total:
    """Privacy that runs have spent together.

    Attributes:
      epsilon: ε of all runs together, at `delta`.
      delta: δ of all runs together.
      how: Method of the composition, a clause.
    """

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
    """Composes runs, each of which may depend on the results of those before.

    The squared μ of Gaussian mechanisms add up (Dong et al. 2022, corollary 2). To ε and δ of
    these together, ε and δ of every other run are added (Dwork & Roth 2014, theorem 3.16).

    Args:
      runs: The runs, with the same neighbouring data sets if they have the same unit of privacy.

    Returns:
      An upper bound for who takes part in all of them; None if one of them has no guarantee, or
      they are not of one unit of privacy.
    """
    if not of_one_unit(runs):
        return None
    epsilon, delta, how = 0.0, 0.0, []
    rhos, others = [], []
    for run in runs:
        if run.epsilon is None or run.delta is None or math.isinf(run.epsilon):
            return None
        if run.rho_zcdp is None:
            others.append(run)
        else:
            rhos.append(run)
    if rhos:
        delta = max(run.delta for run in rhos)
        epsilon = gaussian.epsilon(
            gaussian.mu_from_rho(math.fsum(run.rho_zcdp for run in rhos)), delta
        )
        how.append("ρ of the Gaussian mechanisms added up")
    if others:
        epsilon += math.fsum(run.epsilon for run in others)
        delta += math.fsum(run.delta for run in others)
        how.append("ε and δ of sampled runs added up")
    return Total(epsilon, delta, ", ".join(how))


def with_earlier_runs(
    this: Spent, earlier: Sequence[Spent], same_users: bool | None
) -> tuple[str, Total | None]:
    """Describes what a run and the runs that its initial weights come from have spent together.

    Args:
      this: The run.
      earlier: The run whose model it began with, then the one which that began with, and so on.
      same_users: Whether all of these runs trained on the same users; None if that is not known.

    Returns:
      A few sentences for the headline, and the total; None if there is none (`compose`).
    """
    chain = ", which began with those of the run ".join(run.says for run in earlier)
    text = f"{BEGAN}{chain}. "
    if not of_one_unit([this, *earlier]):
        return (
            f"{text}Some of these runs protect single examples, others all that is of a user or "
            "device: nothing is promised for all together.",
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
        reason = "not all of these have a guarantee: nothing is promised for all together."
        return f"{text}{who}, {reason}", None
    return (
        f"{text}{who}, ε = {display.round_up(total.epsilon)} at δ = {total.delta:g} ({total.how}).",
        total,
    )
