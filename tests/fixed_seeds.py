"""Noise and cohorts that are the same whenever a test is run: no test may depend on chance.

    from tests.fixed_seeds import fixed_seeds  # noqa: F401

in a test file fixes the root seeds of all its tests, and `fix` those of a fixture of a module.
A correct run is called violated once in a thousand times, as is stated.
"""

import random

import pytest
import tensorflow as tf

from tff_dpftrl.private_round import seeds
from tff_dpftrl.runs import cohort_seed


@pytest.fixture(autouse=True)
def fixed_seeds(monkeypatch):
    """Root seeds that differ from run to run and are the same whenever a test is repeated."""
    fix(monkeypatch)


def fix(patch: pytest.MonkeyPatch) -> None:
    """Has root seeds of noise and cohorts drawn by generators that begin here."""

    def drawn(num_words=seeds.PHILOX_WORDS):
        return tf.random.uniform([num_words], maxval=2**62, dtype=tf.int64, seed=5)

    tf.random.set_seed(5)  # Otherwise what is drawn depends on the tests before.
    patch.setattr(seeds, "root_seed_from_os", drawn)
    patch.setattr(cohort_seed.secrets, "randbits", random.Random(5).getrandbits)
