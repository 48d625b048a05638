"""Aggregators with one bug each, for `audit_aggregator` to find; correct ones beside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import tensorflow as tf

import tff_dpftrl
from tff_dpftrl.accounting import guarantee
from tff_dpftrl.auditing import aggregator
from tff_dpftrl.discretization import grid
from tff_dpftrl.mechanisms import restarts
from tff_dpftrl.private_round import (
    adaptive_clipping,
    aggregation,
    clipping,
    discretize,
    estimators,
    fixed_clip,
    noise_stream,
    sampled_gaussian,
    secure_sums,
)

SCHEMA = tff_dpftrl.MinSep(num_rounds=32, min_sep=8, max_participations=4)
DELTA = 1e-6
CLIENTS_PER_ROUND = 10
CLIP_NORM = 0.5
STARTS = (0, 12)


@dataclasses.dataclass(frozen=True)
class Case:
    """What is audited, and with what.

    Attributes:
      build: Makes the aggregator.
      claim: Makes the claim from it; its own if None.
      options: Further arguments of `audit_aggregator`.
      schema: What clients keep to.
    """

    build: Callable[[], Any]
    claim: Callable[[Any], Any] | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    schema: tff_dpftrl.MinSep = SCHEMA

    def arguments(self) -> dict[str, Any]:
        """Arguments of `audit_aggregator`."""
        aggregator = self.build()
        claim = None if self.claim is None else self.claim(aggregator)
        return {
            "aggregator_or_process": aggregator,
            "schema": self.schema,
            "claim": claim,
            **self.options,
        }


def blt():
    """A BLT of fixed decays: nothing is optimised."""
    return tff_dpftrl.Blt(buf_decay=(0.9, 0.4), output_scale=(0.3, 0.2))


def restarted(base):
    """`base`, begun anew in the middle."""
    return restarts.Restarted(base, STARTS)


class _LessNoise(fixed_clip.FixedClipRound):
    @property
    def _stddev(self):
        return 0.8 * super()._stddev


class _NoiseOfTheMean(fixed_clip.FixedClipRound):
    """The noise is divided by the clients first, added to the sum, and divided again."""

    @property
    def _stddev(self):
        return super()._stddev / self.clients_per_round


class _NoFreshBits(fixed_clip.FixedClipRound):
    """Draws its noise with the seed of the run alone."""

    def noise(self, state, shapes, root=None):
        return super().noise(state, shapes, state.seed)


class _ClippedByTensor(fixed_clip.FixedClipRound):
    def clip_client(self, tensors, broadcast, weight=None):
        clipped = [clipping.clip_by_norm([x], self.clipping.constant_norm)[0][0] for x in tensors]
        return fixed_clip.interface.Contribution(clipped), tf.constant(True)


class _FirstTensorNotClipped(fixed_clip.FixedClipRound):
    def clip_client(self, tensors, broadcast, weight=None):
        first, *others = tensors
        clipped, _ = clipping.clip_by_norm(others, self.clipping.constant_norm)
        return fixed_clip.interface.Contribution([tf.cast(first, tf.float64), *clipped]), (
            tf.constant(True)
        )


class OnlyFirstTwoClipped(fixed_clip.FixedClipRound):
    def clip_client(self, tensors, broadcast, weight=None):
        clipped, _ = clipping.clip_by_norm(tensors[:2], self.clipping.constant_norm)
        kept = [tf.cast(tensor, tf.float64) for tensor in tensors[2:]]
        return fixed_clip.interface.Contribution([*clipped, *kept]), tf.constant(True)


class _NoNoiseSomewhere(fixed_clip.FixedClipRound):
    """Has no noise on some of the tensors, in some of the rounds."""

    def is_silent(self, tensor, rank, round_index):
        raise NotImplementedError

    def noise(self, state, shapes, root=None):
        noise, after = super().noise(state, shapes, root)
        silent = [
            self.is_silent(tensor, len(shape), state.round_index)
            for tensor, shape in enumerate(shapes)
        ]
        return [tf.where(no, 0.0 * x, x) for no, x in zip(silent, noise, strict=True)], after


class NoNoiseOnMatrices(_NoNoiseSomewhere):
    def is_silent(self, tensor, rank, round_index):
        return rank == 2


class NoNoiseOnFourth(_NoNoiseSomewhere):
    def is_silent(self, tensor, rank, round_index):
        return tensor == 3


class NoNoiseOnFourthLater(_NoNoiseSomewhere):
    FIRST = 6  # The first round without.

    def is_silent(self, tensor, rank, round_index):
        return (tensor == 3) & (round_index >= self.FIRST)


class NoNoiseLater(_NoNoiseSomewhere):
    FIRST = 70  # The first round without.

    def is_silent(self, tensor, rank, round_index):
        return round_index >= self.FIRST


class _ClippedAboveTwice(fixed_clip.FixedClipRound):
    def clip_client(self, tensors, broadcast, weight=None):
        clipped, is_finite = super().clip_client(tensors, broadcast)
        return _kept_up_to(2.0 * self.clipping.constant_norm, tensors, clipped), is_finite


class _NotClippedUpTo(fixed_clip.FixedClipRound):
    def clip_client(self, tensors, broadcast, weight=None):
        clipped, is_finite = super().clip_client(tensors, broadcast)
        return _kept_up_to(1.5 * self.clipping.constant_norm, tensors, clipped), is_finite


def _kept_up_to(norm, tensors, clipped):
    """Returns the update as it is if its norm is at most `norm`, else the clipped one."""
    given = [tf.cast(tensor, tf.float64) for tensor in tensors]
    is_kept = tf.linalg.global_norm(given) <= norm
    kept = [tf.where(is_kept, one, two) for one, two in zip(given, clipped.update, strict=True)]
    return fixed_clip.interface.Contribution(kept)


class _MeasuresTheMean(fixed_clip.FixedClipRound):
    def release(self, state, totals):
        state, average, measured = super().release(state, totals)
        first = tf.reshape(totals.update[0], [-1])[:2] / self.clients_per_round
        return state, average, measured | {"mean": tf.cast(first, tf.float32)}


class _MeasuresTheNorm(fixed_clip.FixedClipRound):
    def release(self, state, totals):
        state, average, measured = super().release(state, totals)
        norm = tf.cast(tf.linalg.global_norm(totals.update), tf.float32)
        return state, average, measured | {"norm": norm}


class _ShortSeed(_NoFreshBits):
    def initial_state(self, shapes):
        state = super().initial_state(shapes)
        return state._replace(seed=tf.bitwise.bitwise_and(state.seed, [0, 0xFFFFFF]))


class _SameSeedForTensors(fixed_clip.FixedClipRound):
    def initial_state(self, shapes):
        return super().initial_state(shapes[:1])

    def noise(self, state, shapes, root=None):
        (first,), after = super().noise(state, shapes[:1], root)
        return [tf.reshape(first, shape) for shape in shapes], after


class _SeedNotAdvanced(_NoFreshBits):
    def noise(self, state, shapes, root=None):
        first = state._replace(round_index=tf.constant(0, tf.int64))
        noise, after = super().noise(first, shapes)
        return noise, after._replace(round_index=state.round_index + 1)


class _RestartWithOldNoise(fixed_clip.FixedClipRound):
    """Begins with the first block's noise again, of which fresh bits would make other noise."""

    def noise(self, state, shapes, root=None):
        _, t = self._stream(shapes).block(state.round_index)
        block = noise_stream.NoiseStream(self._recipe.recipe, shapes)
        noise, buffer = block.next(state.buffer, t, state.seed)
        return noise, state._replace(round_index=state.round_index + 1, buffer=buffer)


