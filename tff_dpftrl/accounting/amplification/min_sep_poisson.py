"""b-min-sep sampling: Poisson sampling without the clients of the last b − 1 rounds.

A unit that may take part does so with probability q in each round, and then waits until b rounds
later (Dong et al. 2026, arXiv 2602.09338). The first rounds are as if infinitely many had gone
before. Neighbours differ in one unit, whose contributions are replaced by zeros; units' rounds are
drawn independently of each other and of all data. If units are added or removed instead, the bound
is the same, as long as nothing else depends on who takes part.

With C >= 0 the run is dominated by P = E_m N(Cm, σ²I) against Q = N(0, σ²I), for the random set m
of a unit's rounds. Two bounds are proven here, and the least one counts; neither is above the one
without amplification.

*Number of rounds.* Telling the adversary m (joint convexity) gives
δ(ε) <= E_m δ_Gauss(ε; ‖Cm‖/σ) <= Σ_k Pr[k rounds] δ_Gauss(ε; S_k/σ), with S_k the sensitivity of k
rounds that are b apart.

*Slots*, for a C of at most b bands. m is a renewal process whose gaps have the generating function
F(x) = q x^b / (1 − (1−q) x). Let p in (q, 1] be a probability of occupation. A renewal process of
slots with gaps F̃, of which each slot is occupied with probability p, independently, has occupied
slots with gaps p F̃ / (1 − (1−p) F̃). That is F if F̃ = F / (p + (1−p) F) =

    (q/p) x^b / (1 − (1−q) x + κ x^b),   κ = q (1−p) / p.

F̃(1) = 1, and its coefficients are nonnegative if κ <= (1−q)^b (b−1)^(b−1) / b^b: then the
denominator D has a root x₀ > 1 (or D(x) <= 0 for some x > 0), the coefficients a_n = (1−q) a_{n−1}
− κ a_{n−b} of 1/D satisfy a_n >= a_{n−1} / x₀ by induction: (1−q) − κ a_{n−b}/a_{n−1} >=
(1−q) − κ x₀^(b−1) = 1/x₀. So m is a thinned stationary process of slots, which does not depend on
data. Tell the adversary the slots (joint convexity). They are at least b apart, so that no two of
their columns share a row, and the run is J slots' Poisson-sampled Gaussians with probability p and
noise z / (largest column norm). By Markov's inequality Pr[J > j] <= e^(s(n−1)) F̃(e^(−s))^j for
every s > 0, since J > j means that j gaps fit between the first slot and round n − 1. A part of δ
is spent on it. With b = 1 this is Poisson sampling, with q = 1 the schema's own bound.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from scipy import optimize, special, stats

from tff_dpftrl import validation
from tff_dpftrl.accounting import dp_fedavg, gaussian
from tff_dpftrl.accounting.amplification import estimate as estimate_lib
from tff_dpftrl.accounting.amplification import patterns
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.participation import secret_cohorts

_ROUNDING = 1e-9
"""Relative error allowed for in probabilities."""
_COUNT_SHARE = 0.01
"""Share of delta that is spent on there being more slots than counted."""
_MOST_COUNTS = 200
"""Largest number of different numbers of rounds whose sensitivities are computed."""


@dataclasses.dataclass(frozen=True)
class MinSepPoisson:
    """One run of a strategy with b-min-sep sampling; see `from_strategy`."""

    strategy: strategy_lib.Strategy
    noise_multiplier: float
    num_rounds: int
    min_sep: int
    sampling_probability: float

    @classmethod
    def from_strategy(
        cls,
        strategy: strategy_lib.Strategy,
        *,
        noise_multiplier: float,
        num_rounds: int,
        min_sep: int,
        sampling_probability: float,
    ) -> MinSepPoisson:
        """Builds the run of a strategy with b-min-sep sampling.

        C must have no negative entries. `sampling_probability` is that of a client that was in none
        of the last b − 1 rounds.
        """
        validation.noise_multiplier(noise_multiplier)
        num_rounds = validation.integer("num_rounds", num_rounds, minimum=1)
        min_sep = validation.integer("min_sep", min_sep, minimum=1)
        probability = validation.probability("sampling_probability", sampling_probability)
        patterns.check_nonnegative(strategy, num_rounds)
        return cls(strategy, float(noise_multiplier), num_rounds, min_sep, probability)

    @property
    def _schema(self) -> schema_lib.MinSep:
        return schema_lib.MinSep.as_many_as_fit(self.num_rounds, self.min_sep)

    def _sensitivity(self, count: int) -> float:
        """Returns the sensitivity of `count` rounds of one client."""
        return self.strategy.sensitivity(
            schema_lib.MinSep(self.num_rounds, self.min_sep, count)
        ).value

    def unamplified_epsilon(self, delta: float) -> float:
        """Computes epsilon at `delta` of a unit whose rounds are known, as many as fit."""
        if self.noise_multiplier == 0.0:
            return math.inf
        return gaussian.epsilon(
            self._sensitivity(self._schema.max_participations) / self.noise_multiplier, delta
        )

    def epsilon(self, delta: float) -> float:
        """Computes epsilon at `delta`: a bound that holds, and never above the unamplified one."""
        validation.delta(delta)
        unamplified = self.unamplified_epsilon(delta)
        if math.isinf(unamplified):
            return unamplified
        bounds = [unamplified, self._epsilon_by_count(delta, unamplified)]
        if patterns.num_bands(self.strategy, self.num_rounds) <= self.min_sep:
            bounds.append(self._epsilon_by_slots(delta))
        return min(bounds)

    def estimate(self, delta: float, num_samples: int, seed: int) -> estimate_lib.Estimate:
        """Estimates epsilon at `delta` by simulated privacy losses: no guarantee.

        It takes many times 1 / delta samples. More than b bands are refused: a unit's rounds would
        share noise, and the likelihood ratio has no recursion.
        """
        n, b, q = self.num_rounds, self.min_sep, self.sampling_probability
        bands = patterns.num_bands(self.strategy, n)
        if bands > b:
            raise validation.UsageError(
                f"strategy must have at most min_sep={b} bands for an estimate, got {bands}: use "
                "the bound, or fewer bands."
            )
        columns = patterns.columns(self.strategy, n)
        if self.noise_multiplier > 0.0:
            columns = columns / self.noise_multiplier
        half = (columns**2).sum(axis=0) / 2.0
        share = self._share

        def first_eligible(rng: np.random.Generator, count: int) -> np.ndarray:
            chances = np.append(1.0 - (b - 1) * share, np.full(b - 1, share))
            return rng.choice(b, size=count, p=chances / chances.sum())

        def log_ratio(z: np.ndarray) -> np.ndarray:
            # Backwards: entry t of `later` is the ratio of a unit that may take part in round t.
            exponents = z @ columns - half
            later = np.zeros((n + b, len(z)))
            for t in range(n - 1, -1, -1):
                absent = later[t + 1] + (math.log1p(-q) if q < 1.0 else -math.inf)
                later[t] = np.logaddexp(absent, math.log(q) + exponents[:, t] + later[t + b])
            weights = np.full((b, 1), math.log(share))
            weights[0] = math.log(max(1.0 - (b - 1) * share, 1e-300))
            return np.asarray(special.logsumexp(later[:b] + weights, axis=0))

        def remove(rng: np.random.Generator, count: int) -> np.ndarray:
            next_round = first_eligible(rng, count)
            present = np.zeros((count, n))
            for t in range(n):
                takes_part = (next_round <= t) & (rng.random(count) < q)
                present[:, t] = takes_part
                next_round = np.where(takes_part, t + b, next_round)
            return log_ratio(present @ columns.T + rng.standard_normal((count, len(columns))))

        def add(rng: np.random.Generator, count: int) -> np.ndarray:
            return -log_ratio(rng.standard_normal((count, len(columns))))

        return estimate_lib.estimate(
            estimate_lib.untilted(remove),
            estimate_lib.untilted(add),
            delta=delta,
            bound=self.epsilon(delta),
            num_samples=num_samples,
            seed=seed,
        )

    @property
    def _share(self) -> float:
        """Expected share of the clients in a round."""
        return secret_cohorts.stationary_share(self.min_sep, self.sampling_probability)

    def count_tail(self) -> np.ndarray:
        """Computes the probabilities of at least k rounds, k = 0, 1, …, shape [most rounds + 1].

        The first eligible round r has probability share for r = 1 … b − 1, and else is 0. The k-th
        participation is in round r + (k−1)(b−1) + (k successes' trials of probability q) − 1.
        """
        n, b, q = self.num_rounds, self.min_sep, self.sampling_probability
        share = self._share
        first = np.arange(b)
        chances = np.where(first == 0, 1.0 - (b - 1) * share, share)
        most = self._schema.max_participations
        counts = np.arange(1, most + 1)
        trials = np.maximum(n - first[None, :] - (counts[:, None] - 1) * (b - 1), 0)
        tail = stats.binom.sf(counts[:, None] - 1, trials, q) @ chances
        return np.append(1.0, np.minimum(tail * (1.0 + _ROUNDING), 1.0))

    def _epsilon_by_count(self, delta: float, unamplified: float) -> float:
        """Bounds epsilon by the distribution of the number of a client's rounds."""
        tail = self.count_tail()
        most = len(tail) - 1
        # Numbers in steps: a number in between counts as the next larger one.
        counts = np.unique(np.linspace(1, most, min(most, _MOST_COUNTS)).round().astype(int))
        sizes = [self._sensitivity(int(count)) / self.noise_multiplier for count in counts]
        # δ = Σ Pr[K >= previous count + 1] (δ_count − δ_previous), increasing in the tail.
        starts = np.append(0, counts[:-1]) + 1

        def excess(epsilon: float) -> float:
            deltas = np.array([gaussian.delta(size, epsilon) for size in sizes])
            steps = np.diff(np.maximum.accumulate(deltas), prepend=0.0)
            return float(tail[starts] @ steps) * (1.0 + _ROUNDING) - delta

        if excess(0.0) <= 0.0:
            return 0.0
        low, high = 0.0, unamplified
        if excess(high) > 0.0:
            return high
        while high - low > 1e-6 * high:
            middle = (low + high) / 2.0
            low, high = (middle, high) if excess(middle) > 0.0 else (low, middle)
        return high

    def occupation(self) -> float:
        """Computes the least probability p with which a slot is occupied, from q to 1."""
        b, q = self.min_sep, self.sampling_probability
        if q == 1.0:
            return 1.0
        log_kappa = b * math.log1p(-q) - math.log(b)
        if b > 1:
            log_kappa += (b - 1) * math.log1p(-1.0 / b)
        # Rounded up, to stay clear of the boundary.
        return min(1.0, q / (q + math.exp(log_kappa)) * (1.0 + _ROUNDING))

    def most_slots(self, log_probability: float) -> int:
        """Computes a number of slots that is exceeded with at most this probability, by Markov."""
        n, b, q = self.num_rounds, self.min_sep, self.sampling_probability
        p = self.occupation()
        most = self._schema.max_participations

        def log_gap(s: float) -> float:
            """Returns log F̃(e^(−s))."""
            log_f = math.log(q) - s * b
            if q < 1.0:
                log_f -= math.log(-math.expm1(math.log1p(-q) - s))
            return log_f - math.log(p + (1.0 - p) * math.exp(log_f))

        def slots(log_s: float) -> float:
            s = math.exp(log_s)
            return (log_probability - s * (n - 1)) / log_gap(s)

        # Every s gives a number that holds.
        best = optimize.minimize_scalar(
            slots, bounds=(math.log(1e-3 / n), math.log(50.0)), method="bounded"
        )
        return min(most, math.ceil(float(best.fun) * (1.0 + _ROUNDING)))

    def _epsilon_by_slots(self, delta: float) -> float:
        """Bounds epsilon by Poisson-sampled slots."""
        norm = self._sensitivity(1)
        slots = self.most_slots(math.log(_COUNT_SHARE * delta))
        rest = delta * (1.0 - _COUNT_SHARE)
        if slots == self._schema.max_participations:
            rest = delta
        run = dp_fedavg.DpFedAvg(self.occupation(), self.noise_multiplier / norm, max(1, slots))
        return run.epsilon(rest)
