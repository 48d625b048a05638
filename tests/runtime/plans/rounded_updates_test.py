"""Rounded updates are never longer than what was rounded, and others are refused by name."""

from __future__ import annotations

import fractions
import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from tff_dpftrl.runtime.plans import plan_pb2, rounded_updates, tensor_values

_STEP = 1 / 32767


def _plan(*arrays, rounded=None):
    tensors = [
        plan_pb2.Tensor(label=f"w/{i}", dtype=array.dtype.name, shape=array.shape)
        for i, array in enumerate(arrays)
    ]
    return plan_pb2.ServerPlan(
        update=tensors, rounded=range(len(arrays)) if rounded is None else rounded
    )


def _sent_and_read(*arrays, rounded=None):
    plan = _plan(*arrays, rounded=rounded)
    sent, scales = rounded_updates.rounded(arrays, plan.rounded)
    return rounded_updates.read(tensor_values.to_bytes(sent), scales, plan)


def _squared(array):
    """The squared norm, without any rounding."""
    return sum((fractions.Fraction(float(entry)) ** 2 for entry in array.flat), start=0)


def _all_rounded_up(count):
    """One entry of 1, and as many that are rounded up by all but half a step."""
    return np.concatenate([[1.0], np.full(count, math.nextafter(0.5, 1.0) * _STEP * (1 + 1e-9))])


@pytest.mark.parametrize(
    "array",
    [
        pytest.param(_all_rounded_up(30_000), id="all rounded up"),
        pytest.param(-_all_rounded_up(3), id="negative"),
        pytest.param(_all_rounded_up(5000) * 0.5, id="clipped to a half"),
        pytest.param(_all_rounded_up(5000).astype(np.float32), id="float32"),
        pytest.param(np.full(1000, 1.5 * _STEP) + np.eye(1, 1000)[0], id="one and a half steps"),
        pytest.param(np.full((30, 40), 0.1), id="all equal"),
        pytest.param(np.full(1000, 1e300), id="huge"),
        pytest.param(np.full(1000, 3e38, np.float32), id="huge float32"),
        pytest.param(np.array([5e-324, -1e-310, 1e-291]), id="subnormal"),
        pytest.param(np.array([1e-280, 1e-285]), id="tiny"),
        # The scale would be rounded up to the smallest float32, twice as much.
        pytest.param(np.array([2.5e-41, 1e-41], np.float32), id="tiny float32"),
        pytest.param(np.zeros((2, 3)), id="zeros"),
        pytest.param(np.zeros((0, 3)), id="empty"),
        pytest.param(np.float64(-0.3), id="scalar"),
    ],
)
def test_what_is_read_is_no_longer_than_what_was_rounded(array):
    array = np.asarray(array)
    (found,) = _sent_and_read(array)
    assert found.dtype == array.dtype and found.shape == array.shape
    assert _squared(found) <= _squared(array)


@hypothesis.settings(deadline=None, derandomize=True, max_examples=60)
@hypothesis.given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.sampled_from([1e-30, 1.0, 1e20])
)
def test_no_list_of_numbers_gets_longer_or_moves_far(entries, unit):
    array = np.array(entries) * unit
    (found,) = _sent_and_read(array)
    assert _squared(found) <= _squared(array)
    largest = np.abs(array).max()
    shrunk = 1e-6 + np.sqrt(len(entries)) * _STEP / 2 + len(entries) * _STEP**2 / 8
    np.testing.assert_allclose(found, array, rtol=0, atol=largest * (_STEP / 2 + shrunk) + 1e-290)


def test_the_norm_of_all_tensors_together_does_not_grow():
    update = [_all_rounded_up(3000), np.full((2, 2), 1.5 * _STEP) + np.eye(2), np.zeros(4)]
    found = _sent_and_read(*update)
    assert sum(map(_squared, found)) <= sum(map(_squared, update))


