"""Exact probes of the steps of fine-tuning, on correct steps and on planted faults."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl.auditing import step_probes
from tff_dpftrl.auditing.evidence import run_noise
from tff_dpftrl.execution import entropy
from tff_dpftrl.finetuning import (
    clipped_sums,
    example_sampling,
    ghost,
    private_steps,
    run_privacy,
)
from tff_dpftrl.finetuning import plan as plan_lib
from tff_dpftrl.mechanisms import identity
from tff_dpftrl.models import keras_versions, low_rank, transformer, word_lstm
from tff_dpftrl.runs import privacy

_CLIP, _AT_ONCE, _NUM_STEPS = 0.05, 3, 7
# Chance that correct steps are called violated in a test: the noise has no seed here.
_ERROR_RATE = 1e-6
_MODEL = word_lstm.WordLstm(40, 5, embedding_size=12, state_size=16)
_TRANSFORMER = transformer.Transformer(
    40, 5, embedding_size=12, num_layers=1, num_heads=2, feed_forward_size=16
)
_ADAPTERS = low_rank.LowRank(_TRANSFORMER, _TRANSFORMER.initial_weights(0), 2)

_SAMPLED = run_privacy.SampledFinetuning.of(
    plan_lib.make_plan(
        example_sampling.of_sizes([4] * 100),
        sampling="user",
        group_size=2,
        expected_units=10.0,
        num_steps=_NUM_STEPS,
        noise_multiplier=1.0,
        delta=1e-5,
    ),
    clip_norm=_CLIP,
    deterministic_seed=None,
)
_PASSES = privacy.DpFtrl(
    num_rounds=_NUM_STEPS,
    clients_per_round=10,
    clip_norm=_CLIP,
    delta=1e-5,
    noise_multiplier=1.0,
    data_in_one_place=True,
).plan(40, 1000)


def _rows(counts, seed=0):
    ids = np.random.default_rng(seed).integers(4, 40, [sum(counts), 6]).astype(np.int32)
    return (ids[:, :-1], ids[:, 1:]), np.concatenate([[0], np.cumsum(counts)])


_UNITS = [2, 1, 2, 2, 1]  # Three at once: the last piece has two.


def _build(plan, sums, *, noise=1.0, model=_MODEL, kind=private_steps.PrivateSteps):
    strategy = identity.Identity() if plan is _SAMPLED else plan.strategy
    weaker = plan.with_noise(multiplier=noise * plan.noise_multiplier)
    return lambda optimizer: kind(
        private_steps.round_of(weaker, strategy),
        sums,
        optimizer,
        model.initial_weights(0),
        units_at_once=_AT_ONCE,
    )


# Traced once for all tests, which takes most of an audit's time.
_GHOST = tf.function(ghost.booked(_MODEL, 2), autograph=False)
_LOOPED = tf.function(clipped_sums.looped(clipped_sums.language_rows(_MODEL)), autograph=False)


def _audit(build, plan=_SAMPLED, counts=tuple(_UNITS), error_rate=_ERROR_RATE):
    return step_probes.audit_steps(build, *_rows(counts), plan=plan, error_rate=error_rate)


@pytest.mark.parametrize(
    ("plan", "sums", "counts"),
    [
        pytest.param(_SAMPLED, _GHOST, _UNITS, id="ghost"),
        pytest.param(_SAMPLED, _LOOPED, _UNITS, id="looped", marks=pytest.mark.slow),
        pytest.param(_PASSES, _GHOST, _UNITS, id="passes", marks=pytest.mark.slow),
        pytest.param(_SAMPLED, _GHOST, [1], id="one unit", marks=pytest.mark.slow),
        pytest.param(_SAMPLED, _GHOST, [2] * 90, id="more than expected", marks=pytest.mark.slow),
    ],
)
def test_correct_steps_are_consistent(plan, sums, counts):
    found = _audit(_build(plan, sums), plan, counts)
    assert found.verdict == "consistent with the claim", found.to_markdown()
    added = next(finding for finding in found.findings if finding.test == "what one unit adds")
    assert float(added.says.split()[2]) > 0.999  # The clip was reached,
    spread = next(finding for finding in found.findings if "standard deviation" in finding.test)
    assert float(spread.power.split()[2]) > 0.85  # and a tenth of the noise would be missed.
    assert found.confidence == pytest.approx(1.0 - _ERROR_RATE)


@pytest.mark.slow
def test_adapters_are_audited_like_a_model():
    sums = ghost.booked(_ADAPTERS, 2)
    assert not _audit(_build(_SAMPLED, sums, model=_ADAPTERS)).is_violated


def _leave_out_fresh_bits(private_round):
    noise = private_round.noise
    private_round.noise = lambda state, shapes: noise(state, shapes, state.seed)


class _SameNoise(private_steps.PrivateSteps):
    """Takes every step with the seed of the run alone, as if it were the first."""

    def __init__(self, private_round, *args, **kwargs):
        _leave_out_fresh_bits(private_round)
        super().__init__(private_round, *args, **kwargs)

    def step(self, state, row_splits, read_rows):
        first = state["aggregator"]._replace(round_index=tf.constant(0, tf.int64))
        new, units = super().step({**state, "aggregator": first}, row_splits, read_rows)
        index = state["aggregator"].round_index + 1
        return {**new, "aggregator": new["aggregator"]._replace(round_index=index)}, units


class _WithoutNoise(private_steps.PrivateSteps):
    """Releases the exact mean in some of the steps, on some of the weights."""

    def _is_exact(self, state):
        return int(state["aggregator"].round_index) == _NUM_STEPS - 1

    def _exact_weights(self, tensor, size):
        return size

    def step(self, state, row_splits, read_rows):
        new, units = super().step(state, row_splits, read_rows)
        if self._is_exact(state):
            old = state["global_model_weights"]["trainable"]
            total, _ = self._sum(self._weights, read_rows, row_splits, self._clip_norm)
            weights = []
            for i, after in enumerate(new["global_model_weights"]["trainable"]):
                exact = old[i] - total[i].numpy() * self._scale / 10.0
                is_exact = np.arange(after.size) < self._exact_weights(i, after.size)
                weights.append(np.where(is_exact.reshape(after.shape), exact, after))
            new = {**new, "global_model_weights": {"trainable": weights}}
        return new, units


class _OftenExact(_WithoutNoise):
    def _is_exact(self, state):
        return int(np.sum(state["aggregator"].seed)) % 2 == 0 or super()._is_exact(state)


class _ExactInTheMiddle(_WithoutNoise):
    def _is_exact(self, state):
        return int(state["aggregator"].round_index) == 3  # Three steps come before and after it.


class _ExactTensor(_WithoutNoise):
    """Has no noise on the smallest tensor, or on the first weights of the first one."""

    def _is_exact(self, state):
        return True

    def _exact_weights(self, tensor, size):
        return size if size == min(weight.shape.num_elements() for weight in self._weights) else 0


class _ExactBlock(_ExactTensor):
    def _exact_weights(self, tensor, size):
        return 128 if tensor == 0 else 0


class _TwiceAtBorders(private_steps.PrivateSteps):
    """Adds the last unit of every full piece to the next one as well."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        once = self._sum

        def twice(weights, read_rows, row_splits, clip_norm):
            total, units = once(weights, read_rows, row_splits, clip_norm)
            for last in range(_AT_ONCE, len(row_splits), _AT_ONCE):
                begin, end = row_splits[last - 1], row_splits[last]
                more, _ = once(
                    weights,
                    lambda i, j, begin=begin: read_rows(begin + i, begin + j),
                    np.array([0, end - begin]),
                    clip_norm,
                )
                total = [
                    tf.cast(x, tf.float64) + tf.cast(y, tf.float64)
                    for x, y in zip(total, more, strict=True)
                ]
            return total, units

        self._sum = twice


