"""Sessions of a noise party with a server that sums securely: what it gives and refuses."""

from __future__ import annotations

import multiprocessing
import os
import signal

import numpy as np
import pytest
import tensorflow as tf

from tests.runtime.device import wire_server
from tests.runtime.noise_party import noisy_task
from tff_dpftrl.mechanisms import banded, restarts, tree
from tff_dpftrl.private_round import discretize
from tff_dpftrl.runtime.noise_party import ledger as ledger_lib
from tff_dpftrl.runtime.noise_party import promise as promise_lib
from tff_dpftrl.runtime.noise_party import rows as rows_lib

# Eager functions do not reach into `tf.data`, which reads the seeds of first states.
pytestmark = pytest.mark.filterwarnings("ignore:Even though the:UserWarning")
_RESTARTED = restarts.Restarted(noisy_task.BLT, (0, 3, 6))
_STRATEGIES = {
    "blt": noisy_task.BLT,
    "banded": banded.Banded([[1.0, 0.0], *[[1.0, 0.5]] * 7]),
    "tree with restarts": restarts.Restarted(tree.Tree(4), (0, 3)),
}


@pytest.fixture(name="server")
def _server():
    made = wire_server.WireServer(lambda: 0.0)
    yield made
    made.stop()


@pytest.fixture(autouse=True)
def _eagerly():
    """Runs without graphs, whose tracing takes seconds; `party_noise_test` has them."""
    tf.config.run_functions_eagerly(True)
    yield
    tf.config.run_functions_eagerly(False)


@pytest.fixture(name="run")
def _run(server, tmp_path):
    started = []

    def run(task=None, requests=({},), sessions=None, **options):
        task = noisy_task.make() if task is None else task
        server.script = noisy_task.Rounds(task, list(requests))
        running = noisy_task.start(task, tmp_path, server, **options)
        started.append(running)
        running.run(sessions)
        return running, server.script

    yield run
    for running in started:
        running.close()


def _expected(task, ledger, row):
    """The noise that was given for a round, drawn again from the first one on."""
    noise = promise_lib.Promise(task, noisy_task.PARTY).noise
    before = noise.before_round(noise.initial_state(ledger.seed()), row, ledger.root)
    drawn, count, _ = noise.draw(before, ledger.root(row))
    return noise.encode(drawn, count, noisy_task.ROUND_SEED)


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(strategy, id=name, marks=[] if name == "blt" else [pytest.mark.slow])
        for name, strategy in _STRATEGIES.items()
    ],
)
def test_each_sum_has_the_noise_of_its_round(run, strategy):
    task = noisy_task.make(strategy)
    running, rounds = run(task, [{}, {}, {}])
    assert [one.next_round for one in rounds.check_ins] == [0, 1, 2, 3]
    modulus = rounds.parameters.layout[3].modulus
    for row, total in enumerate(rounds.totals):
        integers, _ = _expected(task, running.ledger, row)
        np.testing.assert_array_equal(total[3], (integers + 0 + 1 + 2) % modulus)
        assert total[0] == 3  # The party is no device.
    given = running.ledger.given()
    assert [(one.row, one.devices, one.outcome) for one in given] == [
        (0, 3, "summed"),
        (1, 3, "summed"),
        (2, 3, "summed"),
    ]
    assert running.lines[0] == "Round 0: noise given to the sum of 3 devices."
    assert running.lines[-1] == "All rounds are done: no round"


def test_the_count_of_adaptive_clipping_gets_its_noise(run):
    task = noisy_task.make(_RESTARTED, adaptive=True)
    requests = [{}, {}, {"broadcast": noisy_task.broadcast(task, 0.5), "round_index": 3}]
    running, rounds = run(task, requests)
    assert [one.clip_norm for one in running.ledger.given()] == [2.0, 2.0, 0.5]
    for row, total in zip((0, 1, 3), rounds.totals, strict=True):
        _, doubled = _expected(task, running.ledger, row)
        count = tf.constant(total[5].astype(np.int32))
        assert discretize.to_centre(count, noisy_task.COUNT_MODULUS).numpy() == [doubled]


