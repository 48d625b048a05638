import json
import math
import sys

import numpy as np
import pytest

from tests.runtime.status import watched
from tff_dpftrl.runtime.status import snapshot, task_figures


def test_a_server_that_has_seen_nothing_has_figures():
    told = watched.Watched()
    found = snapshot.of_population(told.seen, "minutes", {})
    assert found["alerts"] == [] and found["epoch"] == 0
    assert found["series"]["committed"] == []
    assert found["tasks"][0]["attempt"] is None
    found = snapshot.of_task(told.seen.tasks["train"])
    assert found["round_seconds"]["counts"] == []
    json.dumps(found, allow_nan=False)


def test_series_are_those_of_the_window():
    told = watched.Watched()
    told.round(seconds=4.0)
    told.clock.now = watched.START + 3600
    for name, steps in (("minutes", 120), ("day", 12), ("week", 1)):
        found = snapshot.of_population(told.seen, name, {"train": {"epsilon": None}})
        assert len(found["series"]["committed"]) == steps
        # The round has left the window of ten minutes.
        assert sum(found["series"]["committed"]) == (0 if name == "minutes" else 1)
        assert found["window"]["end"] == watched.START + 3600
        assert found["tasks"][0]["epsilon"] is None
    found = snapshot.of_population(told.seen, "day", {})
    # Five devices were connected for two of 300 seconds.
    assert found["series"]["participating"][0] == pytest.approx(5 * 2 / 300, rel=1e-4)


def test_a_distribution_is_cut_to_what_is_in_use():
    task = task_figures.TaskFigures(watched.Watched().seen.tasks["train"].settings)
    for seconds in (1.0, 2.0, 1e9):
        task.round_seconds.add(seconds)
    found = snapshot.of_task(task)["round_seconds"]
    assert found["edges"][:5] == pytest.approx([1, 2**0.25, 2**0.5, 2**0.75, 2])
    assert (found["counts"][0], found["counts"][4], found["counts"][-1]) == (1, 1, 1)
    assert len(found["edges"]) == len(found["counts"])
    assert found["edges"][-1] == task.round_seconds.edges[-1]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (math.inf, None),
        (math.nan, None),
        (10**400, None),
        (True, True),
        (("a", 1.5), ["a", 1.5]),
        ({"a": {"b": None}}, {"a": {"b": None}}),
        ("x" * 1000, "x" * 500),
        (b"bytes", "b'bytes'"),
        ([[[[["deep"]]]]], [[[["['deep']"]]]]),
        (list(range(1000)), list(range(100))),
    ],
)
def test_what_others_make_is_cut_to_what_json_holds(value, expected):
    found = snapshot.plain(value)
    assert found == expected
    json.dumps(found, allow_nan=False)


def test_scalars_of_numpy_become_numbers():
    found = snapshot.plain({"a": np.float64(1.5), "b": np.float32(0.5), "c": np.int64(3)})
    assert found == {"a": 1.5, "b": 0.5, "c": 3}
    json.dumps(found)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
