"""`tff-dpftrl optimize`: the best noise mechanism for a training run."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
import time

from tff_dpftrl.cli import mechanism_flags, output
from tff_dpftrl.mechanisms import table

_DESCRIPTION = """\
Optimise a DP-FTRL mechanism for a number of rounds and the participation of clients.

A client takes part in at most --max-participations rounds, any two of them at least
--min-sep apart (a stride: round 7 and round 9 are 2 apart). The loss is the stddev of the
noise in the sum of all updates so far, at a fixed privacy guarantee: lower is better.
"""

_EPILOG = """\
mechanisms:
{mechanisms}

examples:
  # The setting of the BLT paper's Table 3. Takes well under a second.
  tff-dpftrl optimize --mechanism blt --rounds 2052 --min-sep 342 --max-participations 6

  # The BLT of least RmsLoss, kept in a file.
  tff-dpftrl optimize --mechanism blt --rounds 2000 --min-sep 400 --max-participations 5 \\
      --error rms --output strategy.json

  # For a server with momentum and a cosine schedule: least noise in the models.
  tff-dpftrl optimize --mechanism blt --rounds 2000 --min-sep 400 \\
      --workload momentum=0.9,warmup=100,decay=cosine
"""

_LONGEST_LIST = 64


def add_parser(subparsers) -> None:
    """Registers the subcommand."""
    listing = "\n".join(
        f"  {name:13}{mechanism.summary}" for name, mechanism in table.MECHANISMS.items()
    )
    parser = subparsers.add_parser(
        "optimize",
        description=_DESCRIPTION,
        epilog=_EPILOG.format(mechanisms=listing),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--mechanism",
        required=True,
        choices=table.MECHANISMS,
        metavar="NAME",
        help="See below.",
    )
    mechanism_flags.add_schema_arguments(parser)
    mechanism_flags.add_options(parser)
    parser.add_argument("--output", metavar="FILE", help="File for the strategy, as JSON.")
    output.add_format(parser)


def run(args: argparse.Namespace) -> int:
    """Optimises and prints; returns the exit status."""
    from tff_dpftrl.mechanisms import certificate as certificate_lib
    from tff_dpftrl.mechanisms import serialization

    mechanism_flags.require(args, *mechanism_flags.SCHEMA)
    schema = mechanism_flags.schema_from(args)
    options = mechanism_flags.options_from(args, schema.num_rounds)
    start = time.perf_counter()
    strategy = table.build(
        args.mechanism,
        schema,
        options,
        notify=mechanism_flags.notify,
    )
    seconds = time.perf_counter() - start
    certificate = certificate_lib.certify(strategy, schema, options.workload)
    if args.output is not None:
        # Certificates in files are of prefix sums, whatever the strategy was optimised for.
        serialization.save(args.output, strategy, certificate_lib.certify(strategy, schema))
    parameters = {key: value for key, value in strategy.to_dict().items() if key != "mechanism"}
    omitted = [key for key, value in parameters.items() if _is_long(value)]
    report = {"mechanism": strategy.name}
    report |= {key: value for key, value in certificate.to_dict().items() if key in _SCHEMA_KEYS}
    report |= {key: value for key, value in parameters.items() if key not in omitted}
    report |= {key: value for key, value in certificate.to_dict().items() if key not in report}
    report |= {"memory_copies": strategy.memory_copies(schema.num_rounds), "seconds": seconds}
    if options.workload is not None:
        report["workload"] = options.workload.description
    if options.workload is not None and table.MECHANISMS[args.mechanism].quick:
        for_sums = table.build(args.mechanism, schema, dataclasses.replace(options, workload=None))
        report |= {
            "max_loss_of_prefix_optimum": for_sums.max_loss(schema, options.workload),
            "rms_loss_of_prefix_optimum": for_sums.rms_loss(schema, options.workload),
        }
    if omitted:
        report["left_out"] = omitted
    if args.format == "json":
        output.print_json(report)
    else:
        print("\n".join(f"{key:20} {_as_text(value)}" for key, value in report.items()))
        if args.output is not None:
            print(
                f"Train with it:\n  tff-dpftrl train --strategy {shlex.quote(args.output)} ...",
                file=sys.stderr,
            )
    return 0


_SCHEMA_KEYS = ("num_rounds", "min_sep", "max_participations")


def _is_long(value) -> bool:
    return isinstance(value, list) and (
        len(value) > _LONGEST_LIST or any(isinstance(item, list) for item in value)
    )


def _as_text(value) -> str:
    if isinstance(value, list):
        return "  ".join(_as_text(item) for item in value)
    return f"{value:.10g}" if isinstance(value, float) else str(value)
