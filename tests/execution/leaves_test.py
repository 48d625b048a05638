"""What compiled processes take and give is what TFF takes and gives."""

import collections
import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
import tree

from tests.execution import small_processes
from tff_dpftrl import array_files
from tff_dpftrl.execution import compiled_process, leaves, tff_names

_ELEMENT = collections.OrderedDict(x=tff.TensorType(np.float32, [2]), y=np.int32)
_SEQUENCE = tff.SequenceType(_ELEMENT)


def _total(dataset):
    return dataset.reduce(
        0.0, lambda total, e: total + tf.reduce_sum(e["x"]) + tf.cast(e["y"], tf.float32)
    )


def _element(y):
    return collections.OrderedDict(x=np.ones(2, np.float32), y=y)


def _dataset(num_examples):
    arrays = collections.OrderedDict(
        x=np.ones((num_examples, 2), np.float32), y=np.arange(num_examples, dtype=np.int32)
    )
    return tf.data.Dataset.from_tensor_slices(arrays)


def test_every_leaf_has_a_path():
    type_spec = tff.to_type(collections.OrderedDict(a=[np.int32, _ELEMENT], b=_SEQUENCE))
    assert leaves.paths(type_spec) == ["a/0", "a/1/x", "a/1/y", "b"]
    assert leaves.paths(tff.to_type(np.int32)) == [""]
    assert leaves.paths(None) == []
    assert len(leaves.specs(type_spec)) == 4


def test_a_state_is_free_as_soon_as_nothing_needs_it():
    """Not when Python collects its garbage, many rounds later: each round has another state."""
    type_spec = tff.to_type([collections.OrderedDict(a=np.float32, b=[np.float32, np.int32])])
    tensors = [tf.zeros([]), tf.ones([]), tf.constant(1)]
    alive = [weakref.ref(tensor) for tensor in tensors]
    gc.disable()
    try:
        value = leaves.pack(tensors, type_spec)
        assert value[0]["b"][0] is tensors[1]
        del tensors, value
        assert [reference() for reference in alive] == [None] * 3
    finally:
        gc.enable()


@pytest.fixture(scope="module")
def process():
    return small_processes.build(_total, _SEQUENCE)


@pytest.fixture(scope="module")
def compiled(process):
    return compiled_process.compile_process(process)


@pytest.mark.parametrize(
    "cohort",
    [
        [],
        [_dataset(0), _dataset(0)],
        [_dataset(3), [_element(1), _element(2)], []],
        [[collections.OrderedDict(x=[1.0, 2.0], y=3)]],
    ],
    ids=["no client", "empty datasets", "lists and datasets", "lists of numbers"],
)
def test_client_data_that_tff_takes(process, compiled, cohort):
    assert compiled.next(0.0, cohort)[1] == process.next(0.0, cohort)[1]


def _float64_dataset():
    return _dataset(2).map(
        lambda e: collections.OrderedDict(x=tf.cast(e["x"], tf.float64), y=e["y"])
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (_float64_dataset(), r"client_data\[1\] must be a dataset with elements of type"),
        (_dataset(2).batch(2), r"client_data\[1\] must be a dataset with elements of type"),
        (5, r"client_data\[1\] must be a tf.data.Dataset or a list, got <class 'int'>"),
        ([_element("a")], r"client_data\[1\], element 0.y must be a tensor of dtype int32"),
        ([collections.OrderedDict(x=[1.0], y=3)], r"0.x must be of shape \(2,\), got \(1,\)"),
        ([collections.OrderedDict(x=[1.0, 2.0])], r"element 0 must have 2 elements"),
    ],
)
def test_client_data_of_another_type_is_refused(compiled, value, message):
    with pytest.raises(ValueError, match=message):
        compiled.next(0.0, [_dataset(1), value])
    assert compiled.next(0.0, [_dataset(1)])[1] == 2.0


