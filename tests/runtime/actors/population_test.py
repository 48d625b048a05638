import dataclasses
import re

import pytest

from tff_dpftrl.runtime.actors import events, population
from tff_dpftrl.secure_sums import parameters, vectors
from verification.schedules import noise_parties, simulation

SERVED = simulation.small_population()
SIZES = population.RoundSettings(goal_count=100)


def test_sizes_of_a_round():
    assert (SIZES.wanted, SIZES.least) == (130, 80)
    odd = dataclasses.replace(SIZES, goal_count=3, over_selection=1.1, least_fraction=0.5)
    assert (odd.wanted, odd.least) == (4, 2)
    exact = dataclasses.replace(SIZES, over_selection=1.0, least_fraction=1.0)
    assert (exact.wanted, exact.least) == (100, 100)


def test_more_devices_may_be_chosen_than_are_declared_and_not_fewer():
    assert SIZES.most_wanted == 300
    assert dataclasses.replace(SIZES, most_over_selection=1.0).most_wanted == 130


def test_patience_follows_the_devices_within_bounds():
    assert [SIZES.patience(half) for half in (0.0, 1.0, 20.0, 500.0)] == [60.0, 60.0, 80.0, 600.0]


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("goal_count", 0),
        ("goal_count", 10**400),
        ("over_selection", 0.9),
        ("over_selection", 1e308),
        ("most_over_selection", 0.5),
        ("least_fraction", 0.0),
        ("least_fraction", 1.1),
        ("selection_timeout", 0.0),
        ("reporting_timeout", float("nan")),
        ("exchange_timeout", -1.0),
        ("devices_per_aggregator", 0),
    ],
)
def test_senseless_sizes_are_refused_by_name(argument, value):
    with pytest.raises(ValueError, match=argument):
        dataclasses.replace(SIZES, **{argument: value})


def test_senseless_populations_are_refused_by_name():
    training = SERVED.task("training")
    with pytest.raises(ValueError, match="different names"):
        dataclasses.replace(SERVED, tasks=(training, training))
    with pytest.raises(ValueError, match="different names"):
        dataclasses.replace(SERVED, tasks=())
    with pytest.raises(ValueError, match="model_of='training' of the task 'evaluation'"):
        dataclasses.replace(SERVED, tasks=(SERVED.task("evaluation"),))
    for argument in ("lease_seconds", "silence_seconds"):
        with pytest.raises(ValueError, match=f"{argument} .*One lost heartbeat"):
            dataclasses.replace(SERVED, **{argument: 1.5 * SERVED.heartbeat_seconds})
    with pytest.raises(ValueError, match="weight"):
        dataclasses.replace(training, weight=0.0)


def secure(least_devices=10, most_devices=130, num_neighbours=None, per_group=65, **changes):
    demanded = parameters.Parameters(
        (vectors.Segment(1, 2**32),),
        changes.pop("threat_model", parameters.ThreatModel.HONEST_BUT_CURIOUS),
        least_devices,
        num_neighbours,
        most_devices,
    )
    rounds = dataclasses.replace(SIZES, devices_per_aggregator=per_group, **changes)
    return dataclasses.replace(SERVED.task("training"), rounds=rounds, secure_sum=demanded)


def test_a_secure_sum_has_time_for_all_its_steps():
    plain = dataclasses.replace(SERVED.task("training"), rounds=SIZES)
    assert (plain.longest, plain.longest_closing()) == (SIZES.longest, SIZES.exchange_timeout)
    for model, steps in (("honest-but-curious", 3), ("active-server", 4)):
        task = secure(secure_step_timeout=7.0, threat_model=parameters.ThreatModel(model))
        assert task.secure_sum.num_steps == steps
        assert task.longest == plain.longest + 7.0 * (steps + 1)
        assert task.longest_closing() == plain.longest_closing() + 7.0 * (steps + 1)


def test_devices_are_divided_into_groups_that_can_lose_some():
    assert [secure(40).num_groups(n) for n in (130, 104, 100, 40, 39)] == [2, 2, 1, 1, 0]
    assert secure(10, per_group=20).num_groups(130) == 7
    assert secure(60, per_group=65).num_groups(130) == 1
    # With neighbours a group is never larger than what was proven of it.
    sparse = secure(40, num_neighbours=20)
    assert [sparse.num_groups(n) for n in (130, 80, 79, 65, 40, 39)] == [2, 2, 0, 1, 1, 0]
    assert SERVED.task("training").num_groups(5) == 3


