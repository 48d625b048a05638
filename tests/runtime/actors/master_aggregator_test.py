import dataclasses

import pytest

from tff_dpftrl.runtime.actors import actor, master_aggregator, messages, roles
from tff_dpftrl.runtime.store import contents, interface
from verification.schedules import simulation, toy_task

TASK = simulation.small_population().task("training")  # Goal 3, least 2, groups of 2.
COMMIT = interface.Commit("training", 5, 1, b"model 5", b"training|seed|5")
ROLE = roles.MasterAggregatorRole("leader", 2, COMMIT, b"model 5", frozenset({"s0", "s1"}))

BEGIN = messages.BeginAttempt("attempt", 2, "training", 5)


class Attempt:
    """A Master Aggregator and what it did last; the store notes the attempt at once."""

    def __init__(self, task=TASK, role=ROLE, *, is_noted=True):
        self.is_noted = is_noted
        self.actor = master_aggregator.MasterAggregator("attempt", "store", task, role)
        self.effects = self.actor.start(0.0)
        self.timers = []

    def deliver(self, message, now=1.0):
        self.timers += [one for one in self.effects if isinstance(one, actor.After)]
        self.effects = self.actor.step(now, message)
        if self.is_noted and BEGIN in self.sent("store"):
            self.deliver(messages.AttemptBegun(), now)
        return self

    def sent(self, to):
        return [
            effect.message
            for effect in self.effects
            if isinstance(effect, actor.Send) and effect.to == to
        ]

    def spawned(self):
        return [effect for effect in self.effects if isinstance(effect, actor.Spawn)]

    def stopped(self):
        return {effect.address for effect in self.effects if isinstance(effect, actor.Stop)}

    def wait(self):
        """Lets the last time-out pass."""
        timers = [one for one in (*self.timers, *self.effects) if isinstance(one, actor.After)]
        return self.deliver(timers[-1].message)


def forwarded(selector, *devices):
    return messages.DevicesForwarded(selector, devices)


def reporting():
    return Attempt().deliver(forwarded("s0", "a", "b", "c")).deliver(forwarded("s1", "d"))


def counted(i, accepted, outstanding, is_short=False):
    return messages.ReportsCounted(f"attempt/aggregator/{i}", accepted, outstanding, is_short)


def part(i, *names, **counts):
    counts = {"reports": len(names), **counts}
    return messages.PartialSum(f"attempt/aggregator/{i}", list(names), counts)


class _ReadingStep(toy_task.NameStep):
    """The step of the toy task, with a state that it reads first."""

    def apply(self, total, num_reports, model, state):
        return super().apply(total, num_reports, model, bytes(state))

    def skip(self, model, state):
        return super().skip(model, bytes(state))


def committing():
    made = reporting().deliver(counted(0, 2, 0)).deliver(counted(1, 1, 1))
    return made.deliver(part(0, "a", "c")).deliver(part(1, "b", outstanding=1))


def test_devices_are_divided_among_aggregators_when_all_selectors_have_answered():
    made = Attempt().deliver(forwarded("s0", "a", "b", "c"))
    assert not made.spawned()
    made.deliver(forwarded("s1", "d"))
    groups = [effect.role.devices for effect in made.spawned()]
    assert groups == [("a", "c"), ("b", "d")]
    role = made.spawned()[0].role
    assert (role.attempt, role.round_index, role.model) == ("attempt", 5, b"model 5")


def test_no_device_takes_part_before_the_store_has_noted_the_attempt():
    def choosing():
        made = Attempt(is_noted=False).deliver(forwarded("s0", "a", "b"))
        made.deliver(forwarded("s1", "c"))
        assert made.sent("store") == [BEGIN] and not made.spawned()
        return made

    assert len(choosing().deliver(messages.AttemptBegun()).spawned()) == 2
    reason = "Another attempt has begun before."
    for made in (choosing().deliver(messages.CommitRefused(reason)), choosing().wait()):
        (abandoned,) = made.sent("leader")
        assert abandoned.not_stored and not abandoned.used_devices
        for device in "abc":
            (away,) = made.sent(device)
            assert isinstance(away, messages.ComeBack)
        assert not made.deliver(messages.AttemptBegun()).effects


def test_a_selector_that_does_not_answer_is_not_waited_for():
    made = Attempt().deliver(forwarded("s0", "a", "b")).wait()
    assert [effect.role.devices for effect in made.spawned()] == [("a", "b")]
    made.deliver(forwarded("s1", "late"))
    assert made.sent("late") == [messages.ComeBack("late", (0.0,), "the round was abandoned")]
    assert not made.deliver(forwarded("s1", "late")).effects


