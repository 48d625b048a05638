"""`tff-dpftrl pretrain`: a model of public text, for `train` and `finetune` to begin with."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import shlex
import sys
import typing

from tff_dpftrl.cli import config_flags
from tff_dpftrl.data import tables
from tff_dpftrl.runtime.tasks import task_config
from tff_dpftrl.training import language_config, pretraining
from tff_dpftrl.training import options as options_lib

_DESCRIPTION = """\
Train a language model centrally on text that you declare public, for `train` or `finetune` to
begin with.

Nothing of it is private: whoever has the model may learn the text. By default the text is the
docstrings of Python's standard library. The model of the best epoch so far is kept at any
time, so that Ctrl-C ends it early and loses only the epoch under way.

Give the --config of the run of `train`, or of `task new`, that is to follow. Model, vocabulary and
sequence length are taken from it; its users' data are not read. A run of `finetune` takes all of
these from the pretrained model: give them here.
"""

_EPILOG = """\
examples:
  tff-dpftrl pretrain --config quickstart --output results/pretrained
  tff-dpftrl train --config quickstart --initial-weights results/pretrained \\
    --output results/warm

  # A transformer, for `finetune` to go on with.
  tff-dpftrl pretrain --model transformer --output results/pretrained
  tff-dpftrl finetune --data users.jsonl.gz --initial-weights results/pretrained \\
    --target-epsilon 4 --compute-budget 1024 --output results/finetuned

  # On a file of public text, in the format of `train`, less what nearly repeats users' text.
  tff-dpftrl pretrain --config my_run.toml --data public.jsonl.gz \\
    --without-near-duplicates-of users.jsonl.gz --output results/pretrained
"""

# Options of a run that say something of its own users and of its initial weights.
_TABLE = tuple(field.name for field in dataclasses.fields(tables.TableOptions))
_OF_THE_RUN = ("data", *_TABLE, "max_users", "train_on_test_users", "initial_weights")

_HELP = {
    "data": "Public text: 'standard-library'; 'docs', with the docstrings of the installed "
    "packages, for a run that trains on something else; or a table or file as for train.",
    "epochs": "Number of passes over the text. The learning rate falls to zero over them.",
    "patience": "Number of epochs without improvement on held-out text after which the training "
    "ends.",
    "batch_size": "Number of sequences in a batch.",
    "learning_rate": "Learning rate of Adam in the beginning.",
    "seed": "Seed of the initial weights and of the order of the text.",
    "without_near_duplicates_of": "Corpus, such as that of the run that follows. Public texts "
    "that nearly repeat its texts are left out. Its texts are looked at for this, which "
    "no epsilon covers.",
}


def add_parser(subparsers) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser(
        "pretrain",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run, what_is_left=what_is_left)
    parser.add_argument("--output", required=True, metavar="DIR", help="Folder of the results.")
    config_flags.add_config(parser, task_config.TaskConfig)
    group = parser.add_argument_group("central training")
    config_flags.add_table_options(group)
    for field in dataclasses.fields(pretraining.PretrainingConfig):
        if field.name in _TABLE:
            continue
        group.add_argument(
            "--" + field.name.replace("_", "-"),
            type=str if field.default is None else type(field.default),
            default=field.default,
            metavar=config_flags.METAVARS.get(
                field.name, {int: "N", float: "X"}.get(type(field.default))
            ),
            help=_HELP[field.name]
            + ("" if field.default is None else f" Default: {field.default}."),
        )
    hints = typing.get_type_hints(language_config.LanguageConfig)
    group = parser.add_argument_group("as in the run that follows")
    for field in _shared_fields():
        config_flags.add_flag(group, field, hints[field.name])


def _shared_fields() -> list[dataclasses.Field]:
    """Returns the options of a run that its pretraining must share."""
    return [
        field
        for field in dataclasses.fields(language_config.LanguageConfig)
        if field.name not in _OF_THE_RUN
    ]


def _text_of(config: pretraining.PretrainingConfig) -> str | None:
    """Returns the text of pretraining as the text to learn sub-words on."""
    is_file = config.data not in ("docs", pretraining.STANDARD_LIBRARY)
    return config.data if is_file else None


def what_is_left(args: argparse.Namespace) -> str:
    """Returns what the results folder holds after an interruption."""
    output = pathlib.Path(args.output)
    if not (output / "model.npz").exists():
        return "No epoch had ended: there is no model, and the same command begins again."
    return f"{shlex.quote(args.output)} holds the best model of the epochs that ended."


def run(args: argparse.Namespace) -> int:
    """Pretrains, and returns the exit status."""
    output = pathlib.Path(args.output)
    pretraining.check_is_free(output)
    config = pretraining.PretrainingConfig(
        **{
            f.name: getattr(args, f.name)
            for f in dataclasses.fields(pretraining.PretrainingConfig)
            if f.name in args
        }
    )
    of_run = options_lib.read_toml(args.config) if args.config else {}
    if args.config:  # Flags of `train` may complete the other options, so names are all to check.
        options_lib.check_names(of_run, args.config, task_config.TaskConfig)
    names = {field.name for field in _shared_fields()}
    options = {name: value for name, value in of_run.items() if name in names}
    options |= {name: value for name, value in vars(args).items() if name in names}
    options |= {name: of_run[name] for name in ("data", *_TABLE) if name in of_run}
    if options.get("tokenizer") in ("wordpiece", "sentencepiece"):
        options.setdefault("vocabulary", _text_of(config))
    elif not args.config and options.get("tokenizer") != "checkpoint":  # Nothing else is known.
        options.setdefault("vocabulary", "english")
    shared = language_config.LanguageConfig.of(**options).with_absolute_paths()
    print("Reading the text ...", file=sys.stderr)
    text = pretraining.read(config, shared)
    print("Loading TensorFlow ...", file=sys.stderr)
    summary = pretraining.pretrain(
        config, shared, output, text=text, progress=lambda line: print(line, file=sys.stderr)
    )
    begin = f"--initial-weights {shlex.quote(str(output))} ..."
    print(
        f"\n{summary}\nResults are in {output}/; begin a run with them:\n"
        f"  tff-dpftrl train {begin}\n  tff-dpftrl finetune {begin}"
    )
    return 0
