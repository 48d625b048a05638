"""Central training on public text, for a model that federated training goes on with.

The folder of a pretrained model:

    model.npz          of the epoch that was of least loss on held-out text
    vocabulary.json    the words of its ids, and how text is split into them
    pretraining.json   what it was trained on, with which options, and every epoch's metrics
    text_digests.npz   digests of the text, if it came from a file
    curves.png, README.md
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

import tqdm

from tff_dpftrl import durable_files, validation, version
from tff_dpftrl.data import (
    docstrings,
    near_duplicates,
    sequences,
    sources,
    split,
    table_files,
    tables,
    text_digests,
    user_text,
    vocabulary,
)
from tff_dpftrl.models import table as model_table
from tff_dpftrl.reports import readme
from tff_dpftrl.runs import progress as progress_lib
from tff_dpftrl.training import corpus as corpus_lib
from tff_dpftrl.training import language_config, trained_model, warm_start

STANDARD_LIBRARY = "standard-library"
"""Name of the docstrings of Python's standard library."""

# Files that are written before the first model, so that no model is without them.
_BEFORE_MODEL = {"vocabulary.json", warm_start.RECORD, warm_start.DIGESTS}


@dataclasses.dataclass(frozen=True)
class PretrainingConfig(tables.TableOptions):
    """Options of central training.

    Attributes:
      data: Public text: "standard-library"; "docs", with the docstrings of the installed
        packages, for a run that trains on something else; or a file as `train` reads it.
        That it is public is the operator's word; no privacy statement covers it. How a table
        is read is said by the attributes of `TableOptions`.
      epochs: Number of passes over the text; the learning rate falls to zero over them.
      patience: Epochs without improvement on held-out text after which it ends.
      batch_size: Number of sequences in a batch.
      learning_rate: Learning rate of Adam at the beginning.
      seed: Seed of the initial weights and of the order of the text.
      without_near_duplicates_of: Corpus of which no near-duplicates are trained on, often that of
        the later run (Charles et al. 2024, appendix D); None to leave nothing out. Its texts are
        looked at for this, which the later run's privacy statement says and epsilon does not cover.
    """

    data: str = STANDARD_LIBRARY
    epochs: int = 10
    patience: int = 2
    batch_size: int = 64
    learning_rate: float = 3e-3
    seed: int = 0
    without_near_duplicates_of: str | None = None

    def __post_init__(self):
        super().__post_init__()
        for name in ("epochs", "patience", "batch_size"):
            validation.integer(name, getattr(self, name), minimum=1)
        validation.integer("seed", self.seed, minimum=0)
        validation.learning_rate("learning_rate", self.learning_rate)


@dataclasses.dataclass(frozen=True, eq=False)
class PublicText:
    """Public text in two parts, and the vocabulary.

    Attributes:
      held_out: Users whose text decides which epoch is best.
      corpus: Corpus of the text, in words.
      left_out: Number of texts that were left out as near-duplicates; None if none were sought.
      near_duplicates_of: Corpus that they nearly repeat; None if none were sought.
    """

    train: user_text.UserText
    held_out: user_text.UserText
    words: vocabulary.Vocabulary
    corpus: str
    left_out: int | None = None
    near_duplicates_of: str | None = None

    @property
    def source(self) -> str:
        """Source of the text, for the privacy statement of a later run."""
        if self.left_out is None:
            return self.corpus
        return (
            f"{self.corpus}, without near-duplicates of text of {self.near_duplicates_of} (texts "
            f"left out: {self.left_out}): which and how many these are was found by looking at "
            "that text without noise, which epsilon does not cover"
        )


