import dataclasses
import math
import random

import pytest

from tff_dpftrl.runtime.actors import actor, coordinator, events, messages, population
from tff_dpftrl.runtime.store import interface
from verification.schedules import noise_parties, simulation

SERVED = simulation.small_population()  # Lease 8 s, heartbeat 2 s; training wants 4 devices.
SELECTORS = ("s0", "s1")


def commits(training=0, evaluation=0):
    return (
        interface.Commit("training", training, 1, b"model %d" % training, b"secret"),
        interface.Commit("evaluation", evaluation, 1, b"", b"secret"),
    )


class Leader:
    """A Coordinator and what it did last."""

    def __init__(self, served=SERVED):
        self.actor = coordinator.Coordinator("me", served, SELECTORS, "store", random.Random(0))
        self.effects = self.actor.start(100.0)
        (self.tick,) = [one.message for one in self.effects if isinstance(one, actor.After)]

    def deliver(self, message, now=101.0):
        self.effects = self.actor.step(now, message)
        return self

    def heartbeat(self, now):
        return self.deliver(self.tick, now)

    def sent(self, to, kind=object):
        return [
            effect.message
            for effect in self.effects
            if isinstance(effect, actor.Send)
            and effect.to == to
            and isinstance(effect.message, kind)
        ]

    def spawned(self):
        return [effect for effect in self.effects if isinstance(effect, actor.Spawn)]

    def is_stopped(self):
        return actor.Stop("me") in self.effects


def leading(served=SERVED, **rounds_done):
    made = Leader(served).deliver(messages.LeaseGranted(3, 100.0))
    (asked,) = made.sent("store", messages.ReadCommits)
    known = tuple(
        dataclasses.replace(commit, rounds_done=rounds_done.get(commit.task, 0))
        for commit in commits()
        if commit.task in {task.name for task in served.tasks}
    )
    return made.deliver(messages.CommitsRead(asked.request, known))


def waiting(selector, count, task="training", epoch=3, serial=0):
    return messages.DevicesWaiting(selector, epoch, task, serial, count)


def running():
    made = leading().deliver(waiting("s0", 3)).deliver(waiting("s1", 3))
    (spawn,) = made.spawned()
    return made, spawn


def committed(task="training", rounds_done=1, epoch=3, attempt="me/round/1"):
    commit = interface.Commit(
        task, rounds_done, epoch, b"new model", b"secret", {"attempt": attempt, "loss": 0.5}
    )
    return messages.RoundCommitted(attempt, epoch, commit)


def test_it_asks_for_the_lease_and_stops_when_it_does_not_get_it():
    made = Leader()
    assert made.sent("store") == [messages.AcquireLease("me", 100.0)]
    assert made.heartbeat(102.0).sent("store") == [messages.AcquireLease("me", 102.0)]
    assert made.deliver(messages.LeaseRefused(0, "somebody leads")).is_stopped()
    assert not made.heartbeat(104.0).effects


def test_it_stops_when_nobody_answers():
    assert Leader().heartbeat(108.0).is_stopped()


def test_it_leads_from_what_is_committed():
    made = leading(training=7, evaluation=5)
    (wish,) = made.sent("s0")
    assert wish == messages.SelectDevices(3, "me", "training", 4, True)
    assert made.sent("s1") == [wish]
    made.deliver(waiting("s0", 4))
    (spawn,) = made.spawned()
    assert (spawn.role.epoch, spawn.role.commit.rounds_done) == (3, 7)


def test_it_tells_what_devices_are_chosen_for():
    made = leading(training=7, evaluation=5)
    opened = events.SelectionOpened
    assert made.sent(events.OBSERVER, opened) == [opened("training", 7)]
    assert not made.deliver(waiting("s0", 1)).sent(events.OBSERVER, opened)
    # The next round is that of this task once more, if the attempt is not abandoned.
    assert made.deliver(waiting("s0", 4)).sent(events.OBSERVER, opened) == [opened("training", 8)]


