"""Tests of the flags that name a mechanism and a schema."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tracemalloc

import pytest

from tff_dpftrl.cli import mechanism_flags
from tff_dpftrl.mechanisms import restarts, serialization, table, tree, zoo
from tff_dpftrl.participation import schema as schema_lib

_SCHEMA = ["--rounds", "10", "--min-sep", "4"]


def _parse(*flags):
    parser = argparse.ArgumentParser()
    mechanism_flags.add_arguments(parser)
    return parser.parse_args(flags)


def _strategy(*flags):
    args = _parse(*flags)
    return mechanism_flags.strategy_from(args, mechanism_flags.schema_from(args))


@pytest.mark.parametrize(
    "flags, expected",
    [
        (["--min-sep", "4"], (4, 3)),
        (["--min-sep-gap", "3"], (4, 3)),
        (["--min-sep", "4", "--max-participations", "2"], (4, 2)),
        (["--min-sep-gap", "3", "--max-participations", "5"], (4, 5)),
    ],
)
def test_schema(flags, expected):
    args = _parse("--mechanism", "tree", "--rounds", "10", *flags)
    assert mechanism_flags.schema_from(args) == schema_lib.MinSep(10, *expected)


_LONG = ["--rounds", "1000000000", "--min-sep", "10000"]
_OF_ANY_LENGTH = """
import json, resource, sys
import numpy, scipy.fft, scipy.optimize, scipy.signal
from tff_dpftrl.accounting import calibrate, planner
from tff_dpftrl.cli import main
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30, 4 * 2**30))  # Fails rather than fills a machine.
for command in json.loads(sys.argv[1]):
    assert main.main(command) == 0, command
    assert peak() - before < 200 * 10**6, command
"""


def test_memory_does_not_depend_on_the_number_of_rounds():
    account = ["account", *_LONG, "--noise-multiplier", "7", "--max-participations", "10"]
    mechanisms = ["blt", "bisr", "bandfhu", "identity", "tree", "tree-vanilla", "lambda-cgd"]
    commands = [[*account, "--mechanism", name] for name in mechanisms]
    commands[2] += ["--bands", "16"]
    commands[6] += ["--correlation", "0.9"]
    commands += [
        ["optimize", *_LONG, "--mechanism", "blt"],
        ["calibrate", *_LONG, "--mechanism", "blt", "--target-epsilon", "5"],
        ["compare", "blt", "bisr", "blt-gboard-b400", *_LONG, "--vary", "rounds", "--values",
         "1000000000"],
        ["plan", "--population", "4000000", "--rounds", "1000000000", "--target-epsilon", "500",
         "--report-goals", "400", "--max-participations", "100001", "--mechanisms",
         "blt,bisr,identity"],
    ]  # fmt: skip
    subprocess.run([sys.executable, "-c", _OF_ANY_LENGTH, json.dumps(commands)], check=True)


@pytest.mark.parametrize(
    "flags, reason",
    [
        (
            ["--mechanism", "bandtoep"],
            "mechanism bandtoep is for at most 10000000 rounds, got 1000",
        ),
        (["--mechanism", "bandinv"], "mechanism bandinv is for at most 10000000 rounds, got 1000"),
        (["--mechanism", "tree", "--restart-every", "9"], "at most 10000000 with restarts"),
        (
            ["--mechanism", "blt", "--workload", "momentum=0.9,decay=linear"],
            "workload with momentum 0.9, linear decay is for at most 1000000 rounds, got 10000",
        ),
    ],
)
def test_what_grows_with_the_rounds_is_refused_before_it_does(flags, reason):
    tracemalloc.start()
    with pytest.raises(ValueError, match=reason):
        _strategy(*flags, *_LONG)
    assert tracemalloc.get_traced_memory()[1] < 50 * 10**6
    tracemalloc.stop()


def test_flags_are_the_options_of_mechanisms():
    given = ["--error", "rms", "--buffers", "3", "--max-decay", "0.9", "--bands", "5"]
    args = _parse(
        "--mechanism", "tree", *_SCHEMA, *given, "--correlation", "0.5", "--checkpoint", "x"
    )
    expected = table.Options("rms", 3, 0.9, 5, 0.5, "x")
    assert mechanism_flags.options_from(args, 10) == expected
    auto = _parse("--mechanism", "blt", *_SCHEMA, "--buffers", "auto")
    assert mechanism_flags.options_from(auto, 10) == table.DEFAULTS


def test_a_mechanism_is_that_of_the_table_with_restarts():
    starts = (0, 3, 7)
    found = _strategy(
        "--mechanism", "bisr", *_SCHEMA, "--restart-every", "4", "--first-restart", "3"
    )
    assert found == table.build("bisr", schema_lib.MinSep(10, 4, 3), starts=starts)
    assert isinstance(found, restarts.Restarted) and found.starts == starts


def test_a_file_holds_the_strategy_of_a_block(tmp_path):
    path = tmp_path / "strategy.json"
    serialization.save(path, tree.Tree(5))
    found = _strategy("--strategy", str(path), *_SCHEMA, "--restart-every", "5")
    assert found == restarts.Restarted(tree.Tree(5), (0, 5))
    with pytest.raises(ValueError, match="--strategy takes no options of mechanisms"):
        _strategy("--strategy", str(path), *_SCHEMA, "--bands", "2")


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--first-restart", "2"], "--first-restart needs --restart-every"),
        (["--restart-every", "0"], "--restart-every must be at least 1"),
        (["--restart-every", "4", "--first-restart", "0"], "--first-restart must be at least 1"),
    ],
)
def test_restarts_that_make_no_sense_are_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        _strategy("--mechanism", "tree", *_SCHEMA, *flags)


def test_a_strategy_may_be_an_entry_of_the_zoo():
    assert _strategy("--strategy", "blt-gboard-b100", *_SCHEMA) == zoo.load("blt-gboard-b100")
    with pytest.raises(ValueError, match="blt-gboard: there is no such file, .* blt-gboard-b100,"):
        _strategy("--strategy", "blt-gboard", *_SCHEMA)
