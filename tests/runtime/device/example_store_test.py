"""Tests of tff_dpftrl.runtime.device.example_store."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sqlite3
import stat
import time

import hypothesis
import pytest
from hypothesis import strategies as st

from tff_dpftrl.runtime.device import example_store, participation_timer, private_database

# Without shrinking, which takes minutes where every step writes files.
deterministic = hypothesis.settings(
    deadline=None,
    derandomize=True,
    max_examples=12,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)

_BEGIN = 1_700_000_000.0


@pytest.fixture(autouse=True, scope="module")
def _no_power_cuts():
    """Tests kill processes, not the machine: they need not wait for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(private_database, "_SYNCHRONOUS", "OFF")
        yield


class _Clock:
    def __init__(self):
        self.now = _BEGIN

    def __call__(self):
        return self.now


@pytest.fixture(name="clock")
def _clock():
    return _Clock()


def _open(path, clock, **retention):
    return example_store.SqliteExampleStore.open(
        path, clock=clock, retention=example_store.Retention(**retention)
    )


@pytest.fixture(name="store")
def _store(tmp_path, clock):
    store = _open(tmp_path / "store", clock, max_age_s=320.0, max_bytes=10_000)
    yield store
    store.close()


def _bytes_of_folder(folder):
    return b"".join(path.read_bytes() for path in folder.iterdir())


def test_the_newest_come_first_and_no_more_than_asked(store, clock):
    store.add("typed", [b"1", b"2"])
    clock.now += 1
    store.add("typed", [b"3"])
    store.add("typed", [b"0"], recorded=_BEGIN - 5)
    store.add("other", [b"x"])
    assert store.select("typed", max_examples=9) == [b"3", b"2", b"1", b"0"]
    assert store.select("typed", max_examples=2) == [b"3", b"2"]
    assert store.select("typed", max_examples=9, recorded_since=_BEGIN) == [b"3", b"2", b"1"]
    assert store.select("typed", max_examples=9, recorded_since=_BEGIN + 2) == []
    assert store.select("nothing", max_examples=9) == []
    assert store.counts() == {"other": 1, "typed": 4}


def test_what_expired_is_not_read_and_then_deleted(store, clock, tmp_path):
    store.add("typed", [b"<old>"])
    clock.now += 320.0
    assert store.select("typed", max_examples=9) == [b"<old>"]
    clock.now += 0.5
    assert store.select("typed", max_examples=9) == []
    assert store.counts() == {"typed": 1}
    store.expire()
    assert store.counts() == {}
    assert b"<old>" not in _bytes_of_folder(tmp_path)


def test_opening_deletes_what_expired_while_the_device_was_off(tmp_path, clock):
    _open(tmp_path / "store", clock, max_age_s=3600.0).close()
    with contextlib.closing(_open(tmp_path / "store", clock, max_age_s=3600.0)) as store:
        store.add("typed", [b"<old>"])
        clock.now += 60.0
        store.add("typed", [b"<young>"])
    clock.now += 3600.0 - 30.0
    assert b"<old>" in _bytes_of_folder(tmp_path)
    with contextlib.closing(_open(tmp_path / "store", clock, max_age_s=3600.0)) as store:
        assert store.counts() == {}  # The young one would have expired within 1/32 of an hour.
    assert b"<old>" not in _bytes_of_folder(tmp_path)


def test_a_device_that_waits_deletes_once_a_day(store, clock, tmp_path):
    waits, elapsed = [], _Clock()

    def wait(seconds):
        waits.append(seconds)
        elapsed.now += seconds

    expiry = example_store.DailyExpiry(store, wait, elapsed)
    store.add("typed", [b"<old>"])
    clock.now += 1000.0
    expiry(80_000.0)
    assert store.counts() == {"typed": 1}
    expiry(80_000.0)  # Ends a day after the beginning: time to delete.
    assert waits == [80_000.0, 6_400.0]
    expiry(1.0)
    assert b"<old>" not in _bytes_of_folder(tmp_path)
    assert waits[2:] == [1.0]


