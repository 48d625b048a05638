"""Files of vocabularies, in JSON: words by id, their source, and the tokenizer.

With such a file and a model's weights, neither the corpus nor the options of the run are needed.
"""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

from tff_dpftrl import durable_files, json_text, validation
from tff_dpftrl.data import subwords, tokenizer, vocabulary

NAME = "vocabulary.json"
"""Name of the file in the folder of a model."""

_RULES = (tokenizer.NO_MARKS, tokenizer.LATEST)
_FORMATS = {key: rule for rule in _RULES for key in (rule, f"sub-words {rule}")}
"""Version of the rule that splits texts into words, by the format of a file."""

_PUBLIC = "The words are from text that is public, or that the operator has declared to be."
_NOT_PUBLIC = (
    "The words were counted on the users whom the run protects, without noise. No privacy "
    "statement covers which words these are, nor their order: do not publish this file, or "
    "anything that holds or speaks the words, unless those users' words may be seen."
)

_NOISED = (
    "Some words were counted with noise on users whom a run protects: the privacy statement "
    "of the run that counted them covers which words these are, and their order."
)
_IS_NOISED = "is_noised"


def is_of_model(source: str | None) -> bool:
    """Returns whether the source of a vocabulary is a file that `read` reads."""
    return source is not None and pathlib.PurePath(source).name in (NAME, subwords.NAME)


def note(words: vocabulary.Vocabulary) -> str:
    """Returns what a reader of the words must know of their source."""
    if words.is_public:
        return _PUBLIC
    return _NOISED if words.is_noised else _NOT_PUBLIC


def write(
    path: str | os.PathLike[str],
    words: vocabulary.Vocabulary,
    rule: vocabulary.Rule,
    *,
    private: bool = False,
) -> None:
    """Writes a vocabulary, whole or not at all."""
    if rule != (expected := words.rule(rule.is_tokenized)):
        raise validation.UsageError(f"rule must be that of the words, {expected}, got {rule}.")
    is_subwords = isinstance(words, subwords.Subwords)
    content = {
        "format": f"sub-words {words.word_rule}" if is_subwords else words.word_rule,
        "source": words.source,
        "is_public": words.is_public,
        **({_IS_NOISED: True} if words.is_noised else {}),
        "note": note(words),
        "lower_case": words.lower_case,
        "is_tokenized": rule.is_tokenized,
        "ids": {
            "padding": vocabulary.PAD,
            "first word": 1,
            "out of vocabulary": words.oov,
            "beginning": words.bos,
            "end": words.eos,
        },
        **(subwords.to_json(words) if is_subwords else {"words": list(words.words)}),
    }
    text = json.dumps(content, indent=1) + "\n"
    durable_files.write(path, text.encode("ascii"), private=private)


def read(path: str | os.PathLike[str]) -> tuple[vocabulary.Vocabulary, vocabulary.Rule]:
    """Reads a vocabulary that `write` wrote, or the `tokenizer.json` of a checkpoint."""
    if pathlib.PurePath(path).name == subwords.NAME:
        found = subwords.read(path)
        return found, found.rule()
    try:
        content = json_text.parse(pathlib.Path(path).read_text(encoding="utf-8"))
        file_format = content["format"]
        word_rule = _FORMATS.get(file_format)
        is_subwords = word_rule is not None and isinstance(file_format, str)
        words, source = content["tokenizer" if is_subwords else "words"], content["source"]
        lower_case, is_tokenized = content["lower_case"], content["is_tokenized"]
        is_public = content["is_public"]
        is_noised = content.setdefault(_IS_NOISED, False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise validation.UsageError(f"{path} cannot be read as a vocabulary: {error!r}.") from error
    if word_rule is None:
        raise validation.UsageError(
            f"{path} is a vocabulary of format {file_format!r}, and this version of tff-dpftrl "
            f"reads formats {', '.join(map(str, _FORMATS))} only: use the version that wrote it."
        )
    if is_subwords:
        _check_flags(content, path)
        found = subwords.of_json(content | {"word_rule": word_rule}, str(path))
        return found, found.rule(is_tokenized)
    if not (isinstance(words, list) and all(isinstance(word, str) for word in words)):
        raise validation.UsageError(
            f"{path} cannot be read as a vocabulary: 'words' is no list of strings."
        )
    _check_flags(content, path)
    found = vocabulary.Vocabulary(
        tuple(words), source, lower_case, is_public, is_noised, word_rule=word_rule
    )
    return found, found.rule(is_tokenized)


def _check_flags(content: dict[str, Any], path: str | os.PathLike[str]) -> None:
    for name in ("lower_case", "is_tokenized", "is_public", _IS_NOISED):
        if not isinstance(content[name], bool):  # "false" would be taken for a yes.
            raise validation.UsageError(
                f"{path} cannot be read as a vocabulary: {name!r} must be true or false, got "
                f"{content[name]!r}."
            )
