"""A process of every public learning algorithm and aggregator factory of TFF, to be compiled."""

import collections
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
import tensorflow_privacy as tfp
from tensorflow_model_optimization.python.core.internal import tensor_encoding as te

_algorithms, _aggregators = tff.learning.algorithms, tff.aggregators
SGD = tff.learning.optimizers.build_sgdm(0.1)
"""Optimizer of clients."""
_SPEC = collections.OrderedDict(
    x=tf.TensorSpec([None, 3], tf.float32), y=tf.TensorSpec([None, 1], tf.float32)
)
_VECTOR = tff.TensorType(np.float32, (3,))
_PAIR = tff.StructWithPythonType([("a", _VECTOR), ("b", _VECTOR)], collections.OrderedDict)
_WHOLE = tff.TensorType(np.int32, (3,))
_ROUNDINGS = 2e-6  # Of float32, over two rounds of a small model.
_LOSS = tf.keras.losses.MeanSquaredError


class Case(NamedTuple):
    """A process and the data of its rounds.

    Attributes:
      build: Builds the process.
      cohort: Function from the index of a round to the clients' values.
      atol: Largest difference from TFF's results: roundings, or what randomness explains.
      has_random_state: Whether the state holds random numbers, so that only outputs are compared.
    """

    build: Callable[[], tff.templates.IterativeProcess]
    cohort: Callable[[int], list[Any]]
    atol: float = _ROUNDINGS
    has_random_state: bool = False


def model_fn():
    """Makes a linear model."""
    layers = [tf.keras.layers.Dense(1, input_shape=(3,), kernel_initializer="ones")]
    return tff.learning.models.from_keras_model(
        tf.keras.Sequential(layers), loss=_LOSS(), input_spec=_SPEC
    )


def _reconstruction_model():
    inputs = tf.keras.Input((3,))
    shared = tf.keras.layers.Dense(2, use_bias=False, kernel_initializer="ones")
    own = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    model = tf.keras.Model(inputs, own(shared(inputs)))
    return tff.learning.models.ReconstructionModel.from_keras_model_and_layers(
        model, global_layers=[shared], local_layers=[own], input_spec=_SPEC
    )


def _examples(round_index: int, num_examples: int) -> collections.OrderedDict:
    rng = np.random.default_rng(10 * round_index + num_examples)
    return collections.OrderedDict(
        x=rng.normal(size=(num_examples, 3)).astype(np.float32),
        y=rng.normal(size=(num_examples, 1)).astype(np.float32),
    )


def _batches(round_index: int) -> list[tf.data.Dataset]:
    return [
        tf.data.Dataset.from_tensor_slices(_examples(round_index, size)).batch(2)
        for size in (2, 1, 5)
    ]


def _points(round_index: int) -> list[tf.data.Dataset]:
    return [
        tf.data.Dataset.from_tensor_slices(_examples(round_index, size)["x"]) for size in (4, 3)
    ]


def _vectors(round_index: int) -> list[np.ndarray]:
    rng = np.random.default_rng(round_index)
    return list(rng.uniform(-1, 1, (4, 3)).astype(np.float32))


def _pairs(round_index: int) -> list[collections.OrderedDict]:
    return [collections.OrderedDict(a=value, b=2 * value + 1) for value in _vectors(round_index)]


def _whole(round_index: int) -> list[np.ndarray]:
    return [np.arange(3, dtype=np.int32) + client + round_index for client in range(4)]


def _weighted(values: Callable[[int], list]) -> Callable[[int], list]:
    return lambda index: [
        (value, np.float32(1 + client)) for client, value in enumerate(values(index))
    ]


def _learning(build: Callable[..., Any], cohort=_batches, **arguments: Any) -> Case:
    return Case(functools.partial(build, **arguments), cohort)


def _process_of(process: tff.templates.MeasuredProcess) -> tff.templates.IterativeProcess:
    """Makes an iterative process of an aggregation; a weight comes with each client's value."""
    state_type, *value_types = process.next.type_signature.parameter
    members = [value_type.member for value_type in value_types]
    is_weighted = len(members) == 2
    data_type = tff.StructWithPythonType([(None, m) for m in members], tuple)

    @tff.federated_computation(
        state_type, tff.FederatedType(data_type if is_weighted else members[0], tff.CLIENTS)
    )
    def next_fn(state, data):
        output = process.next(state, data[0], data[1]) if is_weighted else process.next(state, data)
        return output.state, tff.federated_zip((output.result, output.measurements))

    return tff.templates.IterativeProcess(process.initialize, next_fn)


