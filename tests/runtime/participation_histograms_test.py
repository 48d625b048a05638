"""Tests of tff_dpftrl.runtime.participation_histograms."""

from __future__ import annotations

import collections

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from tff_dpftrl.participation import observed as observed_lib
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.runtime import participation_histograms as histograms

deterministic = hypothesis.settings(deadline=None, derandomize=True)

_BUCKETS = histograms.ParticipationBuckets((1, 3, 10), (1, 2, 5))


@pytest.mark.parametrize(
    ("stride", "times", "position", "count_position"),
    [
        (None, 1, 0, 0),
        (1, 2, 1, 1),
        (2, 3, 1, 2),
        (3, 5, 2, 2),
        (9, 2, 2, 1),
        (10, 2, 3, 1),
        (10**9, 2, 3, 1),
    ],
)
def test_every_number_has_its_bucket(stride, times, position, count_position):
    strides, counts = _BUCKETS.encode(stride, times)
    assert strides.dtype == counts.dtype == np.int32
    assert (strides.shape, counts.shape) == _BUCKETS.shapes == ((4,), (3,))
    assert np.flatnonzero(strides).tolist() == [position]
    assert np.flatnonzero(counts).tolist() == [count_position]
    _BUCKETS.check_one_hot(strides, counts)


def test_decoding_errs_on_the_safe_side():
    sums = [sum(v) for v in zip(_BUCKETS.encode(None, 1), _BUCKETS.encode(9, 3), strict=True)]
    assert _BUCKETS.decode(*sums) == (3, 5)
    assert _BUCKETS.decode(*_BUCKETS.encode(None, 1)) == (None, 1)
    assert _BUCKETS.decode(np.zeros(4, int), np.zeros(3, int)) == (None, 0)


@st.composite
def _runs(draw):
    """A schema and cohorts of rounds that respect it, except perhaps the stride."""
    num_rounds, num_clients = draw(st.integers(1, 25)), draw(st.integers(1, 6))
    cohorts = draw(
        st.lists(st.sets(st.integers(0, num_clients - 1)), min_size=num_rounds, max_size=num_rounds)
    )
    min_sep = draw(st.integers(1, num_rounds))
    return schema_lib.MinSep(num_rounds, min_sep, num_rounds), cohorts


@deterministic
@hypothesis.given(_runs())
def test_what_is_observed_is_never_better_than_the_truth_and_not_much_worse(run):
    declared, cohorts = run
    buckets = histograms.ParticipationBuckets.for_schema(declared)
    truth = observed_lib.ParticipationCounter(10)
    seen = histograms.ObservedRounds()
    last, times = {}, collections.Counter()
    for round_index, cohort in enumerate(cohorts):
        truth.add(np.array(sorted(cohort), int))
        sums = [np.zeros(shape, np.int64) for shape in buckets.shapes]
        for client in cohort:
            times[client] += 1
            stride = round_index - last[client] if client in last else None
            for total, vector in zip(sums, buckets.encode(stride, times[client]), strict=True):
                total += vector
            last[client] = round_index
        seen = seen.with_round(buckets, *sums, declared_min_sep=declared.min_sep)
        found, exact = seen.participation(), truth.observed
        assert found.num_rounds == exact.num_rounds
        assert (found.min_sep is None) == (exact.min_sep is None)
        if exact.min_sep is not None:
            assert exact.min_sep / 1.2 - 1 <= found.min_sep <= exact.min_sep
            # At the declared limit nothing is lost: a kept promise is seen to be kept.
            if exact.min_sep >= declared.min_sep:
                assert found.min_sep >= declared.min_sep
        assert exact.max_participations <= found.max_participations
        assert found.max_participations <= 1.2 * exact.max_participations + 1
        assert found.max_participations <= found.num_rounds
        breaks = exact.min_sep is not None and exact.min_sep < declared.min_sep
        assert (seen.contradicting_reports > 0) == (seen.contradicting_rounds > 0) == breaks


def test_buckets_of_a_production_schema_are_few_and_exact_at_the_limits():
    buckets = histograms.ParticipationBuckets.for_schema(schema_lib.MinSep(2_000, 313, 6))
    assert 313 in buckets.stride_edges
    assert buckets.times_edges == (1, 2, 3, 4, 5, 6)
    assert buckets.decode(*buckets.encode(313, 6)) == (313, 6)
    assert buckets.shapes[0][0] <= 45
    assert (
        histograms.ParticipationBuckets.for_schema(schema_lib.MinSep(5, 9, 1)).stride_edges[-1] == 5
    )


