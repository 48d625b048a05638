"""`tff-dpftrl task`: makes, signs and reports what devices and server compute together."""

from __future__ import annotations

import argparse
import json
import pathlib
import shlex
import sys
from collections.abc import Callable
from typing import Any

from tff_dpftrl import validation
from tff_dpftrl.cli import config_flags
from tff_dpftrl.cli import output as output_lib
from tff_dpftrl.runtime.tasks import task_config
from tff_dpftrl.training import options as options_lib

_DESCRIPTION = """\
Make a task of a population of devices, and report what became of it.

  tff-dpftrl task new      options in, a folder with signed and tested plans out
  tff-dpftrl task show     what a task was built from, who signed it, and who approved it
  tff-dpftrl task approve  sign the task as a reviewer
  tff-dpftrl task report   metrics, curves, privacy statement and model of what is committed
"""

_NEW = """\
Make a task: what devices and server compute in every round, as plans that are tested on public
text and signed, with what they promise of privacy.

The options are those of `train` (a --config of it is a beginning), and how rounds go with
devices. clients_per_round is the number of reports that a round is complete with. The devices'
data is not read. The new folder holds nothing secret: give it to the server, and its
signing_key.pub to devices.
"""

_NEW_EPILOG = """\
examples:
  tff-dpftrl task new --config next_word --output tasks/nwp

  # A server that keeps to the protocol sees sums of 40 devices or more, and no report.
  tff-dpftrl task new --config next_word --secagg-bits 20 \\
    --secure-aggregation --least-group 40 --output tasks/nwp

  # A group of tasks that differ in one option; they share the devices.
  tff-dpftrl task new --config next_word --grid client_learning_rate=0.1,0.3 \\
    --output tasks/nwp

  # A task that evaluates the model of another one while that trains.
  tff-dpftrl task new --evaluates tasks/nwp --clients-per-round 20 --output tasks/nwp_eval
"""

_SHOW = """\
Show what a task was built from, whose key signed it, the hashes of its plans and terms, and whose
keys approved it. All of it is signed, unlike README.md, and was verified.
"""

_APPROVE = """\
Approve a task as a reviewer: sign the hashes of its plans and privacy terms with your own key. A
task that is made again needs to be approved again. The approval is a file in the task's folder;
that of a copy of the folder can be copied here. The key that signed the task cannot approve it.

`serve` and `device` ask for approvals with --reviewers and --approvals.
"""

_APPROVE_EPILOG = """\
examples:
  tff-dpftrl task show tasks/nwp
  tff-dpftrl task approve tasks/nwp --key alice.key

  # Once: the reviewer's name and public key in the list.
  (echo Alice; cat alice.key.pub) >> reviewers.pem
  tff-dpftrl serve --population keyboard --task tasks/nwp --store store \\
    --reviewers reviewers.pem --approvals 1
"""

_REPORT = """\
Write metrics, curves, privacy statement and model of what a task has committed so far, and print a
summary. The server may go on meanwhile: its store is only read.

The results are in the folder report/ of the task, unless --output names another. What is in its
private/ holds exact figures of the devices. README.md says of each other file who may see it.
"""

_REPORT_EPILOG = """\
examples:
  tff-dpftrl task report tasks/nwp --store store
  tff-dpftrl predict tasks/nwp/report "the number of"

  # For an auditor, who needs neither the server nor its store.
  tff-dpftrl task report tasks/nwp --store store --records --output nwp_records
  tff-dpftrl audit --run nwp_records
"""

_HIDDEN = ("algorithm", "eval_every", "max_users", "train_on_test_users")

_FIRST = (
    "output config signing_key population num_devices model initial_weights num_rounds "
    "clients_per_round noise_multiplier delta secure_aggregation"
)


