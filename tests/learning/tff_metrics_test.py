"""Sums of metrics within TFF's computations; `metric_sums_test.py` tests their arithmetic."""

import collections
import functools

import numpy as np
import pytest
import tensorflow as tf

pytest.importorskip("tensorflow_federated", reason="makes data or processes of TFF")

import tensorflow_federated as tff

from tff_dpftrl import execution
from tff_dpftrl.learning import metric_sums, tff_metrics
from tff_dpftrl.models import metric_grid

_TYPE = tff.types.to_type(collections.OrderedDict(total=np.float32, num=np.int64))
_GRIDS = {"num": metric_grid.MetricGrid((0.0, 1.0, 10.0))}
# As TFF has those of a functional model, and of a variable model.
_FINALIZERS = [
    lambda sums: collections.OrderedDict(total=sums["total"], num=-sums["num"]),
    collections.OrderedDict(total=tf.identity, num=tf.negative),
]
_CLIENTS = [
    collections.OrderedDict(total=np.float32(total), num=np.int64(num))
    for total, num in ((0.5, -1), (0.25, -20))
]


@pytest.fixture(autouse=True)
def _simulated():
    with execution.secure_sum_simulation():
        yield


def _aggregated(build, finalizers):
    aggregate = tff_metrics.aggregator(build)(finalizers, _TYPE)

    @tff.federated_computation(tff.FederatedType(_TYPE, tff.CLIENTS))
    def run(metrics):
        return aggregate(metrics)

    return run(_CLIENTS), str(tff.framework.ConcreteComputation.get_proto(run))


@pytest.mark.parametrize("finalizers", _FINALIZERS)
def test_metrics_in_the_clear_are_those_of_tff_and_of_all_sums(finalizers):
    build = functools.partial(metric_sums.build, grids=_GRIDS, bounds={"total": 2.0})
    found, message = _aggregated(build, finalizers)
    assert list(found) == ["total", "num", "num_histogram", metric_sums.BOUNDED_SUMS]
    assert (found["total"], found["num"], found["bounded_sums"]) == (0.75, 21, [0.375])
    assert found["num_histogram"].tolist() == [0, 0, 2]
    assert "federated_secure_sum" not in message


def test_secure_metrics_have_no_other_sums():
    build = functools.partial(metric_sums.build, is_secure=True, grids=_GRIDS)
    found, message = _aggregated(build, _FINALIZERS[0])
    # Negative metrics count as zero, and in a histogram as they are.
    assert (found["total"], found["num"]) == (0.75, 0)
    assert found["num_histogram"].tolist() == [0, 0, 2]
    assert "federated_secure_sum" in message
    assert "federated_aggregate" not in message and "federated_sum" not in message


@pytest.mark.parametrize("is_secure, finalizers", enumerate(_FINALIZERS))
def test_an_evaluation_has_the_results_of_tffs_for_each_round(is_secure, finalizers):
    build = functools.partial(metric_sums.build, is_secure=bool(is_secure), grids=_GRIDS)
    process = tff_metrics.evaluation_process(build, finalizers, _TYPE)
    theirs = tff.learning.metrics.SumThenFinalizeFactory(finalizers).create(_TYPE)
    clients = [collections.OrderedDict(total=c["total"], num=-c["num"]) for c in _CLIENTS]
    for cohort in (clients, clients[:1]):
        this_round, all_rounds = process.next(process.initialize(), cohort).result
        assert this_round.pop("num_histogram").sum() == len(cohort)
        assert this_round == theirs.next(theirs.initialize(), cohort).result[0]
        assert all_rounds == ()
