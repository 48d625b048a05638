"""Extraction of sentences from the docstrings of Python source files, without importing them.

It needs the standard library only and is also a program, so that
`tff_dpftrl.data.docstrings` can run several copies of it. It reads a JSON list of paths from
standard input, and writes a JSON list of docstrings (lists of sentences) per path, a line each.
"""

from __future__ import annotations

import ast
import gc
import inspect
import json
import pathlib
import re
import signal
import sys
import warnings
from collections.abc import Iterator

_TRIPLE_QUOTED = re.compile(r'"""(.*?)"""|\'\'\'(.*?)\'\'\'', re.DOTALL)
_MIN_QUOTED_WORDS = 100
"""Least number of words between triple quotes in a file that is parsed: parsing is slow."""

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_NEW_PARAGRAPH = re.compile(r"\s*(?:[-*+•]\s|:\w|\d+[.)]\s|@\w|\.\.\s|#)")
_SECTION_HEADING = re.compile(r"\s*[\w ]+:\s*$|\s*[-=~^*#_`+|. ]+$")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`\"'(\[])")
_LETTERS = re.compile(r"[^\W\d_]+")


def docstrings_of_file(path: str) -> list[list[str]]:
    """Returns the sentences of each docstring of a file, in the file's order.

    Docstrings without a sentence are left out. A file that cannot be read or parsed, or that has
    fewer than 100 words in triple quotes, has none.
    """
    try:
        source = pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return []
    quoted = sum(len((a or b).split()) for a, b in _TRIPLE_QUOTED.findall(source))
    if quoted < _MIN_QUOTED_WORDS:
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return [split for text in _docstrings(tree) if (split := sentences(text))]


def _docstrings(node: ast.AST) -> Iterator[str]:
    """Yields the docstrings of `node` and of definitions in it, but not within expressions."""
    if isinstance(node, _DOCUMENTED) and node.body:
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            if isinstance(first.value.value, str):
                yield first.value.value
    for child in getattr(node, "body", ()):
        if isinstance(child, (*_DOCUMENTED, ast.If, ast.Try, ast.With)):
            yield from _docstrings(child)


def sentences(docstring: str) -> list[str]:
    """Splits a docstring into sentences of prose.

    Examples of code, headings and rulers are left out, wrapped lines are joined, and each item of a
    list begins a sentence. Sentences have at least three words, most of whose characters are
    letters.
    """
    paragraphs: list[list[str]] = [[]]
    in_fence = in_doctest = False
    for line in inspect.cleandoc(docstring).splitlines():
        stripped = line.strip()
        if stripped.startswith(("```", "~~~")):
            in_fence = not in_fence
        in_doctest = stripped.startswith(">>>") or (in_doctest and bool(stripped))
        if in_fence or in_doctest or not stripped or _SECTION_HEADING.match(line):
            paragraphs.append([])
            continue
        if _NEW_PARAGRAPH.match(line):
            paragraphs.append([])
        paragraphs[-1].append(stripped)
    return [
        sentence
        for paragraph in paragraphs
        for sentence in _SENTENCE_END.split(" ".join(paragraph))
        if _is_prose(sentence)
    ]


def _is_prose(sentence: str) -> bool:
    letters = _LETTERS.findall(sentence)
    visible = len(sentence) - sentence.count(" ")
    return len(letters) >= 3 and sum(map(len, letters)) >= 0.7 * visible


def main() -> None:
    """Answers one request on standard input."""
    if hasattr(signal, "SIGPIPE"):  # Ends quietly when the parent process is gone.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    gc.disable()  # It takes a fifth of the time, and frees nothing: syntax trees have no cycles.
    for path in json.load(sys.stdin):
        print(json.dumps(docstrings_of_file(path)), flush=True)


if __name__ == "__main__":
    main()
