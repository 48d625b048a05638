"""Cost of a round of aggregation, as ratios to TFF's Gaussian aggregator.

    python benchmarks/aggregators.py [--sizes 0.1 4 25] [--rounds 9] [--clients 4]
        [--no-memory]

For each model size, in millions of float32 parameters, one line an aggregator:
seconds a round (median), their ratio to TFF's Gaussian (median over the rounds of
the ratio within a round, so that a busy machine disturbs it little), the state
that is kept between rounds in copies of the model, and the growth of the resident
memory of Python and of TFF's worker over those rounds when run alone.

A round makes the clients' updates inside TensorFlow, aggregates them, and adds the
result to model weights that are part of the state: what a learning process does,
without the clients' training. Our aggregators start in mid-run: a tree and an
inverse-banded matrix draw less noise in their first rounds.
"""

from __future__ import annotations

import argparse
import collections
import gc
import os
import subprocess
import sys
import tempfile
import time

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl import aggregators
from tff_dpftrl.mechanisms import blt, identity, inverse_banded, tree

_REFERENCE = "TFF Gaussian"
_NUM_ROUNDS_PLANNED = 2000
_ROUND = 777
_DECAY = (0.9999999999921251, 0.9944453083640997, 0.8985923474607591, 0.4912001418098778, 0.2)
_SCALE = (0.0070314825502323835, 0.10613806907600574, 0.1898159060327625, 0.1966594748, 0.05)


def _blt(num_buffers: int) -> blt.Blt:
    return blt.Blt(_DECAY[:num_buffers], _SCALE[:num_buffers])


def _tff_tree(name: str, clients: int, specs) -> tff.aggregators.UnweightedAggregationFactory:
    dp = tff.aggregators.DifferentiallyPrivateFactory
    if name == "TFF tree":
        return dp.tree_aggregation(
            noise_multiplier=1.0, clients_per_round=clients, l2_norm_clip=1.0, record_specs=specs
        )
    return dp.tree_adaptive(
        noise_multiplier=1.0,
        clients_per_round=clients,
        record_specs=specs,
        initial_l2_norm_clip=1.0,
        clipped_count_stddev=1.0,
    )


def _factories(clients: int, specs):
    """Functions that build the aggregators, by name, in the order of the table."""
    ours = {
        "identity": identity.Identity(),
        **{f"BLT d={d}": _blt(d) for d in range(1, 6)},
        "tree": tree.Tree(_NUM_ROUNDS_PLANNED),
        "vanilla tree": tree.Tree(_NUM_ROUNDS_PLANNED, variance_reduction=False),
        "BISR p=16": inverse_banded.InverseBanded.bisr(16),
    }

    def fixed(strategy):
        return lambda: aggregators.build_dp_ftrl_aggregator(
            strategy, noise_multiplier=1.0, clip_norm=1.0, clients_per_round=clients
        )

    def adaptive():
        return aggregators.build_adaptive_dp_ftrl_aggregator(
            _blt(4),
            noise_multiplier=1.0,
            clients_per_round=clients,
            clipping=aggregators.AdaptiveClipping(
                initial_clip_norm=1.0, clipped_count_stddev=1.0, only_estimates=True
            ),
        )

    gaussian = tff.aggregators.DifferentiallyPrivateFactory.gaussian_fixed
    factories = {
        "no noise": tff.aggregators.UnweightedMeanFactory,
        _REFERENCE: lambda: gaussian(1.0, clients, 1.0),
        "TFF tree": lambda: _tff_tree("TFF tree", clients, specs),
        "TFF tree_adaptive": lambda: _tff_tree("TFF tree_adaptive", clients, specs),
    }
    factories |= {name: fixed(strategy) for name, strategy in ours.items()}
    factories["adaptive BLT d=4"] = adaptive
    return factories


def _build_round(factory, specs):
    """Returns (initialize, next) of a process that aggregates and updates weights."""
    value_type = tff.to_type([tff.TensorType(np.float32, spec.shape.as_list()) for spec in specs])
    process = factory.create(value_type)

    @tff.tensorflow.computation
    def zeros():
        return [tf.zeros(spec.shape) for spec in specs]

    @tff.tensorflow.computation(np.int32)
    def update(client):
        scale = tf.cast(client + 1, tf.float32) * 1e-4
        return [tf.fill(spec.shape, scale) for spec in specs]

    @tff.tensorflow.computation(value_type, value_type)
    def apply(weights, mean):
        return [w + g for w, g in zip(weights, mean, strict=True)]

    @tff.federated_computation
    def initialize():
        weights = tff.federated_eval(zeros, tff.SERVER)
        return tff.federated_zip((weights, process.initialize()))

    @tff.federated_computation(
        initialize.type_signature.result, tff.FederatedType(np.int32, tff.CLIENTS)
    )
    def next_fn(state, clients):
        weights, aggregator_state = state
        output = process.next(aggregator_state, tff.federated_map(update, clients))
        weights = tff.federated_map(apply, (weights, output.result))
        return tff.federated_zip((weights, output.state))

    return initialize, next_fn


