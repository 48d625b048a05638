"""The privacy plan of fine-tuning by sampling, ELS or ULS, and its promise.

Both add independent Gaussian noise to a sum of clipped gradients and divide by a constant,
the *expected* number of what was clipped: never by how many were sampled, which depends
on the data and on the secret sample. The guarantee is that of mixtures of Gaussians
(`accounting.mixture_of_gaussians`), for one user, and tight for both.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from tff_dpftrl import validation
from tff_dpftrl.accounting import (
    budget_shares,
    calibrate,
    display,
    mixture_of_gaussians,
    parts,
    statement,
)
from tff_dpftrl.accounting import facts as facts_lib
from tff_dpftrl.accounting import statement_sentences as sentences
from tff_dpftrl.finetuning import example_sampling
from tff_dpftrl.finetuning import group_size as group_sizes
from tff_dpftrl.mechanisms import strategy

EXAMPLE, USER = "example", "user"
"""Unit of sampling: examples of a pool (ELS), or users (ULS)."""

_NO_FACTS = facts_lib.Facts()
_NAMES = {EXAMPLE: "example-level sampling (ELS)", USER: "user-level sampling (ULS)"}


@dataclasses.dataclass(frozen=True)
class Plan:
    """The privacy of one run. Build it with `make_plan`; all of it is plain values.

    Attributes:
      sampling: `EXAMPLE` or `USER`.
      group_size: G, the largest number of examples of one user in the pool (ELS) or in a
        step (ULS).
      num_users: Number of users, N: of all owners, where rows have several.
      num_units: Number of units to sample from: the size of the pool (ELS) or N (ULS).
      units_are_declared: Whether `num_units` was declared, not counted on the data.
      expected_units: B examples (ELS) or M users (ULS), expected in a step: the constant
        that the noised sum is divided by.
      num_steps: Number of steps, T.
      noise_multiplier: σ, the noise's standard deviation per unit of the clip norm.
      delta: δ of the (ε, δ) statement.
      num_examples: Number n of all examples of all users, if δ is the default n^−1.1; else None.
      group_size_source: Source of G, a phrase.
      group_size_epsilon: Cost in ε of choosing G, part of `epsilon`.
      group_size_is_exact: Whether G was computed from the users' data without noise.
      users_scale: 1, or how many times as many users the noise was calibrated for: the
        paper's comparisons "scale the users in the accounting". `epsilon` is that of the
        users there are, whatever this is; see `what_if`.
      others: All else that the run releases about the same users, part of `epsilon`.
    """

    sampling: str
    group_size: int
    num_users: int
    num_units: int
    units_are_declared: bool
    expected_units: float
    num_steps: int
    noise_multiplier: float
    delta: float
    num_examples: int | None
    group_size_source: str
    group_size_epsilon: float
    group_size_is_exact: bool
    users_scale: float = 1.0
    others: tuple[parts.Part, ...] = ()

    def __post_init__(self):
        if not isinstance(self.others, tuple):  # As `dataclasses.asdict` wrote them.
            object.__setattr__(self, "others", parts.from_json(self.others))

    @property
    def sampling_probability(self) -> float:
        """P of an example of the pool (ELS) or q of a user (ULS), in one step."""
        return self.expected_units / self.num_units

    @property
    def rows_per_unit(self) -> int:
        """The most examples whose mean gradient is clipped as one: 1 (ELS) or G (ULS)."""
        return 1 if self.sampling == EXAMPLE else self.group_size

    @property
    def noise_of_average(self) -> float:
        """σ / B or σ / M: standard deviation of a step's noise for a clip norm of 1."""
        return self.noise_multiplier / self.expected_units

    @property
    def epsilon(self) -> float:
        """ε of the whole run at `delta`, the choice of G included; inf without noise."""
        return self.epsilon_after(self.num_steps)

    def epsilon_after(self, num_steps: int) -> float:
        """Computes ε at `delta` of the first steps, the choice of G included; inf without noise."""
        num_steps = validation.integer("num_steps", num_steps, minimum=0)
        if num_steps > self.num_steps:
            raise validation.UsageError(
                f"num_steps={num_steps} exceeds those planned, {self.num_steps}."
            )
        return self.group_size_epsilon + _epsilon(self.rounds(num_steps), self.others, self.delta)

    def rounds(self, num_steps: int) -> parts.SampledRounds:
        """Returns the first steps, without all else that the run releases."""
        return parts.SampledRounds(
            self.noise_multiplier, self.sampling_probability, num_steps, self._rows
        )

    @property
    def parts(self) -> tuple[parts.Part, ...]:
        """All that is released besides the weights, the choice of G included."""
        if not self.group_size_epsilon:
            return self.others
        says = f"{self.group_size_source} (ε without a δ)"
        return *self.others, parts.Part(parts.MEDIAN, says, epsilon=self.group_size_epsilon)

    def with_figures(self, share: float) -> Plan:
        """Returns the plan with figures of each step, for a share in (0, 1) of the same budget."""
        figures = budget_shares.figures(self.rounds(self.num_steps), share)
        noise = self.noise_multiplier * budget_shares.growth(share)
        return dataclasses.replace(self, noise_multiplier=noise, others=(*self.others, figures))

    def _profile(self, num_steps: int) -> tuple[tuple[float, float], ...]:
        """Returns points (ε, δ) of the first steps, the choice of G included."""
        if self.noise_multiplier == 0.0 or num_steps == 0:
            return ()
        return parts.profile(self.rounds(num_steps), self.parts, self.epsilon_after(num_steps))

    @property
    def _rows(self) -> int:
        """Largest number of units of one user."""
        return self.group_size if self.sampling == EXAMPLE else 1

    @property
    def _examples(self) -> str:
        return strategy.counted(self.group_size, "example")

    def contributions(
        self, users: example_sampling.Users, seed: int
    ) -> example_sampling.Contributions:
        """Samples the contributions to each step, for the users that the plan was made for.

        `seed` must be secret and have at least 128 random bits. Keep it with the run's other
        secrets (`runs.cohort_seed`).
        """
        make = (
            example_sampling.ExampleSampling
            if self.sampling == EXAMPLE
            else example_sampling.UserSampling
        )
        counted = _count_units(users, self.sampling, self.group_size)
        if counted != self.num_units and not self.units_are_declared:
            raise validation.UsageError(
                f"users have {counted} {_units(self.sampling)}, but the plan was made for "
                f"{self.num_units}: the data has changed; make a new plan."
            )
        return make(
            users,
            group_size=self.group_size,
            sampling_probability=self.sampling_probability,
            num_steps=self.num_steps,
            seed=seed,
        )

    def relative_noise(self, gradient_norm: group_sizes.GradientNorms) -> float:
        """Returns L · σ / B or L(G) · σ / M: noise of the average, gradients clipped to their norm.

        It orders the losses of fine-tuning runs of one length and compute budget (own
        measurements); ELS clips single examples, hence L(1). It has the unit of the gradient's norm
        as given.
        """
        return gradient_norm(self.rows_per_unit) * self.noise_of_average

    def expected_gradients(self, users: example_sampling.Users) -> float:
        """Gradients expected in a step: p · |D_sub|, or q · Σ min(n_u, G)."""
        return self.sampling_probability * users.pool_size(self.group_size)

    def share_of_examples_used(self, users: example_sampling.Users) -> float:
        """Returns the expected share of all examples that are in at least one step."""
        sizes = users.num_examples
        taken = np.minimum(sizes, self.group_size)
        if self.sampling == EXAMPLE:
            used = taken * -math.expm1(self.num_steps * _log1m(self.sampling_probability))
        else:
            in_step = self.sampling_probability * taken / sizes
            with np.errstate(divide="ignore"):
                used = sizes * -np.expm1(self.num_steps * np.log1p(-in_step))
        return float(used.sum() / sizes.sum())

    def what_if(self) -> WhatIf | None:
        """Returns what σ was calibrated for if `users_scale` is not 1; else None."""
        if self.users_scale == 1.0:
            return None
        delta = self.delta
        if self.num_examples is not None:
            delta = default_delta(self.users_scale * self.num_examples)
        rounds = dataclasses.replace(
            self.rounds(self.num_steps),
            sampling_probability=self.sampling_probability / self.users_scale,
        )
        epsilon = _epsilon(rounds, (), delta)
        return WhatIf(self.users_scale, self.users_scale * self.num_users, epsilon, delta)

    def describe(self) -> list[str]:
        """Returns sampling, group size and noise in a few lines for people."""
        unit = _units(self.sampling)
        of_user = "in the pool" if self.sampling == EXAMPLE else "in a step, drawn anew each time"
        spent = (
            "no finite ε" if math.isinf(self.epsilon) else f"ε = {display.round_up(self.epsilon)}"
        )
        lines = [
            f"Sampling: {_NAMES[self.sampling]}; each of {self.num_units} {unit} is in a step "
            f"with probability {display.round_up(self.sampling_probability)}, in secret; "
            f"{self.num_steps} steps.",
            f"Group size: at most {self._examples} of a user {of_user}; {self.group_size_source}.",
            f"Noise: σ = {self.noise_multiplier:.4g}, {self.noise_of_average:.4g} of the clip norm "
            f"in an average over {self.expected_units:g} {unit}; {spent} at δ = "
            f"{display.delta(self.delta, 3)}.",
        ]
        hypothetical = self.what_if()
        return lines + ([hypothetical.sentence] if hypothetical else [])

    def statement(
        self,
        facts: facts_lib.Facts = _NO_FACTS,
        *,
        steps_done: int | None = None,
        seed_is_known: bool = False,
    ) -> statement.PrivacyStatement:
        """Makes the run's privacy statement; no guarantee without noise, or if the seed is known.

        `facts` are those that the plan does not have, such as the clip norm. All planned steps are
        charged if `steps_done` is None. `seed_is_known` says that the user gave the seed of noise
        or sampling.
        """
        charged = self.num_steps if steps_done is None else steps_done
        hypothetical = self.what_if()
        claim = statement.SampledClaim(
            mechanism=_NAMES[self.sampling],
            epsilon=self.epsilon_after(charged),
            delta=self.delta,
            accounting=self._accounting(),
            sampling=self._sampling_sentence(),
            seed_is_known=seed_is_known,
            profile=() if seed_is_known else self._profile(charged),
            others=self.parts if self.others else (),
            apart=() if self.others or not self.group_size_epsilon else (parts.MEDIAN,),
            weights=self.rounds(charged),
        )
        return statement.sampled_statement(
            claim,
            dataclasses.replace(
                facts.with_plan(
                    {
                        "sampling": self.sampling,
                        "group_size": self.group_size,
                        "sampling_probability": self.sampling_probability,
                        "num_units": self.num_units,
                        "denominator": self.expected_units,
                        "noise_multiplier": self.noise_multiplier,
                        "noise_of_average": self.noise_of_average,
                        "num_steps_charged": charged,
                        "group_size_epsilon": self.group_size_epsilon,
                    },
                    headline_caveats=[hypothetical.sentence] if hypothetical else [],
                ),
                not_covered=(*self._not_covered(), *facts.not_covered),
                caveats=(*self._caveats(facts), *facts.caveats),
            ),
            num_users=self.num_users,
            data_in_one_place=True,
        )

    def _accounting(self) -> str:
        if self.sampling == EXAMPLE:
            text = (
                "Privacy loss distribution of the mixture of Gaussians N(j, σ²), j ~ "
                f"Binomial({self.group_size}, p), which is tight for one user with at most "
                f"{self._examples} in the pool (Charles et al. 2024, Theorem 3), "
                "composed over the steps."
            )
        else:
            text = (
                "Privacy loss distribution of the Poisson-sampled Gaussian mechanism (Charles et "
                "al. 2024, Theorem 2), composed over the steps."
            )
        if self.group_size_epsilon:
            text += f" Added to it is ε = {self.group_size_epsilon:g} for the choice of group size."
        return text

    def _sampling_sentence(self) -> str:
        chance = (
            f"with probability {display.round_up(self.sampling_probability, 6)}, independently of "
            "all else"
        )
        if self.sampling == EXAMPLE:
            return (
                f"At most {self._examples} of each user were put into a pool, once, at random; "
                f"every example of the pool is in a step {chance}."
            )
        return (
            f"Every user is in a step {chance}, with at most {self._examples} drawn at random in "
            "every step; their mean gradient is clipped."
        )

    def _not_covered(self) -> tuple[str, ...]:
        if not self.group_size_is_exact:
            return ()
        return (group_sizes.not_covered(self.group_size, self.group_size_source),)

    def _caveats(self, facts: facts_lib.Facts) -> tuple[str, ...]:
        counted = []
        if self.units_are_declared:
            counted.append(f"The number of users, {self.num_users}, is stated as it was counted.")
        else:
            what = "The size of the pool" if self.sampling == EXAMPLE else "The number of users"
            counted.append(counted_caveat(what, self.num_units, "; declare it to avoid this"))
        if self.num_examples is not None:
            counted.append(default_delta_caveat(self.num_examples))
        if sentences.NOISE_GENERATOR in facts.parameters and self.group_size_epsilon:
            if not self.others:  # With them it is said anyway.
                counted.append(sentences.OTHER_GENERATORS)
        return tuple(counted)


