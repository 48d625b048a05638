"""Sums of the clients' updates around a private round, in the clear or by secure sums.

    aggregation = Aggregation(private_round)
    state = aggregation.initial_state(shapes)
    # In every round, with the cohort's updates:
    seen = aggregation.broadcast(state)
    sent = [aggregation.contribute(update, seen, None) for update in updates]
    # Each plain part is summed, each secure one modulo its entry of `moduli`.
    (plain, secure), *_ = sent  # One client's.
    state, average, measurements = aggregation.release(state, plain, secure, shapes)

TensorFlow without TFF. The factories of `aggregators` compute the same inside of TFF.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tff_dpftrl import validation
from tff_dpftrl.private_round import clipping, interface, secure_sums

_UPDATE = "update"
_NOT_FINITE = "non_finite_clients"

Parts = collections.OrderedDict
"""What a client sends, or its sums, by name."""


class Aggregation:
    """Aggregation of updates by a private round.

    `vector_sum` is the secure sum of the clipped updates; None if they are summed in the clear.
    """

    def __init__(
        self,
        private_round: interface.PrivateRound,
        *,
        vector_sum: secure_sums.VectorSum | None = None,
        report_non_finite_clients: bool = False,
    ):
        """Initialises the aggregation.

        The noise of the round covers what the encoding of `vector_sum` adds to a contribution; with
        it, the bits of adaptive clipping are summed securely, too. No noise covers the exact count
        of `report_non_finite_clients`: it is for the operator only.
        """
        num_parties = getattr(private_round, "noise_parties", 0)
        if vector_sum is None and num_parties:
            raise validation.UsageError(
                f"private_round has noise_parties={num_parties}, which add noise within secure "
                "sums, and vector_sum is None: nobody would add any. Give vector_sum."
            )
        if vector_sum is not None:
            covered = _covered_norm(private_round)
            if covered is None or not vector_sum.contribution_norm <= covered:
                raise validation.UsageError(
                    "private_round must have noise for a contribution of norm "
                    f"{vector_sum.contribution_norm}, what one client can add to vector_sum, got "
                    f"{covered}."
                )
        self.private_round = private_round
        self.vector_sum = vector_sum
        _, *self._scalars = private_round.contribution_type._fields
        self._bit_sum = secure_sums.HalfBitSum(has_noise=num_parties > 0)
        self._reports_non_finite = report_non_finite_clients
        fields = (*private_round.state_type._fields, "sum_state")
        self._state_type: Any = collections.namedtuple("AggregationState", fields)

    @property
    def is_weighted(self) -> bool:
        """Whether clients have weights: their numbers of examples."""
        return self._scalars == ["weight"]

    @property
    def moduli(self) -> Parts:
        """Moduli of the secure parts of what a client sends."""
        if self.vector_sum is None:
            return Parts()
        scalars = ((name, self._bit_sum.moduli) for name in self._scalars)
        return Parts([(_UPDATE, self.vector_sum.moduli), *scalars])

    def initial_state(self, shapes: Sequence[Sequence[int]]) -> Any:
        """Returns the state before the first round, with new seeds each time it runs.

        It is secret: the state of the private round, with one more field, `sum_state`.
        """
        sum_state = () if self.vector_sum is None else self.vector_sum.initial_state()
        return self._state_type(*self.private_round.initial_state(shapes), sum_state)

    def broadcast(self, state: Any) -> Parts:
        """Returns what the clients of the next round are sent."""
        seen = Parts(seen=self.private_round.broadcast(self._round_state(state)))
        if self.vector_sum is not None:
            seen["round_seed"], _ = self.vector_sum.start_round(state.sum_state)
        return seen

    def contribute(
        self, tensors: Sequence[tf.Tensor], broadcast: Parts, num_examples: tf.Tensor | None
    ) -> tuple[Parts, Parts]:
        """Clips one client's update, and encodes it for secure sums.

        It returns parts that are summed in the clear, and parts of secure sums.
        """
        weight = num_examples if self.is_weighted else None
        contribution, is_finite = self.private_round.clip_client(tensors, broadcast["seen"], weight)
        plain, secure = Parts(contribution._asdict()), Parts()
        if self.vector_sum is not None:
            update = plain.pop(_UPDATE)
            secure[_UPDATE] = self.vector_sum.encode(update, broadcast["round_seed"])
            for name in self._scalars:
                secure[name] = self._bit_sum.encode(tf.cast(plain.pop(name), tf.float32))
        if self._reports_non_finite:
            plain[_NOT_FINITE] = tf.cast(tf.logical_not(is_finite), tf.int32)
        return plain, secure

    def release(
        self, state: Any, plain: Parts, secure: Parts, shapes: Sequence[Sequence[int]]
    ) -> tuple[Any, list[tf.Tensor], Parts]:
        """Adds the noise of a round to the sums.

        It returns the state after the round, the noised average (float64) and measurements.
        """
        totals, counted, sum_state = Parts(plain), Parts(), state.sum_state
        not_finite = totals.pop(_NOT_FINITE, None)
        if self.vector_sum is not None:
            round_seed, sum_state = self.vector_sum.start_round(sum_state)
            totals[_UPDATE], counted["summed_clients"] = self.vector_sum.decode(
                secure[_UPDATE], round_seed, shapes
            )
            totals |= {name: self._bit_sum.decode(secure[name]) for name in self._scalars}
        contribution = self.private_round.contribution_type(**totals)
        after, average, measured = self.private_round.release(
            self._round_state(state), contribution
        )
        measurements = Parts(measured)
        if not_finite is not None:
            measurements[_NOT_FINITE] = not_finite
        return (
            self._state_type(*after, sum_state),
            average,
            Parts([*measurements.items(), *counted.items()]),
        )

    def _round_state(self, state: Any) -> Any:
        return self.private_round.state_type(*state[:-1])


def _covered_norm(private_round: interface.PrivateRound) -> float | None:
    """Returns the norm of a contribution to a secure sum that the noise of a round covers."""
    for name in ("encoded_norm", "unit_inflation"):
        if hasattr(private_round, name):
            return getattr(private_round, name)
    return None


class PlainMean:
    """Mean of the updates that are finite, without clipping or noise: for comparisons only."""

    moduli = Parts()
    is_weighted = False

    def initial_state(self, shapes: Sequence[Sequence[int]]) -> tuple[()]:
        """Returns the empty state."""
        del shapes
        return ()

    def broadcast(self, state: tuple[()]) -> tuple[()]:
        """Returns the empty value that clients are sent."""
        return state

    def contribute(
        self, tensors: Sequence[tf.Tensor], broadcast: tuple[()], num_examples: tf.Tensor | None
    ) -> tuple[Parts, Parts]:
        """Returns one client's update, zero if it is not finite, and the count of one client."""
        del broadcast, num_examples
        is_finite = tf.math.is_finite(clipping.global_norm(tensors))
        update = [tf.where(is_finite, tensor, tf.zeros_like(tensor)) for tensor in tensors]
        return Parts([(_UPDATE, update), ("clients", tf.constant(1, tf.int32))]), Parts()

    def release(
        self, state: tuple[()], plain: Parts, secure: Parts, shapes: Sequence[Sequence[int]]
    ) -> tuple[tuple[()], list[tf.Tensor], Parts]:
        """Returns the mean of the clients; zero without clients."""
        del secure, shapes
        count = plain["clients"]
        mean = [
            tf.math.divide_no_nan(total, tf.cast(count, total.dtype)) for total in plain[_UPDATE]
        ]
        return state, mean, Parts()
