"""Tests of parts of a task's report; `making_test` writes a whole one."""

import types

import pytest

from tff_dpftrl.runtime.store import interface
from tff_dpftrl.runtime.tasks import task_report
from verification import memory_store


@pytest.fixture
def store():
    return memory_store.MemoryStore()


def _commit(store, task, *all_metrics):
    store.add_task("tests", task, model=b"", state=b"")
    epoch = store.acquire("tests", "me", now=0.0, duration=10.0).epoch
    for index, metrics in enumerate(all_metrics):
        store.commit(
            "tests",
            task,
            round_index=index,
            epoch=epoch,
            model=b"",
            state=b"",
            metrics=metrics,
            now=1.0 + index,
        )


def test_rounds_have_the_same_columns(store):
    _commit(store, "one", {"loss": 2.0}, {"loss": 1.0, "accuracy": 0.5})
    rows = task_report.rounds(store, "tests", "one")
    assert [row["round"] for row in rows] == [1, 2]
    assert [list(row) for row in rows] == [
        ["task", "round", "epoch", "committed_at", "loss", "accuracy"]
    ] * 2
    assert [row["accuracy"] for row in rows] == [None, 0.5]
    with pytest.raises(interface.UnknownTask):
        task_report.rounds(store, "tests", "two")


def test_tasks_that_train_on_the_same_devices_are_composed(store):
    _commit(store, "one", {"privacy/rho_zcdp": 0.5})
    _commit(store, "two", {"privacy/rho_zcdp": 0.5}, {"privacy/rho_zcdp": 0.75})
    _commit(store, "without noise", {"privacy/rho_zcdp": None})
    _commit(store, "evaluates", {"loss": 1.0})
    _commit(store, "not begun")
    assert task_report.others(store, "tests", "one") == {"two": 0.75, "without noise": None}


def test_a_line_says_what_is_promised():
    statement = types.SimpleNamespace(
        has_guarantee=False, no_guarantee=["No noise was added."], epsilon=8.0, delta=1e-5
    )
    line = "Privacy: NO guarantee: No noise was added; see privacy_statement.md."
    assert task_report.privacy_line(statement) == line
    statement.has_guarantee = True
    line = "Privacy: ε = 8 at δ = 1e-05, per device; see privacy_statement.md."
    assert task_report.privacy_line(statement) == line
