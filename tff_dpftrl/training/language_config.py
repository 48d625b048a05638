"""Options of pretraining, training and fine-tuning for text, vocabulary and model.

Options are fields of frozen dataclasses, whose metadata says what they mean and which flags,
keys of a TOML file and entries of a run's `config.json` they are.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.data import subwords, table_files, tables, vocabulary_file
from tff_dpftrl.data import vocabulary as vocabulary_lib
from tff_dpftrl.models import table as model_table
from tff_dpftrl.training import composed
from tff_dpftrl.training.composed import option

if TYPE_CHECKING:
    from typing_extensions import Self

Tokenizer = Literal["words", "wordpiece", "sentencepiece", "checkpoint"]

Model = Literal[(*model_table.MODELS, model_table.CUSTOM)]

# Options that are sizes of models, and the names of these sizes in the models.
_MODEL_SIZES = {
    "embedding_size": "embedding_size",
    "lstm_size": "state_size",
    "tie_embeddings": "tie_embeddings",
    "num_layers": "num_layers",
    "num_heads": "num_heads",
    "num_key_value_heads": "num_key_value_heads",
    "feed_forward_size": "feed_forward_size",
}


def _defaults(name: str) -> str:
    """Returns the defaults of an option of models: "128 (word-lstm), 670 (gboard-cifg)"."""
    size, words = _MODEL_SIZES[name], {}
    for model in model_table.takers(size):
        value = model_table.MODELS[model].sizes[size]
        words[model] = ("yes" if value else "no") if isinstance(value, bool) else str(value)
    if len(words) == len(model_table.MODELS) and len(set(words.values())) == 1:
        return words.popitem()[1]
    return ", ".join(f"{word} ({model})" for model, word in words.items())


def _size(help: str, name: str) -> Any:
    return option(None, f"{help}; if not given, {_defaults(name)}.", "model", 1)


@dataclasses.dataclass(frozen=True)
class TextConfig(composed.Options):
    """Text by user.

    Attributes carry their meaning, unit and group in their field metadata, which is what
    `--help` of the commands prints.
    """

    data: str = option(
        "docs",
        "Corpus: 'docs' (docstrings of installed packages, a user is a module); a table with a "
        "user and a text in each row (CSV, TSV, JSON lines, Parquet, Feather; a file, a folder, a "
        "pattern, or several with commas between them: docs/how_to/tables.md); a .jsonl file of "
        '{"user_id", "examples"} lines; or a .sqlite file in the layout of '
        "tff.simulation.datasets.",
        "data",
    )
    user_column: str | None = option(
        None, "Tables: name of the column of users. Default: the one with a usual name.", "data"
    )
    text_column: str | None = option(
        None, "Tables: name of the column of texts. Default: the one with a usual name.", "data"
    )
    encoding: str | None = option(
        None, "CSV, TSV and JSON lines: encoding, such as latin-1. Default: UTF-8.", "data"
    )
    max_bad_rows: float = option(
        0.01,
        "Tables: largest share of rows that may be left out because they have no user or text, or "
        "are damaged. Such rows are counted and named.",
        "data",
        0.0,
    )
    split: str | None = option(
        None,
        "Tables in a folder with files of several splits, such as train.csv and test.csv, as in "
        "data sets of Hugging Face: name of the split to read, or all. Default: train.",
        "data",
    )
    pretokenized: bool = option(
        False,
        "Take texts as words that are already separated by white space, as in TFF's Stack "
        "Overflow, and do not split them further.",
        "data",
    )
    sqlite_text_feature: str = option(
        "tokens", "SQLite: name of the feature that holds an example's text.", "data"
    )
    sqlite_split: str | None = option(
        None, "SQLite: name of the only split to read. Default: all splits.", "data"
    )
    max_users: int | None = option(
        None,
        "Largest number of training users: only the first ones are used. Default: all.",
        "data",
        2,
    )
    train_on_test_users: bool = option(
        False,
        "Also train on the users who are otherwise kept for a test of your own: one in ten, by a "
        "hash of the id. Another one in ten is always held out.",
        "data",
    )

    @property
    def text(self) -> TextConfig:
        """The options of the text alone."""
        return self.part(TextConfig)

    @property
    def table(self) -> tables.TableOptions:
        """The options of reading a table."""
        return self.part(tables.TableOptions)


def begun(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a begun run: without `split`, it has read all files of a folder."""
    data = values.get("data")
    parts = table_files.parts(data) if isinstance(data, str) else ()
    # A manifest has absolute paths; others are names of corpora, or of rows in memory.
    if any(os.path.isabs(part) and os.path.isdir(part) for part in parts):
        return {"split": table_files.ALL, **values}
    return dict(values)


