"""Shares recover secrets exactly, say nothing below the threshold, and survive wrong ones."""

from __future__ import annotations

import collections
import itertools
import math
import random

import hypothesis
import pytest
from hypothesis import strategies as st

from tff_dpftrl.secure_sums import secret_sharing

_SETTINGS = hypothesis.settings(deadline=None, derandomize=True, max_examples=50)
_SECRETS = st.integers(0, secret_sharing.PRIME - 1)


def _is_probable_prime(number):
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37):
        powers = [pow(base, odd << i, number) for i in range(twos)]
        if powers[0] != 1 and number - 1 not in powers:
            return False
    return True


def _split_one(secret, threshold, num_shares, **kwargs):
    return [share for (share,) in secret_sharing.split([secret], threshold, num_shares, **kwargs)]


def test_field_has_prime_order_and_is_the_smallest_with_room_for_32_bytes():
    assert _is_probable_prime(secret_sharing.PRIME)
    assert not any(_is_probable_prime(2**256 + i) for i in range(1, 297, 2))
    assert secret_sharing.PRIME < 256**secret_sharing.SHARE_BYTES


def test_published_example():
    # Wikipedia, "Shamir's secret sharing": f(x) = 1234 + 166 x + 94 x², which no field reduces.
    # Its differences at 0 are 260 and 188.
    drawn = iter([188, 260])
    shares = _split_one(1234, 3, 6, random_below=lambda bound: next(drawn))
    assert shares == [1494, 1942, 2578, 3402, 4414, 5614]
    assert secret_sharing.Recovery([2, 4, 5]).recover([1942, 3402, 4414]) == 1234


@pytest.mark.parametrize("threshold", range(1, 6))
def test_exactly_the_sets_of_the_threshold_recover(threshold):
    points = range(1, 6)
    secrets = (2**256 - 1, 0)
    shares = secret_sharing.split(secrets, threshold, 5)
    for size in range(1, 6):
        for chosen in itertools.permutations(range(5), size):
            recovery = secret_sharing.Recovery([points[i] for i in chosen])
            recovered = tuple(recovery.recover([shares[i][j] for i in chosen]) for j in range(2))
            assert (recovered == secrets) == (size >= threshold)


def test_fewer_shares_than_the_threshold_are_independent_of_the_secret(monkeypatch):
    # Over the field of 7, all polynomials: any two of four shares are uniform, for each secret.
    monkeypatch.setattr(secret_sharing, "PRIME", 7)
    for secret in range(7):
        seen = collections.Counter()
        for differences in itertools.product(range(7), repeat=2):
            drawn = iter(differences)
            shares = _split_one(secret, 3, 4, random_below=lambda bound: next(drawn))  # noqa: B023
            seen.update(itertools.combinations(enumerate(shares), 2))
        assert len(seen) == 6 * 49
        assert set(seen.values()) == {1}


@_SETTINGS
@hypothesis.given(st.data())
def test_any_threshold_of_shares_recovers(data):
    points = range(1, data.draw(st.integers(1, 40)) + 1)
    threshold = data.draw(st.integers(1, len(points)))
    secrets = tuple(data.draw(st.lists(_SECRETS, min_size=1, max_size=3)))
    split = secret_sharing.split(secrets, threshold, len(points))
    shares = dict(zip(points, split, strict=True))
    chosen = data.draw(st.permutations(points))[:threshold]
    recovery = secret_sharing.Recovery(chosen)
    for i, secret in enumerate(secrets):
        assert recovery.recover([shares[point][i] for point in chosen]) == secret


@_SETTINGS
@hypothesis.given(st.data())
def test_wrong_shares_are_found_as_far_as_there_are_spare_ones(data):
    num_shares = data.draw(st.integers(1, 20))
    points = data.draw(st.permutations(range(1, num_shares + 1)))[:16]
    threshold = data.draw(st.integers(1, len(points)))
    secret = data.draw(_SECRETS)
    split = _split_one(secret, threshold, num_shares)
    shares = [split[point - 1] for point in points]
    num_wrong = data.draw(st.integers(0, (len(points) - threshold) // 2))
    wrong = data.draw(st.permutations(range(len(points))))[:num_wrong]
    for i in wrong:
        shares[i] = (shares[i] + data.draw(st.integers(1, 2**256))) % secret_sharing.PRIME
    corrected = secret_sharing.correct(points, shares, threshold)
    assert corrected[0] == secret
    assert sorted(corrected[1]) == sorted(points[i] for i in wrong)


def test_more_wrong_shares_are_not_taken_for_others():
    shares = _split_one(5, 3, 6)
    # Two of six are wrong where one can be corrected: random ones lie on no polynomial.
    rng = random.Random(0)
    for _ in range(20):
        broken = [*shares[:4], rng.randrange(2**256), rng.randrange(2**256)]
        assert secret_sharing.correct(range(1, 7), broken, 3) is None
    assert secret_sharing.correct([1, 2], shares[:2], 3) is None


def test_secret_of_zero_is_corrected():
    shares = _split_one(0, 1, 5)
    assert secret_sharing.correct(range(1, 6), [*shares[:4], 7], 1) == (0, (5,))


def test_values_of_a_polynomial_with_the_drawn_differences():
    # Against Newton's formula: the sum of the differences times "x over k".
    drawn = []

    def random_below(bound):
        drawn.append(secret_sharing.secrets.randbelow(bound))
        return drawn[-1]

    shares = secret_sharing.split((3, 4), 60, 90, random_below=random_below)
    for i, secret in enumerate((3, 4)):
        differences = [secret, *drawn[i::2][::-1]]
        for x in (1, 2, 59, 60, 90):
            value = sum(math.comb(x, k) * difference for k, difference in enumerate(differences))
            assert shares[x - 1][i] == value % secret_sharing.PRIME


@pytest.mark.parametrize(
    "values, threshold, num_shares, match",
    [
        ([1], 0, 2, "threshold must be from 1 to num_shares=2, got 0"),
        ([1], 3, 2, "got 3"),
        ([secret_sharing.PRIME], 1, 1, "values must be"),
        ([-1], 1, 1, "values must be"),
    ],
)
def test_arguments_out_of_range(values, threshold, num_shares, match):
    with pytest.raises(ValueError, match=match):
        secret_sharing.split(values, threshold, num_shares)
