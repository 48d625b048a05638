"""Answer of `tff-dpftrl plan --finetune`: what each way to fine-tune privately costs."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tff_dpftrl import validation
from tff_dpftrl.accounting import budget_shares, display, parts
from tff_dpftrl.cli import config_flags, output
from tff_dpftrl.finetuning import amplified, example_sampling, group_size, passes, plan
from tff_dpftrl.training import corpus, language_config, warm_start

if TYPE_CHECKING:
    from tff_dpftrl.finetuning import proxies

Norms = Mapping[str, group_size.GradientNorms]
Planned = plan.Plan | passes.PlannedPasses | amplified.PlannedAmplified


class _Way(NamedTuple):
    """Way to fine-tune: its name, what JSON says of it, and the flags of `finetune` for it."""

    name: str
    facts: dict[str, Any]
    flags: list[str]


def print_ways(args: argparse.Namespace) -> None:
    """Plans all ways at the same ε and compute, and prints them with the recommended command."""
    given = config_flags.given_options(args, language_config.TextConfig)
    text = {name: value for name, value in given.items() if name != "data"}
    table = language_config.TextConfig(**text).table
    share = _share_of_figures(args)
    if args.initial_weights is not None:
        warm_start.refuse_protected(args.initial_weights, args.data or "", table)
        model = warm_start.find(args.initial_weights)
    elif args.proxy_data is not None:
        raise validation.UsageError("--proxy-data is for --initial-weights: give that too.")
    users = _users(args, text)
    asked: dict[str, Any] = {
        "compute_budget": args.compute_budget,
        "num_steps": args.steps,
        "target_epsilon": args.target_epsilon,
        "smallest_cohort": args.smallest_cohort,
    }
    sizes = args.example_group_sizes
    plans = plan.choices(users, **asked, delta=args.delta, example_group_sizes=sizes)
    measured = None
    if args.initial_weights is not None:
        print("Measuring gradients of public text ...", file=sys.stderr)
        from tff_dpftrl.finetuning import proxies  # Needs TensorFlow.

        measured = proxies.of_model(
            model.load(),
            args.proxy_data or "standard-library",
            protected=args.data or "",
            largest_group=max(one.rows_per_unit for one in plans),
            is_tokenized=text.get("pretokenized", False),
            table=table,
        )
    norms = _gradient_norms(args, plans, measured)
    norm = norms.get("halfway") or next(iter(norms.values()))
    best = [min(plans, key=lambda one, by=by: one.relative_noise(by)) for by in norms.values()]
    recommended = min(plans, key=lambda one: one.relative_noise(norm))
    turns: list[passes.PlannedPasses] = []
    by_bands: list[amplified.PlannedAmplified] = []
    refusal = ""
    try:
        turns = [passes.planned(users, norm, **asked, delta=recommended.delta)]
    except validation.UsageError as error:
        refusal = str(error)
    try:
        every = amplified.choices(users, **asked, delta=recommended.delta)
        by_bands = [one for one in amplified.least_by_bands(every, norm) if one.asked.bands != 1]
    except validation.UsageError:
        pass  # What passes would need is said, and is the same.

    def ways(planned: Sequence[Planned]) -> list[_Way]:
        shared = [one.with_figures(share) if share else one for one in planned]
        return [_way(one, users, norms) for one in shared]

    sampled, by_passes, cyclic = ways(plans), ways(turns), ways(by_bands)
    chosen = sampled[plans.index(recommended)]
    names = {name: sampled[plans.index(one)].name for name, one in zip(norms, best, strict=True)}
    command = shlex.join(_command(args, text, share, chosen.flags))
    if args.format == "json":
        report = {
            "recommended": chosen.facts,
            "command": command,
            "passes": by_passes[0].facts if by_passes else refusal,
            "cyclic": [way.facts for way in cyclic],
            "best": names,
            "plans": [way.facts for way in sampled],
        }
        if measured is not None:
            report["measured"] = dataclasses.asdict(measured)
        output.print_json(report)
        return
    rows = [["way", "probability", "sigma", "noise", "gradients", "examples used", "epsilon"]]
    rows[0] += [f"noise/{name}" for name in norms]
    rows += [_row(way, " *" if way is chosen else "") for way in sampled]
    rows += [_row(way) for way in by_passes] or [["passes: see below", *["-"] * len(rows[0][1:])]]
    output.print_table([*rows, *map(_row, cyclic)], left=0)
    print("\n" + "\n".join(_about(users, chosen, names, sampled, measured)))
    if by_passes:
        print(
            f"Passes (everybody at most {turns[0].participations} times) keep no secret but the "
            f"noise: {' '.join(by_passes[0].flags)} in the command below, instead of its sampling "
            "and sizes."
        )
    else:
        print(f"Passes cannot be compared: {refusal}")
    if by_bands:
        noises = [one.relative_noise(norm) for one in by_bands]
        ratio = min(noises) / recommended.relative_noise(norm)
        flags = " ".join(cyclic[noises.index(min(noises))].flags)
        print(
            f"Cyclic sampling with correlated noise has {ratio:.2f} of the recommended way's noise "
            f"at best: {flags} instead of its sampling and sizes. One band is ULS; with a whole "
            "pass nothing is sampled."
        )
    if by_bands or by_passes:
        print(
            "Less noise meant a lower loss among all these ways, on two corpora, once each had its "
            "own learning rate: four to sixteen times as large for correlated noise, with Adam "
            "(docs/experiments.md)."
        )
    if share:
        shared = recommended.with_figures(share)
        costs = parts.costs(shared.rounds(shared.num_steps), "", shared.parts, shared.delta)
        alone = ", ".join(f"{row.name} {display.round_up(row.epsilon_alone)}" for row in costs)
        print(
            f"Of the budget, metrics have the share {share:g} and the weights the rest: epsilon "
            f"{display.round_up(shared.epsilon)} is of both; in the recommended way they would "
            f"cost, alone, {alone}."
        )
    if args.population is None:
        print(
            "In a group size taken from this table the users had a say: with "
            "--group-size-looked-at-users the statement says so."
        )
    print(f"\nFine-tune in the recommended way:\n  {command}")


def _share_of_figures(args: argparse.Namespace) -> float:
    """Returns the share of the budget of figures of each step; 0 for none."""
    if args.budget_shares is None:
        return 0.0
    shares = budget_shares.parse(args.budget_shares)
    if list(shares) != ["metrics"]:
        raise validation.UsageError(
            f"--budget-shares {args.budget_shares!r} must be of metrics alone, like metrics=0.05: "
            "words are those of the initial weights."
        )
    return shares["metrics"]


def _users(args: argparse.Namespace, text: Mapping[str, Any]) -> example_sampling.Users:
    if (args.population is None) != (args.examples_per_user is None):
        raise validation.UsageError("--population and --examples-per-user go together.")
    given = set(text)
    if args.proxy_data is not None:
        given.discard("pretokenized")  # Which is of that file, too.
    if args.data is None and given:
        name = min(given).replace("_", "-")
        raise validation.UsageError(f"--{name} is for --data, which is not given: leave it out.")
    if args.population is not None:
        count = validation.integer("--population", args.population, minimum=1)
        size = validation.integer("--examples-per-user", args.examples_per_user, minimum=1)
        return example_sampling.of_sizes([size] * count)
    if args.user_sizes is not None:
        try:
            lines = args.user_sizes.read_text(encoding="utf-8-sig").split()
            return example_sampling.of_sizes([int(line) for line in lines])
        except (OSError, ValueError) as error:
            raise validation.UsageError(
                f"--user-sizes {args.user_sizes} must have one number above 0 on each line: {error}"
            ) from error
    config = language_config.TextConfig(args.data, **text)
    return example_sampling.of_text(corpus.read_users(config.text).train)


def _gradient_norms(
    args: argparse.Namespace, plans: Sequence[plan.Plan], measured: proxies.Proxies | None
) -> Norms:
    """Returns L(G) as measured or given, or for each of three assumptions, with L(1) = 1."""
    if measured is not None:
        return {"measured": measured.gradient_norms}
    if args.gradient_norms:
        sizes = tuple(2**i for i in range(len(args.gradient_norms)))
        return {"given": group_size.GradientNorms(sizes, args.gradient_norms)}
    sizes = tuple(sorted({1, *(one.group_size for one in plans)}))
    return {
        name: group_size.GradientNorms(sizes, tuple(size**-power for size in sizes))
        for name, power in (("equal", 0.0), ("halfway", 0.25), ("diverse", 0.5))
    }


def _way(one: Planned, users: example_sampling.Users, norms: Norms) -> _Way:
    size = one.group_size if isinstance(one, plan.Plan) else one.asked.group_size
    group = ["--group-size", str(size)]
    if isinstance(one, plan.Plan):
        facts = dataclasses.asdict(one) | {"sampling_probability": one.sampling_probability}
        if not one.others:
            del facts["others"]
        is_uls, units = one.sampling != plan.EXAMPLE, str(int(one.expected_units))
        name = f"{'ULS' if is_uls else 'ELS'}, G = {size}, {'M' if is_uls else 'B'} = "
        name += f"{one.expected_units:g}"
        spent = "--cohort" if is_uls else "--compute-budget"
        flags = ["--sampling", one.sampling, *group, spent, units]
    elif isinstance(one, passes.PlannedPasses):
        facts = dataclasses.asdict(one.asked) | {"noise_multiplier": one.noise_multiplier}
        facts["participations"] = one.participations
        name = f"passes, G = {size}, M = {one.asked.users_per_step}"
        flags = ["--sampling", "passes", *group, "--cohort", str(one.asked.users_per_step)]
        flags += ["--delta", f"{one.asked.delta:.3g}"]
    else:
        facts = dataclasses.asdict(one.asked) | {"noise_multiplier": one.plan.noise_multiplier}
        facts["sampling_probability"] = one.plan.cyclic.sampling_probability
        name = f"cyclic, {one.name}, G = {size}, M = {one.asked.units_per_step}"
        flags = ["--sampling", one.asked.sampling, "--bands", str(one.asked.bands), *group]
        flags += ["--cohort", str(one.asked.units_per_step)]
    facts |= {
        "epsilon": one.epsilon,
        "noise_of_average": one.noise_of_average,
        "expected_gradients": one.expected_gradients(users),
        "share_of_examples_used": one.share_of_examples_used(users),
        "relative_noise": {name: one.relative_noise(norm) for name, norm in norms.items()},
    }
    return _Way(name, facts, flags)


def _row(way: _Way, mark: str = "") -> list[str]:
    """Returns a way as cells of the table."""
    facts = way.facts
    probability = facts.get("sampling_probability")
    return [
        f"{way.name}{mark}",
        "-" if probability is None else f"{probability:.4g}",
        f"{facts['noise_multiplier']:.4g}",
        f"{facts['noise_of_average']:.4g}",
        f"{facts['expected_gradients']:.0f}",
        f"{100 * facts['share_of_examples_used']:.1f} %",
        display.round_up(facts["epsilon"]),
        *(f"{noise:.4g}" for noise in facts["relative_noise"].values()),
    ]


def _about(
    users: example_sampling.Users,
    chosen: _Way,
    best: Mapping[str, str],
    sampled: Sequence[_Way],
    measured: proxies.Proxies | None,
) -> list[str]:
    """Returns what is planned for, and why one way is recommended; `best` has names of ways."""
    median = float(np.median(users.num_examples))
    lines = [
        f"{len(users)} users with {int(users.num_examples.sum())} examples, median {median:g}; "
        f"delta = {display.delta(chosen.facts['delta'], 3)}.",
        f"* Recommended: {chosen.name}: the least noise relative to the gradient"
        + (", if its norm falls with the fourth root of G." if "halfway" in best else "."),
    ]
    if measured is not None:
        norms = measured.gradient_norms
        pairs = zip(norms.group_sizes, norms.norms, strict=True)
        by_size = ", ".join(f"{norm:.3g} (G = {size})" for size, norm in pairs)
        lines.append(
            f"Norm of the mean of G gradients, median over {measured.num_users} public users "
            f"({measured.source}): {by_size}; of all weights, not of adapters (--adapter-rank)."
        )
    if "halfway" in best and len(set(best.values())) == 1:
        lines.append("It is the best one whatever the gradients are.")
    elif "halfway" in best:
        lines.append(
            f"Best if a user's gradients are all equal: {best['equal']}; if they have nothing "
            f"in common: {best['diverse']}. Give --initial-weights to measure it."
        )
    if any(way.facts["sampling"] == plan.EXAMPLE for way in sampled):
        lines.append(
            "The group sizes of ELS lie around the exact median, which the guarantee does not "
            "cover: declare one, or take a private median."
        )
    return [
        *lines,
        "The number of users or the size of the pool is treated as public, and the samples must "
        "stay secret.",
    ]


def _command(
    args: argparse.Namespace, text: Mapping[str, Any], share: float, way: Sequence[str]
) -> list[str]:
    """Returns the command of `finetune` for a way."""
    words = ["tff-dpftrl", "finetune", "--data", args.data or "CORPUS"]
    for name, value in text.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{flag}")
        else:
            words += [f"--{flag}", str(value)]
    words += ["--initial-weights", str(args.initial_weights or "DIR")]
    words += [] if args.proxy_data is None else ["--proxy-data", args.proxy_data]
    words += [*way, *([] if args.population else ["--group-size-looked-at-users"])]
    for name in ("target_epsilon", "steps", "delta"):
        if (number := getattr(args, name)) is not None:
            words += [f"--{name.replace('_', '-')}", repr(number).removesuffix(".0")]
    words += ["--budget-shares", f"metrics={share:g}"] if share else []
    return [*words, "--output", "results/finetuned"]