@dataclasses.dataclass(frozen=True)
class VocabularyConfig(TextConfig):
    """Text by user, and its vocabulary."""

    tokenizer: Tokenizer | None = option(
        None,
        "Units that text is split into. 'words'. 'wordpiece': pieces of words, which exported "
        "models and plans of devices can have. 'sentencepiece': pieces of text with its spaces, "
        "and bytes, so that nothing is unknown. Sub-words of both kinds are learned on the public "
        "text of --vocabulary. 'checkpoint': the units of the tokenizer.json of --vocabulary or "
        "of the initial weights (docs/how_to/subwords.md). Default: as in a vocabulary.json or "
        "tokenizer.json; else words.",
        "data",
    )
    vocabulary: str | None = option(
        None,
        "Source of the vocabulary. 'english': frequent words of ordinary English. 'docs': "
        "docstrings of the standard library, for technical text. A file: the vocabulary.json of a "
        "model, the tokenizer.json of a checkpoint, or a file that you declare to be public, "
        "either one word a line (.txt) or a corpus of other users, as for --data. 'dp' (train): "
        "words of the training users, counted with noise, for a share of the budget. 'private': "
        "the same without noise, which the privacy statement then does not cover. Default: that "
        "of the initial weights, if there are any; else 'docs' for the data 'docs' and for "
        "sub-words, and 'english' for all others.",
        "data",
    )
    vocabulary_size: int | None = option(
        None,
        "Largest number of words, or of sub-words, in the vocabulary. Default: "
        f"{vocabulary_lib.DEFAULT_SIZE}, or all of a vocabulary.json.",
        "data",
        1,
    )
    lower_case: bool = option(
        True, "Lower-case the text; a checkpoint's tokenizer.json says itself what it does.", "data"
    )
    sequence_length: int = option(20, "Number of tokens in a training sequence.", "data", 1)

    @override
    def with_defaults(self) -> Self:
        """Returns options that name their vocabulary, so that no default changes."""
        source, size = self.vocabulary_source(), self.vocabulary_size
        if size is None and not vocabulary_file.is_of_model(source):
            size = vocabulary_lib.DEFAULT_SIZE
        return dataclasses.replace(self, vocabulary=source, vocabulary_size=size)

    def vocabulary_source(self) -> str:
        """Returns the source of the vocabulary, also if it follows from other options."""
        if self.vocabulary is not None:
            if self.tokenizer == "checkpoint" and not vocabulary_file.is_of_model(self.vocabulary):
                raise validation.UsageError(
                    f"vocabulary must be a tokenizer.json with tokenizer 'checkpoint', got "
                    f"{self.vocabulary!r}."
                )
            return self.vocabulary
        if self.tokenizer == "checkpoint":
            raise validation.UsageError(
                "tokenizer 'checkpoint' needs a tokenizer: name the tokenizer.json of a checkpoint "
                "as vocabulary, or the checkpoint's folder as initial_weights."
            )
        is_learned = self.tokenizer not in (None, "words")
        return "docs" if self.data == "docs" or is_learned else "english"


@dataclasses.dataclass(frozen=True)
class LanguageConfig(VocabularyConfig):
    """Text by user, its vocabulary and the model of it."""

    model: Model = option(
        "word-lstm",
        f"Language model: {'; '.join(f'{n}, {m.summary}' for n, m in model_table.MODELS.items())}; "
        f"{model_table.CUSTOM}, a custom model, which Python code "
        "gives (docs/how_to/custom_models.md).",
        "model",
    )
    embedding_size: int | None = _size("Width of the word embedding", "embedding_size")
    lstm_size: int | None = _size("Width of the LSTM's state", "lstm_size")
    tie_embeddings: bool | None = option(
        None,
        "Use one matrix as input embedding and as output layer; if not given, "
        f"{_defaults('tie_embeddings')}.",
        "model",
    )
    num_layers: int | None = _size("Blocks of attention and feed-forward", "num_layers")
    num_heads: int | None = _size("Attention heads in a block", "num_heads")
    num_key_value_heads: int | None = _size(
        "Attention heads that have keys and values, which the others share", "num_key_value_heads"
    )
    feed_forward_size: int | None = _size("Width of the feed-forward layers", "feed_forward_size")

    initial_weights: str | None = option(
        None,
        "Folder of a model to begin with, from `tff-dpftrl pretrain` or an earlier run. This run's "
        "statement then does not cover the earlier run's users. Default: random weights.",
        "model",
    )

    def __post_init__(self):
        super().__post_init__()
        self._check_model()

    def _check_model(self):
        for name, size in _MODEL_SIZES.items():
            takers = model_table.takers(size)
            if getattr(self, name) is not None and self.model not in takers:
                raise validation.UsageError(
                    f"{name} is for the model {' or '.join(takers)}, not for {self.model}: leave "
                    "it out."
                )
        if self.model == model_table.CUSTOM and self.initial_weights is not None:
            raise validation.UsageError(
                "initial_weights has no meaning with a custom model, which begins with the "
                "weights that it has: leave it out."
            )

    @property
    def model_sizes(self) -> dict[str, Any]:
        """Sizes of the model that are given, by the names that `model_table.build` takes."""
        given = {size: getattr(self, name) for name, size in _MODEL_SIZES.items()}
        return {size: value for size, value in given.items() if value is not None}

    @override
    def with_defaults(self) -> Self:
        """Returns options that name their vocabulary and all sizes, so that no default changes."""
        sizes = {}
        if self.model != model_table.CUSTOM:
            known = {**model_table.MODELS[self.model].sizes, **self.model_sizes}
            sizes = {name: known[size] for name, size in _MODEL_SIZES.items() if size in known}
        return dataclasses.replace(super().with_defaults(), **sizes)

    @override
    def vocabulary_source(self) -> str:
        if self.vocabulary is None and self.initial_weights is not None:
            folder = pathlib.Path(self.initial_weights).expanduser()
            names = (vocabulary_file.NAME, subwords.NAME)
            return str(folder / next((n for n in names if (folder / n).exists()), names[0]))
        return super().vocabulary_source()
