"""What a store says of rows that are not what it wrote."""

import pytest
import sqlalchemy

from tests.runtime.store import postgresql
from tff_dpftrl.runtime.store import database, interface, sql

server = postgresql.server


def _write(place):
    """Writes three rounds of a task, one of another, and a new task."""
    with sql.SqlStore(place) as store:
        for task in ("nwp", "other", "new"):
            store.add_task("keyboard", task, model=b"model 0", state=b"state 0")
        for t in range(3):
            epoch = store.acquire("keyboard", f"{t}", now=10.5 * t, duration=5.0).epoch
            _commit(store, "nwp", t, epoch)
        _commit(store, "other", 0, epoch)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The file of a store, written once: SQLite waits for the disk."""
    folder = tmp_path_factory.mktemp("written")
    _write(folder)
    return (folder / "store.sqlite").read_bytes()


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request, tmp_path):
    """Where there is a store with rounds."""
    if request.param == "sqlite":
        content = request.getfixturevalue("written")
        (tmp_path / "store.sqlite").write_bytes(content)
        return tmp_path
    url = request.getfixturevalue("server").new_database()
    _write(url)
    return url


def _commit(store, task, round_index, epoch):
    return store.commit(
        "keyboard",
        task,
        round_index=round_index,
        epoch=epoch,
        model=b"model %d" % round_index,
        state=b"the seed %d" % round_index,
        metrics={"loss": 1 / (round_index + 1)},
        now=1.7e9 + round_index / 3,
    )


def _change(place, statement):
    engine, _ = database.open_database(place)
    with engine.begin() as connection:
        connection.execute(sqlalchemy.text(statement))
    engine.dispose()


_ADVICE = "Restore only a backup that has at least these rounds: keyboard/new 0, keyboard/nwp 3, k"
_NWP = "population = 'keyboard' AND task = 'nwp'"
_ROUND = f"UPDATE rounds SET {{}} WHERE {_NWP} AND round = {{}}"
_COMMIT = f"UPDATE commits SET {{}} WHERE {_NWP}"
_LAST = "the last commit of the task 'nwp' of the population 'keyboard' is not what was written"
_OLDER = "the lease of the population 'keyboard' is older than its last commit"
_LEASE = "the lease of the population 'keyboard' is not what was written"


def _missing(number):
    return f"round {number} of the task 'nwp' of the population 'keyboard' is missing or not what"


_WHEN_OPENED = {
    _ROUND.format("metrics = '{}'", 0): _missing(1),
    _ROUND.format("committed_at = 1", 1): _missing(2),
    _ROUND.format("epoch = 1", 1): _missing(2),
    _ROUND.format("round = 7", 1): _missing(2),
    _ROUND.format("model_digest = state_digest", 1): _missing(2),
    _ROUND.format("digest = ''", 1): _missing(2),
    _ROUND.format("task = 'other'", 2): _LAST,
    f"DELETE FROM rounds WHERE {_NWP} AND round = 0": _missing(1),
    f"DELETE FROM rounds WHERE {_NWP} AND round = 2": _LAST,
    f"DELETE FROM rounds WHERE {_NWP}": _LAST,
    f"DELETE FROM commits WHERE {_NWP}": "the task .nwp. .* has rounds that its last",
    _COMMIT.format("rounds_done = 2"): _LAST,
    _COMMIT.format("rounds_done = 9000000000"): _LAST,
    _COMMIT.format("epoch = 2"): _LAST,
    _COMMIT.format("metrics = '{}'"): _LAST,
    _COMMIT.format("model_digest = state_digest"): _LAST,
    _COMMIT.format("digest = first_digest"): _LAST,
    _COMMIT.format("first_digest = digest"): _missing(1),
    "UPDATE commits SET task = 'renamed' WHERE task = 'new'": "the last commit of the task 'renam",
    "UPDATE leases SET epoch = 2": _LEASE,
    "UPDATE leases SET owner = 'b'": _LEASE,
    "UPDATE leases SET valid_until = valid_until + 1": _LEASE,
    "DELETE FROM leases": _OLDER,
}


@pytest.mark.parametrize(("change", "message"), _WHEN_OPENED.items())
def test_a_changed_row_is_named_when_the_store_is_opened(place, change, message):
    _change(place, change)
    with pytest.raises(interface.StoreDamaged, match=f"is damaged: {message}") as caught:
        sql.SqlStore(place)
    said = str(caught.value)
    assert "\n" not in said and "the seed" not in said
    if "renamed" not in change:
        assert _ADVICE in said


def test_the_advice_counts_rounds_by_what_is_whole(place):
    _change(place, _COMMIT.format("rounds_done = 9000000000"))
    with pytest.raises(interface.StoreDamaged, match="keyboard/nwp 3, keyboard/other 1. With"):
        sql.SqlStore(place)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_COMMIT.format("model = state"), "the model of the task 'nwp' .* after round 3 is not"),
        (_COMMIT.format("state = model"), "the state of the task 'nwp' .* after round 3 is not"),
    ],
)
def test_a_changed_model_or_state_is_named_when_it_is_read(place, change, message):
    _change(place, change)
    with sql.SqlStore(place) as store:
        with pytest.raises(interface.StoreDamaged, match=message) as caught:
            store.last_commit("keyboard", "nwp")
        assert _ADVICE in str(caught.value)
        assert store.last_commit("keyboard", "other").rounds_done == 1  # A task of its own.


def _reads(store):
    return {
        "last_commit": lambda: store.last_commit("keyboard", "nwp"),
        "history": lambda: store.history("keyboard", "nwp"),
        "commit": lambda: _commit(store, "nwp", 3, 3),
        "add_task": lambda: store.add_task("keyboard", "nwp", model=b"", state=b""),
        "lease": lambda: store.lease("keyboard"),
        "acquire": lambda: store.acquire("keyboard", "next", now=100.0, duration=5.0),
        "renew": lambda: store.renew("keyboard", "2", 3, now=22.0, duration=5.0),
        "release": lambda: store.release("keyboard", "2", 3),
    }


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        (_ROUND.format("metrics = '{}'", 0), {"history"}),
        (_ROUND.format("metrics = '{}'", 2), {"history", "last_commit", "commit"}),
        (_COMMIT.format("rounds_done = 2"), {"history", "last_commit", "commit"}),
        (_COMMIT.format("rounds_done = 4"), {"history", "last_commit", "commit"}),
        (_COMMIT.format("digest = ''"), {"history", "last_commit", "commit"}),
        (_COMMIT.format("state = model"), {"last_commit"}),
        (f"DELETE FROM commits WHERE {_NWP}", {"add_task"}),
        ("UPDATE leases SET epoch = epoch - 1", {"lease", "acquire", "renew", "release", "commit"}),
    ],
)
def test_damage_of_an_open_store_is_found_by_who_needs_the_row(place, change, refused):
    with sql.SqlStore(place) as store:
        with store._engine.begin() as connection:
            connection.execute(sqlalchemy.text(change))
        reads = _reads(store)
        for name in sorted(refused):
            with pytest.raises(interface.StoreDamaged, match="is damaged: "):
                reads[name]()


def test_what_sqlite_says_of_damage_is_one_line_without_what_a_row_holds(written, tmp_path):
    path = tmp_path / "store.sqlite"
    path.write_bytes(written)
    with sql.SqlStore(tmp_path) as store, store._engine.begin() as connection:
        # As where the bytes of a state are taken for a text.
        text = "CAST(x'FF' || 'the seed' AS TEXT)"
        connection.execute(sqlalchemy.text(f"UPDATE rounds SET metrics = {text}"))
    with pytest.raises(interface.StoreError, match="decode .* 'metrics'. Restore only") as caught:
        sql.SqlStore(tmp_path)
    assert "seed" not in str(caught.value)
    table = written.index(b"CREATE TABLE rounds")
    at = written.index(b"NOT NULL", table)
    path.write_bytes(written[:at] + b"NOT \xc5ULL" + written[at + 8 :])
    with pytest.raises(interface.StoreError, match="a text in it is damaged. Restore only"):
        sql.SqlStore(tmp_path)
    path.write_bytes(written[:at] + b"NOT WELL" + written[at + 8 :])
    with pytest.raises(interface.StoreError, match="malformed database schema .* Restore only"):
        sql.SqlStore(tmp_path)
