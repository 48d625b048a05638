"""The text of a run: training users, held-out users and the vocabulary.

Everything that can be wrong with the files of a run is found here, without TensorFlow,
whose import takes longer (but SQLite is parsed by it).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any, TypeVar

import tqdm

from tff_dpftrl import packages, validation
from tff_dpftrl.data import (
    grouping,
    set_union,
    sources,
    split,
    subword_learning,
    subwords,
    table_files,
    tables,
    user_text,
    vocabulary,
    vocabulary_file,
)
from tff_dpftrl.runs import joint_runs, manifest, statement_subject
from tff_dpftrl.training import composed, language_config

# Files of a model in a folder, in the layout of this package and in that of Hugging Face.
_OF_MODEL = ("model.npz", "vocabulary.json", "tokenizer.json", "config.json", "*.safetensors")

_Config = TypeVar("_Config", bound=composed.Options)


@dataclasses.dataclass(frozen=True)
class TextOptions(language_config.VocabularyConfig):
    """Options of text and vocabulary; `TrainingConfig` says what the further ones mean."""

    base_vocabulary: str | None = None
    target_epsilon: float | None = None
    delta: float = 0.0
    budget_shares: str | None = None
    deterministic_noise_seed: int | None = None
    held_out_users: str = "public"

    def without_noise(self) -> TextOptions:
        """Returns options of the same users and public words, by which nothing is counted."""
        words = self.vocabulary
        if words == vocabulary.DP:
            has_base = self.base_vocabulary != vocabulary.NO_BASE
            words = self.base_vocabulary if has_base else "docs"
        return dataclasses.replace(
            self,
            vocabulary=words,
            base_vocabulary=None,
            target_epsilon=None,
            delta=0.0,
            budget_shares=None,
            deterministic_noise_seed=None,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class RunText:
    """Text by user, in two parts, and the vocabulary.

    Training users are protected; held-out users never train. `num_untouched` users are kept for a
    test, and not used.
    """

    train: user_text.UserText
    held_out: user_text.UserText
    words: vocabulary.Vocabulary
    num_untouched: int = 0


def read(
    options: TextOptions,
    *,
    rows: Any = None,
    cache: pathlib.Path | None = None,
    notice: tables.Notice = tables.to_stderr,
) -> RunText:
    """Reads the corpus and the vocabulary that options name."""
    require_packages(vars(options))
    parts = read_users(options, rows=rows, cache=cache, notice=notice)
    protected = parts.train
    if options.held_out_users == "protected":
        users = (*protected.user_ids, *parts.validation.user_ids)
        protected = dataclasses.replace(protected, user_ids=users)
    words = _read_vocabulary(options, parts.train, protected)
    return RunText(parts.train, parts.validation, words, num_untouched=len(parts.test))


def require_packages(options: Mapping[str, Any]) -> None:
    """Refuses options of a run that need a missing package, before anything is read."""
    source, initial = options.get("vocabulary"), options.get("initial_weights")
    near_duplicates = options.get("without_near_duplicates_of")
    has_subwords = initial is not None and (pathlib.Path(initial) / subwords.NAME).exists()
    needs = {
        "pyarrow": any(map(sources.needs_arrow, filter(None, (options["data"], near_duplicates)))),
        "tokenizers": options.get("tokenizer") not in (None, "words")
        or vocabulary_file.is_of_model(source)
        or has_subwords,
        "datasketch": near_duplicates is not None,
        "cryptography": options.get("noise") == "secure",
    }
    packages.require("What the options ask for", *(name for name, is_so in needs.items() if is_so))


def read_users(
    options: language_config.TextConfig,
    *,
    rows: Any = None,
    cache: pathlib.Path | None = None,
    notice: tables.Notice = tables.to_stderr,
    rows_per_owner: int | None = None,
) -> split.UserSplit:
    """Reads the users that options name, split by a hash of their id.

    About eight in ten train, and one in ten is held out (`validation`). The test part is never
    touched, and empty if it is trained on, too. Rows (`sources.of_rows`) can be the corpus instead;
    `data` is then their name. `rows_per_owner` is for rows that may have lists of users.
    """
    place = grouping.Cache(cache)
    if rows is not None:
        corpus = sources.of_rows(
            rows,
            options.data,
            pretokenized=options.pretokenized,
            table=options.table,
            cache=place,
            notice=notice,
            rows_per_owner=rows_per_owner,
        )
    else:
        corpus = _load_corpus(options, place, notice, rows_per_owner)
    parts = split.by_user(corpus)
    if options.train_on_test_users:
        held_out = set(parts.validation.user_ids)
        train = [user for user in corpus.user_ids if user not in held_out]
        parts = split.UserSplit(corpus.select(train), parts.validation, corpus.select([]))
    if options.max_users is not None:
        chosen = parts.train.user_ids[: options.max_users]
        parts = dataclasses.replace(parts, train=parts.train.select(chosen))
    _check_users(corpus, parts.train, parts.validation)
    return parts


def planned(
    config: composed.Options, train: user_text.UserText, held_out: user_text.UserText
) -> dict[str, str]:
    """Computes the digests of what a run reads, for `check_planned` in other runs of a sweep.

    They are those of users and texts, by the options that name them, and of other files by path.
    """
    flat = config.with_absolute_paths().with_defaults().to_dict()
    default = language_config.TextConfig().to_dict()
    text = {name: flat[name] for name, value in default.items() if flat[name] != value}
    digests = {json.dumps(text): manifest.identity([train.digest(), held_out.digest()])}
    for name in composed.FILES:
        value = flat.get(name)
        if name != "data" and value not in (None, *composed.FILES[name]):
            for path in _files_of(pathlib.Path(value)):
                digests[str(path)] = statement_subject.sha256(path)
    return digests


def _files_of(path: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files that an option names: of a folder, those of a model."""
    if path.is_dir():
        return sorted(file for pattern in _OF_MODEL for file in path.glob(pattern))
    files = table_files.find(str(path)) or [path]
    return [file for file in files if file.is_file()]  # Who reads a file says that it is missing.


