"""The server's optimizer follows its schedule, its restarts and its average."""

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl.training import config as config_lib
from tff_dpftrl.training import optimizers


def _config(**changes):
    values = {"num_rounds": 8, "clients_per_round": 5, "noise_multiplier": 1.0} | changes
    return config_lib.TrainingConfig.of(**values)


def _rates(**options):
    """What the server's SGD makes of a unit update in every round."""
    optimizer = optimizers.build_server_optimizer(
        _config(server_optimizer="sgd", server_learning_rate=2.0, **options).rules
    )
    state, steps = optimizer.initialize(tf.TensorSpec([])), []
    for _ in range(8):
        state, weights = optimizer.next(state, tf.zeros([]), tf.ones([]))
        steps.append(-float(weights))
    return steps


def test_the_servers_learning_rate_follows_its_schedule():
    rounds = np.arange(8)
    warm = np.minimum(1.0, (rounds + 1) / 4)
    np.testing.assert_allclose(_rates(), 2.0)
    np.testing.assert_allclose(_rates(server_decay="linear"), 2 * (1 - rounds / 8))
    np.testing.assert_allclose(
        _rates(server_decay="cosine", server_warmup_rounds=3),
        2 * warm * np.cos(np.pi * rounds / 16) ** 2,
        rtol=1e-5,
    )
    np.testing.assert_allclose(_rates(server_warmup_rounds=3), 2 * warm)


def test_momentum_restarts_with_the_noise():
    restarting = {"adaptive_clipping": True, "restart_warmup": 3, "restart_every": 4}
    optimizer = optimizers.build_server_optimizer(
        config_lib.TrainingConfig.of(
            noise_multiplier=1.0, num_rounds=8, restart_optimizer=True, **restarting
        ).rules
    )
    state, weights, moves = optimizer.initialize(tf.TensorSpec([])), tf.zeros([]), []
    for _ in range(8):
        state, moved = optimizer.next(state, weights, tf.ones([]))
        moves.append(float(weights - moved))
        weights = moved
    grown = [1.0, 1.9, 2.71, 3.439]
    np.testing.assert_allclose(moves, [*grown[:3], *grown, 1.0], rtol=1e-5)
    # The schedule goes on where the momentum begins anew.
    scheduled = optimizers.build_server_optimizer(
        config_lib.TrainingConfig.of(
            noise_multiplier=1.0,
            num_rounds=8,
            restart_optimizer=True,
            server_decay="linear",
            iterate_averaging=0.5,
            **restarting,
        ).rules
    )
    state, weights, moves = scheduled.initialize(tf.TensorSpec([])), tf.zeros([]), []
    for _ in range(8):
        state, moved = scheduled.next(state, weights, tf.ones([]))
        moves.append(float(weights - moved))
        weights = moved
    rates = 1 - np.arange(8) / 8
    np.testing.assert_allclose(moves, rates * [*grown[:3], *grown, 1.0], rtol=1e-5)
    with pytest.raises(
        ValueError,
        match="restart_optimizer has no meaning with algorithm 'dp-ftrl', but with adaptive",
    ):
        config_lib.TrainingConfig.of(noise_multiplier=1.0, restart_optimizer=True)


@pytest.mark.parametrize(
    "options",
    [
        {"server_optimizer": "sgd", "server_decay": "linear", "server_warmup_rounds": 3},
        {"server_momentum": 0.8},
        {"server_momentum": 0.9, "server_decay": "cosine", "server_warmup_rounds": 4},
        {"iterate_averaging": 0.8},
        {"adaptive_clipping": True, "restart_warmup": 5, "restart_optimizer": True},
        {"server_optimizer": "adam", "server_decay": "cosine", "server_adam_epsilon": 1e6},
    ],
)
def test_a_workload_is_what_the_server_makes_of_impulses(options):
    size = 16
    config = _config(num_rounds=size, workload="auto", **options)
    optimizer = optimizers.build_server_optimizer(config.rules)
    weights = tf.zeros(size)
    state = optimizer.initialize(tf.TensorSpec([size]))
    rows, moved = [], np.zeros(size)
    for step, impulse in enumerate(np.eye(size, dtype=np.float32)):
        state, new = optimizer.next(state, weights, tf.constant(impulse))
        change = weights.numpy() - new.numpy().astype(np.float64)
        if config.learning.server_optimizer == "adam":
            # With a large epsilon the preconditioner is constant, but for Adam's √(1 − β₂^t).
            change *= 1e6 / np.sqrt(1 - 0.999 ** (step + 1))
        moved = moved + change
        weights = new
        averaged = config.learning.iterate_averaging is not None
        rows.append(-state["average"].numpy() if averaged else moved)
    found = config.request().options.workload
    np.testing.assert_allclose(np.array(rows), found.matrix(), rtol=1e-3, atol=1e-5)
