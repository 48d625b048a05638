"""Tests that what the package offers by name is there, documented, and loaded lazily."""

import subprocess
import sys

import pytest

import tff_dpftrl


@pytest.mark.parametrize("name", [n for n in tff_dpftrl.__all__ if not n.startswith("__")])
def test_public_names_exist_and_say_what_they_are(name):
    documented = getattr(tff_dpftrl, name).__doc__
    assert documented and len(documented) > 40


def test_unknown_names_are_refused():
    with pytest.raises(AttributeError, match="no attribute 'build_magic'"):
        tff_dpftrl.build_magic  # noqa: B018


def test_the_maths_does_not_load_tensorflow():
    code = (
        "import sys, tff_dpftrl; "
        "tff_dpftrl.optimize_blt(tff_dpftrl.MinSep(100, 10, 3)); tff_dpftrl.dp_ftrl_guarantee; "
        "sys.exit(any(name.startswith('tensorflow') for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
