"""`tff-dpftrl audit`: does the running code keep the promise that it prints?"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tff_dpftrl import validation
from tff_dpftrl.auditing import defaults
from tff_dpftrl.cli import output
from tff_dpftrl.training import composed, custom_models
from tff_dpftrl.training import config as config_lib
from tff_dpftrl.training import options as options_lib

if TYPE_CHECKING:
    from tff_dpftrl.auditing import audit_report

VIOLATED = 3
"""Exit status where the claim was refuted: no other outcome has it."""

INCOMPLETE = 4
"""Exit status where nothing contradicts the claim, but it was not derived, or nothing tested."""

_DESCRIPTION = """\
Test whether the code keeps the promise that it prints, in one of two ways.

--config: run what `tff-dpftrl train` or `task new` would run with a file of options, on small
tensors and a tiny model, thousands of times with and without one client. How well the two can be
told apart gives a lower bound on ε. It takes minutes. For options of `finetune`, repeat steps with
its model, with and without each unit, and compare exactly what they release.

--run: derive the numbers of a finished or interrupted run's privacy statement again, as far as its
records allow, from ledger, options, checkpoint and strategy. Other code than wrote them does this,
except for the ε of bins sampling, and for sentences. Its files are searched for what
should not be there. It takes seconds.

docs/explanation/auditing.md says what an audit proves and what it does not.

exit status:
  0  nothing contradicts the claim
  1  a file could not be written
  2  nothing could be audited: a wrong flag, no run in the folder, a run in use
  3  the claim is VIOLATED
  4  nothing contradicts the claim, but it cannot be derived (private/ is not there, or the
     mechanism is a custom one), or no test could be done
"""

_EPILOG = """\
examples:
  # Before a run: would it keep its promise?
  tff-dpftrl audit --config quickstart --output results/audit

  # The same without reading the corpus, of whose users only the number matters.
  tff-dpftrl audit --config quickstart --clients 3000 --trials 2000

  # After it: recount; nothing in its folder is changed.
  tff-dpftrl audit --run results/quickstart

  # Keep the report, and add its verdict to the statement of the run.
  tff-dpftrl audit --run results/quickstart --output results/audit --state

  # A task that was served to devices, without its server.
  tff-dpftrl task report tasks/nwp --store store --records --output nwp_records
  tff-dpftrl audit --run nwp_records

  # For a script.
  tff-dpftrl audit --run results/quickstart --format json | jq -r .verdict
