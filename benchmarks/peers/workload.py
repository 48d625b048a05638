"""What all contenders of a benchmark compute: data, first weights, and how they train.

NumPy only, so that it can be read in the environment of every peer.
"""

from __future__ import annotations

import dataclasses
import json

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
