"""How many examples of one user to use: medians, Estimate-and-Double, and what they cost.

For ELS the median of the users' sizes is near the best group size (Charles et al. 2024,
section 6.1). For ULS a compute budget of B gradients a step can be spent on the group size
G or on the cohort M, with G · M = B; Estimate-and-Double (their Algorithm 3) walks from
(1, 32) upwards and doubles whichever lowers the noise more, relative to the gradient's
norm: L(G) · σ(M) / M, where L(G) is the typical norm of a mean of G gradients of one user
and σ(M) the noise multiplier that the target needs with M of N users in a step.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Sequence

import numpy as np

from tff_dpftrl import validation
from tff_dpftrl.finetuning import example_sampling

SMALLEST_COHORT = 32
"""The cohort that Estimate-and-Double begins with, as in the paper."""

_PROBED = 128  # Users of `probe`.

COMPUTE_BUDGET = 256
"""The gradients of a step where nothing else is given."""

_MEDIANS = tuple(2**i for i in range(17))  # Group sizes that a private median is chosen among.
_FAR = 0.1  # Probability of a private median outside the users' middle half that is warned of.


@dataclasses.dataclass(frozen=True)
class Choice:
    """A group size, and what statements must report of its choice.

    Attributes:
      group_size: Group size G, a number of examples.
      source: Source of the group size, a phrase like "declared before the run".
      epsilon: Cost of the choice in pure differential privacy (δ = 0); 0 if no data was looked
        at, or if the choice is not covered.
      looked_at_users: Whether it was computed from the protected users' data without
        noise: the guarantee does not cover it then.
    """

    group_size: int
    source: str = "declared before the run"
    epsilon: float = 0.0
    looked_at_users: bool = False

    def __post_init__(self):
        example_sampling.check_group_size(self.group_size)
        validation.number("epsilon", self.epsilon, at_least=0)


def not_covered(group_size: int, source: str) -> str:
    """Returns a statement's sentence on a group size that was chosen by looking at the users."""
    return (
        f"Choice of the group size, {group_size}: {source}, computed on the training users without "
        "noise."
    )


def median_choice(sizes: Sequence[int] | np.ndarray) -> Choice:
    """Returns the power of two nearest to the median of the users' numbers of examples.

    The paper takes 2⁷ for a median of 183 and 2⁴ for 16. Of two powers as near it is the smaller.
    The median is exact, that is not private; `private_median_choice` costs next to nothing.
    """
    median = float(np.median(example_sampling.of_sizes(sizes).num_examples))
    return Choice(
        min(_powers_of_two(2.0 * median), key=lambda power: (abs(power - median), power)),
        f"the power of two nearest to the median, {median:g}, of the users' numbers of examples",
        looked_at_users=True,
    )


def private_median_choice(
    sizes: Sequence[int] | np.ndarray,
    *,
    epsilon: float,
    seed: int,
    candidates: Sequence[int] | None = None,
) -> Choice:
    """Returns a median of the users' numbers of examples by the exponential mechanism.

    g has the probability ∝ exp(ε · u(g) / 2) with u(g) = −max(#{n_u < g} − N/2, N/2 − #{n_u ≤ g},
    0), each n_u being rounded to the nearest candidate first: where all users have 27 examples, 32
    has the utility 0, and without rounding no candidate had. The choice is ε-differentially private
    for neighbours that differ in one user's data, whatever takes its place: another number n_u
    moves u by at most 1, and where the user is there or not, N not being taken for public, by 1/2
    only. The statements' neighbours, whose one user counts for zero, are among them. Own, not the
    paper's.

    `sizes` has n_u of each user whose data is there. Compose ε with that of the run, as
    `plan.make_plan` does. `seed` must be secret and have at least 128 random bits; the same seed
    makes the same choice. `candidates` must be fixed without a look at the data; by default they
    are the powers of two up to 2¹⁶.
    """
    epsilon = validation.positive("epsilon", epsilon)
    seed = validation.integer("seed", seed, minimum=0)
    chances = median_probabilities(sizes, epsilon=epsilon, candidates=candidates)
    digest = hashlib.shake_256(f"tff_dpftrl/finetuning/median/{seed}".encode()).digest(8)
    uniform = int.from_bytes(digest, "little") / 2**64
    totals = np.cumsum(list(chances.values()))
    place = int(np.searchsorted(totals / totals[-1], uniform, side="right"))
    return Choice(
        list(chances)[min(place, len(chances) - 1)],
        f"a private median of the users' numbers of examples, ε = {epsilon:g} "
        "(one user's number replaced by any other, or left out)",
        epsilon=epsilon,
    )


