"""The laws of a noise party's ledger: each row once, in order, on the disk before it is sent."""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess
import sys

import numpy as np
import pytest

from tff_dpftrl.runtime.noise_party import ledger as ledger_lib

_TERMS = "ab" * 32


@pytest.fixture(name="path")
def _path(tmp_path):
    return tmp_path / "task.ledger"


def _open(path, **options):
    return ledger_lib.Ledger.open(path, "task", _TERMS, **options)


def _given(row, attempt=None, session=None):
    attempt = f"attempt {row}" if attempt is None else attempt
    session = row.to_bytes(32, "big") if session is None else session
    return ledger_lib.Given(row, attempt, session, None, 3, 0.0, bytes([row]) * 32)


def test_rows_are_given_in_order_and_never_again(path):
    ledger = _open(path)
    assert ledger.next_row == 0
    ledger.give(_given(0), 0)
    ledger.give(_given(3), 1)
    assert ledger.next_row == 4
    for row in (0, 2, 3):
        with pytest.raises(ledger_lib.NoiseRefusedError, match=f"the noise of round {row} was"):
            ledger.give(_given(row, "another", b"s" * 32), 4)
    assert [one.row for one in ledger.given()] == [0, 3]
    assert ledger.last() == _given(3)


@pytest.mark.parametrize(
    "again", [_given(1, attempt="attempt 0"), _given(1, session=(0).to_bytes(32, "big"))]
)
def test_an_attempt_has_noise_once(path, again):
    ledger = _open(path)
    ledger.give(_given(0), 0)
    with pytest.raises(ledger_lib.NoiseRefusedError, match="has had the noise of round 0"):
        ledger.give(again, 1)
    assert ledger.next_row == 1


def test_a_request_passes_over_few_rows(path):
    ledger = _open(path, most_skipped=2)
    ledger.give(_given(2), 0)
    with pytest.raises(ledger_lib.NoiseRefusedError, match="pass over the noise of 3 rounds"):
        ledger.check(6, "attempt", b"s" * 32)
    ledger.check(5, "attempt", b"s" * 32)


def test_it_is_all_there_after_it_is_opened_again(path):
    ledger = _open(path)
    seed = ledger.seed()
    ledger.give(_given(0), 0)
    ledger.note(0, ledger_lib.SUMMED)
    ledger.close()
    again = _open(path)
    np.testing.assert_array_equal(again.seed(), seed)
    assert seed.dtype == np.int64 and seed.shape == (4,)
    assert (again.next_row, again.last().outcome) == (1, ledger_lib.SUMMED)
    assert ledger_lib.Ledger.read(path).task == ("task", _TERMS)
    assert path.stat().st_mode & 0o777 == 0o600


def test_seeds_differ(tmp_path):
    one, other = (_open(tmp_path / name).seed() for name in ("one", "other"))
    assert not np.array_equal(one, other)


def test_new_draws_of_a_row_have_the_fresh_bits_of_the_attempt_that_was_given_next(path):
    ledger = _open(path)
    ledger.give(_given(1), 0)
    ledger.give(_given(3), 2)
    for row, of in ((0, 1), (1, 1), (2, 3), (3, 3)):
        words = ledger.seed() ^ np.frombuffer(bytes([of]) * 32, np.int64)
        np.testing.assert_array_equal(ledger.root(row), words)


def test_rows_of_version_1_have_the_seed_of_the_ledger_alone(path):
    ledger = _open(path)
    ledger.give(_given(0), 0)
    seed = ledger.seed()
    ledger.close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("ALTER TABLE given DROP COLUMN entropy")
        connection.execute("PRAGMA user_version = 1")
    again = _open(path)
    np.testing.assert_array_equal(again.root(0), seed)
    again.give(_given(1), 1)
    again.close()
    again = _open(path)
    assert [one.entropy for one in again.given()] == [bytes(32), _given(1).entropy]


def test_the_ledger_of_another_task_is_refused(path):
    _open(path).close()
    with pytest.raises(ValueError, match="is the ledger of the task 'task' with the terms abab"):
        ledger_lib.Ledger.open(path, "task", "cd" * 32)


def test_two_processes_never_give_one_row(path):
    one, other = _open(path), _open(path)
    one.give(_given(0), 0)
    with pytest.raises(ledger_lib.NoiseRefusedError, match="the noise of round 0 was given"):
        other.give(_given(0, "another", b"s" * 32), 0)
    # A later row was drawn as if the one of the other process had not been given.
    with pytest.raises(ledger_lib.NoiseRefusedError, match="has given the noise of round 0 mean"):
        other.give(_given(1), 0)
    assert one.next_row == 1


_GIVE_FOR_EVER = """
import sys
from tff_dpftrl.runtime.noise_party import ledger as ledger_lib
ledger = ledger_lib.Ledger.open(sys.argv[1], "task", sys.argv[2])
while True:
    row = ledger.next_row
    name = row.to_bytes(32, "big")
    ledger.give(ledger_lib.Given(row, f"attempt {row}", name, None, 3, 0.0, name), row)
    print(row, flush=True)  # As if its noise were sent.
"""


def test_what_was_sent_before_a_kill_is_in_the_ledger(path):
    _open(path).close()
    sent = []
    for _ in range(2):
        with subprocess.Popen(
            [sys.executable, "-c", _GIVE_FOR_EVER, path, _TERMS], stdout=subprocess.PIPE, text=True
        ) as process:
            sent += [int(process.stdout.readline()) for _ in range(3)]
            process.kill()
            sent += [int(line) for line in process.stdout if line.endswith("\n")]
        assert _open(path).next_row > sent[-1]
    assert sent == sorted(set(sent)) and len(sent) >= 6
