"""Optimizers of the noised gradient. They only post-process what was noised."""

from __future__ import annotations

import math

from tff_dpftrl import validation
from tff_dpftrl.finetuning import config
from tff_dpftrl.mechanisms import workload as workload_lib
from tff_dpftrl.models import keras_versions

_WARMUP = 10


def build(options: config.StepOptions) -> keras_versions.Optimizer:
    """Builds the optimizer of a run, whose learning rate is to be assigned before each step."""
    rate = learning_rate(options, 0)
    moments = {"beta_1": options.momentum, "beta_2": options.second_moment_decay}
    match options.optimizer:
        case "sgd":
            return keras_versions.SGD(rate)
        case "momentum":
            return keras_versions.SGD(rate, momentum=options.momentum)
        case "adam":
            return keras_versions.Adam(rate, **moments)
        case "adamw":
            return keras_versions.AdamW(rate, weight_decay=options.weight_decay, **moments)
        case "adafactor":
            return keras_versions.Adafactor(rate, relative_step=False)
    raise validation.UsageError(f"optimizer must be one of Optimizer, got {options.optimizer!r}.")


def _warmup(options: config.StepOptions) -> int:
    if options.warmup_steps is None:
        return min(_WARMUP, options.num_steps // 10)
    return options.warmup_steps


def update_rule(options: config.StepOptions) -> workload_lib.UpdateRule:
    """Returns how the optimizer makes models of the noised gradients.

    Adafactor, like Adam, is taken with a constant preconditioner; it has no momentum.
    """
    adam = options.optimizer in ("adam", "adamw")
    return workload_lib.UpdateRule(
        momentum=options.momentum if adam or options.optimizer == "momentum" else 0.0,
        adam=adam,
        warmup_rounds=_warmup(options),
        decay=options.decay,
        averaging=options.iterate_averaging,
        weight_decay=options.learning_rate * options.weight_decay,
        rate_before_momentum=not adam,
    )


def learning_rate(options: config.StepOptions, step: int) -> float:
    """Returns the learning rate of a step, from 0: a linear warm-up times a decay to zero."""
    rate = options.learning_rate * min(1.0, (step + 1) / (_warmup(options) + 1))
    done = step / options.num_steps
    match options.decay:
        case "linear":
            rate *= 1.0 - done
        case "cosine":
            rate *= 0.5 * (1.0 + math.cos(math.pi * done))
    return rate