def test_an_abandoned_round_cannot_push_the_count_above_the_rounds_there_were():
    # A device counts attempts; its fourth of a task with two committed rounds is its second.
    seen = histograms.ObservedRounds()
    seen = seen.with_round(_BUCKETS, *_BUCKETS.encode(1, 3), declared_min_sep=1)
    seen = seen.with_round(_BUCKETS, *_BUCKETS.encode(1, 4), declared_min_sep=1)
    assert seen.participation() == observed_lib.Participation(2, 1, 2)


def test_a_round_without_devices_counts_as_a_round():
    seen = histograms.ObservedRounds().with_round(
        _BUCKETS, np.zeros(4, int), np.zeros(3, int), declared_min_sep=3
    )
    assert seen.participation() == observed_lib.Participation(1, None, 0)


def test_an_unknown_round_is_counted_and_hides_nothing_of_the_others():
    seen = histograms.ObservedRounds().with_unknown_round()
    assert seen == histograms.ObservedRounds(1, None, 0, unknown_rounds=1)
    for stride in (12, 12, 9):
        seen = seen.with_round(_BUCKETS, *_BUCKETS.encode(stride, 2), declared_min_sep=3)
    assert seen == histograms.ObservedRounds(4, 3, 2, unknown_rounds=1)
    seen = seen.with_unknown_round()
    assert seen == histograms.ObservedRounds(5, 3, 2, unknown_rounds=2)


def test_reports_that_contradict_the_declaration_are_counted():
    seen = histograms.ObservedRounds()
    for strides in ((1, 1), (3, 10), (2, 12)):
        sums = [sum(v) for v in zip(*(_BUCKETS.encode(s, 2) for s in strides), strict=True)]
        seen = seen.with_round(_BUCKETS, *sums, declared_min_sep=3)
    assert seen == histograms.ObservedRounds(
        3, 1, 2, contradicting_reports=3, contradicting_rounds=2
    )


@pytest.mark.parametrize(
    ("strides", "times", "message"),
    [
        ([1, 0, 0], [1, 0, 0], r"strides must be integers of shape \(4,\)"),
        ([1, 0, 0, 0], [1, 0], r"times must be integers of shape \(3,\)"),
        ([1.0, 0, 0, 0], [1, 0, 0], "strides must be integers"),
        ([2, -1, 0, 0], [1, 0, 0], "strides must not be negative, got -1"),
        ([1, 1, 0, 0], [1, 0, 0], "2 and 1 devices"),
        ([1, 0, 0, 0], [0, 1, 0], "1 and 0 of them for the first time"),
    ],
)
def test_sums_that_no_devices_make_are_refused(strides, times, message):
    for judge in (_BUCKETS.decode, _BUCKETS.check_one_hot):
        with pytest.raises(ValueError, match=message):
            judge(np.array(strides), np.array(times))


@pytest.mark.parametrize(
    ("strides", "times"),
    [([0, 0, 0, 0], [0, 0, 0]), ([1, 1, 0, 0], [1, 1, 0]), ([0, 2, 0, 0], [0, 2, 0])],
)
def test_one_device_puts_one_in_each(strides, times):
    with pytest.raises(ValueError, match="one-hot"):
        _BUCKETS.check_one_hot(np.array(strides), np.array(times))


@pytest.mark.parametrize(
    ("stride", "times", "message"),
    [
        (None, 6, "times=6 is above the declared 5"),
        (None, 0, "times must be at least 1"),
        (None, 2, "stride=None contradicts times=2"),
        (3, 1, "stride=3 contradicts times=1"),
        (0, 2, "stride must be at least 1"),
    ],
)
def test_impossible_participations_are_named(stride, times, message):
    with pytest.raises(ValueError, match=message):
        _BUCKETS.encode(stride, times)


@pytest.mark.parametrize(
    ("edges", "message"),
    [((), "must increase"), ((2, 3), "from 1"), ((1, 1), "must increase"), ((1, 0.5), "integer")],
)
def test_bad_edges_are_named(edges, message):
    with pytest.raises(ValueError, match=f"stride_edges.*{message}"):
        histograms.ParticipationBuckets(edges, (1,))
    with pytest.raises(ValueError, match=f"times_edges.*{message}"):
        histograms.ParticipationBuckets((1,), edges)


@pytest.mark.parametrize(
    ("edges", "stride", "count"),
    [
        ((1, 2, 4), 1, 0),
        ((1, 2, 4), 2, 1),
        ((1, 2, 4), 3, 1),
        ((1, 2, 4), 4, 2),
        ((1, 2, 4), 9, 2),
        ((1,), 5, 0),
    ],
)
def test_buckets_below_a_stride_hold_smaller_ones_only(edges, stride, count):
    buckets = histograms.ParticipationBuckets(edges, (1, 2))
    assert buckets.below(stride) == count
    for told in range(1, 12):
        strides, _ = buckets.encode(told, 2)
        is_below = bool(strides[1 : 1 + count].any())
        assert not is_below or told < stride