def read(
    config: PretrainingConfig, options: language_config.LanguageConfig, *, rows: Any = None
) -> PublicText:
    """Reads public text and vocabulary, without TensorFlow.

    The text must not be the users' data of the later run, whose options are the second argument.
    About one user in ten, by a hash of their id, is held out. Rows are a table in memory instead of
    files (`sources.of_rows`), and `config.data` is then its name.
    """
    options = options.with_defaults()
    if options.vocabulary in ("private", vocabulary.DP):
        raise validation.UsageError(
            f"vocabulary {options.vocabulary!r} is counted on the users to be protected, and "
            "pretraining reads public text only: name a public vocabulary, and use it for the run "
            "too."
        )
    if options.model == model_table.CUSTOM:
        raise validation.UsageError(
            f"model {model_table.CUSTOM!r} can be trained in Python only, where it is: pretrain it "
            "there, or name a model of this package."
        )
    corpus_lib.require_packages({**vars(options), **vars(config)})
    if rows is not None:
        corpus = sources.of_rows(
            rows, _name_of_rows(config), pretokenized=options.pretokenized, table=config
        )
        source = f"{corpus.name}, declared public by the operator"
    elif config.data == STANDARD_LIBRARY:
        corpus = docstrings.read_standard_library()
        source = "docstrings of Python's standard library"
    elif config.data == "docs" and options.data != "docs":
        corpus = _all_docstrings()
        source = "docstrings of Python's standard library and of the installed packages"
    else:
        if config.data == "docs":
            raise validation.UsageError(
                "data 'docs' are what the run protects, whose data are 'docs' too (the default): "
                f"pretrain on {STANDARD_LIBRARY!r} or on a file of public text, or name the run's "
                "data with --config."
            )
        _refuse_protected(config, options)
        corpus = sources.load_user_text(
            config.data,
            pretokenized=options.pretokenized,
            sqlite_text_feature=options.sqlite_text_feature,
            sqlite_split=options.sqlite_split,
            table=config,
        )
        source = f"{pathlib.PurePath(config.data).name}, declared public by the operator"
    left_out, others = None, config.without_near_duplicates_of
    if others is not None:
        table = options.table
        users = sources.load_user_text(others, table=table, pretokenized=options.pretokenized)
        corpus, left_out = near_duplicates.without(corpus, [users])
        others = pathlib.PurePath(users.name).name
    if rows is not None or others is not None:
        _refuse_shared(corpus, options)
    held_out = split.by_user(corpus).validation
    kept = set(held_out.user_ids)
    train = corpus.select([user for user in corpus.user_ids if user not in kept])
    for part, verb in ((train, "train on"), (held_out, "hold out")):
        if not part.has_text():
            raise validation.UsageError(
                f"data {corpus.name!r} has {len(corpus)} users, too few to {verb} any with text: "
                "about one in ten is held out, by a hash of their ids. Use more text."
            )
    words = corpus_lib.public_vocabulary(options)
    if not words.is_public:
        raise validation.UsageError(
            f"vocabulary {options.vocabulary} is not of public text, and pretraining reads public "
            "text only: name another one."
        )
    return PublicText(train, held_out, words, source, left_out, others)


def _all_docstrings() -> user_text.UserText:
    library, installed = docstrings.read_standard_library(), docstrings.read()
    texts = {f"standard library: {user}": library.examples(user) for user in library.user_ids}
    texts |= {user: installed.examples(user) for user in installed.user_ids}
    return user_text.UserText.from_mapping("docs", texts, user_unit=installed.user_unit)


def _refuse_protected(config: PretrainingConfig, options: language_config.LanguageConfig) -> None:
    public, protected = config.data, options.data
    table = options.table
    if config.without_near_duplicates_of is not None:  # Then what is left is looked at.
        is_protected = sources.are_same_file(public, protected)
    else:
        is_protected = sources.share_texts(public, protected, table, one_table=config)
    if is_protected:
        raise _protected(public, protected)


def _refuse_shared(corpus: user_text.UserText, options: language_config.LanguageConfig) -> None:
    for part in sources.parts_of(options.data, options.table, ()):
        if user_text.shared_users(corpus, part):
            raise _protected(corpus.name, options.data)


def _protected(public: str, protected: str) -> validation.UsageError:
    return validation.UsageError(
        f"data {public!r} is the file of the users to be protected, {protected!r}, a copy "
        "of it, or has texts of theirs, and cannot be public: pretrain on other text."
    )


def _name_of_rows(config: PretrainingConfig) -> str:
    """Returns the name of rows in memory, which is not that of a run's rows by default."""
    return "public rows" if config.data == STANDARD_LIBRARY else config.data


def check_is_free(output: pathlib.Path) -> None:
    """Refuses a file, and a folder with more than an interruption left in the first epoch."""
    if output.is_dir():
        names = {path.name for path in output.iterdir() if not durable_files.is_leftover(path)}
        is_free = names <= _BEFORE_MODEL
    else:
        is_free = not output.exists()
    if not is_free:
        raise validation.UsageError(
            f"--output {output} exists and is not an empty folder: name another one."
        )


