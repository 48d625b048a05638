"""`tff-dpftrl account`: what a DP-FTRL run costs in privacy."""

from __future__ import annotations

import argparse
import dataclasses
import math
import shlex
from typing import TYPE_CHECKING, Any

from tff_dpftrl import validation
from tff_dpftrl.accounting import display
from tff_dpftrl.cli import delta_flag, mechanism_flags, output, sampling_flags

if TYPE_CHECKING:
    from tff_dpftrl.accounting import guarantee as guarantee_lib
    from tff_dpftrl.accounting import neighbours as neighbours_lib
    from tff_dpftrl.mechanisms import strategy as strategy_lib
    from tff_dpftrl.participation import sampling as sampling_lib
    from tff_dpftrl.participation import schema as schema_lib

_DESCRIPTION = """\
Account for the privacy of a DP-FTRL run: rho-zCDP, and epsilon at a delta.

The guarantee is for zeroing out all contributions of one client that takes part in at most
--max-participations rounds, any two of them at least --min-sep apart. epsilon is exact for a
Gaussian mechanism of the sensitivity, which is an upper bound where its line says so; epsilon_rdp
is the looser conversion that older papers used. Text output rounds up.

With --sampling, clients are drawn by the server in secret, and the guarantee rests on that: no
separation is promised. --neighbours and --group-of add a line for other neighbouring data sets.

A run that goes on more than once from the state after a round, as from a backup, releases more.
With --branches and --fork-at, all figures are for all branches together.
"""

_EPILOG = """\
examples:
  # es-ES of the Gboard paper's Table 1, whose MinS of 526 counts the rounds in between.
  tff-dpftrl account --mechanism tree --noise-multiplier 7 --rounds 1900 \\
      --min-sep-gap 526 --max-participations 3 --delta 1e-10

  # A run with adaptive clipping: restarts after 128 rounds and then every 1024.
  tff-dpftrl account --mechanism tree --noise-multiplier 7 --rounds 2000 --min-sep 300 \\
      --max-participations 7 --delta 1e-10 --first-restart 128 --restart-every 1024

  # A backup of the state after 1,000 of 2,000 rounds was continued beside the run itself.
  tff-dpftrl account --mechanism blt --noise-multiplier 7 --rounds 2000 --min-sep 300 \\
      --delta 1e-10 --branches 2 --fork-at 1000

  # DP-SGD; and what it promises to two users who are replaced by others together.
  tff-dpftrl account --noise-multiplier 1 --rounds 2000 --sampling poisson \\
      --sampling-probability 0.01 --neighbours substitute --group-of 2

  # Amplified by sampling: 400 groups of clients take turns, each client with probability 0.1.
  tff-dpftrl account --mechanism bandtoep --bands 400 --noise-multiplier 1 --rounds 2000 \\
      --delta 1e-10 --sampling cyclic --sampling-groups 400 --sampling-probability 0.1
"""


def add_parser(subparsers) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser(
        "account",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--noise-multiplier",
        type=float,
        metavar="Z",
        help="Standard deviation of the noise draws per unit of clip norm. With "
        "adaptive clipping: the total z of updates and clip norm together.",
    )
    delta_flag.add(parser)
    mechanism_flags.add_arguments(parser)
    sampling_flags.add_arguments(parser)
    sampling_flags.add_neighbours(parser)
    parser.add_argument(
        "--branches",
        type=int,
        metavar="N",
        help="Number of runs that continue from the state after the first --fork-at rounds.",
    )
    parser.add_argument(
        "--fork-at",
        type=int,
        metavar="T",
        help="Number of rounds that all --branches share. Each has its own noise after them.",
    )
    output.add_format(parser)


def run(args: argparse.Namespace) -> int:
    """Accounts and prints; returns the exit status."""
    needs = (("rounds",),) if args.sampling else mechanism_flags.RUN
    mechanism_flags.require(args, ("noise_multiplier",), *needs)
    delta_flag.check(args.delta)
    options = sampling_flags.options_from(args)
    _check_branches(args, is_sampled=options is not None)
    strategy, participation = sampling_flags.run_from(args, options)
    show(args, strategy, participation, args.noise_multiplier)
    return 0


