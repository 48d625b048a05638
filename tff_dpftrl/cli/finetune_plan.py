"""`tff-dpftrl finetune-plan`: what each way to fine-tune privately costs, before any gradient."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import shlex
import sys
import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tff_dpftrl import validation
from tff_dpftrl.cli import config_flags, output
from tff_dpftrl.data import tables
from tff_dpftrl.finetuning import config as config_lib
from tff_dpftrl.finetuning import group_size
from tff_dpftrl.training import language_config

if TYPE_CHECKING:
    from tff_dpftrl.finetuning import amplified, example_sampling, passes, proxies
    from tff_dpftrl.finetuning import plan as plan_lib
    from tff_dpftrl.training import trained_model

_DESCRIPTION = """\
Plan a fine-tuning run with user-level privacy where all data lies in one place.

A compute budget of B gradients a step can be spent on B sampled examples, at most G of each user
in the pool (ELS), or on M sampled users with G examples each, G * M = B (ULS). A row is printed for
each way that meets the target. Its columns are the sampling probability, the noise multiplier
(sigma), the noise of the averaged gradient in units of the clip norm, the gradients expected in a
step (users with fewer than G examples give fewer), and the share of all examples that is used in at
least one step. The next row is for passes: M users at a time take turns, and correlated noise needs
no secret samples (DP-FTRL). The last rows are for cyclic sampling: groups of users take turns and
are sampled at their group's, and correlated noise has as many bands as there are groups. Correlated
noise is given as the independent noise whose sums up to each step are as noisy, in the root mean
square over the steps.

The better way has less noise *relative to the gradient*. The mean of G gradients of one user is
smaller than one gradient: by nothing if all are equal, by the square root of G if they have
nothing in common. Only gradients tell where between the two it is. They are measured with the
pretrained model on public text (--initial-weights), by which `finetune` decides, or elsewhere
(--gradient-norms). Without them, the recommended way is the best one for the fourth root of G,
which is halfway.

With --budget-shares metrics=S, figures of each step get the share S of the budget: of 1 / sigma^2,
or, in passes, of the squared mu. These quantities add up; epsilon does not. The noise of the
gradients then grows by a factor of 1 / sqrt(1 - S) in every way. Epsilon is that of both.

Below the table is the command that fine-tunes in the recommended way.
"""

_EPILOG = """\
examples:
  # The users of a file of texts whom `finetune` would train on, eight in ten; an example is
  # a text that is not blank.
  tff-dpftrl finetune-plan --data users.jsonl.gz --target-epsilon 4 --compute-budget 1024 \\
      --steps 500

  # With the gradients of the model that is to be fine-tuned, on public text.
  tff-dpftrl finetune-plan --data users.jsonl.gz --initial-weights results/pretrained \\
      --target-epsilon 4 --compute-budget 1024 --steps 500

  # As finetune --pretokenized and --max-users read them.
  tff-dpftrl finetune-plan --data users.jsonl.gz --pretokenized --max-users 2000 \\
      --target-epsilon 4 --compute-budget 1024 --steps 500

  # Before there is any data: 10000 users with 50 examples each.
  tff-dpftrl finetune-plan --users 10000 --examples-per-user 50 --target-epsilon 4 \\
      --compute-budget 1024 --steps 500

  # With the norms of the mean of 1, 2, 4 ... gradients of a user, medians over 128 public users.
  tff-dpftrl finetune-plan --user-sizes sizes.txt --target-epsilon 1 --compute-budget 1024 \\
      --steps 300 --gradient-norms 8.76,6.62,5.13,4.02,3.36,3.04
