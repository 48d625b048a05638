"""Tests of tff_dpftrl.finetuning.clipped_sums, against NumPy."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from tests.models import small_models
from tff_dpftrl.finetuning import clipped_sums
from tff_dpftrl.models import metrics
from tff_dpftrl.private_round import clipping

_COUNTS = (3, 1, 0, 2, 5)
_FLOAT32 = 1e-6  # Relative: sixteen roundings; a gradient here takes fewer.


def _row_losses(weights, rows):
    """Half the squared error of a linear model; a gradient is the error times the inputs."""
    inputs, labels = rows
    slopes, offset = weights
    return 0.5 * tf.square(tf.linalg.matvec(inputs, slopes) + offset - labels)


def _problem(counts=_COUNTS, seed=0):
    """Weights, rows, `row_splits`."""
    rng = np.random.default_rng(seed)
    num_rows = sum(counts)
    weights = [rng.normal(size=3).astype(np.float32), np.float32(rng.normal())]
    rows = (rng.normal(size=(num_rows, 3)), rng.normal(size=num_rows))
    splits = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return weights, tuple(x.astype(np.float32) for x in rows), splits


def _row_gradients(weights, rows):
    """Shape [rows, 4]."""
    slopes, offset = (np.float64(weight) for weight in weights)
    inputs, labels = (np.float64(x) for x in rows)
    errors = inputs @ slopes + offset - labels
    return errors[:, None] * np.concatenate([inputs, np.ones([len(inputs), 1])], axis=1)


def _unit_gradients(weights, rows, splits):
    """Shape [units, 4]; zero for a unit without rows."""
    gradients = _row_gradients(weights, rows)
    return np.stack(
        [
            gradients[a:b].mean(axis=0) if b > a else np.zeros(4)
            for a, b in zip(splits[:-1], splits[1:], strict=True)
        ]
    )


def _clip(gradients, clip_norm):
    norms = np.linalg.norm(gradients, axis=1)
    factors = np.minimum(1, clip_norm * (1 - clipping.CLIP_MARGIN) / np.maximum(norms, 1e-30))
    return gradients * factors[:, None]


def _run(
    weights, rows, splits, clip_norm, *, row_losses=_row_losses, normalised=False, compiled=False
):
    """Sum as one vector, and norms."""
    function = clipped_sums.looped(row_losses, normalised=normalised)
    if compiled:
        function = tf.function(function, autograph=False)
    total, units = function([tf.constant(w) for w in weights], rows, splits, clip_norm)
    assert all(x.dtype == tf.float64 for x in (*total, *units))
    return np.concatenate([np.ravel(x) for x in total]), units.norms.numpy()


@pytest.mark.parametrize("clip_norm", [0.1, 1.0, 100.0])
def test_the_sum_is_that_of_clipped_means(clip_norm):
    weights, rows, splits = _problem()
    gradients = _unit_gradients(weights, rows, splits)
    found, norms = _run(weights, rows, splits, clip_norm, compiled=True)
    np.testing.assert_allclose(norms, np.linalg.norm(gradients, axis=1), rtol=_FLOAT32)
    expected = _clip(gradients, clip_norm).sum(axis=0)
    scale = np.linalg.norm(_clip(gradients, clip_norm), axis=1).sum()
    np.testing.assert_allclose(found, expected, rtol=0, atol=_FLOAT32 * scale)


@pytest.mark.parametrize("units_per_chunk", [2, 9])
def test_the_loss_of_a_unit_is_the_mean_of_its_rows(units_per_chunk):
    weights, rows, splits = _problem()
    losses = _row_losses(weights, rows).numpy()
    expected = [
        losses[a:b].mean() if b > a else 0.0 for a, b in zip(splits[:-1], splits[1:], strict=True)
    ]
    add = clipped_sums.sum_in_chunks(
        clipped_sums.looped(_row_losses), units_per_chunk=units_per_chunk
    )
    _, units = add(weights, lambda begin, end: tuple(x[begin:end] for x in rows), splits, 0.1)
    np.testing.assert_allclose(units.losses, expected, rtol=_FLOAT32)


def test_clipping_rows_before_their_mean_is_something_else():
    weights, rows, splits = _problem()
    row_gradients = _clip(_row_gradients(weights, rows), 1.0)
    bounds = zip(splits[:-1], splits[1:], strict=True)
    wrong = sum(row_gradients[a:b].mean(axis=0) for a, b in bounds if b > a)
    found, _ = _run(weights, rows, splits, 1.0)
    assert np.linalg.norm(found - wrong) > 0.1


def test_dividing_by_the_group_size_is_something_else():
    # A unit's divisor is the number of its own rows.
    weights, rows, splits = _problem()
    counts = np.maximum(np.diff(splits), 1)
    wrong = _unit_gradients(weights, rows, splits) * counts[:, None] / max(_COUNTS)
    found, _ = _run(weights, rows, splits, 100.0)
    assert np.linalg.norm(found - wrong.sum(axis=0)) > 0.1


def test_without_clipping_units_of_one_row_add_up_to_the_gradient_of_all():
    weights, rows, splits = _problem([1] * 6)
    with tf.GradientTape() as tape:
        watched = [tf.constant(w) for w in weights]
        tape.watch(watched)
        loss = tf.reduce_sum(_row_losses(watched, rows))
    expected = np.concatenate([np.ravel(x) for x in tape.gradient(loss, watched)])
    found, _ = _run(weights, rows, splits, 1e6)
    np.testing.assert_allclose(found, expected, rtol=0, atol=_FLOAT32 * 6 * np.abs(expected).max())


@pytest.mark.parametrize("unit", range(len(_COUNTS)))
def test_no_unit_moves_the_sum_by_more_than_the_clip_norm(unit):
    weights, rows, splits = _problem()
    weights = [
        np.multiply(w, 50, dtype=np.float32) for w in weights
    ]  # Every unit with rows is clipped.
    kept = np.ones(splits[-1], bool)
    kept[splits[unit] : splits[unit + 1]] = False
    fewer = np.delete(np.diff(splits), unit)
    without = np.concatenate([[0], np.cumsum(fewer)])
    with_unit, _ = _run(weights, rows, splits, 0.3)
    without_unit, _ = _run(weights, tuple(x[kept] for x in rows), without, 0.3)
    moved = np.linalg.norm(with_unit - without_unit)
    assert moved <= 0.3
    if _COUNTS[unit]:
        assert moved > 0.3 * (1 - 2 * clipping.CLIP_MARGIN)


def test_normalised_sums_are_divided_by_the_clip_norm():
    weights, rows, splits = _problem()
    total, norms = _run(weights, rows, splits, 0.7)
    normalised, same_norms = _run(weights, rows, splits, 0.7, normalised=True)
    np.testing.assert_array_equal(normalised, total / 0.7)
    np.testing.assert_array_equal(norms, same_norms)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_a_unit_that_is_not_finite_counts_as_zero(value):
    weights, rows, splits = _problem()
    rows[0][4] = value  # The first of two rows of unit 3.
    gradients = np.delete(_unit_gradients(*_problem()), 3, axis=0)
    found, norms = _run(weights, rows, splits, 1.0)
    assert norms[3] == np.inf and np.all(np.isfinite(np.delete(norms, 3)))
    np.testing.assert_allclose(found, _clip(gradients, 1.0).sum(axis=0), rtol=0, atol=1e-5)


@pytest.mark.parametrize("counts", [(), (0,), (0, 0, 0)])
def test_nobody_adds_zero(counts):
    found, norms = _run(*_problem(counts), 1.0)
    np.testing.assert_array_equal(found, np.zeros(4))
    np.testing.assert_array_equal(norms, np.zeros(len(counts)))


def test_weights_that_are_looked_up_or_not_used_have_a_gradient():
    table, unused = np.ones([4, 2], np.float32), np.ones(3, np.float32)

    def row_losses(weights, rows):
        return tf.reduce_sum(tf.gather(weights[0], rows), axis=1)

    ids = np.array([1, 1, 3], np.int32)
    found, norms = _run([table, unused], ids, [0, 2, 3], 10.0, row_losses=row_losses)
    np.testing.assert_array_equal(found, [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 0])
    np.testing.assert_allclose(norms, np.sqrt([2, 2]), rtol=1e-12)


@pytest.mark.parametrize("splits", [[0, 3, 10], [0, 3, 12], [1, 3, 11], [0, 7, 3, 11]])
def test_row_splits_that_are_not_of_these_rows_are_refused(splits):
    weights, rows, _ = _problem()
    with pytest.raises(tf.errors.InvalidArgumentError, match="row_splits must"):
        _run(weights, rows, splits, 1.0)


def test_a_loss_of_all_rows_is_refused():
    with pytest.raises(ValueError, match="row_losses must return one loss a row"):
        _run(*_problem(), 1.0, row_losses=lambda *args: tf.reduce_mean(_row_losses(*args)))


def _run_in_chunks(units_per_chunk, problem=None, reads=None, devices=None):
    weights, rows, splits = problem or _problem()

    def read_rows(begin, end):
        if reads is not None:
            reads.append((int(begin), int(end)))
        return tuple(x[begin:end] for x in rows)

    add = clipped_sums.sum_in_chunks(
        clipped_sums.looped(_row_losses), units_per_chunk=units_per_chunk, devices=devices
    )
    total, units = add(weights, read_rows, splits, 1.0)
    return np.concatenate([np.ravel(x) for x in total]), units.norms


@pytest.mark.parametrize(
    "units_per_chunk", [2, 9, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 5))]
)
def test_chunks_change_nothing_but_the_order_of_addition(units_per_chunk):
    expected, norms = _run(*_problem(), 1.0)
    found, found_norms = _run_in_chunks(units_per_chunk)
    np.testing.assert_array_equal(found_norms, norms)
    # Five clipped units, added in float64.
    np.testing.assert_allclose(found, expected, rtol=0, atol=5 * 5 * 2.0**-53)
    again, _ = _run_in_chunks(units_per_chunk)
    np.testing.assert_array_equal(again, found)


_TWO_DEVICES = """
import tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
import numpy as np
from tff_dpftrl.finetuning import ghost, clipped_sums
from tff_dpftrl.models import gpt2
model = gpt2.Gpt2(11, 5, 40, 1, 4, 64)
weights = [tf.constant(weight) for weight in model.initial_weights(0)]
ids = np.random.default_rng(0).integers(1, 11, [9, 6], dtype=np.int32)
booked = ghost.booked(model, 1)
read = lambda begin, end: (ids[begin:end, :-1], ids[begin:end, 1:])
found = []
for devices in ([], ["CPU:0", "CPU:1"]):
    add = clipped_sums.sum_in_chunks(booked, units_per_chunk=2, devices=devices)
    total, units = add(weights, read, np.arange(10), 0.5)
    found.append([*(x.numpy() for x in total), units.norms, units.losses])
