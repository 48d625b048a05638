"""Speed of the secure-aggregation encoder, as ratios.

    python benchmarks/secagg_encoding.py [--training-step]

Per dimension d it prints the milliseconds of one Walsh–Hadamard transform of this
package, of TFF's `fast_walsh_hadamard_transform`, and of a copy of the vector; how
many times faster than TFF's ours is, and how many times slower than the memory
traffic of a transform blocked for a 1 MiB cache: one pass for the first 2^18
coordinates and one more for the rest, each as long as a copy. Then the whole
encoder and decoder, and the client side of TFF's discretisation with rotation, the
pieces of `tff.aggregators.ddp_secure_aggregator` (flatten and pad, signs, transform,
conditional rounding with its float32 norm test, modular shift).

With --training-step it also times one SGD step of a 4M-parameter LSTM on a 16×20
batch, and prints the encoder's share of the local training of 1, 4 and 16 steps.

Everything is compiled with tf.function; the fastest of several runs counts.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf
from tensorflow_federated.python.aggregators import discretization, hadamard, rotation

from tff_dpftrl.discretization import grid
from tff_dpftrl.private_round import discretize, walsh_hadamard

_LOG2_DIMS = (16, 20, 22, 24)
_LOG2_CACHED = 18
_CLIENTS, _BITS, _CLIP_NORM = 100, 20, 1.0
_SEED = (3, 5)


def _milliseconds(function: Callable[..., object], *arguments: tf.Tensor) -> float:
    """Time of the fastest of at least 7 calls after a first one."""
    function(*arguments)
    times = []
    while len(times) < 7 or (sum(times) < 0.5 and len(times) < 200):
        start = time.perf_counter()
        function(*arguments)
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


@tf.function
def _copy(x):
    return x + 1.0


@tf.function
def _ours(x):
    return walsh_hadamard.walsh_hadamard(x)


@tf.function
def _tff(x):
    return hadamard.fast_walsh_hadamard_transform(x[tf.newaxis])[0]


def _our_encoder(encoding: grid.GridEncoding):
    seed = tf.constant(_SEED, tf.int64)

    @tf.function
    def encode(x):
        return discretize.encode(x, seed, encoding, _CLIP_NORM)

    @tf.function
    def decode(total):
        return discretize.decode(total, tf.constant(1), seed, encoding, _CLIP_NORM)

    return encode, decode


def _tff_encoder(encoding: grid.GridEncoding):
    """TFF's functions in the order in which its distributed DP composes them."""
    scale = encoding.scaled_clip_norm / _CLIP_NORM
    seed = tf.constant(_SEED, tf.int64)

    @tf.function
    def encode(x):
        x = tf.clip_by_norm(x, _CLIP_NORM)
        x = tf.pad(x, [[0, encoding.padded_dim - encoding.dim]])
        x *= rotation.sample_rademacher(tf.shape(x), x.dtype, seed)
        x = hadamard.fast_walsh_hadamard_transform(x[tf.newaxis])[0]
        x = discretization._discretize_struct(
            x, scale, stochastic=True, beta=encoding.rejection_bound, prior_norm_bound=_CLIP_NORM
        )
        return tf.math.floormod(x + encoding.max_coordinate, encoding.modulus)

    return encode


def _compare(log2_dim: int) -> None:
    dim = 2**log2_dim
    x = tf.constant(np.random.default_rng(0).normal(size=dim) / math.sqrt(dim), tf.float32)
    copy, ours, theirs = (_milliseconds(f, x) for f in (_copy, _ours, _tff))
    bound = copy * (1 + (log2_dim > _LOG2_CACHED))
    encoding = grid.for_bits(dim, _CLIENTS, _BITS)
    encode, decode = _our_encoder(encoding)
    our_encode = _milliseconds(encode, x)
    our_decode = _milliseconds(decode, encode(x))
    their_encode = _milliseconds(_tff_encoder(encoding), x)
    print(
        f"2^{log2_dim}: transform {ours:.2f} ms, TFF {theirs:.2f} ms, copy {copy:.2f} ms: "
        f"{theirs / ours:.1f} times faster, {ours / bound:.1f} times the bound | "
        f"encode {our_encode:.1f} ms, TFF {their_encode:.1f} ms: "
        f"{their_encode / our_encode:.1f} times faster | decode {our_decode:.1f} ms",
        flush=True,
    )


def _training_step_milliseconds() -> tuple[int, float]:
    """Parameters of an LSTM with 670 units and 10,000 words, and the time of an SGD step."""
    vocabulary, batch, length = 10_000, 16, 20
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Embedding(vocabulary, 96),
            tf.keras.layers.LSTM(670, return_sequences=True),
            tf.keras.layers.Dense(96),
            tf.keras.layers.Dense(vocabulary),
        ]
    )
    loss_fn = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    tokens = tf.random.stateless_uniform([batch, length + 1], [1, 2], 0, vocabulary, tf.int32)
    model(tokens[:, :-1])

    @tf.function
    def step(tokens):
        with tf.GradientTape() as tape:
            loss = loss_fn(tokens[:, 1:], model(tokens[:, :-1]))
        gradients = tape.gradient(loss, model.trainable_variables)
        for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
            variable.assign_sub(0.1 * tf.convert_to_tensor(gradient))
        return loss

    return model.count_params(), _milliseconds(step, tokens)


def main() -> None:
    """Prints the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--training-step", action="store_true")
    arguments = parser.parse_args()
    for log2_dim in _LOG2_DIMS:
        _compare(log2_dim)
    if arguments.training_step:
        parameters, step = _training_step_milliseconds()
        encode, _ = _our_encoder(grid.for_bits(parameters, _CLIENTS, _BITS))
        encoding = _milliseconds(encode, tf.fill([parameters], 1e-3))
        print(f"{parameters} parameters: training step {step:.0f} ms, encode {encoding:.1f} ms")
        for steps in (1, 4, 16):
            print(f"  {steps} steps: encoder {encoding / (steps * step):.1%} of training")


if __name__ == "__main__":
    main()
