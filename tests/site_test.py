"""Tests the pages of the site: what is made from the code, and what must agree with it."""

import argparse
import importlib.util
import json
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import tff_dpftrl
from tff_dpftrl.cli import main
from tff_dpftrl.training import composed, config, metrics_columns, options

_DOCS = pathlib.Path(__file__).resolve().parents[1] / "docs"


def _module(name):
    sys.path.insert(0, str(_DOCS))
    try:
        spec = importlib.util.spec_from_file_location(name, _DOCS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(_DOCS))
    return module


reference_pages = _module("reference_pages")
markdown_docstrings = _module("markdown_docstrings")
stage = _module("stage")


def _text(name):
    return (_DOCS / name).read_text("utf-8")


@pytest.fixture(scope="module")
def pages():
    return dict(reference_pages.all_pages())


def test_each_command_has_a_page_with_all_its_options(pages):
    every = reference_pages.parsers(main._build_parser())
    assert len(every) > 20
    for prog, parser in every.items():
        if prog == "tff-dpftrl":
            continue
        page = pages[f"reference/commands/{prog.split()[1]}.md"]
        assert f"# {prog}\n" in page
        for action in parser._actions:
            if action.help != argparse.SUPPRESS:
                assert all(flag in page for flag in action.option_strings), action


def test_each_key_and_metric_is_explained(pages):
    keys, metrics = pages["reference/configuration.md"], pages["reference/metrics.md"]
    assert all(f"| `{name}` |" in keys for name in composed.options_of(config.TrainingConfig))
    assert "| `num_rounds` | integer |" in keys
    for name in options.built_in_configs():  # With what it runs, the beginning of its comment.
        assert re.search(rf"^\| `{name}` \| \w.* \|$", keys, re.MULTILINE)
    assert all(f"| `{column.name}` |" in metrics for column in metrics_columns.COLUMNS)
    assert "| `tff_dpftrl_rounds_committed` | counter |" in metrics


def test_each_public_name_leads_to_its_module(pages):
    table, modules = pages["reference/python.md"], "\n".join(pages.values())
    for name in tff_dpftrl.__all__:
        where = tff_dpftrl._MODULE_OF.get(name)
        if where:
            module = f"tff_dpftrl.{where.partition(':')[0]}"
            assert f"`{name} <{module}." in table
            assert f".. automodule:: {module}\n" in modules


def test_text_of_the_code_has_no_meaning_in_markdown():
    assert reference_pages._plain("a | b *c* <d> `e | *f*`") == r"a \| b \*c\* \<d\> `e \| *f*`"
    page = "docs/how_to/tables.md"
    assert reference_pages._plain(f"see {page}: `x`") == f"see [{page}](/{page}): `x`"


@pytest.mark.parametrize(
    "text, expected",
    [
        ("Code in `x_` and *args.", ["Code in \\ ``x_``\\  and \\*args."]),
        ("A text:\n  laid out\n  so\nGoes on.", ["A text:", "", "::", ""]),
        ("Args:\n  x: Number.\n    More.", ["Args:", "  x: Number.", "    More."]),
        ("- An item\n  goes on.", ["- An item", "  goes on."]),
        ("Example:\n```\nx = *y\n```", ["", "::", "", "  x = *y", ""]),
    ],
)
def test_docstrings_are_read_as_they_are_meant(text, expected):
    lines = markdown_docstrings.as_restructured_text(text.split("\n"))
    assert "\n".join(expected) in "\n".join(lines)


def test_a_notebook_is_shown_with_outputs_of_its_own_source_only(tmp_path):
    path = next((_DOCS.parent / "colabs").glob("quickstart.ipynb"))
    executed = json.loads(path.read_text("utf-8"))
    executed["cells"][-1]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "42"}]
    (tmp_path / path.name).write_text(json.dumps(executed))
    shown = stage.notebooks(tmp_path)
    assert json.loads(shown["colabs/quickstart.ipynb"]) == executed
    assert "was not executed" in shown["colabs/secagg.ipynb"]
    executed["cells"][0]["source"] = "# Changed since"
    (tmp_path / path.name).write_text(json.dumps(executed))
    assert "was not executed" in stage.notebooks(tmp_path)["colabs/quickstart.ipynb"]


def test_the_sidebar_has_the_order_of_the_front_page():
    links = re.findall(r"^- \[.*?\]\((.*?)\.(?:md|ipynb)\)", _text("README.md"), re.MULTILINE)
    listed = re.findall(r"- file: ((?:docs|colabs)/.*)", _text("_toc.yml"))
    assert listed == [x.removeprefix("../") if x.startswith("../") else f"docs/{x}" for x in links]


def test_pictures_of_experiments_are_in_the_gallery_with_their_captions():
    gallery = (_DOCS / "gallery.md").read_text("utf-8")
    shown = re.findall(r"!\[([^]]+)\]\(([^)]+)\)\n\n\*([^*]+)\.\*", gallery)
    assert {path.name for path in (_DOCS / "experiments").glob("*.png")} <= {
        pathlib.PurePath(path).name for _, path, _ in shown
    }
    assert all(alt == " ".join(caption.split()) for alt, _, caption in shown)