@pytest.mark.parametrize(
    "requests, refusal",
    [
        ([{"round_index": 3}, {"round_index": 1}], "the noise of round 1 was given, or passed"),
        ([{"attempt": "a"}, {"attempt": "a"}], "'a', or its session, has had the noise of round"),
        ([{}, {"secure_sum_session": b"s" * 31}], "session must have 32 bytes"),
        ([{}, {"round_index": 7}], "would pass over the noise of 6 rounds"),
        ([{}, {"round_index": 8}], "the task has 8 rounds"),
        ([{}, {"task": "other"}], "asks for noise of the task 'other', and this is for 'noisy'"),
        ([{}, {"plan_sha256": b"q" * 32}], "the server has a plan 7171"),
        ([{}, {"attempt": ""}], "names no attempt"),
        ([{}, {"broadcast": b"x"}], "The model"),
    ],
)
def test_what_must_not_be_given_is_refused_and_shown(run, requests, refusal):
    running, rounds = run(requests=requests, most_skipped=5)
    assert len(rounds.totals) == 1
    (line,) = [line for line in running.lines if line.startswith("Refused: ")]
    assert refusal in line
    assert len(running.ledger.given()) == 1
    # It goes on where it was.
    assert rounds.check_ins[-1].next_round == rounds.check_ins[-2].next_round


def test_an_attempt_that_fails_after_the_noise_has_used_it_up(run, server):
    task = noisy_task.make()
    server.script = None
    running, rounds = run(task, [], 0)
    rounds.requests, rounds.accepts = [{}], False
    running.run()
    assert "Round 0: noise given, and the attempt failed (round abandoned)" in running.lines[0]
    assert running.ledger.given()[0].outcome == "round abandoned"
    assert rounds.check_ins[-1].next_round == 1


def test_an_attempt_that_fails_before_the_noise_has_used_none(run):
    running, rounds = run(requests=[], sessions=0)
    rounds.requests = [{}, {}]

    def fail(step):
        if step == "request" and not rounds.totals and len(rounds.check_ins) == 1:
            raise RuntimeError("the server stops")

    rounds.at = fail
    running.run()
    assert [one.next_round for one in rounds.check_ins] == [0, 0, 1]
    assert [one.row for one in running.ledger.given()] == [0]
    assert running.lines[0].endswith("s)")  # Says when it comes back.


def test_a_server_that_is_away_is_tried_again(run, server):
    running, rounds = run(requests=[], sessions=0)
    rounds.requests = [{}]
    server.stop()
    running.run(2)
    assert len(running.lines) == 1 and "cannot be reached" in running.lines[0]


def test_the_end_of_all_rounds_is_the_end(run):
    running, rounds = run(requests=[{"round_index": 7}], most_skipped=10)
    assert running.lines[-1] == "All rounds are done: no round"
    assert [one.next_round for one in rounds.check_ins] == [0, 8]


def test_a_server_that_has_lost_the_last_round_is_told(run, server):
    running, rounds = run(requests=[], sessions=0)
    rounds.requests = [{"round_index": 7}]
    rounds.accepts = False
    running.run()
    assert [one.next_round for one in rounds.check_ins] == [0, 8]
    running.ledger.note(7, ledger_lib.SENT)  # As after a kill of the server.
    running.run()
    assert [one.next_round for one in rounds.check_ins] == [0, 8, 8]
    server.stop()
    running.run(2)
    assert "again in" in running.lines[-1]
    running.ledger.note(7, ledger_lib.SUMMED)
    running.run()
    assert "and the server is gone" in running.lines[-1]


