"""Tests of tff_dpftrl.runtime.device.watcher."""

from __future__ import annotations

import threading
import time

import pytest

from tff_dpftrl.runtime.device import session, watcher


def _interrupt():
    raise session.Interrupted("no longer idle")


@pytest.fixture(name="watch")
def _watch():
    return watcher.Watcher(interval_s=0.01)


def test_what_blocks_is_ended_until_it_has_ended(watch):
    """A call that has not begun when it is ended for the first time is ended again."""
    ended, calls = threading.Event(), []

    def end():
        calls.append(1)
        if len(calls) == 3:
            ended.set()

    with pytest.raises(session.Interrupted, match="no longer idle"):
        with watch.watching(_interrupt, end):
            assert ended.wait(20)
            raise ConnectionError("cancelled")
    assert len(calls) >= 3


def test_what_takes_too_long_says_so(watch):
    ended = threading.Event()
    with pytest.raises(session.StepFailed, match="no answer"):
        with watch.watching(lambda: None, ended.set, seconds=0.03, too_long="no answer"):
            assert ended.wait(20)
            raise ConnectionError("cancelled")


def test_errors_of_the_block_pass(watch):
    with pytest.raises(KeyError):
        with watch.watching(lambda: None, lambda: None):
            raise KeyError("x")


def test_a_block_that_ended_well_in_spite_of_it_has_ended_well(watch):
    ended = threading.Event()
    with watch.watching(_interrupt, ended.set):
        assert ended.wait(20)


def test_nothing_is_called_after_the_block(watch):
    calls = []
    with watch.watching(lambda: calls.append(1), lambda: None):
        while not calls:
            time.sleep(0.005)
    before = len(calls)
    with watch.watching(lambda: None, lambda: None, seconds=0.0):
        time.sleep(0.05)
    assert len(calls) == before


def test_one_thread_watches_over_all_and_goes(watch):
    before = set(threading.enumerate())

    def watchers():
        return len({t for t in threading.enumerate() if t.name == "watcher"} - before)

    asked = [threading.Event() for _ in range(5)]
    blocks = [watch.watching(event.set, lambda: None) for event in asked]
    for block in blocks:
        block.__enter__()
    assert all(event.wait(20) for event in asked)
    assert watchers() == 1
    for block in blocks:
        block.__exit__(None, None, None)
    end = time.monotonic() + 20
    while watchers() and time.monotonic() < end:
        time.sleep(0.01)
    assert not watchers()
