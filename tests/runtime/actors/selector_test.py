import collections
import dataclasses
import math
import random

import pytest

from tff_dpftrl.runtime.actors import actor, messages, roles, selector
from verification.schedules import simulation

SERVED = simulation.small_population()
BOTH = frozenset({"training", "evaluation"})
WISH = messages.SelectDevices(3, "leader", "training", 2, True)


def make(seed=0, wish=WISH):
    made = selector.Selector("selector", SERVED, random.Random(seed), lambda *_: (7.0, 9.0))
    made.start(0.0)
    if wish is not None:
        made.step(0.0, wish)
    return made


def sent(effects, kind):
    return [
        effect.message
        for effect in effects
        if isinstance(effect, actor.Send) and isinstance(effect.message, kind)
    ]


def check_in(made, device, tasks=BOTH, peer=""):
    return made.step(1.0, messages.CheckIn(device, tasks, peer))


def forward(serial, count, epoch=3, then=WISH):
    return messages.ForwardDevices(epoch, serial, f"attempt {serial}", "training", count, then)


def test_devices_wait_until_as_many_are_there_as_are_wanted():
    made = make()
    assert check_in(made, "a") == []
    (reply,) = sent(check_in(made, "b"), messages.DevicesWaiting)
    assert reply == messages.DevicesWaiting("selector", 3, "training", 0, 2)
    assert check_in(made, "b") == []  # Once more over the same connection.
    (away,) = sent(check_in(made, "c"), messages.ComeBack)
    assert (away.turns, away.reason) == ((7.0, 9.0), "enough devices are waiting")
    (forwarded,) = sent(made.step(2.0, forward(1, 2)), messages.DevicesForwarded)
    assert len(forwarded.devices) == 2 and away.device not in forwarded.devices


@pytest.mark.parametrize("peers", ["", "01234567"], ids=["of one address", "of many"])
def test_reservoir_sampling_gives_everybody_the_same_chance(peers):
    wanted, came, repetitions = 3, 8, 4000
    chosen = collections.Counter()
    for seed in range(repetitions):
        made = make(seed, dataclasses.replace(WISH, wanted=wanted))
        for i in range(came):
            check_in(made, f"{i}", peer=peers[i : i + 1])
        (forwarded,) = sent(made.step(2.0, forward(1, wanted)), messages.DevicesForwarded)
        chosen.update(forwarded.devices)
    chance = wanted / came
    margin = 6 * math.sqrt(chance * (1 - chance) / repetitions)
    # Keeping the first three would give chances of 1 and 0; the margin is 0.05.
    for i in range(came):
        assert abs(chosen[f"{i}"] / repetitions - chance) < margin


def test_a_host_with_many_sessions_gets_no_more_places_than_others_while_others_wait():
    wanted = 10
    for seed in range(20):
        made = make(seed, dataclasses.replace(WISH, wanted=wanted))
        for i in range(40):
            check_in(made, f"silent {i}", peer="host")
        for i in range(9):
            away = sent(check_in(made, f"honest {i}", peer=f"{i}"), messages.ComeBack)
            assert away[0].device.startswith("silent")
        for i in range(40):
            check_in(made, f"silent again {i}", peer="host")
        (forwarded,) = sent(made.step(2.0, forward(1, wanted)), messages.DevicesForwarded)
        assert sum(device.startswith("silent") for device in forwarded.devices) == 1
        assert len(forwarded.devices) == wanted


def test_fewer_devices_than_wait_are_forwarded_from_many_addresses():
    made = make(wish=dataclasses.replace(WISH, wanted=6))
    for i in range(6):
        check_in(made, f"{i}", peer="host" if i < 4 else f"{i}")
    (forwarded,) = sent(made.step(2.0, forward(1, 3)), messages.DevicesForwarded)
    assert {"4", "5"} < set(forwarded.devices)


def test_who_went_away_is_not_forwarded():
    made = make()
    for device in ("a", "b"):
        check_in(made, device)
    made.step(1.0, messages.DeviceGone("a"))
    made.step(1.0, messages.DeviceGone("a"))
    (forwarded,) = sent(made.step(2.0, forward(1, 2)), messages.DevicesForwarded)
    assert forwarded.devices == ("b",)


def test_devices_are_forwarded_once():
    made = make(wish=dataclasses.replace(WISH, wanted=3))
    for device in ("a", "b", "c"):
        check_in(made, device)
    effects = made.step(2.0, forward(2, 1))
    (forwarded,) = sent(effects, messages.DevicesForwarded)
    assert len(forwarded.devices) == 1
    assert sent(effects, messages.DevicesWaiting)[0].serial == 2
    assert made.step(2.0, forward(2, 1)) == []
    assert made.step(2.0, forward(1, 1)) == []  # Overtaken.


