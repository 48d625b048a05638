"""One device lies in its participation histograms, which are summed securely."""

import dataclasses
import functools

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from tests.runtime.plans import small_tasks
from tests.runtime.tasks import small_folder
from tff_dpftrl.runtime.actors import population
from tff_dpftrl.runtime.plans import secure_report
from tff_dpftrl.runtime.tasks import planned_task, task_privacy, task_state
from tff_dpftrl.secure_sums import vectors
from verification import memory_store

_SCHEMA = small_folder.SCHEMA
_MODULUS = secure_report.COUNT_MODULUS
_DECLARED = task_privacy.TaskPrivacy(small_folder.SECURE_TERMS).declared_epsilon
_TERMS = dataclasses.replace(small_folder.SECURE_TERMS, max_epsilon=_DECLARED)
_TOO_SOON = ((0, 1, 0, 0, 0, 0, 0), (0, 1, 0))
_ENTRIES = st.one_of(
    st.integers(0, _MODULUS - 1),
    st.sampled_from([0, 1, 2, 3, _MODULUS - 1, _MODULUS - 2, _MODULUS // 2]),
)
_LIES = st.tuples(st.tuples(*[_ENTRIES] * 7), st.tuples(*[_ENTRIES] * 3))
# Zeros but for a few places: what can still look like histograms of some devices.
_SMALL = st.integers(-2, 3)
_SMALL_LIES = st.tuples(st.tuples(*[_SMALL] * 7), st.tuples(*[_SMALL] * 3))


@pytest.fixture(scope="module")
def task():
    process = small_tasks.SECURE_ONLY_ROUNDS["secagg"]()
    folder = small_folder.folder_of(
        process, terms=_TERMS, secure_aggregation=small_tasks.SECURE_AGGREGATION
    )
    return planned_task.PlannedTask(folder)


@pytest.fixture(scope="module")
def device(task):
    return small_folder.device_of(task)


def _honest(device, rounds):
    """Vectors of three devices; each takes part in every second round, as it may."""
    done = rounds.commit.rounds_done
    return _vectors(device, rounds.commit.model, *((None, 1) if done < 2 else (2, done // 2 + 1)))


@functools.cache
def _vectors(device, model, stride, times):
    """Which are only read: with the same model devices report the same."""
    return [
        small_folder.secure_report_of(
            device, model, small_folder.examples(index, 3), stride=stride, times=times
        )
        for index in range(3)
    ]


def _lying(report, lie):
    """The report with other histograms; all else is honest."""
    strides, times = (np.array(part, np.int64) % _MODULUS for part in lie)
    return [report[0], strides.astype(np.uint32), times.astype(np.uint32), *report[3:]]


def _run(task, device, lies):
    """Rounds of a new task; in each the first device puts a lie into its histograms, if any.

    A group whose histograms are not of its devices is lost: the round goes on with another one.

    Returns:
      The rounds, and the number of lost groups.
    """
    rounds, num_lost = small_folder.Rounds(task, memory_store.MemoryStore()), 0
    for lie in lies:
        reports = _honest(device, rounds)
        if lie is None:
            rounds.run_groups([(_sum(task, reports), 3)])
            continue
        lying = [_lying(reports[0], lie), *reports[1:]]
        try:
            rounds.run_groups([(_sum(task, lying), 3)])
        except population.UnusableReport as error:
            assert "a device has lied" in str(error)
            num_lost += 1
            rounds.run_groups([(_sum(task, reports), 3)])
    return rounds, num_lost


def _sum(task, reports):
    layout = task.served.task.secure_sum.layout
    total = vectors.zeros(layout)
    for report in reports:
        vectors.add(total, report, layout)
    return total


def _privacy_of(commit):
    return {name: value for name, value in commit.metrics.items() if "privacy/" in name}


def _statement(task, rounds):
    state = task_state.TaskState.from_bytes(rounds.commit.state, task.folder.terms.digest())
    return task_privacy.TaskPrivacy(task.folder.terms).statement(state.observed)


@functools.cache
def _honest_rounds(task, device, number):
    """So many rounds without lies, with which others are compared; they are only read."""
    return _run(task, device, [None] * number)[0]


def _checked(task, lies, device):
    """Compares a task with lies to an honest one.

    Returns:
      What the task observed, its statement, and the number of groups that were lost.
    """
    honest, (rounds, num_lost) = _honest_rounds(task, device, len(lies)), _run(task, device, lies)
    assert _privacy_of(rounds.commit) == _privacy_of(honest.commit)
    assert task.refusal(rounds.commit) == task.refusal(honest.commit)
    told, expected = _statement(task, rounds), _statement(task, honest)
    assert (told.epsilon, told.rho_zcdp) == (expected.epsilon, expected.rho_zcdp)
    assert told.has_guarantee
    seen, clean = task.observed(rounds.commit), task.observed(honest.commit)
    # Whatever is noticed is said, and whatever is not leaves the headline alone.
    is_noticed = seen.unknown_rounds or seen.contradicting_reports
    assert bool(told.headline_caveats) == bool(is_noticed)
    assert seen.num_rounds == clean.num_rounds == len(lies)
    assert seen.contradicting_reports <= 3 * len(lies)
    return seen, told, num_lost


@hypothesis.settings(deadline=None, derandomize=True, max_examples=15)
@hypothesis.given(st.one_of(_LIES, _SMALL_LIES))
def test_whatever_one_device_reports_epsilon_and_budget_are_the_declared_ones(task, device, lie):
    _checked(task, [None, lie], device)


def test_a_report_that_hides_another_costs_its_group(task, device):
    """-1 and +1 as the red team sent it, which took ε to that of participation in every round."""
    lie = ((0, -1, 1, 1, 0, 0, 0), (0, 1, 0))
    seen, told, num_lost = _checked(task, [None, None, None, lie], device)
    assert (num_lost, seen.unknown_rounds, seen.contradicting_reports) == (1, 0, 0)
    assert seen.min_sep == _SCHEMA.min_sep
    assert told.headline_caveats == ()


def test_a_device_that_says_in_every_round_that_it_has_not_rested_ends_nothing(task, device):
    seen, told, _ = _checked(task, [_TOO_SOON] * 5, device)
    assert (seen.contradicting_reports, seen.contradicting_rounds) == (5, 5)
    (caveat,) = told.headline_caveats
    assert "a stride of 1 rounds is below min_sep=2" in caveat and "5 reports in 5 rounds" in caveat


def test_lies_do_not_hide_later_evidence(task, device):
    """After groups that were lost, a report that contradicts is still counted and shown."""
    nonsense = ((_MODULUS - 1,) * 7, (5, 0, 0))
    lies = [nonsense, nonsense, None, _TOO_SOON, _TOO_SOON]
    seen, told, num_lost = _checked(task, lies, device)
    assert (num_lost, seen.unknown_rounds, seen.contradicting_rounds) == (2, 0, 2)
    assert (seen.min_sep, seen.contradicting_reports) == (1, 2)
    (caveat,) = told.headline_caveats
    assert "2 reports in 2 rounds" in caveat


def test_an_honest_task_states_what_it_stated_before(task, device):
    rounds, _ = _run(task, device, [None] * _SCHEMA.num_rounds)
    statement = _statement(task, rounds)
    assert statement.epsilon == _DECLARED == rounds.commit.metrics["privacy/epsilon"]
    assert statement.observed == task.observed(rounds.commit).participation()
    assert (statement.observed.min_sep, statement.observed.max_participations) == (2, 3)
    assert statement.headline_caveats == ()
    assert task.refusal(rounds.commit) == "all 6 declared rounds are done"
