"""What a strategy gains that knows the server's optimizer: `python experiments/workloads.py`.

The first table has the root mean square loss of the models, under the workload of an optimizer, of
strategies that are optimal for the prefix sums and for that workload. The second one checks by
training whether less noise in the models makes better models. Writes
experiments/results/workload_losses.csv and workload_training.csv; a quarter of an hour on one core.
"""

from __future__ import annotations

import argparse
import csv
import functools
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from tff_dpftrl.accounting import calibrate
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.mechanisms import table
from tff_dpftrl.mechanisms import workload as workload_lib
from tff_dpftrl.participation import schema as schema_lib

_RESULTS = pathlib.Path(__file__).resolve().parent / "results"
WORKLOADS = (
    "momentum=0.9",
    "momentum=0.95",
    "decay=cosine",
    "momentum=0.9,warmup=10,decay=cosine",
    "averaging=0.95",
    "momentum=0.9,averaging=0.95",
)
_SCHEMAS = ((1000, 100), (500, 25), (200, 200))
_NAMES = {
    "blt": "BLT",
    "bandtoep": "banded Toeplitz",
    "bandmf": "BandMF",
    "bifr": "γ-BIFR",
    "bandinv": "banded inverse",
}

_TRAINED, _HELD_OUT, _FEATURES, _HIDDEN, _CLASSES = 2000, 4000, 20, 32, 10
_BATCH, _STEPS = 100, 200
_DELTA = 1e-5
_EPSILONS = (2.0, 8.0)
_RATES = (0.02, 0.05, 0.1, 0.2, 0.4)
_SEEDS = tuple(range(20))
_TRAINED_WORKLOADS = (WORKLOADS[0], WORKLOADS[3], WORKLOADS[5])

Weights = list[np.ndarray]


@functools.cache
def _for_prefix_sums(name: str, schema: schema_lib.MinSep) -> strategy_lib.Strategy:
    return table.build(name, schema, table.Options("rms"))


def losses(schema: schema_lib.MinSep, text: str) -> dict[str, object]:
    """Returns a row: losses of the optimum for the prefix sums and of that for the workload."""
    workload = workload_lib.parse(text).workload(schema.num_rounds)
    row: dict[str, object] = {
        "rounds": schema.num_rounds,
        "stride": schema.min_sep,
        "workload": text,
    }
    for name in _NAMES:
        best = table.build(name, schema, table.Options("rms", workload=workload))
        before, after = (
            one.rms_loss(schema, workload) for one in (_for_prefix_sums(name, schema), best)
        )
        row[_NAMES[name]] = f"{before:.4g} → {after:.4g} ({100 * (after / before - 1):.1f} %)"
    return row


def data() -> tuple[np.ndarray, np.ndarray]:
    """Makes the examples of `keras_passes.py`: features, and the class that is to be learned."""
    rng = np.random.default_rng(2021)
    hidden = rng.normal(size=[_FEATURES, 32]) / _FEATURES**0.5
    last = rng.normal(size=[32, _CLASSES])
    features = rng.normal(size=[_TRAINED + _HELD_OUT, _FEATURES])
    return features, np.argmax(np.tanh(2.0 * features @ hidden) @ last, axis=1)


