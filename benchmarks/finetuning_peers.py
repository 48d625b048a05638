"""Cost of clipped gradients, one a row, beside Opacus, jax_privacy and plain gradients.

    PYTHONPATH=. python benchmarks/finetuning_peers.py --opacus PYTHON --jax-privacy PYTHON
        [--models transformer ...] [--rounds 9] [--json FILE]

All compute the sum of the clipped gradients of the same 64 rows of random words, with the same
weights, in float32, or the plain gradient of their mean loss. It is checked first that they do.
The clip norm is the median of the rows' norms, so that half of them are clipped. Nobody adds noise
or takes a step. The environments are those of benchmarks/peers/README.md, which also says what is
to whose advantage. `interleaving.py` says what the ratios are.

"gpt2-small" is measured where it is named: the shapes of GPT-2 small with two embeddings, 8 rows,
the clip norm 1. What forms the gradients of all rows is left out there.
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

_MOST_COMPARED = 10_000_000
"""Numbers of a gradient that are compared, evenly chosen."""

_NUM_ROWS = {"gpt2-small": 8, "transformer": 64, "word-lstm": 64}
_SIZES = {
    "gpt2-small": {
        "vocabulary_size": 50_257,
        "sequence_length": 64,
        "embedding_size": 768,
        "num_layers": 12,
        "num_heads": 12,
        "feed_forward_size": 3_072,
    },
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
    is_large = name == "gpt2-small"
    kind, num_rows = "transformer" if is_large else name, _NUM_ROWS[name]
    model = ours.MODELS[kind](**_SIZES[name])
    size = [num_rows, model.sequence_length + 1]
    rows = np.random.default_rng(0).integers(1, model.vocabulary_size, size, dtype=np.int32)
    weights = dict(zip(model.weight_shapes, model.initial_weights(0), strict=True))
    clip_norm = 1.0
    if not is_large:
        pair = tuple(tf.constant(np.ascontiguousarray(x)) for x in (rows[:, :-1], rows[:, 1:]))
        clipped_sum = ghost.fastest_clipped_sum(model, 1)
        _, units = clipped_sum(list(weights.values()), pair, tf.range(num_rows + 1), clip_norm)
        clip_norm = float(np.median(units.norms))
    return workload_lib.Gradients(kind, _SIZES[name], rows, weights, clip_norm, is_large)


def _check(children: dict[str, interleaving.Child], ways: dict[str, tuple[str, int]]) -> None:
    """Compares the gradients of all ways; raises RuntimeError if one differs."""
    own = {}  # Of the plain gradient and of the clipped ones; the first ones are ours.
    for name, (child, index) in ways.items():
        children[child].run_round(index)
        gradient = [x.ravel() for x in children[child].weights()]
        every = 1 + sum(x.size for x in gradient) // _MOST_COMPARED
        gradient = np.concatenate([x[::every] for x in gradient])
        kind = "plain" if name.endswith("plain") else "clipped"
        first = own.setdefault(kind, gradient)
        difference = np.linalg.norm(gradient - first) / np.linalg.norm(first)
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
    title = f"{name}: {parameters / 1e6:.2f}M weights, {_NUM_ROWS[name]} rows of {length} words"
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
    small = [name for name in _SIZES if name != "gpt2-small"]
    parser.add_argument("--models", nargs="+", choices=_SIZES, default=small)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", metavar="FILE", help="where `figures.py` reads the ratios")
    args = parser.parse_args()
    tables = [measure(args, name) for name in args.models]
    if args.json:
        figures.record(args.json, tables)


if __name__ == "__main__":
    main()
