"""Adaptive clipping: the estimate, the restarts, the split of the noise."""

from __future__ import annotations

import dataclasses
import math
import warnings

import numpy as np
import pytest
import tensorflow_federated as tff

from tff_dpftrl import aggregators, validation
from tff_dpftrl.aggregators import adaptive_clipping
from tff_dpftrl.mechanisms import blt, identity, noise_split, restarts, tree
from tff_dpftrl.private_round import adaptive_clipping as adaptive_clipping_lib
from tff_dpftrl.private_round import gaussians, seeds

_BLT = blt.Blt((0.99, 0.8), (0.05, 0.2))
_VECTOR = tff.TensorType(np.float32, [2])


def _build(strategy, **kwargs):
    arguments = {
        "noise_multiplier": 0.0,
        "clients_per_round": 2,
        "initial_clip_norm": 10.0,
        "only_estimates": not isinstance(strategy, restarts.Restarted),
    } | kwargs
    clip_arguments = {
        field.name: arguments.pop(field.name)
        for field in dataclasses.fields(aggregators.AdaptiveClipping)
        if field.name in arguments
    }
    return aggregators.build_adaptive_dp_ftrl_aggregator(
        strategy, clipping=aggregators.AdaptiveClipping(**clip_arguments), **arguments
    )


def _run(process, values_by_round):
    state, outputs = process.initialize(), []
    for values in values_by_round:
        outputs.append(process.next(state, values))
        state = outputs[-1].state
    return outputs


def _scalars(*values):
    return [np.float32(value) for value in values]


def _measured(outputs, name):
    return [float(output.measurements[name]) for output in outputs]


def test_linear_update_reproduces_the_values_of_tensorflow_privacy():
    # quantile_adaptive_clip_tree_query_test.test_adaptation_target_zero of TensorFlow
    # Privacy 0.9, which restarts after every round.
    process = _build(
        restarts.Restarted(identity.Identity(), tuple(range(6))),
        target_unclipped_quantile=0.0,
        clip_learning_rate=1.0,
        geometric_update=False,
    ).create(tff.TensorType(np.float32))
    outputs = _run(process, [_scalars(8.5, -7.25)] * 5)
    sums = [2 * float(output.result) for output in outputs]
    np.testing.assert_allclose(sums, [1.25, 1.25, 0.75, 0.25, 0.0], atol=1e-4)
    np.testing.assert_allclose(_measured(outputs, "estimated_clip_norm"), [9, 8, 7.5, 7, 7])
    np.testing.assert_allclose(_measured(outputs, "clip_norm"), [10, 9, 8, 7.5, 7])
    np.testing.assert_allclose(_measured(outputs, "unclipped_fraction"), [1, 1, 0.5, 0.5, 0])
    assert _measured(outputs, "num_restarts") == [0, 1, 2, 3, 4]


def test_geometric_update_by_hand():
    # Norms 5 and 2.5, target 0, rate ln 2 (both of TensorFlow Privacy's geometric test): the
    # estimate halves while both are below it and is divided by √2 while one is.
    process = _build(
        restarts.Restarted(identity.Identity(), tuple(range(6))),
        initial_clip_norm=16.0,
        target_unclipped_quantile=0.0,
        clip_learning_rate=math.log(2),
    ).create(tff.TensorType(np.float32))
    outputs = _run(process, [_scalars(5.0, -2.5)] * 5)
    root2 = math.sqrt(2)
    estimates = [8, 4, 4 / root2, 2, 2]
    np.testing.assert_allclose(_measured(outputs, "estimated_clip_norm"), estimates, rtol=1e-6)
    sums = [2.5, 2.5, 4 - 2.5, 4 / root2 - 2.5, 0.0]
    np.testing.assert_allclose([2 * float(o.result) for o in outputs], sums, atol=1e-4)


def test_active_norm_moves_only_where_a_block_starts():
    process = _build(
        restarts.Restarted(_BLT, (0, 2, 5)), target_unclipped_quantile=0.0, clip_learning_rate=0.1
    ).create(tff.TensorType(np.float32))
    outputs = _run(process, [_scalars(0.1, 0.1)] * 6)
    estimates = 10.0 * np.exp(-0.1 * np.arange(1, 7))
    np.testing.assert_allclose(_measured(outputs, "estimated_clip_norm"), estimates, rtol=1e-6)
    active = [10, 10, estimates[1], estimates[1], estimates[1], estimates[4]]
    np.testing.assert_allclose(_measured(outputs, "clip_norm"), active, rtol=1e-6)
    assert _measured(outputs, "num_restarts") == [0, 0, 1, 1, 1, 2]


