"""Runs the examples of the pages in docs/, and compares what they print."""

import doctest
import pathlib
import re
import sys

import pytest

from tff_dpftrl.data import jsonl

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


@pytest.mark.slow
def test_the_example_of_a_custom_model_runs_whole(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = (_DOCS / "custom_models.md").read_text("utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 2
    names = {}
    for block in blocks:
        exec(block, names)
    assert names["results"].statement.has_guarantee
    assert not names["results"].statement.headline_caveats
    assert names["results"].summary in capsys.readouterr().out
    statement = (tmp_path / "results" / "custom_model" / "privacy_statement.md").read_text()
    assert "cats and dogs" in statement and "trained on: nothing (so the operator" in statement
    texts = jsonl.read(tmp_path / "users.jsonl")
    assert {user: texts.examples(user) for user in texts.user_ids} == names["users"]


@pytest.mark.parametrize("page", sorted(_DOCS.glob("*.md")), ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text("utf-8")):
        assert (page.parent / target).exists(), target


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
