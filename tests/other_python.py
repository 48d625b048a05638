"""Another Python, whose environment has another TensorFlow, for tests of several versions."""

import os
import pathlib
import sys

import pytest

_VARIABLE = "OTHER_TENSORFLOW_PYTHON"
_ROOT = pathlib.Path(__file__).parents[1]


def path() -> str:
    """Returns the interpreter that OTHER_TENSORFLOW_PYTHON or the Makefile's environments name."""
    own = pathlib.Path(sys.prefix).resolve()
    environments = [_ROOT / name for name in (".venv", ".venv-tff")]
    pythons = [one / "bin" / "python" for one in environments if one.resolve() != own]
    found = os.environ.get(_VARIABLE) or next((str(one) for one in pythons if one.exists()), None)
    if found is None:
        pytest.skip(
            f"needs another TensorFlow: set {_VARIABLE} to the Python of its environment, or run "
            "`make .venv-tff/.ready` with Python 3.11"
        )
    return found
