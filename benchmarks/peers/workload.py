"""What all contenders of a benchmark compute: data, weights, and what they do with them.

NumPy only, so that it can be read in the environment of every peer.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Workload:
    """Rounds of federated averaging with clipped updates and Gaussian noise.

    The model is `tff_dpftrl.models.word_lstm.WordLstm`. Its last three ids are those of
    words out of the vocabulary, of the beginning and of the end of a sequence; 0 is padding.

    Attributes:
      cohorts: For each round and each of its clients the client's sequences, int32, shape
        [n, sequence_length + 1].
      weights: The model's first weights, float32, in the order of `weight_shapes`.
      vocabulary_size: Number of ids.
      sequence_length: Number of words in a training sequence.
      embedding_size: Width of the embedding.
      state_size: Width of the LSTM's state.
      tie_embeddings: Whether input and output share one embedding.
      seed: Seed of `weights` and of the noise.
      batch_size: Sequences in a client's batch.
      client_learning_rate: Of the clients' SGD, which makes one pass over its sequences.
      clip_norm: L2 norm that a client's update is clipped to.
      noise_multiplier: Standard deviation of the noise in the sum, per unit of clip norm.
      server_learning_rate: Of the server's SGD on the mean update.
      server_momentum: Of the same.
    """

    cohorts: list[list[np.ndarray]]
    weights: list[np.ndarray]
    vocabulary_size: int
    sequence_length: int
    embedding_size: int
    state_size: int
    tie_embeddings: bool = True
    seed: int = 0
    batch_size: int = 8
    client_learning_rate: float = 1.0
    clip_norm: float = 0.5
    noise_multiplier: float = 0.6
    server_learning_rate: float = 1.0
    server_momentum: float = 0.9

    def save(self, path: str) -> None:
        """Writes it to a file, `.npz`."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        cohorts, weights = fields.pop("cohorts"), fields.pop("weights")
        np.savez(
            path,
            rows=np.concatenate([rows for cohort in cohorts for rows in cohort]),
            num_rows=np.array([[len(rows) for rows in cohort] for cohort in cohorts]),
            numbers=json.dumps(fields),
            **{f"weight_{i}": weight for i, weight in enumerate(weights)},
        )


def load(path: str) -> Workload:
    """Reads what `Workload.save` wrote."""
    file = np.load(path)
    num_rows = file["num_rows"]
    clients = np.split(file["rows"], np.cumsum(num_rows)[:-1])
    size = num_rows.shape[1]
    return Workload(
        cohorts=[clients[i : i + size] for i in range(0, len(clients), size)],
        weights=[file[f"weight_{i}"] for i in range(sum("weight_" in n for n in file.files))],
        **json.loads(str(file["numbers"])),
    )


@dataclasses.dataclass(frozen=True)
class Gradients:
    """A sum of clipped gradients, one for each row, or the plain gradient of the mean loss.

    The loss of a row is the mean cross-entropy of its words but the first. There is no padding.

    Attributes:
      model: "transformer" or "word-lstm", as `tff_dpftrl_gradients.py` has them.
      sizes: Arguments of the model.
      rows: Ids, int32, shape [n, sequence_length + 1].
      weights: By name, float32.
      clip_norm: L2 norm that the gradient of a row is clipped to.
      is_large: Whether ways that form the gradients of many rows, or in float64, are left out.
    """

    model: str
    sizes: dict[str, Any]
    rows: np.ndarray
    weights: dict[str, np.ndarray]
    clip_norm: float
    is_large: bool = False

    def save(self, path: str) -> None:
        """Writes it to a file, `.npz`."""
        names = ("model", "sizes", "clip_norm", "is_large")
        numbers = {name: getattr(self, name) for name in names}
        weights = {f"weight_{name}": weight for name, weight in self.weights.items()}
        np.savez(path, rows=self.rows, numbers=json.dumps(numbers), **weights)


def load_gradients(path: str) -> Gradients:
    """Reads what `Gradients.save` wrote."""
    file = np.load(path)
    names = [name for name in file.files if name.startswith("weight_")]
    return Gradients(
        rows=file["rows"],
        weights={name.removeprefix("weight_"): file[name] for name in names},
        **json.loads(str(file["numbers"])),
    )


PRODUCTS = ((4096, 128, 4096), (1024, 1024, 1024))
"""Sizes of matrix products by which frameworks are compared: rows, inner, columns."""


def product_speeds(
    convert: Callable[[np.ndarray], Any], multiply: Callable[[Any, Any], Any]
) -> list[float]:
    """Measures the best speed of each of `PRODUCTS`, in GFLOP for a second of one core.

    Args:
      convert: From a matrix to one of the framework.
      multiply: Multiplies two of these, and waits for the product.

    Returns:
      One speed for each.
    """
    speeds = []
    for rows, inner, columns in PRODUCTS:
        rng = np.random.default_rng(0)
        sizes = (rows, inner), (inner, columns)
        factors = [convert(rng.standard_normal(size).astype(np.float32)) for size in sizes]
        seconds = []
        for _ in range(30):
            start = time.process_time()
            multiply(*factors)
            seconds.append(time.process_time() - start)
        speeds.append(round(2e-9 * rows * inner * columns / min(seconds), 1))
    return speeds
