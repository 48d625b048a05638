"""Sensitivity of tree aggregation against TensorFlow Privacy: values and times as ratios.

    python benchmarks/tree_sensitivity.py [--full]

TensorFlow Privacy's `compute_zcdp_single_tree` is the published dynamic program. Its rows
below take it seconds; with --full also those that take minutes. The last table is what only
this package can do. Times: ours the best of five, TensorFlow Privacy's of one run.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from tensorflow_privacy.privacy.analysis import tree_aggregation_accountant

from tff_dpftrl.mechanisms.numerics import tree_sensitivity

# Gboard Tables 1 and 2: name, rounds, MinS (a gap), MaxP.
_QUICK = [("OTF pt-PT", 430, 54, 7), ("pt-PT", 530, 54, 8), ("es-AR", 640, 90, 5)]
_LONG = [
    ("OTF ru-RU", 870, 327, 3),
    ("de-DE", 930, 212, 4),
    ("es-ES", 1900, 526, 3),
    ("pt-BR", 3600, 909, 3),
    ("en-US", 2800, 371, 7),
]
_OURS_ONLY = [  # rounds, stride, participations
    (2000, 55, 36),
    (2000, 10, 200),
    (10**6, 1000, 10),
    (10**6, 10_000, 100),
    (10**6, 1000, 100),
    (10**6, 1000, 1000),
    (10**6, 1, 10**6),
]


def _ours(num_rounds: int, min_sep: int, max_participations: int) -> tuple[int, bool, float]:
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        squared, exact = tree_sensitivity.squared([num_rounds], min_sep, max_participations)
        seconds.append(time.perf_counter() - start)
    return squared, exact, min(seconds)


def main() -> int:
    """Runs the comparison and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="also the rows that take minutes")
    args = parser.parse_args()
    print(f"{'row':>10} {'rounds':>7} {'gap':>5} {'k':>3} {'S²':>5} {'ms':>8} "
          f"{'theirs':>7} {'seconds':>8} {'ratio':>10}")  # fmt: skip
    for name, num_rounds, gap, k in _QUICK + (_LONG if args.full else []):
        squared, _, seconds = _ours(num_rounds, gap + 1, k)
        start = time.perf_counter()
        zcdp = tree_aggregation_accountant.compute_zcdp_single_tree(1.0, num_rounds, k, gap)
        peer = time.perf_counter() - start
        print(f"{name:>10} {num_rounds:7} {gap:5} {k:3} {squared:5} {seconds * 1e3:8.3f} "
              f"{2 * zcdp:7.0f} {peer:8.1f} {peer / seconds:10.0f}", flush=True)  # fmt: skip
    print(f"\n{'rounds':>8} {'stride':>7} {'k':>8} {'S²':>15} {'exact':>6} {'seconds':>9}")
    for num_rounds, min_sep, k in _OURS_ONLY:
        squared, exact, seconds = _ours(num_rounds, min_sep, k)
        print(f"{num_rounds:8} {min_sep:7} {k:8} {squared:15} {exact!s:>6} {seconds:9.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
