"""Answer of `tff-dpftrl plan --finetune`: what each way to fine-tune privately costs."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tff_dpftrl import validation
from tff_dpftrl.cli import config_flags, output
from tff_dpftrl.data import tables
from tff_dpftrl.finetuning import group_size
from tff_dpftrl.training import language_config

if TYPE_CHECKING:
    from tff_dpftrl.finetuning import amplified, example_sampling, passes, proxies
    from tff_dpftrl.finetuning import plan as plan_lib
    from tff_dpftrl.training import trained_model

    Planned = plan_lib.Plan | passes.PlannedPasses | amplified.PlannedAmplified

Norms = Mapping[str, group_size.GradientNorms]

_HAD_A_SAY = (
    "In a group size taken from this table the users had a say: with --group-size-looked-at-users "
    "the statement says so."
)
_LINE = 100  # Characters of a line of the command to paste, about.


class _Way(NamedTuple):
    """Way to fine-tune: its name, what JSON says of it, and the flags of `finetune` for it."""

    name: str
    facts: dict[str, Any]
    flags: list[list[str]]


def print_ways(args: argparse.Namespace) -> None:
    """Plans all ways at the same ε and compute, and prints them with the recommended command."""
    from tff_dpftrl.finetuning import amplified, passes, plan

    share, text = _share(args), _text_options(args)
    model, users = _model(args, text), _users(args, text)
    asked: dict[str, Any] = {
        "compute_budget": args.compute_budget,
        "num_steps": args.steps,
        "target_epsilon": args.target_epsilon,
        "smallest_cohort": args.smallest_cohort,
    }
    sizes = args.example_group_sizes
    plans = plan.choices(users, **asked, delta=args.delta, example_group_sizes=sizes)
    plans = [one.with_figures(share) for one in plans] if share else plans
    measured = None if model is None else _measure(model, args, text, plans)
    norms = _gradient_norms(args, plans, measured)
    best = {
        name: min(plans, key=lambda one, norm=norm: one.relative_noise(norm))
        for name, norm in norms.items()
    }
    deciding = "halfway" if "halfway" in norms else next(iter(norms))
    recommended, norm = best[deciding], norms[deciding]
    turns: passes.PlannedPasses | None = None
    by_bands: list[amplified.PlannedAmplified] = []
    refusal = ""
    try:
        turns = passes.planned(users, norm, **asked, delta=recommended.delta)
        turns = turns.with_figures(share) if share else turns
    except validation.UsageError as error:
        refusal = str(error)
    try:
        bands = amplified.choices(users, **asked, delta=recommended.delta)
        by_bands = [one for one in amplified.least_by_bands(bands, norm) if one.asked.bands != 1]
        by_bands = [one.with_figures(share) for one in by_bands] if share else by_bands
    except validation.UsageError:
        pass  # What passes would need is said, and is the same.
    sampled = [_way(one, users, norms) for one in plans]
    by_passes = None if turns is None else _way(turns, users, norms)
    cyclic = [_way(one, users, norms) for one in by_bands]
    chosen = sampled[plans.index(recommended)]
    names = {name: sampled[plans.index(one)].name for name, one in best.items()}
    command = _command(args, text, share, chosen.flags)
    if args.format == "json":
        output.print_json(
            {
                "recommended": chosen.facts,
                "command": " ".join(command),
                "passes": refusal if by_passes is None else by_passes.facts,
                "cyclic": [way.facts for way in cyclic],
                "best": names,
                "plans": [way.facts for way in sampled],
            }
            | ({} if measured is None else {"measured": dataclasses.asdict(measured)})
        )
        return
    rows = [["way", "probability", "sigma", "noise", "gradients", "examples used", "epsilon"]]
    rows[0] += [f"noise/{name}" for name in norms]
    rows += [_row(way, " *" if way is chosen else "") for way in sampled]
    if by_passes is None:
        rows.append(["passes: see below", *("-" for _ in rows[0][1:])])
    rows += [_row(way) for way in (by_passes, *cyclic) if way is not None]
    output.print_table(rows, left=0)
    print("\n" + "\n".join(_about(users, chosen, names, sampled, measured)))
    if by_passes is None or turns is None:
        print(f"Passes cannot be compared: {refusal}")
    else:
        print(
            f"Passes (everybody at most {turns.participations} times) keep no secret but the "
            f"noise: {_joined(by_passes.flags)} in the command below, instead of its sampling and "
            "sizes."
        )
    if by_bands:
        least = min(by_bands, key=lambda one: one.relative_noise(norm))
        ratio = least.relative_noise(norm) / recommended.relative_noise(norm)
        print(
            f"Cyclic sampling with correlated noise has {ratio:.2f} of the recommended way's noise "
            f"at best: {_joined(cyclic[by_bands.index(least)].flags)} instead of its sampling and "
            "sizes. One band is ULS; with a whole pass nothing is sampled."
        )
    if by_bands or turns is not None:
        print(
            "Less noise meant a lower loss among all these ways, on two corpora, once each had its "
            "own learning rate: four to sixteen times as large for correlated noise, with Adam "
            "(docs/experiments.md)."
        )
    if share:
        print(_split(recommended, share))
    if args.population is None:
        print(_HAD_A_SAY)
    print(f"\nFine-tune in the recommended way:\n  {_wrapped(command)}")


def _share(args: argparse.Namespace) -> float:
    """Returns the share of the budget of figures of each step; 0 for none."""
    if args.budget_shares is None:
        return 0.0
    from tff_dpftrl.accounting import budget_shares

    shares = budget_shares.parse(args.budget_shares)
    if list(shares) != ["metrics"]:
        raise validation.UsageError(
            f"--budget-shares {args.budget_shares!r} must be of metrics alone, like metrics=0.05: "
            "words are those of the initial weights."
        )
    return shares["metrics"]


def _text_options(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the options for reading the text that are given, without its path."""
    given = config_flags.given_options(args, language_config.TextConfig)
    return {name: value for name, value in given.items() if name != "data"}


