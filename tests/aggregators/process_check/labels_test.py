"""Tests of what labels become on the way, and that none is lost where structures differ."""

import numpy as np
import pytest
import tensorflow_federated as tff

from tff_dpftrl.aggregators.process_check import labels

_ONE = labels.Contribution(1, b"clip")
_OTHER = labels.Contribution(2, b"clip")
_FROM_SERVER = labels.Aggregate(0, depends_on_data=True)


@pytest.mark.parametrize(
    "at_clients, at_server",
    [
        ([_ONE], [labels.Total(1, b"clip")]),
        ([_ONE, labels.RAW], [labels.Aggregate(5, True)]),
        ([_ONE, _OTHER], [labels.Aggregate(5, True)]),
        ([labels.RAW], [labels.Aggregate(5, True)]),
        ([], [labels.Aggregate(5, False)]),
        ([_ONE, _FROM_SERVER], [labels.Total(1, b"clip"), _FROM_SERVER]),
    ],
)
def test_only_contributions_of_one_clipping_arrive_as_its_total(at_clients, at_server):
    assert labels.at_arrival(frozenset(at_clients), 5) == frozenset(at_server)


def test_packing_undoes_leaves_and_loses_no_label():
    type_spec = tff.to_type((np.float32, (np.float32, np.float32)))
    first, second = frozenset([labels.RAW]), frozenset([_ONE])
    packed = labels.pack(type_spec, [first, second, first])
    assert list(labels.leaves(packed)) == [first, second, first]
    assert packed[1][0] == second
    for wrong in ([first, second], [first, second, first, second]):
        assert labels.union(labels.pack(type_spec, wrong)) == first | second


def test_filling_marks_one_placement_only():
    type_spec = tff.to_type(
        [tff.FederatedType(np.float32, tff.CLIENTS), tff.FederatedType(np.float32, tff.SERVER)]
    )
    filled = labels.fill(type_spec, frozenset([labels.RAW]), only_at=tff.CLIENTS)
    assert list(labels.leaves(filled)) == [frozenset([labels.RAW]), frozenset()]
