"""Tests of the queries: the aggregators' bits, TFP's contract, and events that compose to our ε."""

from __future__ import annotations

import collections
import math

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
import tensorflow_privacy as tfp

import tff_dpftrl
from tff_dpftrl import aggregators, execution
from tff_dpftrl.aggregators import dp_query
from tff_dpftrl.mechanisms import banded, dense, identity, restarts, tree
from tff_dpftrl.private_round import estimators, sampled_gaussian

_SPECS = collections.OrderedDict(b=tf.TensorSpec([2]), a=tf.TensorSpec([]))
_TYPE = tff.to_type(collections.OrderedDict(b=(np.float32, [2]), a=(np.float32, [])))
_SCHEMA = tff_dpftrl.MinSep(4, 2, 2)
_STRATEGIES = {
    "BLT": tff_dpftrl.Blt((0.99, 0.8), (0.05, 0.2)),
    "banded": banded.Banded([[1.0, 0.0], [1.0, 0.5], [1.0, 0.5], [1.0, 0.5]]),
    "tree": tree.Tree(4),
    "dense": dense.Dense(np.tril(0.5 ** np.abs(np.subtract.outer(np.arange(4), np.arange(4))))),
    "identity": identity.Identity(),
}


@pytest.fixture(scope="module", autouse=True)
def _context():
    with execution.local():
        yield


def _fixed(strategy=_STRATEGIES["BLT"], **more):
    arguments = {"noise_multiplier": 2.0, "clip_norm": 1.0, "clients_per_round": 4}
    return aggregators.build_dp_ftrl_aggregator(strategy, **arguments | more)


def _adaptive(strategy, **more):
    arguments = {
        "noise_multiplier": 2.0,
        "clients_per_round": 4,
        "clipping": aggregators.AdaptiveClipping(
            1.0, clip_learning_rate=0.5, clipped_count_stddev=3.0
        ),
    }
    return aggregators.build_adaptive_dp_ftrl_aggregator(
        restarts.Restarted(strategy, (0, 2)), **arguments | more
    )


def _records(t):
    return [
        collections.OrderedDict(
            b=np.array([x + 0.1 * t, -x], np.float32), a=np.float32(math.nan if x == 2 else 3 * x)
        )
        for x in (0.0, 0.1, 0.7, 2.0)
    ]


def _run(query, num_rounds=4, state=None, first=0, records=_records):
    """Results, events and the last state of a loop as TFP's documentation has it."""
    state = query.initial_global_state() if state is None else state
    results, events = [], []
    for t in range(first, first + num_rounds):
        params = query.derive_sample_params(state)
        halves = []
        for half in (records(t)[::2], records(t)[1::2]):
            sample = query.initial_sample_state(_SPECS)
            for record in half:
                sample = query.accumulate_record(params, sample, record)
            halves.append(sample)
        result, state, event = query.get_noised_result(query.merge_sample_states(*halves), state)
        tf.nest.assert_same_structure(result, _SPECS)
        results.append(np.append(result["b"], result["a"]))
        events.append(event)
    return np.array(results), events, state


@pytest.mark.filterwarnings("ignore::tff_dpftrl.aggregators.ExpensiveClippingWarning")
@pytest.mark.parametrize(
    ("name", "build"),
    [
        pytest.param(
            name,
            build,
            marks=[] if name == "BLT" and build is _adaptive else [pytest.mark.slow],
        )
        for name in _STRATEGIES
        for build in (_fixed, _adaptive)
    ],
)
def test_a_loop_and_tffs_factory_release_the_bits_of_the_aggregator(name, build):
    ours = build(_STRATEGIES[name], deterministic_seed=5)
    query = dp_query.DPFTRLAverageQuery(ours.private_round, _SPECS)
    theirs = tff.aggregators.DifferentiallyPrivateFactory(query).create(_TYPE)
    process = ours.create(_TYPE)
    state, their_state = process.initialize(), theirs.initialize()
    looped, _, last = _run(query, 3)
    for t in range(3):
        output, their_output = (
            process.next(state, _records(t)),
            theirs.next(their_state, _records(t)),
        )
        for key in ("a", "b"):
            np.testing.assert_array_equal(their_output.result[key], output.result[key])
        # Sums in another order may differ in their last bits.
        expected = np.append(output.result["b"], output.result["a"])
        np.testing.assert_allclose(looped[t], expected, rtol=1e-6, atol=1e-7)
        state, their_state = output.state, their_output.state
        metrics = their_output.measurements["dp_query_metrics"]
        if build is _adaptive:
            assert metrics["estimated_clip_norm"] == output.measurements["estimated_clip_norm"]
        else:
            assert metrics["clip_norm"] == 1.0
    assert int(last.round_index) == 3


