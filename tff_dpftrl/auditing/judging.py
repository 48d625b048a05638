"""What recorded games prove about a claim: findings with bounds, error rates and power."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import scipy.linalg
from scipy import special, stats

from tff_dpftrl.auditing import audit_report, games
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
    """The bounds that hold for every mechanism.

    Of ε by Steinke et al. 2023, and where a Gaussian mechanism is claimed of μ by Mahloujifar
    et al. 2024, each with half of the error.

    Args:
      test: Name of the finding.
      values: Scores of the canaries, from what was released alone, [canaries].
      present: Whether each took part, by a fair coin of its own, bool, [canaries].
      claim: The claim.
      error_rate: Of the finding.
      about: Further sentences, after a space.

    Returns:
      The finding; "not tested" if the claim is more than so many canaries can refute.
    """
    best = one_run.all_right(len(present))
    mu, most_mu, shown, most = None, 0.0, "", ""
    each = error_rate if claim.mu is None else error_rate / 2.0
    if claim.mu is not None:
        mu, guesses = one_run.mu_at_least(values, present, error_rate=each)
        most_mu = max(one.mu_at_least(each / len(best)) for one in best)
        shown = (
            f"{guesses.correct} of {guesses.guesses} guesses show at least μ = {mu:.4g} "
            "(Mahloujifar et al. 2024), "
        )
        most = f" μ above {most_mu:.3g}, and no"
    epsilon, guesses = one_run.epsilon_at_least(values, present, delta=claim.delta, error_rate=each)
    most_epsilon = max(one.epsilon_at_least(claim.delta, each / len(best)) for one in best)
    can_refute = claim.is_refuted_by(most_mu, most_epsilon)
    is_above = claim.is_refuted_by(mu or 0.0, epsilon)
    return audit_report.Finding(
        test,
        "violated" if is_above else "consistent" if can_refute else "not tested",
        f"Of {len(present)} canaries {shown}{guesses.correct} of {guesses.guesses} guesses show at "
        f"least ε = {epsilon:.4g} at δ = {claim.delta:g} (Steinke et al. 2023); claimed is "
        f"{claim}. It holds for every mechanism, and rests on the canaries' coins only."
        f"{'' if can_refute else TOO_FEW}{about}",
        error_rate,
        trials=len(present),
        mu_at_least=mu,
        epsilon_at_least=epsilon,
        power=f"so many canaries prove no{most} ε above {most_epsilon:.3g}, whatever is wrong",
    )


def at_best(
    present: np.ndarray, claim: claim_lib.Claim, *, error_rate: float, seed: int
) -> tuple[bool, str]:
    """What counts prove of a claim of (ε, δ) alone if scores are never wrong.

    Args:
      present: Whether canaries took part, bool, [trials].
      claim: The claim.
      error_rate: Of the bound.
      seed: Of the trials that choose thresholds.

    Returns:
      Whether that refutes the claim, and the power in words.
    """
    perfect = bounds.from_counts(
        present.astype(float), present, delta=claim.delta, error_rate=error_rate, seed=seed
    )
    most = perfect.epsilon_at_least
    return most > claim.epsilon, f"so many trials prove no ε above {most:.3g}, whatever is wrong"


@dataclasses.dataclass(frozen=True)
class Judge:
    """Turns recordings into findings about one claim.

    Attributes:
      claim: The claim, of the rounds that were played.
      error_rate: Of each finding.
      seed: Of the trials that choose thresholds.
      signal: What canaries were seen to add along their directions, in clip norms; None if it
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
        """The game, scored by the best test there is if the mechanism is what it claims.

        Args:
          transcripts: The games.
          pattern: When canaries took part.
          covariance: Of the noise, as claimed, [rounds, rounds].

        Returns:
          The finding, and the trade-off of the scores.
        """
        test = "distinguishing game, likelihood ratio"
        if not np.all(np.isfinite(transcripts.released)):
            return self._not_finite(test, transcripts), None
        signal = pattern.signal(len(covariance))
        found = scores.likelihood_ratio_scores(transcripts, signal, covariance)
        true_mu = math.sqrt(float(signal @ scipy.linalg.solve(covariance, signal, assume_a="pos")))
        seen = "if each adds one clip norm, as the mechanism says of itself,"
        if self.signal is not None:
            true_mu *= abs(self.signal)
            seen = f"each was seen to add {self.signal:.4g} clip norms, and by that"
        rounds = ", ".join(map(str, pattern.rounds[:6])) + ("…" if len(pattern.rounds) > 6 else "")
        about = (
            f"Canaries take part in {len(pattern.rounds)} rounds ({rounds}); {seen} μ is "
            f"{true_mu:.4g}."
        )
        return self._bounded(test, about, found, transcripts.present)

    def learned(
        self, transcripts: transcripts_lib.Transcripts, are_independent: bool = True
    ) -> tuple[audit_report.Finding, audit_report.TradeOff | None]:
        """The game, scored by a classifier that knows nothing of the mechanism.

        Args:
          transcripts: The games.
          are_independent: Whether trials are, if the claim is true; else the one-run bound
            decides, of all runs together: a coin of one run has no part in the others.

        Returns:
          The finding, and the trade-off of the scores; None if what was released is not finite.
        """
        test = "distinguishing game, learned classifier"
        if not np.all(np.isfinite(transcripts.released)):
            return self._not_finite(test, transcripts), None
        train, rest = transcripts.split(_TRAIN_FRACTION, self.seed)
        about = f"It learns from {len(train)} trials and is tested on {len(rest)} others."
        found = scores.learned_scores(train, rest)
        if are_independent:
            return self._bounded(test, about, found, rest.present)
        finding = one_run_bound(
            test, found, rest.present, self.claim, error_rate=self.error_rate, about=f" {about}"
        )
        bound = bounds.for_claim(
            found, rest.present, self.claim, error_rate=self.error_rate, seed=self.seed
        )
        is_above = self.claim.is_refuted_by(bound.mu_at_least, bound.epsilon_at_least)
        if is_above and finding.outcome != "violated":
            advice = (
                " Were trials independent, which nobody says of the noise, it were "
                f"μ = {bound.mu_at_least:.4g}, ε = {bound.epsilon_at_least:.4g} at least, and the "
                "claim refuted: give mechanism, or canaries_per_run=1."
            )
            finding = dataclasses.replace(finding, says=finding.says + advice)
        return finding, bounds.trade_off(found, rest.present)

    def _bounded(
        self, test: str, about: str, found: np.ndarray, present: np.ndarray
    ) -> tuple[audit_report.Finding, audit_report.TradeOff]:
        bound = bounds.for_claim(
            found, present, self.claim, error_rate=self.error_rate, seed=self.seed
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
            f"{about} At least μ = {bound.mu_at_least:.4g}, ε = {bound.epsilon_at_least:.4g} at "
            f"δ = {self.claim.delta:g} ({bound.method}); claimed is {self.claim}.",
            self.error_rate,
            trials=len(present),
            mu_at_least=bound.mu_at_least,
            epsilon_at_least=bound.epsilon_at_least,
            power=power,
        )
        return finding, bounds.trade_off(found, present)

    def _power(self, present: np.ndarray) -> str:
        """By how much μ has to exceed the claim to be found, if scores stay Gaussian."""
        first, second = int(np.sum(present)), int(np.sum(~present))
        error = math.sqrt(1 / first + 1 / second + self.claim.mu**2 / (2 * len(present)))
        # Half of the error rate goes to the Gaussian family.
        errors = special.ndtri(_SURELY) - special.ndtri(self.error_rate / 2)
        return f"a μ of {self.claim.mu + errors * error:.4g} is found with 99 % probability"

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
        """What was released where nobody sent anything is the noise that is claimed.

        Args:
          recorded: The recordings, in clip norms.
          stddev: Of the draws z, in clip norms, as claimed.
          unit_covariance: Of the noise over rounds, for noise multiplier 1.

        Returns:
          The findings of `forensics`, on tensors with enough quiet coordinates.
        """
        if not np.all(np.isfinite(recorded.noise)):
            return (audit_report.Finding("noise", "violated", "What is released is not finite."),)
        recordings = [
            forensics.Recording(
                f"tensor {tensor}",
                recorded.noise[:, :, recorded.tensor_of == tensor],
                stddev,
                unit_covariance,
                significant_bits=recorded.significant_bits[tensor],
            )
            for tensor in np.unique(recorded.tensor_of)
            if np.sum(recorded.tensor_of == tensor) >= _FEWEST_QUIET
        ]
        if not recordings:
            says = f"No tensor has {_FEWEST_QUIET} coordinates to spare for it."
            return (audit_report.Finding("noise", "not tested", says),)
        return forensics.examine(recordings, error_rate=self.error_rate)

    def counts(self, recorded: np.ndarray, unit_covariance: np.ndarray) -> audit_report.Finding:
        """The noise on the counts of adaptive clipping is as large as it is said to be.

        Args:
          recorded: [runs, rounds], in standard deviations of the noise as claimed.
          unit_covariance: Of the noise over rounds, for noise multiplier 1.

        Returns:
          The finding; more noise than claimed violates nothing.
        """
        factor = np.linalg.cholesky(unit_covariance)
        white = scipy.linalg.solve_triangular(factor, recorded.T, lower=True)
        number, squares = white.size, float(np.sum(white**2))
        p_value = stats.chi2.cdf(squares, number)
        # Smallest deviation below 1 that is found: both quantiles of the same law.
        found = stats.chi2.ppf(self.error_rate, number) / stats.chi2.ppf(_SURELY, number)
        return audit_report.Finding(
            "the noise on the counts of adaptive clipping",
            "violated" if p_value < self.error_rate else "consistent",
            f"Whitened by what is claimed, {number} values have standard deviation "
            f"{math.sqrt(squares / number):.4g}, where 1 is claimed (p-value of less "
            f"{p_value:.2g}).",
            self.error_rate,
            trials=number,
            power=f"{math.sqrt(found):.3g} times the standard deviation is found with 99 % "
            "probability",
        )
