"""A model of a few words in a folder like that of a run, without training."""

import pathlib
from typing import Any

import numpy as np

from tff_dpftrl.data import vocabulary
from tff_dpftrl.models import export, word_lstm
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
    is_tokenized: bool = False,
    **models: Any,
) -> pathlib.Path:
    """Writes model.npz, or the models given by name, and vocabulary.json."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, found in (models or {"model": weights()}).items():
        export.write(folder / f"{name}.npz", MODEL, found)
    trained_model.write_vocabulary(folder, words, is_tokenized)
    return folder
