"""How clients and the server learn from a round, and what draws its noise; no TensorFlow."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tff_dpftrl.mechanisms import workload as workload_lib

ServerOptimizer = Literal["sgd", "momentum", "adam"]
NoiseGenerator = Literal["philox", "secure"]
Decay = Literal["none", "linear", "cosine"]


@dataclasses.dataclass(frozen=True)
class LearningOptions:
    """Optimizers, their schedule, the adaptation of a learned clip norm, and the noise's generator.

    Attributes:
      num_rounds: Number of rounds, over which the server's learning rate decays.
      client_learning_rate: Learning rate of the clients' SGD.
      server_optimizer: Optimizer of the server.
      server_learning_rate: Learning rate of the server's optimizer.
      server_momentum: Momentum of the optimizer 'momentum'.
      server_adam_epsilon: Term that the optimizer 'adam' adds to the root of its second moment.
      server_warmup_rounds: Rounds over which the server's learning rate grows to its full value.
      server_decay: How the server's learning rate falls to zero over the rounds.
      server_restarts: Rounds in which the state of the server's optimizer restarts.
      iterate_averaging: Decay of the average of the rounds' models; None for no average.
      target_unclipped_quantile: Share of clients that adaptive clipping leaves unclipped.
      clip_learning_rate: Step of the logarithm of the adaptive clip norm.
      clipped_count_stddev: Standard deviation of the noise on a round's number of unclipped
        clients; None for a twentieth of the cohort.
      noise: Generator of the noise.
    """

    num_rounds: int
    client_learning_rate: float
    server_optimizer: ServerOptimizer
    server_learning_rate: float
    server_momentum: float
    server_adam_epsilon: float
    server_warmup_rounds: int
    server_decay: Decay
    server_restarts: tuple[int, ...]
    iterate_averaging: float | None
    target_unclipped_quantile: float
    clip_learning_rate: float
    clipped_count_stddev: float | None
    noise: NoiseGenerator

    @property
    def update_rule(self) -> workload_lib.UpdateRule:
        """Rule by which the server's optimizer makes models of the released sums."""
        from tff_dpftrl.mechanisms import workload as workload_lib

        # The server's Adam has β₁ = 0.9, whatever server_momentum says.
        momentum = {"sgd": 0.0, "momentum": self.server_momentum, "adam": 0.9}
        return workload_lib.UpdateRule(
            momentum=momentum[self.server_optimizer],
            adam=self.server_optimizer == "adam",
            warmup_rounds=self.server_warmup_rounds,
            decay=self.server_decay,
            averaging=self.iterate_averaging,
            restarts=self.server_restarts,
        )
