"""`tff-dpftrl plan`: how to run so that privacy and noise come out as wanted."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from tff_dpftrl import validation
from tff_dpftrl.accounting import samplings
from tff_dpftrl.cli import delta_flag, mechanism_flags, output, plan_report

if TYPE_CHECKING:
    from tff_dpftrl.accounting import guarantee as guarantee_lib
    from tff_dpftrl.accounting import planner as planner_lib
    from tff_dpftrl.accounting import planner_request
    from tff_dpftrl.mechanisms import workload as workload_lib

_DESCRIPTION = """\
Plan a DP-FTRL run: mechanism, report goal (clients a round), noise multiplier and how often a
device may take part, from the size of the population and a privacy target.

Prints the Pareto set: plans that no other beats in privacy, noise, report goal and memory; one
of them is recommended, with the commands that set it up. The noise is that in the sum of the
averaged updates so far, per unit of clip norm; it stands for utility by a hypothesis. With
--workload it is the noise in the models, per unit of clip norm and learning rate.

The recommended plan has the fewest clients a round among those with no more noise than Gboard's
production models. If there is none, or if the noise is the target, a plan with twice the clients a
round, and each device twice as often, is preferred only if it lowers the noise (or mu, with which
epsilon grows) by a fifth.

With --sampling, one party holds the data of --population clients and draws each round's clients in
secret. For each number of clients a round, the plan with the least noise is printed. With cyclic
and b-min-sep, it is the best of several numbers of bands of correlated noise, up to 64 (--all
prints those that were tried). With bins, the number of bins follows from the number of clients a
round, and the noise is a BLT's: give --report-goals, since each takes seconds.

With --budget-shares, --target-epsilon is for everything that the run releases. A share of the
budget is a share of the squared mu of the Gaussian mechanism that spends it all. These quantities
add up; epsilon does not. The weights get the rest: their noise grows by a factor of
1 / sqrt(1 - shares), and some more for the vocabulary's share of delta.
"""

_EPILOG = """\
examples:
  # All that is known: 4 million devices, 2000 rounds, a target.
  tff-dpftrl plan --population 4000000 --rounds 2000 --target-epsilon 5 --delta 1e-10

  # Keep the noise of a run that was good enough (tree, z 7, 6500 clients); what does it cost?
  tff-dpftrl plan --population 4000000 --rounds 2000 --delta 1e-10 --keep-noise-of tree:7:6500

  # A timer of 3 days at 250 rounds a day; and if the run takes 3000 rounds, 500 rounds apart?
  tff-dpftrl plan --population 9000000 --rounds 2000 --target-epsilon 5 --delta 1e-10 \\
      --timer-hours 72 --rounds-per-day 250 --what-if-rounds 3000 --what-if-min-sep 500 \\
      --plot plans.png

  # Data in one place: groups take turns, and are sampled in secret, for a run of 500 rounds.
  tff-dpftrl plan --population 1600 --rounds 500 --target-epsilon 4 --delta 1e-5 \\
      --report-goals 64 --sampling cyclic --all