def pretrain(
    config: PretrainingConfig,
    options: language_config.LanguageConfig,
    output: pathlib.Path,
    *,
    text: PublicText | None = None,
    rows: Any = None,
    progress: progress_lib.Progress = print,
) -> str:
    """Trains a model, and keeps the best one of the epochs done at any time.

    Args:
      config: Options of the pretraining.
      options: Options of the later run: model, vocabulary, sequence length.
      output: An empty or new folder.
      text: Text and vocabulary, as `read` returned them; they are read now if None.
      rows: A table in memory to read instead of files (`sources.of_rows`).
      progress: Callback for progress lines.

    Returns:
      The outcome in a line.

    Raises:
      ValueError: If text or folder cannot be used, or training diverged.
      OSError: If a file cannot be written.
    """
    from tff_dpftrl.models import central_training, evaluation, export, metrics, table
    from tff_dpftrl.training import startup

    check_is_free(output)
    if rows is not None:
        if text is not None:
            raise validation.UsageError("Give text or rows, not both: rows become text.")
        config = dataclasses.replace(config, data=_name_of_rows(config))
    if text is None:
        text = read(config, options, rows=rows)
    words, spec = text.words, sequences.SequenceSpec(options.sequence_length)
    ids = sequences.SequenceCorpus(text.train, words, spec).pooled()
    others = sequences.SequenceCorpus(text.held_out, words, spec)
    held_out = others.pooled()
    model = table.build(
        options.model,
        vocabulary_size=words.size,
        sequence_length=options.sequence_length,
        **options.model_sizes,
    )
    special = metrics.SpecialIds(oov=words.oov, bos=words.bos, eos=words.eos)
    evaluate = evaluation.Evaluator(
        model, special, held_out, targets_per_character=others.targets_per_character()
    )
    if text.left_out is not None:
        progress(
            f"Left out: {text.left_out} texts that nearly repeat text of "
            f"{text.near_duplicates_of} ({near_duplicates.METHOD})."
        )
    progress(
        f"Text: {len(ids)} sequences of {len(text.train)} users ({text.corpus}); {len(held_out)} "
        f"of {len(text.held_out)} others decide when to stop. Model: {options.model}, "
        f"{model.num_parameters} weights."
    )
    num_words, num_unknown = words.count(ids[:, 1:])
    for line in (
        *startup.describe_script(text.train.texts(), words),
        *startup.describe_unknown_words(num_unknown / max(1, num_words), words),
    ):
        progress(line)
    output.mkdir(parents=True, exist_ok=True)
    durable_files.remove_leftovers(output)
    # Installed texts can always be read again.
    if rows is not None or (config.data != "docs" and sources.is_on_disk(config.data)):
        text_digests.TextDigests.of(text.train, text.held_out).save(output / warm_start.DIGESTS)
    done: list[dict[str, float]] = []
    per_epoch = central_training.num_batches(len(ids), config.batch_size)
    with tqdm.tqdm(
        total=config.epochs * per_epoch,
        unit="batch",
        mininterval=0.1 if sys.stderr.isatty() else 10.0,
        dynamic_ncols=True,
    ) as bar:

        def show(loss: float) -> None:
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            bar.update()

        trained = central_training.epochs(
            model,
            model.initial_weights(config.seed),
            ids,
            num_epochs=config.epochs,
            batch_size=config.batch_size,
            learning_rate=config.learning_rate,
            seed=config.seed,
            on_batch=show,
        )
        for number, epoch in enumerate(trained, start=1):
            measured = evaluate(epoch.weights)
            if not measured["loss"] < float("inf"):
                raise validation.UsageError(
                    f"Training diverged in epoch {number}: lower learning_rate, "
                    f"{config.learning_rate:g}."
                )
            done.append(
                {"round": number, "loss": epoch.loss}
                | {f"eval_{name}": float(value) for name, value in measured.items()}
            )
            _write_record(output, config, options, text, done)
            if _best(done) is done[-1]:
                trained_model.write_vocabulary(output, words, text.train.is_tokenized)
                export.write(output / "model.npz", model, epoch.weights)
            _draw(output, text, done)
            tqdm.tqdm.write(
                f"Epoch {number}: top-1 accuracy on held-out text {measured['top1_in_vocab']:.2%}, "
                f"perplexity {measured['perplexity']:.1f}, "
                f"{measured['bits_per_character']:.3f} bits per character.",
                file=sys.stderr,
            )
            readme.write(output)
            if _best(done)["round"] + config.patience <= number:
                break
    best = _best(done)
    return (
        f"Best of {len(done)} epochs: {best['round']}, with top-1 accuracy "
        f"{best['eval_top1_in_vocab']:.2%} on held-out text. Nothing of it is private: whoever has "
        "the model may learn the text."
    )


def _best(rows: list[dict[str, float]]) -> dict[str, float]:
    """Returns the epoch of least held-out loss, which is less noisy than accuracy."""
    return min(rows, key=lambda row: row["eval_loss"])


def _write_record(
    output: pathlib.Path,
    config: PretrainingConfig,
    options: language_config.LanguageConfig,
    text: PublicText,
    rows: list[dict[str, float]],
) -> None:
    record: Mapping[str, Any] = {
        "source": text.source,
        "vocabulary_source": text.words.source,
        "pretraining": dataclasses.asdict(config) | {"data": _found_from_everywhere(config.data)},
        **_record_of_near_duplicates(text),
        "model": {"name": options.model, **options.with_defaults().model_sizes},
        "best_epoch": _best(rows)["round"],
        "epochs": [
            {"epoch": row["round"]} | {name: row[name] for name in row if name != "round"}
            for row in rows
        ],
        "tff_dpftrl": version.__version__,
    }
    content = json.dumps(record, indent=2) + "\n"
    durable_files.write(output / warm_start.RECORD, content.encode("utf-8"))


def _record_of_near_duplicates(text: PublicText) -> dict[str, Any]:
    if text.left_out is None:
        return {}
    found = {
        "of": text.near_duplicates_of,
        "left_out": text.left_out,
        "method": near_duplicates.METHOD,
    }
    return {warm_start.NEAR_DUPLICATES: found}


def _found_from_everywhere(data: str) -> str:
    """Returns the name of a text, which a run elsewhere compares with its own users' text."""
    return table_files.absolute(data) if sources.is_on_disk(data) else data


def _draw(output: pathlib.Path, text: PublicText, rows: list[dict[str, float]]) -> None:
    from tff_dpftrl.runs import curves

    shown = [{name: row[name] for name in row if name != "loss"} for row in rows]
    curves.write(output, shown, title=f"pretraining on {text.corpus}", unit="epoch")
