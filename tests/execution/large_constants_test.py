"""Constants that are taken out of a computation: the same values, and graphs without them."""

import numpy as np
import pytest

tff = pytest.importorskip("tensorflow_federated")

import tree  # noqa: E402

from tff_dpftrl.execution import (  # noqa: E402
    client_part,
    compiled_process,
    contexts,
    graph_function,
    large_constants,
    process_form,
    tff_names,
)

_LARGE = np.random.default_rng(0).normal(size=[300, 100]).astype(np.float32)
_SMALL = np.arange(5, dtype=np.float32)


def _process() -> tff.templates.IterativeProcess:
    """Process whose state has a large and a small constant, and the large one again."""

    @tff_names.tensorflow_computation
    def make():
        return {"large": _LARGE, "small": _SMALL, "sum": _LARGE + np.float32(1)}

    @tff_names.federated_computation
    def initialize():
        return tff_names.federated_eval(make, tff_names.SERVER)

    state_type = initialize.type_signature.result

    @tff_names.federated_computation(
        state_type, tff_names.FederatedType(np.float32, tff_names.CLIENTS)
    )
    def next_fn(state, values):
        return state, tff_names.federated_sum(values)

    return tff.templates.IterativeProcess(initialize, next_fn)


def test_arguments_of_initialize_are_the_constants():
    process = _process()
    taken, constants = large_constants.take_out(process.initialize)
    assert [constant.shape for constant in constants] == 2 * [_LARGE.shape]
    by_value = sorted((c.numpy() for c in constants), key=np.sum)
    np.testing.assert_array_equal(by_value, sorted([_LARGE, _LARGE + np.float32(1)], key=np.sum))
    size = tff_names.ConcreteComputation.get_proto(taken).ByteSize()
    assert (
        size
        < _LARGE.nbytes
        < tff_names.ConcreteComputation.get_proto(process.initialize).ByteSize()
    )


def test_a_first_state_is_that_of_tff():
    process = _process()
    with contexts.local():
        expected = process.initialize()
    compiled = compiled_process.compile_process(process)
    state = compiled.initialize()
    compiled.drop_initialization()
    with pytest.raises(RuntimeError, match="drop_initialization"):
        compiled.initialize()
    tree.map_structure(np.testing.assert_array_equal, state, expected)


def test_the_round_for_plans_keeps_its_constants():
    with contexts.compiled_only():
        round_ = process_form.round_of(_process())
    traced = graph_function.GraphFunction.trace(round_.initialize_in_graph, [])
    state = client_part.traced(traced.importer(), [])()
    expected = round_.initialize()
    assert len(state) == len(expected) == 3
    for one, other in zip(state, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_computation_without_large_constants_is_returned_itself():
    @tff_names.tensorflow_computation
    def make():
        return _SMALL

    assert large_constants.take_out(make) == (make, [])