def _check_branches(args: argparse.Namespace, *, is_sampled: bool) -> None:
    """Refuses --branches and --fork-at if they are out of range, or do not fit other flags."""
    if args.branches is None and args.fork_at is None:
        return
    if args.branches is None or args.fork_at is None:
        raise validation.UsageError(
            "--branches and --fork-at need each other: the number of branches, and the number of "
            "rounds that they share."
        )
    validation.integer("--branches", args.branches, minimum=1)
    validation.integer("--fork-at", args.fork_at, minimum=0)
    if args.fork_at > args.rounds:
        raise validation.UsageError(
            f"--fork-at must be at most --rounds {args.rounds}, got {args.fork_at}."
        )
    if is_sampled:
        rounds = args.fork_at + args.branches * (args.rounds - args.fork_at)
        raise validation.UsageError(
            "--branches is not for --sampling. For poisson, if each branch draws its "
            f"cohorts anew, give --rounds {rounds}, the rounds of all branches. For others, leave "
            "out --sampling, and give the separation and participations that clients keep to."
        )


def show(
    args: argparse.Namespace,
    strategy: strategy_lib.Strategy,
    participation: schema_lib.MinSep | sampling_lib.Sampling,
    noise_multiplier: float,
) -> None:
    """Prints what a run of `sampling_flags.run_from` guarantees, as JSON or as rounded-up text."""
    if args.sampling is None:
        report, lines = _exact(args, strategy, participation, noise_multiplier)
    else:
        report, lines = _sampled(args, strategy, participation, noise_multiplier)
    if args.format == "json":
        output.print_json(report)
        return
    if noise_multiplier == 0.0:
        print("No differential privacy guarantee: there is no noise.\n")
    print("\n".join(f"{name:15} {text}" for name, text in lines.items()))
    if noise_multiplier and args.sampling is None and "fork_at" not in report:
        name, value = "mechanism", args.mechanism
        if args.strategy is not None:
            name, value = "strategy", shlex.quote(args.strategy)
        schema = participation
        output.print_next(
            "Train with this noise, and with the same mechanism and its options",
            f"tff-dpftrl train --{name} {value} "
            f"--noise-multiplier {display.round_up(noise_multiplier, 8)} "
            f"--rounds {schema.num_rounds} --min-sep {schema.min_sep} "
            f"--max-participations {schema.max_participations} --delta {args.delta!r} ...",
        )


