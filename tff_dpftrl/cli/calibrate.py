"""`tff-dpftrl calibrate`: the noise multiplier that meets a privacy target."""

from __future__ import annotations

import argparse

from tff_dpftrl.cli import account, delta_flag, mechanism_flags, output

_DESCRIPTION = """\
Find the smallest noise multiplier with which a DP-FTRL run meets a privacy target.

The result was accounted for again and is not above the target. Output as of `account`.
"""

_EPILOG = """\
examples:
  # A BLT optimised for 2000 rounds in which a device takes part at most every 400 rounds.
  tff-dpftrl calibrate --target-epsilon 5 --delta 1e-10 --mechanism blt --rounds 2000 \\
      --min-sep 400

  # A strategy from a file, for a target on rho-zCDP, printed as JSON.
  tff-dpftrl calibrate --target-rho 0.25 --strategy strategy.json --rounds 2000 --min-sep 400 \\
      --format json
"""


def add_parser(subparsers) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser(
        "calibrate",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument(
        "--target-epsilon", type=float, metavar="E", help="Largest allowed epsilon at --delta."
    )
    target.add_argument("--target-rho", type=float, metavar="R", help="Largest allowed rho-zCDP.")
    delta_flag.add(parser)
    mechanism_flags.add_arguments(parser)
    output.add_format(parser)


def run(args: argparse.Namespace) -> int:
    """Calibrates and prints; returns the exit status."""
    from tff_dpftrl.accounting import calibrate, guarantee

    delta_flag.check(args.delta)
    schema = mechanism_flags.schema_from(args)
    strategy = mechanism_flags.strategy_from(args, schema)
    noise_multiplier = calibrate.calibrate_noise_multiplier(
        strategy,
        schema,
        target_epsilon=args.target_epsilon,
        target_rho=args.target_rho,
        delta=args.delta,
        clip_norm_inflation=args.clip_norm_inflation,
    )
    claim = guarantee.dp_ftrl_guarantee(
        strategy,
        noise_multiplier=noise_multiplier,
        schema=schema,
        delta=args.delta,
        clip_norm_inflation=args.clip_norm_inflation,
    )
    account.print_report(args, claim.to_dict(), claim)
    return 0
