"""Executes the notebooks of this folder and checks that they are committed without outputs.

Run it as `python colabs/execute.py [NOTEBOOK ...]`. TFF_DPFTRL_SMALL=1 is set, which
the notebooks read to use small data. Nothing is written back.
"""

import os
import pathlib
import sys
import time

import nbclient
import nbformat

_HERE = pathlib.Path(__file__).parent
_TIMEOUT_SECONDS = 900


def _execute(path: pathlib.Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "code" and (cell.outputs or cell.execution_count):
            sys.exit(f"{path.name}: cell {number} is committed with outputs; clear them.")
    nbclient.NotebookClient(
        notebook,
        timeout=_TIMEOUT_SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(_HERE)}},
    ).execute()


def main() -> None:
    """Executes the named notebooks, or all."""
    os.environ["TFF_DPFTRL_SMALL"] = "1"
    paths = [pathlib.Path(name) for name in sys.argv[1:]] or sorted(_HERE.glob("*.ipynb"))
    if not paths:
        sys.exit("There is no notebook to execute.")
    for path in paths:
        start = time.monotonic()
        _execute(path)
        print(f"{path.name}: executed in {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
