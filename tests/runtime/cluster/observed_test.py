"""Tests of tff_dpftrl.runtime.cluster.observed: what is replayed is what was heard."""

import asyncio
import pickle
import random

import prometheus_client
import pytest

from tests.runtime.status import watched
from tff_dpftrl.runtime.actors import events
from tff_dpftrl.runtime.cluster import observed
from tff_dpftrl.runtime.protocol import wire_pb2
from tff_dpftrl.runtime.server import observer
from tff_dpftrl.runtime.status import metrics, observations


class _Recorded(watched.Watched):
    """A population whose events go to a recorder."""

    def __init__(self, *names, **changes):
        super().__init__(*names, **changes)
        self.served = self.seen.served
        self.seen = observed.Recorder(clock=self.clock)


class _Heard(observer.Observer):
    """Lists events."""

    def __init__(self):
        self.events = []

    def on_event(self, now, event):
        self.events.append((now, event))


def _replay(reader, taken, to):
    taken = [pickle.loads(pickle.dumps(one)) for one in taken]
    asyncio.run(reader.replay(taken, to))


def _metrics(seen):
    registry = metrics.registry(seen, lambda: {})
    return prometheus_client.generate_latest(registry).decode()


def _levels(seen):
    return tuple(seen.series.total(name) for name in observations.LEVELS)


def _live(told, num_rounds, take=lambda: None):
    """Rounds with all that may happen in one."""
    told.lead()
    for i in range(num_rounds):
        told.seen.session_opened()
        told.seen.session_refused("expired token")
        told.seen.session_closed("refused")
        told.seen.session_opened()
        told.seen.waiting()
        told.seen.sent_away("enough devices wait", True)
        told.seen.session_closed("sent away")
        told.tell("-v[!", versions={"tensorflow": "2.14.1"})
        take()
        told.begin()
        told.clock.now += 1.5
        told.report(count=2)
        take()
        told.clock.now += 2.25
        told.report(count=2)
        told.report(refusal="late")
        told.drop(0)
        told.tell(seconds=4.0)
        if i % 3 == 2:
            told.lose()
        else:
            told.commit()
        told.clock.now += 0.5
        take()


def test_what_is_replayed_is_what_was_heard():
    direct, recorded = watched.Watched(), _Recorded()
    _live(direct, 40)
    reader = observed.Reader(clock=recorded.clock)
    seen = observations.Observations(recorded.served, clock=reader.now)

    _live(recorded, 40, lambda: _replay(reader, [recorded.seen.take()], seen))

    assert _metrics(seen) == _metrics(direct.seen)
    assert seen.tasks["train"].committed == 27
    seen.now(), direct.seen.now()
    for name in ("minutes", "day", "week"):
        window, expected = seen.series.window(name), direct.seen.series.window(name)
        for channel, values in expected.values.items():
            assert window.values[channel] == pytest.approx(values), channel


def test_hours_that_nobody_takes_are_told_at_their_times_in_bounded_size():
    recorded = _Recorded()
    direct = watched.Watched()
    for told in (direct, recorded):
        told.lead()
        for _ in range(3000):
            told.round(seconds=5.0)
            told.clock.now += 7.0
    taken = recorded.seen.take()
    assert len(taken.items) < 11_000 and len(pickle.dumps(taken)) < 1_000_000
    reader = observed.Reader(clock=recorded.clock)
    seen = observations.Observations(recorded.served, clock=reader.now)

    _replay(reader, [taken], seen)

    assert _levels(seen) == (0, 0, 0)
    for counter in ("sessions", "reports", "dropped_participating", "bytes_received"):
        assert seen.series.total(counter) == direct.seen.series.total(counter), counter
    # Of 6,001 events, the last 2,048 are there: 1,024 rounds.
    assert seen.tasks["train"].committed == 1024
    assert (seen.tasks["train"].rounds_done, seen.epoch) == (3000, 1)
    hours = seen.series.window("week").values
    expected = direct.seen.series.window("week").values
    assert hours["reports"][-9:] == pytest.approx(expected["reports"][-9:], rel=0.02)


def test_kinds_are_bounded_whatever_devices_say():
    recorded = _Recorded()
    generator = random.Random(0)
    for i in range(20_000):
        recorded.tell(seconds=generator.uniform(0, 1e5), versions={"system": f"of {i}"})
    recorded.seen.session_refused("expired token")
    taken = recorded.seen.take()
    assert sum(len(item.rows) for item in taken.items) <= 1024
    seen = observations.Observations(recorded.served, clock=recorded.clock)
    _replay(observed.Reader(clock=recorded.clock), [taken], seen)
    assert seen.session_table.rows() == [("-v[]+^", 20_000, 100.0)]
    assert seen.session_seconds.count == 512
    assert seen.refused_sessions.items() == [("expired token", 1)]


def test_an_event_that_comes_through_several_hosts_counts_once():
    clock = watched.Clock()
    hosts = [observed.Recorder(clock=clock) for _ in range(3)]
    reader, heard = observed.Reader(clock=clock), _Heard()
    for epoch in (1, 2):
        event = events.Leading("keyboard", epoch)
        noted = hosts[0].note(clock(), event)
        for host in hosts[1:]:
            clock.now += 0.25
            host.relay(clock(), noted)
        _replay(reader, [host.take() for host in hosts[:2]], heard)
    _replay(reader, [host.take() for host in hosts], heard)
    told_again = hosts[1].note(clock(), events.Leading("keyboard", 2))
    assert told_again.event == noted.event and told_again.name != noted.name
    _replay(reader, [host.take() for host in hosts], heard)
    assert [event.epoch for _, event in heard.events] == [1, 2, 2]


