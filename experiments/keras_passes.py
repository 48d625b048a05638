"""DP-FTRL against DP-SGD without amplification: `python experiments/keras_passes.py`.

A scaled reproduction of the centralised comparison of Kairouz et al. 2021: passes over a
classification set in one place, with example-level privacy, nothing sampled and nothing shuffled.
At equal ε the noise is a tree's, a BLT's, or independent in every step, which is DP-SGD as far as
it can be proven without a secret sample. The set is made: ten classes by a random network of two
layers, so that every machine has it. Each mechanism has the learning rate that is best for it on
held-out examples, which no ε accounts for. Writes experiments/results/keras_passes.csv; some
minutes on two cores.
"""

from __future__ import annotations

import csv
import pathlib
import tempfile
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

import tff_dpftrl

_RESULTS = pathlib.Path(__file__).resolve().parent / "results" / "keras_passes.csv"
_NUM_TRAINED, _NUM_HELD_OUT, _FEATURES, _CLASSES = 2000, 4000, 20, 10
_BATCH, _EPOCHS = 100, 10
_DELTA = 1e-5
_SEEDS = (0, 1, 2)
_RATES = (0.05, 0.2)
_MECHANISMS = ("blt", "tree", "identity")
_EPSILON = 8.0


def data(num: int) -> tuple[np.ndarray, np.ndarray]:
    """Makes examples: Gaussian features, and the class that the random network scores highest."""
    rng = np.random.default_rng(2021)
    hidden = rng.normal(size=[_FEATURES, 32]) / _FEATURES**0.5
    last = rng.normal(size=[32, _CLASSES])
    features = rng.normal(size=[num, _FEATURES])
    classes = np.argmax(np.tanh(2.0 * features @ hidden) @ last, axis=1)
    return features.astype(np.float32), classes.astype(np.int32)


def accuracy(mechanism: str, rate: float, seed: int) -> float:
    """Trains a model, and returns its accuracy on held-out examples.

    Args:
      mechanism: Mechanism of the noise.
      rate: Learning rate of SGD with momentum 0.9.
      seed: Seed of the initial weights; the noise has a secret one.
    """
    x, y = data(_NUM_TRAINED + _NUM_HELD_OUT)
    tf.keras.utils.set_random_seed(seed)
    model = tf.keras.Sequential(
        [
            tf.keras.Input([_FEATURES]),
            tf.keras.layers.Dense(32, "tanh"),
            tf.keras.layers.Dense(_CLASSES),
        ]
    )
    model.compile(
        tf.keras.optimizers.SGD(rate, momentum=0.9),
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    with tempfile.TemporaryDirectory() as folder:
        tff_dpftrl.private_fit(
            model,
            x[:_NUM_TRAINED],
            y[:_NUM_TRAINED],
            pathlib.Path(folder) / "run",
            privacy=tff_dpftrl.FitPrivacy(
                clip_norm=1.0, delta=_DELTA, target_epsilon=_EPSILON, mechanism=mechanism
            ),
            batch_size=_BATCH,
            epochs=_EPOCHS,
            trained_on="nothing",
            progress=lambda line: None,
        )
    held_out = x[_NUM_TRAINED:], y[_NUM_TRAINED:]
    return float(model.evaluate(*held_out, verbose=0, return_dict=True)["accuracy"])


def row(mechanism: str) -> dict[str, object]:
    """Returns a mechanism's accuracy over the seeds, at the rate that is best for it."""
    found = {rate: [accuracy(mechanism, rate, seed) for seed in _SEEDS] for rate in _RATES}
    print(mechanism, found, flush=True)
    return summary(mechanism, found)


def summary(mechanism: str, found: Mapping[float, Sequence[float]]) -> dict[str, object]:
    """Returns the row of a mechanism from accuracies by learning rate and seed."""
    best = max(found, key=lambda rate: np.mean(found[rate]))
    values = 100.0 * np.array(found[best])
    error = np.std(values, ddof=1) / len(values) ** 0.5
    return {
        "mechanism": mechanism,
        "ε": f"{_EPSILON:g}",
        "δ": f"{_DELTA:g}",
        "learning rate": f"{best:g}",
        "seeds": len(values),
        "held-out accuracy": f"{np.mean(values):.1f} ± {error:.1f} %",
    }


def main() -> None:
    """Trains and writes."""
    found = [row(mechanism) for mechanism in _MECHANISMS]
    _RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with open(_RESULTS, "w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, found[0], lineterminator="\n")
        table.writeheader()
        table.writerows(found)
    print(_RESULTS)


if __name__ == "__main__":
    main()
