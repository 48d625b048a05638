"""Cost of clipped gradients, one a row, beside Opacus, jax_privacy and plain gradients.

    PYTHONPATH=. python benchmarks/finetuning_peers.py --opacus PYTHON --jax-privacy PYTHON
        [--models transformer ...] [--rounds 9] [--json FILE]

All compute the sum of the clipped gradients of the same 64 rows of random words, with the same
weights, in float32, or the plain gradient of their mean loss. It is checked first that they do.
The clip norm is the median of the rows' norms, so that half of them are clipped. Nobody adds noise
or takes a step. The environments are those of benchmarks/peers/README.md, which also says what is
to whose advantage. `interleaving.py` says what the ratios are.
"""

from __future__ import annotations

import argparse
import collections
from typing import Any

import figures
import interleaving
import numpy as np
import tensorflow as tf
import tff_dpftrl_gradients as ours  # Whose folder `interleaving` adds.
import workload as workload_lib

from tff_dpftrl.finetuning import ghost

_NUM_ROWS = 64
_SIZES = {
    "transformer": {
        "vocabulary_size": 4096,
        "sequence_length": 64,
        "embedding_size": 128,
        "num_layers": 4,
        "num_heads": 4,
        "feed_forward_size": 512,
    },
    "word-lstm": {
        "vocabulary_size": 4096,
        "sequence_length": 20,
        "embedding_size": 96,
        "state_size": 256,
        "tie_embeddings": False,
    },
}


def workload(name: str) -> workload_lib.Gradients:
    """Draws rows and weights, and finds the median of the norms."""
    model = ours.MODELS[name](**_SIZES[name])
    size = [_NUM_ROWS, model.sequence_length + 1]
    rows = np.random.default_rng(0).integers(1, model.vocabulary_size, size, dtype=np.int32)
    weights = dict(zip(model.weight_shapes, model.initial_weights(0), strict=True))
    pair = tuple(tf.constant(np.ascontiguousarray(x)) for x in (rows[:, :-1], rows[:, 1:]))
    clipped_sum = ghost.fastest_clipped_sum(model, 1)
    _, units = clipped_sum(list(weights.values()), pair, tf.range(_NUM_ROWS + 1), 1.0)
    return workload_lib.Gradients(name, _SIZES[name], rows, weights, float(np.median(units.norms)))


def _check(children: dict[str, interleaving.Child], ways: dict[str, tuple[str, int]]) -> None:
    """Compares the gradients of all ways; raises RuntimeError if one differs."""
    found = {}
    for name, (child, index) in ways.items():
        children[child].run_round(index)
        found[name] = np.concatenate([x.ravel() for x in children[child].weights()])
    for name, gradient in found.items():
        own = found["tff_dpftrl, plain" if name.endswith("plain") else "tff_dpftrl"]
        difference = np.linalg.norm(gradient - own) / np.linalg.norm(own)
        print(f"{name:<44}differs by {difference:.1e}{interleaving.verdict(difference, 1e-4)}")
        if not difference <= 1e-4:
            raise RuntimeError(f"{name} computes something else.")


def measure(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Checks and compares one model; returns the table."""
    commands = {"ours": interleaving.Command("tff_dpftrl_gradients.py")}
    if args.opacus:
        commands["Opacus"] = interleaving.Command("opacus_gradients.py", python=args.opacus)
    if args.jax_privacy:
        commands["jax_privacy"] = interleaving.Command(
            "jax_privacy_gradients.py", python=args.jax_privacy
        )
    work = workload(name)
    parameters = sum(w.size for w in work.weights.values())
    length = work.sizes["sequence_length"]
    title = f"{name}: {parameters / 1e6:.2f}M weights, {_NUM_ROWS} rows of {length} words"
    facts = collections.defaultdict(dict)
    with interleaving.started(work, commands) as children:
        ways = {}
        for key, child in children.items():
            ways |= {way: (key, index) for index, way in enumerate(child.facts["ways"])}
            for kind in ("speeds", "versions"):
                facts[kind] |= child.facts[kind]
        speeds = f"GFLOP a core second of {workload_lib.PRODUCTS}: {facts['speeds']}"
        print(f"\n{title}; {speeds}", flush=True)
        _check(children, ways)

        def contender(key, index):
            run = children[key].run_round
            return interleaving.Contender(lambda _: run(index), children[key].pid)

        contenders = {way: contender(*place) for way, place in ways.items()}
        times = interleaving.take_turns(contenders, args.rounds, num_warm_up=1)
    plain = {way for way in ways if way.endswith("plain")}
    comparisons = [
        interleaving.Comparison(way, next(p for p in plain if ways[p][0] == key))
        for way, (key, _) in ways.items()
        if way not in plain
    ] + [interleaving.Comparison("tff_dpftrl", way) for way in ways if ways[way][0] != "ours"]
    table = interleaving.print_table(title, times, comparisons, facts["versions"])
    return {**table, "GFLOP a core second": facts["speeds"]}


def main() -> None:
    """Prints a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--opacus", metavar="PYTHON", help="Python with Opacus")
    parser.add_argument("--jax-privacy", metavar="PYTHON", help="Python with jax_privacy")
    parser.add_argument("--models", nargs="+", choices=_SIZES, default=list(_SIZES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", metavar="FILE", help="where `figures.py` reads the ratios")
    args = parser.parse_args()
    tables = [measure(args, name) for name in args.models]
    if args.json:
        figures.record(args.json, tables)


if __name__ == "__main__":
    main()