def test_a_resumed_loop_goes_on_as_if_nothing_had_happened():
    query = dp_query.DPFTRLAverageQuery(_fixed(deterministic_seed=5).private_round, _SPECS)
    whole, _, _ = _run(query, 4)
    first, _, state = _run(query, 2)
    saved = tf.nest.map_structure(np.asarray, state)
    again = dp_query.DPFTRLAverageQuery(_fixed(deterministic_seed=6).private_round, _SPECS)
    rest, _, _ = _run(again, 2, state=saved, first=2)
    np.testing.assert_array_equal(np.concatenate([first, rest]), whole)


def test_branches_of_a_loop_have_other_noise():
    query = dp_query.DPFTRLAverageQuery(_fixed().private_round, _SPECS)
    _, _, state = _run(query, 2)
    one, other = (_run(query, 2, state=state, first=2)[0] for _ in range(2))
    assert not np.any(one == other)


def test_every_run_has_a_seed_of_its_own():
    query = dp_query.DPFTRLAverageQuery(_fixed().private_round, _SPECS)
    assert not np.array_equal(_run(query, 1)[0], _run(query, 1)[0])


def test_a_sum_is_the_average_of_fixed_denominator():
    private_round = _fixed(deterministic_seed=5).private_round
    sums, _, _ = _run(dp_query.DPFTRLSumQuery(private_round, _SPECS))
    means, _, _ = _run(dp_query.DPFTRLAverageQuery(private_round, _SPECS))
    np.testing.assert_allclose(sums, 4 * means, rtol=1e-6)
    normalized = tfp.NormalizedQuery(dp_query.DPFTRLSumQuery(private_round, _SPECS), 4)
    np.testing.assert_allclose(_run(normalized)[0], means, rtol=1e-6)


def _finite_records(t):
    return _records(t)[:3]


@pytest.mark.slow
def test_without_noise_the_sum_is_that_of_tfps_tree_query():
    ours = dp_query.DPFTRLSumQuery(_fixed(tree.Tree(4), noise_multiplier=0).private_round, _SPECS)
    theirs = tfp.TreeResidualSumQuery.build_l2_gaussian_query(1.0, 0.0, _SPECS)
    np.testing.assert_allclose(
        _run(ours, records=_finite_records)[0],
        _run(theirs, records=_finite_records)[0],
        rtol=2e-5,
        atol=1e-6,
    )


def test_without_noise_the_clip_norm_follows_tfps_quantile_query():
    # One that estimates anew in every round, as TFP's does.
    adaptive = aggregators.build_adaptive_dp_ftrl_aggregator(
        restarts.Restarted(identity.Identity(), (0, 1, 2, 3, 4)),
        noise_multiplier=0.0,
        clients_per_round=4,
        clipping=aggregators.AdaptiveClipping(
            1.0, target_unclipped_quantile=0.8, clip_learning_rate=0.5, clipped_count_stddev=0.0
        ),
    )
    ours = dp_query.DPFTRLSumQuery(adaptive.private_round, _SPECS)
    theirs = tfp.QuantileAdaptiveClipSumQuery(
        initial_l2_norm_clip=1.0,
        noise_multiplier=0.0,
        target_unclipped_quantile=0.8,
        learning_rate=0.5,
        clipped_count_stddev=0.0,
        expected_num_records=4,
        geometric_update=True,
    )

    def records(t):
        del t
        return [
            collections.OrderedDict(b=np.array([x, 0], np.float32), a=np.float32(0))
            for x in (0.5, 1.5, 3.0, 4.0)
        ]

    state, their_state = ours.initial_global_state(), theirs.initial_global_state()
    norms = []
    for t in range(4):
        result, _, state = _run(ours, 1, state, records=records)
        their_result, _, their_state = _run(theirs, 1, their_state, records=records)
        np.testing.assert_allclose(result, their_result, rtol=2e-5)
        norms.append(float(ours.derive_metrics(state)["clip_norm"]))
        assert norms[t] == pytest.approx(float(theirs.derive_sample_params(their_state)[0]))
    assert norms[-1] > 1.5


