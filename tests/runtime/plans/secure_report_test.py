from __future__ import annotations

import numpy as np
import pytest

from tests.runtime.plans import secure_plans as made
from tff_dpftrl.runtime.plans import plan_pb2, secure_report
from tff_dpftrl.secure_sums import parameters as parameters_lib
from tff_dpftrl.secure_sums import vectors

_SECOND_TIME = (np.int32([0, 0, 1, 0]), np.int32([0, 1, 0]))
_LAYOUT = tuple(
    vectors.Segment(size, modulus)
    for size, modulus in ((1, 2**32), (4, 2**32), (3, 2**32), (4, 1001), (1, 2**47))
)


def _sum(*reports, plan=None):
    layout = secure_report.parameters_of(plan or made.server()).layout
    total = vectors.zeros(layout)
    for report in reports:
        vectors.add(total, report, layout)
    return total


def _report(seed, participation=made.NEVER_BEFORE):
    return secure_report.vector_of(made.device(), made.update(seed), participation)


def test_both_plans_of_a_task_demand_the_same():
    expected = parameters_lib.Parameters(
        _LAYOUT,
        parameters_lib.ThreatModel.HONEST_BUT_CURIOUS,
        least_devices=made.LEAST,
        most_devices=made.MOST,
    )
    assert secure_report.parameters_of(made.device()) == expected
    assert secure_report.parameters_of(made.server()) == expected
    assert vectors.packed_bytes(_LAYOUT) == 4 * 8 + 2 * 4 + 6
    few = made.device(secure_aggregation=made.wanted(least_neighbours=9))
    assert secure_report.parameters_of(few).least_neighbours == 9


def test_the_sum_of_reports_is_read_back():
    first, second = made.update(1), made.update(2)
    total = _sum(_report(1), _report(2, _SECOND_TIME))
    read = secure_report.read_total(made.server(), total, 2)
    assert read.count == 2
    assert read.strides.tolist() == [1, 0, 1, 0]
    assert read.times.tolist() == [1, 1, 0]
    np.testing.assert_array_equal(read.sums[0], (first[0] + second[0]) % 1001)
    assert read.sums[1].shape == () and read.sums[1] == first[1] + second[1]
    assert {part.dtype for part in (read.strides, read.times, *read.sums)} == {np.dtype(np.int64)}


def test_a_sum_of_the_largest_entries_of_all_devices_does_not_wrap_around():
    largest = [np.full(4, 1000, np.int32), np.array(2**40)]
    report = secure_report.vector_of(made.device(), largest, made.NEVER_BEFORE)
    assert not np.shares_memory(report[-1], largest[-1])
    read = secure_report.read_total(made.server(), _sum(*[report] * made.MOST), made.MOST)
    assert read.sums[1] == made.MOST * 2**40


_FEW = made.server(secure_aggregation=made.wanted(most_devices=2))


@pytest.mark.parametrize(
    ("plan", "total", "num_devices", "said"),
    [
        (made.server(), _sum(_report(1), _report(2)), 1, "counts 2 devices"),
        (made.server(), _sum(_report(1), _report(2)), 3, "counts 2 devices"),
        (made.server(), _sum(_report(1)), 1, "2 to 100"),
        (_FEW, _sum(*[_report(1)] * 3, plan=_FEW), 3, "2 to 2"),
        (made.server(), _sum(_report(1), _report(2))[:-1], 2, "no vector of the plan"),
    ],
)
def test_a_sum_that_is_not_of_the_plan_s_devices_is_refused(plan, total, num_devices, said):
    with pytest.raises(secure_report.TotalRefusedError, match=said):
        secure_report.read_total(plan, total, num_devices)


@pytest.mark.parametrize(
    ("vector", "loss", "said"),
    [
        (np.int32([0, 0, 0, 1001]), 0, r"vector.*outside \[0, 1000\]"),
        (np.int32([-1, 0, 0, 0]), 0, "outside"),
        (np.zeros(4, np.int32), 2**40 + 1, "loss.*outside"),
        (np.zeros(4, np.int64), 0, "int32 of shape"),
        (np.zeros(5, np.int32), 0, "int32 of shape"),
        (np.zeros(4, np.int32), None, "2 tensors"),
    ],
)
def test_an_update_that_is_not_as_the_plan_says_is_refused(vector, loss, said):
    sent = [vector] if loss is None else [vector, np.array(loss)]
    with pytest.raises(ValueError, match=said):
        secure_report.vector_of(made.device(), sent, made.NEVER_BEFORE)
    with pytest.raises(ValueError, match="one-hot"):
        _report(1, (np.int32([1, 0, 1, 0]), np.int32([1, 1, 0])))


def _wants(**fields):
    return {"secure_aggregation": made.wanted(**fields)}


def _sums(dtype, size, **rule):
    tensor = plan_pb2.Tensor(label="a", dtype=dtype, shape=[size])
    return {"tensors": [tensor], "secure_sums": [plan_pb2.SecureSum(**rule)]}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"secure_aggregation": None}, "asks for no secure aggregation"),
        ({"secure_aggregation": plan_pb2.SecureAggregation()}, "threat_model"),
        (_wants(threat_model=7), "threat_model is 7"),
        (_wants(least_devices=1), "least_devices is 1"),
        (_wants(most_devices=1), "most_devices is 1"),
        (_wants(most_devices=2**31 + 1), "most_devices"),
        (
            _wants(threat_model=plan_pb2.SecureAggregation.ACTIVE_SERVER, least_neighbours=5),
            "complete graph",
        ),
        ({"secure_sums": made.RULES[1:]}, "seen as they are: vector"),
        ({"secure_sums": []}, "seen as they are: vector, metrics/loss"),
        ({"secure_sums": [*made.RULES, made.RULES[0]]}, "rules for 3"),
        ({"tensors": [plan_pb2.Tensor(label="a", dtype="float32", shape=[4])]}, "rules for 2"),
        (_sums("float32", 4, modulus=7), "float32"),
        (_sums("int32", -1, modulus=7), "fixed shape"),
        (_sums("int32", 2), "unknown rule"),
        (_sums("int32", 2, modulus=1), "modulo 1 "),
        (_sums("int64", 2, modulus=2**32 + 1), "modulo"),
        (_sums("int64", 2, modulus=2**63), "modulo"),
        (_sums("int64", 2, largest_entry=2**60), "modulo"),
    ],
)
def test_a_plan_whose_sums_cannot_be_secure_is_refused(fields, said):
    for make in (made.device, made.server):
        with pytest.raises(secure_report.PlanNotSecureError, match=said):
            secure_report.parameters_of(make(**dict(fields)))
