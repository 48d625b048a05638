"""Noise that is the same whenever a test is run: chance is none of what a test may depend on.

    from tests.auditing.fixed_seeds import fixed_seeds  # noqa: F401

in a test file fixes the root seeds of all its tests.
"""

import pytest
import tensorflow as tf

from tff_dpftrl.private_round import seeds


@pytest.fixture(autouse=True)
def fixed_seeds(monkeypatch):
    """Root seeds that differ from run to run and are the same whenever a test is repeated."""

    def drawn():
        return tf.random.uniform([2], maxval=2**62, dtype=tf.int64, seed=5)

    monkeypatch.setattr(seeds, "root_seed_from_os", drawn)
