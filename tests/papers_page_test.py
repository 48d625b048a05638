"""The page of the papers has each table and figure, with a status that its links carry."""

import json
import pathlib
import re

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_PAGE = _ROOT / "docs" / "reference" / "papers.md"
# Tables and figures of each paper, appendices included, as captions and texts number them.
_PAPERS = {
    "Gboard with DP-FTRL": (2, 4),
    "BLT-DP-FTRL": (4, 15),
    "DP-FedAvg": (3, 12),
    "Fine-tuning with user-level privacy": (2, 18),
    "Federated learning at scale": (1, 9),
}
_STATUSES = {"exactly", "in shape", "not seen", "config only", "not done"}


def _rows():
    """Returns the paper, the caption, the status and the last cell of each row."""
    found = []
    for section in _PAGE.read_text("utf-8").split("\n## ")[1:]:
        for line in section.splitlines():
            if line.startswith(("| Table", "| Figure")):
                cells = [cell.strip() for cell in line.strip("|").split(" | ")]
                found.append((section.partition("\n")[0], *cells))
    return found


_ROWS = _rows()


@pytest.mark.parametrize("paper", _PAPERS)
def test_every_table_and_figure_has_its_rows(paper):
    kinds = dict(zip(("Table", "Figure"), _PAPERS[paper], strict=True))
    captions = [caption for name, caption, *_ in _ROWS if name == paper]
    assert len(set(captions)) == len(captions)
    listed = [re.fullmatch(r"(Table|Figure) (\d+)(?: \(.+\))?", caption) for caption in captions]
    expected = [(kind, str(n)) for kind, count in kinds.items() for n in range(1, count + 1)]
    assert list(dict.fromkeys(match.groups() for match in listed)) == expected


def test_there_are_no_rows_of_other_papers():
    assert {paper for paper, *_ in _ROWS} == set(_PAPERS)


@pytest.mark.parametrize("row", _ROWS, ids=lambda row: f"{row[0]}, {row[1]}")
def test_a_status_has_what_shows_it_or_a_reason(row):
    _, _, status, last = row
    assert status in _STATUSES
    links = re.findall(r"\[([^]]+)\]\(([^)#]+)(?:#[^)]+)?\)", last)
    for _, target in links:
        path = _PAGE.parent / target
        assert path.exists() or not (_ROOT / "setup.py").exists(), target
    tests = [(text, target) for text, target in links if text.startswith("test_")]
    for name, target in tests:
        path = _PAGE.parent / target
        if path.exists():  # A sandbox has the tests of one folder.
            assert f"\ndef {name}(" in path.read_text("utf-8"), name
    match status:
        case "exactly":
            assert tests
        case "in shape" | "not seen" | "config only":
            assert links and len(last.split()) >= 2
        case "not done":
            assert len(re.sub(r"\[[^]]+\]\([^)]+\)", "", last).split()) >= 5


@pytest.mark.parametrize("paper", _PAPERS)
def test_a_notebook_of_each_paper_ends_in_its_figure_beside_ours(paper):
    (section,) = re.findall(rf"\n## {paper}\n(.*?)\n\|", _PAGE.read_text("utf-8"), re.DOTALL)
    (target,) = re.findall(r"\]\((\S+\.ipynb)\)\s+ends in", section)
    *_, words, code = json.loads((_PAGE.parent / target).read_text("utf-8"))["cells"]
    heading = words["source"][0].rstrip()
    assert re.fullmatch(r"## The papers?['’]s? figures beside ours", heading), heading
    assert code["cell_type"] == "code"
