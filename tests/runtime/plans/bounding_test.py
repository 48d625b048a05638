"""From what is known of a process to the bounds of its reports."""

import numpy as np
import pytest

from tff_dpftrl.discretization import grid
from tff_dpftrl.models import metric_grid
from tff_dpftrl.runtime.plans import bounding, plan_pb2

_MOST = 1000


def _tensor(label, dtype, *shape):
    return plan_pb2.Tensor(label=label, dtype=dtype, shape=shape)


_METRICS = [
    _tensor("0/0/counts/loss_sum", "float32"),
    _tensor("0/0/counts/num_targets", "int64"),
    _tensor("0/0/own", "int32"),
    _tensor("0/0/other", "float32"),
]
_WEIGHTS = [_tensor("trainable/0", "float32", 2, 3), _tensor("trainable/1", "float32", 3)]
_UPDATE = [_tensor("0/1/0", "float64", 2, 3), _tensor("0/1/1", "float64", 3)]
_BIT, _COUNTER = _tensor("0/2", "float64"), _tensor("0/3", "int32")
_BROADCAST = [_tensor("0/trainable/0", "float32", 2, 3), _tensor("1/active", "float32")]

# The same of a round of this package.
_OWN_METRICS = [_tensor(f"plain/metrics/{t.label[2:]}", t.dtype) for t in _METRICS]
_OWN_UPDATE = [
    _tensor("plain/update/update/0", "float64", 2, 3),
    _tensor("plain/update/update/1", "float64", 3),
]
_OWN_COUNTER = _tensor("plain/update/non_finite_clients", "int32")


def _bounds(update, kind=plan_pb2.TRAINING, secure_sums=(), **limits):
    """The bounds by label."""
    server = plan_pb2.ServerPlan(
        update=update,
        secure_sums=secure_sums,
        prepare=plan_pb2.Graph(outputs=_BROADCAST),
        get_weights=plan_pb2.Graph(outputs=_WEIGHTS),
    )
    options = {"metrics": {"loss_sum": 0.1, "num_targets": 7.5}, "most_reports": _MOST} | limits
    bounding.bound_reports(server, kind, bounding.ReportLimits(**options))
    found = {}
    for bound in server.report_bounds:
        for place in bound.tensors:
            found[server.update[place].label] = bound
    assert found.keys() == {tensor.label for tensor in update}
    return found, server


def _interval(bound):
    return bound.entries.least, bound.entries.largest


@pytest.mark.parametrize(
    ("clip_norm", "largest", "times", "bit"),
    [(0.3, 0.3, "", (0.0, 1.0)), ("active", 1.0, "1/active", (-0.5, 0.5))],
)
def test_training_in_the_clear(clip_norm, largest, times, bit):
    found, _ = _bounds([*_METRICS, *_UPDATE, _BIT, _COUNTER], clip_norm=clip_norm)
    least, most = _interval(found["0/0/counts/loss_sum"])
    assert least == 0 and float(np.float32(most)) == most <= 0.1
    assert 0.1 < float(np.nextafter(np.float32(most), np.float32(1)))
    assert _interval(found["0/0/counts/num_targets"]) == (0, 7)
    assert _interval(found["0/0/own"]) == (-2147483, 2147483)  # Times the most reports: an int32.
    assert _interval(found["0/0/other"]) == (-bounding.LARGEST_METRIC, bounding.LARGEST_METRIC)
    assert _interval(found["0/2"]) == bit
    assert _interval(found["0/3"]) == (0, 1)
    norm = found["0/1/0"].norm
    assert found["0/1/1"].norm == norm and (norm.largest, norm.times) == (largest, times)
    assert not found["0/1/0"].HasField("entries")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_an_update_of_half_precision_is_refused_with_the_reason(dtype):
    update = [_tensor(tensor.label, dtype, *tensor.shape) for tensor in _OWN_UPDATE]
    with pytest.raises(bounding.UnboundedError, match=f"{dtype}, .* make the model's weights"):
        _bounds([*_OWN_METRICS, *update])


