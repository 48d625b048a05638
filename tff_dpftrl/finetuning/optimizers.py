"""Optimizers of the noised gradient. They only post-process what was noised."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import tensorflow as tf

from tff_dpftrl import validation

if TYPE_CHECKING:
    from tff_dpftrl.finetuning import config as config_lib

_WARMUP = 10


def build(config: config_lib.FinetuningConfig) -> tf.keras.optimizers.Optimizer:
    """Builds the optimizer of a run, with the learning rate of step 0.

    Args:
      config: Options of the run.

    Returns:
      The optimizer; its learning rate is to be assigned before each step.
    """
    optimizers, rate = tf.keras.optimizers, learning_rate(config, 0)
    moments = {"beta_1": config.momentum, "beta_2": config.second_moment_decay}
    match config.optimizer:
        case "sgd":
            return optimizers.SGD(rate)
        case "momentum":
            return optimizers.SGD(rate, momentum=config.momentum)
        case "adam":
            return optimizers.Adam(rate, **moments)
        case "adamw":
            return optimizers.AdamW(rate, weight_decay=config.weight_decay, **moments)
        case "adafactor":
            return optimizers.Adafactor(rate, relative_step=False)
    raise validation.UsageError(f"optimizer must be one of Optimizer, got {config.optimizer!r}.")


def learning_rate(config: config_lib.FinetuningConfig, step: int) -> float:
    """The learning rate of a step: a linear warm-up times a decay to zero.

    Args:
      config: Options of the run.
      step: The step, from 0.

    Returns:
      The rate.
    """
    warmup = config.warmup_steps
    if warmup is None:
        warmup = min(_WARMUP, config.num_steps // 10)
    rate = config.learning_rate * min(1.0, (step + 1) / (warmup + 1))
    done = step / config.num_steps
    match config.decay:
        case "linear":
            rate *= 1.0 - done
        case "cosine":
            rate *= 0.5 * (1.0 + math.cos(math.pi * done))
    return rate
