"""Reports of audits: the claim, the finding of each test with its numbers, and the verdict."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

from tff_dpftrl import durable_files, json_text, pictures, validation, version
from tff_dpftrl.accounting import display
from tff_dpftrl.auditing import claim as claim_lib
from tff_dpftrl.auditing import trade_off_plot

Outcome = Literal["consistent", "violated", "not tested", "estimate"]
_OUTCOMES = get_args(Outcome)

_PICTURE = "trade_off.png"
_NOT_OURS = "custom, not of this package: its author answers for what was not tested"
_NOT_OURS_SHORT = " (code not of this package)"
_LIMITS = (
    "A lower bound above the claim shows, at its confidence, that the claim is false. A bound "
    "below it shows no guarantee: it is what these tests could see, not what is leaked.",
    "What was not tested, by this audit or at all, may leak anything: other inputs, other "
    "machines, files, metrics, logs, timing.",
)


@dataclasses.dataclass(frozen=True)
class Covered:
    """Numbered things, such as rounds or tensors, that a test looked at.

    `what` is the plural of their name, such as "rounds". `spans` has the first and last number of
    each run of them, counted from 1 and increasing. `total` is the number of them that there are.
    """

    what: str
    spans: tuple[tuple[int, int], ...]
    total: int

    @classmethod
    def of(cls, what: str, indices: Iterable[int], total: int) -> Covered:
        """Makes it of the indices of what was looked at, counted from 0, in any order."""
        spans: list[tuple[int, int]] = []
        for number in sorted({index + 1 for index in indices}):
            if spans and spans[-1][1] == number - 1:
                spans[-1] = (spans[-1][0], number)
            else:
                spans.append((number, number))
        return cls(what, tuple(spans), total)

    @property
    def indices(self) -> set[int]:
        """Indices of what was looked at, counted from 0."""
        return {index for first, last in self.spans for index in range(first - 1, last)}

    def __str__(self) -> str:
        if not self.spans:
            return f"none of {self.total} {self.what}"
        if self.spans == ((1, self.total),) and self.total > 1:
            return f"all {self.total} {self.what}"
        named = []
        for first, last in self.spans:
            is_long = last > first + 1
            named += [f"{first} to {last}"] if is_long else map(str, sorted({first, last}))
        what = self.what if named[1:] or " " in named[0] else self.what.removesuffix("s")
        *others, last_named = named
        return f"{what} {', '.join(others)}{' and ' * bool(others)}{last_named} of {self.total}"


@dataclasses.dataclass(frozen=True)
class Finding:
    """The finding of one test of an audit.

    Attributes:
      test: Name of the test, such as "distinguishing game, likelihood ratio".
      outcome: "violated" if the claim, or the mechanism's description, cannot be true as
        stated; "estimate" for a number without confidence, which decides nothing.
      says: One or two sentences with the numbers, for people.
      error_rate: Largest chance of "violated" for code that keeps its claim; 0 for a test
        without chance.
      trials: Number of trials, or of values tested; None if there is no such number.
      mu_at_least: Lower bound of μ at confidence 1 − error_rate; None if the test gives none.
      epsilon_at_least: Lower bound of ε at the claim's δ at confidence 1 − error_rate; None
        if the test gives none.
      power: Smallest deviation that the test finds with 99 % probability, or what so few trials
        cannot show, in words; "" if the test is exact. It is about what `covers` names.
      covers: What the test looked at, one entry for each kind of thing; empty if it has no parts
        that could be left out.
    """

    test: str
    outcome: Outcome
    says: str
    error_rate: float = 0.0
    trials: int | None = None
    mu_at_least: float | None = None
    epsilon_at_least: float | None = None
    power: str = ""
    covers: tuple[Covered, ...] = ()

    def __post_init__(self):
        if self.outcome not in _OUTCOMES:
            raise validation.UsageError(
                f"outcome must be one of {_OUTCOMES}, got {self.outcome!r}."
            )
        if not 0.0 <= self.error_rate < 1.0:
            raise validation.UsageError(f"error_rate must be in [0, 1), got {self.error_rate!r}.")

    @property
    def text(self) -> str:
        """The result of the test, and what it looked at, in words."""
        return f"{self.says} Looked at: {self.covered}." if self.covers else self.says

    @property
    def covered(self) -> str:
        """The rounds, tensors and so on that the test looked at, in words; "" if it has none."""
        return "; ".join(map(str, self.covers))


def untested(others: Iterable[str]) -> tuple[Finding, ...]:
    """Makes the findings on what a run releases besides the updates, which no game is of."""
    says = (
        "Its noise and its share of ε are not looked at: the claim here is of the updates alone. "
        "`audit --run` recounts ε of all parts from the records."
    )
    return tuple(Finding(f"release of the {one}", "not tested", says) for one in others)


@dataclasses.dataclass(frozen=True)
class TradeOff:
    """Points of an empirical trade-off curve: the rates of both errors at each threshold.

    A false positive is "took part" of a client that did not; a false negative "did not" of one that
    did.
    """

    false_positive_rate: tuple[float, ...]
    false_negative_rate: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class AuditReport:
    """The report of an audit.

    Attributes:
      subject: Description of the audited code or run.
      claim: Claim that was tested.
      findings: Findings of the tests.
      is_ours: Whether the audited code is from this package; the report says so if not.
      missing: Records without which the claim cannot be derived and that were not there, a noun
        phrase like "private/ (…)"; "" if all were.
      trade_off: Empirical trade-off curve of the strongest game; None if none was played.
      code_version: Version of this package that did the audit.
    """

    subject: str
    claim: claim_lib.Claim
    findings: tuple[Finding, ...]
    is_ours: bool
    trade_off: TradeOff | None = None
    code_version: str = version.__version__
    missing: str = ""

    @property
    def is_violated(self) -> bool:
        """Whether any test found that the claim cannot be true as stated."""
        return any(finding.outcome == "violated" for finding in self.findings)

    @property
    def is_tested(self) -> bool:
        """Whether any test could be done, estimates apart."""
        return any(finding.outcome in ("consistent", "violated") for finding in self.findings)

    @property
    def error_rate(self) -> float:
        """Largest chance that a correct mechanism is called violated."""
        return math.fsum(finding.error_rate for finding in self.findings)

    @property
    def confidence(self) -> float:
        """One minus the chance that a correct mechanism is called violated, at least."""
        return 1.0 - self.error_rate

    @property
    def epsilon_at_least(self) -> float:
        """The largest lower bound of ε at the claim's δ that a test gives; 0 if none does."""
        bounds = (finding.epsilon_at_least for finding in self.findings)
        return max((bound for bound in bounds if bound is not None), default=0.0)

    @property
    def mu_at_least(self) -> float:
        """The largest lower bound of μ that a test gives; 0 if none does."""
        bounds = (finding.mu_at_least for finding in self.findings)
        return max((bound for bound in bounds if bound is not None), default=0.0)

    @property
    def verdict(self) -> str:
        """One line: "consistent with the claim", or "VIOLATED: ..." with the bound or the tests.

        Where records are missing: "nothing contradicts the claim, which …". Where no test could
        be done: "nothing was tested".
        """
        if not self.is_tested:
            return "nothing was tested"
        if not self.is_violated:
            if self.missing:
                return (
                    f"nothing contradicts the claim, which cannot be derived without {self.missing}"
                )
            return "consistent with the claim"
        violated = [finding for finding in self.findings if finding.outcome == "violated"]
        is_above = self.epsilon_at_least > self.claim.epsilon
        is_exact = not is_above and any(finding.error_rate == 0.0 for finding in violated)
        chance = "" if is_exact else self._with_confidence(" ")
        if is_above:
            return (
                f"VIOLATED: at least ε = {display.round_down(self.epsilon_at_least)}{chance}, "
                f"where ε = {display.round_up(self.claim.epsilon)} is claimed"
            )
        return f"VIOLATED{chance}: {', '.join(finding.test for finding in violated)}"

    @property
    def headline(self) -> str:
        """The verdict, how many of the tests could be done, and what none of them looked at."""
        tests = [finding.outcome for finding in self.findings if finding.outcome != "estimate"]
        done = len(tests) - tests.count("not tested")
        missed = f"; no test looked at {', '.join(self._missed)}" if self._missed else ""
        return f"{self.verdict} ({done} of {len(tests)} tests could be done{missed})"

    @property
    def _missed(self) -> list[str]:
        """The number of rounds, tensors and so on that no test looked at, in words."""
        looked: dict[str, set[int]] = {}
        totals: dict[str, int] = {}
        for finding in self.findings:
            for one in finding.covers:
                is_test = finding.outcome in ("consistent", "violated")
                looked.setdefault(one.what, set()).update(one.indices if is_test else ())
                totals[one.what] = max(one.total, totals.get(one.what, 0))
        return [
            f"{total - len(looked[what])} of {total} {what}"
            for what, total in totals.items()
            if len(looked[what]) < total
        ]

    @property
    def powers(self) -> tuple[str, ...]:
        """The smallest fault that each test left to chance would have found, and where."""
        return tuple(
            f"{one.test}: {one.power}{f' ({one.covered})' if one.covers else ''}"
            for one in self.findings
            if one.power
        )

    def entry(self) -> str:
        """Returns one line for `PrivacyStatement.with_audit`."""
        bound = ""
        if not self.is_violated and self.epsilon_at_least > 0.0:
            least = display.round_down(self.epsilon_at_least)
            bound = f"; at least ε = {least} at δ = {display.round_down(self.claim.delta, 6)}"
            bound += self._with_confidence(", ")
        text = (
            f"audited: {self.subject}{'' if self.is_ours else _NOT_OURS_SHORT}: "
            f"{self.headline}{bound}; tff_dpftrl {self.code_version}"
        )
        return " ".join(text.split())

    def to_markdown(self) -> str:
        """Returns the report as Markdown; lower bounds are rounded down."""
        claim = self.claim
        claimed = (
            "no guarantee"
            if math.isinf(claim.epsilon)
            else display.epsilon_at(claim.epsilon, claim.delta)
        )
        if claim.mu is not None:
            claimed += f", as a Gaussian mechanism of μ = {display.round_up(claim.mu)}"
        chance = self.error_rate
        lines = [
            "# Audit",
            "",
            f"**{self.headline}**",
            "",
            f"- Audited: {self.subject}",
            f"- Code: {'of this package' if self.is_ours else _NOT_OURS}",
            f"- Claim: {claimed}",
            f"- Shown: at least ε = {display.round_down(self.epsilon_at_least)} at δ = "
            f"{display.round_down(claim.delta, 6)}{self._shown_mu()}{self._with_confidence(', ')}",
            "- Chance that code that keeps its claim is called VIOLATED: "
            + (
                f"at most {display.round_up(100.0 * chance)}%"
                if chance
                else "none, nothing was left to chance"
            ),
            "",
            *self._smallest_faults(),
            "## Tests",
            "",
            "| test | outcome | error rate | trials | ε at least | μ at least |",
            "|---|---|---|---|---|---|",
            *(_row(finding) for finding in self.findings),
            "",
        ]
        for finding in self.findings:
            lines += [f"### {finding.test}", "", f"{finding.outcome}: {finding.text}", ""]
        lines += ["## What this does not say", "", *(f"- {line}" for line in _LIMITS), ""]
        return "\n".join([*lines, f"tff_dpftrl {self.code_version}"]) + "\n"

    def _smallest_faults(self) -> list[str]:
        if not self.powers:
            return []
        title = "Smallest faults that these tests would have found with 99 % probability:"
        return [title, "", *(f"- {line}" for line in self.powers), ""]

    def _shown_mu(self) -> str:
        return f", μ = {display.round_down(self.mu_at_least)}" if self.mu_at_least > 0.0 else ""

    def _with_confidence(self, before: str) -> str:
        if not self.error_rate:
            return ""  # Nothing was left to chance.
        below_one = min(self.confidence, math.nextafter(1.0, 0.0))
        return f"{before}with {display.round_down(100.0 * below_one)}% confidence"

    def to_json(self) -> str:
        """Returns the report as JSON; infinite numbers become null."""
        values: dict[str, Any] = dataclasses.asdict(self)
        values |= {
            "verdict": self.verdict,
            "headline": self.headline,
            "confidence": self.confidence,
            "epsilon_at_least": self.epsilon_at_least,
        }
        return json.dumps(_without_infinity(values), indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> AuditReport:
        """Reads a report that `to_json` wrote; an infinite lower bound comes back as None.

        Raises:
          ValueError: If `text` is not a report.
        """
        try:
            values = json_text.parse(text)
        except ValueError as error:
            raise validation.UsageError(f"text is not the report of an audit: {error}.") from None
        try:
            claim, curve = values["claim"], values["trade_off"]
            epsilon = math.inf if claim["epsilon"] is None else claim["epsilon"]
            return cls(
                subject=str(values["subject"]),
                claim=claim_lib.Claim(epsilon, claim["delta"], claim["mu"]),
                findings=tuple(_finding(finding) for finding in values["findings"]),
                is_ours=bool(values["is_ours"]),
                trade_off=None
                if curve is None
                else TradeOff(**{name: tuple(rates) for name, rates in curve.items()}),
                code_version=str(values["code_version"]),
                missing=str(values.get("missing", "")),  # Earlier versions did not say.
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise validation.UsageError(
                f"text is not the report of an audit, written by to_json: {error!r}."
            ) from None

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes `audit.md`, `audit.json` and, if a game was played, `trade_off.png`.

        Args:
          folder: Folder to write to; made if missing. Files of an earlier audit are replaced.

        Raises:
          OSError: If a file cannot be written.
        """
        folder = pathlib.Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if self.trade_off is None:
            (folder / _PICTURE).unlink(missing_ok=True)  # From an earlier audit.
        else:
            pictures.write(folder / _PICTURE, self.draw(), dpi=120)
        durable_files.write(folder / "audit.json", (self.to_json() + "\n").encode("utf-8"))
        durable_files.write(folder / "audit.md", self.to_markdown().encode("utf-8"))

    def draw(self) -> Any:
        """Draws the plot that `save` writes: claimed and empirical trade-off curves.

        Returns:
          A `matplotlib.figure.Figure`.

        Raises:
          ValueError: If no game was played.
        """
        if self.trade_off is None:
            raise validation.UsageError(
                "No game was played in this audit, so there is no curve to draw."
            )
        return trade_off_plot.draw(
            claimed=self.claim.least_false_negative_rate,
            empirical=(self.trade_off.false_positive_rate, self.trade_off.false_negative_rate),
            shown=self._shown_curve(),
            title=f"{self.subject}: {self.verdict}",
        )

    def _shown_curve(self) -> trade_off_plot.Curve | None:
        """Returns the best trade-off that the lower bounds allow; None without bounds."""
        if self.mu_at_least > 0.0:
            bound = claim_lib.Claim.gaussian(self.mu_at_least, self.claim.delta)
        elif self.epsilon_at_least > 0.0:
            bound = claim_lib.Claim(self.epsilon_at_least, self.claim.delta)
        else:
            return None
        return bound.least_false_negative_rate


def _finding(values: Mapping[str, Any]) -> Finding:
    """Reads a finding; those of earlier versions do not say what they cover."""
    covers = tuple(
        Covered(one["what"], tuple((a, b) for a, b in one["spans"]), one["total"])
        for one in values.get("covers", ())
    )
    return Finding(**{**values, "covers": covers})


def _row(finding: Finding) -> str:
    cells = [
        finding.test,
        finding.outcome,
        display.round_up(finding.error_rate, 3),
        "" if finding.trials is None else str(finding.trials),
        "" if finding.epsilon_at_least is None else display.round_down(finding.epsilon_at_least),
        "" if finding.mu_at_least is None else display.round_down(finding.mu_at_least),
    ]
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _without_infinity(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_infinity(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_infinity(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
