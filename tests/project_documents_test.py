"""Tests that the documents at the top name what there is."""

import pathlib
import re

import pytest

from tff_dpftrl import version

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_SUFFIXES = (".py", ".md", ".proto", ".toml", ".sh", ".lock", ".cff", "/")


def _paths(text: str) -> set[str]:
    """Returns what stands in backticks and looks like a path of this repository."""
    quoted = re.findall(r"`([\w./-]+)`", text)
    return {name for name in quoted if "/" in name and name.endswith(_SUFFIXES)}


@pytest.mark.skipif(not (_ROOT / "setup.py").exists(), reason="needs the whole repository")
@pytest.mark.parametrize("name", ["ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_paths_exist(name):
    paths = _paths((_ROOT / name).read_text("utf-8"))
    assert len(paths) > 3
    roots = [_ROOT, _ROOT / "tff_dpftrl"]
    missing = [path for path in paths if not any((root / path).exists() for root in roots)]
    assert not missing


def test_a_path_that_does_not_exist_is_seen():
    assert _paths("see `runtime/store/no_such.py`, `tests/` and `a/b`") == {
        "runtime/store/no_such.py",
        "tests/",
    }


def test_the_citation_has_the_version_of_the_package():
    citation = (_ROOT / "CITATION.cff").read_text("utf-8")
    assert f"\nversion: {version.__version__}\n" in citation
