"""A trained model as it is used: texts in, likely next words out.

Two files of a run's folder are enough, and may be handed on by themselves: the model and
`vocabulary.json`. Neither options nor data of the run are read, and TFF is not needed.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import shlex
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, get_args

from tff_dpftrl import validation
from tff_dpftrl.data import vocabulary, vocabulary_file
from tff_dpftrl.models import hugging_face
from tff_dpftrl.runs import joint_runs, manifest

if TYPE_CHECKING:  # So that `find` can refuse a folder before TensorFlow is imported.
    import numpy as np
    import tensorflow as tf

    from tff_dpftrl.models import language_model, metrics, next_words
    from tff_dpftrl.training import custom_models

Which = Literal["last", "best"]
"""The model after the last round, or the one that was best on the held-out users."""

_MODELS: dict[Which, str] = {"last": "model.npz", "best": "best_model.npz"}


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Prediction of the words after a text.

    Attributes:
      next_words: Words of the vocabulary and their probabilities, best first.
      unknown_word: Probability of a word out of the vocabulary.
      end_of_text: Probability that the text ends here.
      unknown_in_text: Words of the text that are not in the vocabulary, in order, each
        once; the model was told that some unknown word stands there.
    """

    next_words: tuple[tuple[str, float], ...]
    unknown_word: float
    end_of_text: float
    unknown_in_text: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Continuation:
    """Sampled continuation of a text.

    Attributes:
      text: What follows the text, with the space before it.
      has_ended: Whether the model ended the text there.
    """

    text: str
    has_ended: bool


