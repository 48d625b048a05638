"""Tests of DP-FTRL inside `tff.learning.programs.train_model`."""

import asyncio
import collections
import sys
from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
import tree

from tff_dpftrl.aggregators import dp_ftrl
from tff_dpftrl.execution import compiled_process
from tff_dpftrl.mechanisms import blt
from tff_dpftrl.participation import cohorts, ledger
from tff_dpftrl.training import cohort_source, program

_CLIENTS = [f"client{i}" for i in range(12)]
_NUM_ROUNDS = 3


def _dataset(client_id):
    rng = np.random.default_rng(int(client_id.removeprefix("client")))
    x = rng.normal(size=[6, 2]).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices(
        collections.OrderedDict(x=x, y=x @ np.array([[1.0], [-2.0]], np.float32))
    ).batch(3)


def _model_fn():
    inputs = tf.keras.Input([2])
    outputs = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")(inputs)
    return tff.learning.models.from_keras_model(
        tf.keras.Model(inputs, outputs),
        loss=tf.keras.losses.MeanSquaredError(),
        input_spec=_dataset("client0").element_spec,
    )


@pytest.fixture(scope="module")
def process():
    return tff.learning.algorithms.build_unweighted_fed_avg(
        _model_fn,
        client_optimizer_fn=tff.learning.optimizers.build_sgdm(0.1),
        model_aggregator=dp_ftrl.build_dp_ftrl_aggregator(
            blt.Blt(buf_decay=(0.9,), output_scale=(0.3,)),
            noise_multiplier=0.5,
            clip_norm=0.5,
            clients_per_round=3,
            deterministic_seed=5,
        ),
    )


def _sampler():
    return cohorts.MinSepSampler(
        num_clients=len(_CLIENTS), clients_per_round=3, min_sep=4, num_rounds=_NUM_ROUNDS, seed=1
    )


def _source(sampler, on_cohort):
    return cohort_source.CohortDataSource(
        _CLIENTS,
        lambda client_id, round_index: _dataset(client_id),
        _dataset("client0").element_spec,
        sampler,
        on_cohort=on_cohort,
    )


class _Released(tff.program.ReleaseManager):
    """Keeps what is released."""

    def __init__(self):
        self.values = {}

    async def release(self, value, key):
        self.values[key] = value


def _train(process, folder, num_rounds=_NUM_ROUNDS, on_cohort=None):
    """Runs TFF's program; returns what it released."""
    sampler = _sampler()
    manager = program.CommittedStateManager(folder, sampler.schema, binding="z = 1")
    released = _Released()

    def begin(round_index, ids):
        manager.begin_round(round_index, ids)
        if on_cohort is not None:
            on_cohort(round_index, ids)

    source = _source(sampler, begin)

    async def run():
        await tff.learning.programs.train_model(
            train_process=process,
            train_data_source=source,
            train_per_round_clients=3,
            train_total_rounds=num_rounds,
            program_state_manager=manager,
            model_output_manager=program.WeightsReleaseManager(released),
            evaluation_manager=None,
            evaluation_periodicity=1,
        )

    context = tff.program.NativeFederatedContext(
        tff.backends.native.create_async_local_cpp_execution_context()
    )
    try:
        with tff.framework.get_context_stack().install(context):
            asyncio.run(run())
        return released.values, manager.observed()
    finally:
        manager.close()


def _plain_loop(process):
    sampler = _sampler()
    state = process.initialize()
    for t in range(_NUM_ROUNDS):
        state = process.next(state, [_dataset(_CLIENTS[i]) for i in sampler.cohort(t)]).state
    return process.get_model_weights(state).trainable


def _weights(released):
    last = released[f"training_checkpoint_round_{_NUM_ROUNDS}"]
    return [np.asarray(leaf) for leaf in tree.flatten(last)]


@pytest.mark.slow
def test_the_program_equals_a_plain_loop_and_releases_weights_only(process, tmp_path):
    released, observed = _train(process, tmp_path)
    weights = _weights(released)
    assert [w.shape for w in weights] == [(2, 1)]
    np.testing.assert_array_equal(weights[0], _plain_loop(process)[0])
    assert (observed.num_rounds, observed.min_sep, observed.max_participations) == (3, None, 1)


@pytest.mark.slow
def test_the_program_runs_a_compiled_process(process, tmp_path):
    compiled = compiled_process.compile_process(process)
    released, _ = _train(compiled, tmp_path)
    np.testing.assert_array_equal(_weights(released)[0], _plain_loop(compiled)[0])
    compiled.close()


class _Crash(Exception):
    """Stands for the death of the process."""


@pytest.mark.slow
def test_an_interrupted_program_goes_on_with_the_same_noise(process, tmp_path):
    def crash(round_index, ids):
        if round_index == 2:
            raise _Crash

    with pytest.raises(_Crash):
        _train(process, tmp_path, on_cohort=crash)
    released, _ = _train(process, tmp_path)
    np.testing.assert_array_equal(_weights(released)[0], _plain_loop(process)[0])


class _ProgramState(NamedTuple):
    """What TFF's program saves."""

    state: dict[str, np.ndarray]
    round_number: int
    next_evaluation_timestamp_seconds: int | None
    data_iterator: tff.program.FederatedDataSourceIterator


def test_what_was_saved_is_committed_and_the_round_after_it_begins_with_the_same_cohort(tmp_path):
    sampler, cohorts_begun = _sampler(), []

    def opened():
        manager = program.CommittedStateManager(tmp_path, sampler.schema, binding="z = 1")

        def begin(round_index, ids):
            cohorts_begun.append(ids)
            manager.begin_round(round_index, ids)

        return manager, _ProgramState(
            {"aggregator": np.zeros(2)}, 0, None, _source(sampler, begin).iterator()
        )

    manager, new = opened()
    asyncio.run(manager.save(new, 0))
    new.data_iterator.select(3)
    saved = new._replace(state={"aggregator": np.ones(2)}, round_number=1)
    asyncio.run(manager.save(saved, 1))
    saved.data_iterator.select(3)  # Of a round that is never saved.
    manager.close()
    manager, new = opened()
    assert asyncio.run(manager.get_versions()) == [1]
    loaded = asyncio.run(manager.load(1, new))
    np.testing.assert_array_equal(loaded.state["aggregator"], np.ones(2))
    loaded.data_iterator.select(3)
    assert cohorts_begun[1] == cohorts_begun[2] != cohorts_begun[0] and loaded.round_number == 1
    manager.close()


@pytest.mark.slow
def test_a_deleted_checkpoint_is_refused(process, tmp_path):
    _train(process, tmp_path, num_rounds=2)
    for path in (tmp_path / "checkpoints").glob("round_00000002_*"):
        path.unlink()
    with pytest.raises(ValueError, match="that the ledger names as the last one"):
        _train(process, tmp_path)


def test_two_programs_in_one_folder_are_refused(tmp_path):
    schema = _sampler().schema
    book = ledger.Ledger.create(tmp_path / "ledger.sqlite", schema, initial_checkpoint="start")
    with book, pytest.raises(ValueError, match="in use by another process"):
        program.CommittedStateManager(tmp_path, schema, binding="z = 1")


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