def test_an_update_keeps_its_direction_and_a_quarter_of_its_bytes():
    rng = np.random.default_rng(0)
    update = [rng.normal(size=(1000, 90)) * 1e-3, rng.standard_t(2, size=10_000), np.float32(7)]
    found = _sent_and_read(*update, rounded=[0, 1])
    for array, other in zip(update[:2], found, strict=False):
        error = np.linalg.norm(other - array) / np.linalg.norm(array)
        assert 0 < error < 5e-3
        assert abs(np.mean(other - array)) < 1e-4 * np.abs(array).max()
    assert found[2] == 7
    sent, scales = rounded_updates.rounded(update, [0, 1])
    num_bytes = len(tensor_values.to_bytes(sent)) + 8 * len(scales)
    assert num_bytes / 100_000 < 2.01


def test_an_update_that_is_sent_as_it_is_is_read_bit_for_bit():
    update = [np.random.default_rng(0).normal(size=5), np.arange(3)]
    plan = _plan(*update, rounded=[0])
    found = rounded_updates.read(tensor_values.to_bytes(update), [], plan)
    for array, other in zip(update, found, strict=True):
        np.testing.assert_array_equal(array, other)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_an_update_that_is_not_finite_is_refused_by_name(wrong):
    with pytest.raises(rounded_updates.ScalesError, match="w/1, is not finite: its scale is nan"):
        _sent_and_read(np.ones(3), np.array([1.0, wrong, 2.0]))


_CONTENT = tensor_values.to_bytes([np.ones(4, np.int16)])


@pytest.mark.parametrize(
    ("content", "scales", "reason"),
    [
        (_CONTENT, [1.0, 1.0], "update has 2 scales, and the plan rounds 1 tensors"),
        (_CONTENT, [-1.0], "its scale is -1, which must be a number from 0"),
        (_CONTENT, [math.inf], "is not finite: its scale is inf"),
        (_CONTENT, [], "must be float64 of shape"),
        (_CONTENT[:-1], [1.0], "cannot"),
        (_CONTENT + b"\0", [1.0], "cannot"),
        (tensor_values.to_bytes([np.ones(4)]), [1.0], "must be int16 of shape"),
        (tensor_values.to_bytes([np.ones(5, np.int16)]), [1.0], "must be int16 of shape"),
    ],
)
def test_reports_that_do_not_fit_the_plan_are_refused(content, scales, reason):
    with pytest.raises(ValueError, match=reason):
        rounded_updates.read(content, scales, _plan(np.ones(4)))


def test_integers_that_are_scaled_beyond_all_numbers_are_infinite():
    content = tensor_values.to_bytes([np.full(2, 32767, np.int16)])
    (found,) = rounded_updates.read(content, [1e308], _plan(np.ones(2)))
    assert np.isinf(found).all()  # The server refuses it, as any other infinity.


def test_tensors_with_a_norm_in_the_clear_are_rounded():
    def bound(*places, **kinds):
        return plan_pb2.ReportBound(tensors=places, **kinds)

    norm, entries = plan_pb2.ReportBound.Norm(), plan_pb2.ReportBound.Entries()
    tensors = _plan(*[np.zeros(2)] * 4, np.zeros(2, np.float32), np.zeros(2, np.int32)).update
    bounds = [
        bound(0, 2, norm=norm),
        bound(1, entries=entries),
        bound(3, norm=norm, entries=entries),
        bound(4, 5, norm=norm),
    ]
    assert rounded_updates.places_in(bounds, tensors) == [0, 2, 4]
    rounded_updates.check_places([0, 2, 4], tensors, 1)


@pytest.mark.parametrize("rounded", [[1, 0], [0, 0], [2], [3], [9]])
def test_places_that_cannot_be_rounded_are_refused(rounded):
    tensors = _plan(*[np.zeros(2)] * 2, np.zeros(2, np.int64), np.zeros(2)).update
    with pytest.raises(ValueError, match="rounded names the tensors"):
        rounded_updates.check_places(rounded, tensors, 1)
