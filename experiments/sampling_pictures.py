"""Writes pictures of colabs/sampling.ipynb for docs/gallery.md: noise by bands, and by ε.

Run it as `python experiments/sampling_pictures.py`. It executes the notebook, in a minute.
"""

from __future__ import annotations

import base64
import pathlib

import nbclient
import nbformat

_ROOT = pathlib.Path(__file__).resolve().parents[1]
# Names of the files in the order of the notebook's pictures; None for one that is left out.
_NAMES = (None, "sampling_bands", "sampling_epsilon", None)


def main() -> None:
    """Executes the notebook, and writes its pictures."""
    notebook = nbformat.read(_ROOT / "colabs" / "sampling.ipynb", as_version=4)
    where = {"metadata": {"path": str(_ROOT / "colabs")}}
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=where).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    pictures = [
        output.data["image/png"] for output in outputs if "image/png" in output.get("data", ())
    ]
    for name, picture in zip(_NAMES, pictures, strict=True):
        if name is not None:
            path = _ROOT / "docs" / "experiments" / f"{name}.png"
            path.write_bytes(base64.b64decode(picture))
            print(path)


if __name__ == "__main__":
    main()