def test_a_device_goes_on_where_nothing_can_be_deleted(store, monkeypatch, caplog):
    def fail():
        raise OSError("disk full")

    monkeypatch.setattr(store, "expire", fail)
    elapsed, waits = _Clock(), []
    expiry = example_store.DailyExpiry(store, waits.append, elapsed)
    elapsed.now += 90_000.0
    expiry(5.0)
    assert waits == [5.0]
    assert "Expired examples cannot be deleted: disk full" in caplog.text


def test_what_expires_soon_goes_with_what_expired(store, clock):
    for age in (309, 311):
        store.add("typed", [b"%d" % age], recorded=clock.now - age)
    assert store.select("typed", max_examples=9) == [b"309", b"311"]
    store.add("typed", [b"321"], recorded=clock.now - 321)
    assert store.select("typed", max_examples=9) == [b"309"]
    assert store.counts() == {"typed": 1}
    clock.now += 10.0  # 319 s: may stay, and does, since nothing has expired.
    store.expire()
    assert store.counts() == {"typed": 1}


def test_the_oldest_give_way_when_it_is_full(store, clock):
    for number in range(12):
        clock.now += 1
        store.add("ab"[number % 2], [b"%02d" % number + b"." * 918])  # 1,000 with the row's own.
        total = sum(store.counts().values())
        # Ten fit; the eleventh leaves the newest that need at most 8,750.
        assert total == (number + 1 if number < 10 else number - 2)
    assert [e[:2] for e in store.select("a", max_examples=99)] == [b"10", b"08", b"06", b"04"]
    assert [e[:2] for e in store.select("b", max_examples=99)] == [
        b"11",
        b"09",
        b"07",
        b"05",
        b"03",
    ]


def test_one_large_example_stays_alone(store, clock):
    store.add("a", [b"." * 500])
    clock.now += 1
    store.add("a", [b"x" * 9_900])
    assert [len(e) for e in store.select("a", max_examples=9)] == [9_900]
    with pytest.raises(ValueError, match="An example of 9921 bytes.*max_bytes=10000"):
        store.add("a", [b"y", b"x" * 9_921])
    assert store.counts() == {"a": 1}  # All or none.


def test_the_file_is_not_much_larger_than_the_cap(tmp_path, clock):
    store = _open(tmp_path / "store", clock, max_bytes=200_000)
    for size in (20, 300, 5_000):
        for _ in range(5):
            clock.now += 1
            store.add("typed", [os.urandom(size)] * (200_000 // (size + 80) // 4))
            assert (tmp_path / "store").stat().st_size < 1.4 * 200_000 + 50_000
    store.close()


def test_clearing_leaves_nothing_of_a_collection_in_the_file(store, tmp_path):
    for _ in range(3):
        store.add("typed", [b"<secret>" + b"." * 100] * 6)
        store.add("kept", [b"<kept>" + b"." * 90] * 6)
    store.clear("typed")
    content = _bytes_of_folder(tmp_path)
    assert b"<secret>" not in content
    assert content.count(b"<kept>") >= 18
    assert store.counts() == {"kept": 18}
    store.clear()
    assert b"<kept>" not in _bytes_of_folder(tmp_path)
    assert store.counts() == {}


_OPERATIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"), st.sampled_from("ab"), st.integers(1, 8), st.integers(0, 400),
            st.floats(0, 350),
        ),
        st.tuples(st.just("wait"), st.floats(0, 200)),
        st.tuples(st.just("clear"), st.sampled_from(["a", "b", None])),
        st.just(("expire",)),
        st.just(("restart",)),
    ),
    min_size=5,
    max_size=24,
)  # fmt: skip


