"""Entry point of the command `tff-dpftrl`.

Each subcommand is a module beside this one with `add_parser(subparsers)`, which
registers it, and `run(args) -> int`. Only the module of the named command is imported, and
it imports what is slow (TensorFlow, Matplotlib) inside `run`: `--help` and the maths stay
quick. `_NEEDS` has the packages that it imports: it is refused at once where one is missing. One
that leaves files behind also sets the default `what_is_left`, a function from the arguments to a
sentence about these files, which is printed after an interruption.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import functools
import gc
import importlib
import itertools
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn, TextIO

from tff_dpftrl import packages, quiet_tensorflow, validation, version
from tff_dpftrl.cli import interruption

_PROGRAM = "tff-dpftrl"
_TRACEBACK_VARIABLE = "TFF_DPFTRL_TRACEBACK"
_MISSING = "the following arguments are required"  # How argparse begins to say so.
_LONGEST_SUMMARY = 300  # Characters of an unexpected exception that its line quotes.
_GROUPS = {
    "Train on texts in one place": {
        "pretrain": "train a model on public text, for --initial-weights of train and finetune",
        "train": "train a next-word model with DP-FTRL and state its privacy",
        "sweep": "train, or fine-tune, for all combinations of options, and compare",
        "finetune-plan": "ELS or ULS, group size, cohort and noise for fine-tuning",
        "finetune": "fine-tune a pretrained model with a guarantee for every user",
    },
    "Look at what was trained": {
        "report": "state the privacy of an interrupted or finished run, and write its model",
        "compare-runs": "what differs between runs: options, ε, participation, accuracy, curves",
        "audit": "test whether a config or a run keeps the promise that it prints",
        "budget": "state what all runs on one corpus have spent together",
        "predict": "type half a sentence and get a trained model's next words",
        "export": "write a trained model as a SavedModel, or for TensorFlow Lite",
    },
    "Train on devices": {
        "task": "make a task for devices (new), or report what became of it (report)",
        "serve": "serve tasks to the devices of a population",
        "device": "take part in a server's rounds, with texts that stay on this machine",
        "log": "keep, and verify, a public log of plans and privacy statements",
        "fleet": "run many simulated devices, some of them faulty, against a server",
        "noise-party": "add the noise of a task within its secure sums, and see no data",
    },
    "Choose mechanism and noise": {
        "optimize": "find the best noise mechanism for a run",
        "compare": "compare mechanisms over separations, rounds or participations",
        "account": "what a run costs in privacy",
        "calibrate": "the noise that meets a privacy target",
        "plan": "which mechanism, report goal, noise and timer reach a target",
    },
}
_PROTOCOL = ("tensorflow", "cryptography", "google.protobuf")
_SERVED = (*_PROTOCOL, "grpc", "sqlalchemy")
# Packages that commands need: always, or if they get an argument, or one of its values. What an
# option of a run needs besides is known to `training.corpus.require_packages`.
_NEEDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("pretrain", "train", "sweep", "finetune"), ("tensorflow", "matplotlib")),
    **dict.fromkeys(("predict", "export"), ("tensorflow",)),
    "finetune-plan initial_weights": ("tensorflow",),
    "audit config": ("tensorflow",),
    "audit config output": ("matplotlib",),
    "task": _PROTOCOL,
    "task task_command=report": (*_SERVED, "matplotlib"),
    "serve": (*_SERVED, "prometheus_client", "tornado"),
    "device server": (*_PROTOCOL, "grpc"),
    "device server_bundle": (*_PROTOCOL, "grpc"),
    "fleet": (*_PROTOCOL, "grpc"),
    "log": ("cryptography",),
    "noise-party": _PROTOCOL,
    "compare png": ("matplotlib",),
    "plan plot": ("matplotlib",),
}
_SUBCOMMANDS = tuple(name for names in _GROUPS.values() for name in names)
_JOURNEY = """\
The usual way:
  tff-dpftrl pretrain --config quickstart --output results/pretrained
  tff-dpftrl train --config quickstart --initial-weights results/pretrained \\
      --output results/quickstart
  tff-dpftrl audit --run results/quickstart
  tff-dpftrl predict results/quickstart "the number of"

