"""Rounds of learning and of evaluation, of a model, optimizers and a private round.

A training round is that of TFF's federated averaging with the same parts: the same noise, and the
same weights up to rounding. TFF zeroes an update that is not finite before the aggregator sees it;
here the private round does, which also leaves its client out of the estimate of a clip norm, and
counts it.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf

from tff_dpftrl.execution import federated_round
from tff_dpftrl.learning import local_updates, metric_sums, optimizers
from tff_dpftrl.learning import model as model_lib
from tff_dpftrl.private_round import aggregation as aggregation_lib

Aggregation: TypeAlias = aggregation_lib.Aggregation | aggregation_lib.PlainMean

_UPDATE = "update"
_METRICS = "metrics"


class ModelWeights(NamedTuple):
    """Weights of a model: a tuple of those that are trained, and one of all others."""

    trainable: Any
    non_trainable: Any


class LearningState(NamedTuple):
    """State of the server between rounds. Secret: the aggregator's part reveals the noise.

    `client_work` is the next round's index, int64; () if clients do not depend on it.
    """

    global_model_weights: Any
    client_work: Any
    aggregator: Any
    finalizer: Any


class Broadcast(NamedTuple):
    """Value that clients are sent."""

    weights: Any
    client_work: Any
    aggregator: Any


def build_training(
    model: model_lib.Model,
    *,
    local_update: local_updates.LocalUpdate,
    aggregation: Aggregation,
    server_optimizer: optimizers.Optimizer,
    metrics: metric_sums.Build = metric_sums.build,
) -> federated_round.FederatedRound:
    """Builds a round of training.

    The server's optimizer is applied unless the update is not finite. The output is like the
    metrics of a TFF learning process. A `tff.learning.models.FunctionalModel` is a model, too, if
    the state of its metrics counts examples in int64, as `BatchOutput.num_examples` does.
    """
    sums = _metric_sums(model, metrics)
    shapes = [tuple(np.shape(weight)) for weight in model.initial_weights[0]]
    local_model = local_updates.FunctionalLocalModel(model)

    def initialize() -> LearningState:
        weights = _initial_weights(model)
        specs = tuple(tf.TensorSpec(w.shape, w.dtype) for w in weights.trainable)
        first_round = tf.constant(0, tf.int64) if local_update.counts_rounds else ()
        return LearningState(
            weights,
            first_round,
            aggregation.initial_state(shapes),
            server_optimizer.initialize(specs),
        )

    def prepare(state: LearningState) -> Broadcast:
        seen = aggregation.broadcast(state.aggregator)
        return Broadcast(state.global_model_weights, state.client_work, seen)

    def work(batches: tf.data.Dataset, broadcast: Broadcast) -> Any:
        update, num_examples, unfinalized = local_update.run(
            local_model, broadcast.weights, batches, broadcast.client_work
        )
        plain, secure = aggregation.contribute(update, broadcast.aggregator, num_examples)
        plain_metrics, metric_parts = _encoded(sums, unfinalized)
        return {_UPDATE: plain, _METRICS: plain_metrics}, metric_parts | secure_parts(
            aggregation, secure
        )

    def update(state: LearningState, plain: Any, secure: Mapping[str, Any]) -> Any:
        aggregator, average, measured = aggregation.release(
            state.aggregator, plain[_UPDATE], secure, shapes
        )
        weights = state.global_model_weights
        average = tuple(
            tf.cast(one, w.dtype) for one, w in zip(average, weights.trainable, strict=True)
        )
        finalizer, trainable = server_optimizer.next(state.finalizer, weights.trainable, average)
        is_finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(one)) for one in average])
        finalizer, trainable = tf.nest.map_structure(
            lambda new, old: tf.where(is_finite, new, old),
            (finalizer, trainable),
            (state.finalizer, weights.trainable),
        )
        output = collections.OrderedDict(
            client_work={"train": _decoded(sums, plain[_METRICS], secure)},
            aggregator=measured,
            finalizer={"update_non_finite": tf.cast(tf.logical_not(is_finite), tf.int32)},
        )
        next_round = state.client_work + 1 if local_update.counts_rounds else ()
        weights = ModelWeights(trainable, weights.non_trainable)
        return LearningState(weights, next_round, aggregator, finalizer), output

    return federated_round.compose(
        initialize=initialize,
        client=tf.data.DatasetSpec(model.input_spec),
        prepare=prepare,
        work=work,
        update=update,
        accesses=_accesses(lambda state: state.global_model_weights, _with_weights),
    )


def build_evaluation(
    model: model_lib.Model, *, metrics: metric_sums.Build = metric_sums.build
) -> federated_round.FederatedRound:
    """Builds a round in which clients evaluate a model, whose state is the model's weights."""
    sums = _metric_sums(model, metrics)

    def work(batches: tf.data.Dataset, broadcast: ModelWeights) -> Any:
        def evaluate(state: Any, batch: Any) -> Any:
            x, y = model_lib.x_and_y(batch)
            predictions = model.predict_on_batch(tuple(broadcast), x, training=False)
            loss = model.loss(output=predictions, label=y)
            output = model_lib.BatchOutput(loss, predictions, model_lib.num_examples(batch))
            return model.update_metrics_state(state, batch_output=output, labels=y)

        return _encoded(
            sums, local_updates.iterate(evaluate, batches, model.initialize_metrics_state)
        )

    def update(state: ModelWeights, plain: Any, secure: Mapping[str, Any]) -> Any:
        evaluated = {"current_round_metrics": _decoded(sums, plain, secure)}
        return state, {"client_work": {"eval": evaluated}}

    return federated_round.compose(
        initialize=lambda: _initial_weights(model),
        client=tf.data.DatasetSpec(model.input_spec),
        prepare=lambda state: state,
        work=work,
        update=update,
        accesses=_accesses(lambda state: state, lambda state, weights: weights),
    )