@deterministic
@hypothesis.example(
    [
        ("add", "a", 8, 290, 0.0),
        ("wait", 100.0),
        ("add", "b", 8, 290, 0.0),  # For which some of the first go,
        ("clear", "b"),  # although there would be room for them now.
    ]
)
@hypothesis.given(_OPERATIONS)
def test_every_example_is_either_read_or_gone(tmp_path_factory, operations):
    folder, clock = tmp_path_factory.mktemp("device"), _Clock()
    retention = {"max_age_s": 320.0, "max_bytes": 6_000}
    store = _open(folder / "store", clock, **retention)
    added = []  # (recorded, number, collection, example), the ones that were not cleared.
    excused = set()
    number = 0
    for name, *values in operations:
        if name == "add":
            collection, count, size, age = values
            examples = []
            for _ in range(count):
                number += 1
                examples.append(b"<%07d>" % number + b"." * size + b"<%07d>" % number)
                added.append((clock.now - age, number, collection, examples[-1]))
            store.add(collection, examples, recorded=clock.now - age)
        elif name == "wait":
            clock.now += values[0]
        elif name == "clear":
            store.clear(*values)
            added = [row for row in added if values[0] not in (None, row[2])]
        elif name == "expire":
            store.expire()
        else:
            store.close()
            store = _open(folder / "store", clock, **retention)
        present = {c: store.select(c, max_examples=10**6) for c in "ab"}
        newest_first = sorted(added, reverse=True)
        for collection, examples in present.items():
            of_it = [row for row in newest_first if row[2] == collection]
            chosen = [row for row in of_it if row[3] in set(examples)]
            assert examples == [row[3] for row in chosen]
            assert all(row[0] >= clock.now - 320.0 for row in chosen)
        needed = 0
        for recorded, _, collection, example in newest_first:  # None is lost without a reason.
            needed += len(example) + 80
            if needed > 6_000 * 7 / 8 or recorded < clock.now - 310.0:
                excused.add(example)  # For good: what made it go may be cleared later.
            assert example in present[collection] or example in excused
        if name in ("add", "clear", "expire"):
            live = {e for examples in present.values() for e in examples}
            found = set(re.findall(rb"<\d{7}>", _bytes_of_folder(folder)))
            allowed = {row[3][:9] for row in added if row[0] >= clock.now - 320.0}
            assert found == {e[:9] for e in live}
            assert found <= allowed
            assert sum(len(e) + 80 for e in live) <= 6_000
    store.close()


def test_a_rewriting_that_failed_is_made_up_for(tmp_path, clock, monkeypatch):
    store = _open(tmp_path / "store", clock, max_age_s=10.0)

    def fail(self):
        raise OSError("disk full")

    store.add("typed", [b"<secret>"])
    clock.now += 11
    with monkeypatch.context() as patch:
        patch.setattr(private_database.PrivateDatabase, "rewrite", fail)
        store.add("typed", [b"new"])  # Adding works all the same,
        with pytest.raises(OSError, match="disk full"):
            store.clear("nothing")  # who clears is told,
    calls = []
    rewrite = private_database.PrivateDatabase.rewrite
    monkeypatch.setattr(
        private_database.PrivateDatabase, "rewrite", lambda self: (calls.append(1), rewrite(self))
    )
    store.close()
    store = _open(tmp_path / "store", clock, max_age_s=10.0)
    store.add("typed", [b"newer"])  # and the next writer does it, once.
    store.add("typed", [b"newest"])
    assert calls == [1]
    store.close()


def test_processes_write_and_read_at_the_same_time(tmp_path, clock):
    path = tmp_path / "store"
    children = []
    for child in range(4):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                store = _open(path, clock, max_bytes=20_000)
                for number in range(6):
                    store.add(f"of {child}", [b"%d %d" % (child, number)])
                    seen = store.select(f"of {child}", max_examples=99)
                    assert seen == [b"%d %d" % (child, n) for n in range(number, -1, -1)]
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0] * 4
    store = _open(path, clock, max_bytes=20_000)
    assert store.counts() == {f"of {child}": 6 for child in range(4)}
    store.close()


