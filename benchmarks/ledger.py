"""Cost of the participation ledger, as a ratio to plain inserts into SQLite.

    python benchmarks/ledger.py [--clients-per-round 6500] [--population 650000] [--rounds 150]

Processor time of `begin_round` and `commit_round` of one round (median), its ratio to one
durable transaction that inserts as many (round, client) rows into a plain SQLite table
(median over the rounds of the ratio within a round), the growth of the file for each
participation and each user, and the time of `recount` for all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import sqlite3
import tempfile
import time

import numpy as np

from tff_dpftrl.participation import cohorts, ledger, recount


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clients-per-round", type=int, default=6_500)
    parser.add_argument("--population", type=int, default=650_000)
    parser.add_argument("--rounds", type=int, default=150)
    args = parser.parse_args()
    sampler = cohorts.MinSepSampler(
        num_clients=args.population,
        clients_per_round=args.clients_per_round,
        min_sep=args.population // args.clients_per_round // 2,
        num_rounds=args.rounds,
        seed=0,
    )
    ours, plain, sizes = [], [], []
    with tempfile.TemporaryDirectory() as name:
        path = pathlib.Path(name, "ledger")
        connection = sqlite3.connect(pathlib.Path(name, "plain"), isolation_level=None)
        connection.execute("PRAGMA synchronous = EXTRA")
        connection.execute("CREATE TABLE asked (round INTEGER, client INTEGER)")
        book = ledger.Ledger.create(path, sampler.schema, initial_checkpoint="state 0")
        with contextlib.closing(connection), book:
            for t in range(args.rounds):
                users = [f"user {i}" for i in sampler.cohort(t)]
                start = time.process_time()
                book.begin_round(
                    t, users, noise_fingerprint=f"noise {t}", checkpoint_fingerprint=f"state {t}"
                )
                book.commit_round(t, users, f"state {t + 1}")
                ours.append(time.process_time() - start)
                start = time.process_time()
                connection.execute("BEGIN")
                connection.executemany("INSERT INTO asked VALUES (?, ?)", [(t, u) for u in users])
                connection.execute("COMMIT")
                plain.append(time.process_time() - start)
                sizes.append(path.stat().st_size)
            num_users = sum(book.observed().histogram.values())
        start = time.perf_counter()
        found = recount.recount(path)
        seconds = time.perf_counter() - start
    participations = args.rounds * args.clients_per_round
    # While every user is new, a round adds both; once all have been seen, participations only.
    turn = args.population // args.clients_per_round
    ratio = np.median(np.asarray(ours) / np.asarray(plain))
    print(f"{args.clients_per_round} clients a round, {num_users} users, {participations} in all")
    print(f"a round              {np.median(ours):8.3f} s, {ratio:.1f} times plain inserts")
    if args.rounds > turn:
        later = (sizes[-1] - sizes[turn - 1]) / ((args.rounds - turn) * args.clients_per_round)
        first = sizes[turn - 1] / args.population - later
        print(f"bytes a participation{later:8.1f}")
        print(f"bytes a user         {first:8.1f}")
    print(f"recount              {seconds:8.3f} s")
    assert found.observed.num_rounds == args.rounds


if __name__ == "__main__":
    main()
