"""From (strategy, z, schema) to numbers: published tables, composition, prefixes."""

from __future__ import annotations

import dataclasses
import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import rdp
from hypothesis import given, settings
from hypothesis import strategies as st

from tff_dpftrl.accounting import calibrate, events, gaussian, guarantee, parts
from tff_dpftrl.mechanisms import (
    banded_toeplitz,
    identity,
    inverse_banded,
    restarts,
    strategy,
    tree,
    zoo,
)
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
    claim = _gboard(row)
    assert claim.sensitivity.exact
    assert claim.sensitivity.squared == row[5]
    if row[0] != "en-US*":
        assert round(claim.rho_zcdp, 2) == row[4]


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


@pytest.mark.parametrize(
    "squared_column_norm, participations, noise, rho, epsilon",
    [
        # Published by Google with the production matrices: 400 bands; 1000 bands.
        (0.2, 3, 1.411, 0.1506840301548885, 3.42400740942813),
        (1.0, 2, 8.35, 0.014342572340349278, 0.9935500950539),
        # Table 4, pt-BR BandMF-4.523, one participation.
        (1.0, 1, 4.523, 2.444e-2, 1.312),
    ],
)
def test_production_bandmf(squared_column_norm, participations, noise, rho, epsilon):
    # Columns of one participant do not overlap: S² is their number times the squared norm.
    claim = guarantee.Guarantee(
        "banded",
        noise,
        schema_lib.MinSep(2000, 485, participations),
        strategy.Sensitivity(participations * squared_column_norm, True, "orthogonal columns"),
        1e-10,
    )
    digits = 1e-12 if rho > 0.03 or rho < 0.02 else 1e-3
    assert claim.rho_zcdp == pytest.approx(rho, rel=digits)
    # Google's epsilon is a PLD's, rounded upwards by about 1e-7.
    assert claim.epsilon == pytest.approx(epsilon, rel=max(digits, 1e-6))


def test_tree_row_of_pt_pt_does_not_follow_from_its_parameters():
    # Table 4 prints rho = 1.33 for TreeAgg-7 / 91 / 4 over 430 rounds; z = 7 gives .4388, so the
    # run must have had z = 4.03 (its report goal was smaller).
    schema = schema_lib.MinSep.from_gap(430, 91, 4)
    claim = guarantee.dp_ftrl_guarantee(
        tree.Tree(430), noise_multiplier=7.0, schema=schema, delta=1e-10
    )
    assert claim.rho_zcdp == pytest.approx(0.4388, abs=5e-5)
    implied = math.sqrt(claim.sensitivity.squared / (2 * 1.33))
    assert implied == pytest.approx(4.03, abs=0.02)


def test_tree_row_of_id_id():
    # Table 4: TreeAgg-7 / 437 / 5 over 2350 rounds, rho = .94, and epsilon of that printed rho.
    schema = schema_lib.MinSep.from_gap(2350, 437, 5)
    claim = guarantee.dp_ftrl_guarantee(
        tree.Tree(2350), noise_multiplier=7.0, schema=schema, delta=1e-10
    )
    assert round(claim.rho_zcdp, 2) == 0.94
    assert round(gaussian.epsilon(gaussian.mu_from_rho(0.94), 1e-10), 2) == 9.29


def _strategies(rounds):
    return [
        identity.Identity(),
        tree.Tree(rounds),
        zoo.load("blt-gboard-b400"),
        banded_toeplitz.BandedToeplitz.fhu(5),
        inverse_banded.InverseBanded.bisr(3),
        restarts.Restarted(tree.Tree(rounds), (0, 13, 30)),
        restarts.Restarted(zoo.load("blt-gboard-b400"), (0, 20)),
    ]


@pytest.mark.parametrize("index", range(7))
def test_prefix_of_every_mechanism_is_monotone(index):
    rounds = 48
    schema = schema_lib.MinSep(rounds, 7, 4)
    curve = [
        guarantee.epsilon_so_far(
            _strategies(rounds)[index],
            noise_multiplier=3.0,
            schema=schema,
            rounds_released=t,
            delta=1e-8,
        )
        for t in range(rounds + 1)
    ]
    assert all(a <= b * (1 + 1e-12) for a, b in zip(curve, curve[1:], strict=False))


@pytest.mark.parametrize("index", range(7))
def test_calibration_works_for_every_mechanism(index):
    mechanism = _strategies(48)[index]
    schema = schema_lib.MinSep(48, 7, 4)
    noise = calibrate.calibrate_noise_multiplier(mechanism, schema, target_epsilon=3.0, delta=1e-9)
    claim = guarantee.dp_ftrl_guarantee(
        mechanism, noise_multiplier=noise, schema=schema, delta=1e-9
    )
    assert 3.0 * (1 - 1e-8) <= claim.epsilon <= 3.0


def test_identity_with_one_participation_is_the_plain_gaussian():
    schema = schema_lib.MinSep(100, 100, 1)
    claim = guarantee.dp_ftrl_guarantee(
        identity.Identity(), noise_multiplier=2.5, schema=schema, delta=1e-6
    )
    assert claim.rho_zcdp == pytest.approx(1 / (2 * 2.5**2), rel=1e-14)
    plain = dp_accounting.get_epsilon_gaussian(2.5, 1e-6)
    assert claim.epsilon == pytest.approx(plain, rel=1e-9)
    assert claim.delta_at(claim.epsilon) == pytest.approx(1e-6, rel=1e-9)


