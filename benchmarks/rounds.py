"""Cost of whole rounds, clients' training included, as ratios to named peers.

    python benchmarks/rounds.py 4m overhead quickstart many light peers
        [--rounds N] [--baseline CHECKOUT] [--fedjax PYTHON] [--pfl PYTHON] [--json FILE]

Parts, all of them if none is named:

    4m          a 4M-parameter LSTM, 4 clients with 2 batches each: our aggregators in the
                compiled process and through TFF's executor, over TFF's Gaussian
    overhead    what the engine adds to a client's work, at 0.2M and 4M parameters
    quickstart  20 clients with 4 batches each, and cohorts as `make train` draws them: over
                TFF's executor (of --baseline, a checkout of another commit of this package,
                if given), and over one TensorFlow function that only trains the clients; the
                goal is in processor time
    many        1,000 clients with one batch each, over TFF's executor; and peak memory
    light       TFF's own federated averaging as its tutorials build it, compiled, over TFF's
                executor: 64 clients with two rows, and 4 clients with a million weights
    peers       the quickstart's rounds over FedJAX and pfl-research, in the environments
                of benchmarks/peers/README.md; also checks that all do the same work

Contenders take turns within each round, whichever process they live in, and the others
wait meanwhile. `interleaving.py` says what the ratios are; quartiles say how much other programs
disturbed them. `--json` puts the tables of ratios where `figures.py` reads them.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import functools
import gc
import importlib.metadata
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import figures
import interleaving
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
import tff_dpftrl_rounds as ours  # Whose folder `interleaving` adds.
import workload as workload_lib

import tff_dpftrl
from tff_dpftrl import aggregators, execution
from tff_dpftrl.data import client_datasets
from tff_dpftrl.execution import client_part
from tff_dpftrl.mechanisms import identity, tree
from tff_dpftrl.models import word_lstm
from tff_dpftrl.training import corpus
from tff_dpftrl.training import options as options_lib
from tff_dpftrl.training import task as task_lib

_NUM_COHORTS = 5
_MID_RUN = 777
_QUICKSTART_BATCH = 8
"""Sequences, whatever the config says today, so that figures stay comparable."""


def _ours(engine: str, mechanism: str = "blt", **options) -> interleaving.Command:
    return interleaving.Command(arguments=("--engine", engine, "--mechanism", mechanism), **options)


_LOOPS = {
    "training loop": _ours("loop"),
    "training loop, one thread an operation": interleaving.Command(
        arguments=("--engine", "loop", "--operation-threads", "1")
    ),
}


def _contenders(
    children: Mapping[str, interleaving.Child], work: workload_lib.Workload
) -> dict[str, interleaving.Contender]:
    """Takes the cohorts in turn, too."""

    def rounds(child):
        return lambda index: child.run_round(index % len(work.cohorts))

    return {name: interleaving.Contender(rounds(c), c.pid) for name, c in children.items()}


def _versions(**others: str) -> dict[str, str]:
    names = ("tensorflow", "tensorflow_federated", "numpy")
    return {name: importlib.metadata.version(name) for name in names} | others


@functools.cache
def _quickstart_task() -> task_lib.LanguageTask:
    config = options_lib.config_from_mapping(options_lib.read_toml("quickstart"), "quickstart")
    text = corpus.read(config.part(corpus.TextOptions))
    return task_lib.build_language_task(config.part(task_lib.TaskOptions), text)


def quickstart_workload(
    clients_per_round: int, num_sequences: int | None, num_cohorts: int = _NUM_COHORTS
) -> workload_lib.Workload:
    """The quickstart's model on its corpus.

    Args:
      clients_per_round: Number of clients of a cohort.
      num_sequences: Every client has exactly so many; as in the quickstart, up to 64 and
        a last batch that may be smaller, if None.
      num_cohorts: Number of cohorts.

    Returns:
      The workload; a client may be in several cohorts, but not twice in one.
    """
    task = _quickstart_task()
    model = task.model
    rng = np.random.default_rng(0)
    rows = [
        client_datasets.client_rows(task.train, user, task.client_spec, 0)[:num_sequences]
        for user in task.train.user_ids
    ]
    rows = [r for r in rows if num_sequences is None or len(r) == num_sequences]
    return workload_lib.Workload(
        cohorts=[
            [rows[i] for i in rng.choice(len(rows), clients_per_round, replace=False)]
            for _ in range(num_cohorts)
        ],
        weights=list(model.initial_weights(0)),
        vocabulary_size=model.vocabulary_size,
        sequence_length=model.sequence_length,
        embedding_size=model.embedding_size,
        state_size=model.state_size,
        batch_size=_QUICKSTART_BATCH,
    )


def synthetic_workload(clients_per_round: int) -> workload_lib.Workload:
    """A 4M-parameter LSTM; clients have 2 batches of 16 sequences without padding."""
    model = word_lstm.WordLstm(10_000, state_size=670, tie_embeddings=False)
    rng = np.random.default_rng(0)
    size = [_NUM_COHORTS, clients_per_round, 32, model.sequence_length + 1]
    return workload_lib.Workload(
        cohorts=[list(c) for c in rng.integers(1, model.vocabulary_size, size, dtype=np.int32)],
        weights=list(model.initial_weights(0)),
        vocabulary_size=model.vocabulary_size,
        sequence_length=model.sequence_length,
        embedding_size=model.embedding_size,
        state_size=model.state_size,
        tie_embeddings=model.tie_embeddings,
        batch_size=16,
        client_learning_rate=0.1,
        clip_norm=1.0,
        noise_multiplier=1.0,
    )


def _aggregators(clients: int) -> dict[str, tff.aggregators.UnweightedAggregationFactory]:
    common = {"noise_multiplier": 1.0, "clients_per_round": clients}

    def fixed(strategy):
        return aggregators.build_dp_ftrl_aggregator(strategy, clip_norm=1.0, **common)

    return {
        "TFF Gaussian": tff.aggregators.DifferentiallyPrivateFactory.gaussian_fixed(
            1.0, clients, 1.0
        ),
        "identity": fixed(identity.Identity()),
        "BLT d=4": fixed(ours.BLT),
        "adaptive BLT d=4": aggregators.build_adaptive_dp_ftrl_aggregator(
            ours.BLT,
            clipping=aggregators.AdaptiveClipping(
                initial_clip_norm=1.0, clipped_count_stddev=1.0, only_estimates=True
            ),
            **common,
        ),
        "tree": fixed(tree.Tree(2000)),
    }


class InProcess:
    """A process whose rounds run here, compiled or in TFF's current context."""

    def __init__(
        self,
        work: workload_lib.Workload,
        process,
        *,
        compiled: bool,
        clients=None,
    ):
        """Initialises it, and sets our aggregators' states to mid-run.

        A tree draws less noise in its first rounds.
        """
        self._work, self._compiled = work, compiled
        self._process = (
            tff_dpftrl.compile_process(
                process,
                clients=clients,
                **ours.tensor_arguments(work),
            )
            if compiled
            else process
        )
        state = self._process.initialize()
        if hasattr(state.aggregator, "round_index"):
            in_mid_run = state.aggregator._replace(round_index=np.int64(_MID_RUN))
            state = state._replace(aggregator=in_mid_run)
        self._state = state

    def run_round(self, index: int, num_clients: int | None = None) -> float:
        """Seconds of a round with the first clients of the cohort `index`."""
        clients = self._work.cohorts[index % _NUM_COHORTS][:num_clients]
        gc.collect()
        start = time.perf_counter()
        if not self._compiled:
            spec = ours.client_spec(self._work)
            clients = [client_datasets.batches(rows, spec) for rows in clients]
        self._state = self._process.next(self._state, clients).state
        return time.perf_counter() - start