tff-dpftrl COMMAND --help has the options of a command, with examples.
"""


class _Parser(argparse.ArgumentParser):
    """Parser of the command, which shows its subcommands in groups."""

    def format_help(self) -> str:
        """Returns usage, groups of subcommands, and the usual way through them."""
        lines = [self.format_usage(), f"{self.description}\n"]
        width = max(map(len, _SUBCOMMANDS))
        for title, about in _GROUPS.items():
            lines += [f"{title}:", *(f"  {name:{width}}  {about[name]}" for name in about), ""]
        return "\n".join([*lines, _JOURNEY])

    def parse_known_args(self, args=None, namespace=None):
        """Parses; shows the help without arguments, and names the nearest command."""
        given = sys.argv[1:] if args is None else list(args)
        if not given:
            self.exit(2, self.format_help())
        if not given[0].startswith("-") and given[0] not in _SUBCOMMANDS:
            near = difflib.get_close_matches(given[0], _SUBCOMMANDS, n=1)
            meant = f"; did you mean {near[0]}?" if near else ""
            self.exit(2, f"{self.prog}: unknown command {given[0]!r}{meant} (see --help)\n")
        return super().parse_known_args(args, namespace)


class _RefusedError(Exception):
    """A command line that a parser refuses, with the reason."""


class _CommandParser(argparse.ArgumentParser):
    """Parser of one subcommand, whose errors are one line without the list of all flags."""

    def parse_known_args(self, args=None, namespace=None):
        """Parses, and reports unknown flags before missing ones: they may be misspelt."""
        given: list[str] = list(args or ())
        try:
            return self._parse(given, namespace)
        except _RefusedError as refusal:
            for other in self._readings(given):
                with contextlib.suppress(_RefusedError):
                    return self._parse(other, namespace)
            self.exit(2, f"{self.prog}: {refusal} (see {self.prog} --help)\n")

    def _parse(self, args: list[str], namespace: argparse.Namespace | None):
        self._given = [argument.partition("=")[0] for argument in args]
        for argument in args:
            if argument == "--" or self._subparsers is not None:  # Flags are those of a part.
                break
            if argument.startswith("--") and " " not in argument:
                self._check_flag(argument.partition("=")[0])
        namespace, left = super().parse_known_args(args, namespace)
        if left:
            self.error(f"unexpected argument {left[0]!r}")
        return namespace, left

    def _readings(self, args: list[str]) -> Iterator[list[str]]:
        """Yields other readings of arguments that argparse refuses, such as `--html RUN`.

        An option that takes any number of values takes all that follow. In another reading, one
        of them is what the command is about.
        """
        takes_many = any(a.option_strings and a.nargs in ("?", "*", "+") for a in self._actions)
        if not takes_many or "--" in args:
            return
        for i in reversed(range(len(args))):
            if not args[i].startswith("-"):
                yield [*args[:i], *args[i + 1 :], "--", args[i]]

    def _missing_choices(self) -> list[str]:
        """Returns which one of several flags is missing, too: argparse would say that next."""
        flags = [argument for argument in self._given if argument.startswith("-")]
        missing = []
        for group in self._mutually_exclusive_groups:
            names = [name for action in group._group_actions for name in action.option_strings]
            is_given = any(name.startswith(flag) for flag in flags for name in names)
            has_argument = not all(action.option_strings for action in group._group_actions)
            if group.required and names and not (is_given or has_argument):
                missing.append(f"one of {', '.join(names)} is required")
        return missing

    def _check_flag(self, flag: str) -> None:
        known = [name for name in self._option_string_actions if name.startswith("--")]
        if any(name.startswith(flag) for name in known):  # Abbreviations are allowed.
            return
        near = difflib.get_close_matches(flag.replace("_", "-"), known, n=3)
        meant = f"; did you mean {' or '.join(near)}?" if near else ""
        self.error(f"unknown option {flag}{meant}")

    def error(self, message: str) -> NoReturn:
        """Refuses the arguments, which `parse_known_args` may read in another way."""
        if message.startswith(_MISSING):
            message = "; ".join([message, *self._missing_choices()])
        raise _RefusedError(message)


def _build_parser(commands: Iterable[str] = _SUBCOMMANDS) -> argparse.ArgumentParser:
    """Builds the parser of the program for some subcommands; its help has all of them."""
    parser = _Parser(
        prog=_PROGRAM,
        description="Federated learning with DP-FTRL: train, optimise mechanisms, account.",
    )
    parser.add_argument("--version", action="version", version=version.__version__)
    subparsers = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=_CommandParser
    )
    for name in commands:
        importlib.import_module(f"tff_dpftrl.cli.{name.replace('-', '_')}").add_parser(subparsers)
    return parser


def _show_warning(
    command: str,
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Prints a warning without its line of code, in place of `warnings.showwarning`."""
    del category, filename, lineno, line
    print(f"{command}: warning: {message}", file=file or sys.stderr)


