"""Executes the notebooks of this folder and checks that they are committed without outputs.

Run it as `python colabs/execute.py [NOTEBOOK ...]`. TFF_DPFTRL_SMALL=1 is set, which
the notebooks read to use small data. Nothing is written back. A notebook whose metadata names
a module that is not installed (`"tff_dpftrl": {"needs": ["torch"]}`) is skipped, and said to be.
"""

import importlib.util
import os
import pathlib
import sys
import time

import nbclient
import nbformat

_HERE = pathlib.Path(__file__).parent
_TIMEOUT_SECONDS = 900


def _execute(path: pathlib.Path) -> str:
    """Executes a notebook; returns what became of it."""
    notebook = nbformat.read(path, as_version=4)
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "code" and (cell.outputs or cell.execution_count):
            sys.exit(f"{path.name}: cell {number} is committed with outputs; clear them.")
    needs = notebook.metadata.get("tff_dpftrl", {}).get("needs", [])
    missing = [name for name in needs if importlib.util.find_spec(name) is None]
    if missing:
        return f"skipped: {', '.join(missing)} is not installed"
    start = time.monotonic()
    nbclient.NotebookClient(
        notebook,
        timeout=_TIMEOUT_SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(_HERE)}},
    ).execute()
    return f"executed in {time.monotonic() - start:.0f} s"


def main() -> None:
    """Executes the named notebooks, or all."""
    os.environ["TFF_DPFTRL_SMALL"] = "1"
    paths = [pathlib.Path(name) for name in sys.argv[1:]] or sorted(_HERE.glob("*.ipynb"))
    if not paths:
        sys.exit("There is no notebook to execute.")
    for path in paths:
        print(f"{path.name}: {_execute(path)}", flush=True)


if __name__ == "__main__":
    main()
