"""`tff-dpftrl export`: a trained model for others, as a SavedModel or for TensorFlow Lite."""

from __future__ import annotations

import argparse
import shlex
import sys

from tff_dpftrl import validation
from tff_dpftrl.cli import output as output_lib
from tff_dpftrl.cli import trained_run

_DESCRIPTION = """\
Write a trained model as a SavedModel: texts in, likely next words and probabilities out.

The vocabulary and the rule that splits text are inside, except for sub-words other than those of
wordpiece: these models are exported with ids in place of texts. The SavedModel loads with plain
TensorFlow, in any language that has it and in TensorFlow Serving, where tff_dpftrl is not
installed. Its file assets.extra/vocabulary.json says where the words are from. Its second
signature, ids, takes ids and returns scores of all ids, for programs that split text themselves.

With --history it also takes a user's own earlier text, whose n-grams are mixed into the
probabilities where the model runs. None of that earlier text is in what is exported.

With --tflite the folder gets model.tflite instead, for TensorFlow Lite (LiteRT) on phones and
small devices: built-in operations only, ids in, scores and likely next ids out. Beside it are
vocabulary.json and README.md, which says how text becomes ids.

Whoever has the file can read every word of the vocabulary. A public vocabulary tells nothing of the
users who trained. If it was counted on them (--vocabulary private), no privacy statement covers the
words.
"""

_EPILOG = """\
examples:
  tff-dpftrl export results/quickstart --output next_words

  # Elsewhere, in Python:
  import tensorflow as tf
  model = tf.saved_model.load("next_words")
  output = model.signatures["serving_default"](texts=tf.constant(["the number of"]))
  output["words"], output["probabilities"]      # [1, 10] each, best first
  output["unknown_word"], output["end_of_text"] # what else may come next

  # TensorFlow Serving wants a version's number as the last folder.
  mkdir models/next_words
  tff-dpftrl export results/quickstart --output models/next_words/1 --model best --top 3

  # For phones and small devices.
  tff-dpftrl export results/quickstart --tflite --output next_words_lite
"""


def add_parser(subparsers) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser(
        "export",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    trained_run.add_arguments(parser)
    parser.add_argument(
        "folder",
        metavar="OUTPUT",
        nargs="?",
        help="The same as --output OUTPUT.",
    )
    parser.add_argument("--output", metavar="OUTPUT", help="Folder for the model; made if missing.")
    parser.add_argument(
        "--tflite",
        action="store_true",
        help="Write model.tflite, vocabulary.json and README.md instead of a SavedModel.",
    )
    parser.add_argument(
        "--top",
        type=int,
        default=10,
        metavar="N",
        help="Number of words that the model returns. Default: 10.",
    )
    parser.add_argument(
        "--history",
        action="store_true",
        help="Make the model take a user's earlier text, too: signatures with_history (if it takes "
        "texts) and ids_with_history of a SavedModel, the input history of model.tflite.",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="Replace an earlier export in the folder."
    )


def run(args: argparse.Namespace) -> int:
    """Exports, and returns the exit status."""
    validation.integer("--top", args.top, minimum=1)
    if (args.output is None) == (args.folder is None):
        raise validation.UsageError("Name the folder for the model once: --output OUTPUT.")
    output = args.folder if args.output is None else args.output
    files = trained_run.find(args)
    print("Loading TensorFlow ...", file=sys.stderr)
    if args.tflite:
        from tff_dpftrl.training import tflite_model as written
    else:
        from tff_dpftrl.training import saved_model as written

    written.check_output(output, overwrite=args.overwrite)
    trained = files.load()
    written.write(output, trained, top=args.top, history=args.history, overwrite=args.overwrite)
    words = trained.words
    print(f"{files.model_path} with its {len(words.words)} {words.unit} is in {output}/")
    takes_texts = args.tflite or trained.rule.is_in_graphs
    if not takes_texts:
        print(
            "It takes ids in place of texts, since TensorFlow has no operations for its sub-words: "
            "assets.extra/vocabulary.json has the tokenizer; the id of a token is its number "
            "plus 1."
        )
    if not (words.is_public or words.is_noised):
        print(
            "Its words were counted on the training users without noise, and everybody who has the "
            "folder, or is answered by it, learns of them: no privacy statement covers that."
        )
    if args.tflite:
        output_lib.print_next(
            "How an application feeds it", f"cat {shlex.quote(str(output))}/README.md"
        )
    else:
        name = "serving_default" if takes_texts else "ids"
        output_lib.print_next(
            "Use it in any Python with TensorFlow",
            f"tf.saved_model.load({str(output)!r}).signatures[{name!r}]",
        )
    return 0
