"""Texts as arrays of word ids of one length, ready for a language model."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import threading
from collections.abc import Sequence

import numpy as np

from tff_dpftrl import validation, version
from tff_dpftrl.data import user_text
from tff_dpftrl.data import vocabulary as vocabulary_lib


@dataclasses.dataclass(frozen=True)
class SequenceSpec:
    """Length and splitting of the sequences that texts become.

    Attributes:
      sequence_length: Number of positions T that a model predicts.
      split_long_texts: If True, a text longer than a sequence continues in the
        next one, which begins with the last word of the one before. If False it is
        cut off, as in TFF's Stack Overflow task.
    """

    sequence_length: int = 20
    split_long_texts: bool = True

    def __post_init__(self):
        validation.integer("sequence_length", self.sequence_length, minimum=1)


_CACHED = 2**27  # Bytes of sequences in memory.
_PER_USER = 300  # Bytes of a user's array in memory besides its content, about.


@dataclasses.dataclass(frozen=True, eq=False)
class Survey:
    """Counts and digest of the sequences of all users.

    Attributes:
      num_sequences: Number of sequences of each user, in the corpus's order, int64.
      num_words: Number of words in the sequences.
      num_unknown: Number of those words that are not in the vocabulary.
      digest: BLAKE2b digest (hex) of the sequences of all users, in their order. Whoever knows
        the texts can compute it: keep it with the secrets of a run.
    """

    num_sequences: np.ndarray
    num_words: int
    num_unknown: int
    digest: str


class SequenceCorpus:
    """The sequences of a corpus by user, tokenised when they are needed.

    A sequence is T + 1 ids, T the sequence length: a model reads ids 0 to T − 1
    and predicts ids 1 to T. A text is BOS, its words and EOS, then PAD; a text that
    fills its last sequence to the end loses its EOS, as in TFF's task.
    """

    def __init__(
        self,
        corpus: user_text.UserText,
        vocabulary: vocabulary_lib.Vocabulary,
        spec: SequenceSpec | None = None,
    ):
        """Initialises the view; nothing is read yet."""
        self.corpus = corpus
        self.vocabulary = vocabulary
        self.spec = SequenceSpec() if spec is None else spec
        self._tokenizer = vocabulary.rule(corpus.is_tokenized)
        self._cache: dict[str, np.ndarray] = {}  # The last used is the last one.
        self._cached_bytes = 0
        self._lock = threading.Lock()

    @property
    def user_ids(self) -> tuple[str, ...]:
        """The corpus's users."""
        return self.corpus.user_ids

    def sequences(self, user_id: str) -> np.ndarray:
        """Returns all sequences of one user: ids, int32, shape [n, T + 1]. Do not modify them."""
        with self._lock:
            cached = self._cache.pop(user_id, None)
            if cached is not None:
                self._cache[user_id] = cached
                return cached
        encoded = self._encode(self.corpus.examples(user_id))
        encoded.flags.writeable = False
        with self._lock:
            if user_id not in self._cache:
                self._cache[user_id] = encoded
                self._cached_bytes += encoded.nbytes + _PER_USER
            while self._cached_bytes > _CACHED and len(self._cache) > 1:
                oldest = self._cache.pop(next(iter(self._cache)))
                self._cached_bytes -= oldest.nbytes + _PER_USER
        return encoded

    @functools.cached_property
    def survey(self) -> Survey:
        """The survey of all users; of a large corpus it is kept beside the texts."""
        if self.corpus.remember is None:
            return self._count()
        key = hashlib.blake2b(digest_size=16)
        rules = (version.__version__, repr(self.spec), repr(self._tokenizer))
        for part in (*rules, *self.vocabulary.words, *self.user_ids):
            encoded = part.encode("utf-8", "surrogatepass")
            key.update(len(encoded).to_bytes(8, "little") + encoded)
        kept = self.corpus.remember(f"survey {key.hexdigest()}", lambda: _pack(self._count()))
        return _unpack(kept)

    def _count(self) -> Survey:
        content = hashlib.blake2b(digest_size=16)
        lengths = np.zeros(len(self.user_ids), np.int64)
        num_words = num_unknown = 0
        for index, user_id in enumerate(self.user_ids):
            rows = self.sequences(user_id)
            content.update(f"{len(user_id)} {user_id} {rows.shape}".encode())
            content.update(rows.astype("<i4").tobytes())
            targets = rows[:, 1:]
            lengths[index] = len(rows)
            words, unknown = self.vocabulary.count(targets)
            num_words, num_unknown = num_words + words, num_unknown + unknown
        return Survey(lengths, num_words, num_unknown, content.hexdigest())

    def sample(
        self, user_id: str, *, max_sequences: int | None, num_epochs: int = 1, seed: int
    ) -> np.ndarray:
        """Samples sequences of one user in random order: ids, int32.

        The shape is [num_epochs · min(n, max_sequences), T + 1].
        """
        if max_sequences is not None:
            validation.integer("max_sequences", max_sequences, minimum=1)
        validation.integer("num_epochs", num_epochs, minimum=1)
        sequences = self.sequences(user_id)
        user_key = int.from_bytes(hashlib.sha256(user_id.encode("utf-8")).digest()[:8], "big")
        rng = np.random.default_rng([seed, user_key])
        chosen = rng.permutation(len(sequences))[:max_sequences]
        later_epochs = [rng.permutation(chosen) for _ in range(num_epochs - 1)]
        return sequences[np.concatenate([chosen, *later_epochs])]

    def pooled(
        self, user_ids: Sequence[str] | None = None, max_sequences: int | None = None, seed: int = 0
    ) -> np.ndarray:
        """Returns the sequences of `pooled_with_users` without their users."""
        return self.pooled_with_users(user_ids, max_sequences, seed)[0]

    def pooled_with_users(
        self, user_ids: Sequence[str] | None = None, max_sequences: int | None = None, seed: int = 0
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the sequences of many users in one array, and where each is from.

        These are ids, int32, shape [n, T + 1]; indices in `user_ids`; and indices in the
        `sequences` of that user, both int64, shape [n]. With `max_sequences`, they are a random
        sample from users in random order, so that few are read.
        """
        user_ids = list(self.user_ids if user_ids is None else user_ids)
        order = np.arange(len(user_ids))
        if max_sequences is not None:
            order = np.random.default_rng([seed, 0]).permutation(len(user_ids))
        parts, users, count = [np.zeros([0, self.spec.sequence_length + 1], np.int32)], [], 0
        places = [np.zeros(0, np.int64)]
        for index in order:
            # Twice the size of the sample, so that a long user does not fill it alone.
            if max_sequences is not None and count >= 2 * max_sequences:
                break
            parts.append(self.sequences(user_ids[index]))
            users += [index] * len(parts[-1])
            places.append(np.arange(len(parts[-1])))
            count += len(parts[-1])
        found = np.concatenate(parts), np.array(users, np.int64), np.concatenate(places)
        if max_sequences is None:
            return found
        chosen = np.sort(np.random.default_rng([seed, 1]).permutation(count)[:max_sequences])
        pool, owners, places_in = (part[chosen] for part in found)
        return pool, owners, places_in

    def targets_per_character(self, user_ids: Sequence[str] | None = None) -> float:
        """Returns the number of targets of some users, over the number of characters of their text.

        Bits per character are this times the mean loss, over ln 2 (Gao et al. 2020, "The Pile",
        section 3.1, there with bytes). Ends of texts are targets. Characters are those of Unicode,
        white space included, before the text is lower-cased: they do not depend on the vocabulary.
        Of texts that are cut off, all targets and characters count, as if the rest of the text had
        the mean loss, too.
        """
        if not self.spec.split_long_texts:
            whole = dataclasses.replace(self.spec, split_long_texts=True)
            of_whole = SequenceCorpus(self.corpus, self.vocabulary, whole)
            return of_whole.targets_per_character(self.user_ids if user_ids is None else user_ids)
        targets = characters = 0
        for user_id in self.user_ids if user_ids is None else user_ids:
            targets += int(np.count_nonzero(self.sequences(user_id)[:, 1:]))
            characters += sum(map(len, self.corpus.examples(user_id)))
        return targets / characters if characters else float("nan")

    def _encode(self, texts: Sequence[str]) -> np.ndarray:
        length = self.spec.sequence_length
        bos, eos = self.vocabulary.bos, self.vocabulary.eos
        rows = []
        for text in texts:
            words = self._tokenizer.words(text)
            if not words:
                continue
            if not self.spec.split_long_texts:
                words = words[:length]
            ids = [bos, *self.vocabulary.ids(words), eos]
            # One sequence ends with the id that the next begins with.
            for start in range(0, max(1, len(words)), length):
                rows.append(ids[start : start + length + 1])
        encoded = np.full([len(rows), length + 1], vocabulary_lib.PAD, np.int32)
        for row, ids in zip(encoded, rows, strict=True):
            row[: len(ids)] = ids
        return encoded


def _pack(survey: Survey) -> bytes:
    """Returns a survey as bytes."""
    content = io.BytesIO()
    np.savez_compressed(content, **dataclasses.asdict(survey))
    return content.getvalue()


def _unpack(content: bytes) -> Survey:
    """Returns what `_pack` was given."""
    with np.load(io.BytesIO(content), allow_pickle=False) as found:
        return Survey(
            found["num_sequences"],
            int(found["num_words"]),
            int(found["num_unknown"]),
            str(found["digest"]),
        )
