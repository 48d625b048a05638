"""What an audit found: the claim, each test with its numbers, the verdict."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any, Literal

from tff_dpftrl import version
from tff_dpftrl.auditing import claim as claim_lib

Outcome = Literal["consistent", "violated", "not tested"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """What one test of an audit found.

    Attributes:
      test: Name of the test, as "distinguishing game, likelihood ratio".
      outcome: "violated" if the claim cannot be true as stated.
      says: One or two sentences with the numbers, for people.
      error_rate: Chance of "violated" for code that keeps its claim, at most; 0 for
        what is no matter of chance.
      trials: Number of trials, or of values looked at; None if that says nothing.
      mu_at_least: Lower bound of μ at confidence 1 − error_rate; None if the test gives none.
      epsilon_at_least: Lower bound of ε at the claim's δ, likewise.
      power: Smallest deviation that the test finds with 99 % probability, in words; "" if
        the test is exact.
    """

    test: str
    outcome: Outcome
    says: str
    error_rate: float = 0.0
    trials: int | None = None
    mu_at_least: float | None = None
    epsilon_at_least: float | None = None
    power: str = ""

    def __post_init__(self):
        if self.outcome not in ("consistent", "violated", "not tested"):
            raise ValueError(
                f"outcome must be 'consistent', 'violated' or 'not tested', got {self.outcome!r}."
            )
        if not 0.0 <= self.error_rate < 1.0:
            raise ValueError(f"error_rate must be in [0, 1), got {self.error_rate!r}.")


@dataclasses.dataclass(frozen=True)
class TradeOff:
    """Points of an empirical trade-off curve, for the picture.

    Attributes:
      false_positive_rate: How often each threshold said "took part" of those who did not.
      false_negative_rate: How often it said "did not" of those who did.
    """

    false_positive_rate: tuple[float, ...]
    false_negative_rate: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class AuditReport:
    """What an audit found.

    Attributes:
      subject: What was audited, in words.
      claim: What it claims.
      findings: What each test found.
      is_ours: Whether the code that was audited is this package's own; somebody's own is
        named as such.
      trade_off: Empirical trade-off curve of the strongest game; None if none was played.
      code_version: Version of this package, which audited.
    """

    subject: str
    claim: claim_lib.Claim
    findings: tuple[Finding, ...]
    is_ours: bool
    trade_off: TradeOff | None = None
    code_version: str = version.__version__

    @property
    def is_violated(self) -> bool:
        """Whether any test found that the claim cannot be true as stated."""
        return any(finding.outcome == "violated" for finding in self.findings)

    @property
    def confidence(self) -> float:
        """One minus the chance that a correct mechanism is called violated, at least."""
        return 1.0 - sum(finding.error_rate for finding in self.findings)

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

    def to_json(self) -> str:
        """The report for programs."""
        values: dict[str, Any] = dataclasses.asdict(self)
        values |= {
            "verdict": self.verdict,
            "confidence": self.confidence,
            "epsilon_at_least": self.epsilon_at_least,
        }
        return json.dumps(_without_infinity(values), indent=2, allow_nan=False)

    @property
    def verdict(self) -> str:
        """One line: "consistent with the claim", or "VIOLATED: ..." with what was found."""
        if not self.is_violated:
            return "consistent with the claim"
        if self.epsilon_at_least > self.claim.epsilon:
            return (
                f"VIOLATED: at least ε = {self.epsilon_at_least:.3g} with "
                f"{self.confidence:.0%} confidence, where ε = {self.claim.epsilon:.3g} is claimed"
            )
        violated = [finding.test for finding in self.findings if finding.outcome == "violated"]
        return f"VIOLATED: {', '.join(violated)} (with {self.confidence:.0%} confidence)"


def _without_infinity(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_infinity(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_infinity(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
