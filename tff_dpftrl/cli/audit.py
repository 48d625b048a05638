"""`tff-dpftrl audit`: does the running code keep the promise that it prints?"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import TYPE_CHECKING

from tff_dpftrl.cli import output

if TYPE_CHECKING:
    from tff_dpftrl.auditing import report as report_lib

VIOLATED = 3
"""Exit status where the claim was refuted: no other outcome has it."""

_DESCRIPTION = """\
Audit a run that is finished or interrupted: derive everything in its privacy statement again from
ledger, options, checkpoint and strategy, by code that shares nothing with that which wrote them,
and look through its files for what should not be there.

docs/auditing.md says what an audit proves and what it does not.

The exit status is 0 if nothing contradicts the claim, 3 if the claim is VIOLATED, 2 if nothing
could be audited (a wrong flag, no run in the folder, a run in use), 1 if a file could not be
written.
"""

_EPILOG = """\
examples:
  # Recount a finished run; nothing in its folder is changed.
  tff-dpftrl audit --run results/quickstart

  # Keep the report, and let the run's statement say how it went.
  tff-dpftrl audit --run results/quickstart --output results/audit --state

  # For a script.
  tff-dpftrl audit --run results/quickstart --format json | jq -r .verdict
"""


def add_parser(subparsers) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser(
        "audit",
        help="test whether a run keeps the promise that it prints",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--run",
        metavar="RUN",
        dest="run_folder",
        required=True,
        help="Folder that train or finetune wrote to, of a run that is not under way.",
    )
    parser.add_argument(
        "--state",
        action="store_true",
        help="Add a line to the run's privacy statement that says how the audit went. The claim "
        "stays what it is; a refuted one says so beside ε. `tff-dpftrl report` takes it away.",
    )
    parser.add_argument(
        "--output",
        metavar="DIR",
        help="Folder for audit.md and audit.json; made if missing. Nothing is written if not "
        "given.",
    )
    output.add_format(parser)


def run(args: argparse.Namespace) -> int:
    """Audits, and returns the exit status."""
    from tff_dpftrl.auditing.recount import run_folder

    found = run_folder.recount_run(args.run_folder, say=_say)
    if args.output is not None:
        found.save(args.output)
    if args.state:
        _state(pathlib.Path(args.run_folder), found)
    if args.format == "json":
        output.print_json(json.loads(found.to_json()))
    else:
        _print(found)
    return VIOLATED if found.is_violated else 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _print(found: report_lib.AuditReport) -> None:
    """The verdict, and each test in a line."""
    print(found.verdict + "\n")
    for finding in found.findings:
        print(f"{finding.outcome:12} {finding.test}: {finding.says}")


def _state(folder: pathlib.Path, found: report_lib.AuditReport) -> None:
    """Adds the audit to the statement of a run, once."""
    from tff_dpftrl import durable_files
    from tff_dpftrl.accounting import statement as statement_lib

    path = folder / "privacy_statement.json"
    if not path.exists():
        raise ValueError(
            f"--state needs a statement, and {path} does not exist: run tff-dpftrl report on the "
            "folder first."
        )
    stated = statement_lib.PrivacyStatement.from_json(path.read_text(encoding="utf-8"))
    entry = found.entry()
    if entry in stated.audits:
        return
    stated = stated.with_audit(entry, is_refuted=found.is_violated)
    durable_files.write(path, (stated.to_json() + "\n").encode("utf-8"))
    durable_files.write(path.with_suffix(".md"), stated.to_markdown().encode("utf-8"))
