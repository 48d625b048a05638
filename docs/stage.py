"""Puts the site's pages into one folder, from where Sphinx reads them.

Pages of the repository are links, at their paths there; those of `reference_pages` are written
beside them. Notebooks are those that `make notebooks` has executed. One whose source has changed
since, or that was skipped, is shown without outputs, and says so.
"""

from __future__ import annotations

import json
import pathlib
import shutil

import reference_pages

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_LINKED = ("docs", "experiments", "benchmarks", "tests", "tff_dpftrl", "LICENSE", "CITATION.cff")
_NOT_EXECUTED = "> This notebook was not executed for this page: its cells have no outputs here."


def stage(folder: pathlib.Path, executed: pathlib.Path) -> None:
    """Makes the folder anew.

    Args:
      folder: Folder that Sphinx reads.
      executed: Folder of executed notebooks; it may be missing.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in (*_LINKED, *(page.name for page in _ROOT.glob("*.md"))):
        (folder / name).symlink_to(_ROOT / name)
    for name, text in {**notebooks(executed), **dict(reference_pages.all_pages())}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def notebooks(executed: pathlib.Path) -> dict[str, str]:
    """Returns the notebooks by path, with outputs where they are of the same source."""
    pages = {}
    for path in sorted((_ROOT / "colabs").glob("*.ipynb")):
        page = json.loads(path.read_text("utf-8"))
        copy = executed / path.name
        done = json.loads(copy.read_text("utf-8")) if copy.exists() else {"cells": []}
        if [_source(cell) for cell in done["cells"]] == [_source(cell) for cell in page["cells"]]:
            page = done
        else:
            note = {"cell_type": "markdown", "id": "note", "metadata": {}, "source": _NOT_EXECUTED}
            page["cells"].insert(1, note)
        pages[f"colabs/{path.name}"] = json.dumps(page)
    return pages


def _source(cell: dict) -> str:
    return "".join(cell["source"])


if __name__ == "__main__":
    stage(_ROOT / "build" / "site-pages", _ROOT / "build" / "notebooks")
