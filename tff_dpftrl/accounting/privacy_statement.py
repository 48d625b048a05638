"""The privacy statement of a run: what is promised, to whom, under which assumptions.

It follows the checklist of Ponomareva et al. 2023 (section 5.3), as Appendix A of the Gboard
paper (Xu et al. 2023) fills it in. A statement whose claim does not hold carries no epsilon,
and gives the reasons. `statement` builds statements.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

from tff_dpftrl import json_text, validation, version
from tff_dpftrl.accounting import display
from tff_dpftrl.accounting import facts as facts_lib
from tff_dpftrl.accounting import statement_sentences as sentences
from tff_dpftrl.participation import observed as observed_lib
from tff_dpftrl.participation import schema as schema_lib

UnitOfPrivacy = Literal["user", "device", "example"]
ParticipationRecord = Literal["observed", "assumed"]
Scalar = facts_lib.Scalar


@dataclasses.dataclass(frozen=True)
class PrivacyStatement:
    """The privacy guarantee of one run, in full, or the reasons why there is none.

    Build it with a function of the module `statement`.

    Attributes:
      mechanism: Name of the mechanism.
      parameters: Parameters of the mechanism and the run, by name.
      epsilon: Epsilon at `delta`; None if there is no guarantee.
      delta: Delta of the (epsilon, delta) guarantee.
      rho_zcdp: zCDP parameter ρ; None without a guarantee, or for a mechanism that has none.
      no_guarantee: Reasons why there is no guarantee; empty if there is one.
      accounting: Method by which epsilon was computed.
      declared: Participation schema declared before the run; None if the guarantee rests on
        sampling.
      accounted: Participation schema for which the guarantee is computed, or None likewise.
      observed: Participation on record; None if there is no record.
      unit_of_privacy: Unit in which neighbouring data sets differ: "user", "device" or "example".
      adjacency: Definition of neighbouring data sets.
      setting: Trust model: who is trusted, and with what.
      output: Outputs to which the guarantee applies.
      covered: Accesses to data that the guarantee covers.
      not_covered: Accesses to data that the guarantee does not cover.
      assumptions: Assumptions on which the guarantee rests.
      caveats: Further facts that a reader should know.
      headline_caveats: Caveats without which nobody should quote epsilon and delta.
      audits: Results of audits of the running code, one line each, added by `with_audit`.
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
        if self.unit_of_privacy not in get_args(UnitOfPrivacy):
            raise validation.UsageError(
                "unit_of_privacy must be 'user', 'device' or 'example', got "
                f"{self.unit_of_privacy!r}."
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
        """Whether there is a guarantee at all."""
        return not self.no_guarantee

    @property
    def participation_record(self) -> ParticipationRecord:
        """Whether participation is on record ("observed") or only assumed ("assumed")."""
        return "assumed" if self.observed is None else "observed"

    def with_audit(self, entry: str, *, is_refuted: bool) -> PrivacyStatement:
        """Adds the result of an audit; epsilon and delta stay what they are.

        Args:
          entry: Result in one line, from `auditing.audit_report.AuditReport.entry`.
          is_refuted: Whether the audit showed that the claim cannot be true. A caveat beside
            epsilon then says so. No audit makes epsilon smaller or larger.

        Returns:
          A copy with the result.
        """
        refuted = (sentences.refuted(entry),) if is_refuted else ()
        return dataclasses.replace(
            self,
            audits=(*self.audits, entry),
            headline_caveats=(*refuted, *self.headline_caveats),
        )

    def to_markdown(self) -> str:
        """Renders the statement as Markdown; epsilon and rho are rounded up."""
        return _to_markdown(self)

    def to_json(self) -> str:
        """Writes the statement as JSON; epsilon is null without a guarantee."""
        record = {"participation_record": self.participation_record}
        return json.dumps(dataclasses.asdict(self) | record, indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> PrivacyStatement:
        """Reads what `to_json` wrote, also by versions without audits.

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
        statement = cls(**values)
        if statement.participation_record != record:
            raise validation.UsageError(
                f"text says participation_record={record!r}, but its record is "
                f"{statement.participation_record}."
            )
        return statement

    def diff(self, other: PrivacyStatement) -> dict[str, tuple[Any, Any]]:
        """Compares with another statement.

        Args:
          other: Statement to compare with.

        Returns:
          Pairs (value here, value there) of the fields that differ, by field name.
          Parameters are compared one by one, under names like "parameters.clip_norm".
        """
        mine, theirs = _flat(self), _flat(other)
        return {
            name: (mine.get(name), theirs.get(name))
            for name in sorted(mine.keys() | theirs.keys())
            if mine.get(name) != theirs.get(name)
        }


def _is_of_kind(value: Any, kind: str) -> bool:
    """Returns whether a value has the type that the annotation `kind` of a field names."""
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
    return value is None or not isinstance(value, tuple)  # A class that checked it.


def _flat(statement: PrivacyStatement) -> dict[str, Any]:
    values = dataclasses.asdict(statement)
    parameters = values.pop("parameters")
    return values | {f"parameters.{name}": value for name, value in parameters.items()}


def _participation(title: str, facts: schema_lib.MinSep | observed_lib.Participation | None) -> str:
    if facts is None:
        return f"| {title} | not recorded | | | |"
    if facts.min_sep is None:
        separation = "none took part twice | |"
    else:
        separation = f"{facts.min_sep} | {facts.min_sep_gap} |"
    return f"| {title} | {facts.num_rounds} | {separation} {facts.max_participations} |"


def _bullets(lines: tuple[str, ...]) -> list[str]:
    return [f"- {line}" for line in lines]


def _unit(statement: PrivacyStatement) -> str:
    """Returns the unit of privacy, with its meaning in the corpus if the parameters give one."""
    unit, meaning = f"one {statement.unit_of_privacy}", statement.parameters.get("user")
    return unit if meaning is None or meaning == unit else f"{unit}, here {meaning}"


def _readable(name: str, value: Scalar) -> Scalar:
    """Rounds a parameter up if a larger value promises less, so that it cannot flatter."""
    if name == "sampling_probability" and isinstance(value, int | float):
        return display.round_up(value, 6)
    return value


def _headline(statement: PrivacyStatement) -> list[str]:
    """Returns epsilon and delta, with the caveats without which they must not be quoted."""
    if not statement.has_guarantee:
        return ["**No differential privacy guarantee.**", "", *_bullets(statement.no_guarantee)]
    bound = f"(ε = {display.round_up(statement.epsilon)}, δ = {statement.delta:g})"
    promise = f"{statement.unit_of_privacy.capitalize()}-level {bound}-differential privacy"
    if statement.participation_record == "assumed":
        what = "sampling of cohorts" if statement.accounted is None else "participation schema"
        promise += f", if the {what} was kept: it was assumed, not observed"
    rho = "" if statement.rho_zcdp is None else f", ρ = {display.round_up(statement.rho_zcdp)} zCDP"
    lines = [f"**{promise}**{rho}, by the mechanism {statement.mechanism}."]
    for caveat in statement.headline_caveats:
        lines += ["", f"**{caveat}**"]
    return lines


def _to_markdown(statement: PrivacyStatement) -> str:
    """Renders a statement; the rounded numbers stand exactly in the JSON."""
    lines = ["# Privacy statement", "", *_headline(statement)]
    lines += [
        "",
        "## Setting",
        "",
        f"- Trust: {statement.setting}",
        f"- Unit of privacy: {_unit(statement)}.",
        f"- Neighbouring data sets: {statement.adjacency}",
        f"- Released: {statement.output}",
        "",
        "## Covered",
        "",
        *_bullets(statement.covered),
        "",
        "## Not covered",
        "",
        *_bullets(statement.not_covered),
        "",
    ]
    if statement.accounted is not None:
        lines += [
            "## Participation",
            "",
            "| | rounds | MinS, stride (j − i) | MinS, gap (rounds in between) | MaxP |",
            "|---|---|---|---|---|",
            _participation("declared", statement.declared),
            _participation("accounted for", statement.accounted),
            _participation("observed", statement.observed),
            "",
        ]
    lines += [
        "## Accounting",
        "",
        statement.accounting,
        "",
        "Assumptions:",
        "",
        *_bullets(statement.assumptions),
        "",
        "## Mechanism and parameters",
        "",
        f"- mechanism: {statement.mechanism}",
        *(f"- {name}: {_readable(name, value)}" for name, value in statement.parameters.items()),
        "",
        "## Caveats",
        "",
        *_bullets(statement.caveats),
        "",
        *(["## Audits", "", *_bullets(statement.audits), ""] if statement.audits else []),
        f"tff_dpftrl {statement.code_version}",
    ]
    return "\n".join(lines) + "\n"
