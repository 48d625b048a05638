"""`tff-dpftrl log`: a public log of plans and privacy statements, and its verification."""

from __future__ import annotations

import argparse
import pathlib
import sys

from tff_dpftrl import durable_files, validation
from tff_dpftrl.cli import output

_DESCRIPTION = """\
Keep, and verify, a public log of plans and privacy statements. Whoever kept an earlier checkpoint
sees whether anything but additions was made.

  tff-dpftrl log append   enter the plans, terms and statements of tasks and runs, and sign the log
  tff-dpftrl log verify   find out whether a log is whole, and goes on from where it was
  tff-dpftrl log prove    write the proof that one file is in the log

The log is a Merkle tree (RFC 6962), and its checkpoint a signed note, as other transparency logs
have them. Serve the folder as files, or put it into a public git repository.
"""

_APPEND = """\
Enter plans, privacy terms and statements into a log, and sign the new checkpoint. Files that were
entered before are skipped. The log is verified first; a new one is made if --name gives its name.
"""

_APPEND_EPILOG = """\
examples:
  tff-dpftrl log append public_log tasks/nwp --key log.key --name example.org/keyboard

  # Later: the statement of the task's report, and that of a run.
  tff-dpftrl log append public_log tasks/nwp results/quickstart --key log.key
"""

_VERIFY = """\
Verify a log: the signature of its checkpoint, that its entries are those that were signed, its
files, and that it goes on from an earlier checkpoint. Keep the checkpoint that you verified, and
name it as --earlier the next time: only so can you see that nothing was changed or removed.

With --proof, one file is verified by the proof that log prove wrote; the log is not needed then.
"""

_VERIFY_EPILOG = """\
examples:
  tff-dpftrl log verify public_log --public-key log.key.pub
  tff-dpftrl log verify public_log --public-key log.key.pub --earlier my_checkpoint \\
    --has tasks/nwp/terms.json

  tff-dpftrl log verify --proof terms.proof --has tasks/nwp/terms.json --public-key log.key.pub
"""

_PROVE = """\
Write the proof that a file is in a log: its entry, the hashes that lead from it to the root, and
the signed checkpoint.
"""


