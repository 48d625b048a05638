"""Mutants change one place of a module each, and none of its texts."""

import ast
import pathlib

import pytest

from verification import mutants

_SOURCE = '''
"""A module."""
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import nothing

_LIMIT: int = 3

def clip(x: float = 1.0, *, flag: bool = False) -> float:
    """Returns x."""
    if x < 0 or x is None:
        raise ValueError(f"x must be at least {0 + 0}, got {x}.")
    pairs = zip([x], [x], strict=True)
    y = max(0.0, x * _LIMIT)
    y += 1
    return -y if not flag else "a" + "b"
'''
_PATH = pathlib.PurePath("tff_dpftrl/clip.py")


def _all():
    return [mutants.mutated(_SOURCE, one.index) for one in mutants.mutants_of(_PATH, _SOURCE)]


def test_each_changes_one_line_and_can_be_compiled():
    whole = ast.unparse(ast.parse(_SOURCE)).splitlines()
    made = _all()
    assert len(set(made)) == len(made)
    for source in made:
        compile(source, "mutant", "exec")
        changed = [
            pair for pair in zip(whole, source.splitlines(), strict=True) if pair[0] != pair[1]
        ]
        assert len(changed) == 1


@pytest.mark.parametrize(
    "line",
    [
        "if x <= 0 or x is None:",
        "if x < 0 and x is None:",
        "if x < 0 or x is not None:",
        "if x < 1 or x is None:",
        "pass",
        "_LIMIT: int = 4",
        "def clip(x: float=1.5, *, flag: bool=False) -> float:",
        "def clip(x: float=1.0, *, flag: bool=True) -> float:",
        "y = x * _LIMIT",
        "y = max(0.0, x / _LIMIT)",
        "y = max(1.0, x * _LIMIT)",
        "y -= 1",
        "y += 2",
        "return y if not flag else 'a' + 'b'",
        "return -y if flag else 'a' + 'b'",
    ],
)
def test_what_is_changed(line):
    assert any(line in [one.strip() for one in source.splitlines()] for source in _all())


def test_texts_types_and_assertions_stay():
    assert len(_all()) == 15


def test_a_survivor_is_shown_as_a_difference():
    changed = mutants.mutated(_SOURCE, 0)
    shown = mutants._difference(_SOURCE, changed)
    assert shown.count("    - ") == shown.count("    + ") == 1
