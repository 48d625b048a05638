import asyncio
import collections
import copy
import sys

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl.participation import cohorts, observed
from tff_dpftrl.training import cohort_source

NUM_CLIENTS = 12


@pytest.fixture(scope="module")
def client_data():
    """Every client has one element, its own index."""
    return tff.simulation.datasets.TestClientData(
        {f"user{i:02d}": {"x": np.array([[float(i)]], np.float32)} for i in range(NUM_CLIENTS)}
    )


def min_sep_sampler(seed=3, num_rounds=40):
    return cohorts.MinSepSampler(
        num_clients=NUM_CLIENTS, clients_per_round=3, min_sep=3, num_rounds=num_rounds, seed=seed
    )


def clients_of(datasets):
    return [int(next(iter(dataset))["x"][0]) for dataset in datasets]


def test_selects_the_cohorts_of_the_sampler_in_order(client_data):
    sampler = min_sep_sampler()
    iterator = cohort_source.CohortDataSource.from_client_data(client_data, sampler).iterator()
    for t in range(8):
        assert clients_of(iterator.select(3)) == sampler.cohort(t).tolist()


def test_types_fit_a_tff_computation(client_data):
    source = cohort_source.CohortDataSource.from_client_data(client_data, min_sep_sampler())
    element = collections.OrderedDict(x=tff.TensorType(np.float32, [1]))
    expected = tff.FederatedType(tff.SequenceType(element), tff.CLIENTS)
    assert source.federated_type.is_assignable_from(expected)
    assert source.iterator().federated_type == source.federated_type


def test_a_dataset_may_depend_on_the_round():
    asked = []

    def client_dataset(client_id, round_index):
        asked.append((client_id, round_index))
        return tf.data.Dataset.from_tensors(round_index)

    sampler = min_sep_sampler()
    ids = [f"u{i}" for i in range(NUM_CLIENTS)]
    source = cohort_source.CohortDataSource(
        ids, client_dataset, tf.TensorSpec((), tf.int32), sampler
    )
    iterator = source.iterator()
    iterator.select(3)
    iterator.select(3)
    assert asked == [(ids[i], t) for t in (0, 1) for i in sampler.cohort(t)]


def test_restored_and_copied_iterators_go_on_with_the_same_cohorts(client_data):
    source = cohort_source.CohortDataSource.from_client_data(client_data, min_sep_sampler())
    iterator = source.iterator()
    for _ in range(5):
        iterator.select(3)
    copied = copy.deepcopy(iterator)
    # A later process has a source of its own, equal but not identical.
    again = cohort_source.CohortDataSource.from_client_data(client_data, min_sep_sampler())
    restored = type(again.iterator()).from_bytes(iterator.to_bytes())
    expected = clients_of(iterator.select(3))
    assert clients_of(copied.select(3)) == expected
    assert clients_of(restored.select(3)) == expected


def test_another_seed_is_refused_on_restoring(client_data):
    first = cohort_source.CohortDataSource.from_client_data(client_data, min_sep_sampler(seed=3))
    iterator = first.iterator()
    iterator.select(3)
    other = cohort_source.CohortDataSource.from_client_data(client_data, min_sep_sampler(seed=4))
    with pytest.raises(ValueError, match="another cohort"):
        type(other.iterator()).from_bytes(iterator.to_bytes())


def test_wrong_sizes_are_refused(client_data):
    source = cohort_source.CohortDataSource.from_client_data(client_data, min_sep_sampler())
    with pytest.raises(ValueError, match="k=4.*clients_per_round=3"):
        source.iterator().select(4)
    sampler = cohorts.MinSepSampler(
        num_clients=11, clients_per_round=3, min_sep=3, num_rounds=5, seed=0
    )
    with pytest.raises(ValueError, match="num_clients=12"):
        cohort_source.CohortDataSource.from_client_data(client_data, sampler)


def test_ids_that_write_one_number_in_several_ways_are_refused():
    ids = ["7", "7.0", *map("u{}".format, range(NUM_CLIENTS - 2))]
    with pytest.raises(ValueError, match="client_ids: ids of users write one number in several"):
        cohort_source.CohortDataSource(
            ids, lambda *a: None, tf.TensorSpec((), tf.int32), min_sep_sampler()
        )