@pytest.mark.parametrize(
    ("clip_norm", "name", "least"), [(0.3, "weight", 0.0), ("active", "bit", -0.5)]
)
def test_a_round_of_this_package_is_bounded_by_its_labels(clip_norm, name, least):
    scalar = _tensor(f"plain/update/{name}", "float64")
    # What looks like the update, bit or count of a round of TFF is a metric here.
    like = [
        _tensor("plain/metrics/0/update/0", "float64", 2, 3),
        _tensor("plain/metrics/0/update/1", "float64", 3),
        _tensor("plain/metrics/0/bit", "float64"),
    ]
    tensors = [*_OWN_METRICS, scalar, _OWN_COUNTER, *_OWN_UPDATE, *like]
    found, server = _bounds(tensors, clip_norm=clip_norm)
    assert _interval(found["plain/metrics/0/counts/num_targets"]) == (0, 7)
    assert _interval(found[scalar.label]) == (least, least + 1)
    assert _interval(found[_OWN_COUNTER.label]) == (0, 1)
    (norm,) = [bound for bound in server.report_bounds if bound.HasField("norm")]
    assert [server.update[i].label for i in norm.tensors] == [t.label for t in _OWN_UPDATE]
    assert norm.norm.times == ("1/active" if clip_norm == "active" else "")
    largest = bounding.LARGEST_METRIC
    for tensor in like:
        assert _interval(found[tensor.label]) == (-largest, largest)


def test_an_update_of_this_package_that_nobody_clips_has_sums_that_are_finite():
    update = [_tensor(t.label, "float32", *t.shape) for t in _OWN_UPDATE]
    found, _ = _bounds([*_OWN_METRICS, _tensor("plain/update/clients", "int32"), *update])
    assert found[update[0].label].norm.largest * _MOST <= np.finfo(np.float32).max
    assert _interval(found["plain/update/clients"]) == (0, 1)


@pytest.mark.parametrize(
    ("update", "kind", "limits", "message"),
    [
        (_OWN_METRICS, plan_pb2.TRAINING, {}, "none of its 4 tensors in the clear"),
        (_OWN_UPDATE[:1], plan_pb2.TRAINING, {"clip_norm": 1.0}, "none of its 1 tensors"),
        (_OWN_UPDATE[::-1], plan_pb2.TRAINING, {"clip_norm": 1.0}, "none of its 2 tensors"),
        (
            [_tensor("plain/metrics/0/update/0", "float64", 2, 3), _OWN_UPDATE[1]],
            plan_pb2.TRAINING,
            {"clip_norm": 1.0},
            "none of its 2 tensors",
        ),
        (
            [*_OWN_UPDATE, _tensor("plain/update/other", "float64")],
            plan_pb2.TRAINING,
            {"clip_norm": 1.0},
            "plain/update/other is summed in the clear",
        ),
        (
            [*_OWN_UPDATE, _tensor("plain/update/bit", "float64", 3)],
            plan_pb2.TRAINING,
            {"clip_norm": 1.0},
            "plain/update/bit is summed in the clear",
        ),
        (_OWN_UPDATE, plan_pb2.EVALUATION, {}, "plain/update/update/0 is summed in the clear"),
        (
            _OWN_UPDATE,
            plan_pb2.TRAINING,
            {"encoding": grid.for_bits(9, 8, 16)},
            "plain/update/update/0 is summed in the clear",
        ),
    ],
)
def test_a_round_of_this_package_sends_nothing_without_a_bound(update, kind, limits, message):
    with pytest.raises(bounding.UnboundedError, match=message):
        _bounds(update, kind, **limits)


def test_metrics_that_nobody_names_are_refused_if_all_must_be_named():
    grids = {"loss": metric_grid.MetricGrid((0.0, 1.0, 2.0))}
    known = [_METRICS[0], _tensor("0/1/loss_histogram", "int32", 3), *_UPDATE, _COUNTER]
    options = {"clip_norm": 1.0, "grids": grids, "names_all_metrics": True}
    assert _interval(_bounds(known, **options)[0]["0/3"]) == (0, 1)
    for other in (_tensor("0/4/own", "float32"), _tensor("0/4/0", "float32", 2, 3)):
        with pytest.raises(bounding.UnboundedError, match=f"'{other.label}', which is no metric"):
            _bounds([*known, other], **options)
        rule = plan_pb2.SecureSum(largest_entry=1)
        with pytest.raises(bounding.UnboundedError, match=f"'{other.label}', which is no metric"):
            _bounds([*known, other], secure_sums=[rule], **options)