def test_a_stop_between_ledger_and_sending_costs_the_round_and_nothing_is_sent(run, monkeypatch):
    give = ledger_lib.Ledger.give

    def stop(self, given, first):
        give(self, given, first)
        raise KeyboardInterrupt

    monkeypatch.setattr(ledger_lib.Ledger, "give", stop)
    with pytest.raises(KeyboardInterrupt):
        run(requests=[{}])
    monkeypatch.undo()
    task = noisy_task.make()
    again, rounds = run(task, [{"attempt": "again"}])
    assert [(one.row, one.outcome) for one in again.ledger.given()] == [(0, "sent"), (1, "summed")]
    (total,) = rounds.totals
    # The row that was not sent is part of the past all the same.
    integers, _ = _expected(task, again.ledger, 1)
    modulus = rounds.parameters.layout[3].modulus
    np.testing.assert_array_equal(total[3], (integers + 3) % modulus)


def test_without_room_on_the_disk_nothing_is_sent(run, monkeypatch):
    def fail(self, given, first):
        raise OSError("no space left on device")

    monkeypatch.setattr(ledger_lib.Ledger, "give", fail)
    with pytest.raises(OSError, match="no space left"):
        run(requests=[{}])
    monkeypatch.undo()
    again, rounds = run(requests=[{}])
    assert [one.row for one in again.ledger.given()] == [0]
    assert len(rounds.totals) == 1


class _Server:
    """Address of a server in another process."""

    def __init__(self, address, root_certificates):
        self.address, self.root_certificates = address, root_certificates


def _take_part(task, folder, address):
    """Runs a party in a process of its own, which is killed from outside."""
    running = noisy_task.start(task, folder, _Server(*address))
    running.run()


@pytest.mark.slow
def test_a_kill_at_any_step_repeats_nothing(server, tmp_path):
    task = noisy_task.make()
    rounds = server.script = noisy_task.Rounds(task, [{}] * 6)
    steps, killed = ["check-in", "keys", "request", "vector"], {}

    def kill(reached):
        if steps and reached == steps[0] and process.pid not in killed:
            steps.pop(0)
            killed[process.pid] = rounds.check_ins[-1].next_round
            os.kill(process.pid, signal.SIGKILL)

    rounds.at = kill
    address = (server.address, server.root_certificates)
    for _ in range(5):
        process = multiprocessing.get_context("spawn").Process(
            target=_take_part, args=(task, tmp_path, address)
        )
        process.start()
        process.join(300)
    assert not steps and process.exitcode == 0
    ledger = ledger_lib.Ledger.read(tmp_path / "noisy.ledger")
    rows = [one.row for one in ledger.given()]
    modulus = rounds.parameters.layout[3].modulus
    expected = [_expected(task, ledger, row)[0] for row in rows]
    ledger.close()
    # After the kill in the last step the server has the sum; the party does not know it.
    summed = [(total[3].astype(np.int64) - 3) % modulus for total in rounds.totals]
    found = [
        [row for row, e in zip(rows, expected, strict=True) if np.array_equal(one, e)]
        for one in summed
    ]
    assert all(len(one) == 1 for one in found), "a sum has noise of no row"
    assert [one for (one,) in found] == sorted({one for (one,) in found}), "a row was given twice"
    # Only the kill after the noise had left has used up a row.
    assert list(killed.values()) == [0, 0, 0, 0]
    assert rounds.check_ins[4].next_round == 1


def test_noise_after_a_restart_is_that_of_a_party_that_went_on(run, server, tmp_path, monkeypatch):
    monkeypatch.setattr(rows_lib, "_ROWS_BETWEEN_CHECKPOINTS", 2)
    task = noisy_task.make()
    running, _ = run(task, [{}, {}, {}])
    running.close()
    checkpoint = tmp_path / "noisy.noise"
    assert checkpoint.stat().st_mode & 0o777 == 0o600
    content = checkpoint.read_bytes()
    # Lost, damaged, and as it was: the noise is the same.
    for row, changed in ((3, content), (4, b""), (5, content[:-1] + b"?")):
        checkpoint.write_bytes(changed)
        again, rounds = run(task, [{"attempt": f"again {row}"}])
        integers, _ = _expected(task, again.ledger, row)
        modulus = rounds.parameters.layout[3].modulus
        np.testing.assert_array_equal(rounds.totals[0][3], (integers + 3) % modulus)
        again.close()