class NoiseWithoutSeed(fixed_clip.FixedClipRound):
    """Draws noise that no audit can hold fixed: rounds of it cannot be replayed."""

    def noise(self, state, shapes, root=None):
        after = state._replace(round_index=state.round_index + 1)
        return [tf.random.normal(shape) for shape in shapes], after


class _CountWithoutFreshBits(adaptive_clipping.AdaptiveClipRound):
    def noise(self, state, shapes, root=None):
        noise, _, after = super().noise(state, shapes)
        _, count_noise, repeated = super().noise(state, shapes, state.seed)
        return noise, count_noise, after._replace(count_buffer=repeated.count_buffer)


class _Counting(fixed_clip.FixedClipRound):
    """Divides by the number of clients that there were."""

    contribution_type = adaptive_clipping.CountedContribution

    def clip_client(self, tensors, broadcast, weight=None):
        (clipped,), is_finite = super().clip_client(tensors, broadcast)
        return adaptive_clipping.CountedContribution(
            clipped, tf.constant(1.0, tf.float64)
        ), is_finite

    def release(self, state, totals):
        state, average, measured = super().release(state, totals)
        count = tf.maximum(totals.bit, 1.0)
        return state, [x * (self.clients_per_round / count) for x in average], measured


class _BitNotShifted(adaptive_clipping.AdaptiveClipRound):
    def clip_client(self, tensors, broadcast, weight=None):
        contribution, is_finite = super().clip_client(tensors, broadcast)
        bit = tf.cast(contribution.bit > 0, tf.float64)
        return contribution._replace(bit=bit), is_finite

    def release(self, state, totals):
        shifted = totals.bit - self.clients_per_round / 2
        return super().release(state, totals._replace(bit=shifted))


