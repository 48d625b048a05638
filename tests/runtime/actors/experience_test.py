import dataclasses
import random

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


def test_devices_that_were_given_up_have_twice_as_long_in_the_next_attempt():
    made = experience.Experience(ROUNDS)
    made.committed(complete(13, 1.0))
    patience = [ROUNDS.patience(made.half_seconds)]
    for _ in range(5):
        made.abandoned(incomplete(13, 0))  # They went away: this says nothing of their speed.
        made.abandoned(dataclasses.replace(incomplete(13, 0), has_given_up=True))
        patience.append(ROUNDS.patience(made.half_seconds))
    assert patience == [10.0, 20.0, 40.0, 80.0, 100.0, 100.0]


def test_devices_that_came_and_those_that_rest_are_remembered_for_a_while():
    made = experience.Experience(ROUNDS)
    assert (made.selection_seconds, made.num_devices) == (ROUNDS.selection_timeout, 0)
    made.selected(8.0, 100)
    made.selected(4.0, 20)
    assert (made.selection_seconds, made.num_devices) == (7.0, 100)
    made.selected(9.0, 90)
    assert (made.selection_seconds, made.num_devices) == (9.0, 100)


def test_enough_devices_reach_the_least_number_of_reports_with_a_deviation_to_spare():
    made = experience.Experience(ROUNDS)
    assert made.enough == 13  # (8 + sqrt(8 · 3/13)) · 13/10 = 12.2.
    for _ in range(20):
        made.abandoned(incomplete(made.wanted, made.wanted // 2))
    assert made.wanted == 20 and made.enough == 20
    for _ in range(9):
        made.committed(complete(made.wanted))
    assert made.enough == 9  # Nearly all report again.


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
