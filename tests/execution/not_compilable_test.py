"""What only TFF can run is refused with its reason, and a mistake is not taken for it."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tests.execution import small_processes
from tff_dpftrl.execution import compiled_process


@tff.tensorflow.computation(np.int32)
def _as_keys(x):
    return tf.stack([x])


@tff.tensorflow.computation(np.float32, np.int32)
def _select(value, key):
    return value + tf.cast(key, tf.float32)


@tff.tensorflow.computation(tff.SequenceType(np.float32))
def _total(dataset):
    return dataset.reduce(0.0, lambda total, x: total + x)


def _with_select(state, values):
    keys = tff.federated_map(_as_keys, values)
    selected = tff.federated_select(keys, tff.federated_value(3, tff.SERVER), state, _select)
    return state, tff.federated_sum(tff.federated_map(_total, selected))


@tff.tensorflow.computation(np.int32, np.int32)
def _difference(x, y):
    return x - y


def _in_two_phases(state, values):
    total = tff.federated_broadcast(tff.federated_sum(values))
    return state, tff.federated_sum(tff.federated_map(_difference, (values, total)))


def _three_results(state, values):
    return state, tff.federated_sum(values), state


@pytest.mark.parametrize(
    ("round_fn", "reason"),
    [
        (_with_select, "federated_select"),
        (_in_two_phases, "broadcast dependent on aggregate"),
        (_three_results, "return two values"),
    ],
)
def test_a_process_of_another_form_is_refused_with_tffs_reason(round_fn, reason):
    process = small_processes.build_from(round_fn)
    with pytest.raises(compiled_process.NotCompilableError, match=f"run by TFF.*{reason}"):
        compiled_process.compile_process(process)


def test_a_process_without_clients_is_refused():
    initialize = small_processes.build(lambda x: x).initialize

    @tff.federated_computation(initialize.type_signature.result)
    def next_fn(state):
        return state, state

    process = tff.templates.IterativeProcess(initialize, next_fn)
    with pytest.raises(compiled_process.NotCompilableError, match="take two arguments"):
        compiled_process.compile_process(process)


def test_least_and_largest_values_can_be_compiled():
    def round_fn(state, values):
        return state, tff.federated_zip((tff.federated_min(values), tff.federated_max(values)))

    process = small_processes.build_from(round_fn)
    compiled = compiled_process.compile_process(process)
    for cohort in ([4, 2, 9], []):
        assert compiled.next(0.0, cohort)[1] == process.next(0.0, cohort)[1]


def test_mistakes_come_out_as_they_are():
    with pytest.raises(AttributeError):
        compiled_process.compile_process(3)

    def with_a_mistake(rows):
        return tf.data.Dataset.from_tensors(rows).map(lambda x: x + "a")

    process = small_processes.build(
        lambda dataset: dataset.reduce(0.0, lambda total, x: total + x),
        tff.SequenceType(np.float32),
    )
    with pytest.raises((TypeError, ValueError)) as caught:
        compiled_process.compile_process(
            process, dataset_fn=with_a_mistake, tensor_spec=tf.TensorSpec([], tf.float32)
        )
    assert not isinstance(caught.value, compiled_process.NotCompilableError)
