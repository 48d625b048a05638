"""The report card of a run: what is promised, to whom, and under which assumptions.

It follows the checklist of Ponomareva et al. 2023 (section 5.3), as Appendix A of
the Gboard paper (Xu et al. 2023) fills it in. A statement whose claim does not
hold carries no epsilon at all, and says why.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any, Literal

from tff_dpftrl import json_text, validation, version
from tff_dpftrl.accounting import facts as facts_lib
from tff_dpftrl.accounting import guarantee, statement_text
from tff_dpftrl.accounting import statement_sentences as sentences
from tff_dpftrl.participation import observed as observed_lib
from tff_dpftrl.participation import schema as schema_lib

UnitOfPrivacy = Literal["user", "device"]
ParticipationRecord = Literal["observed", "assumed"]
Scalar = facts_lib.Scalar


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
      declared: The participation schema that was declared before the run, if it
        matters.
      accounted: The participation schema that the guarantee is computed for.
      observed: Participation that was recorded; None if there is no record.
      unit_of_privacy: What neighbouring data sets differ by: "user" or "device".
      adjacency: How they differ.
      setting: Who is trusted.
      output: What the guarantee applies to.
      covered: Data accesses that are covered.
      not_covered: Data accesses that are not.
      assumptions: What the guarantee relies on.
      caveats: What a reader should know besides.
      headline_caveats: What nobody should quote epsilon and delta without.
      audits: What audits of the running code found, a line each; see `with_audit`.
      code_version: Version of this package.
    """

    mechanism: str
    parameters: Mapping[str, Scalar]
    epsilon: float | None
    delta: float
    rho_zcdp: float | None
    no_guarantee: tuple[str, ...]
    accounting: str
    declared: schema_lib.MinSep | None
    accounted: schema_lib.MinSep | None
    observed: observed_lib.Participation | None
    unit_of_privacy: UnitOfPrivacy
    adjacency: str
    setting: str
    output: str
    covered: tuple[str, ...]
    not_covered: tuple[str, ...]
    assumptions: tuple[str, ...]
    caveats: tuple[str, ...]
    headline_caveats: tuple[str, ...] = ()
    audits: tuple[str, ...] = ()
    code_version: str = version.__version__

    def __post_init__(self):
        validation.delta(self.delta)
        if self.unit_of_privacy not in ("user", "device"):
            raise validation.UsageError(
                f"unit_of_privacy must be 'user' or 'device', got {self.unit_of_privacy!r}."
            )
        if self.epsilon is not None and not 0.0 <= self.epsilon < math.inf:
            raise validation.UsageError(
                f"epsilon must be finite, or None if unbounded; got {self.epsilon!r}."
            )
        if (self.epsilon is None) != bool(self.no_guarantee):
            raise validation.UsageError(
                "A statement has either an epsilon or the reasons why there is none, got "
                f"epsilon={self.epsilon!r} and no_guarantee={self.no_guarantee!r}."
            )
        if self.no_guarantee and self.rho_zcdp is not None:
            raise validation.UsageError(
                f"rho_zcdp must be None without a guarantee, got {self.rho_zcdp!r}."
            )

    @property
    def has_guarantee(self) -> bool:
        """Whether anything is promised at all."""
        return not self.no_guarantee

    @property
    def participation_record(self) -> ParticipationRecord:
        """Whether there is a record of who took part when, or it is only assumed."""
        return "assumed" if self.observed is None else "observed"

    def with_audit(self, entry: str, *, is_refuted: bool) -> PrivacyStatement:
        """A copy that says what an audit found; the claim stays what it is.

        Args:
          entry: One line, as `auditing.audit_report.AuditReport.entry` has it.
          is_refuted: Whether the audit found that the claim cannot be true: it then stands
            beside ε. No audit makes ε smaller, nor larger: a refuted claim is no other claim.

        Returns:
          The copy.
        """
        refuted = (sentences.refuted(entry),) if is_refuted else ()
        return dataclasses.replace(
            self,
            audits=(*self.audits, entry),
            headline_caveats=(*refuted, *self.headline_caveats),
        )

    def to_markdown(self) -> str:
        """The statement for people; costs in privacy are rounded up."""
        return statement_text.to_markdown(self)

    def to_json(self) -> str:
        """The statement for programs; epsilon is null without a guarantee."""
        record = {"participation_record": self.participation_record}
        return json.dumps(dataclasses.asdict(self) | record, indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> PrivacyStatement:
        """Inverse of `to_json`; statements from before there were audits have none.

        Raises:
          ValueError: If `text` is not a statement.
        """
        try:
            values = json_text.parse(text)
        except ValueError as error:
            raise validation.UsageError(f"text is not a privacy statement: {error}.") from None
        kinds_of = {field.name: str(field.type) for field in dataclasses.fields(cls)}
        names = {"participation_record", *kinds_of}
        if not isinstance(values, dict) or set(values) | {"audits"} != names:
            raise validation.UsageError("text is not a privacy statement written by to_json.")
        record = values.pop("participation_record")
        kinds = {
            "declared": schema_lib.MinSep,
            "accounted": schema_lib.MinSep,
            "observed": observed_lib.Participation,
        }
        for name, value in values.items():
            if isinstance(value, list):
                values[name] = tuple(value)
            elif name in kinds and value is not None:
                try:
                    values[name] = kinds[name](**value)
                except TypeError as error:
                    raise validation.UsageError(f"text has a wrong {name}: {error}.") from None
            if not _is_of_kind(values[name], kinds_of[name]):
                raise validation.UsageError(
                    f"text is not a privacy statement: {name} is of another type."
                )
        found = cls(**values)
        if found.participation_record != record:
            raise validation.UsageError(
                f"text says participation_record={record!r}, but its record is "
                f"{found.participation_record}."
            )
        return found

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


def _is_of_kind(value: Any, kind: str) -> bool:
    """Whether a value is of a type, as the fields of `PrivacyStatement` name it."""
    if kind == "str":
        return isinstance(value, str)
    if kind == "tuple[str, ...]":
        return isinstance(value, tuple) and all(isinstance(one, str) for one in value)
    if kind.startswith("float"):
        is_number = type(value) in (int, float) and not abs(value) >= 2**1023  # Or no float is.
        return is_number or (value is None and kind.endswith("None"))
    if kind.startswith("Mapping"):
        return isinstance(value, dict) and all(
            one is None or isinstance(one, str | int | float) for one in value.values()
        )
    return value is None or not isinstance(value, tuple)  # Of a class that has checked it.


def _flat(statement: PrivacyStatement) -> dict[str, Any]:
    values = dataclasses.asdict(statement)
    parameters = values.pop("parameters")
    return values | {f"parameters.{name}": value for name, value in parameters.items()}


_NO_FACTS = facts_lib.Facts()


def dp_ftrl_statement(
    claim: guarantee.Guarantee,
    facts: facts_lib.Facts = _NO_FACTS,
    *,
    unit_of_privacy: UnitOfPrivacy,
    num_users: int | None = None,
    declared: schema_lib.MinSep | None = None,
    observed: observed_lib.Participation | None = None,
    data_in_one_place: bool = False,
) -> PrivacyStatement:
    """The statement of a DP-FTRL run.

    There is no guarantee if the noise is 0, if the seed of the noise is known, or if
    the observed participation broke the declared schema or the one the claim is
    computed for. Without an observation the headline says that it was assumed.

    Args:
      claim: The guarantee; its schema may be the declared one, cut to the rounds
        that were run.
      facts: Facts of the run that the claim does not have; none by default.
      unit_of_privacy: "device" if a client is a device, "user" if it is a person.
      num_users: Number of users (or devices) in the population, to judge delta by;
        warns if delta is not below 1 / num_users. None if unknown.
      declared: The schema declared before the run; `claim.schema` if None.
      observed: What the ledger recorded, `Ledger.observed()`; None if nothing was.
      data_in_one_place: Whether there are no clients: one party holds everybody's data.

    Returns:
      The statement.

    Raises:
      ValueError: If an argument is out of range.
    """
    declared = claim.schema if declared is None else declared
    reasons = []
    if claim.noise_multiplier == 0.0:
        reasons.append(sentences.NO_NOISE)
    if claim.seed_is_known:
        reasons.append(sentences.KNOWN_SEED)
    if not reasons and math.isinf(claim.epsilon):
        reasons.append(sentences.TOO_LITTLE_NOISE)
    if observed is not None:
        observed = observed_lib.Participation(
            observed.num_rounds, observed.min_sep, observed.max_participations
        )
        broken = _breaches(observed, declared, "declared")
        reasons.extend(broken or _breaches(observed, claim.schema, "accounted for"))
    parameters: dict[str, Scalar] = {
        "noise_multiplier": claim.noise_multiplier,
        "sensitivity_squared": claim.sensitivity.squared,
        "sensitivity_method": claim.sensitivity.method
        + ("" if claim.sensitivity.exact else " (an upper bound)"),
        "clip_norm_inflation": claim.clip_norm_inflation,
    }
    if claim.clip_norm is not None:
        parameters["clip_norm"] = claim.clip_norm
    if claim.adaptive_clipping:
        parameters["adaptive_clipping"] = (
            "noise_multiplier is that of updates and clip norm together"
        )
    if num_users is not None:
        parameters["num_users"] = validation.integer("num_users", num_users, minimum=1)
    return PrivacyStatement(
        mechanism=claim.mechanism,
        parameters={**parameters, **facts.parameters},
        epsilon=None if reasons else claim.epsilon,
        delta=claim.delta,
        rho_zcdp=None if reasons else claim.rho_zcdp,
        no_guarantee=tuple(reasons),
        accounting=sentences.MATRIX_ACCOUNTING,
        declared=declared,
        accounted=claim.schema,
        observed=observed,
        unit_of_privacy=unit_of_privacy,
        adjacency=sentences.zero_out(unit_of_privacy, claim.adaptive_clipping),
        setting=sentences.SETTING_IN_ONE_PLACE if data_in_one_place else sentences.SETTING,
        output=sentences.OUTPUT_IN_ONE_PLACE if data_in_one_place else sentences.OUTPUT,
        covered=sentences.covered(unit_of_privacy, data_in_one_place),
        not_covered=(
            *sentences.not_covered(facts.hyperparameter_tuning, data_in_one_place),
            *_vocabulary_not_covered(facts),
            *facts.not_covered,
        ),
        assumptions=(
            sentences.schema_kept(observed is not None),
            sentences.NO_SAMPLING,
            sentences.one_client(unit_of_privacy, data_in_one_place),
            sentences.norm_bound(claim.adaptive_clipping),
            sentences.NOISE_USED_ONCE,
            *_vocabulary_assumed(facts),
        ),
        caveats=(
            sentences.FLOATING_POINT,
            *sentences.unit_caveats(unit_of_privacy),
            *facts.caveats,
        ),
        headline_caveats=(
            *sentences.delta_caveats(claim.delta, num_users, unit_of_privacy),
            *facts.headline_caveats,
        ),
    )


def _vocabulary_not_covered(facts: facts_lib.Facts) -> list[str]:
    if facts.vocabulary_is_public:
        return []
    return [sentences.vocabulary_choice(facts.vocabulary_source)]


def _vocabulary_assumed(facts: facts_lib.Facts) -> list[str]:
    if not facts.vocabulary_is_public:
        return []
    return [sentences.public_vocabulary(facts.vocabulary_source)]


def _breaches(
    observed: observed_lib.Participation, schema: schema_lib.MinSep, name: str
) -> list[str]:
    return [
        f"The participation broke the schema {name}: {breach}."
        for breach in observed.breaches(schema)
    ]


def sampled_statement(
    *,
    mechanism: str,
    epsilon: float,
    delta: float,
    accounting: str,
    sampling: str,
    facts: facts_lib.Facts = _NO_FACTS,
    unit_of_privacy: UnitOfPrivacy = "user",
    num_users: int | None = None,
    seed_is_known: bool = False,
    data_in_one_place: bool = False,
) -> PrivacyStatement:
    """The statement of a run whose privacy relies on secret random sampling.

    For DP-FedAvg, ELS, ULS and amplified banded matrix factorisation. Its headline
    says that the sampling is assumed: no record of cohorts shows how they were drawn.

    Args:
      mechanism: Its name.
      epsilon: What the accounting found; inf if there was no noise.
      delta: The delta of `epsilon`.
      accounting: How epsilon was computed.
      sampling: What is sampled, and how; becomes an assumption.
      facts: Facts of the run, with the parameters of the mechanism; none by default.
      unit_of_privacy: "device" if a client is a device, "user" if it is a person.
      num_users: Number of users (or devices) in the population; None if unknown.
      seed_is_known: Whether the user chose the seed of noise or sampling.
      data_in_one_place: Whether there are no clients: one party holds everybody's data.

    Returns:
      The statement.

    Raises:
      ValueError: If an argument is out of range.
    """
    reasons = []
    if math.isinf(epsilon):
        reasons.append(sentences.TOO_LITTLE_NOISE)
    if seed_is_known:
        reasons.append(sentences.KNOWN_SEED)
    parameters: dict[str, Scalar] = {}
    if num_users is not None:
        parameters["num_users"] = validation.integer("num_users", num_users, minimum=1)
    return PrivacyStatement(
        mechanism=mechanism,
        parameters={**parameters, **facts.parameters},
        epsilon=None if reasons else epsilon,
        delta=delta,
        rho_zcdp=None,
        no_guarantee=tuple(reasons),
        accounting=accounting,
        declared=None,
        accounted=None,
        observed=None,
        unit_of_privacy=unit_of_privacy,
        adjacency=sentences.zero_out_when_sampled(unit_of_privacy),
        setting=sentences.SETTING_IN_ONE_PLACE if data_in_one_place else sentences.SETTING,
        output=sentences.OUTPUT_IN_ONE_PLACE if data_in_one_place else sentences.OUTPUT,
        covered=sentences.covered(unit_of_privacy, data_in_one_place),
        not_covered=(
            *sentences.not_covered(facts.hyperparameter_tuning, data_in_one_place),
            *_vocabulary_not_covered(facts),
            *facts.not_covered,
        ),
        assumptions=(
            f"{sampling} {sentences.SECRET_SAMPLING}",
            sentences.one_client(unit_of_privacy, data_in_one_place),
            sentences.CLIPPED_AS_STATED,
            sentences.NOISE_USED_ONCE,
            *_vocabulary_assumed(facts),
        ),
        caveats=(
            sentences.FLOATING_POINT,
            *sentences.unit_caveats(unit_of_privacy),
            *facts.caveats,
        ),
        headline_caveats=(
            *sentences.delta_caveats(delta, num_users, unit_of_privacy),
            *facts.headline_caveats,
        ),
    )
