"""Rounds of this package, for `benchmarks/rounds.py`: the same work as its peers do.

    PYTHONPATH=CHECKOUT python tff_dpftrl_rounds.py WORKLOAD.npz
        [--engine native|tff|loop] [--mechanism blt|identity] [--operation-threads N]

`native` runs the rounds of `tff-dpftrl train`, with its threads. `tff` runs the same rounds in
TFF's executor. `loop` only trains the clients in one TensorFlow function and adds their updates up:
no metrics, no clipping, no noise, no server.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import round_server
import tensorflow as tf
import tensorflow_federated as tff
import workload as workload_lib

import tff_dpftrl
from tff_dpftrl import execution
from tff_dpftrl.aggregators import dp_ftrl
from tff_dpftrl.data import client_datasets
from tff_dpftrl.execution import contexts
from tff_dpftrl.learning import functional_model, local_model, local_updates, optimizers, rounds
from tff_dpftrl.learning import model as model_lib
from tff_dpftrl.mechanisms import blt, identity
from tff_dpftrl.models import metrics, word_lstm
from tff_dpftrl.private_round import aggregation, clipping, fixed_clip

BLT = blt.Blt(
    (0.9999999999921251, 0.9944453083640997, 0.8985923474607591, 0.4912001418098778),
    (0.0070314825502323835, 0.10613806907600574, 0.1898159060327625, 0.1966594748),
)
_MECHANISMS = {"identity": identity.Identity(), "blt": BLT}


def build_model(work: workload_lib.Workload) -> model_lib.Model:
    """The model of a workload, with the workload's first weights."""
    model = word_lstm.WordLstm(
        vocabulary_size=work.vocabulary_size,
        sequence_length=work.sequence_length,
        embedding_size=work.embedding_size,
        state_size=work.state_size,
        tie_embeddings=work.tie_embeddings,
    )
    oov, bos, eos = (work.vocabulary_size - i for i in (3, 2, 1))
    return functional_model.build(model, metrics.SpecialIds(oov, bos, eos), work.seed)


def build_process(
    work: workload_lib.Workload, aggregator: tff.aggregators.UnweightedAggregationFactory
) -> tff.learning.templates.LearningProcess:
    """The rounds of `tff-dpftrl train` as a process of TFF, with any aggregator."""
    return tff.learning.algorithms.build_unweighted_fed_avg(
        local_model.as_tff(build_model(work)),
        client_optimizer_fn=tff.learning.optimizers.build_sgdm(work.client_learning_rate),
        server_optimizer_fn=tff.learning.optimizers.build_sgdm(
            work.server_learning_rate, work.server_momentum
        ),
        model_aggregator=aggregator,
        loop_implementation=tff.learning.LoopImplementation.DATASET_ITERATOR,
    )


def build_native(work: workload_lib.Workload, mechanism: str) -> execution.CompiledProcess:
    """The rounds of `tff-dpftrl train`."""
    private_round = fixed_clip.FixedClipRound(
        _MECHANISMS[mechanism],
        noise_multiplier=work.noise_multiplier,
        clipping=clipping.FlatClipping(work.clip_norm),
        clients_per_round=len(work.cohorts[0]),
        deterministic_seed=work.seed,
    )
    made = rounds.build_training(
        build_model(work),
        local_update=local_updates.FedAvg(optimizers.sgdm(work.client_learning_rate)),
        aggregation=aggregation.Aggregation(private_round, report_non_finite_clients=True),
        server_optimizer=optimizers.sgdm(work.server_learning_rate, work.server_momentum),
    )
    return execution.CompiledProcess(made, **tensor_arguments(work))


def tensor_arguments(work: workload_lib.Workload) -> dict[str, object]:
    """Arguments of `compile_process` with which clients' values are their sequences."""
    spec = client_spec(work)
    return {
        "dataset_fn": lambda rows: client_datasets.batches(rows, spec),
        "tensor_spec": tf.TensorSpec([None, work.sequence_length + 1], tf.int32),
    }


def client_spec(work: workload_lib.Workload) -> client_datasets.ClientSpec:
    """Batches of a client of the workload."""
    return client_datasets.ClientSpec(work.batch_size, None)


