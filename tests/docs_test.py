"""Runs the examples of pages, and checks what a reader would follow: links, commands, code."""

import ast
import doctest
import itertools
import json
import pathlib
import re
import shlex

import numpy as np
import pytest

import tff_dpftrl
from tff_dpftrl.cli import main
from tff_dpftrl.data import jsonl

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_DOCS = _ROOT / "docs"
_PAGES = sorted(page for page in _DOCS.rglob("*.md") if ">>> " in page.read_text("utf-8"))
_TEXTS = sorted(
    [
        *_ROOT.glob("*.md"),
        *_DOCS.rglob("*.md"),
        *_ROOT.glob("benchmarks/*.md"),
        *_ROOT.glob("experiments/*.md"),
        *_ROOT.glob("tff_dpftrl/*/README.md"),
    ]
)
_OPERATORS = {"|", "&&", ";", "&", ">", ">>", "||", ")", "<"}
_PARSER = main._build_parser()


def _name(page):
    return str(page.relative_to(_ROOT))


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.name)
def test_examples_print_what_the_page_says(page):
    # The fences of code blocks are no output.
    text = re.sub(r"^```.*$", "", page.read_text("utf-8"), flags=re.MULTILINE)
    test = doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)
    report = []
    doctest.DocTestRunner(verbose=False).run(test, out=report.append)
    if "No module named 'tensorflow_federated'" in "".join(report):
        pytest.skip("the page is about TFF")
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
        _check_resuming(code["After a crash"][0], names, monkeypatch)


def _check_resuming(code, names, monkeypatch):
    """With a known seed, a run that stops in a round ends with the model of one that does not."""
    step, sampler = names["step"], names["sampler"]

    def run(step):
        stream = tff_dpftrl.NoiseStream(
            names["strategy"],
            noise_multiplier=names["z"],
            clip_norm=names["clip_norm"],
            template=[np.zeros(5)],
            seed=1,
        )
        names.update(weights=np.zeros(5, np.float32), stream=stream, step=step)
        exec(code, names)
        return names["weights"]

    def interrupted(t, cohort):
        step(t, cohort)
        if t == 30:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(interrupted)
    resumed = run(step)
    assert names["stream"].round_index == names["observed"].num_rounds == sampler.num_rounds
    pathlib.Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    np.testing.assert_array_equal(resumed, run(step))


@pytest.mark.parametrize("page", _TEXTS, ids=_name)
def test_links_lead_to_files_and_headings(page):
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]+))?\)", page.read_text("utf-8")):
        path = page.parent / target if target else page
        assert path.exists() or not (_ROOT / "setup.py").exists(), target
        if anchor and path.suffix == ".md":
            assert anchor in _anchors(path.read_text("utf-8")), f"{target}#{anchor}"


def _without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def _anchors(text: str) -> set[str]:
    """Returns the anchors of a page's headings, as forges and the site make them."""
    found: dict[str, int] = {}
    for heading in re.findall(r"^#+ (.*)$", _without_code(text), re.MULTILINE):
        anchor = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        found[anchor] = found.get(anchor, -1) + 1
    return {f"{anchor}-{i}" if i else anchor for anchor, n in found.items() for i in range(n + 1)}


def test_anchors_are_those_of_forges():
    text = "# At equal ε, `x_y`!\n## Twice\n```sh\n# no heading\n```\n## Twice\n"
    assert _anchors(text) == {"at-equal-ε-x_y", "twice", "twice-1"}


@pytest.mark.parametrize("page", _TEXTS, ids=_name)
def test_source_lines_are_short(page):
    """Rows of tables, and what cannot be broken, may be longer."""
    lines = page.read_text("utf-8").splitlines()
    long = [line for line in lines if len(line) > 120 and not line.lstrip("> ").startswith("|")]
    assert not [line for line in long if " " in line[:120].lstrip("-> ")]


def _texts_of_cells(path):
    cells = json.loads(path.read_text("utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]


@pytest.mark.parametrize("path", sorted(_ROOT.glob("colabs/*.ipynb")), ids=_name)
def test_lines_and_links_of_notebooks(path):
    text = "\n".join(_texts_of_cells(path))
    assert not [x for x in text.splitlines() if len(x) > 120 and not x.startswith("|")]
    for target in re.findall(r"\]\(([^)#:\s]+)\)", text):
        assert (path.parent / target).exists(), target


@pytest.mark.parametrize("page", _TEXTS, ids=_name)
def test_python_blocks_compile(page):
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.M | re.DOTALL):
        if ">>> " not in block:
            compile(block, page.name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def _commands(text: str) -> list[list[str]]:
    """Returns the arguments of each `tff-dpftrl` in the blocks of a shell."""
    found = []
    for block in re.findall(r"^```(?:sh|bash)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        block = block.replace("\\\n", " ")
        for name, value in re.findall(r"^\s*(\w+)=\"([^\"]*)\"$", block, re.MULTILINE):
            block = re.sub(rf"\${name}\b", value, block)
        for line in block.splitlines():
            lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            words = list(lexer)
            for i, word in enumerate(words):
                if word.rpartition("/")[2] == "tff-dpftrl" and word not in words[:i]:
                    rest = itertools.takewhile(lambda w: w not in _OPERATORS, words[i + 1 :])
                    found.append(list(rest))
    return found


@pytest.mark.parametrize("page", _TEXTS, ids=_name)
def test_commands_are_understood(page):
    for arguments in _commands(page.read_text("utf-8")):
        if {"...", "…"} & {*arguments}:  # What else is needed is left out.
            parser, words = _PARSER, iter(arguments)
            while parser._subparsers is not None:  # As `task new` has.
                parser = parser._subparsers._group_actions[0].choices[next(words)]
            known = parser._option_string_actions
            assert {a for a in arguments if a.startswith("-")} <= known.keys(), arguments
            continue
        try:
            _PARSER.parse_args(arguments)
        except SystemExit as stop:  # 0 after --help.
            assert not stop.code, " ".join(arguments)


def test_a_command_that_does_not_exist_is_seen():
    text = """```sh
Q="--config x"
ls && tff-dpftrl train $Q \\
    --output y | tee z  # Why.
```"""
    assert _commands(text) == [["train", "--config", "x", "--output", "y"]]
