"""Tests of tff_dpftrl.runtime.serving: a task served to devices, ended, and gone on with."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
import urllib.request

import pytest
import tornado.netutil

from tests.runtime.plans import small_tasks
from tests.runtime.tasks import number_devices, small_folder
from tff_dpftrl.accounting import statement_sentences as sentences
from tff_dpftrl.reports import markup
from tff_dpftrl.runtime import serving, signing_keys
from tff_dpftrl.runtime.actors import events
from tff_dpftrl.runtime.protocol import attestation
from tff_dpftrl.runtime.server import server, server_folder
from tff_dpftrl.runtime.status import access
from tff_dpftrl.runtime.tasks import planned_task, task_folder
from verification import memory_store

_CONFIG = small_folder.CONFIG.changed(over_selection=1.0, least_fraction=1.0, selection_timeout=5.0)
_SETTINGS = serving.Settings(round_seconds=0.5, population_size=8)


@pytest.fixture(scope="module", name="task")
def _task(tmp_path_factory):
    path = tmp_path_factory.mktemp("tasks") / "small"
    terms = dataclasses.replace(small_folder.TERMS, vocabulary_is_public=False)
    small_folder.write(path, small_tasks.ROUNDS["blt"](), terms=terms, config=_CONFIG)
    return planned_task.load(path)


@pytest.fixture(name="folder")
def _folder(tmp_path):
    folder = server_folder.of(tmp_path / "server")
    folder.make(("localhost", "127.0.0.1"))
    return folder


def _serving(tasks, store, folder, lines=None, **changes):
    issuer = signing_keys.load_public(folder.issuer_public)
    return serving.Serving(
        tasks if isinstance(tasks, tuple) else [tasks],
        store,
        folder,
        dataclasses.replace(_SETTINGS, **changes),
        attestation=attestation.SignedTokens([issuer], clock=time.time),
        progress=(lambda line: None) if lines is None else lines.append,
    )


async def _until(condition):
    for _ in range(600):
        if await asyncio.to_thread(condition):
            return
        await asyncio.sleep(0.05)
    raise AssertionError("nothing came of it")


def _run(served, condition, folder):
    async def run():
        await served.start()
        try:
            with number_devices.running(folder):
                await _until(condition)
                pages = []

                def knows_privacy():
                    pages.append(urllib.request.urlopen(served.page_address).read().decode())
                    return "ε = " in pages[-1]

                await _until(knows_privacy)
                # The devices' threads end while the server still answers them.
                await served.stop()
        finally:
            await served.stop()
        return pages[-1]

    return asyncio.run(run())


def test_rounds_are_committed_told_and_gone_on_with(task, folder):
    store, lines = memory_store.MemoryStore(), []

    def rounds():
        return store.last_commit("tests", "small").rounds_done

    served = _serving(task, store, folder, lines)
    page = _run(served, lambda: rounds() >= 2, folder)
    assert "<h2>Task small</h2>" in page
    assert "(MinS)</th><td>2</td>" in page
    assert "of the budget of ε = " in page
    assert markup.text(sentences.PRIVATE_VOCABULARY) in page
    so_far = task.privacy(store.last_commit("tests", "small"))
    assert 0 < so_far.epsilon <= so_far.budget_epsilon
    assert (so_far.contradicting_reports, so_far.unknown_rounds) == (0, 0)
    assert not folder.endpoint.exists() and folder.sessions.exists()
    assert folder.day_curve_of("tests").exists()
    repeats = f"small: {task_folder.REPEATS_NOISE}"  # Its seed is given, for tests.
    assert lines[:2] == ["small: 6 rounds.", repeats]
    (first,) = [line for line in lines if "round 1 of 6 committed" in line]
    assert "3 reports" in first and "ε so far" in first
    done = rounds()

    lines.clear()
    again = _serving(task, store, folder, lines, status_address=None)

    async def to_the_end():
        await again.start()
        try:
            assert again.page_address == ""
            with number_devices.running(folder):
                await asyncio.wait_for(again.done.wait(), 60)
                await again.stop()
        finally:
            await again.stop()

    asyncio.run(to_the_end())
    assert lines[:2] == [f"small: goes on after round {done} of 6.", repeats]
    # A look at the store after round 5 can find round 6 there before its event is told.
    assert "small: no further round: all 6 declared rounds are done." in lines[-2:]
    plan = task.folder.terms.server_plan
    assert json.loads(folder.rounds.read_text()) == {"tests/small": [plan, 6]}
    history = store.history("tests", "small")
    assert [row["round"] for row in history] == list(range(6))
    assert all(row["participation/min_sep"] in (None, 2, 3, 4, 5) for row in history)


def test_a_store_that_was_set_back_is_refused(task, folder):
    plan = task.folder.terms.server_plan
    folder.keep_rounds({"tests/small": (plan, 2)})
    folder.keep_rounds({"tests/another": ("its plan", 5)})

    async def start():
        served = _serving(task, memory_store.MemoryStore(), folder)
        try:
            await served.start()
        finally:
            await served.stop()

    with pytest.raises(ValueError, match="has 0 rounds of the task 'small', and 2 were committed"):
        asyncio.run(start())
    assert not folder.endpoint.exists()
    # As many, or more, or a task that was made anew.
    folder.check_rounds("tests", "small", plan, 2)
    folder.check_rounds("tests", "small", "another plan", 0)
    folder.rounds.write_text("{")
    with pytest.raises(ValueError, match="rounds.json is damaged"):
        folder.check_rounds("tests", "small", plan, 9)


def test_a_second_server_is_refused(task, folder, tmp_path):
    store = memory_store.MemoryStore()
    other = server_folder.of(tmp_path / "other")
    other.make(("localhost",))

    async def run():
        first = _serving(task, store, folder)
        await first.start()
        try:
            with pytest.raises(server.ServerError, match="two servers for one population"):
                await _serving(task, store, other).start()
            assert not other.endpoint.exists()
            assert folder.address() == first.address
        finally:
            await first.stop()

    asyncio.run(run())
    with pytest.raises(ValueError, match="No server runs with the folder"):
        folder.address()


@pytest.mark.slow
def test_an_open_status_page_is_warned_of(task, folder, monkeypatch):
    bind = tornado.netutil.bind_sockets
    monkeypatch.setattr(
        tornado.netutil, "bind_sockets", lambda port, _, family: bind(port, "127.0.0.1", family)
    )

    async def started(**settings):
        lines = []
        served = _serving(task, memory_store.MemoryStore(), folder, lines, **settings)
        try:
            await served.start()
        finally:
            await served.stop()
        return [line for line in lines if line.startswith("Warning: whoever reaches http://")]

    both = {"status_access": access.Access(is_open=True)}
    assert asyncio.run(started(status_address="10.0.0.1:0", **both))
    assert not asyncio.run(started(**both))
    with pytest.raises(ValueError, match="is for other machines"):
        asyncio.run(started(status_address="10.0.0.1:0"))


@pytest.mark.slow
def test_a_server_that_is_refused_leaves_the_files_of_the_other_alone(task, folder):
    store = memory_store.MemoryStore()

    async def run():
        first = _serving(task, store, folder)
        await first.start()
        try:
            with pytest.raises(server.ServerError, match="two servers for one population"):
                second = _serving(task, store, folder)
                second.seen["tests"].session_table.add("-v[]+^")
                await second.start()
            assert folder.address() == first.address
            first.seen["tests"].session_table.add("-v[]+^")
            first.seen["tests"].session_table.add("-v[]+#")
        finally:
            await first.stop()
        assert first.seen["tests"].session_table.total == 2

    asyncio.run(run())
    assert not folder.endpoint.exists()


def test_a_line_is_said_once(task, folder):
    lines = []
    seen = _serving(task, memory_store.MemoryStore(), folder, lines).seen["tests"]

    def released(index):
        return events.RoundReleased("small", index, f"attempt {index}", {"devices/reports": 3})

    async def run():
        seen.on_event(0.0, events.Leading("tests", 2))
        seen.on_event(1.0, released(0))  # Of a server before this one, which has said so.
        for waiting in (0, 0, 1, 1):
            seen.on_event(2.0, events.TooFewDevices("small", waiting, 3))
        for _ in range(2):
            seen.on_event(3.0, released(1))
        seen.on_event(4.0, events.PartyAway("small", 1, 1))
        seen.on_event(5.0, events.PartyAway("small", 0, 1, to_skip=3))

    asyncio.run(run())
    assert [line.partition(":")[2][:17] for line in lines if "reports" in line] == [
        " round 2 of 6 com"
    ]
    assert sum("devices wait" in line for line in lines) == 2
    assert lines[-2].startswith("small: 1 of 1 noise parties that the plan names are away")
    assert lines[-1].startswith("small: rounds to skip: 3. A noise party has given their noise")


def test_a_commit_says_what_contradicts_the_declared_participation(task, folder):
    lines = []
    seen = _serving(task, memory_store.MemoryStore(), folder, lines).seen["tests"]
    metrics = {"devices/reports": 3, "participation/contradicting_reports": 2}

    async def run():
        for index, unknown in enumerate((0, 0, 1)):  # The first is from before this server.
            told = {**metrics, "participation/unknown_rounds": unknown}
            seen.on_event(0.0, events.RoundReleased("small", index, f"attempt {index}", told))

    asyncio.run(run())
    first, second = lines
    assert "2 reports against the declared participation so far" in first
    assert "impossible" not in first
    assert "1 rounds with impossible participation histograms so far" in second


@pytest.mark.slow  # It makes a second task.
def test_devices_in_two_populations_of_one_server_are_served_in_both(task, folder, tmp_path):
    other = {"population": "others"}
    small_folder.write_plans(
        tmp_path / "other",
        small_folder.plans(small_tasks.ROUNDS["blt"](), **other),
        terms=dataclasses.replace(small_folder.TERMS, **other),
        config=_CONFIG.changed(**other),
    )
    store, lines = memory_store.MemoryStore(), []
    served = _serving(
        (task, planned_task.load(tmp_path / "other")),
        store,
        folder,
        lines,
        population_size={"tests": 8.0, "others": 4.0},
        shares={"others": 0.2},
    )

    def is_done():
        return all(store.last_commit(name, "small").rounds_done >= 2 for name in served.seen)

    async def run():
        await served.start()
        try:
            with number_devices.running(folder, count=4, populations=("tests", "others")):
                await _until(is_done)
                front = urllib.request.urlopen
                first = await asyncio.to_thread(lambda: front(served.page_address).read().decode())
                assert '<a href="0/">tests</a>' in first and '<a href="1/">others</a>' in first
                for i, name in enumerate(served.seen):
                    url = f"{served.page_address}/{i}/"
                    text = await asyncio.to_thread(lambda url=url: front(url).read().decode())
                    assert f"<h1>{name}</h1>" in text
                    assert served.seen[name].series.total("reports") >= 3
                await served.stop()
        finally:
            await served.stop()

    asyncio.run(run())
    assert lines[:4:2] == ["tests, small: 6 rounds.", "others, small: 6 rounds."]
    assert any(line.startswith("others, small: round 1 of 6 committed") for line in lines)
    assert set(json.loads(folder.rounds.read_text())) == {"tests/small", "others/small"}
    assert all(folder.sessions_of(name).exists() for name in served.seen)


def test_devices_that_have_shown_a_token_count_for_the_curve_of_the_day_once(task, folder):
    came = []
    served = _serving(task, memory_store.MemoryStore(), folder)
    seen = serving.LoggedObservations(
        served.seen["tests"].served,
        clock=time.time,
        progress=lambda line: None,
        released=lambda name: None,
        checked_in=lambda: came.append(1),
    )
    seen.waiting()
    seen.sent_away("enough devices are waiting", True)  # It was counted when it began to wait.
    assert len(came) == 1
    seen.sent_away("too many devices check in", False)  # A flood needs no token for this.
    seen.sent_away("it has to rest", False)
    assert len(came) == 1


def test_a_given_curve_steers_until_another_is_learned(task, folder):
    curve = tuple(range(1, 25))
    served = _serving(task, memory_store.MemoryStore(), folder, availability=curve)
    (one,) = served._served
    assert one.pace.steering.availability == curve


def test_what_cannot_be_served_is_named(task, folder):
    with pytest.raises(ValueError, match=r"shares name the populations \['others'\]"):
        _serving(task, memory_store.MemoryStore(), folder, shares={"others": 0.5})
    with pytest.raises(ValueError, match="has a name twice"):
        serving.Serving(
            [task, task], memory_store.MemoryStore(), folder, _SETTINGS, progress=lambda line: None
        )
    with pytest.raises(ValueError, match="--server-folder"):
        serving.folder_for("postgresql://user@host/name", None)
    assert serving.folder_for("store", None).path.parts == ("store", "server")


def test_a_server_folder_is_made_once(tmp_path):
    folder = server_folder.of(tmp_path / "server")
    folder.make(("localhost",))
    folder.keep_plan_keys(small_tasks.KEYS)
    before = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=r"names has \['elsewhere'\]"):
        folder.make(("elsewhere",))
    folder.make(None)
    folder.keep_plan_keys(small_tasks.KEYS)
    assert {path: path.read_bytes() for path in before} == before
    assert len(folder.plan_keys) == len(small_tasks.KEYS)
    for damaged in ("", "[]", "{}"):
        folder.endpoint.write_text(damaged)
        with pytest.raises(ValueError, match="endpoint.json holds no address of a server"):
            folder.address()
    for path in (folder.private_key, folder.issuer):
        assert path.stat().st_mode & 0o077 == 0
