"""Accounting for example-level sampling: how much faster than dp_accounting, and how close.

    python benchmarks/mixture_of_gaussians.py [--interval 1e-3] [--groups 1,2,4,32]

The peer is dp_accounting's PLDAccountant, of which `--interval` is the discretisation of
privacy losses (its own default, 1e-4, takes minutes and gigabytes for the last rows). The
setting is Figure 1 of Charles et al. 2024: 2000 steps, sampling probability 0.01, delta 1e-6.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import dp_accounting

from tff_dpftrl.accounting import mixture_of_gaussians

_STEPS, _SAMPLING, _DELTA = 2000, 0.01, 1e-6


def _timed(function: Callable[[], float], repetitions: int) -> tuple[float, float]:
    """The result and the median of the seconds it takes."""
    seconds = []
    for _ in range(repetitions):
        start = time.perf_counter()
        result = function()
        seconds.append(time.perf_counter() - start)
    return result, statistics.median(seconds)


def _theirs(mixture: mixture_of_gaussians.MixtureOfGaussians, interval: float) -> float:
    accountant = dp_accounting.pld.PLDAccountant(value_discretization_interval=interval)
    return accountant.compose(mixture.to_dp_event(_STEPS)).get_epsilon(_DELTA)


def main() -> None:
    """Prints a row for each noise multiplier and group size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--interval", type=float, default=1e-3)
    parser.add_argument("--groups", default="1,2,4,32")
    args = parser.parse_args()
    print("sigma  group   epsilon   theirs / ours - 1    our s   their s   ratio")
    for noise in (2.0, 1.0, 0.5):
        for group in map(int, args.groups.split(",")):
            mixture = mixture_of_gaussians.els(noise, _SAMPLING, group)
            ours, our_seconds = _timed(
                lambda mixture=mixture: mixture_of_gaussians.epsilon(
                    mixture, num_steps=_STEPS, delta=_DELTA
                ),
                repetitions=5,
            )
            theirs, their_seconds = _timed(
                lambda mixture=mixture: _theirs(mixture, args.interval), repetitions=1
            )
            print(
                f"{noise:5} {group:6} {ours:9.6g} {theirs / ours - 1:19.1e} {our_seconds:8.3f} "
                f"{their_seconds:9.2f} {their_seconds / our_seconds:7.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
