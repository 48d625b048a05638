"""Expectations of an engineer that are met, are not met, and cannot be evaluated."""

import dataclasses

import numpy as np
import pytest

from tff_dpftrl.runtime.plans import expectations, plan_pb2

_LOSSES = (3.0, 2.0, 1.5)


def _trial(plan=None, update_of=None, changes=(0.5, 0.4, 0.3), **metrics):
    """Makes a trial of three rounds; an update is the sum of the lengths of the examples."""
    metrics = {"client_work/train/loss": _LOSSES, "client_work/train/mse": _LOSSES} | metrics
    return expectations.Trial(
        plan=plan or plan_pb2.DevicePlan(),
        proxies=[[b"abc", b"de"], []],
        metrics=[{k: np.float32(v[i]) for k, v in metrics.items()} for i in range(3)],
        changes=changes,
        update_of=update_of or (lambda examples: [np.float32([sum(map(len, examples)), 1.0])]),
    )


def _in_order(examples):
    return [np.float32([index * len(example) for index, example in enumerate(examples)])]


_MET = [
    expectations.loss_below(1.6),
    expectations.metric_below("train/mse", 1.6),
    expectations.metric_above("client_work/train/loss", 1.4),
    expectations.update_norm_between(0.3, 0.5),
    expectations.same_in_every_run(),
    expectations.order_of_examples_is_ignored(),
    expectations.expect("it falls", lambda trial: list(trial.metric("loss")) == [3.0, 2.0, 1.5]),
    expectations.expect("NumPy's", lambda trial: np.less(trial.changes, 1).all()),
    *expectations.from_text("loss < 1.6, mse>1.4 ,update < 0.6"),
]


@pytest.mark.parametrize("expectation", _MET, ids=lambda one: one.description)
def test_expectations_that_are_met(expectation):
    assert expectation.outcome(_trial()).holds


_NOT_MET = [
    (expectations.loss_below(1.5), "loss 3, 2, 1.5"),
    (expectations.metric_above("mse", 2.5), "mse 3, 2, 1.5"),
    (expectations.update_norm_between(0.35, 1.0), "update 0.5, 0.4, 0.3"),
    (expectations.update_norm_between(0.0, 0.45), "update 0.5, 0.4, 0.3"),
    (expectations.unknown_features_are_ignored(), "relative difference of two updates 1"),
    (expectations.expect("false", lambda trial: False), "client_work/train/loss 3, 2, 1.5; "),
    (expectations.expect("own", lambda trial: expectations.Outcome(False, "7 of 8")), "7 of 8"),
    *[(one, "update 0.5, 0.4, 0.3") for one in expectations.from_text("update < 0.5,update>0.3")],
]


@pytest.mark.parametrize(("expectation", "measured"), _NOT_MET)
def test_expectations_that_are_not_met_show_the_numbers(expectation, measured):
    outcome = expectation.outcome(_trial())
    assert not outcome.holds and outcome.measured.startswith(measured)


def test_an_order_that_matters_is_found():
    expectation = expectations.order_of_examples_is_ignored()
    outcome = expectation.outcome(_trial(update_of=_in_order))
    # Sizes 0 and 2 become 0 and 3: 1 of 2.
    assert not outcome.holds and "updates 0.5, at most 1e-05 wanted" in outcome.measured


def test_a_run_that_differs_is_found():
    draws = np.random.default_rng(0)
    trial = _trial(update_of=lambda examples: [draws.normal(size=3)])
    assert not expectations.same_in_every_run(within=1e-3).outcome(trial).holds


def _raises(trial):
    raise RuntimeError("no\nsuch")


@pytest.mark.parametrize(
    ("expectation", "message"),
    [
        (expectations.metric_above("accuracy", 0.1), r"there is no metric 'accuracy'; the task "),
        (expectations.loss_below(2), r"several metrics 'loss': \['client_work/train/loss', 'ev"),
        (expectations.expect("it", _raises), "it raises RuntimeError: no$"),
        (expectations.expect("it", lambda trial: None), r"True or False, got None \(NoneType\)"),
        (expectations.expect("it", lambda trial: 1.0), r"True or False, got 1.0 \(float\)"),
        (expectations.metric_above("shape", 0), r"'shape' has shape \[2\] and dtype float32, and"),
    ],
)
def test_what_cannot_be_evaluated_says_why(expectation, message):
    trial = _trial(**{"eval/loss": _LOSSES, "shape": [[1, 2]] * 3})
    with pytest.raises(expectations.CannotEvaluateError, match=message) as caught:
        expectation.outcome(trial)
    assert "\n" not in str(caught.value)


def test_the_order_of_shuffled_examples_cannot_be_tested():
    trial = _trial(plan_pb2.DevicePlan(seed_policy=plan_pb2.DEVICE_DRAWS))
    with pytest.raises(expectations.CannotEvaluateError, match="plan shuffles"):
        expectations.order_of_examples_is_ignored().outcome(trial)


@pytest.mark.parametrize(
    "text", ["", "loss", "loss < ", "loss <= 3", "loss < x", "loss < 1,", "loss < 1e999", "< 3"]
)
def test_text_that_is_no_comparison_is_refused(text):
    with pytest.raises(ValueError, match="expect must be comparisons such as 'loss < 6.5, "):
        expectations.from_text(text)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: expectations.expect("", bool), "description must be words"),
        (lambda: expectations.expect("it", True), "'it' must be a function of a trial, got True"),
        (lambda: expectations.loss_below(float("nan")), "largest must be a finite number"),
        (lambda: expectations.update_norm_between(2, 1), "largest must be .*above 2"),
        (lambda: expectations.same_in_every_run(-1), "within must be .*at least 0"),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_differences_are_relative_to_each_tensor():
    plan = plan_pb2.DevicePlan()
    one = [np.float32([3.0, 4.0]), np.float32([1e-5])]
    other = [np.float32([3.0, 4.5]), np.float32([2e-5])]
    assert expectations.largest_difference(one, one, plan) == 0
    # 0.5 of 5, and 1e-5 of 1e-3, as the second tensor is smaller than that.
    assert expectations.largest_difference(one, other, plan) == pytest.approx(0.1)
    assert expectations.largest_difference(one[1:], other[1:], plan) == pytest.approx(0.01)
    nan = [np.float32([3.0, np.nan]), one[1]]
    assert expectations.largest_difference(nan, nan, plan) == 0
    assert expectations.largest_difference(one, nan, plan) == np.inf


def test_differences_of_secure_sums_are_modular():
    plan = plan_pb2.DevicePlan(secure_sums=[plan_pb2.SecureSum(modulus=16)])
    one, other = [np.int32([15, 4, 8])], [np.int32([0, 4, 7])]
    assert expectations.largest_difference(one, other, plan, steps=1) == 0
    # As numbers around 0 these are -1, 4 and -8, and 15 and 0 are one apart.
    expected = np.sqrt(2) / 9
    assert expectations.largest_difference(one, other, plan) == pytest.approx(expected)
    whole = dataclasses.replace(_trial(plan), update_of=lambda examples: one)
    assert expectations.same_in_every_run().outcome(whole).holds