def test_missing_and_non_finite_clients_pull_the_fraction_to_one_half():
    process = _build(identity.Identity(), clients_per_round=4, report_non_finite_clients=True)
    process = process.create(tff.TensorType(np.float32))
    (output,) = _run(process, [_scalars(1.0, 20.0, np.nan)])
    # Bits +1/2, -1/2, 0, 0; the sum is 1 + 10 (clipped).
    assert float(output.measurements["unclipped_fraction"]) == 0.5
    assert output.measurements["non_finite_clients"] == 1
    np.testing.assert_allclose(output.result, 11 / 4, rtol=2e-5)


@pytest.mark.parametrize(
    "strategy, noise_multiplier",
    [
        (identity.Identity(), 1.5),
        pytest.param(_BLT, 1.5, marks=pytest.mark.slow),
        pytest.param(_BLT, 0.0, marks=pytest.mark.slow),
        pytest.param(tree.Tree(4), 1.5, marks=pytest.mark.slow),
    ],
)
def test_without_restarts_and_learning_it_is_the_fixed_clip(strategy, noise_multiplier):
    adaptive = _build(
        strategy,
        noise_multiplier=noise_multiplier,
        clip_learning_rate=0.0,
        clipped_count_stddev=2.0,
        initial_clip_norm=3.25,
        deterministic_seed=5,
    )
    fixed = aggregators.build_dp_ftrl_aggregator(
        strategy,
        noise_multiplier=adaptive.private_round.update_noise_multiplier,
        clip_norm=3.25,
        clients_per_round=2,
        deterministic_seed=5,
    )
    cohorts = [[np.float32([9, 7])], [np.float32([1, 0]), np.float32([0, 2])], []]
    ours, theirs = (_run(factory.create(_VECTOR), cohorts) for factory in (adaptive, fixed))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a.result, b.result)


def test_noise_starts_anew_in_each_block_and_scales_with_the_active_norm():
    size, num_rounds, starts = 40_000, 5, (0, 3)
    factory = _build(
        restarts.Restarted(_BLT, starts),
        noise_multiplier=1.0,
        clipped_count_stddev=1.0,
        clip_learning_rate=1.0,
        target_unclipped_quantile=0.0,
        clients_per_round=1,
        deterministic_seed=2,
    )
    outputs = _run(factory.create(tff.TensorType(np.float32, [size])), [[]] * num_rounds)
    noise = np.stack([output.result for output in outputs]).astype(np.float64)
    norms = np.asarray(_measured(outputs, "clip_norm"))
    assert norms[0] == norms[2] != norms[3] == norms[4]
    np.testing.assert_allclose(
        _measured(outputs, "noise_stddev"),
        factory.private_round.update_noise_multiplier * norms,
        rtol=1e-6,
    )
    inverse = np.zeros((num_rounds, num_rounds))
    for start, end in ((0, 3), (3, 5)):
        inverse[start:end, start:end] = np.linalg.inv(_BLT.strategy_matrix(end - start))
    scaled = factory.private_round.update_noise_multiplier * norms[:, np.newaxis] * inverse
    expected, covariance = scaled @ scaled.T, noise @ noise.T / size
    variance = np.diag(expected)
    margin = 6 * np.sqrt((np.outer(variance, variance) + expected**2) / size)
    assert np.all(np.abs(covariance - expected) < margin)
    # Power: a BLT running on across the restart would be noticed.
    inverse = np.linalg.inv(_BLT.strategy_matrix(num_rounds))
    scaled = factory.private_round.update_noise_multiplier * norms[:, np.newaxis] * inverse
    assert np.any(np.abs(scaled @ scaled.T - expected) > margin)


def test_count_noise_is_c_inverse_of_the_draws_of_its_own_stream():
    seed, num_rounds, stddev, m = 8, 3, 3.0, 10
    process = _build(
        _BLT,
        noise_multiplier=1.0,
        clipped_count_stddev=stddev,
        clients_per_round=m,
        deterministic_seed=seed,
    ).create(tff.TensorType(np.float32))
    outputs = _run(process, [[]] * num_rounds)
    stream = seeds.derive(seeds.root_seed(seed), adaptive_clipping_lib.COUNT_STREAM)
    tensor = seeds.derive(seeds.derive(stream, 0), 0)
    draws = [float(gaussians.normal(seeds.derive(tensor, t), 1)[0]) for t in range(num_rounds)]
    expected = 0.5 + stddev / m * np.linalg.solve(_BLT.strategy_matrix(num_rounds), draws)
    np.testing.assert_allclose(_measured(outputs, "unclipped_fraction"), expected, rtol=1e-5)


