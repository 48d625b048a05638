"""Every law of a campaign is kept by what is right, and broken by a mistake that is planted."""

import numpy as np
import pytest

from tests.runtime.store import postgresql
from tests.verification.campaign import mistakes, toy_evidence
from verification.campaign import (
    checks,
    database_log,
    devices,
    hostile,
    memory_search,
    report,
    supervisor,
    tiny_tasks,
)

server = postgresql.server
Law = checks.Law
STRUCK = supervisor.Outcome(toy_evidence.FAULT, True, 1.5)


def test_what_is_right_breaks_no_law(tmp_path):
    play = toy_evidence.Play(tmp_path)
    play.good_rounds()
    verdict = play.verdict([STRUCK])
    assert not verdict.broken
    assert all(verdict.looked_at[law] for law in Law)


@pytest.fixture(params=["sqlite", "postgresql"])
def play(request, tmp_path):
    """Rounds as they should be, in a store of each kind."""
    url = ""
    if request.param == "postgresql":
        url = request.getfixturevalue("server").new_database()
    play = toy_evidence.Play(tmp_path, store_url=url)
    play.good_rounds()
    yield play
    play.store.close()


def test_the_book_has_every_lease_and_commit_in_order(play):
    lines = toy_evidence.lines(play.place)
    found = [(line.kind, line.owner or line.task, line.rounds) for line in lines]
    assert found == [
        (database_log.LEASE, "first", 0),
        (database_log.COMMIT, tiny_tasks.CLEAR, 1),
        (database_log.ROUND, tiny_tasks.CLEAR, 1),
        (database_log.COMMIT, tiny_tasks.SECURE, 1),
        (database_log.ROUND, tiny_tasks.SECURE, 1),
        (database_log.LEASE, "second", 0),
        (database_log.COMMIT, tiny_tasks.CLEAR, 2),
        (database_log.ROUND, tiny_tasks.CLEAR, 2),
        (database_log.COMMIT, tiny_tasks.CLEAR, 3),
        (database_log.ROUND, tiny_tasks.CLEAR, 3),
    ]


def _stale_epoch(play):
    zombie = play.epoch
    play.lead("third")
    play.commit(play.attempt("e", (1, 2, 3)), epoch=zombie)


def _write(play, *statements):
    database = database_log.connect(play.place.store)
    with database.connect() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)
    database.dispose()


_COLUMNS = "rounds_done, epoch, model, state, metrics, model_digest, state_digest, digest"


def _goes_on_from_a_backup(play):
    before = play.last()
    _write(play, f"CREATE TABLE backup AS SELECT * FROM commits WHERE task = '{tiny_tasks.CLEAR}'")
    play.round("e", (1, 2, 3))
    _write(
        play,
        f"DELETE FROM rounds WHERE task = '{tiny_tasks.CLEAR}' AND round = {before.rounds_done}",
        f"UPDATE commits SET ({_COLUMNS}) = (SELECT {_COLUMNS} FROM backup) "
        f"WHERE task = '{tiny_tasks.CLEAR}'",
    )
    play.commit(play.attempt("f", (4, 5, 6), commit=before))


def _releases_before_the_commit(play):
    play.release(play.attempt("e", (1, 2, 3)))  # And is killed.
    play.round("f", (1, 2, 4))


def _tells_of_what_is_never_committed(play):
    play.release(play.attempt("e", (1, 2, 3)))


def _draws_other_noise(play):
    made = play.attempt("e", (1, 2, 3))
    made[2]["model"] = "another"
    play.commit(made)


def _sums_reports_twice(play):
    play.commit(play.attempt("e", (1, 2, 3), times=2))


def _counts_wrongly(play):
    made = play.attempt("e", (1, 2, 3))
    made[2]["devices/reports"] = 4
    play.commit(made)


def _loses_an_accepted_report(play):
    play.round("e", (1, 2, 3))
    play.note(devices.ACCEPTED, 7, "e", 99)
    play.records[-1] = _of_round(play.records[-1], play.last().rounds_done - 1)


def _of_round(record, round_index):
    return devices.Record(**{**vars(record), "round_index": round_index})


def _gives_an_epoch_again(play):
    _write(play, "UPDATE leases SET epoch = 1, owner = 'third'")


def _two_lead(play):
    play.leading.append((tiny_tasks.POPULATION, play.epoch))


def _comes_too_early(play):
    play.skip()
    play.round("e", (2, 3))
    play.round("f", (3, 4))