@dataclasses.dataclass(frozen=True)
class WhatIf:
    """Hypothetical promise of a run with `users_scale` times the users: no guarantee for anybody.

    Each user has as many examples as now. ε is that of the hypothetical run at its `delta`.
    """

    users_scale: float
    num_users: float
    epsilon: float
    delta: float

    @property
    def sentence(self) -> str:
        """Sentence about the hypothetical run, for caveats."""
        return (
            f"What if: with {self.users_scale:g} times as many users, {self.num_users:g}, and the "
            f"same expected batch, the noise would give ε = {display.round_up(self.epsilon)} at "
            f"δ = {display.delta(self.delta, 3)}. This is a comparison, not a guarantee for "
            "anybody in this data."
        )


def check_one_given(target_epsilon: float | None, noise_multiplier: float | None) -> None:
    """Refuses both a target and a noise multiplier, and neither."""
    if (target_epsilon is None) == (noise_multiplier is None):
        raise validation.UsageError(
            f"Give exactly one of target_epsilon={target_epsilon!r} and "
            f"noise_multiplier={noise_multiplier!r}."
        )


def default_delta(num_examples: float) -> float:
    """Returns δ = n^−1.1, the paper's; n counts all examples, before any are left out."""
    remedy = "With a single example, choose a delta."
    return validation.number("num_examples", num_examples, above=1, remedy=remedy) ** -1.1