class _EstimateUsedAtOnce(adaptive_clipping.AdaptiveClipRound):
    def clip_client(self, tensors, broadcast, weight=None):
        moved = adaptive_clipping.ClipState(
            broadcast.estimate, broadcast.estimate, broadcast.excess
        )
        return super().clip_client(tensors, moved)


class _ZeroIsUnclipped(adaptive_clipping.AdaptiveClipRound):
    def clip_client(self, tensors, broadcast, weight=None):
        contribution, is_finite = super().clip_client(tensors, broadcast)
        is_zero = tf.equal(contribution.bit, 0.0)
        bit = tf.where(is_zero, tf.constant(0.5, tf.float64), contribution.bit)
        return contribution._replace(bit=bit), is_finite


class _UnboundedSum(secure_sums.VectorSum):
    """Takes the first rounding, however long it is."""

    def encode(self, tensors, round_seed):
        always = lambda *_: tf.constant(True)  # noqa: E731
        with mock.patch.object(discretize, "has_norm_at_most", always):
            return super().encode(tensors, round_seed)


class _UninflatedSum(secure_sums.VectorSum):
    """Declares the norm before rounding."""

    @property
    def contribution_norm(self):
        return self.clip_norm


def fixed(round_type, strategy=None, **options):
    """DP-FTRL with one clip norm, of a round of this type."""
    return round_type(
        blt() if strategy is None else strategy,
        noise_multiplier=2.0,
        clipping=clipping.FlatClipping(CLIP_NORM),
        clients_per_round=CLIENTS_PER_ROUND,
        **options,
    )


def adaptive(round_type, **options):
    """DP-FTRL with adaptive clipping, of a round of this type."""
    return round_type(
        restarted(blt()),
        noise_multiplier=2.0,
        clients_per_round=CLIENTS_PER_ROUND,
        clipping=adaptive_clipping.AdaptiveClipping(
            initial_clip_norm=CLIP_NORM, clipped_count_stddev=2.0
        ),
        **options,
    )


def encoding(dim: int = 256, scaled_clip_norm: float = 16.0) -> grid.GridEncoding:
    """A coarse grid: rounding lengthens updates by a third."""
    return grid.GridEncoding(dim=dim, max_clients=128, scaled_clip_norm=scaled_clip_norm)


def _fixed(round_type, strategy=None):
    return lambda: aggregation.Aggregation(fixed(round_type, strategy))


def _adaptive(round_type):
    return lambda: aggregation.Aggregation(adaptive(round_type))


def _secagg(sum_type):
    def build():
        vector_sum = sum_type(encoding(), CLIP_NORM)
        private_round = fixed(fixed_clip.FixedClipRound, encoded_norm=vector_sum.contribution_norm)
        return aggregation.Aggregation(private_round, vector_sum=vector_sum)

    return build


def _adaptive_secagg():
    vector_sum = secure_sums.VectorSum(encoding(), 1.0)
    private_round = adaptive(
        adaptive_clipping.AdaptiveClipRound, unit_inflation=vector_sum.contribution_norm
    )
    return aggregation.Aggregation(private_round, vector_sum=vector_sum)


def _sampled():
    return aggregation.Aggregation(
        sampled_gaussian.SampledGaussianRound(
            clipping=clipping.FlatClipping(CLIP_NORM),
            noise_multiplier=2.0,
            estimator=estimators.FixedDenominator(0.1, 100.0),
        )
    )


def _forget_buffer(state):
    """What a program loads that saved everything but the past noise."""
    return state._replace(buffer=state.buffer * 0.0)


def _claim_with_gap(made):
    """The claim for somebody who gave the stride where the gap was asked for."""
    schema = tff_dpftrl.MinSep.from_gap(_CLOSE.num_rounds, _CLOSE.min_sep, _CLOSE.num_rounds)
    return guarantee.dp_ftrl_guarantee(
        made.private_round.strategy,
        noise_multiplier=made.private_round.noise_multiplier,
        schema=schema,
        delta=DELTA,
    )


