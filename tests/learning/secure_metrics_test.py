from __future__ import annotations

import collections
import sys

import numpy as np
import pytest
import tensorflow_federated as tff

from tff_dpftrl import execution
from tff_dpftrl.learning import secure_metrics

_TYPE = tff.types.to_type(
    collections.OrderedDict(
        counts=collections.OrderedDict(zeta=np.float32, alpha=np.int64),
        num=tff.TensorType(np.int32, [2]),
    )
)


def _metrics(loss, count, num):
    return collections.OrderedDict(
        counts=collections.OrderedDict(zeta=np.float32(loss), alpha=np.int64(count)),
        num=np.int32(num),
    )


@pytest.fixture(autouse=True)
def _simulated():
    with execution.secure_sum_simulation():
        yield


def _sum(*clients):
    process = secure_metrics.SecureMetricsSumFactory().create(_TYPE)
    return process.next(process.initialize(), list(clients)).result


def test_sums_are_those_of_the_grid_and_keep_names_and_dtypes():
    total = _sum(_metrics(1.5, 3, [1, 0]), _metrics(2 + 2.0**-20, 4, [5, 6]))
    assert total["counts"]["zeta"] == np.float32(3.5 + 2.0**-20)
    assert total["counts"]["zeta"].dtype == np.float32
    assert total["counts"]["alpha"] == 7
    assert total["num"].tolist() == [6, 6] and total["num"].dtype == np.int32


def test_a_client_whose_training_diverged_counts_as_nobody():
    broken = [_metrics(loss, 100, [100, 100]) for loss in (np.nan, np.inf, -np.inf)]
    total = _sum(*broken[:2], _metrics(1.5, 3, [1, 2]), *broken[2:])
    assert total["counts"] == {"zeta": 1.5, "alpha": 3}
    assert total["num"].tolist() == [1, 2]


def test_a_client_adds_no_more_than_the_sum_has_room_for():
    total = _sum(_metrics(1e30, 2**62, [1, 1]), _metrics(-5.0, -5, [-1, 1]))
    assert total["counts"]["zeta"] == np.float32(2**20)
    assert total["counts"]["alpha"] == secure_metrics.LARGEST_ENTRY
    assert total["num"].tolist() == [1, 2]


def test_a_process_has_no_other_sums_than_secure_ones():
    aggregate = secure_metrics.secure_sum_then_finalize(
        lambda sums: collections.OrderedDict(mean=sums["counts"]["zeta"] / 2.0)
    )

    @tff.federated_computation(tff.FederatedType(_TYPE, tff.CLIENTS))
    def run(metrics):
        return aggregate(metrics)

    assert run([_metrics(1.0, 1, [1, 1]), _metrics(2.0, 1, [1, 1])])["mean"] == 1.5
    message = str(tff.framework.ConcreteComputation.get_proto(run))
    assert "federated_secure_sum" in message
    assert "federated_aggregate" not in message and "federated_sum" not in message


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