def test_the_end_of_the_rounds_is_an_error_not_a_repetition(client_data):
    source = cohort_source.CohortDataSource.from_client_data(
        client_data, min_sep_sampler(num_rounds=2)
    )
    iterator = source.iterator()
    iterator.select(3)
    iterator.select(3)
    with pytest.raises(ValueError, match="beyond the last round"):
        iterator.select(3)


def test_poisson_cohorts_vary_in_size(client_data):
    sampler = cohorts.PoissonSampler(
        num_clients=NUM_CLIENTS, sampling_probability=0.5, num_rounds=10, seed=1
    )
    iterator = cohort_source.CohortDataSource.from_client_data(client_data, sampler).iterator()
    assert len({len(iterator.select()) for _ in range(10)}) > 1
    with pytest.raises(ValueError, match="k=3"):
        iterator.select(3)


def test_the_hook_can_refuse_a_round_and_the_round_is_not_consumed(client_data):
    def refuse(round_index, ids):
        if round_index == 1:
            raise ValueError("not today")

    iterator = cohort_source.CohortDataSource.from_client_data(
        client_data, min_sep_sampler(), on_cohort=refuse
    ).iterator()
    iterator.select(3)
    with pytest.raises(ValueError, match="not today"):
        iterator.select(3)
    assert iterator.next_round == 1


class _StopTraining(Exception):
    pass


def _train(client_data, directory, num_rounds, on_cohort):
    """Trains a linear model with TFF's own program; returns the final weights."""

    def model_fn():
        keras_model = tf.keras.Sequential(
            [tf.keras.layers.Dense(1, kernel_initializer="zeros", input_shape=(1,))]
        )
        return tff.learning.models.from_keras_model(
            keras_model,
            loss=tf.keras.losses.MeanSquaredError(),
            input_spec=(tf.TensorSpec((None, 1)), tf.TensorSpec((None, 1))),
        )

    prepared = client_data.preprocess(
        lambda dataset: dataset.map(lambda row: (row["x"] / 12.0, row["x"])).batch(1)
    )
    process = tff.learning.algorithms.build_unweighted_fed_avg(
        model_fn, tff.learning.optimizers.build_sgdm(0.1)
    )
    source = cohort_source.CohortDataSource.from_client_data(
        prepared, min_sep_sampler(), on_cohort=on_cohort
    )
    released = tff.program.MemoryReleaseManager()
    context = tff.program.NativeFederatedContext(
        tff.backends.native.create_async_local_cpp_execution_context()
    )
    with tff.framework.get_context_stack().install(context):
        asyncio.run(
            tff.learning.programs.train_model(
                train_process=process,
                train_data_source=source,
                train_per_round_clients=3,
                train_total_rounds=num_rounds,
                program_state_manager=tff.program.FileProgramStateManager(str(directory)),
                model_output_manager=released,
                evaluation_manager=None,
                evaluation_periodicity=num_rounds,
            )
        )
    [(state, *_)] = [
        value if isinstance(value, tuple) and not hasattr(value, "_fields") else (value,)
        for key, value in released.values().items()
        if key == f"training_checkpoint_round_{num_rounds}"
    ]
    return state.global_model_weights.trainable


@pytest.mark.slow
def test_train_model_resumes_with_the_same_cohorts_and_ends_with_the_same_weights(
    client_data, tmp_path
):
    log = []

    def record(round_index, ids):
        log.append((round_index, tuple(ids)))

    def interrupt(round_index, ids):
        if round_index == 3:
            raise _StopTraining
        record(round_index, ids)

    weights = _train(client_data, tmp_path / "whole", 5, record)
    whole, log = log, []
    with pytest.raises(_StopTraining):
        _train(client_data, tmp_path / "resumed", 5, interrupt)
    resumed_weights = _train(client_data, tmp_path / "resumed", 5, record)
    assert [t for t, _ in whole] == [0, 1, 2, 3, 4]
    # The last state may not have been saved when the crash came: rounds can repeat, with
    # the same cohort.
    assert dict(log) == dict(whole)
    counter = observed.ParticipationCounter(NUM_CLIENTS)
    for _, ids in whole:
        counter.add(np.array([client_data.client_ids.index(i) for i in ids]))
    assert not counter.observed.breaches(min_sep_sampler().schema)
    for a, b in zip(weights, resumed_weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
