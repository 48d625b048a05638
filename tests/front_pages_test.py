"""The front pages: README.md is one screen, and docs/README.md lists every page once."""

import pathlib
import re
import sys

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_DOCS = _ROOT / "docs"


def test_the_docs_list_every_page_and_notebook_once():
    text = (_DOCS / "README.md").read_text("utf-8")
    listed = re.findall(r"^- \[[^\]]+\]\(([^)]+)\): ", text, re.MULTILINE)
    pages = {page.relative_to(_DOCS).as_posix() for page in _DOCS.rglob("*.md")} - {"README.md"}
    of_colabs = [target for target in listed if target.startswith("../colabs/")]
    assert sorted(set(listed) - set(of_colabs)) == sorted(pages)
    assert len(set(listed)) == len(listed)
    notebooks = {f"../colabs/{path.name}" for path in (_ROOT / "colabs").glob("*.ipynb")}
    assert set(of_colabs) == notebooks or not notebooks  # They may be left out of a sandbox.


def test_the_readme_is_one_screen_that_hides_no_baseline():
    text = (_ROOT / "README.md").read_text("utf-8")
    assert len(text.split()) <= 450
    for target in re.findall(r"\]\(([^)#:\s]+)\)", text):
        assert (_ROOT / target).exists() or not (_ROOT / "setup.py").exists(), target
    for page in (_ROOT / "README.md", _DOCS / "experiments.md"):
        assert len(re.findall("bigrams", page.read_text("utf-8"), re.IGNORECASE)) <= len(
            re.findall("trigrams", page.read_text("utf-8"), re.IGNORECASE)
        )


if __name__ == "__main__":
    import pytest

    sys.exit(pytest.main([__file__]))