class _NoFreshBits(private_steps.PrivateSteps):
    def __init__(self, private_round, *args, **kwargs):
        _leave_out_fresh_bits(private_round)
        super().__init__(private_round, *args, **kwargs)


class _NoiseWithoutSeed(private_steps.PrivateSteps):
    """Takes steps with noise that no audit can hold fixed."""

    def step(self, state, row_splits, read_rows):
        seed = tf.random.uniform([2], maxval=2**62, dtype=tf.int64)
        private = state["aggregator"]._replace(seed=seed)
        return super().step({**state, "aggregator": private}, row_splits, read_rows)


_SPREAD = "noise: standard deviation of each step"
_OF_TENSORS = "noise: standard deviation of each tensor"
_PLANTED = {
    "noise × 0.3": ({"noise": 0.3}, _SPREAD),
    "noise × 0.9": ({"noise": 0.9}, _SPREAD),
    "the same noise in every step": ({"kind": _SameNoise}, "noise: correlation of steps"),
    "no noise in the last step": ({"kind": _WithoutNoise}, _SPREAD),
    "no noise in the middle step": ({"kind": _ExactInTheMiddle}, _SPREAD),
    "no noise on the smallest tensor": ({"kind": _ExactTensor}, _OF_TENSORS),
    "no noise on a block of a tensor": ({"kind": _ExactBlock}, _SPREAD),
    "an exact mean in half of the runs": ({"kind": _OftenExact}, _SPREAD),
    "units counted twice at borders": ({"kind": _TwiceAtBorders}, "what one unit adds"),
    "no fresh bits": ({"kind": _NoFreshBits}, "a step executed again from its state"),
}


