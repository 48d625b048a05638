"""Prints the path of the first of some Pythons 3 that runs here: find_python.py 12 13 11."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Sequence


def find(minors: Sequence[int]) -> str | None:
    """Returns the first Python 3 of these minor versions that runs here; None if none does.

    The shims of pyenv are on the path for versions that are not selected, too, and do not run.
    """
    for minor in minors:
        places = [shutil.which(f"python3.{minor}")]
        pyenv = pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv"))
        places += map(str, sorted(pyenv.glob(f"versions/3.{minor}.*/bin/python")))
        for place in filter(None, places):
            done = subprocess.run(
                [place, "-c", "import sys, venv; print(sys.version_info[1])"],
                capture_output=True,
                text=True,
            )
            if done.returncode == 0 and done.stdout.strip() == str(minor):
                return place
    return None


if __name__ == "__main__":
    print(find([int(minor) for minor in sys.argv[1:]]) or "")
