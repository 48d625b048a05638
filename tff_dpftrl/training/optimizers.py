"""The optimizer of a run's server."""

from __future__ import annotations

import functools
import math

import tensorflow as tf

from tff_dpftrl.learning import iterate_averaging, optimizer_restarts
from tff_dpftrl.learning import optimizers as optimizers_lib
from tff_dpftrl.training import learning_options, noise_options


def build_server_optimizer(
    rules: noise_options.RoundRules,
) -> optimizers_lib.Optimizer:
    """Builds the server's optimizer, which only post-processes what was noised."""
    options = rules.learning
    rate = options.server_learning_rate
    match options.server_optimizer:
        case "adam":
            optimizer = optimizers_lib.adam(rate, options.server_adam_epsilon)
        case "momentum":
            optimizer = optimizers_lib.sgdm(rate, options.server_momentum)
        case "sgd":
            optimizer = optimizers_lib.sgdm(rate)
    if rules.server_restarts:
        optimizer = optimizer_restarts.restart_at(optimizer, rules.server_restarts)
    if options.server_warmup_rounds or options.server_decay != "none":
        optimizer = optimizers_lib.scheduled(optimizer, functools.partial(_scheduled_rate, options))
    if options.iterate_averaging is not None:
        optimizer = iterate_averaging.average_iterates(optimizer, options.iterate_averaging)
    return optimizer


def _scheduled_rate(options: learning_options.LearningOptions, round_index: tf.Tensor) -> tf.Tensor:
    """Returns the server's learning rate in a round: a linear warm-up times a decay to zero."""
    now = tf.cast(round_index, tf.float32)
    rate = tf.constant(options.server_learning_rate, tf.float32)
    if options.server_warmup_rounds:
        rate *= tf.minimum(1.0, (now + 1.0) / (options.server_warmup_rounds + 1.0))
    done = now / options.num_rounds
    match options.server_decay:
        case "linear":
            rate *= 1.0 - done
        case "cosine":
            rate *= 0.5 * (1.0 + tf.cos(math.pi * done))
    return rate
