"""Lets Sphinx read this package's docstrings, which are plain text with `code` in backticks.

They follow Google's style, which napoleon reads after this. In what is left, reStructuredText would
give a meaning to stars, bars and underscores, and refuse blocks that are indented without a word.
"""

from __future__ import annotations

import re

_SECTION = re.compile(r"(Args|Arguments|Attributes|Raises|Returns|Yields|Example|Examples|Note):$")
_ITEM = re.compile(r"\s*([-*]|\d+\.) ")


def as_restructured_text(lines: list[str]) -> list[str]:
    """Returns a docstring's lines such that reStructuredText shows what they say."""
    return _escaped("\n".join(_with_literal_blocks(lines))).split("\n")


def _with_literal_blocks(lines: list[str]) -> list[str]:
    """Marks text that is indented below other text, outside of sections and items, as literal."""
    result: list[str] = []
    in_section = in_block = in_fence = False
    previous = ""
    for line in lines:
        if line.strip().startswith("```"):
            in_fence = not in_fence
            result += ["", f"{line[: line.index('`')]}::", ""] if in_fence else [""]
            continue
        if in_fence:
            result.append(f"  {line}")
            continue
        is_indented = line.startswith(" ")
        if not is_indented and line:
            in_section = bool(_SECTION.match(line))
            if in_block and previous:
                result.append("")
            in_block = False
        elif is_indented and not in_section and not in_block and not _belongs_to_item(result):
            result += ["", "::", ""] if previous else ["::", ""]
            in_block = True
        result.append(line)
        previous = line
    return result


def _belongs_to_item(before: list[str]) -> bool:
    """Tells whether an indented line goes on with an item of a list."""
    for line in reversed(before):
        if line and not line.startswith(" "):
            return bool(_ITEM.match(line))
    return False


def _escaped(text: str) -> str:
    """Makes literals of code in backticks, and escapes the rest, blocks apart."""
    result, is_block = [], False
    for part in re.split(r"(\n\n)", text):
        if part.strip() and not part.startswith(" "):
            is_block = False
        result.append(part if is_block else _inline(part))
        is_block = is_block or part.strip().split("\n")[-1].strip() == "::"
    return "".join(result)


def _inline(text: str) -> str:
    parts = re.split(r"(?<!`)`([^`]+)`(?!`)", text)
    for i, part in enumerate(parts):
        if i % 2:
            parts[i] = f"\\ ``{' '.join(part.split())}``\\ "
        else:
            parts[i] = re.sub(r"(?<![:`\n])(\*(?! )|\||_(?!\w))", r"\\\1", part)
    return "".join(parts)


def _process(app, what, name, obj, options, lines: list[str]) -> None:
    lines[:] = as_restructured_text(lines)


def setup(app):
    """Comes before napoleon, whose priority is 500."""
    app.connect("autodoc-process-docstring", _process, priority=400)
    return {"parallel_read_safe": True}
