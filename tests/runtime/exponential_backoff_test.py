"""Tests of tff_dpftrl.runtime.exponential_backoff."""

from __future__ import annotations

import random

import pytest

from tff_dpftrl.runtime import exponential_backoff


@pytest.mark.parametrize(
    ("failures", "seconds"), [(1, 0.5), (2, 1.0), (4, 4.0), (5, 7.5), (10**9, 7.5)]
)
def test_doubles_up_to_the_longest(failures, seconds):
    assert exponential_backoff.exponential_s(failures, 0.5, 7.5) == seconds


def test_jitter_takes_at_most_half():
    drawn = [exponential_backoff.jittered_s(8.0, random.Random(seed)) for seed in range(200)]
    assert 4.0 < min(drawn) < 4.5 and 7.5 < max(drawn) <= 8.0
