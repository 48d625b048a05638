"""Chooses the sampling, group size and clip norm that the options of a run leave open."""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Mapping
from typing import TypeVar

from tff_dpftrl import validation
from tff_dpftrl.accounting import statement
from tff_dpftrl.finetuning import (
    amplified,
    example_sampling,
    group_size,
    passes,
    proxies,
    ways,
)
from tff_dpftrl.finetuning import plan as plan_lib
from tff_dpftrl.mechanisms import workload as workload_lib
from tff_dpftrl.runs import mechanism_plan, privacy

CLIP_FACTOR = 0.5
"""The clip norm that is chosen, over the median norm of public users' gradients."""

_POOL_LOOKED_AT = (
    "The comparison of sampling users with sampling examples used the exact size of the pool."
)


@dataclasses.dataclass(frozen=True)
class SamplingOptions:
    """Options of sampling, sizes and noise; `FinetuningConfig` says what each means."""

    sampling: str
    compute_budget: int | None
    group_size: int | None
    group_size_looked_at_users: bool
    cohort_size: int | None
    num_steps: int
    target_epsilon: float | None
    noise_multiplier: float | None
    delta: float | None
    clip_norm: float | None
    group_size_epsilon: float
    declared_units: int | None
    mechanism: str | None
    model_workload: workload_lib.Workload | None
    deterministic_noise_seed: int | None
    splits_budget: bool
    sampled_unit: str
    bands: int | str
    min_sep: int | None
    is_amplified: bool

    @property
    def budget(self) -> int:
        """The compute budget of a step, where it is not the product of the other two sizes."""
        return self.compute_budget or group_size.COMPUTE_BUDGET

    @property
    def given_group_size(self) -> group_size.Choice | None:
        """The group size that the options give, with its source; None if it is to be chosen."""
        if self.group_size is None:
            return None
        if self.group_size_looked_at_users:
            return group_size.Choice(
                self.group_size, "given with the training users in view", looked_at_users=True
            )
        return group_size.Choice(self.group_size)


@dataclasses.dataclass(frozen=True)
class Chosen:
    """Sampling and noise of a run.

    Attributes:
      reasons: Reasons of the choices, line by line; exact figures of the users may be in them.
      facts: Parameters that the statement reports of the choices.
      not_covered: Data accesses for the choices that ε does not cover, a sentence each.
      caveats: Further caveats of the statement, a sentence each.
    """

    privacy: mechanism_plan.MechanismPlan
    group_size: int
    reasons: tuple[str, ...] = ()
    facts: Mapping[str, statement.Scalar] = dataclasses.field(default_factory=dict)
    not_covered: tuple[str, ...] = ()
    caveats: tuple[str, ...] = ()


_T = TypeVar("_T")


def _given(name: str, value: _T | None) -> _T:
    """Returns an option that the config has made sure of."""
    if value is None:
        raise validation.UsageError(f"{name} is needed for this sampling: give it.")
    return value


def needs_proxies(options: SamplingOptions) -> bool:
    """Returns whether gradients of public text decide anything that the options leave open."""
    return options.clip_norm is None or options.splits_budget


def largest_group(options: SamplingOptions, num_users: int) -> int:
    """Returns the largest group size whose gradients may have to be known."""
    if "example" in (options.sampling, options.sampled_unit):
        return 1
    if options.group_size is not None:
        return options.group_size
    if options.cohort_size is not None:
        return options.budget // options.cohort_size
    _check_num_users(num_users)
    return max(g for g, _ in group_size.splits(options.budget, num_users=num_users))


def choose(
    options: SamplingOptions,
    users: example_sampling.Users,
    public: proxies.Proxies | None,
    num_parameters: int,
) -> Chosen:
    """Chooses what the options leave open; ε includes the private median where it was looked at.

    `public` has the norms of public users' gradients; None if `needs_proxies` returned False.
    """
    if options.is_amplified:
        return _amplified(options, users, public, num_parameters)
    match options.sampling:
        case "passes":
            return _passes(options, users, public, num_parameters)
        case "example":
            return _sampled(options, _example(options, users, _median(options, users)), public)
        case "user":
            choice, cohort, why = _group_and_cohort(options, users, public)
            return _sampled(options, _user(options, users, choice, cohort), public, why)
    return _better(options, users, _given("proxy_data", public))


