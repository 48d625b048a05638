"""`tff-dpftrl finetune`: a pretrained model on users' texts, with a user-level guarantee."""

from __future__ import annotations

import argparse
import pathlib
import shlex
import sys

from tff_dpftrl import validation
from tff_dpftrl.cli import train
from tff_dpftrl.finetuning import config as config_lib
from tff_dpftrl.runs import manifest
from tff_dpftrl.training import options as options_lib
from tff_dpftrl.training import warm_start

_DESCRIPTION = """\
Fine-tune a pretrained language model on the texts of many users, held in one place, with a
guarantee for every user, and state it.

Either examples are sampled (ELS: a pool of at most G examples of each user) or users (ULS: their
mean gradient over at most G examples), in secret; or nobody is, users take turns, and the noise is
correlated (passes). By default --compute-budget, the gradients of a step, is spent on whichever
promises less noise; gradients of public text decide, which costs no privacy. Compare all choices
beforehand with `tff-dpftrl finetune-plan`.

Model and vocabulary are those of --initial-weights, from `tff-dpftrl pretrain`. The output folder
is that of `tff-dpftrl train` (docs/results_folder.md): predict, export and report work on it.

Ctrl-C loses nothing but the step that is being computed.
"""

_EPILOG = """\
examples:
  tff-dpftrl pretrain --model transformer --output pretrained

  # Sampling, group size, cohort and clip norm are chosen, and it is said why.
  tff-dpftrl finetune --data users.jsonl.gz --initial-weights pretrained --target-epsilon 4 \\
      --compute-budget 1024 --steps 500 --output results/finetuned

  # Or they are given.
  tff-dpftrl finetune --data users.jsonl.gz --initial-weights pretrained --target-epsilon 4 \\
      --sampling user --group-size 8 --cohort 128 --clip-norm 2 --output results/uls

  # Go on after an interruption.
  tff-dpftrl finetune --resume --output results/finetuned

A TOML file given with --config holds the same options, with underscores instead of hyphens
(num_steps = 500), in tables of any name; flags overrule it.
"""


def add_parser(subparsers) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser(
        "finetune",
        help="fine-tune a pretrained model with a guarantee for every user",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run, what_is_left=what_is_left)
    train.add_folder_and_source(parser)
    train.add_options(parser, config_lib.FinetuningConfig)


def what_is_left(args: argparse.Namespace) -> str:
    """What the results folder holds after an interruption, and what can be done with it."""
    if not manifest.exists(pathlib.Path(args.output)):
        return "No run had begun: there is nothing to resume."
    output = shlex.quote(args.output)
    return (
        "Every committed step is kept. Go on with:\n"
        f"  tff-dpftrl finetune --resume --output {output}\n"
        "or get the privacy statement and the model of what was committed with:\n"
        f"  tff-dpftrl report {output}"
    )


def run(args: argparse.Namespace) -> int:
    """Fine-tunes, or resumes, and returns the exit status.

    What is wrong with options and files is found before TensorFlow is imported.
    """
    output = pathlib.Path(args.output)
    flags = train.given_options(args, config_lib.FinetuningConfig)
    new_config = None
    if not args.resume:
        options = options_lib.read_toml(args.config) if args.config else {}
        new_config = options_lib.config_from_mapping(
            options_lib.overrule(options, flags),
            args.config or "the command line",
            config_lib.FinetuningConfig,
        ).with_absolute_paths()
        manifest.check_is_free(output)
        warm_start.find(new_config.initial_weights)
    elif flags or args.config:
        raise validation.UsageError(
            "--resume goes on with the options that the run began with: leave out "
            f"{'--config' if args.config else '--' + next(iter(flags)).replace('_', '-')}."
        )
    else:
        manifest.read(output)
    text = None
    if new_config is not None:
        from tff_dpftrl.training import corpus  # Not needed by --help.

        print("Reading the data ...", file=sys.stderr)
        text = corpus.read_users(new_config)
    train.silence_tensorflow()
    print("Loading TensorFlow ...", file=sys.stderr)
    from tff_dpftrl.finetuning import run as run_lib

    results = run_lib.finetune(new_config, output, text=text)
    print(
        f"\n{results.summary}\nResults are in {output}/\nType half a sentence and get words: "
        f'tff-dpftrl predict {shlex.quote(str(output))} "..."'
    )
    return 0
