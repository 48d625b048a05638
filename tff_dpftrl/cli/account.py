"""`tff-dpftrl account`: what a DP-FTRL run costs in privacy."""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING, Any

from tff_dpftrl import validation
from tff_dpftrl.cli import delta_flag, mechanism_flags, output

if TYPE_CHECKING:
    from tff_dpftrl.accounting import guarantee as guarantee_lib

_DESCRIPTION = """\
Account for the privacy of a DP-FTRL run: rho-zCDP, and epsilon at a delta.

The guarantee is for zeroing out all contributions of one client that takes part in at most
--max-participations rounds, any two of them at least --min-sep apart. epsilon is exact for the
mechanism; epsilon_rdp is the looser conversion that older papers used. Text output rounds up.
"""

_EPILOG = """\
examples:
  # es-ES of the Gboard paper's Table 1, whose MinS of 526 counts the rounds in between.
  tff-dpftrl account --mechanism tree --noise-multiplier 7 --rounds 1900 \\
      --min-sep-gap 526 --max-participations 3 --delta 1e-10

  # A run with adaptive clipping: restarts after 128 rounds and then every 1024.
  tff-dpftrl account --mechanism tree --noise-multiplier 7 --rounds 2000 --min-sep 300 \\
      --max-participations 7 --delta 1e-10 --first-restart 128 --restart-every 1024

  # Amplified by sampling: 400 groups of clients take turns, each client with probability 0.1.
  tff-dpftrl account --mechanism bandtoep --bands 400 --noise-multiplier 1 --rounds 2000 \\
      --min-sep 400 --delta 1e-10 --sampling-groups 400 --sampling-probability 0.1
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
        required=True,
        metavar="Z",
        help=(
            "Standard deviation of the noise draws per unit of clip norm. With "
            "adaptive clipping: the total z of updates and clip norm together."
        ),
    )
    delta_flag.add(parser)
    mechanism_flags.add_arguments(parser)
    sampling = parser.add_argument_group(
        "cyclic sampling by the server (banded mechanisms only; adds epsilon_amplified)"
    )
    sampling.add_argument(
        "--sampling-groups",
        type=int,
        metavar="G",
        help=("Number of groups of clients that take turns, at least the number of bands."),
    )
    sampling.add_argument(
        "--sampling-probability",
        type=float,
        metavar="Q",
        help=("Probability that a client is in the cohort when its group's turn comes."),
    )
    output.add_format(parser)


def run(args: argparse.Namespace) -> int:
    """Accounts and prints; returns the exit status."""
    from tff_dpftrl.accounting import guarantee

    delta_flag.check(args.delta)
    schema = mechanism_flags.schema_from(args)
    strategy = mechanism_flags.strategy_from(args, schema)
    claim = guarantee.dp_ftrl_guarantee(
        strategy,
        noise_multiplier=args.noise_multiplier,
        schema=schema,
        delta=args.delta,
        clip_norm_inflation=args.clip_norm_inflation,
    )
    report = claim.to_dict()
    if args.sampling_groups is not None or args.sampling_probability is not None:
        report["epsilon_amplified"] = _amplified(args, strategy)
    print_report(args, report, claim)
    return 0


def _amplified(args: argparse.Namespace, strategy) -> float:
    from tff_dpftrl.accounting import amplified_banded

    if args.sampling_groups is None or args.sampling_probability is None:
        raise validation.UsageError("--sampling-groups and --sampling-probability go together.")
    if args.clip_norm_inflation != 1.0:
        raise validation.UsageError(
            "--clip-norm-inflation cannot be combined with --sampling-groups."
        )
    return amplified_banded.AmplifiedBanded.from_strategy(
        strategy,
        noise_multiplier=args.noise_multiplier,
        num_rounds=args.rounds,
        num_groups=args.sampling_groups,
        sampling_probability=args.sampling_probability,
    ).epsilon(args.delta)


def print_report(
    args: argparse.Namespace, report: dict[str, Any], claim: guarantee_lib.Guarantee
) -> None:
    """Prints a guarantee, as JSON or as text that rounds up."""
    if args.format == "json":
        output.print_json(report)
        return
    from tff_dpftrl.accounting import display

    schema = claim.schema
    noise_multiplier = display.round_up(claim.noise_multiplier, 8)
    lines = {
        "mechanism": f"{claim.mechanism}, noise multiplier {noise_multiplier}",
        "rounds": str(schema.num_rounds),
        "participation": (
            f"at most {schema.max_participations} times, at least {schema.min_sep} apart (stride; "
            f"{schema.min_sep_gap} rounds in between)"
        ),
        "sensitivity": f"S^2 = {claim.sensitivity.squared:.8g} ({claim.sensitivity.method})",
        "rho (zCDP)": display.round_up(claim.rho_zcdp),
        "epsilon": f"{display.round_up(claim.epsilon)} at delta = {claim.delta:g}",
        "epsilon by RDP": f"{display.round_up(claim.epsilon_rdp)} (looser; as in older papers)",
    }
    if claim.clip_norm_inflation != 1.0:
        lines["inflation"] = f"{claim.clip_norm_inflation:.8g} times the clip norm"
    if "epsilon_amplified" in report:
        lines["amplified"] = (
            f"epsilon {display.round_up(report['epsilon_amplified'])} if the server samples, "
            "secretly, and clients come only when asked"
        )
    if claim.noise_multiplier == 0.0:
        print("No differential privacy guarantee: there is no noise.\n")
    print("\n".join(f"{name:15} {text}" for name, text in lines.items()))
    if claim.noise_multiplier:
        name, value = "mechanism", args.mechanism
        if args.strategy is not None:
            name, value = "strategy", shlex.quote(args.strategy)
        output.print_next(
            "Train with this noise, and with the same mechanism and its options",
            f"tff-dpftrl train --{name} {value} --noise-multiplier {noise_multiplier} "
            f"--rounds {schema.num_rounds} --min-sep {schema.min_sep} "
            f"--max-participations {schema.max_participations} --delta {claim.delta:g} ...",
        )
