"""The noised estimate against NumPy: weights, bounds, noise, seeds and state."""

import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl.aggregators import sampled_gaussian
from tff_dpftrl.private_round import clipping, estimators
from verification import conformance

_VALUE_TYPE = tff.to_type(collections.OrderedDict(a=(np.float32, [3]), b=(np.float32, [2, 2])))
_FIXED = estimators.FixedDenominator(0.1, 50)
_CLIPPED = estimators.ClippedDenominator(0.1, 50)


def _process(value_type=_VALUE_TYPE, weight_type=np.float32, **changes):
    arguments = dict(clipping=clipping.FlatClipping(2.0), noise_multiplier=0.0, estimator=_FIXED)
    factory = sampled_gaussian.SampledGaussianFactory(**(arguments | changes))
    return factory.create(value_type, tff.to_type(weight_type))


def _update(rng, scale):
    return collections.OrderedDict(
        a=(scale * rng.normal(size=3)).astype(np.float32),
        b=(scale * rng.normal(size=(2, 2))).astype(np.float32),
    )


def _flat(update):
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in tf.nest.flatten(update)])


def _cohort(num_clients=6):
    rng = np.random.default_rng(2)
    values = [_update(rng, scale) for scale in np.geomspace(0.1, 30, num_clients)]
    return values, list(np.linspace(1, 12, num_clients).astype(np.float32))


def _expected_sum(values, num_examples, clip_norm, weight_cap):
    weights = np.minimum(np.array(num_examples, np.float64) / weight_cap, 1)
    flat = [_flat(v) for v in values]
    clipped = [v * min(1, clip_norm / np.linalg.norm(v)) for v in flat]
    return np.sum([w * c for w, c in zip(weights, clipped, strict=True)], axis=0), np.sum(weights)


@pytest.mark.parametrize(
    "estimator, num_clients",
    [(_FIXED, 1), (_CLIPPED, 12), pytest.param(_CLIPPED, 3, marks=pytest.mark.slow)],
)
def test_estimate_without_noise(estimator, num_clients):
    values, num_examples = _cohort(num_clients)
    process = _process(estimator=estimator, weight_cap=8.0)
    output = process.next(process.initialize(), values, num_examples)
    total, weight = _expected_sum(values, num_examples, 2.0, 8.0)
    divisor = 5.0 if estimator is _FIXED else max(5.0, weight)
    np.testing.assert_allclose(_flat(output.result), total / divisor, rtol=3e-5, atol=1e-6)
    assert set(output.measurements) == {"clip_norm", "noise_stddev"}


def test_per_layer_clipping():
    values, num_examples = _cohort()
    process = _process(clipping=clipping.PerLayerClipping.from_layer_norms([0.5, 1.5]))
    result = process.next(process.initialize(), values, num_examples).result
    for name, bound in (("a", 0.5), ("b", 1.5)):
        clipped = [v[name] * min(1, bound / np.linalg.norm(v[name])) for v in values]
        np.testing.assert_allclose(result[name], np.sum(clipped, axis=0) / 5, rtol=3e-5, atol=1e-6)


@pytest.mark.parametrize(
    "estimator, clip",
    [
        pytest.param(_FIXED, clipping.FlatClipping(2.0), marks=pytest.mark.slow),
        pytest.param(_FIXED, clipping.PerLayerClipping(2.0), marks=pytest.mark.slow),
        (_CLIPPED, clipping.FlatClipping(2.0)),
    ],
)
def test_one_client_moves_the_estimate_by_the_sensitivity_at_most(estimator, clip):
    process = _process(estimator=estimator, clipping=clip)
    aligned = collections.OrderedDict(a=np.full(3, 9, np.float32), b=np.full((2, 2), 9, np.float32))
    opposed = tf.nest.map_structure(lambda x: -x, aligned)
    huge = tf.nest.map_structure(lambda x: np.float32(1e10) * x, opposed)
    overflowing = tf.nest.map_structure(lambda x: np.float32(1e37) * x, opposed)
    broken = tf.nest.map_structure(lambda x: np.float32(np.nan) * x, opposed)
    state, bound = process.initialize(), estimator.unit_sensitivity * 2.0
    worst = 0.0
    for size in (0, 4, 5, 6):
        cohort, counts = [aligned] * size, [1.0] * size
        before = _flat(process.next(state, cohort, counts).result)
        for extra in (opposed, huge, overflowing, broken):
            for count in (1.0, 0.5, 1e30, np.inf, np.nan, -7.0):
                after = process.next(state, cohort + [extra], counts + [count]).result
                worst = max(worst, np.linalg.norm(_flat(after) - before))
    assert worst <= bound
    # And it is (nearly) reached: 2 S / (q W_min + 1) for the clipped denominator.
    reached = bound if estimator is _FIXED else bound * 5 / 6
    assert worst >= reached * (1 - 2e-5)


