"""Tests of the check of docstrings."""

import pytest

from verification import plain_words

_MODULE = '''
"""See the notes.

Attributes:
  size: Of the batch.
"""

def f(a, b, *rest):
    """Adds.

    See: Of nothing.

    Args:
      a: The first summand.
      b: {text}
        from: Of a continuation.
      **rest: Other summands.

    Returns:
      sum: From both.
    """
'''


def _lines(text):
    return [number for number, _ in plain_words.refused_lines(_MODULE.format(text=text))]


@pytest.mark.parametrize(
    "text", ["Of a sum.", "From a.", "Told a.", "As for a.", "As in g.", "See g."]
)
def test_texts_without_a_noun_are_found(text):
    assert sorted(_lines(text)) == [5, 15]


@pytest.mark.parametrize("text", ["Offset of a.", "Seed.", "Number of summands.", "Fromage."])
def test_noun_phrases_pass(text):
    assert _lines(text) == [5]


@pytest.mark.parametrize(
    ("code", "is_refused"),
    [
        ('def f():\n    """Whether it rains."""', True),
        ('def f():\n    """Returns whether it rains."""', False),
        ('async def f():\n    """Re-reads a file."""', False),
        ('class A:\n    """What came of it."""', True),
        ('class A:\n    """Whatever came of it."""', False),
        (
            'class A:\n    @functools.cached_property\n    def f(self):\n        """The sum."""',
            False,
        ),
        ('class A:\n    @property\n    def f(self):\n        """How many there are."""', True),
        ('class A:\n    def __init__(self):\n        """Internal; use `open`."""', False),
        ('"""What this module does."""', False),
    ],
)
def test_summaries_begin_with_a_verb_or_a_noun(code, is_refused):
    assert bool(list(plain_words.refused_lines(code))) == is_refused


def test_the_command_counts_them(tmp_path, capsys):
    (tmp_path / "a.py").write_text(_MODULE.format(text="Of a sum."))
    assert plain_words.main([str(tmp_path)]) == 1
    assert "a.py:15: b: Of a sum." in capsys.readouterr().out
    (tmp_path / "a.py").write_text("x = 1\n")
    assert plain_words.main([str(tmp_path)]) == 0
