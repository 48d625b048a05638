"""`tff-dpftrl device`: takes part in the rounds of a server, with texts that stay here."""

from __future__ import annotations

import argparse
import collections
import contextlib
import logging
import pathlib
import random
import shlex
import sys
import time
from typing import TYPE_CHECKING

from tff_dpftrl import durable_files, validation
from tff_dpftrl.cli import config_flags, trust_flags
from tff_dpftrl.runtime.device import backoff

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tff_dpftrl.runtime.device import device_runtime, session

_DESCRIPTION = """\
Take part in the rounds of a server (`tff-dpftrl serve`) as one device: check in when the server
wants it, train on the newest texts of the example store, and report the update. Only what a signed
plan computes from the texts leaves this machine: updates or counts, which can tell of them unless
sums are secure. Needs TensorFlow, and no TensorFlow Federated.

A plan is run only if it is signed with one of the --plan-keys, and calls nothing outside of the
computation. The state folder holds how often, and when, this device took part: with it, it keeps to
the pause between two rounds that the privacy statement rests on. Who removes it forgets that.

Ctrl-C ends it at once; what counts is written down before a report leaves.
"""

_EPILOG = """\
examples:
  # Fill a store: one text a line, or one user of a corpus.
  tff-dpftrl device --examples my.sqlite --add texts.txt
  tff-dpftrl device --examples my.sqlite --add docs --user numpy

  # Or examples of named tensors, as the task's folder describes them.
  tff-dpftrl device --examples my.sqlite --add windows.npz --features tasks/own/examples.json

  # Take part until all rounds are done, or Ctrl-C; the server is on this machine.
  tff-dpftrl device --server-folder store/server --population keyboard --examples my.sqlite

  # On another machine: copy device_bundle.json of the server's folder there, and for a
  # demonstration attestation_issuer, which is secret (docs/explanation/runtime.md, "What a
  # device needs").
  tff-dpftrl device --server-bundle device_bundle.json --examples my.sqlite \\
      --attestation-key attestation_issuer

Standard output has one line a session: its shape (-v[]+^ is all that it should be), how it ended,
seconds and memory. Shapes: - checked in, v plan verified, [ training, ] trained, + uploading,
^ accepted, # sent away or refused, ! given up by the device, * error, ? not believed.
"""


