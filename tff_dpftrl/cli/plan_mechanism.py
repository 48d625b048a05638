"""Answers of `tff-dpftrl plan` about one mechanism: its noise for a target, its best form."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
import time

from tff_dpftrl.cli import account, delta_flag, mechanism_flags, output, sampling_flags
from tff_dpftrl.mechanisms import table

_LONGEST_LIST = 64
_SCHEMA = ("num_rounds", "min_sep", "max_participations")


def print_noise(args: argparse.Namespace) -> None:
    """Prints the smallest noise multiplier that meets a target, and what it guarantees."""
    from tff_dpftrl.accounting import calibrate, noise_search

    delta_flag.check(args.delta)
    neighbours = sampling_flags.neighbours_from(args)
    options = sampling_flags.options_from(args)
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


def print_strategy(args: argparse.Namespace) -> None:
    """Optimises a mechanism, prints its losses, and writes it to the file of --output."""
    from tff_dpftrl.mechanisms import certificate as certificate_lib
    from tff_dpftrl.mechanisms import serialization

    schema = mechanism_flags.schema_from(args)
    options = mechanism_flags.options_from(args, schema.num_rounds)
    start = time.perf_counter()
    strategy = table.build(args.mechanism, schema, options, notify=mechanism_flags.notify)
    seconds = time.perf_counter() - start
    claim = certificate_lib.certify(strategy, schema, options.workload).to_dict()
    if args.output is not None:
        # Certificates in files are of prefix sums, whatever the strategy was optimised for.
        serialization.save(args.output, strategy, certificate_lib.certify(strategy, schema))
    parameters = {key: value for key, value in strategy.to_dict().items() if key != "mechanism"}
    omitted = [key for key, value in parameters.items() if _is_long(value)]
    report = {"mechanism": strategy.name, **{key: claim[key] for key in _SCHEMA}}
    report |= {key: value for key, value in parameters.items() if key not in omitted}
    report |= {key: value for key, value in claim.items() if key not in report}
    report |= {"memory_copies": strategy.memory_copies(schema.num_rounds), "seconds": seconds}
    if options.workload is not None:
        report["workload"] = options.workload.description
        if table.MECHANISMS[args.mechanism].quick:
            for_sums = dataclasses.replace(options, workload=None)
            optimum = table.build(args.mechanism, schema, for_sums)
            report["max_loss_of_prefix_optimum"] = optimum.max_loss(schema, options.workload)
            report["rms_loss_of_prefix_optimum"] = optimum.rms_loss(schema, options.workload)
    if omitted:
        report["left_out"] = omitted
    if args.format == "json":
        output.print_json(report)
        return
    print("\n".join(f"{key:20} {_as_text(value)}" for key, value in report.items()))
    if args.output is not None:
        command = f"tff-dpftrl train --strategy {shlex.quote(args.output)} ..."
        print(f"Train with it:\n  {command}", file=sys.stderr)


def _is_long(value) -> bool:
    return isinstance(value, list) and (
        len(value) > _LONGEST_LIST or any(isinstance(item, list) for item in value)
    )


def _as_text(value) -> str:
    if isinstance(value, list):
        return "  ".join(map(_as_text, value))
    return f"{value:.10g}" if isinstance(value, float) else str(value)
