"""Report of `tff-dpftrl plan`: a table, advice, and the commands that set a plan up."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tff_dpftrl.accounting import guarantee as guarantee_lib
    from tff_dpftrl.accounting import parts as parts_lib
    from tff_dpftrl.accounting import planner as planner_lib
    from tff_dpftrl.accounting import planner_request, sampled_plans

    WhatIf = guarantee_lib.Guarantee | str | None

_TRAINING_SHARE = 0.8  # Of the users of a file, `train` keeps the others for evaluation.
_NEIGHBOURS = 60  # Of a device in the largest group with noise parties: see `secure_groups`.


def as_json(
    shown: Sequence[planner_lib.Plan], what_ifs: Sequence[WhatIf], recommended: planner_lib.Plan
) -> dict[str, Any]:
    """Returns the report as JSON-compatible values.

    `what_ifs` has the guarantee of each plan under other conditions, or the reason why there is
    none; None if it was not asked for.
    """
    from tff_dpftrl.accounting import planner

    plans = []
    for plan, what_if in zip(shown, what_ifs, strict=True):
        row = plan.to_dict()
        if isinstance(what_if, str):
            row["what_if"] = {"impossible": what_if}
        elif what_if is not None:
            row["what_if"] = what_if.to_dict()
        plans.append(row)
    return {
        "hypothesis": planner.HYPOTHESIS,
        "recommended": recommended.to_dict()
        | {
            "strategy": recommended.strategy.to_dict(),
            **_parts_json(recommended.guarantee),
            "training_users_needed": _training_users(recommended),
            "users_of_a_file_needed": _users_of_a_file(_training_users(recommended)),
        },
        "plans": plans,
    }


def _costs(claim: guarantee_lib.Guarantee) -> tuple[parts_lib.Cost, ...]:
    from tff_dpftrl.accounting import parts

    return parts.costs(claim.weights, claim.mechanism, claim.others, claim.delta)


def _parts_json(claim: guarantee_lib.Guarantee) -> dict[str, Any]:
    rows = _costs(claim)
    return {"parts": [dataclasses.asdict(row) for row in rows]} if rows else {}


def split(costs: Sequence[parts_lib.Cost], epsilon: float, delta: float) -> str:
    """Returns a few lines on how a budget is split, with the cost of each part alone."""
    from tff_dpftrl.accounting import display

    rows = [
        f"  {row.name}: {'the rest' if row.name == costs[0].name else row.says}; alone "
        f"epsilon {display.round_up(row.epsilon_alone)}"
        for row in costs
    ]
    return "\n".join(
        [
            f"Epsilon {display.round_up(epsilon)} at delta {display.delta(delta)} is of all "
            "together, by shares of the squared mu:",
            *rows,
        ]
    )


_COLUMNS = ("goal", "mechanism", "min-sep", "max", "z", "noise", "rho", "epsilon", "memory")


def rows(shown: Sequence[planner_lib.Plan], what_ifs: Sequence[WhatIf]) -> list[list[str]]:
    """Returns the plans as cells of a table, its heading first; arguments as for `as_json`."""
    from tff_dpftrl.accounting import display

    asked = any(what_if is not None for what_if in what_ifs)
    table = [[*_COLUMNS, "upload", *(["what if: epsilon"] if asked else [])]]
    for plan, what_if in zip(shown, what_ifs, strict=True):
        claim = plan.guarantee
        row = [
            str(plan.report_goal),
            plan.mechanism,
            str(claim.schema.min_sep),
            str(claim.schema.max_participations),
            display.round_up(claim.noise_multiplier),
            f"{plan.noise_in_sum:.3g}",
            display.round_up(claim.rho_zcdp, 3) if claim.is_gaussian else "-",
            display.round_up(claim.epsilon),
            _bytes(plan.memory_bytes),
            _bytes(plan.upload_bytes),
        ]
        if asked:
            row.append("no" if isinstance(what_if, str) else display.round_up(what_if.epsilon))
        table.append(row)
    return table


def sampled_rows(
    shown: Sequence[sampled_plans.SampledPlan], num_parameters: int
) -> list[list[str]]:
    """Returns plans with secret sampling as cells of a table, its heading first."""
    from tff_dpftrl.accounting import display

    given = list(shown[0].given)
    table = [
        ["goal", "mechanism", *(name.replace("_", "-") for name in given)]
        + ["z", "noise", "epsilon", "memory"]
    ]
    for plan in shown:
        table.append(
            [
                str(plan.report_goal),
                plan.strategy.name,
                *(f"{plan.given[name]:.4g}" for name in given),
                display.round_up(plan.noise_multiplier),
                f"{plan.noise_in_sum:.3g}",
                display.round_up(plan.epsilon),
                _bytes(4 * num_parameters * plan.memory_copies),
            ]
        )
    return table


def _bytes(count: int) -> str:
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB"):
        if value >= 1000.0:
            value, unit = value / 1000.0, larger
    return f"{value:.3g} {unit}"


_WORTH_IT = (
    "By the rule that twice the clients a round, each device twice as often, are worth it if they "
    "lower\n{} by a fifth."
)


def _training_users(plan: planner_lib.Plan) -> int:
    """Returns the smallest population that can keep up the plan's schema."""
    schema = plan.guarantee.schema
    by_participations = -(-schema.num_rounds * plan.report_goal // schema.max_participations)
    return max(schema.min_sep * plan.report_goal, by_participations)


def _users_of_a_file(training_users: int) -> int:
    """Returns how many users a file needs for a number of training users.

    A hash chooses each for training with probability 0.8. With so many, fewer than wanted
    are chosen with a chance of about one in a million: 0.8 n - 5 √(0.16 n) = training_users.
    """
    share = _TRAINING_SHARE
    slack = 5.0 * math.sqrt(share * (1.0 - share))
    root = (slack + math.sqrt(slack**2 + 4.0 * share * training_users)) / (2.0 * share)
    return math.ceil(root**2)


def advice(
    plan: planner_lib.Plan, request: planner_request.Request, workload: str = "prefix"
) -> str:
    """Returns why a plan is recommended, what it promises, and the commands that set it up."""
    from tff_dpftrl.accounting import display, planner

    claim, schema = plan.guarantee, plan.guarantee.schema
    production = planner.production_noise_in_sum(schema.num_rounds, request.workload)
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
    asked = plan.report_goal * schema.num_rounds / request.population
    lines = [
        "",
        *lines,
        f"It is ({display.round_up(claim.epsilon)}, {display.delta(claim.delta)})-DP if no device "
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
    if request.noise_parties:
        lines += ["", *_of_parties(request.noise_parties, display.round_up(claim.epsilon))]
    if claim.others:
        lines += ["", split(_costs(claim), claim.epsilon, claim.delta)]
    lines += ["", planner.HYPOTHESIS, "", "To run it:", *_commands(plan, request, workload)]
    return "\n".join(lines)


def _of_parties(number: int, epsilon: str) -> list[str]:
    """Describes what noise parties cost and promise."""
    if number == 1:
        return [
            "The noise party adds the noise within the secure sums in place of the server: the",
            f"same noise, and epsilon {epsilon} is also against the server, unless both collude.",
            "It is not against the party itself, which can subtract its noise from what is",
            "released: name two to be safe from each alone.",
        ]
    return [
        f"Each of the {number} noise parties adds the whole noise, that of z: the released model",
        f"has {number} times the variance, {math.sqrt(number):.3f} times the noise, as above.",
        f"Epsilon {epsilon} counts on the noise of one party alone: it holds unless the server",
        f"colludes with all {number}.",
    ]


def _noised_task(plan: planner_lib.Plan, request: planner_request.Request) -> str:
    """Returns the options by which `task new` has noise parties, in one group a round."""
    from tff_dpftrl.runtime.tasks import secure_groups, task_config

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


def _commands(plan: planner_lib.Plan, request: planner_request.Request, workload: str) -> list[str]:
    from tff_dpftrl.accounting import display
    from tff_dpftrl.mechanisms import table

    schema = plan.guarantee.schema
    participation = (
        f"--rounds {schema.num_rounds} --min-sep {schema.min_sep} "
        f"--max-participations {schema.max_participations}"
    )
    optimize = f"tff-dpftrl optimize --mechanism {plan.mechanism} {participation}"
    if "workload" in table.MECHANISMS[plan.mechanism].options and workload != "prefix":
        optimize += f" --workload {workload}"
    noise = display.round_up(plan.guarantee.noise_multiplier, digits=7)
    run, noise = f"--strategy strategy.json {participation}", f"--noise-multiplier {noise}"
    account = f"{run} {noise} --delta {request.delta!r}"
    if request.shares:
        # Shares are shares of the whole budget, which a noise multiplier does not determine.
        shares = ",".join(f"{name}={share:g}" for name, share in request.shares.items())
        noise = f"--target-epsilon {request.target_epsilon!r} --budget-shares {shares}"
        noise += " --vocabulary dp" if "vocabulary" in request.shares else ""
    learn = f"{run} {noise} --delta {request.delta!r} --clients-per-round {plan.report_goal}"
    if request.secagg_inflation is not None:
        bits = -(-plan.upload_bytes * 8 // (1 << (request.num_parameters - 1).bit_length()))
        learn += f" --secagg-bits {bits}"
    commands = [f"  {optimize} --output strategy.json", f"  tff-dpftrl account {account}"]
    if request.noise_parties:
        return [*commands, f"  tff-dpftrl task new {learn} {_noised_task(plan, request)}"]
    return [
        *commands,
        f"  tff-dpftrl train {learn} --data YOUR_DATA --output results",
        f"`train` keeps 2 in 10 users of a file for evaluation: for the {_training_users(plan):,} "
        "training users",
        f"of this plan the file must have {_users_of_a_file(_training_users(plan)):,} users.",
    ]
