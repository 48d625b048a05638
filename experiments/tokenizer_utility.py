"""Words against sub-words on three corpora, with a BLT's noise and without privacy.

    python experiments/tokenizer_utility.py shakespeare irc commits --data FOLDER --work FOLDER

pretrains a model on other public text for each corpus and tokenizer, trains it on the corpus once
for each kind of noise and each seed, and appends a row to
experiments/results/tokenizers_seeds.csv when a run is done. Runs that have their row are left out.
Then means and standard errors go to experiments/results/tokenizers.csv.

All tokenizers are measured on the same texts of held-out users (`measure`), in two ways that can
be compared between them:

- Bits per character. An unknown word is charged with its letters, by a code that is counted on the
  letters of the public text (`SpellingCode`), so that the bits are of all of the words.
- Accuracy of whole words: a word is right if the likeliest pieces, one after the other, spell it
  and then begin another word. Unknown words are wrong.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import gzip
import itertools
import json
import math
import pathlib
import random
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence

import finetuning_text
import numpy as np
import tensorflow as tf

from tff_dpftrl.data import sequences, subwords, tokenizer, user_text, vocabulary
from tff_dpftrl.models import metrics, ngrams
from tff_dpftrl.runs import checkpoint, released_model
from tff_dpftrl.training import config as config_lib
from tff_dpftrl.training import corpus as corpus_lib
from tff_dpftrl.training import language_config, pretraining, trained_model

_RESULTS = pathlib.Path(__file__).resolve().parent / "results"
_SEEDS, _TOKENIZERS, _NOISES = (0, 1, 2), ("words", "wordpiece", "sentencepiece"), ("none", "blt")
_LENGTHS = {"words": 20, "wordpiece": 28, "sentencepiece": 28}
_MODEL = {"model": "word-lstm", "embedding_size": 64, "lstm_size": 128}
_VOCABULARY_SIZE, _MAX_USERS, _HELD_OUT = 4000, 1000, 1500
_SPACE, _BYTE = "▁", re.compile(r"<0x([0-9A-F]{2})>")


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A corpus, and the public text that its models begin with.

    Attributes:
      file: Name of the file of users, without its suffix.
      public: Name of the file of public text; None for the standard library's docstrings.
      share: The public text has every so many-th user of its file.
      epochs: Number of passes over the public text.
    """

    file: str
    public: str | None
    share: int
    epochs: int


CORPORA = {
    "shakespeare": Corpus("shakespeare_by_role", "ubuntu_irc_by_user", 4, 1),
    "irc": Corpus("ubuntu_irc_by_user", "commits_by_author", 16, 1),
    "commits": Corpus("commits_by_author", None, 1, 2),
}


class SpellingCode:
    """A code of words by their letters: n-grams, interpolated by Witten and Bell's rule.

    A word has -Σ log2 p(c | the letters before it in the word) bits, its end included. After a
    context h of at most `order` letters, p(c | h) = (n(h, c) + t(h) p(c | h')) / (n(h) + t(h)),
    with the numbers n of letters in the words that it is counted on, the number t(h) of different
    letters after h, and h' without its first letter. Below the empty context all letters known
    have the same probability, together with one for all others. One of those has 20.1 bits more,
    log2 of the number of Unicode's code points.
    """

    def __init__(self, words: Iterable[str], order: int = 4):
        """Counts the letters of words, each as often as it occurs."""
        self._order = order
        self._after: dict[str, collections.Counter[str]] = {}
        for word in words:
            for context, letter in self._of(word):
                for size in range(len(context) + 1):
                    counts = self._after.setdefault(context[size:], collections.Counter())
                    counts[letter] += 1
        self._totals = {context: found.total() for context, found in self._after.items()}

    def _of(self, word: str) -> Iterator[tuple[str, str]]:
        """Yields each letter and the end of a word, with its context."""
        marked = f"\n{word}\n"
        for at in range(1, len(marked)):
            yield marked[max(0, at - self._order) : at], marked[at]

    def bits(self, word: str) -> float:
        """Returns the bits of a word."""
        bits, known = 0.0, self._after.get("", {})
        for context, letter in self._of(word):
            share = 1.0 / (len(known) + 1)
            for size in range(len(context), -1, -1):
                if (found := self._after.get(context[size:])) is not None:
                    total = self._totals[context[size:]]
                    share = (found[letter] + len(found) * share) / (total + len(found))
            bits -= math.log2(share)
            if letter not in known:
                bits += math.log2(0x110000)
        return bits


