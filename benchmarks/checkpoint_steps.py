"""Seconds and memory of a private step at the sizes of checkpoints, with random weights.

    PYTHONPATH=. python benchmarks/checkpoint_steps.py [--shapes gpt2 llama-135m llama-360m]
        [--ranks 0 8] [--pieces 8 2] [--steps 3] [--examples 8] [--length 64]
        [--compute-dtype bfloat16] [--gradient-checkpointing]

A step is that of `finetune --sampling example`: 8 examples of 64 random tokens, their norms, the
clipped sum, noise, and Adam. Rank 0 trains all weights; others low-rank adapters. A batch is added
up in pieces (`--examples-at-once`). Each row is a process of its own. Seconds are of the processor,
of all cores together, and by the clock, medians over the steps after the first one; memory is the
largest resident set. A plain step, without clipping and noise, is measured beside, and alone with
`--pieces 0`.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

_SHAPES = {
    "gpt2": {
        "model": "gpt2",
        "vocabulary_size": 50_258,
        "embedding_size": 768,
        "num_layers": 12,
        "num_heads": 12,
        "feed_forward_size": 3_072,
        "num_positions": 1_024,
    },
    "llama-135m": {
        "model": "llama",
        "vocabulary_size": 49_153,
        "embedding_size": 576,
        "num_layers": 30,
        "num_heads": 9,
        "num_key_value_heads": 3,
        "feed_forward_size": 1_536,
    },
    "llama-360m": {
        "model": "llama",
        "vocabulary_size": 49_153,
        "embedding_size": 960,
        "num_layers": 32,
        "num_heads": 15,
        "num_key_value_heads": 5,
        "feed_forward_size": 2_560,
    },
}


def main() -> None:
    """Measures each combination in a process of its own, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=_SHAPES, default=["gpt2", "llama-135m"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[0, 8])
    parser.add_argument("--pieces", nargs="+", type=int, default=[8, 2])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--examples", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--compute-dtype", default="float32")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        return _measure(**json.loads(args.one))
    print("| shape | weights | trained | way | processor, s | clock, s | memory, GB |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for shape in args.shapes:
        for rank in args.ranks:
            for piece in dict.fromkeys([*args.pieces, 0]):
                names = ("steps", "examples", "length", "compute_dtype", "gradient_checkpointing")
                common = {name: getattr(args, name) for name in names}
                one = json.dumps({"shape": shape, "rank": rank, "piece": piece, **common})
                command = [sys.executable, __file__, "--one", one]
                done = subprocess.run(command, capture_output=True, text=True)
                said = done.stdout.strip() or done.stderr.strip().splitlines()[-1]
                print(said, flush=True)
    return None


def _measure(
    shape: str, rank: int, piece: int, steps: int, examples: int, length: int, **options
) -> None:
    import numpy as np

    from tff_dpftrl.models import low_rank, table

    whole = model = table.from_description({**_SHAPES[shape], "sequence_length": length})
    rng = np.random.default_rng(0)
    weights = [
        rng.standard_normal(size, np.float32) * 0.02
        if len(size) > 1
        else np.full(size, float(name.endswith("scale")), np.float32)
        for name, size in model.weight_shapes.items()
    ]
    if rank:
        model = low_rank.LowRank(whole, weights, rank)
        weights = list(model.initial_weights(0))
    ids = rng.integers(1, whole.vocabulary_size, [examples, length + 1], dtype=np.int32)
    step = (_private if piece else _plain)(model, weights, ids, piece, **options)
    del weights
    seconds = [_timed(step) for _ in range(steps + 1)][1:]
    processor, clock = (statistics.median(values) for values in zip(*seconds, strict=True))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    way = f"private, {piece} at once" if piece else "plain"
    way += ", bfloat16" if options["compute_dtype"] == "bfloat16" else ""
    way += ", recomputed" if options["gradient_checkpointing"] else ""
    trained = f"rank {rank}" if rank else "all"
    millions = f"{whole.num_parameters / 1e6:.0f}M"
    print(
        f"| {shape} | {millions} | {trained}, {model.num_parameters / 1e6:.1f}M | {way} | "
        f"{processor:.1f} | {clock:.1f} | {memory:.1f} |"
    )


def _timed(step: Callable[[], None]) -> tuple[float, float]:
    begun = time.process_time(), time.perf_counter()
    step()
    return time.process_time() - begun[0], time.perf_counter() - begun[1]


def _private(
    model, weights, ids, piece, compute_dtype, gradient_checkpointing
) -> Callable[[], None]:
    import numpy as np
    import tensorflow as tf

    from tff_dpftrl.finetuning import example_sampling, ghost, private_steps
    from tff_dpftrl.finetuning import plan as plan_lib
    from tff_dpftrl.mechanisms import identity

    users = example_sampling.Users(tuple(map(str, range(1_000))), np.ones(1_000, np.int64))
    plan = plan_lib.make_plan(
        users,
        sampling="example",
        group_size=1,
        expected_units=len(ids),
        num_steps=100,
        noise_multiplier=1.0,
        delta=1e-5,
    )
    private = plan.of_run(clip_norm=1.0, deterministic_seed=None)
    steps = private_steps.PrivateSteps(
        private_steps.round_of(private, identity.Identity()),
        ghost.fastest_clipped_sum(
            model, 1, compute_dtype=compute_dtype, recompute=gradient_checkpointing
        ),
        tf.keras.optimizers.Adam(1e-5),
        weights,
        units_at_once=piece,
    )
    state = steps.initial_state()

    def step() -> None:
        nonlocal state
        state, _ = steps.step(
            state,
            np.arange(len(ids) + 1),
            lambda begin, end: (ids[begin:end, :-1], ids[begin:end, 1:]),
        )

    return step


def _plain(model, weights, ids, _, compute_dtype, gradient_checkpointing) -> Callable[[], None]:
    import tensorflow as tf

    from tff_dpftrl.finetuning import clipped_sums

    recompute = {"recompute": True} if gradient_checkpointing else {}
    row_losses = clipped_sums.language_rows(model, compute_dtype, **recompute)
    variables = [tf.Variable(weight) for weight in weights]
    optimizer = tf.keras.optimizers.Adam(1e-5)
    optimizer.build(variables)

    @tf.function(autograph=False)
    def gradient():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(row_losses(variables, (ids[:, :-1], ids[:, 1:])))
        return tape.gradient(loss, variables)

    def step() -> None:
        optimizer.apply_gradients(zip(gradient(), variables, strict=True))

    return step


if __name__ == "__main__":
    main()