def add_parser(subparsers) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser(
        "device",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(
        run=run,
        what_is_left=what_is_left,
    )
    parser.add_argument(
        "--examples",
        required=True,
        metavar="FILE",
        help="File of the example store. It is made if there is none.",
    )
    filling = parser.add_argument_group("filling the store (then nothing else is done)")
    filling.add_argument(
        "--add",
        metavar="FILE",
        help="File of texts to add, one a line, the newest last; - is standard input. With --user, "
        "a corpus as for train --data. With --features, examples: JSON lines of values by name, or "
        "a NumPy archive (.npz) of arrays whose first axis counts examples.",
    )
    filling.add_argument(
        "--features",
        metavar="FILE",
        help="File examples.json of a task's folder, which describes the examples to add.",
    )
    filling.add_argument("--user", metavar="ID", help="User of the corpus whose texts are added.")
    config_flags.add_table_options(filling)
    filling.add_argument(
        "--collection",
        default="text",
        metavar="NAME",
        help="Collection that the texts are added to. Default: text.",
    )
    server = parser.add_argument_group("server")
    trust_flags.add_arguments(server)
    trust_flags.add_reviewers(server, "Run only plans that were approved by")
    server.add_argument(
        "--population",
        action="append",
        default=[],
        metavar="NAME",
        help="Population to take part in. May be given several times: the device waits to be "
        "selected in all of them at once, and trains for one at a time.",
    )
    here = parser.add_argument_group("this device")
    here.add_argument(
        "--state-folder",
        metavar="DIR",
        help="Folder for the record of this device's participations, and the plans that it keeps. "
        "Default: FILE.device, beside the examples.",
    )
    here.add_argument(
        "--once", action="store_true", help="Run one session for each population now, and end."
    )
    here.add_argument(
        "--stay",
        action="store_true",
        help="Stay when no task of the populations has a further round, and come back about once "
        "a day for later tasks. Default: end then.",
    )
    here.add_argument(
        "--start-within",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="Time in seconds within which the first session begins, at random, so that devices "
        "that start together do not check in together. Default: %(default)g.",
    )
    here.add_argument(
        "--eligible",
        choices=("always", "linux"),
        default="always",
        help="Condition for work: always, or while this machine is idle and on external power "
        "(linux). Default: %(default)s.",
    )
    here.add_argument(
        "--max-load",
        type=float,
        default=0.5,
        metavar="X",
        help="With --eligible linux: largest load of other programs on an idle machine, in threads "
        "a core. Default: %(default)g.",
    )
    here.add_argument("--verbose", action="store_true", help="Show the tracebacks of errors, too.")


def what_is_left(args: argparse.Namespace) -> str:
    """Returns what the example store holds after an interruption."""
    if args.add is not None:
        return f"Nothing was added to {args.examples}, or all of it."
    return (
        f"{_state_folder(args)} knows how often this device took part: keep it. The same command "
        "goes on."
    )


def _state_folder(args: argparse.Namespace) -> pathlib.Path:
    return pathlib.Path(args.state_folder or f"{args.examples}.device")


def run(args: argparse.Namespace) -> int:
    """Takes part, or fills the store, and returns the exit status."""
    if args.add is not None:
        return _add(args)
    for name, meaning in (
        ("user", "whose texts of a corpus are added"),
        ("features", "what the examples to add must hold"),
    ):
        if getattr(args, name) is not None:
            raise validation.UsageError(f"--{name} says {meaning}: give --add, too.")
    return _take_part(args)


def _add(args: argparse.Namespace) -> int:
    from tff_dpftrl.data import table_files
    from tff_dpftrl.runtime.device import example_store, named_tensors, text_examples

    if args.server is not None:
        raise validation.UsageError(
            "--add only fills the store: start the device without it afterwards."
        )
    is_table = table_files.kind_of(args.add) or config_flags.table_options(args).given
    is_corpus = args.user is not None or config_flags.table_options(args).given
    if args.features is not None and is_corpus:
        raise validation.UsageError(
            "--features is for examples of one device, not for a corpus: leave it out, or --user "
            "and the options of tables."
        )
    if args.features is None and args.user is None and is_table:
        raise validation.UsageError(
            f"--add {args.add} is a table of several users: give --user, too. Without it, --add "
            "takes a file with a text in each line."
        )
    if args.features is not None:
        features = named_tensors.read_features(args.features)
        encoded = named_tensors.encode_all(named_tensors.read(args.add), features)
    elif args.user is None:
        encoded = [text_examples.encode_text(line) for line in _lines(args.add)]
    with contextlib.closing(
        example_store.SqliteExampleStore.open(args.examples, clock=time.time)
    ) as store:
        before = store.counts().get(args.collection, 0)
        if args.user is not None:
            from tff_dpftrl.data import sources

            print("Reading the data ...", file=sys.stderr)
            corpus = sources.load_user_text(args.add, table=config_flags.table_options(args))
            text_examples.add_user(store, corpus, args.user, collection=args.collection)
        else:
            store.add(args.collection, encoded)
        after = store.counts().get(args.collection, 0)
    kind = "texts" if args.features is None else "examples"
    print(f"{after - before} {kind} were added; {args.examples} has {after} in {args.collection!r}")
    _progress(
        f"Take part with:\n  tff-dpftrl device --examples {shlex.quote(args.examples)} "
        "--server-bundle device_bundle.json (and --attestation-key, for a demonstration)"
    )
    return 0


def _lines(path: str) -> list[str]:
    try:
        content = sys.stdin.buffer.read() if path == "-" else pathlib.Path(path).read_bytes()
        lines = content.decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise validation.UsageError(f"--add {path} cannot be read: {error}.") from None
    if any("\0" in line for line in lines):
        raise validation.UsageError(
            f"--add {path} has NUL characters, as UTF-16 has: write it in UTF-8."
        )
    texts = [line for line in lines if line.strip()]
    if not texts:
        raise validation.UsageError(f"--add {path} has no text in it.")
    return texts


def _take_part(args: argparse.Namespace) -> int:
    trust, reviewers = trust_flags.Trust(args), trust_flags.reviewers(args)
    populations = trust.populations(args.population)
    _silence_tracebacks(args.verbose)
    from tff_dpftrl.runtime.device import (
        device_runtime,
        eligibility,
        example_store,
        known_plans,
        loaded_plans,
        participation_timer,
        scheduler,
    )

    validation.positive("--max-load", args.max_load)
    validation.number("--start-within", args.start_within, at_least=0)
    if not pathlib.Path(args.examples).exists():
        raise validation.UsageError(
            f"There is no example store at {args.examples}: fill one with --add."
        )
    folder = _state_folder(args)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:

        def opened(resource):
            return stack.enter_context(contextlib.closing(resource))

        examples = opened(example_store.SqliteExampleStore.open(args.examples, clock=time.time))
        own = device_runtime.DeviceRuntime(
            opened(trust.connect()),
            loaded_plans.LoadedPlans(trust.plan_keys, reviewers),
            examples,
            opened(
                participation_timer.ParticipationTimer.open(
                    folder / "participation.sqlite", clock=time.time
                )
            ),
            trust.attester(),
            eligibility.SettableEligibility()
            if args.eligible == "always"
            else eligibility.LinuxEligibility(max_load_per_core=args.max_load),
            issuers=trust.issuers,
            known_plans=known_plans.PlanFolder(folder / "plans"),
        )
        sessions = _Sessions(own)
        schedule = scheduler.Schedule(
            populations,
            clock=time.monotonic,
            generator=random.SystemRandom(),
            waits=backoff.Waits(first_s=args.start_within),
        )
        lock_file = folder / "lock"
        if args.once:
            with durable_files.locked(lock_file) as is_ours:
                if not is_ours:
                    raise OSError(
                        f"another process of this device has a session ({lock_file} is locked)"
                    )
                return _run_each_once(sessions, own.turn, populations)
        scheduler.run_jobs(
            schedule,
            lambda population: sessions.run(population).result,
            own.eligibility,
            wait=example_store.DailyExpiry(examples, time.sleep),
            should_stop=lambda: schedule.is_finished and not args.stay,
            turn=own.turn,
            lock_file=lock_file,
            progress=_progress,
        )
    _progress(f"{', '.join(populations)}: all rounds of all tasks are done: nothing is left.")
    return 0


def _run_each_once(sessions: _Sessions, turn: session.Turn, populations: Sequence[str]) -> int:
    """Runs one session for each population, side by side, and returns the worst status."""
    from tff_dpftrl.runtime.device import scheduler

    status = 0
    with scheduler.SideBySide(sessions.run_and_tell, turn, populations) as running:
        for population in populations:
            running.begin(population)
        while len(running):
            if (ended := running.next_ended(1.0)) is not None:
                status = max(status, ended[1])
    return status


class _Sessions:
    """Runner of a device's sessions that prints how each ended."""

    def __init__(self, own: device_runtime.DeviceRuntime):
        self._own = own
        self._shapes: collections.Counter[str] = collections.Counter()

    def run(self, population: str) -> device_runtime.EndedSession:
        """Runs one session."""
        _progress(f"Checking in for {population} ...")
        ended = self._own.run_session(population)
        result, report = ended.result, ended.result.report
        self._shapes[report.shape] += 1
        print(
            f"{population}  {report.shape:7}{result.outcome.value}, {report.seconds:g} s, "
            f"{report.peak_memory_bytes / 1e6:.0f} MB; {self._shapes[report.shape]} such"
            + (f": {result.reason}" if result.reason else ""),
            flush=True,
        )
        return ended

    def run_and_tell(self, population: str) -> int:
        """Runs one session, waits until the server has heard of it, and returns the status."""
        ended = self.run(population)
        ended.summary_sent.result()
        return int(ended.result.outcome.value in ("failed", "attestation failed"))


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _silence_tracebacks(verbose: bool) -> None:
    """Shows errors of sessions as one line each; with `verbose`, with their tracebacks."""
    logger = logging.getLogger("tff_dpftrl.runtime")
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler() if verbose else logging.NullHandler())
