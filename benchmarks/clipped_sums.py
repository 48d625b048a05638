"""Cost of per-unit clipping over the plain gradient of the same rows.

    PYTHONPATH=. python benchmarks/clipped_sums.py [--models transformer ...] [--repeats 7]

"plain" is training that is not private: the gradient of the mean cross-entropy of a batch of 64
rows, without the positions of padding. "plain, full" is the same in static shapes, for rows
without padding. The reference is the one with less processor time. "ELS" clips the gradient of
each row (units of one row), "ULS, G = 8" that of the mean of each user's 8 rows; each in the
way that `ghost.fastest_clipped_sum` chooses. "loop" and "ghost" are one way or the other,
chosen or not. All go through the same 64 rows of random words; those of "sentences" have 13
words on average, the others are full. Threads are TensorFlow's default.

Each line has milliseconds (median), and its examples a second over those of the reference, of
the clock and of processor time: the median over the repeats of the ratio within a repeat, so
that a busy machine disturbs it little. PASS or FAIL says whether the ratio of processor time
reaches the goal for full rows: 0.85 for ELS, 0.8 for ULS. Then the memory beyond the imports,
in MB, at a batch of 64 rows and of 256, each in a process of its own: `sum_in_chunks` with
chunks of 64 rows (`--no-memory` leaves it out).

Of the models of Keras ("keras-mlp", …) "plain" is `train_on_batch`, with SGD, and the others are
clipped as `private_fit` does, or in the loop; without goals and memory.
"""

from __future__ import annotations

import argparse
import collections
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tff_dpftrl.finetuning import clipped_sums, ghost, keras_losses
from tff_dpftrl.models import language_model, metrics, transformer, word_lstm

_ROWS = 64
_MODELS = {
    "transformer": (transformer.Transformer(4096, 64, 128, 4, 4, 512), 64),
    "sentences": (transformer.Transformer(4096, 32, 128, 2, 4, 512), 13),
    "word-lstm": (word_lstm.WordLstm(4096, 20, 96, 256), 20),
}
"""By name: model, and words in a row."""

_STEPS = 32


def _keras_transformer(ids):
    layers = tf.keras.layers
    states = layers.Embedding(4096, 128)(ids)
    for _ in range(2):
        mixed = layers.MultiHeadAttention(4, 32)(states, states)
        states = layers.LayerNormalization()(states + mixed)
        inner = layers.Dense(128)(layers.Dense(512, "gelu")(states))
        states = layers.LayerNormalization()(states + inner)
    return layers.Dense(2)(layers.GlobalAveragePooling1D()(states))


def _keras_lstm(ids):
    states = tf.keras.layers.Embedding(4096, 96)(ids)
    return tf.keras.layers.Dense(2)(tf.keras.layers.LSTM(128)(states))


def _keras_mlp(inputs):
    for _ in range(2):
        inputs = tf.keras.layers.Dense(512, "relu")(inputs)
    return tf.keras.layers.Dense(10)(inputs)


_KERAS = {
    "keras-mlp": (_keras_mlp, tf.keras.Input([256])),
    "keras-transformer": (_keras_transformer, tf.keras.Input([_STEPS], dtype="int32")),
    "keras-lstm": (_keras_lstm, tf.keras.Input([_STEPS], dtype="int32")),
}

_CHOSEN = {"ELS": 1, "ULS, G = 8": 8}
_GOALS = {"ELS": 0.85, "ULS, G = 8": 0.8}
"""Smallest ratio that is wanted with full rows, of processor time."""


def _draw(model: language_model.LanguageModel, mean_length: int, num_rows: int):
    """Rows of random words, their ends padded."""
    rng = np.random.default_rng(0)
    ids = rng.integers(1, model.vocabulary_size, [num_rows, model.sequence_length + 1])
    if mean_length < model.sequence_length:
        lengths = np.clip(rng.geometric(1 / mean_length, num_rows), 2, None)
        ids[np.arange(ids.shape[1]) >= lengths[:, None]] = language_model.PAD
    return ids[:, :-1].astype(np.int32), ids[:, 1:].astype(np.int32)


def _weights(model: language_model.LanguageModel) -> list[tf.Tensor]:
    return [tf.constant(weight) for weight in model.initial_weights(0)]


def _plain(model, rows, *, full: bool = False) -> Callable[[], None]:
    def scores(weights, words, targets):
        targets = tf.reshape(targets, [-1])
        if full:
            return tf.reshape(model.logits(weights, words), [-1, model.vocabulary_size]), targets
        logits, positions = model.compact_logits(weights, words)
        return logits, tf.gather(targets, positions)

    @tf.function(autograph=False)
    def gradient(weights, words, targets):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            loss = metrics.mean_cross_entropy(*scores(weights, words, targets), language_model.PAD)
        return tape.gradient(loss, weights)

    weights, rows = _weights(model), tf.nest.map_structure(tf.constant, rows)
    return lambda: gradient(weights, *rows)


def _clipped(model, rows, way: clipped_sums.ClippedSum, rows_per_unit: int) -> Callable[[], None]:
    compiled = tf.function(way, autograph=False)
    weights, rows = _weights(model), tf.nest.map_structure(tf.constant, rows)
    splits = tf.range(0, _ROWS + 1, rows_per_unit)
    return lambda: compiled(weights, rows, splits, 1.0)


def _ways(model) -> dict[str, tuple[clipped_sums.ClippedSum, int]]:
    ways = {name: (ghost.fastest_clipped_sum(model, size), size) for name, size in _CHOSEN.items()}
    looped = clipped_sums.looped(clipped_sums.language_rows(model))
    for size in (1, 4, 8):
        ways[f"loop, G = {size}"] = looped, size
    for size in (4, 8):
        ways[f"ghost, G = {size}"] = ghost.booked(model, size), size
    return ways