@dataclasses.dataclass(frozen=True, eq=False)
class TrainedModel:
    """A model with its weights, vocabulary and tokenizer.

    Attributes:
      model: The model.
      weights: One array for each entry of its `weight_shapes`.
      words: The vocabulary.
      rule: Tokenizer that splits text into words.
      checkpoint: Folder in Hugging Face's layout that it was read from; None of another one.
    """

    model: language_model.LanguageModel
    weights: Sequence[np.ndarray]
    words: vocabulary.Vocabulary
    rule: vocabulary.Rule
    checkpoint: pathlib.Path | None = None

    @property
    def special(self) -> metrics.SpecialIds:
        """Ids that are not words of the vocabulary."""
        from tff_dpftrl.models import metrics

        return metrics.SpecialIds(oov=self.words.oov, bos=self.words.bos, eos=self.words.eos)

    def predict(
        self, texts: Sequence[str], top: int = 5, *, history: Sequence[str] | None = None
    ) -> list[Prediction]:
        """Predicts how texts that have begun go on.

        The last word is taken as whole: "I wan" is followed by a word, not by "t".

        Args:
          texts: Beginnings of sentences. If one is longer than the model's sequence length,
            its end is read.
          top: Number of words to predict; all of the vocabulary if it has fewer.
          history: Texts that the author of all these texts wrote earlier: a cache of them is
            mixed into the probabilities (`models.text_cache`). They are kept nowhere.

        Returns:
          A prediction for each text.

        Raises:
          ValueError: If a text has no word in it, the history has none, or `top` is not positive.
        """
        import tensorflow as tf

        validation.integer("top", top, minimum=1)
        split = list(map(self._words_of, texts))
        if not split:
            return []
        ids = tf.ragged.constant([self.words.ids(words) for words in split], dtype=tf.int32)
        top = min(top, self.words.size)  # Any number at all fits the graph then.
        if history is None:
            found = self._next_words(ids, tf.constant(top))
        else:
            found = self._next_words_after(ids, tf.constant(top), self._rows(history))
        arrays = [part.numpy() for part in found]
        known, predictions = self.words.id_of, []
        for words, best, values, unknown, end in zip(split, *arrays, strict=True):
            # The embedding of a checkpoint may have more rows than there are tokens.
            named = [
                (self.words.shown(i), float(value))
                for i, value in zip(best.tolist(), values, strict=True)
                if i < self.words.size
            ]
            missing = dict.fromkeys(word for word in words if word not in known)
            predictions.append(Prediction(tuple(named), float(unknown), float(end), tuple(missing)))
        return predictions

    def continue_texts(
        self,
        texts: Sequence[str],
        num_tokens: int,
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int | np.random.Generator | None = None,
    ) -> list[Continuation]:
        """Samples how texts go on, one word or sub-word after the other.

        Args:
          texts: Beginnings of texts. Of what is longer than the model's sequence length, the end
            is read.
          num_tokens: Largest number of words or sub-words that are sampled for a text.
          temperature: Number that the scores are divided by; 0 takes the likeliest.
          top_p: Least probability of the smallest set of likeliest words that is sampled from.
          seed: Seed of the samples, or their generator; the operating system's if None.

        Returns:
          A continuation of each text.

        Raises:
          ValueError: If a text has no word in it, or a number is out of range.
        """
        import numpy as np

        from tff_dpftrl.models import next_words

        validation.integer("num_tokens", num_tokens, minimum=1)
        validation.number("temperature", temperature, at_least=0)
        validation.number("top_p", top_p, above=0, at_most=1)
        if not isinstance(seed, np.random.Generator | None):
            validation.integer("seed", seed, minimum=0)
        rng, length = np.random.default_rng(seed), self.model.sequence_length
        begun = [self.words.ids(self._words_of(text)) for text in texts]
        added: list[list[int]] = [[] for _ in begun]
        going = list(range(len(begun)))
        for _ in range(num_tokens):
            if not going:
                break
            rows = np.zeros([len(going), length], np.int32)
            for row, index in zip(rows, going, strict=True):
                ids = [self.words.bos, *begun[index], *added[index]][-length:]
                row[: len(ids)] = ids
            scores = self._next_scores(rows).numpy()[:, : self.words.size]
            sampled = next_words.sample(
                scores, self.special, rng, temperature=temperature, top_p=top_p
            )
            for index, word in zip(going, sampled.tolist(), strict=True):
                added[index].append(word)
            going = [index for index in going if added[index][-1] != self.words.eos]
        return [
            Continuation(self._text_after(ids, new), new[-1] == self.words.eos)
            for ids, new in zip(begun, added, strict=True)
        ]

    def _words_of(self, text: str) -> list[str]:
        words = self.rule.words(text)
        if not words:
            raise validation.UsageError(
                f"the text must have at least one word in it, got {text!r}."
            )
        return words

    def _text_after(self, begun: Sequence[int], added: Sequence[int]) -> str:
        """Returns the text of further ids, with the space before it."""
        first, both = self.words.text(begun), self.words.text([*begun, *added])
        # A character may consist of several tokens, of which only the last one is new.
        return both[len(first) :] if both.startswith(first) else self.words.text(added)

    @functools.cached_property
    def _next_scores(self) -> Callable[..., tf.Tensor]:
        import tensorflow as tf

        from tff_dpftrl.models import next_words

        weights = [tf.convert_to_tensor(weight) for weight in self.weights]
        spec = tf.TensorSpec([None, self.model.sequence_length], tf.int32)

        @tf.function(autograph=False, input_signature=[spec])
        def graph(ids):
            return next_words.next_scores(self.model, weights, ids)

        return graph

    def _rows(self, history: Sequence[str]) -> tf.Tensor:
        """Returns texts as rows of `text_cache`."""
        import tensorflow as tf

        from tff_dpftrl.models import text_cache

        ids = [self.words.ids(words) for text in history if (words := self.rule.words(text))]
        if not ids:
            raise validation.UsageError(
                "history must have at least one word in it: leave it out if nothing was written."
            )
        return text_cache.rows_of(tf.ragged.constant(ids, dtype=tf.int32), self.special)

    @functools.cached_property
    def _next_words(self) -> Callable[..., next_words.NextWords]:
        return self._graph()

    @functools.cached_property
    def _next_words_after(self) -> Callable[..., next_words.NextWords]:
        import tensorflow as tf

        return self._graph(tf.TensorSpec([None, None], tf.int32))

    def _graph(self, *history: tf.TensorSpec) -> Callable[..., next_words.NextWords]:
        import tensorflow as tf

        from tff_dpftrl.models import next_words

        # Tensors, since arrays would be copied into the graph.
        weights = [tf.convert_to_tensor(weight) for weight in self.weights]

        @tf.function(
            autograph=False,
            input_signature=[
                tf.RaggedTensorSpec([None, None], tf.int32),
                tf.TensorSpec([], tf.int32),
                *history,
            ],
        )
        def graph(ids, top, history=None):
            return next_words.next_words(self.model, weights, ids, self.special, top, history)

        return graph


@dataclasses.dataclass(frozen=True)
class TrainedFiles:
    """The files of a trained model, of which the small one has been read.

    `checkpoint` is the checkpoint in Hugging Face's layout that holds the model; None if it is in
    `model_path`.
    """

    model_path: pathlib.Path
    words: vocabulary.Vocabulary
    rule: vocabulary.Rule
    checkpoint: hugging_face.Checkpoint | None = None

    def load(
        self,
        model: custom_models.Model | None = None,
        *,
        sequence_length: int | None = None,
    ) -> TrainedModel:
        """Reads the model; refuses a file of another vocabulary.

        `model` is the custom model that the run trained, if it trained one; its weights do not
        matter. `sequence_length` is the number of positions of the model of a checkpoint in Hugging
        Face's layout; `hugging_face.SEQUENCE_LENGTH` if None.
        """
        from tff_dpftrl.models import export
        from tff_dpftrl.training import custom_models

        if self.checkpoint is not None:
            stored, weights = self.checkpoint.read(sequence_length)
            if stored.vocabulary_size < self.words.size:
                raise validation.UsageError(
                    f"{self.checkpoint.folder} has a {hugging_face.TOKENIZER} of "
                    f"{len(self.words.words)} tokens, and a model of {stored.vocabulary_size - 1} "
                    "only: they are of two checkpoints. Restore the one that belongs to the other."
                )
            folder = self.checkpoint.folder
            return TrainedModel(stored, weights, self.words, self.rule, folder)
        if sequence_length is not None:
            raise validation.UsageError(
                f"sequence_length is for a checkpoint in Hugging Face's layout, and the length of "
                f"{self.model_path} is its own: leave it out."
            )
        stored, weights = export.read(self.model_path)
        # The embedding of a checkpoint may have more rows than there are tokens.
        is_larger = stored.vocabulary_size > self.words.size and self.words.may_be_fewer
        if stored.vocabulary_size != self.words.size and not is_larger:
            raise validation.UsageError(
                f"{self.model_path} is a model of {stored.vocabulary_size} ids, but "
                f"{vocabulary_file.NAME} beside it has {self.words.size}: they are of two runs. "
                "Restore the one that belongs to the other."
            )
        stored = custom_models.for_file(stored, model, self.model_path)
        return TrainedModel(stored, weights, self.words, self.rule)


