import pytest

from tests.runtime.status import watched
from tff_dpftrl.runtime.actors import events
from tff_dpftrl.runtime.status import next_round


def _select(told, waiting=1, task="train", **changes):
    told.on_event(events.SelectionProgress(task, waiting, 5, **changes))
    return next_round.outlook(told.seen, "train")


def _led(*names, **changes):
    told = watched.Watched(*names, **changes)
    told.lead()
    return told


def test_nobody_leads():
    told = watched.Watched()
    told.clock.now += 40
    expected = "No server leads the population: nobody has taken its lease for 40 seconds."
    assert next_round.outlook(told.seen, "train") == [expected]
    told.lead()
    assert next_round.outlook(told.seen, "train")[0].startswith("The server has just begun")


def test_too_few_devices_have_checked_in():
    told = _led()
    told.seen.session_opened()
    assert _select(told) == [
        "Too few devices have checked in: 1 devices wait, and a round needs 4 at least: waiting "
        "for more.",
        "Connected in all: 1 device.",
    ]


def test_a_noise_party_is_away():
    told = _led()
    told.on_event(events.PartyAway("train", 1, 2))
    assert _select(told)[0] == (
        "A noise party is away: 1 of 2 noise parties that the plan names are away, and the next "
        "round waits for them: have their operators start tff-dpftrl noise-party."
    )
    assert told.seen.tasks["train"].phase == "waiting for a noise party"
    told.on_event(events.PartyAway("train", 0, 2))
    assert "party" not in _select(told)[0]
    told.on_event(events.PartyAway("train", 0, 2, to_skip=7))
    assert _select(told)[0].startswith("Rounds are skipped: rounds to skip: 7. A noise party has")
    assert told.seen.tasks["train"].phase == "skipping rounds"
    first = told.seen.tasks["train"].rounds_done or 0
    for index in range(first, first + 6):
        told.on_event(events.RoundSkipped("train", index, "attempt"))
    told.on_event(events.RoundSkipped("train", first + 5, "attempt"))  # A repetition.
    assert _select(told)[0].startswith("Rounds are skipped: rounds to skip: 1. A noise party has")
    told.on_event(events.RoundSkipped("train", first + 6, "attempt"))
    assert "skip" not in _select(told)[0]
    assert told.seen.tasks["train"].phase == "waiting for devices"


def test_devices_have_to_rest():
    found = _select(_led(min_sep=3), resting=20)
    assert (
        "20 check-ins were of devices that have to rest. Devices rest until min_sep=3" in found[0]
    )
    assert "so that 18 devices are needed" in found[0]  # 3 rounds of ceil(4 · 1.3) = 6.
    found = _select(_led(min_sep=3), resting=20, min_sep_is_over=True)
    assert "They have counted later rounds than this store has" in found[0]


@pytest.mark.parametrize(("size", "is_small"), [(None, False), (17, True), (18, False)])
def test_the_population_is_too_small(size, is_small):
    told = _led(min_sep=3)
    told.seen.population_size = size
    found = "".join(_select(told))
    assert ("The population is too small: rounds that choose 6 devices" in found) == is_small
    assert ("need 18 devices, and 17 come" in found) == is_small


def test_enough_devices_wait_for_the_time_out():
    assert _select(_led(), waiting=4) == [
        "4 of 5 devices wait: the round begins with all, or with 4 or more when no others come, "
        "after 30 seconds at the latest."
    ]


def test_selectors_are_silent():
    found = _select(_led(), waiting=4, selectors=3, silent_selectors=2)
    assert found[1:] == [
        "2 of 3 Selectors have not answered for 6 seconds: devices that wait there do not count."
    ]


def test_commits_fail():
    told = _led()
    told.begin()
    told.lose(reason="the store is full.")
    told.on_event(events.StoreFailed("no space"))
    told.clock.now += 5
    assert _select(told, not_stored=3, pause_seconds=16) == [
        "The store failed 5 seconds ago: no round begins or is committed until it answers.",
        "Commits fail: 3 attempts since the last commit could not be stored. The next one begins "
        "in 16 seconds.",
        "The last attempt was abandoned: the store is full.",
    ]
    told.clock.now += 25  # Twice the length of a lease after the failure.
    assert _select(told, is_reading=True)[0] == "The store has not answered yet what is committed."


def test_another_task_comes_first():
    told = _led("train", "other")
    told.round("train")
    assert _select(told, task="other") == [
        "Devices are selected for other first: it has done 0 rounds at weight 1, this task 1 round "
        "at weight 1."
    ]
    told.begin("other")
    assert _select(told) == ["Round 1 of other runs, and only one round runs at a time."]


def test_a_round_waits_for_reports():
    told = _led()
    told.begin(devices=6)
    told.clock.now += 20
    told.report(count=3)
    found = "Round 1 waits for reports: 3 of 4 have come, from 6 devices"
    assert next_round.outlook(told.seen, "train") == [
        f"{found}. It ends in 40 seconds at the latest, with 4 or more."
    ]
    told.clock.now += 40
    assert next_round.outlook(told.seen, "train") == [
        f"{found}, and their time is over: with fewer than 4 it is abandoned."
    ]
    told.report()
    assert next_round.outlook(told.seen, "train") == [
        "Round 1 has its 4 reports: sum, noise and commit follow."
    ]
    told.lose(reason="the noise failed")
    assert "The last attempt was abandoned: the noise failed." in _select(told)
    told.begin()
    told.commit()
    assert "abandoned" not in "".join(_select(told))


def test_a_task_is_over():
    told = _led(num_rounds=1)
    told.round()
    assert next_round.outlook(told.seen, "train") == ["No further round: all 1 rounds are done."]
    told.seen.tasks["train"].stopped = "round 2 would bring ε to 3"
    assert next_round.outlook(told.seen, "train") == [
        "No further round: round 2 would bring ε to 3."
    ]


def test_a_new_leader_counts_anew():
    told = _led()
    _select(told)
    told.lead(2)
    assert "just begun" in next_round.outlook(told.seen, "train")[0]