"""


def add_parser(subparsers) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser(
        "plan",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--population", type=int, required=True, metavar="N", help="Number of devices that train."
    )
    parser.add_argument("--rounds", type=int, required=True, metavar="N", help="Number of rounds.")
    delta_flag.add(parser)
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument(
        "--target-epsilon", type=float, metavar="E", help="Epsilon that the plans reach."
    )
    target.add_argument(
        "--target-rho", type=float, metavar="R", help="rho-zCDP that the plans reach."
    )
    target.add_argument(
        "--target-noise",
        type=float,
        metavar="X",
        help="Largest noise of the plans, in the unit that this command prints.",
    )
    target.add_argument(
        "--keep-noise-of",
        type=_reference,
        metavar="MECHANISM:Z:GOAL",
        help="Reference for the noise: the plans have at most the noise of this mechanism, with "
        "noise multiplier Z and GOAL clients a round.",
    )
    parser.add_argument(
        "--budget-shares",
        metavar="PART=SHARE,...",
        help="Shares of the budget of --target-epsilon for what is released besides the weights: "
        "vocabulary, metrics; a name alone has the default share. Default: all for the weights.",
    )
    parser.add_argument(
        "--report-goals",
        type=_positive_integers,
        metavar="M,M,...",
        help=("Numbers of clients a round to consider. Default: 100 to 20000, in ten steps."),
    )
    separation = parser.add_mutually_exclusive_group()
    separation.add_argument(
        "--min-sep",
        type=int,
        metavar="B",
        help="Least stride that the guarantee relies on. Default: the largest possible.",
    )
    separation.add_argument(
        "--min-sep-fraction",
        type=float,
        default=1.0,
        metavar="F",
        help="Share of the largest possible stride that the guarantee relies on (production saw "
        "0.14 to 0.81). Default: 1.",
    )
    separation.add_argument(
        "--timer-hours",
        type=float,
        metavar="H",
        help="Number of hours that a device waits after it took part; with --rounds-per-day.",
    )
    parser.add_argument(
        "--rounds-per-day", type=float, metavar="R", help="Number of rounds in a day."
    )
    parser.add_argument(
        "--max-participations",
        type=int,
        metavar="K",
        help="Largest number of rounds of one device, at least as many as "
        "population, report goal and rounds imply. Default: as many as fit.",
    )
    parser.add_argument(
        "--mechanisms",
        metavar="NAME,...",
        help="Mechanisms to consider. Default: those that can be run and are "
        "optimised in about a second, which leaves out bandmf.",
    )
    parser.add_argument(
        "--parameters",
        type=int,
        default=4_050_000,
        metavar="P",
        help=("Number of the model's parameters, for memory and upload. Default: 4050000."),
    )
    parser.add_argument(
        "--secagg-inflation",
        type=float,
        metavar="F",
        help="Largest factor, such as 1.01, by which the rounding of secure "
        "aggregation may inflate the clip norm. Default: no secure aggregation.",
    )
    parser.add_argument(
        "--noise-parties",
        type=int,
        metavar="N",
        help="Number of noise parties, which add the noise within the secure sums of a task; with "
        "--secagg-inflation. Each adds the whole noise. Default: none, the server adds it.",
    )
    mechanism_flags.add_workload(parser)
    parser.add_argument(
        "--what-if-rounds",
        type=int,
        metavar="N",
        help="Number of rounds for which a second guarantee of each plan is printed.",
    )
    parser.add_argument(
        "--what-if-min-sep",
        type=int,
        metavar="B",
        help="Observed stride for which a second guarantee of each plan is printed.",
    )
    parser.add_argument(
        "--sampling",
        choices=samplings.SAMPLINGS,
        metavar="NAME",
        help=f"Secret sampling of the clients: {', '.join(samplings.SAMPLINGS)}. Default: none.",
    )
    parser.add_argument(
        "--plot", metavar="FILE", help="File for a plot of all plans: PNG, PDF or SVG."
    )
    parser.add_argument(
        "--all", action="store_true", help="Print all plans. Default: only the Pareto set."
    )
    output.add_format(parser)


def _shares(args: argparse.Namespace) -> dict[str, float]:
    """Returns the shares of the budget that are given."""
    if args.budget_shares is None:
        return {}
    from tff_dpftrl.accounting import budget_shares

    shares = budget_shares.parse(args.budget_shares)
    if args.target_epsilon is None:
        raise validation.UsageError("--budget-shares are shares of --target-epsilon: give it.")
    return shares


def _positive_integers(text: str) -> tuple[int, ...]:
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must look like 1000,6500, got {text!r}") from None
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"must be positive, got {text!r}")
    return values


def _reference(text: str) -> tuple[str, float, int]:
    try:
        name, noise_multiplier, report_goal = text.split(":")
        return name, float(noise_multiplier), int(report_goal)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must look like tree:7:6500, got {text!r}") from None


def run(args: argparse.Namespace) -> int:
    """Plans and prints; returns the exit status."""
    if args.sampling is not None:
        return _run_sampled(args)
    from tff_dpftrl.accounting import planner

    request = _request(args)
    names = None if args.mechanisms is None else args.mechanisms.split(",")
    delta_flag.check_for_population(args.delta, args.population)
    if args.plot is not None:
        from tff_dpftrl.accounting import display, planner_plots

        planner_plots.format_of(args.plot)  # Refuses what could not be written.
    plans = planner.make_plans(request, names)
    for report_goal, reason in request.schemas()[1].items():
        if args.report_goals or report_goal <= args.population:
            print(f"Report goal {report_goal} is left out: {reason}", file=sys.stderr)
    for name in planner.default_mechanisms(1) if names is None else ():
        if name not in planner.default_mechanisms(args.rounds):
            print(f"Mechanism {name} is left out: it is for fewer rounds.", file=sys.stderr)
    shown = plans if args.all else planner.pareto(plans)
    production = planner.production_noise_in_sum(args.rounds, request.workload)
    quiet_enough = production if request.target_noise is None else None
    recommended = planner.recommend(plans, quiet_enough)
    what_ifs = [_what_if(plan, args) for plan in shown]
    if args.format == "json":
        output.print_json(plan_report.as_json(shown, what_ifs, recommended))
    else:
        output.print_table(plan_report.rows(shown, what_ifs), left=1)
        print(plan_report.advice(recommended, request, args.workload))
    if args.plot is not None:
        title = (
            f"{args.population:,} devices, {args.rounds:,} rounds, δ = {display.delta(args.delta)}"
        )
        planner_plots.save_plans(args.plot, plans, title)
    return 0


_NOT_SAMPLED = (
    *("target_rho", "target_noise", "keep_noise_of", "min_sep", "timer_hours", "rounds_per_day"),
    *("max_participations", "mechanisms", "secagg_inflation", "what_if_rounds", "what_if_min_sep"),
    *("noise_parties", "plot"),
)


def _run_sampled(args: argparse.Namespace) -> int:
    """Plans a run with secret sampling and prints; returns the exit status."""
    from tff_dpftrl.accounting import planner, planner_request, sampled_plans

    unused = [name for name in _NOT_SAMPLED if getattr(args, name) is not None]
    if args.min_sep_fraction != 1.0:
        unused.append("min_sep_fraction")
    if unused:
        raise validation.UsageError(
            f"--{unused[0].replace('_', '-')} is not for --sampling, which takes --target-epsilon, "
            "--delta, --report-goals and --all."
        )
    delta_flag.check_for_population(args.delta, args.population)
    plans = sampled_plans.make_plans(
        args.sampling,
        population=args.population,
        num_rounds=args.rounds,
        report_goals=args.report_goals or planner_request.DEFAULT_REPORT_GOALS,
        target_epsilon=args.target_epsilon,
        delta=args.delta,
        shares=_shares(args),
    )
    shown = plans if args.all else sampled_plans.least_noise(plans)
    if args.format == "json":
        output.print_json(
            {"hypothesis": planner.HYPOTHESIS, "plans": [plan.to_dict() for plan in shown]}
        )
        return 0
    output.print_table(plan_report.sampled_rows(shown, args.parameters), left=1)
    if shown[0].costs:
        print(f"\n{plan_report.split(shown[-1].costs, shown[-1].epsilon, args.delta)}")
    print(f"\n{planner.HYPOTHESIS}")
    return 0


def _request(args: argparse.Namespace) -> planner_request.Request:
    from tff_dpftrl.accounting import planner_request

    min_sep = args.min_sep
    if (args.timer_hours is None) != (args.rounds_per_day is None):
        raise validation.UsageError("--timer-hours and --rounds-per-day go together.")
    if args.timer_hours is not None:
        min_sep = planner_request.min_sep_of_timer(args.timer_hours, args.rounds_per_day)
    for flag, value in (
        ("--what-if-rounds", args.what_if_rounds),
        ("--what-if-min-sep", args.what_if_min_sep),
    ):
        if value is not None:
            validation.integer(flag, value, minimum=1)
    workload = mechanism_flags.workload_from(args, args.rounds)
    target_noise = args.target_noise
    if args.keep_noise_of is not None:
        target_noise = _reference_noise(args, workload)
    return planner_request.Request(
        shares=_shares(args),
        population=args.population,
        num_rounds=args.rounds,
        delta=args.delta,
        target_epsilon=args.target_epsilon,
        target_rho=args.target_rho,
        target_noise=target_noise,
        report_goals=_report_goals(args),
        min_sep=min_sep,
        min_sep_fraction=args.min_sep_fraction,
        max_participations=args.max_participations,
        num_parameters=args.parameters,
        secagg_inflation=args.secagg_inflation,
        workload=workload,
        noise_parties=args.noise_parties or 0,
    )


def _report_goals(args: argparse.Namespace) -> tuple[int, ...]:
    """Returns the numbers of clients a round to try: with noise parties, those of one group."""
    from tff_dpftrl.accounting import planner_request

    goals = args.report_goals or planner_request.DEFAULT_REPORT_GOALS
    if not args.noise_parties:
        return goals
    from tff_dpftrl.runtime.tasks import secure_groups

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


def _reference_noise(args: argparse.Namespace, workload: workload_lib.Workload | None) -> float:
    from tff_dpftrl.accounting import planner, planner_request
    from tff_dpftrl.mechanisms import table
    from tff_dpftrl.participation import schema as schema_lib

    name, noise_multiplier, report_goal = args.keep_noise_of
    min_sep = min(planner_request.largest_min_sep(args.population, report_goal), args.rounds)
    return planner.noise_in_sum(
        table.build(name, schema_lib.MinSep.as_many_as_fit(args.rounds, min_sep)),
        num_rounds=args.rounds,
        noise_multiplier=noise_multiplier,
        report_goal=report_goal,
        workload=workload,
    )


def _what_if(
    plan: planner_lib.Plan, args: argparse.Namespace
) -> guarantee_lib.Guarantee | str | None:
    """Returns the guarantee under other conditions, or why there is none; None if not asked."""
    if args.what_if_rounds is None and args.what_if_min_sep is None:
        return None
    try:
        return plan.what_if(num_rounds=args.what_if_rounds, min_sep=args.what_if_min_sep)
    except ValueError as error:
        return str(error)