def _sum(
    factory: Callable[[], Any], value_type: tff.Type = _PAIR, cohort=_pairs, atol=_ROUNDINGS
) -> Case:
    """Makes a case of a factory; weighted ones get 1, 2 and so on as weights."""

    def build():
        made = factory()
        if isinstance(made, tff.aggregators.WeightedAggregationFactory):
            return _process_of(made.create(value_type, tff.TensorType(np.float32)))
        return _process_of(made.create(value_type))

    return Case(build, cohort, atol)


def _mean(factory: Callable[[], Any], **changes: Any) -> Case:
    case = _sum(factory, **changes)
    return case._replace(cohort=_weighted(case.cohort))


def _gatherer(spec: tf.TensorSpec) -> Any:
    # Without random rounding both sum the same.
    return te.encoders.as_gather_encoder(
        te.encoders.uniform_quantization(8, stochastic=False), spec
    )


_DP = _aggregators.DifferentiallyPrivateFactory
_SPECS = collections.OrderedDict(a=tf.TensorSpec([3]), b=tf.TensorSpec([3]))


def _quantile_process() -> tff.templates.IterativeProcess:
    query = tfp.NoPrivacyQuantileEstimatorQuery(
        initial_estimate=1.0, target_quantile=0.5, learning_rate=0.2
    )
    process = _aggregators.PrivateQuantileEstimationProcess(query)
    state_type, value_type = process.next.type_signature.parameter

    @tff.federated_computation(state_type, value_type)
    def next_fn(state, value):
        state = process.next(state, value)
        return state, process.report(state)

    return tff.templates.IterativeProcess(process.initialize, next_fn)


def _metrics(create: Callable[[Any, tff.Type], Any], *, has_random_state: bool = False) -> Case:
    finalizers = collections.OrderedDict(loss=tf.function(lambda x: x[0] / x[1]))
    pair = tff.StructWithPythonType([(None, np.float32), (None, np.float32)], list)
    value_type = tff.StructWithPythonType([("loss", pair)], collections.OrderedDict)

    def cohort(round_index):
        return [
            collections.OrderedDict(loss=[np.float32(value[0] + 2), np.float32(3)])
            for value in _vectors(round_index)
        ]

    def build():
        return _process_of(create(finalizers, value_type))

    return Case(build, cohort, has_random_state=has_random_state)


ALGORITHMS = {
    "build_fed_eval": _learning(_algorithms.build_fed_eval, model_fn=model_fn),
    "build_fed_kmeans": _learning(
        _algorithms.build_fed_kmeans, _points, num_clusters=2, data_shape=(3,), random_seed=(1, 2)
    ),
    "build_fed_recon": _learning(
        _algorithms.build_fed_recon, model_fn=_reconstruction_model, loss_fn=_LOSS
    ),
    "build_fed_recon_eval": _learning(
        _algorithms.build_fed_recon_eval, model_fn=_reconstruction_model, loss_fn=_LOSS
    ),
    "build_fed_sgd": _learning(_algorithms.build_fed_sgd, model_fn=model_fn),
    "build_mime_lite_with_optimizer_schedule": _learning(
        _algorithms.build_mime_lite_with_optimizer_schedule,
        model_fn=model_fn,
        learning_rate_fn=lambda index: 0.1 / (1.0 + tf.cast(index, tf.float32)),
        base_optimizer=SGD,
    ),
    "build_weighted_fed_avg_with_optimizer_schedule": _learning(
        _algorithms.build_weighted_fed_avg_with_optimizer_schedule,
        model_fn=model_fn,
        client_learning_rate_fn=lambda index: 0.1 / (1.0 + tf.cast(index, tf.float32)),
        client_optimizer_fn=tff.learning.optimizers.build_sgdm,
    ),
    **{
        f"build_{kind}_fed_avg": _learning(
            getattr(_algorithms, f"build_{kind}_fed_avg"),
            model_fn=model_fn,
            client_optimizer_fn=SGD,
        )
        for kind in ("unweighted", "weighted")
    },
    **{
        f"build_{kind}_fed_prox": _learning(
            getattr(_algorithms, f"build_{kind}_fed_prox"),
            model_fn=model_fn,
            proximal_strength=0.3,
            client_optimizer_fn=SGD,
        )
        for kind in ("unweighted", "weighted")
    },
    **{
        f"build_{kind}_mime_lite": _learning(
            getattr(_algorithms, f"build_{kind}_mime_lite"), model_fn=model_fn, base_optimizer=SGD
        )
        for kind in ("unweighted", "weighted")
    },
}
"""Cases of `tff.learning.algorithms`, by the names of their builders."""

