"""Batches that a plan makes of serialized examples."""

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl.runtime.plans import example_pipeline


def _example(ids):
    feature = tf.train.Feature(int64_list=tf.train.Int64List(value=ids))
    features = tf.train.Features(feature={"tokens": feature})
    return tf.train.Example(features=features).SerializeToString()


def _shifted(features):
    """Batches of a language model: y is x shifted by one word."""
    return features["tokens"][:, :-1], features["tokens"][:, 1:]


def _batches(examples, *, seed=None, **options):
    features = {"tokens": example_pipeline.PaddedSequence(4)}
    pipeline = example_pipeline.ExamplePipeline(features, _shifted, **({"batch_size": 2} | options))
    serialized = tf.constant(list(map(_example, examples)), tf.string, shape=[len(examples)])
    seed = None if seed is None else tf.constant(seed, tf.int64)
    return [
        tuple(map(lambda array: array.tolist(), batch))
        for batch in pipeline.batches(serialized, seed).as_numpy_iterator()
    ]


def test_sequences_are_padded_cut_and_shifted():
    found = _batches([[2, 5, 6], [2, 7, 8, 9, 10, 11], []])
    assert found == [([[2, 5, 6], [2, 7, 8]], [[5, 6, 0], [7, 8, 9]]), ([[0, 0, 0]], [[0, 0, 0]])]


def test_no_examples_make_no_batch():
    assert _batches([]) == []
    assert _batches([], epochs=3, shuffle=True, seed=[1, 2]) == []


def test_batches_run_over_the_ends_of_epochs():
    found = _batches([[1], [2], [3]], epochs=2)
    assert [[row[0] for row in x] for x, _ in found] == [[1, 2], [3, 1], [2, 3]]


def _order(seed):
    found = _batches([[i] for i in range(20)], batch_size=20, epochs=2, shuffle=True, seed=seed)
    return [[row[0] for row in x] for x, _ in found]


def test_every_epoch_has_its_own_order_from_the_seed():
    first, second = _order([1, 2])
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second != list(range(20))
    assert _order([1, 2]) == [first, second]
    assert _order([1, 3]) != [first, second]


def test_several_features_of_several_types():
    features = {
        "x": tf.io.FixedLenFeature([2], tf.float32),
        "words": example_pipeline.PaddedSequence(2, tf.string, b"-"),
    }
    pipeline = example_pipeline.ExamplePipeline(features, dict, batch_size=5)
    example = tf.train.Example()
    example.features.feature["x"].float_list.value.extend([1.0, 2.0])
    example.features.feature["words"].bytes_list.value.append(b"hello")
    (batch,) = pipeline.batches(tf.constant([example.SerializeToString()])).as_numpy_iterator()
    np.testing.assert_array_equal(batch["x"], [[1.0, 2.0]])
    assert batch["words"].tolist() == [[b"hello", b"-"]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": {}}, "at least one feature"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"epochs": 0}, "epochs must be at least 1"),
    ],
)
def test_bad_options_are_refused(options, message):
    values = {"features": {"x": tf.io.FixedLenFeature([], tf.float32)}, "batch_size": 1} | options
    with pytest.raises(ValueError, match=message):
        example_pipeline.ExamplePipeline(to_batch=dict, **values)