def _better(
    options: SamplingOptions, users: example_sampling.Users, public: proxies.Proxies
) -> Chosen:
    """Chooses ELS or ULS by the noise of the average, relative to the gradients' size."""
    median = _median(options, users)
    choice, cohort, why = _group_and_cohort(options, users, public)
    # The median was looked at, whichever group size is taken.
    charged = dataclasses.replace(
        choice, epsilon=median.epsilon, source=f"{choice.source}, compared with {median.source}"
    )
    plans = [_example(options, users, median), _user(options, users, charged, cohort)]
    noise = [
        ways.Way(plan, plan.group_size).relative_noise(public.gradient_norms) for plan in plans
    ]
    better = plans[noise.index(min(noise))]
    by_example, by_user = (f"{value:.3g}" for value in noise)
    said = (
        f"Noise of a step's average, in units of the gradients: {by_example} if examples are "
        f"sampled (ELS, G = {median.group_size}), {by_user} if users are (ULS, G = "
        f"{choice.group_size}, M = {cohort}): the smaller one is taken."
    )
    chosen = _sampled(options, better, public, (*why, said))
    return dataclasses.replace(chosen, not_covered=(_POOL_LOOKED_AT,))


def _median(options: SamplingOptions, users: example_sampling.Users) -> group_size.Choice:
    """Returns the group size of ELS."""
    if options.given_group_size is not None:
        return options.given_group_size
    seed = options.deterministic_noise_seed
    return group_size.private_median_choice(
        users.num_examples,
        epsilon=options.group_size_epsilon,
        seed=secrets.randbits(256) if seed is None else seed,
    )


def _group_and_cohort(
    options: SamplingOptions, users: example_sampling.Users, public: proxies.Proxies | None
) -> tuple[group_size.Choice, int, tuple[str, ...]]:
    """Returns G and M of ULS, and why."""
    if (given := options.given_group_size) is not None:
        return given, options.cohort_size or options.budget // given.group_size, ()
    if options.cohort_size is not None:
        group = options.budget // options.cohort_size
        return group_size.Choice(group, "compute_budget / cohort_size"), options.cohort_size, ()
    num_users = options.declared_units or len(users)
    _check_num_users(num_users)
    sigma = plan_lib.noise_multiplier_of_cohort(
        num_users,
        num_steps=options.num_steps,
        target_epsilon=_given("target_epsilon", options.target_epsilon),
        delta=options.delta or plan_lib.default_delta(int(users.num_examples.sum())),
    )
    public = _given("proxy_data", public)
    split = group_size.estimate_and_double(
        public.gradient_norms,
        sigma,
        compute_budget=options.budget,
        num_users=num_users,
    )
    path = " → ".join(f"({one.group_size}, {one.cohort_size})" for one in (*split.doublings, split))
    choice = split.choice(
        norms_of=f"{public.num_users} public users ({public.source})", looked_at_users=False
    )
    return choice, split.cohort_size, (f"Estimate-and-Double, (group size, cohort): {path}.",)


def _check_num_users(num_users: int) -> None:
    if num_users < group_size.SMALLEST_COHORT:
        raise validation.UsageError(
            f"Estimate-and-Double begins with {group_size.SMALLEST_COHORT} users in a step, and "
            f"there are {num_users}: give sampling 'user', group_size and cohort_size."
        )


def _example(
    options: SamplingOptions, users: example_sampling.Users, choice: group_size.Choice
) -> plan_lib.Plan:
    pool = options.declared_units or users.pool_size(choice.group_size)
    budget = options.budget
    if budget > pool and options.given_group_size is options.declared_units is None:
        # The group size was drawn. A refusal would show that before it is charged.
        budget = users.pool_size(1)
    if budget > pool:
        raise validation.UsageError(
            # The number of examples tells more of the users than ε covers.
            f"compute_budget={budget} exceeds the number of examples in the pool: lower it, or "
            "raise group_size."
        )
    return _plan(options, users, plan_lib.EXAMPLE, choice, budget)


