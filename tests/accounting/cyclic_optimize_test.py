"""Choice of bands, groups and noise for cyclic Poisson sampling."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tff_dpftrl.accounting import calibrate, cyclic_optimize, dp_fedavg
from tff_dpftrl.mechanisms import banded_toeplitz, banded_toeplitz_optimize
from tff_dpftrl.participation import schema as schema_lib

_DELTA = 1e-5
# The best of published mechanisms and numbers of bands, as a ratio to DP-SGD's error: 500 rounds,
# 1,600 clients, 64 a round.
_BEST_OF_TABLE = {1.0: 1.0, 4.0: 0.902, 8.0: 0.774, 16.0: 0.63}


def _dp_sgd_error(num_rounds, probability, epsilon):
    noise = dp_fedavg.calibrate_noise_multiplier(
        sampling_probability=probability,
        num_rounds=num_rounds,
        target_epsilon=epsilon,
        delta=_DELTA,
    )
    return noise * math.sqrt((num_rounds + 1) / 2)  # Prefix t has t independent draws.


@pytest.mark.parametrize(
    "epsilon", [4.0, *(pytest.param(value, marks=pytest.mark.slow) for value in (1.0, 8.0, 16.0))]
)
def test_it_is_not_worse_than_the_best_of_a_table(epsilon):
    choice = cyclic_optimize.best_cyclic(500, 1600, 64, epsilon, _DELTA)
    ratio = choice.best.error / _dp_sgd_error(500, 0.04, epsilon)
    assert ratio <= _BEST_OF_TABLE[epsilon]
    assert choice.best.accountant().epsilon(_DELTA) <= epsilon
    assert choice.best.accountant().epsilon(_DELTA) >= epsilon * (1 - 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("num_rounds", [100, 800])
@pytest.mark.parametrize("passes", [2, 20])
@pytest.mark.parametrize("epsilon", [1.0, 4.0, 16.0])
def test_it_is_not_worse_than_any_number_of_bands(num_rounds, passes, epsilon):
    pass_rounds = num_rounds // passes
    choice = cyclic_optimize.best_cyclic(num_rounds, 64 * pass_rounds, 64, epsilon, _DELTA)
    for bands in {1, 2, 3, 4, 6, 8, 12, 16, 25, pass_rounds}:
        if bands > pass_rounds:
            continue
        one = schema_lib.MinSep(num_rounds, num_rounds, 1)
        strategy = banded_toeplitz_optimize.optimize_banded_toeplitz(one, bands)
        noise = dp_fedavg.calibrate_noise_multiplier(
            sampling_probability=bands / pass_rounds,
            num_rounds=math.ceil(num_rounds / bands),
            target_epsilon=epsilon,
            delta=_DELTA,
        )
        # The search stops at 0.1 %.
        assert choice.best.error <= noise * strategy.rms_loss(one) * (1 + 2e-3)


def test_the_error_is_that_of_the_materialised_noise():
    choice = cyclic_optimize.best_cyclic(60, 300, 20, 6.0, _DELTA)
    assert [run.num_bands for run in choice.curve] == sorted({r.num_bands for r in choice.curve})
    assert choice.best in choice.curve
    assert choice.best.error == min(run.error for run in choice.curve)
    for run in choice.curve:
        sums = np.cumsum(np.linalg.inv(run.strategy.strategy_matrix(60)), axis=0)
        rms = math.sqrt(np.mean(np.sum(sums**2, axis=1)))
        assert run.error == pytest.approx(run.noise_multiplier * rms, rel=1e-9)
        assert run.num_groups >= run.num_bands
        # The same expected cohort for all: 20 of 300 clients.
        assert run.sampling_probability == pytest.approx(run.num_groups * 20 / 300)
        assert 6.0 * (1 - 1e-3) <= run.accountant().epsilon(_DELTA) <= 6.0


def test_no_other_coefficients_of_as_many_bands_have_less_error():
    # What sampling costs depends on the largest column norm alone.
    run = cyclic_optimize.best_cyclic(60, 300, 20, 6.0, _DELTA).best
    rng = np.random.default_rng(1)
    assert isinstance(run.strategy, banded_toeplitz.BandedToeplitz)
    coefficients = np.array(run.strategy.coefficients)
    for size in (0.003, 0.03):
        for _ in range(10):
            changed = coefficients * (1 + size * rng.standard_normal(len(coefficients)))
            other = banded_toeplitz.BandedToeplitz(tuple(changed))
            scale = np.linalg.norm(changed) / np.linalg.norm(coefficients)
            assert run.noise_multiplier * scale * other.rms_error(60) > run.error * (1 - 1e-9)


def test_a_whole_pass_of_bands_costs_what_its_schema_does():
    last = cyclic_optimize.best_cyclic(60, 300, 20, 6.0, _DELTA).curve[-1]
    assert (last.num_bands, last.num_groups, last.sampling_probability) == (15, 15, 1.0)
    noise = calibrate.calibrate_noise_multiplier(
        # The last turn's columns count in full, though the run ends before their last entries.
        last.strategy,
        schema_lib.MinSep(100, 15, 4),
        target_epsilon=6.0,
        delta=_DELTA,
    )
    assert last.noise_multiplier == pytest.approx(noise, rel=2e-4)


def test_one_band_is_dp_sgd():
    first = cyclic_optimize.best_cyclic(60, 300, 20, 6.0, _DELTA, max_bands=1)
    assert [run.num_bands for run in first.curve] == [1]
    assert first.best.num_groups == 1
    assert first.best.error == pytest.approx(_dp_sgd_error(60, 20 / 300, 6.0), rel=2e-4)


@pytest.mark.slow
def test_few_bands_may_take_turns_in_more_groups():
    # 16 groups would take three turns, 20 groups only two, and nothing is sampled any more.
    runs = cyclic_optimize.best_cyclic(40, 20_000, 1000, 8.0, 1e-8).curve
    chosen = {run.num_bands: run for run in runs}[16]
    assert (chosen.num_groups, chosen.sampling_probability) == (20, 1.0)
    noise = dp_fedavg.calibrate_noise_multiplier(
        sampling_probability=16 / 20, num_rounds=3, target_epsilon=8.0, delta=1e-8
    )
    one = schema_lib.MinSep(40, 40, 1)
    assert chosen.error < noise * chosen.strategy.rms_loss(one)


@pytest.mark.parametrize(
    "bad",
    [
        {"num_rounds": 0},
        {"num_clients": 0},
        {"clients_per_round": 0},
        {"clients_per_round": 301},
        {"target_epsilon": -1.0},
        {"delta": 2.0},
        {"max_bands": 0},
    ],
)
def test_bad_input_is_named(bad):
    good = {
        "num_rounds": 60,
        "num_clients": 300,
        "clients_per_round": 20,
        "target_epsilon": 6.0,
        "delta": 1e-5,
    }
    with pytest.raises(ValueError, match=next(iter(bad))):
        cyclic_optimize.best_cyclic(**{**good, **bad})
