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
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.accounting import calibrate, display, mixture_of_gaussians, parts, statement
from tff_dpftrl.accounting import facts as facts_lib
from tff_dpftrl.accounting import statement_sentences as sentences
from tff_dpftrl.finetuning import example_sampling
from tff_dpftrl.finetuning import group_size as group_sizes
from tff_dpftrl.mechanisms import identity, strategy
from tff_dpftrl.participation import observed
from tff_dpftrl.participation import sampling as sampling_lib
from tff_dpftrl.runs import mechanism_plan, participants

EXAMPLE, USER = "example", "user"
"""Unit of sampling: examples of a pool (ELS), or users (ULS)."""

_NAMES = {EXAMPLE: "example-level sampling (ELS)", USER: "user-level sampling (ULS)"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Steps(participants.Sampled):
    """Steps of ELS or ULS: each example of a pool, or each user, is in a step with one probability.

    Attributes:
      group_size: G, the largest number of examples of one user in the pool (ELS) or in a
        step (ULS).
      num_units: Number of units to sample from: the size of the pool (ELS) or N (ULS).
      units_are_declared: Whether `num_units` was declared, not counted on the data.
      num_examples: Number n of all examples of all users, if δ is the default n^−1.1; else None.
      group_size_source: Source of G, a phrase.
      group_size_epsilon: Cost in ε of choosing G.
      group_size_is_exact: Whether G was computed from the users' data without noise.
      users_scale: 1, or how many times as many users the noise was calibrated for: the
        paper's comparisons "scale the users in the accounting". ε is that of the users there are,
        whatever this is; see `Plan.what_if`.
    """

    group_size: int
    num_units: int
    units_are_declared: bool = False
    num_examples: int | None = None
    group_size_source: str
    group_size_epsilon: float = 0.0
    group_size_is_exact: bool = False
    users_scale: float = 1.0

    @property
    def unit(self) -> str:
        """Unit of sampling, `EXAMPLE` or `USER`."""
        return USER if self.pool is None else EXAMPLE

    @property
    def examples(self) -> str:
        """The group size in words."""
        return strategy.counted(self.group_size, "example")

    @property
    def median(self) -> tuple[parts.Part, ...]:
        """The choice of G as a part of the budget, if it cost anything."""
        if not self.group_size_epsilon:
            return ()
        says = f"{self.group_size_source} (ε without a δ)"
        return (parts.Part(parts.MEDIAN, says, epsilon=self.group_size_epsilon),)

    def check(self, users: example_sampling.Users) -> None:
        """Refuses other users than those that were counted."""
        counted = _count_units(users, self.unit, self.group_size)
        if counted != self.num_units and not self.units_are_declared:
            raise validation.UsageError(
                f"users have {counted} {self.unit}s, but the plan was made for {self.num_units}: "
                "the data has changed; make a new plan."
            )

    @override
    def says(self, unit: statement.UnitOfPrivacy) -> dict[str, Any]:
        chance = (
            f"with probability {display.round_up(self.cyclic.sampling_probability, 6)}, "
            "independently of all else"
        )
        if self.unit == EXAMPLE:
            accounting = (
                "Privacy loss distribution of the mixture of Gaussians N(j, σ²), j ~ "
                f"Binomial({self.group_size}, p), which is tight for one user with at most "
                f"{self.examples} in the pool (Charles et al. 2024, Theorem 3), "
                "composed over the steps."
            )
            drawn = (
                f"At most {self.examples} of each user were put into a pool, once, at random; "
                f"every example of the pool is in a step {chance}."
            )
        else:
            accounting = (
                "Privacy loss distribution of the Poisson-sampled Gaussian mechanism (Charles et "
                "al. 2024, Theorem 2), composed over the steps."
            )
            drawn = (
                f"Every user is in a step {chance}, with at most {self.examples} drawn at random "
                "in every step; their mean gradient is clipped."
            )
        if self.group_size_epsilon:
            accounting += (
                f" Added to it is ε = {self.group_size_epsilon:g} for the choice of group size."
            )
        return {"accounting": accounting, "sampling": drawn}


@dataclasses.dataclass(frozen=True)
class Plan(mechanism_plan.MechanismPlan):
    """Plan of a run by ELS or ULS, in the words of fine-tuning. Build it with `make_plan`.

    Its rounds are steps, its clients users. σ is its noise multiplier.
    """

    participation: Steps

    @property
    def sampling(self) -> str:
        """Unit of sampling, `EXAMPLE` or `USER`."""
        return self.participation.unit

    @property
    def group_size(self) -> int:
        """The largest number of examples of one user in the pool (ELS) or in a step (ULS)."""
        return self.participation.group_size

    @property
    def rows_per_unit(self) -> int:
        """The most examples whose mean gradient is clipped as one: 1 (ELS) or G (ULS)."""
        return 1 if self.sampling == EXAMPLE else self.group_size

    @property
    def sampling_probability(self) -> float:
        """P of an example of the pool (ELS) or q of a user (ULS), in one step."""
        return self.participation.cyclic.sampling_probability

    @property
    def noise_of_average(self) -> float:
        """σ / B or σ / M: standard deviation of a step's noise for a clip norm of 1."""
        return self.noise_multiplier / self.clients_per_round

    def of_run(self, *, clip_norm: float, deterministic_seed: int | None) -> Plan:
        """Returns the plan of a run; a `deterministic_seed` is the caller's, of noise and samples.

        The plan of a comparison has a clip norm of 1.
        """
        noise = dataclasses.replace(self.noise, deterministic_seed=deterministic_seed)
        return dataclasses.replace(self, clipping=mechanism_plan.Clipping(clip_norm), noise=noise)

    def of_users(self, num_users: int) -> Plan:
        """Returns the plan for so many users: the owners of all rows, if rows have several."""
        drawn = dataclasses.replace(self.participation, num_clients=num_users)
        return dataclasses.replace(self, participation=drawn)

    def what_if(self) -> Plan | None:
        """Returns the plan that σ was calibrated for if `users_scale` is not 1; else None.

        It is hypothetical, with more users of as many examples, and no guarantee for anybody.
        """
        drawn, scale, delta = self.participation, self.participation.users_scale, self.delta
        if scale == 1.0:
            return None
        if drawn.num_examples is not None:
            delta = default_delta(scale * drawn.num_examples)
        rarer = dataclasses.replace(
            drawn.cyclic, sampling_probability=self.sampling_probability / scale
        )
        more = dataclasses.replace(
            drawn, num_clients=round(scale * drawn.num_clients), sampling=rarer, users_scale=1.0
        )
        return dataclasses.replace(self, participation=more, delta=delta, others=())

    def _what_if(self) -> list[str]:
        """Says what the hypothetical plan promises, for caveats."""
        hypothetical = self.what_if()
        if hypothetical is None:
            return []
        scale = self.participation.users_scale
        return [
            f"What if: with {scale:g} times as many users, {scale * self.num_clients:g}, and the "
            "same expected batch, the noise would give ε = "
            f"{display.round_up(hypothetical.epsilon)} at δ = "
            f"{display.delta(hypothetical.delta, 3)}. This is a comparison, not a guarantee for "
            "anybody in this data."
        ]

    @property
    @override
    def mechanism(self) -> str:
        return _NAMES[self.sampling]

    @override
    def describe(self) -> list[str]:
        drawn, epsilon = self.participation, self._spent(self.num_rounds)
        units = f"{self.sampling}s"
        of_user = "in the pool" if self.sampling == EXAMPLE else "in a step, drawn anew each time"
        spent = "no finite ε" if math.isinf(epsilon) else f"ε = {display.round_up(epsilon)}"
        return [
            f"Sampling: {self.mechanism}; each of {drawn.num_units} {units} is in a step "
            f"with probability {display.round_up(self.sampling_probability)}, in secret; "
            f"{self.num_rounds} steps.",
            f"Group size: at most {drawn.examples} of a user {of_user}; {drawn.group_size_source}.",
            f"Noise: σ = {self.noise_multiplier:.4g}, {self.noise_of_average:.4g} of the clip norm "
            f"in an average over {self.clients_per_round:g} {units}; {spent} at δ = "
            f"{display.delta(self.delta, 3)}.",
            *self._what_if(),
        ]

    @override
    def _of_samples(
        self,
        drawn: participants.Sampled,
        seen: observed.ObservedParticipation,
        facts: facts_lib.Facts,
        charge_all_rounds: bool,
    ) -> statement.PrivacyStatement:
        steps = self.participation
        charged = self.num_rounds if charge_all_rounds else seen.num_rounds
        rounds, epsilon = self._rounds(charged), self._spent(charged)
        beside = any(part not in steps.median for part in self.others)
        has_table = beside or not self.others  # The choice of G alone is said in words.
        told = facts.with_plan(
            {
                "sampling": self.sampling,
                "group_size": self.group_size,
                "sampling_probability": self.sampling_probability,
                "num_units": steps.num_units,
                "denominator": self.clients_per_round,
                "noise_multiplier": self.noise_multiplier,
                "noise_of_average": self.noise_of_average,
                "num_steps_charged": charged,
                "group_size_epsilon": steps.group_size_epsilon,
                "clip_norm": self.clip_norm,
                "num_steps": seen.num_rounds,
            },
            headline_caveats=self._what_if(),
        )
        if steps.group_size_is_exact:
            said = group_sizes.not_covered(self.group_size, steps.group_size_source)
            told = dataclasses.replace(told, not_covered=(said, *told.not_covered))
        caveats = (*self._caveats(facts, has_table), *told.caveats)
        claim = statement.SampledClaim(
            mechanism=self.mechanism,
            epsilon=epsilon,
            delta=self.delta,
            **steps.says(self.unit_of_privacy),
            seed_is_known=self.deterministic_seed is not None,
            profile=self._profile(steps, charged, rounds, epsilon) if self.has_guarantee else (),
            others=self.others if has_table else (),
            apart=() if has_table else tuple(part.name for part in self.others),
            weights=rounds,
        )
        return statement.sampled_statement(
            claim,
            dataclasses.replace(told, caveats=caveats),
            num_users=self.num_clients,
            data_in_one_place=True,
        )

    def _caveats(self, facts: facts_lib.Facts, has_table: bool) -> list[str]:
        steps = self.participation
        if steps.units_are_declared:
            said = [f"The number of users, {self.num_clients}, is stated as it was counted."]
        else:
            what = "The size of the pool" if self.sampling == EXAMPLE else "The number of users"
            said = [counted_caveat(what, steps.num_units, "; declare it to avoid this")]
        if steps.num_examples is not None:
            said.append(default_delta_caveat(steps.num_examples))
        if sentences.NOISE_GENERATOR in facts.parameters and steps.group_size_epsilon:
            if not has_table:  # With one it is said anyway.
                said.append(sentences.OTHER_GENERATORS)
        return said

    @property
    def record(self) -> dict[str, Any]:
        """The plan as runs record it: JSON-compatible values."""
        steps = self.participation
        others = parts.to_json(part for part in self.others if part not in steps.median)
        kept = ("group_size", "num_units", "units_are_declared", "num_examples")
        kept += ("group_size_source", "group_size_epsilon", "group_size_is_exact", "users_scale")
        return {
            "sampling": self.sampling,
            "num_users": self.num_clients,
            "expected_units": self.clients_per_round,
            "num_steps": self.num_rounds,
            "noise_multiplier": self.noise_multiplier,
            "delta": self.delta,
            **{name: getattr(steps, name) for name in kept},
            **({"others": others} if others else {}),
        }

    @override
    def derived(self) -> dict[str, Any]:
        return {"plan": self.record, "clip_norm": self.clip_norm}


def of_record(record: Mapping[str, Any]) -> Plan:
    """Makes a plan of what `Plan.record` returned, with a clip norm of 1."""
    values = dict(record)
    unit, num_users = values.pop("sampling"), values.pop("num_users")
    expected, others = values.pop("expected_units"), parts.from_json(values.pop("others", ()))
    noise, delta = values.pop("noise_multiplier"), values.pop("delta")
    probability = expected / values["num_units"]
    steps = Steps(
        num_users,
        expected,
        sampling_lib.CyclicPoisson(values.pop("num_steps"), 1, probability),
        participants.Pool(values["num_units"], values["group_size"]) if unit == EXAMPLE else None,
        **values,
    )
    return Plan(
        steps,
        mechanism_plan.Clipping(1.0),
        mechanism_plan.Noise(identity.Identity(), noise),
        delta,
        others=(*others, *steps.median),
    )


def resumed(derived: Mapping[str, Any], *, deterministic_seed: int | None) -> Plan:
    """Makes the plan of a run that has begun, from what `Plan.derived` recorded."""
    plan = of_record(derived["plan"])
    return plan.of_run(clip_norm=derived["clip_norm"], deterministic_seed=deterministic_seed)


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
    return of_record(
        {
            "sampling": sampling,
            "group_size": choice.group_size,
            "num_users": len(users),
            "num_units": num_units,
            "units_are_declared": declared_units is not None,
            "expected_units": expected_units,
            "num_steps": num_steps,
            "noise_multiplier": validation.noise_multiplier(noise_multiplier),
            "delta": delta,
            "num_examples": num_examples,
            "group_size_source": choice.source,
            "group_size_epsilon": choice.epsilon,
            "group_size_is_exact": choice.looked_at_users,
            "users_scale": users_scale,
            "others": parts.to_json(others),
        }
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


def _count_units(users: example_sampling.Users, sampling: str, group_size: int) -> int:
    return users.pool_size(group_size) if sampling == EXAMPLE else len(users)
