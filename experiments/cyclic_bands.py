"""How many bands are best for which ε: `python experiments/cyclic_bands.py`.

The error of cyclic Poisson sampling with the best bands, of passes without sampling (BLT, and
banded Toeplitz with a whole pass of bands), and of DP-SGD with Poisson sampling, at the same ε and
expected cohort, and what the search for the bands took. Writes
experiments/results/cyclic_bands.csv, which `page.py` puts into docs/experiments.md.
"""

from __future__ import annotations

import csv
import pathlib
import time

from tff_dpftrl.accounting import calibrate, cyclic_optimize
from tff_dpftrl.mechanisms import table
from tff_dpftrl.participation import schema as schema_lib

_RESULTS = pathlib.Path(__file__).resolve().parent / "results"
_COHORT, _DELTA = 64, 1e-5
_EPSILONS = (1.0, 4.0, 8.0, 16.0)
_ROUNDS_AND_PASSES = ((500, 20), (500, 2), (2000, 20), (2000, 100))


def row(num_rounds: int, passes: int, epsilon: float) -> dict[str, object]:
    """Returns a row of the table; errors are ratios to that of DP-SGD.

    Args:
      num_rounds: Number of rounds n.
      passes: Number of passes over the clients in these rounds.
      epsilon: ε at δ = 1e-5.
    """
    turn = num_rounds // passes
    begin = time.process_time()
    choice = cyclic_optimize.best_cyclic(num_rounds, turn * _COHORT, _COHORT, epsilon, _DELTA)
    seconds = time.process_time() - begin
    dp_sgd, best = choice.curve[0].error, choice.best
    schema = schema_lib.MinSep(num_rounds, turn, passes)
    blt = table.build("blt", schema, table.Options(error="rms"))
    noise = calibrate.calibrate_noise_multiplier(blt, schema, target_epsilon=epsilon, delta=_DELTA)
    return {
        "rounds": num_rounds,
        "passes": passes,
        "ε": f"{epsilon:g}",
        "BLT, passes": f"{noise * blt.rms_error(num_rounds) / dp_sgd:.2f}",
        "bands of a pass": f"{choice.curve[-1].error / dp_sgd:.2f}",
        "best bands": f"{best.error / dp_sgd:.2f}",
        "number of bands": best.num_bands,
        "q": f"{best.sampling_probability:.2g}",
        "seconds": f"{seconds:.1f}",
        "tried": len(choice.curve),
    }


def main() -> None:
    """Writes the table."""
    rows = [row(*case, epsilon) for case in _ROUNDS_AND_PASSES for epsilon in _EPSILONS]
    with (_RESULTS / "cyclic_bands.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