@pytest.mark.slow
def test_estimate_reaches_the_target_quantile():
    rng = np.random.default_rng(0)
    m, target = 50, 0.7
    process = _build(
        restarts.Restarted(_BLT, tuple(range(0, 80, 10))),
        initial_clip_norm=0.1,
        target_unclipped_quantile=target,
        noise_multiplier=1.0,
        clients_per_round=m,
        deterministic_seed=1,
    ).create(tff.TensorType(np.float32))
    cohorts = [list(np.exp(rng.normal(size=m)).astype(np.float32)) for _ in range(80)]
    outputs = _run(process, cohorts)
    log_estimates = np.log(_measured(outputs, "estimated_clip_norm"))[40:]
    # Norms are log-normal; the 0.7-quantile is exp(0.5244). The median would be 1.
    assert abs(np.mean(log_estimates) - 0.5244) < 0.2
    assert _measured(outputs, "clip_norm")[-1] > 1.2


@pytest.mark.slow
def test_a_private_estimate_can_be_fixed_afterwards():
    # The recipe of README.md in tff_dpftrl/aggregators.
    rng = np.random.default_rng(1)
    value_type = tff.TensorType(np.float32)
    estimator = _build(
        _BLT,
        initial_clip_norm=1.0,
        noise_multiplier=0.5,
        clients_per_round=20,
        deterministic_seed=4,
    ).create(value_type)
    cohorts = [list(rng.normal(5.0, 0.5, 20).astype(np.float32)) for _ in range(25)]
    clip_norm = _measured(_run(estimator, cohorts), "estimated_clip_norm")[-1]
    assert 4.0 < clip_norm < 6.2
    fixed = aggregators.build_dp_ftrl_aggregator(
        _BLT, noise_multiplier=0.0, clip_norm=clip_norm, clients_per_round=1
    ).create(value_type)
    (output,) = _run(fixed, [_scalars(100.0)])
    np.testing.assert_allclose(output.result, clip_norm, rtol=3e-5)


def test_split_of_the_noise_is_theorem_1():
    z, stddev = 7.0, 325.0
    split = noise_split.update_noise_multiplier(z, stddev)
    # Precisions of the updates (sensitivity 1) and of the counts (1/2) add up.
    np.testing.assert_allclose(split**-2 + 0.25 * stddev**-2, z**-2, rtol=1e-12)
    assert noise_split.update_noise_multiplier(0.0, 0.0) == 0.0
    factory = _build(_BLT, noise_multiplier=z, clients_per_round=6500)
    assert factory.private_round.clipped_count_stddev == 325.0
    assert factory.private_round.update_noise_multiplier == split


@pytest.mark.parametrize("stddev", [0.0, 0.5, 3.5])
def test_impossible_split_is_refused(stddev):
    with pytest.raises(ValueError, match="clipped_count_stddev must be above noise_multiplier / 2"):
        _build(_BLT, noise_multiplier=7.0, clipped_count_stddev=stddev)


def test_expensive_split_warns():
    with pytest.warns(
        aggregators.ExpensiveClippingWarning, match=r"multiplies the noise of the updates by 1\.6"
    ):
        _build(_BLT, noise_multiplier=1.0, clipped_count_stddev=0.64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _build(_BLT, noise_multiplier=1.0, clipped_count_stddev=2.0)


@pytest.mark.parametrize(
    "name, value",
    [
        ("noise_multiplier", -1.0),
        ("clients_per_round", 0),
        ("initial_clip_norm", 0.0),
        ("target_unclipped_quantile", 1.1),
        ("clip_learning_rate", -0.1),
        ("clipped_count_stddev", math.nan),
        ("deterministic_seed", -1),
    ],
)
def test_unusable_arguments_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        _build(_BLT, **{name: value})


def test_state_resumes_and_the_estimate_stays_in_the_safe_range():
    process = _build(
        restarts.Restarted(_BLT, (0, 1)), target_unclipped_quantile=0.0, clip_learning_rate=1e4
    ).create(tff.TensorType(np.float32))
    (output,) = _run(process, [_scalars(1.0, 1.0)])
    state = output.state
    assert isinstance(state, adaptive_clipping.AdaptiveDPFTRLState)
    assert state.round_index == 1
    np.testing.assert_allclose(state.clip.active, validation.MIN_CLIP_NORM)
    assert np.isfinite(process.next(state, _scalars(1.0)).result)


@pytest.mark.parametrize(
    "strategy", [identity.Identity(), restarts.Restarted(identity.Identity(), (0,))]
)
def test_a_strategy_without_restarts_has_to_be_asked_for(strategy):
    with pytest.raises(ValueError, match="has no restarts, so that the clip norm would stay 0.3"):
        _build(strategy, initial_clip_norm=0.3, only_estimates=False)
    _build(strategy, initial_clip_norm=0.3, only_estimates=True)
