import collections
import contextlib
import dataclasses
import itertools
import os
import pathlib
import sqlite3
import stat
import tempfile

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from tff_dpftrl.participation import cohorts, ledger, ledger_rules, recount, schema

deterministic = hypothesis.settings(deadline=None, derandomize=True)

# Every transaction waits for the disk; a disk in memory does not keep it waiting.
FAST_DIRECTORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
DECLARED = schema.MinSep(num_rounds=6, min_sep=2, max_participations=2)


@pytest.fixture
def path():
    with tempfile.TemporaryDirectory(dir=FAST_DIRECTORY) as directory:
        yield pathlib.Path(directory) / "ledger.sqlite"


@pytest.fixture
def book(path):
    with ledger.Ledger.create(path, DECLARED, initial_checkpoint="initial") as book:
        yield book


def begin(book, t, cohort, noise=None, checkpoint=None):
    return book.begin_round(
        t,
        cohort,
        noise_fingerprint=f"noise {t}" if noise is None else noise,
        checkpoint_fingerprint=book.last_checkpoint if checkpoint is None else checkpoint,
    )


def run_round(book, t, cohort, contributed=None):
    begin(book, t, cohort)
    book.commit_round(t, cohort if contributed is None else contributed, f"checkpoint {t}")


def test_a_run_from_beginning_to_end(book, path):
    assert book.last_committed_round is None
    assert book.last_checkpoint == "initial"
    assert book.observed().num_rounds == 0
    for t, cohort in enumerate([["a", "b"], ["c"], ["a"]]):
        run_round(book, t, cohort)
    assert book.last_committed_round == 2
    assert book.last_checkpoint == "checkpoint 2"
    seen = book.observed()
    assert (seen.num_rounds, seen.min_sep, seen.min_sep_gap) == (3, 2, 1)
    assert (seen.max_participations, seen.histogram) == (2, {1: 2, 2: 1})
    book.close()
    assert recount.recount(path) == recount.Recount(DECLARED, seen, committed_rounds=3, breaches=())


class TestSchema:
    def test_too_soon(self, book):
        run_round(book, 0, ["a", "b"])
        with pytest.raises(ledger_rules.SchemaRefusal, match="stride of 1 .*min_sep=2") as error:
            begin(book, 1, ["a", "c"])
        # The size of a cohort may be a secret.
        assert "2 clients" not in str(error.value) and "of 2" not in str(error.value)

    def test_too_often(self, book):
        for t, cohort in enumerate([["a"], [], ["a"], []]):
            run_round(book, t, cohort)
        with pytest.raises(ledger_rules.SchemaRefusal, match="max_participations=2"):
            begin(book, 4, ["a"])

    def test_too_long(self, book):
        for t in range(6):
            run_round(book, t, [])
        with pytest.raises(ledger_rules.SchemaRefusal, match="num_rounds=6"):
            begin(book, 6, [])

    def test_a_refused_round_leaves_no_trace(self, book, path):
        run_round(book, 0, ["a"])
        with pytest.raises(ledger_rules.SchemaRefusal):
            begin(book, 1, ["a", "new"])
        assert book.pending_round is None
        assert not begin(book, 1, ["b"])
        book.commit_round(1, ["b"], "checkpoint 1")
        assert book.observed().histogram == {1: 2}

    def test_who_was_asked_and_did_not_contribute_does_not_count_once_committed(self, book):
        run_round(book, 0, ["a", "b"], contributed=["b"])
        assert book.observed().histogram == {1: 1}
        run_round(book, 1, ["a"])
        assert book.observed().histogram == {1: 2}

    def test_everybody_asked_counts_while_the_round_is_open(self, book, path):
        run_round(book, 0, ["a", "b"])
        run_round(book, 1, [])
        begin(book, 2, ["a", "c"])
        seen = book.observed()
        assert (seen.num_rounds, seen.min_sep, seen.max_participations) == (3, 2, 2)
        book.close()
        assert recount.recount(path).observed == seen
        assert recount.recount(path).committed_rounds == 2

    def test_only_those_asked_can_contribute(self, book):
        begin(book, 0, ["a"])
        with pytest.raises(ledger_rules.LedgerRefusal, match="1 users contributed"):
            book.commit_round(0, ["a", "b"], "checkpoint")

    def test_the_promise_cannot_change(self, book, path):
        book.close()
        with pytest.raises(ValueError, match="cannot change its promise"):
            ledger.Ledger.open(path, dataclasses.replace(DECLARED, max_participations=3))


