"""Tests of the entry point: help, errors, exit status."""

import sys

import pytest

from tff_dpftrl import version
from tff_dpftrl.cli import main


def test_version(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main.main(["--version"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out.strip() == version.__version__


@pytest.mark.parametrize("arguments", [[], ["account"], ["train", "--rounds", "many"]])
def test_wrong_usage_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main.main(arguments)
    assert exit_info.value.code == 2
    assert "usage: tff-dpftrl" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", ["train", "optimize", "compare", "account", "calibrate", "plan"]
)
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main.main([command, "--help"])
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    assert f"tff-dpftrl {command}" in text and len(text.splitlines()) > 15


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
