"""The flags with which a user names a mechanism, its options and a participation schema."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tff_dpftrl import validation
from tff_dpftrl.mechanisms import defaults, table

if TYPE_CHECKING:
    from tff_dpftrl.mechanisms import strategy as strategy_lib
    from tff_dpftrl.mechanisms import workload as workload_lib
    from tff_dpftrl.participation import schema as schema_lib


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of mechanism, schema and restarts; what is needed is checked by `require`."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--mechanism",
        choices=table.MECHANISMS,
        metavar="NAME",
        help=f"One of {', '.join(table.MECHANISMS)}; the optimised ones are optimised for the "
        "schema.",
    )
    which.add_argument(
        "--strategy",
        metavar="FILE|NAME",
        help="Strategy file that tff-dpftrl optimize --output wrote, or the name of a published "
        "strategy, such as blt-gboard-b100, -b400 or -b1000 (parameters of production models).",
    )
    add_schema_arguments(parser)
    parser.add_argument(
        "--restart-every",
        type=int,
        metavar="R",
        help="Number of rounds after which the mechanism restarts, as adaptive clipping needs it.",
    )
    parser.add_argument(
        "--first-restart",
        type=int,
        metavar="R",
        help="First round after a restart, if it is not --restart-every (Gboard: 128, then every "
        "1024).",
    )
    parser.add_argument(
        "--clip-norm-inflation",
        type=float,
        default=1.0,
        metavar="F",
        help="Factor by which the rounding of secure aggregation can raise the norm of a clipped "
        "update above the clip norm that --noise-multiplier is relative to. Default: 1, no "
        "rounding.",
    )
    add_options(parser.add_argument_group("options of mechanisms"))


def require(args: argparse.Namespace, *needs: Sequence[str]) -> None:
    """Refuses a command line that lacks flags: of each need, names of attributes, one is given."""
    missing = [names for names in needs if all(getattr(args, name) is None for name in names)]
    if missing:
        flags = (" or ".join(f"--{name.replace('_', '-')}" for name in names) for names in missing)
        raise validation.UsageError(f"the following flags are required: {', '.join(flags)}.")


SCHEMA = (("rounds",), ("min_sep", "min_sep_gap"))
"""What `require` asks for a participation schema."""
RUN = (*SCHEMA, ("mechanism", "strategy"))
"""What `require` asks of a run without secret sampling."""


def add_schema_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the participation schema."""
    parser.add_argument("--rounds", type=int, metavar="N", help="Number of rounds.")
    separation = parser.add_mutually_exclusive_group()
    separation.add_argument(
        "--min-sep",
        type=int,
        metavar="B",
        help="Least stride: number of rounds from one participation of a client to its next.",
    )
    separation.add_argument(
        "--min-sep-gap",
        type=int,
        metavar="G",
        help="Least gap: number of rounds between two participations, B - 1, as in TensorFlow "
        "Privacy and Gboard's tables.",
    )
    parser.add_argument(
        "--max-participations",
        type=int,
        metavar="K",
        help="Largest number of rounds of one client. Default: as many as fit.",
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `table.Options`."""
    parser.add_argument(
        "--error",
        choices=["max", "rms"],
        help="Noise to minimise: the largest of all prefix sums (max), or its root mean square "
        "over rounds (rms). Default: max for blt, rms for the others.",
    )
    parser.add_argument(
        "--buffers",
        type=_buffers,
        metavar="D|auto",
        help="Number of buffers of a BLT, 1 to 8. Default: auto, which adds buffers while each "
        "lowers the loss by 0.1%% or more.",
    )
    parser.add_argument(
        "--max-decay",
        type=float,
        metavar="X",
        help="Largest buffer decay of a BLT. With 1 there is no bound, but the BLT then suits its "
        "number of rounds only. Default: 1 - 1 / rounds.",
    )
    parser.add_argument(
        "--bands",
        type=int,
        metavar="P",
        help="Bands of bandmf, bandtoep and bandfhu (default: min-sep; a run keeps bands - 1 model "
        "copies), or of the inverse for bisr, bifr and bandinv (default: "
        f"{defaults.INVERSE_BANDS}).",
    )
    parser.add_argument(
        "--correlation", type=float, metavar="L", help="Factor λ of lambda-cgd. Default: tuned."
    )
    parser.add_argument(
        "--checkpoint",
        metavar="FILE",
        help="File for the state of a bandmf search. A search goes on from it if it exists.",
    )
    add_workload(parser)


def add_workload(parser: argparse.ArgumentParser) -> None:
    """Adds the flag of the workload."""
    parser.add_argument(
        "--workload",
        default="prefix",
        metavar="NAME=VALUE,...",
        help="Sums from which the server's optimizer makes models; the strategy minimises their "
        "noise. momentum=0.9, adam=0.9 (its momentum, the preconditioner as if constant), "
        "warmup=100 (rounds), decay=linear or cosine, averaging=0.95, or some of them with "
        "commas. Default: prefix, the prefix sums, as of SGD with a constant rate.",
    )


def workload_from(args: argparse.Namespace, num_rounds: int) -> workload_lib.Workload | None:
    """Returns the workload of --workload for a number of rounds; None if it is prefix sums."""
    from tff_dpftrl.mechanisms import workload as workload_lib

    return workload_lib.parse(args.workload).workload(num_rounds)


def _buffers(text: str) -> int | None:
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number or auto, got {text!r}") from None


def options_from(args: argparse.Namespace, num_rounds: int) -> table.Options:
    """Reads the flags of `add_options` for a run of `num_rounds` rounds."""
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(table.Options)}
    return table.Options(**given | {"workload": workload_from(args, num_rounds)})


def schema_from(args: argparse.Namespace) -> schema_lib.MinSep:
    """Returns the participation schema of the flags of `add_schema_arguments`."""
    from tff_dpftrl.participation import schema as schema_lib

    most = args.rounds if args.max_participations is None else args.max_participations
    if args.min_sep is None:
        schema = schema_lib.MinSep.from_gap(args.rounds, args.min_sep_gap, most)
    else:
        schema = schema_lib.MinSep(args.rounds, args.min_sep, most)
    if args.max_participations is None:
        return schema_lib.MinSep.as_many_as_fit(args.rounds, schema.min_sep)
    return schema


def strategy_from(args: argparse.Namespace, schema: schema_lib.MinSep) -> strategy_lib.Strategy:
    """Returns the run's strategy, restarts included, optimised for its longest block of rounds."""
    from tff_dpftrl.mechanisms import restarts, zoo

    for flag, value in (
        ("--restart-every", args.restart_every),
        ("--first-restart", args.first_restart),
    ):
        if value is not None:
            validation.integer(flag, value, minimum=1)
    if args.restart_every is not None:
        starts = restarts.starts(
            schema.num_rounds, every=args.restart_every, first=args.first_restart
        )
    elif args.first_restart is not None:
        raise validation.UsageError("--first-restart needs --restart-every.")
    else:
        starts = (0,)
    options = options_from(args, schema.num_rounds)
    if args.strategy is None:
        return table.build(args.mechanism, schema, options, starts=starts, notify=notify)
    if options.given():
        raise validation.UsageError("--strategy takes no options of mechanisms; leave them out.")
    return restarts.whole_run(zoo.find(args.strategy), schema.num_rounds, starts)


def notify(sentence: str) -> None:
    """Prints progress and advice on standard error, apart from the results."""
    print(sentence, file=sys.stderr)
