"""Tests of the process of a run: what it refuses, and that nothing leaks past the noise."""

import sys

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl.aggregators import check_process
from tff_dpftrl.learning import functional_model
from tff_dpftrl.models import metrics, word_lstm
from tff_dpftrl.private_round import clipping, estimators
from tff_dpftrl.training import config as config_lib
from tff_dpftrl.training import process


def _config(**changes):
    values = {"num_rounds": 8, "clients_per_round": 5, "noise_multiplier": 1.0} | changes
    return config_lib.TrainingConfig(**values)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param(
            {"adaptive_clipping": True, "restart_warmup": 4, "clipped_count_stddev": 2.0},
            marks=pytest.mark.slow,
        ),
        pytest.param({"algorithm": "dp-fedavg"}, marks=pytest.mark.slow),
        pytest.param(
            {"sampling": "cyclic", "mechanism": "bandtoep", "bands": 3}, marks=pytest.mark.slow
        ),
        pytest.param(
            {
                "algorithm": "dp-fedsgd",
                "estimator": "clipped-denominator",
                "per_layer_clipping": True,
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=["dp-ftrl", "adaptive", "dp-fedavg", "cyclic", "dp-fedsgd"],
)
def test_only_metrics_of_the_cohort_are_exact(options):
    config = _config(**options)
    model = word_lstm.WordLstm(
        vocabulary_size=9,
        sequence_length=3,
        embedding_size=2,
        state_size=2,
        tie_embeddings=True,
    )
    special = metrics.SpecialIds(oov=6, bos=7, eos=8)
    plan = config.privacy().plan(100, model.num_parameters)
    checked = check_process.check_process(
        process.build_process(plan, config.learning, functional_model.build(model, special, seed=0))
    )
    assert len(checked.releases) == 1
    checked.raise_if_any(allow=["metrics"])


def test_a_sampled_cohort_is_clipped_and_divided_as_asked():
    common = {"algorithm": "dp-fedavg", "clip_norm": 0.5}
    plain, other = (
        process.build_sampled_aggregator(_config(**common, **options).privacy().plan(100, 10))
        for options in ({}, {"estimator": "clipped-denominator", "per_layer_clipping": True})
    )
    assert plain.private_round.clipping == clipping.FlatClipping(0.5)
    assert other.private_round.clipping == clipping.PerLayerClipping(0.5)
    assert plain.private_round.estimator == estimators.FixedDenominator(0.05, 100)
    assert other.private_round.estimator == estimators.ClippedDenominator(0.05, 100)


@pytest.mark.parametrize(
    ("estimator", "change"), [("fixed-denominator", 1.0), ("clipped-denominator", 2.0)]
)
def test_noise_follows_a_schedule_of_clip_norms_and_costs_what_is_claimed(estimator, change):
    plan = _config(
        algorithm="dp-fedavg", clip_norm=0.5, clip_norm_schedule="2:0.2,5:0.1", estimator=estimator
    )
    plan = plan.privacy().plan(100, 10)
    mechanism = process.build_sampled_aggregator(plan).private_round
    state, norms, noises = mechanism.initial_state([[10]]), [], []
    for round_index in range(plan.num_rounds):
        clipped, _ = mechanism.clip_client([tf.fill([10], 3.0)], state.round_index, 1.0)
        norms.append(float(tf.norm(clipped.update[0])))
        state, _, measured = mechanism.release(state, clipped)
        # One user changes the average of 5 expected ones by so much.
        noises.append(float(measured["noise_stddev"]) / (change * norms[round_index] / 5))
    np.testing.assert_allclose(norms, [0.5] * 2 + [0.2] * 3 + [0.1] * 3, rtol=2e-5)
    if change == 2.0:  # As for the other one, with twice the noise on the average.
        np.testing.assert_allclose(noises, 1.0, rtol=2e-5)
        return
    accountant = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-3)
    for begin, end in ((0, 2), (2, 5), (5, 8)):
        sampled = dp_accounting.PoissonSampledDpEvent(
            0.05, dp_accounting.GaussianDpEvent(noises[begin])
        )
        accountant.compose(dp_accounting.SelfComposedDpEvent(sampled, end - begin))
    spent = accountant.get_epsilon(plan.delta)
    assert plan.epsilon_after(plan.num_rounds) == pytest.approx(spent, rel=3e-3)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
