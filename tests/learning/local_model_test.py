"""Models of either kind work in TFF's processes."""

import numpy as np
import pytest
import tensorflow as tf

pytest.importorskip("tensorflow_federated", reason="wraps models for TFF")

import tensorflow_federated as tff

from tff_dpftrl.learning import bucket_counts, local_model
from tff_dpftrl.learning import model as model_lib


def test_tff_gets_a_model_of_its_own_that_computes_the_same():
    model = bucket_counts.build_model(3)
    theirs = local_model.as_tff(model)
    assert isinstance(theirs, tff.learning.models.FunctionalModel)
    assert model_lib.is_functional(theirs)
    assert local_model.as_tff(theirs) is theirs
    assert local_model.as_tff(len) is len
    weights, x, y = ((np.arange(3.0, dtype=np.float32),), ()), tf.ones([2, 3]), tf.constant([1, 2])
    found = [
        (scores := one.predict_on_batch(weights, x), one.loss(scores, y), one.input_spec)
        for one in (model, theirs)
    ]
    tf.nest.map_structure(np.testing.assert_array_equal, *(pair[:2] for pair in found))
    assert found[0][2] == found[1][2]
    output = model_lib.BatchOutput(0.0, scores, 2)
    state = theirs.update_metrics_state(
        theirs.initialize_metrics_state(), tf.constant([1, 2], tf.int64), output
    )
    assert theirs.finalize_metrics(state)["num_examples"] == 3


def test_a_model_without_metrics_can_be_tffs_too():
    spec = tf.TensorSpec([None])
    model = local_model.as_tff(model_lib.Model(((), ()), lambda *_: 1, lambda *_: 2, (spec, spec)))
    state = model.initialize_metrics_state()
    output = model_lib.BatchOutput(0.0, (), 0)
    assert model.finalize_metrics(model.update_metrics_state(state, tf.zeros([1]), output)) == {}
