"""Vocabularies of sub-words, as Hugging Face's `tokenizers` writes them (`tokenizer.json`).

They replace a `vocabulary.Vocabulary`: tokens take the place of words, and the rule splits text
into tokens. The token t of a `tokenizer.json` has the id t + 1,
since 0 is padding, so a model has one id more than the file has tokens.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import re
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from tff_dpftrl import json_text, packages, validation
from tff_dpftrl.data import tokenizer, vocabulary

if TYPE_CHECKING:
    import tensorflow as tf
    import tokenizers

NAME = "tokenizer.json"
"""Name of the file in a folder of Hugging Face's layout."""

Kind = Literal["wordpiece", "sentencepiece", "checkpoint"]
"""Pieces of this package's words; pieces of text with its spaces; or what the file says."""

# Ends and beginnings of texts, where no file beside `tokenizer.json` names them.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "[SEP]")
_BEGINNINGS = ("<|begin_of_text|>", "<s>", "<bos>", "[BOS]", "[CLS]")
# Files of Hugging Face's layout that name them, the most specific first.
_NAMING_FILES = ("tokenizer_config.json", "special_tokens_map.json")
LEARNED_ENDS = ("[BOS]", "[EOS]")
"""Beginning and end of texts in vocabularies that are learned here."""

_HALF_CHARACTER = re.compile("[\ud800-\udfff]")
# Sentences of some scripts have no spaces. WordPiece takes each Chinese character as a word, as in
# BERT, and cuts words that would be too long for it.
_LONGEST_WORD = 100
IDEOGRAPH = re.compile(
    "([\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af]"
    "[\ufe00-\ufe0f\U000e0100-\U000e01ef]*)"
)
"""Expression of a Chinese character, with its variation selectors."""


@dataclasses.dataclass(frozen=True)
class SubwordTokenizer:
    """A tokenizer of text into sub-words.

    A special token that is spelled out in a text ("<|endoftext|>") is read as its letters, so that
    no text ends another. No token is put in front or at the end.

    Attributes:
      lower_case: Whether a learned vocabulary lower-cases text; a checkpoint's tokenizer decides
        that by itself.
      is_tokenized: Whether texts are words separated by white space already; it only matters to
        WordPiece.
      kind: Kind of the vocabulary.
      definition: Content of `tokenizer.json`.
      word_rule: Version of the rule of a learned vocabulary: `Tokenizer.version`.
    """

    lower_case: bool
    is_tokenized: bool
    kind: Kind
    definition: str = dataclasses.field(repr=False)
    word_rule: int = tokenizer.LATEST
    digest: str = dataclasses.field(init=False, compare=False)

    def __post_init__(self):
        digest = hashlib.sha256(self.definition.encode()).hexdigest()
        object.__setattr__(self, "digest", digest)

    def words(self, text: str) -> list[str]:
        """Returns the tokens of one text, in order."""
        if self.kind != "wordpiece":
            library = _library(self.definition)
            text = _cleaned(text, self.lower_case, self.word_rule)
            ids = library.encode(text, add_special_tokens=False).ids
            return list(map(library.id_to_token, ids))  # `tokens` of unknown text may be the text.
        words = words_of(
            self.kind,
            lower_case=self.lower_case,
            is_tokenized=self.is_tokenized,
            word_rule=self.word_rule,
        )(text)
        pieces = _pieces(self.definition).tokenize
        return [piece.value for word in words for piece in pieces(word)]

    @property
    def is_in_graphs(self) -> bool:
        """Whether `split` can build a graph."""
        return self.kind == "wordpiece"

    def split(self, texts: tf.Tensor) -> tf.RaggedTensor:
        """Splits texts into tokens in a TensorFlow graph, with the same result as `words`.

        `texts` are strings in UTF-8, normalised to NFC, of shape [n]. The tokens have the ragged
        shape [n, None].
        """
        import tensorflow as tf

        from tff_dpftrl.data import wordpiece_graph

        if not self.is_in_graphs:
            raise validation.UsageError(
                f"tokenizer {self.kind!r} cannot be in a graph of TensorFlow: give the graph ids "
                "that `data.subwords` made, or take tokenizer 'wordpiece'."
            )
        rule = tokenizer.Tokenizer(self.lower_case, self.is_tokenized, self.word_rule)
        if self.word_rule > tokenizer.NO_MARKS:
            words = rule.split(tf.strings.regex_replace(texts, IDEOGRAPH.pattern, r" \1 "))
            words = wordpiece_graph.cut(words, _LONGEST_WORD)
        else:
            words = rule.split(texts)
        model = _wordpiece(self.definition)
        return wordpiece_graph.split(
            words, list(model["vocab"]), model["unk_token"], model["max_input_chars_per_word"]
        )


