"""`tff-dpftrl noise-party`: adds the noise of a task within its secure sums, and has no data."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import pathlib
import sys
import time
from typing import TYPE_CHECKING, Any

from tff_dpftrl import durable_files, validation
from tff_dpftrl.cli import output as output_lib
from tff_dpftrl.cli import trust_flags

if TYPE_CHECKING:
    from tff_dpftrl.runtime.noise_party import ledger as ledger_lib

_DESCRIPTION = """\
Be the noise party of a task: a second operator, who holds the noise and no data. It joins each
secure group of devices like one more device, and its vector is the round's noise. So the server
sees no sum of updates without noise, unless it colludes with every noise party of the task; sums of
metrics and participation stay exact. A task's only noise party can subtract its noise from what is
released; two protect from each other.

  tff-dpftrl noise-party new-key    make the folder with the key that task new needs
  tff-dpftrl noise-party --task ... take part in the rounds of a server
  tff-dpftrl noise-party status     what this party has given

The folder holds key, seed and ledger. Run it on a machine that the server's operator does not
control, and keep the folder secret. Do not go on from a copy or a backup of it: an older ledger
does not know which noise was given. It gives other noise, but that costs epsilon once more.
"""

_EPILOG = """\
examples:
  # Once, before the task is made: send party/key.pub to its maker.
  tff-dpftrl noise-party new-key --folder party
  tff-dpftrl task new --config next_word --secure-aggregation --secagg-bits 24 \\
      --noise-party party/key.pub --output tasks/nwp

  # With the task's folder, the key of its signer, and the server's address and certificate.
  tff-dpftrl noise-party --task tasks/nwp --folder party --plan-keys signing_key.pub \\
      --server example.org:8443 --server-certificate server.pem

  # Or with the bundle that the server's operator gives to devices, for all but the signer's key.
  tff-dpftrl noise-party --task tasks/nwp --folder party --plan-keys signing_key.pub \\
      --server-bundle device_bundle.json

