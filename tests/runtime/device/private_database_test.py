"""Tests of tff_dpftrl.runtime.device.private_database, besides those of the files it is for."""

from __future__ import annotations

import random
import re
import threading

import pytest

from tff_dpftrl.runtime.device import private_database

_KIND = private_database.Kind(
    name="a notebook",
    application_id=0x54455354,
    version=1,
    tables="""CREATE TABLE notes (id INTEGER PRIMARY KEY, note BLOB);
CREATE TABLE other (id INTEGER)""",
    if_damaged="Throw it away.",
)


@pytest.fixture(name="path")
def _path(tmp_path, monkeypatch):
    monkeypatch.setattr(private_database, "_SYNCHRONOUS", "OFF")
    return tmp_path / "notes"


def _tags(path):
    return set(re.findall(rb"<\d{6}>", path.read_bytes()))


def _write_and_delete_at_random(database, seed):
    """Returns the tags of the notes that are left."""
    generator, live, number = random.Random(seed), {}, 0
    for _ in range(300):
        with database.transaction() as connection:
            for _ in range(generator.randrange(1, 8)):
                number += 1
                tag = b"<%06d>" % number
                note = tag + b"." * generator.choice([10, 50, 100]) + tag
                row = connection.execute("INSERT INTO notes (note) VALUES (?)", (note,)).lastrowid
                live[row] = tag
            for row in generator.sample(sorted(live), min(generator.randrange(9), len(live))):
                connection.execute("DELETE FROM notes WHERE id = ?", (row,))
                del live[row]
    return set(live.values())


def test_what_is_deleted_is_gone_when_the_file_was_rewritten(path):
    left_by_sqlite = set()
    for seed in range(5):
        path.unlink(missing_ok=True)
        database = private_database.PrivateDatabase.open(path, _KIND)
        live = _write_and_delete_at_random(database, seed)
        left_by_sqlite |= _tags(path) - live
        database.rewrite()
        assert _tags(path) == live
        assert [p.name for p in path.parent.iterdir()] == [path.name]
        database.close()
    # Overwriting rows (secure_delete) is not enough: SQLite leaves copies where it moved them.
    assert left_by_sqlite


def test_a_transaction_is_whole_or_not_there(path):
    database = private_database.PrivateDatabase.open(path, _KIND)
    with pytest.raises(RuntimeError), database.transaction() as connection:
        connection.execute("INSERT INTO notes (note) VALUES (x'00')")
        raise RuntimeError
    assert database.read("SELECT count(*) FROM notes") == [(0,)]
    database.close()


def test_threads_share_a_connection(path):
    database = private_database.PrivateDatabase.open(path, _KIND)

    def count_up():
        for _ in range(20):
            with database.transaction() as connection:
                [(count,)] = connection.execute("SELECT count(*) FROM other")
                connection.execute("INSERT INTO other VALUES (?)", (count,))

    threads = [threading.Thread(target=count_up) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert database.read("SELECT id FROM other ORDER BY id") == [(i,) for i in range(80)]
    database.close()


def test_a_transaction_that_the_disk_has_no_room_for_is_undone(path):
    database = private_database.PrivateDatabase.open(path, _KIND)
    [(pages,)] = database.read("PRAGMA page_count")
    database.read(f"PRAGMA max_page_count = {pages + 2}")
    with (
        pytest.raises(OSError, match=f"{path}, a notebook, cannot be used: .*full"),
        database.transaction() as connection,
    ):
        connection.execute("INSERT INTO other VALUES (1)")
        connection.execute("INSERT INTO notes (note) VALUES (zeroblob(100000))")
    assert database.read("SELECT count(*) FROM other") == [(0,)]
    database.check()
    database.close()
