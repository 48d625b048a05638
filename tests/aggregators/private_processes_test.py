"""The tables of docs/explanation/private_processes.md; how bad an unsafe wrapping is."""

from __future__ import annotations

import collections
import pathlib
import re

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import tff_dpftrl
from tff_dpftrl import aggregators
from tff_dpftrl.aggregators import sampled_gaussian
from tff_dpftrl.mechanisms import blt, identity
from tff_dpftrl.private_round import clipping, estimators

_DOCUMENT = (
    pathlib.Path(__file__).resolve().parents[2] / "docs" / "explanation" / "private_processes.md"
)
_OURS = aggregators.build_dp_ftrl_aggregator(
    blt.Blt((0.99, 0.8), (0.05, 0.2)), noise_multiplier=1e4, clip_norm=1.0, clients_per_round=4
)
_AS_WEIGHTED = aggregators.WeightedFactory(_OURS, weight_cap=3.0)
_SGD = tff.learning.optimizers.build_sgdm(0.1)
_MOMENTUM = tff.learning.optimizers.build_sgdm(0.1, momentum=0.9)
_TFF = tff.learning.algorithms


_SPEC = collections.OrderedDict(x=tf.TensorSpec([None, 2]), y=tf.TensorSpec([None, 1]))


def _linear_model():
    return tff.learning.models.from_keras_model(
        tf.keras.Sequential([tf.keras.layers.InputLayer([2]), tf.keras.layers.Dense(1)]),
        loss=tf.keras.losses.MeanSquaredError(),
        input_spec=_SPEC,
    )


def _reconstruction_model():
    """Two layers; the second never leaves the client."""
    model = tf.keras.Sequential(
        [tf.keras.layers.InputLayer([2]), tf.keras.layers.Dense(2), tf.keras.layers.Dense(1)]
    )
    return tff.learning.models.ReconstructionModel.from_keras_model_and_layers(
        keras_model=model,
        global_layers=[model.layers[0]],
        local_layers=[model.layers[1]],
        input_spec=_SPEC,
    )


def _table(title: str) -> dict[str, list[str]]:
    """Cells of the rows of the table under a title, by the first cell without its quotes."""
    section = _DOCUMENT.read_text(encoding="utf-8").split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0].replace("`", ""): row[1:] for row in rows}


def _code(cell: str) -> set[str]:
    """What a cell has in quotes, which is nothing if it says so."""
    paths = set(re.findall(r"`([^`]*)`", cell))
    assert bool(paths) != cell.startswith("nothing"), cell
    return paths


def _evaluate():
    @tf.function
    def evaluate(model, dataset):
        del model
        return collections.OrderedDict(n=dataset.reduce(0.0, lambda total, _: total + 1.0))

    return evaluate


def _personalize():
    @tf.function
    def personalize(model, train, test):
        del model, train
        return collections.OrderedDict(n=test.reduce(0.0, lambda total, _: total + 1.0))

    return personalize


def _sampled():
    return sampled_gaussian.SampledGaussianFactory(
        clipping=clipping.FlatClipping(1.0),
        noise_multiplier=1.0,
        estimator=estimators.FixedDenominator(0.1, total_weight=100),
    )