def build_training(work: workload_lib.Workload) -> Callable[..., tuple[Any, list[tf.Tensor]]]:
    """From weights, metrics and one client's sequences to metrics and update, in a graph.

    The metrics are those of the model, or () if they are not to be counted.
    """
    model = build_model(work)

    def train(weights, metrics, rows):
        def step(start, metrics, *trained):
            batch = rows[start : start + work.batch_size]
            x, y = batch[:, :-1], batch[:, 1:]
            with tf.GradientTape() as tape:
                tape.watch(trained)
                output = model.predict_on_batch((trained, ()), x, training=True)
                loss = model.loss(output, y)
            gradients = tape.gradient(loss, trained)
            stepped = (
                w - work.client_learning_rate * tf.convert_to_tensor(g)
                for w, g in zip(trained, gradients, strict=True)
            )
            if metrics:
                result = model_lib.BatchOutput(loss, output, tf.shape(x)[0])
                metrics = model.update_metrics_state(metrics, labels=y, batch_output=result)
            return start + work.batch_size, metrics, *stepped

        _, metrics, *trained = tf.while_loop(
            lambda start, *_: start < tf.shape(rows)[0], step, (0, metrics, *weights)
        )
        return metrics, [new - old for new, old in zip(trained, weights, strict=True)]

    return train


def build_loop(work: workload_lib.Workload) -> Callable[..., tuple[tf.Tensor, ...]]:
    """From weights, all clients' sequences and their numbers to the sum of the updates."""
    train = build_training(work)

    @tf.function(autograph=False)
    def run(weights, rows, num_rows):
        ends = tf.cumsum(num_rows)

        def add_client(index, *totals):
            _, update = train(weights, (), rows[ends[index] - num_rows[index] : ends[index]])
            return index + 1, *(t + u for t, u in zip(totals, update, strict=True))

        # Clients do not depend on each other, only their sum does.
        return tf.while_loop(
            lambda index, *_: index < tf.size(num_rows),
            add_client,
            (0, *(tf.zeros_like(w) for w in weights)),
            parallel_iterations=len(os.sched_getaffinity(0)),
        )[1:]

    return run


def _serve_loop(work: workload_lib.Workload) -> None:
    loop, weights = build_loop(work), tuple(map(tf.constant, work.weights))
    for index in round_server.rounds(lambda: weights, tff_dpftrl=tff_dpftrl.__file__):
        cohort = work.cohorts[index]
        lengths = tf.constant([len(rows) for rows in cohort])
        loop(weights, tf.constant(np.concatenate(cohort)), lengths)[0].numpy()


def _build_for_tff(work: workload_lib.Workload, mechanism: str) -> Any:
    aggregator = dp_ftrl.build_dp_ftrl_aggregator(
        _MECHANISMS[mechanism],
        noise_multiplier=work.noise_multiplier,
        clip_norm=work.clip_norm,
        clients_per_round=len(work.cohorts[0]),
        deterministic_seed=work.seed,
    )
    return build_process(work, aggregator)


def _serve_process(
    work: workload_lib.Workload, process: Any, client_value: Callable[[np.ndarray], Any]
) -> None:
    state = process.initialize()
    asked = round_server.rounds(
        lambda: process.get_model_weights(state).trainable, tff_dpftrl=tff_dpftrl.__file__
    )
    for index in asked:
        state, _ = process.next(state, [client_value(rows) for rows in work.cohorts[index]])


def main() -> None:
    """Loads the workload and serves rounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload")
    parser.add_argument("--engine", choices=["native", "tff", "loop"], default="native")
    parser.add_argument("--mechanism", choices=sorted(_MECHANISMS), default="blt")
    parser.add_argument("--operation-threads", type=int, help="TensorFlow's, for an operation")
    args = parser.parse_args()
    if args.operation_threads:
        tf.config.threading.set_intra_op_parallelism_threads(args.operation_threads)
    work = workload_lib.load(args.workload)
    if args.engine == "loop":
        _serve_loop(work)
    elif args.engine == "native":
        execution.limit_operation_threads(len(work.cohorts[0]))
        _serve_process(work, build_native(work, args.mechanism), lambda rows: rows)
    else:
        spec = client_spec(work)
        with contexts.local():
            process = _build_for_tff(work, args.mechanism)
            _serve_process(work, process, lambda rows: client_datasets.batches(rows, spec))


if __name__ == "__main__":
    main()
