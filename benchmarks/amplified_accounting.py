"""Accounting of secret samples: time, and how far from jax_privacy's Monte Carlo for the same run.

    PYTHONPATH=. python benchmarks/amplified_accounting.py [--jax-privacy PYTHON] [--samples 20000]

The first table has runs of 100,000 rounds; the second one runs that a Monte Carlo can do in
minutes, with our bound, our estimate, and jax_privacy's samples of the same privacy losses. A Monte
Carlo of N draws says nothing about δ below about 10 / N, so that δ is 1e-3 there. Seconds are
processor time. `PYTHON` is an interpreter with jax_privacy 2.0.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

from tff_dpftrl.accounting import amplified_banded
from tff_dpftrl.accounting.amplification import balls_in_bins, min_sep_poisson
from tff_dpftrl.mechanisms import banded_toeplitz, blt

# Reads a job, draws of both directions' losses, and prints them and the seconds.
_PEER = """
import json, sys, time
import numpy as np
from jax_privacy import batch_selection
from jax_privacy.experimental.monte_carlo import sample_generation as generation
job = json.load(sys.stdin)
if job["sampling"] == "bins":
    strategy = batch_selection.BallsInBinsSampling(
        cycle_length=job["stride"], iterations=job["rounds"])
else:
    strategy = batch_selection.BMinSepSampling(
        min_sep=job["stride"], sampling_prob=job["probability"], iterations=job["rounds"],
        warm_start=True)
many = {"num_samples": job["samples"]} if job["sampling"] != "bins" else {}
draws = 1 if many else job["samples"]
column = np.array(job["column"])
start = time.process_time()
losses = []
for positive in (True, False):
    rng = np.random.default_rng(int(positive))
    losses.append(np.ravel([
        generation.get_privacy_loss_sample(
            strategy, job["noise"], column, rng, positive_sample=positive, **many)[0]
        for _ in range(draws)
    ]).tolist())
