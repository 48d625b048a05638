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

    The fields are those of `config.TrainingConfig`, whose help says what they mean.
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
