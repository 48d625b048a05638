"""The docstrings of the standard library, which take seconds to find, found once per session."""

import pathlib

import pytest

from tests import shared_folders
from tff_dpftrl.data import docstrings


@pytest.fixture(scope="session")
def standard_library(tmp_path_factory) -> pathlib.Path:
    """A folder for `cache_dir` that has them."""
    return shared_folders.made_once(
        tmp_path_factory,
        "standard_library",
        lambda path: docstrings.read_standard_library(cache_dir=path),
    )
