"""BLT optimisation against jax_privacy 2.0: losses, and times as ratios.

    python benchmarks/blt_optimization.py --peer-python jax/bin/python [--full]

jax_privacy needs another environment than this package: make one with
`python -m venv jax && jax/bin/pip install jax_privacy==2.0.0`. Each of its runs is a
fresh process, timed without imports and compilation cache, as a user meets it; ours
are in this process, best of three. The losses of both are evaluated by this package
from the parameters found. Without --full the cases that keep jax_privacy busy for
minutes are left out.

The second table relates the evaluation of coefficients, 2·10⁵ of them, to the time it
takes to write as many numbers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

import numpy as np

from tff_dpftrl.mechanisms import blt, blt_optimize
from tff_dpftrl.participation import schema as schema_lib

_QUICK = [  # num_rounds, min_sep, max_participations, error, num_buffers
    (2052, 342, 6, "max", 2),
    (2052, 342, 6, "max", 3),
    (2052, 342, 6, "max", 4),
    (2052, 342, 6, "rms", 2),
    (2052, 342, 6, "rms", 3),
    (2052, 342, 6, "rms", 5),
    (2000, 400, 5, "max", 4),
    (10**7, 10**7, 1, "max", 4),
]
_LONG = [(20_000, 4000, 5, "max", 4), (200_000, 40_000, 5, "max", 4)]
_OURS_ONLY = [
    (100, 20, 5, "max", 4),
    (10**6, 2 * 10**5, 5, "max", 4),
    (10**9, 2 * 10**8, 5, "max", 4),
    (10**9, 10**5, 10**4, "rms", 4),
]

_PEER = """
import json, sys, time
import jax
jax.config.update("jax_enable_x64", True)
from jax_privacy.matrix_factorization import buffered_toeplitz as bt
n, b, k, error, d = json.loads(sys.argv[1])
error = {"max": "max", "rms": "mean"}[error]
start = time.perf_counter()
if k == 1 and error == "max":
    loss = bt.LossFn.build_closed_form_single_participation(n=n)
else:
    loss = bt.LossFn.build_min_sep(n=n, error=error, min_sep=b, max_participations=k)
found, _ = bt.optimize_loss(loss, num_buffers=d)
found.buf_decay.block_until_ready()
print(json.dumps([[float(x) for x in found.buf_decay], [float(x) for x in found.output_scale],
                  time.perf_counter() - start]))
"""


def _ours(case) -> tuple[float, float]:
    n, b, k, error, num_buffers = case
    schema = schema_lib.MinSep(n, b, k)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        result = blt_optimize.search(
            schema, num_buffers=num_buffers, minimize_rms=error == "rms", max_decay=1
        )
        seconds.append(time.perf_counter() - start)
    return result.loss, min(seconds)


def _peer(case, python: str, timeout: float) -> tuple[str, float | None]:
    """The loss of jax_privacy's BLT, or why there is none, and the seconds it took."""
    n, b, k, error, _ = case
    try:
        done = subprocess.run(
            [python, "-c", _PEER, json.dumps(case)],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "unfinished", timeout
    if done.returncode:
        return done.stderr.strip().splitlines()[-1][:40], None
    decay, scale, seconds = json.loads(done.stdout.splitlines()[-1])
    if max(decay) >= 1:
        return f"decay {max(decay)!r}", seconds
    strategy, schema = blt.Blt(decay, scale), schema_lib.MinSep(n, b, k)
    loss = strategy.rms_loss(schema) if error == "rms" else strategy.max_loss(schema)
    return f"{loss:.6f}", seconds


def _compare(cases, python: str | None, timeout: float) -> None:
    print(f"{'rounds':>11} {'min_sep':>9} {'k':>6} loss  d {'ours':>13} {'seconds':>8} "
          f"{'jax_privacy':>13} {'seconds':>8} {'ratio':>7}")  # fmt: skip
    for case in cases:
        loss, seconds = _ours(case)
        n, b, k, error, num_buffers = case
        line = f"{n:11} {b:9} {k:6} {error}  {num_buffers:2} {loss:13.6f} {seconds:8.3f}"
        if python is not None and case not in _OURS_ONLY:
            peer_loss, peer_seconds = _peer(case, python, timeout)
            line += f" {peer_loss:>13}"
            if peer_seconds is not None:
                line += f" {peer_seconds:8.1f} {peer_seconds / seconds:7.0f}"
        print(line, flush=True)


def _best_of(function, repeats: int = 200) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def _coefficients(length: int = 200_000) -> None:
    schema = schema_lib.MinSep(length, length // 5, 5)
    strategy = blt_optimize.optimize_blt(schema, num_buffers=4, max_decay=1)
    write = _best_of(lambda: np.full(length, 1.0))
    print(f"\n{length} coefficients (d = 4), time as a multiple of writing as many numbers")
    for name, function in {
        "C": strategy.coefficients,
        "inverse of C": strategy.inverse_coefficients,
    }.items():
        seconds = _best_of(lambda function=function: function(length))
        print(f"{name:13} {seconds * 1e3:.3f} ms  {seconds / write:.2f}")


def main() -> int:
    """Runs the comparison and prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-python", help="Python of an environment with jax_privacy.")
    parser.add_argument("--full", action="store_true", help="Include the cases of minutes.")
    parser.add_argument("--timeout", type=float, default=300.0, help="Seconds for each peer run.")
    args = parser.parse_args()
    cases = _QUICK + (_LONG if args.full else []) + _OURS_ONLY
    _compare(cases, args.peer_python, args.timeout)
    _coefficients()
    return 0


if __name__ == "__main__":
    sys.exit(main())
