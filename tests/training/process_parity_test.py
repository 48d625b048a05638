"""Native rounds against TFF's federated averaging with this package's aggregators."""

import numpy as np
import pytest
import tensorflow as tf
import tree

tff = pytest.importorskip("tensorflow_federated", reason="compares with processes of TFF")

from tff_dpftrl.aggregators import dp_ftrl, sampled_gaussian, secagg  # noqa: E402
from tff_dpftrl.execution import compiled_process, contexts  # noqa: E402
from tff_dpftrl.learning import dp_fedavg, functional_model, local_model  # noqa: E402
from tff_dpftrl.models import metrics, word_lstm  # noqa: E402
from tff_dpftrl.private_round import adaptive_clipping, clipping, estimators  # noqa: E402
from tff_dpftrl.training import config as config_lib  # noqa: E402
from tff_dpftrl.training import optimizers, process  # noqa: E402

_ROUNDS = 10
_LENGTH = 3
_MODEL = word_lstm.WordLstm(
    vocabulary_size=9,
    sequence_length=_LENGTH,
    embedding_size=2,
    state_size=2,
    tie_embeddings=True,
)
_SPECIAL = metrics.SpecialIds(oov=6, bos=7, eos=8)
_COMMON = {
    "num_rounds": _ROUNDS,
    "clients_per_round": 4,
    "noise_multiplier": 0.5,
    "deterministic_noise_seed": 7,
    "client_learning_rate": 0.5,
}
_ADAPTIVE = {"adaptive_clipping": True, "restart_warmup": 4, "clipped_count_stddev": 2.0}
_MOMENTUM = {"server_optimizer": "momentum", "server_momentum": 0.9}
_SLOW = pytest.mark.slow
_OPTIONS = {
    "blt": _MOMENTUM,
    "adaptive": _ADAPTIVE | _MOMENTUM,
    "secagg": {"secagg_bits": 20},
    "dp-fedavg": {"algorithm": "dp-fedavg", "per_layer_clipping": True},
    "tree": {"mechanism": "tree", "server_optimizer": "adam", "server_decay": "cosine"},
    "bandtoep": {"mechanism": "bandtoep", "bands": 3, "iterate_averaging": 0.9},
    "secure noise": {"noise": "secure", "deterministic_noise_seed": None},
    "adaptive secagg": _ADAPTIVE | {"secagg_bits": 20, "server_warmup_rounds": 3},
    "cyclic": {"sampling": "cyclic", "mechanism": "bandtoep", "bands": 3},
    "dp-fedsgd": {"algorithm": "dp-fedsgd", "estimator": "clipped-denominator"},
    "no noise": {"mechanism": "none", "noise_multiplier": None},
}
_DEFAULT = ("blt", "adaptive secagg", "dp-fedavg")


def _aggregator(plan, options):
    """Builds the TFF factory of a plan, without the code under test."""
    if getattr(plan, "strategy", plan) is None:
        return tff.aggregators.UnweightedMeanFactory()
    common = {
        "noise_multiplier": plan.noise_multiplier,
        "deterministic_seed": plan.deterministic_seed,
        "secure_noise": options.noise == "secure",
    }
    if not hasattr(plan, "strategy"):
        per_layer = clipping.PerLayerClipping if plan.per_layer_clipping else clipping.FlatClipping
        estimator = (
            estimators.FixedDenominator
            if plan.estimator == "fixed-denominator"
            else estimators.ClippedDenominator
        )
        return sampled_gaussian.SampledGaussianFactory(
            clipping=per_layer(plan.clip_norms),
            estimator=estimator(plan.sampling_probability, plan.num_clients),
            report_non_finite_clients=True,
            **common,
        )
    common["clients_per_round"] = plan.clients_per_round
    clip_norm = plan.clip_norm
    if getattr(plan, "adaptive_clipping", False):
        clip_norm = adaptive_clipping.AdaptiveClipping(
            initial_clip_norm=plan.clip_norm,
            target_unclipped_quantile=options.noise.target_unclipped_quantile,
            clip_learning_rate=options.noise.clip_learning_rate,
            clipped_count_stddev=options.noise.clipped_count_stddev,
        )
    if getattr(plan, "encoding", None) is not None:
        return secagg.build_secagg_dp_ftrl_aggregator(
            plan.strategy, encoding=plan.encoding, clip_norm=clip_norm, **common
        )
    common["report_non_finite_clients"] = True
    if getattr(plan, "adaptive_clipping", False):
        return dp_ftrl.build_adaptive_dp_ftrl_aggregator(
            plan.strategy, clipping=clip_norm, **common
        )
    return dp_ftrl.build_dp_ftrl_aggregator(plan.strategy, clip_norm=clip_norm, **common)


