"""Checks of a strategy: its sensitivity, and its noise, against the noise that is streamed.

The claim of a strategy is its `sensitivity`. What is released is noised by the stream of its
`noise_recipe`. Here the covariance Σ of that noise is computed from the stream itself, and
√(uᵀ Σ⁻¹ u) for contributions u of one client: that is how far the client moves the release, in
standard deviations of z. No sensitivity may be below it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tff_dpftrl import validation
from tff_dpftrl.auditing import audit_report
from tff_dpftrl.auditing.evidence import worst_pattern
from tff_dpftrl.mechanisms import noise_recipe
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.private_round import noise_stream

_SMALL = (1, 2, 3, 5, 8)
_STREAMED = 1e-4  # Of float32 streams, relative to the largest entry of the covariance.
_EXACT = 1e-6
_MAX_ROUNDS = 4_000


class _SingularNoise(Exception):
    """Covariance without an inverse: a combination of rounds is released without noise."""


@dataclasses.dataclass(frozen=True)
class StrategyCheck:
    """Result of `check_strategy`.

    Attributes:
      subject: Name of the strategy.
      findings: Findings of the tests, each with the numbers.
    """

    subject: str
    findings: tuple[audit_report.Finding, ...]

    @property
    def is_violated(self) -> bool:
        """Whether a test found that a number of the strategy cannot be true."""
        return any(finding.outcome == "violated" for finding in self.findings)

    def raise_if_violated(self) -> None:
        """Raises if a test found that a number of the strategy cannot be true.

        Raises:
          ValueError: The message lists the findings.
        """
        if self.is_violated:
            raise validation.UsageError(str(self))

    def __str__(self) -> str:
        lines = [f"strategy {self.subject}: {self._headline()}"]
        lines += [f"  {found.test}: {found.outcome}. {found.text}" for found in self.findings]
        return "\n".join(lines)

    def _headline(self) -> str:
        """Says in a word what was found, and names what was not tested."""
        untested = [found.test for found in self.findings if found.outcome == "not tested"]
        if self.is_violated:
            return "VIOLATED"
        if len(untested) == len(self.findings):
            return "not tested"
        return f"not fully tested ({'; '.join(untested)})" if untested else "consistent"


def check_strategy(
    strategy: strategy_lib.Strategy, schema: schema_lib.MinSep, *, streamed_rounds: int = 64
) -> StrategyCheck:
    """Tests whether a strategy's sensitivity and losses are those of the noise it streams.

    Use it for strategies of your own, then `audit_aggregator` for the aggregator around them.
    The tests are exact, without chance:

    - The noise of the first `streamed_rounds` rounds, streamed as in training, has the
      covariance of `noise_matrix`, and the noise of a round depends on no later draw.
    - `noise_matrix` times `strategy_matrix` is the identity.
    - The noise leaves no combination of rounds without noise.
    - For up to 8 rounds no pattern of any schema, with any signs, moves the release by more
      than `sensitivity` of that schema.
    - Under `schema` the strongest pattern that a search finds does not either. The search is
      no proof, but what it finds is a pattern.
    - `prefix_noise_variance` and `round_noise_variance` are those of `noise_matrix`.

    A strategy that passes may still be wrong where nothing looked: in other schemas of more
    than 8 rounds, and after `streamed_rounds`.

    Args:
      strategy: Strategy to test.
      schema: Participation schema of the run, of at most 4,000 rounds.
      streamed_rounds: Largest number of rounds that are streamed. Give at least the round of
        the first restart, and some more.

    Returns:
      The findings. A test that the strategy's own code refuses is "not tested".

    Raises:
      ValueError: If an argument is out of range or no strategy.
    """
    strategy_lib.check_strategy(strategy)
    validation.integer("streamed_rounds", streamed_rounds, minimum=1)
    validation.number(
        "schema.num_rounds",
        schema.num_rounds,
        at_most=_MAX_ROUNDS,
        remedy="Check a shorter run: matrices of so many rounds do not fit into memory.",
    )
    streamed = min(streamed_rounds, schema.num_rounds)
    tests: dict[str, Callable[[], str | None]] = {
        "streamed noise": lambda: _streamed(strategy, streamed),
        "noise matrix": lambda: _inverse(strategy, schema.num_rounds),
        "sensitivity, all patterns": lambda: _all_patterns(strategy, schema.num_rounds),
        "sensitivity, strongest pattern": lambda: _strongest(strategy, schema),
        "losses": lambda: _losses(strategy, schema.num_rounds),
    }
    looked = {"streamed noise": streamed, "sensitivity, all patterns": _SMALL[-1]}
    findings = []
    for name, test in tests.items():
        rounds = range(min(looked.get(name, schema.num_rounds), schema.num_rounds))
        covers = (audit_report.Covered.of("rounds", rounds, schema.num_rounds),)
        findings.append(dataclasses.replace(_run(name, test), covers=covers))
    return StrategyCheck(strategy.name, tuple(findings))


def _run(name: str, test: Callable[[], str | None]) -> audit_report.Finding:
    """Runs a test that returns what is wrong, None if nothing is."""
    try:
        wrong = test()
    except _SingularNoise as error:
        wrong = str(error)
    except (ValueError, NotImplementedError, np.linalg.LinAlgError, tf.errors.OpError) as error:
        reason = str(error).partition("\n")[0]
        return audit_report.Finding(name, "not tested", f"The strategy refused: {reason}")
    if wrong is None:
        return audit_report.Finding(name, "consistent", "Nothing was found.")
    return audit_report.Finding(name, "violated", wrong)


def _streamed(strategy: strategy_lib.Strategy, num_rounds: int) -> str | None:
    """Compares the stream with the noise matrix."""
    emitted = _stream(strategy.noise_recipe(), num_rounds)
    actual, stated = emitted @ emitted.T, _covariance(strategy, num_rounds)
    error = np.abs(actual - stated) / np.max(np.abs(stated))
    if np.max(error) <= _STREAMED:
        return None
    s, t = np.unravel_index(np.argmax(error), error.shape)
    return (
        f"The covariance of the noise of rounds {s} and {t} is {actual[s, t]:.6g} in the stream of "
        f"noise_recipe, and {stated[s, t]:.6g} by noise_matrix."
    )


def _stream(recipe: noise_recipe.NoiseRecipe, num_rounds: int) -> np.ndarray:
    """Streams a recipe on draws that are unit vectors: row t is the map to the noise of round t."""
    starts = (0,)
    if isinstance(recipe, noise_recipe.RestartedNoise):
        starts, recipe = recipe.starts, recipe.recipe
    kernel = noise_stream.build_kernel(recipe)
    size = 4 * num_rounds + 64
    columns: dict[tuple[int, int], int] = {}

    def draw(block: int, index: Any) -> tf.Tensor:
        column = columns.setdefault((block, int(index)), len(columns))
        if column >= size:
            raise validation.UsageError(f"noise_recipe takes more than {size} draws.")
        return tf.one_hot(column, size)

    rows, buffer = [], None
    for t in range(num_rounds):
        block = int(np.searchsorted(starts, t, side="right")) - 1
        if buffer is None and kernel.num_buffers:
            buffer = tf.zeros([kernel.num_buffers, size])
        in_block = tf.constant(t - starts[block], tf.int64)
        noise, new_buffer = kernel.step(buffer, in_block, functools.partial(draw, block))
        buffer = buffer if new_buffer is None else new_buffer
        rows.append(np.asarray(noise, np.float64))
    return np.array(rows)


def _covariance(strategy: strategy_lib.Strategy, num_rounds: int) -> np.ndarray:
    noise = np.asarray(strategy.noise_matrix(num_rounds), np.float64)
    if noise.ndim != 2 or len(noise) != num_rounds or not np.all(np.isfinite(noise)):
        raise validation.UsageError(
            f"noise_matrix({num_rounds}) must be finite, of shape [{num_rounds}, m]."
        )
    return noise @ noise.T


def _invertible_covariance(strategy: strategy_lib.Strategy, num_rounds: int) -> np.ndarray:
    """Returns the covariance; raises _SingularNoise if it has no inverse."""
    covariance = _covariance(strategy, num_rounds)
    try:
        own = np.diag(np.linalg.cholesky(covariance)) ** 2  # Variances given earlier rounds.
        is_singular = np.any(own <= num_rounds * np.finfo(float).eps * np.diag(covariance))
    except np.linalg.LinAlgError:
        is_singular = True
    if is_singular:
        raise _SingularNoise(
            f"The covariance of the noise of {num_rounds} rounds is singular: a combination of "
            "rounds is released without noise, and no sensitivity is large enough."
        )
    return covariance


def _inverse(strategy: strategy_lib.Strategy, num_rounds: int) -> str | None:
    """Compares the noise matrix with the strategy matrix."""
    noise, matrix = strategy.noise_matrix(num_rounds), strategy.strategy_matrix(num_rounds)
    if noise.shape[1] != matrix.shape[0] or matrix.shape[1] != num_rounds:
        return f"noise_matrix has the shape {noise.shape}, strategy_matrix {matrix.shape}."
    error = float(np.max(np.abs(noise @ matrix - np.eye(num_rounds))))
    if not error <= _EXACT:
        return f"noise_matrix times strategy_matrix differs by {error:.3g} from the identity."
    if noise.shape[0] == noise.shape[1] and np.any(np.triu(noise, 1)):
        return "noise_matrix has entries above the diagonal: noise of later rounds."
    return None


def _all_patterns(strategy: strategy_lib.Strategy, most_rounds: int) -> str | None:
    """Tries all patterns with all signs, under all schemas of few rounds."""
    for num_rounds in _SMALL:
        if num_rounds > most_rounds:
            break
        inverse = np.linalg.inv(_invertible_covariance(strategy, num_rounds))
        signals, gaps, sizes = _signals(num_rounds)
        squares = np.einsum("ij,jk,ik->i", signals, inverse, signals)
        for schema in _schemas(num_rounds):
            allowed = (gaps >= schema.min_sep) & (sizes <= schema.max_participations)
            best = np.argmax(np.where(allowed, squares, 0.0))
            wrong = _understated(strategy, schema, squares[best], signals[best])
            if wrong is not None:
                return wrong
    return None


def _signals(num_rounds: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lists all contributions in {-1, 0, 1}, their least strides, and their numbers of rounds."""
    signals = np.stack(np.meshgrid(*[[0.0, 1.0, -1.0]] * num_rounds), -1).reshape(-1, num_rounds)
    signals = signals[np.any(signals, axis=1)]
    gaps = [np.min(np.diff(np.flatnonzero(row)), initial=num_rounds) for row in signals]
    return signals, np.array(gaps), np.count_nonzero(signals, axis=1)