def check_planned(
    config: composed.Options,
    output: pathlib.Path,
    train: user_text.UserText,
    held_out: user_text.UserText,
) -> None:
    """Refuses to begin a run of a sweep, or of a choice among runs, on other data than planned."""
    digests = joint_runs.planned(output)
    if digests is not None:
        joint_runs.refuse_changed(digests, planned(config, train, held_out))


def named(config: _Config | None, text: Any, rows: Any) -> _Config | None:
    """Names rows in memory whose name was left at the default; refuses rows beside text."""
    if rows is None or config is None:
        return config
    if text is not None:
        raise validation.UsageError("Give text or rows, not both: rows become text.")
    if config.to_dict()["data"] != language_config.TextConfig.data:
        return config
    return config.changed(data="rows")


def check_named(data: str, train: user_text.UserText) -> None:
    """Refuses text in memory that a statement would call the docstrings of packages."""
    default = language_config.TextConfig.data
    if data == default and train.name != default:
        raise validation.UsageError(
            f"text is of {train.name!r}, but data is {default!r} in the config, which is what "
            "the statement would say: set data to the name of the text."
        )


def check_on_disk(data: str, go_on: str) -> None:
    """Refuses to go on without the text in memory that a run began with; `go_on` gives it again."""
    if sources.is_in_memory(data):
        raise validation.UsageError(
            f"The text of the run, {data!r}, was in memory: give it again, in Python: {go_on}."
        )


def _check_users(
    corpus: user_text.UserText, train: user_text.UserText, held_out: user_text.UserText
) -> None:
    """Refuses a corpus that leaves nobody, or no word, to train on or to evaluate on."""
    if not corpus.has_text():
        raise validation.UsageError(
            f"data {corpus.name!r} has {len(corpus)} users, none of them has a text with a word in "
            "it: check how the file was written."
        )
    for part, verb in ((train, "train on"), (held_out, "hold out for evaluation")):
        if len(part) == 0:
            raise validation.UsageError(
                f"data {corpus.name!r} has too few users, {len(corpus)}: a hash of their ids gives "
                f"about eight in ten to training and one in ten to evaluation, which leaves none "
                f"to {verb}; use a larger corpus."
            )
        if not part.has_text():
            raise validation.UsageError(
                f"data {corpus.name!r} has {len(part)} users to {verb}, none of them has a text "
                f"with a word in it (others of its {len(corpus)} users have); use a larger corpus."
            )


def _load_corpus(
    options: language_config.TextConfig,
    cache: grouping.Cache,
    notice: tables.Notice,
    rows_per_owner: int | None,
) -> user_text.UserText:
    is_hidden = options.data != "docs"
    with tqdm.tqdm(
        desc="Reading docstrings", unit="file", leave=False, delay=1.0, disable=is_hidden
    ) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        return sources.load_user_text(
            options.data,
            pretokenized=options.pretokenized,
            sqlite_text_feature=options.sqlite_text_feature,
            sqlite_split=options.sqlite_split,
            table=options.table,
            cache=cache,
            progress=show,
            notice=notice,
            rows_per_owner=rows_per_owner,
        )


def _read_vocabulary(
    options: TextOptions, train: user_text.UserText, protected: user_text.UserText
) -> vocabulary.Vocabulary:
    size, lower_case = options.vocabulary_size, options.lower_case
    if options.vocabulary == vocabulary.DP:
        from tff_dpftrl.training import vocabulary_share  # It brings dp_accounting with it.

        assert options.target_epsilon is not None  # `TrainingConfig` asks for it.
        base = _read_base(options, protected)
        return set_union.add_words(
            base,
            train,
            len(base.words) if size is None else size,  # Only a vocabulary.json has its own size.
            vocabulary_share.counting(options.target_epsilon, options.delta, options.budget_shares),
            lower_case=lower_case,
            seed=options.deterministic_noise_seed,
        )
    if options.vocabulary == "private":
        size = vocabulary.DEFAULT_SIZE if size is None else size
        make = _maker(options.tokenizer)
        return vocabulary.of_training_users(train, size, lower_case=lower_case, make=make)
    return public_vocabulary(options, protected)


