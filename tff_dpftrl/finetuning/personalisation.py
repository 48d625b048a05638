"""Personalisation: what a model gains when users train it further on their own text.

Each of some held-out users begins with the model, trains it by SGD on the first half of their
examples, and is asked how well it then predicts the other half (Charles et al. 2024, appendix
G.2). One learning rate serves all of them.

On a user's own device that is no business of anybody else, and of no privacy statement. But
the averages told here are exact figures of these users.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from tff_dpftrl import validation
from tff_dpftrl.data import sequences, sources, tables, user_text
from tff_dpftrl.runs import manifest
from tff_dpftrl.training import corpus, language_config, trained_model, warm_start

Part = Literal["held-out", "test"]
"""Users whom runs evaluate on, or those that they never touch (`data.split`)."""

TEXT_OPTIONS = (
    *("data", "pretokenized", "sqlite_text_feature", "sqlite_split"),
    *(field.name for field in dataclasses.fields(tables.TableOptions)),
)
"""Options of a run that say what its text is."""


@dataclasses.dataclass(frozen=True)
class PersonalisationConfig:
    """Options of personalisation: how the users train, and how many of them.

    Attributes:
      learning_rates: Learning rates of SGD; each is tried on all users.
      epochs: Passes over the first half of a user's examples, each in another order.
      min_examples: Smallest number of examples; users with fewer are left out.
      seed: Seed of the choice of users and of the order of their examples. The same users take part
        whatever the model is.
    """

    learning_rates: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3)
    epochs: int = 4
    batch_size: int = 8
    min_examples: int = 8
    max_users: int = 80
    seed: int = 0

    def __post_init__(self):
        rates = validation.numbers("learning_rates", self.learning_rates)
        for rate in rates:
            validation.learning_rate("learning_rates", rate)
        if not rates or len(set(rates)) < len(rates):
            raise validation.UsageError(
                f"learning_rates must be one or more different ones, got {rates}."
            )
        object.__setattr__(self, "learning_rates", rates)
        for name, minimum in (("epochs", 1), ("batch_size", 1), ("max_users", 1), ("seed", 0)):
            validation.integer(name, getattr(self, name), minimum=minimum)
        remedy = "One half is trained on, the other predicted."
        validation.integer("min_examples", self.min_examples, minimum=2, remedy=remedy)


class Mean(NamedTuple):
    """A mean over users, each of whom counts the same.

    Attributes:
      value: The mean; not finite if it is of a user for whom training diverged.
      standard_error: NaN if there is one user only.
    """

    value: float
    standard_error: float

    @classmethod
    def of(cls, values: np.ndarray) -> Mean:
        """Returns the mean of values, shape [users], of which NaN stands for no value."""
        values = values[~np.isnan(values)]
        mean = float(np.mean(values)) if len(values) else math.nan
        if len(values) < 2 or not math.isfinite(mean):
            return cls(mean, math.nan)
        return cls(mean, float(np.std(values, ddof=1)) / math.sqrt(len(values)))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Quality of the predictions for the second halves of the users' examples.

    Attributes:
      learning_rate: Learning rate of the users' training; None if they did not train.
      loss: Cross-entropy in nats per word; the end of an example and unknown words count.
      loss_gain: Decrease of the loss by the training; its standard error is that of the
        users' differences. None if there was no training.
      top1: Share of the words of the vocabulary that are guessed, over the users who have
        any.
      top1_gain: Increase of `top1` by the training; None if there was no training.
    """

    learning_rate: float | None
    loss: Mean
    top1: Mean
    loss_gain: Mean | None = None
    top1_gain: Mean | None = None

    def as_dict(self) -> dict[str, float | None]:
        """Returns all numbers by name, without NaN and infinity, which JSON does not have."""
        fields: dict[str, float | None] = {"learning_rate": self.learning_rate}
        for name in ("loss", "loss_gain", "top1", "top1_gain"):
            mean = getattr(self, name) or Mean(math.nan, math.nan)
            for key, value in ((name, mean.value), (f"{name}_se", mean.standard_error)):
                fields[key] = value if math.isfinite(value) else None
        return fields


@dataclasses.dataclass(frozen=True)
class Personalisation:
    """Results of a personalisation: exact figures.

    Attributes:
      num_users: Users who took part.
      num_too_few: Users who were looked at and had fewer examples than `min_examples`.
      before: With the model as it is.
      after: With the users' own models, for each learning rate.
    """

    num_users: int
    num_too_few: int
    before: Outcome
    after: tuple[Outcome, ...]

    @property
    def best(self) -> Outcome:
        """The outcome of the learning rate with the least mean loss over all users."""
        return min((one for one in self.after if _converged(one)), key=lambda one: one.loss.value)