def test_files_for_other_programs_are_links_of_their_pages():
    assert "](privacy_statement.schema.json)" in _text("reference/statements.md")
    page = _text("reference/wire_protocol.md")
    for file in ("runtime/protocol/wire", "runtime/plans/plan", "secure_sums/secure_sum"):
        assert f"](../../tff_dpftrl/{file}.proto)" in page


# Questions of newcomers, each with pages one of which answers it.
_QUESTIONS = {
    "how do I choose epsilon": ["choose_privacy"],
    "how do I resume": ["resume"],
    "can I use this with flower": ["from_flower", "other_frameworks"],
    "how to load a csv": ["tables"],
    "what is min_sep": ["participation", "glossary"],
    "my run crashed, how do I continue": ["resume"],
    "which mechanism should I use": ["which_mechanism"],
    "what is a clip norm": ["adaptive_clipping", "glossary"],
    "can I train a Keras model of my own": ["custom_models"],
    "how do I fine-tune a Hugging Face model": ["checkpoints"],
    "how do I fine-tune on my users' texts": ["how_to/finetuning"],
    "how do I put the model on a phone with TensorFlow Lite": ["export"],
    "does it work with PyTorch": ["other_frameworks"],
    "how do I migrate from Opacus": ["from_opacus"],
    "what does secure aggregation hide from the server": ["secure_aggregation"],
    "how do I audit a run": ["audit_a_run"],
    "how do I read the privacy statement": ["reading_a_statement"],
    "what files are in the results folder": ["results_folder"],
    "what is a neighbour": ["neighbours"],
    "which python version do I need": ["environments"],
    "how do I compare many learning rates in a sweep": ["sweeps"],
    "what is not protected": ["limits"],
    "what words do I put in the vocabulary": ["vocabulary"],
    "how large is epsilon in published deployments": ["published_deployments"],
    "run the server on two machines": ["two_machines", "run_a_server"],
    "how do I start a server for devices": ["run_a_server"],
}

# What Sphinx puts before search_order.js, with a simpler stemmer.
_BEFORE = """
var stopwords = ["a", "and", "are", "at", "be", "for", "in", "is", "it", "of", "on", "or", "the",
                 "this", "to", "with"];
const Search = {};
class Stemmer {
  stemWord(word) {
    return word.length > 4 ? word.replace(/(ing|ed|es|s|e)$/, "") : word;
  }
}
"""
# An index as Sphinx writes it, of pages as [name, text], and the three best pages of each question.
_AFTER = """
const {pages, questions} = JSON.parse(require("fs").readFileSync(0, "utf-8"));
const stem = (word) => new Stemmer().stemWord(word);
const index = {docnames: [], filenames: [], titles: [], terms: {}, titleterms: {}};
const add = (terms, text, page) =>
  splitWords(text).map(stem).forEach((term) => {
    terms[term] = Object.hasOwn(terms, term) ? terms[term] : [];
    if (!terms[term].includes(page)) terms[term].push(page);
  });
pages.forEach(([name, text], page) => {
  const headings = text.replace(/^```.*?^```/gms, "").match(/^#+ .*$/gm) ?? [];
  index.docnames.push(name);
  index.filenames.push(name);
  index.titles.push((headings[0] ?? "").replace(/^# /, ""));
  headings.forEach((heading) => add(index.titleterms, heading, page));
  add(index.terms, text, page);
});
Search._index = index;
const best = questions.map((question) => {
  const words = splitWords(question).filter((word) => !stopwords.includes(word)).map(stem);
  const found = Search.performTermsSearch(new Set(words));
  found.sort((a, b) => Scorer.score(b) - Scorer.score(a));
  return found.slice(0, 3).map((result) => result[0]);
});
console.log(JSON.stringify(best));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node, which runs the search")
def test_the_search_answers_questions_in_plain_language(pages):
    root = _DOCS.parent
    paths = [*_DOCS.rglob("*.md"), *root.glob("*.md"), *root.glob("tff_dpftrl/*/README.md")]
    paths += [*root.glob("benchmarks/*.md"), *root.glob("experiments/*.md")]
    texts = [(str(p.relative_to(root).with_suffix("")), p.read_text("utf-8")) for p in paths]
    texts += [(name.removesuffix(".md"), text) for name, text in pages.items()]
    done = subprocess.run(
        ["node", "-e", _BEFORE + _text("search_order.js") + _AFTER],
        input=json.dumps({"pages": texts, "questions": [*_QUESTIONS]}),
        capture_output=True,
        text=True,
        check=True,
    )
    found = dict(zip(_QUESTIONS, json.loads(done.stdout), strict=True))
    missed = {
        question: found[question]
        for question, right in _QUESTIONS.items()
        if not any(page.endswith(name) for page in found[question] for name in right)
    }
    assert not missed