# Faults of the noise, of what a unit adds and of fresh bits; the others are slow.
_FAST = ("no noise in the middle step", "units counted twice at borders", "no fresh bits")


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, marks=[] if fault in _FAST else [pytest.mark.slow]) for fault in _PLANTED],
)
@pytest.mark.parametrize(
    "plan", [_SAMPLED, pytest.param(_PASSES, marks=pytest.mark.slow)], ids=["sampled", "passes"]
)
def test_planted_faults_are_found_and_named(fault, plan, monkeypatch):
    monkeypatch.setattr(run_noise, "_BLOCK", 64)  # The model's tensors are small.
    changes, test = _PLANTED[fault]
    found = _audit(_build(plan, _GHOST, **changes), plan)
    assert test in {finding.test for finding in found.findings if finding.outcome == "violated"}
    assert found.is_ours == ("kind" not in changes)


@pytest.mark.slow
def test_rows_that_are_not_clipped_are_found():
    def unclipped(weights, rows, row_splits, clip_norm):
        return _LOOPED(weights, rows, row_splits, 3.0 * clip_norm)

    found = _audit(_build(_SAMPLED, unclipped))
    assert {finding.test for finding in found.findings if finding.outcome == "violated"} == {
        "what one unit adds"
    }


@pytest.mark.slow
def test_of_steps_that_cannot_be_replayed_nobody_says_what_a_unit_adds():
    found = _audit(_build(_SAMPLED, _GHOST, kind=_NoiseWithoutSeed))
    assert not found.is_violated
    (missed,) = (one for one in found.findings if one.outcome == "not tested")
    assert missed.test == "what one unit adds" and "the sensitivity is not known" in missed.says
    everything = f"{_NUM_STEPS} of {_NUM_STEPS} steps for the sensitivity"
    assert everything in found.headline


def test_what_cannot_be_audited_is_refused():
    with pytest.raises(ValueError, match="row_splits must have one unit at least"):
        _audit(_build(_SAMPLED, _GHOST), counts=())
    silent = _SAMPLED.with_noise(multiplier=0.0)
    with pytest.raises(ValueError, match="plan has no noise"):
        _audit(_build(_SAMPLED, _GHOST), silent)


@pytest.mark.slow
def test_correct_steps_are_hardly_ever_called_violated(monkeypatch):
    steps = _build(_SAMPLED, _GHOST)(keras_versions.SGD(1.0))  # Traced once for all audits:
    bits = entropy.Repeated()  # they read the same file.
    monkeypatch.setattr(entropy, "Repeated", lambda: bits)
    violated = sum(
        _audit(lambda _: steps, counts=[2, 1], error_rate=0.05).is_violated for _ in range(200)
    )
    assert violated <= 21  # Of Binomial(200, 0.05), more in one of a thousand.