def test_the_lease_is_counted_from_when_it_asked():
    made = leading().heartbeat(106.0)
    assert made.sent("store", messages.RenewLease) == [messages.RenewLease("me", 3, 106.0)]
    made.deliver(messages.LeaseGranted(3, 102.0), 107.0)  # Until 110.
    made.deliver(messages.LeaseGranted(3, 100.5), 107.0)  # Overtaken.
    assert not made.heartbeat(109.9).is_stopped()
    assert made.heartbeat(110.0).is_stopped()
    assert not made.spawned() and not made.sent("s0")


def test_a_zombie_acts_on_nothing():
    made, spawn = running()
    made.deliver(committed(), 130.0)  # It was stopped past its lease.
    assert made.is_stopped()
    assert made.sent(spawn.address) == [messages.AbandonRound("the lease has ended")]
    assert not made.sent(events.OBSERVER)
    assert not made.deliver(waiting("s0", 4), 101.0).effects


def test_an_answer_that_took_longer_than_the_lease_is_no_lease():
    made = Leader().deliver(messages.LeaseGranted(3, 100.0), 108.0)
    assert not made.sent("s0")


@pytest.mark.parametrize(
    "message", [messages.LeaseRefused(3, "lost"), messages.LeaseGranted(4, 101.0)]
)
def test_it_stops_at_once_when_the_lease_is_not_its_own_any_more(message):
    assert leading().deliver(message).is_stopped()


def test_refusals_of_another_epoch_are_old():
    made = (
        leading().deliver(messages.LeaseRefused(0, "old")).deliver(messages.LeaseRefused(2, "old"))
    )
    assert not made.is_stopped()


def test_an_orderly_stop_lets_another_one_lead_at_once():
    made, spawn = running()
    made.deliver(messages.Shutdown())
    assert made.sent("store") == [messages.ReleaseLease("me", 3)]
    assert made.sent(spawn.address, messages.AbandonRound)
    assert made.is_stopped()


def test_a_round_begins_when_enough_devices_wait():
    made = leading().deliver(waiting("s0", 3))
    assert not made.spawned()
    made.deliver(waiting("s1", 3, epoch=2)).deliver(waiting("s1", 3, task="evaluation"))
    assert not made.spawned()
    made.deliver(waiting("s1", 3))
    (spawn,) = made.spawned()
    orders = [*made.sent("s0"), *made.sent("s1")]
    assert sum(order.count for order in orders) == 4
    assert {order.attempt for order in orders} == {spawn.address}
    assert spawn.role.expected == {"s0", "s1"}
    (began,) = made.sent(events.OBSERVER, events.RoundBegan)
    assert (began.round_index, began.devices) == (0, 4)


def test_the_progress_of_selection_is_sent_when_it_has_changed():
    def sent():
        return made.sent(events.OBSERVER, events.SelectionProgress)

    progress = events.SelectionProgress("training", 1, 4, selectors=2)
    made = leading().deliver(waiting("s0", 1)).deliver(waiting("s1", 0)).heartbeat(102.0)
    assert sent() == [progress]
    made.heartbeat(104.0)
    assert not sent()
    made.deliver(messages.LeaseGranted(3, 104.0), 104.0).deliver(waiting("s1", 0), 105.0)
    made.heartbeat(106.0)  # The other Selector was heard last at 100.
    assert sent() == [dataclasses.replace(progress, silent_selectors=1)]
    made.deliver(waiting("s0", 1), 107.0).heartbeat(107.0)
    assert sent() == [progress]


def test_the_progress_of_selection_has_the_pause_after_a_commit_that_failed():
    made, spawn = running()
    made.deliver(messages.RoundAbandoned(spawn.address, "the store fails", {}, not_stored=True))
    made.heartbeat(101.0)  # The pause began at 100, and lasts a heartbeat of two seconds or so.
    (progress,) = made.sent(events.OBSERVER, events.SelectionProgress)
    assert (progress.not_stored, progress.is_reading) == (1, True)
    assert progress.pause_seconds == math.ceil(made.actor._paused_until - 101.0) > 0