def find(
    folder: str | pathlib.Path, which: Which = "last", *, is_published: bool = True
) -> TrainedFiles:
    """Finds the files of a run's model, without TensorFlow.

    Args:
      folder: Folder that `train` or `report` wrote to, or one with a copy of the two files; or a
        checkpoint in Hugging Face's layout.
      which: "last" or "best".
      is_published: Whether to refuse runs of which nothing is to be published, those that
        `sweep --select` chooses among.

    Returns:
      The files.

    Raises:
      ValueError: If there is no run in the folder, it has no such model yet, or it is from
        before vocabularies were kept; each time with what to do about it.
    """
    folder = pathlib.Path(folder)
    if which not in _MODELS:
        raise validation.UsageError(
            f"which must be one of {', '.join(get_args(Which))}; got {which!r}."
        )
    if is_published:
        joint_runs.refuse_unreleased(folder)
    model_path, words_path = folder / _MODELS[which], folder / vocabulary_file.NAME
    if which == "best" and not model_path.exists():  # Held-out users who are protected chose it.
        private = folder / "private" / _MODELS[which]
        model_path = private if private.exists() else model_path
    quoted = shlex.quote(str(folder))
    if not model_path.exists() and hugging_face.is_checkpoint(folder):
        if which == "best":
            raise validation.UsageError(
                f"{folder} is a checkpoint, which has one model and not a best one beside it: "
                "leave --model out."
            )
        return _of_checkpoint(folder)
    if not model_path.exists():
        if not manifest.exists(folder):
            raise validation.UsageError(
                f"There is no trained model in {folder}: {model_path} does not exist. Name a "
                "folder that tff-dpftrl train or pretrain wrote to."
            )
        _refuse_custom(folder)
        raise validation.UsageError(
            f"The run in {folder} has no {model_path.name} yet: "
            + (
                f"tff-dpftrl report {quoted} writes the model of the rounds done so far."
                if which == "last"
                else "no model has been evaluated. Take the last model, or go on with "
                f"tff-dpftrl train --resume --output {quoted}."
            )
        )
    if not words_path.exists():
        raise validation.UsageError(
            f"The model in {folder} has no words: {words_path} does not exist, perhaps because an "
            "older version of tff-dpftrl trained it. While its data is where it was, tff-dpftrl "
            f"train --resume --output {quoted} writes it, also for a run that has ended."
        )
    return TrainedFiles(model_path, *vocabulary_file.read(words_path))


def _refuse_custom(folder: pathlib.Path) -> None:
    """Refuses a run of a model that was made in Python, of which only the weights are known."""
    known = manifest.public(folder)
    if known.get("kind") != manifest.CUSTOM_FINETUNING:
        return
    weights = folder / "weights.npz"
    where = f"are in {weights}"
    if not weights.exists():
        where = f"are written to {weights} by tff-dpftrl report {shlex.quote(str(folder))}"
    raise validation.UsageError(
        f"The run in {folder} trained a model that was made in Python, which only your code can "
        f"compute: its weights {where}, in the order in which the code gave them. Read them by "
        "numpy.load, and use them in your model."
    )


def _of_checkpoint(folder: pathlib.Path) -> TrainedFiles:
    """Finds the files of a checkpoint in Hugging Face's layout."""
    checkpoint = hugging_face.find(folder)
    path = folder / hugging_face.TOKENIZER
    if not path.exists():
        raise validation.UsageError(
            f"{folder} has no {path.name}, by which text becomes the model's ids: where "
            "transformers is installed, AutoTokenizer.from_pretrained(…).save_pretrained(…) "
            "writes it."
        )
    words, rule = vocabulary_file.read(path)
    return TrainedFiles(checkpoint.files[0], words, rule, checkpoint)


def write_vocabulary(
    folder: pathlib.Path, words: vocabulary.Vocabulary, is_tokenized: bool
) -> None:
    """Writes to a run's folder what `find` reads there beside the model."""
    vocabulary_file.write(folder / vocabulary_file.NAME, words, words.rule(is_tokenized))
