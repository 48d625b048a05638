"""Changed inputs of every kind are taken or refused in one line; a server outlives any session.

`benchmarks/fuzz_inputs.py` reads as many as wanted, and repeats one by its seed.
"""

import os
import pathlib

import hypothesis
import pytest
from hypothesis import strategies as st

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

_SEED = 16
_QUICK = (
    *(*files.KINDS, *messages.KINDS, *plans.KINDS),
    *(*secure_sums.KINDS, *task_folders.KINDS),
)
_IN_ALL = 100_000
_READERS = [kind for kind in (*messages.KINDS, *plans.KINDS) if kind.read is not None]


def _name(kind):
    return kind.name


def _check(tally, number):
    assert not tally.failures, tally.failures[0]
    assert sum(tally.outcomes.values()) == number


@pytest.mark.parametrize("kind", _QUICK, ids=_name)
def test_a_changed_input_is_taken_or_refused(kind, tmp_path):
    _check(judging.run(kind, tmp_path, judging.seeds_of(_SEED, 12)), 12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", _QUICK, ids=_name)
def test_no_changed_input_of_many_does_any_harm(kind, tmp_path):
    number = _IN_ALL // len(_QUICK) + 1
    _check(judging.run(kind, tmp_path, judging.seeds_of(_SEED + 1, number)), number)


@pytest.mark.slow
@pytest.mark.parametrize("kind", (*commands.KINDS, plans.LOADED), ids=_name)
def test_commands_and_tensorflow_take_or_refuse_changed_inputs(kind, tmp_path):
    _check(judging.run(kind, tmp_path, judging.seeds_of(_SEED, 100)), 100)


@pytest.mark.parametrize("kind", _READERS, ids=_name)
@hypothesis.settings(deadline=None, derandomize=True, max_examples=20, database=None)
@hypothesis.given(content=st.binary(max_size=300))
def test_any_bytes_are_taken_or_refused(kind, content):
    judging.judge(judging.Case(lambda: kind.read(content)), kind.refusals)


@pytest.mark.parametrize(
    "num_sessions", [40, pytest.param(4000, marks=pytest.mark.slow)], ids=["few", "many"]
)
@pytest.mark.parametrize("is_secure", [False, True], ids=["plain", "secure"])
def test_a_server_outlives_sessions_that_keep_to_no_protocol(tmp_path, is_secure, num_sessions):
    seeds = judging.seeds_of(_SEED, num_sessions)
    found = storm.storm_of_sessions(tmp_path, seeds, is_secure=is_secure)
    assert found.looks and not found.errors
    assert sum(found.outcomes.values()) == num_sessions
    assert found.outcomes["UNAUTHENTICATED"]  # The server looks at tokens.
    assert found.looks[-1].open_files <= found.looks[0].open_files + 8


@pytest.mark.parametrize(
    "num_sessions", [30, pytest.param(4000, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_a_device_outlives_a_server_that_lies(tmp_path, num_sessions):
    found = storm.storm_of_servers(tmp_path, judging.seeds_of(_SEED, num_sessions))
    assert not found.errors
    assert found.outcomes["failed"] and found.outcomes["completed"]


# The law itself.


def _violates(read, folder=None):
    with pytest.raises(judging.Violation) as caught:
        judging.judge(judging.Case(read, folder), (ValueError,))
    return str(caught.value)


def _raise(error):
    raise error


def test_the_law_is_kept_by_a_value_and_by_a_refusal():
    assert judging.judge(judging.Case(lambda: 1), (ValueError,)) == "accepted"
    assert judging.judge(judging.Case(lambda: _raise(ValueError("no."))), (ValueError,)) == (
        "ValueError"
    )


def test_the_law_is_broken_by_another_exception_or_no_message():
    assert "KeyError" in _violates(lambda: _raise(KeyError("x")))
    assert "not one line" in _violates(lambda: _raise(ValueError("")))
    assert "not one line" in _violates(lambda: _raise(ValueError("two\nlines")))
    assert "characters" in _violates(lambda: _raise(ValueError("x" * 10**6)))


def test_the_law_is_broken_by_what_an_input_must_not_do(tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    assert "for writing" in _violates((tmp_path / "evil").touch, inside)
    assert "os.system" in _violates(lambda: os.system("true"))
    assert "MemoryError" in _violates(lambda: bytearray(8 * judging.MOST_MEMORY))
    judging.judge(judging.Case((inside / "fine").touch, inside), ())


def test_the_law_is_broken_by_what_takes_too_long(monkeypatch):
    monkeypatch.setattr(judging, "LONGEST_SECONDS", 0.05)

    def for_ever():
        while True:
            pass

    assert "seconds" in _violates(for_ever)


def test_the_law_is_broken_by_a_file_that_changes_or_stays(tmp_path):
    def broken(read):
        def write(folder, number):
            (folder / "file").write_text(f"content {number}")

        kind = files.kind("test", write, {"file": lambda content, *_: content}, read, faults=0)
        judging.empty(tmp_path)
        [(_, reason)] = judging.run(kind, tmp_path, [1]).failures
        return reason

    def change(folder: pathlib.Path):
        (folder / "file").write_text("another")

    assert "changed" in broken(change)
    assert "left behind" in broken(lambda folder: (folder / "half.unfinished").touch())


def test_a_seed_makes_one_input(tmp_path):
    seen = []

    def read(folder):
        seen.append((folder / "file").read_bytes())

    def write(folder, number):
        (folder / "file").write_text('{"a": [1, 2, {"b": "c"}]}' * (number == 0) or f"{number}")

    kind = files.kind("test", write, {"file": plans.mutations.json_text}, read, faults=0)
    for _ in range(2):
        judging.empty(tmp_path)
        judging.run(kind, tmp_path, judging.seeds_of(3, 10))
    assert seen[:10] == seen[10:] and len(set(seen[:10])) > 5