def _forward(weights: Weights, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    hidden = np.tanh(x @ weights[0] + weights[1])
    return hidden, hidden @ weights[2] + weights[3]


def _clipped_sums(weights: Weights, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Sums the gradients of a batch's examples, each clipped to norm 1; shape [seeds, weights]."""
    hidden, logits = _forward(weights, x)
    shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
    by_logits = shares / shares.sum(axis=-1, keepdims=True) - np.eye(_CLASSES)[y]
    by_hidden = by_logits @ np.swapaxes(weights[2], 1, 2) * (1.0 - hidden**2)
    # An example's gradient is an outer product in each layer.
    squares = (np.sum(hidden**2, axis=-1) + 1.0) * np.sum(by_logits**2, axis=-1)
    squares += (np.sum(x**2, axis=-1) + 1.0) * np.sum(by_hidden**2, axis=-1)
    factors = np.minimum(1.0, 1.0 / np.sqrt(squares))[..., np.newaxis]
    by_logits, by_hidden = factors * by_logits, factors * by_hidden
    parts = (
        x.T @ by_hidden,
        by_hidden.sum(axis=1),
        np.swapaxes(hidden, 1, 2) @ by_logits,
        by_logits.sum(axis=1),
    )
    return np.concatenate([part.reshape(len(hidden), -1) for part in parts], axis=1)


def accuracies(
    noise_matrix: np.ndarray, noise_multiplier: float, rule: workload_lib.UpdateRule, rate: float
) -> np.ndarray:
    """Trains in passes, one model a seed, and measures the models that the rule keeps.

    Args:
      noise_matrix: C⁻¹, shape [steps, steps].
      noise_multiplier: Standard deviation of the draws.
      rule: Momentum, schedule and average of the server.
      rate: Full learning rate.

    Returns:
      The shares of held-out examples that are classified rightly, shape [seeds].
    """
    x, y = data()
    shapes = [(_FEATURES, _HIDDEN), (1, _HIDDEN), (_HIDDEN, _CLASSES), (1, _CLASSES)]
    sizes = [rows * columns for rows, columns in shapes]
    models, draws = [], []
    for seed in _SEEDS:  # Initial weights and draws are the same for all strategies.
        rng = np.random.default_rng(seed)
        parts = [rng.normal(size=size) for size in sizes]
        scales = (_FEATURES**-0.5, 0.0, _HIDDEN**-0.5, 0.0)
        models.append(np.concatenate([a * part for a, part in zip(scales, parts, strict=True)]))
        draws.append(rng.normal(size=(_STEPS, sum(sizes))))
    model, noise = np.array(models), noise_multiplier * noise_matrix @ np.array(draws)

    def tensors(flat: np.ndarray) -> Weights:
        parts = np.split(flat, np.cumsum(sizes)[:-1], axis=1)
        return [part.reshape(len(flat), *s) for part, s in zip(parts, shapes, strict=True)]

    velocity, kept, share = np.zeros_like(model), np.zeros_like(model), 0.0
    for step, factor in enumerate(rule.rates(_STEPS)):
        rows = (step * _BATCH + np.arange(_BATCH)) % _TRAINED
        update = (_clipped_sums(tensors(model), x[rows], y[rows]) + noise[:, step]) / _BATCH
        velocity = rule.momentum * velocity + update
        model = model - rate * factor * velocity
        decay = rule.averaging or 0.0
        kept, share = decay * kept + (1 - decay) * model, decay * share + (1 - decay)
    _, logits = _forward(tensors(kept / share), x[_TRAINED:])
    return np.mean(np.argmax(logits, axis=-1) == y[_TRAINED:], axis=1)


def trained(mechanism: str, text: str, epsilon: float) -> dict[str, object]:
    """Returns a row: accuracies with the two strategies at one ε, each at its best rate."""
    schema = schema_lib.MinSep.as_many_as_fit(_STEPS, _TRAINED // _BATCH)
    rule = workload_lib.parse(text)
    workload = rule.workload(_STEPS)
    found: dict[str, Mapping[float, np.ndarray]] = {}
    noise = {}
    for label, options in (
        ("prefix", table.Options("rms")),
        ("auto", table.Options("rms", workload=workload)),
    ):
        strategy = table.build(mechanism, schema, options)
        noise[label] = strategy.rms_loss(schema, workload)
        found[label] = _by_rate(strategy, schema, rule, epsilon)
    # One rate for both, the best of the strategy for prefix sums: it is not what is compared.
    rate = max(_RATES, key=lambda rate: found["prefix"][rate].mean())
    before, after = found["prefix"][rate], found["auto"][rate]
    gain = after - before
    error = gain.std(ddof=1) / np.sqrt(len(gain))
    return {
        "mechanism": _NAMES[mechanism],
        "workload": text,
        "ε": f"{epsilon:g}",
        "learning rate": f"{rate:g}",
        "noise of the models": f"{100 * (noise['auto'] / noise['prefix'] - 1):.1f} %",
        "accuracy, prefix": f"{100 * before.mean():.2f} %",
        "accuracy, auto": f"{100 * after.mean():.2f} %",
        "gain in points": f"{100 * gain.mean():.2f} ± {100 * error:.2f}",
        "of the first three seeds": f"{100 * gain[:3].mean():.2f}",
    }


def _by_rate(
    strategy: strategy_lib.Strategy,
    schema: schema_lib.MinSep,
    rule: workload_lib.UpdateRule,
    epsilon: float,
) -> dict[float, np.ndarray]:
    multiplier = calibrate.calibrate_noise_multiplier(
        strategy, schema, target_epsilon=epsilon, delta=_DELTA
    )
    matrix = strategy.noise_matrix(_STEPS)
    return {rate: accuracies(matrix, multiplier, rule, rate) for rate in _RATES}


def _write(name: str, rows: Sequence[Mapping[str, object]]) -> None:
    _RESULTS.mkdir(parents=True, exist_ok=True)
    with open(_RESULTS / f"{name}.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(name)


def main(arguments: Sequence[str] | None = None) -> None:
    """Computes and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("losses", "training"), help="One of the two tables.")
    args = parser.parse_args(arguments)
    if args.only != "training":
        rows = []
        for num_rounds, min_sep in _SCHEMAS:
            schema = schema_lib.MinSep.as_many_as_fit(num_rounds, min_sep)
            for text in WORKLOADS:
                rows.append(losses(schema, text))
                print(rows[-1], flush=True)
        _write("workload_losses", rows)
    if args.only != "losses":
        rows = []
        for epsilon in _EPSILONS:
            for text in _TRAINED_WORKLOADS:
                for mechanism in ("blt", "bandtoep"):
                    rows.append(trained(mechanism, text, epsilon))
                    print(rows[-1], flush=True)
        _write("workload_training", rows)


if __name__ == "__main__":
    main()