seen = clipped_sums.sum_in_chunks(
    lambda *given: (booked(*given)[0], clipped_sums.PerUnit(*[tf.zeros([1])] * 2)),
    units_per_chunk=9, devices=["CPU:1", "CPU:0"],
)
print(seen(weights, read, np.arange(10), 0.5)[0][0].device)
print(all(map(np.array_equal, *found)))
"""


def test_chunks_on_two_devices_add_up_to_the_same_bits():
    expected, norms = _run_in_chunks(2)
    found, found_norms = _run_in_chunks(2, devices=["CPU:0", "CPU:0"])
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(found_norms, norms)


@pytest.mark.slow
def test_two_logical_devices_share_the_chunks():
    """In a process of its own, since TensorFlow makes its devices once."""
    done = subprocess.run(
        [sys.executable, "-c", _TWO_DEVICES], capture_output=True, text=True, check=True
    )
    device, is_same = done.stdout.split()
    assert device.endswith("CPU:1")
    assert is_same == "True"


def test_chunks_of_whole_units_are_read_one_after_the_other():
    reads = []
    _run_in_chunks(2, reads=reads)
    assert reads == [(0, 4), (4, 6), (6, 11)]


def test_a_batch_of_nobody_reads_nothing():
    reads = []
    found, norms = _run_in_chunks(2, _problem(()), reads)
    np.testing.assert_array_equal(found, np.zeros(4))
    assert not reads and norms.shape == (0,)


def test_rows_that_are_missing_are_not_left_out_silently():
    weights, rows, splits = _problem()
    add = clipped_sums.sum_in_chunks(clipped_sums.looped(_row_losses), units_per_chunk=2)
    with pytest.raises(ValueError, match="rows from 4 up to 6, all 2 of them; got .1. rows"):
        add(weights, lambda begin, end: tuple(x[begin : min(end, 5)] for x in rows), splits, 1.0)
    with pytest.raises(ValueError, match="row_splits must be a vector that begins with 0"):
        add(weights, lambda begin, end: rows, [], 1.0)
    with pytest.raises(ValueError, match="clip_norm must be a finite number, at least"):
        add(weights, lambda begin, end: rows, splits, 0.0)
    with pytest.raises(ValueError, match="units_per_chunk must be at least 1, got 0"):
        clipped_sums.sum_in_chunks(clipped_sums.looped(_row_losses), units_per_chunk=0)


@pytest.mark.parametrize("name", ["word-lstm", "dp-fedavg-lstm", "transformer"])
def test_the_loss_of_a_row_of_text_is_the_mean_over_its_own_targets(name):
    model = small_models.build(name, vocabulary_size=9, sequence_length=4)
    weights = [tf.constant(w) for w in model.initial_weights(0)]
    ids = np.array([[7, 1, 2, 3, 8], [7, 6, 8, 0, 0], [7, 0, 0, 0, 0], [0, 0, 0, 0, 0]], np.int32)
    rows = ids[:, :-1], ids[:, 1:]
    found = clipped_sums.language_rows(model)(weights, rows)
    log_shares = tf.nn.log_softmax(model.logits(weights, rows[0])).numpy()
    expected = [-log_shares[0, range(4), [1, 2, 3, 8]].mean()]
    expected += [-log_shares[1, range(2), [6, 8]].mean(), 0, 0]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    # Training weighs each target of a batch the same instead: four here and two there.
    logits, positions = model.compact_logits(weights, rows[0])
    targets = tf.gather(tf.reshape(rows[1], [-1]), positions)
    in_training = metrics.mean_cross_entropy(logits, targets, 0)
    assert float(in_training) == pytest.approx(float(4 * found[0] + 2 * found[1]) / 6, rel=1e-5)