def test_a_former_coordinator_is_not_followed():
    made = make()
    check_in(made, "a")
    assert made.step(2.0, dataclasses.replace(WISH, epoch=2, coordinator="former")) == []
    assert made.step(2.0, forward(9, 1, epoch=2)) == []
    (reply,) = sent(
        made.step(2.0, dataclasses.replace(WISH, epoch=4, coordinator="next")),
        messages.DevicesWaiting,
    )
    assert (reply.epoch, reply.waiting) == (4, 1)
    (forwarded,) = sent(made.step(2.0, forward(1, 1, epoch=4)), messages.DevicesForwarded)
    assert forwarded.devices == ("a",)


def test_devices_wait_for_tasks_that_they_can_run():
    made = make()
    (away,) = sent(check_in(made, "old", frozenset({"evaluation"})), messages.ComeBack)
    assert away.reason == "the next round is not for this version"
    check_in(made, "a", frozenset({"training"}))
    check_in(made, "b", BOTH)
    effects = made.step(2.0, dataclasses.replace(WISH, task="evaluation"))
    assert [away.device for away in sent(effects, messages.ComeBack)] == ["a"]
    assert sent(effects, messages.DevicesWaiting)[0].waiting == 1


def test_nobody_waits_when_nobody_leads_or_devices_are_not_wanted():
    (away,) = sent(check_in(make(wish=None), "a"), messages.ComeBack)
    assert away.reason == "no round is waiting for devices"
    made = make()
    check_in(made, "a")
    effects = made.step(2.0, dataclasses.replace(WISH, accepting=False))
    assert [away.device for away in sent(effects, messages.ComeBack)] == ["a"]
    assert sent(check_in(made, "b"), messages.ComeBack)


def test_devices_hear_when_nothing_is_left():
    made = make()
    check_in(made, "a")
    finished = dataclasses.replace(WISH, task="", accepting=False, is_finished=True)
    (waiting,) = sent(made.step(2.0, finished), messages.ComeBack)
    (late,) = sent(check_in(made, "b"), messages.ComeBack)
    for away in (waiting, late):
        assert away.is_finished and away.reason == "all rounds of all tasks are done"
        assert away.turns  # For devices that do not know the field.


def test_those_who_are_too_many_are_sent_away():
    made = make(wish=dataclasses.replace(WISH, wanted=5))
    for i in range(5):
        check_in(made, f"{i}")
    effects = made.step(2.0, dataclasses.replace(WISH, wanted=2))
    assert len(sent(effects, messages.ComeBack)) == 3
    assert sent(effects, messages.DevicesWaiting)[0].waiting == 2


def spawned(effects):
    return [effect.address for effect in effects if isinstance(effect, actor.Spawn)]


def test_silence_of_the_coordinator_makes_a_new_one():
    made = selector.Selector("selector", SERVED, random.Random(0), lambda *_: (0.0,))
    (timer,) = made.start(0.0)
    effects = made.step(timer.seconds, timer.message)
    (first,) = spawned(effects)  # No Coordinator has ever sent a heartbeat.
    assert any(
        isinstance(effect, actor.Spawn) and effect.role == roles.CoordinatorRole()
        for effect in effects
    )
    made.step(10.0, WISH)
    assert spawned(made.step(10.0 + SERVED.silence_seconds - 0.1, timer.message)) == []
    (second,) = spawned(made.step(10.0 + SERVED.silence_seconds, timer.message))
    assert second != first
    assert spawned(made.step(10.1 + SERVED.silence_seconds, timer.message)) == []  # It has time.


def test_the_engine_may_tell_that_the_coordinator_is_lost():
    made = make()
    assert spawned(made.step(1.0, messages.Lost("somebody else"))) == []
    assert len(spawned(made.step(1.0, messages.Lost("leader")))) == 1


def test_unknown_messages_are_mistakes():
    with pytest.raises(TypeError, match="selector got a message of the type int"):
        make().step(1.0, 5)


def test_noise_parties_are_told_of_and_are_no_devices():
    made = make()
    party = messages.PartyReady("party", b"key", "training", 3)
    (count,) = sent(made.step(1.0, party), messages.DevicesWaiting)
    assert (count.waiting, count.parties) == (0, (party,))
    check_in(made, "a")
    (count,) = sent(check_in(made, "b"), messages.DevicesWaiting)
    assert (count.waiting, count.parties) == (2, (party,))
    (forwarded,) = sent(made.step(2.0, forward(1, 2)), messages.DevicesForwarded)
    assert sorted(forwarded.devices) == ["a", "b"]
    (count,) = sent(made.step(3.0, messages.DeviceGone("party")), messages.DevicesWaiting)
    assert count.parties == ()


def test_noise_parties_are_sent_away_when_all_rounds_are_done():
    made = make()
    made.step(1.0, messages.PartyReady("party", b"key", "training", 3))
    over = dataclasses.replace(WISH, accepting=False, is_finished=True)
    (away,) = sent(made.step(2.0, over), messages.ComeBack)
    assert away.device == "party" and away.is_finished


def test_a_noise_party_that_comes_before_a_coordinator_waits_for_it():
    made = make(wish=None)
    party = messages.PartyReady("party", b"key", "training", 3)
    assert not made.step(1.0, party)
    (count,) = sent(made.step(2.0, WISH), messages.DevicesWaiting)
    assert count.parties == (party,)
