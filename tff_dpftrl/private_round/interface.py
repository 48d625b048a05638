"""Interface of a private round: a client's contribution, and the server's noisy release.

    state = private_round.initial_state(shapes)
    # In every round, with the cohort's updates:
    seen = private_round.broadcast(state)
    contributions = [private_round.clip_client(update, seen)[0] for update in updates]
    totals = private_round.total(contributions, shapes)
    state, average, measurements = private_round.release(state, totals)

TensorFlow without TFF: the functions work eagerly and in graphs. The aggregation
factories of `aggregators` are adapters that call exactly these, and any other
caller, a server or a fine-tuning loop, gets the same numbers from them.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import tensorflow as tf

from tff_dpftrl import validation
from tff_dpftrl.private_round import summation

_DATA = (bool, int, float, str, bytes, np.generic, np.ndarray, np.dtype, tf.Tensor, tf.DType)


class Contribution(NamedTuple):
    """Contribution of one client to the sums, clipped, or the sums themselves, in float64."""

    update: Any


class PrivateRound(abc.ABC):
    """Private mechanism with all its parameters, for updates that are lists of tensors.

    Neighbouring cohorts differ in one client, whose contribution is replaced by
    `no_contribution`, in all its parts.
    """

    contribution_type: ClassVar[type] = Contribution
    """NamedTuple type of a contribution: `update`, a list of tensors, then scalars if any."""

    state_type: ClassVar[type]
    """NamedTuple type of the state."""

    broadcast_field: ClassVar[str]
    """Name of the state's field that clients may see; never a seed, nor past noise."""

    noise_multiplier: float
    """Noise multiplier z of everything released in a round; with 0 nothing is private."""

    deterministic_seed: int | None
    """Seed of all noise if the caller gave one: then the run is not private."""

    @abc.abstractmethod
    def initial_state(self, shapes: Sequence[Sequence[int]]) -> Any:
        """Returns the state before the first round, with a new root seed each time it runs.

        Args:
          shapes: Static shapes of an update's tensors.

        Returns:
          A NamedTuple. It is secret, but for `broadcast_field`.

        Raises:
          ValueError: If updates of these shapes cannot be clipped.
        """

    def broadcast(self, state: Any) -> Any:
        """Returns the value that the clients of the next round are sent."""
        return getattr(state, self.broadcast_field)

    @abc.abstractmethod
    def clip_client(
        self, tensors: Sequence[tf.Tensor], broadcast: Any, weight: tf.Tensor | None = None
    ) -> tuple[Any, tf.Tensor]:
        """Clips one client's update to its contribution to the sums.

        Args:
          tensors: The client's update, floats of any dtype.
          broadcast: Value that `broadcast` returned.
          weight: Number of the client's examples, a numeric scalar; only for a round that
            weighs clients.

        Returns:
          A contribution of float64 tensors, and whether the update was finite; if
          not, the client counts as zero (`clipping.count_as_zero_if_not_finite`).
        """

    @abc.abstractmethod
    def release(self, state: Any, totals: Any) -> tuple[Any, list[tf.Tensor], dict[str, tf.Tensor]]:
        """Adds the noise of a round to the sums.

        Args:
          state: State before the round.
          totals: Sum of the contributions of any number of clients.

        Returns:
          The state after the round, the noised average (float64 tensors), and
          measurements: float32 or integer scalars that the guarantee covers.
        """

    @abc.abstractmethod
    def skip(self, state: Any, shapes: Sequence[Sequence[int]]) -> Any:
        """Passes over a round of which nothing is released.

        A round may collect updates and fail before its release. Its index is then used up: the
        noise of that index is drawn, kept where later noise is correlated with it, and never
        released. That is the mechanism without one of its outputs, in which no client took part:
        post-processing of the mechanism that is accounted for.

        Args:
          state: State before the round.
          shapes: Static shapes of an update's tensors.

        Returns:
          The state after the round. The noise of all later rounds is what it would have been
          after `release`. Whatever a release estimates from the clients stays as it was.
        """

    def no_contribution(self, shapes: Sequence[Sequence[int]]) -> Any:
        """Returns the contribution of an absent client: zeros, in float64."""
        num_scalars = len(self.contribution_type._fields) - 1
        update = [tf.zeros(shape, summation.DTYPE) for shape in shapes]
        return self.contribution_type(update, *[tf.zeros([], summation.DTYPE)] * num_scalars)

    def total(self, contributions: Sequence[Any], shapes: Sequence[Sequence[int]]) -> Any:
        """Sums contributions in float64; the sum of none is zero."""
        return tf.nest.map_structure(
            lambda *parts: tf.add_n(parts), self.no_contribution(shapes), *contributions
        )


def foreign_part(part: Any) -> str | None:
    """Finds code in a mechanism that is not of this package, and that nobody here vouches for.

    A subclass of a round, a strategy of the caller's own or a method that was replaced may add
    any noise, or none.

    It returns the name of the first class or replaced method; None if all code is of this package.
    """
    kind = type(part)
    if isinstance(part, tuple | list):
        return _first_foreign(part)
    if part is None or isinstance(part, _DATA):
        return None
    if kind.__module__.partition(".")[0] != __name__.partition(".")[0]:
        return f"{kind.__module__}.{kind.__qualname__}"
    attributes = getattr(part, "__dict__", {})
    for name in attributes:
        if callable(getattr(kind, name, None)):
            return f"{kind.__qualname__}.{name}"
    return _first_foreign(attributes.values())


def _first_foreign(parts: Iterable[Any]) -> str | None:
    return next(filter(None, map(foreign_part, parts)), None)


def refuse_weight(weight: tf.Tensor | None) -> None:
    """Raises ValueError if a client was given a weight in a round without weights."""
    if weight is not None:
        raise validation.UsageError(
            "weight must be None: in this round every client weighs the same. Use a "
            "SampledGaussianRound to weigh clients."
        )
