"""Digests of a corpus by which its texts are recognised where the corpus itself is gone.

Digests are keyed with random bytes that lie beside them: those of two corpora cannot be compared
with each other, and whoever has a text can find out whether the corpus had it. So they are for
text that is public.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import pathlib
import secrets
from collections.abc import Iterable

import numpy as np

from tff_dpftrl import durable_files, validation
from tff_dpftrl.data import tokenizer, user_text

_MOST = 2**20
_LARGEST = np.uint64(2**64 - 1)


@dataclasses.dataclass(frozen=True, eq=False)
class TextDigests:
    """Digests of the texts of a corpus, and of each with the id of its user.

    Of a corpus with more than a million texts, the smallest digests are kept: a sample of the
    texts, and of any other corpus the texts with digests as small are compared with it.

    Attributes:
      key: Key of the digests, 16 bytes.
      texts: Sorted digests of texts, uint64.
      texts_of_users: Sorted digests of ids with texts, uint64.
    """

    key: bytes
    texts: np.ndarray
    texts_of_users: np.ndarray

    @classmethod
    def of(cls, *corpora: user_text.UserText) -> TextDigests:
        """Computes the digests of corpora with a new key."""
        key, texts, texts_of_users = secrets.token_bytes(16), set(), set()
        for corpus in corpora:
            for user_id in corpus.user_ids:
                for text in user_text.normal_texts(corpus.examples(user_id)):
                    texts.add(_digest(key, "", text))
                    texts_of_users.add(_digest(key, user_id, text))
                if len(texts_of_users) > 4 * _MOST:  # As many as fit, whatever is to come.
                    texts, texts_of_users = (
                        set(_smallest(found).tolist()) for found in (texts, texts_of_users)
                    )
        return cls(key, _smallest(texts), _smallest(texts_of_users))

    def shared_users(self, protected: user_text.UserText) -> int:
        """Counts the users of a corpus who have their texts in this one, or in its sample."""
        shared = 0
        for user_id in protected.user_ids:
            examples = protected.examples(user_id)
            # Earlier versions made digests of texts as they were, not normalised.
            shared += any(
                self._has_texts_of(user_id, user_text.normal_texts(examples, version))
                for version in (tokenizer.LATEST, tokenizer.NO_MARKS)
            )
        return shared

    def _has_texts_of(self, user_id: str, texts: frozenset[str]) -> bool:
        compared = {text: _digest(self.key, "", text) for text in texts}
        compared = {text: d for text, d in compared.items() if d <= _bound(self.texts)}
        with_id = (_digest(self.key, user_id, text) for text in texts)
        return (user_text.is_long(compared) and _has_all(self.texts, compared.values())) or any(
            _has_all(self.texts_of_users, [one]) for one in with_id
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the digests to a file."""
        content = io.BytesIO()
        np.savez(
            content,
            key=np.frombuffer(self.key, np.uint8),
            texts=self.texts,
            texts_of_users=self.texts_of_users,
        )
        durable_files.write(path, content.getvalue())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TextDigests:
        """Reads what `save` wrote."""
        try:
            with np.load(pathlib.Path(path), allow_pickle=False) as archive:
                key, texts, of_users = (archive[n] for n in ("key", "texts", "texts_of_users"))
        except Exception as error:  # NumPy and zipfile raise a dozen kinds.
            raise validation.UsageError(
                f"{path} cannot be read: {error}. Restore it, or pretrain anew."
            ) from error
        return cls(key.tobytes(), texts.astype(np.uint64), of_users.astype(np.uint64))


def _digest(key: bytes, user_id: str, text: str) -> int:
    content = f"{len(user_id)} {user_id}{text}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(content, key=key, digest_size=8).digest(), "big")


def _smallest(digests: set[int]) -> np.ndarray:
    return np.sort(np.fromiter(digests, np.uint64, len(digests)))[:_MOST]


def _bound(kept: np.ndarray) -> np.uint64:
    """Returns the largest digest that the sample would have kept."""
    return kept[-1] if len(kept) == _MOST else _LARGEST


def _has_all(kept: np.ndarray, digests: Iterable[int]) -> bool:
    sought = np.fromiter(digests, np.uint64)
    places = np.searchsorted(kept, sought)
    return bool(np.all(places < len(kept)) and np.all(kept[places] == sought))
