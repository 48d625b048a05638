"""What mechanisms lose at equal privacy: `python experiments/mechanism_losses.py`.

Nothing is trained. At one ε the noise in the sum of the updates so far is proportional to the
loss, sensitivity times error (BLT paper, section 2). Writes
experiments/results/mechanism_losses.csv.
"""

from __future__ import annotations

import csv
import pathlib

from tff_dpftrl.mechanisms import table
from tff_dpftrl.participation import schema as schema_lib

_RESULTS = pathlib.Path(__file__).resolve().parent / "results" / "mechanism_losses.csv"
_SCHEMAS = {
    "mechanisms_commits": schema_lib.MinSep.as_many_as_fit(200, 154),
    "mechanisms_irc": schema_lib.MinSep.as_many_as_fit(150, 50),
}
_MECHANISMS = {
    "bandmf": ("bandmf", table.DEFAULTS),
    "bandtoep": ("bandtoep", table.DEFAULTS),
    "blt, 4 buffers": ("blt", table.Options(buffers=4)),
    "blt, 2 buffers": ("blt", table.Options(buffers=2)),
    "tree, full": ("tree-full", table.DEFAULTS),
    "tree, online": ("tree", table.DEFAULTS),
    "identity": ("identity", table.DEFAULTS),
}


def rows() -> list[dict[str, object]]:
    """One row for each schema and mechanism."""
    found = []
    for experiment, schema in _SCHEMAS.items():
        for label, (name, options) in _MECHANISMS.items():
            strategy = table.build(name, schema, options)
            found.append(
                {
                    "experiment": experiment,
                    "rounds": schema.num_rounds,
                    "stride": schema.min_sep,
                    "participations": schema.max_participations,
                    "mechanism": label,
                    "largest loss": f"{strategy.max_loss(schema):.3f}",
                    "root mean square loss": f"{strategy.rms_loss(schema):.3f}",
                }
            )
    return found


def main() -> None:
    """Computes and writes."""
    found = rows()
    _RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with open(_RESULTS, "w", newline="", encoding="utf-8") as file:
        losses = csv.DictWriter(file, found[0], lineterminator="\n")
        losses.writeheader()
        losses.writerows(found)
    print(_RESULTS)


if __name__ == "__main__":
    main()
