"""Entry point of the command `tff-dpftrl`.

Each subcommand is a module beside this one with `add_parser(subparsers)`, which
registers it, and `run(args) -> int`. Modules import what is slow (TensorFlow,
Matplotlib) inside `run`, so that `--help` and the maths stay quick.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from tff_dpftrl import version

_SUBCOMMANDS = ("train", "optimize", "compare", "account", "calibrate", "plan")


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tff-dpftrl",
        description="Federated learning with DP-FTRL: train, optimise mechanisms, account.",
    )
    parser.add_argument("--version", action="version", version=version.__version__)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in _SUBCOMMANDS:
        importlib.import_module(f"tff_dpftrl.cli.{name}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
      argv: Arguments without the program's name; `sys.argv[1:]` if None.

    Returns:
      The exit status: 0, or 2 if the user's input cannot be used.
    """
    args = _build_parser().parse_args(argv)
    try:
        return args.run(args)
    except ValueError as error:
        print(f"tff-dpftrl {args.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
