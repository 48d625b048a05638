"""DP-FedAvg against both tables of McMahan et al. 2018, by three accountants."""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
import pytest

from tff_dpftrl.accounting import dp_fedavg, gaussian

# McMahan et al. 2018, Table 1: users K, expected sample, z, epsilon after 10^0 ... 10^6 rounds, at
# delta = K^-1.1.
TABLE_1 = [
    (1e5, 1e2, 1.0, (0.97, 0.98, 1.00, 1.07, 1.18, 2.21, 7.50)),
    (1e6, 1e1, 1.0, (0.68, 0.69, 0.69, 0.69, 0.69, 0.72, 0.73)),
    (1e6, 1e3, 1.0, (1.17, 1.17, 1.20, 1.28, 1.39, 2.44, 8.13)),
    (1e6, 1e4, 1.0, (1.73, 1.92, 2.08, 3.06, 8.49, 32.38, 187.01)),
    (1e6, 1e3, 3.0, (0.47, 0.47, 0.48, 0.48, 0.49, 0.67, 1.95)),
    (1e9, 1e3, 1.0, (0.84, 0.84, 0.84, 0.85, 0.88, 0.88, 0.88)),
]
# Table 2: users, expected sample, epsilon after 5000 rounds with z = 1 at delta = 1e-9.
TABLE_2 = [
    (763430, 5000, 4.634),
    (763430, 1667, 2.314),
    (763430, 1250, 2.038),
    (1e8, 5000, 1.152),
    (1e8, 1667, 0.991),
    (1e8, 1250, 0.987),
]


@pytest.mark.parametrize("users, sample, noise, epsilons", TABLE_1)
def test_moments_accountant_gives_table_1(users, sample, noise, epsilons):
    for power, printed in enumerate(epsilons):
        run = dp_fedavg.DpFedAvg(sample / users, noise, 10**power)
        # Half a unit of the last printed digit; .685 appears as .68.
        assert run.epsilon_moments_accountant(users**-1.1) == pytest.approx(printed, abs=0.0051)


@pytest.mark.parametrize("users, sample, printed", TABLE_2)
def test_moments_accountant_gives_table_2(users, sample, printed):
    run = dp_fedavg.DpFedAvg(sample / users, 1.0, 5000)
    assert run.epsilon_moments_accountant(1e-9) == pytest.approx(printed, abs=0.00051)


# Computed with dp_accounting 0.6.0: users, sample, rounds, delta, RDP, PLD.
@pytest.mark.parametrize(
    "users, sample, rounds, delta, renyi, tight",
    [
        (1e5, 1e2, 10**6, 1e5**-1.1, 6.829, 6.372),
        pytest.param(1e6, 1e4, 10**6, 1e6**-1.1, 160.12, 149.10, marks=pytest.mark.slow),
        (763430, 5000, 5000, 1e-9, 4.183, 3.899),
    ],
)
def test_the_three_accountants_beside_each_other(users, sample, rounds, delta, renyi, tight):
    run = dp_fedavg.DpFedAvg(sample / users, 1.0, rounds)
    assert run.epsilon_rdp(delta) == pytest.approx(renyi, rel=1e-3)
    assert run.epsilon(delta) == pytest.approx(tight, rel=1e-3)
    assert run.epsilon(delta) <= run.epsilon_rdp(delta) <= run.epsilon_moments_accountant(delta)


@pytest.mark.parametrize(
    "q, noise, rounds",
    [
        pytest.param(0.01, 1.0, 1000, marks=pytest.mark.slow),
        pytest.param(0.1, 0.7, 30, marks=pytest.mark.slow),
        (0.5, 3.0, 100),
    ],
)
def test_agrees_with_the_pld_accountant(q, noise, rounds):
    run = dp_fedavg.DpFedAvg(q, noise, rounds)
    accountant = dp_accounting.pld.PLDAccountant().compose(run.to_dp_event())
    theirs = accountant.get_epsilon(1e-7)
    assert run.epsilon(1e-7) == pytest.approx(theirs, rel=1e-4)


