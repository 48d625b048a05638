"""A model of a few words in a folder like that of a run, without training."""

import pathlib
from collections.abc import Sequence

import numpy as np

from tff_dpftrl.data import vocabulary
from tff_dpftrl.models import export, language_model, word_lstm
from tff_dpftrl.training import trained_model

WORDS = vocabulary.Vocabulary(("the", "front", "end", "isn't", "3.5", ".", "ß"), "a book")
MODEL = word_lstm.WordLstm(WORDS.size, sequence_length=4, embedding_size=3, state_size=5)


def weights(seed: int = 0) -> tuple[np.ndarray, ...]:
    """Weights that are large enough for predictions to differ."""
    rng = np.random.default_rng(seed)
    return tuple(rng.normal(size=s).astype(np.float32) for s in MODEL.weight_shapes.values())


def write(
    folder: pathlib.Path,
    *,
    words: vocabulary.Vocabulary = WORDS,
    model: language_model.LanguageModel | None = None,
    is_tokenized: bool = False,
    last: Sequence[np.ndarray] | None = None,
    best: Sequence[np.ndarray] | None = None,
) -> pathlib.Path:
    """Writes model.npz, best_model.npz if it is given, and vocabulary.json."""
    folder.mkdir(parents=True, exist_ok=True)
    model = MODEL if model is None else model
    export.write(folder / "model.npz", model, weights() if last is None else last)
    if best is not None:
        export.write(folder / "best_model.npz", model, best)
    trained_model.write_vocabulary(folder, words, is_tokenized)
    return folder
