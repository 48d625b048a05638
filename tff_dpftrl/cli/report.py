"""`tff-dpftrl report`: statement, curves and model of what a run has committed."""

from __future__ import annotations

import argparse
import json
import math
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tff_dpftrl.cli import output
from tff_dpftrl.runs import manifest

if TYPE_CHECKING:
    from tff_dpftrl.training import report as report_lib

_DESCRIPTION = """\
Write the privacy statement, the curves and the model of what a training run has committed
so far, and print a summary.

It works on interrupted and on finished runs, and on no data: the folder is enough. While
`tff-dpftrl train` has the folder open it is refused; interrupt the run first, and go on
with it afterwards (tff-dpftrl train --resume). The statement of a run that has not ended
charges all rounds that it declared, since whoever ends it early has seen how it went.
"""

_EPILOG = """\
examples:
  # After Ctrl-C: is the model good enough, and what has it cost?
  tff-dpftrl report results/blt

  # For a script: the ε that is stated.
  tff-dpftrl report results/blt --format json | jq .statement.epsilon
"""


def add_parser(subparsers) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser(
        "report",
        help="state the privacy of an interrupted or finished run, and write its model",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("run_folder", metavar="RUN", help="Folder that train or finetune wrote to.")
    output.add_format(parser)


def run(args: argparse.Namespace) -> int:
    """Reports, and returns the exit status."""
    folder = pathlib.Path(args.run_folder)
    known = manifest.read(folder)  # Refuses what is no run before TensorFlow is imported.
    baselines, held_out = {}, None
    if known.kind == manifest.CUSTOM_FINETUNING:
        from tff_dpftrl.finetuning import custom_run

        results = custom_run.write_report(folder)
    else:
        results = _report_on_text(known.kind, folder)
        baselines, held_out = dict(results.baselines), results.held_out
    if args.format == "json":
        output.print_json(
            {
                "statement": json.loads(results.statement.to_json()),
                "last_round": {name: _finite(value) for name, value in results.rows[-1].items()},
                "baselines": baselines,
                "held_out": held_out,
                "summary": results.summary,
            }
        )
    else:
        print(f"{results.summary}\nStatement, curves and model are in {folder}/")
        if held_out is not None:
            _print_head_words(held_out["head_words"])
    return 0


def _report_on_text(kind: manifest.Kind, folder: pathlib.Path) -> report_lib.TrainingResults:
    if kind == manifest.FINETUNING:
        from tff_dpftrl.finetuning import run as finetuning_run

        return finetuning_run.write_report(folder)
    from tff_dpftrl.training import report

    return report.report(folder)


def _print_head_words(head_words: Mapping[str, Any]) -> None:
    """Prints the histogram as McMahan et al. 2018 do in their Table 3."""
    top = head_words["top"]
    print(
        f"\nShare of words where so many of the model's {top} likeliest are among the most\n"
        "frequent words of the held-out users:"
    )
    rows = [["most frequent", *map(str, range(top + 1))]]
    for size, shares in head_words["histograms"].items():
        rows.append([size, *(f"{share:.1%}" for share in shares)])
    output.print_table(rows, left=0)


def _finite(value: Any) -> Any:
    """Returns None in place of a number that JSON does not have, such as an infinite perplexity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
