"""Bounds of reports and of sums: what is refused, and what never is."""

import numpy as np
import pytest

from tff_dpftrl.runtime.plans import plan_pb2, report_bounds, tensor_values

_MOST = 10


def _entries(place, least, largest):
    entries = plan_pb2.ReportBound.Entries(least=least, largest=largest)
    return plan_pb2.ReportBound(tensors=[place], entries=entries)


def _norm(places, largest, **fields):
    norm = plan_pb2.ReportBound.Norm(largest=largest, **fields)
    return plan_pb2.ReportBound(tensors=places, norm=norm)


def _plan(*bounds, dtypes=("int32", "float64", "float64"), **fields):
    """A server's plan with a count and an update of two tensors."""
    shapes = ([], [3], [])
    update = [
        plan_pb2.Tensor(label=f"tensor {place}", dtype=dtype, shape=shape)
        for place, (dtype, shape) in enumerate(zip(dtypes, shapes, strict=False))
    ]
    return plan_pb2.ServerPlan(task="small", update=update, report_bounds=bounds, **fields)


def _report(count=1, first=(0.0, 0.0, 0.0), second=0.0):
    return [np.int32(count)[()], np.array(first), np.array(second)]


_CLIPPED = _plan(_entries(0, 0, 5), _norm([1, 2], 5.0))


@pytest.mark.parametrize(
    ("counts", "num_devices", "is_refused"),
    [
        ((0, 1, 0), 1, False),
        ((0, 1, 1), 1, True),
        ((0, 0, 0), 1, True),
        ((1, 0, 2), 3, False),
        ((3, 0, 0), 3, False),
        ((1, 0, 1), 3, True),
        ((2, 0, 2), 3, True),
    ],
)
def test_a_histogram_counts_each_device_once(counts, num_devices, is_refused):
    bound = _entries(0, 0, 1)
    bound.counts_once = True
    update = [plan_pb2.Tensor(label="loss_histogram", dtype="int32", shape=[3])]
    plan = plan_pb2.ServerPlan(task="small", update=update, report_bounds=[bound])
    bounds = report_bounds.ReportBounds(plan, _MOST)
    if not is_refused:
        bounds.check([np.array(counts, np.int32)], num_devices)
        return
    message = f"loss_histogram, counts {sum(counts)} devices: .* can only count {num_devices} in"
    with pytest.raises(report_bounds.OutOfBoundsError, match=message):
        bounds.check([np.array(counts, np.int32)], num_devices)
    with pytest.raises(report_bounds.OutOfBoundsError, match="has entries outside"):
        bounds.check([np.array([2, -1, 0], np.int32)])


@pytest.mark.parametrize(
    ("report", "num_devices", "message"),
    [
        (_report(5, (0, 3, 0), 4), 1, None),
        (_report(6), 1, r"tensor 0, has entries outside \[0, 5\]"),
        (_report(-1), 1, "has entries outside"),
        (_report(1, (0, 3, 0), 4.01), 1, "not clipped to the norm 5, .* an honest device"),
        (_report(1, (0, 3, 0), np.nan), 1, "not clipped"),
        (_report(1, (0, 3, 0), np.inf), 1, "not clipped"),
        (_report(1, (0, 1e300, 0), 0), 1, "not clipped"),
        (_report(15, (0, 9, 0), 12), 3, None),
        (_report(16), 3, "the most that 3 honest devices"),
        (_report(15, (0, 9, 0), 12.01), 3, "not clipped to the norm 15"),
    ],
)
def test_entries_and_joint_norms_are_those_of_so_many_devices(report, num_devices, message):
    bounds = report_bounds.ReportBounds(_CLIPPED, _MOST)
    report = [np.asarray(part) for part in report]
    if message is None:
        bounds.check(report, num_devices)
        return
    with pytest.raises(report_bounds.OutOfBoundsError, match=message):
        bounds.check(report, num_devices)


