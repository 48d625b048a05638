"""`tff-dpftrl predict`: likely next words of texts that have begun, or sampled continuations."""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import sys
from collections.abc import Iterator

from tff_dpftrl import validation
from tff_dpftrl.cli import trained_run
from tff_dpftrl.training import trained_model

_DESCRIPTION = """\
Print the words that a trained model expects next, with their probabilities.

Texts are given as arguments, or one a line on standard input; at a terminal, type the
beginning of a sentence and press Enter. The last word of a text is taken as a whole word. Below the
words, two other outcomes are printed: a word outside the vocabulary, and the end of the text. If a
text is longer than the sequences that the model was trained on, its end is read.
"""

_EPILOG = """\
examples:
  tff-dpftrl predict results/quickstart "this function returns"

  # The model that was best on the held-out users, ten words.
  tff-dpftrl predict results/quickstart "the number of" --model best --top 10

  # A text that goes on for up to 40 words, or sub-words.
  tff-dpftrl predict results/finetuned "Dear" --tokens 40 --temperature 0.8 --top-p 0.9 --seed 1

  # With your own earlier text, one a line: words that you use often are likelier.
  tff-dpftrl predict results/quickstart "this function returns" --history my_text.txt

  # Many texts, for a script: one JSON object a line.
  tff-dpftrl predict results/quickstart --format jsonl < beginnings.txt > predictions.jsonl
"""

_TEXTS_AT_A_TIME = 64
_SAMPLING = {
    "temperature": "number that scores are divided by; 0 takes the likeliest word. Default: 1.",
    "top-p": "probability of the fewest likeliest words that are sampled from. Default: 1.",
    "seed": "seed of the samples. Default: another continuation each time.",
}


def add_parser(subparsers) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser(
        "predict",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    trained_run.add_arguments(parser)
    parser.add_argument(
        "texts",
        metavar="TEXT",
        nargs="*",
        help="Beginning of a sentence, in quotes. Without one, lines of standard input.",
    )
    parser.add_argument("--top", type=int, metavar="N", help="Number of words. Default: 5.")
    parser.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        help="Largest number of sampled words or sub-words by which each text is continued, in "
        "place of the list of next words.",
    )
    parser.add_argument(
        "--history",
        metavar="FILE",
        help="File with earlier texts of the author, one a line, UTF-8. Its n-grams are mixed "
        "into the probabilities. The file is read here only: nothing of it is sent or kept. "
        "Not with --tokens.",
    )
    for name, what in _SAMPLING.items():
        kind = int if name == "seed" else float
        parser.add_argument(f"--{name}", type=kind, metavar="N", help=f"With --tokens: {what}")
    parser.add_argument(
        "--format",
        choices=("text", "jsonl"),
        default="text",
        help="Format of standard output: text, or JSON lines, one for each text. Default: text.",
    )


def run(args: argparse.Namespace) -> int:
    """Predicts, and returns the exit status."""
    for name in ("top", "history") if args.tokens is not None else ("temperature", "top_p", "seed"):
        if getattr(args, name) is not None:
            without = "without" if args.tokens is None else "with"
            raise validation.UsageError(
                f"--{name.replace('_', '-')} has no meaning {without} --tokens: leave it out."
            )
    top = validation.integer("--top", 5 if args.top is None else args.top, minimum=1)
    files = trained_run.find(args)
    for text in args.texts:
        _check(files, text, "TEXT")
    history = None if args.history is None else _read_history(files, args.history)
    trained = files.load()
    if args.tokens is not None:
        return _continue(args, files, trained)
    show = _print_json if args.format == "jsonl" else _print_text
    for texts in [args.texts] if args.texts else _lines(files):
        for text, prediction in zip(
            texts, trained.predict(texts, top, history=history), strict=True
        ):
            show(text, prediction)
        sys.stdout.flush()
    return 0


def _continue(
    args: argparse.Namespace,
    files: trained_model.TrainedFiles,
    trained: trained_model.TrainedModel,
) -> int:
    """Prints texts with their sampled continuations."""
    import numpy as np

    if args.seed is not None:
        validation.integer("--seed", args.seed, minimum=0)
    rng = np.random.default_rng(args.seed)
    numbers = {name: getattr(args, name) for name in ("temperature", "top_p")}
    given = {name: number for name, number in numbers.items() if number is not None}
    for texts in [args.texts] if args.texts else _lines(files):
        found = trained.continue_texts(texts, args.tokens, **given, seed=rng)
        for text, continuation in zip(texts, found, strict=True):
            if args.format == "jsonl":
                fields = {
                    "text": text,
                    "continuation": continuation.text,
                    "has_ended": continuation.has_ended,
                }
                print(json.dumps(fields))
            else:
                print(text + continuation.text)
        sys.stdout.flush()
    return 0


def _read_history(files: trained_model.TrainedFiles, file: str) -> list[str]:
    """Reads a user's earlier texts."""
    try:
        texts = pathlib.Path(file).read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise validation.UsageError(
            f"--history {file} is not UTF-8: name a file of plain text, one text a line."
        ) from None
    except OSError as error:
        raise validation.UsageError(
            f"--history {file} cannot be read ({error.strerror}): name a file of your text."
        ) from None
    if not any(map(files.rule.words, texts)):
        raise validation.UsageError(
            f"--history {file} has no word in it: leave it out if nothing was written."
        )
    return texts


def _check(files: trained_model.TrainedFiles, text: str, where: str) -> None:
    if not files.rule.words(text):
        raise validation.UsageError(f"{where} must have at least one word in it, got {text!r}.")


def _lines(files: trained_model.TrainedFiles) -> Iterator[list[str]]:
    """Yields the lines of standard input, many at a time unless a person types them."""
    if sys.stdin.isatty():
        print("Type the beginning of a sentence, and Enter; Ctrl-D ends.", file=sys.stderr)
        for line in sys.stdin:
            if files.rule.words(line):
                yield [line.rstrip("\r\n")]
        return
    lines = (line.rstrip("\r\n").removeprefix("\ufeff") for line in sys.stdin)
    numbered = enumerate(lines, start=1)
    while lines := list(itertools.islice(numbered, _TEXTS_AT_A_TIME)):
        for number, text in lines:
            _check(files, text, f"line {number} of standard input")
        yield [text for _, text in lines]


def _print_json(text: str, prediction: trained_model.Prediction) -> None:
    fields = {
        "text": text,
        "next_words": [{"word": w, "probability": p} for w, p in prediction.next_words],
        "unknown_word": prediction.unknown_word,
        "end_of_text": prediction.end_of_text,
        "unknown_in_text": prediction.unknown_in_text,
    }
    print(json.dumps(fields, allow_nan=False))


def _print_text(text: str, prediction: trained_model.Prediction) -> None:
    print(text)
    for word, probability in prediction.next_words:
        print(f"{probability:8.1%}  {word}")
    if prediction.unknown_word:  # Of some sub-words there are none.
        print(f"{prediction.unknown_word:8.1%}  (a word outside the vocabulary)")
    print(f"{prediction.end_of_text:8.1%}  (the end of the text)")
    if prediction.unknown_in_text:
        words = ", ".join(map(repr, prediction.unknown_in_text))
        print(f"   not in the vocabulary, so read as some unknown word: {words}")
    print()