def _in_mid_run(state):
    """The state with our aggregators in a round whose noise needs a usual number of draws."""
    weights, aggregator_state = state
    if hasattr(aggregator_state, "round_index"):
        aggregator_state = aggregator_state._replace(round_index=np.int64(_ROUND))
    return weights, aggregator_state


def _specs(millions: float) -> list[tf.TensorSpec]:
    """Four matrices and a bias, like a small language model."""
    rows = max(1, round(millions * 1e6 / 4 / 512))
    return [tf.TensorSpec([rows, 512], tf.float32)] * 4 + [tf.TensorSpec([512], tf.float32)]


def _num_bytes(structure) -> int:
    return sum(np.asarray(leaf).nbytes for leaf in tf.nest.flatten(structure))


def _resident_megabytes() -> float:
    """Peak resident memory of this process and its children, so far."""
    total = 0.0
    children = [os.getpid()]
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/stat") as file:
                if int(file.read().rsplit(")", 1)[1].split()[1]) == os.getpid():
                    children.append(int(entry))
        except OSError:
            continue  # It ended meanwhile.
    for pid in children:
        with open(f"/proc/{pid}/status") as file:
            total += next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))
    return total / 1024


def _measure_memory(millions: float, clients: int, name: str, output: str) -> None:
    """Writes the growth of peak memory over three rounds, in MB, to the file `output`."""
    specs = _specs(millions)
    tff.tensorflow.computation(lambda: tf.constant(0))()  # Starts TFF's worker.
    before = _resident_megabytes()
    initialize, next_fn = _build_round(_factories(clients, specs)[name](), specs)
    state = initialize()
    for _ in range(3):
        state = next_fn(state, list(range(clients)))
    with open(output, "w", encoding="ascii") as file:
        file.write(f"{_resident_megabytes() - before:.0f}")


def _memory_in_own_process(millions: float, clients: int, name: str) -> str:
    # A file, not a pipe: TFF's worker would keep a pipe open.
    with tempfile.TemporaryDirectory() as directory:
        output = os.path.join(directory, "megabytes")
        command = [sys.executable, os.path.abspath(__file__), "--memory-of", name, output]
        command += ["--sizes", str(millions), "--clients", str(clients)]
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
        with open(output, encoding="ascii") as file:
            return file.read()


def _benchmark(millions: float, clients: int, num_rounds: int, with_memory: bool) -> None:
    specs = _specs(millions)
    model_bytes = sum(4 * spec.shape.num_elements() for spec in specs)
    rounds, states = {}, {}
    for name, build in _factories(clients, specs).items():
        initialize, rounds[name] = _build_round(build(), specs)
        states[name] = _in_mid_run(initialize())
    seconds = collections.defaultdict(list)
    for t in range(num_rounds + 1):
        for name, next_fn in rounds.items():
            start = time.perf_counter()
            states[name] = next_fn(states[name], list(range(clients)))
            if t > 0:  # The first round compiles.
                seconds[name].append(time.perf_counter() - start)
            gc.collect()
    print(f"\n{model_bytes / 4e6:.1f}M parameters, {clients} clients, {num_rounds} rounds")
    print(f"{'aggregator':<20}{'s/round':>9}{'ratio':>7}{'state':>8}{'peak MB':>9}")
    reference = np.asarray(seconds[_REFERENCE])
    for name, values in seconds.items():
        ratio = np.median(np.asarray(values) / reference)
        copies = _num_bytes(states[name]) / model_bytes - 1
        memory = _memory_in_own_process(millions, clients, name) if with_memory else "-"
        print(
            f"{name:<20}{np.median(values):>9.3f}{ratio:>7.2f}{copies:>8.2f}{memory:>9}", flush=True
        )


def main() -> None:
    """Runs the benchmark for every size."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.1, 4, 25])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--no-memory", action="store_true", help="leave the last column out")
    parser.add_argument("--memory-of", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    for millions in args.sizes:
        if args.memory_of is not None:
            _measure_memory(millions, args.clients, *args.memory_of)
        else:
            _benchmark(millions, args.clients, args.rounds, not args.no_memory)


if __name__ == "__main__":
    main()
