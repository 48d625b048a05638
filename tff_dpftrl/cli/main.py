"""Entry point of the command `tff-dpftrl`.

Each subcommand is a module beside this one with `add_parser(subparsers)`, which
registers it, and `run(args) -> int`. Modules import what is slow (TensorFlow,
Matplotlib) inside `run`, so that `--help` and the maths stay quick. One that leaves
files behind also sets the default `what_is_left`, a function of the arguments that
says, after an interruption, what they hold.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import functools
import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from typing import NoReturn, TextIO

from tff_dpftrl import version
from tff_dpftrl.cli import interruption

_PROGRAM = "tff-dpftrl"
_SUBCOMMANDS = (
    "train",
    "sweep",
    "pretrain",
    "finetune",
    "personalize",
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
    "task",
    "serve",
    "device",
    "fleet",
)


class _CommandParser(argparse.ArgumentParser):
    """The parser of one subcommand: its errors are one line, not the list of all flags."""

    def parse_known_args(self, args=None, namespace=None):
        """As in the base class, but unknown flags come first: they may be misspelt ones."""
        for argument in args or ():
            if argument == "--" or self._subparsers is not None:  # Flags are those of a part.
                break
            if argument.startswith("--") and " " not in argument:
                self._check_flag(argument.partition("=")[0])
        namespace, left = super().parse_known_args(args, namespace)
        if left:
            self.error(f"unexpected argument {left[0]!r}")
        return namespace, left

    def _check_flag(self, flag: str) -> None:
        known = [name for name in self._option_string_actions if name.startswith("--")]
        if any(name.startswith(flag) for name in known):  # Abbreviations are allowed.
            return
        near = difflib.get_close_matches(flag.replace("_", "-"), known, n=3)
        meant = f"; did you mean {' or '.join(near)}?" if near else ""
        self.error(f"unknown option {flag}{meant}")

    def error(self, message: str) -> NoReturn:
        """Ends the process with status 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="Federated learning with DP-FTRL: train, optimise mechanisms, account.",
    )
    parser.add_argument("--version", action="version", version=version.__version__)
    subparsers = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=_CommandParser
    )
    for name in _SUBCOMMANDS:
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
    """In place of `warnings.showwarning`: whose line of code it was is nothing to a user."""
    del category, filename, lineno, line
    print(f"{command}: warning: {message}", file=file or sys.stderr)


def _reason(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{error}: make room on the disk"
    return str(error)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
      argv: Arguments without the program's name. If None, those of the process, which
        is then taken to be the command's own: SIGINT and SIGTERM end it at once.

    Returns:
      The exit status: 0; 1 if a file could not be written; 2 if the user's input cannot be
      used, or a package that the subcommand needs is not installed; 3 if `audit` found a
      claim violated; 130 after Ctrl-C, 143 after SIGTERM.
    """
    stop = interruption.Interruption(_PROGRAM)
    if argv is None:
        stop.install()
    try:
        args = _build_parser().parse_args(argv)
        stop.command = f"{_PROGRAM} {args.command}"
        if "what_is_left" in args:
            stop.what_is_left = functools.partial(args.what_is_left, args)
        with warnings.catch_warnings():
            warnings.showwarning = functools.partial(_show_warning, stop.command)
            status = args.run(args)
        sys.stdout.flush()
        return status
    except ValueError as error:
        print(f"{stop.command}: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "tff_dpftrl":
            raise
        print(
            f"{stop.command} needs {error.name}, which is not installed: see 'Environment' in "
            "README.md.",
            file=sys.stderr,
        )
        return 2
    except BrokenPipeError:  # As of `| head`: nobody reads on.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(stop.message(_reason(error)), end="", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(stop.message(), end="", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