def _process(plan, options, model):
    """Builds TFF's learning process of a plan."""
    client_optimizer = tff.learning.optimizers.build_sgdm(options.learning.client_learning_rate)
    server_optimizer = optimizers.build_server_optimizer(options)
    aggregator = _aggregator(plan, options)
    if not hasattr(plan, "sampling_probability") or hasattr(plan, "strategy"):
        return tff.learning.algorithms.build_unweighted_fed_avg(
            getattr(local_model, "as_tff", lambda m: m)(model),
            client_optimizer_fn=client_optimizer,
            server_optimizer_fn=server_optimizer,
            model_aggregator=aggregator,
            metrics_aggregator=tff.learning.metrics.sum_then_finalize,
            loop_implementation=tff.learning.LoopImplementation.DATASET_ITERATOR,
        )
    common = {"aggregator": aggregator, "server_optimizer": server_optimizer}
    if plan.algorithm == "dp-fedsgd":
        rate = options.learning.client_learning_rate
        return dp_fedavg.build_dp_fedsgd(model, learning_rate=rate, **common)
    return dp_fedavg.build_dp_fedavg(model, client_optimizer=client_optimizer, **common)


def _cohort(round_index):
    """Makes clients of 0 to 5 sequences, in batches of 2."""
    rng = np.random.default_rng(round_index)
    for size in (3, 0, 5, 1):
        ids = rng.integers(0, 9, (size, _LENGTH + 1)).astype(np.int32)
        yield tf.data.Dataset.from_tensor_slices((ids[:, :-1], ids[:, 1:])).batch(2)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(one, id=name, marks=() if name in _DEFAULT else _SLOW)
        for name, one in _OPTIONS.items()
    ],
)
def test_ten_rounds_are_those_of_tff(options):
    config = config_lib.TrainingConfig.of(**(_COMMON | options))
    plan = config.request().plan(20, _MODEL.num_parameters)
    model = functional_model.build(_MODEL, _SPECIAL, seed=0)
    native = compiled_process.CompiledProcess(process.build_round(plan, config.rules, model))
    with contexts.compiled_only():
        of_tff = compiled_process.compile_process(_process(plan, config.rules, model))
    state = initial = native.initialize()
    # A checkpoint of one goes on in the other: the same tensors in the same order.
    expected_state = tree.unflatten_as(of_tff.initialize(), tree.flatten(state))
    for one, other in zip(tree.flatten(of_tff.initialize()), tree.flatten(state), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
    for round_index in range(_ROUNDS):
        cohort = list(_cohort(round_index))
        state, measured = native.next(state, cohort)
        expected_state, expected = of_tff.next(expected_state, cohort)
        change = [
            np.linalg.norm(np.subtract(now, then))
            for now, then in zip(
                tree.flatten(state.global_model_weights),
                tree.flatten(initial.global_model_weights),
                strict=True,
            )
        ]
        for one, other, size in zip(
            native.get_model_weights(state).trainable,
            of_tff.get_model_weights(expected_state).trainable,
            change,
            strict=True,
        ):
            # Measured: the same bits. TensorFlow may fuse operations of the two graphs differently.
            assert np.linalg.norm(np.subtract(one, other)) <= 1e-6 * size + 1e-8
        _assert_same_noise(state.aggregator, expected_state.aggregator)
        trained, expected_trained = (one["client_work"]["train"] for one in (measured, expected))
        assert sorted(trained) == sorted(expected_trained)
        for name, value in expected_trained.items():
            np.testing.assert_allclose(trained[name], value, rtol=1e-4, err_msg=name)
        for name, value in measured["aggregator"].items():
            np.testing.assert_allclose(value, expected["aggregator"][name], rtol=1e-4)
    native.close()
    of_tff.close()


def _assert_same_noise(aggregator, expected):
    """Compares what an aggregator keeps of its noise, bit by bit."""
    for field in ("round_index", "seed", "buffer", "count_buffer", "sum_state"):
        if field in getattr(aggregator, "_fields", ()):
            tree.map_structure(
                np.testing.assert_array_equal,
                tree.flatten(getattr(aggregator, field)),
                tree.flatten(getattr(expected, field)),
            )
