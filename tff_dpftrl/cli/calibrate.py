"""`tff-dpftrl calibrate`: the noise multiplier that meets a privacy target."""

from __future__ import annotations

import argparse

from tff_dpftrl import validation
from tff_dpftrl.cli import account, delta_flag, mechanism_flags, output, sampling_flags

_DESCRIPTION = """\
Find the smallest noise multiplier with which a DP-FTRL run meets a privacy target.

The result was accounted for again and is not above the target. Output as of `account`.

The target is for the neighbouring data sets of --neighbours and --group-of. With --sampling,
clients are drawn by the server in secret, and the guarantee rests on that.
"""

_EPILOG = """\
examples:
  # A BLT optimised for 2000 rounds in which a device takes part at most every 400 rounds.
  tff-dpftrl calibrate --target-epsilon 5 --delta 1e-10 --mechanism blt --rounds 2000 \\
      --min-sep 400

  # A strategy from a file, for a target on rho-zCDP, printed as JSON.
  tff-dpftrl calibrate --target-rho 0.25 --strategy strategy.json --rounds 2000 --min-sep 400 \\
      --format json

  # Correlated noise of 4 bands where groups of clients take turns, each with probability 0.16.
  tff-dpftrl calibrate --target-epsilon 4 --delta 1e-5 --mechanism bandtoep --bands 4 \\
      --rounds 500 --sampling cyclic --sampling-groups 4 --sampling-probability 0.16
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
    target = parser.add_mutually_exclusive_group()
    target.add_argument(
        "--target-epsilon", type=float, metavar="E", help="Largest allowed epsilon at --delta."
    )
    target.add_argument("--target-rho", type=float, metavar="R", help="Largest allowed rho-zCDP.")
    delta_flag.add(parser)
    mechanism_flags.add_arguments(parser)
    sampling_flags.add_arguments(parser)
    sampling_flags.add_neighbours(parser)
    output.add_format(parser)


def run(args: argparse.Namespace) -> int:
    """Calibrates and prints; returns the exit status."""
    from tff_dpftrl.accounting import calibrate, noise_search

    needs = (("rounds",),) if args.sampling else mechanism_flags.RUN
    mechanism_flags.require(args, ("target_epsilon", "target_rho"), *needs)
    delta_flag.check(args.delta)
    neighbours = sampling_flags.neighbours_from(args)
    options = sampling_flags.options_from(args)
    if options is not None and args.target_epsilon is None:
        raise validation.UsageError(
            "--target-rho is not for --sampling, which has no rho: give --target-epsilon."
        )
    strategy, participation = sampling_flags.run_from(args, options)
    if options is not None:
        noise_multiplier = noise_search.smallest_noise(
            lambda noise: sampling_flags.account(options, strategy, participation, noise).epsilon(
                args.delta, neighbours
            ),
            target_epsilon=args.target_epsilon,
        )
    else:
        noise_multiplier = calibrate.calibrate_noise_multiplier(
            strategy,
            participation,
            target_epsilon=args.target_epsilon,
            target_rho=args.target_rho,
            delta=args.delta,
            clip_norm_inflation=neighbours.num_changes * args.clip_norm_inflation,
        )
    account.show(args, strategy, participation, noise_multiplier)
    return 0
