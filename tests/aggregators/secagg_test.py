"""DP-FTRL over secure sums: its noise, its sums, its fit into learning processes."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tests.aggregators import nested_update
from tff_dpftrl import execution, validation
from tff_dpftrl.aggregators import adaptive_clipping, dp_ftrl, secagg
from tff_dpftrl.discretization import grid
from tff_dpftrl.execution import tff_names
from tff_dpftrl.mechanisms import blt, identity, restarts
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.private_round import adaptive_clipping as adaptive_clipping_lib

_CLIP_NORM = 2.0
_ENCODING = grid.for_bits(nested_update.DIM, 5, 16)
_BLT = blt.Blt((0.99, 0.8), (0.05, 0.2))


@pytest.fixture(scope="module", autouse=True)
def _secure_sums_in_the_clear():
    with execution.secure_sum_simulation():
        yield


def _flat(value):
    return np.concatenate([np.ravel(x).astype(np.float64) for x in tf.nest.flatten(value)])


def _margin(num_clients):
    # Six standard errors of the rounding, and float32's.
    stddev = _ENCODING.rounding_stddev_bound(_CLIP_NORM, num_clients)
    return 6 * stddev + 2e-5 * _CLIP_NORM * num_clients


def test_rotation_and_noise_have_seeds_of_their_own():
    factory = secagg.build_secagg_dp_ftrl_aggregator(
        identity.Identity(),
        noise_multiplier=1.0,
        clip_norm=_CLIP_NORM,
        clients_per_round=3,
        encoding=_ENCODING,
    )
    process = factory.create(nested_update.TYPE)
    first, second = process.initialize(), process.initialize()
    assert np.all(first.seed != first.sum_state.rotation_seed)
    assert np.all(first.seed != second.seed)
    assert np.all(first.sum_state.rotation_seed != second.sum_state.rotation_seed)


def test_noise_is_that_of_the_plain_aggregator_for_the_inflated_norm():
    # A coarse grid, where forgetting the inflation would show.
    encoding = grid.for_bits(nested_update.DIM, 3, 5)
    inflated = encoding.inflated_clip_norm(_CLIP_NORM)
    assert inflated > 1.1 * _CLIP_NORM
    arguments = {"noise_multiplier": 1.5, "clients_per_round": 3, "deterministic_seed": 11}
    factory = secagg.build_secagg_dp_ftrl_aggregator(
        _BLT, clip_norm=_CLIP_NORM, encoding=encoding, **arguments
    )
    assert factory.private_round.encoded_norm == inflated
    process = factory.create(nested_update.TYPE)
    plain = dp_ftrl.build_dp_ftrl_aggregator(_BLT, clip_norm=inflated, **arguments).create(
        nested_update.TYPE
    )
    state, plain_state = process.initialize(), plain.initialize()
    for _ in range(3):
        output = process.next(state, [])
        plain_output = plain.next(plain_state, [])
        np.testing.assert_allclose(
            _flat(output.result), _flat(plain_output.result), rtol=1e-5, atol=1e-6
        )
        assert output.measurements["noise_stddev"] == pytest.approx(1.5 * inflated)
        state, plain_state = output.state, plain_output.state


def test_without_noise_it_is_the_plain_aggregator_up_to_rounding():
    arguments = {"noise_multiplier": 0.0, "clip_norm": _CLIP_NORM, "clients_per_round": 4}
    process = secagg.build_secagg_dp_ftrl_aggregator(_BLT, encoding=_ENCODING, **arguments).create(
        nested_update.TYPE
    )
    plain = dp_ftrl.build_dp_ftrl_aggregator(_BLT, **arguments).create(nested_update.TYPE)
    state = process.initialize()
    for t in range(3):
        updates = [nested_update.update(10 * t + i) for i in range(3)]
        output = process.next(state, updates)
        expected = _flat(plain.next(plain.initialize(), updates).result)
        assert np.max(np.abs(_flat(output.result) - expected)) <= _margin(3) / 4
        assert output.measurements["summed_clients"] == 3
        state = output.state


def _adaptive(encoding, strategy, count_stddev=None, **kwargs):
    arguments = {
        "noise_multiplier": 0.0,
        "clients_per_round": 4,
        "clipping": adaptive_clipping_lib.AdaptiveClipping(
            _CLIP_NORM,
            clip_learning_rate=1.0,
            clipped_count_stddev=count_stddev,
            only_estimates=not isinstance(strategy, restarts.Restarted),
        ),
        "deterministic_seed": 11,
    } | kwargs
    plain = adaptive_clipping.build_adaptive_dp_ftrl_aggregator(strategy, **arguments)
    clipping = arguments.pop("clipping")
    secure = secagg.build_secagg_dp_ftrl_aggregator(
        strategy, clip_norm=clipping, encoding=encoding, **arguments
    )
    return secure, plain


@pytest.mark.slow
def test_adaptive_clipping_is_the_plain_one_up_to_rounding():
    # A new block every second round: the active norm, and the grid with it, shrinks twofold.
    strategy = restarts.Restarted(identity.Identity(), (0, 2, 4))
    secure, plain = _adaptive(_ENCODING, strategy)
    process, plain_process = secure.create(nested_update.TYPE), plain.create(nested_update.TYPE)
    state, plain_state = process.initialize(), plain_process.initialize()
    active = []
    for t in range(5):
        updates = [
            tf.nest.map_structure(lambda x: np.float32(0.1) * x, nested_update.update(t + 5 * i))
            for i in range(3)
        ]
        output = process.next(state, updates)
        plain_output = plain_process.next(plain_state, updates)
        state, plain_state = output.state, plain_output.state
        active.append(float(output.measurements["clip_norm"]))
        assert active[-1] == plain_output.measurements["clip_norm"]
        assert (
            output.measurements["unclipped_fraction"]
            == plain_output.measurements["unclipped_fraction"]
        )
        error = _flat(output.result) - _flat(plain_output.result)
        assert np.max(np.abs(error)) <= _margin(3) / 4 * active[-1] / _CLIP_NORM
    assert active[4] < 0.5 * active[0]


def test_noise_of_adaptive_clipping_covers_the_inflated_norm():
    encoding = grid.for_bits(nested_update.DIM, 4, 6)
    secure, plain = _adaptive(encoding, identity.Identity(), noise_multiplier=1.0, count_stddev=3.0)
    process, plain_process = secure.create(nested_update.TYPE), plain.create(nested_update.TYPE)
    output = process.next(process.initialize(), [])
    plain_output = plain_process.next(plain_process.initialize(), [])
    np.testing.assert_allclose(
        _flat(output.result), encoding.inflation * _flat(plain_output.result), rtol=1e-5
    )
    assert encoding.inflation > 1.1
    assert output.measurements["noise_stddev"] == pytest.approx(
        encoding.inflation * plain_output.measurements["noise_stddev"]
    )
    tff.test.assert_not_contains_unsecure_aggregation(process.next)


def test_nothing_of_a_client_is_summed_in_the_clear():
    process = secagg.build_secagg_dp_ftrl_aggregator(
        _BLT, noise_multiplier=1.0, clip_norm=1.0, clients_per_round=4, encoding=_ENCODING
    ).create(nested_update.TYPE)
    tff.test.assert_contains_secure_aggregation(process.next)
    tff.test.assert_not_contains_unsecure_aggregation(process.next)


def test_message_of_one_line_where_there_are_no_secure_sums():
    process = secagg.build_secagg_dp_ftrl_aggregator(
        _BLT, noise_multiplier=1.0, clip_norm=1.0, clients_per_round=4
    ).create(nested_update.TYPE)
    with execution.local():
        state = process.initialize()
        with pytest.raises(validation.UsageError, match="secure_sum_simulation") as caught:
            process.next(state, [nested_update.update(0)])
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is caught.value.__context__ is None  # No traceback of gRPC.
    assert process.next(state, [nested_update.update(0)]).measurements["summed_clients"] == 1
    with pytest.raises(Exception, match="max_clients") as caught:  # Other errors stay.
        process.next(state, [nested_update.update(client) for client in range(5)])
    assert not isinstance(caught.value, validation.UsageError)


@pytest.mark.slow
def test_nothing_runs_while_it_is_built_and_compiled_processes_need_no_context():
    def make_model():
        return tf.keras.Sequential([tf.keras.layers.InputLayer([4]), tf.keras.layers.Dense(3)])

    spec = (tf.TensorSpec([None, 4]), tf.TensorSpec([None], tf.int64))
    with execution.compiled_only():
        process = execution.compile_process(_learning_process(make_model, spec, None))
        client = (np.ones((8, 4), np.float32), np.zeros(8, np.int64))
        output = process.next(process.initialize(), [tf.data.Dataset.from_tensors(client)])
    assert output.metrics["aggregator"]["summed_clients"] == 1


_ARGUMENTS = {"noise_multiplier": 1.0, "clients_per_round": 3.5, "deterministic_seed": 11}
_BUILDERS = {
    "fixed": lambda **more: secagg.build_secagg_dp_ftrl_aggregator(
        _BLT, clip_norm=_CLIP_NORM, **_ARGUMENTS | more
    ),
    "adaptive": lambda **more: secagg.build_secagg_dp_ftrl_aggregator(
        restarts.Restarted(_BLT, (0, 2)),
        clip_norm=adaptive_clipping_lib.AdaptiveClipping(_CLIP_NORM, clipped_count_stddev=9.0),
        **_ARGUMENTS | more,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", _BUILDERS)
def test_the_grid_follows_from_the_updates(name):
    build = _BUILDERS[name]

    def encoding(factory):
        return factory.for_updates(nested_update.TYPE).inner_sum.factory.encoding

    assert encoding(build()) == grid.for_bits(nested_update.DIM, 4, 24)
    # Few bits, where a grid for another dimension has another inflation.
    factory = build(bits=5, max_clients=5)
    expected = grid.for_bits(nested_update.DIM, 5, 5)
    assert encoding(factory) == expected != grid.for_bits(1, 5, 5)
    assert encoding(build(encoding=_ENCODING)) == _ENCODING
    given = build(encoding=expected)
    schema = schema_lib.MinSep(4, 2, 2)
    assert factory.guarantee(schema, 1e-6) == given.guarantee(schema, 1e-6)
    results = []
    for made in (factory, given):
        process = made.create(nested_update.TYPE)
        output = process.next(process.initialize(), [])
        results.append((*_flat(output.result), output.measurements["noise_stddev"]))
    np.testing.assert_array_equal(*results)
    with pytest.raises(ValueError, match="for_updates"):
        _ = factory.private_round
    assert given.private_round.noise_multiplier == 1.0


@pytest.mark.parametrize("build", _BUILDERS.values(), ids=_BUILDERS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_clients": 3}, "max_clients 3 is below clients_per_round 3.5"),
        ({"max_clients": 5, "encoding": _ENCODING}, "exclude each other"),
        ({"bits": 3, "max_clients": 100}, "use at least 8 bits"),
        ({"clients_per_round": 0}, "clients_per_round"),
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
    ],
)
def test_bad_arguments_are_refused_by_the_builder(build, arguments, message):
    with pytest.raises(ValueError, match=message):
        build(**arguments)


def test_it_warns_once_of_expensive_clipping():
    with pytest.warns(adaptive_clipping.ExpensiveClippingWarning) as caught:
        factory = secagg.build_secagg_dp_ftrl_aggregator(
            restarts.Restarted(_BLT, (0, 2)),
            clip_norm=adaptive_clipping_lib.AdaptiveClipping(1.0, clipped_count_stddev=0.6),
            **_ARGUMENTS,
        )
        factory.create(nested_update.TYPE)
    warned = [one for one in caught if one.category is adaptive_clipping.ExpensiveClippingWarning]
    assert len(warned) == 1


def test_asynchronous_contexts_are_let_through():
    context = tff.backends.test.create_async_test_cpp_execution_context()
    with tff_names.get_context_stack().install(context):
        execution.check_secure_sums()


def test_bad_arguments():
    with pytest.raises(ValueError, match="max_clients"):
        secagg.build_secagg_dp_ftrl_aggregator(
            _BLT, noise_multiplier=1.0, clip_norm=1.0, clients_per_round=6, encoding=_ENCODING
        )


def _learning_process(make_model, batch_type, encoding):
    def model_fn():
        return tff.learning.models.from_keras_model(
            make_model(),
            loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            input_spec=batch_type,
        )

    aggregator = secagg.build_secagg_dp_ftrl_aggregator(
        _BLT, noise_multiplier=0.1, clip_norm=0.5, clients_per_round=2, encoding=encoding
    )
    return tff.learning.algorithms.build_unweighted_fed_avg(
        model_fn,
        client_optimizer_fn=tff.learning.optimizers.build_sgdm(0.1),
        server_optimizer_fn=tff.learning.optimizers.build_sgdm(1.0, 0.9),
        model_aggregator=aggregator,
    )


@pytest.mark.slow
def test_in_a_learning_process():
    def make_model():
        return tf.keras.Sequential([tf.keras.layers.InputLayer([4]), tf.keras.layers.Dense(3)])

    spec = (tf.TensorSpec([None, 4]), tf.TensorSpec([None], tf.int64))
    process = _learning_process(make_model, spec, grid.for_bits(15, 2, 20))
    rng = np.random.default_rng(0)
    data = [
        tf.data.Dataset.from_tensors(
            (rng.normal(size=(8, 4)).astype(np.float32), rng.integers(3, size=8))
        )
        for _ in range(2)
    ]
    output = process.next(process.initialize(), data)
    assert np.all(np.isfinite(_flat(process.get_model_weights(output.state).trainable)))


@pytest.mark.slow
def test_four_million_parameter_lstm_builds_and_runs():
    vocabulary, units = 10_000, 670

    def make_model():
        tokens = tf.keras.Input([None], dtype=tf.int64)
        hidden = tf.keras.layers.Embedding(vocabulary, 96)(tokens)
        hidden = tf.keras.layers.LSTM(units, return_sequences=True)(hidden)
        hidden = tf.keras.layers.Dense(96)(hidden)
        return tf.keras.Model(tokens, tf.keras.layers.Dense(vocabulary)(hidden))

    dim = sum(int(np.prod(weight.shape)) for weight in make_model().trainable_weights)
    assert dim > 4_000_000
    spec = (tf.TensorSpec([None, None], tf.int64), tf.TensorSpec([None, None], tf.int64))
    process = _learning_process(make_model, spec, grid.for_bits(dim, 2, 20))
    rng = np.random.default_rng(0)
    tokens = rng.integers(vocabulary, size=(2, 4, 10))
    data = [tf.data.Dataset.from_tensors((t, np.roll(t, -1))) for t in tokens]
    output = process.next(process.initialize(), data)
    weights = _flat(process.get_model_weights(output.state).trainable)
    assert weights.size == dim and np.all(np.isfinite(weights))