def test_histograms_count_each_device_once_and_are_declared():
    grids = {"loss": metric_grid.MetricGrid((0.0, 1.0, 2.0))}
    histogram = _tensor("0/1/loss_histogram", "int32", 3)
    found, server = _bounds([*_METRICS, histogram, *_UPDATE], clip_norm=1.0, grids=grids)
    bound = found["0/1/loss_histogram"]
    assert bound.counts_once and _interval(bound) == (0, 1)
    assert sum(bound.counts_once for bound in server.report_bounds) == 1
    rule = plan_pb2.SecureSum(largest_entry=1)
    found, _ = _bounds([histogram], plan_pb2.EVALUATION, secure_sums=[rule], grids=grids)
    bound = found["0/1/loss_histogram"]
    assert bound.counts_once and _interval(bound) == (0, 1)


def test_an_update_that_nobody_clips_has_sums_that_are_finite():
    update = [_tensor(t.label, "float32", *t.shape) for t in _UPDATE]
    found, _ = _bounds([_COUNTER, *_METRICS, *update])
    assert found["0/1/0"].norm.largest * _MOST <= np.finfo(np.float32).max
    assert _interval(found["0/3"]) == (0, 1)


def test_an_evaluation_has_metrics_only():
    found, _ = _bounds(_METRICS, plan_pb2.EVALUATION)
    assert not any(bound.HasField("norm") for bound in found.values())


@pytest.mark.parametrize(
    ("metrics", "update", "bit"),
    [("2/0", "3/0", "3/1"), ("secure/metrics/0", "secure/update", "secure/bit")],
    ids=["tff", "own"],
)
def test_secure_sums(metrics, update, bit):
    encoding = grid.for_bits(9, 8, 16)
    tensors = [
        _tensor(f"{metrics}/num_targets", "int64"),
        _tensor(f"{metrics}/own", "int64"),
        _tensor(f"{update}/vector", "int32", encoding.padded_dim),
        _tensor(f"{update}/count", "int32"),
        _tensor(f"{bit}/doubled", "int32"),
    ]
    rules = [
        *[plan_pb2.SecureSum(largest_entry=2**40 - 1)] * 2,
        plan_pb2.SecureSum(modulus=encoding.sum_modulus),
        *[plan_pb2.SecureSum(modulus=2**31 - 1)] * 2,
    ]
    found, server = _bounds(tensors, secure_sums=rules, encoding=encoding, clip_norm=1.0)
    assert [rule.largest_entry for rule in server.secure_sums] == [7, 2**40 - 1, 0, 0, 0]
    assert _interval(found[f"{metrics}/num_targets"]) == (0, 7)
    assert _interval(found[f"{metrics}/own"]) == (0, 2**40 - 1)
    vector = found[f"{update}/vector"]
    assert _interval(vector) == (0, 2 * encoding.max_coordinate)
    assert vector.norm.centre == encoding.max_coordinate
    assert vector.norm.largest**2 == pytest.approx(encoding.max_squared_norm, rel=1e-15)
    assert _interval(found[f"{update}/count"]) == (1, 1)
    assert _interval(found[f"{bit}/doubled"]) == (0, 2)


@pytest.mark.parametrize(
    ("update", "rules", "limits", "message"),
    [
        (_METRICS, [], {"clip_norm": 1.0}, "none of its 4 tensors in the clear"),
        ([*_METRICS, *_UPDATE], [], {"clip_norm": "norm"}, "0 scalars of that name"),
        (
            [_tensor("3/0/vector", "int32", 16)],
            [plan_pb2.SecureSum(modulus=64)],
            {},
            "nothing bounds what a device may send",
        ),
        (
            [_tensor("3/0/vector", "int32", 8)],
            [plan_pb2.SecureSum(modulus=64)],
            {"encoding": grid.for_bits(9, 8, 16)},
            "encoding is not that of 3/0/vector",
        ),
    ],
)
def test_what_nothing_bounds_is_refused_with_the_remedy(update, rules, limits, message):
    with pytest.raises(bounding.UnboundedError, match=message):
        _bounds(update, secure_sums=rules, **limits)
