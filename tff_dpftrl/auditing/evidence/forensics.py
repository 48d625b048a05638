"""Tests of recorded noise against the claimed noise: its covariance, repeats and tails.

A mechanism releases its noise when all updates are zero. Multiplied by the inverse of the
Cholesky factor of the claimed covariance over rounds, the noise is an array of independent
N(0, 1) if the claim is true; for a square C these are the draws z themselves. The tests look for
deviations from such an array. Each test has a share of the error rate (Bonferroni), and states
the deviation that it finds with 99 % probability.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np
import scipy.linalg
from scipy import special, stats

from tff_dpftrl import validation
from tff_dpftrl.auditing import audit_report
from tff_dpftrl.auditing.evidence import correlations

_TAILS = (3.0, 4.0, 4.5)
_FEWEST_COORDINATES = 8
# Two floats of 32 bits from a good generator are equal far less often.
_EQUAL = 2.0**-20


@dataclasses.dataclass(frozen=True, eq=False)
class Recording:
    """A recording of the noise of one tensor, or of one stream, with the claim about it.

    Attributes:
      name: Name of the tensor, for people.
      noise: Released sums of zero updates before any division, floating, shape [runs, rounds,
        coordinates]. Runs are independent initialisations.
      stddev: Claimed standard deviation of the draws z: noise multiplier times clip norm.
      covariance: Claimed covariance over rounds for stddev 1, shape [rounds, rounds], from
        `worst_pattern.noise_covariance`.
      significant_bits: Significant bits of the released floats: 24 for float32, 11 for
        float16, 8 for bfloat16.
    """

    name: str
    noise: np.ndarray
    stddev: float
    covariance: np.ndarray
    significant_bits: int = 24

    def __post_init__(self):
        shape = np.shape(self.noise)
        if len(shape) != 3 or shape[2] < _FEWEST_COORDINATES:
            raise validation.UsageError(
                "noise must have shape [runs, rounds, coordinates] with at least "
                f"{_FEWEST_COORDINATES} coordinates, got {shape}: record a larger tensor."
            )
        if np.shape(self.covariance) != (shape[1], shape[1]):
            raise validation.UsageError(
                f"covariance must have shape [{shape[1]}, {shape[1]}], one entry for two rounds of "
                f"noise, got {np.shape(self.covariance)}."
            )
        if not np.all(np.isfinite(self.noise)):
            raise validation.UsageError(f"noise of {self.name} must be finite.")
        if not self.stddev > 0.0:
            raise validation.UsageError(
                f"stddev must be positive, got {self.stddev!r}: nothing is claimed."
            )

    def whitened(self) -> np.ndarray:
        """Returns the whitened noise, independent N(0, 1) if the claim is true; same shape."""
        factor = np.linalg.cholesky(self.covariance) * self.stddev
        runs, rounds, coordinates = self.noise.shape
        columns = self.noise.transpose(1, 0, 2).reshape(rounds, runs * coordinates)
        white = scipy.linalg.solve_triangular(factor, columns, lower=True)
        return white.reshape(rounds, runs, coordinates).transpose(1, 0, 2)


def examine(
    recordings: Sequence[Recording], *, error_rate: float
) -> tuple[audit_report.Finding, ...]:
    """Runs all tests on the noise of one or more tensors that were recorded together.

    Too little noise, noise that is repeated or shared, a mean, and tails that are too short are
    violations. More noise than claimed is reported, but is none. `error_rate` is the largest chance
    that any test says "violated" if all claims are true.
    """
    if not 0.0 < error_rate < 1.0:
        raise validation.UsageError(
            f"error_rate must be strictly between 0 and 1, got {error_rate!r}."
        )
    if (
        not all(map(np.size, (one.noise for one in recordings)))
        or len({np.shape(one.noise)[:2] for one in recordings}) != 1
    ):
        raise validation.UsageError(
            "recordings must be of one or more tensors with the same runs and rounds, got "
            f"{[np.shape(one.noise) for one in recordings]}."
        )
    white = {one.name: one.whitened() for one in recordings}
    if len(white) != len(recordings):
        raise validation.UsageError("recordings must have different names.")
    runs, rounds, _ = next(iter(white.values())).shape
    tests = [_variance, _variance_by_round, _mean, _neighbours, _tails]
    left_out = []
    for test, name, is_possible in (
        (_rounds, "rounds", rounds > 1),
        (_tensors, "tensors and streams", len(white) > 1),
        (_runs, "runs", runs > 1),
    ):
        if is_possible:
            tests.append(test)
        else:
            says = f"It takes two {name}."
            left_out.append(
                audit_report.Finding(f"noise: correlation of {name}", "not tested", says)
            )
    share = error_rate / len(tests)
    tests[tests.index(_tails)] = functools.partial(
        _tails, rounded=max(_moved_by_rounding(one) for one in recordings)
    )
    done = [test(white, share) for test in tests]
    return (*done, _equal_values(recordings), *left_out)


_White = dict[str, np.ndarray]


def _finding(name, violated, says, share, trials, power) -> audit_report.Finding:
    outcome = "violated" if violated else "consistent"
    return audit_report.Finding(f"noise: {name}", outcome, says, share, int(trials), power=power)


def _variance(white: _White, share: float) -> audit_report.Finding:
    count = sum(values.size for values in white.values())
    total = sum(float(np.sum(values**2)) for values in white.values())
    lowest, highest = stats.chi2.ppf([share, 1.0 - share], count)
    ratio = math.sqrt(total / count)
    says = f"The standard deviation is {ratio:.4f} of the claimed one."
    if total > highest:
        says += " That is more noise than claimed."
    power = math.sqrt(lowest / stats.chi2.ppf(correlations.POWER, count))
    return _finding(
        "standard deviation",
        total < lowest,
        says,
        share,
        count,
        f"a standard deviation of {power:.4f} of the claimed one",
    )


def _variance_by_round(white: _White, share: float) -> audit_report.Finding:
    ratios, chances, powers = [], [], []
    for values in white.values():
        count = values.shape[0] * values.shape[2]
        totals = np.sum(values**2, axis=(0, 2))
        ratios.append(np.sqrt(totals / count))
        chances.append(stats.chi2.cdf(totals, count))
    number = sum(map(len, chances))
    for values in white.values():
        count = values.shape[0] * values.shape[2]
        lowest = stats.chi2.ppf(share / number, count)
        powers.append(math.sqrt(lowest / stats.chi2.ppf(correlations.POWER, count)))
    tensor = int(np.argmin([chance.min() for chance in chances]))
    worst = int(np.argmin(chances[tensor]))
    return _finding(
        "standard deviation of each round",
        chances[tensor][worst] < share / number,
        f"The smallest is {ratios[tensor][worst]:.4f} of the claimed one, given earlier rounds, "
        f"in round {worst + 1} of {list(white)[tensor]}.",
        share,
        number,
        f"{min(powers):.4f} of the claimed one in one round",
    )


def _mean(white: _White, share: float) -> audit_report.Finding:
    scores, sizes = [], []
    for values in white.values():
        runs, rounds, coordinates = values.shape
        for axes, size in (
            ((0, 1, 2), values.size),
            ((0, 2), runs * coordinates),  # For each round.
            ((0, 1), runs * rounds),  # For each coordinate.
        ):
            scores.append(np.ravel(np.sum(values, axis=axes)) / math.sqrt(size))
            sizes.append(size)
    largest = max(float(np.max(np.abs(score))) for score in scores)
    number = sum(map(len, scores))
    limit = -float(special.ndtri(share / number / 2.0))
    power = (limit + special.ndtri(correlations.POWER)) / math.sqrt(min(sizes))
    return _finding(
        "mean",
        largest > limit,
        f"The largest mean, of a tensor, a round or a coordinate, is {largest:.2f} standard "
        "errors from 0.",
        share,
        number,
        f"a mean of {power:.2g} standard deviations in one coordinate or round",
    )


def _moved_by_rounding(recording: Recording) -> float:
    """Returns about how far rounding to the released floats can move a distribution function."""
    factor = np.linalg.cholesky(recording.covariance)
    # A value r moves by r 2^-bits at most, and less after whitening.
    larger = np.max(np.sqrt(np.diagonal(recording.covariance)) / np.diagonal(factor))
    steepest = math.exp(-0.5) / math.sqrt(2.0 * math.pi)  # The largest |x| times density.
    return float(larger) * steepest * 2.0 ** (1 - recording.significant_bits)


def _tails(white: _White, share: float, rounded: float) -> audit_report.Finding:
    """Tests counts beyond some values, and the distribution by Kolmogorov and Smirnov's test.

    Each has half of the share. The second test is on values over their empirical standard
    deviation: that only makes the statistic smaller (Lilliefors 1967), and more noise than
    claimed is no short tail. `rounded` is what rounding may add to the statistic.
    """
    values = np.sort(np.concatenate([one.ravel() for one in white.values()]))
    count, each = len(values), share / 2.0 / len(_TAILS)
    short, says, powers = False, [], []
    for limit in _TAILS:
        chance = 2.0 * float(special.ndtr(-limit))
        beyond = count - int(np.searchsorted(values, limit) - np.searchsorted(values, -limit))
        short |= bool(stats.binom.cdf(beyond, count, chance) <= each)
        says.append(f"{beyond} beyond {limit:g} (expected {count * chance:.1f})")
        fewest = int(stats.binom.ppf(each, count, chance)) - 1
        if fewest >= 0:
            # Clopper–Pearson: with this chance, so few or fewer are seen with 99 % probability.
            most = special.betaincinv(fewest + 1, count - fewest, 1.0 - correlations.POWER)
            powers.append(f"{most / chance:.0%} of the values beyond {limit:g}")
    spread = math.sqrt(float(np.mean(values**2)))
    steps = np.arange(count + 1) / count
    below = special.ndtr(values / spread) if spread > 0.0 else np.full(count, 0.5)
    distance = float(max(np.max(steps[1:] - below), np.max(below - steps[:-1])))
    allowed = math.sqrt(math.log(4.0 / share) / (2.0 * count)) + rounded
    off = allowed + math.sqrt(-math.log(1.0 - correlations.POWER) / (2.0 * count))
    powers.append(f"a distribution function that is off by {off:.2g} after scaling")
    return _finding(
        "tails",
        short or distance > allowed,
        f"{', '.join(says)} standard deviations; largest distance of the distribution function "
        f"{distance:.2g}.",
        share,
        count,
        ", or ".join(powers),
    )


def _rows(values: np.ndarray) -> np.ndarray:
    """Reshapes [runs, rounds, coordinates] to [rounds, runs · coordinates]."""
    return values.transpose(1, 0, 2).reshape(values.shape[1], -1)


def _rounds(white: _White, share: float) -> audit_report.Finding:
    scan = correlations.Scan()
    for name, values in white.items():
        rows = _rows(values)
        later = np.triu(np.ones((len(rows), len(rows)), bool), 1)
        scan.add(rows, rows, f"rounds {{}} and {{}} of {name}", later)
    return scan.finding("correlation of rounds", share, together=True)


def _neighbours(white: _White, share: float) -> audit_report.Finding:
    scan = correlations.Scan()
    for name, values in white.items():
        # Each value is used once, so that all pairs are independent.
        scan.add(
            _rows(values[..., :-1:2]),
            _rows(values[..., 1::2][..., : values[..., :-1:2].shape[2]]),
            f"rounds {{}} and {{}} of {name}, coordinates shifted by one",
        )
    return scan.finding("correlation of coordinates", share)


def _tensors(white: _White, share: float) -> audit_report.Finding:
    scan = correlations.Scan()
    for (name, values), (other, others) in itertools.combinations(white.items(), 2):
        width = min(values.shape[2], others.shape[2])
        for shift in (-1, 0, 1):
            low, high = max(0, -shift), width - max(0, shift)
            scan.add(
                _rows(values[..., low:high]),
                _rows(others[..., low + shift : high + shift]),
                f"round {{}} of {name} and {{}} of {other}, coordinates shifted by {shift}",
            )
    return scan.finding("correlation of tensors and streams", share)


def _runs(white: _White, share: float) -> audit_report.Finding:
    scan = correlations.Scan()
    for name, values in white.items():
        for first, second in itertools.combinations(range(len(values)), 2):
            label = f"rounds {{}} and {{}} of runs {first + 1} and {second + 1} of {name}"
            scan.add(values[first], values[second], label)
    return scan.finding("correlation of runs", share)


def _equal_values(recordings: Sequence[Recording]) -> audit_report.Finding:
    """Tests for equal values within a round, of which floats have next to none.

    If two values are equal with probability p, p of all pairs are expected to be. Four times
    that and twenty more is beyond all chance, so that no error is spent here.
    """
    worst, equal_rows = (0.0, ""), ""
    for one in recordings:
        runs, rounds, coordinates = one.noise.shape
        rows = np.ascontiguousarray(one.noise.reshape(runs * rounds, coordinates))
        repeated = len(rows) - len(np.unique(rows, axis=0))
        if repeated and not equal_rows:
            equal_rows = f" {one.name} releases {repeated} whole vectors again."
        pairs = runs * coordinates * (runs * coordinates - 1) / 2.0
        for t in range(rounds):
            _, counts = np.unique(one.noise[:, t], return_counts=True)
            equal = float(np.sum(counts * (counts - 1.0)) / 2.0)
            # Of two N(0, σ²), rounded to p bits: ∫ f² g, where g = 2^(1−p) |x|.
            chance = max(_EQUAL, 2.0 ** (1 - one.significant_bits) / (2.0 * math.pi))
            excess = equal / (4.0 * pairs * chance + 20.0)
            if excess > worst[0]:
                worst = (excess, f"{equal:.0f} equal pairs in round {t + 1} of {one.name}")
    return audit_report.Finding(
        "noise: equal values",
        "violated" if worst[0] > 1.0 or equal_rows else "consistent",
        f"At most {worst[1] or 'no equal pairs'}.{equal_rows}",
        trials=sum(one.noise.size for one in recordings),
    )
