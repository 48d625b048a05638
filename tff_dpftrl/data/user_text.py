"""Corpora of texts keyed by user, which all sources of data return."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tff_dpftrl import validation
from tff_dpftrl.data import tokenizer
from tff_dpftrl.data import user_ids as user_ids_lib

_MIN_SHARED_WORDS = 20
"""Least number of words that show a copy: shorter texts may well be the same by chance."""


@dataclasses.dataclass(frozen=True, eq=False)
class UserText:
    """A corpus: users in a fixed order, and the texts of each.

    Attributes:
      name: Name of the corpus in reports: a file name, or "docs".
      user_unit: Description of one user for the privacy statement, for instance
        "one line (user_id) of the file".
      user_ids: Unique identifiers of the users, in the corpus's order.
      read_examples: Function from a user id to that user's texts, in their order. It may
        read them lazily; call `examples` instead.
      is_tokenized: Whether texts are words separated by white space already.
      remember: Function that keeps values beside a large corpus: it takes a name, and a function
        that computes the value if it is not kept yet. None if nothing is kept.
      co_owners: Who else owns texts of a user, where texts have several owners; empty if each
        text is of its user alone.
    """

    name: str
    user_unit: str
    user_ids: tuple[str, ...]
    read_examples: Callable[[str], Sequence[str]] = dataclasses.field(repr=False)
    is_tokenized: bool = False
    remember: Callable[[str, Callable[[], bytes]], bytes] | None = dataclasses.field(
        default=None, repr=False
    )
    co_owners: Mapping[str, Collection[str]] = dataclasses.field(default_factory=dict, repr=False)

    def __post_init__(self):
        known = frozenset(self.user_ids)
        if len(known) != len(self.user_ids):
            raise validation.UsageError(
                f"user_ids of {self.name!r} must be unique, but {len(self.user_ids) - len(known)} "
                "of them are repeated; merge the examples of one user."
            )
        user_ids_lib.check(known.union(*self.co_owners.values()), self.name)
        object.__setattr__(self, "_known", known)

    @classmethod
    def from_mapping(
        cls,
        name: str,
        examples_by_user: Mapping[str, Sequence[str]],
        *,
        user_unit: str = "one user_id",
        is_tokenized: bool = False,
    ) -> UserText:
        """Builds a corpus held in memory, users in the mapping's order."""
        examples_by_user = {user: tuple(texts) for user, texts in examples_by_user.items()}
        return cls(
            name, user_unit, tuple(examples_by_user), examples_by_user.__getitem__, is_tokenized
        )

    @classmethod
    def from_rows(
        cls,
        name: str,
        rows: Iterable[tuple[Any, str]],
        *,
        user_unit: str = "one user_id",
        is_tokenized: bool = False,
    ) -> UserText:
        """Builds a corpus from a table with a user and a text in each row.

        Rows are read once. For a pandas data frame, give `zip(frame["user"], frame["text"])`.
        """
        examples_by_user: dict[str, list[str]] = {}
        for number, row in enumerate(rows):
            user, text = row if isinstance(row, (tuple, list)) and len(row) == 2 else (None, None)
            try:
                user = user_ids_lib.at(f"{name!r}, row ", number, user)
            except user_ids_lib.NoId:
                text = None
            if not isinstance(text, str):
                raise validation.UsageError(
                    f"rows must be pairs of a user_id and a text, but row {number} of {name!r} is "
                    f"{str(row)[:60]!r}: leave out rows without a user or a text."
                )
            examples_by_user.setdefault(user, []).append(text)
        return cls.from_mapping(
            name, examples_by_user, user_unit=user_unit, is_tokenized=is_tokenized
        )

    def __len__(self) -> int:
        return len(self.user_ids)

    def examples(self, user_id: str) -> list[str]:
        """Returns the texts of one user."""
        if user_id not in self._known:
            raise validation.UsageError(
                f"user_id {user_id!r} is not a user of {self.name!r}; see user_ids."
            )
        return list(self.read_examples(user_id))

    def count_owners(self, user_ids: Iterable[str]) -> int:
        """Counts the owners of some users' texts, these users included."""
        users = set(user_ids)
        return len(users.union(*(self.co_owners.get(user, ()) for user in users)))

    def texts(self) -> Iterator[str]:
        """Yields the texts of all users, user after user."""
        for user_id in self.user_ids:
            yield from self.read_examples(user_id)

    def digest(self) -> str:
        """Computes a BLAKE2b digest (hex) of the users and their texts, in order; keep it secret.

        Whoever knows all users and texts but one finds out by it whether the guess of that one is
        right.
        """
        digest = hashlib.blake2b(digest_size=16)
        for user_id in self.user_ids:
            digest.update(json.dumps([user_id, *self.read_examples(user_id)]).encode() + b"\n")
        return digest.hexdigest()

    def has_text(self) -> bool:
        """Returns whether any user has a text that is not blank; reads until one is found."""
        return any(text.strip() for text in self.texts())

    def select(self, user_ids: Sequence[str]) -> UserText:
        """Returns the corpus restricted to some users, in the order given."""
        unknown = [user_id for user_id in user_ids if user_id not in self._known]
        if unknown:
            raise validation.UsageError(
                f"user_ids must be users of {self.name!r}, but {unknown[0]!r} is not; see user_ids."
            )
        return dataclasses.replace(self, user_ids=tuple(user_ids))


def require_several_users(corpus: UserText) -> UserText:
    """Checks that a corpus has at least two users, and returns it."""
    if len(corpus) == 0:
        raise validation.UsageError(
            f"{corpus.name}: the corpus is empty; it needs at least two users."
        )
    if len(corpus) == 1:
        raise validation.UsageError(
            f"{corpus.name}: the corpus has a single user, {corpus.user_ids[0]!r}; federated "
            "training needs at least two. Split the text by who wrote it."
        )
    return corpus


def shared_users(public: UserText, protected: UserText) -> int:
    """Counts the users of one corpus who have their texts in another, in any order.

    These have one of their texts under their id in `public`, or all of their texts, 20 words or
    more (40 characters where no spaces are written), under any. White space and case make no
    difference.
    """
    texts_of = {user_id: normal_texts(public.examples(user_id)) for user_id in public.user_ids}
    all_texts = frozenset().union(*texts_of.values())
    shared = 0
    for user_id in protected.user_ids:
        texts = normal_texts(protected.examples(user_id))
        is_copied = texts <= all_texts and is_long(texts)
        shared += is_copied or not texts.isdisjoint(texts_of.get(user_id, ()))
    return shared


def normal_texts(texts: Iterable[str], version: int = tokenizer.LATEST) -> frozenset[str]:
    """Returns texts as they are compared: normalised, in lower case, with single blanks.

    Empty ones are left out.
    """
    words = (tokenizer.normalised(text, version).lower().split() for text in texts)
    return frozenset(" ".join(each) for each in words if each)


def is_long(texts: Iterable[str]) -> bool:
    """Returns whether texts are so long that nobody else writes them by chance."""
    # Two characters count as a word where no spaces are written.
    words = (max(len(text.split()), tokenizer.count_unspaced(text) // 2) for text in texts)
    return sum(words) >= _MIN_SHARED_WORDS
