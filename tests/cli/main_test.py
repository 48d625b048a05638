"""Tests of the entry point: help, errors, warnings, exit status."""

import argparse
import contextlib
import importlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import warnings
from importlib import metadata

import numpy as np
import pytest

from tff_dpftrl import packages, quiet_tensorflow, validation, version
from tff_dpftrl.cli import account, main

_COMMANDS = (
    "train",
    "sweep",
    "report",
    "audit",
    "predict",
    "export",
    "optimize",
    "compare",
    "account",
    "calibrate",
    "plan",
    "finetune-plan",
    "device",
    "fleet",
)


def _errors(arguments, capsys):
    """What is printed by a command that ends with status 2 for its arguments."""
    with pytest.raises(SystemExit) as exit_info:
        main.main(arguments)
    assert exit_info.value.code == 2
    return capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main.main(["--version"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out.strip() == version.__version__


def test_without_a_command_the_usual_way_is_shown(capsys):
    shown = _errors([], capsys)
    assert shown.startswith("usage: tff-dpftrl")
    assert "tff-dpftrl audit --run results/quickstart" in shown


def test_help_lists_every_command_in_a_group(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main.main(["--help"])
    assert exit_info.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert "Train on devices:" in lines
    modules = pathlib.Path(main.__file__).parent.glob("*.py")
    commands = {
        path.stem.replace("_", "-")
        for path in modules
        if "def add_parser(" in path.read_text(encoding="utf-8")
    }
    shown = {line.split()[0] for line in lines if line.startswith("  ") and line[2:3].isalpha()}
    assert shown - {"tff-dpftrl"} == commands


@pytest.mark.parametrize(
    "command, near", [("fintune", "did you mean finetune?"), ("xyz", "unknown command 'xyz' (see")]
)
def test_an_unknown_command_is_one_line_with_the_nearest_one(command, near, capsys):
    (line,) = _errors([command, "--wobble"], capsys).splitlines()
    assert line.startswith("tff-dpftrl: unknown command") and near in line


@pytest.mark.parametrize("command", _COMMANDS)
def test_an_unknown_flag_is_one_line_that_names_the_command(command, capsys):
    (line,) = _errors([command, "--wobble", "3"], capsys).splitlines()
    assert line == (
        f"tff-dpftrl {command}: unknown option --wobble (see tff-dpftrl {command} --help)"
    )


@pytest.mark.parametrize("missing, is_ours", [("tff_dpftrl.missing", True), ("missing", False)])
def test_a_package_that_is_not_installed_is_named(missing, is_ours, monkeypatch, capsys):
    monkeypatch.setattr(account, "run", lambda args: importlib.import_module(missing))
    command = ["account", "--mechanism", "tree", "--noise-multiplier", "7", "--rounds", "8"]
    command += ["--min-sep", "2"]
    if is_ours:  # A bug, not a wish of the user that cannot be met.
        assert main.main(command) == 70
        return
    assert main.main(command) == 2
    error = capsys.readouterr().err
    assert error.startswith("tff-dpftrl account needs missing, which is not installed: install")
    assert error.count("\n") == 1


_PROTOCOL = "tensorflow cryptography google.protobuf"
_LATE = [
    ("pretrain --data none.jsonl --output new", "tensorflow matplotlib"),
    ("train --data none.jsonl --output new", "tensorflow matplotlib"),
    ("train --resume --output none", "tensorflow matplotlib"),
    ("sweep --over seed=0:2 --data none.jsonl --output new", "tensorflow matplotlib"),
    ("sweep --finetune --over seed=0:2 --data none.jsonl --output new", "tensorflow matplotlib"),
    ("finetune-plan --data none.jsonl --initial-weights none --target-epsilon 8", "tensorflow"),
    ("finetune --data none.jsonl --output new", "tensorflow matplotlib"),
    ("predict none --history none.txt", "tensorflow"),
    ("export none --output new", "tensorflow"),
    ("audit --config none.toml --output new", "tensorflow matplotlib"),
    ("task new --config none.toml --output new", _PROTOCOL),
    ("task show none", _PROTOCOL),
    ("task approve none --key new", _PROTOCOL),
    ("task report none", f"{_PROTOCOL} sqlalchemy matplotlib"),
    (
        "serve --population p --task none --store new",
        f"{_PROTOCOL} grpc sqlalchemy prometheus_client tornado",
    ),
    ("device --examples none --server none", f"{_PROTOCOL} grpc"),
    ("device --examples none --server-bundle none", f"{_PROTOCOL} grpc"),
    ("fleet --data none.jsonl", f"{_PROTOCOL} grpc"),
    ("noise-party --folder none", _PROTOCOL),
    ("compare tree --vary min-sep --values 2 --rounds 8 --min-sep 2 --png new.png", "matplotlib"),
    ("plan --population 9 --rounds 4 --target-epsilon 8 --plot new.png", "matplotlib"),
]


@pytest.mark.parametrize(
    "arguments, package", [(line, name) for line, names in _LATE for name in names.split()]
)
def test_what_a_command_comes_to_need_is_asked_for_before_anything_is_read(
    arguments, package, monkeypatch, tmp_path, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(packages, "is_missing", lambda module: module == package)
    assert main.main(arguments.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    command = arguments.split()[0]
    name = packages.NAMES.get(package.partition(".")[0], package)
    assert line.startswith(
        f"tff-dpftrl {command}: This command needs {name}, which is not installed: pip"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments, extra",
    [
        ("train --data none.jsonl --output new", "finetuning"),
        ("task new --config none.toml --output new", "devices"),
        ("task report none", "plots,server"),
        ("serve --population p --task none --store new", "server"),
        ("device --examples none --server none", "devices"),
        ("compare tree --vary min-sep --values 2 --rounds 8 --min-sep 2 --png new.png", "plots"),
    ],
)
def test_one_command_installs_all_that_is_missing(arguments, extra, monkeypatch, capsys):
    monkeypatch.setattr(packages, "is_missing", lambda module: True)
    assert main.main(arguments.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f": pip install 'tff_dpftrl[{extra}]' (docs/reference/environments.md).")


def test_extras_have_the_packages_that_errors_say_they_have():
    try:
        required = metadata.requires("tff_dpftrl") or []
    except metadata.PackageNotFoundError:
        pytest.skip("The package is not installed, so that nothing says what its extras are.")
    brought = [(module, extra) for extra, modules in packages.EXTRAS.items() for module in modules]
    for module, extra in brought:
        name = module.partition(".")[0]
        package = re.escape(packages.NAMES.get(name, name)).replace("_", "[-_]")
        line = re.compile(rf"(?i){package}[^-\w].*extra == .{extra}")
        assert any(map(line.match, required)), (module, extra)


@pytest.mark.parametrize(
    "arguments, meant",
    [
        # Also if what is required is missing, perhaps because it is misspelt.
        (["train", "--outptu", "x"], "--output"),
        (["train", "--output=x", "--min_sep=3"], "--min-sep"),
        (["calibrate", "--mechansim", "blt"], "--mechanism"),
    ],
)
def test_a_misspelt_flag_is_recognised(arguments, meant, capsys):
    (line,) = _errors(arguments, capsys).splitlines()
    assert f"did you mean {meant}" in line


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["train", "--rounds", "many", "--output", "x"], "--rounds"),
        (["train", "--output", "x", "stray"], "'stray'"),
        (["train", "--output", "x", "-q"], "'-q'"),
    ],
)
def test_other_wrong_usage_is_one_line_too(arguments, named, capsys):
    (line,) = _errors(arguments, capsys).splitlines()
    assert line.startswith("tff-dpftrl train: ") and named in line


def _parsers(parser, name=""):
    """Yields the parsers of all commands and parts of commands, and their names."""
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for part, below in action.choices.items():
                yield from _parsers(below, f"{name} {part}".strip())


_SWALLOWING = {
    "report --html": ["report --html RUN --format json", "report RUN --format json --html"],
    "budget --runs": ["budget --runs a b DATA", "budget DATA --runs a b"],
    "log verify --has": [
        "log verify --public-key k --has a b LOG",
        "log verify LOG --public-key k --has a b",
    ],
}


@pytest.mark.parametrize("option", _SWALLOWING)
def test_an_option_leaves_the_command_what_it_is_about(option):
    first, last = (
        vars(main._build_parser().parse_args(line.split())) for line in _SWALLOWING[option]
    )
    assert first == last


def test_no_other_option_can_take_what_a_command_is_about():
    greedy = {
        f"{name} {option.option_strings[-1]}"
        for name, parser in _parsers(main._build_parser())
        for option in parser._actions
        if option.option_strings and option.nargs in ("?", "*", "+")
        # The options of a part of a command are its own.
        if any(not a.option_strings and a.nargs != argparse.PARSER for a in parser._actions)
    }
    assert greedy == set(_SWALLOWING)


@pytest.mark.parametrize(
    "arguments, named",
    [
        ("finetune-plan", "--target-epsilon --data"),
        ("finetune-plan --users=9 --steps 3", "--target-epsilon"),
        ("calibrate --target-eps 3", "--rounds --mechanism --min-sep-gap"),
        ("fleet --server a:1", "--server-certificate --plan-keys --population"),
        ("task new --output nowhere", "noise_multiplier population"),
        (
            "finetune --sampling passes",
            "--output initial_weights noise_multiplier group_size delta",
        ),
    ],
)
def test_all_that_is_missing_is_named_at_once_and_nothing_else(arguments, named, capsys):
    with contextlib.suppress(SystemExit):  # Of argparse.
        assert main.main(arguments.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    for name in named.split():
        assert name in line
    given = [part.partition("=")[0] for part in arguments.split() if part.startswith("--")]
    asked = line.partition("(see ")[0].replace("--server-", "")
    assert not any(f"{flag}, " in asked or f"{flag} is" in asked for flag in given), line


@pytest.mark.parametrize("command", _COMMANDS)
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main.main([command, "--help"])
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    assert f"tff-dpftrl {command}" in text and len(text.splitlines()) > 15


@pytest.fixture
def stub(monkeypatch):
    """Replaces what `account` does by a function of its arguments."""

    def replace(run, **defaults):
        def add_parser(subparsers):
            subparsers.add_parser("account").set_defaults(run=run, **defaults)

        monkeypatch.setattr(account, "add_parser", add_parser)

    return replace


def test_a_warning_is_one_line_without_source(stub, capsys):
    def run(args):
        warnings.warn("the clip norm is costly", stacklevel=1)
        return 0

    stub(run)
    shown = warnings.showwarning
    assert main.main(["account"]) == 0
    assert capsys.readouterr().err == "tff-dpftrl account: warning: the clip norm is costly\n"
    assert warnings.showwarning is shown


_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "GRPC_VERBOSITY": "NONE"}
_LOUD = {"TF_CPP_MIN_LOG_LEVEL": "0", "GRPC_VERBOSITY": "DEBUG"}


@pytest.mark.parametrize("given, levels", [({}, _QUIET), (_LOUD, _LOUD)])
def test_libraries_are_quiet_unless_the_user_wants_to_hear_them(stub, monkeypatch, given, levels):
    environment, seen, installed = given | {"MPLBACKEND": "gtk"}, [], []
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(quiet_tensorflow, "install", lambda: installed.append(True))
    stub(lambda args: seen.append(dict(environment)))
    main.main(["account"])
    assert seen == [levels]  # No backend, which Matplotlib might refuse, ...
    assert environment == levels | {"MPLBACKEND": "gtk"}  # ... but the caller has it again.
    assert bool(installed) == (levels is _QUIET)


@pytest.mark.parametrize(
    "error, status, said",
    [
        (validation.UsageError("z is negative."), 2, "tff-dpftrl account: z is negative."),
        (
            OSError(28, "No space left"),
            1,
            "tff-dpftrl account: [Errno 28] No space left: make room on the disk. Kept: x",
        ),
        (KeyboardInterrupt(), 130, "tff-dpftrl account: interrupted. Kept: x"),
    ],
)
def test_errors_end_with_a_status_and_say_what_is_left(stub, capsys, error, status, said):
    def run(args):
        raise error

    def what_is_left(args: argparse.Namespace) -> str:
        return f"Kept: {args.kept}"

    stub(run, what_is_left=what_is_left, kept="x")
    assert main.main(["account"]) == status
    assert capsys.readouterr().err.strip() == said


@pytest.mark.parametrize("is_shown", [False, True])
def test_a_defect_is_one_line_that_names_its_traceback(
    stub, capsys, monkeypatch, tmp_path, is_shown
):
    def run(args):
        return np.zeros(3) + np.zeros(4)

    stub(run, what_is_left=lambda args: "Kept: x")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TFF_DPFTRL_TRACEBACK", "1" if is_shown else "0")
    assert main.main(["account"]) == 70
    *traceback, line = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(
        "tff-dpftrl account: ValueError: operands could not be broadcast together with shapes "
        "(3,) (4,): a defect of tff-dpftrl, not of the input. The traceback is "
    )
    assert line.endswith(" Kept: x")
    if is_shown:
        assert "return np.zeros(3) + np.zeros(4)" in "".join(traceback)
        assert not list(tmp_path.iterdir())
        return
    (file,) = tmp_path.iterdir()
    assert f"is in {file} (" in line and not traceback
    assert "return np.zeros(3) + np.zeros(4)" in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600  # Values in a traceback may be secret.


def test_a_defect_without_a_temporary_folder_prints_its_traceback(stub, capsys, monkeypatch):
    stub(lambda args: {}["key"])
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    assert main.main(["account"]) == 70
    error = capsys.readouterr().err
    assert "Traceback" in error and "The traceback is above." in error


def test_an_output_that_nobody_reads_is_no_traceback():
    child = subprocess.Popen(
        [sys.executable, "-m", "tff_dpftrl.cli.main", "account", "--mechanism", "identity"]
        + "--noise-multiplier 7 --rounds 9 --min-sep 3 --delta 1e-10".split(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    child.stdout.close()
    assert (child.stderr.read(), child.wait()) == (b"", 1)
    child.stderr.close()


def test_a_caller_keeps_its_own_signal_handlers(stub):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    seen = []

    def run(args):
        seen.append((signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)))
        return 0

    stub(run)
    assert main.main(["account"]) == 0
    assert seen == [before]
