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
from collections.abc import Iterable

from tff_dpftrl.reports import results as reported
from tff_dpftrl.sweeps import axes as axes_lib
from tff_dpftrl.sweeps import cells as cells_lib
from tff_dpftrl.sweeps import folder as folder_lib
from tff_dpftrl.sweeps import results as results_lib
from tff_dpftrl.training import composed

_HERE = pathlib.Path(__file__).resolve().parent
_PICTURES = _HERE.parent / "docs" / "experiments"
_WITH_EARLIER_TEXT = "eval_top1_with_earlier_text"


def collect(sweep: pathlib.Path, name: str, *, with_picture: bool = True) -> list[pathlib.Path]:
    """Copies tables and curves of a sweep.

    Args:
      sweep: Folder of a sweep, all cells of which are finished.
      name: Name of the experiment.
      with_picture: Whether its curves are shown.

    Returns:
      The files that were written.

    Raises:
      ValueError: If the folder holds no sweep, or a cell of it is not finished.
    """
    cells = cells_lib.grid(*folder_lib.read(sweep))
    found = [results_lib.read(sweep, cell) for cell in cells]
    unfinished = [result for result in found if result.state != "finished"]
    if unfinished:
        raise ValueError(
            f"{len(unfinished)} of {len(cells)} cells of {sweep} are not finished: go on with it."
        )
    results = _HERE / "results" / name
    results.mkdir(parents=True, exist_ok=True)
    _PICTURES.mkdir(parents=True, exist_ok=True)
    written = [_copy_table(sweep / file, results / file) for file in ("cells.csv", "summary.csv")]
    if with_picture:
        written.append(_PICTURES / f"{name}.png")
        shutil.copyfile(sweep / "curves.png", written[-1])
    baselines = [
        {
            "model": model,
            results_lib.ACCURACY: mean,
            **_with_earlier_text(found, model),
        }
        for model, mean in results_lib.common_baselines(found).items()
    ]
    heads = [_head_words(sweep, cell) for cell in cells]
    columns = ["model", results_lib.ACCURACY, _WITH_EARLIER_TEXT]
    written.append(_write(results / "baselines.csv", columns, baselines))
    written.append(_write(results / "head_words.csv", list(heads[0]), heads))
    return written


def _copy_table(source: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    """Copies a table, naming files without their folders, which are of this machine."""
    with open(source, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        for name in composed.FILES.keys() & row.keys():
            row[name] = axes_lib.short(name, row[name] or None)
    return _write(target, list(rows[0]), rows)


def _head_words(sweep: pathlib.Path, cell: cells_lib.Cell) -> dict[str, object]:
    """How many of the ten likeliest words are frequent ones, on average."""
    path = folder_lib.cell_folder(sweep, cell) / "held_out.json"
    head = json.loads(path.read_text(encoding="utf-8"))["head_words"]
    return {"setting": axes_lib.label(cell.setting), "seed": cell.config.seed} | {
        f"of_{size}": sum(count * share for count, share in enumerate(shares))
        for size, shares in head["histograms"].items()
    }


def _with_earlier_text(found: Iterable[results_lib.CellResult], model: str) -> dict[str, float]:
    """What n-grams have with a cache of each user's earlier text, on average over the cells."""
    name = f"{model}{reported.WITH_EARLIER_TEXT}"
    measured = [result.baselines[name] for result in found if name in result.baselines]
    return {_WITH_EARLIER_TEXT: statistics.fmean(measured)} if measured else {}


def _write(path: pathlib.Path, columns: list[str], rows: list[dict[str, object]]) -> pathlib.Path:
    with open(path, "w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, columns, lineterminator="\n")
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
    parser.add_argument("--no-picture", action="store_true", help="Leave the curves out.")
    args = parser.parse_args()
    name = args.name or args.sweep.resolve().name
    try:
        written = collect(args.sweep, name, with_picture=not args.no_picture)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print("\n".join(map(str, written)))


if __name__ == "__main__":
    main()