def test_updates_that_are_not_finite_count_as_absent():
    values, num_examples = _cohort(3)
    bad = _update(np.random.default_rng(3), 1.0)
    bad["b"][0, 1] = np.inf
    for estimator in (_FIXED, estimators.ClippedDenominator(0.1, 5)):
        process = _process(estimator=estimator, report_non_finite_clients=True)
        state = process.initialize()
        without = process.next(state, values, num_examples)
        with_bad = process.next(state, values + [bad], num_examples + [np.float32(5)])
        np.testing.assert_array_equal(_flat(with_bad.result), _flat(without.result))
        assert without.measurements["non_finite_clients"] == 0
        assert with_bad.measurements["non_finite_clients"] == 1


@pytest.mark.parametrize("estimator", [_FIXED, _CLIPPED])
def test_noise_has_the_stated_deviation_and_is_independent(estimator):
    size, noise_multiplier, clip_norms = 200_000, 1.5, [2.0, 0.5]
    process = _process(
        tff.to_type([(np.float32, [size]), (np.float32, [size])]),
        clipping=clipping.FlatClipping(clip_norms),
        noise_multiplier=noise_multiplier,
        estimator=estimator,
        deterministic_seed=11,
    )
    state, draws = process.initialize(), []
    for clip_norm in clip_norms:
        # Nobody shows up: the result is noise only.
        output = process.next(state, [], [])
        state = output.state
        factor = 1 if estimator is _FIXED else 2
        stddev = noise_multiplier * factor * clip_norm / (0.1 * 50)
        assert output.measurements["clip_norm"] == clip_norm
        assert output.measurements["noise_stddev"] == pytest.approx(stddev, rel=1e-6)
        draws += [np.asarray(x, np.float64) / stddev for x in output.result]
    # The relative standard error of a standard deviation is 1/√(2 size), of a mean and of a
    # correlation 1/√size. Power: a deviation off by 2 % is 12 standard errors away.
    margin = 6 / np.sqrt(2 * size)
    assert 0.02 > 2 * margin
    covariance = np.cov(draws)
    np.testing.assert_allclose(np.sqrt(np.diag(covariance)), 1, atol=margin)
    np.testing.assert_allclose(np.mean(draws, axis=1), 0, atol=6 / np.sqrt(size))
    off_diagonal = covariance[~np.eye(len(draws), dtype=bool)]
    np.testing.assert_allclose(off_diagonal, 0, atol=6.1 / np.sqrt(size))


def test_noise_does_not_depend_on_the_cohort():
    values, num_examples = _cohort()
    noisy = _process(noise_multiplier=1.0, deterministic_seed=5)
    silent = _process(deterministic_seed=5)
    noise = _flat(noisy.next(noisy.initialize(), [], []).result)
    estimate = _flat(silent.next(silent.initialize(), values, num_examples).result)
    both = _flat(noisy.next(noisy.initialize(), values, num_examples).result)
    np.testing.assert_allclose(both, estimate + noise, atol=1e-6)


