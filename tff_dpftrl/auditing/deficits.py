"""Is there a direction with less noise than claimed, in recorded noise?

Recordings are whitened by the claimed covariance over rounds: they are independent N(0, 1)
then. Noise of two places that is equal, opposite or correlated leaves their difference or
their sum with a smaller variance. Each sum of squares has an exact χ² law, so that the
smallest of them is judged exactly but for Bonferroni's correction. More noise than claimed
violates nothing, and is not looked for.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

import numpy as np
import scipy.linalg
from scipy import stats

from tff_dpftrl.auditing import report

_SURELY = 0.99
_MOST_RUN_PAIRS = 45


@dataclasses.dataclass(frozen=True, eq=False)
class Recorded:
    """Noise of several runs, whitened: independent N(0, 1) if the claim is true.

    Attributes:
      white: float64, [runs, rounds, coordinates].
      tensor_of: int, [coordinates].
      position_in: int, [coordinates]: the position within the tensor.
    """

    white: np.ndarray
    tensor_of: np.ndarray
    position_in: np.ndarray

    @classmethod
    def whitened(
        cls,
        noise: np.ndarray,
        covariance: np.ndarray,
        tensor_of: np.ndarray,
        position_in: np.ndarray,
    ) -> Recorded:
        """Whitens what was recorded.

        Args:
          noise: [runs, rounds, coordinates].
          covariance: Of a coordinate over rounds, as claimed, [rounds, rounds].
          tensor_of: The tensor of each coordinate.
          position_in: Its position in it.

        Returns:
          The recording; round t of it is what round t has that earlier ones do not tell.
        """
        factor = np.linalg.cholesky(covariance)
        runs, rounds, coordinates = noise.shape
        flat = noise.transpose(1, 0, 2).reshape(rounds, -1)
        white = scipy.linalg.solve_triangular(factor, flat, lower=True)
        white = white.reshape(rounds, runs, coordinates).transpose(1, 0, 2)
        return cls(white, tensor_of, position_in)

    def findings(self, error_rate: float) -> list[report.Finding]:
        """All tests; each has a quarter of `error_rate`.

        Args:
          error_rate: Of all of them together.

        Returns:
          A finding for each.
        """
        tests = {
            "the noise over rounds": self._over_rounds(),
            "the noise of different tensors": self._over_tensors(),
            "the noise of different coordinates": self._over_coordinates(),
            "the noise of different runs": self._over_runs(),
        }
        each = error_rate / len(tests)
        return [_judged(name, list(sums), each) for name, sums in tests.items()]

    def _over_rounds(self) -> Iterator[tuple[str, float, int]]:
        runs, rounds, coordinates = self.white.shape
        flat = self.white.transpose(1, 0, 2).reshape(rounds, -1)
        gram = flat @ flat.T
        number = runs * coordinates
        for t in range(rounds):
            yield f"round {t}", gram[t, t], number
        # Of each pair the smaller of sum and difference, which counts as both.
        half = (np.diagonal(gram)[:, None] + np.diagonal(gram)) / 2.0
        smaller = half - np.abs(gram)
        for i, j in itertools.combinations(range(rounds), 2):
            yield f"rounds {i} and {j}", smaller[i, j], number
            yield "", smaller[i, j] + 2.0 * abs(gram[i, j]), number

    def _over_tensors(self) -> Iterator[tuple[str, float, int]]:
        for tensor in np.unique(self.tensor_of):
            part = self.white[:, :, self.tensor_of == tensor]
            yield f"tensor {tensor}", float(np.sum(part**2)), part.size
        for one, two in itertools.combinations(np.unique(self.tensor_of), 2):
            first, second = (np.flatnonzero(self.tensor_of == tensor) for tensor in (one, two))
            _, left, right = np.intersect1d(
                self.position_in[first], self.position_in[second], return_indices=True
            )
            if len(left):
                yield from _pair(
                    f"tensors {one} and {two}",
                    self.white[:, :, first[left]],
                    self.white[:, :, second[right]],
                )

    def _over_coordinates(self) -> Iterator[tuple[str, float, int]]:
        even = self.white.shape[2] // 2 * 2
        if even:
            yield from _pair(
                "neighbouring coordinates", self.white[:, :, 0:even:2], self.white[:, :, 1:even:2]
            )

    def _over_runs(self) -> Iterator[tuple[str, float, int]]:
        pairs = itertools.combinations(range(len(self.white)), 2)
        for one, two in itertools.islice(pairs, _MOST_RUN_PAIRS):
            yield from _pair(f"runs {one} and {two}", self.white[one], self.white[two])


def _pair(name: str, one: np.ndarray, two: np.ndarray) -> Iterator[tuple[str, float, int]]:
    """Sums of squares of the difference and of the sum, each over √2."""
    yield f"the difference of {name}", float(np.sum((one - two) ** 2)) / 2.0, one.size
    yield f"the sum of {name}", float(np.sum((one + two) ** 2)) / 2.0, one.size


def _judged(test: str, sums: list[tuple[str, float, int]], error_rate: float) -> report.Finding:
    if not sums:
        return report.Finding(test, "not tested", "There was nothing to compare.")
    squares = np.array([total for _, total, _ in sums])
    numbers = np.array([number for _, _, number in sums])
    level = error_rate / len(sums)
    p_values = stats.chi2.cdf(squares, numbers)
    # Equal noise leaves nothing: ties at 0 are told apart by what is left.
    least = int(np.lexsort((squares / numbers, p_values))[0])
    name, number = sums[least][0], int(numbers[least])
    stddev = math.sqrt(max(0.0, squares[least]) / number)
    detectable = stats.chi2.ppf(level, numbers) / stats.chi2.ppf(_SURELY, numbers)
    found = not p_values[least] >= level
    says = f"Of {len(sums)} directions, {name} has the least noise for the number of values: "
    return report.Finding(
        test,
        "violated" if found else "consistent",
        f"{says}{stddev:.4g} times what is claimed ({number} values, p-value "
        f"{min(1.0, p_values[least] * len(sums)):.2g} with all directions counted).",
        error_rate,
        trials=int(numbers.max()),
        power=f"{math.sqrt(detectable.min()):.3g} times the claimed standard deviation in one of "
        "them is found with 99 % probability",
    )
