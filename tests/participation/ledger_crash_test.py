"""Kills a process that keeps a ledger, again and again, and resumes it."""

import hashlib
import multiprocessing
import os
import pathlib
import random
import signal

from tff_dpftrl.participation import cohorts, ledger, recount

SAMPLER = cohorts.MinSepSampler(
    num_clients=600, clients_per_round=60, min_sep=7, num_rounds=40, seed=2
)


def run(directory, kill_at=None):
    """A run whose "model" is a hash of all that entered it, resumable at any point.

    Kills itself when it is about to execute its `kill_at`-th statement of SQL; the same
    statement many times in a row counts once.
    """
    directory = pathlib.Path(directory)
    path = directory / "ledger"
    states = directory / "states"
    states.mkdir(exist_ok=True)

    def save(state):
        fingerprint = hashlib.sha256(state).hexdigest()
        unfinished = directory / "unfinished"
        unfinished.write_bytes(state)
        os.replace(unfinished, states / fingerprint)
        return fingerprint

    if path.exists():
        book = ledger.Ledger.open(path, SAMPLER.schema)
    else:
        book = ledger.Ledger.create(path, SAMPLER.schema, initial_checkpoint=save(b"start"))
    with book:
        if kill_at is not None:
            book._connection.set_trace_callback(killer(kill_at))
        state = (states / book.last_checkpoint).read_bytes()
        done = book.last_committed_round
        for t in range(0 if done is None else done + 1, SAMPLER.num_rounds):
            cohort = [f"user {i}" for i in SAMPLER.cohort(t)]
            book.begin_round(
                t,
                cohort,
                noise_fingerprint=hashlib.sha256(b"noise" + state).hexdigest(),
                checkpoint_fingerprint=hashlib.sha256(state).hexdigest(),
            )
            state = hashlib.sha256(state + repr((t, sorted(cohort))).encode()).digest()
            contributed = [user for user in cohort if not user.endswith("7")]
            book.commit_round(t, contributed, save(state))
        return book.last_checkpoint, book.observed()


def killer(kill_at):
    seen = [""]

    def before_statement(statement):
        if statement[:20] != seen[-1]:
            seen.append(statement[:20])
        if len(seen) > kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    return before_statement


def run_in_a_process(processes, directory, kill_at):
    """Forks a server without threads: among those of TFF a child may crash as it begins."""
    child = processes.Process(target=run, args=(directory, kill_at))
    child.start()
    child.join()
    return child.exitcode


def test_a_run_killed_at_random_moments_ends_like_an_uninterrupted_one(tmp_path):
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([__name__])
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    expected = run(whole)
    moments = random.Random(5)
    kills, interrupted_rounds = 0, set()
    # The first of these is killed by its first statement, in round 0.
    for kill_at in [1, *(moments.randint(1, 30) for _ in range(14))]:
        kills += run_in_a_process(processes, killed, kill_at) == -signal.SIGKILL
        with ledger.Ledger.open(killed / "ledger", SAMPLER.schema) as book:
            seen = book.observed()
            interrupted_rounds.add(book.pending_round)
        assert recount.recount(killed / "ledger").observed == seen
        assert not seen.breaches(SAMPLER.schema)
    assert kills == 15
    assert len(interrupted_rounds - {None}) >= 3  # Killed between begin and commit.
    assert None in interrupted_rounds  # And before the begin was durable.
    assert run(killed) == expected
    result = recount.recount(killed / "ledger")
    assert result == recount.recount(whole / "ledger")
    assert result.committed_rounds == SAMPLER.num_rounds
