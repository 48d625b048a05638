"""Options of rounds: their number and size, the clients' work, and how clients and server learn."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

from tff_dpftrl import validation
from tff_dpftrl.training import composed
from tff_dpftrl.training.composed import option

if TYPE_CHECKING:
    from tff_dpftrl.mechanisms import workload as workload_lib

ServerOptimizer = Literal["sgd", "momentum", "adam"]
NoiseGenerator = Literal["philox", "secure"]
Decay = Literal["none", "linear", "cosine"]

_RATES = ("client_learning_rate", "server_adam_epsilon", "server_learning_rate")


@dataclasses.dataclass(frozen=True)
class Seeded(composed.Options):
    """The public seed of a run."""

    seed: int = option(
        0,
        "Public seed of the shuffling, the initial model and dp-ftrl's cohorts. It is not the "
        "seed of noise or of sampled cohorts: those seeds are secret.",
        "run",
    )


@dataclasses.dataclass(frozen=True)
class BatchOptions(composed.Options):
    """Rows of a client in a round."""

    batch_size: int = option(8, "Sequences in a client's batch.", "data", 1)
    max_sequences_per_client: int = option(
        64, "Largest number of sequences of one client that are used in a round.", "data", 1
    )
    client_epochs: int = option(
        1, "Number of passes of a client over its sequences in a round.", "federated learning", 1
    )


@dataclasses.dataclass(frozen=True)
class RoundOptions(composed.Options):
    """Number and size of the rounds."""

    num_rounds: int = option(100, "Number of rounds of training.", "federated learning", 1)
    clients_per_round: int = option(
        20, "Number of clients in a round's cohort (the report goal).", "federated learning", 1
    )


@dataclasses.dataclass(frozen=True)
class LearningOptions(RoundOptions):
    """The same, optimizers of clients and server, and the schedule of the server's rate."""

    client_learning_rate: float = option(
        1.0, "Learning rate of the clients' SGD.", "federated learning", 0.0
    )
    server_optimizer: ServerOptimizer = option(
        "momentum", "Optimizer of the server: sgd, momentum or adam.", "federated learning"
    )
    server_learning_rate: float = option(
        1.0, "Learning rate of the server's optimizer.", "federated learning", 0.0
    )
    server_momentum: float = option(
        0.9, "Momentum of the server's optimizer 'momentum'.", "federated learning", 0.0
    )
    server_adam_epsilon: float = option(
        1e-7,
        "Term that the server's optimizer 'adam' adds to the root of its second moment. Steps are "
        "normalised where updates are larger than this term.",
        "federated learning",
        0.0,
    )
    server_warmup_rounds: int = option(
        0,
        "Rounds over which the server's learning rate grows to its full value.",
        "federated learning",
        0,
    )
    server_decay: Decay = option(
        "none",
        "How the server's learning rate falls to zero over the rounds: none, linear or cosine.",
        "federated learning",
    )
    iterate_averaging: float | None = option(
        None,
        "Decay of the exponential moving average of the rounds' models, which is evaluated and "
        "kept in place of the last model; 0.95 averages some 20 rounds. It costs no privacy. "
        "Default: no average.",
        "federated learning",
        0.0,
    )

    def __post_init__(self):
        super().__post_init__()
        for name in _RATES:
            validation.learning_rate(name, getattr(self, name))
        validation.number("server_momentum", self.server_momentum, below=1)
        if self.iterate_averaging is not None:
            validation.number("iterate_averaging", self.iterate_averaging, above=0, below=1)
        if self.server_warmup_rounds >= self.num_rounds:
            raise validation.UsageError(
                f"server_warmup_rounds must be below num_rounds={self.num_rounds}, got "
                f"{self.server_warmup_rounds}."
            )

    def update_rule(self, restarts: tuple[int, ...] = ()) -> workload_lib.UpdateRule:
        """Returns the rule by which the server's optimizer makes models of the released sums."""
        from tff_dpftrl.mechanisms import workload as workload_lib

        # The server's Adam has β₁ = 0.9, whatever server_momentum says.
        momentum = {"sgd": 0.0, "momentum": self.server_momentum, "adam": 0.9}
        return workload_lib.UpdateRule(
            momentum=momentum[self.server_optimizer],
            adam=self.server_optimizer == "adam",
            warmup_rounds=self.server_warmup_rounds,
            decay=self.server_decay,
            averaging=self.iterate_averaging,
            restarts=restarts,
        )
