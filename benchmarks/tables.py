"""Seconds and memory of a run on a table of many users: reading, first round, resumption.

    python benchmarks/tables.py [--users 10000 100000 1000000] [--folder DIR]

For each number of users it writes a CSV file with ten texts a user, in random order, of words whose
frequencies fall like those of a language. Then each step below is a process of its own, whose
seconds (imports included) and largest memory are printed.

    read      reads the table and groups it by user into the file beside the run
    count     splits all texts into words once: figures of the text, and its digest
    round     begins the run and ends after its first round
    resume    goes on with it for one round

`count` is a part of a run's beginning; it is a step here so that it is seen. The first round of a
run that begins with nothing comes after the sum of the first three.
"""

from __future__ import annotations

import argparse
import csv
import os
import pathlib
import random
import resource
import subprocess
import sys
import tempfile
import time

_TEXTS_PER_USER = 10
_WORDS_PER_TEXT = (4, 20)
_STEPS = ("read", "count", "round", "resume")
_BLOCK = 100_000


def main() -> None:
    """Makes the corpora and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--users", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--folder", type=pathlib.Path, help="Place for the files; a temporary one.")
    parser.add_argument("--step", choices=_STEPS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step:
        _step(args.step, args.folder)
        return
    print(f"{'users':>9} {'MB':>6} " + "".join(f"{f'{s} s':>10} {'MB':>6}" for s in _STEPS))
    for users in args.users:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            _measure(users, pathlib.Path(folder))


def _measure(users: int, folder: pathlib.Path) -> None:
    _write(users, folder)
    megabytes = (folder / "texts.csv").stat().st_size / 1e6
    cells = [f"{users:>9} {megabytes:>6.0f} "]
    for step in _STEPS:
        begin = time.monotonic()
        command = [sys.executable, __file__, "--step", step, "--folder", str(folder)]
        env = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, env=env)
        seconds = time.monotonic() - begin
        cells.append(f"{seconds:>10.1f} {float(done.stdout.split()[-1]):>6.0f}")
        print(f"{users} users, {step}: {seconds:.1f} s", file=sys.stderr, flush=True)
    print("".join(cells), flush=True)


def _write(users: int, folder: pathlib.Path) -> None:
    """Writes texts.csv and words.txt."""
    rng = random.Random(users)
    letters = "aeioubdfgklmnprst"
    words = ["".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(20_000)]
    words = list(dict.fromkeys(words))
    (folder / "words.txt").write_text("\n".join(words[:4000]))
    cumulative, total = [], 0.0
    for rank in range(len(words)):
        total += 1 / (rank + 3)
        cumulative.append(total)
    num_texts = users * _TEXTS_PER_USER
    # Each user comes ten times, in an order as good as random: users are coprime to the step.
    step = 7 * users // 11 * 2 + 1
    with (folder / "texts.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("user_id", "text"))
        for begin in range(0, num_texts, _BLOCK):
            pool = rng.choices(words, cum_weights=cumulative, k=_BLOCK)
            for number in range(begin, min(begin + _BLOCK, num_texts)):
                place, length = rng.randrange(_BLOCK - 20), rng.randint(*_WORDS_PER_TEXT)
                text = " ".join(pool[place : place + length])
                writer.writerow((f"user{number * step % users:07d}", text))


def _step(name: str, folder: pathlib.Path) -> None:
    """Does one step in this process, and prints its largest memory in megabytes."""
    from tff_dpftrl.data import sequences
    from tff_dpftrl.runs import loop, manifest
    from tff_dpftrl.training import config as config_lib
    from tff_dpftrl.training import corpus, run

    output = folder / "run"
    config = config_lib.TrainingConfig.of(
        data=str(folder / "texts.csv"),
        vocabulary=str(folder / "words.txt"),
        embedding_size=32,
        lstm_size=64,
        num_rounds=100,
        clients_per_round=100,
        noise_multiplier=0.5,
        mechanism="tree",
    )

    class Ended(BaseException):
        """Stands for the end of the process after a round."""

    def end(self: object, row: object) -> None:
        raise Ended

    options = config.part(corpus.TextOptions)
    if name == "read":
        corpus.read_users(options, cache=output / manifest.TEXTS_CACHE)
    elif name == "count":
        text = corpus.read(options, cache=output / manifest.TEXTS_CACHE)
        spec = sequences.SequenceSpec(config.language.sequence_length)
        _ = sequences.SequenceCorpus(text.train, text.words, spec).survey
    else:
        loop.Loop._publish = end  # type: ignore[method-assign]
        try:
            run.train(config if name == "round" else None, output)
        except Ended:
            pass
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
