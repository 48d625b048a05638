"""Executes the notebooks of this folder and checks that they are committed without outputs.

Run it as `python colabs/execute.py [--output DIR] [--jobs N] [--needing MODULE] [NOTEBOOK ...]`; N
are executed at a time. TFF_DPFTRL_SMALL=1 is set, which the notebooks read to use small data.
Executed copies go to DIR, from where `make docs` takes them; nothing is written back. Each notebook
must show a picture.
A notebook whose metadata names a module that is not installed (`"tff_dpftrl": {"needs":
["torch"]}`) is skipped, and said to be.
"""

import argparse
import concurrent.futures
import importlib.util
import os
import pathlib
import sys
import time

import nbclient
import nbformat

_HERE = pathlib.Path(__file__).parent
_TIMEOUT_SECONDS = 900


def _needs(path: pathlib.Path) -> list[str]:
    """Returns the modules that the notebook's metadata names."""
    return nbformat.read(path, as_version=4).metadata.get("tff_dpftrl", {}).get("needs", [])


def _execute(path: pathlib.Path, output: pathlib.Path | None) -> str:
    """Executes a notebook, and writes the copy with outputs; returns what became of it."""
    notebook = nbformat.read(path, as_version=4)
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "code" and (cell.outputs or cell.execution_count):
            sys.exit(f"{path.name}: cell {number} is committed with outputs; clear them.")
    missing = [name for name in _needs(path) if importlib.util.find_spec(name) is None]
    if missing:
        return f"skipped: {', '.join(missing)} is not installed"
    start = time.monotonic()
    nbclient.NotebookClient(
        notebook,
        timeout=_TIMEOUT_SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(_HERE)}},
    ).execute()
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", ())]
    if not any("image/png" in out.get("data", ()) for out in outputs):
        sys.exit(f"{path.name}: no cell shows a picture; draw one.")
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, output / path.name)
    return f"executed in {time.monotonic() - start:.0f} s"


def main() -> None:
    """Executes the named notebooks, or all."""
    parser = argparse.ArgumentParser(description="Executes notebooks on small data.")
    parser.add_argument("notebooks", nargs="*", type=pathlib.Path, help="Default: all.")
    parser.add_argument("--output", metavar="DIR", type=pathlib.Path, help="For executed copies.")
    parser.add_argument("--needing", metavar="MODULE", help="Only those that need this module.")
    parser.add_argument("--jobs", metavar="N", type=int, default=2, help="Default: 2.")
    args = parser.parse_args()
    os.environ["TFF_DPFTRL_SMALL"] = "1"
    paths = args.notebooks or sorted(_HERE.glob("*.ipynb"))
    paths = [path for path in paths if args.needing is None or args.needing in _needs(path)]
    if not paths:
        sys.exit("There is no notebook to execute.")
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:  # A kernel is a process.
        running = {path: pool.submit(_execute, path, args.output) for path in paths}
        try:
            for path, result in running.items():
                print(f"{path.name}: {result.result()}", flush=True)
        finally:
            pool.shutdown(cancel_futures=True)


if __name__ == "__main__":
    main()
