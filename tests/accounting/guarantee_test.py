"""From (strategy, z, schema) to numbers: published tables, composition, prefixes."""

from __future__ import annotations

import dataclasses
import math
import sys

import dp_accounting
import numpy as np
import pytest
from dp_accounting import rdp
from hypothesis import given, settings
from hypothesis import strategies as st

from tff_dpftrl.accounting import events, gaussian, guarantee
from tff_dpftrl.mechanisms import strategy, tree
from tff_dpftrl.participation import schema as schema_lib

_ZERO_OUT = dp_accounting.NeighboringRelation.REPLACE_SPECIAL

# Gboard paper (Xu et al. 2023), Tables 1 and 2: row, rounds, MinS (a gap), MaxP, printed rho; and
# S², which each of them follows from with z = 7. `en-US*` and `es-ES*` ran secure aggregation.
GBOARD_ROWS = [
    ("de-DE", 930, 212, 4, 0.48, 47),
    ("en-GB", 980, 226, 4, 0.48, 47),
    ("fr-FR", 1280, 180, 5, 0.89, 87),
    ("it-IT", 1620, 303, 5, 0.71, 70),
    ("pt-PT", 530, 54, 8, 1.86, 182),
    ("es-ES", 1900, 526, 3, 0.35, 34),
    ("es-ES*", 1750, 349, 4, 0.52, 51),
    ("en-US", 2800, 371, 7, 1.31, 128),
    ("en-US*", 1360, 622, 2, 0.25, 24),
    ("pt-BR", 3600, 909, 3, 0.45, 44),
    ("en-IN", 1290, 170, 6, 1.14, 112),
    ("es-MX", 1980, 343, 5, 0.64, 63),
    ("es-AR", 640, 90, 5, 0.84, 82),
    ("OTF de-DE", 1170, 206, 5, 0.89, 87),
    ("OTF en-GB", 1220, 206, 5, 0.89, 87),
    ("OTF es-ES", 1280, 197, 5, 0.89, 87),
    ("OTF fr-FR", 1300, 290, 4, 0.61, 60),
    ("OTF it-IT", 1360, 188, 5, 0.89, 87),
    ("OTF ru-RU", 870, 327, 3, 0.32, 31),
    ("OTF pt-PT", 430, 54, 7, 0.99, 97),
]
# Table 2 and Appendix A: epsilon at delta = 1e-10, computed by the authors from the printed rho.
GBOARD_EPSILONS = {
    "pt-PT": 13.69,
    "en-US*": 4.49,
    "OTF de-DE": 9.01,
    "OTF en-GB": 9.01,
    "OTF es-ES": 9.01,
    "OTF fr-FR": 7.31,
    "OTF it-IT": 9.01,
    "OTF ru-RU": 5.13,
    "OTF pt-PT": 9.56,
}


class _Identity(strategy.Strategy):
    """Independent noise, written out here so that the test does not rely on ours."""

    mechanism = "identity"

    def strategy_matrix(self, num_rounds):
        return np.eye(num_rounds)

    noise_matrix = strategy_matrix

    def sensitivity(self, schema):
        return strategy.Sensitivity(float(schema.effective_participations), True, "columns")

    def prefix_noise_variance(self, num_rounds):
        return np.arange(1.0, num_rounds + 1)

    def round_noise_variance(self, num_rounds):
        return np.ones(num_rounds)

    def noise_recipe(self):
        raise ValueError("not needed here")

    def memory_copies(self, num_rounds):
        return 0

    def to_dict(self):
        return {"mechanism": self.mechanism}


def _gboard(row, **kwargs) -> guarantee.Guarantee:
    _, rounds, gap, participations, _, _ = row
    return guarantee.dp_ftrl_guarantee(
        tree.Tree(rounds),
        noise_multiplier=7.0,
        schema=schema_lib.MinSep.from_gap(rounds, gap, participations),
        delta=1e-10,
        **kwargs,
    )


@pytest.mark.parametrize("row", GBOARD_ROWS, ids=lambda row: row[0])
def test_zcdp_of_the_gboard_tables(row):
    found = _gboard(row)
    assert found.sensitivity.exact
    assert found.sensitivity.squared == row[5]
    if row[0] != "en-US*":
        assert round(found.rho_zcdp, 2) == row[4]