def test_a_vector_that_was_shifted_is_measured_from_its_centre():
    plan = _plan(_norm([0], 5.0, centre=100.0), dtypes=("int32",))
    bounds = report_bounds.ReportBounds(plan, _MOST)
    for num_devices in (1, 4):
        middle, most = 100 * num_devices, 5 * num_devices
        for value in (middle - most, middle, middle + most):
            bounds.check([np.array(value, np.int32)], num_devices)
        for value in (middle - most - 1, middle + most + 1):
            with pytest.raises(report_bounds.OutOfBoundsError, match="not clipped"):
                bounds.check([np.array(value, np.int32)], num_devices)


def test_a_norm_follows_what_the_devices_of_the_round_were_sent():
    broadcast = [
        plan_pb2.Tensor(label="weights", dtype="float32", shape=[2]),
        plan_pb2.Tensor(label="clip/active", dtype="float32", shape=[]),
    ]
    plan = _plan(
        _norm([0], 2.0, times="clip/active"),
        dtypes=("float64",),
        prepare=plan_pb2.Graph(outputs=broadcast),
    )
    bounds = report_bounds.ReportBounds(plan, _MOST)
    for active in (0.25, 8.0):
        model = tensor_values.to_bytes([np.zeros(2, np.float32), np.float32(active)])
        round_ = bounds.for_round(model)
        round_.check([np.array(2 * active)])
        with pytest.raises(report_bounds.OutOfBoundsError):
            round_.check([np.array(2.001 * active)])


def test_a_clipped_update_is_within_the_margin_of_the_clip_whatever_its_size():
    """10⁶ entries whose norm is C (1 - CLIP_MARGIN), added in another order by NumPy."""
    rng = np.random.default_rng(0)
    for scale in (1e-6, 1.0, 1e18):
        update = rng.normal(size=1_000_000)
        update *= scale * (1 - 1e-5) * (1 + 2e-7) / np.linalg.norm(update)
        plan = _plan(_norm([0], scale), dtypes=("float64",))
        report_bounds.ReportBounds(plan, _MOST).check([update])


def test_a_tensor_without_a_bound_is_refused():
    with pytest.raises(ValueError, match="does not bound every tensor"):
        report_bounds.ReportBounds(_plan(_entries(0, 0, 1), _norm([1], 1.0)), _MOST)
    with pytest.raises(ValueError, match="does not bound every tensor"):
        report_bounds.ReportBounds(_plan(_entries(0, 0, 1), _norm([0, 1, 2], 1.0)), _MOST)


@pytest.mark.parametrize(
    ("rule", "largest", "room"),
    [(None, 2**31 // _MOST + 1, "2.14748e"), (plan_pb2.SecureSum(modulus=1000), 100, "999")],
)
def test_sums_have_room_for_the_most_reports(rule, largest, room):
    rules = [] if rule is None else [rule]
    for most, fits in ((largest - 1, True), (largest, False)):
        plan = _plan(_entries(0, 0, most), dtypes=("int32",), secure_sums=rules)
        if fits:
            report_bounds.ReportBounds(plan, _MOST)
            continue
        with pytest.raises(ValueError, match=rf"over 10 reports .* room for {room}"):
            report_bounds.ReportBounds(plan, _MOST)


def test_a_sum_is_not_checked_where_noise_parties_have_added_to_it():
    noised = _norm([1, 2], 5.0)
    noised.noised = True
    bounds = report_bounds.ReportBounds(_plan(_entries(0, 0, 5), noised), _MOST)
    with pytest.raises(report_bounds.OutOfBoundsError):
        bounds.check(_report(1, (900.0, 0.0, 0.0)))  # A report has the bound all the same.
    bounds.check_sum(_report(1, (900.0, 0.0, 0.0)), 2)
    with pytest.raises(report_bounds.OutOfBoundsError):
        bounds.check_sum(_report(11), 2)
