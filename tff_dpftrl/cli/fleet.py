"""`tff-dpftrl fleet`: many simulated devices, to try a server out with."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator

from tff_dpftrl import validation
from tff_dpftrl.cli import config_flags, output, trust_flags

_DESCRIPTION = """\
Run many simulated devices against a server (`tff-dpftrl serve`). Each has the texts of one user of
a corpus, and does over gRPC and TLS what `tff-dpftrl device` does; what it knows of its
participation is in memory only. Some drop out, some are slow, and on request some are malicious.

The users that `train` holds out are no devices. It ends with a table of what became of the
sessions, beside that of Bonawitz et al. 2019 (table 1). Ctrl-C ends it, with the table.
"""

_EPILOG = """\
examples:
  tff-dpftrl fleet --server-folder store/server --population keyboard --data docs \\
      --devices 300 --until-rounds 50

  # Examples of a model of your own.
  tff-dpftrl fleet ... --data devices.jsonl --features tasks/own/examples.json

  # One in twenty devices attacks, and devices are there at night only, a night every 10 minutes.
  tff-dpftrl fleet ... --malicious 0.05 --attacks nan shape --day-seconds 600
"""

_ATTACKS = ("nan", "shape", "attempt", "token", "garbage")
_PROGRESS_S = 5.0


def add_parser(subparsers) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser(
        "fleet",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    trust_flags.add_arguments(parser.add_argument_group("server"))
    devices = parser.add_argument_group("devices")
    _add(devices, "--population", str, "NAME", None, "Population that the devices take part in.")
    _add(devices, "--data", str, "CORPUS", "docs", "Texts by user, as for train --data.")
    _add(
        devices, "--features", str, "FILE", None,
        "File examples.json of a task's folder, for examples that are not texts. The data is then "
        "JSON lines of {\"user_id\", \"examples\"}, an example an object of names and values.",
    )  # fmt: skip
    config_flags.add_table_options(devices)
    _add(devices, "--devices", int, "N", 300, "Number of devices, each with the texts of one user.")
    _add(
        devices,
        "--seed",
        int,
        "N",
        0,
        "Seed of the choice of users, their behaviour and the order of examples.",
    )
    faults = parser.add_argument_group("what goes wrong")
    _add(
        faults, "--drop-outs", float, "SHARE", 0.08, "Share of the sessions whose device drops out."
    )
    _add(faults, "--stragglers", float, "SHARE", 0.22, "Share of the sessions that take longer.")
    _add(
        faults, "--straggler-seconds", float, "X", 5.0, "Mean delay of these sessions, in seconds."
    )
    _add(faults, "--malicious", float, "SHARE", 0.0, "Share of the devices that attack.")
    faults.add_argument(
        "--attacks",
        nargs="+",
        choices=_ATTACKS,
        default=list(_ATTACKS),
        help="Attacks of these devices. Without secure sums: NaNs, a wrong shape, the report of "
        "another attempt, a used token, or bytes that are not an update. With secure sums: invalid "
        "keys, a vector that is too long, a report in the clear, a used token, or bytes that are "
        "not a message. Default: all.",
    )
    _add(
        faults, "--day-seconds", float, "X", None,
        "Length of a simulated day in seconds. Devices then work at night only. Default: they "
        "always may.",
    )  # fmt: skip
    running = parser.add_argument_group("running")
    _add(
        running,
        "--until-rounds",
        int,
        "N",
        None,
        "Number of rounds that counted after which the fleet ends.",
    )
    _add(running, "--seconds", float, "X", None, "Time in seconds after which the fleet ends.")
    _add(
        running,
        "--start-within",
        float,
        "SECONDS",
        5.0,
        "Time in seconds within which all devices first check in.",
    )
    _add(running, "--processes", int, "N", 1, "Number of processes that share the devices.")
    _add(
        running,
        "--connections",
        int,
        "N",
        4,
        "Number of connections that the devices of a process share.",
    )
    _add(
        running, "--sessions", int, "N", 1000, "Largest number of sessions at a time in a process."
    )
    _add(
        running,
        "--training",
        int,
        "N",
        2,
        "Largest number of devices that train at a time in a process.",
    )
    output.add_format(parser)


def _add(
    group: argparse._ArgumentGroup, flag: str, kind: type, metavar: str, default: object, text: str
) -> None:
    shown = "" if default is None else f" Default: {default}."
    group.add_argument(flag, type=kind, metavar=metavar, default=default, help=text + shown)


def run(args: argparse.Namespace) -> int:
    """Runs the fleet, and returns the exit status: 1 if no report counted."""
    trust = trust_flags.Trust(args)
    (population,) = trust.populations([args.population] if args.population else [])
    from tff_dpftrl.runtime.device import named_tensors
    from tff_dpftrl.runtime.fleet import behaviour, fleet, tally

    made = fleet.Fleet(
        trust.for_fleet(),
        population,
        args.data,
        args.devices,
        seed=args.seed,
        rates=behaviour.Rates(
            drop_outs=args.drop_outs,
            stragglers=args.stragglers,
            straggler_s=args.straggler_seconds,
            malicious=args.malicious,
            attacks=tuple(map(behaviour.Attack, args.attacks)),
        ),
        day_s=args.day_seconds,
        start_within_s=args.start_within,
        num_connections=args.connections,
        max_sessions=args.sessions,
        max_training=args.training,
        table=config_flags.table_options(args),
        features=None if args.features is None else named_tensors.read_features(args.features),
    )
    for flag, value in (("--until-rounds", args.until_rounds), ("--processes", args.processes)):
        if value is not None:
            validation.integer(flag, value, minimum=1)
    if args.seconds is not None:
        validation.positive("--seconds", args.seconds)
    counts, begin = tally.Tally(), time.monotonic()
    progress = _Progress(counts, begin, args.devices)
    stop = threading.Event()
    print("Reading the data ...", file=sys.stderr)
    with _orderly_end(stop):
        fleet.run(
            made,
            fleet.Ending(rounds=args.until_rounds, seconds=args.seconds),
            stop=stop,
            on_session_end=progress.add,
            num_processes=args.processes,
        )
    seconds = time.monotonic() - begin
    if args.format == "json":
        output.print_json(counts.to_dict(seconds))
    else:
        output.print_table(counts.table(), left=4)
        print("\n".join(["", *counts.summary(seconds)]))
    return 0 if counts.rounds else 1


class _Progress:
    """Printer of progress lines: one for each round that counts, and some in between."""

    def __init__(self, counts, begin: float, num_devices: int):
        self._counts, self._begin, self._num_devices = counts, begin, num_devices
        self._advised = 0
        self._last = begin
        self._num_rounds = 0

    def add(self, end) -> None:
        """Counts a session."""
        self._counts.add(end)
        now = time.monotonic()
        rounds = len(self._counts.rounds)
        if rounds == self._num_rounds and now < self._last + _PROGRESS_S:
            return
        where = ""
        if rounds > self._num_rounds:
            self._advised = 0
        if rounds > self._num_rounds:
            where = f"{end.task} round {end.round_index}, "
        self._num_rounds, self._last = rounds, now
        print(
            f"{now - self._begin:6.1f} s: {where}{sum(self._counts.shapes.values())} sessions, "
            f"{sum(self._counts.rounds.values())} reports counted",
            file=sys.stderr,
            flush=True,
        )
        if self._counts.rests_in_a_row >= max(self._num_devices, 2 * self._advised):
            self._advised = self._counts.rests_in_a_row  # Next time after twice as many.
            print(self._counts.rests_advice, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _orderly_end(stop: threading.Event) -> Iterator[None]:
    """Lets the first Ctrl-C or SIGTERM in the block end the fleet, and the second the process."""
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for signum, handler in before.items():
            signal.signal(signum, handler)

    def end(signum: int, frame: object) -> None:
        del signum, frame
        restore()
        stop.set()

    for signum in before:
        signal.signal(signum, end)
    try:
        yield
    finally:
        restore()