DISTRIBUTED_NOISE = _sum(
    lambda: tff.learning.ddp_secure_aggregator(1e-4, 4, zeroing=False), atol=1e-4
)
"""Case that TFF can build, but not run."""

_MEANS = {
    "compression_aggregator": tff.learning.compression_aggregator,
    "robust_aggregator": tff.learning.robust_aggregator,
    "secure_aggregator": tff.learning.secure_aggregator,
}
AGGREGATORS = {
    **{f"tff.learning.{name}": _mean(factory) for name, factory in _MEANS.items()},
    "tff.learning.add_debug_measurements": _mean(
        lambda: tff.learning.add_debug_measurements(_aggregators.MeanFactory())
    ),
    "tff.learning.add_debug_measurements_with_mixed_dtype": _mean(
        lambda: tff.learning.add_debug_measurements_with_mixed_dtype(_aggregators.MeanFactory())
    ),
    "tff.learning.dp_aggregator": _sum(lambda: tff.learning.dp_aggregator(0.0, 4)),
    "DifferentiallyPrivateFactory": _sum(lambda: _DP(tfp.GaussianSumQuery(1.0, 0.0))),
    "DifferentiallyPrivateFactory.gaussian_fixed": _sum(lambda: _DP.gaussian_fixed(0.0, 4, 1.0)),
    "DifferentiallyPrivateFactory.gaussian_adaptive": _sum(lambda: _DP.gaussian_adaptive(0.0, 4)),
    "DifferentiallyPrivateFactory.tree_aggregation": _sum(
        lambda: _DP.tree_aggregation(0.0, 4, 1.0, _SPECS)
    ),
    "DifferentiallyPrivateFactory.tree_adaptive": _sum(
        lambda: _DP.tree_adaptive(0.0, 4, _SPECS, clipped_count_stddev=0.0)
    ),
    "DiscreteFourierTransformFactory": _sum(
        lambda: _aggregators.DiscreteFourierTransformFactory(_aggregators.SumFactory())
    ),
    "EncodedSumFactory": _sum(lambda: _aggregators.EncodedSumFactory(_gatherer)),
    "EncodedSumFactory.quantize_above_threshold": _sum(
        lambda: _aggregators.EncodedSumFactory.quantize_above_threshold(threshold=2),
        atol=4 * 4 / 255,  # Four clients, one step each, of a range of at most 4.
    ),
    "HadamardTransformFactory": _sum(
        lambda: _aggregators.HadamardTransformFactory(_aggregators.SumFactory())
    ),
    "MeanFactory": _mean(_aggregators.MeanFactory),
    "PrivateQuantileEstimationProcess": Case(
        _quantile_process, lambda index: [np.float32(value[0] + 1) for value in _vectors(index)]
    ),
    "SecureModularSumFactory": _sum(
        lambda: _aggregators.SecureModularSumFactory(17), _WHOLE, _whole
    ),
    "SecureSumFactory": _sum(lambda: _aggregators.SecureSumFactory(8.0)),
    "SumFactory": _sum(_aggregators.SumFactory),
    "UnweightedMeanFactory": _sum(_aggregators.UnweightedMeanFactory),
    # All clients are in the sample; their order is that of the sums.
    "UnweightedReservoirSamplingFactory": _sum(
        lambda: _aggregators.UnweightedReservoirSamplingFactory(8)
    ),
    "add_measurements": _sum(
        lambda: _aggregators.add_measurements(
            _aggregators.SumFactory(), client_measurement_fn=lambda value: collections.OrderedDict()
        )
    ),
    "as_weighted_aggregator": _mean(
        lambda: _aggregators.as_weighted_aggregator(_aggregators.UnweightedMeanFactory())
    ),
    "clipping_factory": _sum(lambda: _aggregators.clipping_factory(1.0, _aggregators.SumFactory())),
    "concat_factory": _sum(lambda: _aggregators.concat_factory(_aggregators.SumFactory())),
    "zeroing_factory": _sum(lambda: _aggregators.zeroing_factory(2.0, _aggregators.SumFactory())),
    "tff.learning.metrics.SumThenFinalizeFactory": _metrics(
        lambda finalizers, value_type: tff.learning.metrics.SumThenFinalizeFactory(
            finalizers
        ).create(value_type)
    ),
    "tff.learning.metrics.FinalizeThenSampleFactory": _metrics(
        tff.learning.metrics.FinalizeThenSampleFactory(8).create, has_random_state=True
    ),
    "tff.learning.metrics.SecureSumFactory": _sum(tff.learning.metrics.SecureSumFactory),
}
"""Cases of aggregator factories, by names, those of `tff.aggregators` without the module."""
