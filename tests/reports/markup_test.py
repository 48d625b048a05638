"""Tests of `reports.markup`."""

from xml.etree import ElementTree

import pytest

from tests.reports import made_up
from tff_dpftrl.accounting import statement_text
from tff_dpftrl.reports import markup


def _parsed(html: str) -> ElementTree.Element:
    return ElementTree.fromstring(f"<body>{html}</body>")


def test_statements_become_headings_lists_tables_and_bold_text():
    text = statement_text.markdown(made_up.stated(data="users.csv"))
    body = _parsed(markup.of_markdown(text, level=2))
    assert [one.text for one in body.iter("h2")] == ["Privacy statement"]
    headings = [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")]
    assert [one.text for one in body.iter("h3")] == headings
    bullets = [line for line in text.splitlines() if line.startswith("- ")]
    assert len(list(body.iter("li"))) == len(bullets)
    assert any("differential privacy" in (one.text or "") for one in body.iter("strong"))
    (table,) = body.iter("table")
    rows = [["".join(cell.itertext()) for cell in row] for row in table.iter("tr")]
    assert rows[0][:2] == ["", "rounds"] and rows[3] == ["observed", "4", "2", "1", "2"]
    # Nothing of the text is lost but its marks.
    plain = "".join(text.replace("*", "").replace("#", "").replace("|", "").split())
    shown = "".join("".join(body.itertext()).split())
    for line in bullets:
        assert "".join(line.removeprefix("- ").split()) in shown and line[2:10].strip() in text
    assert len(shown) >= len(plain) - plain.count("-") - len("Participation")


@pytest.mark.parametrize("text", [made_up.SCRIPT, made_up.IMAGE, "a & b", "&lt;", "**<b>**"])
def test_html_in_a_text_is_shown_as_it_is_written(text):
    for line in (text, f"# {text}", f"- {text}", f"| {text} |\n|---|\n| {text} |"):
        body = _parsed(markup.of_markdown(line, level=2))
        assert text.replace("*", "") in "".join(body.itertext())
        assert not {one.tag for one in body.iter()} & {"script", "img", "b"}


def test_attributes_cannot_be_left():
    made = markup.table([made_up.IMAGE], [["a"]], made_up.IMAGE)
    (region,) = _parsed(made)
    assert region.get("aria-label") == made_up.IMAGE
    assert markup.text("a\x1b[2Jb\x00") == "a�[2Jb�"
