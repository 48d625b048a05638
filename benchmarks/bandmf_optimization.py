"""BandMF and BandToep optimisation against jax_privacy 2.0: losses, times and memory.

    python benchmarks/bandmf_optimization.py --peer-python jax/bin/python [--full]

jax_privacy needs another environment than this package: make one with
`python -m venv jax && jax/bin/pip install jax_privacy==2.0.0`. Every run, ours too, is a
fresh process, timed without imports; jax_privacy's compilation is part of its time. Both
losses are RmsLoss under the schema, from columns of norm 1 (BandMF: 100 steps for
jax_privacy, its default). Peak memory is that of the whole process. Without --full the
case of the BLT paper's Table 3, which takes minutes, is left out; there jax_privacy runs 5
steps only, and the seconds of one step are what to compare.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

_HEADER = f"{'mechanism':>9} {'rounds':>8} {'bands':>6} {'k':>4} {'':>12} {'RmsLoss':>10} " \
          f"{'seconds':>8} {'steps':>6} {'peak GB':>8}"  # fmt: skip

_OURS = """
import json, resource, sys, time
from tff_dpftrl.mechanisms import banded_optimize, banded_toeplitz_optimize
from tff_dpftrl.participation import schema as schema_lib
mechanism, n, bands, k, _ = json.loads(sys.argv[1])
schema, steps = schema_lib.MinSep(n, bands, k), []
start = time.perf_counter()
if mechanism == "bandmf":
    found = banded_optimize.optimize_banded(
        schema, bands, progress=lambda step, loss: steps.append(step))
else:
    found = banded_toeplitz_optimize.optimize_banded_toeplitz(schema, bands)
seconds = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
print(json.dumps([found.rms_loss(schema), seconds, len(steps), peak]))
"""

_PEER = """
import json, resource, sys, time
import jax
jax.config.update("jax_enable_x64", True)
import jax.numpy as jnp
from jax_privacy.matrix_factorization import banded, toeplitz
mechanism, n, bands, k, steps = json.loads(sys.argv[1])
start = time.perf_counter()
if mechanism == "bandmf":
    found = banded.optimize(n, bands=bands, max_optimizer_steps=steps)
    seconds = time.perf_counter() - start
    error = jnp.sqrt(jnp.mean(banded.per_query_error(found)))
    loss = float(error * jnp.sqrt(banded.minsep_sensitivity_squared(found, bands, k)))
else:
    found = toeplitz.optimize_banded_toeplitz(n, bands)
    found.block_until_ready()
    seconds = time.perf_counter() - start
    error = jnp.sqrt(jnp.mean(toeplitz.per_query_error(strategy_coef=found, n=n)))
    squared = toeplitz.minsep_sensitivity_squared(
        found, min_sep=bands, max_participations=k, n=n
    )
    loss = float(error * jnp.sqrt(squared))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
print(json.dumps([loss, seconds, steps, peak]))
"""

# mechanism, num_rounds, bands = min_sep, max_participations, steps of jax_privacy
_QUICK = [
    ("bandmf", 300, 50, 6, 100),
    ("bandmf", 600, 100, 6, 100),
    ("bandtoep", 2052, 342, 6, 250),
    ("bandtoep", 20_000, 400, 50, 250),
]
_LONG = [("bandmf", 2052, 342, 6, 5)]
_OURS_ONLY = [("bandtoep", 10**5, 1000, 100, 0)]
_OURS_ONLY_LONG = [("bandmf", 20_000, 100, 200, 0), ("bandtoep", 10**6, 100, 20, 0)]


def _run(python: str, program: str, case, timeout: float) -> list[float] | str:
    """What the program printed, or in a few words why there is nothing."""
    try:
        done = subprocess.run(
            [python, "-c", program, json.dumps(case)],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"unfinished after {timeout:.0f} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1][:60]
    return json.loads(done.stdout.splitlines()[-1])


def _report(case, who: str, result: list[float] | str) -> None:
    mechanism, num_rounds, bands, k, _ = case
    line = f"{mechanism:>9} {num_rounds:8} {bands:6} {k:4} {who:>12} "
    if isinstance(result, str):
        line += result
    else:
        loss, seconds, steps, peak = result
        line += f"{loss:10.5f} {seconds:8.2f} {steps or '':>6} {peak:8.2f}"
    print(line, flush=True)


def main() -> int:
    """Runs the comparison and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-python", help="Python with jax_privacy 2.0; without: ours only")
    parser.add_argument("--full", action="store_true", help="also the cases that take minutes")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds a run may take")
    args = parser.parse_args()
    print(_HEADER)
    for case in _QUICK + _OURS_ONLY + (_LONG + _OURS_ONLY_LONG if args.full else []):
        ours = _run(sys.executable, _OURS, case, args.timeout)
        _report(case, "ours", ours)
        if args.peer_python is None or case in _OURS_ONLY + _OURS_ONLY_LONG:
            continue
        theirs = _run(args.peer_python, _PEER, case, args.timeout)
        _report(case, "jax_privacy", theirs)
        if not isinstance(ours, str) and not isinstance(theirs, str):
            # With steps on both sides, the ratio of one step; otherwise of all.
            per = [r[1] / r[2] if ours[2] else r[1] for r in (ours, theirs)]
            what = "a step" if ours[2] else "in all"
            print(f"{'':42} ratio: time {what} {per[1] / per[0]:.1f}, peak memory "
                  f"{theirs[3] / ours[3]:.1f}", flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