def test_a_kill_at_any_time_leaves_a_whole_store(tmp_path, clock):
    path = tmp_path / "store"
    for attempt in range(5):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            store = _open(path, clock, max_bytes=3_000)
            for number in range(10_000):
                tag = b"<%d%06d>" % (attempt, number)
                store.add("typed", [tag + b"." * (number % 300)] * 2)
                os.write(writer, b"%06d" % number)
            os._exit(0)
        os.close(writer)
        os.read(reader, 6)
        time.sleep(0.02 * attempt)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        last = os.read(reader, 60_000)[-6:]
        store = _open(path, clock, max_bytes=3_000)
        examples = store.select("typed", max_examples=999)
        if last:  # What was confirmed is there, or what came just after.
            assert examples[0][:9] >= b"<%d" % attempt + last + b">"
        assert examples[0] == examples[1]  # All of one call, or none.
        store.clear("nothing")  # The next writing makes up for what was interrupted.
        found = set(re.findall(rb"<\d{7}>", _bytes_of_folder(tmp_path)))
        assert found == {e[:9] for e in examples}
        store.close()
        os.close(reader)


def test_the_file_is_for_its_owner_only(tmp_path, clock):
    path = tmp_path / "store"
    before = os.umask(0)
    try:
        _open(path, clock).close()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        path.chmod(0o644)
        _open(path, clock).close()
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["store"]


def _other_database(path):
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE photos (id INTEGER)")
    connection.commit()
    connection.close()


def _other_kind(path):
    participation_timer.ParticipationTimer.open(path, clock=_Clock()).close()


def _newer_format(path):
    _open(path, _Clock()).close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 2")
    connection.close()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path.write_bytes(b"text, " * 900), "is not an example store"),
        (_other_database, "is not an example store"),
        (_other_kind, "is not an example store"),
        (_newer_format, "is an example store of format 2, and this version knows format 1"),
        (lambda path: path.mkdir(), "is not an example store, and not a file"),
    ],
)
def test_a_foreign_file_gets_one_clear_line_and_is_left_alone(tmp_path, clock, make, reason):
    path = tmp_path / "store"
    make(path)
    if path.is_file():
        path.chmod(0o644)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(ValueError, match=f"{path} {reason}") as refusal:
        _open(path, clock)
    assert "\n" not in str(refusal.value)
    assert (path.read_bytes() if path.is_file() else None) == before
    assert not path.is_file() or stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_missing_folder_is_named(tmp_path, clock):
    with pytest.raises(ValueError, match=f"there is no folder {tmp_path / 'none'}"):
        _open(tmp_path / "none" / "store", clock)


def test_damage_is_named_when_it_is_met(tmp_path, clock):
    path = tmp_path / "store"
    store = _open(path, clock, max_bytes=10**6)
    store.add("typed", [b"." * 1_000] * 100)
    store.close()
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{path}, an example store, is damaged") as refusal:
        _open(path, clock)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.select("a", max_examples=0), "max_examples"),
        (lambda s: s.select("", max_examples=1), "collection"),
        (lambda s: s.select("a" * 201, max_examples=1), "collection"),
        (lambda s: s.select("a", max_examples=1, recorded_since=float("nan")), "recorded_since"),
        (lambda s: s.add("a", ["text"]), "examples must be bytes, got a str"),
        (lambda s: s.add("a", [b"x"], recorded=_BEGIN + 1), "recorded=.* in the future"),
        (lambda s: example_store.Retention(max_age_s=0), "max_age_s"),
        (lambda s: example_store.Retention(max_bytes=0), "max_bytes"),
    ],
)
def test_bad_arguments_are_named(store, call, message):
    with pytest.raises(ValueError, match=message):
        call(store)
    assert store.counts() == {}
