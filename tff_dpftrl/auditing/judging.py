"""Findings from recorded games about a claim, with bounds, error rates and power."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import scipy.linalg
from scipy import special, stats

from tff_dpftrl.accounting import display
from tff_dpftrl.auditing import audit_report, games, scored_canaries
from tff_dpftrl.auditing import claim as claim_lib
from tff_dpftrl.auditing.evidence import bounds, forensics, one_run, scores, worst_pattern
from tff_dpftrl.auditing.evidence import transcripts as transcripts_lib

_SURELY = 0.99
_TRAIN_FRACTION = 0.5
_FEWEST_QUIET = 8
_LEAST_SIGNAL = 0.5
TOO_FEW = " That is no test of this claim: so many cannot refute it, whatever is wrong."


def one_run_bound(
    test: str,
    values: np.ndarray,
    present: np.ndarray,
    claim: claim_lib.Claim,
    *,
    error_rate: float,
    about: str = "",
) -> audit_report.Finding:
    """Computes the bounds that hold for every mechanism.

    ε is bounded as in Steinke et al. 2023. If a Gaussian mechanism is claimed, μ is bounded too, as
    in Mahloujifar et al. 2024, each with half of the error. Each canary took part by an independent
    fair coin. The finding is "not tested" if the claim is more than so many canaries can refute.
    """
    best = one_run.all_correct(len(present))
    most_mu, shown, most = 0.0, "", ""
    with_mu = claim.mu is not None
    found = scored_canaries.lower_bounds(
        values, present, delta=claim.delta, error_rate=error_rate, with_mu=with_mu
    )
    mu, epsilon, guesses = found.mu_at_least, found.epsilon_at_least, found.guesses
    each = error_rate / 2.0 if with_mu else error_rate
    if mu is not None and found.mu_guesses is not None:
        most_mu = max(one.mu_at_least(each / len(best)) for one in best)
        shown = (
            f"{found.mu_guesses.correct} of {found.mu_guesses.guesses} guesses show at least "
            f"μ = {display.round_down(mu)} (Mahloujifar et al. 2024), "
        )
        most = f" μ above {display.round_up(most_mu, 3)}, and no"
    most_epsilon = max(one.epsilon_at_least(claim.delta, each / len(best)) for one in best)
    can_refute = claim.is_refuted_by(most_mu, most_epsilon)
    is_above = claim.is_refuted_by(mu or 0.0, epsilon)
    return audit_report.Finding(
        test,
        "violated" if is_above else "consistent" if can_refute else "not tested",
        f"Of {len(present)} canaries {shown}{guesses.correct} of {guesses.guesses} guesses show at "
        f"least ε = {display.round_down(epsilon)} at δ = {display.round_down(claim.delta, 6)} "
        f"(Steinke et al. 2023); claimed is {claim}. It holds for every mechanism, and rests on "
        f"the canaries' coins only.{'' if can_refute else TOO_FEW}{about}",
        error_rate,
        trials=len(present),
        mu_at_least=mu,
        epsilon_at_least=epsilon,
        power=f"so many canaries prove no{most} ε above {display.round_up(most_epsilon, 3)}, "
        "whatever is wrong",
    )


def at_best(
    present: np.ndarray, claim: claim_lib.Claim, *, error_rate: float, seed: int
) -> tuple[bool, str]:
    """Computes what counts prove of a claim of (ε, δ) alone if scores are never wrong.

    Returns whether the bound refutes the claim, and the power in words.
    """
    perfect = bounds.from_counts(
        present.astype(float), present, delta=claim.delta, error_rate=error_rate, seed=seed
    )
    most = perfect.epsilon_at_least
    shown = display.round_up(most, 3)
    return most > claim.epsilon, f"so many trials prove no ε above {shown}, whatever is wrong"


def tensors_with_noise(recorded: games.Games) -> list[int]:
    """Returns the tensors with enough quiet coordinates to look at their noise."""
    numbers, counts = np.unique(recorded.tensor_of, return_counts=True)
    return numbers[counts >= _FEWEST_QUIET].tolist()


@dataclasses.dataclass(frozen=True)
class Judge:
    """Judge of one claim for the rounds that were played, who turns recordings into findings.

    Attributes:
      error_rate: Error rate of each finding.
      seed: Seed of the choice of the trials that choose thresholds.
      signal: Measured contribution of canaries along their directions, in clip norms; None if it
        was not measured.
    """

    claim: claim_lib.Claim
    error_rate: float
    seed: int
    signal: float | None = None

    def likelihood_ratio(
        self,
        transcripts: transcripts_lib.Transcripts,
        pattern: worst_pattern.Pattern,
        covariance: np.ndarray,
    ) -> tuple[audit_report.Finding, audit_report.TradeOff | None]:
        """Judges games by the likelihood ratio, the best test if the claimed mechanism is true."""
        test = "distinguishing game, likelihood ratio"
        if not np.all(np.isfinite(transcripts.released)):
            return self._not_finite(test, transcripts), None
        signal = pattern.signal(len(covariance))
        values = scores.likelihood_ratio_scores(transcripts, signal, covariance)
        true_mu = math.sqrt(float(signal @ scipy.linalg.solve(covariance, signal, assume_a="pos")))
        seen = "if each adds one clip norm, as the mechanism says of itself,"
        if self.signal is not None:
            true_mu *= abs(self.signal)
            seen = f"each was seen to add {self.signal:.4g} clip norms, and by that"
        rounds = ", ".join(str(t + 1) for t in pattern.rounds[:6]) + (
            "…" if len(pattern.rounds) > 6 else ""
        )
        about = (
            f"Canaries take part in {len(pattern.rounds)} rounds ({rounds}); {seen} μ is "
            f"{true_mu:.4g}."
        )
        return self._bounded(test, about, values, transcripts.present)

    def learned(
        self, transcripts: transcripts_lib.Transcripts, are_independent: bool = True
    ) -> tuple[audit_report.Finding, audit_report.TradeOff | None]:
        """Judges games by a classifier that knows nothing of the mechanism.

        Where trials are not independent even if the claim is true, the one-run bound decides, over
        all runs together: a coin of one run has no part in the others. The trade-off is None if a
        release is not finite.
        """
        test = "distinguishing game, learned classifier"
        if not np.all(np.isfinite(transcripts.released)):
            return self._not_finite(test, transcripts), None
        train, rest = transcripts.split(_TRAIN_FRACTION, self.seed)
        about = f"It learns from {len(train)} trials and is tested on {len(rest)} others."
        values = scores.learned_scores(train, rest)
        if are_independent:
            return self._bounded(test, about, values, rest.present)
        finding = one_run_bound(
            test, values, rest.present, self.claim, error_rate=self.error_rate, about=f" {about}"
        )
        bound = bounds.for_claim(
            values, rest.present, self.claim, error_rate=self.error_rate, seed=self.seed
        )
        is_above = self.claim.is_refuted_by(bound.mu_at_least, bound.epsilon_at_least)
        if is_above and finding.outcome != "violated":
            advice = (
                " Were trials independent, which nobody says of the noise, it were "
                f"{bound} at least, and the claim refuted: give mechanism, or canaries_per_run=1."
            )
            finding = dataclasses.replace(finding, says=finding.says + advice)
        return finding, bounds.trade_off(values, rest.present)

    def _bounded(
        self, test: str, about: str, values: np.ndarray, present: np.ndarray
    ) -> tuple[audit_report.Finding, audit_report.TradeOff]:
        bound = bounds.for_claim(
            values, present, self.claim, error_rate=self.error_rate, seed=self.seed
        )
        is_above = self.claim.is_refuted_by(bound.mu_at_least, bound.epsilon_at_least)
        if self.claim.mu is not None:
            is_tested, power = True, self._power(present)
        else:
            is_tested, power = at_best(
                present, self.claim, error_rate=self.error_rate, seed=self.seed
            )
            about += "" if is_tested else TOO_FEW
        if self.signal is not None and self.signal < _LEAST_SIGNAL:
            is_tested, power = False, ""
            about += (
                f" That tests little: a canary adds {self.signal:.4g} clip norms, where the "
                "numbers of the mechanism say 1."
            )
        finding = audit_report.Finding(
            test,
            "violated" if is_above else "consistent" if is_tested else "not tested",
            f"{about} At least {bound} at δ = {display.round_down(self.claim.delta, 6)} "
            f"({bound.method}); claimed is {self.claim}.",
            self.error_rate,
            trials=len(present),
            mu_at_least=bound.mu_at_least,
            epsilon_at_least=bound.epsilon_at_least,
            power=power,
        )
        return finding, bounds.trade_off(values, present)

    def _power(self, present: np.ndarray) -> str:
        """Describes the smallest μ above the claim that is found, if scores stay Gaussian."""
        first, second = int(np.sum(present)), int(np.sum(~present))
        error = math.sqrt(1 / first + 1 / second + self.claim.mu**2 / (2 * len(present)))
        # Half of the error rate goes to the Gaussian family.
        errors = special.ndtri(_SURELY) - special.ndtri(self.error_rate / 2)
        return f"a μ of {display.round_up(self.claim.mu + errors * error)}"

    def _not_finite(
        self, test: str, transcripts: transcripts_lib.Transcripts
    ) -> audit_report.Finding:
        return audit_report.Finding(
            test,
            "violated",
            "Some of what was released is not finite: no noise hides that.",
            trials=len(transcripts),
        )

    def noise(
        self, recorded: games.Games, stddev: float, unit_covariance: np.ndarray
    ) -> tuple[audit_report.Finding, ...]:
        """Tests that releases on coordinates that nobody moved are the claimed noise.

        `stddev` is the claimed one of the draws z, in clip norms; `unit_covariance` is for noise
        multiplier 1. Tensors with few quiet coordinates are left out.
        """
        if not np.all(np.isfinite(recorded.noise)):
            return (audit_report.Finding("noise", "violated", "What is released is not finite."),)
        recordings = [
            forensics.Recording(
                f"tensor {tensor + 1}",
                recorded.noise[:, :, recorded.tensor_of == tensor],
                stddev,
                unit_covariance,
                significant_bits=recorded.significant_bits[tensor],
            )
            for tensor in tensors_with_noise(recorded)
        ]
        if not recordings:
            says = f"No tensor has {_FEWEST_QUIET} coordinates to spare for it."
            return (audit_report.Finding("noise", "not tested", says),)
        return forensics.examine(recordings, error_rate=self.error_rate)

    def counts(self, recorded: np.ndarray, unit_covariance: np.ndarray) -> audit_report.Finding:
        """Tests that the noise on the counts of adaptive clipping is as large as claimed.

        Counts are in claimed standard deviations, shape [runs, rounds]. More noise violates
        nothing.
        """
        factor = np.linalg.cholesky(unit_covariance)
        white = scipy.linalg.solve_triangular(factor, recorded.T, lower=True)
        number, squares = white.size, float(np.sum(white**2))
        p_value = stats.chi2.cdf(squares, number)
        # Smallest deviation below 1 that is found: two quantiles of the same distribution.
        detectable = stats.chi2.ppf(self.error_rate, number) / stats.chi2.ppf(_SURELY, number)
        return audit_report.Finding(
            "the noise on the counts of adaptive clipping",
            "violated" if p_value < self.error_rate else "consistent",
            f"Whitened by what is claimed, {number} values have standard deviation "
            f"{math.sqrt(squares / number):.4g}, where 1 is claimed (p-value of less "
            f"{p_value:.2g}).",
            self.error_rate,
            trials=number,
            power=f"{math.sqrt(detectable):.3g} times the standard deviation",
        )
