"""Models of any kind are read for rounds, or refused with what to change."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl import validation
from tff_dpftrl.learning import model as model_lib
from tff_dpftrl.learning import own_model

_LOSS = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
_BATCH = (tf.TensorSpec([None, 18]), tf.TensorSpec([None], tf.int64))


def _keras(*layers):
    return tf.keras.Sequential([tf.keras.Input([18]), *layers, tf.keras.layers.Dense(3)])


def _metrics():
    return {"top": tf.keras.metrics.SparseTopKCategoricalAccuracy(2), "areas": _areas()}


def _areas():
    return tf.keras.metrics.MeanIoU(3, sparse_y_pred=False)


def test_a_keras_model_becomes_functional_and_is_read_again_as_it_is():
    model = own_model.read(_keras(), _BATCH, loss=_LOSS, metrics=_metrics)
    assert isinstance(model, model_lib.Model)
    assert own_model.read(model, _BATCH) is model
    assert own_model.num_parameters(model) == 18 * 3 + 3
    assert own_model.num_parameters(model, trained=False) == 0
    specs = own_model.metric_specs(model)
    assert list(specs) == ["loss/0", "loss/1", "top/0", "top/1", "areas/0"]
    assert specs["areas/0"].shape == [3, 3] and specs["loss/0"].dtype == tf.float32


def test_a_function_of_weights_is_a_model_too():
    model = model_lib.Model(
        initial_weights=((np.zeros([18], np.float32),), ()),
        predict_on_batch=lambda weights, x, training=True: tf.linalg.matvec(x, weights[0][0]),
        loss=lambda output, label, sample_weight=None: tf.reduce_sum(output),
        input_spec=_BATCH,
    )
    assert own_model.read(model, _BATCH) is model
    assert own_model.metric_specs(model) == {}
    for other in (_BATCH[::-1], _BATCH[0], (tf.TensorSpec([None, 17]), _BATCH[1])):
        with pytest.raises(validation.UsageError, match="and the pipeline makes"):
            own_model.read(model, other)


def test_metrics_need_names():
    for state in ((1.0, 2.0), 3.0):
        model = model_lib.Model(
            initial_weights=((), ()),
            predict_on_batch=lambda *_: None,
            loss=lambda *_: None,
            input_spec=_BATCH,
            initialize_metrics_state=lambda s=state: tf.nest.map_structure(tf.constant, s),
        )
        with pytest.raises(validation.UsageError, match="metrics without a name"):
            own_model.metric_specs(model)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (3, {}, "model must be a tf.keras.Model, .* got a int"),
        (lambda: 3, {}, "that makes a tff.learning.models.VariableModel, got a int"),
        (_keras, {"loss": _LOSS}, "loss and metrics are for a tf.keras.Model"),
        (_keras(), {}, "loss must be a tf.keras.losses.Loss"),
        (_keras(), {"loss": _LOSS, "metrics": lambda: {"loss": 3}}, "without 'loss'"),
    ],
)
def test_what_is_no_model_is_refused(model, options, message):
    with pytest.raises(validation.UsageError, match=message):
        own_model.read(model, _BATCH, **options)


@pytest.mark.parametrize(
    ("make_layer", "message"),
    [
        (
            lambda: tf.keras.layers.BatchNormalization(name="own"),
            "layer own keeps statistics or words",
        ),
        (lambda: tf.keras.layers.Normalization(name="own"), "layer own keeps statistics or words"),
        (
            lambda: tf.keras.layers.Dense(18, trainable=False, name="own"),
            "weights only, but .*own/",
        ),
        (lambda: tf.keras.layers.Dense(18, kernel_regularizer="l2"), "model adds losses"),
        (lambda: tf.keras.layers.Dense(18, kernel_constraint="non_neg"), "has a constraint on"),
    ],
)
def test_a_keras_model_that_would_not_be_trained_as_it_is_built_is_refused(make_layer, message):
    with pytest.raises(validation.UsageError, match=message):
        own_model.read(_keras(make_layer()), _BATCH, loss=_LOSS)


@pytest.mark.slow  # Making two models and their specs takes seconds.
def test_models_of_tff_are_read_as_they_are():
    tff = pytest.importorskip("tensorflow_federated", reason="reads models of TFF")

    def with_variables():
        metrics = [tf.keras.metrics.SparseCategoricalAccuracy(name="accuracy")]
        return tff.learning.models.from_keras_model(
            _keras(), _LOSS, input_spec=_BATCH, metrics=metrics
        )

    functional = tff.learning.models.functional_model_from_keras(
        _keras(), _LOSS, _BATCH, lambda: collections.OrderedDict(areas=_areas())
    )
    for model in (functional, with_variables):
        assert own_model.read(model, _BATCH) is model
        assert own_model.num_parameters(model) == 18 * 3 + 3
        assert own_model.num_parameters(model, trained=False) == 0
        with pytest.raises(validation.UsageError, match="and the pipeline makes"):
            own_model.read(model, _BATCH[::-1])
    assert list(own_model.metric_specs(functional)) == ["areas/0"]
    assert set(own_model.metric_specs(with_variables)) > {"loss/0", "accuracy/1"}
