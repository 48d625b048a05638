"""The flags with which a user names a strategy and a participation schema."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from tff_dpftrl.cli import optimize, strategies

if TYPE_CHECKING:
    from tff_dpftrl.accounting import guarantee
    from tff_dpftrl.mechanisms import strategy as strategy_lib
    from tff_dpftrl.participation import schema as schema_lib


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --mechanism or --strategy, the schema, restarts and the options of mechanisms."""
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--mechanism",
        choices=strategies.MECHANISMS,
        metavar="NAME",
        help="One of "
        + ", ".join(strategies.MECHANISMS)
        + "; the optimised ones are optimised for the schema.",
    )
    which.add_argument(
        "--strategy", metavar="FILE", help="A strategy written by tff-dpftrl optimize --output."
    )
    optimize.add_schema_arguments(parser)
    parser.add_argument(
        "--restart-every",
        type=int,
        metavar="R",
        help="The mechanism begins anew every so many rounds, as adaptive clipping needs it.",
    )
    parser.add_argument(
        "--first-restart",
        type=int,
        metavar="R",
        help="First round after a restart, if not --restart-every (Gboard: 128, then every 1024).",
    )
    parser.add_argument(
        "--clip-norm-inflation",
        type=float,
        default=1.0,
        metavar="F",
        help="Norm bound after secure aggregation's rounding over the clip norm that the noise is "
        "relative to. Default: 1, no rounding.",
    )
    strategies.add_options(parser.add_argument_group("options of mechanisms"))


def schema_from(args: argparse.Namespace) -> schema_lib.MinSep:
    """The schema of the whole run."""
    return optimize.schema_from(args)


def strategy_from(args: argparse.Namespace, schema: schema_lib.MinSep) -> strategy_lib.Strategy:
    """The strategy of the whole run, restarts included.

    Args:
      args: Parsed flags of `add_arguments`.
      schema: The schema of the whole run.

    Returns:
      The strategy; one that is optimised is optimised for its longest block.

    Raises:
      ValueError: If flags do not fit together, or a file cannot be read.
    """
    from tff_dpftrl.mechanisms import restarts, serialization
    from tff_dpftrl.participation import schema as schema_lib

    starts = _starts(args, schema.num_rounds)
    ends = [*starts[1:], schema.num_rounds]
    longest = max(end - start for start, end in zip(starts, ends, strict=True))
    options = strategies.options_from(args)
    if args.strategy is not None:
        if options != strategies.Options():
            raise ValueError("--strategy takes no options of mechanisms; leave them out.")
        base = serialization.load(args.strategy)
    else:
        block = schema_lib.MinSep(
            longest, min(schema.min_sep, longest), min(schema.max_participations, longest)
        )
        base = strategies.build(args.mechanism, block, options)
    if base.max_rounds is not None and base.max_rounds < longest:
        raise ValueError(
            f"the strategy is for at most {base.max_rounds} rounds, got {longest}: optimise one "
            "for more, or restart it with --restart-every."
        )
    return base if len(starts) == 1 else restarts.Restarted(base, starts)


def named(found: guarantee.Guarantee, args: argparse.Namespace) -> guarantee.Guarantee:
    """The guarantee under the name by which the user asked for its mechanism."""
    return found if args.mechanism is None else dataclasses.replace(found, mechanism=args.mechanism)


def _starts(args: argparse.Namespace, num_rounds: int) -> tuple[int, ...]:
    """First rounds of the blocks between restarts."""
    every, first = args.restart_every, args.first_restart
    if every is None:
        if first is not None:
            raise ValueError("--first-restart needs --restart-every.")
        return (0,)
    first = every if first is None else first
    for flag, value in (("--restart-every", every), ("--first-restart", first)):
        if value < 1:
            raise ValueError(f"{flag} must be at least 1, got {value}.")
    return (0, *range(first, num_rounds, every))
