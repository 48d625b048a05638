"""What is kept on a server and a device when the disk fills up, at every page, or is read-only."""

from __future__ import annotations

import contextlib
import itertools
import json
import re

import pytest

from tests import small_disk
from tests.runtime.plans import small_tasks
from tests.runtime.tasks import small_folder
from tff_dpftrl.runtime import participation_histograms, signing_keys
from tff_dpftrl.runtime.device import example_store, participation_timer
from tff_dpftrl.runtime.server import server_folder
from tff_dpftrl.runtime.status import session_table
from tff_dpftrl.runtime.store import interface, sql
from tff_dpftrl.runtime.tasks import planned_task

disk = small_disk.disk


def _check_line(failure, reason="full|No space left|I/O error|unable to open"):
    """What a user is told is one line that says why."""
    said = str(failure)
    assert re.search(reason, said) and "\n" not in said and "secret" not in said, said


_ROUNDS = 4


def _run_rounds(folder, confirmed):
    """Adds a task and commits its rounds; goes on where it was."""
    with sql.SqlStore(folder / "store") as store:
        with contextlib.suppress(interface.TaskExists):
            store.add_task("keyboard", "task", model=b"0", state=b"secret")
        epoch = store.acquire("keyboard", f"{len(confirmed)}", now=0.0, duration=1.0).epoch
        for t in range(store.last_commit("keyboard", "task").rounds_done, _ROUNDS):
            after = b"%d" % (t + 1) * 3000
            store.commit(
                "keyboard",
                "task",
                round_index=t,
                epoch=epoch,
                model=after,
                state=b"secret" + after,
                metrics={"loss": t},
                now=0.0,
            )
            confirmed.append(t)
        store.release("keyboard", f"{len(confirmed)}", epoch)


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_store_keeps_what_it_confirmed_on_a_disk_that_fills_up(disk, step):
    confirmed = []
    failures = set()
    pages = itertools.count(0, step)
    for folder, failure in small_disk.at_every_page(
        disk, lambda f: _run_rounds(f, confirmed), pages
    ):
        if failure is not None:
            assert isinstance(failure, interface.StoreError)
            _check_line(failure)
            failures.add(len(confirmed))
            with sql.SqlStore(folder / "store") as store:
                with contextlib.suppress(interface.UnknownTask):
                    last = store.last_commit("keyboard", "task")
                    assert last.rounds_done - len(confirmed) in (0, 1)
                    if last.rounds_done:
                        assert last.model == b"%d" % last.rounds_done * 3000
                        assert last.state == b"secret" + last.model
                lease = store.lease("keyboard")
            if lease is not None and lease.owner:
                with sql.SqlStore(folder / "store") as store:
                    store.release("keyboard", lease.owner, lease.epoch)
            _run_rounds(folder, confirmed)
        with sql.SqlStore(folder / "store") as store:
            rounds = [row["round"] for row in store.history("keyboard", "task")]
        assert rounds == list(range(_ROUNDS))
        confirmed.clear()
    assert len(failures) >= 3  # Before the first commit, and after some of them.


def test_a_store_on_a_read_only_disk_is_named(disk):
    _run_rounds(disk.folder, [])
    with disk.read_only(), pytest.raises(interface.StoreError) as caught:
        sql.SqlStore(disk.folder / "store")
    _check_line(caught.value, "Cannot write to the store at .*: Read-only file system. Name")


_BUCKETS = participation_histograms.ParticipationBuckets((1, 2, 4, 8), (1, 2, 3))
_RULE = participation_timer.ParticipationRule(min_sep=3, max_participations=9, min_hours=0.0)


def test_a_timer_forgets_no_participation_on_a_disk_that_fills_up(disk):
    recorded = []

    def take_part(folder):
        with contextlib.closing(
            participation_timer.ParticipationTimer.open(folder / "timer", clock=lambda: 0.0)
        ) as timer:
            for number in range(40):
                # Each of a task of its own, so that the file grows.
                name = f"task {number}, with a long name {'x' * 200}"
                timer.record("keyboard", name, 5, _RULE, _BUCKETS)
                recorded.append(name)

    failures = 0
    for folder, failure in small_disk.at_every_page(disk, take_part):
        with contextlib.closing(
            participation_timer.ParticipationTimer.open(folder / "timer", clock=lambda: 0.0)
        ) as timer:
            for name in recorded:
                with pytest.raises(participation_timer.TimerRefusal):
                    timer.check("keyboard", name, 6, _RULE)
            timer.record("keyboard", "another one", 5, _RULE, _BUCKETS)
        if failure is not None:
            _check_line(failure)
            failures += len(recorded) > 0
        recorded.clear()
    assert failures >= 2


def test_examples_come_whole_or_not_at_all_on_a_disk_that_fills_up(disk):
    added = []
    retention = example_store.Retention(max_age_s=1e6, max_bytes=10**6)

    def opened(folder):
        return contextlib.closing(
            example_store.SqliteExampleStore.open(
                folder / "examples", retention=retention, clock=lambda: 1e6
            )
        )

    def add(folder):
        with opened(folder) as store:
            for number in range(5):
                store.add("typed", [b"%d" % number * 3000] * 2)
                added.append(number)

    failures = 0
    for folder, failure in small_disk.at_every_page(disk, add):
        with opened(folder) as store:
            found = [example[:1] for example in store.select("typed", max_examples=99)]
            numbers = sorted(int(first) for first in found)
            assert numbers == [number for number in added for _ in range(2)]
            store.add("typed", [b"more"])
        if failure is not None:
            _check_line(failure)
            failures += len(added) > 0
        added.clear()
    assert failures >= 2


def test_the_files_of_a_server_are_whole_or_not_there_on_a_disk_that_fills_up(disk):
    def make(path):
        folder = server_folder.of(path / "server")
        folder.make(("localhost", "127.0.0.1"))
        folder.keep_plan_keys(small_tasks.KEYS)
        folder.keep_rounds({"task": ("its plan", 3)})
        table = session_table.SessionTable()
        table.add("-v[]+^")
        table.save(folder.sessions)
        folder.write_endpoint("127.0.0.1:1", "")

    failures = 0
    for path, failure in small_disk.at_every_page(disk, make):
        if failure is not None:
            _check_line(failure)
            failures += 1
            folder = server_folder.of(path / "server")
            if folder.rounds.exists():
                assert json.loads(folder.rounds.read_text()) == {"task": ["its plan", 3]}
            if folder.sessions.exists():
                assert session_table.SessionTable.load(folder.sessions).total == 1
            make(path)
        folder = server_folder.of(path / "server")
        assert folder.address() == "127.0.0.1:1"
        assert signing_keys.load_private(folder.issuer).public_key() == signing_keys.load_public(
            folder.issuer_public
        )
        assert not list(folder.path.rglob("*.unfinished"))
    assert failures >= 5


@pytest.mark.slow
def test_a_task_is_whole_or_not_there_on_a_disk_that_fills_up(disk):
    plans = small_folder.plans(small_tasks.ROUNDS["blt"]())

    def write(folder):
        small_folder.write_plans(folder / "task", plans)

    def content(folder):
        return {file.name: file.read_bytes() for file in (folder / "task").iterdir()}

    write(disk.folder)
    assert planned_task.load(disk.folder / "task").name == "small"
    failures = 0
    # Files that grow alike: not each of their pages tells something else.
    for folder, failure in small_disk.at_every_page(disk, write, itertools.count(0, 5)):
        if failure is not None:
            _check_line(failure)
            failures += 1
            assert list(folder.iterdir()) == []
            write(folder)
        assert content(folder) == content(disk.folder)
    assert failures >= 5
