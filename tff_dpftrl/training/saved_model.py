"""A trained model as a SavedModel: texts in, likely next words and their probabilities out.

Vocabulary, splitting of text and weights are inside, made of operations of TensorFlow's
core: it loads where this package is not installed.

Example:
  ```
  import tensorflow as tf
  model = tf.saved_model.load("exported")
  output = model.signatures["serving_default"](texts=tf.constant(["the number of"]))
  output["words"], output["probabilities"], output["unknown_word"], output["end_of_text"]
  ```
"""

from __future__ import annotations

import pathlib

import tensorflow as tf

from tff_dpftrl import durable_files, validation
from tff_dpftrl.data import vocabulary_file
from tff_dpftrl.models import next_words
from tff_dpftrl.runs import tensorflow_files
from tff_dpftrl.training import trained_model

_FILE = "saved_model.pb"
# TensorFlow's place for files that go with a SavedModel and are not read by it.
_EXTRA = pathlib.PurePath("assets.extra", "vocabulary.json")


class _NextWords(tf.Module):
    """The graph from texts to words, and what it needs."""

    def __init__(self, trained: trained_model.TrainedModel):
        super().__init__()
        self._trained = trained
        self._weights = [tf.Variable(weight, trainable=False) for weight in trained.weights]
        # A half of a character that JSON had cut, which no UTF-8 text has in it.
        words = [word.encode("utf-8", "surrogatepass") for word in trained.words.words]
        self._words = tf.constant(words)
        self._ids = tf.lookup.StaticHashTable(
            tf.lookup.KeyValueTensorInitializer(
                self._words, tf.range(1, len(words) + 1, dtype=tf.int32)
            ),
            default_value=trained.words.oov,
        )

    @tf.function(
        autograph=False,
        input_signature=[
            tf.TensorSpec([None], tf.string, name="texts"),
            tf.TensorSpec([], tf.int32, name="top"),
        ],
    )
    def predict(self, texts, top):
        """Predicts the next words of texts; `write` describes the results."""
        trained = self._trained
        texts = tf.strings.unicode_transcode(texts, "UTF-8", "UTF-8", errors="replace")
        ids = tf.ragged.map_flat_values(self._ids.lookup, trained.rule.split(texts))
        predicted = next_words.next_words(trained.model, self._weights, ids, trained.special, top)
        return {
            "words": tf.gather(self._words, predicted.ids - 1),
            "probabilities": predicted.probabilities,
            "unknown_word": predicted.unknown_word,
            "end_of_text": predicted.end_of_text,
        }


def check_output(output: str | pathlib.Path, *, overwrite: bool = False) -> None:
    """Refuses a folder that `write` may not write to.

    Args:
      output: The folder.
      overwrite: Whether a SavedModel that is there may be replaced.

    Raises:
      ValueError: If something is there already, unless it is a SavedModel that may be
        replaced, or the folder that it is to be in does not exist.
    """
    output = pathlib.Path(output)
    if not output.absolute().parent.is_dir():
        raise validation.UsageError(
            f"OUTPUT {output} cannot be written: there is no folder {output.absolute().parent}. "
            "Make it first."
        )
    if not output.exists() and not output.is_symlink():
        return
    if not (output / _FILE).is_file():
        raise validation.UsageError(
            f"OUTPUT {output} exists and is no SavedModel, so it is left alone: name a new folder."
        )
    if not overwrite:
        raise validation.UsageError(
            f"OUTPUT {output} is a SavedModel already: add --overwrite to replace it, or name a "
            "new folder."
        )


def write(
    output: str | pathlib.Path,
    trained: trained_model.TrainedModel,
    *,
    top: int = 10,
    overwrite: bool = False,
) -> None:
    """Writes a SavedModel, whole or not at all.

    Its signature `serving_default` maps `texts` (strings, UTF-8, shape [n]) to `words`
    (strings, [n, k], best first), `probabilities` (float32, [n, k]), `unknown_word` and
    `end_of_text` (float32, [n]); see `models.next_words`. The loaded object's method
    `predict(texts, top)` does so with another number of words. A text without words gives
    what may come first in a text. Bytes that are not UTF-8 are read as U+FFFD.

    Beside it lies `assets.extra/vocabulary.json`, which says where the words are from.

    Args:
      output: The folder, which is made.
      trained: The model.
      top: Number of words k of the signature; all of the vocabulary if it has fewer.
      overwrite: Whether a SavedModel that is there is replaced.

    Raises:
      ValueError: If `top` is not positive, or as for `check_output`.
      OSError: If it cannot be written.
    """
    validation.integer("top", top, minimum=1)
    check_output(output, overwrite=overwrite)
    module = _NextWords(trained)

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None], tf.string, name="texts")])
    def serve(texts):
        return module.predict(texts, tf.constant(min(top, trained.words.size)))

    with durable_files.new_folder(pathlib.Path(output).resolve(), replace=overwrite) as folder:
        with tensorflow_files.as_os_error(output):
            tf.saved_model.save(module, str(folder), signatures=serve)
        (folder / _EXTRA).parent.mkdir()
        vocabulary_file.write(folder / _EXTRA, trained.words, trained.rule)
