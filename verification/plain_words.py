"""Refuses docstrings whose parts cannot be understood alone. Run by `make lint`.

    python -m verification.plain_words tff_dpftrl

The text of an argument or attribute is a noun phrase: what the value is. One that begins with Of,
From, Told, As for, As in or See leaves out the noun, or sends the reader away. The first word of a
function is its verb ("Returns", "Reads"); that of a class or property is no pronoun.
"""

from __future__ import annotations

import ast
import pathlib
import re
import sys
from collections.abc import Iterator

_SECTION = re.compile(r"(Args|Attributes):$")
_TEXT = re.compile(r"\*{0,2}\w+: (Of|From|Told|As for|As in|See)\b")
_VERB = re.compile(r"[A-Z][\w-]*s\b")
_PRONOUN = re.compile(r"(What|Who|Whose|How|When|Where|It|They|That|This)\b")
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
        if not _has_plain_summary(node):
            yield docstring.lineno, lines[docstring.lineno - 1].strip()
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


def _has_plain_summary(node: ast.AST) -> bool:
    """Returns whether the first word of a docstring is what it must be."""
    if isinstance(node, ast.Module):
        return True
    first = ast.get_docstring(node) or ""
    if isinstance(node, ast.ClassDef) or any(map(_is_property, node.decorator_list)):
        return not _PRONOUN.match(first)
    return node.name == "__init__" or bool(_VERB.match(first))


def _is_property(decorator: ast.expr) -> bool:
    return ast.unparse(decorator).endswith("property")


def main(folders: list[str]) -> int:
    """Prints the refused texts of all modules in folders; returns 1 if there is one."""
    count = 0
    for folder in folders:
        for path in sorted(pathlib.Path(folder).rglob("*.py")):
            for number, text in refused_lines(path.read_text("utf-8")):
                print(f"{path}:{number}: {text}")
                count += 1
    if count:
        print(
            f"{count} texts: an argument's says what the value is, a function's begins with a "
            "verb, a class's or property's with a noun."
        )
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
