"""Runs the examples of the pages in docs/, and compares what they print."""

import doctest
import pathlib
import re
import sys

import pytest

_DOCS = pathlib.Path(__file__).resolve().parents[1] / "docs"
_PAGES = sorted(page for page in _DOCS.glob("*.md") if ">>> " in page.read_text("utf-8"))


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.name)
def test_examples_print_what_the_page_says(page):
    # The fences of code blocks are no output.
    text = re.sub(r"^```.*$", "", page.read_text("utf-8"), flags=re.MULTILINE)
    test = doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)
    report = []
    doctest.DocTestRunner(verbose=False).run(test, out=report.append)
    assert not report, "".join(report)


@pytest.mark.parametrize("page", sorted(_DOCS.glob("*.md")), ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text("utf-8")):
        assert (page.parent / target).exists(), target


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
