"""The example in the package's docstring, with which others begin, prints what it says."""

from __future__ import annotations

import doctest

from tff_dpftrl import secure_sums


def test_the_example_prints_what_it_says():
    result = doctest.testmod(secure_sums)
    assert result.attempted and not result.failed