def test_with_too_few_devices_nothing_begins():
    made = Attempt().deliver(forwarded("s0", "a")).wait()
    assert made.sent("a")[0].reason == "the round was abandoned"
    (reply,) = made.sent("leader")
    assert reply.reason == "devices were not forwarded in time"
    assert made.stopped() == {"attempt"}


def test_the_goal_closes_reporting():
    made = reporting().deliver(counted(0, 2, 0))
    assert not made.sent("attempt/aggregator/0")
    made.deliver(counted(1, 1, 1))
    assert made.sent("attempt/aggregator/0") == [messages.CloseReporting()]
    assert made.sent("attempt/aggregator/1") == [messages.CloseReporting()]


def test_reporting_closes_early_when_nobody_is_left_and_late_by_its_time_out():
    made = reporting().deliver(counted(0, 1, 0)).deliver(counted(1, 0, 0))
    assert made.sent("attempt/aggregator/0") == [messages.CloseReporting()]
    made = reporting().deliver(counted(0, 1, 1)).wait()
    assert made.sent("attempt/aggregator/1") == [messages.CloseReporting()]


def test_silent_devices_are_given_up_once_others_have_had_time():
    made = reporting().deliver(counted(0, 2, 0), now=1.5)  # Half of the goal, after 0.5 seconds.
    (timer,) = [one for one in made.effects if isinstance(one, actor.After)]
    assert timer.seconds == TASK.rounds.patience(0.5) - 0.5 == 1.5
    made.deliver(timer.message, now=3.0)
    assert made.sent("attempt/aggregator/0") == [messages.DropSilent()]
    (last,) = [one for one in made.effects if isinstance(one, actor.After)]
    assert last.seconds == 2.0  # For who is sending.
    assert made.deliver(last.message, now=5.0).sent("attempt/aggregator/0") == [
        messages.CloseReporting()
    ]


def test_reporting_closes_when_all_that_are_left_were_silent():
    made = reporting().deliver(counted(0, 2, 0), now=1.5)
    (timer,) = [one for one in made.effects if isinstance(one, actor.After)]
    made.deliver(timer.message, now=3.0).deliver(counted(1, 0, 0), now=3.1)
    assert made.sent("attempt/aggregator/0") == [messages.CloseReporting()]
    made.deliver(part(0, "a", "c")).deliver(part(1, dropped=2))
    assert made.sent("store")  # Two of three are enough.


def test_devices_have_the_time_that_they_needed_before():
    role = dataclasses.replace(ROLE, half_seconds=1.0)
    made = Attempt(role=role).deliver(forwarded("s0", "a", "b", "c")).deliver(forwarded("s1", "d"))
    (timer,) = [one for one in made.effects if getattr(one, "seconds", 0) == 4.0]
    # Half has come in less time: the time of earlier rounds holds.
    made.deliver(counted(0, 2, 0), now=1.5)
    assert not [one for one in made.effects if isinstance(one, actor.After)]
    assert made.deliver(timer.message, now=5.0).sent("attempt/aggregator/0") == [
        messages.DropSilent()
    ]
    # In more time than expected: the first timer is void.
    made = Attempt(role=role).deliver(forwarded("s0", "a", "b", "c")).deliver(forwarded("s1", "d"))
    made.deliver(counted(0, 2, 0), now=2.25)
    assert not made.deliver(timer.message, now=5.0).effects


def test_more_devices_than_a_sum_has_room_for_are_divided_into_as_many_groups():
    made = Attempt().deliver(forwarded("s0", *"abcdef")).deliver(forwarded("s1", *"ghi"))
    roles_made = [effect.role for effect in made.spawned()]
    assert [len(role.devices) for role in roles_made] == [5, 4]
    assert [role.most_reports for role in roles_made] == [2, 2]


def test_the_turnout_says_who_may_have_reported_too():
    made = reporting().deliver(counted(0, 1, 0)).deliver(counted(1, 0, 0))  # All are gone.
    made.deliver(part(0, "a", dropped=1)).deliver(part(1, dropped=2))
    (reply,) = made.sent("leader")
    assert reply.turnout == messages.Turnout(4, 1, 0, 0.0)
    made = reporting().deliver(counted(0, 2, 0)).deliver(counted(1, 1, 1))
    made.deliver(part(0, "a", "c", late=2)).deliver(part(1, "b", outstanding=1))
    made.deliver(messages.RoundStored(dataclasses.replace(COMMIT, rounds_done=6)))
    assert made.sent("leader")[0].turnout == messages.Turnout(4, 3, 3, 0.0)
    made = reporting().deliver(messages.Lost("attempt/aggregator/0"))
    made.deliver(counted(1, 1, 0)).deliver(part(1, "b"))
    assert made.sent("leader")[0].turnout is None


