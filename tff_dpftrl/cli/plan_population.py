"""Answers of `tff-dpftrl plan --population`: how to run for a target, and what sets it up."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tff_dpftrl import validation
from tff_dpftrl.accounting import (
    budget_shares,
    display,
    parts,
    planner,
    planner_plots,
    planner_request,
    sampled_plans,
)
from tff_dpftrl.cli import delta_flag, mechanism_flags, output
from tff_dpftrl.mechanisms import table
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.runtime.tasks import secure_groups, task_config

_TRAINING_SHARE = 0.8  # Of the users of a file, `train` keeps the others for evaluation.
_NEIGHBOURS = 60  # Of a device in the largest group with noise parties: see `secure_groups`.
_WORTH_IT = (
    "By the rule that twice the clients a round, each device twice as often, are worth it if they "
    "lower\n{} by a fifth."
)
# Columns of the table, by the names of JSON.
_COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "report_goal": ("goal", str),
    "mechanism": ("mechanism", str),
    "min_sep": ("min-sep", str),
    "max_participations": ("max", str),
    "sampling_groups": ("sampling-groups", "{:.4g}".format),
    "sampling_probability": ("sampling-probability", "{:.4g}".format),
    "bins": ("bins", "{:.4g}".format),
    "noise_multiplier": ("z", display.round_up),
    "noise_in_sum": ("noise", "{:.3g}".format),
    "rho_zcdp": ("rho", lambda rho: "-" if rho is None else display.round_up(rho, 3)),
    "epsilon": ("epsilon", display.round_up),
    "memory_bytes": ("memory", display.data_size),
    "upload_bytes": ("upload", display.data_size),
}


def print_plans(args: argparse.Namespace) -> None:
    """Plans for devices, prints the plans and which is recommended, and draws --plot."""
    request = _request(args)
    delta_flag.check_for_population(args.delta, args.population)
    if args.plot is not None:
        planner_plots.format_of(args.plot)  # Refuses what could not be written.
    plans = planner.make_plans(request, args.compare)
    for report_goal, reason in request.schemas()[1].items():
        if args.report_goals or report_goal <= args.population:
            print(f"Report goal {report_goal} is left out: {reason}", file=sys.stderr)
    for name in planner.default_mechanisms(1) if args.compare is None else ():
        if name not in planner.default_mechanisms(args.rounds):
            print(f"Mechanism {name} is left out: it is for fewer rounds.", file=sys.stderr)
    shown = [plan.to_dict() for plan in (plans if args.all else planner.pareto(plans))]
    production = planner.production_noise_in_sum(args.rounds, request.workload)
    best = planner.recommend(plans, production if request.target_noise is None else None)
    users, claim = _training_users(best), best.guarantee
    costs = parts.costs(claim.weights, claim.mechanism, claim.others, claim.delta)
    if args.format == "json":
        recommended = best.to_dict() | {"strategy": best.strategy.to_dict()}
        recommended |= {"parts": [dataclasses.asdict(cost) for cost in costs]} if costs else {}
        recommended["training_users_needed"] = users
        recommended["users_of_a_file_needed"] = _users_of_a_file(users)
        report = {"hypothesis": planner.HYPOTHESIS, "recommended": recommended, "plans": shown}
        output.print_json(report)
    else:
        _print_table(shown)
        lines = ["", *_reasons(best, request, production)]
        lines += ["", *_split(costs, claim.epsilon, claim.delta)] if costs else []
        lines += ["", planner.HYPOTHESIS, "", "To run it:"]
        print("\n".join([*lines, *_commands(best, request, args.workload)]))
    if args.plot is not None:
        title = f"{args.population:,} devices, {args.rounds:,} rounds, δ = "
        planner_plots.save_plans(args.plot, plans, title + display.delta(args.delta))


def print_sampled_plans(args: argparse.Namespace) -> None:
    """Plans a run whose clients are drawn in secret, and prints the plans."""
    delta_flag.check_for_population(args.delta, args.population)
    plans = sampled_plans.make_plans(
        args.sampling,
        population=args.population,
        num_rounds=args.rounds,
        report_goals=_report_goals(args),
        target_epsilon=args.target_epsilon,
        delta=args.delta,
        shares=_shares(args),
    )
    shown = plans if args.all else sampled_plans.least_noise(plans)
    rows = [plan.to_dict() for plan in shown]
    if args.format == "json":
        output.print_json({"hypothesis": planner.HYPOTHESIS, "plans": rows})
        return
    _print_table(
        [row | {"memory_bytes": 4 * args.parameters * row["memory_copies"]} for row in rows]
    )
    if shown[0].costs:
        print("\n" + "\n".join(_split(shown[-1].costs, shown[-1].epsilon, args.delta)))
    print(f"\n{planner.HYPOTHESIS}")


def _print_table(plans: Sequence[Mapping[str, Any]]) -> None:
    """Prints plans, given as in JSON."""
    columns = {name: column for name, column in _COLUMNS.items() if name in plans[0]}
    rows = [[text(plan[name]) for name, (_, text) in columns.items()] for plan in plans]
    output.print_table([[heading for heading, _ in columns.values()], *rows], left=1)


def _shares(args: argparse.Namespace) -> dict[str, float]:
    return {} if args.budget_shares is None else budget_shares.parse(args.budget_shares)


def _request(args: argparse.Namespace) -> planner_request.Request:
    if (args.timer_hours is None) != (args.rounds_per_day is None):
        raise validation.UsageError("--timer-hours and --rounds-per-day go together.")
    min_sep, target_noise = args.min_sep, args.target_noise
    if args.timer_hours is not None:
        min_sep = planner_request.min_sep_of_timer(args.timer_hours, args.rounds_per_day)
    workload = mechanism_flags.workload_from(args, args.rounds)
    if args.keep_noise_of is not None:
        name, noise_multiplier, goal = args.keep_noise_of
        most = min(planner_request.largest_min_sep(args.population, goal), args.rounds)
        target_noise = planner.noise_in_sum(
            table.build(name, schema_lib.MinSep.as_many_as_fit(args.rounds, most)),
            num_rounds=args.rounds,
            noise_multiplier=noise_multiplier,
            report_goal=goal,
            workload=workload,
        )
    names = ("population", "delta", "target_epsilon", "target_rho", "min_sep_fraction")
    names += ("max_participations", "secagg_inflation", "noise_parties")
    return planner_request.Request(
        **{name: getattr(args, name) for name in names},
        num_rounds=args.rounds,
        shares=_shares(args),
        target_noise=target_noise,
        report_goals=_report_goals(args),
        min_sep=min_sep,
        num_parameters=args.parameters,
        workload=workload,
    )


def _report_goals(args: argparse.Namespace) -> tuple[int, ...]:
    """Returns the numbers of clients a round to try: with noise parties, those of one group."""
    goals = args.report_goals or planner_request.DEFAULT_REPORT_GOALS
    for goal in goals:
        validation.integer("--report-goals", goal, minimum=1)
    if not args.noise_parties:
        return goals
    largest, most = secure_groups.LARGEST_NOISED, secure_groups.MOST_PARTIES
    if args.noise_parties > most:
        raise validation.UsageError(
            f"--noise-parties must be at most {most}, got {args.noise_parties}: each adds the "
            "whole noise."
        )
    fitting = tuple(goal for goal in goals if goal <= largest)
    if not fitting:
        raise validation.UsageError(
            f"--noise-parties need one group a round, of {largest} devices at most, and "
            f"--report-goals has {min(goals)}: lower it."
        )
    return fitting


def _split(costs: Sequence[parts.Cost], epsilon: float, delta: float) -> list[str]:
    """Returns how a budget is split, with the cost of each part alone."""
    return [
        f"Epsilon {display.round_up(epsilon)} at delta {display.delta(delta)} is of all together, "
        "by shares of the squared mu:",
        *(
            f"  {cost.name}: {'the rest' if cost.name == costs[0].name else cost.says}; alone "
            f"epsilon {display.round_up(cost.epsilon_alone)}"
            for cost in costs
        ),
    ]


def _training_users(plan: planner.Plan) -> int:
    """Returns the smallest population that can keep up the plan's schema."""
    schema = plan.guarantee.schema
    by_participations = -(-schema.num_rounds * plan.report_goal // schema.max_participations)
    return max(schema.min_sep * plan.report_goal, by_participations)


def _users_of_a_file(training_users: int) -> int:
    """Returns how many users a file needs for a number of training users."""
    # A hash chooses each for training with probability 0.8. With so many, fewer than wanted are
    # chosen with a chance of about one in a million: 0.8 n - 5 √(0.16 n) = training_users.
    share = _TRAINING_SHARE
    slack = 5.0 * math.sqrt(share * (1.0 - share))
    root = (slack + math.sqrt(slack**2 + 4.0 * share * training_users)) / (2.0 * share)
    return math.ceil(root**2)


def _reasons(plan: planner.Plan, request: planner_request.Request, production: float) -> list[str]:
    """Returns why a plan is recommended, and what it promises."""
    claim, schema = plan.guarantee, plan.guarantee.schema
    what = f"{plan.mechanism} with {plan.report_goal} clients a round"
    noise = f"noise {plan.noise_in_sum:.3g}; tree, z 7, 6500 clients have {production:.3g}"
    if request.target_noise is not None:
        lines = [
            f"Recommended: {what} ({noise}).",
            _WORTH_IT.format("mu = sensitivity / noise, with which epsilon grows,"),
        ]
    elif plan.is_as_quiet_as(production):
        lines = [
            f"Recommended: {what}, the fewest clients a round with no more noise than",
            f"Gboard's production models ({noise}).",
        ]
    else:
        lines = [
            "None of these plans is as quiet as Gboard's production models; more devices or a",
            f"larger epsilon lower the noise. To begin with: {what} ({noise}).",
            _WORTH_IT.format("the noise"),
        ]
    epsilon = display.round_up(claim.epsilon)
    asked = plan.report_goal * schema.num_rounds / request.population
    lines += [
        f"It is ({epsilon}, {display.delta(claim.delta)})-DP if no device "
        f"takes part more than {schema.max_participations} times,",
        f"or twice within {schema.min_sep} rounds; on average one takes part {asked:.3g} times.",
    ]
    if schema.min_sep > 1:
        half = plan.what_if(min_sep=-(-schema.min_sep // 2))
        lines.append(
            f"If devices come back after {half.schema.min_sep} rounds: epsilon "
            f"{display.round_up(half.epsilon)}. A separation is a result of timers and speed; "
            "observe it."
        )
    if request.workload is not None:
        lines.append(f"Noise is that of the models, for {request.workload.description}.")
    many = request.noise_parties
    if many == 1:
        lines += [
            "",
            "The noise party adds the noise within the secure sums in place of the server: the",
            f"same noise, and epsilon {epsilon} is also against the server, unless both collude.",
            "It is not against the party itself, which can subtract its noise from what is",
            "released: name two to be safe from each alone.",
        ]
    elif many:
        lines += [
            "",
            f"Each of the {many} noise parties adds the whole noise, that of z: the released model",
            f"has {many} times the variance, {math.sqrt(many):.3f} times the noise, as above.",
            f"Epsilon {epsilon} counts on the noise of one party alone: it holds unless the server",
            f"colludes with all {many}.",
        ]
    return lines


def _commands(plan: planner.Plan, request: planner_request.Request, workload: str) -> list[str]:
    """Returns the commands that make the strategy, account for the run, and begin it."""
    schema = plan.guarantee.schema
    participation = (
        f"--rounds {schema.num_rounds} --min-sep {schema.min_sep} "
        f"--max-participations {schema.max_participations}"
    )
    make = f"--mechanism {plan.mechanism} {participation}"
    if "workload" in table.MECHANISMS[plan.mechanism].options and workload != "prefix":
        make += f" --workload {workload}"
    noise = f"--noise-multiplier {display.round_up(plan.guarantee.noise_multiplier, digits=7)}"
    run, delta = f"--strategy strategy.json {participation}", f"--delta {request.delta!r}"
    account = f"{run} {noise} {delta}"
    if request.shares:
        # Shares are shares of the whole budget, which a noise multiplier does not determine.
        shares = ",".join(f"{name}={share:g}" for name, share in request.shares.items())
        noise = f"--target-epsilon {request.target_epsilon!r} --budget-shares {shares}"
        noise += " --vocabulary dp" if "vocabulary" in request.shares else ""
    learn = f"{run} {noise} {delta} --clients-per-round {plan.report_goal}"
    if request.secagg_inflation is not None:
        bits = -(-plan.upload_bytes * 8 // (1 << (request.num_parameters - 1).bit_length()))
        learn += f" --secagg-bits {bits}"
    commands = [
        f"  tff-dpftrl plan {make} --output strategy.json",
        f"  tff-dpftrl account {account}",
    ]
    if request.noise_parties:
        return [*commands, f"  tff-dpftrl task new {learn} {_noised_task(plan, request)}"]
    users = _training_users(plan)
    return [
        *commands,
        f"  tff-dpftrl train {learn} --data YOUR_DATA --output results",
        f"`train` keeps 2 in 10 users of a file for evaluation: for the {users:,} training users",
        f"of this plan the file must have {_users_of_a_file(users):,} users.",
    ]


def _noised_task(plan: planner.Plan, request: planner_request.Request) -> str:
    """Returns the options by which `task new` has noise parties, in one group a round."""
    goal, schema = plan.report_goal, plan.guarantee.schema
    # More devices, as far as the declared participation and the size of the group allow.
    over_selection = min(
        task_config.ServingOptions.over_selection,
        request.population / (schema.min_sep * goal),
        request.population * schema.max_participations / (schema.num_rounds * goal),
        secure_groups.LARGEST_NOISED / goal,
    )
    over_selection = math.floor(100 * over_selection) / 100
    size = math.ceil(over_selection * goal)
    keys = ",".join(f"party_{index + 1}.pub" for index in range(request.noise_parties))
    options = f"--over-selection {over_selection:g} --devices-per-aggregator {size}"
    if size > secure_groups.LARGEST_COMPLETE:
        options += f" --secure-neighbours {_NEIGHBOURS}"
    return (
        f"--secure-aggregation honest-but-curious {options} --noise-party {keys} "
        f"--population NAME --num-devices {request.population} --output tasks/NAME"
    )