def median_probabilities(
    sizes: Sequence[int] | np.ndarray, *, epsilon: float, candidates: Sequence[int] | None = None
) -> dict[int, float]:
    """Returns how likely `private_median_choice` chooses each group size; secret."""
    if candidates is None:
        candidates = _MEDIANS
    if not len(candidates):
        raise validation.UsageError("candidates must have at least one group size, got none.")
    options = np.array([example_sampling.check_group_size(one) for one in candidates])
    ordered = np.sort(options)
    nearest = np.searchsorted(
        (ordered[1:] + ordered[:-1]) / 2.0, example_sampling.of_sizes(sizes).num_examples
    )
    counts = np.sort(ordered[nearest])
    half = len(counts) / 2.0
    below = np.searchsorted(counts, options, side="left") - half
    above = half - np.searchsorted(counts, options, side="right")
    utility = -np.maximum(np.maximum(below, above), 0.0)
    weights = np.exp(epsilon / 2.0 * (utility - utility.max()))
    return dict(zip(options.tolist(), (weights / weights.sum()).tolist(), strict=True))


def far_median_bound(num_users: int, epsilon: float) -> float:
    """Bounds the probability that `private_median_choice` leaves the middle half of the users.

    It does if fewer than a quarter of the sizes, rounded to the candidates, are at most the choice,
    or fewer than a quarter are at least the choice: its utility is then below −N/4. The rounded
    sizes' own median is a candidate of utility 0. Each of the other K − 1 candidates, if it is
    outside, has at most x = exp(−ε N / 8) times the median's probability. Together they have at
    most (K − 1) x / (1 + (K − 1) x). It is the utility theorem of the exponential mechanism (Dwork
    and Roth 2014, theorem 3.11) before it is simplified.

    The bound is for the default candidates, and holds whatever the users' sizes are. Users who are
    all at the ends, a quarter of them at one, come near it.
    """
    ratio = (len(_MEDIANS) - 1) * math.exp(-epsilon * num_users / 8.0)
    return ratio / (1.0 + ratio)


def median_warning(num_users: int, epsilon: float) -> str | None:
    """Returns a warning if `far_median_bound` is above a tenth; it does not depend on the sizes."""
    bound = far_median_bound(num_users, epsilon)
    if bound <= _FAR:
        return None
    enough = 8.0 / num_users * math.log((len(_MEDIANS) - 1) * (1.0 - _FAR) / _FAR)
    enough = math.ceil(100 * enough) / 100
    # More than 1 would cost more than a group size is worth.
    other = f", or a group_size_epsilon from {enough:g} on" if enough <= 1.0 else ""
    return (
        f"Warning: with group_size_epsilon={epsilon:g} and so few users, the group size may be far "
        "from the users' median: with a probability of up to "
        f"{math.ceil(100 * bound)} % it is outside the middle half of their numbers of examples, "
        f"rounded to powers of two. Give group_size{other}."
    )