def _users(args: argparse.Namespace, text: Mapping[str, Any]) -> example_sampling.Users:
    from tff_dpftrl.finetuning import example_sampling

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
    from tff_dpftrl.training import corpus

    config = language_config.TextConfig(args.data, **text)
    return example_sampling.of_text(corpus.read_users(config.part(corpus.UserOptions)).train)


def _table(text: Mapping[str, Any]) -> tables.TableOptions:
    return language_config.TextConfig(**text).part(tables.TableOptions)


def _model(args: argparse.Namespace, text: Mapping[str, Any]) -> trained_model.TrainedFiles | None:
    """Loads the model in --initial-weights."""
    if args.initial_weights is None:
        if args.proxy_data is not None:
            raise validation.UsageError("--proxy-data is for --initial-weights: give that too.")
        return None
    from tff_dpftrl.training import warm_start

    warm_start.refuse_protected(args.initial_weights, args.data or "", _table(text))
    return warm_start.find(args.initial_weights)


def _measure(
    model: trained_model.TrainedFiles,
    args: argparse.Namespace,
    text: Mapping[str, Any],
    plans: Sequence[plan_lib.Plan],
) -> proxies.Proxies:
    """Measures the norms of the model's gradients on public text."""
    print("Measuring gradients of public text ...", file=sys.stderr)
    from tff_dpftrl.finetuning import proxies

    return proxies.of_model(
        model.load(),
        args.proxy_data or "standard-library",
        protected=args.data or "",
        largest_group=max(one.rows_per_unit for one in plans),
        is_tokenized=text.get("pretokenized", False),
        table=_table(text),
    )