_PROCESSES = {
    "build_unweighted_fed_avg": lambda **more: _TFF.build_unweighted_fed_avg(
        _linear_model, _SGD, model_aggregator=_OURS, **more
    ),
    "build_weighted_fed_avg": lambda: _TFF.build_weighted_fed_avg(
        _linear_model, _SGD, model_aggregator=_AS_WEIGHTED
    ),
    "build_weighted_fed_avg_with_optimizer_schedule": lambda: (
        _TFF.build_weighted_fed_avg_with_optimizer_schedule(
            _linear_model,
            lambda _: 0.1,
            tff.learning.optimizers.build_sgdm,
            model_aggregator=_AS_WEIGHTED,
        )
    ),
    "build_unweighted_fed_prox": lambda: _TFF.build_unweighted_fed_prox(
        _linear_model, 1.0, _SGD, model_aggregator=_OURS
    ),
    "build_weighted_fed_prox": lambda: _TFF.build_weighted_fed_prox(
        _linear_model, 1.0, _SGD, model_aggregator=_AS_WEIGHTED
    ),
    "build_fed_sgd": lambda: _TFF.build_fed_sgd(_linear_model, model_aggregator=_AS_WEIGHTED),
    "build_fed_recon": lambda: _TFF.build_fed_recon(
        _reconstruction_model,
        loss_fn=tf.keras.losses.MeanSquaredError,
        model_aggregator_factory=_OURS,
        client_weighting=tff.learning.ClientWeighting.UNIFORM,
    ),
    "build_unweighted_mime_lite": lambda **more: _TFF.build_unweighted_mime_lite(
        _linear_model, _MOMENTUM, model_aggregator=_OURS, **more
    ),
    "build_weighted_mime_lite": lambda **more: _TFF.build_weighted_mime_lite(
        _linear_model, _MOMENTUM, model_aggregator=_AS_WEIGHTED, **more
    ),
    "build_mime_lite_with_optimizer_schedule": lambda **more: (
        _TFF.build_mime_lite_with_optimizer_schedule(
            _linear_model, lambda _: 0.1, _MOMENTUM, model_aggregator=_AS_WEIGHTED, **more
        )
    ),
    "build_fed_kmeans": lambda: _TFF.build_fed_kmeans(2, (3,), sum_aggregator=_OURS),
    "build_fed_eval": lambda: _TFF.build_fed_eval(_linear_model),
    "build_fed_recon_eval": lambda: _TFF.build_fed_recon_eval(
        _reconstruction_model, loss_fn=tf.keras.losses.MeanSquaredError
    ),
    "build_personalization_eval_computation": lambda: _TFF.build_personalization_eval_computation(
        _linear_model, collections.OrderedDict(personalized=_personalize), _evaluate()
    ),
    "tff_dpftrl.build_dp_fedavg": lambda: tff_dpftrl.build_dp_fedavg(
        _linear_model, aggregator=_sampled(), client_optimizer=_SGD
    ),
    "tff_dpftrl.build_dp_fedsgd": lambda: tff_dpftrl.build_dp_fedsgd(
        _linear_model, aggregator=_sampled(), learning_rate=0.1
    ),
}
_WITHOUT_RELEASE = (
    "build_fed_eval",
    "build_fed_recon_eval",
    "build_personalization_eval_computation",
)


def test_every_algorithm_has_a_row_and_a_test():
    builders = {name for name in dir(_TFF) if name.startswith("build_")}
    ours = {"tff_dpftrl.build_dp_fedavg", "tff_dpftrl.build_dp_fedsgd"}
    assert set(_table("TFF's learning algorithms")) == builders | ours == set(_PROCESSES)


# One of each kind that the table knows; the others are slow.
_FAST = {
    "build_fed_kmeans",
    "tff_dpftrl.build_dp_fedsgd",
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in _FAST else [pytest.mark.slow]) for n in _PROCESSES],
)
def test_the_table_of_algorithms_says_what_the_check_finds(name):
    _, elsewhere, metrics, _ = _table("TFF's learning algorithms")[name]
    check = tff_dpftrl.check_process(_PROCESSES[name]())
    paths = {path for leak in check.leaks for path in leak.paths}
    in_metrics = {path for path in paths if path.startswith("metrics.")}
    assert _code(elsewhere) == paths - in_metrics
    assert _code(metrics) == {".".join(path.split(".")[:2]) for path in in_metrics}
    assert len(check.releases) == (name not in _WITHOUT_RELEASE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, aggregator",
    [
        ("build_unweighted_mime_lite", _OURS),
        ("build_weighted_mime_lite", _AS_WEIGHTED),
        ("build_mime_lite_with_optimizer_schedule", _AS_WEIGHTED),
    ],
)
def test_mime_lite_with_both_aggregators_leaves_but_the_metrics(name, aggregator):
    check = tff_dpftrl.check_process(_PROCESSES[name](full_gradient_aggregator=aggregator))
    assert len(check.releases) == 2
    check.raise_if_any(allow=["metrics.client_work"])
    with pytest.raises(ValueError, match="metrics.client_work.train.loss"):
        check.raise_if_any()


def test_the_documented_lines_leave_the_metrics_out():
    (lines,) = re.findall(
        r"```python\n(def no_metrics.*?)```", _DOCUMENT.read_text(encoding="utf-8"), re.DOTALL
    )
    names = {"tff": tff, "tff_dpftrl": tff_dpftrl, "ours": _OURS}
    exec(lines, names | {"model_fn": _linear_model, "client_optimizer": _SGD})


_UPDATE = tff.TensorType(np.float32, [4])


def _estimated_norm():
    # Without noise, as in TFF's own robust_aggregator.
    return tff.aggregators.PrivateQuantileEstimationProcess.no_noise(
        initial_estimate=1.0, target_quantile=0.5, learning_rate=1.0
    )


@tff.tensorflow.computation(_UPDATE)
def _norm(update):
    return tf.norm(update)


def _client_norms(updates):
    return collections.OrderedDict(
        client_norms=tff.federated_sum(tff.federated_map(_norm, updates))
    )


