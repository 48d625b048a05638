"""Neighbour graphs of large groups, in which devices share their secrets (Bell et al. 2020).

In the protocol of Bonawitz et al. 2017 every device has every other one as a neighbour, so that its
work grows with the group. Bell et al. 2020 ("Secure Single-Server Aggregation with
(Poly)Logarithmic Overhead", the semi-honest protocol) give it k neighbours in a random graph. The
graph is a Harary graph: a ring in random order on which each device knows the k/2 nearest devices
on either side. Secrets are shared among a device and its neighbours, and t shares recover one. With
growing n, k grows as log n.

With a complete graph nothing fails as long as fewer than t devices are corrupt and at least t
remain. Here three failures are possible. Their probability depends on k and t, and
`failure_probabilities` bounds it:

- Too few shares: a device whose neighbourhood has fewer than t left. The sum is lost. The server
  knows before it asks any device for shares, so nothing else is lost.
- Exposed secrets: an honest device with t corrupt neighbours or more. Together with the server,
  these can recover both secrets, which the protocol never reveals together.
- A disconnected graph: honest survivors who are not connected without the corrupt and the
  dropped-out devices. The server sees the sum of each part, not only the sum of all.

The bounds make the paper's assumptions. The server draws the graph honestly (it is honest but
curious). Corruption and drop-out do not depend on the graph. A server that chooses the graph, or
the devices that drop out, can put any device among t corrupt ones.

The bounds are unions over devices, of exact hypergeometric tails, and over pairs of gaps on the
ring. The paper's closed forms for the growth of k are looser.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Sequence

import numpy as np
from scipy import special

from tff_dpftrl import validation

_LEAST_THRESHOLD = 2  # With one, a share is the secret.
_ROUNDING = 1e-9  # 0.29 of 100 devices are 29, though not in binary fractions.


@dataclasses.dataclass(frozen=True)
class Neighbourhood:
    """Number of neighbours of each device, and number of shares that recover a secret.

    Attributes:
      num_devices: Number n of devices in the group, at least 2.
      num_neighbours: Number k of neighbours of each device, without itself; n - 1 for the
        complete graph. Odd only where n is even.
      threshold: Number t, at least 2, of the k + 1 shares of a secret that recover it. Each
        neighbour has one share, and the device keeps one.
    """

    num_devices: int
    num_neighbours: int
    threshold: int

    def __post_init__(self):
        _check_degree(self.num_devices, self.num_neighbours)
        validation.integer("threshold", self.threshold, minimum=_LEAST_THRESHOLD)
        if self.threshold > self.num_neighbours + 1:
            raise validation.UsageError(
                f"threshold must be at most num_neighbours + 1 = {self.num_neighbours + 1}, as "
                f"many shares as there are, got {self.threshold}."
            )

    @property
    def complete(self) -> bool:
        """Whether every device is a neighbour of every other one."""
        return self.num_neighbours == self.num_devices - 1

    @property
    def threshold_fraction(self) -> float:
        """Fraction of the k + 1 shares for which `threshold` is the least number above it."""
        return (self.threshold - 0.5) / (self.num_neighbours + 1)


@dataclasses.dataclass(frozen=True)
class FailureProbabilities:
    """Upper bounds of probabilities, as logarithms to base 2; -inf for impossible events.

    Attributes:
      too_few_shares: Bound for a secret that cannot be recovered, so that the sum is lost.
      exposed_secrets: Bound for corrupt devices with enough shares of an honest one's secrets.
      disconnected: Bound for honest survivors who are not connected with each other.
    """

    too_few_shares: float
    exposed_secrets: float
    disconnected: float

    @property
    def insecure(self) -> float:
        """Bound for the event that more than the sum of all honest survivors can be learnt."""
        return min(0.0, float(np.logaddexp2(self.exposed_secrets, self.disconnected)))


def random_neighbours(
    num_devices: int, num_neighbours: int, *, order: Sequence[int] | None = None
) -> list[tuple[int, ...]]:
    """Draws a random Harary graph: for each device its neighbours in increasing order.

    With an odd number of neighbours, each device also knows the one opposite on the ring, for which
    `num_devices` must be even. The operating system draws the order on the ring, except in tests.
    It raises ValueError if there is no such graph.
    """
    _check_degree(num_devices, num_neighbours)
    if order is None:
        order = list(range(num_devices))
        secrets.SystemRandom().shuffle(order)
    elif sorted(order) != list(range(num_devices)):
        raise validation.UsageError(
            f"order must be a permutation of 0 to {num_devices - 1}, got {order!r}."
        )
    half = num_neighbours // 2
    steps = [step for step in range(-half, half + 1) if step]
    if num_neighbours % 2:
        steps.append(num_devices // 2)
    graph: list[tuple[int, ...]] = [()] * num_devices
    for place, device in enumerate(order):
        graph[device] = tuple(sorted(order[(place + step) % num_devices] for step in steps))
    return graph


def failure_probabilities(
    neighbourhood: Neighbourhood, corrupt_fraction: float, drop_out_fraction: float
) -> FailureProbabilities:
    """Bounds the failure probabilities of a graph drawn at random.

    Args:
      neighbourhood: Size of the group, number of neighbours and threshold.
      corrupt_fraction: Largest fraction of the devices that collude with the server, in
        [0, 1).
      drop_out_fraction: Largest fraction of the devices that do not reveal their shares in the
        end, whenever they dropped out, in [0, 1).

    Returns:
      Bounds for the case that both fractions are reached, by different devices.

    Raises:
      ValueError: If both fractions together leave no honest survivor.
    """
    n, k = neighbourhood.num_devices, neighbourhood.num_neighbours
    corrupt, dropped = _counts(n, corrupt_fraction, drop_out_fraction)
    return FailureProbabilities(
        too_few_shares=_log2(_log_too_few_shares(n, k, dropped)[neighbourhood.threshold]),
        exposed_secrets=_log2(_log_exposed_secrets(n, k, corrupt)[neighbourhood.threshold]),
        disconnected=_log2(_log_disconnected(n, k, corrupt + dropped)),
    )


def choose(
    num_devices: int,
    corrupt_fraction: float,
    drop_out_fraction: float,
    *,
    security_bits: float = 40,
    correctness_bits: float = 20,
    threshold_fraction: float = 0.5,
) -> Neighbourhood:
    """Chooses the fewest neighbours, and the smallest threshold, with which failures are rare.

    Args:
      num_devices: Number n of devices, at least 2.
      corrupt_fraction: Largest fraction of the devices that collude with the server, in
        [0, 1).
      drop_out_fraction: Largest fraction of the devices that do not reveal their shares in the
        end, in [0, 1).
      security_bits: Negative log2 of the largest probability, in one sum, of exposed secrets or
        a disconnected graph.
      correctness_bits: Negative log2 of the largest probability of a sum that is lost by too few
        shares.
      threshold_fraction: Fraction of the k + 1 shares, in [0, 1), above which the threshold is.
        Devices demand the usual half. The paper has no such rule, and needs fewer neighbours
        where few devices are corrupt and many drop out.

    Returns:
      The neighbourhood; the complete graph where n is small.

    Raises:
      ValueError: If not even the complete graph will do.
    """
    validation.integer("num_devices", num_devices, minimum=2)
    validation.number("security_bits", security_bits, above=0)
    validation.number("correctness_bits", correctness_bits, above=0)
    validation.number("threshold_fraction", threshold_fraction, at_least=0, below=1)
    corrupt, dropped = _counts(num_devices, corrupt_fraction, drop_out_fraction)
    log_security, log_correctness = (
        -bits * math.log(2) for bits in (security_bits, correctness_bits)
    )
    for k in (*range(2, num_devices - 1, 2), num_devices - 1):
        log_disconnected = _log_disconnected(num_devices, k, corrupt + dropped)
        if log_disconnected > log_security:
            continue
        insecure = np.logaddexp(_log_exposed_secrets(num_devices, k, corrupt), log_disconnected)
        least = max(_LEAST_THRESHOLD, math.floor(threshold_fraction * (k + 1)) + 1)
        # Probabilities fall with t; index k + 1, all shares, is the last.
        secure = least + np.flatnonzero(insecure[least:] <= log_security)
        if (
            len(secure)
            and _log_too_few_shares(num_devices, k, dropped)[secure[0]] <= log_correctness
        ):
            return Neighbourhood(num_devices, k, int(secure[0]))
    raise validation.UsageError(
        f"Not even with all {num_devices} devices as neighbours is there a threshold above "
        f"{threshold_fraction:g} of the shares, above {corrupt} corrupt and at most "
        f"{num_devices - dropped} surviving devices: lower corrupt_fraction={corrupt_fraction!r} "
        f"or drop_out_fraction={drop_out_fraction!r}."
    )


def _check_degree(num_devices: int, num_neighbours: int) -> None:
    validation.integer("num_devices", num_devices, minimum=2)
    validation.integer("num_neighbours", num_neighbours, minimum=1)
    if num_neighbours >= num_devices:
        raise validation.UsageError(
            f"num_neighbours must be below num_devices={num_devices}, got {num_neighbours}."
        )
    if num_neighbours % 2 and num_devices % 2:
        raise validation.UsageError(
            f"num_neighbours={num_neighbours} and num_devices={num_devices} are both odd, and no "
            "such graph exists: take an even number of neighbours."
        )


def _counts(num_devices: int, corrupt_fraction: float, drop_out_fraction: float) -> tuple[int, int]:
    counts = []
    for name, fraction in (
        ("corrupt_fraction", corrupt_fraction),
        ("drop_out_fraction", drop_out_fraction),
    ):
        validation.number(name, fraction, at_least=0, below=1)
        counts.append(math.floor(fraction * num_devices + _ROUNDING))
    corrupt, dropped = counts
    if corrupt + dropped >= num_devices:
        raise validation.UsageError(
            f"corrupt_fraction={corrupt_fraction!r} and drop_out_fraction={drop_out_fraction!r} "
            f"leave no honest survivor of {num_devices} devices: lower one of them."
        )
    return corrupt, dropped


def _log_too_few_shares(num_devices: int, num_neighbours: int, dropped: int) -> np.ndarray:
    """Computes the log of the expected number of devices with fewer than t shares left.

    The results are for t = 0, 1, …, k + 1. Survivors count their own share as well.
    """
    n, k = num_devices, num_neighbours
    survivors = n - dropped
    of_dropped = _log_below(n - 1, survivors, k) if dropped else np.full(k + 2, -np.inf)
    # Own share and fewer than t - 1 others.
    of_survivors = np.append(-np.inf, _log_below(n - 1, survivors - 1, k)[:-1])
    return np.minimum(
        0.0,
        np.logaddexp(
            of_dropped + (math.log(dropped) if dropped else 0.0), of_survivors + math.log(survivors)
        ),
    )


def _log_exposed_secrets(num_devices: int, num_neighbours: int, corrupt: int) -> np.ndarray:
    """Computes the log expected number of honest devices with t corrupt neighbours, t ≤ k + 1."""
    n, k = num_devices, num_neighbours
    pmf = _log_pmf(n - 1, corrupt, k)
    at_least = np.append(np.logaddexp.accumulate(pmf[::-1])[::-1], -np.inf)
    return np.minimum(0.0, at_least + math.log(n - corrupt))


def _log_disconnected(num_devices: int, num_neighbours: int, removed: int) -> float:
    """Computes the log of the expected number of pairs of gaps that cut the ring, at most 0.

    Two successive survivors are neighbours unless h = k // 2 devices or more are missing between
    them. So the ring falls apart only where two stretches of h devices are gone, with survivors on
    both sides of them. There are n (n - 2h - 1) / 2 pairs of stretches, and all 2h devices of a
    pair must be among those removed. With k odd the connection to the opposite device, which can
    only help, is left out.
    """
    n, both = num_devices, 2 * (num_neighbours // 2)
    if num_neighbours == n - 1 or removed < both:
        return -math.inf
    pairs = n * (n - both - 1) / 2
    missing = _log_choose(n - both, removed - both) - _log_choose(n, removed)
    return min(0.0, math.log(pairs) + float(missing))


def _log_below(population: int, marked: int, draws: int) -> np.ndarray:
    """Computes the log probability of fewer than t marked draws, for t = 0, 1, …, draws + 1."""
    return np.append(-np.inf, np.logaddexp.accumulate(_log_pmf(population, marked, draws)))


def _log_pmf(population: int, marked: int, draws: int) -> np.ndarray:
    """Computes the log probability of 0, 1, …, draws marked draws, without replacement."""
    hits = np.arange(draws + 1)
    possible = (hits <= marked) & (draws - hits <= population - marked)
    pmf = np.full(draws + 1, -np.inf)
    hits = hits[possible]
    pmf[possible] = (
        _log_choose(marked, hits)
        + _log_choose(population - marked, draws - hits)
        - _log_choose(population, draws)
    )
    return pmf


def _log_choose(n: int, k: int | np.ndarray) -> np.ndarray:
    return special.gammaln(n + 1) - special.gammaln(np.add(k, 1)) - special.gammaln(n - k + 1)


def _log2(log: float) -> float:
    return float(log) / math.log(2)
