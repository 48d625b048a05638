import json
import math
import sys

import pytest

from tff_dpftrl.runtime.status import history
from verification import memory_store


def test_rounds_become_columns():
    with memory_store.MemoryStore() as store:
        store.add_task("keyboard", "train", model=b"", state=b"")
        epoch = store.acquire("keyboard", "me", now=0, duration=100).epoch
        for i in range(3):
            store.commit(
                "keyboard",
                "train",
                round_index=i,
                epoch=epoch,
                model=b"",
                state=b"",
                metrics={"loss": 3.0 - i, "attempt": f"a/{i}", **({"late": 5} if i == 1 else {})},
                now=10.0 * i,
            )
        found = history.columns(store.history("keyboard", "train"))
    assert found == {
        "rounds": 3,
        "round": [0, 1, 2],
        "committed_at": [0, 10, 20],
        "columns": {"loss": [3, 2, 1], "late": [None, 5, None]},
    }


def test_a_skipped_round_is_no_point():
    released = {"round": 0, "committed_at": 5, "loss": 2.0, "devices/reports": 4}
    rows = [released, {"round": 1, "committed_at": 6, "skipped": True, "attempt": "a"}]
    assert history.columns(rows) == history.columns(rows[:1])


def test_no_round_is_no_point():
    assert history.columns([]) == {"rounds": 0, "round": [], "committed_at": [], "columns": {}}


@pytest.mark.parametrize("num_rounds", [300, 301, 599, 600, 4321])
def test_many_rounds_become_means_of_neighbours(num_rounds):
    rows = [{"round": i, "committed_at": i, "x": float(i)} for i in range(num_rounds)]
    found = history.columns(rows)
    points = len(found["round"])
    assert points == len(found["columns"]["x"]) <= 300
    assert points > 140
    assert found["round"][-1] == num_rounds - 1
    size = math.ceil(num_rounds / 300)
    assert found["columns"]["x"][0] == (size - 1) / 2


def test_values_that_are_no_finite_numbers_are_left_out():
    rows = [
        {"round": 0, "a": math.nan, "b": "<script>", "c": [1], "d": True, "e": 10**400, "f": 1},
        {"round": 1, "a": 2.0, "f": math.inf},
    ]
    found = history.columns(rows)
    assert found["columns"] == {"a": [None, 2], "f": [1, None]}
    json.dumps(found, allow_nan=False)


def test_there_are_only_so_many_columns_with_names_of_so_many_letters():
    found = history.columns([{f"metric {i:02d}" + "x" * 1000: i for i in range(500)}])
    assert len(found["columns"]) == 64
    assert {len(name) for name in found["columns"]} == {80}


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
