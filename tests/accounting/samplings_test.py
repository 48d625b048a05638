"""Accounting by the name of a sampling, against integrals and the modules behind it."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from tff_dpftrl.accounting import (
    dp_fedavg,
    gaussian,
    mixture_of_gaussians,
    neighbours,
    samplings,
)
from tff_dpftrl.accounting.amplification import balls_in_bins, min_sep_poisson
from tff_dpftrl.mechanisms import banded_toeplitz, identity, tree
from tff_dpftrl.participation import sampling

_DELTA = 1e-5


def _run(name, strategy, noise, rounds, *, group_size=1, **options):
    sampling = samplings.described(name, rounds, options)
    return samplings.account(
        sampling, strategy, noise_multiplier=noise, units_per_client=group_size
    )


def _cyclic(strategy, noise, rounds, groups, q):
    return _run("cyclic", strategy, noise, rounds, sampling_probability=q, sampling_groups=groups)


def test_more_changes_never_cost_less_with_little_noise():
    run = _run("bins", identity.Identity(), 0.1, 20, bins=10)
    assert run.epsilon(_DELTA, neighbours.Neighbours("substitute")) >= run.epsilon(_DELTA)


def test_poisson_is_dp_fedavg_and_els():
    run = _run("poisson", identity.Identity(), 1.5, 200, sampling_probability=0.02)
    assert run.epsilon(_DELTA) == dp_fedavg.DpFedAvg(0.02, 1.5, 200).epsilon(_DELTA)
    els = _run("poisson", identity.Identity(), 1.5, 200, sampling_probability=0.02, group_size=3)
    assert els.epsilon(_DELTA) == mixture_of_gaussians.epsilon(
        mixture_of_gaussians.els(1.5, 0.02, 3), num_steps=200, delta=_DELTA
    )
    # Three users by themselves are one with three examples.
    three = neighbours.Neighbours("substitute", 3)
    assert run.epsilon(_DELTA, three) == els.epsilon(_DELTA, neighbours.Neighbours("substitute"))


@pytest.mark.parametrize("relation", ["zero-out", "substitute"])
@pytest.mark.parametrize(
    "coefficient, groups_of_users",
    [
        (0.0, (0, 0)),
        (0.6, (0, 1)),
        *(
            pytest.param(coefficient, groups, marks=pytest.mark.slow)
            for coefficient, groups in ((0.0, (0, 1)), (0.0, (1, 1)), (0.6, (0, 0)), (0.6, (1, 1)))
        ),
    ],
)
def test_two_users_in_any_groups_are_within_the_bound(relation, groups_of_users, coefficient):
    """Two rounds, two groups, each user drawn with probability q at the turn: an integral."""
    q, noise = 0.4, 1.3
    matrix = np.array([[1.0, 0.0], [coefficient, 1.0]])
    if coefficient:
        strategy = banded_toeplitz.BandedToeplitz((1.0, coefficient))
    else:
        strategy = identity.Identity()
    x = np.linspace(-9.0, 9.0, 901)

    def mixture(sign):
        density = 0.0
        for drawn in itertools.product((0, 1), repeat=2):
            weight = math.prod(q if one else 1 - q for one in drawn)
            mean = sum(one * matrix[:, g] for one, g in zip(drawn, groups_of_users, strict=True))
            first, second = (stats.norm.pdf(x, sign * m / noise) for m in np.zeros(2) + mean)
            density = density + weight * np.outer(first, second)
        return density

    run = _cyclic(strategy, noise, 2, 2, q)
    pair = neighbours.Neighbours(relation, 2)
    upper, lower = mixture(1.0), mixture(-1.0 if relation == "substitute" else 0.0)
    for delta in (1e-2, 1e-4):
        epsilon = run.epsilon(delta, pair)
        for one, other in ((upper, lower), (lower, upper)):
            here = np.maximum(one - math.exp(epsilon) * other, 0.0).sum() * (x[1] - x[0]) ** 2
            assert here <= delta * (1 + 1e-3)  # Of the grid.
            # One band, both users in one group: the bound is reached.
            if coefficient == 0.0 and groups_of_users == (0, 0) and one is upper:
                assert here >= delta * (1 - 1e-2)


def test_cyclic_sampling_says_how_users_were_added_up():
    banded = _cyclic(banded_toeplitz.BandedToeplitz((1.0, 0.5)), 2.0, 40, 4, 0.1)
    two, substituted = neighbours.Neighbours(group_of=2), neighbours.Neighbours("substitute")
    assert "group privacy" in banded.how(two) and "group privacy" not in banded.how(substituted)
    assert "double mixture" in banded.how(substituted)
    assert banded.epsilon(_DELTA) < banded.epsilon(_DELTA, substituted)
    chain = neighbours.epsilon_by_changes(banded.epsilon, 2, _DELTA)
    assert banded.epsilon(_DELTA, two) <= chain
    # A group so large that a chain says nothing is no worse than if its samples were known.
    many = neighbours.Neighbours(group_of=50)
    assert banded.epsilon(_DELTA, many) == gaussian.epsilon(50 * banded.known_mu, _DELTA)
    assert _cyclic(identity.Identity(), 0.0, 40, 4, 0.1).epsilon(_DELTA) == math.inf


def test_bins_are_accounted_for_by_their_mixture():
    strategy = banded_toeplitz.BandedToeplitz((1.0, 0.5))
    run = _run("bins", strategy, 6.0, 12, bins=4)
    own = balls_in_bins.BallsInBins.from_strategy(
        strategy, noise_multiplier=6.0, num_rounds=12, num_bins=4
    )
    assert run.epsilon(_DELTA) == own.epsilon(_DELTA)
    # The bin that has most to tell, if it is known: three rounds.
    assert run.known_mu == pytest.approx(math.sqrt(3 * 1.25) / 6.0)


def test_b_min_sep_is_that_of_its_module():
    strategy = banded_toeplitz.BandedToeplitz((1.0, 0.5))
    options = {"sampling_probability": 0.05, "min_sep": 3}
    run = _run("b-min-sep", strategy, 3.0, 30, **options)
    own = min_sep_poisson.MinSepPoisson.from_strategy(
        strategy, noise_multiplier=3.0, num_rounds=30, **options
    )
    assert run.epsilon(_DELTA) == own.epsilon(_DELTA)
    assert run.known_mu == pytest.approx(math.sqrt(10 * 1.25) / 3.0)


@pytest.mark.parametrize("known_mu", [0.31, 1.0])
def test_other_neighbours_of_a_bound_are_a_chain_or_samples_that_are_known(known_mu):
    class ZeroOut:
        """Gaussian mechanism in place of a sampled run."""

        def epsilon(self, delta):
            return gaussian.epsilon(0.3, delta)

    run = samplings.BoundedRun(ZeroOut(), "a bound", known_mu)
    which = neighbours.Neighbours("substitute", 2)
    chain = neighbours.epsilon_by_changes(ZeroOut().epsilon, 4, _DELTA)
    known = gaussian.epsilon(4 * known_mu, _DELTA)
    assert run.epsilon(_DELTA) == ZeroOut().epsilon(_DELTA)
    assert run.epsilon(_DELTA, which) == min(chain, known)
    assert (known < chain) == (known_mu == 0.31)
    assert run.how() == "a bound" and "group privacy from a bound" in run.how(which)


def test_each_description_has_a_name_and_a_row():
    assert set(samplings.SAMPLINGS) == {"poisson", *sampling.KINDS}
    poisson = samplings.described("poisson", 30, {"sampling_probability": 0.1})
    assert poisson == sampling.CyclicPoisson(30, 1, 0.1)
    bins = samplings.described("bins", 30, {"bins": 4, "group_size": 1})
    assert bins == sampling.BallsInBins(30, 4)


def test_several_examples_of_a_user_in_groups_are_a_mixture():
    strategy = banded_toeplitz.BandedToeplitz((1.0, 0.5))
    options = {"sampling_probability": 0.1, "sampling_groups": 4}
    three = _run("cyclic", strategy, 2.0, 40, group_size=3, **options)
    mixture = mixture_of_gaussians.els(2.0 / math.sqrt(1.25), 0.1, 3)
    expected = mixture_of_gaussians.epsilon(mixture, num_steps=10, delta=_DELTA)
    assert three.epsilon(_DELTA) == pytest.approx(expected, rel=1e-9)
    # All three are in each of the ten rounds, if that is known.
    assert three.known_mu == pytest.approx(3 * math.sqrt(10 * 1.25) / 2.0)


@pytest.mark.parametrize(
    "name, strategy, options, message",
    [
        ("poisson", tree.Tree(8), {"sampling_probability": 0.1}, "needs a banded C"),
        ("poisson", identity.Identity(), {"sampling_probability": 1.5}, "sampling_probability"),
        (
            "cyclic",
            tree.Tree(8),
            {"sampling_probability": 0.1, "sampling_groups": 4},
            "needs a banded C",
        ),
        (
            "cyclic",
            banded_toeplitz.BandedToeplitz((1.0, 0.5, 0.2)),
            {"sampling_probability": 0.1, "sampling_groups": 2},
            "number of bands 3",
        ),
    ],
)
def test_bad_input(name, strategy, options, message):
    with pytest.raises(ValueError, match=message):
        _run(name, strategy, 1.0, 8, **options)