def counted_caveat(what: str, number: int, remedy: str = "") -> str:
    """Returns a statement's sentence on a number that the sampling probability rests on."""
    return (
        f"{what}, {number}, determines the sampling probability. It was counted on the data and "
        f"is treated as public{remedy}."
    )


def default_delta_caveat(num_examples: int) -> str:
    """Returns a statement's sentence on where `default_delta` comes from."""
    return (
        f"δ is n^-1.1 for the {num_examples} examples of all users, a number that is treated as "
        "public."
    )


def make_plan(
    users: example_sampling.Users,
    *,
    sampling: str,
    group_size: int | group_sizes.Choice,
    expected_units: float,
    num_steps: int,
    target_epsilon: float | None = None,
    noise_multiplier: float | None = None,
    delta: float | None = None,
    declared_units: int | None = None,
    users_scale: float = 1.0,
    others: tuple[parts.Part, ...] = (),
) -> Plan:
    """Makes the plan of a run that meets a target, or adds a given noise.

    Args:
      users: The users.
      sampling: `EXAMPLE` (ELS) or `USER` (ULS).
      group_size: G, declared; or a choice of `group_size`, whose ε is composed.
      expected_units: B, examples expected in a step (ELS), or M, users (ULS).
      num_steps: Number of steps, T.
      target_epsilon: ε that choice, run and `others` together may spend; None if `noise_multiplier`
        is given.
      noise_multiplier: σ, 0 for no noise and no guarantee; None if `target_epsilon` is given.
      delta: δ of the (ε, δ) statement; `default_delta` of the users' examples if None.
      declared_units: A size of the pool (ELS) or a number of users (ULS) to compute the
        probability from, fixed without a look at the data; counted on the data if None.
      users_scale: Factor of the number of users that the noise is calibrated for, at least 1;
        with `target_epsilon` only.
      others: All else that the run releases about the same users.

    Returns:
      The plan; its ε was evaluated and is not above the target (unless `users_scale`
      is not 1: then that of `Plan.what_if`).

    Raises:
      ValueError: If an argument is out of range, or the target cannot be met.
    """
    if sampling not in _NAMES:
        raise validation.UsageError(f"sampling must be {EXAMPLE!r} or {USER!r}, got {sampling!r}.")
    choice = (
        group_size
        if isinstance(group_size, group_sizes.Choice)
        else group_sizes.Choice(example_sampling.check_group_size(group_size))
    )
    expected_units = validation.positive("expected_units", expected_units)
    num_steps = validation.integer("num_steps", num_steps, minimum=1)
    users_scale = validation.number("users_scale", users_scale, at_least=1)
    check_one_given(target_epsilon, noise_multiplier)
    if users_scale != 1.0 and target_epsilon is None:
        raise validation.UsageError(
            f"users_scale={users_scale:g} needs a target_epsilon: give one."
        )
    num_units = _count_units(users, sampling, choice.group_size)
    if declared_units is not None:
        num_units = validation.integer("declared_units", declared_units, minimum=1)
    if expected_units > num_units:
        if sampling == EXAMPLE:  # The size of the pool tells of the users more than ε covers.
            raise validation.UsageError(
                f"expected_units={expected_units:g} exceeds the number of examples in the pool: "
                "lower it or raise group_size."
            )
        raise validation.UsageError(
            f"expected_units={expected_units:g} exceeds the {num_units} users that there are to "
            "sample from: lower it."
        )
    num_examples, scaled = None, delta
    if delta is None or scaled is None:
        num_examples = int(users.num_examples.sum())
        delta, scaled = default_delta(num_examples), default_delta(users_scale * num_examples)
    delta = validation.delta(delta)
    if noise_multiplier is None:
        target_epsilon = validation.positive("target_epsilon", target_epsilon)
        left = target_epsilon - choice.epsilon
        if left <= 0.0:
            raise validation.UsageError(
                f"target_epsilon={target_epsilon:g} is not above {choice.epsilon:g}, which the "
                "choice of the group size costs: raise it, or spend less on the choice."
            )
        probability = expected_units / num_units / users_scale
        rows = choice.group_size if sampling == EXAMPLE else 1
        noise_multiplier = mixture_of_gaussians.calibrate_els(
            sampling_probability=probability,
            group_size=rows,
            num_steps=num_steps,
            target_epsilon=left,
            delta=scaled,
        )
        if others:
            noise_multiplier = calibrate.noise_beside(
                lambda noise: parts.SampledRounds(noise, probability, num_steps, rows),
                others,
                target_epsilon=left,
                delta=scaled,
                initial=noise_multiplier,
            )
    return Plan(
        sampling=sampling,
        group_size=choice.group_size,
        num_users=len(users),
        num_units=num_units,
        units_are_declared=declared_units is not None,
        expected_units=expected_units,
        num_steps=num_steps,
        noise_multiplier=validation.noise_multiplier(noise_multiplier),
        delta=delta,
        num_examples=num_examples,
        group_size_source=choice.source,
        group_size_epsilon=choice.epsilon,
        group_size_is_exact=choice.looked_at_users,
        users_scale=users_scale,
        others=others,
    )