@pytest.mark.parametrize(
    ("element_type", "elements"),
    [
        # Their order is not that of the alphabet, in which tf.data has them.
        (
            collections.OrderedDict(b=np.int32, a=np.int32),
            [collections.OrderedDict(b=i, a=10 + i) for i in range(3)],
        ),
        (
            [np.float32, tff.TensorType(np.int32, [None])],
            [(0.5, np.ones(i % 3, np.int32)) for i in range(7)],
        ),
        (tff.TensorType(np.str_, None), [b"a", b"b"]),
        (tff.TensorType(np.str_, None), []),
        (collections.OrderedDict(b=np.str_, a=tff.TensorType(np.float32, [None, 2])), []),
    ],
    ids=["names", "ragged", "texts", "no text", "nothing"],
)
def test_lists_of_elements_become_datasets_of_them(element_type, elements):
    type_spec = tff.SequenceType(element_type)
    variant = leaves.flatten(elements, type_spec, "x")[0]
    spec = tff_names.type_to_tf_tensor_specs(type_spec.element)
    spec = tuple(spec) if isinstance(spec, list) else spec
    found = list(tf.data.experimental.from_variant(variant, spec))
    assert len(found) == len(elements)
    for one, element in zip(found, elements, strict=True):
        tf.nest.map_structure(np.testing.assert_array_equal, one, element)


def test_a_dataset_in_place_of_a_cohort_is_refused(compiled):
    with pytest.raises(ValueError, match="client_data must be a list with a value for each client"):
        compiled.next(0.0, _dataset(2))


def test_client_values_may_be_structures_of_datasets():
    nested = tff.to_type(collections.OrderedDict(a=_SEQUENCE, b=(_SEQUENCE, np.int32)))
    compiled = compiled_process.compile_process(
        small_processes.build(
            lambda v: _total(v["a"]) - _total(v["b"][0]) + tf.cast(v["b"][1], tf.float32), nested
        )
    )
    clients = [dict(b=(_dataset(n), n), a=_dataset(3)) for n in range(4)]
    totals = [2 * n + n * (n - 1) / 2 for n in range(4)]
    assert compiled.next(0.0, clients)[1] == 4 * 9 - sum(totals) + 6
    with pytest.raises(ValueError, match=r"client_data\[0\].b.1 must be in the range of int32"):
        compiled.next(0.0, [dict(a=_dataset(1), b=(_dataset(1), 2**40))])


def test_results_have_the_containers_of_tff():
    process = small_processes.build(lambda x: (x, {"b": x, "a": (x, [x])}))
    compiled = compiled_process.compile_process(process)
    expected, actual = process.next(0.0, [1, 2])[1], compiled.next(0.0, [1, 2])[1]
    tree.assert_same_structure(expected, actual, check_types=True)
    assert expected == actual


def test_updates_that_are_no_numbers_are_summed_as_in_tff():
    process = small_processes.build(lambda x: tf.math.log(x), np.float32)
    compiled = compiled_process.compile_process(process)
    for clients in ([-1.0, 1.0], [0.0, 1.0]):
        expected = process.next(0.0, clients)[1]
        assert not np.isfinite(expected)
        np.testing.assert_array_equal(compiled.next(0.0, clients)[1], expected)


@tff.tensorflow.computation
def _initial():
    return collections.OrderedDict(
        numbers=tf.zeros([3]), count=tf.constant(7, tf.int64), name=tf.constant("x")
    )


_STATE_TYPE = _initial.type_signature.result


@tff.tensorflow.computation(_STATE_TYPE, np.int32)
def _update(state, total):
    return collections.OrderedDict(
        numbers=state["numbers"] + tf.cast(total, tf.float32),
        count=state["count"] + 1,
        name=tf.strings.join([state["name"], "y"]),
    )


@pytest.fixture(scope="module")
def with_state():
    def round_fn(state, values):
        return tff.federated_map(_update, (state, tff.federated_sum(values))), state

    process = small_processes.build_from(round_fn, initial=_initial)
    return process, compiled_process.compile_process(process)


def _as_lists(state):
    return [np.asarray(leaf).tolist() for leaf in state.values()]


def test_states_go_back_and_forth_between_tff_and_compiled_processes(with_state):
    process, compiled = with_state
    state = process.initialize()
    for run in (process, compiled, compiled, process):
        state, _ = run.next(state, [2])
    assert _as_lists(state) == [[8.0, 8.0, 8.0], 11, b"xyyyy"]