def test_log_moments_are_integrals():
    q, noise = 0.2, 1.3
    x = np.linspace(-40.0, 80.0, 400_001)
    base = np.exp(-(x**2) / (2 * noise**2)) / (noise * math.sqrt(2 * math.pi))
    ratio = 1 - q + q * np.exp((2 * x - 1) / (2 * noise**2))
    expected = [np.log(base @ ratio ** (moment + 1) * (x[1] - x[0])) for moment in (1, 5, 12)]
    computed = dp_fedavg.DpFedAvg(q, noise, 1)._log_moments()[[0, 4, 11]]
    np.testing.assert_allclose(computed, expected, rtol=1e-9)


def test_full_participation_is_the_plain_gaussian():
    run = dp_fedavg.DpFedAvg(1.0, 5.0, 20)
    exact = gaussian.epsilon(math.sqrt(20) / 5.0, 1e-6)
    assert exact <= run.epsilon(1e-6) <= exact * (1 + 1e-4)
    # With q = 1 the log moments of a Gaussian are λ (λ + 1) / (2 z²).
    moments = np.arange(1, 33)
    np.testing.assert_allclose(run._log_moments(), moments * (moments + 1) / 50.0, rtol=1e-12)


def test_no_noise_is_no_privacy():
    run = dp_fedavg.DpFedAvg(0.01, 0.0, 10)
    assert run.epsilon(1e-6) == run.epsilon_rdp(1e-6) == math.inf
    assert run.epsilon_moments_accountant(1e-6) == math.inf


def test_calibration_meets_the_target():
    noise = dp_fedavg.calibrate_noise_multiplier(
        sampling_probability=0.01, num_rounds=1000, target_epsilon=2.0, delta=1e-7
    )
    assert 2.0 * (1 - 1e-3) <= dp_fedavg.DpFedAvg(0.01, noise, 1000).epsilon(1e-7) <= 2.0


@pytest.mark.parametrize(
    "arguments, name",
    [
        ((0.0, 1.0, 1), "sampling_probability"),
        ((1.5, 1.0, 1), "sampling_probability"),
        ((0.1, -1.0, 1), "noise_multiplier"),
        ((0.1, math.inf, 1), "noise_multiplier"),
        ((0.1, 1.0, 0), "num_rounds"),
        ((0.1, 1.0, 1.5), "num_rounds"),
    ],
)
def test_errors_name_the_argument(arguments, name):
    with pytest.raises(ValueError, match=name):
        dp_fedavg.DpFedAvg(*arguments)


@pytest.mark.parametrize("noise", [1e-320, 1e-200, 1e-160, 1e-20])
@pytest.mark.filterwarnings("error")
def test_next_to_no_noise_never_looks_private(noise):
    run = dp_fedavg.DpFedAvg(0.01, noise, 100)
    assert run.epsilon(1e-6) > 1e30
    if noise < 1e-100:
        # dp_accounting's Rényi accountant says 0 at 1e-160, and divides by zero at 1e-200.
        assert run.epsilon_rdp(1e-6) == run.epsilon_moments_accountant(1e-6) == math.inf


@pytest.mark.filterwarnings("error")
def test_boundless_noise_overflows_nowhere():
    run = dp_fedavg.DpFedAvg(0.01, 1e200, 100)
    assert run.epsilon(1e-6) == 0.0
    # At most log(1 / delta) / 31, the last of the moments.
    assert run.epsilon_moments_accountant(1e-6) < 0.5
    assert run.epsilon_rdp(1e-6) < 0.5
    for noise in (math.inf, math.nan):
        with pytest.raises(ValueError, match="noise_multiplier must be a finite number"):
            dp_fedavg.DpFedAvg(0.01, noise, 100)