@contextlib.contextmanager
def _silenced_libraries(command: str) -> Iterator[None]:
    """Keeps notes of TensorFlow, TFF's worker, gRPC and JAX off the terminal; errors are shown.

    Libraries read the environment when they are first imported, which any command may do. The
    processes that a command starts inherit it. Who sets a level of logging gets it. Keras 3 imports
    Matplotlib, which refuses a backend that it does not have: none is named meanwhile.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    if os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3") == "3":
        quiet_tensorflow.install()
    backend = os.environ.pop("MPLBACKEND", None)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "pkg_resources is deprecated")
            warnings.showwarning = functools.partial(_show_warning, command)
            yield
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend


def _check_packages(args: argparse.Namespace) -> None:
    """Refuses a command for lack of packages that it would come to need."""
    given = {args.command}
    given |= {name for name, value in vars(args).items() if value not in (None, False)}
    given |= {f"{name}={value}" for name, value in vars(args).items() if isinstance(value, str)}
    needs = (modules for case, modules in _NEEDS.items() if given.issuperset(case.split()))
    packages.require("This command", *dict.fromkeys(itertools.chain(*needs)))


def _reason(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{error}: make room on the disk"
    return str(error)


def _report_defect(stop: interruption.Interruption, error: Exception) -> int:
    """Reports an exception that no input should cause, in one line; returns the exit status."""
    text = " ".join(str(error).split())
    summary = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if len(summary) > _LONGEST_SUMMARY:
        summary = summary[: _LONGEST_SUMMARY - 1] + "…"
    details = "".join(traceback.format_exception(error))
    place = "above"
    if os.environ.get(_TRACEBACK_VARIABLE, "") not in ("", "0"):
        print(details, end="", file=sys.stderr)
    else:
        try:
            with tempfile.NamedTemporaryFile(
                "w", prefix="tff-dpftrl-", suffix=".txt", delete=False, encoding="utf-8"
            ) as file:
                file.write(f"tff_dpftrl {version.__version__}, Python {sys.version}\n\n{details}")
            place = f"in {file.name} ({_TRACEBACK_VARIABLE}=1 prints it)"
        except OSError:  # No room, or no temporary folder.
            print(details, end="", file=sys.stderr)
    reason = f"{summary}: a defect of {_PROGRAM}, not of the input. The traceback is {place}"
    print(stop.message(reason), end="", file=sys.stderr)
    return 70


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns the exit status.

    If `argv` is None, the process is taken to be the command's own: SIGINT and SIGTERM end it at
    once. The status is 0; 1 if a file could not be written; 2 if the user's input cannot be used,
    or a package that the subcommand needs is not installed; 3 if `audit` found a claim violated; 70
    after a defect of the program, whose traceback is written to a temporary file; 130 after Ctrl-C,
    143 after SIGTERM.
    """
    stop = interruption.Interruption(_PROGRAM)
    if argv is None:
        stop.install()
        # This saves a tenth of the time until a first round: Python would check all imports again.
        gc.set_threshold(50_000, 20, 20)
    try:
        given = sys.argv[1:] if argv is None else argv
        named = [argument for argument in given if argument in _SUBCOMMANDS]
        args = _build_parser(named[:1]).parse_args(argv)
        stop.command = f"{_PROGRAM} {args.command}"
        if "what_is_left" in args:
            stop.what_is_left = functools.partial(args.what_is_left, args)
        with _silenced_libraries(stop.command):
            _check_packages(args)
            status = args.run(args)
        sys.stdout.flush()
        return status
    except validation.UsageError as error:
        print(f"{stop.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # The reader has ended, as `| head` does.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(stop.message(_reason(error)), end="", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(stop.message(), end="", file=sys.stderr)
        return 130
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and _is_of_others(error.name):
            print(f"{stop.command} needs {packages.remedy(str(error.name))}.", file=sys.stderr)
            return 2
        return _report_defect(stop, error)


def _is_of_others(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] != "tff_dpftrl"


if __name__ == "__main__":
    sys.exit(main())