def _read_base(options: TextOptions, protected: user_text.UserText) -> vocabulary.Vocabulary | None:
    """Reads the public words that the vocabulary 'dp' adds to; None for none."""
    if options.base_vocabulary == vocabulary.NO_BASE:
        return None
    base = public_vocabulary(
        dataclasses.replace(options, vocabulary=options.base_vocabulary, tokenizer=None), protected
    )
    for is_refused, why in (
        (not base.is_public, "is counted on users of another run: name public words"),
        (isinstance(base, subwords.Subwords), "has sub-words, and 'dp' counts words: name a list"),
    ):
        if is_refused:
            raise validation.UsageError(
                f"base_vocabulary {options.base_vocabulary} {why}, or take 'none'."
            )
    return base


def public_vocabulary(
    options: TextOptions | language_config.VocabularyConfig,
    protected: user_text.UserText | None = None,
) -> vocabulary.Vocabulary:
    """Reads, counts or learns a vocabulary of public text.

    Its source is 'docs', 'english', the vocabulary.json of a model, which is public only if the
    file says so, the tokenizer.json of a checkpoint, or a file that the user declares to be public.
    That file must not be the data, and is compared with the text of the protected users, if it is
    here.
    """
    source, size, tokenizer = options.vocabulary, options.vocabulary_size, options.tokenizer
    lower_case, data = options.lower_case, options.data
    assert source is not None  # `LanguageConfig.part` and `with_defaults` name it.
    if vocabulary_file.is_of_model(source):
        return _of_model(source, size, tokenizer=tokenizer, lower_case=lower_case)
    make = _maker(tokenizer)
    size = vocabulary.DEFAULT_SIZE if size is None else size
    if vocabulary.is_of_counts(source):
        if make is not vocabulary.most_frequent:
            raise validation.UsageError(
                f"vocabulary {source} has counts of words, and tokenizer {tokenizer!r} learns "
                "sub-words on text: take tokenizer 'words', or name public text."
            )
        return vocabulary.from_counts(source, size, lower_case=lower_case)
    if source == "docs":
        return vocabulary.standard_library(size, lower_case=lower_case, make=make)
    if source == "english" and make is not vocabulary.most_frequent:
        raise validation.UsageError(
            f"vocabulary 'english' is a list of words, and tokenizer {tokenizer!r} learns "
            "sub-words on text: name a file of public text, or 'docs', or take tokenizer 'words'."
        )
    if source == "english":
        return vocabulary.english(size, lower_case=lower_case)
    if sources.are_same_file(data, source):  # `from_file` compares the texts.
        raise validation.UsageError(
            f"vocabulary {source!r} is the file of the users to be protected, {data!r}, or a copy "
            "of it, and cannot be public: count it on other text, or pass vocabulary 'private', "
            "and the statement will say that it is not covered."
        )
    return vocabulary.from_file(
        source,
        size,
        lower_case=lower_case,
        is_tokenized=options.pretokenized,
        protected=protected,
        make=make,
    )


def _maker(tokenizer: str | None) -> vocabulary.Make:
    """Returns the function that makes a vocabulary of this kind of a corpus."""
    if tokenizer in (None, "words"):
        return vocabulary.most_frequent
    return functools.partial(subword_learning.learn, kind=tokenizer)


def _of_model(
    path: str, size: int | None, *, tokenizer: str | None, lower_case: bool
) -> vocabulary.Vocabulary:
    """Reads the words of a model, the most frequent first; at most `size` of them."""
    words, _ = vocabulary_file.read(path)
    kind = words.kind if isinstance(words, subwords.Subwords) else "words"
    if tokenizer not in (None, kind):
        raise validation.UsageError(
            f"tokenizer must be {kind!r} with the vocabulary {path}, which has that kind; got "
            f"{tokenizer!r}: leave it out, or name other text as vocabulary."
        )
    if isinstance(words, subwords.Subwords):
        return _subwords_of_model(words, path, size, lower_case)
    if words.lower_case != lower_case:
        raise validation.UsageError(
            f"lower_case must be {str(words.lower_case).lower()} with the vocabulary {path}, whose "
            f"words are {'' if words.lower_case else 'not '}in lower case; got "
            f"{str(lower_case).lower()}."
        )
    return dataclasses.replace(words, words=words.words[:size])


def _subwords_of_model(
    words: subwords.Subwords, path: str, size: int | None, lower_case: bool
) -> subwords.Subwords:
    """Refuses options that sub-words cannot follow."""
    if size is not None and size != len(words.words):
        raise validation.UsageError(
            f"vocabulary_size must be left out with the sub-words of {path}, which has all of its "
            f"{len(words.words)} tokens; got {size}."
        )
    if words.kind != "checkpoint" and words.lower_case != lower_case:
        raise validation.UsageError(
            f"lower_case must be {str(words.lower_case).lower()} with the vocabulary {path}, which "
            f"was learned so; got {str(lower_case).lower()}."
        )
    return words