def test_after_the_time_out_of_the_selection_the_least_number_is_enough():
    made = leading().deliver(waiting("s0", 1)).heartbeat(104.0)
    made.deliver(messages.LeaseGranted(3, 107.5), 107.5)
    assert not made.spawned()
    made.heartbeat(108.0)
    assert made.sent(events.OBSERVER)[:1] == [events.TooFewDevices("training", 1, 2)]
    made.deliver(waiting("s0", 2), 109.0)
    assert not made.spawned()  # The time is counted anew.
    made.heartbeat(114.5)
    (spawn,) = made.spawned()
    assert [order.count for order in made.sent("s0", messages.ForwardDevices)] == [2]
    assert spawn.role.expected == {"s0"}
    # The other Selector only hears what is wanted next.
    assert [type(message) for message in made.sent("s1")] == [messages.SelectDevices]


def half_have_reported():
    """A Coordinator whose last attempt was committed late, with half of its devices."""
    served = dataclasses.replace(SERVED, tasks=(SERVED.task("training"),))
    made = leading(served).deliver(waiting("s0", 4))
    (spawn,) = made.spawned()
    turnout = messages.Turnout(4, 2, 0, 1.5)
    return made.deliver(dataclasses.replace(committed(attempt=spawn.address), turnout=turnout))


def test_more_devices_are_chosen_where_few_have_reported():
    made = half_have_reported()
    (wish,) = made.sent("s0", messages.SelectDevices)
    assert wish.wanted == 5  # A goal of 3, where 5 of 8 are expected to report.
    (spawn,) = made.deliver(waiting("s0", 6, serial=1)).spawned()
    assert [order.count for order in made.sent("s0", messages.ForwardDevices)] == [5]
    assert spawn.role.half_seconds == 1.5


def test_devices_that_do_not_come_are_not_waited_for():
    """The selection opened at 101.0, when the last attempt began; a goal of 3 wants 5 devices."""
    made = half_have_reported().deliver(waiting("s0", 4, serial=1), 104.0)
    made.deliver(messages.LeaseGranted(3, 104.0), 104.0)
    assert not made.deliver(waiting("s0", 4, serial=1), 105.9).spawned()
    assert made.deliver(waiting("s0", 4, serial=1), 107.0).spawned()  # As long again as they took.
    assert [order.count for order in made.sent("s0", messages.ForwardDevices)] == [4]


def test_devices_that_were_known_and_need_not_rest_are_waited_for():
    training = dataclasses.replace(
        SERVED.task("training"),
        rounds=dataclasses.replace(SERVED.task("training").rounds, selection_timeout=60.0),
        min_sep=2,
        pipelined=False,
    )
    made = leading(dataclasses.replace(SERVED, tasks=(training,), lease_seconds=1000.0))

    def attempt(count, began, dropped=0):
        made.deliver(waiting("s0", count, serial=made.actor._serial), began)
        (spawn,) = made.spawned()
        done = committed(rounds_done=spawn.role.commit.rounds_done + 1, attempt=spawn.address)
        metrics = {**done.commit.metrics, "devices/dropped": dropped}
        commit = dataclasses.replace(done.commit, metrics=metrics)
        made.deliver(dataclasses.replace(done, commit=commit), began)

    attempt(4, 111.0)  # Ten seconds after the opening.
    attempt(4, 121.0, dropped=2)  # Eight devices are known: four rest, four wait.
    made.deliver(waiting("s0", 2, serial=2), 122.0)  # Two rest, and four are missing.
    assert not made.deliver(waiting("s0", 2, serial=2), 131.9).spawned()
    assert made.deliver(waiting("s0", 2, serial=2), 132.0).spawned()  # As long as others took.
    (began,) = made.sent(events.OBSERVER, events.RoundBegan)
    assert began.devices == 2


