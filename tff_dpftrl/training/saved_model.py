"""A trained model as a SavedModel: texts in, likely next words and their probabilities out.

Vocabulary, splitting of text and weights are inside, made of operations of TensorFlow's
core: it loads where this package is not installed.

Example:
  ```
  import tensorflow as tf
  model = tf.saved_model.load("exported")
  output = model.signatures["serving_default"](texts=tf.constant(["the number of"]))
  output["words"], output["probabilities"], output["unknown_word"], output["end_of_text"]
  output = model.signatures["ids"](ids=tf.constant([[1, 2, 3, 4]]))  # Without the text.
  output["scores"], output["next_ids"], output["probabilities"]
  ```
"""

from __future__ import annotations

import itertools
import pathlib
from typing import Any

import numpy as np
import tensorflow as tf

from tff_dpftrl import durable_files, validation
from tff_dpftrl.data import vocabulary_file
from tff_dpftrl.models import next_words, text_cache
from tff_dpftrl.runs import tensorflow_files
from tff_dpftrl.training import trained_model

_FILE = "saved_model.pb"
# TensorFlow's place for files that go with a SavedModel and are not read by it.
_EXTRA = pathlib.PurePath("assets.extra", "vocabulary.json")


class NextIds(tf.Module):
    """The graph from ids to the scores of the next id."""

    def __init__(self, trained: trained_model.TrainedModel):
        """Initialises the weights as variables."""
        super().__init__()
        self._trained = trained
        self._weights = [tf.Variable(weight, trainable=False) for weight in trained.weights]

    def signature(
        self, top: int, batch_size: int | None = None, *, with_history: bool = False
    ) -> Any:
        """Returns the function of the signature `ids` or `ids_with_history`; see `write`."""
        trained = self._trained
        specs = [tf.TensorSpec([batch_size, trained.model.sequence_length], tf.int32, name="ids")]
        if with_history:
            specs.append(tf.TensorSpec([None, None], tf.int32, name="history"))

        @tf.function(autograph=False, input_signature=specs)
        def of_ids(ids, history=None):
            scores = next_words.next_scores(trained.model, self._weights, ids)
            found = next_words.of_scores(scores, trained.special, top, history=history, words=ids)
            return {"scores": scores, "next_ids": found.ids, **_probabilities(found)}

        return of_ids


def _probabilities(found: next_words.NextWords) -> dict[str, tf.Tensor]:
    return {
        "probabilities": found.probabilities,
        "unknown_word": found.unknown_word,
        "end_of_text": found.end_of_text,
    }


class _NextWords(NextIds):
    """The graph from texts to words, and what it needs."""

    def __init__(self, trained: trained_model.TrainedModel):
        super().__init__(trained)
        # Half of a character that JSON had cut, which UTF-8 text never contains.
        words = [word.encode("utf-8", "surrogatepass") for word in trained.words.words]
        self._words = tf.constant(words)
        # A hash table would have to be initialised, and the converter to TensorFlow Lite would
        # fail at that, whatever signature it is asked for. So no two words may share a hash.
        for self._key in itertools.count():
            hashes = self._hash(self._words).numpy()
            if len(np.unique(hashes)) == len(words):
                break
        order = np.argsort(hashes)
        self._hashes, self._ids = tf.constant(hashes[order]), tf.constant(order + 1, tf.int32)

    def _hash(self, words: tf.Tensor) -> tf.Tensor:
        return tf.strings.to_hash_bucket_strong(words, np.iinfo(np.int64).max, [self._key, 0])

    def _lookup(self, words: tf.Tensor) -> tf.Tensor:
        """Returns the ids of words, shape [n]."""
        place = tf.minimum(tf.searchsorted(self._hashes, self._hash(words)), len(self._hashes) - 1)
        ids = tf.gather(self._ids, place)
        is_known = tf.equal(tf.gather(self._words, ids - 1), words)
        return tf.where(is_known, ids, self._trained.words.oov)

    def ids(self, texts: tf.Tensor) -> tf.RaggedTensor:
        """Returns the ids of the words of texts, ragged shape [n, None]."""
        texts = tf.strings.unicode_transcode(texts, "UTF-8", "UTF-8", errors="replace")
        return tf.ragged.map_flat_values(self._lookup, self._trained.rule.split(texts))

    @tf.function(
        autograph=False,
        input_signature=[
            tf.TensorSpec([None], tf.string, name="texts"),
            tf.TensorSpec([], tf.int32, name="top"),
        ],
    )
    def predict(self, texts, top):
        """Predicts the next words of texts; `write` describes the results."""
        return self.after(texts, top)

    def after(
        self, texts: tf.Tensor, top: tf.Tensor, history: tf.Tensor | None = None
    ) -> dict[str, tf.Tensor]:
        """Predicts the next words of texts, perhaps after rows of `text_cache`."""
        trained = self._trained
        predicted = next_words.next_words(
            trained.model, self._weights, self.ids(texts), trained.special, top, history
        )
        return {"words": tf.gather(self._words, predicted.ids - 1), **_probabilities(predicted)}


