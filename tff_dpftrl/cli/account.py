"""`tff-dpftrl account`: what a DP-FTRL run costs in privacy."""

from __future__ import annotations

import argparse
import dataclasses
import math
import shlex
from typing import TYPE_CHECKING, Any

from tff_dpftrl import validation
from tff_dpftrl.accounting import display
from tff_dpftrl.cli import delta_flag, flags, mechanism_flags, output, sampling_flags

if TYPE_CHECKING:
    from tff_dpftrl.accounting import guarantee as guarantee_lib
    from tff_dpftrl.accounting import neighbours as neighbours_lib
    from tff_dpftrl.mechanisms import strategy as strategy_lib
    from tff_dpftrl.participation import sampling as sampling_lib
    from tff_dpftrl.participation import schema as schema_lib

    # What JSON says, lines of text, and ε for the neighbours that were asked for, with its method.
    _Report = tuple[
        dict[str, Any], dict[str, str], tuple[neighbours_lib.Neighbours, float, str] | None
    ]

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
    noise = "Standard deviation of the noise draws per unit of clip norm. With adaptive clipping: "
    noise += "the total z of updates and clip norm together."
    fork = "Number of rounds that all --branches share. Each has its own noise after them."
    flags.add(
        parser,
        ("noise-multiplier", float, "Z", noise),
        ("branches", int, "N", "Number of runs that go on from the state after --fork-at rounds."),
        ("fork-at", int, "T", fork),
    )
    delta_flag.add(parser)
    mechanism_flags.add_arguments(parser)
    sampling_flags.add_arguments(parser)
    sampling_flags.add_neighbours(parser)
    output.add_format(parser)


def run(args: argparse.Namespace) -> int:
    """Accounts and prints; returns the exit status."""
    needs = (("rounds",),) if args.sampling else mechanism_flags.RUN
    mechanism_flags.require(args, ("noise_multiplier",), *needs)
    delta_flag.check(args.delta)
    options = sampling_flags.options_from(args)
    if (args.branches is None) != (args.fork_at is None):
        raise validation.UsageError(
            "--branches and --fork-at need each other: the number of branches, and the number of "
            "rounds that they share."
        )
    if args.branches is not None and args.sampling is not None:
        rounds = max(args.rounds, args.fork_at + args.branches * (args.rounds - args.fork_at))
        raise validation.UsageError(
            "--branches is not for --sampling. For poisson, if each branch draws its "
            f"cohorts anew, give --rounds {rounds}, the rounds of all branches. For others, leave "
            "out --sampling, and give the separation and participations that clients keep to."
        )
    strategy, participation = sampling_flags.run_from(args, options)
    show(args, strategy, participation, args.noise_multiplier)
    return 0


def show(
    args: argparse.Namespace,
    strategy: strategy_lib.Strategy,
    participation: schema_lib.MinSep | sampling_lib.Sampling,
    noise_multiplier: float,
) -> None:
    """Prints what a run of `sampling_flags.run_from` guarantees, as JSON or as rounded-up text."""
    report_of = _exact if args.sampling is None else _sampled
    report, lines, others = report_of(args, strategy, participation, noise_multiplier)
    if others is not None:
        neighbours, epsilon, method = others
        stated = {"epsilon": _finite(epsilon), "method": method}
        report["neighbours"] = dataclasses.asdict(neighbours) | stated
        said = f"epsilon {display.round_up(epsilon)} where {neighbours.sentence} ({method})"
        lines["neighbours"] = said
    if args.format == "json":
        output.print_json(report)
        return
    if noise_multiplier == 0.0:
        print("No differential privacy guarantee: there is no noise.\n")
    print("\n".join(f"{name:15} {text}" for name, text in lines.items()))
    if noise_multiplier and args.sampling is None and args.branches is None:
        name, value = "mechanism", args.mechanism
        if args.strategy is not None:
            name, value = "strategy", shlex.quote(args.strategy)
        output.print_next(
            "Train with this noise, and with the same mechanism and its options",
            f"tff-dpftrl train --{name} {value} "
            f"--noise-multiplier {display.round_up(noise_multiplier, 8)} "
            f"--rounds {report['num_rounds']} --min-sep {report['min_sep']} "
            f"--max-participations {report['max_participations']} --delta {args.delta!r} ...",
        )


def _exact(
    args: argparse.Namespace,
    strategy: strategy_lib.Strategy,
    schema: schema_lib.MinSep,
    noise_multiplier: float,
) -> _Report:
    """Returns the report of a run without sampling."""
    claim = _guarantee(args, strategy, schema, noise_multiplier)
    fork = {}
    if args.branches is not None:
        from tff_dpftrl.mechanisms import branches

        fork = {"num_branches": args.branches, "fork_at": args.fork_at}
        joint = branches.sensitivity(strategy, schema, **fork)
        claim = dataclasses.replace(claim, sensitivity=joint)
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
    }
    if fork:
        lines["branches"] = (
            f"all figures are of {args.branches} branches together, which share the first "
            f"{args.fork_at} rounds and have independent noise after them; participation is "
            "that in the shared rounds and any one branch"
        )
    if claim.clip_norm_inflation != 1.0:
        lines["inflation"] = f"{claim.clip_norm_inflation:.8g} times the clip norm"
    neighbours = sampling_flags.neighbours_from(args)
    changes, others = neighbours.num_changes, None
    if neighbours.relation != "zero-out" or changes > 1:
        larger = dataclasses.replace(claim, clip_norm_inflation=changes * claim.clip_norm_inflation)
        method = f"{changes} times the sensitivity" if changes > 1 else "the same distributions"
        others = neighbours, larger.epsilon, method
    return claim.to_dict() | fork, lines, others


def _sampled(
    args: argparse.Namespace,
    strategy: strategy_lib.Strategy,
    sampling: sampling_lib.Sampling,
    noise_multiplier: float,
) -> _Report:
    """Returns the report of a run with secret sampling."""
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
    neighbours, others = sampling_flags.neighbours_from(args), None
    if neighbours != samplings.ZERO_OUT:
        others = neighbours, sampled.epsilon(args.delta, neighbours), sampled.how(neighbours)
    return report, lines, others


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


def _finite(epsilon: float) -> float | None:
    return epsilon if math.isfinite(epsilon) else None
