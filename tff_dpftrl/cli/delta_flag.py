"""The flag --delta of the commands that account, and warnings about a large δ."""

from __future__ import annotations

import argparse
import sys

from tff_dpftrl import validation
from tff_dpftrl.accounting import defaults


def add(parser: argparse.ArgumentParser) -> None:
    """Adds --delta."""
    parser.add_argument(
        "--delta",
        type=float,
        default=defaults.DELTA,
        metavar="D",
        help="Delta. Default: %(default)s.",
    )


def check(delta: float) -> None:
    """Refuses a δ outside (0, 1); warns on standard error above 1e-3, which promises little."""
    validation.delta(delta, "--delta")
    if delta > defaults.LARGE_DELTA:
        print(
            f"Warning: delta = {delta:g} is large. Publishing each client's data with probability "
            "delta is (0, delta)-DP: choose delta well below 1 / number of clients.",
            file=sys.stderr,
        )


def check_for_population(delta: float, population: int) -> None:
    """Warns on standard error of a δ that is too large for the number of devices."""
    from tff_dpftrl.accounting import statement_sentences

    for reason in statement_sentences.large_delta(delta, population, "device"):
        print(f"Warning: {reason}", file=sys.stderr)
