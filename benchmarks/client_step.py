"""Cost of one training step of a client over its matrix products alone.

    PYTHONPATH=. python benchmarks/client_step.py [--repeats 15] [--sizes small large ...]

A step is what federated averaging does with a batch: forward, loss, gradient, metrics,
and TFF's SGD. "products" are the same matrix products and nothing else, in the order in
which they depend on each other and in the fastest layout (the matrices of the recurrence
are transposed before, outside of the time). "plain step" is the LSTM and the loss as a
textbook has them, with TensorFlow's own gradients. Sequences are full: no padding.

Four steps are one call. Threads are TensorFlow's default. Each line has milliseconds a step
(median), the ratio to "products" (median over the repeats of the ratio within a repeat,
so that a busy machine disturbs it little), and the same ratio of processor time, which
a busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl.learning import functional_model
from tff_dpftrl.learning import model as model_lib
from tff_dpftrl.models import metrics, table, word_lstm

_STEPS = 4
_LENGTH = 20
_WORD_LSTMS = {
    # The model of the config quickstart.
    "small": (word_lstm.WordLstm(2004, _LENGTH, 64, 96), 8),
    "large": (word_lstm.WordLstm(10_004, _LENGTH, 96, 670, tie_embeddings=False), 16),
    "large-tied": (word_lstm.WordLstm(10_004, _LENGTH, 96, 670), 16),
    "gboard": (table.build("gboard-cifg", vocabulary_size=10_004), 16),
}
"""By name: model, and number of sequences in a batch."""


class _PlainWordLstm(word_lstm.WordLstm):
    """The same model, written without thought of its gradient."""

    def _lstm_outputs(self, named, words, record=None):
        del record  # It is for `finetuning`.
        inputs = tf.gather(named["embedding"], tf.transpose(words))
        inputs = tf.reshape(inputs, [-1, self.embedding_size])
        gates = tf.matmul(inputs, named["input_kernel"]) + named["gate_bias"]
        gates = tf.reshape(gates, [self.sequence_length, -1, gates.shape[1]])
        output = tf.zeros([tf.shape(words)[0], named["recurrent_kernel"].shape[0]])
        cell = tf.zeros([tf.shape(words)[0], self.state_size])
        outputs = []
        for step in tf.unstack(gates, num=self.sequence_length):
            step += tf.matmul(output, named["recurrent_kernel"])
            *keep, enter, leave, new = tf.split(step, step.shape[1] // self.state_size, axis=1)
            enter = tf.sigmoid(enter)
            cell = (tf.sigmoid(keep[0]) if keep else 1 - enter) * cell + enter * tf.tanh(new)
            output = tf.sigmoid(leave) * tf.tanh(cell)
            if self.recurrent_projection:
                output = tf.matmul(output, named["projection"])
            outputs.append(output)
        return tf.concat(outputs, axis=0)


def _plain_loss(output, label, sample_weight=None):
    del sample_weight
    targets = tf.gather(tf.reshape(label, [-1]), output["positions"])
    logits = output["logits"]
    own = tf.gather_nd(logits, tf.stack([tf.range(tf.size(targets)), targets], axis=1))
    return tf.reduce_mean(tf.reduce_logsumexp(logits, axis=1) - own)


def _stepper(model, batch_size, *, plain=False) -> Callable[[], None]:
    """Trains on as many batches as there are steps."""
    ids = model.vocabulary_size
    special = metrics.SpecialIds(oov=ids - 3, bos=ids - 2, eos=ids - 1)
    federated = functional_model.build(model, special, seed=0)
    loss_fn = _plain_loss if plain else federated.loss
    optimizer = tff.learning.optimizers.build_sgdm(0.1)
    weights = tuple(tf.constant(w) for w in model.initial_weights(0))
    rng = np.random.default_rng(0)
    words = tf.constant(rng.integers(1, ids - 3, [2, _STEPS, batch_size, _LENGTH]), tf.int32)

    @tf.function
    def train(weights, inputs, labels):
        state = optimizer.initialize(tuple(tf.TensorSpec(w.shape) for w in weights))
        counts = federated.initialize_metrics_state()
        for index in tf.range(_STEPS):
            x, y = inputs[index], labels[index]
            with tf.GradientTape() as tape:
                tape.watch(weights)
                output = federated.predict_on_batch((weights, ()), x, training=True)
                loss = loss_fn(output, y)
            state, weights = optimizer.next(state, weights, tape.gradient(loss, weights))
            batch_output = model_lib.BatchOutput(loss, output, batch_size)
            counts = federated.update_metrics_state(counts, batch_output=batch_output, labels=y)
        return weights, counts

    return lambda: train(weights, *words)


def _products(model, batch_size) -> Callable[[], None]:
    """The matrix products of as many steps."""

    def draw(*shape):
        return 0.01 * tf.random.stateless_normal(shape, [1, 2])

    size, count = model.state_size, batch_size * model.sequence_length
    inputs = draw(count, model.embedding_size)
    named = {name: draw(*shape) for name, shape in model.weight_shapes.items()}
    matrices = [named[n] for n in ("embedding", "input_kernel", "recurrent_kernel", "projection")]
    transposed = [tf.pad(tf.transpose(m), [[0, 0], [0, -m.shape[0] % 16]]) for m in matrices[2:]]
    steps, copies = range(model.sequence_length - 1), matrices[2].shape[1] // size

    @tf.function
    def multiply(inputs, matrices, transposed):
        embedding, input_kernel, recurrent_kernel, projection = matrices

        def project(states):
            """What the recurrence runs on."""
            return tf.matmul(states, projection) if model.recurrent_projection else states

        def gates_of(gradient):
            """As many numbers as the gates have, of the gradient of what `project` returns."""
            if model.recurrent_projection:
                gradient = tf.matmul(gradient, transposed[1])[:, :size]
            return tf.tile(gradient, [1, copies])

        def step(index, inputs, *_):
            gates = tf.matmul(inputs, input_kernel)
            state = gates[:batch_size, :size]
            for _ in steps:
                state = tf.matmul(project(state), recurrent_kernel)[:, :size]
            states = tf.tile(state, [model.sequence_length, 1])
            if model.recurrent_projection:
                outputs = tf.tile(project(state), [model.sequence_length, 1])
            else:
                outputs = tf.matmul(states, projection)
            scores = tf.matmul(outputs, embedding, transpose_b=True)
            embedding_gradient = tf.matmul(scores, outputs, transpose_a=True)
            gradient = outputs_gradient = tf.matmul(scores, embedding)
            projection_gradient = tf.matmul(states, outputs_gradient, transpose_a=True)
            if not model.recurrent_projection:
                gradient = tf.matmul(outputs_gradient, projection, transpose_b=True)
            gate = gates_of(gradient[:batch_size])
            for _ in steps:
                gate = gates_of(tf.matmul(gate, transposed[0])[:, : gradient.shape[1]])
            gates = tf.tile(gate, [model.sequence_length, 1])
            before = (outputs if model.recurrent_projection else states)[batch_size:]
            return (
                index + 1,
                tf.matmul(gates, input_kernel, transpose_b=True),
                embedding_gradient,
                tf.matmul(inputs, gates, transpose_a=True),
                tf.matmul(before, gates[batch_size:], transpose_a=True),
                projection_gradient,
            )

        start = (0, inputs, *map(tf.zeros_like, matrices))
        return tf.while_loop(lambda index, *_: index < _STEPS, step, start)

    return lambda: multiply(inputs, matrices, transposed)


def _print_ratios(runs: dict[str, Callable[[], None]], repeats: int) -> None:
    """Runs them in turn and prints a line for each; the first is the reference."""
    wall, processor = collections.defaultdict(list), collections.defaultdict(list)
    for repeat in range(repeats + 2):
        for name, run in runs.items():
            start, busy = time.perf_counter(), time.process_time()
            run()
            if repeat >= 2:  # The first calls trace and allocate.
                wall[name].append(time.perf_counter() - start)
                processor[name].append(time.process_time() - busy)
    reference = next(iter(runs))
    for name in runs:
        ratios = [
            np.median(np.divide(seconds[name], seconds[reference])) for seconds in (wall, processor)
        ]
        milliseconds = 1e3 * np.median(wall[name]) / _STEPS
        print(f"{name:<14}{milliseconds:>8.2f}{ratios[0]:>8.2f}{ratios[1]:>12.2f}", flush=True)


def main() -> None:
    """Prints a table for each size."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--sizes", nargs="+", choices=_WORD_LSTMS, default=list(_WORD_LSTMS))
    args = parser.parse_args()
    for size in args.sizes:
        model, batch_size = _WORD_LSTMS[size]
        print(
            f"{size}: {model.num_parameters / 1e6:.1f}M weights, {model.state_size} units, "
            f"{batch_size} x {_LENGTH} words\n{'':<14}{'ms':>8}{'ratio':>8}{'processor':>12}"
        )
        plain = _PlainWordLstm(**dataclasses.asdict(model))
        runs = {
            "products": _products(model, batch_size),
            "plain step": _stepper(plain, batch_size, plain=True),
            "step": _stepper(model, batch_size),
        }
        _print_ratios(runs, args.repeats)


if __name__ == "__main__":
    main()
