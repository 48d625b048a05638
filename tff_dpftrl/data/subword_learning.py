"""Vocabularies of sub-words, learned on text by the trainers of Hugging Face's `tokenizers`.

Both kinds are merges of the most frequent neighbours (Sennrich et al. 2016, "Neural machine
translation of rare words with subword units"). The library's trainers give other ids at each call
if they number the characters themselves, so here each has its number before. Its trainer of
unigrams has no such remedy: of the same text it learns another vocabulary each time.
"""

from __future__ import annotations

import collections
import itertools
import json
from typing import Any

from tff_dpftrl import json_text, validation
from tff_dpftrl.data import subwords, tokenizer, user_text

_UNKNOWN = "[UNK]"
_CONTINUES = "##"
_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
_CHARACTERS = (100, 8)
"""Number of characters that are tokens, at most, or one for so many tokens if that is more."""


def learn(
    corpus: user_text.UserText,
    size: int,
    *,
    kind: subwords.Kind,
    source: str,
    lower_case: bool = True,
) -> subwords.Subwords:
    """Learns sub-words on a corpus; the same ones each time.

    Args:
      corpus: Corpus to learn on.
      size: Largest number of tokens, special ones and those of characters and bytes included.
      kind: "wordpiece": pieces of this package's words, as in BERT; a word with a character that is
        no token is unknown. "sentencepiece": pieces of text with its spaces, as in Llama; what is
        no token is spelled in bytes, so nothing is unknown.
      source: Description of the corpus for the privacy statement.
      lower_case: Whether to lower-case.

    Returns:
      The vocabulary, with fewer tokens than `size` if the corpus has no more.

    Raises:
      ValueError: If `size` is too small, or the corpus has no words.
    """
    tokenizers = subwords.package()
    validation.integer("size of the vocabulary", size, minimum=1)
    split = subwords.words_of(kind, lower_case=lower_case, is_tokenized=corpus.is_tokenized)
    spoken = [words for text in corpus.texts() if (words := split(text))]
    if not spoken:
        raise validation.UsageError(
            f"words of the vocabulary from {source} must not be empty: name text with words in it."
        )
    counts = collections.Counter(letter for words in spoken for word in words for letter in word)
    is_wordpiece = kind == "wordpiece"
    least, tokens_each = _CHARACTERS
    frequent = sorted(counts, key=lambda letter: (-counts[letter], letter))
    # A Chinese character is a word for WordPiece: they share the rest with pieces of other words.
    whole = dict.fromkeys(c for c in frequent if is_wordpiece and subwords.IDEOGRAPH.match(c))
    share = sum(counts[letter] for letter in whole) / counts.total()
    letters = [letter for letter in frequent if letter not in whole]
    letters = sorted(letters[: max(least, size // tokens_each)])
    fixed = [_UNKNOWN, *subwords.LEARNED_ENDS, *letters]
    fixed += [_CONTINUES + letter for letter in letters] if is_wordpiece else _BYTES
    if size <= len(fixed):
        raise validation.UsageError(
            f"vocabulary_size must be more than the {len(fixed)} tokens of characters, bytes and "
            f"ends of texts that tokenizer {kind!r} needs here, got {size}."
        )
    letters += itertools.islice(whole, int(share * (size - len(fixed))))
    options: dict[str, Any] = {
        "vocab_size": size,
        "special_tokens": list(dict.fromkeys([*fixed, *letters])),
        "initial_alphabet": letters,
        "limit_alphabet": len(letters),
        "show_progress": False,
    }
    # The trainers' own splitting finds these words again, none of which has a NUL in it.
    if is_wordpiece:
        library = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token=_UNKNOWN))
        trainer = tokenizers.trainers.WordPieceTrainer(**options)
    else:
        library = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=_UNKNOWN))
        trainer = tokenizers.trainers.BpeTrainer(**options)
    library.pre_tokenizer = tokenizers.pre_tokenizers.Split("\0", "removed")
    library.train_from_iterator(map("\0".join, spoken), trainer)
    definition = json_text.parse(library.to_str())
    definition["added_tokens"] = []  # No text has tokens in it, but what they are made of.
    if is_wordpiece:
        definition["pre_tokenizer"] = {"type": "WhitespaceSplit"}
        definition["decoder"] = {"type": "WordPiece", "prefix": _CONTINUES, "cleanup": False}
    else:
        definition["model"] |= {"byte_fallback": True, "fuse_unk": True}
        metaspace = {"type": "Metaspace", "replacement": "▁"}
        metaspace |= {"prepend_scheme": "always", "split": True}
        definition["pre_tokenizer"] = metaspace
        definition["decoder"] = {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        }
    return subwords.of_definition(
        json.dumps(definition),
        source,
        source=source,
        kind=kind,
        lower_case=lower_case,
        beginning=subwords.LEARNED_ENDS[0],
        end=subwords.LEARNED_ENDS[1],
        unknown=_UNKNOWN if is_wordpiece else None,
        word_rule=tokenizer.LATEST,
    )
