"""What is not public in TFF is imported in one file, tried with one release."""

from __future__ import annotations

import pathlib
import re
import sys

import pytest
import tensorflow_federated as tff

import tff_dpftrl
from tff_dpftrl.execution import tff_private

_PRIVATE_IMPORT = re.compile(r"^\s*(from|import) tensorflow_federated\.\w", re.MULTILINE)


def test_release_of_tff_is_the_one_that_was_tried():
    assert tff.__version__ == tff_private.TESTED_VERSION, (
        f"TFF is {tff.__version__}, but what tff_private.py imports was tried with "
        f"{tff_private.TESTED_VERSION}: check each name there, run tests/execution, then change "
        "TESTED_VERSION."
    )


def test_every_listed_name_exists():
    for name in tff_private.__all__:
        assert hasattr(tff_private, name)


def test_no_other_file_imports_what_is_not_public():
    package = pathlib.Path(tff_dpftrl.__file__).parent
    importers = [
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if _PRIVATE_IMPORT.search(path.read_text(encoding="utf-8"))
    ]
    assert importers == ["execution/tff_private.py"]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