@pytest.mark.parametrize("name", GBOARD_EPSILONS)
def test_epsilon_of_the_gboard_tables(name):
    row = next(row for row in GBOARD_ROWS if row[0] == name)
    printed = gaussian.epsilon(gaussian.mu_from_rho(row[4]), 1e-10)
    assert printed == pytest.approx(GBOARD_EPSILONS[name], abs=0.0051)
    # The exact rho differs from the printed one by its rounding, 0.005, and epsilon accordingly.
    slope = gaussian.epsilon(gaussian.mu_from_rho(row[4] + 0.0051), 1e-10) - printed
    assert abs(_gboard(row).epsilon - printed) <= 1.1 * slope


def test_inflation_that_explains_the_secure_aggregation_row():
    # Table 1 prints .25 for en-US*, S² = 24 at z = 7 gives .2449: round(.2449 f², 2) = .25 holds
    # from f = 1.00021 on. Algorithm 2's formula gives that with clip norm C = 5 and d = 4.4e6
    # parameters (padded to 2^23) for scales s up to about 4e4 (section 2.4).
    row = next(row for row in GBOARD_ROWS if row[0] == "en-US*")
    smallest = math.sqrt(0.245 * 98 / 24)
    assert smallest == pytest.approx(1.00021, abs=1e-5)
    assert round(_gboard(row, clip_norm_inflation=smallest + 1e-9).rho_zcdp, 2) == 0.25
    assert _gboard(row).rho_zcdp < 0.245
    clip_norm, dimension = 5.0, 2.0**23

    def inflation(scale):
        return math.sqrt(
            1.0
            + dimension / (2 * scale * clip_norm) ** 2
            + 1.0 / (scale * clip_norm)
            + math.sqrt(dimension) / (2 * (scale * clip_norm) ** 2)
        )

    assert inflation(1.3e4) > smallest > inflation(1.5e4)
    # The other run with secure aggregation, es-ES*, is printed as .52 and stays there.
    other = next(row for row in GBOARD_ROWS if row[0] == "es-ES*")
    assert round(_gboard(other, clip_norm_inflation=inflation(1.3e4)).rho_zcdp, 2) == 0.52


def test_identity_with_one_participation_is_the_plain_gaussian():
    schema = schema_lib.MinSep(100, 100, 1)
    found = guarantee.dp_ftrl_guarantee(
        _Identity(), noise_multiplier=2.5, schema=schema, delta=1e-6
    )
    assert found.rho_zcdp == pytest.approx(1 / (2 * 2.5**2), rel=1e-14)
    plain = dp_accounting.get_epsilon_gaussian(2.5, 1e-6)
    assert found.epsilon == pytest.approx(plain, rel=1e-9)
    assert found.delta_at(found.epsilon) == pytest.approx(1e-6, rel=1e-9)


def test_accountants_accept_the_event():
    found = _gboard(GBOARD_ROWS[4])
    event = found.to_dp_event()
    pld = dp_accounting.pld.PLDAccountant(_ZERO_OUT)
    assert pld.supports(event)
    assert pld.compose(event).get_epsilon(1e-10) == pytest.approx(found.epsilon, rel=1e-6)
    renyi = rdp.RdpAccountant(neighboring_relation=_ZERO_OUT).compose(event)
    assert renyi.get_epsilon(1e-10) == pytest.approx(found.epsilon_rdp, rel=2e-3)
    assert pld.ledger == event
    rebuilt = dp_accounting.DpEvent.from_named_tuple(event.to_named_tuple())
    assert rebuilt == event


def test_event_without_noise_is_not_private():
    found = guarantee.dp_ftrl_guarantee(
        _Identity(), noise_multiplier=0.0, schema=schema_lib.MinSep(10, 1, 1), delta=1e-6
    )
    assert found.rho_zcdp == found.epsilon == math.inf
    assert found.to_dict()["epsilon"] is None
    accountant = dp_accounting.pld.PLDAccountant(_ZERO_OUT).compose(found.to_dp_event())
    assert accountant.get_epsilon(1e-6) == math.inf


def test_event_refuses_an_inconsistent_multiplier():
    event = _gboard(GBOARD_ROWS[0]).to_dp_event()
    values = {
        name: getattr(event, name)
        for name in event.to_named_tuple()._fields
        if hasattr(event, name)
    }
    with pytest.raises(ValueError, match="noise_multiplier"):
        events.DpFtrlDpEvent(**(values | {"noise_multiplier": 2 * event.noise_multiplier}))