def test_rounds_are_skipped_at_once_until_enough_devices_may_have_rested():
    training = dataclasses.replace(SERVED.task("training"), min_sep=5, pipelined=False)
    served = dataclasses.replace(SERVED, tasks=(training,), lease_seconds=1000.0)
    made = leading(served).deliver(messages.LeaseGranted(3, 101.0))
    now, rounds = 101.0, []
    for index in range(3):  # What rests from round 0 is not known: another may have led.
        made.deliver(waiting("s0", 4, serial=made.actor._serial), now)
        (spawn,) = made.spawned()
        made.deliver(committed(rounds_done=index + 1, attempt=spawn.address), now)
    made.deliver(messages.DevicesWaiting("s0", 3, "training", 3, 0, 11), now)
    now += SERVED.heartbeat_seconds
    assert not made.deliver(waiting("s0", 0, serial=3), now).spawned()
    assert not made.heartbeat(now).spawned()  # Twelve rest, of whom eleven have come by.
    made.deliver(messages.DevicesWaiting("s0", 3, "training", 3, 0, 12), now)
    while made.spawned():
        (skip,) = made.spawned()
        assert skip.role.skips
        rounds.append(skip.role.commit.rounds_done)
        made.deliver(skipped(skip.address, rounds[-1] + 1), now)
        made.deliver(messages.DevicesWaiting("s0", 3, "training", 3, 0, 12), now)
    assert rounds == [3, 4]  # For round 5 those of round 0 have rested.


def test_nothing_is_learned_twice_from_one_attempt():
    made = half_have_reported()
    turnout = messages.Turnout(4, 0, 0, 9.0)
    made.deliver(dataclasses.replace(committed(attempt="me/round/1"), turnout=turnout))
    abandoned = messages.RoundAbandoned("me/round/1", "too few", {}, turnout=turnout)
    made.deliver(abandoned).heartbeat(102.0)
    assert made.sent("s0", messages.SelectDevices)[0].wanted == 5


def test_the_next_devices_are_chosen_while_a_round_reports_but_no_round_begins():
    made, spawn = running()
    (order,) = made.sent("s0")
    # Evaluation is behind its share, and its schedule forbids pipelining.
    assert (order.then.task, order.then.accepting) == ("evaluation", False)
    made.deliver(committed())
    assert [wish.accepting for wish in made.sent("s0")] == [True]
    made.deliver(waiting("s0", 3, "evaluation", serial=1))
    (spawn,) = made.spawned()
    assert spawn.role.model == b"new model"  # That of training.
    (order,) = made.sent("s0")
    assert (order.then.task, order.then.accepting) == ("training", True)
    made.deliver(waiting("s0", 4, serial=2))
    assert not made.spawned()


def test_a_count_from_before_the_devices_were_forwarded_is_not_believed():
    made, _ = running()
    made.deliver(committed()).deliver(waiting("s0", 3, "evaluation", serial=1))
    made.deliver(waiting("s0", 4, serial=1))  # Not yet forwarded for the second attempt.
    done = committed("evaluation", attempt="me/round/2")
    made.deliver(done)
    assert not made.heartbeat(102.0).spawned()
    assert made.deliver(waiting("s0", 4, serial=1)).spawned()  # It never will.


def test_tasks_get_their_shares():
    made = leading()
    begun = []
    for i in range(1, 10):
        (wish,) = made.sent("s0", messages.SelectDevices)
        begun.append(wish.task)
        made.deliver(waiting("s0", wish.wanted, wish.task, serial=i))
        assert len(made.spawned()) == 1
        done = committed(wish.task, begun.count(wish.task), attempt=f"me/round/{i}")
        made.deliver(done)
    assert begun.count("training") == 6 and begun.count("evaluation") == 3


def test_a_task_that_is_over_begins_no_round():
    training = dataclasses.replace(
        SERVED.task("training"), num_rounds=2, refusal=lambda commit: None
    )
    served = dataclasses.replace(SERVED, tasks=(training,))
    made = leading(served, training=2)
    (wish,) = made.sent("s0")
    assert (wish.task, wish.accepting) == ("", False)
    assert not made.deliver(waiting("s0", 9, "")).spawned()
    guarded = dataclasses.replace(
        SERVED.task("training"),
        refusal=lambda commit: "the budget is spent" if commit.rounds_done == 1 else None,
    )
    made = leading(dataclasses.replace(SERVED, tasks=(guarded,)))
    made.deliver(waiting("s0", 4)).deliver(committed())
    assert made.sent("s0")[-1].task == ""