def _logs_a_vector(play):
    own = tiny_tasks.sentinel(toy_evidence.SEED, tiny_tasks.SECURE, 9)
    (play.place.logs / "server.log").write_text(f"got {own.tolist()}")


MISTAKES = {
    _stale_epoch: {Law.FRESH_EPOCH},
    _goes_on_from_a_backup: {Law.ONE_COMMIT, Law.ONE_MODEL, Law.KEPT},
    _releases_before_the_commit: {Law.KEPT, Law.ONE_MODEL},
    _tells_of_what_is_never_committed: {Law.KEPT},
    _draws_other_noise: {Law.EXACT_SUM, Law.ONE_MODEL},
    _sums_reports_twice: {Law.EXACT_SUM, Law.OWN_REPORTS},
    _counts_wrongly: {Law.OWN_REPORTS},
    _loses_an_accepted_report: {Law.OWN_REPORTS},
    _gives_an_epoch_again: {Law.GROWING_EPOCHS},
    _comes_too_early: {Law.SEPARATION},
    _two_lead: {Law.GROWING_EPOCHS},
    _logs_a_vector: {Law.NO_VECTOR},
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__.strip("_"))
def test_a_planted_mistake_is_found(tmp_path, mistake):
    play = toy_evidence.Play(tmp_path, mistakes.CommitsUnderAnyEpoch)
    play.good_rounds()
    mistake(play)
    assert MISTAKES[mistake] <= toy_evidence.broken(play.verdict())


def test_a_changed_history_is_found_in_each_kind_of_database(play):
    assert not play.verdict().broken
    _goes_on_from_a_backup(play)
    assert MISTAKES[_goes_on_from_a_backup] <= toy_evidence.broken(play.verdict())


def test_a_want_of_progress_is_found(tmp_path):
    play = toy_evidence.Play(tmp_path)
    play.good_rounds()
    verdict = play.verdict([STRUCK, supervisor.Outcome(toy_evidence.FAULT, True)])
    assert toy_evidence.broken(verdict) == {Law.PROGRESS}


def test_a_skipped_round_is_no_progress_in_the_end(tmp_path):
    play = toy_evidence.Play(tmp_path)
    play.good_rounds()
    after_faults = len(toy_evidence.lines(play.place))
    play.round("e", (2, 3))
    play.skip(tiny_tasks.SECURE)
    verdict = play.verdict(after_faults=after_faults)
    assert [law for law, _ in verdict.broken] == [Law.PROGRESS]
    assert tiny_tasks.SECURE in verdict.broken[0][1]
    assert (verdict.num_released, verdict.num_skipped) == (5, 1)


def test_hostile_devices_need_not_keep_a_timer(tmp_path):
    play = toy_evidence.Play(tmp_path)
    play.good_rounds()
    play.round("e", (0, 3))
    assert not play.verdict(hostile={0: hostile.Kind.DUPLICATE}).broken


def test_a_vector_in_memory_is_found_and_reported(tmp_path):
    play = toy_evidence.Play(tmp_path)
    play.good_rounds()
    outcome = supervisor.Outcome(toy_evidence.FAULT, True, 2.0, 26, ("device 1: text, from 0",))
    verdict = play.verdict([outcome])
    assert toy_evidence.broken(verdict) == {Law.NO_VECTOR}
    left = supervisor.Campaign(play.place, toy_evidence.SEED, 30.0, [outcome], play.records)
    told = report.as_markdown(report.as_json("asyncio", left, verdict, seconds=60.0))
    assert "# 1 faults on the engine asyncio" in told
    assert f"| {toy_evidence.FAULT.kind.value} | 1 | 2.0 | 2.0 |" in told
    assert "device 1: text, from 0" in told


def test_sentinels_are_of_one_device_and_one_task():
    vectors = {
        (task, device): tiny_tasks.sentinel(0, task, device)
        for task in tiny_tasks.TASKS
        for device in range(tiny_tasks.NUM_DEVICES)
    }
    for key, vector in vectors.items():
        assert vector.max() < tiny_tasks.MODULUS and vector.shape == (tiny_tasks.SIZE,)
        packed = tiny_tasks.packed(tiny_tasks.vector(vector, key[1], 1))
        assert memory_search.found_in([packed], memory_search.pieces(vector.tolist()))
        for other, own in vectors.items():
            assert (other == key) == np.array_equal(own, vector)