def test_rounds_that_fit_no_secure_sum_are_refused():
    with pytest.raises(ValueError, match="choose 130 devices, and .* no .* fewer than 131"):
        secure(least_devices=131, most_devices=200)
    with pytest.raises(ValueError, match="choose 130 devices, and its moduli have room for 129"):
        secure(most_devices=129)
    with pytest.raises(ValueError, match="most_devices must be"):
        secure(most_devices=None)
    with pytest.raises(ValueError, match="step_timeout"):
        secure(secure_step_timeout=0.0)
    with pytest.raises(TypeError, match="NameSum sums no vectors"):
        SERVED.task("training").summation.decode_group([], 1)


@pytest.mark.parametrize("num_devices", [1, 5, 60, 120, 129, 130, 260, 389])
def test_the_remedies_of_a_small_population_help(num_devices):
    task = dataclasses.replace(SERVED.task("training"), rounds=SIZES, min_sep=3)
    advice = task.rests_advice(num_devices)
    assert f"need 390 devices, and {num_devices} come" in advice
    remedies = dict(re.findall(r"(clients_per_round|min_sep)=(\d+)(?! rounds)", advice))

    def with_goal(goal):
        return dataclasses.replace(task, rounds=dataclasses.replace(SIZES, goal_count=goal))

    assert ("clients_per_round" in remedies) == (num_devices >= 6)  # Two devices, three times.
    if "clients_per_round" in remedies:
        goal = int(remedies["clients_per_round"])
        assert not with_goal(goal).rests_advice(num_devices)
        assert with_goal(goal + 1).rests_advice(num_devices)
    assert ("min_sep" in remedies) == (num_devices >= 130)
    if "min_sep" in remedies:
        rested = dataclasses.replace(task, min_sep=int(remedies["min_sep"]))
        assert not rested.rests_advice(num_devices)
    assert not task.rests_advice(390)


def test_a_shortage_says_what_mends_it():
    task = dataclasses.replace(SERVED.task("training"), rounds=SIZES, min_sep=3)
    assert task.shortage(events.TooFewDevices("training", 2, 80)) == (
        "2 devices wait, and a round needs 80 at least: waiting for more."
    )
    rests = task.shortage(events.TooFewDevices("training", 2, 80, 70))
    assert "2 devices wait, and a round needs 80 at least; 70 check-ins" in rests
    assert "390 devices are needed" in rests and "smaller clients_per_round or min_sep" in rests


@pytest.mark.parametrize("rounds_done", [26, 27, 900])
@pytest.mark.parametrize("hours", [0.0, 12.0])
def test_a_shortage_blames_no_limit_that_cannot_be_the_reason(rounds_done, hours):
    """Ten participations with min_sep=3 need 28 rounds; devices may have counted one more."""
    task = dataclasses.replace(
        SERVED.task("training"), min_sep=3, max_participations=10, min_sep_hours=hours
    )
    found = task.shortage(events.TooFewDevices("training", 2, 80, 70, True, rounds_done))
    assert ("max_participations=10 times" in found) == (rounds_done >= 27)
    assert ("min_sep_hours=12 are not over" in found) == bool(hours)
    assert "They have counted later rounds than this store has" in found
    assert ("If neither" in found) == (rounds_done >= 27 or bool(hours))


def test_noise_parties_have_noise_for_one_group_a_round():
    task = simulation.noised_population(2).tasks[0]
    assert task.noise_parties == noise_parties.public_keys(2)
    plain = simulation.secure_population().tasks[0]
    assert task.secure_sum.num_steps == plain.secure_sum.num_steps + 1
    with pytest.raises(ValueError, match="one group a round: raise devices_per_aggregator to 7"):
        dataclasses.replace(task, rounds=dataclasses.replace(task.rounds, devices_per_aggregator=6))
    event = events.PartyAway("training", 1, 2)
    assert task.wait_for_parties(event).startswith("1 of 2 noise parties that the plan names")
