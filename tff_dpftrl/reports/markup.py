"""HTML of text that came from files: every character of it is escaped."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

_BULLET = "- "
_SEPARATOR = re.compile(r"\|(\s*:?-+:?\s*\|)+")


def text(value: object) -> str:
    """Escapes a value; characters that are not printable are replaced."""
    shown = "".join(c if c.isprintable() or c in "\n\t" else "�" for c in str(value))
    return html.escape(shown)


def element(name: str, content: str, **attributes: str) -> str:
    """Makes an HTML element; values of attributes are escaped, and `class_` stands for `class`."""
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(value)}"' for key, value in attributes.items()
    )
    return f"<{name}{shown}>{content}</{name}>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], caption: str) -> str:
    """Makes a table that scrolls by itself on narrow screens; the first cell of a row heads it."""
    cells = "".join(f'<th scope="col">{text(name)}</th>' for name in head)
    lines = [f"<caption>{text(caption)}</caption><thead><tr>{cells}</tr></thead><tbody>"]
    for first, *others in rows:
        data = "".join(f"<td>{cell}</td>" for cell in others)
        lines.append(f'<tr><th scope="row">{first}</th>{data}</tr>')
    inside = element("table", "".join([*lines, "</tbody>"]))
    return element("div", inside, class_="scrolls", tabindex="0", role="region", aria_label=caption)


def bullets(lines: Iterable[str]) -> str:
    """Makes a list of lines, which are HTML."""
    return element("ul", "".join(f"<li>{line}</li>" for line in lines))


def of_markdown(markdown: str, *, level: int) -> str:
    """Converts what statements use of Markdown: headings, bullets, tables, bold and code.

    Whatever else is in the text, HTML above all, is shown as it is written. `level` is that of its
    first headings on the page.
    """
    parts: list[str] = []
    heading = "Table"
    for kind, lines in _blocks(markdown.splitlines()):
        if kind == "heading":
            marks, _, heading = lines[0].partition(" ")
            parts.append(element(f"h{min(6, level - 1 + len(marks))}", _inline(heading)))
        elif kind == "bullets":
            parts.append(bullets(_inline(line.removeprefix(_BULLET)) for line in lines))
        elif kind == "table":
            head, _, *rows = map(_cells, lines)
            body = ([*map(_inline, row), *[""] * (len(head) - len(row))] for row in rows)
            parts.append(table(head, body, heading))
        else:
            parts.append(element("p", _inline(" ".join(lines))))
    return "\n".join(parts)


def _kind(line: str) -> str:
    if re.match(r"#{1,6} ", line):
        return "heading"
    if line.startswith(_BULLET):
        return "bullets"
    return "table" if line.startswith("|") else "paragraph"


def _blocks(lines: Sequence[str]) -> Iterable[tuple[str, list[str]]]:
    """Yields consecutive lines of one kind; an empty line ends a block."""
    block: list[str] = []
    for line in [*lines, ""]:
        is_same = bool(block) and bool(line.strip()) and _kind(line) == _kind(block[0])
        if block and (not is_same or _kind(line) == "heading"):
            kind = _kind(block[0])
            is_table = len(block) > 1 and bool(_SEPARATOR.fullmatch(block[1].replace(" ", "")))
            yield ("paragraph" if kind == "table" and not is_table else kind), block
            block = []
        if line.strip():
            block.append(line)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]


def _inline(line: str) -> str:
    shown = text(line)
    shown = re.sub(r"`([^`]+)`", r"<code>\1</code>", shown)
    return re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", shown)
