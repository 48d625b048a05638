"""The privacy statement of a run: what is promised, to whom, under which assumptions.

It follows the checklist of Ponomareva et al. 2023 (section 5.3), as Appendix A of the Gboard
paper (Xu et al. 2023) fills it in. A statement whose claim does not hold carries no epsilon,
and gives the reasons. `statement` builds statements.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any, Literal, get_args

from tff_dpftrl import json_text, validation, version
from tff_dpftrl.accounting import facts as facts_lib
from tff_dpftrl.accounting import gaussian
from tff_dpftrl.accounting import parts as parts_lib
from tff_dpftrl.accounting import statement_sentences as sentences
from tff_dpftrl.accounting import trade_off as trade_off_lib
from tff_dpftrl.participation import observed as observed_lib
from tff_dpftrl.participation import schema as schema_lib

UnitOfPrivacy = Literal["user", "device", "example"]
ParticipationRecord = Literal["observed", "assumed"]
Scalar = facts_lib.Scalar
SCHEMA = 1
"""Version of the JSON's layout, `docs/reference/privacy_statement.schema.json`."""

DIGESTS = DIGEST, KEYED_DIGEST = "statement_sha256", "statement_hmac_sha256"
"""Names of entries of `subject`: digests of all other entries of a statement, by which an edit of
any of them is found. The keyed one has the key of a run's ledger, so that nobody else can make it.
"""

_NOT_FIELDS = ("schema", "participation_record", "plain_sentences")
# Entries that statements of earlier versions lack.
_NEWER = frozenset(
    {
        *("audits", "schema", "plain_sentences", "from_whom", "data_in_one_place", "profile"),
        *("subject", "parts"),
    }
)


def digest(values: Mapping[str, Any]) -> str:
    """Computes the SHA-256 (hex) of a statement in JSON, but for the digests in it."""
    subject = values.get("subject")
    if isinstance(subject, Mapping):
        values = {**values, "subject": _without_digests(subject)}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode("utf-8")).hexdigest()


def _without_digests(subject: Mapping[str, Scalar]) -> dict[str, Scalar]:
    return {name: value for name, value in subject.items() if name not in DIGESTS}


def refuse_edited(values: Mapping[str, Any], name: object = "text") -> None:
    """Refuses an edited statement in JSON. Earlier versions have no digest, and pass."""
    subject = values.get("subject")
    stated = subject.get(DIGEST) if isinstance(subject, Mapping) else None
    if stated is not None and stated != digest(values):
        raise EditedError(
            f"{name} is a privacy statement that was edited after it was written: restore it, or "
            "remove it and run tff-dpftrl report on its folder."
        )


class EditedError(validation.UsageError):
    """A statement is not as it was written."""