def _gradient_norms(
    args: argparse.Namespace, plans: Sequence[plan_lib.Plan], measured: proxies.Proxies | None
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
    from tff_dpftrl.finetuning import passes, plan

    if isinstance(one, plan.Plan):
        facts = dataclasses.asdict(one)
        if not one.others:
            del facts["others"]
        facts["sampling_probability"] = one.sampling_probability
        size, is_uls = one.group_size, one.sampling != plan.EXAMPLE
        units = ["--cohort" if is_uls else "--compute-budget", str(int(one.expected_units))]
        flags = [["--sampling", one.sampling], ["--group-size", str(size)], units]
        kind, letter = ("ULS", "M") if is_uls else ("ELS", "B")
        name = f"{kind}, G = {size}, {letter} = {one.expected_units:g}"
    elif isinstance(one, passes.PlannedPasses):
        asked = one.asked
        facts = dataclasses.asdict(asked)
        facts |= {"noise_multiplier": one.noise_multiplier, "participations": one.participations}
        flags = [
            ["--sampling", "passes"],
            ["--group-size", str(asked.group_size)],
            ["--cohort", str(asked.users_per_step)],
            ["--delta", f"{asked.delta:.3g}"],
        ]
        name = f"passes, G = {asked.group_size}, M = {asked.users_per_step}"
    else:
        asked = one.asked
        facts = dataclasses.asdict(asked)
        facts["sampling_probability"] = one.plan.cyclic.sampling_probability
        facts["noise_multiplier"] = one.plan.noise_multiplier
        flags = [
            ["--sampling", asked.sampling],
            ["--bands", str(asked.bands)],
            ["--group-size", str(asked.group_size)],
            ["--cohort", str(asked.units_per_step)],
        ]
        name = f"cyclic, {one.name}, G = {asked.group_size}, M = {asked.units_per_step}"
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
    from tff_dpftrl.accounting import display

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
    import numpy as np

    from tff_dpftrl.accounting import display
    from tff_dpftrl.finetuning import plan

    median = float(np.median(users.num_examples))
    lines = [
        f"{len(users)} users with {int(users.num_examples.sum())} examples, median {median:g}; "
        f"delta = {display.delta(chosen.facts['delta'], 3)}.",
        f"* Recommended: {chosen.name}: the least noise relative to the gradient"
        + (", if its norm falls with the fourth root of G." if "halfway" in best else "."),
    ]
    if measured is not None:
        norms = measured.gradient_norms
        by_size = ", ".join(
            f"{norm:.3g} (G = {size})"
            for size, norm in zip(norms.group_sizes, norms.norms, strict=True)
        )
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
    lines.append(
        "The number of users or the size of the pool is treated as public, and the samples must "
        "stay secret."
    )
    return lines


def _split(one: plan_lib.Plan, share: float) -> str:
    """Returns how the budget of a plan is split, with the cost of each part alone."""
    from tff_dpftrl.accounting import display, parts

    rows = parts.costs(one.rounds(one.num_steps), "", one.parts, one.delta)
    alone = ", ".join(f"{row.name} {display.round_up(row.epsilon_alone)}" for row in rows)
    return (
        f"Of the budget, metrics have the share {share:g} and the weights the rest: epsilon "
        f"{display.round_up(one.epsilon)} is of both; in the recommended way they would cost, "
        f"alone, {alone}."
    )


def _joined(flags: Sequence[Sequence[str]]) -> str:
    return " ".join(word for words in flags for word in words)


def _command(
    args: argparse.Namespace, text: Mapping[str, Any], share: float, way: list[list[str]]
) -> list[str]:
    """Returns the command of `finetune` for a way, each flag with its value."""
    parts = [["--data", args.data or "CORPUS"]]
    for name, value in text.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            parts.append([f"--{'' if value else 'no-'}{flag}"])
        else:
            parts.append([f"--{flag}", str(value)])
    parts.append(["--initial-weights", str(args.initial_weights or "DIR")])
    if args.proxy_data is not None:
        parts.append(["--proxy-data", args.proxy_data])
    parts += way
    if args.population is None:
        parts.append(["--group-size-looked-at-users"])
    for name in ("target_epsilon", "steps", "delta"):
        if (number := getattr(args, name)) is not None:
            parts.append([f"--{name.replace('_', '-')}", repr(number).removesuffix(".0")])
    if share:
        parts.append(["--budget-shares", f"metrics={share:g}"])
    parts.append(["--output", "results/finetuned"])
    return ["tff-dpftrl finetune", *(shlex.join(part) for part in parts)]


def _wrapped(command: list[str]) -> str:
    """Returns a command in lines, which a shell reads as one."""
    lines = [command[0]]
    for part in command[1:]:
        if len(lines[-1]) + len(part) >= _LINE:
            lines.append(f"    {part}")
        else:
            lines[-1] += f" {part}"
    return " \\\n  ".join(lines)