"""

_BELIEVED = (
    "\nThis believes the records. To test the mechanism itself, which clips and draws noise: "
    "tff-dpftrl audit --config FILE, with the run's options."
)
_OF_CONFIG = ("kind", "clients", "trials", "error_rate")
_STATEMENT = "privacy_statement.json"
_KINDS = ("train", "finetune", "task")


def add_parser(subparsers) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser(
        "audit",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--config",
        metavar="FILE",
        help="Options of train, finetune or task new: a TOML file, or a name like quickstart.",
    )
    what.add_argument(
        "--run",
        metavar="RUN",
        dest="run_folder",
        help="Results folder of train, finetune or sweep --select, of a run that is not under "
        "way; or the report of a served task with its records (task report --records).",
    )
    parser.add_argument(
        "--output",
        metavar="DIR",
        help="Folder for audit.md, audit.json and, with --config, trade_off.png; made if missing. "
        "Default: no files are written.",
    )
    of_config = parser.add_argument_group("with --config")
    of_config.add_argument(
        "--kind",
        choices=_KINDS,
        help="Command that the options of --config are for. Default: the first that has them all.",
    )
    of_config.add_argument(
        "--clients",
        type=int,
        metavar="N",
        help="Number of training users. Default: counted in the config's corpus, or num_devices "
        "of a task.",
    )
    of_config.add_argument(
        "--trials",
        type=int,
        metavar="N",
        help="Least number of games; fine-tuning has none. More games find smaller deviations. "
        f"Default: {defaults.TRIALS}.",
    )
    of_config.add_argument(
        "--error-rate",
        type=float,
        metavar="P",
        help="Largest chance that a config that keeps its promise is called VIOLATED. Default: "
        f"{defaults.ERROR_RATE}.",
    )
    of_run = parser.add_argument_group("with --run")
    of_run.add_argument(
        "--state",
        action="store_true",
        help="Add the outcome of the audit to the run's privacy statement. The claim is not "
        "changed; if the audit refuted it, the statement says so beside ε. `tff-dpftrl report` "
        "removes this line. `report --html` keeps it while the claim is the same.",
    )
    output.add_format(parser)


def run(args: argparse.Namespace) -> int:
    """Audits, and returns the exit status."""
    report = _of_config(args) if args.config is not None else _of_run(args)
    if args.format == "json":
        output.print_json(json.loads(report.to_json()))
    else:
        _print(report)
        if args.run_folder is not None:
            print(_BELIEVED)
    try:
        if args.state:
            _state(pathlib.Path(args.run_folder), report)
        if args.output is not None:
            report.save(args.output)
    except OSError as error:
        if not report.is_violated:
            raise
        _progress(f"The verdict stands, but a file cannot be written: {error}")
    if report.is_violated:
        return VIOLATED
    return INCOMPLETE if report.missing or not report.is_tested else 0


def _of_config(args: argparse.Namespace) -> audit_report.AuditReport:
    if args.state:
        raise validation.UsageError(
            "--state is for --run: there is no statement yet, leave it out."
        )
    values = options_lib.read_toml(args.config)
    kind = args.kind or _kind_of(values)
    config = options_lib.config_from_mapping(values, args.config, _config_classes()[kind])
    if isinstance(config, config_lib.TrainingConfig):
        custom_models.refuse_missing(config.language.model, None)
    if kind == "finetune" and args.trials is not None:
        raise validation.UsageError(
            "--trials is for games: steps of fine-tuning are compared exactly, leave it out."
        )
    rates = {} if args.error_rate is None else {"error_rate": args.error_rate}
    _progress("Loading TensorFlow ...")
    if kind == "finetune":
        from tff_dpftrl.auditing import configured_steps

        return configured_steps.audit_config(
            config, num_users=args.clients, progress=_progress, **rates
        )
    from tff_dpftrl.auditing import configured

    clients = (
        config.serving.num_devices if kind == "task" and args.clients is None else args.clients
    )
    games = {} if args.trials is None else {"trials": args.trials}
    return configured.audit_config(
        config, num_clients=clients, progress=_progress, **games, **rates
    )


def _config_classes() -> dict[str, type[composed.Options]]:
    """Returns the class of the options of each command."""
    from tff_dpftrl.finetuning import config as finetuning_config
    from tff_dpftrl.runtime.tasks import task_config

    classes = config_lib.TrainingConfig, finetuning_config.FinetuningConfig, task_config.TaskConfig
    return dict(zip(_KINDS, classes, strict=True))


def _kind_of(values: Mapping[str, Any]) -> str:
    """Returns the first command that has all options of a file, or the first one of all."""
    for kind, config_class in _config_classes().items():
        if values.keys() <= config_class.known():
            return kind
    return _KINDS[0]


def _of_run(args: argparse.Namespace) -> audit_report.AuditReport:
    for name in _OF_CONFIG:
        if getattr(args, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise validation.UsageError(f"{flag} is for --config, not for a recount: leave it out.")
    if args.state and not (path := pathlib.Path(args.run_folder) / _STATEMENT).exists():
        raise validation.UsageError(
            f"--state needs a statement, and {path} does not exist: run tff-dpftrl report on the "
            "folder first."
        )
    from tff_dpftrl.auditing.recount import run_folder

    return run_folder.recount_run(args.run_folder, progress=_progress)


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _print(report: audit_report.AuditReport) -> None:
    """Prints the verdict, and each test in a line."""
    print(report.headline + "\n")
    for finding in report.findings:
        print(f"{finding.outcome:12} {finding.test}: {finding.text}")
    if report.powers:
        print("\nSmallest faults that these tests would have found with 99 % probability:")
        print("\n".join(f"  {line}" for line in report.powers))


def _state(folder: pathlib.Path, report: audit_report.AuditReport) -> None:
    """Adds the audit to the statement of a run, once."""
    from tff_dpftrl import durable_files
    from tff_dpftrl.accounting import privacy_statement as statement_lib
    from tff_dpftrl.models import hugging_face
    from tff_dpftrl.reports import readme
    from tff_dpftrl.runs import reporting

    path = folder / _STATEMENT
    try:
        remedy = "Run tff-dpftrl report on the folder first."
        stated = statement_lib.PrivacyStatement.read(path, remedy=remedy)
    except (OSError, ValueError) as error:
        reason = f"Nothing is added to {path}, which --state cannot read: {error}"
        if not report.is_violated:
            raise validation.UsageError(reason) from error
        _progress(reason)
        return
    entry = report.entry()
    if entry in stated.audits:
        return
    reporting.write_statement(folder, stated.with_audit(entry, is_refuted=report.is_violated))
    copies = [folder / name / path.name for name in hugging_face.FOLDERS]
    for copy in (one for one in copies if one.exists()):
        for suffix in (".json", ".md"):
            content = path.with_suffix(suffix).read_bytes()
            durable_files.write(copy.with_suffix(suffix), content)
    if report.is_violated and (folder / readme.NAME).exists():
        with contextlib.suppress(validation.UsageError):  # Of a damaged file: the verdict stands.
            readme.write(folder)  # No guarantee covers the model now.
