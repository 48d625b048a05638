"""Noise and cohorts that are the same whenever a test is run: no test may depend on chance.

    from tests.fixed_seeds import fixed_seeds  # noqa: F401

in a test file fixes the root seeds of all its tests, and `fix` those of a fixture of a module.
What graphs read of the operating system is then the same in every round, unless an audit renews it:
draws differ by the run's seed and the round. A correct run is called violated once in a thousand
times, as is stated.
"""

import functools
import random

import pytest
import tensorflow as tf

from tff_dpftrl.execution import entropy
from tff_dpftrl.private_round import seeds
from tff_dpftrl.runs import cohort_seed

_ROOT_SEED = seeds.root_seed


@pytest.fixture(autouse=True)
def fixed_seeds(monkeypatch):
    """Root seeds that differ from run to run and are the same whenever a test is repeated."""
    fix(monkeypatch)


def fix(patch: pytest.MonkeyPatch) -> None:
    """Has root seeds of noise and cohorts drawn by generators that begin here."""

    def root_seed(deterministic_seed, *, secure=False):
        if deterministic_seed is not None:
            return _ROOT_SEED(deterministic_seed, secure=secure)
        num_words = seeds.SECURE_WORDS if secure else seeds.PHILOX_WORDS
        return tf.random.uniform([num_words], maxval=2**62, dtype=tf.int64, seed=5)

    tf.random.set_seed(5)  # Otherwise what is drawn depends on the tests before.
    patch.setattr(seeds, "root_seed", root_seed)
    patch.setattr(seeds, "SOURCE", _bits().path)
    patch.setattr(entropy.secrets, "token_bytes", random.Random(5).randbytes)
    patch.setattr(cohort_seed.secrets, "randbits", random.Random(5).getrandbits)


@functools.cache
def _bits() -> entropy.Repeated:
    """Bits that stay, since a graph of one test may be run in another one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entropy.secrets, "token_bytes", random.Random(5).randbytes)
        return entropy.Repeated()
