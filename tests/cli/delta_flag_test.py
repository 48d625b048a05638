"""Tests of tff_dpftrl.cli.delta_flag."""

import argparse

import pytest

from tff_dpftrl.accounting import defaults
from tff_dpftrl.cli import delta_flag


def test_the_default_is_that_of_the_accounting():
    parser = argparse.ArgumentParser()
    delta_flag.add(parser)
    assert parser.parse_args([]).delta == defaults.DELTA
    assert parser.parse_args(["--delta", "1e-7"]).delta == 1e-7


@pytest.mark.parametrize("delta, is_warned", [(1e-10, False), (1e-3, False), (2e-3, True)])
def test_a_large_delta_is_warned_of(delta, is_warned, capsys):
    delta_flag.check(delta)
    assert ("is large" in capsys.readouterr().err) == is_warned


@pytest.mark.parametrize("delta", [0.0, 1.0, float("nan")])
def test_what_is_no_delta_is_refused(delta):
    with pytest.raises(ValueError, match="--delta must be"):
        delta_flag.check(delta)
