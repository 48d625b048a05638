"""A task that is not text: which movement a window of a sensor's measurements shows.

A window is 16 measurements of two axes; movements differ in frequency. All data is drawn by seeds.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tff_dpftrl.runtime.plans import example_pipeline
from tff_dpftrl.runtime.tasks import definition

LENGTH, AXES, MOVEMENTS, MOST_WINDOWS = 16, 2, 3, 12


def windows(seed: int, num_windows: int = MOST_WINDOWS) -> list[dict[str, np.ndarray]]:
    """Draws the windows of a device, which has phase and strength of its own."""
    rng = np.random.Generator(np.random.Philox(seed))
    strength, times = rng.uniform(0.7, 1.3), np.arange(LENGTH)[:, None]
    drawn = []
    for _ in range(num_windows):
        movement = int(rng.integers(MOVEMENTS))
        phase = rng.uniform(0, 2 * np.pi, [1, AXES])
        wave = strength * np.sin(2 * np.pi * (movement + 1) * times / LENGTH + phase)
        noisy = wave + 0.2 * rng.standard_normal([LENGTH, AXES])
        drawn.append({"window": noisy.astype(np.float32), "movement": np.int64(movement)})
    return drawn


def to_batch(features):
    """Makes (x, y) of a batch: how strong each frequency is, and the movement."""
    waves = tf.transpose(features["window"], [0, 2, 1])
    strengths = tf.abs(tf.signal.rfft(waves)) / LENGTH
    return tf.reshape(strengths, [-1, AXES * (LENGTH // 2 + 1)]), features["movement"]


PIPELINE = example_pipeline.ExamplePipeline(
    {
        "window": tf.io.FixedLenFeature([LENGTH, AXES], tf.float32),
        "movement": tf.io.FixedLenFeature([], tf.int64),
    },
    to_batch,
    batch_size=4,
    epochs=2,
    shuffle=True,
    max_rows=MOST_WINDOWS,
)


def keras_model() -> tf.keras.Model:
    """Builds a linear classifier with zero weights."""
    inputs = tf.keras.Input([AXES * (LENGTH // 2 + 1)])
    scores = tf.keras.layers.Dense(MOVEMENTS, kernel_initializer="zeros")(inputs)
    return tf.keras.Model(inputs, scores)


def define(**changes) -> definition.TaskDefinition:
    """Returns the definition, with changes."""
    rows = float(MOST_WINDOWS * PIPELINE.epochs)
    return definition.TaskDefinition(
        **{
            "model": keras_model(),
            "loss": tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "metrics": lambda: {"accuracy": tf.keras.metrics.SparseCategoricalAccuracy()},
            "pipeline": PIPELINE,
            "proxies": [windows(seed) for seed in (1001, 1002)],
            "largest_metrics": {"loss": 20 * rows, "accuracy": rows},
            "data": "windows drawn by a seed",
            "description": "a linear classifier of movements",
            "trained_on": "nothing",
        }
        | changes
    )
