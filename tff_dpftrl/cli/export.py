"""`tff-dpftrl export`: a trained model for others, as a SavedModel."""

from __future__ import annotations

import argparse
import sys

from tff_dpftrl import validation
from tff_dpftrl.cli import trained_run

_DESCRIPTION = """\
Write a trained model as a SavedModel: texts in, likely next words and probabilities out.

The vocabulary and the rule that splits text are inside. It loads with plain TensorFlow, in
any language that has it and in TensorFlow Serving, where tff_dpftrl is not installed.
OUTPUT/assets.extra/vocabulary.json says where the words are from.

Whoever has the file can read every word of the vocabulary. With a public one that tells
nothing of the users who trained; of one that was counted on them (--vocabulary private) no
privacy statement covers the words.
"""

_EPILOG = """\
examples:
  tff-dpftrl export results/quickstart next_words

  # Elsewhere, in Python:
  import tensorflow as tf
  model = tf.saved_model.load("next_words")
  output = model.signatures["serving_default"](texts=tf.constant(["the number of"]))
  output["words"], output["probabilities"]      # [1, 10] each, best first
  output["unknown_word"], output["end_of_text"] # what else may come next

  # TensorFlow Serving wants a version's number as the last folder.
  mkdir models/next_words
  tff-dpftrl export results/quickstart models/next_words/1 --model best --top 3
"""


def add_parser(subparsers) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser(
        "export",
        help="write a trained model as a SavedModel, with its vocabulary inside",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    trained_run.add_arguments(parser)
    parser.add_argument("output", metavar="OUTPUT", help="Folder for the SavedModel; it is made.")
    parser.add_argument(
        "--top",
        type=int,
        default=10,
        metavar="N",
        help="Number of words that the signature returns. Default: 10.",
    )
    parser.add_argument("--overwrite", action="store_true", help="Replace an existing SavedModel.")


def run(args: argparse.Namespace) -> int:
    """Exports, and returns the exit status."""
    validation.integer("--top", args.top, minimum=1)
    files = trained_run.find(args)
    print("Loading TensorFlow ...", file=sys.stderr)
    from tff_dpftrl.training import saved_model

    saved_model.check_output(args.output, overwrite=args.overwrite)
    trained = files.load()
    saved_model.write(args.output, trained, top=args.top, overwrite=args.overwrite)
    print(f"{files.model_path} with its {len(trained.words.words)} words is in {args.output}/")
    if not trained.words.is_public:
        print(
            "Its words were counted on the training users without noise, and everybody who has the "
            "folder, or is answered by it, learns of them: no privacy statement covers that."
        )
    return 0