def read(folder: str | pathlib.Path, given: Mapping[str, Any], part: Part) -> user_text.UserText:
    """Reads the text of users who did not train a model, without TensorFlow.

    `given` has some of `TEXT_OPTIONS`; without "data", the others are what the run in `folder` had.
    Users are chosen by a hash of their ids, as in runs. Text that is recorded to have trained the
    model is refused.
    """
    if part not in get_args(Part):
        raise validation.UsageError(
            f"users must be one of {', '.join(get_args(Part))}; got {part!r}."
        )
    folder, options, rows_per_owner = pathlib.Path(folder), dict(given), None
    if part == "test" and manifest.exists(folder):
        if manifest.read(folder).config.get("train_on_test_users"):
            raise validation.UsageError(
                f"The run in {folder} has trained on the test users (train_on_test_users): take "
                "users='held-out'."
            )
    if "data" not in given:
        if not manifest.exists(folder):
            raise validation.UsageError(
                f"{folder} is not the folder of a run, whose text could be read: name text with "
                "data."
            )
        known = language_config.begun(manifest.read(folder).config)
        options = {name: known[name] for name in TEXT_OPTIONS if name in known} | options
        rows_per_owner = known.get("rows_per_owner")
    config = language_config.TextConfig(**options)
    if part == "test" and not manifest.exists(folder):
        _refuse_trained_on(folder, config)
    parts = corpus.read_users(
        config.part(corpus.UserOptions),
        cache=folder / manifest.TEXTS_CACHE,
        may_write=False,
        rows_per_owner=rows_per_owner,
    )
    return parts.test if part == "test" else parts.validation


def _refuse_trained_on(folder: pathlib.Path, config: language_config.TextConfig) -> None:
    """Refuses a corpus of which `pretrain` has taken all users but the held-out ones."""
    known, data = warm_start.pretrained_on(folder), config.data
    table = config.part(tables.TableOptions)
    if known is not None and sources.share_texts(known, data, table):
        raise validation.UsageError(
            f"users 'test' of data {data!r} are among those whom the model in {folder} was trained "
            "on, by tff-dpftrl pretrain: take users 'held-out', or other text."
        )


def personalise(
    trained: trained_model.TrainedModel,
    text: user_text.UserText,
    config: PersonalisationConfig,
    *,
    on_user: Callable[[], None] = lambda: None,
) -> Personalisation:
    """Trains and measures for one user after the other; returns means over the users.

    An example is a text with a word in it, as long as the model's sequences; what is longer is cut
    off, as in fine-tuning. `on_user` is called whenever a user is done. It is an error if no user
    has enough examples, or training diverges at each learning rate.
    """
    spec = sequences.SequenceSpec(trained.model.sequence_length, split_long_texts=False)
    encoded = sequences.SequenceCorpus(text, trained.words, spec)
    users, num_too_few = _choose(encoded, config)
    from tff_dpftrl.models import local_training

    local = local_training.LocalTraining(trained.model, trained.weights, trained.special)
    before, after = [], {rate: [] for rate in config.learning_rates}
    for user in users:
        rows = encoded.sequences(user)
        own, others = rows[: len(rows) // 2], rows[len(rows) // 2 :]
        local.restart()
        before.append(local.measure(others))
        for rate, measured in after.items():
            local.restart()
            local.train(
                own,
                learning_rate=rate,
                num_epochs=config.epochs,
                batch_size=config.batch_size,
                rng=np.random.default_rng(_key(config.seed, user)),
            )
            measured.append(local.measure(others))
        on_user()
    first = _outcome(None, before)
    result = Personalisation(
        len(users),
        num_too_few,
        first,
        tuple(_outcome(rate, measured, before) for rate, measured in after.items()),
    )
    if not any(map(_converged, result.after)):
        raise validation.UsageError(
            f"Training diverged with each of learning_rates {config.learning_rates}: lower them."
        )
    return result


def _choose(
    encoded: sequences.SequenceCorpus, config: PersonalisationConfig
) -> tuple[list[str], int]:
    """Users in an order of their own; no more are looked at than needed."""
    chosen, num_too_few = [], 0
    for user in sorted(encoded.user_ids, key=lambda user: _key(config.seed, user)):
        if len(chosen) == config.max_users:
            break
        if len(encoded.sequences(user)) >= config.min_examples:
            chosen.append(user)
        else:
            num_too_few += 1
    if not chosen:
        raise validation.UsageError(
            f"data {encoded.corpus.name!r} has {len(encoded.user_ids)} such users, none of whom "
            f"has min_examples = {config.min_examples} examples with a word: lower it or use more "
            "text."
        )
    return chosen, num_too_few


def _key(seed: int, user_id: str) -> int:
    """Depends on the user and the seed only."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{user_id}".encode()).digest()[:16], "big")


def _outcome(
    rate: float | None, measured: Sequence[Any], before: Sequence[Any] | None = None
) -> Outcome:
    losses, top1s = np.array(measured, np.float64).T
    # A user whose model diverged must not be left out of a mean.
    losses = np.where(np.isnan(losses), math.inf, losses)
    if before is None:
        return Outcome(rate, Mean.of(losses), Mean.of(top1s))
    first_losses, first_top1s = np.array(before, np.float64).T
    gains = Mean.of(first_losses - losses), Mean.of(top1s - first_top1s)
    return Outcome(rate, Mean.of(losses), Mean.of(top1s), *gains)


def _converged(one: Outcome) -> bool:
    return math.isfinite(one.loss.value)
