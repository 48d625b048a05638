"""A trained model for TensorFlow Lite (LiteRT): ids in, scores and likely next ids out.

The file has built-in operations only, which every interpreter has, and neither text nor
vocabulary: a device that splits text itself finds the words in `vocabulary.json` beside it.

Example:
  ```
  runner = tf.lite.Interpreter("exported/model.tflite").get_signature_runner()
  output = runner(ids=ids)  # The names and shapes are those of `saved_model`'s signature `ids`.
  ```
"""

from __future__ import annotations

import pathlib
from typing import Any

import tensorflow as tf
from tensorflow.lite.python import convert_phase  # Its errors have no public name.

from tff_dpftrl import durable_files, validation
from tff_dpftrl.data import tokenizer, vocabulary_file
from tff_dpftrl.training import saved_model, trained_model

_FILE = "model.tflite"
_README = "README.md"
_HISTORY = """
## The user's earlier text

Each row of `history` is an earlier text of the same user: {bos}, the ids of all its words, {eos},
filled up at its end with 0. Rows may have any length, the same for all. N-grams of them are mixed
into the probabilities of the words; `scores` are those of the model alone. Keep the texts on the
device: nothing else needs them.
"""


def check_output(output: str | pathlib.Path, *, overwrite: bool = False) -> None:
    """Refuses a folder that `write` may not write to."""
    saved_model.check_output(
        output, overwrite=overwrite, file=_FILE, what="folder of a TensorFlow Lite model"
    )


def write(
    output: str | pathlib.Path,
    trained: trained_model.TrainedModel,
    *,
    top: int = 10,
    history: bool = False,
    overwrite: bool = False,
) -> None:
    """Writes a folder with `model.tflite`, `vocabulary.json` and `README.md`, whole or not at all.

    The model takes any number of sequences at once. One of the caller's own with loops, such as a
    recurrent layer of Keras, takes a single sequence.

    Args:
      output: The folder, which is made.
      trained: The model.
      top: Number of words k that are returned; all of the vocabulary if it has fewer.
      history: Whether the model takes a user's earlier text as well, as the signature
        `ids_with_history` of `saved_model.write` does.
      overwrite: Whether a folder that this function wrote before is replaced.

    Raises:
      ValueError: If `top` is not positive, the model needs operations that are not built in, or as
        for `check_output`.
      OSError: If it cannot be written.
    """
    num_words = trained.words.size - len(trained.special.all)
    top = min(validation.integer("top", top, minimum=1), num_words)
    check_output(output, overwrite=overwrite)
    content, batch = _converted(trained, top, history)
    with durable_files.new_folder(pathlib.Path(output).resolve(), replace=overwrite) as folder:
        durable_files.write(folder / _FILE, content)
        vocabulary_file.write(folder / vocabulary_file.NAME, trained.words, trained.rule)
        durable_files.write(folder / _README, _readme(trained, top, batch, history).encode())


def _converted(trained: trained_model.TrainedModel, top: int, history: bool) -> tuple[bytes, str]:
    """Returns the file's content, and the number of sequences that it takes."""
    module = saved_model.NextIds(trained)
    try:
        return _convert(module, module.signature(top, with_history=history)), "n"
    except convert_phase.ConverterError:  # Loops are lowered for one known shape only.
        pass
    try:
        one = module.signature(top, batch_size=1, with_history=history)
        return _convert(module, one), "1"
    except convert_phase.ConverterError as error:
        lines = [line for line in str(error).splitlines() if "error:" in line] or [str(error)]
        reason = lines[0].partition("error:")[2].strip() or lines[0]
        raise validation.UsageError(
            "This model cannot be a TensorFlow Lite file of built-in operations only "
            f"({reason[:200]}): export a SavedModel, or build the model without such operations "
            "(recurrent layers of Keras with unroll=True)."
        ) from error


def _convert(module: tf.Module, function: Any) -> bytes:
    converter = tf.lite.TFLiteConverter.from_concrete_functions(
        [function.get_concrete_function()], module
    )
    converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS]
    return converter.convert()


def _readme(trained: trained_model.TrainedModel, top: int, batch: str, history: bool) -> str:
    words, length = trained.words, trained.model.sequence_length
    earlier = _HISTORY.format(bos=words.bos, eos=words.eos) if history else ""
    row = "\n| `history` (input) | int32, [h, w] | what the user wrote earlier, as below |"
    row = row if history else ""
    feed = "ids=ids, history=history" if history else "ids=ids"
    to_ids = "\n".join(_to_ids(trained))
    return f"""\
# Prediction of the next word, for TensorFlow Lite (LiteRT)

`{_FILE}` has built-in operations only and one signature. `{vocabulary_file.NAME}` has its words.

| tensor | type and shape | meaning |
|---|---|---|
| `ids` (input) | int32, [{batch}, {length}] | a text that has begun, as below |{row}
| `scores` | float32, [{batch}, {words.size}] | logit of every id to come next |
| `next_ids` | int32, [{batch}, {top}] | the likeliest words of the vocabulary, best first |
| `probabilities` | float32, [{batch}, {top}] | their probabilities |
| `unknown_word` | float32, [{batch}] | probability of a word out of the vocabulary |
| `end_of_text` | float32, [{batch}] | probability that the text ends here |

Probabilities leave out padding and the beginning of a text, which never come next.

## From text to ids

{to_ids}
4. A sequence is {words.bos} and then the ids of the words; of one longer than {length}, the last
   {length} ids. Fill it up at its end with 0. The last word is taken as whole.
{earlier}
## In Python

    from ai_edge_litert.interpreter import Interpreter  # Or tf.lite.Interpreter.
    runner = Interpreter("{_FILE}").get_signature_runner()
    found = runner({feed})
    best = [words[i - 1] for i in found["next_ids"][0]]

{vocabulary_file.note(words)}
"""


def _to_ids(trained: trained_model.TrainedModel) -> list[str]:
    """Returns the first three steps from a text to a sequence."""
    words, rule = trained.words, trained.rule
    normal = words.word_rule > tokenizer.NO_MARKS
    lower = "Normalise the text to Unicode's form NFC. " if normal else ""
    lower += (
        "Lower-case the text, by Unicode and not by the device's language. "
        if words.lower_case
        else "Leave capitals as they are. "
    )
    ends = f"{words.bos} begins a text, {words.eos} ends it, 0 is padding."
    if isinstance(rule, tokenizer.Tokenizer):
        return [
            f"1. {lower}U+0000 is read as U+FFFD.",
            "2. Its words are the matches, one after the other, of this regular expression (RE2):",
            "",
            f"   `{rule.pattern}`",
            f"3. The id of a word is its place in `words` of `{vocabulary_file.NAME}`, counted from"
            " 1. Every",
            f"   other word has the id {words.oov}. {ends}",
        ]
    return [
        f"1. {lower.strip()}",
        f"2. Split it into sub-words with `tokenizer` of `{vocabulary_file.NAME}`, which is a",
        "   tokenizer.json of Hugging Face's `tokenizers`, without special tokens. Of the kind",
        "   wordpiece, split it into words first, as `tff_dpftrl.data.subwords.words_of` does.",
        f"3. The id of a token is its number there, plus 1. {ends}",
    ]