def test_events_and_calls_of_hosts_are_merged_in_time():
    clock = watched.Clock()
    coordinator, selector = (observed.Recorder(clock=clock) for _ in range(2))
    reader = observed.Reader(clock=clock)
    seen = observations.Observations(watched.Watched().seen.served, clock=reader.now)
    selector.session_opened()
    selector.waiting()
    clock.now += 1
    coordinator.on_event(clock(), events.RoundBegan("train", 0, "attempt 1", 1))
    selector.configured("train", 10)
    clock.now += 3
    selector.reported("train", "", 20)
    clock.now += 1
    coordinator.on_event(clock(), events.RoundReleased("train", 0, "attempt 1", {}))
    _replay(reader, [selector.take(), coordinator.take()], seen)
    task = seen.tasks["train"]
    assert (task.round_seconds.sum, task.report_seconds.sum) == (4, 3)


def test_a_host_whose_clock_is_wrong_does_not_move_the_others():
    clock = watched.Clock()
    wrong = watched.Clock(clock.now + 7200)
    host = observed.Recorder(clock=wrong)
    host.on_event(wrong(), events.Leading("keyboard", 1))
    clock.now += 2
    wrong.now += 2
    reader, heard = observed.Reader(clock=clock), _Heard()
    _replay(reader, [host.take()], heard)
    assert [now for now, _ in heard.events] == [clock.now - 2]
    assert reader.now() == clock.now


def test_who_comes_late_knows_what_holds():
    recorded = _Recorded("train", "test")
    recorded.lead(7)
    recorded.round("test")
    recorded.round()
    recorded.begin()
    recorded.clock.now += 100
    first = observed.Reader(clock=recorded.clock)
    _replay(first, [recorded.seen.take()], observer.Observer())
    recorded.report(count=3)

    reader = observed.Reader(clock=recorded.clock)
    seen = observations.Observations(recorded.served, clock=reader.now)
    _replay(reader, [recorded.seen.take()], seen)

    assert (seen.epoch, _levels(seen)) == (7, (2, 0, 2))
    task = seen.tasks["train"]
    assert (task.rounds_done, task.attempt.round_index, task.attempt.reports) == (1, 1, 3)
    assert task.report_seconds.sum == 3 * 100
    assert seen.tasks["test"].rounds_done == 1 and seen.tasks["test"].attempt is None
    # It goes on from there.
    recorded.report()
    recorded.commit()
    _replay(reader, [recorded.seen.take()], seen)
    assert (task.committed, task.attempt, _levels(seen)) == (1, None, (1, 0, 1))
    assert seen.leaders == 1


def test_devices_of_a_host_that_is_lost_are_gone():
    clock = watched.Clock()
    hosts = [observed.Recorder(clock=clock) for _ in range(2)]
    for host in hosts:
        for _ in range(3):
            host.session_opened()
        host.waiting()
        host.waiting()
        host.configured("train", 10)
    reader = observed.Reader(clock=clock)
    seen = observations.Observations(watched.Watched().seen.served, clock=reader.now)
    _replay(reader, [host.take() for host in hosts], seen)
    assert _levels(seen) == (6, 2, 2)
    for _ in range(7):
        clock.now += 5
        _replay(reader, [hosts[0].take()], seen)
    assert _levels(seen) == (3, 1, 1)
    assert seen.series.total("dropped_waiting") == 1
    # It was cut off only.
    _replay(reader, [host.take() for host in hosts], seen)
    assert _levels(seen) == (6, 2, 2)


def test_the_last_progress_of_selection_is_for_late_readers():
    recorder = observed.Recorder(clock=watched.Clock())
    for waiting in (1, 2):
        recorder.on_event(watched.START, events.SelectionProgress("train", waiting, 4))
    recorder.take()
    (timed,) = recorder.take().before.events
    assert timed.named.event == events.SelectionProgress("train", 2, 4)


_METHODS = sorted(name for name in vars(observer.Observer) if not name.startswith("_"))


@pytest.mark.parametrize("method", _METHODS)
def test_every_call_of_an_observer_arrives(method):
    told = {
        "on_event": (watched.START, events.TooFewDevices("train", 1, 4)),
        "session_refused": ("used token",),
        "sent_away": ("enough devices wait", True),
        "configured": ("train", 1000),
        "sent": ("train", 10),
        "reported": ("train", "late", 100),
        "session_closed": ("training",),
        "session_summarized": (
            wire_pb2.SessionSummary(shape="-v[!", seconds=3.0, versions={"python": "3"}),
        ),
    }
    calls = []

    class Heard(observer.Observer):
        def __getattribute__(self, name):
            return lambda *arguments: calls.append((name, arguments))

    clock = watched.Clock()
    recorder, reader = observed.Recorder(clock=clock), observed.Reader(clock=clock)
    getattr(recorder, method)(*told.get(method, ()))
    _replay(reader, [recorder.take()], Heard())
    assert calls[-1] == (method, told.get(method, ()))
