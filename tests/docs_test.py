"""Runs the examples of the pages in docs/, and compares what they print."""

import doctest
import pathlib
import re
import sys

import numpy as np
import pytest

from tff_dpftrl.data import jsonl

_DOCS = pathlib.Path(__file__).resolve().parents[1] / "docs"
_PAGES = sorted(page for page in _DOCS.rglob("*.md") if ">>> " in page.read_text("utf-8"))


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
    page = (_DOCS / "how_to" / "custom_models.md").read_text("utf-8")
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


@pytest.mark.parametrize(
    "framework, weights",
    [
        ("numpy", lambda names: names["weights"]),
        ("torch", lambda names: names["model"].weight.detach().numpy()[0]),
        ("jax", lambda names: np.asarray(names["params"]["w"])),
    ],
)
def test_the_loops_of_other_frameworks_learn(framework, weights, tmp_path, monkeypatch):
    imported = pytest.importorskip(framework)
    monkeypatch.chdir(tmp_path)
    page = (_DOCS / "how_to" / "other_frameworks.md").read_text("utf-8")
    parts = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    code = {
        part.split("\n")[0]: re.findall(r"```python\n(.*?)```", part, re.DOTALL) for part in parts
    }
    headings = {"numpy": "NumPy", "torch": "PyTorch", "jax": "JAX"}
    names = {}
    try:
        exec(code["What a run needs besides"][0], names)
        exec(code[headings[framework]][0], names)
    finally:
        if framework == "jax":
            imported.config.update("jax_enable_x64", False)
    # The goal has a norm of 1.9, and the noise of the last step one of 0.01.
    assert np.linalg.norm(weights(names) - names["goal"]) < 0.2
    assert names["stream"].round_index == 60
    if framework == "numpy":
        assert names["statement"].has_guarantee
        expected = names["stream"].state()
        exec(code["After a crash"][0], names)
        for name, value in names["stream"].state().items():
            np.testing.assert_array_equal(value, expected[name])


@pytest.mark.parametrize("page", sorted(_DOCS.rglob("*.md")), ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text("utf-8")):
        assert (page.parent / target).exists(), target


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
