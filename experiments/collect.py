"""Keeps what a finished sweep found: `python experiments/collect.py results/NAME [NAME]`.

Writes experiments/results/NAME/ (cells.csv and summary.csv as the sweep wrote them,
baselines.csv, head_words.csv) and docs/experiments/NAME.png. `page.py` then puts the figures
into docs/experiments.md.
"""

from __future__ import annotations

import argparse
import csv
import json
import pathlib
import shutil
import statistics

_HERE = pathlib.Path(__file__).resolve().parent
_PICTURES = _HERE.parent / "docs" / "experiments"


def collect(sweep: pathlib.Path, name: str) -> list[pathlib.Path]:
    """Copies tables and curves of a sweep.

    Args:
      sweep: Folder of a sweep, all cells of which are finished.
      name: Name of the experiment.

    Returns:
      The files that were written.

    Raises:
      ValueError: If a cell is not finished.
    """
    with open(sweep / "cells.csv", newline="") as file:
        cells = list(csv.DictReader(file))
    unfinished = [cell for cell in cells if cell["state"] != "finished"]
    if unfinished:
        raise ValueError(f"{len(unfinished)} of {len(cells)} cells of {sweep} are not finished.")
    results = _HERE / "results" / name
    results.mkdir(parents=True, exist_ok=True)
    _PICTURES.mkdir(parents=True, exist_ok=True)
    written = [results / file for file in ("cells.csv", "summary.csv")]
    for path in written:
        shutil.copyfile(sweep / path.name, path)
    picture = _PICTURES / f"{name}.png"
    shutil.copyfile(sweep / "curves.png", picture)
    folders = sorted(path for path in (sweep / "cells").iterdir() if path.is_dir())
    baselines = [json.loads((f / "private" / "baselines.json").read_text()) for f in folders]
    written += [
        _write(
            results / "baselines.csv",
            [
                {
                    "model": model,
                    "eval_top1_in_vocab": statistics.fmean(b[model] for b in baselines),
                }
                for model in baselines[0]
            ],
        ),
        _write(results / "head_words.csv", [_head_words(folder) for folder in folders]),
    ]
    return [*written, picture]


def _head_words(cell: pathlib.Path) -> dict[str, object]:
    """How many of the ten likeliest words are frequent ones, on average."""
    head = json.loads((cell / "held_out.json").read_text())["head_words"]
    return {"cell": cell.name} | {
        f"of_{size}": sum(count * share for count, share in enumerate(shares))
        for size, shares in head["histograms"].items()
    }


def _write(path: pathlib.Path, rows: list[dict[str, object]]) -> pathlib.Path:
    with open(path, "w", newline="") as file:
        table = csv.DictWriter(file, rows[0], lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    return path


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sweep", type=pathlib.Path, help="Folder of a finished sweep.")
    parser.add_argument("name", nargs="?", help="Name of the experiment; the folder's if left out.")
    args = parser.parse_args()
    try:
        written = collect(args.sweep, args.name or args.sweep.resolve().name)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print("\n".join(map(str, written)))


if __name__ == "__main__":
    main()
