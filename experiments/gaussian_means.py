"""ELS and ULS on a synthetic task: estimating the mean of the users' Gaussians.

Section 4 of Charles et al. 2024. μ ~ N(0, I_d); each of N users has a mean μ_u ~ N(μ, σ₁² I)
and K examples x ~ N(μ_u, σ₂² I). Gradient descent on ½‖θ − x‖² from θ = 0 is made private by
ELS or by ULS, and the result is judged by ‖θ_T − μ‖². The paper leaves open the loss's
constant, θ₀ and the grids of rates and clip norms: these are ours.

Gradients are clipped and divided by the clip norm ("normalised", De et al. 2022), so that
rates mean the same at every clip norm. Batches are Poisson samples, as the accounting
wants, of any size; the denominator is the expected one.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from tff_dpftrl import validation
from tff_dpftrl.accounting import mixture_of_gaussians
from tff_dpftrl.finetuning import example_sampling, plan

RATES = tuple(float(f"{rate:.4g}") for rate in np.geomspace(0.02, 6.0, 11))
"""Learning rates that are tried first, per step of normalised gradients; finer ones follow."""

CLIP_NORMS = (4.0, 8.0, 16.0, 32.0, 64.0)
"""Clip norms that are tried; 4 clips nearly every gradient, 64 nearly none."""

# Trials of the first search, rates of the second one, and trials that are simulated at a time.
_FIRST_TRIALS, _FINER_RATES, _TRIALS_AT_A_TIME = 16, 9, 32


@dataclasses.dataclass(frozen=True)
class Task:
    """A task with its privacy target and compute budget; the defaults are the paper's.

    Attributes:
      epsilon: Target ε; inf for no noise.
      compute_budget: Expected number of gradients in a step, B.
      within_user: Standard deviation of a user's examples, σ₂.
      between_users: Standard deviation of the users' means, σ₁.
      dimension: Number of coordinates, d.
      num_users: Number of users, N.
      examples_per_user: Number of examples of each user, K.
      num_steps: Number of steps, T.
      delta: Target δ.
    """

    epsilon: float = 1.0
    compute_budget: int = 64
    within_user: float = 1.0
    between_users: float = 1.0
    dimension: int = 32
    num_users: int = 256
    examples_per_user: int = 16
    num_steps: int = 256
    delta: float = 1e-6

    def __post_init__(self):
        for name in (
            "compute_budget",
            "dimension",
            "num_users",
            "examples_per_user",
            "num_steps",
        ):
            validation.integer(name, getattr(self, name), minimum=1)
        for name in ("within_user", "between_users"):
            validation.number(name, getattr(self, name), at_least=0)
        if self.epsilon != math.inf:
            validation.positive("epsilon", self.epsilon)
        validation.delta(self.delta)


@dataclasses.dataclass(frozen=True)
class Method:
    """ELS or ULS on a task.

    Attributes:
      sampling: What is sampled: `plan.EXAMPLE` (ELS) or `plan.USER` (ULS).
      group_size: Examples that a user contributes, G; at most K.
    """

    sampling: str
    group_size: int

    def num_units(self, task: Task) -> int:
        """Returns the size of the pool (ELS) or the number of users (ULS)."""
        if self.sampling == plan.EXAMPLE:
            return task.num_users * self.group_size
        return task.num_users

    def expected_units(self, task: Task) -> float:
        """Returns the expected batch of a step: B examples, or M = B / G users."""
        if self.sampling == plan.EXAMPLE:
            return float(task.compute_budget)
        return task.compute_budget / self.group_size

    def check(self, task: Task) -> None:
        """Checks that the method is possible on a task.

        Raises:
          ValueError: If G is larger than K, or a step expects more than there is.
        """
        if self.sampling not in (plan.EXAMPLE, plan.USER):
            raise validation.UsageError(
                f"sampling must be 'example' or 'user', got {self.sampling!r}."
            )
        example_sampling.check_group_size(self.group_size)
        if self.group_size > task.examples_per_user:
            raise validation.UsageError(
                f"group_size={self.group_size} exceeds examples_per_user="
                f"{task.examples_per_user}: lower it."
            )
        if self.expected_units(task) > self.num_units(task):
            raise validation.UsageError(
                f"compute_budget={task.compute_budget} asks for {self.expected_units(task):g} of "
                f"{self.num_units(task)} {self.sampling}s in a step: lower it, or raise group_size."
            )

    def noise_multiplier(self, task: Task) -> float:
        """Returns the σ that meets the task's target; 0 if that is infinite.

        Raises:
          ValueError: If the method is not possible on the task.
        """
        self.check(task)
        if task.epsilon == math.inf:
            return 0.0
        return mixture_of_gaussians.calibrate_els(
            sampling_probability=self.expected_units(task) / self.num_units(task),
            group_size=self.group_size if self.sampling == plan.EXAMPLE else 1,
            num_steps=task.num_steps,
            target_epsilon=task.epsilon,
            delta=task.delta,
        )


@dataclasses.dataclass(frozen=True)
class Result:
    """The best setting of a grid, and its loss.

    Attributes:
      loss: Mean of ‖θ_T − μ‖² over the trials.
      standard_error: Standard error of `loss`.
      learning_rate: Learning rate that reached `loss`.
      clip_norm: Clip norm that reached `loss`.
      noise_multiplier: Noise multiplier σ.
    """

    loss: float
    standard_error: float
    learning_rate: float
    clip_norm: float
    noise_multiplier: float


def best(
    task: Task,
    method: Method,
    *,
    num_trials: int = 128,
    rates: Sequence[float] = RATES,
    clip_norms: Sequence[float] = CLIP_NORMS,
    seed: int = 0,
) -> Result:
    """Finds the least mean loss over learning rates and clip norms.

    A first search with few trials finds clip norm and rate. All trials are then spent on that
    clip norm and finer rates around that rate (the loss is steep in the rate).

    Args:
      task: The task.
      method: ELS or ULS.
      num_trials: Number of trials of the second search.
      rates: Learning rates of the first search, increasing.
      clip_norms: Clip norms, each tried with every rate.
      seed: Non-negative seed of data, batches and noise.

    Returns:
      The best setting and what it reached.

    Raises:
      ValueError: If an argument is out of range, or the method is not possible.
    """
    noise_multiplier = method.noise_multiplier(task)
    settings = list(itertools.product(rates, clip_norms))
    first = simulate(
        task, method, noise_multiplier, settings, num_trials=_FIRST_TRIALS, seed=2 * seed
    )
    rate, clip_norm = settings[int(np.argmin(first.mean(axis=0)))]
    place = list(rates).index(rate)
    low, high = rates[max(place - 1, 0)], rates[min(place + 1, len(rates) - 1)]
    finer = [(float(one), clip_norm) for one in np.geomspace(low, high, _FINER_RATES)]
    losses = simulate(
        task, method, noise_multiplier, finer, num_trials=num_trials, seed=2 * seed + 1
    )
    means = losses.mean(axis=0)
    i = int(np.argmin(means))
    error = float(losses[:, i].std(ddof=1) / math.sqrt(num_trials))
    return Result(float(means[i]), error, *finer[i], noise_multiplier)


def simulate(
    task: Task,
    method: Method,
    noise_multiplier: float,
    settings: Sequence[tuple[float, float]],
    *,
    num_trials: int,
    seed: int,
) -> np.ndarray:
    """Simulates independent trials; settings share a trial's data, batches and noise.

    Args:
      task: The task.
      method: ELS or ULS.
      noise_multiplier: Noise multiplier σ.
      settings: Pairs (learning rate, clip norm), both above 0.
      num_trials: Number of trials, at least 2.
      seed: Non-negative seed of data, batches and noise.

    Returns:
      Losses ‖θ_T − μ‖², float64, shape [trials, settings].

    Raises:
      ValueError: If an argument is out of range, or the method is not possible.
    """
    method.check(task)
    validation.noise_multiplier(noise_multiplier)
    num_trials = validation.integer("num_trials", num_trials, minimum=2)
    for rate, clip_norm in settings:
        validation.positive("learning rate", rate)
        validation.positive("clip_norm", clip_norm)
    losses = []
    for first in range(0, num_trials, _TRIALS_AT_A_TIME):
        count = min(_TRIALS_AT_A_TIME, num_trials - first)
        rng = np.random.default_rng([seed, first])
        losses.append(_simulate(task, method, noise_multiplier, settings, count, rng))
    return np.concatenate(losses)


def _simulate(
    task: Task,
    method: Method,
    noise_multiplier: float,
    settings: Sequence[tuple[float, float]],
    num_trials: int,
    rng: np.random.Generator,
) -> np.ndarray:
    rates, clip_norms = (np.array(column, np.float32) for column in zip(*settings, strict=True))

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal((num_trials, *shape), np.float32)

    d, users, rows = task.dimension, task.num_users, task.examples_per_user
    mean = normal(d)
    user_means = mean[:, None] + np.float32(task.between_users) * normal(users, d)
    # Examples are exchangeable: the first G of a user are as good a pool as any.
    used = method.group_size if method.sampling == plan.EXAMPLE else rows
    data = user_means[:, :, None] + np.float32(task.within_user) * normal(users, used, d)
    data = data.reshape(num_trials * users * used, d)

    units, expected = method.num_units(task), method.expected_units(task)
    theta = np.zeros((num_trials, len(settings), d), np.float32)
    for _ in range(task.num_steps):
        unit, is_there = poisson_samples(rng, num_trials, units, expected / units)
        # Numbers of rows in all data; what is not there points at some unit, with weight 0.
        unit = np.minimum(unit, units - 1) + np.arange(num_trials)[:, None] * units
        if method.sampling == plan.EXAMPLE:
            points = data[unit]
        else:
            points = np.zeros((*unit.shape, d), np.float32)
            for example in _distinct(rng, unit.shape, rows, method.group_size):
                points += data[unit * rows + example]
            points /= np.float32(method.group_size)
        squares = (
            np.einsum("tsd,tsd->ts", theta, theta)[:, :, None]
            + np.einsum("tmd,tmd->tm", points, points)[:, None, :]
            - 2.0 * theta @ points.transpose(0, 2, 1)
        )
        norms = np.sqrt(np.maximum(squares, 1e-12))
        # min(1 / C, 1 / norm) times the gradient θ − point, summed, with noise, over a constant.
        factors = 1.0 / np.maximum(norms, clip_norms[:, None])
        factors *= is_there[:, None, :]
        total = theta * factors.sum(axis=2, keepdims=True) - factors @ points
        total += np.float32(noise_multiplier) * normal(1, d)
        theta -= rates[:, None] * total / np.float32(expected)
    return ((theta - mean[:, None]).astype(np.float64) ** 2).sum(axis=2)


def poisson_samples(
    rng: np.random.Generator, num_samples: int, num_units: int, probability: float
) -> tuple[np.ndarray, np.ndarray]:
    """Draws independent Poisson samples, by the gaps between the units that are taken.

    For simulations: nothing here is secret.

    Args:
      rng: Random generator.
      num_samples: Number of samples.
      num_units: Number of units to sample from.
      probability: Probability of each unit to be in a sample, in (0, 1].

    Returns:
      Indices of units, int64, increasing in each row, shape [samples, width]; and whether
      they are in the sample, bool, same shape: the first ones of a row.
    """
    deviation = math.sqrt(num_units * probability * (1.0 - probability))
    width = math.ceil(num_units * probability + 5.0 * deviation) + 5
    scale = 0.0 if probability == 1.0 else 1.0 / math.log1p(-probability)
    last, parts = np.full((num_samples, 1), -1), []
    while not parts or last.min() < num_units:
        # 1 − U lies in (0, 1].
        gaps = 1 + np.floor(np.log1p(-rng.random((num_samples, width))) * scale)
        parts.append(last + np.cumsum(np.minimum(gaps, num_units + 1).astype(np.int64), axis=1))
        last = parts[-1][:, -1:]
    units = np.concatenate(parts, axis=1)
    units = units[:, : max(1, int((units < num_units).sum(axis=1).max()))]
    return units, units < num_units


def _distinct(
    rng: np.random.Generator, shape: tuple[int, ...], num_rows: int, count: int
) -> list[np.ndarray]:
    """Draws `count` distinct rows out of `num_rows` for each entry of `shape`, uniformly."""
    if count == num_rows:
        return [np.full(shape, row) for row in range(num_rows)]
    order = np.broadcast_to(np.arange(num_rows), (*shape, num_rows)).copy()
    chosen = []
    for place in range(count):
        other = place + (rng.random(shape) * (num_rows - place)).astype(np.int64)
        other = other[..., None]
        drawn = np.take_along_axis(order, other, axis=-1)
        np.put_along_axis(order, other, order[..., place : place + 1], axis=-1)
        chosen.append(drawn[..., 0])
    return chosen
