"""Results of cells that were never run, for tests of what is made of them."""

from collections.abc import Mapping
from typing import Any

from tff_dpftrl.sweeps import cells as cells_lib
from tff_dpftrl.sweeps import results


def result(
    values: Mapping[str, Any],
    accuracy: float,
    epsilon: float | None = 1.0,
    *,
    state: str = "finished",
    options: Mapping[str, Any] | None = None,
    **fields: Any,
) -> results.CellResult:
    """A cell of four rounds, evaluated after the second (half as good) and the last.

    Args:
      values: Of the axes.
      accuracy: After the last round.
      epsilon: Of its statement.
      state: How far it got.
      options: Of all cells.
      **fields: Further fields of the result.
    """
    (cell,) = cells_lib.grid(options or {}, {name: (value,) for name, value in values.items()})
    rows = [
        {"round": t, results.ACCURACY: None, "eval_loss": None, "seconds": 0.5}
        for t in (1, 2, 3, 4)
    ]
    rows[1] |= {results.ACCURACY: accuracy / 2, "eval_loss": 5.0}
    rows[3] |= {results.ACCURACY: accuracy, "eval_loss": 4.0 - accuracy}
    return results.CellResult(
        **{
            "cell": cell,
            "state": state,
            "failure": "",
            "rows": rows,
            "epsilon": epsilon,
            "simulated_epsilon": None,
            "delta": 1e-5,
            "noise_multiplier": values.get("noise_multiplier", 0.0),
            "baselines": {"bigrams": 0.2},
        }
        | fields
    )