def test_only_what_is_committed_is_released():
    made, spawn = running()
    made.deliver(committed())
    (released,) = made.sent(events.OBSERVER)
    assert (released.round_index, released.metrics["loss"]) == (0, 0.5)
    assert not made.deliver(committed()).effects
    assert not made.deliver(committed(rounds_done=2, epoch=2)).effects


def noted(known=None):
    """The commits, with the first attempt at the next round of training."""
    training, evaluation = commits() if known is None else known
    return dataclasses.replace(training, attempt="me/round/1"), evaluation


def reread(made, now=101.0, known=None, **rounds_done):
    """Answers the last question for the commits."""
    (asked,) = made.sent("store", messages.ReadCommits)
    known = commits(**rounds_done) if known is None else known
    return made.deliver(messages.CommitsRead(asked.request, known), now)


def skipped(attempt, rounds_done=1):
    metrics = {"attempt": attempt, population.SKIPPED: True}
    commit = interface.Commit("training", rounds_done, 3, b"model 0", b"secret", metrics)
    return messages.RoundCommitted(attempt, 3, commit)


def test_a_failed_attempt_uses_its_round_up_once_the_store_was_read():
    made, spawn = running()
    made.deliver(messages.RoundAbandoned(spawn.address, "too few reports", {"dropped": 2}))
    (lost,) = made.sent(events.OBSERVER, events.RoundLost)
    assert (lost.round_index, lost.reason, lost.counts) == (0, "too few reports", {"dropped": 2})
    (asked,) = made.sent("store")
    assert not made.deliver(waiting("s0", 4, serial=1)).spawned()
    made.deliver(messages.CommitsRead(asked.request - 1, commits(5)))
    assert not made.effects  # The answer to an earlier question.
    (skip,) = made.deliver(messages.CommitsRead(asked.request, noted())).spawned()
    assert (skip.role.skips, skip.role.commit.rounds_done, skip.role.expected) == (
        True,
        0,
        frozenset(),
    )
    # Devices are chosen for the round after it, and wait while it is skipped.
    (wish, *_) = made.sent("s0", messages.SelectDevices)
    assert wish.accepting
    assert not made.deliver(waiting("s0", 4, wish.task, serial=1)).spawned()
    made.deliver(skipped(skip.address))
    assert made.sent(events.OBSERVER, events.RoundSkipped) == [
        events.RoundSkipped("training", 0, skip.address)
    ]
    (wish, *_) = made.sent("s0", messages.SelectDevices)
    (again,) = made.deliver(waiting("s0", 4, wish.task, serial=1)).spawned()
    assert again.address not in (spawn.address, skip.address)
    assert not again.role.skips


def test_a_round_that_a_former_leader_has_tried_is_skipped():
    """After a kill, or an outage that is longer than the lease, nobody remembers the attempt."""
    made = Leader().deliver(messages.LeaseGranted(3, 100.0))
    (skip,) = reread(made, known=noted()).spawned()
    assert skip.role.skips and skip.role.commit.rounds_done == 0
    assert not made.deliver(waiting("s0", 4)).spawned()
    made.deliver(skipped(skip.address))
    (wish, *_) = made.sent("s0", messages.SelectDevices)
    (attempt,) = made.deliver(waiting("s0", 4, wish.task, serial=1)).spawned()
    assert not attempt.role.skips


def test_an_attempt_that_has_used_no_device_is_repeated():
    made, spawn = running()
    reason = "devices were not forwarded in time"
    made.deliver(messages.RoundAbandoned(spawn.address, reason, {}, used_devices=False))
    assert not reread(made).spawned()
    (wish, *_) = made.sent("s0", messages.SelectDevices)
    (again,) = made.deliver(waiting("s0", 4, wish.task, serial=1)).spawned()
    assert not again.role.skips


def test_a_commit_that_was_made_after_all_is_not_skipped():
    made, spawn = running()
    made.deliver(messages.Lost(spawn.address))
    assert not reread(made, training=1).spawned()
    assert made.sent(events.OBSERVER, events.RoundReleased)


def resting(count, waits=1, selector="s0"):
    return messages.DevicesWaiting(selector, 3, "training", 0, waits, count)


