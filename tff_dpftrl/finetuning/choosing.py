"""What to sample and how much of it: the plan of a run from its options."""

from __future__ import annotations

import dataclasses
import math
import secrets

from tff_dpftrl.accounting import display
from tff_dpftrl.finetuning import config as config_lib
from tff_dpftrl.finetuning import contributions, group_size, proxies, run_privacy
from tff_dpftrl.finetuning import plan as plan_lib
from tff_dpftrl.runs import dp_ftrl_privacy, privacy

CLIP_FACTOR = 0.5
"""The clip norm that is chosen, over the median norm of public users' gradients."""


@dataclasses.dataclass(frozen=True)
class Chosen:
    """How a run samples and noises.

    Attributes:
      privacy: The plan that its books take.
      group_size: G.
      reasons: Why, line by line.
    """

    privacy: privacy.PrivacyPlan
    group_size: int
    reasons: tuple[str, ...]


def needs_proxies(config: config_lib.FinetuningConfig) -> bool:
    """Whether anything is left to choose that gradients of public text decide."""
    splits_budget = (
        config.sampling == "user" and config.group_size is None and config.cohort_size is None
    )
    return config.clip_norm is None or config.sampling == "auto" or splits_budget


def largest_group(config: config_lib.FinetuningConfig, num_users: int) -> int:
    """The largest group size whose gradients may have to be known."""
    if config.sampling == "example":
        return 1
    if config.group_size is not None:
        return config.group_size
    if config.cohort_size is not None:
        return max(1, config.compute_budget // config.cohort_size)
    return max(g for g, _ in group_size.splits(config.compute_budget, num_users=num_users))


def choose(
    config: config_lib.FinetuningConfig,
    users: contributions.Users,
    public: proxies.Proxies | None,
    num_parameters: int,
) -> Chosen:
    """Chooses what the options leave open.

    Args:
      config: Options of the run.
      users: The protected users.
      public: What public users' gradients are like; None if `needs_proxies` says no.
      num_parameters: Number of weights.

    Returns:
      The choice. Its ε includes that of the private median, wherever that was looked at.

    Raises:
      ValueError: If the users or the budget cannot have it.
    """
    match config.sampling:
        case "passes":
            return _passes(config, users, public, num_parameters)
        case "example":
            choice = _example_group(config, users)
            return _sampled(config, _example(config, users, choice), public, ())
        case "user":
            chosen, why = _user_group(config, users, public)
            cohort = config.cohort_size or config.compute_budget // chosen.group_size
            return _sampled(config, _user(config, users, chosen, cohort), public, why)
    return _better(config, users, public)


def _better(
    config: config_lib.FinetuningConfig, users: contributions.Users, public: proxies.Proxies
) -> Chosen:
    """ELS or ULS, by the noise of the average over the gradients' size."""
    median = _example_group(config, users)
    split, why = _user_group(config, users, public)
    # Whichever is taken, the median was looked at.
    charged = dataclasses.replace(
        split, epsilon=median.epsilon, source=f"{split.source}, compared with {median.source}"
    )
    cohort = config.compute_budget // split.group_size
    plans = [_example(config, users, median), _user(config, users, charged, cohort)]
    noise = [plan_lib.relative_noise(plan, public.gradient_norms) for plan in plans]
    by_example, by_user = (f"{value:.3g}" for value in noise)
    better = plans[noise.index(min(noise))]
    return _sampled(
        config,
        better,
        public,
        (
            *why,
            f"Noise of a step's average, in units of the gradients: {by_example} if examples are "
            f"sampled (ELS, G = {median.group_size}), {by_user} if users are (ULS, G = "
            f"{split.group_size}, M = {cohort}): the smaller one is taken.",
        ),
    )


def _example_group(
    config: config_lib.FinetuningConfig, users: contributions.Users
) -> group_size.Choice:
    if config.group_size is not None:
        return group_size.Choice(config.group_size)
    return group_size.private_median_choice(
        users.num_examples,
        epsilon=config.group_size_epsilon,
        seed=(
            secrets.randbits(256)
            if config.deterministic_noise_seed is None
            else config.deterministic_noise_seed
        ),
    )


def _user_group(
    config: config_lib.FinetuningConfig,
    users: contributions.Users,
    public: proxies.Proxies | None,
) -> tuple[group_size.Choice, tuple[str, ...]]:
    if config.group_size is not None:
        return group_size.Choice(config.group_size), ()
    if config.cohort_size is not None:
        found = max(1, config.compute_budget // config.cohort_size)
        return group_size.Choice(found, "compute_budget / cohort_size"), ()
    sigma = plan_lib.noise_multiplier_of_cohort(
        len(users),
        num_steps=config.num_steps,
        target_epsilon=config.target_epsilon,
        delta=config.delta or plan_lib.default_delta(int(users.num_examples.sum())),
    )
    split = group_size.estimate_and_double(
        public.gradient_norms,
        sigma,
        compute_budget=config.compute_budget,
        num_users=len(users),
    )
    path = " → ".join(f"({one.group_size}, {one.cohort_size})" for one in (*split.doublings, split))
    return (
        group_size.Choice(
            split.group_size, f"Estimate-and-Double on gradients of public text, {public.source}"
        ),
        (f"Estimate-and-Double, (group size, cohort): {path}.",),
    )


def _example(
    config: config_lib.FinetuningConfig, users: contributions.Users, choice: group_size.Choice
) -> plan_lib.Plan:
    return _plan(config, users, plan_lib.EXAMPLE, choice, config.compute_budget)


def _user(
    config: config_lib.FinetuningConfig,
    users: contributions.Users,
    choice: group_size.Choice,
    cohort: int,
) -> plan_lib.Plan:
    _check_cohort(config, choice.group_size, cohort)
    return _plan(config, users, plan_lib.USER, choice, cohort)


def _plan(
    config: config_lib.FinetuningConfig,
    users: contributions.Users,
    sampling: str,
    choice: group_size.Choice,
    expected_units: int,
) -> plan_lib.Plan:
    return plan_lib.make_plan(
        users,
        sampling=sampling,
        group_size=choice,
        expected_units=expected_units,
        num_steps=config.num_steps,
        target_epsilon=config.target_epsilon,
        noise_multiplier=config.noise_multiplier,
        delta=config.delta,
        declared_units=config.declared_units,
    )


def _sampled(
    config: config_lib.FinetuningConfig,
    plan: plan_lib.Plan,
    public: proxies.Proxies | None,
    why: tuple[str, ...],
) -> Chosen:
    rows = 1 if plan.sampling == plan_lib.EXAMPLE else plan.group_size
    clip_norm, reason = _clip_norm(config, public, rows)
    found = run_privacy.SampledFinetuning.of(
        plan, clip_norm=clip_norm, deterministic_seed=config.deterministic_noise_seed
    )
    return Chosen(found, plan.group_size, (*why, *reason))


def _clip_norm(
    config: config_lib.FinetuningConfig, public: proxies.Proxies | None, rows: int
) -> tuple[float, tuple[str, ...]]:
    if config.clip_norm is not None:
        return config.clip_norm, ()
    norm = CLIP_FACTOR * public.gradient_norms(rows)
    # Few digits say as much as it is worth.
    norm = float(f"{norm:.2g}")
    return norm, (
        f"Clip norm: {norm:g}, about half the median norm of the gradients of {public.num_users} "
        f"public users ({public.source}).",
    )


def _passes(
    config: config_lib.FinetuningConfig,
    users: contributions.Users,
    public: proxies.Proxies | None,
    num_parameters: int,
) -> Chosen:
    clip_norm, reason = _clip_norm(config, public, config.group_size)
    delta = config.delta or plan_lib.default_delta(int(users.num_examples.sum()))
    asked = asked_of_passes(config, clip_norm=clip_norm, delta=delta)
    plan = asked.plan(len(users), num_parameters)
    spent = plan.epsilon_after(config.num_steps)
    promise = "no guarantee" if spent is None else f"ε = {display.round_up(spent, 4)}"
    turn = math.ceil(len(users) / plan.clients_per_round)
    line = f"Passes: {turn} steps take everybody once; {promise}."
    return Chosen(plan, config.group_size, (*reason, line))


def asked_of_passes(
    config: config_lib.FinetuningConfig, *, clip_norm: float, delta: float
) -> dp_ftrl_privacy.DpFtrlPrivacy:
    """What a run with sampling 'passes' asks of privacy.

    Args:
      config: Its options.
      clip_norm: L2 norm that a user's gradient is clipped to.
      delta: δ.

    Returns:
      What the plan of a new run, or of one to go on with, is made of.

    Raises:
      ValueError: If the budget is smaller than a cohort.
    """
    cohort = config.cohort_size or config.compute_budget // config.group_size
    _check_cohort(config, config.group_size, cohort)
    return dp_ftrl_privacy.DpFtrlPrivacy(
        num_rounds=config.num_steps,
        clients_per_round=cohort,
        clip_norm=clip_norm,
        delta=delta,
        mechanism=config.mechanism,
        noise_multiplier=config.noise_multiplier,
        target_epsilon=config.target_epsilon,
        deterministic_seed=config.deterministic_noise_seed,
    )


def _check_cohort(config: config_lib.FinetuningConfig, group: int, cohort: int) -> None:
    if cohort < 1:
        raise ValueError(
            f"compute_budget={config.compute_budget} is smaller than a cohort of one user with "
            f"group_size={group} examples: raise it or lower group_size."
        )
