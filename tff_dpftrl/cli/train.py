"""`tff-dpftrl train`: a private next-word model, with its privacy statement."""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import shlex
import sys

from tff_dpftrl.cli import config_flags
from tff_dpftrl.runs import manifest
from tff_dpftrl.training import config as config_lib

_DESCRIPTION = """\
Train a next-word model with federated learning and DP-FTRL, and state its privacy.

The output folder receives:

  privacy_statement.md, .json   may be published
  model.npz                     may be published if the statement has a guarantee
  vocabulary.json               may be published if its words may be seen
  config.json
  metrics.csv, curves.png       of the held-out users

Its folder private/ is for the operator's eyes only: whoever reads it can undo the privacy of the
run. It holds metrics.csv, curves.png and TensorBoard events with exact figures of the training
users. It also holds checkpoints with the noise's seed, and the ledger of participation, which
--resume and `tff-dpftrl report` need. docs/reference/results_folder.md explains every file.

Ctrl-C loses nothing but the round that is being run.
"""

_EPILOG = """\
examples:
  # Docstrings of the installed packages, a BLT mechanism, 100 rounds of 20 clients.
  tff-dpftrl train --mechanism blt --noise-multiplier 0.5 --rounds 100 --output results/blt

  # Your own table with a text in each row, noise calibrated to a target, options kept in a file.
  tff-dpftrl train --config my_run.toml --data reviews.csv --user-column author \\
    --text-column body --target-epsilon 8 --output out

  # All texts in one place: secret samples of users, too, for less noise at the same epsilon.
  tff-dpftrl train --sampling cyclic --mechanism bandtoep --bands 8 --data reviews.csv \\
    --target-epsilon 8 --output out

  # Go on after an interruption; the config is the one that the run began with.
  tff-dpftrl train --resume --output out

  # Or see how far it got, and what that has cost.
  tff-dpftrl report out

A TOML file given with --config holds the same options, with underscores instead of hyphens
(num_rounds = 100), in tables of any name; flags overrule it. --config quickstart takes the options
of this name that come with the package.
"""


def add_parser(subparsers) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser(
        "train",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run, what_is_left=what_is_left)
    config_flags.add_folder_and_source(parser)
    config_flags.add_placement(parser.add_argument_group("where clients work (also with --resume)"))
    config_flags.add_options(parser)


def _leave_cores_to_clients(config: config_lib.TrainingConfig) -> None:
    """Sets TensorFlow's threads, before it begins to work."""
    from tff_dpftrl import execution

    # In another program TensorFlow may work already, with threads of that program's choice.
    with contextlib.suppress(RuntimeError):
        execution.limit_operation_threads(config.learning.clients_per_round)


def what_is_left(args: argparse.Namespace, command: str = "train", unit: str = "round") -> str:
    """Returns what the results folder holds after an interruption, and what to do with it."""
    if not manifest.exists(pathlib.Path(args.output)):
        return "No run had begun: there is nothing to resume."
    output = shlex.quote(args.output)
    return (
        f"Every committed {unit} is kept. Go on with:\n"
        f"  tff-dpftrl {command} --resume --output {output}\n"
        "or get the privacy statement and the model of what was committed with:\n"
        f"  tff-dpftrl report {output}"
    )


def run(args: argparse.Namespace) -> int:
    """Trains, or resumes; user errors are found before TensorFlow is imported."""
    from tff_dpftrl.training import opening  # Not needed by --help.

    config, output = config_flags.config_from(args), pathlib.Path(args.output)
    opened = opening.open_run(config, output, placement=config_flags.placement_from(args))
    print("Loading TensorFlow ...", file=sys.stderr)
    _leave_cores_to_clients(opened.config)
    from tff_dpftrl.training import run as run_lib

    print_summary(run_lib.train_opened(opened).summary, output)
    return 0


def print_summary(summary: str, output: pathlib.Path) -> None:
    """Prints the outcome of a run, and what can be done with its folder."""
    print(
        f"\n{summary}\nResults are in {output}/\nType half a sentence and get words: "
        f'tff-dpftrl predict {shlex.quote(str(output))} "..."'
    )
