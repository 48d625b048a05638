"""The manifest has each table and picture of the docs, and commands that can be run."""

import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from experiments import make, page

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_DOCS = _ROOT / "docs"

_MODELS, _SECTIONS = make.read()
_TEXT = "\n".join(path.read_text("utf-8") for path in page.PAGES)
_BLOCKS = page.blocks(_TEXT)
_RUN = {name: section for name, section in _SECTIONS.items() if section["commit"]}
_COMMANDS = [*_MODELS.values(), *(c for s in _RUN.values() for c in s["commands"])]
_NUMBERS = {1: "one seed", 2: "two seeds"}


def _caption(position: int) -> str:
    """Returns the last paragraph before a table, commands and pictures left out."""
    before = re.sub(r"^```.*?^```", "", _TEXT[:position], flags=re.MULTILINE | re.DOTALL)
    paragraphs = re.sub(r"^!\[.*$", "", before, flags=re.MULTILINE).strip().split("\n\n")
    return " ".join(paragraphs[-1].split())


def test_each_table_and_picture_has_a_section():
    assert {name for _, name, _ in _BLOCKS} <= _RUN.keys()
    pictures = {name for section in _SECTIONS.values() for name in section["pictures"]}
    shown = {
        target
        for name in ("experiments.md", "gallery.md")
        for target in re.findall(r"!\[[^]]*\]\(([^)]+)\)", (_DOCS / name).read_text("utf-8"))
    }
    assert shown == pictures


@pytest.mark.parametrize("name", _SECTIONS)
def test_what_a_section_names_is_there(name):
    section = _SECTIONS[name]
    known = {"commands", "models", "needs", "results", "pictures", "seeds", "commit"}
    assert section.keys() == known
    assert set(section["models"]) <= _MODELS.keys()
    files = [_ROOT / "experiments" / "results" / file for file in section["results"]]
    files += [_DOCS / picture for picture in section["pictures"]]
    assert files and all(file.exists() == (name in _RUN) for file in files)
    # Files that a command reads are asked for, or are made before.
    for word in shlex.split(" ".join(section["commands"])):
        if word.endswith(".jsonl.gz"):
            assert word in section["needs"]
        if word.startswith("results/pretrained"):
            assert word.removeprefix("results/") in section["models"]


@pytest.mark.parametrize("command", [c for c in _COMMANDS if c.startswith("python ")])
def test_scripts_have_the_flags_that_they_are_called_with(command):
    script, *words = shlex.split(command)[1:]
    if not (_ROOT / script).exists() and script.startswith("benchmarks/"):
        pytest.skip("needs the whole repository")
    source = (_ROOT / script).read_text("utf-8").replace('f"--{kind}"', '"--words" "--wordpiece"')
    assert not [word for word in words if word.startswith("--") and f'"{word}"' not in source]


def test_commands_are_those_of_the_page():
    """Where docs_test.py parses them."""
    page_text = re.sub(r"\\\n", " ", _TEXT)
    for value in re.findall(r'^Q="(.*)"$', page_text, re.MULTILINE):
        page_text = page_text.replace(f'Q="{value}"', "", 1)
        head, found, tail = page_text.partition('Q="')
        page_text = head.replace("$Q", value) + found + tail
    shown = {
        frozenset(shlex.split(line))
        for line in page_text.splitlines()
        if line.startswith("tff-dpftrl ")
    }
    for command in _COMMANDS:
        if command.startswith("tff-dpftrl"):
            assert frozenset(shlex.split(command)) in shown, command


@pytest.mark.parametrize("index", range(len(_BLOCKS)))
def test_a_table_of_few_seeds_says_so(index):
    block, name, axes = _BLOCKS[index]
    seeds = page.num_seeds(block["kind"], name, axes)
    if seeds in _NUMBERS:
        assert _NUMBERS[seeds] in _caption(block.start()).lower(), _caption(block.start())


@pytest.mark.parametrize("name", sorted({name for _, name, _ in _BLOCKS}))
def test_seeds_of_the_manifest_are_those_of_the_results(name):
    found = [page.num_seeds(block["kind"], name, axes) for block, n, axes in _BLOCKS if n == name]
    assert _SECTIONS[name]["seeds"] == min(found) or not any(found)


def test_commits_are_in_the_history():
    history = subprocess.run(
        ["git", "rev-list", "HEAD"], cwd=_ROOT, capture_output=True, text=True, check=False
    )
    shallow = subprocess.run(
        ["git", "rev-parse", "--is-shallow-repository"], cwd=_ROOT, capture_output=True, text=True
    )
    if history.returncode or shallow.stdout.strip() != "false":
        pytest.skip("needs the whole history of the repository")
    known = {commit[:8] for commit in history.stdout.split()}
    assert {section["commit"] for section in _RUN.values()} <= known


def test_one_commit_is_written():
    text = make.MANIFEST.read_text("utf-8")
    changed = make.with_commit(text, "cohorts", "12345678")
    lines = zip(text.splitlines(), changed.splitlines(), strict=True)
    (pair,) = ((before, after) for before, after in lines if before != after)
    assert pair == (f'commit = "{_SECTIONS["cohorts"]["commit"]}"', 'commit = "12345678"')


def test_a_model_that_is_there_is_not_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr(make, "ROOT", tmp_path)
    section = _SECTIONS["cohorts"]
    assert make.steps(_MODELS, section) == [_MODELS["pretrained"], *section["commands"]]
    (tmp_path / "results" / "pretrained").mkdir(parents=True)
    assert make.steps(_MODELS, section) == section["commands"]


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "name what to make"),
        (["no_table"], "there is no 'no_table' in manifest.toml"),
        (["tokenizers"], "first: shakespeare_by_role.jsonl.gz"),
    ],
)
def test_what_cannot_be_made_is_said_first(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(make, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["make.py", *words])
    with pytest.raises(SystemExit, match="2"):
        make.main()
    assert message in " ".join(capsys.readouterr().err.split())


def test_commands_are_run_in_order_and_the_commit_is_kept(tmp_path, monkeypatch, capsys):
    manifest = tmp_path / "manifest.toml"
    manifest.write_text('[models]\n[toy]\ncommands = ["python a.py"]\nseeds = 1\ncommit = "old"\n')
    ran = []

    def run(words, **options):
        ran.append(words)
        return subprocess.CompletedProcess(words, 0, "0123abcd\n" if "rev-parse" in words else "")

    monkeypatch.setattr(make, "MANIFEST", manifest)
    monkeypatch.setattr(make.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["make.py", "toy"])
    make.main()
    assert [words[-1] for words in ran[2:]] == ["a.py", "experiments/page.py"]
    assert manifest.read_text().endswith('commit = "0123abcd"\n')
    monkeypatch.setattr(sys, "argv", ["make.py", "toy", "--dry-run"])
    make.main()
    assert capsys.readouterr().out.endswith("\npython a.py\n") and len(ran) == 4