"""

_HAD_A_SAY = (
    "In a group size taken from this table the users had a say: with --group-size-looked-at-users "
    "the statement says so."
)
_LINE = 100  # Characters of a line of the command to paste, about.


def add_parser(subparsers) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser(
        "finetune-plan",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    users = parser.add_mutually_exclusive_group(required=True)
    users.add_argument(
        "--data",
        metavar="FILE",
        help="Texts by user, as for train --data.",
    )
    users.add_argument(
        "--user-sizes",
        type=pathlib.Path,
        metavar="FILE",
        help="File with each user's number of examples, one number a line.",
    )
    users.add_argument(
        "--users", type=int, metavar="N", help="Number of users, with --examples-per-user each."
    )
    parser.add_argument(
        "--examples-per-user",
        type=int,
        metavar="K",
        help="Number of examples of each of the --users.",
    )
    hints = typing.get_type_hints(language_config.TextConfig)
    group = parser.add_argument_group("how texts are read, as for finetune")
    for field in _text_options():
        config_flags.add_flag(group, field, hints[field.name])
    parser.add_argument(
        "--target-epsilon",
        type=float,
        required=True,
        metavar="E",
        help="Largest epsilon of the run.",
    )
    parser.add_argument(
        "--budget-shares",
        metavar="metrics=SHARE",
        help="Share of the budget for figures of each step, such as its loss; metrics alone has "
        "the default share. Default: all for the weights.",
    )
    parser.add_argument(
        "--compute-budget",
        type=int,
        default=group_size.COMPUTE_BUDGET,
        metavar="B",
        help="Number of examples whose gradients a step computes. Default: %(default)d.",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=config_lib.FinetuningConfig.num_steps,
        metavar="T",
        help="Number of steps. Default: %(default)d.",
    )
    parser.add_argument(
        "--delta",
        type=float,
        metavar="D",
        help="Delta. Default: n to the power of -1.1 for n examples in all.",
    )
    parser.add_argument(
        "--smallest-cohort",
        type=int,
        default=32,
        metavar="M",
        help="Fewest users in a step of ULS. Default: %(default)s.",
    )
    parser.add_argument(
        "--example-group-sizes",
        type=_integers,
        metavar="G,G,...",
        help="Group sizes of ELS. Default: five powers of two around the users' median.",
    )
    norms = parser.add_mutually_exclusive_group()
    norms.add_argument(
        "--initial-weights",
        type=pathlib.Path,
        metavar="DIR",
        help="Folder of the model to fine-tune. The norms of its gradients for all weights are "
        "measured on --proxy-data. Gradients of adapters (finetune --adapter-rank) have other "
        "norms.",
    )
    norms.add_argument(
        "--gradient-norms",
        type=_numbers,
        metavar="L,L,...",
        help="Typical norms of the mean of 1, 2, 4 ... gradients of one user at the initial "
        "weights. They must be of public users, or the guarantee does not cover the choice.",
    )
    parser.add_argument(
        "--proxy-data",
        metavar="CORPUS",
        help="With --initial-weights: public text by user, as for finetune. Default: "
        "standard-library.",
    )
    output.add_format(parser)


def _text_options() -> list[dataclasses.Field]:
    """Returns the options of `finetune` for reading the text, without its path."""
    fields = dataclasses.fields(language_config.TextConfig)
    return [field for field in fields if field.name != "data"]


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must look like 8,16,32, got {text!r}") from None


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must look like 8.8,6.6,5.1, got {text!r}") from None


def run(args: argparse.Namespace) -> int:
    """Plans and prints; returns the exit status."""
    from tff_dpftrl.finetuning import plan

    of_metrics = _share(args)
    model, users = _model(args), _users(args)
    plans = plan.choices(
        users,
        compute_budget=args.compute_budget,
        num_steps=args.steps,
        target_epsilon=args.target_epsilon,
        delta=args.delta,
        example_group_sizes=args.example_group_sizes,
        smallest_cohort=args.smallest_cohort,
    )
    if of_metrics:
        plans = [one.with_figures(of_metrics) for one in plans]
    measured = None if model is None else _measure(model, args, plans)
    norms = _gradient_norms(args, plans, measured)
    best = {
        name: min(plans, key=lambda one, norm=norm: one.relative_noise(norm))
        for name, norm in norms.items()
    }
    recommended = best.get("halfway") or next(iter(best.values()))
    norm = norms.get("halfway") or next(iter(norms.values()))
    turns = _passes(args, users, norm, recommended.delta)
    by_bands = _cyclic(args, users, norm, recommended.delta)
    if of_metrics:
        turns = turns if isinstance(turns, str) else turns.with_figures(of_metrics)
        by_bands = [one.with_figures(of_metrics) for one in by_bands]
    command = _command(args, _of_plan(recommended))
    sampled = [_as_json(one, users, norms) for one in plans]
    by_passes = turns if isinstance(turns, str) else _passes_json(turns, users, norms)
    cyclic = [_cyclic_json(one, users, norms) for one in by_bands]
    if args.format == "json":
        output.print_json(
            {
                "recommended": sampled[plans.index(recommended)],
                "command": " ".join(command),
                "passes": by_passes,
                "cyclic": cyclic,
                "best": {name: _name(one) for name, one in best.items()},
                "plans": sampled,
            }
            | ({} if measured is None else {"measured": dataclasses.asdict(measured)})
        )
        return 0
    rows = [["way", "probability", "sigma", "noise", "gradients", "examples used", "epsilon"]]
    rows[0] += [f"noise/{name}" for name in norms]
    for one, way in zip(plans, sampled, strict=True):
        rows.append(_row(_name(one) + (" *" if one is recommended else ""), way))
    if isinstance(by_passes, str):
        rows.append(["passes: see below", *("-" for _ in rows[0][1:])])
    else:
        size = f"G = {by_passes['group_size']}, M = {by_passes['users_per_step']}"
        rows.append(_row(f"passes, {size}", by_passes))
    for one, way in zip(by_bands, cyclic, strict=True):
        size = f"G = {one.asked.group_size}, M = {one.asked.units_per_step}"
        rows.append(_row(f"cyclic, {one.name}, {size}", way))
    output.print_table(rows, left=0)
    advice = _advice(recommended, best, users, plans, measured)
    if isinstance(turns, str):
        advice.append(f"Passes cannot be compared: {turns}")
    else:
        instead = " ".join(word for words in _of_passes(turns.asked) for word in words)
        advice.append(
            f"Passes (everybody at most {turns.participations} times) keep no secret but the "
            f"noise: {instead} in the command below, instead of its sampling and sizes."
        )
    if by_bands:
        least = min(by_bands, key=lambda one: one.relative_noise(norm))
        share = least.relative_noise(norm) / recommended.relative_noise(norm)
        instead = " ".join(word for words in _of_cyclic(least) for word in words)
        advice.append(
            f"Cyclic sampling with correlated noise has {share:.2f} of the recommended way's noise "
            f"at best: {instead} instead of its sampling and sizes. One band is ULS; with a whole "
            "pass nothing is sampled."
        )
    if by_bands or not isinstance(turns, str):
        advice.append(
            "Less noise meant a lower loss among all these ways, on two corpora, once each had its "
            "own learning rate: four to sixteen times as large for correlated noise, with Adam "
            "(docs/experiments.md)."
        )
    if of_metrics:
        advice.append(_split(recommended, of_metrics))
    if args.users is None:
        advice.append(_HAD_A_SAY)
    print("\n" + "\n".join(advice))
    print(f"\nFine-tune in the recommended way:\n  {_wrapped(command)}")
    return 0


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


def _passes(
    args: argparse.Namespace,
    users: example_sampling.Users,
    norm: group_size.GradientNorms,
    delta: float,
) -> passes.PlannedPasses | str:
    """Plans passes at the same ε and compute; returns what they would need if they cannot be."""
    from tff_dpftrl.finetuning import passes

    try:
        return passes.planned(
            users,
            norm,
            compute_budget=args.compute_budget,
            num_steps=args.steps,
            target_epsilon=args.target_epsilon,
            delta=delta,
            smallest_cohort=args.smallest_cohort,
        )
    except validation.UsageError as error:
        return str(error)


def _cyclic(
    args: argparse.Namespace,
    users: example_sampling.Users,
    norm: group_size.GradientNorms,
    delta: float,
) -> list[amplified.PlannedAmplified]:
    """Plans cyclic sampling of users at the same ε and compute, by bands, from two on."""
    from tff_dpftrl.finetuning import amplified

    try:
        plans = amplified.choices(
            users,
            compute_budget=args.compute_budget,
            num_steps=args.steps,
            target_epsilon=args.target_epsilon,
            delta=delta,
            smallest_cohort=args.smallest_cohort,
        )
    except validation.UsageError:
        return []  # What passes would need is said, and is the same.
    return [one for one in amplified.least_by_bands(plans, norm) if one.asked.bands != 1]


def _of_plan(one: plan_lib.Plan) -> list[list[str]]:
    """Returns the flags of `finetune` for sampling and sizes of a plan, with their values."""
    from tff_dpftrl.finetuning import plan

    units = str(int(one.expected_units))
    size = ["--compute-budget" if one.sampling == plan.EXAMPLE else "--cohort", units]
    return [["--sampling", one.sampling], ["--group-size", str(one.group_size)], size]


def _of_passes(asked: passes.Passes) -> list[list[str]]:
    return [
        ["--sampling", "passes"],
        ["--group-size", str(asked.group_size)],
        ["--cohort", str(asked.users_per_step)],
        ["--delta", f"{asked.delta:.3g}"],
    ]


def _of_cyclic(one: amplified.PlannedAmplified) -> list[list[str]]:
    return [
        ["--sampling", one.asked.sampling],
        ["--bands", str(one.asked.bands)],
        ["--group-size", str(one.asked.group_size)],
        ["--cohort", str(one.asked.units_per_step)],
    ]


def _command(args: argparse.Namespace, sizes: list[list[str]]) -> list[str]:
    """Returns the command of `finetune` that runs a plan, each flag with its value."""
    parts = [["--data", args.data or "CORPUS"]]
    for name, value in _given_text_options(args).items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            parts.append([f"--{'' if value else 'no-'}{flag}"])
        else:
            parts.append([f"--{flag}", str(value)])
    parts.append(["--initial-weights", str(args.initial_weights or "DIR")])
    if args.proxy_data is not None:
        parts.append(["--proxy-data", args.proxy_data])
    parts += sizes
    if args.users is None:
        parts.append(["--group-size-looked-at-users"])
    numbers = {"--target-epsilon": args.target_epsilon, "--steps": args.steps}
    if args.delta is not None:
        numbers["--delta"] = args.delta
    parts += [[flag, repr(number).removesuffix(".0")] for flag, number in numbers.items()]
    if of_metrics := _share(args):
        parts.append(["--budget-shares", f"metrics={of_metrics:g}"])
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


def _users(args: argparse.Namespace) -> example_sampling.Users:
    from tff_dpftrl.finetuning import example_sampling

    if (args.users is None) != (args.examples_per_user is None):
        raise validation.UsageError("--users and --examples-per-user go together.")
    given = set(_given_text_options(args))
    if args.proxy_data is not None:
        given.discard("pretokenized")  # Which is of that file, too.
    if args.data is None and given:
        name = min(given).replace("_", "-")
        raise validation.UsageError(f"--{name} is for --data, which is not given: leave it out.")
    if args.users is not None:
        count = validation.integer("--users", args.users, minimum=1)
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

    text = language_config.TextConfig(args.data, **_given_text_options(args))
    return example_sampling.of_text(corpus.read_users(text.text).train)


def _given_text_options(args: argparse.Namespace) -> dict[str, Any]:
    return {f.name: vars(args)[f.name] for f in _text_options() if f.name in args}


def _table(args: argparse.Namespace) -> tables.TableOptions:
    return language_config.TextConfig(**_given_text_options(args)).table


def _model(args: argparse.Namespace) -> trained_model.TrainedFiles | None:
    """Loads the model in --initial-weights."""
    if args.initial_weights is None:
        if args.proxy_data is not None:
            raise validation.UsageError("--proxy-data is for --initial-weights: give that too.")
        return None
    from tff_dpftrl.training import warm_start

    warm_start.refuse_protected(args.initial_weights, args.data or "", _table(args))
    return warm_start.find(args.initial_weights)


def _measure(
    model: trained_model.TrainedFiles, args: argparse.Namespace, plans: list[plan_lib.Plan]
) -> proxies.Proxies:
    """Measures the norms of the model's gradients on public text."""
    print("Measuring gradients of public text ...", file=sys.stderr)
    from tff_dpftrl.finetuning import proxies

    return proxies.of_model(
        model.load(),
        args.proxy_data or "standard-library",
        protected=args.data or "",
        largest_group=max(one.rows_per_unit for one in plans),
        is_tokenized=_given_text_options(args).get("pretokenized", False),
        table=_table(args),
    )


