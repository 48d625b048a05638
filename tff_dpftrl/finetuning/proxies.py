"""Gradients of public text at the pretrained weights, which choices cost no privacy to look at."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tff_dpftrl import validation
from tff_dpftrl.data import docstrings, sequences, sources, tables, user_text
from tff_dpftrl.finetuning import clipped_sums, example_sampling, group_size
from tff_dpftrl.models import language_model
from tff_dpftrl.training import pretraining

if TYPE_CHECKING:
    from tff_dpftrl.training import trained_model

_USERS_AT_ONCE = 32
_LARGEST_CLIP_NORM = 1e6  # Nothing is clipped: norms are all that is wanted.


@dataclasses.dataclass(frozen=True)
class Proxies:
    """Norms L(G) of public users' gradients, with the source of their text for statements."""

    gradient_norms: group_size.GradientNorms
    num_users: int
    source: str


def read(
    name: str,
    *,
    is_tokenized: bool,
    protected: str,
    table: tables.TableOptions | None = None,
    users: Sequence[user_text.UserText] = (),
) -> tuple[user_text.UserText, str]:
    """Reads public text by user; returns it with what statements call it.

    `name` is "standard-library", or a file of texts by user; the texts of a tokenized file are
    words separated by white space. `protected` is the corpus of the run, read by the options of
    `table`; `users` are those of it who are read already, perhaps from no file. Public text that
    the run protects is refused.
    """
    if name == pretraining.STANDARD_LIBRARY:
        return docstrings.read_standard_library(), "docstrings of Python's standard library"
    if sources.share_texts(name, protected, table or tables.TableOptions(), users=users):
        raise validation.UsageError(
            f"proxy_data {name!r} is the file of the users to be protected, {protected!r}, a "
            "copy of it, or has texts of theirs, and cannot be public: name other text."
        )
    text = sources.load_user_text(name, pretokenized=is_tokenized)
    return text, f"{pathlib.PurePath(name).name}, declared public by the operator"


def of_model(
    trained: trained_model.TrainedModel,
    name: str = pretraining.STANDARD_LIBRARY,
    *,
    protected: str,
    largest_group: int,
    is_tokenized: bool = False,
    seed: int = 0,
    table: tables.TableOptions | None = None,
    users: Sequence[user_text.UserText] = (),
) -> Proxies:
    """Reads public text and measures a pretrained model's gradients on it: `read`, `measure`."""
    text, source = read(
        name, is_tokenized=is_tokenized, protected=protected, table=table, users=users
    )
    spec = sequence_spec(trained.model)
    return measure(
        sequences.SequenceCorpus(text, trained.words, spec),
        trained.model,
        trained.weights,
        largest_group=largest_group,
        seed=seed,
        source=source,
    )


def sequence_spec(model: language_model.LanguageModel) -> sequences.SequenceSpec:
    """Returns the encoding of text: an example is what its user counts as one, of any length."""
    return sequences.SequenceSpec(model.sequence_length, split_long_texts=False)


def measure(
    corpus: sequences.SequenceCorpus,
    model: language_model.LanguageModel,
    weights: Sequence[np.ndarray],
    *,
    largest_group: int,
    seed: int,
    source: str,
) -> Proxies:
    """Measures the norm of mean gradients of up to 1, 2, 4, … examples of a user.

    The text is encoded as what is fine-tuned on. The last group size that is measured is the power
    of two that is not below `largest_group`. `source` is the text's name in statements. The norms
    are medians over at most 128 users.
    """
    ids = [user for user in corpus.user_ids if len(corpus.sequences(user))]
    if not ids:
        raise validation.UsageError(
            "proxy_data has no user with a word of the vocabulary: name other text."
        )
    users = example_sampling.Users(tuple(ids), np.array([len(corpus.sequences(u)) for u in ids]))
    sizes = [2**i for i in range((largest_group - 1).bit_length() + 1)]
    chosen, orders = group_size.probe(users, largest_group=sizes[-1], seed=seed)
    clipped_sum = clipped_sums.looped(clipped_sums.language_rows(model))
    whole = clipped_sums.sum_in_chunks(clipped_sum, units_per_chunk=_USERS_AT_ONCE)
    columns = []
    for size in sizes:
        rows = [
            corpus.sequences(ids[user])[order[:size]]
            for user, order in zip(chosen.tolist(), orders, strict=True)
        ]
        pool, splits = np.concatenate(rows), np.cumsum([0, *map(len, rows)])
        columns.append(
            whole(
                weights,
                lambda begin, end, pool=pool: (pool[begin:end, :-1], pool[begin:end, 1:]),
                splits,
                _LARGEST_CLIP_NORM,
            )[1].norms
        )
    norms = group_size.GradientNorms.of_users(sizes, np.stack(columns, axis=1))
    return Proxies(norms, len(chosen), source)
