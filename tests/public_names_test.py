"""Tests that what the package offers by name is there, documented, and loaded lazily."""

import subprocess
import sys
import typing

import pytest

import tff_dpftrl


@pytest.mark.parametrize("name", [n for n in tff_dpftrl.__all__ if not n.startswith("__")])
def test_public_names_exist_and_say_what_they_are(name):
    documented = getattr(tff_dpftrl, name).__doc__
    assert documented and len(documented) > 40


def _ours(hint) -> set[type]:
    """Classes of this package in an annotation."""
    found = set().union(*map(_ours, typing.get_args(hint)), set())
    if isinstance(hint, type) and hint.__module__.startswith("tff_dpftrl."):
        found.add(hint)
    return found


@pytest.mark.parametrize(
    "name",
    ["calibrate_noise_multiplier", "calibrate_dp_fedavg", "dp_ftrl_guarantee", "dp_ftrl_statement"]
    + ["epsilon_so_far", "sampled_statement", "Guarantee", "PrivacyStatement", "DpFedAvg"]
    + ["ObservedParticipation"],
)
def test_what_signatures_need_has_a_public_name_too(name):
    offered = {id(getattr(tff_dpftrl, n)) for n in tff_dpftrl.__all__}
    door = getattr(tff_dpftrl, name)
    hints = typing.get_type_hints(door)
    needed = set().union(*map(_ours, hints.values()))
    assert hints and all(id(one) in offered for one in needed), needed


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