def check_output(
    output: str | pathlib.Path,
    *,
    overwrite: bool = False,
    file: str = _FILE,
    what: str = "SavedModel",
) -> None:
    """Refuses a folder that an exported model may not be written to."""
    output = pathlib.Path(output)
    if not output.absolute().parent.is_dir():
        raise validation.UsageError(
            f"OUTPUT {output} cannot be written: there is no folder {output.absolute().parent}. "
            "Make it first."
        )
    if not output.exists() and not output.is_symlink():
        return
    if not (output / file).is_file():
        raise validation.UsageError(
            f"OUTPUT {output} exists and is no {what}, so it is left alone: name a new folder."
        )
    if not overwrite:
        raise validation.UsageError(
            f"OUTPUT {output} is a {what} already: add --overwrite to replace it, or name a "
            "new folder."
        )


def write(
    output: str | pathlib.Path,
    trained: trained_model.TrainedModel,
    *,
    top: int = 10,
    history: bool = False,
    overwrite: bool = False,
) -> None:
    """Writes a SavedModel, whole or not at all.

    Its signature `serving_default` maps `texts` (strings, UTF-8, shape [n]) to `words`
    (strings, [n, k], best first), `probabilities` (float32, [n, k]), `unknown_word` and
    `end_of_text` (float32, [n]); see `models.next_words`. The loaded object's method
    `predict(texts, top)` does so with another number of words. A text without words gives
    what may come first in a text. Bytes that are not UTF-8 are read as U+FFFD. Texts must be
    normalised to NFC (`unicodedata.normalize`): TensorFlow has no operation for it.

    The tokens of a checkpoint or of 'sentencepiece' cannot be made in a graph: then there is no
    `predict`, and `serving_default` is the signature `ids`.

    Its signature `ids` is for who splits text elsewhere, and for TensorFlow Lite, whose
    converter takes it (`signature_keys=["ids"]`). It maps `ids` (int32, [n, T]: the beginning of a
    sequence, its words, and padding up to the model's sequence length T) to `scores` (float32,
    [n, V], logits), `next_ids` (int32, [n, k], best first), and the same probabilities.

    With `history` there are two more signatures, which mix a cache of a user's own earlier text
    into the probabilities (`models.text_cache`); it is computed where the SavedModel runs.
    `with_history` maps `texts` and `history` (strings, [h], earlier texts of the author of all of
    `texts`) to what `serving_default` returns. `ids_with_history` maps `ids` and `history` (int32,
    [h, W]: each earlier text between its beginning and its end, then padding) to what `ids`
    returns; its scores are those of the model alone. No history is in the SavedModel.

    Beside it lies `assets.extra/vocabulary.json`, which says where the words are from.

    Args:
      output: The folder, which is made.
      trained: The model.
      top: Number of words k of the signatures; all of the vocabulary if it has fewer.
      history: Whether it has the signatures that take a user's earlier text.
      overwrite: Whether a SavedModel that is there is replaced.

    Raises:
      ValueError: If `top` is not positive, or as for `check_output`.
      OSError: If it cannot be written.
    """
    validation.integer("top", top, minimum=1)
    check_output(output, overwrite=overwrite)
    if trained.rule.is_in_graphs:
        module, signatures = _of_texts(trained, top, history)
    else:
        module = NextIds(trained)
        signatures = dict.fromkeys(("serving_default", "ids"), module.signature(top))
    if history:
        signatures["ids_with_history"] = module.signature(top, with_history=True)
    with durable_files.new_folder(pathlib.Path(output).resolve(), replace=overwrite) as folder:
        with tensorflow_files.as_os_error(output):
            tf.saved_model.save(module, str(folder), signatures=signatures)
        (folder / _EXTRA).parent.mkdir()
        vocabulary_file.write(folder / _EXTRA, trained.words, trained.rule)


def _of_texts(
    trained: trained_model.TrainedModel, top: int, history: bool
) -> tuple[_NextWords, dict[str, Any]]:
    """Returns the graph from texts to words, and its signatures."""
    module = _NextWords(trained)
    texts_spec, history_spec = (
        tf.TensorSpec([None], tf.string, name=name) for name in ("texts", "history")
    )
    top_words = min(top, trained.words.size)

    @tf.function(autograph=False, input_signature=[texts_spec])
    def serve(texts):
        return module.predict(texts, tf.constant(top_words))

    @tf.function(autograph=False, input_signature=[texts_spec, history_spec])
    def serve_with_history(texts, history):
        rows = text_cache.rows_of(module.ids(history), trained.special)
        return module.after(texts, tf.constant(top_words), rows)

    signatures = {"serving_default": serve, "ids": module.signature(top)}
    return module, signatures | ({"with_history": serve_with_history} if history else {})