@dataclasses.dataclass(frozen=True)
class Subwords(vocabulary.Vocabulary):
    """A vocabulary of sub-words.

    Attributes:
      words: Tokens, in the order of their numbers: token t has the id t + 1.
      source: Source of the tokens, for the privacy statement.
      lower_case: Whether the tokens were learned on lower-cased text; false of a checkpoint.
      is_public: Whether the tokens are independent of the users to be protected.
      kind: Kind of the vocabulary.
      definition: Content of `tokenizer.json`.
      beginning: Token that begins a text; the same as `end` if the tokenizer has one for both.
      end: Token that ends a text.
      unknown: Token of what cannot be spelled with others; None if there is no such text.
    """

    kind: Kind = "checkpoint"
    definition: str = dataclasses.field(default="", repr=False)
    beginning: str = ""
    end: str = ""
    unknown: str | None = None

    def __post_init__(self):
        super().__post_init__()
        for name in ("beginning", "end", "unknown"):
            token = getattr(self, name)
            if token is not None and token not in self.id_of:
                raise validation.UsageError(
                    f"{name} {token!r} is no token of the vocabulary from {self.source}."
                )

    @property
    def size(self) -> int:
        """Number of ids: the tokens and padding."""
        return len(self.words) + 1

    @property
    def oov(self) -> int | None:
        """Id of what cannot be spelled with the tokens; None if there is no such text."""
        return None if self.unknown is None else self.id_of[self.unknown]

    @property
    def bos(self) -> int:
        """Id of the beginning of a text; perhaps that of the end of one."""
        return self.id_of[self.beginning]

    @property
    def eos(self) -> int:
        """Id of the end of a text."""
        return self.id_of[self.end]

    @property
    def may_be_fewer(self) -> bool:
        """Whether a model may have more ids than these: tables of checkpoints are rounded up."""
        return self.kind == "checkpoint"

    def ids(self, words: Sequence[str]) -> list[int]:
        """Returns the ids of tokens that `rule` made."""
        return list(map(self.id_of.__getitem__, words))

    def rule(self, is_tokenized: bool = False) -> SubwordTokenizer:
        """Returns the tokenizer of texts."""
        return SubwordTokenizer(
            self.lower_case, is_tokenized, self.kind, self.definition, self.word_rule
        )

    def text(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, ends of texts and padding left out."""
        kept = [i - 1 for i in ids if i not in (vocabulary.PAD, self.bos, self.eos)]
        return _library(self.definition).decode(kept, skip_special_tokens=False)

    def shown(self, index: int) -> str:
        """Returns a token as a user reads it, with the space that it begins with."""
        token = self.words[index - 1]
        # The first token of a text loses its space in some decoders.
        return token.replace("▁", " ") if token.startswith("▁") else self.text([index]) or token

    @property
    def unit(self) -> str:
        """Name of what the ids stand for, in the plural."""
        return "sub-words"


def words_of(
    kind: Kind, *, lower_case: bool, is_tokenized: bool, word_rule: int = tokenizer.LATEST
) -> Callable[[str], list[str]]:
    """Returns the rule that splits a text into the words that have pieces in a vocabulary."""
    rule = tokenizer.Tokenizer(lower_case, is_tokenized, word_rule)

    def whole(text: str) -> list[str]:
        text = _whole_characters(text)
        if word_rule == tokenizer.NO_MARKS:
            return rule.words(text)
        words = rule.words(IDEOGRAPH.sub(r" \1 ", text))
        starts = range(0, max(map(len, words), default=0), _LONGEST_WORD)
        return [part for word in words for i in starts if (part := word[i : i + _LONGEST_WORD])]

    def spaced(text: str) -> list[str]:
        text = _cleaned(text, lower_case, word_rule).replace("\0", "")
        return [f"▁{word}" for word in text.split(" ")] if text else []

    return whole if kind == "wordpiece" else spaced


def _whole_characters(text: str) -> str:
    return _HALF_CHARACTER.sub("\ufffd", text)


def _cleaned(text: str, lower_case: bool, word_rule: int) -> str:
    text = tokenizer.normalised(_whole_characters(text), word_rule)
    return text.lower() if lower_case else text


def package() -> Any:
    """Returns the package `tokenizers`."""
    packages.require("A vocabulary of sub-words", "tokenizers")
    import tokenizers

    return tokenizers


def _wordpiece(definition: str) -> dict[str, Any]:
    """Returns a learned model of WordPiece without the ends of texts, which no text may spell."""
    model = json_text.parse(definition)["model"]
    vocab = {token: i for token, i in model["vocab"].items() if token not in LEARNED_ENDS}
    return model | {"vocab": vocab}


@functools.lru_cache(maxsize=4)
def _pieces(definition: str) -> tokenizers.models.WordPiece:
    model = _wordpiece(definition)
    return package().models.WordPiece(
        model["vocab"],
        unk_token=model["unk_token"],
        max_input_chars_per_word=model["max_input_chars_per_word"],
    )


@functools.lru_cache(maxsize=4)
def _library(definition: str) -> tokenizers.Tokenizer:
    """Returns the library's tokenizer of a `tokenizer.json`, without what it adds to texts."""
    found = package().Tokenizer.from_str(definition)
    found.no_truncation()
    found.no_padding()
    found.encode_special_tokens = True
    return found


def read(path: str | os.PathLike[str]) -> Subwords:
    """Reads the vocabulary of a checkpoint, which the caller thereby declares public.

    Text ends with the token that `tokenizer_config.json` or `special_tokens_map.json` beside the
    file calls `eos_token`; without them, with the first token of the file that is a usual one, such
    as "<|endoftext|>" or "</s>". Likewise it begins with `bos_token` or a usual one; with the token
    of the end if there is none, as GPT-2's texts do.

    Args:
      path: A `tokenizer.json`.

    Returns:
      The vocabulary.

    Raises:
      ValueError: If the file cannot be read, is no such file, or has no token that ends a text.
    """
    path = pathlib.Path(path)
    remedy = f"Name a {NAME} as Hugging Face's tokenizers write it."
    content = json_text.read_outside(path, max_bytes=validation.MAX_FILE_BYTES, remedy=remedy)
    named: dict[str, str] = {}
    for name in _NAMING_FILES:
        if (beside := path.with_name(name)).exists():
            named = _special_tokens(json_text.read_outside(beside)) | named
    source = f"{NAME} of {path.absolute().parent.name}, declared public by the operator"
    return of_definition(
        json.dumps(content),
        str(path),
        source=source,
        beginning=named.get("bos_token"),
        end=named.get("eos_token"),
        unknown=_unknown(content),
    )


def of_definition(
    definition: str,
    where: str,
    *,
    source: str,
    kind: Kind = "checkpoint",
    lower_case: bool = False,
    is_public: bool = True,
    beginning: str | None = None,
    end: str | None = None,
    unknown: str | None = None,
    word_rule: int = tokenizer.NO_MARKS,
) -> Subwords:
    """Returns the vocabulary of the content of a `tokenizer.json`.

    `beginning` and `end` are tokens that begin and end a text; usual ones if None. `unknown` is the
    token of what cannot be spelled; None if there is no such text.
    """
    if kind not in get_args(Kind):
        raise validation.UsageError(f"{where}: there is no kind {kind!r} of sub-words.")
    try:
        content = json_text.parse(definition)
        definition = json.dumps(content)  # The same text from every file.
        library = _library(definition)
    except validation.UsageError:
        raise
    except BaseException as error:  # The library's errors have no class of their own.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        shown = " ".join(str(error).split())
        raise validation.UsageError(f"{where} cannot be read as a tokenizer: {shown}.") from error
    number_of = library.get_vocab(with_added_tokens=True)
    numbers = collections.Counter(number_of.values())
    if sorted(numbers) != list(range(len(number_of))):
        raise validation.UsageError(
            f"{where} must number its {len(number_of)} tokens from 0 without gaps."
        )
    words = tuple(sorted(number_of, key=number_of.__getitem__))
    end = end or _first(_ENDS, number_of)
    if end is None:
        raise validation.UsageError(
            f"{where} has no token that ends a text, such as {_ENDS[0]}: name one as eos_token in "
            f"{_NAMING_FILES[0]} beside it."
        )
    beginning = beginning or _first(_BEGINNINGS, number_of) or end
    _switch_off_randomness(content.get("model"), where)
    # A text that spells out a special token has its letters.
    for token in content.get("added_tokens") or ():
        token["special"] = token["special"] or token["content"] in (beginning, end)
    definition = json.dumps(content)
    return Subwords(
        words,
        source,
        lower_case,
        is_public,
        kind=kind,
        definition=definition,
        beginning=beginning,
        end=end,
        unknown=unknown,
        word_rule=word_rule,
    )


def _switch_off_randomness(model: dict[str, Any] | None, where: str) -> None:
    """Makes a tokenizer deterministic: a repeated step must read the same tokens."""
    for name in ("dropout", "alpha", "nbest_size"):  # Of BPE and of Unigram.
        if model and model.get(name):
            warnings.warn(
                f"{where} splits text at random ({name} {model[name]}), as is only of use in "
                "training without privacy: it is off.",
                stacklevel=3,
            )
            model[name] = None


def _first(candidates: Sequence[str], known: dict[str, int]) -> str | None:
    return next((token for token in candidates if token in known), None)


def _special_tokens(content: dict[str, Any]) -> dict[str, str]:
    """Returns the special tokens that a file names, with or without their details."""
    found = {}
    for name in ("bos_token", "eos_token"):
        token = content.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            found[name] = token
    return found


def _unknown(content: Any) -> str | None:
    """Returns the unknown token of a model; None if bytes spell everything."""
    model = content.get("model") if isinstance(content, dict) else None
    if not isinstance(model, dict) or model.get("byte_fallback"):
        return None
    if model.get("type") == "Unigram":
        number = model.get("unk_id")
        try:
            return None if number is None else model["vocab"][number][0]
        except (LookupError, TypeError):
            return None  # The library refuses it.
    return model.get("unk_token") or None


def to_json(words: Subwords) -> dict[str, Any]:
    """Returns what `of_json` reads, besides the fields of every vocabulary."""
    return {
        "kind": words.kind,
        "beginning": words.beginning,
        "end": words.end,
        "unknown": words.unknown,
        "tokenizer": json_text.parse(words.definition),
    }


def of_json(content: dict[str, Any], where: str) -> Subwords:
    """Returns the vocabulary that `to_json` described."""
    tokens = {name: content.get(name) for name in ("beginning", "end", "unknown")}
    if not all(isinstance(token, str) or token is None for token in tokens.values()):
        raise validation.UsageError(
            f"{where} cannot be read as a vocabulary: its special tokens are {tokens}."
        )
    return of_definition(
        json.dumps(content["tokenizer"]),
        where,
        source=content["source"],
        kind=content.get("kind"),
        lower_case=content["lower_case"],
        is_public=content["is_public"],
        word_rule=content["word_rule"],
        **tokens,
    )
