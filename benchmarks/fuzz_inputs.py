"""Whether anything that is read can do harm: changed inputs of every kind, many of them.

    PYTHONPATH=. python benchmarks/fuzz_inputs.py [--messages 100000] [--seed 0]
        [--kinds NAME ...] [--only KIND:SEED]

Inputs are valid ones, as the package's own writers make them, that were changed: bits, lengths
and fields of messages, values of JSON and TOML, entries and sizes of archives, pages, tables and
rows of databases, files that are missing or links. Each must be taken, or be refused in one line
by an exception that is documented, soon, in little memory, with no file changed and no code of
its own executed (`tests.fuzzing.judging`).

Besides the kinds of files and messages there are sessions over gRPC: "server" and "secure server",
under a storm of sessions that keep to no protocol, where devices that do must commit a round after
every thousand of them; and "device", whose server lies. Memory and open files of the process stand
in the table at each of these rounds.

Every input is made of its own seed alone. What fails is printed with what repeats it.
"""

from __future__ import annotations

import argparse
import logging
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from tests.fuzzing import (
    commands,
    files,
    judging,
    messages,
    plans,
    secure_sums,
    storm,
    task_folders,
)

_KINDS = {
    kind.name: kind
    for kinds in (files, messages, plans, secure_sums, task_folders)
    for kind in kinds.KINDS
}
_SLOW_KINDS = {kind.name: kind for kind in (plans.LOADED, *commands.KINDS)}
_OF_MILLISECONDS = frozenset(
    (
        *("bandmf checkpoint", "checkpoint", "committed rounds", "ledger", "model", "store"),
        *("checkpoint of GPT-2", "checkpoint of Llama"),
        *("secure sum, to the server", "secure sum, to a device"),
        *(kind.name for kind in (*secure_sums.KINDS, *task_folders.KINDS)),
    )
)
# How many of a kind for one of a slow kind.
_WEIGHTS = {name: 20 if name in _OF_MILLISECONDS else 100 for name in _KINDS}
_STORMS: dict[str, Callable[..., storm.Storm]] = {
    "server": lambda folder, seeds: storm.storm_of_sessions(folder, seeds, is_secure=False),
    "secure server": lambda folder, seeds: storm.storm_of_sessions(folder, seeds, is_secure=True),
    "device": storm.storm_of_servers,
}
_SHARE_OF_STORMS = 0.05  # Of all messages, for each.
_MESSAGES_A_SESSION = 2
_NAMES = (*_KINDS, *_SLOW_KINDS, *_STORMS)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=_NAMES, default=_NAMES, metavar="NAME")
    parser.add_argument("--only", metavar="KIND:SEED", help="Read one input again.")
    return parser.parse_args()


def _numbers(names: Sequence[str], in_all: int) -> dict[str, int]:
    """How many inputs of each kind; sessions of storms."""
    storms = [name for name in names if name in _STORMS]
    kinds = [name for name in names if name not in _STORMS]
    of_storm = int(in_all * (_SHARE_OF_STORMS if kinds else 1 / len(storms)))
    weights = {name: _WEIGHTS.get(name, 1) for name in kinds}
    left = in_all - of_storm * len(storms)
    found = {name: -(-left * w // sum(weights.values())) for name, w in weights.items()}
    return found | dict.fromkeys(storms, -(-of_storm // _MESSAGES_A_SESSION))


def _print_row(name: str, number: object, slowest: object, outcomes: object) -> None:
    print(f"{name:26} {number:>8} {slowest:>8}  {outcomes}", flush=True)


def _words(outcomes: dict[str, int]) -> str:
    ordered = sorted(outcomes.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {count}" for name, count in ordered)


def _run_kind(name: str, seeds: Sequence[int], folder: pathlib.Path) -> tuple[int, list[str]]:
    tally = judging.run((_KINDS | _SLOW_KINDS)[name], folder, seeds)
    _print_row(name, len(seeds), f"{tally.slowest:.2f}", _words(tally.outcomes))
    return len(seeds), [f"--only '{name}:{seed}'   {what}" for seed, what in tally.failures]


def _run_storm(name: str, seeds: Sequence[int], folder: pathlib.Path) -> tuple[int, list[str]]:
    begin = time.perf_counter()
    try:
        found = _STORMS[name](folder, seeds)
    except (judging.Violation, TimeoutError) as error:
        return len(seeds), [f"--kinds '{name}' --seed {seeds[0]}   {error!r}"]
    number = found.looks[-1].num_messages
    _print_row(name, number, f"{time.perf_counter() - begin:.0f} all", _words(found.outcomes))
    for look in found.looks:
        seconds = f", honest round in {look.round_seconds:.2f} s" if look.round_seconds else ""
        print(
            f"    after {look.num_messages:>7} messages: {look.resident_mb:.0f} MB, "
            f"{look.open_files} open files{seconds}"
        )
    return number, [f"--kinds '{name}'   logged: {line}" for line in found.errors]


def main() -> int:
    """Runs the benchmark; the status is 1 if anything did harm."""
    args = _parse()
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    if args.only:
        name, _, seed = args.only.rpartition(":")
        jobs = {name: [int(seed)]}
    else:
        jobs = {
            name: judging.seeds_of(args.seed, number)
            for name, number in _numbers(args.kinds, args.messages).items()
        }
    _print_row("kind", "messages", "slowest", "outcomes")
    in_all, failures = 0, []
    for name, seeds in jobs.items():
        with tempfile.TemporaryDirectory() as folder:
            run = _run_storm if name in _STORMS else _run_kind
            number, failed = run(name, seeds, pathlib.Path(folder))
        in_all += number
        failures += failed
    print(f"{in_all} messages, {len(failures)} failures, seed {args.seed}")
    for failure in failures:
        print(failure)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
