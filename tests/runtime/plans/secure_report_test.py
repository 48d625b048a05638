from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.runtime.plans import secure_plans
from tff_dpftrl.runtime.plans import plan_pb2, secure_report
from tff_dpftrl.secure_sums import parameters as parameters_lib
from tff_dpftrl.secure_sums import vectors

_SECOND_TIME = (np.int32([0, 0, 1, 0]), np.int32([0, 1, 0]))
_LAYOUT = (
    vectors.Segment(1, 2**32),
    vectors.Segment(4, 2**32),
    vectors.Segment(3, 2**32),
    vectors.Segment(4, 1001),
    vectors.Segment(1, 2**47),
)


def _sum(*reports):
    layout = secure_report.parameters_of(secure_plans.server()).layout
    total = vectors.zeros(layout)
    for report in reports:
        vectors.add(total, report, layout)
    return total


def _report(seed, participation=secure_plans.NEVER_BEFORE):
    return secure_report.vector_of(secure_plans.device(), secure_plans.update(seed), participation)


def test_both_plans_of_a_task_demand_the_same():
    wanted = parameters_lib.Parameters(
        _LAYOUT,
        parameters_lib.ThreatModel.HONEST_BUT_CURIOUS,
        least_devices=secure_plans.LEAST,
        most_devices=secure_plans.MOST,
    )
    assert secure_report.parameters_of(secure_plans.device()) == wanted
    assert secure_report.parameters_of(secure_plans.server()) == wanted
    assert vectors.packed_bytes(_LAYOUT) == 4 * 8 + 2 * 4 + 6


def test_a_plan_may_allow_fewer_neighbours_than_all():
    few = secure_plans.device(secure_aggregation=secure_plans.wanted(least_neighbours=9))
    assert secure_report.parameters_of(few).least_neighbours == 9


def test_the_sum_of_reports_is_read_back():
    first, second = secure_plans.update(1), secure_plans.update(2)
    total = _sum(_report(1), _report(2, _SECOND_TIME))
    read = secure_report.read_total(secure_plans.server(), total, 2)
    assert read.count == 2
    assert read.strides.tolist() == [1, 0, 1, 0]
    assert read.times.tolist() == [1, 1, 0]
    np.testing.assert_array_equal(read.sums[0], (first[0] + second[0]) % 1001)
    assert read.sums[1].shape == () and read.sums[1] == first[1] + second[1]
    assert {part.dtype for part in (read.strides, read.times, *read.sums)} == {np.dtype(np.int64)}


def test_a_sum_of_the_largest_entries_of_all_devices_does_not_wrap_around():
    largest = [np.full(4, 1000, np.int32), np.array(2**40)]
    report = secure_report.vector_of(secure_plans.device(), largest, secure_plans.NEVER_BEFORE)
    total = functools.reduce(
        lambda summed, _: vectors.add(summed, report, _LAYOUT) or summed,
        range(secure_plans.MOST),
        vectors.zeros(_LAYOUT),
    )
    read = secure_report.read_total(secure_plans.server(), total, secure_plans.MOST)
    assert read.sums[1] == secure_plans.MOST * 2**40


def test_a_report_shares_no_memory_with_the_update():
    update = [np.arange(4, dtype=np.int32), np.array(5)]
    report = secure_report.vector_of(secure_plans.device(), update, secure_plans.NEVER_BEFORE)
    assert not np.shares_memory(report[-1], update[-1])


@pytest.mark.parametrize("num_devices", [1, 3])
def test_a_sum_that_counts_other_devices_than_it_has_is_refused(num_devices):
    with pytest.raises(secure_report.TotalRefusedError, match="counts 2 devices"):
        secure_report.read_total(secure_plans.server(), _sum(_report(1), _report(2)), num_devices)


def test_a_sum_of_fewer_or_more_devices_than_the_plan_allows_is_refused():
    with pytest.raises(secure_report.TotalRefusedError, match="2 to 100"):
        secure_report.read_total(secure_plans.server(), _sum(_report(1)), 1)
    few = secure_plans.server(secure_aggregation=secure_plans.wanted(most_devices=2))
    layout = secure_report.parameters_of(few).layout
    total = vectors.zeros(layout)
    total[0][0] = 3
    with pytest.raises(secure_report.TotalRefusedError, match="2 to 2"):
        secure_report.read_total(few, total, 3)