def test_seeds():
    fixed = _process(noise_multiplier=1.0, deterministic_seed=3)
    other = _process(noise_multiplier=1.0, deterministic_seed=3 + 2**64)
    private = _process(noise_multiplier=1.0)
    seeds = [p.initialize().seed for p in (fixed, other, private, private)]
    assert len({tuple(seed) for seed in seeds}) == 4
    results = [
        tuple(_flat(p.next(p.initialize(), [], []).result))
        for p in (fixed, fixed, other, private, private)
    ]
    assert results[0] == results[1]
    assert len(set(results)) == 4


def test_state_round_trip():
    values, num_examples = _cohort()
    process = _process(
        noise_multiplier=1.0,
        clipping=clipping.FlatClipping([4.0, 3.0, 2.0]),
        deterministic_seed=1,
    )
    states, outputs = [process.initialize()], []
    for _ in range(3):
        outputs.append(process.next(states[-1], values, num_examples))
        states.append(outputs[-1].state)
    assert [int(s.round_index) for s in states] == [0, 1, 2, 3]
    # What was saved after round 0 is all that is needed for rounds 1 and 2.
    restored = tf.nest.map_structure(np.array, states[1])
    assert isinstance(restored, sampled_gaussian.SampledGaussianState)
    for expected in outputs[1:]:
        output = process.next(restored, values, num_examples)
        np.testing.assert_array_equal(_flat(output.result), _flat(expected.result))
        assert output.measurements == expected.measurements
        restored = output.state


def test_result_has_the_types_of_the_updates():
    value_type = tff.to_type(
        [(tf.bfloat16.as_numpy_dtype, [2]), (np.float16, [1]), (np.float64, [])]
    )
    process = _process(value_type, np.int32, noise_multiplier=1.0)
    assert process.next.type_signature.result.result.member.is_equivalent_to(value_type)
    value = [tf.constant([1, 0], tf.bfloat16).numpy(), np.array([0.5], np.float16), np.float64(0.1)]
    result = process.next(process.initialize(), [value], [4]).result
    assert [np.asarray(x).dtype for x in result] == [np.asarray(x).dtype for x in value]


def test_a_single_tensor_is_an_update():
    process = _process(tff.to_type((np.float32, [2])))
    result = process.next(process.initialize(), [np.array([3.0, 4.0], np.float32)], [1.0]).result
    np.testing.assert_allclose(result, [1.2 / 5, 1.6 / 5], rtol=2e-5)


class _EqualWeights(tff.aggregators.UnweightedAggregationFactory):
    """The factory with one example a client, as the contract wants it."""

    def __init__(self, factory):
        self._factory = factory

    def create(self, value_type):
        weighted = self._factory.create(value_type, tff.to_type(np.float32))

        @tff.federated_computation(
            weighted.initialize.type_signature.result, tff.FederatedType(value_type, tff.CLIENTS)
        )
        def next_fn(state, value):
            return weighted.next(state, value, tff.federated_value(np.float32(1), tff.CLIENTS))

        return tff.templates.AggregationProcess(weighted.initialize, next_fn)


@pytest.mark.slow
@pytest.mark.parametrize("check", conformance.ALL_CHECKS, ids=lambda check: check.__name__)
def test_equal_weights_keep_the_contract_of_our_factories(check):
    def make(noise_multiplier, clip_norm, clients_per_round):
        return _EqualWeights(
            sampled_gaussian.SampledGaussianFactory(
                clipping=clipping.FlatClipping(clip_norm),
                noise_multiplier=noise_multiplier,
                estimator=estimators.FixedDenominator(1.0, clients_per_round),
            )
        )

    check(make)


def test_refuses_unusable_arguments():
    for name, bad in (
        ("noise_multiplier", -1.0),
        ("noise_multiplier", float("inf")),
        ("weight_cap", 0.0),
        ("weight_cap", float("nan")),
        ("deterministic_seed", -1),
        ("clipping", 1.0),
        ("estimator", 100),
    ):
        with pytest.raises(ValueError, match=name):
            _process(**{name: bad})
    for bad in (tff.to_type([]), tff.to_type(np.int32), tff.TensorType(np.float32, [None])):
        with pytest.raises(ValueError, match="value_type"):
            _process(bad)