def test_accountants_accept_the_event():
    claim = _gboard(GBOARD_ROWS[4])
    event = claim.to_dp_event()
    pld = dp_accounting.pld.PLDAccountant(_ZERO_OUT)
    assert pld.supports(event)
    assert pld.compose(event).get_epsilon(1e-10) == pytest.approx(claim.epsilon, rel=1e-6)
    renyi = rdp.RdpAccountant(neighboring_relation=_ZERO_OUT).compose(event)
    assert renyi.get_epsilon(1e-10) == pytest.approx(claim.epsilon_rdp, rel=2e-3)
    assert pld.ledger == event
    rebuilt = dp_accounting.DpEvent.from_named_tuple(event.to_named_tuple())
    assert rebuilt == event


def test_event_without_noise_is_not_private():
    claim = guarantee.dp_ftrl_guarantee(
        identity.Identity(), noise_multiplier=0.0, schema=schema_lib.MinSep(10, 1, 1), delta=1e-6
    )
    assert claim.rho_zcdp == claim.epsilon == math.inf
    assert claim.to_dict()["epsilon"] is None
    accountant = dp_accounting.pld.PLDAccountant(_ZERO_OUT).compose(claim.to_dp_event())
    assert accountant.get_epsilon(1e-6) == math.inf


def test_a_known_seed_guarantees_nothing():
    schema = schema_lib.MinSep(10, 5, 2)
    known = guarantee.dp_ftrl_guarantee(
        identity.Identity(), noise_multiplier=3.0, schema=schema, delta=1e-6, seed_is_known=True
    )
    assert known.mu == known.rho_zcdp == known.epsilon == math.inf
    assert known.delta_at(5.0) == 1.0
    assert known.to_dict()["epsilon"] is None and known.to_dict()["seed_is_known"]
    accountant = rdp.RdpAccountant(neighboring_relation=_ZERO_OUT).compose(known.to_dp_event())
    assert accountant.get_epsilon(1e-6) == math.inf
    assert "no guarantee: the seed of the noise is known" in str(known)
    secret = dataclasses.replace(known, seed_is_known=False)
    assert guarantee.composed_rho([secret, known]) == math.inf


def test_a_guarantee_prints_as_a_sentence_that_rounds_up():
    claim = guarantee.dp_ftrl_guarantee(
        tree.Tree(2000),
        noise_multiplier=7.0,
        schema=schema_lib.MinSep.from_gap(2000, 313, 6),
        delta=1e-10,
    )
    # es-ES of 2022 (McMahan & Thakurta): epsilon 8.5261, rho 79 / 98, both rounded up.
    assert str(claim) == (
        "tree: (ε = 8.527, δ = 1e-10)-differential privacy, ρ = 0.8062 zCDP; noise multiplier 7, "
        "2000 rounds, stride at least 314, at most 6 participations"
    )
    assert "ε = unbounded" in str(dataclasses.replace(claim, noise_multiplier=0.0))
    assert "noise multiplier 7.65432," in str(dataclasses.replace(claim, noise_multiplier=7.654328))
    # A part with a δ of its own: no ρ-zCDP holds.
    words = parts.Part(parts.VOCABULARY, "words", rho_zcdp=0.1, delta=1e-11)
    whole = dataclasses.replace(claim, delta=1000**-1.1, others=(words,))
    assert ", δ = 0.000501188)-differential privacy; noise multiplier 7," in str(whole)
    assert whole.to_dict()["rho_zcdp"] is whole.to_dict()["epsilon_rdp"] is None
    assert whole.to_dict()["epsilon"] == whole.epsilon
    assert claim.to_dict()["rho_zcdp"] == claim.rho_zcdp
    assert guarantee.composed_rho([claim, whole]) == math.inf
    assert guarantee.composed_rho([claim, claim]) == pytest.approx(2 * claim.rho_zcdp)


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
        guarantee.dp_ftrl_guarantee(identity.Identity(), **(valid | changes))


def test_more_rounds_than_declared_are_refused():
    with pytest.raises(ValueError, match="rounds_released"):
        guarantee.epsilon_so_far(
            identity.Identity(),
            noise_multiplier=1.0,
            schema=schema_lib.MinSep(8, 2, 2),
            rounds_released=9,
            delta=1e-6,
        )


@pytest.mark.parametrize("z", [5e-324, 1e-200, 1e-160])
@pytest.mark.filterwarnings("error")
def test_next_to_no_noise_is_no_guarantee_and_no_traceback(z):
    claim = guarantee.dp_ftrl_guarantee(
        tree.Tree(20), noise_multiplier=z, schema=schema_lib.MinSep(20, 5, 4), delta=1e-6
    )
    assert claim.epsilon == claim.rho_zcdp == claim.epsilon_rdp == math.inf
    assert claim.delta_at(1e300) == pytest.approx(1.0)
    assert claim.to_dict()["epsilon"] is None
    assert "ε = unbounded" in str(claim)


@pytest.mark.parametrize("z", [math.inf, math.nan, -1.0, "many"])
def test_noise_must_be_a_finite_number(z):
    # An infinite one used to be epsilon = 0.
    with pytest.raises(ValueError, match="noise_multiplier must be a finite number, at least 0"):
        guarantee.dp_ftrl_guarantee(
            tree.Tree(20), noise_multiplier=z, schema=schema_lib.MinSep(20, 5, 4), delta=1e-6
        )
