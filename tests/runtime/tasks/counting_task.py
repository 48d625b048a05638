"""A task that counts: which kind a note is of, and how long it is. All data is synthetic."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tff_dpftrl.runtime.device import named_tensors
from tff_dpftrl.runtime.tasks import analytics, definition

KINDS, LENGTHS = ("private", "work", "other"), ("short", "long")


def notes(seed: int, num_notes: int = 4) -> list[dict[str, int]]:
    """Draws the notes of a device."""
    rng = np.random.Generator(np.random.Philox(seed))
    return [
        {"kind": int(rng.integers(len(KINDS))), "length": int(rng.integers(100))}
        for _ in range(num_notes)
    ]


def count(notes):
    """Counts notes by kind, and by whether they have at least 50 words."""
    is_long = tf.cast(notes["length"] >= 50, tf.float32)
    return {
        "kinds": tf.reduce_sum(tf.one_hot(notes["kind"], len(KINDS)), axis=0),
        "lengths": tf.stack([tf.reduce_sum(1.0 - is_long), tf.reduce_sum(is_long)]),
    }


def build(**changes) -> definition.TaskDefinition:
    """Returns the definition, with changes."""
    return analytics.define(
        **{
            "buckets": {"kinds": KINDS, "lengths": LENGTHS},
            "features": {
                "kind": tf.io.FixedLenFeature([], tf.int64),
                "length": tf.io.FixedLenFeature([], tf.int64),
            },
            "count": count,
            "proxies": [notes(seed) for seed in (1, 2)],
            "max_examples": 10,
            "data": "notes drawn by a seed",
        }
        | changes
    )


def stored(seed: int) -> list[bytes]:
    """Returns the notes of a device as it stores them."""
    return named_tensors.encode_all(notes(seed), build().features())


def histogram(seeds) -> np.ndarray:
    """Counts the notes of devices, in NumPy."""
    found = np.zeros(len(KINDS) + len(LENGTHS))
    for seed in seeds:
        for note in notes(seed):
            found[note["kind"]] += 1
            found[len(KINDS) + (note["length"] >= 50)] += 1
    return found
