"""The fixed-clip aggregator: its arithmetic, its noise, its state, its fit into TFF."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl import aggregators
from tff_dpftrl.aggregators import dp_ftrl
from tff_dpftrl.mechanisms import blt, identity, tree
from tff_dpftrl.private_round import clipping, gaussians, seeds

_NESTED = tff.to_type(
    collections.OrderedDict(
        a=tff.TensorType(np.float32, [3]), b=(np.float32, [(np.float32, [2, 2])])
    )
)
_BLT = blt.Blt((0.99, 0.8), (0.05, 0.2))


def _build(strategy=None, **kwargs):
    arguments = {"noise_multiplier": 1.0, "clip_norm": 1.0, "clients_per_round": 4} | kwargs
    return aggregators.build_dp_ftrl_aggregator(strategy or identity.Identity(), **arguments)


def _nested(value):
    return collections.OrderedDict(
        a=np.full(3, value, np.float32),
        b=(np.float32(value), [np.full((2, 2), value, np.float32)]),
    )


def _run(process, values_by_round, state=None):
    state = process.initialize() if state is None else state
    outputs = []
    for values in values_by_round:
        outputs.append(process.next(state, values))
        state = outputs[-1].state
    return outputs


def test_identity_is_independent_gaussian_noise_of_the_seed():
    seed, num_rounds = 123, 3
    process = _build(deterministic_seed=seed, noise_multiplier=0.5, clip_norm=8.0).create(_NESTED)
    outputs = _run(process, [[_nested(1.0), _nested(2.0)]] * num_rounds)
    # The path root -> stream 0 -> block 0 -> tensor -> round, then an ordinary Gaussian.
    block = seeds.derive(seeds.derive(seeds.root_seed(seed), 0), 0)
    for t, output in enumerate(outputs):
        for position, tensor in enumerate(tf.nest.flatten(output.result)):
            leaf = seeds.derive(seeds.derive(block, position), t)
            noise = tf.reshape(gaussians.normal(leaf, np.size(tensor)), np.shape(tensor))
            expected = (3.0 + 0.5 * 8.0 * noise) / 4
            np.testing.assert_allclose(tensor, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "strategy",
    [identity.Identity(), _BLT, pytest.param(tree.Tree(7), marks=pytest.mark.slow)],
    ids=lambda s: s.mechanism,
)
def test_without_noise_it_is_the_sum_over_the_fixed_denominator(strategy):
    process = _build(strategy, noise_multiplier=0.0, clip_norm=1e6).create(_NESTED)
    cohorts = [[_nested(1.0), _nested(2.0), _nested(6.0)], [_nested(5.0)], []]
    for output, total in zip(_run(process, cohorts), [9.0, 5.0, 0.0], strict=True):
        tf.nest.map_structure(np.testing.assert_array_equal, output.result, _nested(total / 4))


def test_updates_are_clipped_together():
    process = _build(noise_multiplier=0.0, clip_norm=2.0, clients_per_round=1).create(_NESTED)
    (output,) = _run(process, [[_nested(10.0)]])
    flat = np.concatenate([np.ravel(x) for x in tf.nest.flatten(output.result)])
    assert 2.0 * (1 - 3e-5) < np.linalg.norm(flat.astype(np.float64)) <= 2.0


def test_layers_are_clipped_on_their_own():
    process = _build(
        noise_multiplier=0.0,
        clip_norm=None,
        clipping=clipping.PerLayerClipping.from_layer_norms((3.0, 4.0)),
        clients_per_round=1,
    ).create(tff.to_type([(np.float32, [2]), (np.float32, [2])]))
    (output,) = _run(process, [[[np.float32([30, 0]), np.float32([1, 1])]]])
    np.testing.assert_allclose(output.result[0], [3, 0], rtol=3e-5)
    np.testing.assert_array_equal(output.result[1], [1, 1])


def test_clients_without_finite_norm_count_as_zero():
    process = _build(noise_multiplier=0.0, clip_norm=1e6, report_non_finite_clients=True).create(
        _NESTED
    )
    cohort = [_nested(4.0), _nested(np.nan), _nested(np.inf)]
    (output,) = _run(process, [cohort])
    tf.nest.map_structure(np.testing.assert_array_equal, output.result, _nested(1.0))
    assert output.measurements["non_finite_clients"] == 2


def test_one_client_moves_the_average_by_at_most_its_share():
    process = _build(deterministic_seed=3, clip_norm=2.0).create(tff.TensorType(np.float32))
    (without,) = _run(process, [[np.float32(0.5)]])
    for broken in (1e30, -1e30, np.nan, np.inf):
        (output,) = _run(process, [[np.float32(0.5), np.float32(broken)]])
        assert abs(float(output.result) - float(without.result)) <= 2.0 / 4 * (1 + 1e-6)


def test_measurements_are_flat_and_hold_only_constants():
    process = _build(noise_multiplier=3.0, clip_norm=0.5).create(_NESTED)
    first, second = _run(process, [[_nested(1.0)], [_nested(9.0)] * 3])
    expected = collections.OrderedDict(clip_norm=0.5, noise_stddev=1.5)
    assert first.measurements == second.measurements == expected


def test_measurements_of_the_inner_sum_are_passed_on():
    counting_sum = tff.aggregators.add_measurements(
        tff.aggregators.SumFactory(),
        server_measurement_fn=lambda total: collections.OrderedDict(
            first=tff.federated_map(tff.tensorflow.computation(lambda x: x["a"][0]), total)
        ),
    )
    process = _build(clip_norm=100.0, sum_factory=counting_sum, encoded_norm=100.0).create(_NESTED)
    (output,) = _run(process, [[_nested(1.0), _nested(2.0)]])
    assert set(output.measurements) == {"clip_norm", "noise_stddev", "first"}
    assert output.measurements["first"] == 3.0


def test_noise_follows_the_norm_after_encoding():
    plain = _build(deterministic_seed=1, clients_per_round=1).create(tff.TensorType(np.float32))
    wider = _build(deterministic_seed=1, clients_per_round=1, encoded_norm=1.5).create(
        tff.TensorType(np.float32)
    )
    (a,), (b,) = _run(plain, [[]]), _run(wider, [[]])
    np.testing.assert_allclose(b.result, 1.5 * a.result, rtol=1e-6)
    with pytest.raises(ValueError, match="encoded_norm must be a finite number, at least 1"):
        _build(encoded_norm=0.9)


def test_two_initialisations_share_no_noise():
    process = _build().create(tff.TensorType(np.float32, [100]))
    states = [process.initialize() for _ in range(2)]
    assert not np.array_equal(states[0].seed, states[1].seed)
    (a,), (b,) = (_run(process, [[]], state) for state in states)
    assert np.min(np.abs(a.result - b.result)) > 0


def test_a_given_seed_is_visible_and_repeats():
    factory = _build(deterministic_seed=9)
    assert factory.private_round.deterministic_seed == 9
    assert _build().private_round.deterministic_seed is None
    process = factory.create(tff.TensorType(np.float32, [4]))
    (a,), (b,) = (_run(process, [[]]) for _ in range(2))
    np.testing.assert_array_equal(a.result, b.result)


@pytest.mark.parametrize(
    "strategy",
    [_BLT, pytest.param(tree.Tree(7), marks=pytest.mark.slow)],
    ids=lambda s: s.mechanism,
)
def test_state_is_all_that_is_needed_to_go_on(strategy):
    cohorts = [[_nested(0.1 * t)] for t in range(6)]
    outputs = _run(_build(strategy, deterministic_seed=3).create(_NESTED), cohorts)
    saved = tf.nest.map_structure(np.copy, outputs[2].state)
    assert isinstance(saved, dp_ftrl.DPFTRLState)
    assert saved.round_index == 3
    resumed = _run(_build(strategy, deterministic_seed=4).create(_NESTED), cohorts[3:], saved)
    for before, after in zip(outputs[3:], resumed, strict=True):
        tf.nest.map_structure(np.testing.assert_array_equal, before.result, after.result)


def test_state_holds_one_copy_for_each_buffer_or_one_seed_for_each_level():
    blt_state, reduced, vanilla = (
        _build(strategy).create(_NESTED).state_type.member
        for strategy in (_BLT, tree.Tree(7), tree.Tree(7, variance_reduction=False))
    )
    assert blt_state.buffer.shape == (2, 3 + 1 + 4)
    assert reduced.buffer.shape == (3, 3 + 1 + 4) and reduced.seed.shape == (2,)
    assert len(vanilla.buffer) == 0 and vanilla.seed.shape == (1 + 3, 2)


def test_rounds_beyond_the_strategy_fail():
    process = _build(tree.Tree(3)).create(tff.TensorType(np.float32))
    outputs = _run(process, [[]] * 3)
    with pytest.raises(Exception, match="defined for 3 rounds"):
        process.next(outputs[-1].state, [])


def test_half_precision_updates_are_summed_in_float32():
    value_type = tff.to_type(
        [tff.TensorType(np.float16, [2]), tff.TensorType(tf.bfloat16.as_numpy_dtype, [2])]
    )
    process = _build(noise_multiplier=0.0, clip_norm=1e6, clients_per_round=1).create(value_type)
    small = [tf.constant([1 / 1024, 0], tf.float16), tf.constant([1 / 256, 0], tf.bfloat16)]
    big = [tf.constant([1, 0], tf.float16), tf.constant([1, 0], tf.bfloat16)]
    (output,) = _run(process, [[big] + [small] * 4])
    # Adding 1/2048 or 1/512 one at a time to 1 would change nothing in half precision.
    assert float(output.result[0][0]) == 1 + 4 / 1024
    assert float(output.result[1][0]) == 1 + 4 / 256
    assert output.result[0].dtype == np.float16
    assert output.result[1].dtype == tf.bfloat16.as_numpy_dtype


@pytest.mark.parametrize(
    "value_type, message",
    [
        (tff.to_type([np.float32, np.int32]), "only floats.*got int32"),
        (tff.StructType([]), "at least one tensor"),
        (tff.TensorType(np.float32, [None]), "static shapes"),
        (tff.SequenceType(np.float32), "nesting of tensors"),
    ],
    ids=["integers", "empty", "unknown-shape", "sequence"],
)
def test_unusable_types_are_refused(value_type, message):
    with pytest.raises(ValueError, match=message):
        _build().create(value_type)


@pytest.mark.parametrize(
    "name, value",
    [
        ("noise_multiplier", -1.0),
        ("noise_multiplier", np.nan),
        ("clip_norm", 0.0),
        ("clients_per_round", 0),
        ("clients_per_round", np.inf),
        ("deterministic_seed", -4),
    ],
)
def test_unusable_arguments_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        _build(**{name: value})


def test_one_way_to_say_how_updates_are_clipped():
    per_layer = clipping.PerLayerClipping.from_layer_norms((1.0, 1.0))
    for arguments in ({"clipping": per_layer}, {"clip_norm": None}):
        with pytest.raises(ValueError, match="either clip_norm or clipping"):
            _build(**arguments)
    with pytest.raises(ValueError, match="2 entries, but an update has 3 tensors"):
        _build(clip_norm=None, clipping=per_layer).create(_NESTED)
    with pytest.raises(ValueError, match="noise of different rounds is correlated"):
        _build(clip_norm=None, clipping=clipping.FlatClipping([1.0, 0.5]))


@pytest.mark.parametrize("strategy", ["blt", None, blt.Blt])
def test_what_is_no_strategy_is_refused(strategy):
    with pytest.raises(ValueError, match="strategy must be a strategy of tff_dpftrl.mechanisms"):
        aggregators.build_dp_ftrl_aggregator(
            strategy, noise_multiplier=1.0, clip_norm=1.0, clients_per_round=4
        )


def test_noise_covariance_over_rounds_and_independence_of_tensors():
    # Coordinates are independent samples of the noise over rounds.
    num_rounds, size, stddev = 6, 40_000, 0.75 * 2.0
    value_type = tff.to_type([(np.float32, [size]), (np.float32, [size // 4, 4])])
    process = _build(
        _BLT, noise_multiplier=0.75, clip_norm=2.0, clients_per_round=1, deterministic_seed=17
    ).create(value_type)
    outputs = _run(process, [[]] * num_rounds)
    noise = np.stack(
        [np.stack([np.ravel(x) for x in output.result]) for output in outputs], axis=1
    ).astype(np.float64)
    rows = noise.reshape(2 * num_rounds, size)
    covariance = rows @ rows.T / size

    inverse = np.linalg.inv(_BLT.strategy_matrix(num_rounds))
    block = stddev**2 * inverse @ inverse.T
    expected = np.kron(np.eye(2), block)
    variance = np.diag(expected)
    margin = 6 * np.sqrt((np.outer(variance, variance) + expected**2) / size)
    assert np.all(np.abs(covariance - expected) < margin)
    # Power: independent rounds, or a stddev off by 5 %, would be noticed.
    independent = stddev**2 * np.eye(num_rounds)
    assert np.any(np.abs(block - independent) > margin[:num_rounds, :num_rounds])
    assert np.all(0.1 * variance > np.diag(margin))
