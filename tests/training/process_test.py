"""Tests of the round of a run: what it refuses, and that nothing leaks past the noise."""

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl.execution import client_part, entropy
from tff_dpftrl.learning import bucket_counts
from tff_dpftrl.private_round import clipping, estimators
from tff_dpftrl.training import config as config_lib
from tff_dpftrl.training import process


def _config(**changes):
    values = {"num_rounds": 8, "clients_per_round": 5, "noise_multiplier": 1.0} | changes
    return config_lib.TrainingConfig.of(**values)


_METRIC = "client_work/train/num_examples"
_WEIGHTS = "global_model_weights/trainable/0"
_MODEL = {_WEIGHTS, "finalizer/accumulator/0"}
# What may change with the sum of a part of the reports, by the part.
_CHANGES = {
    "metrics/0/num_examples": {_METRIC},
    "update/non_finite_clients": {"aggregator/non_finite_clients"},
    "update/update/0": _MODEL,
}
_NOISED_BIT = {
    "aggregator/clip/estimate",
    "aggregator/clip/excess",
    "aggregator/estimated_clip_norm",
    "aggregator/unclipped_fraction",
}


@pytest.mark.parametrize(
    ("options", "further"),
    [
        ({}, {}),
        (
            {"adaptive_clipping": True, "restart_warmup": 4, "clipped_count_stddev": 2.0},
            {"update/bit": _NOISED_BIT},
        ),
        ({"algorithm": "dp-fedavg"}, {"update/weight": set()}),
        ({"sampling": "cyclic", "mechanism": "bandtoep", "bands": 3}, {}),
        (
            {
                "algorithm": "dp-fedsgd",
                "estimator": "clipped-denominator",
                "per_layer_clipping": True,
            },
            {"update/weight": _MODEL},
        ),
        ({"mechanism": "none", "noise_multiplier": None}, {"update/clients": _MODEL}),
    ],
    ids=["dp-ftrl", "adaptive", "dp-fedavg", "cyclic", "dp-fedsgd", "none"],
)
def test_only_metrics_of_the_cohort_are_exact(options, further):
    """Nothing else of the reports reaches the server, and the update only with its noise."""
    config = _config(**options)
    plan = config.request().plan(100, 4)
    found = process.build_round(plan, config.rules, bucket_counts.build_model(4))
    allowed = _CHANGES | further
    if options.get("mechanism") == "none":
        del allowed["update/non_finite_clients"]
    assert set(found.report.labels) == {f"plain/{part}" for part in allowed}
    assert not found.secure_sums
    repeated = entropy.Repeated()  # Two calls have the same noise.
    finish, specs = found.finish(answers_draws=True, entropy=repeated)
    finish = client_part.traced(finish, specs, device=client_part.CPU)
    labels = (*found.state.labels, *found.output.labels)
    before = found.initialize()
    sums = [tf.fill(spec.shape, tf.cast(10, spec.dtype)) for spec in found.report.specs]
    after = finish(*before, *sums)
    for place, label in enumerate(found.report.labels):
        other = [*sums[:place], sums[place] * 2, *sums[place + 1 :]]
        pairs = zip(labels, after, finish(*before, *other), strict=True)
        changed = {name for name, one, two in pairs if not np.array_equal(one, two)}
        assert changed == allowed[label.removeprefix("plain/")]
    (weights,) = (value for name, value in zip(labels, after, strict=True) if name == _WEIGHTS)
    has_noise = options.get("mechanism") != "none"
    assert len(set(weights.numpy())) == (4 if has_noise else 1)  # The sum is the same in all.


def _mechanism(config):
    return process.build_aggregation(config.rules, config.request().plan(100, 10)).private_round


def test_a_sampled_cohort_is_clipped_and_divided_as_asked():
    common = {"algorithm": "dp-fedavg", "clip_norm": 0.5}
    plain, other = (
        _mechanism(_config(**common, **options))
        for options in ({}, {"estimator": "clipped-denominator", "per_layer_clipping": True})
    )
    assert plain.clipping == clipping.FlatClipping(0.5)
    assert other.clipping == clipping.PerLayerClipping(0.5)
    assert plain.estimator == estimators.FixedDenominator(0.05, 100)
    assert other.estimator == estimators.ClippedDenominator(0.05, 100)


@pytest.mark.parametrize(
    ("estimator", "change"), [("fixed-denominator", 1.0), ("clipped-denominator", 2.0)]
)
def test_noise_follows_a_schedule_of_clip_norms_and_costs_what_is_claimed(estimator, change):
    config = _config(
        algorithm="dp-fedavg", clip_norm=0.5, clip_norm_schedule="2:0.2,5:0.1", estimator=estimator
    )
    plan, mechanism = config.request().plan(100, 10), _mechanism(config)
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