def bytes_of(token: str) -> bytes:
    """Returns the text of a piece of sentencepiece."""
    if (byte := _BYTE.fullmatch(token)) is not None:
        return bytes.fromhex(byte[1])
    return token.replace(_SPACE, " ").encode()


@dataclasses.dataclass(frozen=True)
class Places:
    """Where the words of a text are among its targets.

    Attributes:
      words: The words.
      spans: First target of each word, and the one after its last.
      is_known: Whether each word is spelled by its targets.
      is_free: Whether the first target of each word may be any: what precedes it is no letter or
        digit that it could go on with.
      tails: Bytes of the last piece of each word up to the word's end, of sentencepiece, whose
        pieces may go on with the next word; else empty.
    """

    words: list[str]
    spans: list[tuple[int, int]]
    is_known: list[bool]
    is_free: list[bool]
    tails: list[bytes]


def places(text: str, words: vocabulary.Vocabulary) -> Places:
    """Returns where the words of a text are among the targets of a tokenizer.

    A piece of sentencepiece may have letters of two words: then it is among the targets of both.
    """
    split = tokenizer.Tokenizer(words.lower_case, version=words.word_rule).words
    if not isinstance(words, subwords.Subwords) or words.kind == "wordpiece":
        found, rule = split(text), words.rule()
        ids = [words.ids(rule.words(word)) for word in found]
        ends = np.cumsum([0, *map(len, ids)]).tolist()
        spans = list(zip(ends[:-1], ends[1:], strict=True))
        is_known = [words.oov not in i for i in ids]
        return Places(found, spans, is_known, [False] * len(found), [b""] * len(found))
    pieces = [bytes_of(token) for token in words.rule().words(text)]
    ends = np.cumsum([0, *map(len, pieces)])
    spelled, place = b"".join(pieces), 0
    found, spans, free, tails = split(spelled.decode()), [], [], []
    for word in found:
        begin = spelled.index(word.encode(), place)
        # The spaces before it are part of its first piece, or pieces.
        first = int(np.searchsorted(ends, place, side="right")) - 1
        is_free = place == 0 or not spelled[:place].decode()[-1].isalnum()
        place = begin + len(word.encode())
        last = int(np.searchsorted(ends, place))
        spans.append((first, last))
        free.append(is_free)
        tails.append(spelled[ends[last - 1] : place])
    return Places(found, spans, [True] * len(found), free, tails)


def continuing(words: vocabulary.Vocabulary) -> np.ndarray:
    """Returns which ids go on with a word that has begun, bool, shape [V]."""
    goes_on = np.zeros(words.size, bool)
    if isinstance(words, subwords.Subwords):
        for token, index in words.id_of.items():
            if words.kind == "wordpiece":
                goes_on[index] = token.startswith("##")
            else:
                goes_on[index] = token[0].isalnum()
    return goes_on