def test_a_round_for_which_devices_have_to_rest_is_skipped_but_not_for_ever():
    training = dataclasses.replace(SERVED.task("training"), min_sep=3, pipelined=False)
    served = dataclasses.replace(SERVED, tasks=(training,))
    made, now, rounds, came = leading(served, training=5), 101.0, [], 0
    for _ in range(8):
        came += 2
        made.deliver(resting(came), now)
        now += training.rounds.selection_timeout
        made.deliver(messages.LeaseGranted(3, now), now)
        made.heartbeat(now)
        for skip in made.spawned():
            assert skip.role.skips
            rounds.append(skip.role.commit.rounds_done)
            made.deliver(skipped(skip.address, rounds[-1] + 1), now)
        assert made.deliver(resting(came), now).spawned() == []
    # An earlier Coordinator may have made an attempt at round 5: its devices rest up to round 7.
    assert rounds == [5, 6, 7]


def test_devices_have_the_selection_time_after_an_attempt_before_a_round_is_skipped():
    """Who came by during the attempt says nothing of those that could come after it."""
    training = dataclasses.replace(SERVED.task("training"), min_sep=3, pipelined=False)
    made = leading(dataclasses.replace(SERVED, tasks=(training,))).deliver(waiting("s0", 4))
    (spawn,) = made.spawned()
    ends = 101.0 + training.rounds.selection_timeout
    made.deliver(messages.LeaseGranted(3, ends), ends - 0.5)
    made.deliver(messages.DevicesWaiting("s0", 3, "training", 1, 0, 9), ends - 0.5)
    made.deliver(committed(attempt=spawn.address), ends)
    made.deliver(messages.DevicesWaiting("s0", 3, "training", 1, 1, 9), ends)
    assert not made.heartbeat(ends + 0.1).spawned()
    later = ends + training.rounds.selection_timeout
    made.deliver(messages.LeaseGranted(3, later), later)
    assert not made.heartbeat(later).spawned()  # Nobody has come since.
    assert made.sent(events.OBSERVER, events.TooFewDevices)
    made.deliver(messages.DevicesWaiting("s0", 3, "training", 1, 1, 12), later)
    later += training.rounds.selection_timeout
    made.deliver(messages.LeaseGranted(3, later), later)
    (skip,) = made.heartbeat(later).spawned()
    assert skip.role.skips
    (few,) = made.sent(events.OBSERVER, events.TooFewDevices)
    assert few == events.TooFewDevices("training", 1, 2, 3, rounds_done=1)


def test_devices_that_rest_when_no_min_sep_makes_them_are_told_apart():
    """After `min_sep` skipped rounds, other limits hold the devices back: no round is skipped."""
    training = dataclasses.replace(SERVED.task("training"), min_sep=3, pipelined=False)
    made = leading(dataclasses.replace(SERVED, tasks=(training,))).deliver(resting(9, 1))
    for is_over in (False, True):
        now = made.actor.now + training.rounds.selection_timeout
        made.deliver(messages.LeaseGranted(3, now), now)
        made.deliver(resting(18 if is_over else 9), now)
        assert made.sent(events.OBSERVER, events.TooFewDevices) == [
            events.TooFewDevices("training", 1, 2, 9, is_over, 3 * is_over)
        ]
        for index in range(0 if is_over else 3):
            (skip,) = made.spawned()
            made.deliver(skipped(skip.address, index + 1), now).deliver(resting(9), now)
        assert not made.spawned()


def test_selectors_hear_when_nothing_is_left():
    one = dataclasses.replace(SERVED.task("training"), num_rounds=7)
    served = dataclasses.replace(SERVED, tasks=(one,))
    before = Leader(served).deliver(messages.LeaseGranted(3, 100.0))
    assert [wish.is_finished for wish in before.sent("s0")] == [False]  # Nothing is known yet.
    (wish,) = leading(served, training=6).sent("s0")
    assert (wish.accepting, wish.is_finished) == (True, False)
    (wish,) = leading(served, training=7).sent("s0")
    assert (wish.accepting, wish.is_finished) == (False, True)