def run_4m(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Prints what our aggregators cost at 4M parameters in both engines."""
    with execution.local():
        return _run_4m(args)


def _run_4m(args: argparse.Namespace) -> list[dict[str, Any]]:
    clients = 4
    work = synthetic_workload(clients)
    contenders = {}
    for name, aggregator in _aggregators(clients).items():
        process = ours.build_process(work, aggregator)
        for compiled in (False, True):
            engine = "compiled" if compiled else "through TFF"
            rounds = InProcess(work, process, compiled=compiled)
            contenders[f"{name}, {engine}"] = interleaving.Contender(rounds.run_round)
    times = interleaving.take_turns(contenders, args.rounds or 9)
    goals = {"BLT d=4": 0.8, "adaptive BLT d=4": 0.85}
    over_tff = [
        interleaving.Comparison(
            name, "TFF Gaussian, through TFF", goals.get(name.removesuffix(", compiled"))
        )
        for name in contenders
        if name != "TFF Gaussian, through TFF"
    ]
    over_identity = [
        interleaving.Comparison(f"{name}, compiled", "identity, compiled", 1.1)
        for name in ("BLT d=4", "adaptive BLT d=4", "tree")
    ]
    parameters = sum(w.size for w in work.weights)
    table = interleaving.print_table(
        f"4m: {parameters / 1e6:.2f}M parameters, {clients} clients x 2 batches of 16 x 20 words",
        times,
        over_tff + over_identity,
        _versions(),
    )
    return [table]


def _client_work(part: client_part.ClientPart) -> Callable[..., Any]:
    """From a client's sequences and what is broadcast to its result."""
    data, work = part.data.importer(), part.work.importer()
    specs = [*part.data.input_specs, *part.work.input_specs[-part.num_broadcast :]]
    return client_part.traced(lambda rows, *broadcast: work(*data(rows), *broadcast), specs)


class BareClients(execution.ThreadedClients):
    """Remembers what the clients of the last round had to compute, to do only that again."""

    def __init__(self, num_threads: int):
        """As the base class."""
        super().__init__(num_threads)
        self._num_threads = num_threads
        self._work = None

    def sum(self, functions, clients, broadcast):
        """As the base class."""
        if self._work is None:
            self._work = _client_work(functions.part)
        self._broadcast = broadcast
        return super().sum(functions, clients, broadcast)

    def run_bare(self, clients: Sequence[np.ndarray]) -> float:
        """Seconds that as many threads take for the clients' work, and nothing else."""
        with concurrent.futures.ThreadPoolExecutor(self._num_threads) as pool:
            start = time.perf_counter()
            list(pool.map(lambda rows: self._work(tf.constant(rows), *self._broadcast), clients))
            return time.perf_counter() - start


def run_overhead(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Prints what a client costs in a round beyond its own work, in milliseconds."""
    cases = [
        ("0.2M parameters, 4 batches of 8", quickstart_workload(20, 32), 8, 20, 1.0),
        ("4M parameters, 2 batches of 16", synthetic_workload(12), 4, 12, 10.0),
    ]
    cores = len(os.sched_getaffinity(0))
    print(
        f"\noverhead: what a client adds to a round, and to its work alone on {cores} threads, ms"
    )
    print(f"{'':<42}{'bare':>9}{'a round':>10}{'overhead':>10}{'quartiles':>18}{'goal':>7}")
    for title, work, few, many, goal in cases:
        process = ours.build_process(work, _aggregators(many)["identity"])
        clients = BareClients(cores)
        engine = InProcess(work, process, compiled=True, clients=clients)
        engine.run_round(0)

        def bare(index: int, count: int) -> float:
            return clients.run_bare(work.cohorts[index % _NUM_COHORTS][:count])  # noqa: B023

        contenders = {}
        for count in (few, many):
            whole = functools.partial(engine.run_round, num_clients=count)
            contenders["round", count] = interleaving.Contender(whole)
            contenders["bare", count] = interleaving.Contender(functools.partial(bare, count=count))
        times = interleaving.take_turns(contenders, args.rounds or 15)
        for unit, verdict_on in (("seconds", goal), ("cpu", None)):
            a_client = {
                kind: 1e3
                * (getattr(times[kind, many], unit) - getattr(times[kind, few], unit))
                / (many - few)
                for kind in ("round", "bare")
            }
            extra = a_client["round"] - a_client["bare"]
            low, median, high = np.percentile(extra, [25, 50, 75])
            print(
                f"{title:<34}{unit:<8}{np.median(a_client['bare']):>9.2f}"
                f"{np.median(a_client['round']):>10.2f}{median:>10.2f}"
                f"{f'{low:.2f} to {high:.2f}':>18}{interleaving.verdict(median, verdict_on)}",
                flush=True,
            )
    return []  # No ratios.


def run_quickstart(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Prints the quickstart's rounds over TFF's executor and over a bare loop."""
    commands = {
        "train": _ours("native"),
        "through TFF": _ours("tff"),
        **_LOOPS,
    }
    if args.baseline:
        commands["baseline"] = _ours("tff", checkout=args.baseline)
    tables = []
    for title, num_sequences in (
        ("quickstart: 20 clients with 4 batches of 8", 32),
        ("quickstart as drawn: 20 clients", None),
    ):
        work = quickstart_workload(20, num_sequences)
        with interleaving.started(work, commands) as children:
            times = interleaving.take_turns(_contenders(children, work), args.rounds or 25)
        comparisons = [
            interleaving.Comparison("train", "baseline", 0.4),
            interleaving.Comparison("train", "through TFF"),
            *(interleaving.Comparison("train", loop, 1.15, of_processor=True) for loop in _LOOPS),
        ]
        tables.append(interleaving.print_table(title, times, comparisons, _versions()))
    return tables


def run_many(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Prints rounds of 1,000 clients over TFF's executor, and peak memory."""
    commands = {"train": _ours("native"), "through TFF": _ours("tff")}
    if args.baseline:
        commands["baseline"] = _ours("tff", checkout=args.baseline)
    work = quickstart_workload(1000, 8, num_cohorts=1)
    with interleaving.started(work, commands | _LOOPS) as children:
        contenders = _contenders(children, work)
        times = interleaving.take_turns(contenders, args.rounds or 5, num_warm_up=1)
    table = interleaving.print_table(
        "many: 1,000 clients with one batch of 8",
        times,
        [
            interleaving.Comparison("train", "through TFF", 0.35),
            interleaving.Comparison("train", "baseline"),
            *(interleaving.Comparison("train", loop) for loop in _LOOPS),
        ],
        _versions(),
    )
    if args.no_memory:
        return [table]
    peaks = collections.defaultdict(dict)
    for num_clients in (100, 300, 1000):
        work = quickstart_workload(num_clients, 8, num_cohorts=1)
        for name, command in commands.items():
            with interleaving.started(work, {name: command}) as children:
                interleaving.take_turns(_contenders(children, work), 3, num_warm_up=0)
                peaks[name][num_clients] = children[name].peak_megabytes()
    print("peak memory in MB, workers included, at 100 / 300 / 1,000 clients")
    for name, by_clients in peaks.items():
        growth = by_clients[1000] / by_clients[100]
        sizes = " / ".join(f"{value:.0f}" for value in by_clients.values())
        goal = 1.1 if name == "train" else None
        verdict = interleaving.verdict(growth, goal)
        print(f"{name:<44}{sizes}: {growth:.2f} times{verdict}", flush=True)
    return [table]


def run_light(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Prints rounds of `build_unweighted_fed_avg` over TFF's executor."""
    tables = []
    for name, width, num_clients, goal in (("light", 100, 64, 0.5), ("wide", 1000, 4, 0.8)):
        rows = {"x": np.ones([2, width], np.float32), "y": np.zeros([2, width], np.float32)}
        clients = [tf.data.Dataset.from_tensor_slices(rows).batch(2)] * num_clients

        def model_fn(width=width, spec=clients[0].element_spec):
            layer = tf.keras.layers.Dense(width, use_bias=False, input_shape=(width,))
            return tff.learning.models.from_keras_model(
                tf.keras.Sequential([layer]), tf.keras.losses.MeanSquaredError(), spec
            )

        process = tff.learning.algorithms.build_unweighted_fed_avg(
            model_fn, client_optimizer_fn=tff.learning.optimizers.build_sgdm(0.01)
        )
        compiled = execution.compile_process(process)
        with execution.local():
            contenders = {
                engine: interleaving.Contender(_rounds_of(one, clients))
                for engine, one in (("compiled", compiled), ("through TFF", process))
            }
            times = interleaving.take_turns(contenders, args.rounds or 15)
        tables.append(
            interleaving.print_table(
                f"{name}: {num_clients} clients with 2 rows, {width * width:,} weights",
                times,
                [interleaving.Comparison("compiled", "through TFF", goal)],
                _versions(),
            )
        )
    return tables


def _rounds_of(process: Any, clients: Sequence[tf.data.Dataset]) -> Callable[[int], float]:
    """Returns a function that takes the next round, and says the seconds of it."""
    state = process.initialize()

    def run_round(index: int) -> float:
        nonlocal state
        start = time.perf_counter()
        state = process.next(state, clients).state
        return time.perf_counter() - start

    return run_round


def run_peers(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Checks that the peers do the same work, and prints our rounds over theirs."""
    commands = {
        "ours, identity": _ours("native", "identity"),
        "ours, BLT d=4": _ours("native", "blt"),
    }
    if args.fedjax:
        commands["FedJAX"] = interleaving.Command("fedjax_rounds.py", python=args.fedjax)
    if args.pfl:
        commands["pfl-research"] = interleaving.Command("pfl_rounds.py", python=args.pfl)
        commands["pfl-research, one thread"] = interleaving.Command(
            "pfl_rounds.py", ("--threads", "1"), python=args.pfl
        )
    theirs = list(commands)[2:]
    if not theirs:
        print("\npeers: neither --fedjax nor --pfl is given; see benchmarks/peers/README.md")
        return []
    work = quickstart_workload(20, 32)
    _check_same_work(work, {name: commands[name] for name in ["ours, identity", *theirs]})
    with interleaving.started(work, commands) as children:
        versions = {k: v for name in theirs for k, v in children[name].facts.items()}
        times = interleaving.take_turns(_contenders(children, work), args.rounds or 25)
    comparisons = [
        interleaving.Comparison(own, name, 1.5)
        for name in theirs
        for own in ("ours, identity", "ours, BLT d=4")
    ]
    table = interleaving.print_table(
        "peers: 20 clients with 4 batches of 8", times, comparisons, _versions(**versions)
    )
    return [table]


def _check_same_work(
    work: workload_lib.Workload, commands: Mapping[str, interleaving.Command]
) -> None:
    """Compares models after three rounds without noise: loss, and change of the weights."""
    num_rounds = 3
    model = ours.build_model(work)
    rows = tf.constant(np.concatenate(work.cohorts[0]))
    changes, losses = {}, {}
    with interleaving.started(
        dataclasses.replace(work, noise_multiplier=0.0), commands
    ) as children:
        for name, child in children.items():
            for index in range(num_rounds):
                child.run_round(index)
            weights = child.weights()
            output = model.predict_on_batch((tuple(weights), ()), rows[:, :-1], training=False)
            losses[name] = float(model.loss(output, rows[:, 1:]))
            changes[name] = np.concatenate(
                [(w - first).ravel() for w, first in zip(weights, work.weights, strict=True)]
            )
    print(f"\npeers: models after {num_rounds} rounds without noise")
    own = next(iter(commands))
    for name in commands:
        difference = np.linalg.norm(changes[name] - changes[own]) / np.linalg.norm(changes[own])
        # Our clipping keeps a margin of 1e-5.
        print(
            f"{name:<44}loss {losses[name]:.6f}, change of the weights differs by "
            f"{difference:.1e}{interleaving.verdict(difference, 1e-4)}",
            flush=True,
        )


_PARTS = {
    "4m": run_4m,
    "overhead": run_overhead,
    "quickstart": run_quickstart,
    "many": run_many,
    "light": run_light,
    "peers": run_peers,
}


def main() -> None:
    """Runs the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(_PARTS)}; all if none is named")
    parser.add_argument("--rounds", type=int, help="rounds that are measured, in each part")
    parser.add_argument(
        "--baseline", metavar="CHECKOUT", help="another checkout of this package, to compare with"
    )
    parser.add_argument("--no-memory", action="store_true", help="leave out peak memory")
    parser.add_argument("--json", metavar="FILE", help="where `figures.py` reads the ratios")
    parser.add_argument("--fedjax", metavar="PYTHON", help="Python with FedJAX")
    parser.add_argument("--pfl", metavar="PYTHON", help="Python with pfl-research")
    args = parser.parse_args()
    unknown = set(args.parts) - set(_PARTS)
    if unknown:
        parser.error(f"no part is called {sorted(unknown)[0]!r}; there are {', '.join(_PARTS)}")
    execution.limit_operation_threads(len(os.sched_getaffinity(0)))
    for part in args.parts or _PARTS:
        tables = _PARTS[part](args)
        if args.json:
            figures.record(args.json, tables)


if __name__ == "__main__":
    main()