def score(
    trained: trained_model.TrainedModel, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores the targets of sequences.

    Args:
      trained: Model and vocabulary.
      rows: Ids, int32, shape [n, T + 1].

    Returns:
      Log-losses in bits; the likeliest ids; and those among the ids that begin a word; each of
      shape [n, T]. Padding, beginnings of texts and unknown words are never likeliest, and no
      word begins with the end of a text.
    """
    words, model = trained.words, trained.model
    never = [i for i in (vocabulary.PAD, words.bos, words.oov) if i is not None]
    never = np.isin(np.arange(words.size), [i for i in never if i != words.eos])
    no_word = never | continuing(words) | (np.arange(words.size) == words.eos)
    weights = [tf.convert_to_tensor(weight, tf.float32) for weight in trained.weights]

    @tf.function(
        autograph=False,
        input_signature=[tf.TensorSpec([None, model.sequence_length + 1], tf.int32)],
    )
    def graph(batch):
        scores = model.logits(weights, batch[:, :-1])
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch[:, 1:], scores)
        best = [
            tf.argmax(tf.where(mask, scores.dtype.min, scores), axis=-1)
            for mask in (never, no_word)
        ]
        return losses / math.log(2), *best

    parts = [graph(rows[at : at + 64]) for at in range(0, len(rows), 64)]
    losses, best, best_word = (
        np.concatenate([part.numpy() for part in each]) for each in zip(*parts, strict=True)
    )
    return losses, best, best_word


def measure(
    trained: trained_model.TrainedModel, texts: Sequence[str], code: SpellingCode
) -> dict[str, float]:
    """Measures a model on texts.

    Args:
      trained: Model and vocabulary.
      texts: The texts.
      code: Code of unknown words.

    Returns:
      Bits per character without and with the letters of unknown words; the share of whole words
      that are predicted; the share of words that are unknown; the number of targets for each word.
    """
    words = trained.words
    goes_on = continuing(words)
    each = rows_of(texts, words, trained.model.sequence_length)
    losses, best, best_word = score(trained, np.concatenate(each))
    bits = letters = right = total = unknown = targets_read = row = 0
    for text, rows in zip(texts, each, strict=True):
        here = slice(row, row + len(rows))
        row += len(rows)
        is_target = rows[:, 1:] != vocabulary.PAD
        targets = rows[:, 1:][is_target]
        bits += float(losses[here][is_target].sum())
        free, begin = best[here][is_target], best_word[here][is_target]
        found = places(text, words)
        targets_read += len(targets)
        total += len(found.words)
        for word, (first, end), is_known, is_free, tail in zip(
            found.words, found.spans, found.is_known, found.is_free, found.tails, strict=True
        ):
            if not is_known:
                unknown += 1
                letters += code.bits(word)
                continue
            guess = np.array(free[first:end])
            if not is_free:
                guess[0] = begin[first]
            if not np.array_equal(guess[:-1], targets[first : end - 1]):
                continue
            if guess[-1] == targets[end - 1]:
                is_longer = bool(tail) and tail != bytes_of(words.words[guess[-1] - 1])
                is_last = is_longer or end == len(targets) or not word[-1].isalnum()
                right += bool(is_last or not goes_on[free[end]])
            elif tail and (other := bytes_of(words.words[guess[-1] - 1])).startswith(tail):
                rest = other[len(tail) :].decode(errors="replace")
                right += not (word[-1].isalnum() and rest[:1].isalnum())
    characters = sum(map(len, texts))
    return {
        "bits": bits / characters,
        "bits with spelling": (bits + letters) / characters,
        "word accuracy": right / total,
        "unknown": unknown / total,
        "targets per word": targets_read / total,
    }


def rows_of(
    texts: Sequence[str], words: vocabulary.Vocabulary, sequence_length: int
) -> list[np.ndarray]:
    """Returns the sequences of each text."""
    each = user_text.UserText.from_mapping("texts", {str(i): [t] for i, t in enumerate(texts)})
    encoded = sequences.SequenceCorpus(each, words, sequences.SequenceSpec(sequence_length))
    return [encoded.sequences(user) for user in each.user_ids]


class Experiment:
    """The runs on one corpus."""

    def __init__(self, name: str, data: pathlib.Path, work: pathlib.Path):
        self.name, self.corpus = name, CORPORA[name]
        self._data, self._work = data, work
        self._file = self._prepared(self.corpus.file, 1)
        self._public = "standard-library"
        if self.corpus.public is not None:
            self._public = str(self._prepared(self.corpus.public, self.corpus.share))
        self._texts: dict[str, corpus_lib.RunText] = {}

    def _prepared(self, file: str, share: int) -> pathlib.Path:
        """Writes a share of the users of a file, white space as one space."""
        path = self._work / f"{file}_{share}.jsonl"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = []
            with gzip.open(self._data / f"{file}.jsonl.gz", "rt", encoding="utf-8") as users:
                for line in list(users)[::share]:
                    user = json.loads(line)
                    user["examples"] = [" ".join(text.split()) for text in user["examples"]]
                    lines.append(json.dumps(user, ensure_ascii=False) + "\n")
            path.write_text("".join(lines), encoding="utf-8")
        return path

    def _options(self, kind: str) -> dict[str, object]:
        return {"data": str(self._file), "sequence_length": _LENGTHS[kind], **_MODEL}

    def pretrained(self, kind: str) -> pathlib.Path:
        """Returns the folder of the pretrained model of a tokenizer."""
        folder = self._work / f"pretrained_{self.name}_{kind}"
        if not (folder / "README.md").exists():
            options = language_config.LanguageConfig(
                tokenizer=kind,
                vocabulary="docs" if self.corpus.public is None else self._public,
                vocabulary_size=_VOCABULARY_SIZE,
                **self._options(kind),
            )
            config = pretraining.PretrainingConfig(data=self._public, epochs=self.corpus.epochs)
            pretraining.pretrain(config, options, folder)
        return folder

    def text(self, kind: str) -> corpus_lib.RunText:
        """Returns the users, and the vocabulary of a tokenizer."""
        if kind not in self._texts:
            self._texts[kind] = corpus_lib.read(
                self._config(kind, "none").part(corpus_lib.TextOptions)
            )
        return self._texts[kind]

    @functools.cached_property
    def held_out(self) -> list[str]:
        """Texts of held-out users, the same for all tokenizers."""
        texts = [text for text in self.text("words").held_out.texts() if text.strip()]
        return random.Random(0).sample(texts, min(_HELD_OUT, len(texts)))

    @functools.cached_property
    def code(self) -> SpellingCode:
        """The code of unknown words, counted on those of the public text, each once."""
        options = language_config.LanguageConfig(vocabulary="docs", **self._options("words"))
        public = pretraining.read(pretraining.PretrainingConfig(data=self._public), options)
        words = self.text("words").words
        found = (word for text in public.train.texts() for word in words.rule().words(text))
        return SpellingCode({word for word in found if word not in words.id_of})

    def _config(self, kind: str, noise: str) -> config_lib.TrainingConfig:
        folder = self.pretrained(kind)
        privacy = {"mechanism": "none"}
        if noise != "none":
            privacy = {
                "mechanism": noise,
                "target_epsilon": 5.0,
                "delta": 1e-6,
                "simulate_report_goal": 250,
                "simulate_population": 12_500,
            }
        return config_lib.TrainingConfig.of(
            tokenizer=kind,
            vocabulary=str(folder / "vocabulary.json"),
            max_users=_MAX_USERS,
            batch_size=16,
            max_sequences_per_client=16,
            num_rounds=60,
            clients_per_round=8,
            client_learning_rate=0.5,
            server_learning_rate=1.0,
            server_momentum=0.9,
            server_warmup_rounds=6,
            server_decay="cosine",
            iterate_averaging=0.9,
            clip_norm=0.5,
            eval_sequences=16,
            **self._options(kind),
            **privacy,
        )

    def rows(self, kind: str, noise: str, seeds: Sequence[int]) -> Iterator[dict[str, object]]:
        """Trains and measures for each seed; without rounds if the noise is "pretrained"."""
        begin = time.process_time()
        first = trained_model.find(self.pretrained(kind)).load()
        weights = iter([first.weights])
        if noise != "pretrained":
            weights = self._train(self._config(kind, noise), first.weights, seeds)
        for seed, found in zip(seeds, weights, strict=True):
            trained = dataclasses.replace(first, weights=found)
            yield {
                "corpus": self.name,
                "tokenizer": kind,
                "noise": noise,
                "seed": seed,
                **{
                    name: f"{value:.5g}"
                    for name, value in measure(trained, self.held_out, self.code).items()
                },
                "processor seconds": f"{time.process_time() - begin:.0f}",
            }
            begin = time.process_time()

    def _train(
        self, config: config_lib.TrainingConfig, initial: Sequence[np.ndarray], seeds: Sequence[int]
    ) -> Iterator[list[np.ndarray]]:
        """Yields the weights after the rounds that `tff-dpftrl train` runs, without its books.

        A seed is one of cohorts and of the clients' order. Noise is drawn anew each time.
        """
        from tff_dpftrl import execution
        from tff_dpftrl.training import federated_trainer, process, task

        text = self.text(config.language.tokenizer)
        of_text = task.build_language_task(config.part(task.TaskOptions), text)
        of_text = dataclasses.replace(of_text, initial_weights=tuple(initial))
        plan = config.request().plan(len(text.train), of_text.model.num_parameters)

        built = execution.CompiledProcess(
            process.build_round(plan, config.rules, of_text.functional_model()),
            dataset_fn=of_text.batches,
            tensor_spec=of_text.rows_spec,
        )
        with contextlib.closing(built):
            for seed in seeds:
                seeded = dataclasses.replace(of_text, seed=seed)
                trainer = federated_trainer.FederatedTrainer(
                    text.train.user_ids, plan, built, seeded.client_rows
                )
                trainer.sample_with(seed)
                state = built.initialize()
                for index in range(config.learning.num_rounds):
                    state = trainer.train(state, index, trainer.members(index)).state
                yield released_model.weights(
                    config.learning.iterate_averaging, checkpoint.Snapshot.of(state)
                )

    def counted(self) -> Iterator[dict[str, object]]:
        """Yields the accuracies of n-grams of words, counted on all training users."""
        config = self._config("words", "none").changed(max_users=None)
        text = corpus_lib.read(config.part(corpus_lib.TextOptions))
        words, length = text.words, config.language.sequence_length
        pooled = sequences.SequenceCorpus(
            text.train, words, sequences.SequenceSpec(length)
        ).pooled()
        special = metrics.SpecialIds(oov=words.oov, bos=words.bos, eos=words.eos)
        model = ngrams.NgramModel(pooled, special, words.size)
        rows = np.concatenate(rows_of(self.held_out, words, length))
        for order, name in enumerate(("unigrams", "bigrams", "trigrams"), start=1):
            accuracy = model.evaluate(rows, order).top1_oov_wrong
            yield {
                "corpus": self.name,
                "tokenizer": "words",
                "noise": name,
                "seed": 0,
                "bits": "",
                "bits with spelling": "",
                "word accuracy": f"{accuracy:.5g}",
                "unknown": "",
                "targets per word": "",
                "processor seconds": "",
            }


def summary(rows: Sequence[dict[str, str]]) -> list[dict[str, object]]:
    """Returns the table: means over seeds, with standard errors."""
    settings: dict[tuple[str, str, str], list[dict[str, str]]] = {}
    order = [*CORPORA, *_TOKENIZERS, "pretrained", *_NOISES, "unigrams", "bigrams", "trigrams"]
    for row in rows:
        settings.setdefault((row["corpus"], row["tokenizer"], row["noise"]), []).append(row)
    made = []
    for setting in sorted(settings, key=lambda names: [order.index(name) for name in names]):
        found = settings[setting]
        is_counted = not found[0]["bits"]

        def mean(name: str, unit: float = 1.0, digits: int = 3, found: Sequence = found) -> str:
            values = unit * np.array([float(row[name]) for row in found])
            error = np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else None
            return f"{values.mean():.{digits}f}" + (
                "" if error is None else f" ± {error:.{digits}f}"
            )

        corpus, kind, noise = setting
        made.append(
            {
                "corpus": corpus,
                "tokenizer": kind,
                "seeds": "" if is_counted else len(found),
                "model": {"none": "no noise", "blt": "BLT, ε = 5"}.get(noise, noise),
                "unknown words": "" if is_counted else f"{100 * float(found[0]['unknown']):.1f} %",
                "bits per character": "" if is_counted else mean("bits"),
                "with unknown words spelled": "" if is_counted else mean("bits with spelling"),
                "whole words predicted": mean("word accuracy", 100.0, 2) + " %",
            }
        )
    return made


def main() -> None:
    """Runs what is left, and writes the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpora", nargs="*", choices=[*CORPORA, []])
    parser.add_argument("--data", type=pathlib.Path, help="folder of the three files of users")
    parser.add_argument("--work", type=pathlib.Path, help="folder of pretrained models")
    parser.add_argument("--tokenizers", default=",".join(_TOKENIZERS), help="only these")
    args = parser.parse_args()
    path, names = _RESULTS / "tokenizers_seeds.csv", ("corpus", "tokenizer", "noise", "seed")

    experiments = {name: Experiment(name, args.data, args.work) for name in args.corpora}
    done = {
        (*(row[name] for name in names[:3]), int(row["seed"])) for row in finetuning_text.read(path)
    }
    settings = itertools.product(args.tokenizers.split(","), ("pretrained", *_NOISES), experiments)
    for kind, noise, corpus in settings:
        seeds = (0,) if noise == "pretrained" else _SEEDS
        left = [seed for seed in seeds if (corpus, kind, noise, seed) not in done]
        for row in experiments[corpus].rows(kind, noise, left) if left else ():
            finetuning_text.append(path, row)
            print(*row.values(), flush=True)
    for corpus, experiment in experiments.items():
        if (corpus, "words", "unigrams", 0) not in done:
            for row in experiment.counted():
                finetuning_text.append(path, row)
    finetuning_text.write(_RESULTS / "tokenizers.csv", summary(finetuning_text.read(path)))
    print(_RESULTS / "tokenizers.csv", file=sys.stderr)


if __name__ == "__main__":
    main()