def test_counts_that_were_overtaken_do_not_go_back():
    made = reporting().deliver(counted(0, 2, 0)).deliver(counted(0, 1, 1))
    assert made.deliver(counted(1, 1, 1)).sent("attempt/aggregator/0")


def test_the_sum_is_noised_and_goes_to_the_store_only():
    made = committing()
    (commit,) = made.sent("store")
    assert (commit.epoch, commit.task, commit.round_index) == (2, "training", 5)
    result = toy_task.Noised.parse(commit.model.decode())
    assert result.devices == ("a", "b", "c") and result.noise.startswith("seed:5:")
    assert commit.state == b"training|seed|6"
    assert commit.metrics["devices/reports"] == 3
    assert commit.metrics["attempt"] == "attempt"
    assert {effect.to for effect in made.effects if isinstance(effect, actor.Send)} == {"store"}


def test_a_commit_is_reported_to_the_coordinator():
    done = dataclasses.replace(COMMIT, rounds_done=6)
    made = committing().deliver(messages.RoundStored(done))
    turnout = messages.Turnout(4, 3, 1, 0.0)
    assert made.sent("leader") == [messages.RoundCommitted("attempt", 2, done, turnout)]
    assert made.stopped() == {"attempt", "attempt/aggregator/0", "attempt/aggregator/1"}


@pytest.mark.parametrize(
    "error", [interface.StoreError("disk full"), interface.UnknownTask("keyboard", "nwp")]
)
def test_a_state_that_cannot_be_read_is_a_commit_that_the_store_refuses(error):
    class LeftInStore(contents.InMemory):
        def parts(self):
            raise error

    commit = dataclasses.replace(COMMIT, state=LeftInStore([b""]))
    task = dataclasses.replace(TASK, server_step=_ReadingStep())
    made = Attempt(task, dataclasses.replace(ROLE, commit=commit))
    made.deliver(forwarded("s0", "a", "c")).deliver(forwarded("s1", "b", "d"))
    made.deliver(counted(0, 2, 0)).deliver(counted(1, 1, 1))
    made.deliver(part(0, "a", "c")).deliver(part(1, "b", outstanding=1))
    (reply,) = made.sent("leader")  # Which makes a pause before it takes more devices.
    assert (reply.reason, reply.not_stored, reply.used_devices) == (str(error), True, True)
    skip = Attempt(task, dataclasses.replace(ROLE, commit=commit, skips=True))
    (reply,) = skip.sent("leader")
    assert (reply.not_stored, reply.used_devices) == (True, False)


def test_a_refused_commit_releases_nothing():
    made = committing().deliver(messages.CommitRefused("stale"))
    (reply,) = made.sent("leader")
    assert (reply.reason, reply.not_stored) == ("stale", True)
    assert "attempt" in made.stopped()


def test_the_store_is_asked_again_with_the_same_result_and_then_given_up():
    made = committing()
    (first,) = made.sent("store")
    assert made.wait().sent("store") == [first]
    assert made.wait().sent("store") == [first]
    (reply,) = made.wait().sent("leader")
    assert reply.reason == "the store did not answer"


def test_a_sum_is_merged_once_and_only_when_it_was_asked_for():
    made = reporting().deliver(part(0, "early")).deliver(counted(0, 2, 0)).deliver(counted(1, 1, 1))
    made.deliver(part(0, "a", "c")).deliver(part(0, "a", "c"))
    assert not made.sent("store")
    made.deliver(part(7, "stranger")).deliver(part(1, "b"))
    (commit,) = made.sent("store")
    assert toy_task.Noised.parse(commit.model.decode()).devices == ("a", "b", "c")


def test_a_lost_aggregator_takes_its_devices_with_it():
    made = reporting().deliver(counted(0, 2, 0))
    made.deliver(messages.Lost("attempt/aggregator/1"))  # Nobody else is outstanding.
    assert made.sent("attempt/aggregator/0") == [messages.CloseReporting()]
    (commit,) = made.deliver(part(0, "a", "c")).sent("store")
    assert toy_task.Noised.parse(commit.model.decode()).devices == ("a", "c")
    assert commit.metrics["devices/lost_aggregators"] == 1


