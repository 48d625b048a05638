"""Turns the name of a mechanism, as typed on the command line, into a strategy."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tff_dpftrl.mechanisms import strategy as strategy_lib
    from tff_dpftrl.participation import schema as schema_lib

MECHANISMS = {
    "blt": "buffered linear Toeplitz: a few buffers, any number of rounds",
    "bandmf": "banded matrix of least loss: min-sep model copies, minutes to optimise",
    "bandtoep": "banded Toeplitz matrix, optimised",
    "bandfhu": "banded square root of the prefix sum, not optimised",
    "bisr": "inverse of the above banded instead: no memory, noise is drawn again",
    "bifr": "the same with the power of (1 - x) tuned",
    "lambda-cgd": "takes back a share of the noise of the round before",
    "tree": "binary tree with online variance reduction",
    "tree-vanilla": "binary tree as first published",
    "tree-full": "binary tree with full variance reduction; cannot be run, only compared",
    "identity": "independent noise",
}

_BANDED = ("bandmf", "bandtoep", "bandfhu", "bisr", "bifr")
OPTIONS_OF = {
    "buffers": ("blt",),
    "max_decay": ("blt",),
    "bands": _BANDED,
    "correlation": ("lambda-cgd",),
    "checkpoint": ("bandmf",),
}
"""Mechanisms that each option is for; those not listed here take none of them."""

_DEFAULT_INVERSE_BANDS = 4


@dataclasses.dataclass(frozen=True)
class Options:
    """What a user may say about a mechanism.

    Attributes:
      error: "max", "rms", or None for the mechanism's usual one: max for BLT, rms
        for the others.
      buffers: Buffers of a BLT; chosen automatically if None.
      bands: Bands of C, or of its inverse; min-sep, or 4, if None.
      max_decay: Largest buffer decay of a BLT; almost 1 if None.
      correlation: λ of lambda-cgd; tuned if None.
      checkpoint: File from which to resume, and to which to save, a BandMF search.
    """

    error: str | None = None
    buffers: int | None = None
    bands: int | None = None
    max_decay: float | None = None
    correlation: float | None = None
    checkpoint: str | None = None


def add_options(
    parser: argparse.ArgumentParser, usual_error: str = "max for blt, rms for the others"
) -> None:
    """Adds the flags of `Options`; `usual_error` says what happens without --error."""
    parser.add_argument(
        "--error",
        choices=["max", "rms"],
        help="Noise to minimise: the last prefix sum's (max) or the mean over rounds (rms). "
        f"Default: {usual_error}.",
    )
    parser.add_argument(
        "--buffers",
        type=_buffers,
        metavar="D|auto",
        help="Buffers of a BLT, 1 to 8. Default: auto, as many as still lower the loss by 0.1%%.",
    )
    parser.add_argument(
        "--bands",
        type=int,
        metavar="P",
        help="Bands of bandmf, bandtoep and bandfhu (default: min-sep), or of the inverse for "
        f"bisr and bifr (default: {_DEFAULT_INVERSE_BANDS}).",
    )
    parser.add_argument(
        "--max-decay",
        type=float,
        metavar="X",
        help="Largest buffer decay of a BLT. With 1 - 1 / rounds or less it may run longer than "
        "planned. Default: almost 1.",
    )
    parser.add_argument(
        "--correlation", type=float, metavar="L", help="Share λ of lambda-cgd. Default: tuned."
    )
    parser.add_argument(
        "--checkpoint",
        metavar="FILE",
        help="Save the state of a bandmf search there, and go on from it if it exists.",
    )


def options_from(args: argparse.Namespace) -> Options:
    """Reads the flags of `add_options`."""
    return Options(
        **{field.name: getattr(args, field.name) for field in dataclasses.fields(Options)}
    )


def _buffers(text: str) -> int | None:
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number or auto, got {text!r}") from None


def build(mechanism: str, schema: schema_lib.MinSep, options: Options) -> strategy_lib.Strategy:
    """The best strategy of a kind for a schema.

    Args:
      mechanism: A key of `MECHANISMS`.
      schema: The participation schema to optimise for.
      options: What the user asked for.

    Returns:
      The strategy.

    Raises:
      ValueError: If an option does not fit.
    """
    _check(mechanism, options)
    if mechanism == "blt":
        return _blt(schema, options)
    if mechanism == "identity":
        from tff_dpftrl.mechanisms import identity

        return identity.Identity()
    if mechanism.startswith("tree"):
        return _tree(mechanism, schema)
    if mechanism in ("bisr", "bifr", "lambda-cgd"):
        return _inverse_banded(mechanism, schema, options)
    return _banded(mechanism, schema, options)


def _check(mechanism: str, options: Options) -> None:
    if mechanism not in MECHANISMS:
        raise ValueError(
            f"--mechanism {mechanism!r} is unknown; use one of {', '.join(MECHANISMS)}."
        )
    for name, takes in OPTIONS_OF.items():
        if getattr(options, name) is not None and mechanism not in takes:
            flag = "--" + name.replace("_", "-")
            raise ValueError(
                f"{flag} is for {', '.join(takes)}, not for {mechanism}; leave it out."
            )


def _blt(schema: schema_lib.MinSep, options: Options) -> strategy_lib.Strategy:
    from tff_dpftrl.mechanisms import blt_optimize

    result = blt_optimize.optimize_blt(
        schema,
        num_buffers=options.buffers,
        minimize_rms=options.error == "rms",
        max_decay=options.max_decay,
    )
    if result.surplus_buffers:
        print(
            f"{options.buffers} buffers are more than this schema can use; "
            f"{result.strategy.num_buffers} reach the same loss.",
            file=sys.stderr,
        )
    if result.decay_at_bound and options.max_decay is None:
        print(
            "The largest decay is as close to 1 as allowed, which ties this BLT to "
            f"{schema.num_rounds} rounds. To run longer, give --max-decay "
            f"{1 - 1 / max(2, schema.num_rounds):.6g}.",
            file=sys.stderr,
        )
    return result.strategy


def _tree(mechanism: str, schema: schema_lib.MinSep) -> strategy_lib.Strategy:
    from tff_dpftrl.mechanisms import tree

    if mechanism == "tree-full":
        return tree.FullTree()
    return tree.Tree(schema.num_rounds, variance_reduction=mechanism == "tree")


def _inverse_banded(
    mechanism: str, schema: schema_lib.MinSep, options: Options
) -> strategy_lib.Strategy:
    from tff_dpftrl.mechanisms import inverse_banded

    bands = _DEFAULT_INVERSE_BANDS if options.bands is None else options.bands
    if mechanism == "bisr":
        return inverse_banded.InverseBanded.bisr(bands)
    if options.correlation is not None:
        return inverse_banded.InverseBanded.lambda_cgd(options.correlation)
    # λ-CGD is γ-BIFR with two bands: (1 - x)^γ = 1 - γ x + ...
    return inverse_banded.optimize_bifr(
        schema,
        2 if mechanism == "lambda-cgd" else bands,
        minimize_rms=options.error != "max",
    )


def _banded(mechanism: str, schema: schema_lib.MinSep, options: Options) -> strategy_lib.Strategy:
    from tff_dpftrl.mechanisms import banded_toeplitz, bandtoep_optimize

    if mechanism == "bandfhu":
        bands = min(schema.min_sep, schema.num_rounds) if options.bands is None else options.bands
        return banded_toeplitz.BandedToeplitz.fhu(bands)
    if mechanism == "bandtoep":
        return bandtoep_optimize.optimize_banded_toeplitz(
            schema, options.bands, minimize_rms=options.error != "max"
        )
    from tff_dpftrl.mechanisms import bandmf_optimize

    return bandmf_optimize.optimize_banded(
        schema,
        options.bands,
        minimize_rms=options.error != "max",
        checkpoint=options.checkpoint,
        progress=_print_progress,
    )


def _print_progress(step: int, loss: float) -> None:
    print(f"step {step}: loss {loss:.6f}", file=sys.stderr)
