"""Texts of one corpus that nearly repeat texts of another.

As in NearDup (Lee et al. 2022, "Deduplicating training data makes language models better"), pairs
are found by MinHash (Broder 1997) and then compared. What counts is how much of the runs of three
words in either text is in both, where NearDup has runs of five words in whole web pages: a
sentence with one of eleven words replaced shares half of its runs of three.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterator, Sequence

import numpy as np

from tff_dpftrl.data import user_text

SIMILARITY = 0.5
"""Least Jaccard similarity of the runs of words of near-duplicates."""

METHOD = (
    "MinHash over runs of three words, then a Jaccard similarity of these runs of 0.5 or more; "
    "finds 93 % of the pairs at 0.5, 99 % at 0.6"
)
"""Words on how near-duplicates are found, for records."""

_RUN = 3
# Of a pair of similarity s, 1 - (1 - s³)²⁰ are compared.
_BANDS, _ROWS = 20, 3


def without(
    public: user_text.UserText, others: Sequence[user_text.UserText]
) -> tuple[user_text.UserText, int]:
    """Leaves out the texts of a corpus that nearly repeat a text of other corpora.

    Case, white space, punctuation and the form of Unicode make no difference. Not found are a text
    inside a longer one, a translation, and what says the same in other words. Texts of fewer than
    three words, which those of a language without blanks may be, are compared as a whole. Returns
    the corpus without users who have no other texts, and the number of texts left out.
    """
    import datasketch

    kept = {user_id: public.examples(user_id) for user_id in public.user_ids}
    runs_of = {text: _runs(text) for texts in kept.values() for text in texts}
    theirs = {_runs(text) for other in others for text in other.texts()} - {b""}
    ours = set(runs_of.values()) - {b""}
    repeated = ours & theirs
    theirs = set(_candidates(theirs, ours))
    ours = list(_candidates(ours - repeated, theirs))
    index = datasketch.MinHashLSH(num_perm=_BANDS * _ROWS, params=(_BANDS, _ROWS))
    for place, signature in enumerate(_signatures(ours)):
        index.insert(place, signature)
    ordered = sorted(theirs)
    for text, signature in zip(ordered, _signatures(ordered), strict=True):
        found = (ours[place] for place in index.query(signature))
        repeated.update(one for one in found if _similarity(one, text) >= SIMILARITY)
    num_texts = sum(map(len, kept.values()))
    kept = {
        user_id: left
        for user_id, texts in kept.items()
        if (left := [text for text in texts if runs_of[text] not in repeated])
    }
    corpus = user_text.UserText.from_mapping(
        public.name, kept, user_unit=public.user_unit, is_tokenized=public.is_tokenized
    )
    return corpus, num_texts - sum(map(len, kept.values()))


def _runs(text: str) -> bytes:
    """Returns the sorted digests of a text's runs of words, each once, as bytes of uint64."""
    words = re.findall(r"\w+", unicodedata.normalize("NFKC", text).lower())
    if not words:
        return b""
    runs = {" ".join(words[i : i + _RUN]) for i in range(max(1, len(words) - _RUN + 1))}
    digests = (
        hashlib.blake2b(run.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        for run in runs
    )
    return np.sort(np.frombuffer(b"".join(digests), np.uint64)).tobytes()


def _candidates(texts: set[bytes], others: set[bytes]) -> Iterator[bytes]:
    """Yields texts whose share of runs in all others together is as large as a repeat's in one."""
    known = np.unique(np.frombuffer(b"".join(others), np.uint64))
    ordered = sorted(texts)
    starts = np.cumsum([0, *(len(text) // 8 for text in ordered)])
    is_known = np.isin(np.frombuffer(b"".join(ordered), np.uint64), known)
    counts = np.diff(np.concatenate([[0], np.cumsum(is_known)])[starts])
    for text, count in zip(ordered, counts.tolist(), strict=True):
        if count >= SIMILARITY * (len(text) // 8):
            yield text


def _signatures(texts: Sequence[bytes]) -> Iterator:
    import datasketch

    runs = ((np.frombuffer(text, np.uint64) >> np.uint64(32)).tolist() for text in texts)
    return datasketch.MinHash.generator(runs, num_perm=_BANDS * _ROWS, hashfunc=int)


def _similarity(one: bytes, other: bytes) -> float:
    """Returns the Jaccard similarity of two sets of runs."""
    ours, theirs = np.frombuffer(one, np.uint64), np.frombuffer(other, np.uint64)
    shared = len(np.intersect1d(ours, theirs, assume_unique=True))
    return shared / (len(ours) + len(theirs) - shared)