@dataclasses.dataclass(frozen=True)
class PrivacyStatement:
    """The privacy guarantee of one run, in full, or the reasons why there is none.

    Build it with a function of the module `statement`.

    Attributes:
      mechanism: Name of the mechanism.
      parameters: Parameters of the mechanism and the run, by name.
      epsilon: Epsilon at `delta`; None if there is no guarantee.
      delta: Delta of the (epsilon, delta) guarantee.
      rho_zcdp: zCDP parameter ρ of the Gaussian mechanism with μ = √(2ρ) that the run is
        equivalent to; None without a guarantee, or for another mechanism.
      no_guarantee: Reasons why there is no guarantee; empty if there is one.
      accounting: Method by which epsilon was computed.
      declared: Participation schema declared before the run; None if the guarantee rests on
        sampling.
      accounted: Participation schema for which the guarantee is computed, or None likewise.
      observed: Participation on record, or of a task what devices report; None if there is neither.
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
      from_whom: Plain sentences on whom one is protected from, and what the server sees; empty in
        statements of earlier versions.
      data_in_one_place: Whether one party holds everybody's data.
      profile: Further pairs (ε, δ) that the run satisfies, by its privacy loss distribution; none
        for a Gaussian mechanism, whose `rho_zcdp` says it all.
      parts: What the weights and all else that the run releases cost alone, beside `epsilon`, which
        is that of the whole; empty if it releases nothing else.
      subject: What the statement is about: date, run, digests and versions, by name. Statements
        that promise the same are equal, whatever they are about.
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
    from_whom: str = ""
    data_in_one_place: bool = False
    profile: tuple[tuple[float, float], ...] = ()
    parts: tuple[parts_lib.Cost, ...] = ()
    subject: Mapping[str, Scalar] = dataclasses.field(default_factory=dict, compare=False)

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
        is_profile = all(0.0 <= e < math.inf and 0.0 <= d <= 1.0 for e, d in self.profile)
        if not is_profile or (self.no_guarantee and self.profile):
            raise validation.UsageError(
                "profile must be pairs (ε, δ), and empty without a guarantee, got "
                f"{self.profile!r}."
            )

    @property
    def has_guarantee(self) -> bool:
        """Whether there is a guarantee at all."""
        return not self.no_guarantee

    @property
    def is_refuted(self) -> bool:
        """Whether an audit has found that what is claimed cannot be true."""
        return any(sentences.refuted(entry) in self.headline_caveats for entry in self.audits)

    @property
    def participation_record(self) -> ParticipationRecord:
        """Whether participation is on record ("observed") or only assumed ("assumed").

        What the devices of a task report of it is no record.
        """
        is_reported = sentences.REPORTED_BY_DEVICES in self.assumptions
        return "assumed" if self.observed is None or is_reported else "observed"

    def trade_off(self) -> trade_off_lib.TradeOff | None:
        """Returns the bounds of all guesses whether one's data was used; None without guarantee."""
        if self.epsilon is None:
            return None
        mu = None if self.rho_zcdp is None else gaussian.mu_from_rho(self.rho_zcdp)
        return trade_off_lib.TradeOff(((self.epsilon, self.delta), *self.profile), mu)

    def with_audit(self, entry: str, *, is_refuted: bool) -> PrivacyStatement:
        """Adds the result of an audit; epsilon and delta stay what they are.

        Args:
          entry: Result in one line, from `auditing.audit_report.AuditReport.entry`.
          is_refuted: Whether the audit showed that the claim cannot be true. A caveat beside
            epsilon then says so. No audit makes epsilon smaller or larger.

        Returns:
          A copy with the result, without the digests of what it was.
        """
        refuted = (sentences.refuted(entry),) if is_refuted else ()
        return dataclasses.replace(
            self,
            audits=(*self.audits, entry),
            subject=_without_digests(self.subject),
            headline_caveats=(*refuted, *self.headline_caveats),
        )

    @classmethod
    def read(
        cls, path: pathlib.Path, *, folder: pathlib.Path | None = None, remedy: str = "Restore it."
    ) -> PrivacyStatement:
        """Reads a statement from a file, which another person may have written.

        Args:
          path: The file.
          folder: Folder that it is in or below, which links may not lead out of; by default the
            next.
          remedy: Sentence that ends the error's message.

        Raises:
          EditedError: If an entry was edited after it was written.
          UsageError: If `json_text.read_outside` refuses the file, or it is not a statement.
        """
        values = json_text.read_outside(path, folder=folder, remedy=remedy)
        try:
            return cls._from_values(values, path)
        except EditedError:
            raise
        except ValueError as error:
            raise validation.UsageError(f"{path} cannot be read: {error} {remedy}") from error

    @classmethod
    def from_json(cls, text: str, name: object = "text") -> PrivacyStatement:
        """Reads what `to_json` wrote, also by earlier versions, whose entries were fewer.

        Args:
          text: The JSON.
          name: Name of its file, for the message that it was edited.

        Raises:
          EditedError: If an entry was edited after it was written.
          ValueError: If `text` is not a statement.
        """
        try:
            values = json_text.parse(text)
        except ValueError as error:
            raise validation.UsageError(f"text is not a privacy statement: {error}.") from None
        return cls._from_values(values, name)

    @classmethod
    def _from_values(cls, values: Any, name: object) -> PrivacyStatement:
        """Reads parsed JSON, as `from_json`."""
        kinds_of = {field.name: str(field.type) for field in dataclasses.fields(cls)}
        names = {*_NOT_FIELDS, *kinds_of}
        if not isinstance(values, dict) or set(values) | _NEWER != names:
            raise validation.UsageError("text is not a privacy statement written by to_json.")
        refuse_edited(values, name)
        if values.get("schema", SCHEMA) != SCHEMA:
            raise validation.UsageError(
                f"text is a privacy statement of layout {values['schema']!r}, and this version "
                f"reads layout {SCHEMA}: use the version that wrote it."
            )
        derived = {name: values.pop(name, None) for name in _NOT_FIELDS}
        kinds = {
            "declared": schema_lib.MinSep,
            "accounted": schema_lib.MinSep,
            "observed": observed_lib.Participation,
        }
        for field, value in values.items():
            if field == "parts":
                values[field] = _costs(value)
            elif isinstance(value, list):
                pairs = (tuple(one) if isinstance(one, list) else one for one in value)
                values[field] = tuple(pairs)
            elif field in kinds and value is not None:
                try:
                    values[field] = kinds[field](**value)
                except TypeError as error:
                    raise validation.UsageError(f"text has a wrong {field}: {error}.") from None
            if not _is_of_kind(values[field], kinds_of[field]):
                raise validation.UsageError(
                    f"text is not a privacy statement: {field} is of another type."
                )
        statement = cls(**values)
        record = derived["participation_record"]
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


def _costs(value: Any) -> tuple[parts_lib.Cost, ...]:
    """Reads the table of parts."""
    try:
        rows = tuple(parts_lib.Cost(**row) for row in value)
    except TypeError as error:
        raise validation.UsageError(f"text has wrong parts: {error}.") from None
    kinds = {field.name: str(field.type) for field in dataclasses.fields(parts_lib.Cost)}
    if not all(_is_of_kind(getattr(row, name), kinds[name]) for row in rows for name in kinds):
        raise validation.UsageError("text is not a privacy statement: a part is of another type.")
    return rows


def _is_of_kind(value: Any, kind: str) -> bool:
    """Returns whether a value has the type that the annotation `kind` of a field names."""
    if kind == "str":
        return isinstance(value, str)
    if kind == "bool":
        return isinstance(value, bool)
    if kind.startswith("tuple[tuple"):
        return isinstance(value, tuple) and all(
            isinstance(one, tuple) and len(one) == 2 and all(map(_is_number, one)) for one in value
        )
    if kind.startswith("tuple[parts_lib"):
        return True  # `_costs` checked it.
    if kind == "tuple[str, ...]":
        return isinstance(value, tuple) and all(isinstance(one, str) for one in value)
    if kind.startswith("float"):
        return _is_number(value) or (value is None and kind.endswith("None"))
    if kind.startswith("Mapping"):
        return isinstance(value, dict) and all(
            one is None or isinstance(one, str | bool) or _is_number(one) for one in value.values()
        )
    return value is None or not isinstance(value, tuple)  # A class that checked it.


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 2**1023  # NaN is not.


def _flat(statement: PrivacyStatement) -> dict[str, Any]:
    values = dataclasses.asdict(statement)
    parameters = values.pop("parameters")
    return values | {f"parameters.{name}": value for name, value in parameters.items()}