def _schemas(num_rounds: int) -> Iterator[schema_lib.MinSep]:
    for min_sep in range(1, num_rounds + 1):
        for participations in range(1, -(-num_rounds // min_sep) + 1):
            yield schema_lib.MinSep(num_rounds, min_sep, participations)


def _strongest(strategy: strategy_lib.Strategy, schema: schema_lib.MinSep) -> str | None:
    """Searches the schema of the run."""
    covariance = _invertible_covariance(strategy, schema.num_rounds)
    pattern = worst_pattern.strongest_pattern(covariance, schema)
    signal = pattern.signal(schema.num_rounds)
    return _understated(strategy, schema, pattern.norm**2, signal)


def _understated(
    strategy: strategy_lib.Strategy, schema: schema_lib.MinSep, squared: float, signal: np.ndarray
) -> str | None:
    stated = strategy.sensitivity(schema).squared
    if squared <= stated * (1.0 + _EXACT):
        return None
    rounds = ", ".join(f"{t}" if signal[t] > 0 else f"−{t}" for t in np.flatnonzero(signal))
    return (
        f"Under {schema} a client in rounds {rounds} (− for the opposite update) moves the "
        f"release by S² = {squared:.6g}; sensitivity states {stated:.6g}."
    )


def _losses(strategy: strategy_lib.Strategy, num_rounds: int) -> str | None:
    """Compares the variances with those of the noise matrix."""
    noise = strategy.noise_matrix(num_rounds)
    for name, stated, actual in (
        ("round_noise_variance", strategy.round_noise_variance(num_rounds), noise),
        (
            "prefix_noise_variance",
            strategy.prefix_noise_variance(num_rounds),
            np.cumsum(noise, axis=0),
        ),
    ):
        squares = np.sum(actual**2, axis=1)
        if np.shape(stated) != squares.shape:
            return f"{name} has the shape {np.shape(stated)}, not {squares.shape}."
        error = np.abs(np.asarray(stated) / squares - 1.0)
        t = int(np.argmax(error))
        if not error[t] <= _EXACT:
            return f"{name} is {stated[t]:.6g} in round {t}; noise_matrix has {squares[t]:.6g}."
    return None