@pytest.mark.parametrize("query_class", [dp_query.DPFTRLAverageQuery, dp_query.DPFTRLSumQuery])
@pytest.mark.parametrize(
    "record, match",
    [
        ({"b": np.ones(1, np.float32), "a": np.float32(0)}, r"got \(1,\) in place of \(2,\)"),
        ({"b": np.float32(1), "a": np.float32(0)}, r"got \(\) in place of \(2,\)"),
        ({"b": np.ones([3, 2], np.float32), "a": np.float32(0)}, "record must have the shapes"),
        ({"b": np.ones(2, np.float32)}, "got 1 tensors"),
        ([], "got 0 tensors"),
    ],
)
def test_what_sums_would_broadcast_is_refused(query_class, record, match):
    query = query_class(_fixed().private_round, _SPECS)
    state = query.initial_global_state()
    with pytest.raises(ValueError, match=match):
        query.preprocess_record(query.derive_sample_params(state), record)
    _, *scalars = query.initial_sample_state()
    sums = type(query.initial_sample_state())(record, *scalars)
    with pytest.raises(ValueError, match=match.replace("record must", "sample_state must")):
        query.get_noised_result(sums, state)


def test_a_shape_that_is_only_known_in_the_graph_is_refused_there():
    query = dp_query.DPFTRLSumQuery(_fixed().private_round, tf.TensorSpec([2]))
    params = query.derive_sample_params(query.initial_global_state())
    run = tf.function(
        lambda record: query.preprocess_record(params, record),
        input_signature=[tf.TensorSpec(None, tf.float32)],
    )
    run(tf.ones([2]))
    with pytest.raises(tf.errors.InvalidArgumentError):
        run(tf.ones([1]))


class _Linear(tf.keras.losses.Loss):
    def call(self, y_true, y_pred):
        return -tf.reduce_sum(y_true * y_pred, axis=-1)


def _fit(run_eagerly, aggregator):
    """Weights after each step of TFP's Keras optimizer on gradients of norms 3 and 0.5."""
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, use_bias=False)])
    model.build([None, 2])
    model.set_weights([np.zeros([2, 1], np.float32)])
    query = dp_query.DPFTRLSumQuery(aggregator.private_round, model.trainable_variables)
    optimizer = tfp.make_keras_generic_optimizer_class(tf.keras.optimizers.legacy.SGD)
    model.compile(
        optimizer(query, num_microbatches=4, learning_rate=1.0),
        loss=_Linear(reduction="none"),
        run_eagerly=run_eagerly,
    )
    features = np.array([[3.0, 0.0], [0.0, 0.5], [0.0, 0.0], [0.0, 0.0]], np.float32)
    steps = []
    for _ in range(3):
        model.train_on_batch(features, np.ones([4, 1], np.float32))
        steps.append(model.get_weights()[0][:, 0])
    return np.array(steps)


@pytest.mark.slow
def test_an_optimizer_of_tfp_trains_with_it():
    without = _fit(True, _fixed(noise_multiplier=0.0))
    np.testing.assert_allclose(without[2], [3.0 / 4, 1.5 / 4], rtol=2e-5)
    with_noise = _fit(True, _fixed(deterministic_seed=1))
    noise = np.diff(with_noise - without, axis=0)
    assert np.min(np.abs(noise[1] - noise[0])) > 0.01


def test_a_function_that_would_repeat_its_round_is_refused():
    with pytest.raises(ValueError, match="run_eagerly=True"):
        _fit(False, _fixed())
    query = dp_query.DPFTRLSumQuery(_fixed(deterministic_seed=1).private_round, _SPECS)
    traced = tf.function(query.get_noised_result)
    sample, state = query.initial_sample_state(), query.initial_global_state()
    _, state, _ = traced(sample, state)
    result, state, _ = traced(sample, state)
    looped, _, _ = _run(query, 2, records=lambda t: [])
    np.testing.assert_array_equal(np.append(result["b"], result["a"]), looped[1])
    variable = tf.Variable(0, dtype=tf.int64)
    tf.function(lambda: query.get_noised_result(sample, state._replace(round_index=variable))[0])()


