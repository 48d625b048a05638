"""What canaries add to a round of training, as a ratio to the same round without them.

    python benchmarks/canaries.py [--rounds 7] [--clients 20] [--canaries 0 5 20]

Rounds of the word LSTM of 0.2 million parameters, every client with 4 batches of 16 × 20 words,
in `compile_process`: of the model itself, and of the one that `auditing.canaries.Canaries`
wraps, with so many canaries beside the real clients. Rounds of all of them are run in turns, and
medians are compared; real clients' datasets are made before. What the auditor looks at after
each round, the model along all directions, is timed by itself.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

import tff_dpftrl
from tff_dpftrl.auditing import canaries as canaries_lib
from tff_dpftrl.learning import functional_model, local_model
from tff_dpftrl.models import metrics, word_lstm

_WORDS, _LENGTH = 2000, 20


def _process(model, clients):
    return tff_dpftrl.compile_process(
        tff.learning.algorithms.build_unweighted_fed_avg(
            local_model.as_tff(model),
            client_optimizer_fn=tff.learning.optimizers.build_sgdm(0.5),
            server_optimizer_fn=tff.learning.optimizers.build_sgdm(1.0),
            model_aggregator=tff_dpftrl.build_dp_ftrl_aggregator(
                tff_dpftrl.Identity(),
                noise_multiplier=1.0,
                clip_norm=0.5,
                clients_per_round=clients,
            ),
            loop_implementation=tff.learning.LoopImplementation.DATASET_ITERATOR,
        )
    )


def main() -> None:
    """Prints the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--canaries", type=int, nargs="+", default=[0, 5, 20])
    options = parser.parse_args()
    lstm = word_lstm.WordLstm(_WORDS, sequence_length=_LENGTH, embedding_size=48, state_size=96)
    special = metrics.SpecialIds(oov=_WORDS - 3, bos=_WORDS - 2, eos=_WORDS - 1)
    model = functional_model.build(lstm, special, seed=0)
    canaries = canaries_lib.Canaries(model, number=100, seed=0)
    rows = np.random.default_rng(0).integers(1, _WORDS - 3, [64, _LENGTH]).astype(np.int32)
    data = tf.data.Dataset.from_tensor_slices((rows, rows)).batch(16)
    plain, watched = (_process(one, options.clients) for one in (model, canaries.model))

    def of_model():
        return plain, [data] * options.clients

    real = [canaries.real(data) for _ in range(options.clients)]

    def with_canaries(number):
        return watched, real + [canaries.client(one) for one in range(number)]

    kinds = {"the model": of_model} | {
        f"wrapped, {number} canaries": lambda number=number: with_canaries(number)
        for number in options.canaries
    }
    states = {name: make()[0].initialize() for name, make in kinds.items()}
    seconds = {name: [] for name in kinds}
    looking = []
    for _ in range(options.rounds + 1):  # The first ones compile.
        for name, make in kinds.items():
            start = time.perf_counter()
            process, cohort = make()
            states[name] = process.next(states[name], cohort).state
            seconds[name].append(time.perf_counter() - start)
        start = time.perf_counter()
        canaries.directions.project(canaries.weights(watched.get_model_weights(states[name])))
        looking.append(time.perf_counter() - start)
    base = statistics.median(seconds["the model"][1:])
    weights = sum(int(np.prod(shape)) for shape in canaries.directions.shapes)
    print(f"{weights} weights, {options.clients} clients, {base:.3f} s a round")
    for name, found in seconds.items():
        print(f"{name:24} {statistics.median(found[1:]) / base:.2f}")
    print(f"{'looking at the model':24} {statistics.median(looking[1:]) / base:.2f}")


if __name__ == "__main__":
    main()