def test_independent_restarts_compose():
    # k blocks in which every client may take part once are k Gaussians.
    block = guarantee.dp_ftrl_guarantee(
        tree.Tree(64), noise_multiplier=5.0, schema=schema_lib.MinSep(64, 64, 1), delta=1e-8
    )
    rho = guarantee.composed_rho([block] * 6)
    accountant = dp_accounting.pld.PLDAccountant(_ZERO_OUT).compose(block.to_dp_event(), 6)
    epsilon = gaussian.epsilon(gaussian.mu_from_rho(rho), 1e-8)
    assert accountant.get_epsilon(1e-8) == pytest.approx(epsilon, rel=1e-6)


@given(
    rounds=st.integers(2, 60),
    min_sep=st.integers(1, 30),
    participations=st.integers(1, 8),
    noise=st.floats(0.1, 50.0),
)
@settings(max_examples=40, deadline=None)
def test_epsilon_is_monotone_in_every_parameter(rounds, min_sep, participations, noise):
    mechanism = tree.Tree(128)
    schema = schema_lib.MinSep(rounds, min_sep, participations)

    def epsilon(schema=schema, noise=noise, **kwargs):
        return guarantee.dp_ftrl_guarantee(
            mechanism, **({"noise_multiplier": noise, "schema": schema, "delta": 1e-6} | kwargs)
        ).epsilon

    base = epsilon()
    assert epsilon(dataclasses.replace(schema, num_rounds=rounds + 1)) >= base
    assert epsilon(dataclasses.replace(schema, min_sep=min_sep + 1)) <= base
    assert epsilon(dataclasses.replace(schema, max_participations=participations + 1)) >= base
    assert epsilon(noise=noise * 1.01) < base
    assert epsilon(delta=1e-5) < base
    assert epsilon(clip_norm_inflation=1.01) > base


def test_epsilon_so_far_grows_to_the_whole_runs():
    schema = schema_lib.MinSep(60, 7, 4)
    mechanism = tree.Tree(60)
    kwargs = {"noise_multiplier": 3.0, "schema": schema, "delta": 1e-8}
    curve = [
        guarantee.epsilon_so_far(mechanism, rounds_released=t, **kwargs)
        for t in range(schema.num_rounds + 1)
    ]
    assert curve[0] == 0.0 < curve[1]
    assert all(a <= b for a, b in zip(curve, curve[1:], strict=False))
    assert curve[-1] == guarantee.dp_ftrl_guarantee(mechanism, **kwargs).epsilon


def test_epsilon_so_far_covers_every_released_sum():
    # Brute force: the released rows of the strategy, over all patterns of a short run.
    schema = schema_lib.MinSep(9, 3, 2)
    for released in range(1, 10):
        matrix = tree.Tree(9).strategy_matrix(released)
        prefix = dataclasses.replace(schema, num_rounds=released)
        worst = max(np.sum(matrix[:, list(p)].sum(axis=1) ** 2) for p in prefix.patterns())
        epsilon = guarantee.epsilon_so_far(
            tree.Tree(9), noise_multiplier=2.0, schema=schema, rounds_released=released, delta=1e-6
        )
        assert epsilon == pytest.approx(gaussian.epsilon(math.sqrt(worst) / 2.0, 1e-6), rel=1e-9)


@pytest.mark.parametrize(
    "changes, name",
    [
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"noise_multiplier": math.nan}, "noise_multiplier"),
        ({"delta": 0.0}, "delta"),
        ({"clip_norm_inflation": 0.99}, "clip_norm_inflation"),
        ({"clip_norm_inflation": math.inf}, "clip_norm_inflation"),
    ],
)
def test_errors_name_the_argument(changes, name):
    valid = {"noise_multiplier": 1.0, "schema": schema_lib.MinSep(8, 2, 2), "delta": 1e-6}
    with pytest.raises(ValueError, match=name):
        guarantee.dp_ftrl_guarantee(_Identity(), **(valid | changes))


def test_more_rounds_than_declared_are_refused():
    with pytest.raises(ValueError, match="rounds_released"):
        guarantee.epsilon_so_far(
            _Identity(),
            noise_multiplier=1.0,
            schema=schema_lib.MinSep(8, 2, 2),
            rounds_released=9,
            delta=1e-6,
        )


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