def _user(
    options: SamplingOptions, users: example_sampling.Users, choice: group_size.Choice, cohort: int
) -> plan_lib.Plan:
    _check_cohort(options, choice.group_size, cohort, options.declared_units or len(users))
    return _plan(options, users, plan_lib.USER, choice, cohort)


def _plan(
    options: SamplingOptions,
    users: example_sampling.Users,
    sampling: str,
    choice: group_size.Choice,
    expected_units: int,
) -> plan_lib.Plan:
    return plan_lib.make_plan(
        users,
        sampling=sampling,
        group_size=choice,
        expected_units=expected_units,
        num_steps=options.num_steps,
        target_epsilon=options.target_epsilon,
        noise_multiplier=options.noise_multiplier,
        delta=options.delta,
        declared_units=options.declared_units,
    )


def _sampled(
    options: SamplingOptions,
    plan: plan_lib.Plan,
    public: proxies.Proxies | None,
    why: tuple[str, ...] = (),
) -> Chosen:
    if plan.sampling == plan_lib.EXAMPLE and plan.clients_per_round < options.budget:
        why += (
            f"A step expects {plan.clients_per_round:g} examples, one for each user: the pool is "
            "below compute_budget.",
        )
    clip_norm, source = _clip_norm(options, public, plan.rows_per_unit)
    private = plan.of_run(clip_norm=clip_norm, deterministic_seed=options.deterministic_noise_seed)
    facts = {
        "group_size_source": plan.participation.group_size_source,
        "clip_norm_source": source,
    }
    return Chosen(private, plan.group_size, (*why, f"Clip norm: {clip_norm:g}, {source}."), facts)


def _clip_norm(
    options: SamplingOptions, public: proxies.Proxies | None, rows: int
) -> tuple[float, str]:
    """Returns the clip norm and its source."""
    if options.clip_norm is not None:
        return options.clip_norm, "given"
    public = _given("proxy_data", public)
    # The estimate is not worth more digits.
    norm = float(f"{CLIP_FACTOR * public.gradient_norms(rows):.2g}")
    return norm, (
        f"about half the median norm of the gradients of {public.num_users} public users "
        f"({public.source})"
    )


