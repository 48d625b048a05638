import dataclasses
import random
import sys

import pytest

from tff_dpftrl.runtime.actors import experience, messages, population

ROUNDS = population.RoundSettings(goal_count=10, over_selection=1.3, reporting_timeout=100.0)


def complete(chosen, half_seconds=1.0, reported=10):
    return messages.Turnout(chosen, reported, chosen - reported, half_seconds)


def incomplete(chosen, reported):
    return messages.Turnout(chosen, reported, 0, 0.0)


def test_it_begins_with_what_is_declared_and_keeps_to_it_while_the_goal_is_reached():
    made = experience.Experience(ROUNDS)
    for _ in range(5):
        assert made.wanted == 13
        made.committed(complete(13))


def test_more_devices_are_chosen_when_fewer_have_reported_and_never_more_than_the_most():
    made = experience.Experience(ROUNDS)
    wanted = []
    for _ in range(6):
        made.abandoned(incomplete(made.wanted, made.wanted // 2))
        wanted.append(made.wanted)
    assert wanted == sorted(wanted) and wanted[0] > 13
    assert 19 <= wanted[-1] <= 21  # Half of them report.
    for _ in range(6):
        made.abandoned(incomplete(made.wanted, 0))
    assert made.wanted == 30


def test_it_falls_back_within_a_few_rounds():
    made = experience.Experience(ROUNDS)
    for _ in range(10):
        made.abandoned(incomplete(made.wanted, 0))
    wanted = []
    for _ in range(5):
        made.committed(complete(made.wanted))
        wanted.append(made.wanted)
    assert wanted == [20, 16, 14, 13, 13]


def test_a_task_may_forbid_it():
    made = experience.Experience(dataclasses.replace(ROUNDS, most_over_selection=1.0))
    made.abandoned(incomplete(13, 0))
    assert made.wanted == 13


def test_devices_are_expected_to_be_as_slow_as_they_were():
    made = experience.Experience(ROUNDS)
    assert made.half_seconds == 0.0
    made.committed(complete(13, 4.0))
    assert made.half_seconds == 4.0
    made.committed(complete(13, 8.0))
    assert made.half_seconds == 8.0  # At once.
    made.committed(complete(13, 4.0))
    assert made.half_seconds == 7.0  # A quick round, such as of attackers, counts little.
    made.abandoned(incomplete(13, 9))  # Something else went wrong.
    assert made.half_seconds == 7.0


def test_a_time_that_is_too_short_for_the_devices_grows_until_it_is_not():
    made = experience.Experience(ROUNDS)
    made.committed(complete(13, 1.0))
    attempts = 0
    while ROUNDS.patience(made.half_seconds) < ROUNDS.reporting_timeout:
        made.abandoned(incomplete(13, 0))
        attempts += 1
    assert attempts == 8


@pytest.mark.parametrize("share", [0.5, 0.7])
def test_most_rounds_reach_their_goal_under_a_steady_loss(share):
    randomness = random.Random(0)
    made = experience.Experience(ROUNDS)
    reached = 0
    for _ in range(200):
        came = sum(randomness.random() < share for _ in range(made.wanted))
        if came >= 10:
            made.committed(complete(made.wanted))
            reached += 1
        else:
            made.committed(dataclasses.replace(incomplete(made.wanted, came), half_seconds=1.0))
    assert reached > 80


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