def _exact(
    args: argparse.Namespace,
    strategy: strategy_lib.Strategy,
    schema: schema_lib.MinSep,
    noise_multiplier: float,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the report of a run without sampling, and its lines."""
    claim = _guarantee(args, strategy, schema, noise_multiplier)
    report, branches_line = claim.to_dict(), {}
    if getattr(args, "branches", None) is not None:
        from tff_dpftrl.mechanisms import branches

        fork = {"num_branches": args.branches, "fork_at": args.fork_at}
        joint = branches.sensitivity(strategy, schema, **fork)
        claim = dataclasses.replace(claim, sensitivity=joint)
        report = claim.to_dict() | fork
        branches_line["branches"] = (
            f"all figures are of {args.branches} branches together, which share the first "
            f"{args.fork_at} rounds and have independent noise after them; participation is "
            "that in the shared rounds and any one branch"
        )
    lines = {
        "mechanism": f"{claim.mechanism}, noise multiplier {display.round_up(noise_multiplier, 8)}",
        "rounds": str(schema.num_rounds),
        "participation": (
            f"at most {schema.max_participations} times, at least {schema.min_sep} apart (stride; "
            f"{schema.min_sep_gap} rounds in between)"
        ),
        "sensitivity": f"S^2 = {claim.sensitivity.squared:.8g} ({claim.sensitivity.method})",
        "rho (zCDP)": display.round_up(claim.rho_zcdp),
        "epsilon": f"{display.round_up(claim.epsilon)} at delta = {display.delta(claim.delta)}",
        "epsilon by RDP": f"{display.round_up(claim.epsilon_rdp)} (looser; as in older papers)",
        **branches_line,
    }
    if claim.clip_norm_inflation != 1.0:
        lines["inflation"] = f"{claim.clip_norm_inflation:.8g} times the clip norm"
    neighbours = sampling_flags.neighbours_from(args)
    changes = neighbours.num_changes
    if neighbours.relation != "zero-out" or changes > 1:
        larger = dataclasses.replace(claim, clip_norm_inflation=changes * claim.clip_norm_inflation)
        method = f"{changes} times the sensitivity" if changes > 1 else "the same distributions"
        _add_neighbours(report, lines, neighbours, larger.epsilon, method)
    return report, lines


def _sampled(
    args: argparse.Namespace,
    strategy: strategy_lib.Strategy,
    sampling: sampling_lib.Sampling,
    noise_multiplier: float,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the report of a run with secret sampling, and its lines."""
    from tff_dpftrl.accounting import gaussian, samplings

    options = sampling_flags.options_from(args) or {}
    sampled = sampling_flags.account(options, strategy, sampling, noise_multiplier)
    epsilon = sampled.epsilon(args.delta)
    # Who learns the samples: a unit may be in all rounds of the schema.
    mu = _guarantee(args, strategy, sampling.schema, noise_multiplier).mu
    known = gaussian.epsilon((args.group_size or 1) * mu, args.delta)
    report: dict[str, Any] = {
        "mechanism": strategy.name,
        "noise_multiplier": noise_multiplier,
        "num_rounds": args.rounds,
        "sampling": args.sampling,
        "group_size": 1,
        **options,
        "epsilon": _finite(epsilon),
        "delta": args.delta,
        "method": sampled.how(),
        "epsilon_if_known": _finite(known),
    }
    about = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in options.items())
    lines = {
        "mechanism": f"{strategy.name}, noise multiplier {display.round_up(noise_multiplier, 8)}",
        "rounds": str(args.rounds),
        "sampling": f"{args.sampling}: {samplings.SAMPLINGS[args.sampling].summary} ({about})",
        "epsilon": f"{display.round_up(epsilon)} at delta = {display.delta(args.delta)}, if nobody "
        "learns who was drawn",
        "by": sampled.how(),
    }
    estimated = sampling_flags.estimate(args, sampled)
    if estimated is not None:
        report["estimate"] = dataclasses.asdict(estimated)
        lines["estimate"] = (
            f"epsilon {estimated.epsilon:.4g}, from {estimated.low:.4g} to {estimated.high:.4g} at "
            f"99 % confidence, by {estimated.num_samples} Monte Carlo draws: no guarantee"
        )
    if math.isfinite(known):
        lines["samples known"] = f"epsilon {display.round_up(known)}, however clients are drawn"
    neighbours = sampling_flags.neighbours_from(args)
    if neighbours != samplings.ZERO_OUT:
        of_others = sampled.epsilon(args.delta, neighbours)
        _add_neighbours(report, lines, neighbours, of_others, sampled.how(neighbours))
    return report, lines


def _guarantee(
    args: argparse.Namespace,
    strategy: strategy_lib.Strategy,
    schema: schema_lib.MinSep,
    noise_multiplier: float,
) -> guarantee_lib.Guarantee:
    from tff_dpftrl.accounting import guarantee

    return guarantee.dp_ftrl_guarantee(
        strategy,
        noise_multiplier=noise_multiplier,
        schema=schema,
        delta=args.delta,
        clip_norm_inflation=args.clip_norm_inflation,
    )


def _add_neighbours(
    report: dict[str, Any],
    lines: dict[str, str],
    neighbours: neighbours_lib.Neighbours,
    epsilon: float,
    method: str,
) -> None:
    """Adds what is guaranteed for further neighbours to a report and to its lines."""
    stated = {"epsilon": _finite(epsilon), "method": method}
    report["neighbours"] = dataclasses.asdict(neighbours) | stated
    lines["neighbours"] = (
        f"epsilon {display.round_up(epsilon)} where {neighbours.sentence} ({method})"
    )


def _finite(epsilon: float) -> float | None:
    return epsilon if math.isfinite(epsilon) else None