class TestReplay:
    def test_the_same_round_may_be_repeated_also_after_a_crash(self, book, path):
        assert begin(book, 0, ["a", "b"]) is False
        assert begin(book, 0, ["b", "a"]) is True
        book.close()
        with ledger.Ledger.open(path, DECLARED) as again:
            assert again.pending_round == 0
            assert begin(again, 0, ["a", "b"]) is True
            again.commit_round(0, ["a"], "checkpoint 0")
            assert again.observed().histogram == {1: 1}

    @pytest.mark.parametrize("cohort", [["a"], ["a", "b", "c"], ["a", "c"], []])
    def test_not_with_another_cohort(self, book, cohort):
        begin(book, 0, ["a", "b"])
        with pytest.raises(ledger_rules.ReplayRefusal, match="another cohort"):
            begin(book, 0, cohort)

    def test_the_noise_of_a_repetition_may_be_another(self, book):
        begin(book, 0, ["a", "b"])
        assert begin(book, 0, ["a", "b"], noise="fresh") is True

    def test_it_cannot_be_skipped_but_committed_with_no_contribution(self, book):
        begin(book, 0, ["a", "b"])
        with pytest.raises(ledger_rules.ForkRefusal, match="next round of this ledger is 0"):
            begin(book, 1, ["c"])
        book.commit_round(0, [], "checkpoint 0")
        assert book.observed().max_participations == 0
        assert begin(book, 1, ["a"]) is False

    def test_one_round_goes_on_from_a_noise_state(self, book):
        begin(book, 0, ["a"], noise="n")
        book.commit_round(0, ["a"], "checkpoint 0")
        for _ in range(2):  # Also where the round was begun already.
            with pytest.raises(ledger_rules.ReplayRefusal, match="noise state of round 0"):
                begin(book, 1, ["b"], noise="n")
            begin(book, 1, ["b"])

    def test_a_run_without_noise_has_no_fingerprint(self, book):
        for t in range(3):
            book.begin_round(
                t, [], noise_fingerprint=None, checkpoint_fingerprint=book.last_checkpoint
            )
            book.commit_round(t, [], f"checkpoint {t}")
        assert book.last_committed_round == 2


class TestForksAndRollbacks:
    @pytest.mark.parametrize(
        "t, checkpoint, message",
        [
            (1, "checkpoint 0", "rolled back.* before round 1"),  # Continued twice.
            (2, "initial", "rolled back.* before round 0"),  # It pretends to be at round 2.
            (2, "other", "never committed a checkpoint other"),
        ],
    )
    def test_a_state_that_is_not_the_last(self, book, t, checkpoint, message):
        run_round(book, 0, ["a"])
        run_round(book, 1, ["b"])
        with pytest.raises(ledger_rules.ForkRefusal, match=message):
            begin(book, t, ["c"], checkpoint=checkpoint)

    @pytest.mark.parametrize("t", [0, 2])
    def test_the_wrong_round_is_neither_begun_nor_committed(self, book, t):
        run_round(book, 0, ["a"])
        with pytest.raises(ledger_rules.ForkRefusal, match="next round of this ledger is 1"):
            begin(book, t, ["b"])
        begin(book, 1, ["b"])
        with pytest.raises(ledger_rules.LedgerRefusal, match="begun and not committed is 1"):
            book.commit_round(t, [], "checkpoint")

    @pytest.mark.parametrize("old", ["initial", "checkpoint 0"])
    def test_a_new_state_needs_a_new_fingerprint(self, book, old):
        run_round(book, 0, ["a"])
        begin(book, 1, ["b"])
        with pytest.raises(ledger_rules.ForkRefusal, match="fingerprint of an earlier state"):
            book.commit_round(1, ["b"], old)


class TestBudget:
    def test_the_guard_sees_the_round_that_would_begin(self, path):
        asked = []

        def guard(seen):
            asked.append(seen)
            return "ε would be 9." if seen.max_participations > 1 else None

        with ledger.Ledger.create(
            path, DECLARED, initial_checkpoint="initial", budget_guard=guard
        ) as book:
            run_round(book, 0, ["a"])
            run_round(book, 1, ["b"])
            with pytest.raises(ledger_rules.BudgetRefusal, match="Round 2 may not begin: ε would"):
                begin(book, 2, ["a"])
            assert book.pending_round is None
            begin(book, 2, ["c"])
            begin(book, 2, ["c"])  # A repetition costs nothing more.
        assert [seen.num_rounds for seen in asked] == [1, 2, 3, 3]
        assert asked[2].min_sep == 2