json.dump({"losses": losses, "seconds": time.process_time() - start}, sys.stdout)
"""

_BLT = blt.Blt((0.97, 0.6), (0.2, 0.25))


def _timed(function: Callable[[], float]) -> tuple[float, float]:
    """Returns the result and its processor time, the least of three."""
    result, seconds = 0.0, math.inf
    for _ in range(3):
        start = time.process_time()
        result = function()
        seconds = min(seconds, time.process_time() - start)
    return result, seconds


def _long_runs() -> None:
    rounds = 100_000
    banded = banded_toeplitz.BandedToeplitz.fhu(16)
    print(f"{rounds:,} rounds, δ = 1e-8")
    print(f"{'sampling':32} {'ε':>9} {'unamplified':>12} {'seconds':>8}")

    def cyclic():
        return amplified_banded.AmplifiedBanded.from_strategy(
            banded,
            noise_multiplier=8.0,
            num_rounds=rounds,
            num_groups=100,
            sampling_probability=0.05,
        )

    def bins(strategy, count, noise):
        return balls_in_bins.BallsInBins.from_strategy(
            strategy, noise_multiplier=noise, num_rounds=rounds, num_bins=count
        )

    def min_sep():
        return min_sep_poisson.MinSepPoisson.from_strategy(
            banded,
            noise_multiplier=8.0,
            num_rounds=rounds,
            min_sep=100,
            sampling_probability=5e-4,
        )

    for name, run in (
        ("cyclic, 100 groups, 16 bands", cyclic),
        ("100 bins, BLT", lambda: bins(_BLT, 100, 60.0)),
        ("400 bins, BLT", lambda: bins(_BLT, 400, 20.0)),
        ("100 bins, 16 bands", lambda: bins(banded, 100, 20.0)),
        ("b-min-sep, b = 100, 16 bands", min_sep),
    ):
        epsilon, seconds = _timed(lambda run=run: run().epsilon(1e-8))
        built = run()
        plain = getattr(built, "unamplified_epsilon", lambda delta: math.nan)(1e-8)
        print(f"{name:32} {epsilon:9.4f} {plain:12.4f} {seconds:8.2f}", flush=True)


def _monte_carlo_epsilon(losses: list[list[float]], delta: float) -> float:
    """Computes the epsilon whose estimated δ, the larger one of both directions, is `delta`."""
    arrays = [np.array(one) for one in losses]
    low, high = 0.0, 1000.0
    for _ in range(60):
        middle = (low + high) / 2.0
        found = max(
            np.maximum(-np.expm1(np.minimum(middle - one, 0.0)), 0.0).mean() for one in arrays
        )
        low, high = (middle, high) if found > delta else (low, middle)
    return high


def _beside_the_peer(python: str | None, samples: int, delta: float) -> None:
    print(f"\nδ = {delta:g}; {samples} draws in each direction")
    print(
        f"{'run':32} {'bound':>8} {'s':>6} {'estimate, 99 % interval':>28} {'s':>6} "
        f"{'theirs':>8} {'s':>7} {'bound/theirs':>13}"
    )
    banded = banded_toeplitz.BandedToeplitz.fhu(8)
    for name, sampling, strategy, noise, rounds, stride, q in (
        ("500 rounds, 25 bins, BLT", "bins", _BLT, 12.0, 500, 25, 1.0),
        ("500 rounds, 25 bins, BLT", "bins", _BLT, 4.0, 500, 25, 1.0),
        ("500 rounds, 25 bins, 8 bands", "bins", banded, 6.0, 500, 25, 1.0),
        (
            "500 rounds, 25 bins, 1 band",
            "bins",
            banded_toeplitz.BandedToeplitz.fhu(1),
            2.0,
            500,
            25,
            1.0,
        ),
        ("200 rounds, 8-min-sep, 8 bands", "min-sep", banded, 6.0, 200, 8, 0.05),
        (
            "200 rounds, 4-min-sep, 1 band",
            "min-sep",
            banded_toeplitz.BandedToeplitz.fhu(1),
            1.0,
            200,
            4,
            0.02,
        ),
    ):
        common = {"noise_multiplier": noise, "num_rounds": rounds}
        if sampling == "bins":
            run = balls_in_bins.BallsInBins.from_strategy(strategy, num_bins=stride, **common)
        else:
            run = min_sep_poisson.MinSepPoisson.from_strategy(
                strategy, min_sep=stride, sampling_probability=q, **common
            )
        bound, seconds = _timed(lambda run=run: run.epsilon(delta))
        start = time.process_time()
        ours = run.estimate(delta, samples, 0)
        line = (
            f"{name:32} {bound:8.4f} {seconds:6.2f} {ours.epsilon:8.4f} [{ours.low:8.4f}, "
            f"{ours.high:8.4f}] {time.process_time() - start:6.2f} "
        )
        if python:
            job = {
                "sampling": sampling,
                "rounds": rounds,
                "stride": stride,
                "probability": q,
                "noise": noise,
                "column": np.trim_zeros(strategy.strategy_matrix(rounds)[:, 0], "b").tolist(),
                "samples": samples,
            }
            answer = subprocess.run(
                [python, "-c", _PEER],
                input=json.dumps(job),
                capture_output=True,
                text=True,
                check=True,
            )
            result = json.loads(answer.stdout)
            theirs = _monte_carlo_epsilon(result["losses"], delta)
            line += f"{theirs:8.4f} {result['seconds']:7.1f} {bound / theirs:13.3f}"
        print(line, flush=True)


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jax-privacy", metavar="PYTHON", help="Python with jax_privacy")
    parser.add_argument("--samples", type=int, default=20_000)
    args = parser.parse_args()
    _long_runs()
    _beside_the_peer(args.jax_privacy, args.samples, 1e-3)


if __name__ == "__main__":
    sys.exit(main())
