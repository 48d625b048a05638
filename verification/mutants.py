"""Mutants: does a room's own test notice when a line of its code says something else?

    python -m verification.mutants participation accounting --sample 40

A seeded sample of small changes is made to a room of the package, one at a time in a copy of the
working tree: another comparison, another operator, a constant that is larger, a condition that is
negated, a refusal that is left out. Each is run against the room's tests, those of the changed
module first. Survivors are printed as a difference of source lines: each is a missing test, or
changes nothing (a bound of a search, a cache size, a faster path).
"""

from __future__ import annotations

import argparse
import ast
import copy
import dataclasses
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_PACKAGE, _TESTS = "tff_dpftrl", "tests"
_COPIED = (_PACKAGE, _TESTS, "verification", "experiments", "docs", "pyproject.toml", "setup.py")
_SECONDS = 900.0  # For the tests of a mutant, which may loop for ever.
_TAKEN_FOR_DEAD = (1, 2, 3, 4)  # Exit statuses of pytest: failures, interruptions, errors.

_COMPARISONS = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is},
}
_OPERATORS = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult},
    **{ast.FloorDiv: ast.Mult, ast.Pow: ast.Mult, ast.Mod: ast.Mult},
}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change of one module.

    Attributes:
      path: Module, relative to the package's parent.
      index: Number of the change among all of the module.
      line: Line of the change.
    """

    path: pathlib.PurePath
    index: int
    line: int


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    )


def _places(tree: ast.Module) -> Iterator[tuple[ast.AST, str, int]]:
    """Yields each place that can be changed: parent, field, and index in the field or -1.

    Annotations, texts, decorators, what is only for type checkers, and the messages of errors are
    left out.
    """
    for parent in _code(tree):
        for field, value in ast.iter_fields(parent):
            if field in ("annotation", "returns", "decorator_list", "exc", "cause"):
                continue
            for index, child in enumerate(value) if isinstance(value, list) else [(-1, value)]:
                if isinstance(child, ast.AST) and _changed(child) is not None:
                    yield parent, field, index


def _code(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Raise | ast.Import | ast.ImportFrom | ast.AnnAssign) or _is_text(node):
        if not (isinstance(node, ast.AnnAssign) and node.value is not None):
            return
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
        return
    if isinstance(node, ast.keyword) and node.arg == "strict":  # Of `zip`: an assertion.
        return
    yield node
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _code(child)


def _changed(node: ast.AST) -> ast.AST | None:
    """Returns the changed copy of a node; None if it is of no kind that is changed."""
    made = copy.deepcopy(node)
    if isinstance(made, ast.Compare) and type(made.ops[0]) in _COMPARISONS:
        made.ops[0] = _COMPARISONS[type(made.ops[0])]()
    elif isinstance(made, ast.BinOp | ast.AugAssign) and type(made.op) in _OPERATORS:
        if isinstance(made, ast.BinOp) and (_is_text(made.left) or _is_text(made.right)):
            return None
        made.op = _OPERATORS[type(made.op)]()
    elif isinstance(made, ast.BoolOp):
        made.op = ast.And() if isinstance(made.op, ast.Or) else ast.Or()
    elif isinstance(made, ast.UnaryOp) and isinstance(made.op, ast.Not | ast.USub):
        return made.operand
    elif isinstance(made, ast.Constant) and isinstance(made.value, bool):
        made.value = not made.value
    elif isinstance(made, ast.Constant) and isinstance(made.value, int | float):
        made.value = made.value * 1.5 if isinstance(made.value, float) else made.value + 1
        made.value = made.value or 1.0
    elif isinstance(made, ast.Call) and getattr(made.func, "id", "") in ("min", "max"):
        if len(made.args) < 2:
            return None
        return made.args[-1]
    elif isinstance(made, ast.If) and any(isinstance(one, ast.Raise) for one in made.body):
        made.body = [ast.copy_location(ast.Pass(), made.body[0])]
    else:
        return None
    return made


def mutants_of(path: pathlib.PurePath, source: str) -> list[Mutant]:
    """Lists the mutants of a module."""
    places = []
    for index, (parent, field, entry) in enumerate(_places(ast.parse(source))):
        value = getattr(parent, field)
        places.append(Mutant(path, index, (value if entry < 0 else value[entry]).lineno))
    return places


def mutated(source: str, index: int) -> str:
    """Returns the source of a module with one change, without comments."""
    tree = ast.parse(source)
    parent, field, entry = list(_places(tree))[index]
    value = getattr(parent, field)
    if entry < 0:
        setattr(parent, field, _changed(value))
    else:
        value[entry] = _changed(value[entry])
    return ast.unparse(ast.fix_missing_locations(tree))


def _difference(source: str, changed: str) -> str:
    before, after = ast.unparse(ast.parse(source)).splitlines(), changed.splitlines()
    lines = [(a, b) for a, b in zip(before, after, strict=False) if a != b]
    return "\n".join(f"    - {a.strip()}\n    + {b.strip()}" for a, b in lines[:2])


def _is_killed(tree: pathlib.Path, room: pathlib.PurePath, mutant: Mutant) -> bool:
    """Runs the tests of the module, and then those of its room, on a tree with a mutant."""
    inside = mutant.path.relative_to(_PACKAGE)
    own = _TESTS / inside.with_name(f"{inside.stem}_test.py")
    for tests in (own, _TESTS / room):
        if not (tree / tests).exists():
            continue
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(tests)]
        try:
            done = subprocess.run(
                command, cwd=tree, capture_output=True, timeout=_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return True
        if done.returncode in _TAKEN_FOR_DEAD:
            return True
    return False


def main() -> int:
    """Makes mutants, runs tests on each, and prints the survivors."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rooms", nargs="+", metavar="ROOM", help="Folder in tff_dpftrl/.")
    parser.add_argument("--sample", type=int, default=20, metavar="N", help="Mutants of each room.")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="Seed of the sample.")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tree = pathlib.Path(folder)
        for name in _COPIED:
            source = _ROOT / name
            (shutil.copytree if source.is_dir() else shutil.copyfile)(source, tree / name)
        for room in args.rooms:
            _run_room(tree, pathlib.PurePath(room), args.sample, args.seed)
    return 0


def _run_room(tree: pathlib.Path, room: pathlib.PurePath, sample: int, seed: int) -> None:
    found = []
    for module in sorted((_ROOT / _PACKAGE / room).rglob("*.py")):
        found += mutants_of(module.relative_to(_ROOT), module.read_text(encoding="utf-8"))
    if not found:
        print(f"{room}: nothing to change")
        return
    chosen = random.Random(seed).sample(found, min(sample, len(found)))
    killed = 0
    for mutant in chosen:
        source = (_ROOT / mutant.path).read_text(encoding="utf-8")
        changed = mutated(source, mutant.index)
        (tree / mutant.path).write_text(changed, encoding="utf-8")
        is_killed = _is_killed(tree, room, mutant)
        (tree / mutant.path).write_text(source, encoding="utf-8")
        killed += is_killed
        if not is_killed:
            place = f"  {mutant.path}:{mutant.line}"
            print(f"{place}\n{_difference(source, changed)}", flush=True)
    print(f"{room}: {killed} of {len(chosen)} mutants are killed", flush=True)


if __name__ == "__main__":
    sys.exit(main())