def _gradient_norms(
    args: argparse.Namespace, plans: list[plan_lib.Plan], measured: proxies.Proxies | None
) -> dict[str, group_size.GradientNorms]:
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


def _name(one: plan_lib.Plan) -> str:
    from tff_dpftrl.finetuning import plan

    if one.sampling == plan.EXAMPLE:
        return f"ELS, G = {one.group_size}, B = {one.expected_units:g}"
    return f"ULS, G = {one.group_size}, M = {one.expected_units:g}"


def _as_json(
    one: plan_lib.Plan,
    users: example_sampling.Users,
    norms: Mapping[str, group_size.GradientNorms],
) -> dict[str, Any]:
    values = dataclasses.asdict(one)
    if not one.others:
        del values["others"]
    return values | {
        "sampling_probability": one.sampling_probability,
        **_compared(one, users, norms),
    }


def _passes_json(
    turns: passes.PlannedPasses,
    users: example_sampling.Users,
    norms: Mapping[str, group_size.GradientNorms],
) -> dict[str, Any]:
    return {
        **dataclasses.asdict(turns.asked),
        "noise_multiplier": turns.noise_multiplier,
        "participations": turns.participations,
        **_compared(turns, users, norms),
    }


def _cyclic_json(
    one: amplified.PlannedAmplified,
    users: example_sampling.Users,
    norms: Mapping[str, group_size.GradientNorms],
) -> dict[str, Any]:
    return {
        **dataclasses.asdict(one.asked),
        "sampling_probability": one.plan.cyclic.sampling_probability,
        "noise_multiplier": one.plan.noise_multiplier,
        **_compared(one, users, norms),
    }