class TestFile:
    def test_files_are_private_and_hold_no_user_id(self, book, path):
        run_round(book, 0, ["alice@example.org"])
        book.close()
        assert sorted(os.listdir(path.parent)) == ["ledger.sqlite", "ledger.sqlite.key"]
        for file in path.parent.iterdir():
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            assert b"alice" not in file.read_bytes()

    def test_rows_cannot_be_changed_or_deleted(self, book, path):
        run_round(book, 0, ["a", "b"], contributed=["a"])
        book.close()
        connection = sqlite3.connect(path)
        for table in ("declared", "rounds", "asked", "commits", "dropped"):
            column = connection.execute(f"SELECT * FROM {table}").description[0][0]
            with pytest.raises(sqlite3.IntegrityError, match="append-only"):
                connection.execute(f"DELETE FROM {table}")
            with pytest.raises(sqlite3.IntegrityError, match="append-only"):
                connection.execute(f"UPDATE {table} SET {column} = 5")
        connection.close()

    def test_one_process_at_a_time_and_none_overwrites_a_ledger(self, book, path):
        with pytest.raises(ValueError, match="exists already"):
            ledger.Ledger.create(path, DECLARED, initial_checkpoint="initial")
        with pytest.raises(ValueError, match="in use by another process"):
            ledger.Ledger.open(path, DECLARED)
        with pytest.raises(ValueError, match="in use by another process"):
            recount.recount(path)
        book.close()
        ledger.Ledger.open(path, DECLARED).close()

    def test_a_missing_ledger_is_not_created(self, path):
        with pytest.raises(ValueError, match="no ledger"):
            ledger.Ledger.open(path, DECLARED)
        assert not path.exists()

    def test_other_files_are_not_ledgers(self, path):
        path.write_bytes(b"not a database, but long enough to look at" * 10)
        with pytest.raises(ValueError, match="not a participation ledger"):
            recount.recount(path)
        path.unlink()
        connection = sqlite3.connect(path)
        connection.execute("CREATE TABLE t (x)")
        connection.close()
        with pytest.raises(ValueError, match="not a participation ledger"):
            recount.recount(path)

    @pytest.mark.parametrize(
        "statement, damage",
        [
            ("DELETE FROM declared", "it lacks the declared schema"),
            ("DELETE FROM rounds WHERE round = 0", "rounds are missing"),
            ("DELETE FROM clients WHERE client = 1", "clients are missing"),
        ],
    )
    def test_a_ledger_that_lost_rows_is_damaged(self, book, path, statement, damage):
        run_round(book, 0, ["a", "b"])
        run_round(book, 1, [])
        book.close()
        with contextlib.closing(sqlite3.connect(path)) as connection, connection:
            triggers = connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'")
            for (name,) in triggers.fetchall():  # Whoever damages a file asks no trigger.
                connection.execute(f"DROP TRIGGER {name}")
            connection.execute(statement)
        with pytest.raises(ValueError, match=damage):
            recount.recount(path)

    def test_the_key_must_be_there_and_be_the_right_one(self, book, path):
        book.close()
        key = pathlib.Path(f"{path}.key")
        key.write_bytes(bytes(32))
        with pytest.raises(ValueError, match="not the key of the ledger"):
            ledger.Ledger.open(path, DECLARED)
        key.unlink()
        with pytest.raises(ValueError, match="key file .* missing"):
            ledger.Ledger.open(path, DECLARED)
        assert recount.recount(path).committed_rounds == 0  # The recount needs no key.

    def test_a_directory_that_is_missing_is_an_os_error(self, tmp_path):
        with pytest.raises(OSError):
            ledger.Ledger.create(
                tmp_path / "none" / "ledger", DECLARED, initial_checkpoint="initial"
            )

    def test_a_full_disk_is_an_os_error_and_the_record_stays_whole(self, book):
        run_round(book, 0, ["a"])
        pages = book._connection.execute("PRAGMA page_count").fetchone()[0]
        book._connection.execute(f"PRAGMA max_page_count = {pages}")
        many = [f"user {i}" for i in range(5_000)]
        with pytest.raises(OSError, match="full"):
            begin(book, 1, many)
        assert book.pending_round is None
        book._connection.execute("PRAGMA max_page_count = 1000000")
        run_round(book, 1, many)
        assert book.observed().histogram == {1: 5_001}

    def test_damage_is_noticed(self, book, path):
        run_round(book, 0, [f"user {i}" for i in range(3_000)])
        book.close()
        content = bytearray(path.read_bytes())
        content[len(content) // 2 : len(content) // 2 + 4096] = bytes(4096)
        path.write_bytes(content)
        with pytest.raises((ValueError, OSError), match="damaged|malformed"):
            recount.recount(path)


@st.composite
def histories(draw):
    """Attempted rounds: (cohort, who contributes, or None for a crash before the commit)."""
    users = st.sets(st.sampled_from("abcdefg"), max_size=4)
    return draw(
        st.lists(
            st.tuples(users, st.one_of(st.none(), st.sets(st.sampled_from("abcdefg")))), max_size=8
        )
    )


@hypothesis.settings(deterministic, max_examples=60)
@hypothesis.given(
    histories(), st.builds(schema.MinSep, st.integers(1, 8), st.integers(1, 4), st.integers(1, 3))
)
def test_the_ledger_equals_brute_force_and_never_lets_the_schema_break(history, declared):
    counted = collections.defaultdict(list)  # user -> rounds, what the ledger should see
    with tempfile.TemporaryDirectory(dir=FAST_DIRECTORY) as directory:
        path = pathlib.Path(directory) / "ledger"
        book = ledger.Ledger.create(path, declared, initial_checkpoint="initial")
        t = 0
        for cohort, contributed in history:
            allowed = all(declared.allows([*counted[user], t]) for user in cohort)
            allowed = allowed and t < declared.num_rounds
            try:
                begin(book, t, sorted(cohort))
            except ledger_rules.SchemaRefusal:
                assert not allowed
                continue
            assert allowed
            open_round = {user: [*counted[user], *([t] * (user in cohort))] for user in "abcdefg"}
            assert_observed(book.observed(), open_round, t + 1)
            if contributed is None:
                book.close()
                assert_observed(recount.recount(path).observed, open_round, t + 1)
                book = ledger.Ledger.open(path, declared)
                assert_observed(book.observed(), open_round, t + 1)
                assert begin(book, t, sorted(cohort)) is True
                contributed = cohort
            for user in cohort & contributed:
                counted[user].append(t)
            book.commit_round(t, sorted(cohort & contributed), f"checkpoint {t}")
            t += 1
            assert_observed(book.observed(), counted, t)
        book.close()
        result = recount.recount(path)
        assert_observed(result.observed, counted, t)
        assert result.breaches == ()
        # What the statement is computed from covers what truly happened.
        if t > 0:
            assert all(result.observed.as_schema().allows(rounds) for rounds in counted.values())


def assert_observed(seen, rounds_of_users, num_rounds):
    rounds_of_users = {user: rounds for user, rounds in rounds_of_users.items() if rounds}
    strides = [
        j - i for rounds in rounds_of_users.values() for i, j in itertools.combinations(rounds, 2)
    ]
    assert seen.num_rounds == num_rounds
    assert seen.min_sep == min(strides, default=None)
    assert seen.max_participations == max(map(len, rounds_of_users.values()), default=0)
    assert seen.histogram == dict(collections.Counter(map(len, rounds_of_users.values())))


def test_a_production_sized_cohort_passes_through(path):
    sampler = cohorts.MinSepSampler(
        num_clients=20_000, clients_per_round=6_500, min_sep=3, num_rounds=7, seed=0
    )
    with ledger.Ledger.create(path, sampler.schema, initial_checkpoint="initial") as book:
        for t in range(sampler.num_rounds):
            run_round(book, t, [f"user {i}" for i in sampler.cohort(t)])
        seen = book.observed()
    assert (seen.min_sep, seen.max_participations) == (3, 3)
    assert sum(c * n for c, n in seen.histogram.items()) == 7 * 6_500
    assert recount.recount(path).observed == seen
    assert np.max(list(seen.histogram)) == 3
