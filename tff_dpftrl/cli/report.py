"""`tff-dpftrl report`: statement, curves and model of what a run has committed."""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tff_dpftrl import durable_files, packages, validation
from tff_dpftrl.accounting import statement_text
from tff_dpftrl.cli import output
from tff_dpftrl.reports import page
from tff_dpftrl.reports import results as results_lib
from tff_dpftrl.runs import manifest, reporting

if TYPE_CHECKING:
    from tff_dpftrl.training import report as report_lib

_DESCRIPTION = """\
Write the privacy statement, the curves and the model of what a training run has committed
so far, and print a summary.

It works on interrupted and on finished runs, and reads no data: the folder is enough. A run that
`tff-dpftrl train` has open is refused: interrupt it first, and go on with it afterwards (tff-dpftrl
train --resume). The statement of a run that has not ended charges all rounds that it declared,
since whoever ends it early has seen how it went.

--html writes all of it as one page: statement, curves, participation, findings of a recount,
options, files. The page needs no other file, script or network, and holds only what may be
published. Nothing else is written, unless the statement is missing or covers fewer rounds than the
metrics do. --private adds exact figures of the training users, under a banner.

The report of a folder without private/, or of pretrain, sweep or task report, is not made again.
What is in the folder is summarised, and what is missing is named.
"""

_EPILOG = """\
examples:
  # After Ctrl-C: is the model good enough, and what has it cost?
  tff-dpftrl report results/blt

  # For a script: the ε that is stated.
  tff-dpftrl report results/blt --format json | jq .statement.epsilon

  # One page to print or to hand on: results/blt/report.html.
  tff-dpftrl report results/blt --html

  # For the operator, with n-gram models and training cohorts: results/blt/private/report.html.
  tff-dpftrl report results/blt --html --private

  # A sweep, or a folder that somebody has handed on.
  tff-dpftrl report results/sweep --html sweep.html
"""


def add_parser(subparsers) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser(
        "report",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "run_folder",
        metavar="RUN",
        help="Folder that train, finetune, pretrain, sweep or task report wrote to.",
    )
    parser.add_argument(
        "--html",
        nargs="?",
        const="",
        metavar="FILE",
        help="Also write the report as one HTML page. Default of FILE: report.html in the run's "
        "folder; with --private, in private/ of that folder.",
    )
    parser.add_argument(
        "--private",
        action="store_true",
        help="Add exact figures of the training users to the page. It is then not to be published.",
    )
    output.add_format(parser)


def run(args: argparse.Namespace) -> int:
    """Reports, and returns the exit status."""
    folder = pathlib.Path(args.run_folder)
    target = _target(args, folder)
    is_run = manifest.exists(folder) and (folder / manifest.PRIVATE).is_dir()
    is_viewed = target is not None and _has_results(folder) and results_lib.read(folder).is_stated
    if (is_run and not is_viewed) or not _has_results(folder):
        _report_again(folder, args.format)
    else:
        _report_what_is_left(folder, args.format)
    if target is not None:
        content = page.of(results_lib.read(folder, private=args.private)).encode("utf-8")
        durable_files.write(target, content, private=args.private)
        print(f"The page is in {target}", file=sys.stderr)
    return 0


def _target(args: argparse.Namespace, folder: pathlib.Path) -> pathlib.Path | None:
    """Returns the file of the page; None for no page."""
    if args.html is None:
        if args.private:
            raise validation.UsageError("--private is for the page: add --html, or leave it out.")
        return None
    if args.html:
        return output.page("--html", args.html)
    if not args.private:
        return folder / page.NAME
    if not (folder / manifest.PRIVATE).is_dir():
        raise validation.UsageError(
            f"--private needs a file: there is no {folder / manifest.PRIVATE}/ to keep the page "
            "in, name one behind --html."
        )
    return folder / manifest.PRIVATE / page.NAME


def _has_results(folder: pathlib.Path) -> bool:
    """Returns whether a folder has results that can be shown, if not derived again."""
    try:
        results_lib.kind_of(folder)
    except validation.UsageError:
        return False
    return not (folder / "task.pb").exists()  # A task's own folder: its error says what to do.


def _report_what_is_left(folder: pathlib.Path, form: str) -> None:
    """Summarises the files of a folder whose run cannot be derived again."""
    found = results_lib.read(folder)
    summary = _summary(found)
    if form == "json":
        stated = found.statement
        output.print_json(
            {
                "statement": None if stated is None else json.loads(statement_text.to_json(stated)),
                "last_round": dict(found.rows[-1]) if found.rows else None,
                "baselines": dict(found.baselines),
                "held_out": None,
                "summary": summary,
                "missing": list(found.missing),
            }
        )
    else:
        print("\n".join([summary, *found.missing]))


def _summary(found: results_lib.Results) -> str:
    """Returns the outcome in a few lines, from what may be published."""
    lines = [f"{page.TITLES[found.kind]}: {found.data}."]
    last = found.evaluations[-1] if found.evaluations else {}
    if results_lib.ACCURACY in last:
        unit = page.UNITS.get(found.kind, "round")
        lines.append(
            f"After {last['round']:g} {unit}s: top-1 accuracy on held-out users "
            f"{last[results_lib.ACCURACY]:.2%}."
        )
    has_statement = found.statement is not None
    lines.append(reporting.promise(found.statement) if has_statement else page.headline(found))
    return "\n".join(lines)


def _report_again(folder: pathlib.Path, form: str) -> None:
    """Derives the report of a run again from what it has committed."""
    known = manifest.read(folder)  # Refuses what is no run before TensorFlow is imported.
    packages.require("The report of a run", "tensorflow", "matplotlib")
    baselines, held_out, written = {}, None, "model"
    if known.kind == manifest.CUSTOM_FINETUNING:
        from tff_dpftrl.finetuning import custom_run

        results = custom_run.write_report(folder)
        written = "weights (weights.npz, which numpy.load reads for your own model)"
    else:
        results = _report_on_text(known.kind, folder)
        baselines, held_out = dict(results.baselines), results.held_out
    if form == "json":
        output.print_json(
            {
                "statement": json.loads(statement_text.to_json(results.statement)),
                "last_round": {name: _finite(value) for name, value in results.rows[-1].items()},
                "baselines": baselines,
                "held_out": held_out,
                "summary": results.summary,
            }
        )
    else:
        print(f"{results.summary}\nStatement, curves and {written} are in {folder}/")
        if held_out is not None:
            _print_head_words(held_out["head_words"])


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