@pytest.mark.parametrize(("waits", "came"), [(1, 0), (0, 1)])
def test_no_round_is_skipped_for_devices_that_do_not_come(waits, came):
    training = dataclasses.replace(SERVED.task("training"), min_sep=3)
    made = leading(dataclasses.replace(SERVED, tasks=(training,))).deliver(resting(came, waits))
    made.deliver(messages.LeaseGranted(3, 107.0), 107.0)
    assert not made.heartbeat(107.0).spawned()
    assert made.sent(events.OBSERVER)[:1] == [events.TooFewDevices("training", waits, 2, came)]


def test_devices_are_spared_while_the_store_makes_no_commit():
    made, spawn = running()
    now, waits = 101.0, []
    made.deliver(messages.RoundAbandoned(spawn.address, "disk full", {}, not_stored=True), now)
    lost = made.sent(events.OBSERVER, events.RoundLost)
    reread(made, now, noted())
    for _ in range(8):
        failed_at = now
        while not made.spawned():
            now += SERVED.heartbeat_seconds
            made.deliver(messages.LeaseGranted(3, now), now)
            made.heartbeat(now)
        (skip,) = made.spawned()
        assert skip.role.skips  # Nothing but this is tried: no device is asked for anything.
        waits.append((now - failed_at) / SERVED.heartbeat_seconds)
        made.deliver(waiting("s0", 4, serial=1), now)
        abandoned = messages.RoundAbandoned(skip.address, "disk full", {}, not_stored=True)
        lost += made.deliver(abandoned, now).sent(events.OBSERVER, events.RoundLost)
        reread(made, now, noted())
    assert waits == [1, 2, 4, 8, 16, 32, 32, 32]
    assert len(lost) == 1  # One cohort was lost: the same line for each skip would look like more.
    while not made.spawned():
        now += SERVED.heartbeat_seconds
        made.deliver(messages.LeaseGranted(3, now), now)
        made.heartbeat(now)
    (skip,) = made.spawned()
    made.deliver(skipped(skip.address), now)
    (wish, *_) = made.sent("s0", messages.SelectDevices)
    assert made.deliver(waiting("s0", 4, wish.task, serial=9), now).spawned()


@pytest.mark.parametrize("how", ["notice", "time"])
def test_a_lost_master_aggregator_may_have_committed(how):
    made, spawn = running()
    if how == "notice":
        made.deliver(messages.Lost("somebody")).deliver(messages.Lost(spawn.address))
    else:
        made.deliver(messages.LeaseGranted(3, 118.0), 108 - 0.1)
        made.heartbeat(101.0 + SERVED.task("training").rounds.longest)
        assert made.sent(spawn.address) == [messages.AbandonRound("its time is over")]
    (asked,) = made.sent("store", messages.ReadCommits)
    made.deliver(messages.CommitsRead(asked.request, commits(training=1)), 107.0)
    assert made.sent(events.OBSERVER, events.RoundReleased)[0].round_index == 0


def test_an_earlier_attempt_that_commits_after_all_ends_the_later_one():
    made, first = running()
    made.deliver(messages.RoundAbandoned(first.address, "the store did not answer", {}))
    (asked,) = made.sent("store")
    made.deliver(messages.CommitsRead(asked.request, noted(commits(evaluation=3))))
    (second,) = made.spawned()
    made.deliver(committed(attempt=first.address))
    assert made.sent(second.address) == [messages.AbandonRound("the round is committed")]
    assert made.sent(events.OBSERVER, events.RoundReleased)


NOISED = simulation.noised_population(2)
PARTIES = noise_parties.public_keys(2)


def _ready(*parties, next_round=4):
    return tuple(
        messages.PartyReady(f"party {i}", PARTIES[i], "training", next_round) for i in parties
    )


def _count(selector, count, parties=(), serial=0):
    return messages.DevicesWaiting(selector, 3, "training", serial, count, parties=parties)


