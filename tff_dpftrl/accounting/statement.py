"""The report card of a run: what is promised, to whom, and under which assumptions.

It follows the checklist of Ponomareva et al. 2023 (section 5.3), as Appendix A of
the Gboard paper (Xu et al. 2023) fills it in. A statement whose claim does not
hold carries no epsilon at all, and says why.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from tff_dpftrl import version
from tff_dpftrl.accounting import gaussian, guarantee, statement_text
from tff_dpftrl.participation import schema as schema_lib

UnitOfPrivacy = Literal["user", "device"]
Scalar = str | int | float | bool | None

_SETTING = (
    "Central differential privacy: the server is trusted to run the mechanism, to keep the "
    "un-noised sums and the seed of the noise secret, and to erase them."
)
_OUTPUT = (
    "All noised sums, hence every intermediate model and the final one (those sent to clients "
    "included)."
)
_COVERED = "Everything the run's rounds learned from the training data of well-behaved clients."
_WELL_BEHAVED = "Clients that do not follow the algorithm (others stay protected)."
_EVALUATION = "Metrics, held-out evaluation, A/B tests and the choice of a checkpoint by them."
_FLOATING_POINT = (
    "The proof is about ideal Gaussians on real numbers. The noise comes from a pseudo-random "
    "generator and floating-point arithmetic, whose gaps are not accounted for (Mironov 2012)."
)
_DETERMINISTIC_SEED = (
    "The noise was drawn from a seed given by the user: whoever knows or guesses it can subtract "
    "the noise."
)


@dataclasses.dataclass(frozen=True)
class Participation:
    """How often clients took part, or were allowed to.

    Attributes:
      num_rounds: Number of rounds.
      min_sep: Smallest stride j − i between two rounds i < j of one client; None
        if no client took part twice.
      max_participations: Largest number of rounds of one client.
    """

    num_rounds: int
    min_sep: int | None
    max_participations: int

    @classmethod
    def from_schema(cls, schema: schema_lib.MinSep) -> Participation:
        """The participation that `schema` allows."""
        return cls(schema.num_rounds, schema.min_sep, schema.max_participations)

    def violations_of(self, declared: Participation, name: str) -> tuple[str, ...]:
        """In which respects this observed participation exceeds the one called `name`."""
        found = []
        if self.num_rounds > declared.num_rounds:
            found.append(f"{self.num_rounds} rounds were run, {declared.num_rounds} {name}")
        if self.max_participations > declared.max_participations:
            found.append(
                f"a client took part {self.max_participations} times, "
                f"{declared.max_participations} {name}"
            )
        allowed = declared.min_sep
        if self.min_sep is not None and (allowed is None or self.min_sep < allowed):
            found.append(
                f"two rounds of one client were {self.min_sep} apart (stride), "
                f"{'no second one was' if allowed is None else f'{allowed}'} {name}"
            )
        return tuple(f"The participation broke its schema: {text}." for text in found)


@dataclasses.dataclass(frozen=True)
class PrivacyStatement:
    """What a run promises, in full. Build it with a function of this module.

    Attributes:
      mechanism: Name of the mechanism.
      parameters: Its parameters and those of the run, names to plain values.
      epsilon: Epsilon at `delta`; None if there is no guarantee.
      delta: Delta of the (epsilon, delta) statement.
      rho_zcdp: The zCDP parameter; None if there is none or no guarantee.
      no_guarantee: Why there is no guarantee; empty if there is one.
      accounting: How epsilon was computed.
      declared: Participation that was declared before the run, if it matters.
      accounted: Participation that the guarantee is computed for.
      observed: Participation that the ledger recorded; None if unknown.
      unit_of_privacy: What neighbouring data sets differ by: "user" or "device".
      adjacency: How they differ.
      setting: Who is trusted.
      output: What the guarantee applies to.
      covered: Data accesses that are covered.
      not_covered: Data accesses that are not.
      assumptions: What the guarantee relies on.
      caveats: What a reader should know besides.
      code_version: Version of this package.
    """

    mechanism: str
    parameters: Mapping[str, Scalar]
    epsilon: float | None
    delta: float
    rho_zcdp: float | None
    no_guarantee: tuple[str, ...]
    accounting: str
    declared: Participation | None
    accounted: Participation | None
    observed: Participation | None
    unit_of_privacy: UnitOfPrivacy
    adjacency: str
    setting: str
    output: str
    covered: tuple[str, ...]
    not_covered: tuple[str, ...]
    assumptions: tuple[str, ...]
    caveats: tuple[str, ...]
    code_version: str = version.__version__

    def __post_init__(self):
        gaussian.check_delta(self.delta)
        if self.unit_of_privacy not in ("user", "device"):
            raise ValueError(
                f"unit_of_privacy must be 'user' or 'device', got {self.unit_of_privacy!r}."
            )
        if self.epsilon is not None and not 0.0 <= self.epsilon < math.inf:
            raise ValueError(f"epsilon must be finite, or None if unbounded; got {self.epsilon!r}.")
        if (self.epsilon is None) != bool(self.no_guarantee):
            raise ValueError(
                "A statement has either an epsilon or the reasons why there is none, got "
                f"epsilon={self.epsilon!r} and no_guarantee={self.no_guarantee!r}."
            )
        if self.no_guarantee and self.rho_zcdp is not None:
            raise ValueError(f"rho_zcdp must be None without a guarantee, got {self.rho_zcdp!r}.")

    @property
    def has_guarantee(self) -> bool:
        """Whether anything is promised at all."""
        return not self.no_guarantee

    def to_markdown(self) -> str:
        """The statement for people; costs in privacy are rounded up."""
        return statement_text.to_markdown(self)

    def to_json(self) -> str:
        """The statement for programs; epsilon is null without a guarantee."""
        return json.dumps(dataclasses.asdict(self), indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> PrivacyStatement:
        """Inverse of `to_json`.

        Raises:
          ValueError: If `text` is not a statement.
        """
        values = json.loads(text)
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(values, dict) or set(values) != names:
            raise ValueError("text is not a privacy statement written by to_json.")
        for name, value in values.items():
            if isinstance(value, list):
                values[name] = tuple(value)
            elif name in ("declared", "accounted", "observed") and value is not None:
                values[name] = Participation(**value)
        return cls(**values)

    def diff(self, other: PrivacyStatement) -> dict[str, tuple[Any, Any]]:
        """What differs from another statement.

        Args:
          other: The statement to compare with.

        Returns:
          From field name to (value here, value there); parameters are compared
          one by one, under names like "parameters.clip_norm".
        """
        mine, theirs = _flat(self), _flat(other)
        return {
            name: (mine.get(name), theirs.get(name))
            for name in sorted(mine.keys() | theirs.keys())
            if mine.get(name) != theirs.get(name)
        }


def _flat(statement: PrivacyStatement) -> dict[str, Any]:
    values = dataclasses.asdict(statement)
    parameters = values.pop("parameters")
    return values | {f"parameters.{name}": value for name, value in parameters.items()}


def dp_ftrl_statement(
    claim: guarantee.Guarantee,
    *,
    unit_of_privacy: UnitOfPrivacy,
    parameters: Mapping[str, Scalar] | None = None,
    declared: schema_lib.MinSep | None = None,
    observed: Participation | None = None,
    deterministic_seed: bool = False,
    vocabulary_source: str | None = None,
    hyperparameter_tuning: str | None = None,
    not_covered: Sequence[str] = (),
    caveats: Sequence[str] = (),
) -> PrivacyStatement:
    """The statement of a DP-FTRL run.

    There is no guarantee if the noise is 0, if the seed of the noise was given by
    the user, or if the observed participation broke the declared schema or the
    one the claim is computed for.

    Args:
      claim: The guarantee; its schema may be the declared one, cut to the rounds
        that were run.
      unit_of_privacy: "device" if a client is a device, "user" if it is a person.
      parameters: More parameters of the run to report.
      declared: The schema declared before the run; `claim.schema` if None.
      observed: What the ledger recorded; None if nothing was.
      deterministic_seed: Whether the user, not the operating system, chose the
        seed of the noise.
      vocabulary_source: Where the vocabulary came from; None if unknown.
      hyperparameter_tuning: How hyperparameters were chosen; None if unknown.
      not_covered: Further accesses to data that the guarantee does not cover.
      caveats: Further caveats.

    Returns:
      The statement.
    """
    accounted = Participation.from_schema(claim.schema)
    promised = accounted if declared is None else Participation.from_schema(declared)
    reasons = []
    if claim.noise_multiplier == 0.0:
        reasons.append("No noise was added (noise_multiplier is 0).")
    if deterministic_seed:
        reasons.append(_DETERMINISTIC_SEED)
    if observed is not None:
        broken = observed.violations_of(promised, "declared")
        reasons.extend(broken or observed.violations_of(accounted, "accounted for"))
    facts: dict[str, Scalar] = {
        "noise_multiplier": claim.noise_multiplier,
        "sensitivity_squared": claim.sensitivity.squared,
        "sensitivity_method": claim.sensitivity.method
        + ("" if claim.sensitivity.exact else " (an upper bound)"),
        "clip_norm_inflation": claim.clip_norm_inflation,
    }
    return PrivacyStatement(
        mechanism=claim.mechanism,
        parameters=facts | dict(parameters or {}),
        epsilon=None if reasons else claim.epsilon,
        delta=claim.delta,
        rho_zcdp=None if reasons else claim.rho_zcdp,
        no_guarantee=tuple(reasons),
        accounting=(
            "rho-zCDP of the matrix mechanism, rho = S² / (2 z²) with the sensitivity S under the "
            "participation schema; (epsilon, delta) is exact for the equivalent Gaussian (Balle & "
            "Wang 2018), as a privacy loss distribution would give it."
        ),
        declared=promised,
        accounted=accounted,
        observed=observed,
        unit_of_privacy=unit_of_privacy,
        adjacency=(
            f"Zero-out: neighbouring data sets differ in that one {unit_of_privacy}'s "
            "contributions are replaced by zeros in every round (Kairouz et al. 2021, Definition "
            "1.1), a form of adding or removing one."
        ),
        setting=_SETTING,
        output=_OUTPUT,
        covered=(_COVERED,),
        not_covered=(
            _WELL_BEHAVED,
            _EVALUATION,
            f"Tuning of hyperparameters: {hyperparameter_tuning or 'not recorded'}.",
            f"Choice of the vocabulary: {vocabulary_source or 'not recorded'}.",
            *not_covered,
        ),
        assumptions=(
            "Every client respects the participation schema above; no random sampling of clients "
            "is assumed.",
            "The L2 norm of a client's contribution to a round is at most the clip norm (times "
            "clip_norm_inflation).",
            "The noise of one run is used for one sequence of cohorts only.",
        ),
        caveats=(_FLOATING_POINT, *_unit_caveats(unit_of_privacy), *caveats),
    )


def _unit_caveats(unit: UnitOfPrivacy) -> tuple[str, ...]:
    if unit == "user":
        return ()
    return (
        "A person with several devices is protected less: by group privacy over those devices.",
    )


def sampled_statement(
    *,
    mechanism: str,
    epsilon: float,
    delta: float,
    accounting: str,
    sampling: str,
    parameters: Mapping[str, Scalar],
    unit_of_privacy: UnitOfPrivacy = "user",
    deterministic_seed: bool = False,
    vocabulary_source: str | None = None,
    hyperparameter_tuning: str | None = None,
    not_covered: Sequence[str] = (),
    caveats: Sequence[str] = (),
) -> PrivacyStatement:
    """The statement of a run whose privacy relies on secret random sampling.

    For DP-FedAvg, ELS, ULS and amplified banded matrix factorisation.

    Args:
      mechanism: Its name.
      epsilon: What the accounting found; inf if there was no noise.
      delta: The delta of `epsilon`.
      accounting: How epsilon was computed.
      sampling: What is sampled, and how; becomes an assumption.
      parameters: Parameters of mechanism and run.
      unit_of_privacy: As for `dp_ftrl_statement`, like the arguments below.
      deterministic_seed: Whether the user chose the seed of noise or sampling.
      vocabulary_source: Where the vocabulary came from; None if unknown.
      hyperparameter_tuning: How hyperparameters were chosen; None if unknown.
      not_covered: Further accesses to data that the guarantee does not cover.
      caveats: Further caveats.

    Returns:
      The statement.
    """
    reasons = []
    if math.isinf(epsilon):
        reasons.append("No noise was added, or too little for any finite epsilon.")
    if deterministic_seed:
        reasons.append(_DETERMINISTIC_SEED)
    return PrivacyStatement(
        mechanism=mechanism,
        parameters=dict(parameters),
        epsilon=None if reasons else epsilon,
        delta=delta,
        rho_zcdp=None,
        no_guarantee=tuple(reasons),
        accounting=accounting,
        declared=None,
        accounted=None,
        observed=None,
        unit_of_privacy=unit_of_privacy,
        adjacency=(
            f"Add or remove all data of one {unit_of_privacy}: neighbouring data sets differ in "
            f"that one {unit_of_privacy} has no data. The number of {unit_of_privacy}s, and with "
            "it the sampling probability, is public."
        ),
        setting=_SETTING,
        output=_OUTPUT,
        covered=(_COVERED,),
        not_covered=(
            _EVALUATION,
            f"Tuning of hyperparameters: {hyperparameter_tuning or 'not recorded'}.",
            f"Choice of the vocabulary: {vocabulary_source or 'not recorded'}.",
            *not_covered,
        ),
        assumptions=(
            f"{sampling} The samples are drawn independently, by a secret generator, and stay "
            "secret.",
            "The L2 norm of what is summed is clipped as the parameters say.",
        ),
        caveats=(_FLOATING_POINT, *_unit_caveats(unit_of_privacy), *caveats),
    )