def add_parser(subparsers) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser(
        "log", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(dest="log_command", metavar="COMMAND", required=True)

    def part(name: str, what: str, description: str, epilog: str | None, run):
        added = parts.add_parser(
            name,
            help=what,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.set_defaults(run=run)
        return added

    what = "enter plans, terms and statements, and sign the log"
    append = part("append", what, _APPEND, _APPEND_EPILOG, _append)
    append.add_argument("log", metavar="LOG", help="Folder of the log.")
    append.add_argument(
        "folders", nargs="+", metavar="FOLDER", help="Folders of tasks, reports and runs."
    )
    append.add_argument(
        "--key",
        required=True,
        metavar="FILE",
        help="Private key (Ed25519, PEM) of the log, which signs nothing else. It is made if "
        "there is none, with the public key beside it.",
    )
    append.add_argument(
        "--name", metavar="NAME", help="Name of a new log, like example.org/keyboard."
    )
    what = "verify a log, or one file by a proof"
    verify = part("verify", what, _VERIFY, _VERIFY_EPILOG, _verify)
    what = verify.add_mutually_exclusive_group(required=True)
    what.add_argument("log", nargs="?", metavar="LOG", help="Folder of the log.")
    what.add_argument(
        "--proof",
        metavar="FILE",
        help="Proof that the log contains a file. Give it instead of LOG, with this one file as "
        "--has.",
    )
    verify.add_argument(
        "--earlier",
        metavar="FILE",
        help="Checkpoint that you kept. The log must begin with all entries that it counts.",
    )
    verify.add_argument(
        "--has", nargs="+", default=[], metavar="FILE", help="Files that must be in the log."
    )
    prove = part("prove", "write the proof that a file is in a log", _PROVE, None, _prove)
    prove.add_argument("log", metavar="LOG", help="Folder of the log.")
    prove.add_argument("file", metavar="FILE", help="File that was entered into the log.")
    prove.add_argument("--output", metavar="FILE", help="File of the proof. Default: the terminal.")
    for parser in (verify, prove):
        parser.add_argument(
            "--public-key",
            required=True,
            metavar="FILE",
            help="Public key of the log, which you got from its operator.",
        )
    output.add_format(verify)


def _append(args: argparse.Namespace) -> int:
    from tff_dpftrl.runtime import signing_keys, transparency_log
    from tff_dpftrl.runtime.tasks import logged_files

    if args.name is not None:
        transparency_log.check_name(args.name)
    files = [found for folder in args.folders for found in logged_files.of_folder(folder)]
    path = pathlib.Path(args.key)
    if path.exists() or args.name is None:
        key = signing_keys.load_private(path)
    else:
        key = signing_keys.create(path)
        print(f"Made the key {path}: readers of the log need {path}.pub.", file=sys.stderr)
    new = transparency_log.append(args.log, files, key, args.name)
    for entry in new:
        print(f"{entry.kind:<11} {entry.sha256[:16]}  {entry.of}")
    print(f"{len(new)} entered, {len(files) - len(new)} known. Publish {args.log}/ as it is.")
    return 0


def _verify(args: argparse.Namespace) -> int:
    from tff_dpftrl.runtime import signing_keys, transparency_log

    key = signing_keys.load_public(args.public_key)
    contents = {name: _read(name) for name in args.has}
    if args.proof is not None:
        if len(contents) != 1 or args.earlier is not None:
            raise validation.UsageError(
                "A --proof is of one file: name it with --has, and leave out --earlier."
            )
        ((name, content),) = contents.items()
        entry = transparency_log.entry_by_proof(_text(args.proof), content, key)
        what = f"a {entry.kind} of {entry.of}, entered {entry.entered}"
        print(f"{name} is in the log as {_shown(what)}.")
        return 0
    log = transparency_log.read(args.log, key)
    if args.earlier is not None:
        note = _text(args.earlier)
        log.check_continues(transparency_log.Checkpoint.verified(note, key, args.earlier))
    absent = [name for name, content in contents.items() if log.place_of(content) is None]
    if absent:
        raise transparency_log.LogRefusedError(f"The log has no entry of {', '.join(absent)}.")
    missing = log.missing_files()
    entries = list(log.entries())
    if args.format == "json":
        output.print_json(
            {
                "name": log.checkpoint.log_name,
                "size": log.checkpoint.size,
                "root": log.checkpoint.root.hex(),
                "entries": [vars(entry) for entry in entries],
                "files_missing": [entry.sha256 for entry in missing],
            }
        )
        return 0
    for entry in entries:
        print(_shown(f"{entry.entered}  {entry.kind:<11} {entry.sha256[:16]}  {entry.of}"))
    since = "" if args.earlier is None else f" It goes on from {args.earlier}."
    print(f"The log {log.checkpoint.log_name} holds: {len(entries)} entries.{since}")
    if missing:
        print(f"Files of {len(missing)} entries are not in {args.log}/{transparency_log.FILES}/.")
    if args.earlier is None:
        print(
            f"Keep a copy of {args.log}/{transparency_log.CHECKPOINT}, for --earlier: without one, "
            "nobody can tell whether this is the log that others see, or saw."
        )
    return 0


def _prove(args: argparse.Namespace) -> int:
    from tff_dpftrl.runtime import signing_keys, transparency_log

    log = transparency_log.read(args.log, signing_keys.load_public(args.public_key))
    place = log.place_of(_read(args.file))
    if place is None:
        raise transparency_log.LogRefusedError(f"The log has no entry of {args.file}.")
    proof = log.prove(place)
    if args.output is None:
        print(proof, end="")
    else:
        durable_files.write(args.output, proof.encode())
    return 0


def _read(path: str) -> bytes:
    try:
        return pathlib.Path(path).read_bytes()
    except OSError as error:
        raise validation.UsageError(f"{path} cannot be read: {error.strerror}.") from None


def _shown(line: str) -> str:
    """Returns a line that whoever keeps the log wrote, without what would steer a terminal."""
    return "".join(c if c.isprintable() else "�" for c in line)


def _text(path: str) -> str:
    try:
        return _read(path).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise validation.UsageError(
            f"{path} is neither a checkpoint nor a proof: it is no text."
        ) from None
