"""Workloads: which sums of the noised rounds a model is made of.

The server's optimizer turns the released sums g_0, g_1, ... into models: θ_t is θ_0 minus
Σ_s A[t, s] g_s. For plain SGD the *workload* A is the matrix of prefix sums. Momentum, a schedule
of the learning rate, weight decay and an average of the models make it another one, and the noise
of the models is that of A C⁻¹ (Denisov et al. 2022). A decides which C is best, and nothing else:
sensitivity, and with it privacy, depends on C alone.

Each of these optimizers is a chain of first-order recurrences, so that A is never needed as a
matrix: it is applied to a vector in O(rounds).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import numpy as np

from tff_dpftrl import validation

MAX_ROUNDS = 4096
"""Largest number of rounds for which work of O(rounds²) is done."""

MAX_LENGTH = 1_000_000
"""Largest number of rounds of a workload: its factors are kept round by round."""

_COLUMNS_AT_ONCE = 256

Decay = Literal["none", "linear", "cosine"]


@dataclasses.dataclass(frozen=True)
class Recurrence:
    """First-order linear recurrence y_t = carry_t · y_{t−1} + gain_t · x_t, with y_{−1} = 0."""

    carry: tuple[float, ...]
    gain: tuple[float, ...]

    @functools.cached_property
    def is_constant(self) -> bool:
        """Whether all rounds have the same factors."""
        return len(set(self.carry)) == len(set(self.gain)) == 1

    def apply(self, x: np.ndarray) -> np.ndarray:
        """Returns y for the inputs x, both of shape [num_rounds, ...]."""
        return _accumulated(_scaled(self.gain, x), self.carry)

    def apply_transposed(self, y: np.ndarray) -> np.ndarray:
        """Multiplies the transposed matrix of the recurrence and y, shape [num_rounds, ...]."""
        # Going backwards, round t receives what round t + 1 carries.
        carry = (0.0, *self.carry[:0:-1])
        return _scaled(self.gain, _accumulated(y[::-1], carry)[::-1])

    def rounds(self, start: int, stop: int) -> Recurrence:
        """Returns the recurrence of the rounds start ... stop − 1 alone."""
        return Recurrence(self.carry[start:stop], self.gain[start:stop])


def _scaled(factors: tuple[float, ...], x: np.ndarray) -> np.ndarray:
    return np.reshape(factors, (-1, *[1] * (x.ndim - 1))) * x


def _accumulated(x: np.ndarray, carry: tuple[float, ...]) -> np.ndarray:
    """Computes y_t = carry_t · y_{t−1} + x_t; the first carry has no effect."""
    factors = set(carry[1:])
    if len(factors) <= 1:
        factor = next(iter(factors), 0.0)
        if factor == 0.0:
            return x
        if factor == 1.0:
            return np.cumsum(x, axis=0)
        from scipy import signal  # It takes long to import.

        return np.asarray(signal.lfilter([1.0], [1.0, -factor], x, axis=0))
    y = np.array(x, dtype=np.float64)
    for t in range(1, len(y)):
        y[t] += carry[t] * y[t - 1]
    return y


@dataclasses.dataclass(frozen=True)
class Workload:
    """Lower-triangular matrix A, from the released sums to the models, as a chain of recurrences.

    The first recurrence is applied first. Models are in units of the learning rate: it changes all
    losses by the same factor.
    """

    recurrences: tuple[Recurrence, ...]
    description: str = "custom"

    def __post_init__(self):
        lengths = {len(part) for one in self.recurrences for part in (one.carry, one.gain)}
        if len(lengths) != 1 or 0 in lengths:
            raise validation.UsageError(
                "recurrences must be at least one, all for the same number of rounds, got lengths "
                f"{sorted(lengths)}."
            )
        values = np.array([[one.carry, one.gain] for one in self.recurrences])
        if not np.all(np.isfinite(values)) or np.any(values[:, 1] <= 0):
            raise validation.UsageError(
                "recurrences must have finite factors, and positive gains: a round without "
                "effect on the models has no place in a workload."
            )

    @property
    def num_rounds(self) -> int:
        """Number of rounds n."""
        return len(self.recurrences[0].carry)

    @functools.cached_property
    def coefficients(self) -> np.ndarray | None:
        """First column of A, shape [num_rounds], if A is Toeplitz; else None."""
        if not all(one.is_constant for one in self.recurrences):
            return None
        impulse = np.zeros(self.num_rounds)
        impulse[0] = 1.0
        return self.apply(impulse)

    def matrix(self) -> np.ndarray:
        """Returns A, dense, shape [num_rounds, num_rounds]."""
        return self.apply(np.eye(self.num_rounds))

    def apply(self, x: np.ndarray) -> np.ndarray:
        """Computes A x in O(num_rounds) a column; x has the shape [num_rounds, ...]."""
        for one in self.recurrences:
            x = one.apply(x)
        return x

    def apply_transposed(self, y: np.ndarray) -> np.ndarray:
        """Computes Aᵀ y; y has the shape [num_rounds, ...]."""
        for one in reversed(self.recurrences):
            y = one.apply_transposed(y)
        return y

    def rounds(self, start: int, stop: int) -> Workload:
        """Returns the diagonal block of A for the rounds start ... stop − 1."""
        parts = tuple(one.rounds(start, stop) for one in self.recurrences)
        return Workload(parts, self.description)

    def responses(self, start: int, stop: int) -> tuple[np.ndarray, ...]:
        """Computes how models and recurrences follow from the outputs kept before a block.

        The block is rounds `start` to `stop` − 1, m in total. For r recurrences, the four matrices
        are: from the last outputs of the recurrences before the block to its models, [m, r]; from
        its inputs to its models, [m, m]; and from both, in this order, to the last outputs of the
        recurrences, [r, r] and [r, m].
        """
        kept, size = len(self.recurrences), stop - start
        y = np.hstack([np.zeros((size, kept)), np.eye(size)])
        last = np.zeros((kept, kept + size))
        for j, one in enumerate(self.recurrences):
            y = _scaled(one.gain[start:stop], y)
            y[0, j] += one.carry[start]
            y = _accumulated(y, one.carry[start:stop])
            last[j] = y[-1]
        return y[:, :kept], y[:, kept:], last[:, :kept], last[:, kept:]

    def noise_variance(self, inverse: np.ndarray) -> np.ndarray:
        """Computes the squared row norms of A C⁻¹ for a Toeplitz C, whose C⁻¹ has column `inverse`.

        It takes O(num_rounds) if A is Toeplitz, else O(num_rounds²).
        """
        if self.coefficients is not None:
            return np.cumsum(np.square(self.apply(inverse)))
        variance = np.zeros(self.num_rounds)
        for start in range(0, self.num_rounds, _COLUMNS_AT_ONCE):
            stop = min(start + _COLUMNS_AT_ONCE, self.num_rounds)
            columns = np.zeros((self.num_rounds, stop - start))
            for s in range(start, stop):
                columns[s:, s - start] = inverse[: self.num_rounds - s]
            variance += np.sum(np.square(self.apply(columns)), axis=1)
        return variance


def check_size(num_rounds: int) -> None:
    """Refuses work of O(rounds²) for more than `MAX_ROUNDS` rounds."""
    if num_rounds > MAX_ROUNDS:
        raise validation.UsageError(
            f"workload with a schedule, weight decay, an average or restarts is for at most "
            f"{MAX_ROUNDS} rounds, got {num_rounds}: leave it out, or take the momentum alone, "
            f"which is for up to {MAX_LENGTH}."
        )


@dataclasses.dataclass(frozen=True)
class UpdateRule:
    """Linear rule by which the server's optimizer makes models of the released sums.

    Attributes:
      momentum: Momentum, or β₁ of Adam, in [0, 1).
      adam: Whether the update is Adam's. Its preconditioner is taken as constant: what is left
        is a momentum whose average is divided by 1 − β₁^t.
      warmup_rounds: Rounds over which the learning rate grows to its full value.
      decay: How the learning rate falls to zero over the rounds.
      averaging: Decay of the average of the models; None if the last model counts.
      weight_decay: Share of the weights that a round at the full learning rate takes off.
      restarts: Rounds before whose step the momentum is set to zero.
      rate_before_momentum: Whether updates are scaled by the learning rate before the momentum
        adds them up, as in Keras's SGD; if False, after, as in TFF's.
    """

    momentum: float = 0.0
    adam: bool = False
    warmup_rounds: int = 0
    decay: Decay = "none"
    averaging: float | None = None
    weight_decay: float = 0.0
    restarts: tuple[int, ...] = ()
    rate_before_momentum: bool = False

    def __post_init__(self):
        validation.number("momentum", self.momentum, at_least=0, below=1)
        validation.integer("warmup", self.warmup_rounds, minimum=0)
        if self.decay not in ("none", "linear", "cosine"):
            raise validation.UsageError(
                f"decay must be none, linear or cosine, got {self.decay!r}."
            )
        if self.averaging is not None:
            validation.number("averaging", self.averaging, above=0, below=1)
        validation.number("weight_decay", self.weight_decay, at_least=0, below=1)

    def rates(self, num_rounds: int) -> np.ndarray:
        """Returns the learning rates relative to the full one, shape [num_rounds]."""
        if self.warmup_rounds >= num_rounds:
            raise validation.UsageError(
                f"warmup must be below the {num_rounds} rounds, got {self.warmup_rounds}."
            )
        now = np.arange(num_rounds)
        rates = np.minimum(1.0, (now + 1.0) / (self.warmup_rounds + 1.0))
        match self.decay:
            case "linear":
                rates *= 1.0 - now / num_rounds
            case "cosine":
                rates *= 0.5 * (1.0 + np.cos(np.pi * now / num_rounds))
        return rates

    def workload(self, num_rounds: int) -> Workload | None:
        """Returns the workload of a run as one to three recurrences; None if it is the prefix sums.

        The learning rate decays over `num_rounds`. The warm-up must be shorter.
        """
        scheduled = self.warmup_rounds or self.decay != "none" or self.weight_decay
        if not (self.momentum or scheduled or self.averaging is not None):
            return None
        if num_rounds > MAX_LENGTH:
            raise validation.UsageError(
                f"workload with {self.description} is for at most {MAX_LENGTH} rounds, got "
                f"{num_rounds}: leave it out, for prefix sums of any number of rounds."
            )
        rates, ones = self.rates(num_rounds), np.ones(num_rounds)
        carry = np.full(num_rounds, self.momentum)
        since_restart = np.arange(num_rounds)
        for start in self.restarts:
            carry[start : start + 1] = 0.0
            since_restart[start:] = np.arange(num_rounds - start)
        before, after = (rates, ones) if self.rate_before_momentum else (ones, rates)
        if self.adam:
            before = (1.0 - self.momentum) * before
            after = after / (1.0 - self.momentum ** (since_restart + 1.0))
        parts = []
        if self.momentum > 0:
            parts.append((carry, before))
        else:
            after = before * after
        parts.append((1.0 - self.weight_decay * rates, after))
        if self.averaging is not None:
            # Σ_s decay^(t−s) θ_s / Σ_s decay^(t−s).
            decay = self.averaging
            shares = (1.0 - decay) / (1.0 - decay ** np.arange(1.0, num_rounds + 1.0))
            parts += [(np.full(num_rounds, decay), ones), (np.zeros(num_rounds), shares)]
        recurrences = tuple(Recurrence(tuple(c.tolist()), tuple(g.tolist())) for c, g in parts)
        return Workload(recurrences, self.description)

    @property
    def description(self) -> str:
        """The rule in a few words."""
        parts = []
        if self.adam:
            parts.append(f"Adam's momentum {self.momentum:g}, its preconditioner as if constant")
        elif self.momentum > 0:
            parts.append(f"momentum {self.momentum:g}")
        if self.warmup_rounds:
            parts.append(f"warm-up over {self.warmup_rounds} rounds")
        if self.decay != "none":
            parts.append(f"{self.decay} decay")
        if self.weight_decay:
            parts.append(f"weight decay {self.weight_decay:g}")
        if self.averaging is not None:
            parts.append(f"average of the models with decay {self.averaging:g}")
        return ", ".join(parts) or "prefix sums"


def parse(text: str) -> UpdateRule:
    """Reads "prefix", or a rule such as "momentum=0.9,warmup=100,decay=cosine,averaging=0.95".

    The names are momentum, adam (β₁), warmup, decay and averaging.
    """
    if text == "prefix":
        return UpdateRule()
    values = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            if name not in _PARSED or name in values:
                raise ValueError
            values[name] = _PARSED[name](value)
        except ValueError:
            raise validation.UsageError(
                f"workload {text!r} cannot be read at {part!r}: write prefix, or some of "
                "momentum=0.9, adam=0.9, warmup=100, decay=cosine and averaging=0.95, with commas."
            ) from None
    if "adam" in values and "momentum" in values:
        raise validation.UsageError(
            f"workload {text!r} names momentum and adam, which has its own: leave one of them out."
        )
    return UpdateRule(
        momentum=values.get("adam", values.get("momentum", 0.0)),
        adam="adam" in values,
        warmup_rounds=values.get("warmup", 0),
        decay=values.get("decay", "none"),
        averaging=values.get("averaging"),
    )


_PARSED = {"momentum": float, "adam": float, "warmup": int, "decay": str, "averaging": float}