def test_a_vector_of_another_layout_is_refused():
    with pytest.raises(secure_report.TotalRefusedError, match="no vector of the plan"):
        secure_report.read_total(secure_plans.server(), _sum(_report(1), _report(2))[:-1], 2)


@pytest.mark.parametrize(
    ("update", "said"),
    [
        ([np.int32([0, 0, 0, 1001]), np.array(0)], r"vector.*outside \[0, 1000\]"),
        ([np.int32([-1, 0, 0, 0]), np.array(0)], "outside"),
        ([np.zeros(4, np.int32), np.array(2**40 + 1)], "loss.*outside"),
        ([np.zeros(4, np.int64), np.array(0)], "int32 of shape"),
        ([np.zeros(5, np.int32), np.array(0)], "int32 of shape"),
        ([np.zeros(4, np.int32)], "2 tensors"),
    ],
)
def test_an_update_that_is_not_as_the_plan_says_is_refused(update, said):
    with pytest.raises(ValueError, match=said):
        secure_report.vector_of(secure_plans.device(), update, secure_plans.NEVER_BEFORE)


def test_a_participation_that_is_no_one_hot_is_refused():
    with pytest.raises(ValueError, match="one-hot"):
        _report(1, (np.int32([1, 0, 1, 0]), np.int32([1, 1, 0])))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"secure_aggregation": None}, "asks for no secure aggregation"),
        ({"secure_aggregation": plan_pb2.SecureAggregation()}, "threat_model"),
        ({"secure_aggregation": secure_plans.wanted(threat_model=7)}, "threat_model is 7"),
        ({"secure_aggregation": secure_plans.wanted(least_devices=1)}, "least_devices is 1"),
        ({"secure_aggregation": secure_plans.wanted(most_devices=1)}, "most_devices is 1"),
        ({"secure_aggregation": secure_plans.wanted(most_devices=2**31 + 1)}, "most_devices"),
        (
            {
                "secure_aggregation": secure_plans.wanted(
                    threat_model=plan_pb2.SecureAggregation.ACTIVE_SERVER, least_neighbours=5
                )
            },
            "complete graph",
        ),
        ({"secure_sums": secure_plans.RULES[1:]}, "seen as they are: vector"),
        ({"secure_sums": []}, "seen as they are: vector, metrics/loss"),
        ({"secure_sums": [*secure_plans.RULES, secure_plans.RULES[0]]}, "rules for 3"),
        ({"tensors": [plan_pb2.Tensor(label="a", dtype="float32", shape=[4])]}, "rules for 2"),
    ],
)
def test_a_plan_whose_sums_cannot_be_secure_is_refused(fields, said):
    for make in (secure_plans.device, secure_plans.server):
        with pytest.raises(secure_report.PlanNotSecureError, match=said):
            secure_report.parameters_of(make(**dict(fields)))


@pytest.mark.parametrize(
    ("tensor", "rule", "said"),
    [
        (plan_pb2.Tensor(label="a", dtype="float32", shape=[4]), {"modulus": 7}, "float32"),
        (plan_pb2.Tensor(label="a", dtype="int32", shape=[-1]), {"modulus": 7}, "fixed shape"),
        (plan_pb2.Tensor(label="a", dtype="int32", shape=[2]), {}, "unknown rule"),
        (plan_pb2.Tensor(label="a", dtype="int32", shape=[2]), {"modulus": 1}, "modulo 1 "),
        (plan_pb2.Tensor(label="a", dtype="int64", shape=[2]), {"modulus": 2**32 + 1}, "modulo"),
        (plan_pb2.Tensor(label="a", dtype="int64", shape=[2]), {"modulus": 2**63}, "modulo"),
        (plan_pb2.Tensor(label="a", dtype="int64", shape=[2]), {"largest_entry": 2**60}, "modulo"),
    ],
)
def test_a_tensor_that_cannot_be_summed_is_refused(tensor, rule, said):
    plan = secure_plans.device(tensors=[tensor], secure_sums=[plan_pb2.SecureSum(**rule)])
    with pytest.raises(secure_report.PlanNotSecureError, match=said):
        secure_report.parameters_of(plan)