def _passes(
    options: SamplingOptions,
    users: example_sampling.Users,
    public: proxies.Proxies | None,
    num_parameters: int,
) -> Chosen:
    group = _given("group_size", options.group_size)
    clip_norm, source = _clip_norm(options, public, group)
    _check_cohort(options, group, options.cohort_size or options.budget // group, len(users))
    asked = asked_of_passes(options, clip_norm=clip_norm)
    plan = asked.plan(len(users), num_parameters)
    turn = math.ceil(len(users) / plan.clients_per_round)
    facts = {
        "sampling": "passes",
        "group_size": group,
        "clip_norm_source": source,
        "contribution": "the mean gradient of at most group_size examples of a user",
    }
    reasons = (f"Clip norm: {clip_norm:g}, {source}.", f"Passes: everybody once in {turn} steps.")
    said = _group_size_not_covered(options.given_group_size)
    return Chosen(plan, group, reasons, facts, said)


def _amplified(
    options: SamplingOptions,
    users: example_sampling.Users,
    public: proxies.Proxies | None,
    num_parameters: int,
) -> Chosen:
    """Chooses what secret samples with correlated noise leave open: sizes, and bands."""
    delta, caveats = options.delta, ()
    if delta is None:
        num_examples = int(users.num_examples.sum())
        delta = plan_lib.default_delta(num_examples)
        caveats = (plan_lib.default_delta_caveat(num_examples),)
    bands = options.bands if isinstance(options.bands, int) else None
    common = {
        "sampling": options.sampling,
        "num_steps": options.num_steps,
        "delta": delta,
        "target_epsilon": options.target_epsilon,
        "bands": bands,
        "min_sep": options.min_sep,
        "mechanism": options.mechanism,
    }
    given, why = options.given_group_size, ()
    if options.splits_budget:
        _check_num_users(len(users))
        measured = _given("proxy_data", public)
        plans = amplified.choices(users, compute_budget=options.budget, **common)
        norms = measured.gradient_norms
        asked = amplified.best(plans, norms).asked
        points = ", ".join(
            f"{one.relative_noise(norms):.3g} ({amplified.name_of(one)})"
            for one in amplified.least_by_bands(plans, norms)
        )
        why = (f"Noise of a step's average, in units of the gradients: {points}.",)
        source = (
            f"by the least noise for the gradient's norm, with gradient norms of "
            f"{measured.num_users} public users ({measured.source})"
        )
    else:
        group = options.group_size or options.budget // _given("cohort_size", options.cohort_size)
        units = options.budget
        if options.sampled_unit == plan_lib.USER:
            units = options.cohort_size or options.budget // group
            _check_cohort(options, group, units, len(users))
        asked = amplified.Amplified(
            units_per_step=units,
            group_size=group,
            sampled_unit=options.sampled_unit,
            noise_multiplier=options.noise_multiplier,
            **common,
        )
        if asked.chooses_bands:
            points = ", ".join(
                f"{one.noise_of_average:.3g} ({amplified.name_of(one)})"
                for one in amplified.curve(asked, users)
            )
            why = (f"Noise of a step's average, in units of the clip norm: {points}.",)
        source = "compute_budget / cohort_size" if given is None else given.source
    asked = asked.with_bands(users)
    clip_norm, clip_norm_source = _clip_norm(options, public, asked.rows_per_unit)
    request = asked.asked(
        users,
        clip_norm=clip_norm,
        deterministic_seed=options.deterministic_noise_seed,
        workload=options.model_workload,
    )
    facts = {
        "sampled_unit": asked.sampled_unit,
        "group_size": asked.group_size,
        "group_size_source": source,
        "clip_norm_source": clip_norm_source,
    }
    pool = asked.pool(users)
    if pool is not None:
        caveats = (plan_lib.counted_caveat("The size of the pool", pool.size), *caveats)
    if asked.sampled_unit == plan_lib.USER:
        facts["contribution"] = "the mean gradient of at most group_size examples of a user"
    return Chosen(
        request.plan(len(users), num_parameters),
        asked.group_size,
        (*why, f"Clip norm: {clip_norm:g}, {clip_norm_source}."),
        facts,
        _group_size_not_covered(given),
        caveats,
    )


def _group_size_not_covered(given: group_size.Choice | None) -> tuple[str, ...]:
    if given is None or not given.looked_at_users:
        return ()
    return (group_size.not_covered(given.group_size, given.source),)


def asked_of_passes(options: SamplingOptions, *, clip_norm: float) -> privacy.DpFtrl:
    """Returns the privacy that a run with sampling 'passes' requests."""
    cohort = options.cohort_size or options.budget // _given("group_size", options.group_size)
    return passes.Passes(
        users_per_step=cohort,
        num_steps=options.num_steps,
        delta=_given("delta", options.delta),
        mechanism=options.mechanism or "blt",
        noise_multiplier=options.noise_multiplier,
        target_epsilon=options.target_epsilon,
    ).asked(
        clip_norm=clip_norm,
        deterministic_seed=options.deterministic_noise_seed,
        workload=options.model_workload,
    )


def _check_cohort(options: SamplingOptions, group: int, cohort: int, num_users: int) -> None:
    if cohort < 1:
        raise validation.UsageError(
            f"compute_budget={options.budget} is smaller than a cohort of one user with "
            f"group_size={group} examples: raise it or lower group_size."
        )
    if cohort > num_users:
        name = "cohort_size" if options.cohort_size else "compute_budget / group_size"
        raise validation.UsageError(
            f"{name} = {cohort} exceeds the {num_users} users that there are: lower it."
        )
