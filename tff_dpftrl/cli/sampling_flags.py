"""The flags with which a user names a secret sampling, its options, and the neighbours of ε."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tff_dpftrl import validation
from tff_dpftrl.accounting import neighbours as neighbours_lib
from tff_dpftrl.accounting import samplings
from tff_dpftrl.cli import mechanism_flags

if TYPE_CHECKING:
    from tff_dpftrl.accounting.amplification import estimate as estimate_lib
    from tff_dpftrl.mechanisms import strategy as strategy_lib
    from tff_dpftrl.participation import sampling as sampling_lib
    from tff_dpftrl.participation import schema as schema_lib

_OPTIONS = ("sampling_probability", "group_size", "sampling_groups", "min_sep", "bins")

_ESTIMATED = ("bins", "b-min-sep")
"""Samplings whose bound is not tight, and whose privacy losses can be drawn."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --sampling and its options."""
    group = parser.add_argument_group(
        "samples that the server draws in secret, which amplify privacy"
    )
    rows = "; ".join(f"{name}: {row.summary}" for name, row in samplings.SAMPLINGS.items())
    group.add_argument(
        "--sampling",
        choices=samplings.SAMPLINGS,
        metavar="NAME",
        help=f"Secret sampling of the cohorts. {rows}. The guarantee needs that nobody learns who "
        "was drawn.",
    )
    for name, kind, letter, text in (
        (
            "sampling_probability",
            float,
            "Q",
            "Probability that a client is in the cohort: of a round (poisson, truncated), of its "
            "group's turn (cyclic), or of a round if it was in none of the last --min-sep - 1 "
            "(b-min-sep).",
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
    ):
        users = [row for row, entry in samplings.SAMPLINGS.items() if name in _taken(entry)]
        group.add_argument(
            f"--{name.replace('_', '-')}",
            type=kind,
            metavar=letter,
            help=f"{text} For {', '.join(users)}.",
        )
    group.add_argument(
        "--estimate-draws",
        type=int,
        metavar="N",
        help="Number of Monte Carlo draws for an estimate of epsilon beside the bound, which is no "
        "guarantee: thousands for bins, many times 1 / delta for b-min-sep. For "
        f"{', '.join(_ESTIMATED)}.",
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


def _taken(row: samplings.Row) -> tuple[str, ...]:
    return (*row.needs, *row.allows)


def options_from(args: argparse.Namespace) -> dict[str, Any] | None:
    """Reads the flags of `add_arguments` that are given, by name; None without --sampling.

    Flags that are missing, or are not for this sampling, are refused.
    """
    if args.estimate_draws is not None:
        validation.integer("--estimate-draws", args.estimate_draws, minimum=1)
        if args.sampling not in _ESTIMATED:
            raise validation.UsageError(
                f"--estimate-draws is for --sampling {' or '.join(_ESTIMATED)}, whose bound is not "
                "tight: leave it out."
            )
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
    return {name: values[name] for name in given}


def _flags(names: Sequence[str]) -> str:
    return " and ".join(f"--{name.replace('_', '-')}" for name in names)


def run_from(
    args: argparse.Namespace, options: Mapping[str, Any] | None
) -> tuple[strategy_lib.Strategy, schema_lib.MinSep | sampling_lib.Sampling]:
    """Builds strategy and participation of a run from its flags and those of `options_from`."""
    if options is None:
        schema = mechanism_flags.schema_from(args)
        return mechanism_flags.strategy_from(args, schema), schema
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
    sampling = samplings.described(args.sampling, rounds, options)
    if args.mechanism is None and args.strategy is None:
        if not samplings.SAMPLINGS[args.sampling].independent_noise:
            raise validation.UsageError(
                f"--sampling {args.sampling} needs a mechanism: --mechanism bandtoep --bands 4, or "
                "--mechanism identity for independent noise."
            )
        args.mechanism = "identity"
    strategy = mechanism_flags.strategy_from(args, sampling.schema)
    samplings.check_noise(args.sampling, strategy)
    return strategy, sampling


def account(
    options: Mapping[str, Any],
    strategy: strategy_lib.Strategy,
    sampling: sampling_lib.Sampling,
    noise_multiplier: float,
) -> samplings.SampledRun:
    """Accounts for the run of `run_from` with a noise multiplier; arguments as there."""
    return samplings.account(
        sampling,
        strategy,
        noise_multiplier=noise_multiplier,
        units_per_client=validation.integer(
            "--group-size", options.get("group_size", 1), minimum=1
        ),
    )


def estimate(
    args: argparse.Namespace, sampled: samplings.SampledRun
) -> estimate_lib.Estimate | None:
    """Estimates epsilon of zero-out by --estimate-draws; None without it, or without noise."""
    if args.estimate_draws is None or not isinstance(sampled, samplings.BoundedRun):
        return None
    run: Any = sampled.zero_out
    if run.noise_multiplier == 0.0:
        return None
    return run.estimate(args.delta, num_samples=args.estimate_draws, seed=0)