def probe(
    users: example_sampling.Users, *, largest_group: int, seed: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Draws the users whose gradients L(G) is estimated from, for all group sizes at once.

    The users should be public or held out, so that L(G) costs no privacy; else it is not covered.
    Returns indices of 128 users, as in the paper, or of all if there are fewer: int64, increasing.
    And for each user its examples in random order, at most `largest_group`. The first G of them are
    the sample for G: samples are nested, so that running means of gradients give all of L in one
    pass.
    """
    largest_group = example_sampling.check_group_size(largest_group)
    seed = validation.integer("seed", seed, minimum=0)
    chosen = example_sampling.random_examples(f"probe/{seed}", "", len(users), _PROBED)
    return chosen, [
        example_sampling.random_order(
            f"probe rows/{seed}", users.ids[user], int(users.num_examples[user]), largest_group
        )
        for user in chosen.tolist()
    ]


@dataclasses.dataclass(frozen=True)
class GradientNorms:
    """L(G) > 0, the typical norm of the mean of at most G gradients of a user, for some G."""

    group_sizes: tuple[int, ...]
    norms: tuple[float, ...]

    def __post_init__(self):
        if len(self.group_sizes) != len(self.norms) or not self.norms:
            raise validation.UsageError(
                f"norms must have one entry for each of {len(self.group_sizes)} group_sizes, at "
                f"least one, got {len(self.norms)}."
            )
        for size, norm in zip(self.group_sizes, self.norms, strict=True):
            example_sampling.check_group_size(size)
            validation.positive(f"norms at group size {size}", norm)
        if any(a >= b for a, b in zip(self.group_sizes, self.group_sizes[1:], strict=False)):
            raise validation.UsageError(
                f"group_sizes must be increasing, got {self.group_sizes!r}."
            )

    @classmethod
    def of_users(cls, group_sizes: Sequence[int] | np.ndarray, norms: np.ndarray) -> GradientNorms:
        """Takes the medians over users, as Algorithm 3 does; each must be above 0.

        `norms` has ‖mean gradient of at most G examples‖ of each user at the pre-trained weights,
        shape [users, group sizes]. Group sizes increase.
        """
        norms = np.asarray(norms, np.float64)
        if norms.ndim != 2 or norms.shape[1] != len(group_sizes) or not len(norms):
            raise validation.UsageError(
                f"norms must have shape [users, {len(group_sizes)}], got {norms.shape}."
            )
        return cls(tuple(group_sizes), tuple(np.median(norms, axis=0).tolist()))

    def __call__(self, group_size: int) -> float:
        """Returns L(G), between known group sizes on a line of logarithms; refuses others."""
        first, last = self.group_sizes[0], self.group_sizes[-1]
        if not first <= group_size <= last:
            raise validation.UsageError(
                f"group_size={group_size} is not between {first} and {last}, for which gradient "
                "norms are known: estimate them for larger groups, or lower the compute budget."
            )
        return math.exp(
            np.interp(math.log(group_size), np.log(self.group_sizes), np.log(self.norms))
        )


@dataclasses.dataclass(frozen=True)
class Doubling:
    """Step of Estimate-and-Double, from a group size G and a cohort size M.

    Attributes:
      tau_group: τ_G, the factor that twice the group size has on the gradient's norm.
      tau_cohort: τ_M, the factor that twice the cohort has on the noise; inf if there are not so
        many users.
    """

    group_size: int
    cohort_size: int
    tau_group: float
    tau_cohort: float


@dataclasses.dataclass(frozen=True)
class Split:
    """Split of a compute budget into group size G and cohort size M.

    Attributes:
      noise: L(G) · σ(M) / M, the noise of the average for an L(G) of the gradient.
      doublings: Steps of Estimate-and-Double; empty for other ways to choose.
    """

    group_size: int
    cohort_size: int
    noise: float
    doublings: tuple[Doubling, ...] = ()

    def choice(self, *, norms_of: str, looked_at_users: bool) -> Choice:
        """Returns the group size, with what a statement must say of where it comes from.

        `norms_of` says whose gradient norms L(G) are, like "128 users of another corpus". If those
        are protected users (`looked_at_users`), L(G) is computed without noise, and the guarantee
        does not cover the choice.
        """
        how = "Estimate-and-Double" if self.doublings else "the least noise for the gradient's norm"
        return Choice(
            self.group_size,
            f"by {how}, with gradient norms of {norms_of}",
            looked_at_users=looked_at_users,
        )


def splits(
    compute_budget: int, *, num_users: int | None = None, smallest_cohort: int = SMALLEST_COHORT
) -> list[tuple[int, int]]:
    """Returns all (G, M), with growing G, that a doubling of either leads to; G · M is the budget.

    G is a power of two. What exceeds `smallest_cohort` times a power of two is left unspent. M is
    at most `num_users`, if that is known.
    """
    doublings = _num_doublings(compute_budget, smallest_cohort, num_users)
    pairs = [(2**i, smallest_cohort * 2 ** (doublings - i)) for i in range(doublings + 1)]
    return [(g, m) for g, m in pairs if num_users is None or m <= num_users]


def estimate_and_double(
    gradient_norm: Callable[[int], float],
    noise_multiplier: Callable[[int], float],
    *,
    compute_budget: int,
    num_users: int | None = None,
    smallest_cohort: int = SMALLEST_COHORT,
    as_printed: bool = False,
) -> Split:
    """Chooses group size and cohort for ULS: Algorithm 3 of the paper, corrected.

    Twice the group size multiplies the typical gradient by τ_G = L(2G) / L(G), and twice the cohort
    the noise of the *average* by τ_M = [σ(2M) / 2M] / [σ(M) / M]; the smaller one is taken. As
    printed in the paper (`as_printed`, for comparison), τ_M is σ(2M) / σ(M): above 1, so that the
    group is always doubled, which contradicts the paper's own results.

    `gradient_norm` is L, a function of G. `noise_multiplier` is σ, a function of M that is
    calibrated for the target with q = M / N. `compute_budget` is B, the number of gradients in a
    step. It begins with G = 1 and the smallest cohort. The split has every step.
    """
    group, cohort, doublings = 1, smallest_cohort, []
    for _ in range(_num_doublings(compute_budget, smallest_cohort, num_users)):
        tau_group = gradient_norm(2 * group) / gradient_norm(group)
        tau_cohort = math.inf
        if num_users is None or 2 * cohort <= num_users:
            tau_cohort = noise_multiplier(2 * cohort) / noise_multiplier(cohort)
            tau_cohort *= 1.0 if as_printed else 0.5
        doublings.append(Doubling(group, cohort, tau_group, tau_cohort))
        if tau_group < tau_cohort:
            group *= 2
        else:
            cohort *= 2
    noise = gradient_norm(group) * noise_multiplier(cohort) / cohort
    return Split(group, cohort, noise, tuple(doublings))


def best_split(
    gradient_norm: Callable[[int], float],
    noise_multiplier: Callable[[int], float],
    *,
    compute_budget: int,
    num_users: int | None = None,
    smallest_cohort: int = SMALLEST_COHORT,
) -> Split:
    """Returns the split with the least L(G) · σ(M) / M of all; see `estimate_and_double`."""
    options = splits(compute_budget, num_users=num_users, smallest_cohort=smallest_cohort)
    return min(
        (Split(g, m, gradient_norm(g) * noise_multiplier(m) / m) for g, m in options),
        key=lambda split: split.noise,
    )


def _num_doublings(compute_budget: int, smallest_cohort: int, num_users: int | None) -> int:
    smallest_cohort = validation.integer("smallest_cohort", smallest_cohort, minimum=1)
    compute_budget = validation.integer("compute_budget", compute_budget, minimum=1)
    if compute_budget < smallest_cohort:
        raise validation.UsageError(
            f"compute_budget={compute_budget} is smaller than the smallest cohort, "
            f"{smallest_cohort} users with one example each: raise it, or lower smallest_cohort."
        )
    if num_users is not None and smallest_cohort > num_users:
        raise validation.UsageError(
            f"smallest_cohort={smallest_cohort} exceeds num_users={num_users}: lower it."
        )
    return (compute_budget // smallest_cohort).bit_length() - 1


def _powers_of_two(largest: float) -> list[int]:
    """Returns 1, 2, 4 and so on, up to `largest`."""
    return [2**i for i in range(max(1, int(largest)).bit_length())]
