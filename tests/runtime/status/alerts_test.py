from tests.runtime.status import watched
from tff_dpftrl.runtime.actors import events
from tff_dpftrl.runtime.protocol import wire_pb2
from tff_dpftrl.runtime.status import alerts


def kinds(told):
    return [alert.kind for alert in alerts.find(told.seen)]


def usual_hour(told, hour):
    """Ten rounds an hour, or forty at night, and some drop-outs."""
    interval = 360 if hour % 24 < 18 else 90
    for _ in range(3600 // interval):
        told.round(dropped=hour % 2)
        told.tell()
        told.clock.now += interval - 2


def usual_days(told):
    for hour in range(24 * 6):
        usual_hour(told, hour)


def test_a_tensorflow_that_the_task_was_not_tested_with():
    tested = watched.Watched(tested_tensorflow=("2.14.1", "2.21.0"))
    unknown = watched.Watched()
    for told in (tested, unknown):
        told.lead()
        for version in ("2.21.3", "2.14.0", "2.17.0", "<b>"):
            summary = wire_pb2.SessionSummary(shape="-v[]+^", versions={"tensorflow": version})
            told.seen.session_summarized(summary)
    (alert,) = alerts.find(tested.seen)
    assert (alert.kind, alert.task) == ("untested", "train")
    assert "have TensorFlow 2.17.0, and the task was tested with 2.14.1, 2.21.0" in alert.text
    assert kinds(unknown) == []


def test_days_and_nights_have_no_alerts():
    told = watched.Watched()
    told.lead()
    assert kinds(told) == []
    for hour in range(24 * 8):
        usual_hour(told, hour)
        assert kinds(told) == []


def test_more_drop_outs_than_in_the_week_before():
    told = watched.Watched()
    told.lead()
    usual_days(told)
    assert kinds(told) == []
    for _ in range(20):
        told.round(dropped=4)
        told.clock.now += 358
    found = alerts.find(told.seen)
    assert [alert.kind for alert in found] == ["drop_outs"]
    assert "50.0 % of the devices that take part drop out (last 2 hours)" in found[0].text
    assert "usual in the last 6 days: " in found[0].text


def test_more_refused_reports_and_sessions_in_minutes_of_a_young_server():
    told = watched.Watched()
    told.lead()
    for _ in range(120):
        told.round(seconds=4.0)
        told.clock.now += 1
    assert kinds(told) == []
    for _ in range(24):
        told.begin(devices=10)
        told.report(count=5)
        told.report(count=5, refusal="late")
        told.commit()
        told.seen.session_refused("replayed token")
        told.seen.session_refused("replayed token")
        told.clock.now += 5
    assert kinds(told) == ["refused_reports", "refused_sessions"]


def test_fewer_rounds_than_usual():
    told = watched.Watched(selection_timeout=3600.0)
    told.lead()
    usual_days(told)
    for _ in range(3):
        told.round()
        told.clock.now += 2398
    found = alerts.find(told.seen)
    assert [alert.kind for alert in found] == ["few_rounds"]
    assert found[0].text.startswith("1.5 rounds an hour (last 2 hours); usual in the last ")


def test_sessions_with_errors():
    told = watched.Watched()
    told.lead()
    for i in range(100):
        told.tell("-v[*" if i % 4 == 0 else "-v[]+^")
    assert kinds(told) == []  # Of the step that has not ended.
    told.clock.now += 5
    found = alerts.find(told.seen)
    assert [alert.kind for alert in found] == ["session_errors"]
    assert found[0].text == "25.0 % of sessions end with an error."
    told.clock.now += 700
    assert "session_errors" not in kinds(told)


def test_no_round_for_long():
    told = watched.Watched("train", "rare")
    told.lead()
    told.round()
    patience = 3 * 2 * (30 + 60 + 7 * 10)  # The store notes each attempt: one exchange more.
    told.clock.now = watched.START + patience - 10
    told.round()
    assert kinds(told) == []
    told.clock.now = watched.START + patience + 1
    found = alerts.find(told.seen)
    assert [(alert.kind, alert.task) for alert in found] == [("no_round", "rare")]
    assert found[0].text == "No round was committed for 16 minutes."


def test_a_task_that_is_over_may_be_quiet():
    told = watched.Watched(num_rounds=1)
    told.lead()
    told.round()
    told.clock.now += 30 * 86_400
    assert kinds(told) == []


def test_nobody_leads():
    told = watched.Watched()
    assert kinds(told) == []
    told.clock.now += 31
    assert kinds(told) == ["no_leader"]
    told.lead()
    assert kinds(told) == []


def test_too_few_devices_until_a_round_begins():
    told = watched.Watched()
    told.lead()
    told.on_event(events.TooFewDevices("train", 2, 4))
    found = alerts.find(told.seen)
    assert [(alert.kind, alert.task) for alert in found] == [("too_few_devices", "train")]
    assert found[0].text == (
        "At the end of the last selection: 2 devices wait, and a round needs 4 at least: "
        "waiting for more."
    )
    told.begin()
    assert kinds(told) == []


def test_a_store_that_failed_lately():
    told = watched.Watched()
    told.lead()
    told.on_event(events.StoreFailed("disk full"))
    told.clock.now += 60
    assert kinds(told) == ["store"]
    told.clock.now += 540
    told.round()
    assert kinds(told) == []
