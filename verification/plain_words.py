"""Refuses texts of arguments that cannot be understood alone. Run by `make lint`.

    python -m verification.plain_words tff_dpftrl

The text of an argument or attribute is a noun phrase: what the value is. One that begins with Of,
From, Told, As for, As in or See leaves out the noun, or sends the reader away.
"""

from __future__ import annotations

import ast
import pathlib
import re
import sys
from collections.abc import Iterator

_SECTION = re.compile(r"(Args|Attributes):$")
_TEXT = re.compile(r"\*{0,2}\w+: (Of|From|Told|As for|As in|See)\b")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def refused_lines(source: str) -> Iterator[tuple[int, str]]:
    """Finds the refused texts of a module.

    Args:
      source: Source code of the module.

    Yields:
      The number of each line, from 1, and its text.
    """
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, _DOCUMENTED) or ast.get_docstring(node) is None:
            continue
        docstring = node.body[0]
        indent = None  # Of the section's heading, within a section.
        for number in range(docstring.lineno, (docstring.end_lineno or 0) + 1):
            text = lines[number - 1].strip()
            depth = len(lines[number - 1]) - len(lines[number - 1].lstrip())
            if _SECTION.match(text):
                indent = depth
            elif text and indent is not None and depth <= indent:
                indent = None
            elif indent is not None and depth == indent + 2 and _TEXT.match(text):
                yield number, text


def main(folders: list[str]) -> int:
    """Prints the refused texts of all modules in folders; returns 1 if there is one."""
    count = 0
    for folder in folders:
        for path in sorted(pathlib.Path(folder).rglob("*.py")):
            for number, text in refused_lines(path.read_text("utf-8")):
                print(f"{path}:{number}: {text}")
                count += 1
    if count:
        print(f"{count} texts of arguments are no noun phrase: say what the value is.")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
