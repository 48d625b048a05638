"""Clipped gradients of this package, for `benchmarks/finetuning_peers.py` (see README.md).

    python tff_dpftrl_gradients.py GRADIENTS.npz

The sums are those of `tff-dpftrl finetune`, from arrays to tensors; the plain gradient is that of
the mean loss of the same rows.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib.metadata
import sys

import numpy as np
import round_server
import tensorflow as tf
import workload as workload_lib

from tff_dpftrl.finetuning import clipped_sums, ghost
from tff_dpftrl.models import language_model, metrics, transformer, word_lstm


class UntiedTransformer(transformer.Transformer):
    """A transformer with an embedding of its own for the output.

    Opacus's ghost clipping refuses a weight that is used twice.
    """

    @property
    def weight_shapes(self) -> collections.OrderedDict[str, tuple[int, ...]]:
        """As the base class, and one more."""
        shapes = super().weight_shapes
        return collections.OrderedDict(shapes, output_embedding=shapes["embedding"])

    def _scores(self, layers, states):
        def renamed(outputs, *uses, order):
            uses = [
                dataclasses.replace(use, name="output_embedding")
                if use.name == "embedding"
                else use
                for use in uses
            ]
            return layers.record(outputs, *uses, order=order)

        named = {**layers.named, "embedding": layers.named["output_embedding"]}
        untied = dataclasses.replace(layers, named=named, record=renamed)
        return super()._scores(untied, states)


MODELS = {"transformer": UntiedTransformer, "word-lstm": word_lstm.WordLstm}


def main() -> None:
    """Loads the workload and serves gradients, one way for each round index."""
    work = workload_lib.load_gradients(sys.argv[1])
    model = MODELS[work.model](**work.sizes)
    words, targets = (np.ascontiguousarray(x) for x in (work.rows[:, :-1], work.rows[:, 1:]))
    weights = [tf.constant(work.weights[name]) for name in model.weight_shapes]
    splits = np.arange(len(words) + 1)

    @tf.function(autograph=False)
    def mean_gradient(weights, words, targets):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            logits, positions = model.compact_logits(weights, words)
            targets = tf.gather(tf.reshape(targets, [-1]), positions)
            loss = metrics.mean_cross_entropy(logits, targets, language_model.PAD)
        return [tf.convert_to_tensor(gradient) for gradient in tape.gradient(loss, weights)]

    def plain():
        gradients = mean_gradient(weights, tf.constant(words), tf.constant(targets))
        return [gradient.numpy() for gradient in gradients]

    def clipped(way):
        add = clipped_sums.sum_in_chunks(way, units_per_chunk=len(words))

        def rows(begin, end):
            return words[begin:end], targets[begin:end]

        return lambda: [x.numpy() for x in add(weights, rows, splits, work.clip_norm)[0]]

    ways = {
        "tff_dpftrl, plain": plain,
        "tff_dpftrl": clipped(ghost.fastest_clipped_sum(model, 1)),
    }
    if not work.is_large:
        looped = clipped_sums.looped(clipped_sums.language_rows(model))
        ways["tff_dpftrl, row by row"] = clipped(looped)
    product = tf.function(tf.matmul, autograph=False)
    speeds = workload_lib.product_speeds(tf.constant, lambda a, b: product(a, b).numpy())
    versions = {name: importlib.metadata.version(name) for name in ("tensorflow", "numpy")}
    round_server.serve_ways(ways, speeds={"TensorFlow": speeds}, versions=versions)


if __name__ == "__main__":
    main()