def test_a_round_waits_for_all_noise_parties():
    made = leading(NOISED, training=4)
    made.deliver(_count("s0", 9, _ready(0)))
    assert not made.spawned()
    made.deliver(_count("s1", 0, _ready(1)))  # At another Selector.
    (spawn,) = made.spawned()
    assert spawn.role.parties == ("party 0", "party 1") and not spawn.role.skips
    # These connections are given away: the next round waits for others.
    made.deliver(committed(rounds_done=5, attempt=spawn.address))
    assert not made.deliver(_count("s0", 9, _ready(0, 1), serial=1)).spawned()
    again = tuple(dataclasses.replace(p, address=f"new {p.address}") for p in _ready(0, 1))
    (spawn,) = made.deliver(_count("s0", 9, again, serial=1)).spawned()
    assert spawn.role.parties == ("new party 0", "new party 1")


def test_a_party_of_a_silent_selector_is_away():
    made = leading(NOISED)
    made.deliver(_count("s1", 0, _ready(1, next_round=0)), 101.0)
    made.deliver(messages.LeaseGranted(3, 105.0), 106.5)
    assert not made.deliver(_count("s0", 9, _ready(0, next_round=0)), 106.5).spawned()


def test_rounds_whose_noise_was_given_are_skipped_before_an_attempt():
    made = leading(NOISED, training=4)
    parties = (*_ready(0), *_ready(1, next_round=6))
    (spawn,) = made.deliver(_count("s0", 9, parties)).spawned()
    assert spawn.role.skips and spawn.role.commit.rounds_done == 4
    assert made.sent(events.OBSERVER, events.PartyAway) == [events.PartyAway("training", 0, 2, 2)]
    skipped = interface.Commit(
        "training", 5, 3, b"", b"secret", {"attempt": spawn.address, population.SKIPPED: True}
    )
    made.deliver(messages.RoundCommitted(spawn.address, 3, skipped))
    (spawn,) = made.deliver(_count("s0", 9, parties)).spawned()
    assert spawn.role.skips and spawn.role.commit.rounds_done == 5
    assert not made.sent(events.OBSERVER, events.PartyAway)  # It was said.
    skipped = dataclasses.replace(
        skipped, rounds_done=6, metrics={**skipped.metrics, "attempt": spawn.address}
    )
    made.deliver(messages.RoundCommitted(spawn.address, 3, skipped))
    (spawn,) = made.deliver(_count("s0", 9, parties)).spawned()
    assert not spawn.role.skips and spawn.role.commit.rounds_done == 6


def test_an_attempt_of_noise_parties_that_fails_costs_its_round():
    made = leading(NOISED, training=4).deliver(_count("s0", 9, _ready(0, 1)))
    (spawn,) = made.spawned()
    made.deliver(messages.RoundAbandoned(spawn.address, "too few reports", {}))
    (asked,) = made.sent("store", messages.ReadCommits)
    known = interface.Commit("training", 4, 1, b"model 4", b"secret", attempt=spawn.address)
    made.deliver(messages.CommitsRead(asked.request, (known,)))
    (spawn,) = made.spawned()
    assert spawn.role.skips and spawn.role.commit.rounds_done == 4


def test_it_says_that_a_noise_party_is_away_and_that_it_is_back():
    made = leading(NOISED)
    away = events.PartyAway("training", 1, 2)
    made.deliver(_count("s0", 9, _ready(0, next_round=0)))
    assert not made.heartbeat(102.0).sent(events.OBSERVER, events.PartyAway)
    made.deliver(messages.LeaseGranted(3, 102.0))
    made.deliver(_count("s0", 9, _ready(0, next_round=0)), 103.0)
    assert made.heartbeat(104.0).sent(events.OBSERVER, events.PartyAway) == [away]
    assert not made.heartbeat(104.5).sent(events.OBSERVER, events.PartyAway)
    made.deliver(_count("s0", 9), 104.6)
    assert not made.heartbeat(104.7).sent(events.OBSERVER, events.PartyAway)
    both = dataclasses.replace(away, away=2)
    assert made.heartbeat(104.8).sent(events.OBSERVER, events.PartyAway) == [both]
    made.deliver(_count("s0", 0, _ready(0, 1, next_round=0)), 105.0)
    back = events.PartyAway("training", 0, 2)
    assert made.heartbeat(106.0).sent(events.OBSERVER, events.PartyAway) == [back]
