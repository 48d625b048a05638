"""The weights that a run begins with, from a model that was trained before."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tff_dpftrl import json_text, validation
from tff_dpftrl.accounting import composition
from tff_dpftrl.data import sources, subwords, tables, text_digests, user_text, vocabulary
from tff_dpftrl.models import hugging_face
from tff_dpftrl.runs import earlier_runs
from tff_dpftrl.training import trained_model

if TYPE_CHECKING:
    from tff_dpftrl.models import language_model

RECORD = "pretraining.json"
"""Name of the file that says what a pretrained model was trained on."""

NEAR_DUPLICATES = "near_duplicates"
"""Entry of the record for texts that were left out because of protected ones."""

DIGESTS = "text_digests.npz"
"""Name of the file by which the text of pretraining is recognised where it is gone."""


@dataclasses.dataclass(frozen=True, eq=False)
class InitialWeights:
    """Weights to begin with.

    Attributes:
      source: Source of the weights, for the privacy statement.
      is_public: Whether the weights are recorded to be of public text alone, chosen without a look
        at other text.
      num_known_words: Number of words of the vocabulary that the earlier model knew.
      runs: Runs that the weights come from, with what they have spent: the last one first.
    """

    weights: tuple[np.ndarray, ...]
    source: str
    is_public: bool
    num_known_words: int
    runs: tuple[composition.Spent, ...] = ()


def find(folder: str | pathlib.Path) -> trained_model.TrainedFiles:
    """Finds the model of a folder, without TensorFlow; an error names the option."""
    try:
        return trained_model.find(pathlib.Path(folder).expanduser())
    except ValueError as error:
        raise validation.UsageError(f"initial_weights cannot be read. {error}") from error


def run_folder(folder: pathlib.Path) -> pathlib.Path:
    """Returns the folder of the run whose weights are in a folder inside of it; else the same."""
    folder = folder.expanduser()
    parent = folder.absolute().parent
    is_inside = folder.name == hugging_face.FOLDER and earlier_runs.is_run(parent)
    return parent if is_inside else folder


def source(folder: pathlib.Path, trained_on: str | None = None) -> tuple[str, bool]:
    """Returns a statement's words on a folder's weights, and whether they are of public text alone.

    They are not if text was left out by looking at other people's. The operator may declare the
    public text that they were trained on, unless it is recorded in the folder.
    """
    folder = run_folder(folder)
    name, record = folder.name, folder / RECORD
    is_run = earlier_runs.is_run(folder)
    if trained_on is not None and (is_run or record.exists()):
        raise validation.UsageError(
            f"trained_on is for weights of which it is not recorded, and {folder} has a record of "
            "it: leave it out."
        )
    if is_run:  # Whatever was pretrained there before.
        text = (
            f"the model of the training run {name!r}, whose own statement says what it may tell of "
            "its users; who is a user of both runs is not covered by either statement alone"
        )
        return text, False
    if record.exists():
        try:
            known = _record(folder)
            trained_on = known["source"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise validation.UsageError(
                f"{record} cannot be read: {error}. Restore it, or pretrain anew."
            ) from error
        return f"the model {name!r}, trained on {trained_on}", NEAR_DUPLICATES not in known
    if trained_on is not None:
        return f"the model {name!r}, trained on {trained_on}, declared public by the operator", True
    return f"the model {name!r}, of which is not recorded what it was trained on", False


def words_of(
    words: vocabulary.Vocabulary, source: str, is_public: bool
) -> tuple[vocabulary.Vocabulary, list[str]]:
    """Returns words that came with initial weights, whose tokenizer nobody has declared public.

    They have a source for the statement; what it does not cover is returned beside them. `source`
    is that of the weights.
    """
    if is_public or not isinstance(words, subwords.Subwords) or words.kind != "checkpoint":
        return words, []
    said = f"{subwords.NAME} of {source}"
    not_covered = [f"Text that the tokenizer was learned on: not recorded; it is that of {source}."]
    return dataclasses.replace(words, source=said), not_covered


def pretrained_on(folder: pathlib.Path) -> str | None:
    """Returns the name of the corpus of a folder of `pretrain`; None if it is not recorded."""
    try:
        data = _record(folder)["pretraining"]["data"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return data if isinstance(data, str) else None


def _record(folder: pathlib.Path) -> Any:
    return json_text.parse((folder.expanduser() / RECORD).read_text(encoding="utf-8"))


def refuse_protected(
    folder: pathlib.Path,
    protected: str,
    table: tables.TableOptions | None = None,
    users: Sequence[user_text.UserText] = (),
) -> None:
    """Refuses weights that were pretrained on the text that the run protects.

    Users of that corpus who are read already are perhaps in no file.
    """
    table = table or tables.TableOptions()
    data = pretrained_on(folder)  # None of something else, which `source` has words for.
    if data is None:
        return
    if NEAR_DUPLICATES in _record(folder):  # The file has more than was trained on.
        is_protected = sources.are_same_file(data, protected)
    else:
        is_protected = sources.share_texts(data, protected, table, users=users)
    if is_protected or _has_digests_of(folder.expanduser(), protected, table, users):
        raise validation.UsageError(
            f"initial_weights {folder} were pretrained on {data!r}, the very text that this run "
            "protects, a copy of it, or text of its users: pretrain on public text."
        )


def _has_digests_of(
    folder: pathlib.Path,
    protected: str,
    table: tables.TableOptions,
    users: Sequence[user_text.UserText],
) -> bool:
    """Returns whether the digests of pretraining, whose text may be gone, are of protected text."""
    if not (folder / DIGESTS).exists():
        return False
    digests = text_digests.TextDigests.load(folder / DIGESTS)
    return any(map(digests.shared_users, sources.parts_of(protected, table, users)))


def read(
    folder: pathlib.Path,
    model: language_model.LanguageModel,
    words: vocabulary.Vocabulary,
    seed: int,
    *,
    protected: str,
    table: tables.TableOptions | None = None,
    users: Sequence[user_text.UserText] = (),
) -> InitialWeights:
    """Reads weights for a model, and maps what belongs to words by word.

    Only the vocabulary, and a sequence length that decides no shape, may be another than the
    model's. Words that the earlier model did not know begin at random, and as its unknown word if
    they were counted with noise. Weights that were pretrained on what is to be protected are
    refused.
    """
    refuse_protected(folder, protected, table, users)
    earlier = find(folder).load()
    sizes = {
        "vocabulary_size": model.vocabulary_size,
        "sequence_length": model.sequence_length,
    }
    resized = dataclasses.replace(earlier.model, **sizes)
    if resized != model:
        raise validation.UsageError(
            f"initial_weights {folder} are of another model, {earlier.model}, than the run's, "
            f"{model}: give the run the same model and sizes, or pretrain with the run's --config."
        )
    # A longer vocabulary shows along which axis a weight belongs to words.
    longer = dataclasses.replace(model, vocabulary_size=model.vocabulary_size + 1).weight_shapes
    there, here = _ids(earlier.words, words)
    new = np.setdiff1d(np.arange(1, len(words.words) + 1), here)
    weights = []
    for (name, shape), fresh, old in zip(
        model.weight_shapes.items(), model.initial_weights(seed), earlier.weights, strict=True
    ):
        axes = [axis for axis, size in enumerate(shape) if longer[name][axis] != size]
        if not axes:
            if old.shape != shape:
                raise validation.UsageError(
                    f"initial_weights {folder} has {name} of shape {old.shape}, the run's model of "
                    f"{shape}: give the run sequence_length {earlier.model.sequence_length}."
                )
            weights.append(old)
            continue
        (axis,) = axes
        mapped = fresh.swapaxes(0, axis).copy()
        # Some tables have no row for padding, the first id.
        first = model.vocabulary_size - shape[axis]
        rows = [pair for pair in zip(here, there, strict=True) if min(pair) >= first]
        to, of = np.array(rows).T - first
        mapped[to] = old.swapaxes(0, axis)[of]
        if words.is_noised and earlier.words.oov is not None:
            unknown = old.swapaxes(0, axis)[earlier.words.oov - first]
            _as_unknown(mapped, unknown, new - first)
        weights.append(mapped.swapaxes(0, axis))
    num_special = words.size - len(words.words)
    runs = earlier_runs.chain_of(run_folder(folder))
    return InitialWeights(tuple(weights), *source(folder), len(here) - num_special, runs)


def _as_unknown(mapped: np.ndarray, unknown: np.ndarray, places: np.ndarray) -> None:
    """Lets new words begin as the unknown word was, all together as likely as it stays.

    The weights belong to words, words first, and are changed in place.
    """
    mapped[places] = unknown
    if mapped.ndim == 1:  # The bias of the words' scores, which are logarithms.
        mapped[places] -= math.log(max(1, len(places)))


def _ids(
    earlier: vocabulary.Vocabulary, words: vocabulary.Vocabulary
) -> tuple[list[int], list[int]]:
    """Ids of the same words, and of the special tokens, in both vocabularies."""
    known = earlier.id_of
    pairs = [(known[word], i) for word, i in words.id_of.items() if word in known]
    pairs += [(vocabulary.PAD, vocabulary.PAD)]
    special = [(getattr(earlier, name), getattr(words, name)) for name in ("oov", "bos", "eos")]
    pairs += [pair for pair in special if None not in pair and pair not in pairs]
    there, here = zip(*pairs, strict=True)
    return list(there), list(here)
