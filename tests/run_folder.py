"""Runs the tests of the files that the arguments name, for Bazel.

After `--declared`, it leaves out what `make test` has shown. What is imported within functions and
the data beside modules must be declared, all files are collected, and one test runs.
"""

import ast
import pathlib
import re
import sys

import pytest

_LATE_IMPORT = re.compile(
    r"^[ \t]+(from|import) (tff_dpftrl|tests|verification|benchmarks)\b", re.M
)


def undeclared(declared: pathlib.Path, source: pathlib.Path) -> list[str]:
    """Finds files of the source tree which declared modules need, and which are not declared.

    Args:
      declared: The folder of the declared files, laid out like the source tree.
      source: The source tree.
    """
    wanted = set()
    for path in declared.rglob("*.py"):
        folder = path.parent.relative_to(declared)
        if folder.parts[:1] == ("tff_dpftrl",):
            wanted |= {(folder, str(folder / name)) for name in _data(source / folder)}
        text = path.read_text("utf-8")
        # The package's own front page imports each name only where it is asked for.
        if str(folder) != "tff_dpftrl" and _LATE_IMPORT.search(text):
            modules = [name.replace(".", "/") for name in _imported(ast.parse(text))]
            wanted |= {(folder, name + end) for name in modules for end in (".py", "/__init__.py")}
    missing = {
        f"{file}, for {folder}"
        for folder, file in wanted
        if (source / file).is_file() and not (declared / file).exists()
    }
    return sorted(missing)


def _data(folder: pathlib.Path) -> list[str]:
    others = ("BUILD", "README.md")
    files = [file for file in folder.glob("*.*") if file.name not in others and file.is_file()]
    return [file.name for file in files if file.suffix not in (".py", ".pyc")]


def _imported(tree: ast.AST) -> list[str]:
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


class LastTest:
    """Leaves out all tests but the last, which is shorter than the first."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        del items[:-1]


def main(arguments: list[str]) -> int:
    """Runs the tests; returns the exit status."""
    if arguments[-1:] != ["--declared"]:
        return int(pytest.main(arguments))
    missing = undeclared(pathlib.Path.cwd(), pathlib.Path(__file__).resolve().parents[1])
    if missing:
        print("No BUILD declares:", *missing, sep="\n  ")
        return 1
    return int(pytest.main(arguments[:-1], plugins=[LastTest()]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
