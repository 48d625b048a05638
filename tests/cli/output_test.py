"""Tests of how commands print."""

from __future__ import annotations

import argparse
import json

import pytest

from tff_dpftrl.cli import output


def test_tables_are_aligned(capsys):
    output.print_table([["n", "name"], ["10", "a"], ["5", "long"]], left=1)
    assert capsys.readouterr().out == " n  name\n10  a\n 5  long\n"


def test_json_has_no_infinities(capsys):
    output.print_json({"a": 1.5})
    assert json.loads(capsys.readouterr().out) == {"a": 1.5}
    with pytest.raises(ValueError, match="not JSON compliant"):
        output.print_json({"a": float("inf")})


def test_text_is_the_default():
    parser = argparse.ArgumentParser()
    output.add_format(parser)
    assert parser.parse_args([]).format == "text"
    with pytest.raises(SystemExit):
        parser.parse_args(["--format", "csv"])
