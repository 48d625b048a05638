"""The flags with which a user names a secret sampling, its options, and the neighbours of ε."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tff_dpftrl import validation
from tff_dpftrl.accounting import neighbours as neighbours_lib
from tff_dpftrl.accounting import samplings
from tff_dpftrl.cli import mechanism_flags

if TYPE_CHECKING:
    from tff_dpftrl.mechanisms import strategy as strategy_lib
    from tff_dpftrl.participation import schema as schema_lib

_OPTIONS = tuple(field.name for field in dataclasses.fields(samplings.Options))


class _Sampling(argparse.Action):
    """Action of --sampling, with which mechanism and separation may be left out."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        """Stores the name, and requires no flag of `const` any more."""
        setattr(namespace, self.dest, values)
        for group in self.const or ():
            group.required = False


def add_arguments(parser: argparse.ArgumentParser, replaces: Sequence[Any] = ()) -> None:
    """Adds --sampling and its options.

    Args:
      parser: Parser of the command.
      replaces: Groups of flags of which one is required, but not with --sampling.
    """
    group = parser.add_argument_group(
        "samples that the server draws in secret, which amplify privacy"
    )
    rows = "; ".join(f"{name}: {row.summary}" for name, row in samplings.SAMPLINGS.items())
    group.add_argument(
        "--sampling",
        action=_Sampling,
        const=replaces,
        choices=samplings.SAMPLINGS,
        metavar="NAME",
        help=f"{rows}. A guarantee by it needs that nobody learns who was drawn.",
    )
    for name, kind, letter, text in (
        (
            "sampling_probability",
            float,
            "Q",
            "Probability of a client to be in the cohort: of a round, of its group's turn, or of a "
            "round if it was in none of the last --min-sep - 1.",
        ),
        (
            "group_size",
            int,
            "G",
            "Largest number of examples of one user where each example is drawn by itself. "
            "Default: 1, users are drawn.",
        ),
        ("sampling_groups", int, "G", "Number of groups that take turns, at least --bands."),
        ("bins", int, "B", "Number of bins: rounds from one of a client's to its next."),
        ("rounds_per_client", int, "K", "Number of rounds of each client."),
        ("clients", int, "N", "Number of clients."),
        ("largest_cohort", int, "M", "Largest number of clients in a round."),
    ):
        users = [row for row, entry in samplings.SAMPLINGS.items() if name in _taken(entry)]
        group.add_argument(
            f"--{name.replace('_', '-')}",
            type=kind,
            metavar=letter,
            help=f"{text} For {', '.join(users)}.",
        )


def add_neighbours(parser: argparse.ArgumentParser) -> None:
    """Adds --neighbours and --group-of."""
    rows = "; ".join(f"{name}: {text}" for name, text in neighbours_lib.RELATIONS.items())
    parser.add_argument(
        "--neighbours",
        choices=neighbours_lib.RELATIONS,
        default="zero-out",
        metavar="NAME",
        help=f"Neighbouring data sets. {rows}. Default: zero-out.",
    )
    parser.add_argument(
        "--group-of",
        type=int,
        default=1,
        metavar="N",
        help="Number of users who differ together (group privacy). Default: 1.",
    )


def neighbours_from(args: argparse.Namespace) -> neighbours_lib.Neighbours:
    """Returns the neighbours of the flags of `add_neighbours`."""
    return neighbours_lib.Neighbours(args.neighbours, args.group_of)


def _taken(row: samplings.Sampling) -> tuple[str, ...]:
    return (*row.needs, *row.allows)


def options_from(args: argparse.Namespace) -> samplings.Options | None:
    """Reads the flags of `add_arguments`, and checks that they are those of the sampling.

    Args:
      args: Parsed flags.

    Returns:
      The options; None without --sampling.

    Raises:
      UsageError: If one is missing, or is not for this sampling.
    """
    values = {name: getattr(args, name) for name in _OPTIONS}
    given = [name for name, value in values.items() if value is not None]
    if args.sampling is None:
        own = [name for name in given if name != "min_sep"]
        if own:
            raise validation.UsageError(
                f"{_flags(own)} needs --sampling, one of {', '.join(samplings.SAMPLINGS)}."
            )
        return None
    row = samplings.SAMPLINGS[args.sampling]
    missing = [name for name in row.needs if values[name] is None]
    if missing:
        raise validation.UsageError(f"--sampling {args.sampling} needs {_flags(missing)}.")
    unused = [name for name in given if name not in _taken(row)]
    if unused:
        raise validation.UsageError(
            f"{_flags(unused)} is not for --sampling {args.sampling}: leave it out."
        )
    return samplings.Options(**{name: values[name] for name in given})


def _flags(names: Sequence[str]) -> str:
    return " and ".join(f"--{name.replace('_', '-')}" for name in names)


def strategy_from(
    args: argparse.Namespace, options: samplings.Options
) -> tuple[strategy_lib.Strategy, schema_lib.MinSep]:
    """Builds the strategy of a run with secret sampling.

    Args:
      args: Parsed flags of `mechanism_flags.add_arguments` and `add_arguments`.
      options: Options of the sampling.

    Returns:
      The strategy and the schema that every outcome of the sampling keeps.

    Raises:
      UsageError: If flags do not fit together.
    """
    row = samplings.SAMPLINGS[args.sampling]
    if args.max_participations is not None or args.min_sep_gap is not None:
        raise validation.UsageError(
            "--min-sep-gap and --max-participations are not for --sampling, which decides how "
            "often a client comes: leave them out."
        )
    if args.clip_norm_inflation != 1.0:
        raise validation.UsageError(
            "--clip-norm-inflation is not for --sampling: multiply --noise-multiplier instead."
        )
    if args.restart_every is not None or args.first_restart is not None:
        raise validation.UsageError("--restart-every and --first-restart are not for --sampling.")
    rounds = validation.integer("--rounds", args.rounds, minimum=1)
    schema = row.schema(rounds, options)
    if args.mechanism is None and args.strategy is None:
        if not row.independent_noise:
            raise validation.UsageError(
                f"--sampling {args.sampling} needs a mechanism: --mechanism bandtoep --bands 4, or "
                "--mechanism identity for independent noise."
            )
        args.mechanism = "identity"
    strategy = mechanism_flags.strategy_from(args, schema)
    return strategy, schema


def build(
    args: argparse.Namespace,
    strategy: strategy_lib.Strategy,
    noise_multiplier: float,
    options: samplings.Options,
) -> samplings.SampledRun:
    """Builds the accounting of a run with the sampling of the flags.

    Args:
      args: Parsed flags.
      strategy: Strategy of the run.
      noise_multiplier: z, standard deviation of the noise per unit clip norm.
      options: Options of the sampling.

    Returns:
      The run.

    Raises:
      UsageError: If the strategy or an option does not fit.
    """
    return samplings.build(args.sampling, strategy, noise_multiplier, args.rounds, options)