_ACCOUNTANTS = (dp_accounting.rdp.RdpAccountant, dp_accounting.pld.PLDAccountant)


def _epsilon(accountant, events):
    accountant = accountant()
    for event in events:
        accountant.compose(event)
    return accountant.get_epsilon(1e-6)


@pytest.mark.parametrize(
    ("name", "accountant"),
    [
        pytest.param(
            name,
            accountant,
            marks=[] if accountant is _ACCOUNTANTS[0] else [pytest.mark.slow],
        )
        for name in _STRATEGIES
        for accountant in _ACCOUNTANTS
    ],
)
def test_the_events_of_a_run_compose_to_its_guarantee(name, accountant):
    ours = _fixed(_STRATEGIES[name])
    query = dp_query.DPFTRLAverageQuery(ours.private_round, _SPECS, schema=_SCHEMA)
    ends = _STRATEGIES[name].max_rounds == 4
    _, events, _ = _run(query, 4 if ends else 5)
    claim = ours.guarantee(_SCHEMA, 1e-6)
    stated = _epsilon(accountant, [claim.to_dp_event()])
    composed = _epsilon(accountant, events[:4])
    # Accountants of privacy loss distributions are exact to 1e-9 or so.
    assert stated * (1 - 1e-8) <= composed <= stated * (1 + 1e-6)
    for t in (1, 2, 3):  # A run that stops early is overstated.
        part = ours.guarantee(tff_dpftrl.MinSep(t, 2, 2), 1e-6)
        of_part = _epsilon(accountant, [part.to_dp_event()])
        assert _epsilon(accountant, events[:t]) >= of_part * (1 - 1e-8)
    assert ends or _epsilon(accountant, events) == math.inf


@pytest.mark.parametrize(
    "aggregator, schema",
    [
        (_fixed(), None),
        (_fixed(deterministic_seed=1), _SCHEMA),
        (_fixed(noise_multiplier=0), _SCHEMA),
    ],
)
def test_where_nothing_is_promised_no_event_is_private(aggregator, schema):
    query = dp_query.DPFTRLAverageQuery(aggregator.private_round, _SPECS, schema=schema)
    assert _run(query, 1)[1] == [dp_accounting.NonPrivateDpEvent()]


def test_tff_extracts_the_events_from_its_states():
    ours = _fixed()
    query = dp_query.DPFTRLAverageQuery(ours.private_round, _SPECS, schema=_SCHEMA)
    process = tff.aggregators.DifferentiallyPrivateFactory(query).create(_TYPE)
    state, events = process.initialize(), []
    for t in range(5):
        state = process.next(state, _records(t)).state
        events.append(dp_accounting.DpEvent.from_named_tuple(state.dp_event))
    claim = ours.guarantee(_SCHEMA, 1e-6)
    assert float(events[0].noise_multiplier) == 1 / claim.mu
    stated = _epsilon(_ACCOUNTANTS[0], [claim.to_dp_event()])
    assert _epsilon(_ACCOUNTANTS[0], events[:4]) == pytest.approx(stated, rel=1e-6)
    assert _epsilon(_ACCOUNTANTS[0], events) == math.inf


@pytest.mark.parametrize(
    "arguments, match",
    [
        (
            (
                sampled_gaussian.SampledGaussianRound(
                    clipping=aggregators.FlatClipping(1.0),
                    noise_multiplier=1.0,
                    estimator=estimators.FixedDenominator(0.1, total_weight=100),
                ),
                _SPECS,
            ),
            "private_round must be",
        ),
        ((_fixed(), _SPECS), "attribute private_round"),
        ((_fixed().private_round, ()), "record_specs must have"),
        ((_fixed().private_round, tf.TensorSpec([2], tf.int32)), "record_specs must have"),
        ((_fixed().private_round, tf.TensorSpec([None])), "record_specs must have"),
    ],
)
def test_what_makes_no_query_is_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        dp_query.DPFTRLAverageQuery(*arguments)