While the party is away, the task's rounds wait. Stop it at any time: no noise is given twice. An
attempt that fails after it got its noise costs a round.
"""

_STATUS = """\
Show what this party has given: the rounds of each task, those that are in a sum, and those of
attempts that were abandoned, whose noise is used up all the same. Also while the party runs.
"""

_KEY = "key"
_LOCK = "lock"
_LEDGER = ".ledger"
_CHECKPOINT = ".noise"


def add_parser(subparsers) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser(
        "noise-party",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=_run, what_is_left=_what_is_left, population=None)
    parts = parser.add_subparsers(dest="noise_party_command", metavar="COMMAND")
    new_key = parts.add_parser("new-key", help="make the folder of a party, with its key")
    new_key.set_defaults(run=_new_key)
    status = parts.add_parser(
        "status", help="show the noise that this party has given", description=_STATUS
    )
    status.set_defaults(run=_status)
    output_lib.add_format(status)
    for one in (new_key, status):
        one.add_argument("--folder", required=True, metavar="DIR", help="Folder of this party.")
    own = parser.add_argument_group("this party")
    own.add_argument("--task", metavar="TASK", help="Folder of the task, from its maker.")
    own.add_argument("--folder", metavar="DIR", help="Folder of this party, from new-key.")
    own.add_argument(
        "--most-skipped",
        type=int,
        default=100,
        metavar="N",
        help="Largest number of rounds whose noise a request of the server may skip. "
        "Default: %(default)d.",
    )
    trust_flags.add_arguments(parser.add_argument_group("server"), attests=False)


def _what_is_left(args: argparse.Namespace) -> str:
    """Returns what the folder holds after an interruption."""
    return (
        f"{args.folder} knows which noise was given: keep it. The same command goes on, and the "
        "task's rounds wait for it."
    )


def _new_key(args: argparse.Namespace) -> int:
    """Makes folder and key, and returns the exit status."""
    from tff_dpftrl.runtime import private_files, signing_keys

    folder = pathlib.Path(args.folder)
    private_files.make_folder(folder)
    key = signing_keys.create(folder / _KEY)
    public = signing_keys.public_path(folder / _KEY)
    print(f"Made the key {signing_keys.raw(key.public_key()).hex()[:16]} of a noise party.")
    print(f"Give {public} to who makes the task (task new --noise-party), and nothing else.")
    return 0


def _run(args: argparse.Namespace) -> int:
    """Takes part in the rounds of a server, and returns the exit status."""
    missing = [f"--{name}" for name in ("task", "folder") if getattr(args, name) is None]
    if missing:
        raise validation.UsageError(
            f"{' and '.join(missing)} must be given: the task's folder, and that of this party "
            "(made by tff-dpftrl noise-party new-key)."
        )
    if not args.plan_keys and not args.server_folder:
        raise validation.UsageError(
            "--plan-keys must be given: signing_key.pub of who signed the task. The server's "
            "operator is whom the noise protects from, and must not choose it."
        )
    validation.integer("--most-skipped", args.most_skipped, minimum=0)
    from tff_dpftrl.runtime import signing_keys
    from tff_dpftrl.runtime.tasks import task_folder

    folder = pathlib.Path(args.folder)
    key = signing_keys.load_private(folder / _KEY)
    args.population = ["(of the task)"]
    trust = trust_flags.Trust(args)
    task = task_folder.read(args.task, trust.plan_keys)
    _progress("Loading TensorFlow ...")
    from tff_dpftrl.runtime.noise_party import ledger as ledger_lib
    from tff_dpftrl.runtime.noise_party import party as party_lib
    from tff_dpftrl.runtime.noise_party import promise as promise_lib
    from tff_dpftrl.runtime.noise_party import rows as rows_lib

    public = signing_keys.raw(key.public_key())
    promise = promise_lib.Promise(task, public)
    digest = task.terms.digest()
    with contextlib.ExitStack() as stack:
        if not stack.enter_context(durable_files.locked(folder / _LOCK)):
            raise OSError(f"another process is this noise party ({folder / _LOCK} is locked)")
        ledger = stack.enter_context(
            contextlib.closing(
                ledger_lib.Ledger.open(
                    folder / f"{digest[:16]}{_LEDGER}",
                    task.name,
                    digest,
                    most_skipped=args.most_skipped,
                )
            )
        )
        connection = stack.enter_context(contextlib.closing(trust.connect()))
        _progress(
            f"Noise party {public.hex()[:16]} of the task {task.name!r}: {promise.describe()}."
        )
        first = ledger.next_row
        _progress(f"The next noise is that of round {first}.")
        rows = rows_lib.Rows(promise.noise, ledger, folder / f"{digest[:16]}{_CHECKPOINT}")
        party_lib.Party(connection, promise, ledger, rows, key).run(
            wait=time.sleep, progress=_progress
        )
    return 0


def _status(args: argparse.Namespace) -> int:
    """Shows what the party has given, and returns the exit status."""
    from tff_dpftrl.runtime import signing_keys
    from tff_dpftrl.runtime.noise_party import ledger as ledger_lib

    folder = pathlib.Path(args.folder)
    key = signing_keys.load_public(signing_keys.public_path(folder / _KEY))
    tasks = []
    for path in sorted(folder.glob(f"*{_LEDGER}")):
        with contextlib.closing(ledger_lib.Ledger.read(path)) as ledger:
            tasks.append(_given(ledger))
    if args.format == "json":
        output_lib.print_json({"key": signing_keys.raw(key).hex(), "tasks": tasks})
        return 0
    print(f"Noise party {signing_keys.raw(key).hex()[:16]}")
    if not tasks:
        print("It has given no noise, and was never started.")
    for task in tasks:
        print(f"Task {task['task']} (terms {task['terms'][:16]}):")
        for name in ("given", "summed", "abandoned", "passed_over", "next_round"):
            print(f"  {name.replace('_', ' '):<12} {task[name]}")
        for one in task["abandoned_rounds"]:
            print(f"  round {one['round']}, attempt {one['attempt']}: {one['outcome']}")
        if task["last"] is not None:
            print(f"  last given   {task['last']}")
    return 0


def _given(ledger: ledger_lib.Ledger) -> dict[str, Any]:
    """Counts what a ledger holds."""
    from tff_dpftrl.runtime.noise_party import ledger as ledger_lib

    given, (task, terms) = ledger.given(), ledger.task
    abandoned = [one for one in given if one.outcome != ledger_lib.SUMMED]
    last = None
    if given:
        moment = datetime.datetime.fromtimestamp(given[-1].time, datetime.timezone.utc)
        last = moment.isoformat(timespec="seconds")
    return {
        "task": task,
        "terms": terms,
        "given": len(given),
        "summed": len(given) - len(abandoned),
        "abandoned": len(abandoned),
        "passed_over": ledger.next_row - len(given),
        "next_round": ledger.next_row,
        "last": last,
        "abandoned_rounds": [
            {"round": one.row, "attempt": one.attempt, "outcome": one.outcome} for one in abandoned
        ],
    }


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
