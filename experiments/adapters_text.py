"""Low-rank adapters beside all weights, and words beside sub-words, at equal ε and compute.

    python experiments/adapters_text.py --data users.jsonl.gz --words results/words \
        --wordpiece results/wordpiece

fine-tunes each pretrained model as `finetuning_text.py` does, with what is trained as one more
axis, and appends a row to experiments/results/finetuning_adapters_seeds.csv when a run is done.
Runs that have their row are left out. Then means and standard errors go to
experiments/results/finetuning_adapters.csv. The learning rates, one for all weights and one for
adapters, are those of least loss with ULS, words and a seed of its own, which the rows have too:
the table has the other seeds.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import pathlib
import sys
import types
from collections.abc import Iterator, Mapping, Sequence

import finetuning_text
import numpy as np
from finetuning_text import ELS, NONE, PASSES, ULS, Cell, read

from tff_dpftrl.finetuning import config as config_lib
from tff_dpftrl.finetuning import proxies, trained_part
from tff_dpftrl.training import trained_model

_RESULTS = pathlib.Path(__file__).resolve().parent / "results"
_SEEDS, _TUNING_SEED = (0, 1, 2), 9
_EPSILON, _BUDGET, _STEPS, _HELD_OUT = 4.0, 64, 30, 1500
RATES = {None: (4e-3, 1.2e-2), 8: (4e-3, 1.2e-2)}
"""Learning rates that are tried, by the rank of the adapters, None for all weights."""


class Corpus(finetuning_text.Corpus):
    """Users and a pretrained model, a part of which is trained.

    Attributes:
      measured: Metrics of the last model that was evaluated.
    """

    def __init__(self, data: str, initial_weights: str):
        super().__init__(_STEPS, data=data, initial_weights=initial_weights)
        self._initial = trained_model.find(pathlib.Path(initial_weights)).load()
        self._whole = dataclasses.replace(
            self.task,
            held_out=self.task.held_out[:_HELD_OUT],
            held_out_users=self.task.held_out_users[:_HELD_OUT],
        )
        self._rate, self.measured = 0.0, {}
        self._sums_of: dict[int | None, dict] = {}
        self._known: dict[int | None, proxies.Proxies] = {None: self.proxies}

    def _config(self, **options: object) -> config_lib.FinetuningConfig:
        config = super()._config(**options)
        rate = getattr(self, "_rate", 0.0)
        return dataclasses.replace(config, learning_rate=rate) if rate else config

    def train(self, rank: int | None, rate: float) -> None:
        """Has the next rows train adapters, or all weights if the rank is None, at a rate."""
        part = trained_part.TrainedPart.of(self._initial, rank, seed=0)
        self.model, self.weights, self._rate = part.model, part.weights, rate
        self._sums = self._sums_of.setdefault(rank, {})  # Traced once for each rank.
        if rank not in self._known:
            self._known[rank] = proxies.measure(
                self.kept, part.model, part.weights, largest_group=8, seed=0, source="test"
            )
        self.proxies = self._known[rank]

        def evaluate(weights: Sequence[np.ndarray]) -> Mapping[str, float]:
            self.measured = self._whole.evaluate(part.whole(weights))
            return self.measured

        self.task = types.SimpleNamespace(train=self._whole.train, evaluate=evaluate)

    @functools.cached_property
    def before(self) -> Mapping[str, float]:
        """Metrics of the pretrained model."""
        return self._whole.evaluate(self._initial.weights)


def named(kind: str, rank: int | None, rate: float, cell: Cell) -> dict[str, str]:
    """Returns the columns that tell runs from each other."""
    return {
        "tokenizer": kind,
        "trained": "all weights" if rank is None else f"rank {rank}",
        "rate": f"{rate:g}",
        **finetuning_text.key(cell),
    }


def best_rate(rows: Sequence[Mapping[str, str]], rank: int | None) -> float:
    """Returns the learning rate of least loss: for all weights, or for adapters of any rank."""
    tried = [
        (float(row["loss"]), float(row["rate"]))
        for row in rows
        if row["seed"] == str(_TUNING_SEED) and (row["trained"] == "all weights") == (rank is None)
    ]
    return min(tried)[1]


def run(path: pathlib.Path, data: str, pretrained: Mapping[str, str]) -> None:
    """Runs what is left.

    Args:
      path: File of the rows.
      data: File of the users.
      pretrained: Folder of the pretrained model of each tokenizer.
    """

    @functools.cache
    def corpus(kind: str) -> Corpus:
        return Corpus(data, pretrained[kind])

    def ensure(kind: str, rank: int | None, rate: float, cell: Cell) -> None:
        name = named(kind, rank, rate, cell)
        if any(name.items() <= row.items() for row in read(path)):
            return
        found = corpus(kind)
        found.train(rank, rate)
        row = name | found.row(cell)
        bits, before = (m["bits_per_character"] for m in (found.measured, found.before))
        row |= {"bits": f"{bits:.5g}", "bits before": f"{before:.5g}"}
        finetuning_text.append(path, row)
        print(*row.values(), flush=True)

    for rank, rates in RATES.items():
        for rate in rates:
            ensure("words", rank, rate, Cell(ULS, _EPSILON, _BUDGET, seed=_TUNING_SEED))
    for rank, cell in cells():
        for kind in pretrained:
            ensure(kind, rank, best_rate(read(path), rank), cell)


def cells() -> Iterator[tuple[int | None, Cell]]:
    """Yields the runs with a model, rank and cell, seed after seed."""
    for seed in _SEEDS:
        for rank in (None, 8):
            for method in (ULS, ELS, PASSES):
                yield rank, Cell(method, _EPSILON, _BUDGET, seed=seed)
    for seed in _SEEDS:
        yield 4, Cell(ULS, _EPSILON, _BUDGET, seed=seed)
    for rank in (None, 8):  # Without noise seeds differ in the samples only.
        yield rank, Cell(NONE, math.inf, _BUDGET, seed=0)


def summary(rows: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Returns the table: means over seeds, with standard errors."""
    settings: dict[tuple[str, ...], list[Mapping[str, str]]] = {}
    for row in rows:
        if row["seed"] != str(_TUNING_SEED):
            setting = tuple(row[name] for name in ("tokenizer", "trained", "method", "ε", "rate"))
            settings.setdefault(setting, []).append(row)
    made = []
    for setting, found in sorted(settings.items(), key=lambda item: item[0][0], reverse=True):
        kind, trained, method, epsilon, rate = setting

        def mean(values: Sequence[float]) -> str:
            if len(values) == 1:
                return f"{values[0]:.3f}"
            error = np.std(values, ddof=1) / len(values) ** 0.5
            return f"{np.mean(values):.3f} ± {error:.3f}"

        bits = [float(row["bits"]) for row in found]
        made.append(
            {
                "tokenizer": kind,
                "trained": trained,
                "method": method,
                "ε": epsilon,
                "learning rate": rate,
                "seeds": str(len(found)),
                "loss": mean([float(row["loss"]) for row in found]),
                "bits per character": mean(bits),
                "perplexity per character": mean([2**value for value in bits]),
                "gain on the pretrained, bits": mean(
                    [float(row["bits before"]) - float(row["bits"]) for row in found]
                ),
            }
        )
    return made


def main() -> None:
    """Runs what is left, and writes the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="users who are fine-tuned on")
    kinds = ("words", "wordpiece")
    for kind in kinds:
        parser.add_argument(f"--{kind}", help=f"folder of a pretrained model of {kind}")
    args = parser.parse_args()
    path = _RESULTS / "finetuning_adapters_seeds.csv"
    if args.data is not None:
        run(path, args.data, {kind: getattr(args, kind) for kind in kinds})
    made = summary(read(path))
    finetuning_text.write(_RESULTS / "finetuning_adapters.csv", made)
    print(_RESULTS / "finetuning_adapters.csv", file=sys.stderr)


if __name__ == "__main__":
    main()
