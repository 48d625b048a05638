"""The claim that an audit tests."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from scipy import special

from tff_dpftrl import validation
from tff_dpftrl.accounting import display, gaussian, guarantee, statement


@dataclasses.dataclass(frozen=True)
class Claim:
    """A privacy claim about all that a mechanism releases about one client.

    Attributes:
      epsilon: Claimed ε at `delta`; inf if nothing is claimed.
      delta: δ of `epsilon`.
      mu: Sensitivity over standard deviation of the Gaussian mechanism that the claim
        equals, for a claim at every δ at once; None if only (ε, δ) is claimed.
    """

    epsilon: float
    delta: float
    mu: float | None = None

    def __post_init__(self):
        validation.delta(self.delta)
        if not self.epsilon >= 0.0:
            raise validation.UsageError(f"epsilon must be at least 0, got {self.epsilon!r}.")
        if self.mu is not None and not self.mu >= 0.0:
            raise validation.UsageError(f"mu must be at least 0, or None, got {self.mu!r}.")

    @classmethod
    def gaussian(cls, mu: float, delta: float) -> Claim:
        """Makes the claim of a Gaussian mechanism: its smallest ε, at δ and at any other."""
        return cls(gaussian.epsilon(mu, delta), delta, mu)

    @classmethod
    def of(cls, claim: AnyClaim) -> Claim:
        """Returns the claim of a guarantee or a privacy statement.

        A guarantee, and a statement with ρ, make the claim of a Gaussian mechanism. For another
        mechanism that satisfies ρ as well, give `Claim(epsilon, delta)`.

        Args:
          claim: A claim, a guarantee, or a statement.

        Returns:
          The claim.

        Raises:
          ValueError: If it is of another type, or promises nothing: a claim without an ε
            cannot be violated.
        """
        if isinstance(claim, guarantee.Guarantee):
            made = cls(claim.epsilon, claim.delta, claim.mu if claim.is_gaussian else None)
        elif isinstance(claim, statement.PrivacyStatement):
            rho = claim.rho_zcdp
            made = cls(
                math.inf if claim.epsilon is None else claim.epsilon,
                claim.delta,
                None if rho is None else gaussian.mu_from_rho(rho),
            )
        elif isinstance(claim, Claim):
            made = claim
        else:
            raise validation.UsageError(
                "claim must be a Guarantee, a PrivacyStatement or a Claim(epsilon, delta), got "
                f"{claim!r}: aggregator.guarantee(schema, delta) makes one."
            )
        if math.isinf(made.epsilon):
            raise validation.UsageError(
                "claim promises nothing (its ε is infinite), so nothing can violate it: give the "
                "claim of a run with noise and without a given seed."
            )
        return made

    def is_refuted_by(self, mu_at_least: float, epsilon_at_least: float) -> bool:
        """Returns whether a lower bound of ε, or of a Gaussian claim's μ, is above the claim."""
        is_above = self.mu is not None and mu_at_least > self.mu
        return is_above or epsilon_at_least > self.epsilon

    def __str__(self) -> str:
        epsilon = f"ε = {display.round_up(self.epsilon)}"
        return epsilon if self.mu is None else f"μ = {display.round_up(self.mu)}, {epsilon}"

    def least_false_negative_rate(self, false_positive_rate: np.ndarray) -> np.ndarray:
        """Computes the claimed trade-off curve: which tests the claim allows.

        It is the smallest rate at which a test can say "did not" of a client that took part, for
        each rate in [0, 1] at which it says "took part" of a client that did not, of any shape
        (Dong, Roth & Su 2022: Definition 2.6 with `mu`, else Proposition 2.5).
        """
        rate = np.asarray(false_positive_rate, float)
        if self.mu is not None:
            return special.ndtr(-special.ndtri(rate) - self.mu)
        first = 1.0 - self.delta - np.exp(self.epsilon) * rate
        second = np.exp(-self.epsilon) * (1.0 - self.delta - rate)
        return np.maximum(0.0, np.maximum(first, second))


AnyClaim = Claim | guarantee.Guarantee | statement.PrivacyStatement
"""Types that `Claim.of` converts to a claim."""