_CLOSE = tff_dpftrl.MinSep.as_many_as_fit(32, 3)
_OF_A_MODEL = {
    "value_type": aggregator.shapes_of([2, 2, 2, 1, 2, 1], 680),
}

PLANTED = {
    "clip above 2C only": Case(_fixed(_ClippedAboveTwice)),
    "norms from C to 1.5 C not clipped": Case(_fixed(_NotClippedUpTo)),
    "exact mean among the measurements": Case(_fixed(_MeasuresTheMean)),
    "exact norm among the measurements": Case(_fixed(_MeasuresTheNorm)),
    "root seed of 24 bits": Case(_fixed(_ShortSeed)),
    "noise std × 0.8": Case(_fixed(_LessNoise)),
    "division before noise": Case(_fixed(_NoiseOfTheMean)),
    "clip per tensor": Case(_fixed(_ClippedByTensor)),
    "clip over the first two of six tensors": Case(
        _fixed(OnlyFirstTwoClipped), options=_OF_A_MODEL
    ),
    "no noise on any matrix": Case(_fixed(NoNoiseOnMatrices)),
    "no noise on the fourth of six tensors": Case(_fixed(NoNoiseOnFourth), options=_OF_A_MODEL),
    "clip missing for one tensor": Case(_fixed(_FirstTensorNotClipped)),
    "same seed for two tensors": Case(_fixed(_SameSeedForTensors)),
    "seed not advanced": Case(_fixed(_SeedNotAdvanced, tff_dpftrl.Identity())),
    "buffer reset at resume": Case(
        _fixed(fixed_clip.FixedClipRound), options={"resume": _forget_buffer}
    ),
    "restart without fresh noise": Case(_fixed(_RestartWithOldNoise, restarted(blt()))),
    "stride read as gap": Case(_fixed(fixed_clip.FixedClipRound), _claim_with_gap, schema=_CLOSE),
    "conditional rounding without its bound": Case(_secagg(_UnboundedSum)),
    "inflation forgotten": Case(_secagg(_UninflatedSum)),
    "denominators by realised count": Case(_fixed(_Counting)),
    "bit sum not shifted": Case(_adaptive(_BitNotShifted)),
    "adaptive norm used before its restart": Case(_adaptive(_EstimateUsedAtOnce)),
    "no fresh bits in a round": Case(_fixed(_NoFreshBits)),
    "no fresh bits in the count": Case(_adaptive(_CountWithoutFreshBits)),
    "zero update contributing": Case(_adaptive(_ZeroIsUnclipped)),
}
"""By the name of its bug."""

CORRECT = {
    "identity": Case(_fixed(fixed_clip.FixedClipRound, tff_dpftrl.Identity())),
    "identity, restarted": Case(
        _fixed(fixed_clip.FixedClipRound, restarted(tff_dpftrl.Identity()))
    ),
    "tree": Case(_fixed(fixed_clip.FixedClipRound, tff_dpftrl.Tree(32))),
    "tree, restarted": Case(_fixed(fixed_clip.FixedClipRound, restarted(tff_dpftrl.Tree(32)))),
    "BLT": Case(_fixed(fixed_clip.FixedClipRound)),
    "BLT, restarted": Case(_fixed(fixed_clip.FixedClipRound, restarted(blt()))),
    "adaptive": Case(_adaptive(adaptive_clipping.AdaptiveClipRound)),
    "secure sum": Case(_secagg(secure_sums.VectorSum)),
    "adaptive, secure sum": Case(_adaptive_secagg),
    "banded": Case(_fixed(fixed_clip.FixedClipRound, tff_dpftrl.BandedToeplitz.fhu(4))),
    "inverse-banded": Case(_fixed(fixed_clip.FixedClipRound, tff_dpftrl.InverseBanded.bisr(4))),
    "banded, restarted": Case(
        _fixed(fixed_clip.FixedClipRound, restarted(tff_dpftrl.BandedToeplitz.fhu(4)))
    ),
    "inverse-banded, restarted": Case(
        _fixed(fixed_clip.FixedClipRound, restarted(tff_dpftrl.InverseBanded.bisr(4)))
    ),
    "sampled": Case(_sampled),
}
"""By the kind of aggregator."""