_FACTORIES = tff.aggregators
_WRAPPED = {
    "tff.aggregators.clipping_factory, fixed norm": lambda: _FACTORIES.clipping_factory(1.0, _OURS),
    "tff.aggregators.zeroing_factory, fixed norm": lambda: _FACTORIES.zeroing_factory(1.0, _OURS),
    "tff.aggregators.concat_factory": lambda: _FACTORIES.concat_factory(_OURS),
    "tff.aggregators.HadamardTransformFactory": lambda: _FACTORIES.HadamardTransformFactory(_OURS),
    "tff.aggregators.DiscreteFourierTransformFactory": lambda: (
        _FACTORIES.DiscreteFourierTransformFactory(_OURS)
    ),
    "tff.aggregators.add_measurements, of the server's result": lambda: _FACTORIES.add_measurements(
        _OURS, server_measurement_fn=lambda mean: collections.OrderedDict(mean=mean)
    ),
    "tff.aggregators.add_measurements, of the clients' updates": lambda: (
        _FACTORIES.add_measurements(_OURS, client_measurement_fn=_client_norms)
    ),
    "tff.learning.add_debug_measurements": lambda: tff.learning.add_debug_measurements(_OURS),
    "tff.aggregators.clipping_factory, estimated norm": lambda: _FACTORIES.clipping_factory(
        _estimated_norm(), _OURS
    ),
    "tff.aggregators.zeroing_factory, estimated norm": lambda: _FACTORIES.zeroing_factory(
        _estimated_norm(), _OURS
    ),
    "tff.aggregators.MeanFactory, ours as the sum of values": lambda: _FACTORIES.MeanFactory(
        value_sum_factory=_OURS
    ),
    "tff.aggregators.UnweightedMeanFactory, ours as the sum of values": lambda: (
        _FACTORIES.UnweightedMeanFactory(value_sum_factory=_OURS)
    ),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if "Transform" in n else []) for n in _WRAPPED],
)
def test_the_table_of_wrappings_says_what_the_check_finds(name):
    table = _table("Wrapping an aggregator in TFF's factories")
    assert set(table) == set(_WRAPPED)
    is_safe, where, _ = table[name]
    factory = _WRAPPED[name]()
    if isinstance(factory, tff.aggregators.WeightedAggregationFactory):
        process = factory.create(_UPDATE, tff.TensorType(np.float32))
    else:
        process = factory.create(_UPDATE)
    check = tff_dpftrl.check_process(process)
    assert {path for leak in check.leaks for path in leak.paths} == _code(where)
    assert len(check.releases) == 1
    if is_safe == "yes":
        check.raise_if_any(allow=["measurements"])
    else:
        with pytest.raises(ValueError, match=re.escape(min(_code(where)))):
            check.raise_if_any()


@pytest.mark.parametrize(
    "build",
    [
        tff.learning.robust_aggregator,
        pytest.param(tff.learning.compression_aggregator, marks=pytest.mark.slow),
        lambda: tff.learning.dp_aggregator(1.0, 100.0),
    ],
    ids=["robust", "compression", "dp"],
)
def test_tffs_composed_aggregators_are_reported(build):
    factory = build()
    weight = [tff.TensorType(np.float32)]
    if isinstance(factory, tff.aggregators.UnweightedAggregationFactory):
        weight = []
    check = tff_dpftrl.check_process(factory.create(_UPDATE, *weight))
    paths = {path for leak in check.leaks for path in leak.paths}
    assert {"result", "state.zeroing_norm[0].current_estimate"} <= paths
    assert not check.releases


@pytest.mark.parametrize(
    "wrapping", ["estimated", "fixed", pytest.param("none", marks=pytest.mark.slow)]
)
def test_an_estimated_norm_lets_an_absent_client_move_the_average(wrapping):
    # Without noise, so that what is left is what the noise would have to cover.
    ours = aggregators.build_dp_ftrl_aggregator(
        identity.Identity(), noise_multiplier=0.0, clip_norm=1.0, clients_per_round=4
    )
    norm = {"estimated": _estimated_norm(), "fixed": 0.6}
    factory = ours
    if wrapping != "none":
        factory = tff.aggregators.zeroing_factory(norm[wrapping], ours)
    process = factory.create(_UPDATE)

    def second_average(first_cohort):
        state = process.next(process.initialize(), first_cohort).state
        # The same cohort in either case; the client that differed is not in it.
        return process.next(state, [np.float32([0.7, 0, 0, 0])] * 4).result

    others = [np.float32([0.2, 0, 0, 0])] * 3
    present = second_average([np.float32([2, 0, 0, 0]), *others])
    zeroed_out = second_average([np.float32([0, 0, 0, 0]), *others])
    moved = np.linalg.norm(present - zeroed_out)
    if wrapping == "estimated":
        # All are zeroed out or none is; a client of the round may move it by clip_norm / 4.
        assert moved == pytest.approx(0.7, rel=1e-3)
    else:
        assert moved == 0