def _compared(
    one: plan_lib.Plan | passes.PlannedPasses | amplified.PlannedAmplified,
    users: example_sampling.Users,
    norms: Mapping[str, group_size.GradientNorms],
) -> dict[str, Any]:
    """Returns what all ways are compared by."""
    return {
        "epsilon": one.epsilon,
        "noise_of_average": one.noise_of_average,
        "expected_gradients": one.expected_gradients(users),
        "share_of_examples_used": one.share_of_examples_used(users),
        "relative_noise": {name: one.relative_noise(norm) for name, norm in norms.items()},
    }


def _row(name: str, way: Mapping[str, Any]) -> list[str]:
    """Returns a way as cells of the table."""
    from tff_dpftrl.accounting import display

    probability = way.get("sampling_probability")
    return [
        name,
        "-" if probability is None else f"{probability:.4g}",
        f"{way['noise_multiplier']:.4g}",
        f"{way['noise_of_average']:.4g}",
        f"{way['expected_gradients']:.0f}",
        f"{100 * way['share_of_examples_used']:.1f} %",
        display.round_up(way["epsilon"]),
        *(f"{noise:.4g}" for noise in way["relative_noise"].values()),
    ]


def _advice(
    recommended: plan_lib.Plan,
    best: dict[str, plan_lib.Plan],
    users: example_sampling.Users,
    plans: list[plan_lib.Plan],
    measured: proxies.Proxies | None,
) -> list[str]:
    import numpy as np

    from tff_dpftrl.accounting import display
    from tff_dpftrl.finetuning import plan

    median = float(np.median(users.num_examples))
    lines = [
        f"{len(users)} users with {int(users.num_examples.sum())} examples, median {median:g}; "
        f"delta = {display.delta(recommended.delta, 3)}.",
        f"* Recommended: {_name(recommended)}: the least noise relative to the gradient"
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
    if "halfway" in best:
        names = {name: _name(one) for name, one in best.items()}
        if len(set(names.values())) == 1:
            lines.append("It is the best one whatever the gradients are.")
        else:
            lines.append(
                f"Best if a user's gradients are all equal: {names['equal']}; if they have nothing "
                f"in common: {names['diverse']}. Give --initial-weights to measure it."
            )
    if any(one.sampling == plan.EXAMPLE for one in plans):
        lines.append(
            "The group sizes of ELS lie around the exact median, which the guarantee does not "
            "cover: declare one, or take a private median."
        )
    lines.append(
        "The number of users or the size of the pool is treated as public, and the samples must "
        "stay secret."
    )
    return lines