def test_an_aggregator_that_is_lost_with_its_sum_is_counted_and_one_whose_sum_has_come_is_not():
    made = (
        reporting().deliver(counted(0, 2, 0)).deliver(counted(1, 1, 1)).deliver(part(0, "a", "c"))
    )
    made.deliver(messages.Lost("attempt/aggregator/0"))
    assert not made.sent("store")
    (commit,) = made.deliver(messages.Lost("attempt/aggregator/1")).sent("store")
    assert commit.metrics["devices/lost_aggregators"] == 1
    assert commit.metrics["devices/reports"] == 2


def test_an_aggregator_that_does_not_hand_over_its_sum_is_lost():
    made = (
        reporting().deliver(counted(0, 2, 0)).deliver(counted(1, 1, 1)).deliver(part(0, "a", "c"))
    )
    (commit,) = made.wait().sent("store")
    assert commit.metrics["devices/lost_aggregators"] == 1
    assert commit.metrics["devices/reports"] == 2


def test_with_too_few_reports_the_attempt_is_abandoned():
    made = reporting().wait().deliver(part(0, "a", dropped=1)).deliver(part(1))
    (reply,) = made.sent("leader")
    assert reply.reason == "too few reports"
    assert reply.counts["dropped"] == 1
    assert not made.sent("store")


def test_all_aggregators_lost_is_an_end():
    made = reporting().deliver(messages.Lost("attempt/aggregator/0"))
    (reply,) = made.deliver(messages.Lost("attempt/aggregator/1")).sent("leader")
    assert reply.reason == "all Aggregators are lost"


SECURE_TASK = simulation.secure_population().task("training")  # Goal 5, least 2, groups of 2.


def secure_reporting():
    made = (
        Attempt(SECURE_TASK)
        .deliver(forwarded("s0", "a", "b", "c"))
        .deliver(forwarded("s1", *"defg"))
    )
    assert [len(effect.role.devices) for effect in made.spawned()] == [4, 3]
    return made


def test_too_few_devices_for_a_secure_sum_do_not_begin():
    rounds = dataclasses.replace(SECURE_TASK.rounds, goal_count=2)
    made = Attempt(dataclasses.replace(SECURE_TASK, rounds=rounds))
    made.deliver(forwarded("s0", "a")).deliver(forwarded("s1"))
    (reply,) = made.sent("leader")
    assert reply.reason == "too few devices for the groups of a secure sum"
    assert made.sent("a")[0].reason == "the round was abandoned"


def test_the_goal_does_not_close_a_group_that_would_be_lost():
    made = secure_reporting().deliver(counted(0, 4, 0))
    made.deliver(counted(1, 1, 2, is_short=True))
    assert not made.sent("attempt/aggregator/0")
    made.deliver(counted(1, 2, 1))
    assert made.sent("attempt/aggregator/0") == [messages.CloseReporting()]
    (timer,) = [one for one in made.effects if isinstance(one, actor.After)]
    assert timer.seconds == SECURE_TASK.longest_closing() > SECURE_TASK.rounds.exchange_timeout


def test_who_was_there_and_left_counts_no_more():
    made = secure_reporting().deliver(counted(0, 3, 1)).deliver(counted(0, 2, 1))
    made.deliver(counted(0, 3, 1)).deliver(counted(1, 2, 1))
    assert not made.sent("attempt/aggregator/0")
    made.deliver(counted(0, 3, 0))
    assert made.sent("attempt/aggregator/0") == [messages.CloseReporting()]


def test_a_lost_group_leaves_the_sum_to_the_others():
    made = secure_reporting().deliver(counted(0, 3, 1)).deliver(counted(1, 2, 1))
    lost = {"reports": 0, "lost_groups": 1, "group lost": 3}
    made.deliver(messages.PartialSum("attempt/aggregator/0", None, lost))
    (commit,) = made.deliver(part(1, "b", "d")).sent("store")
    assert toy_task.Noised.parse(commit.model.decode()).devices == ("b", "d")
    assert commit.metrics["devices/lost_groups"] == 1


def test_no_sum_is_decoded_of_more_devices_than_its_moduli_have_room_for():
    made = secure_reporting().deliver(counted(0, 3, 1)).deliver(counted(1, 2, 1))
    made.deliver(part(0, "a", "c", "e", "g", reports=7))
    (reply,) = made.deliver(part(1, "b", "d")).sent("leader")
    assert reply.reason == "more devices in the sum than its moduli have room for"
    assert not made.sent("store")


@pytest.mark.parametrize("phase", [Attempt, reporting, committing])
def test_the_coordinator_can_end_it_in_any_phase(phase):
    made = phase().deliver(messages.AbandonRound("the lease is lost"))
    assert made.sent("leader")[0].reason == "the lease is lost"
    assert "attempt" in made.stopped()
    assert not made.deliver(messages.AbandonRound("again")).effects