def test_a_state_of_arrays_shares_their_memory_if_it_may():
    type_spec = tff.to_type(
        collections.OrderedDict(a=tff.TensorType(np.float32, [20_000]), b=np.int32)
    )
    state = collections.OrderedDict(
        a=array_files.aligned([20_000], np.dtype(np.float32)), b=np.int64(3)
    )
    state["a"][...] = 1.0
    shared, number = leaves.flatten(state, type_spec, "state", shares_arrays=True)
    (copied, _) = leaves.flatten(state, type_spec, "state")
    assert number.dtype == tf.int32 and number.numpy() == 3
    state["a"][0] = 5.0
    assert (shared[0].numpy(), copied[0].numpy()) == (5.0, 1.0)


def test_a_state_is_never_changed(with_state):
    _, compiled = with_state
    first = compiled.initialize()
    second, _ = compiled.next(first, [1])
    assert _as_lists(compiled.next(first, [1])[0]) == _as_lists(second)
    assert _as_lists(first) == [[0.0, 0.0, 0.0], 7, b"x"]

    array = np.zeros(3, np.float32)
    result, returned = compiled.next(
        collections.OrderedDict(numbers=array, count=np.int64(0), name=b"q"), [1]
    )
    array[:] = 9.0
    assert _as_lists(result) == [[1.0, 1.0, 1.0], 1, b"qy"]
    assert _as_lists(returned) == [[0.0, 0.0, 0.0], 0, b"q"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"numbers": np.zeros(4, np.float32)}, r"numbers must be of shape \(3,\), got \(4,\)"),
        ({"count": "many"}, "state.count must be a tensor of dtype int64"),
        ({"more": 1}, "state must have 3 elements, as its type"),
    ],
)
def test_a_state_of_another_type_is_refused(with_state, changes, message):
    _, compiled = with_state
    state = {"numbers": np.zeros(3, np.float32), "count": 1, "name": "x"} | changes
    with pytest.raises(ValueError, match=message):
        compiled.next(state, [1])


def test_a_state_with_another_name_is_refused(with_state):
    _, compiled = with_state
    state = {"numbers": np.zeros(3, np.float32), "count": 1, "nam": "x"}
    with pytest.raises(ValueError, match=r"must have the elements .*'name'\], got .*'nam'"):
        compiled.next(state, [1])


_ROWS = (tf.TensorSpec([None, 2], tf.float32), tf.TensorSpec([None], tf.int32))


def _dataset_of_rows(rows):
    return tf.data.Dataset.from_tensor_slices(collections.OrderedDict(x=rows[0], y=rows[1]))


@pytest.fixture(scope="module")
def with_rows(process):
    return compiled_process.compile_process(process, dataset_fn=_dataset_of_rows, tensor_spec=_ROWS)


def test_prepared_tensors_in_place_of_datasets(with_rows):
    rows = (np.ones((3, 2), np.float32), np.arange(3))
    assert with_rows.next(0.0, [rows, rows])[1] == 18.0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.ones((3, 2), np.float32), r"client_data\[0\] must be arrays like tensor_spec"),
        ((np.ones((3, 3)), np.arange(3)), r"client_data\[0\] must be of shape \(None, 2\)"),
        ((np.ones((3, 2)), 3 * [2**31]), r"client_data\[0\] must be arrays like tensor_spec"),
        ((np.ones((1, 2)), np.array([2**31])), r"client_data\[0\] must be in the range of int32"),
    ],
)
def test_prepared_tensors_of_another_type_are_refused(with_rows, value, message):
    with pytest.raises(ValueError, match=message):
        with_rows.next(0.0, [value])


def test_prepared_tensors_have_to_make_the_datasets_of_the_process(process):
    with pytest.raises(ValueError, match="result of dataset_fn must be a dataset with elements"):
        compiled_process.compile_process(
            process, dataset_fn=tf.data.Dataset.from_tensor_slices, tensor_spec=_ROWS[0]
        )
    with pytest.raises(ValueError, match="give both or none"):
        compiled_process.compile_process(process, tensor_spec=_ROWS)