def noise_multiplier_of_cohort(
    num_users: int, *, num_steps: int, target_epsilon: float, delta: float
) -> functools.partial[float]:
    """Returns σ(M) of ULS for `group_size.estimate_and_double`: a function of the cohort size."""
    return functools.partial(
        _noise_of_cohort,
        num_users,
        validation.integer("num_steps", num_steps, minimum=1),
        validation.positive("target_epsilon", target_epsilon),
        validation.delta(delta),
    )


def _noise_of_cohort(
    num_users: int, num_steps: int, target_epsilon: float, delta: float, cohort_size: float
) -> float:
    if cohort_size > num_users:
        raise validation.UsageError(
            f"cohort_size={cohort_size:g} exceeds num_users={num_users}: lower it."
        )
    return mixture_of_gaussians.calibrate_els(
        sampling_probability=cohort_size / num_users,
        group_size=1,
        num_steps=num_steps,
        target_epsilon=target_epsilon,
        delta=delta,
    )


def choices(
    users: example_sampling.Users,
    *,
    compute_budget: int,
    num_steps: int,
    target_epsilon: float,
    delta: float | None = None,
    example_group_sizes: Sequence[int] | None = None,
    smallest_cohort: int = group_sizes.SMALLEST_COHORT,
) -> list[Plan]:
    """Returns every way to spend a compute budget: ELS for several group sizes, ULS for all splits.

    The budget is the number of gradients in a step: B for ELS, G · M for ULS. Each plan meets the
    target. By default δ is `default_delta`, and the group sizes of ELS are powers of two from a
    quarter of the users' median to four times it. ELS comes first, each with growing group size.
    Plans with a pool or a population smaller than what a step expects are left out.
    """
    compute_budget = validation.integer("compute_budget", compute_budget, minimum=1)
    if example_group_sizes is None:
        median = group_sizes.median_choice(users.num_examples).group_size
        factors = (0.25, 0.5, 1, 2, 4)
        example_group_sizes = [int(median * f) for f in factors if median * f >= 1]
    kwargs = {"num_steps": num_steps, "target_epsilon": target_epsilon, "delta": delta}
    pairs = group_sizes.splits(
        compute_budget, num_users=len(users), smallest_cohort=smallest_cohort
    )
    plans = [
        make_plan(users, sampling=EXAMPLE, group_size=g, expected_units=compute_budget, **kwargs)
        for g in example_group_sizes
        if users.pool_size(example_sampling.check_group_size(g)) >= compute_budget
    ]
    plans += [
        make_plan(users, sampling=USER, group_size=g, expected_units=m, **kwargs) for g, m in pairs
    ]
    if not plans:
        raise validation.UsageError(
            f"compute_budget={compute_budget} exceeds what {len(users)} users with "
            f"{int(users.num_examples.sum())} examples can give in a step: lower it."
        )
    return plans


def _count_units(users: example_sampling.Users, sampling: str, group_size: int) -> int:
    return users.pool_size(group_size) if sampling == EXAMPLE else len(users)


def _units(sampling: str) -> str:
    return "examples" if sampling == EXAMPLE else "users"


def _log1m(probability: float) -> float:
    return math.log1p(-probability) if probability < 1.0 else -math.inf


@functools.lru_cache(maxsize=1024)
def _epsilon(rounds: parts.SampledRounds, others: tuple[parts.Part, ...], delta: float) -> float:
    return parts.compose(rounds, others, delta)
