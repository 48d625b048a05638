"""Cost of making the noise of one round in plain TensorFlow, without TFF, and in NumPy.

    python benchmarks/noise_kernels.py [--size 4400000] [--repeats 15]

One line a mechanism: milliseconds (median) and the ratio to one draw of the same
size by `tf.random.stateless_normal` (median over the repeats of the ratio within a
repeat, so that a busy machine disturbs it little). "identity" is our own draw; rows that
end in "NumPy" are of `tff_dpftrl.NoiseStream`, with the ratio to TensorFlow's in the same repeat.
The last row reads no fresh bits of the operating system, and has the ratio to "identity", which
does as every round of a run.
"""

from __future__ import annotations

import argparse
import collections
import time

import numpy as np
import tensorflow as tf

from tff_dpftrl.mechanisms import banded_toeplitz, blt, identity, inverse_banded, tree
from tff_dpftrl.numpy_noise import stream as numpy_stream
from tff_dpftrl.private_round import noise_stream

_REFERENCE = "one Gaussian draw"
_FIRST_ROUND = 777  # In mid-run.
_IN_NUMPY = ", NumPy"
_KNOWN_SEED = "identity, known seed"
_NUM_ROUNDS_PLANNED = 2000
_DECAY = (0.9999999999921251, 0.9944453083640997, 0.8985923474607591, 0.4912001418098778, 0.2)
_SCALE = (0.0070314825502323835, 0.10613806907600574, 0.1898159060327625, 0.1966594748, 0.05)


def _strategies():
    strategies = {"identity": identity.Identity()}
    for d in range(1, 6):
        strategies[f"BLT d={d}"] = blt.Blt(_DECAY[:d], _SCALE[:d])
    strategies["tree"] = tree.Tree(_NUM_ROUNDS_PLANNED)
    strategies["vanilla tree"] = tree.Tree(_NUM_ROUNDS_PLANNED, variance_reduction=False)
    for bands in (2, 4, 16):
        strategies[f"BISR p={bands}"] = inverse_banded.InverseBanded.bisr(bands)
    strategies["banded p=16"] = banded_toeplitz.BandedToeplitz.fhu(16)
    return strategies


def _stepper(strategy, size, known_seed=None):
    """A function that makes the noise of the next round each time it is called."""
    stream = noise_stream.NoiseStream(strategy.noise_recipe(), [[size]])
    state = [stream.initial_seed(tf.constant([1, 2], tf.int64)), stream.initial_buffer()]
    index = _FIRST_ROUND

    @tf.function
    def step(seed, buffer, t):
        executed, seed = stream.execution_seeds(seed, t, known_seed)
        noise, buffer = stream.next(buffer, t, executed)
        return noise, seed, buffer

    def run():
        nonlocal index
        _, *state[:] = step(*state, tf.constant(index, tf.int64))
        index += 1

    return run


def _numpy_stepper(strategy, size):
    """A function that makes the noise of the next round in NumPy each time it is called."""
    stream = numpy_stream.NoiseStream(
        strategy, noise_multiplier=1.0, clip_norm=1.0, template=[(size,)]
    )
    stream = numpy_stream.NoiseStream.from_state(stream.state() | {"round_index": _FIRST_ROUND})
    return lambda: stream.next(stream.round_index)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", type=int, default=4_400_000)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    draw = tf.function(lambda: tf.random.stateless_normal([args.size], [1, 2]))
    runs = {_REFERENCE: draw}
    for name, strategy in _strategies().items():
        runs[name] = _stepper(strategy, args.size)
        runs[name + _IN_NUMPY] = _numpy_stepper(strategy, args.size)
    runs[_KNOWN_SEED] = _stepper(identity.Identity(), args.size, known_seed=1)
    seconds = collections.defaultdict(list)
    for repeat in range(args.repeats + 2):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if repeat >= 2:  # The first calls trace and allocate.
                seconds[name].append(time.perf_counter() - start)
    print(f"{args.size / 1e6:.1f}M float32, {args.repeats} repeats")
    print(f"{'noise':<20}{'ms':>8}{'ratio':>8}")
    for name, values in seconds.items():
        peer = name.removesuffix(_IN_NUMPY) if name.endswith(_IN_NUMPY) else _REFERENCE
        peer = "identity" if name == _KNOWN_SEED else peer
        ratio = np.median(np.asarray(values) / np.asarray(seconds[peer]))
        print(f"{name:<20}{1e3 * np.median(values):>8.1f}{ratio:>8.2f}")


if __name__ == "__main__":
    main()