def secure_parts(
    aggregation: Aggregation, secure: Mapping[str, Any]
) -> dict[str, federated_round.SecurePart]:
    """Returns the secure parts of what an aggregation's client sends, with their moduli."""
    return {
        name: federated_round.SecurePart(secure[name], moduli=moduli)
        for name, moduli in aggregation.moduli.items()
    }


def _initial_weights(model: model_lib.Model) -> ModelWeights:
    return ModelWeights(*map(tuple, model.initial_weights))


def _with_weights(state: LearningState, weights: ModelWeights) -> LearningState:
    return state._replace(global_model_weights=weights)


def _accesses(get: Callable[[Any], Any], set_: Callable[[Any, Any], Any]) -> dict[str, Any]:
    return {"get_model_weights": (get, ()), "set_model_weights": (set_, (get,))}


def _metric_sums(
    model: model_lib.Model, build: metric_sums.Build
) -> Sequence[metric_sums.MetricSum]:
    with tf.Graph().as_default():
        spec = tf.nest.map_structure(
            lambda tensor: tf.TensorSpec(tensor.shape, tensor.dtype),
            model.initialize_metrics_state(),
        )
    return build(model.finalize_metrics, spec)


def _encoded(sums: Iterable[metric_sums.MetricSum], unfinalized: Any) -> tuple[Any, dict[str, Any]]:
    """Returns what a client sends of its metrics in the clear, and for secure sums."""
    plain, secure = {}, {}
    for index, one in enumerate(sums):
        encoded = one.encode(unfinalized)
        if one.largest is None:
            plain[str(index)] = encoded
        else:
            secure[f"{_METRICS}/{index}"] = federated_round.SecurePart(encoded, one.largest)
    return plain, secure


def _decoded(
    sums: Iterable[metric_sums.MetricSum], plain: Mapping[str, Any], secure: Mapping[str, Any]
) -> collections.OrderedDict[str, Any]:
    """Returns the metrics of a round."""
    metrics = collections.OrderedDict()
    for index, one in enumerate(sums):
        is_plain = one.largest is None
        metrics |= one.decode(plain[str(index)] if is_plain else secure[f"{_METRICS}/{index}"])
    return metrics
