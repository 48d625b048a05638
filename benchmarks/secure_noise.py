"""Cost of secure noise: ratios to Philox of a draw, and of a round.

    python benchmarks/secure_noise.py [--size 4000000] [--clients 20] [--repeats 15]

Processor seconds of all threads (they depend less on what else the machine does than the time on a
clock), medians over the repeats, and the median of the ratios within a repeat. A draw is one vector
of standard Gaussians. A release adds the noise of BLT with four buffers to a sum. A round is that,
and the work of the clients: each trains a dense layer of that many weights, by SGD on four batches
of 16 rows, and clips its update, which is added to the sum. A recurrent model of
the size takes longer to train, and has a lower ratio.
"""

from __future__ import annotations

import argparse
import collections
import math
import statistics
import time
from collections.abc import Callable

import tensorflow as tf

from tff_dpftrl.mechanisms import blt
from tff_dpftrl.private_round import clipping, fixed_clip, gaussians, interface, seeds

_BLT = blt.Blt(
    (0.9999999999921251, 0.9944453083640997, 0.8985923474607591, 0.4912001418098778),
    (0.0070314825502323835, 0.10613806907600574, 0.1898159060327625, 0.1966594748),
)
_BATCH, _STEPS = 16, 4


def _runs(size: int, clients: int, secure: bool) -> dict[str, Callable[[], object]]:
    private_round = fixed_clip.FixedClipRound(
        _BLT,
        noise_multiplier=1.0,
        clipping=clipping.FlatClipping(1.0),
        clients_per_round=clients,
        secure_noise=secure,
    )
    seed = seeds.root_seed(1, secure=secure)
    draw = tf.function(lambda: gaussians.normal(seed, size))
    state = private_round.initial_state([[size]])
    width = math.isqrt(size)
    rows = tf.random.stateless_normal([_BATCH, width], [1, 2])
    layer = tf.random.stateless_normal([width, size // width], [3, 4]) / math.sqrt(width)

    @tf.function
    def release(state, total):
        return private_round.release(state, interface.Contribution([total]))[:2]

    @tf.function
    def contribute(total):
        trained = layer
        for _ in range(_STEPS):
            # The gradient of the mean square of tanh(rows · layer).
            out = tf.tanh(tf.matmul(rows, trained))
            trained -= 0.1 * tf.matmul(rows, out * (1 - out**2), transpose_a=True)
        broadcast = private_round.broadcast(state)
        (clipped,), _ = private_round.clip_client([trained - layer], broadcast)
        return total + tf.pad(tf.reshape(clipped, [-1]), [[0, size - width * (size // width)]])

    def round_() -> None:
        total = tf.zeros([size], tf.float64)
        for _ in range(clients):
            total = contribute(total)
        release(state, total)

    total = tf.zeros([size], tf.float64)
    return {
        "draw": draw,
        "release": lambda: release(state, total),
        "round": round_,
    }


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", type=int, default=4_000_000)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    philox, secure = (_runs(args.size, args.clients, one) for one in (False, True))
    seconds = collections.defaultdict(list)
    for repeat in range(args.repeats + 1):
        for name in philox:
            for kind, runs in (("philox", philox), ("secure", secure)):
                began, clock = time.process_time(), time.perf_counter()
                runs[name]()
                if repeat:  # The first one traces.
                    seconds[name, kind].append(time.process_time() - began)
                    seconds[name, kind, "clock"].append(time.perf_counter() - clock)
    print(f"{args.size} weights, {args.clients} clients; processor seconds, medians")
    print("         philox  secure  ratio  ratio of clock times")
    for name in philox:
        pairs = [seconds[name, kind] for kind in ("philox", "secure")]
        clocks = [seconds[name, kind, "clock"] for kind in ("philox", "secure")]
        ratios = [
            statistics.median(b / a for a, b in zip(*two, strict=True)) for two in (pairs, clocks)
        ]
        medians = [statistics.median(values) for values in pairs]
        print(f"{name:8} {medians[0]:6.3f}  {medians[1]:6.3f}  {ratios[0]:5.2f}  {ratios[1]:5.2f}")


if __name__ == "__main__":
    main()