def _keras_runs(name: str) -> tuple[tf.keras.Model, dict[str, Callable[[], None]]]:
    make, inputs = _KERAS[name]
    model = tf.keras.Model(inputs, make(inputs))
    model.compile("sgd", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    rng, shape = np.random.default_rng(0), [_ROWS, *inputs.shape[1:]]
    is_text = inputs.dtype == "int32"
    x = rng.integers(1, 4096, shape) if is_text else rng.normal(size=shape)
    x = x.astype(np.int32 if is_text else np.float32)
    y = rng.integers(0, model.output_shape[-1], _ROWS).astype(np.int32)
    losses = keras_losses.row_losses(model)
    weights = [tf.constant(variable.numpy()) for variable in model.trainable_variables]
    rows = tf.constant(x), tf.constant(y)

    def clipped(way, size):
        compiled = tf.function(way, autograph=False)
        splits = tf.range(0, _ROWS + 1, size, dtype=tf.int64)
        return lambda: compiled(weights, rows, splits, 1.0)

    runs = {"plain": lambda: model.train_on_batch(x, y)}
    for size, of_units in ((1, "ELS"), (8, "ULS, G = 8")):
        chosen = ghost.OfLosses(losses, size, report=lambda line: print(f"  {line}"))
        chosen.choose([weight.numpy() for weight in weights], rows)
        runs[of_units] = clipped(chosen, size)
        runs[f"loop, G = {size}"] = clipped(clipped_sums.looped(losses), size)
    return model, runs


def _print_ratios(runs: dict[str, Callable[[], None]], repeats: int, *, full: bool) -> None:
    """Runs them in turn and prints a line for each, with the goals if the rows are full."""
    wall, processor = collections.defaultdict(list), collections.defaultdict(list)
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            start, busy = time.perf_counter(), time.process_time()
            run()
            if repeat:  # The first calls trace and allocate.
                wall[name].append(time.perf_counter() - start)
                processor[name].append(time.process_time() - busy)
    plain = [name for name in runs if name.startswith("plain")]
    reference = min(plain, key=lambda name: np.median(processor[name]))
    for name in runs:
        ratios = [
            np.median(np.divide(seconds[reference], seconds[name])) for seconds in (wall, processor)
        ]
        milliseconds = 1e3 * np.median(wall[name])
        line = f"{name:<16}{milliseconds:>8.0f}{ratios[0]:>8.2f}{ratios[1]:>12.2f}"
        if full and name in _GOALS:
            outcome = "PASS" if ratios[1] >= _GOALS[name] else "FAIL"
            line += f"  {outcome}, goal {_GOALS[name]}"
        print(line, flush=True)


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _print_peak_memory(name: str, way: str, num_rows: int) -> None:
    """Megabytes beyond the imports: of this process, which must do nothing else."""
    model, length = _MODELS[name]
    rows, weights = _draw(model, length, num_rows), _weights(model)
    before = _peak()
    if way == "plain":
        _plain(model, rows)()
    else:
        size = _CHOSEN[way]
        add = clipped_sums.sum_in_chunks(
            ghost.fastest_clipped_sum(model, size), units_per_chunk=_ROWS // size
        )
        for _ in range(2):
            splits = np.arange(0, num_rows + 1, size)
            add(weights, lambda begin, end: tuple(x[begin:end] for x in rows), splits, 1.0)
    print(f"{_peak() - before:.0f}")


def main() -> None:
    """Prints a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--models", nargs="+", choices=_MODELS | _KERAS, default=list(_MODELS))
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--peak-memory-of", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak_memory_of:
        name, way, num_rows = args.peak_memory_of
        _print_peak_memory(name, way, int(num_rows))
        return
    for name in args.models:
        if name in _KERAS:
            model, runs = _keras_runs(name)
            print(
                f"{name}: {model.count_params() / 1e6:.2f}M weights, {_ROWS} rows\n"
                f"{'':<16}{'ms':>8}{'ratio':>8}{'processor':>12}"
            )
            _print_ratios(runs, args.repeats, full=False)
            continue
        model, length = _MODELS[name]
        rows = _draw(model, length, _ROWS)
        print(
            f"{name}: {model.num_parameters / 1e6:.2f}M weights, {_ROWS} rows, "
            f"{np.count_nonzero(rows[0]) / _ROWS:.0f} of {model.sequence_length} words each\n"
            f"{'':<16}{'ms':>8}{'ratio':>8}{'processor':>12}"
        )
        full = length == model.sequence_length
        runs = {"plain": _plain(model, rows)}
        if full:
            runs["plain, full"] = _plain(model, rows, full=True)
        runs |= {k: _clipped(model, rows, way, size) for k, (way, size) in _ways(model).items()}
        _print_ratios(runs, args.repeats, full=full)
        if args.no_memory:
            continue
        print(f"{'MB at rows':<16}{_ROWS:>8}{4 * _ROWS:>8}")
        for way in ("plain", *_CHOSEN):
            peaks = [
                subprocess.run(
                    [sys.executable, __file__, "--peak-memory-of", name, way, str(num_rows)],
                    capture_output=True,
                    text=True,
                    check=True,
                ).stdout.split()[-1]
                for num_rows in (_ROWS, 4 * _ROWS)
            ]
            print(f"{way:<16}{peaks[0]:>8}{peaks[1]:>8}", flush=True)


if __name__ == "__main__":
    main()
