"""Cost of rounds whose clients work in other processes, over rounds in one process.

    PYTHONPATH=. python benchmarks/distribution.py [--workers 1 2 4] [--clients 20 100 1000]
        [--batches 1 4] [--rounds 5] [--size small|large] [--threads 1] [--tff]

Federated averaging of a word LSTM (0.2M parameters as in the config quickstart, or 4M with
`large`) with BLT noise, compiled, its clients' tensors prepared. Contenders are threads of
this process, as many as there are cores; Ray workers on this machine; and with `--tff`
TFF's executor in one process. All are there from the beginning and take turns within a round of
the benchmark, so that a busy machine disturbs the ratios little; processor time, of all
processes together, it disturbs less.

Each line has seconds a round (median), their ratio to the threads (median over the rounds
of the ratio within a round), the same ratio of processor time, and for Ray the megabytes that
are sent each way, pickled. Then cost models are fitted to Ray's rounds:

    seconds = round + worker · workers + chunk · chunks + driver · clients
              + clients · (client + batch · batches) / min(workers, cores)
    processor seconds of this process = round + chunk · chunks + driver · clients
    processor seconds of all others = round + worker · workers + chunk · chunks
              + clients · (client + batch · batches)

where seconds are those of the fastest round, no coefficient is negative and errors are
relative. Each is tried on every line with the coefficients of all the others. On a busy
machine only the models of processor time say something.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import logging
import os
import pickle
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import psutil
import ray
import scipy.optimize
import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl import aggregators, execution
from tff_dpftrl.execution import client_part, client_worker
from tff_dpftrl.learning import functional_model, local_model
from tff_dpftrl.mechanisms import blt
from tff_dpftrl.models import metrics, word_lstm

_CORES = len(os.sched_getaffinity(0))
_LENGTH = 20
_SIZES = {
    "small": (word_lstm.WordLstm(2004, _LENGTH, 64, 96), 8),
    "large": (word_lstm.WordLstm(10_004, _LENGTH, 96, 670, tie_embeddings=False), 16),
}
"""By name: model, and number of sequences in a batch."""
_THREADS = f"{_CORES} threads"
_COEFFICIENTS = ("round", "worker", "chunk", "driver", "client", "batch")
_MODELS = {
    "seconds": _COEFFICIENTS,
    "this process": ("round", "chunk", "driver"),
    "all others": ("round", "worker", "chunk", "client", "batch"),
}
"""Which coefficients each model has."""


@dataclasses.dataclass(frozen=True)
class Line:
    """What one contender took for rounds of one shape.

    Attributes:
      workers: Number of Ray workers; 0 for other contenders.
      clients: Number of clients.
      batches: Number of batches of each.
      seconds: Of each round.
      own_seconds: Processor time of each round in this process.
      other_seconds: Processor time of each round in all others.
    """

    workers: int
    clients: int
    batches: int
    seconds: list[float] = dataclasses.field(default_factory=list)
    own_seconds: list[float] = dataclasses.field(default_factory=list)
    other_seconds: list[float] = dataclasses.field(default_factory=list)

    @property
    def processor_seconds(self) -> list[float]:
        """Processor time of each round."""
        return [sum(both) for both in zip(self.own_seconds, self.other_seconds, strict=True)]

    def measured(self, model: str) -> float:
        """What a model is to say."""
        if model == "seconds":
            return min(self.seconds)
        return statistics.median(
            self.own_seconds if model == "this process" else self.other_seconds
        )

    def terms(self, model: str) -> list[float]:
        """What the coefficients of a model are multiplied with."""
        share = self.clients / (min(self.workers, _CORES) if model == "seconds" else 1)
        chunks = len(client_part.chunks(self.clients))
        terms = [1.0, self.workers, chunks, self.clients, share, share * self.batches]
        return [
            term for name, term in zip(_COEFFICIENTS, terms, strict=True) if name in _MODELS[model]
        ]


def _process(model: word_lstm.WordLstm) -> tff.learning.templates.LearningProcess:
    size = model.vocabulary_size
    special = metrics.SpecialIds(oov=size - 3, bos=size - 2, eos=size - 1)
    return tff.learning.algorithms.build_unweighted_fed_avg(
        local_model.as_tff(functional_model.build(model, special, seed=0)),
        client_optimizer_fn=tff.learning.optimizers.build_sgdm(0.1),
        model_aggregator=aggregators.build_dp_ftrl_aggregator(
            blt.Blt((0.99, 0.9, 0.7, 0.4), (0.02, 0.05, 0.1, 0.1)),
            noise_multiplier=0.5,
            clients_per_round=20,
            clip_norm=1.0,
        ),
        loop_implementation=tff.learning.LoopImplementation.DATASET_ITERATOR,
    )


def _batches(rows: tf.Tensor | np.ndarray, batch_size: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((rows[:, :-1], rows[:, 1:])).batch(batch_size)


def _processor_seconds() -> np.ndarray:
    """Of this process, and of all that it has started."""
    seconds = [time.process_time(), 0.0]
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            seconds[1] += times.user + times.system
    return np.array(seconds)


def _measure_start(workers: int) -> None:
    begin = time.perf_counter()
    with execution.RayClients(workers) as clients:
        started = time.perf_counter()
        pids = clients.wait_until_ready()
        ready = time.perf_counter()
        memory = statistics.median(psutil.Process(pid).memory_info().rss for pid in pids)
    print(
        f"Ray starts in {started - begin:.1f} s, {workers} workers {ready - started:.1f} s later, "
        f"of {memory / 1e6:.0f} MB each before their first round."
    )


def _compiled(process, batch_size: int, clients: client_part.ClientRunner):
    spec = tf.TensorSpec([None, _LENGTH + 1], tf.int32)
    dataset_fn = functools.partial(_batches, batch_size=batch_size)
    return execution.compile_process(
        process, dataset_fn=dataset_fn, tensor_spec=spec, clients=clients
    )


@contextlib.contextmanager
def _contenders(args: argparse.Namespace) -> Iterator[dict[str, tuple[int, Callable]]]:
    """By name: number of Ray workers, and what runs a round of arrays."""
    model, batch_size = _SIZES[args.size]
    process = _process(model)
    state = process.initialize()
    with contextlib.ExitStack() as stack:
        found = {}

        def add_compiled(name: str, workers: int, clients: client_part.ClientRunner) -> None:
            compiled = _compiled(process, batch_size, clients)
            stack.callback(compiled.close)
            found[name] = workers, functools.partial(compiled.next, state)

        def add_tff(name: str, context: tff.framework.SyncContext) -> None:
            def run_round(cohort: Sequence[np.ndarray]) -> None:
                with tff.framework.get_context_stack().install(context):
                    process.next(state, [_batches(rows, batch_size) for rows in cohort])

            found[name] = 0, run_round

        add_compiled(_THREADS, 0, client_part.ThreadedClients())
        ray.init(
            "local",
            num_cpus=sum(args.workers),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _node_ip_address="127.0.0.1",
        )
        stack.callback(ray.shutdown)
        for workers in args.workers:
            clients = execution.RayClients(workers, threads_per_worker=args.threads)
            add_compiled(f"Ray {workers}", workers, clients)
            clients.wait_until_ready()
        if args.tff:
            add_tff("TFF here", stack.enter_context(execution.local()))
        yield found


@contextlib.contextmanager
def _traffic() -> Iterator[dict[str, int]]:
    """Counts the bytes of what is encoded and decoded in this process."""
    sent = {"there": 0, "back": 0}
    encode, decode = client_worker.encode, client_worker.decode

    def counting_encode(*args):
        encoded = encode(*args)
        sent["there"] += len(pickle.dumps(encoded, protocol=5))
        return encoded

    def counting_decode(encoded):
        sent["back"] += len(pickle.dumps(encoded, protocol=5))
        return decode(encoded)

    client_worker.encode, client_worker.decode = counting_encode, counting_decode
    try:
        yield sent
    finally:
        client_worker.encode, client_worker.decode = encode, decode


def _measure(contenders, clients: int, batches: int, args: argparse.Namespace) -> list[Line]:
    model, batch_size = _SIZES[args.size]
    rng = np.random.default_rng(clients)
    shape = batches * batch_size, _LENGTH + 1
    cohort = [
        rng.integers(1, model.vocabulary_size - 3, size=shape).astype(np.int32)
        for _ in range(clients)
    ]
    lines = {name: Line(workers, clients, batches) for name, (workers, _) in contenders.items()}
    traffic = {}
    for name, (_, run_round) in contenders.items():
        with _traffic() as traffic[name]:
            run_round(cohort)
    for _ in range(args.rounds):
        for name, (_, run_round) in contenders.items():
            processor, begin = _processor_seconds(), time.perf_counter()
            run_round(cohort)
            lines[name].seconds.append(time.perf_counter() - begin)
            own, others = _processor_seconds() - processor
            lines[name].own_seconds.append(own)
            lines[name].other_seconds.append(others)
    reference = lines[_THREADS]
    for name, line in lines.items():
        ratio = _ratio(line.seconds, reference.seconds)
        processor = _ratio(line.processor_seconds, reference.processor_seconds)
        text = f"{clients:7d} {batches:7d}  {name:10}"
        text += f"{statistics.median(line.seconds):9.3f}{ratio:7.2f}{processor:10.2f}"
        if line.workers:
            text += "{there:10.2f}{back:9.2f}".format(
                **{way: size / 1e6 for way, size in traffic[name].items()}
            )
        print(text, flush=True)
    return [line for line in lines.values() if line.workers]


def _ratio(one: Sequence[float], other: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def _fit(lines: Sequence[Line], model: str) -> np.ndarray:
    """The coefficients with the smallest relative errors."""
    measured = np.array([line.measured(model) for line in lines])
    terms = np.array([line.terms(model) for line in lines]) / measured[:, None]
    return scipy.optimize.nnls(terms, np.ones(len(lines)))[0]


def _print_model(lines: Sequence[Line], model: str) -> None:
    def errors(fits: Sequence[np.ndarray]) -> str:
        wrong = [
            abs(np.dot(line.terms(model), fit) / line.measured(model) - 1)
            for line, fit in zip(lines, fits, strict=True)
        ]
        return f"median {np.median(wrong):.0%}, largest {np.max(wrong):.0%}"

    coefficients = _fit(lines, model)
    values = zip(_MODELS[model], coefficients, strict=True)
    print(f"\n{model}, in milliseconds:", ", ".join(f"{n} {1e3 * v:.2f}" for n, v in values))
    print(f"  relative error: {errors([coefficients] * len(lines))}")
    others = [_fit([*lines[:i], *lines[i + 1 :]], model) for i in range(len(lines))]
    print(f"  of a line that was left out of the fit: {errors(others)}")


def main() -> None:
    """Prints the table and the cost model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--clients", type=int, nargs="+", default=[20, 100, 1000])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", choices=_SIZES, default="small")
    parser.add_argument("--threads", type=int, help="of one operation in a Ray worker")
    parser.add_argument("--tff", action="store_true", help="TFF's executor in one process too")
    args = parser.parse_args()
    execution.limit_operation_threads(min(args.clients))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    model, _ = _SIZES[args.size]
    parameters = sum(int(np.prod(shape)) for shape in model.weight_shapes.values())
    _measure_start(max(args.workers))
    print(f"{parameters / 1e6:.2f}M parameters, {_CORES} cores\n")
    print("clients batches  contender   seconds  ratio processor  MB there  MB back")
    lines = []
    with _contenders(args) as contenders:
        for clients in args.clients:
            for batches in args.batches:
                lines += _measure(contenders, clients, batches, args)
    for cost_model in _MODELS:
        _print_model(lines, cost_model)


if __name__ == "__main__":
    main()
