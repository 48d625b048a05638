"""Tests of how shares of a round are handed out, with workers that are Python objects."""

from __future__ import annotations

import sys
import threading

import pytest

from tff_dpftrl.execution import client_part, remote_worker, shares

_SQUARES = [0, 1, 4, 9, 16, 25]


class _Worker:
    """Does what it is asked, except in the first calls of `run`, for which others may be given.

    Attributes:
      died: Set once it has been lost.
    """

    def __init__(self, address, *first_calls, connects=(), comes_back=True):
        self.address = address
        self.is_connected = False
        self.num_done = 0
        self.died = threading.Event()
        self.abandoned = threading.Event()
        self._first_calls = list(first_calls)
        self._connects = list(connects)
        self._comes_back = comes_back

    def connect(self):
        if self._connects:
            self.is_connected = self._connects.pop(0)
        else:
            self.is_connected = self._comes_back or not self.died.is_set()
        return self.is_connected

    def run(self, comp, arg):
        if self._first_calls:
            self._first_calls.pop(0)(self)
        self.num_done += 1
        return comp(arg)

    def abandon(self):
        self.is_connected = False
        self.abandoned.set()


def _die(worker):
    worker.is_connected = False
    worker.died.set()
    raise remote_worker.WorkerLostError("killed")


def _fail(worker):
    raise TypeError("a bug")


def _hang(worker):
    assert worker.abandoned.wait(30)
    raise remote_worker.WorkerLostError("abandoned")


def _after(other):
    return lambda worker: other.died.wait(30)


def _run(*workers, patience=30.0):
    return shares.run(lambda x: x * x, range(6), workers, patience)


def test_results_come_in_the_order_of_the_shares():
    workers = [_Worker("a"), _Worker("b"), _Worker("c")]
    assert _run(*workers) == _SQUARES
    assert sum(worker.num_done for worker in workers) == 6


def test_the_share_of_a_lost_worker_goes_to_another():
    lost = _Worker("a", _die, comes_back=False)
    other = _Worker("b", _after(lost))
    with pytest.warns(UserWarning, match=r"worker at a was lost in a round \(killed\)"):
        assert _run(lost, other) == _SQUARES
    assert (lost.num_done, other.num_done) == (0, 6)


def test_a_worker_that_comes_back_is_used_again():
    worker = _Worker("a", _die, connects=[True, False, True])
    with pytest.warns(UserWarning, match="lost"):
        assert _run(worker) == _SQUARES
    assert worker.num_done == 6


def test_a_worker_that_never_answers_is_not_waited_for():
    silent = _Worker("a", connects=[False] * 100)
    assert _run(silent, _Worker("b")) == _SQUARES


def test_it_ends_when_no_worker_answers():
    lost, other = _Worker("a", _die, comes_back=False), _Worker("b", _die, comes_back=False)
    with (
        pytest.warns(UserWarning, match="lost"),
        pytest.raises(client_part.NoWorkersError, match="for 0.1 seconds: a, b. The state before"),
    ):
        _run(lost, other, patience=0.1)


def test_it_ends_when_one_share_costs_worker_after_worker():
    deadly = _Worker("a", *[_die] * 100)
    with (
        pytest.warns(UserWarning, match="lost"),
        pytest.raises(client_part.NoWorkersError, match="for the fifth time in the same share"),
    ):
        shares.run(lambda x: x, range(1), [deadly], 30.0)


def test_an_error_of_the_computation_is_not_tried_again():
    worker, busy = _Worker("a", _fail), _Worker("b", _hang)
    with pytest.raises(TypeError, match="a bug"):
        _run(worker, busy)
    assert worker.num_done == 0
    assert busy.abandoned.is_set()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
