"""`tff-dpftrl finetune`: a pretrained model on users' texts, with a user-level guarantee."""

from __future__ import annotations

import argparse
import functools
import pathlib
import sys

from tff_dpftrl.cli import config_flags, train
from tff_dpftrl.finetuning import config as config_lib

_DESCRIPTION = """\
Fine-tune a pretrained language model on the texts of many users, held in one place, with a
guarantee for every user, and state it.

There are three kinds of sampling. First, examples are sampled in secret (ELS: a pool of at most G
examples of each user), or users (ULS: their mean gradient over at most G examples). Second, nobody
is sampled: users take turns, and the noise is correlated (passes). Third, both, with the least
noise where epsilon is not small: groups of users take turns, are sampled in secret, and the noise
is correlated (cyclic, bins).

By default --compute-budget, the gradients of a step, is spent on ELS or ULS, whichever promises
less noise. Gradients of public text decide, which costs no privacy. Compare all choices beforehand
with `tff-dpftrl finetune-plan`.

Model and vocabulary are those of --initial-weights, from `tff-dpftrl pretrain`, or a checkpoint in
Hugging Face's layout, which comes back in that layout, too (docs/how_to/checkpoints.md). The output
folder is that of `tff-dpftrl train` (docs/reference/results_folder.md): predict, export and report
work on it.

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

  # Correlated noise with secret samples: the bands of least noise are chosen, too.
  tff-dpftrl finetune --data users.jsonl.gz --initial-weights pretrained --target-epsilon 8 \\
      --sampling cyclic --compute-budget 1024 --output results/cyclic

  # Adapters of a checkpoint of GPT-2's or Llama's family.
  tff-dpftrl finetune --data users.jsonl.gz --initial-weights gpt2 --trained-on WebText \\
      --adapter-rank 8 --target-epsilon 4 --output results/adapters

  # Go on after an interruption.
  tff-dpftrl finetune --resume --output results/finetuned

A TOML file given with --config holds the same options, with underscores instead of hyphens
(num_steps = 500), in tables of any name; flags overrule it.
"""


def add_parser(subparsers) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser(
        "finetune",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(
        run=run,
        what_is_left=functools.partial(train.what_is_left, command="finetune", unit="step"),
    )
    config_flags.add_folder_and_source(parser, config_lib.FinetuningConfig)
    config_flags.add_options(parser, config_lib.FinetuningConfig)


def run(args: argparse.Namespace) -> int:
    """Fine-tunes, or resumes; user errors are found before TensorFlow is imported."""
    from tff_dpftrl.finetuning import opening  # Not needed by --help.

    config = config_flags.config_from(args, config_lib.FinetuningConfig)
    output = pathlib.Path(args.output)
    opened = opening.open_run(config, output)
    print("Loading TensorFlow ...", file=sys.stderr)
    from tff_dpftrl.finetuning import run as run_lib

    train.print_summary(run_lib.finetune_opened(opened).summary, output)
    return 0
