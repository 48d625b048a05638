import math
import sys

import pytest

from tff_dpftrl.reports import page as report_page
from tff_dpftrl.runtime.status import past
from verification import memory_store


@pytest.fixture(name="drawn")
def _drawn(monkeypatch):
    """Curves by title, in place of pictures."""
    found = {}

    def chart(series, *, title, **labels):
        found[title] = series
        return f"<{title}>"

    monkeypatch.setattr(report_page, "chart", chart)
    return found


def test_rounds_of_a_store_are_drawn():
    with memory_store.MemoryStore() as store:
        store.add_task("keyboard", "train", model=b"", state=b"")
        epoch = store.acquire("keyboard", "me", now=0, duration=100).epoch
        for i in range(3):
            metrics = {"train/top1": i / 4, "_$\\frac{<b>": 1.0, "attempt": f"a/{i}"}
            common = {"round_index": i, "epoch": epoch, "model": b"", "state": b""}
            store.commit("keyboard", "train", metrics=metrics, now=10.0 * i, **common)
        found = past.of_history(store.history("keyboard", "train"))
    assert found.num_released == 3
    assert [row["round"] for row in found.last] == [2, 1, 0]
    assert found.metrics == {"train/top1": 0.5, "_$\\frac{<b>": 1.0}
    assert found.pictures.count('src="data:image/png;base64,') == 2


def test_a_skipped_round_is_a_row_but_no_point(drawn):
    rows = [{"round": i, "committed_at": 5.0 * i, "loss": 2.0 - i} for i in range(2)]
    found = past.of_history([*rows, {"round": 2, "committed_at": 9, "skipped": True}])
    assert len(found.last) == 3
    assert (found.num_released, found.metrics) == (2, {"loss": 1.0})
    assert drawn["Committed rounds"]["committed"] == ([0.0, 5 / 3600], [1, 2])
    assert drawn["Loss"] == {"loss": ((1, 2), (2, 1))}


def test_no_round_is_no_picture():
    assert past.of_history([]) == past.Past(0, [], {}, "")


@pytest.mark.parametrize("num_rounds", [500, 501, 999, 1000, 43_210])
def test_many_rounds_become_means_of_neighbours(drawn, num_rounds):
    rows = [
        {"round": i, "committed_at": i, "accuracy": float(i), "loss": 1.0}
        for i in range(num_rounds)
    ]
    found = past.of_history(rows)
    assert len(found.last) == 10
    assert set(drawn) == {"Committed rounds", "Accuracy"}
    ((xs, ys),) = drawn["Accuracy"].values()
    assert 250 <= len(xs) == len(ys) <= 500
    assert len(drawn["Committed rounds"]["committed"][0]) == len(xs)
    assert xs[-1] == num_rounds
    assert ys[0] == (math.ceil(num_rounds / 500) - 1) / 2


def test_values_that_are_no_finite_numbers_are_left_out(drawn):
    odd = {"a": math.nan, "b": "<script>", "c": [1], "d": True, "e": 10**400, "f": 1}
    rows = [{"round": i, "committed_at": i, "top1": math.nan} | odd for i in range(3)]
    assert past.of_history(rows).metrics == {"f": 1}
    assert set(drawn) == {"Committed rounds"}


def test_there_are_only_so_many_metrics_and_curves_with_names_of_so_many_letters(drawn):
    names = [f"loss {i:02d}" + "x" * 1000 for i in range(500)]
    rows = [{"round": i, "committed_at": i, **dict.fromkeys(names, 1.0)} for i in range(2)]
    metrics = past.of_history(rows).metrics
    assert 60 <= len(metrics) <= 64 and {len(name) for name in metrics} == {80}
    assert len(drawn["Loss"]) == 6 and {len(name) for name in drawn["Loss"]} == {40}


def test_without_matplotlib_there_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    rows = [{"round": i, "committed_at": i, "loss": 1.0} for i in range(2)]
    found = past.of_history(rows)
    assert "Pictures need matplotlib" in found.pictures and "pip install" in found.pictures
    assert found.metrics == {"loss": 1.0}