def add_parser(subparsers) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser(
        "task",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parts = parser.add_subparsers(dest="task_command", metavar="COMMAND", required=True)
    _add_new(parts)
    _add_review(parts)
    _add_report(parts)


def _add_command(
    parts,
    name: str,
    what: str,
    description: str,
    epilog: str | None,
    run: Callable,
    *,
    add_help: bool = True,
) -> argparse.ArgumentParser:
    """Adds a command whose texts are shown as they are written."""
    parser = parts.add_parser(
        name,
        help=what,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=add_help,
    )
    parser.set_defaults(run=run)
    return parser


def _add_new(parts) -> None:
    what = "make a signed and tested task"
    parser = _add_command(parts, "new", what, _NEW, _NEW_EPILOG, _new, add_help=False)
    config_flags.add_help(parser, _FIRST)
    parser.add_argument("--output", required=True, metavar="DIR", help="The new folder.")
    config_flags.add_config(parser, task_config.TaskConfig)
    parser.add_argument(
        "--signing-key",
        metavar="FILE",
        help="Private key (Ed25519, PEM) that signs the task. It is made if there is none, with "
        "the public key beside it. Default: signing_key beside the new folder.",
    )
    parser.add_argument(
        "--evaluates",
        metavar="TASK",
        help="Folder of a task whose model the new task evaluates. Options that are not given are "
        "that task's.",
    )
    parser.add_argument(
        "--grid",
        metavar="NAME=VALUE,...",
        help="Option and its values: one task is made for each value. Folders and tasks are named "
        "by the value.",
    )
    parser.add_argument(
        "--builder",
        metavar="NAME",
        help="Name and address of the person who builds the task, for its server's plan; '' for "
        "nobody. Default: user.name and user.email of git.",
    )
    parser.add_argument(
        "--allow-dirty",
        action="store_true",
        help="Build from a file of --build although its git repository has code that is not "
        "committed. The plan then says so.",
    )
    config_flags.add_options(parser, task_config.TaskConfig, without=_HIDDEN)


def _add_review(parts) -> None:
    """Registers `task show` and `task approve`."""
    what = "show what a task was built from, who signed it, and who approved it"
    show = _add_command(parts, "show", what, _SHOW, None, _show)
    output_lib.add_format(show)
    what = "sign a task as a reviewer"
    approve = _add_command(parts, "approve", what, _APPROVE, _APPROVE_EPILOG, _approve)
    for parser in (show, approve):
        parser.add_argument("task_folder", metavar="TASK", help="Folder that task new wrote.")
    approve.add_argument(
        "--key",
        required=True,
        metavar="FILE",
        help="Private key (Ed25519, PEM) of the reviewer. It is made if there is none, with the "
        "public key beside it.",
    )


def _show(args: argparse.Namespace) -> int:
    """Shows a task, and returns the exit status."""
    from tff_dpftrl.runtime.tasks import provenance, task_folder

    folder = task_folder.read(args.task_folder)
    server = folder.signed.server
    shown = {
        "task": folder.name,
        "population": folder.terms.population,
        "kind": folder.terms.kind,
        "built": provenance.sentence(folder.server.provenance),
        "signing_key": server.key.hex(),
        "server_plan": server.sha256.hex(),
        "device_plans": [plan.sha256.hex() for plan in folder.signed.devices],
        "terms": folder.terms.digest(),
        "approved_by": [approval.key.hex() for approval in server.approvals.approvals],
    }
    if args.format == "json":
        output_lib.print_json(shown)
    else:
        for name, value in shown.items():
            text = value if isinstance(value, str) else ", ".join(value) or "nobody"
            print(f"{name.replace('_', ' '):<13} {text}")
    return 0


def _approve(args: argparse.Namespace) -> int:
    """Approves a task, and returns the exit status."""
    from tff_dpftrl.runtime.tasks import provenance, task_folder

    task_folder.read(args.task_folder)  # Before a key is made.
    key = _key(pathlib.Path(args.key), "The list of --reviewers has to have")
    folder = task_folder.approve(args.task_folder, key)
    print(f"Approved the task {folder.name!r}. {provenance.sentence(folder.server.provenance)}")
    return 0


def _add_report(parts) -> None:
    what = "write metrics, curves, statement and model of what a task has committed"
    parser = _add_command(parts, "report", what, _REPORT, _REPORT_EPILOG, _report)
    parser.add_argument("task_folder", metavar="TASK", help="Folder that task new wrote.")
    parser.add_argument(
        "--store",
        default="store",
        metavar="PLACE",
        help="Folder or database URL of the store that serve uses. Default: %(default)s.",
    )
    parser.add_argument(
        "--server-folder",
        metavar="DIR",
        help="Folder of the server, which has counts of the devices' sessions. Default: server in "
        "the store's folder.",
    )
    parser.add_argument("--output", metavar="DIR", help="Folder of the results.")
    parser.add_argument(
        "--no-held-out",
        action="store_true",
        help="Do not read the data of the options: the model is then not evaluated on its "
        "held-out users.",
    )
    parser.add_argument(
        "--records",
        action="store_true",
        help="Add the records that an audit needs: the task's folder, and the store's rows in "
        "private/, which holds the seed of the noise.",
    )
    output_lib.add_format(parser)


def _report(args: argparse.Namespace) -> int:
    """Reports, and returns the exit status."""
    from tff_dpftrl.runtime.store import sql
    from tff_dpftrl.runtime.tasks import task_folder

    folder = task_folder.read(args.task_folder)
    output = pathlib.Path(args.output or folder.path / task_folder.REPORT)
    if "://" not in args.store and not pathlib.Path(args.store).is_dir():
        raise validation.UsageError(
            f"There is no store at {args.store}: name the --store that tff-dpftrl serve has."
        )
    from tff_dpftrl.accounting import statement_text
    from tff_dpftrl.runtime.server import server_folder
    from tff_dpftrl.runtime.status import session_table
    from tff_dpftrl.runtime.tasks import task_report

    counted = server_folder.of(args.server_folder or pathlib.Path(args.store) / "server").sessions
    sessions = session_table.SessionTable.load(counted)
    with sql.SqlStore(args.store) as store:
        report = task_report.write(
            folder,
            store,
            output,
            with_held_out=not args.no_held_out,
            sessions=sessions,
            rows_of_store=(
                store.rows(folder.terms.population, folder.name) if args.records else None
            ),
        )
    if args.format == "json":
        stated = report.statement
        output_lib.print_json(
            {
                "statement": stated and json.loads(statement_text.to_json(stated)),
                "last_round": report.rows[-1],
                "held_out": report.held_out,
                "sessions": {shape: count for shape, count, _ in sessions.rows()},
                "summary": report.summary,
            }
        )
    else:
        print(f"{report.summary}\nMetrics, curves, statement and model are in {output}/")
        if sessions.total:
            print("\nSessions of the population's devices, by shape (see private/sessions.md):")
            rows = [
                [shape, str(count), "" if share is None else f"{share:.1f} %"]
                for shape, count, share in sessions.rows()
            ]
            output_lib.print_table([["shape", "count", "of those with a plan"], *rows], left=0)
    return 0


def _new(args: argparse.Namespace) -> int:
    """Makes a task, or a group of them, and returns the exit status."""
    from tff_dpftrl.runtime.tasks import provenance, task_folder
    from tff_dpftrl.training import corpus

    output = pathlib.Path(args.output)
    flags = config_flags.given_options(args, task_config.TaskConfig)
    if args.evaluates and (args.config or args.grid):
        raise validation.UsageError(
            "--evaluates takes its options from the task that it evaluates: leave out "
            f"{'--config' if args.config else '--grid'}."
        )
    of = task_folder.read(args.evaluates) if args.evaluates else None
    if of is None:
        values = options_lib.read_toml(args.config) if args.config else {}
        source = args.config or "the command line"
        values = options_lib.overrule(values, flags)
        config = options_lib.config_from_mapping(values, source, task_config.TaskConfig)
    else:
        config = _evaluating(of.config, flags)
    group = [("", config)]
    if args.grid:
        group = task_config.grid(config, *_grid(args.grid))
    built = provenance.find(config.build, args.builder, allow_dirty=args.allow_dirty)
    folders = [(pathlib.Path(f"{output}{suffix}"), options) for suffix, options in group]
    for folder, options in folders:
        task_folder.check_is_free(folder)
        corpus.require_packages(options.to_dict())
    _progress("Loading TensorFlow ...")
    from tff_dpftrl.runtime.tasks import making

    path = pathlib.Path(args.signing_key or output.parent / "signing_key")
    key = _key(path, "Devices have to trust")
    for folder, options in folders:
        if of is None:
            made = making.make(options, folder, key, built=built, progress=_progress)
        else:
            made = making.make_evaluation(of, options, folder, key, built=built, progress=_progress)
        print(f"The task {made.name!r} is in {folder}/: see its README.md.")
    names = " ".join(f"--task {shlex.quote(str(folder))}" for folder, _ in folders)
    print(
        f"Serve it with:\n  tff-dpftrl serve --population {config.serving.population} {names} ..."
    )
    return 0


def _evaluating(config: task_config.TaskConfig, flags: dict[str, Any]) -> task_config.TaskConfig:
    """Returns the options of an evaluation: those of the evaluated task, with its changes."""
    values = {**config.to_dict(), "task": "", "max_epsilon": None, "weight": 1.0}
    values |= {"min_sep": None, "max_participations": None, "least_group": None}
    values |= {"expect": None, **flags}
    return task_config.TaskConfig.of(**values)


def _grid(text: str) -> tuple[str, list[Any]]:
    name, equals, values = text.partition("=")
    if not equals or not values:
        raise validation.UsageError(
            f"--grid must be like client_learning_rate=0.1,0.3, got {text!r}."
        )
    return name.strip().replace("-", "_"), [_value(entry) for entry in values.split(",")]


def _value(text: str) -> Any:
    """Reads a value as TOML does."""
    named = {"true": True, "false": False}
    if text in named:
        return named[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _key(path: pathlib.Path, who_needs: str):
    """Returns the private key of a file, which is made if there is none."""
    from tff_dpftrl.runtime import signing_keys

    if path.exists():
        return signing_keys.load_private(path)
    path.absolute().parent.mkdir(parents=True, exist_ok=True)
    key = signing_keys.create(path)
    _progress(
        f"Made the signing key {path}, which only you can read: keep it safe. {who_needs} "
        f"{signing_keys.public_path(path)}."
    )
    return key


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
