"""From rounds to plans: what is in them, and which rounds are refused."""

import numpy as np
import pytest
import tensorflow as tf

from tests.runtime.plans import small_tasks
from tff_dpftrl.execution import graph_function, large_fills
from tff_dpftrl.mechanisms import table
from tff_dpftrl.private_round import seeds
from tff_dpftrl.runtime.plans import (
    allowed_ops,
    building,
    device_work,
    plan_pb2,
    secure_report,
    server_work,
    verification,
)
from tff_dpftrl.training import config as config_lib
from tff_dpftrl.training import process as process_lib


@pytest.fixture(scope="module")
def process():
    """With a seed that is drawn at initialisation."""
    return small_tasks.federated_averaging(small_tasks.fixed(0.5, deterministic_seed=None))


@pytest.fixture(scope="module")
def plans(process):
    return small_tasks.plans(process)


def test_a_process_gives_the_same_bytes_again(process, plans):
    again = small_tasks.build_plans(process)
    assert again.devices == plans.devices and again.server == plans.server
    task = plans.sign(small_tasks.KEY)
    assert again.sign(small_tasks.KEY).SerializeToString() == task.SerializeToString()


def test_the_device_plan_says_what_a_device_has_to_know(plans):
    (device,) = plans.devices
    verification.check_device_plan(device)
    assert device.least_runtime_version == 1
    assert (device.batch_size, device.epochs) == (small_tasks.BATCH_SIZE, small_tasks.EPOCHS)
    assert device.selection == small_tasks.SELECTION
    assert device.participation == plans.server.participation == small_tasks.PARTICIPATION
    assert [t.label for t in device.graph.inputs] == [
        "examples",
        "weights/trainable/0",
        "weights/trainable/1",
        "aggregator/seen",
    ]
    assert "ParseExampleV2" in device.ops and list(device.ops) == sorted(device.ops)


def test_devices_get_neither_seed_nor_buffers_of_the_noise(plans):
    server = server_work.ServerWork(plans.server)
    state = server.initialize()
    secret = [s for s, t in zip(state, server.state, strict=True) if t.label == "aggregator/seed"]
    assert len(secret) == 1 and secret[0].any()
    for sent in server.broadcast(state):
        assert not np.isin(secret[0], sent).any()


def test_every_initialisation_draws_its_own_seed(plans):
    server = server_work.ServerWork(plans.server)
    names = [tensor.label for tensor in server.state]
    seeds = {tuple(server.initialize()[names.index("aggregator/seed")]) for _ in range(3)}
    assert len(seeds) == 3


@pytest.mark.slow
def test_shuffling_takes_a_seed_of_the_device(process):
    plan = small_tasks.plans(process, shuffle=True).devices[0]
    assert plan.seed_policy == plan_pb2.DEVICE_DRAWS
    verification.check_device_plan(plan)
    work = device_work.DeviceWork(plan)
    examples = small_tasks.examples(1, 9)
    broadcast = [np.zeros([3, 1], np.float32), np.zeros([1], np.float32), np.array(0, np.int64)]
    first, again, other = (
        work.run(examples, broadcast, seed=s)[2] for s in ((1, 2), (1, 2), (3, 4))
    )
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    drawn = [work.run(examples, broadcast)[2].tobytes() for _ in range(4)]
    assert len(set(drawn)) > 1


def test_evaluation_reports_metrics_of_the_model_in_training(plans):
    training = server_work.ServerWork(plans.server)
    evaluation = small_tasks.plans(small_tasks.evaluation(), kind=plan_pb2.EVALUATION)
    device = device_work.DeviceWork(evaluation.devices[0])
    server = server_work.ServerWork(evaluation.server)
    weights = training.weights(training.initialize())
    weights["trainable/0"] = weights["trainable/0"] + 1
    state = server.with_weights(server.initialize(), weights)
    update = device.run(small_tasks.examples(1, 4), server.broadcast(state))
    _, metrics = server.finish(state, server.accumulate(server.zero(), update))
    x, y = small_tasks.rows(1, 4)
    (found,) = [value for name, value in metrics.items() if "current" in name]
    np.testing.assert_allclose(found, np.mean((x.sum(axis=1, keepdims=True) - y) ** 2), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", [*table.runnable(), "none"])
def test_every_mechanism_makes_plans(mechanism):
    noise = {} if mechanism == "none" else {"noise_multiplier": 1.0}
    config = config_lib.TrainingConfig.of(
        num_rounds=8, clients_per_round=3, mechanism=mechanism, min_sep=2, **noise
    )
    aggregation = process_lib.build_aggregation(config.rules, config.request().plan(100, 4))
    plans = small_tasks.plans(small_tasks.federated_averaging(aggregation))
    verification.check_device_plan(plans.devices[0])


def test_noise_that_no_seed_of_a_state_has_made_is_refused():
    tff = pytest.importorskip("tensorflow_federated", reason="refuses noise of TFF")
    from tests.runtime.plans import tff_tasks

    aggregator = tff.aggregators.DifferentiallyPrivateFactory.gaussian_fixed(0.5, 3, 1.0)
    with pytest.raises(building.CannotPlanError, match="nobody could check"):
        small_tasks.plans(tff_tasks.federated_averaging(aggregator))


def test_batches_of_another_type_are_refused(process):
    pipeline = small_tasks.pipeline()
    object.__setattr__(pipeline, "to_batch", lambda features: features["x"])
    with pytest.raises(ValueError, match="must be a dataset with elements "):
        building.build_plans(process, pipeline, small_tasks.terms())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": ""}, "task must not be empty"),
        ({"selection": plan_pb2.Selection(max_examples=3)}, "collection must not be empty"),
        ({"selection": plan_pb2.Selection(collection="x")}, "max_examples must be at least 1"),
        ({"limits": plan_pb2.Limits(memory_bytes=1, seconds=1.0)}, "limits.upload_bytes"),
        ({"participation": plan_pb2.Participation()}, "min_sep_rounds must be at least 1"),
        ({"participation": plan_pb2.Participation(min_sep_rounds=1)}, "stride_edges must"),
    ],
)
def test_the_terms_of_a_task_must_be_complete(process, options, message):
    with pytest.raises(ValueError, match=message):
        small_tasks.plans(process, **options)


@pytest.mark.parametrize(
    "process",
    [
        small_tasks.secure_evaluation,
        pytest.param(small_tasks.SECURE_ONLY_ROUNDS["secagg adaptive"], marks=pytest.mark.slow),
    ],
)
def test_plans_with_secure_aggregation_have_nothing_in_the_clear(process):
    plans = small_tasks.plans(process(), secure_aggregation=small_tasks.SECURE_AGGREGATION)
    (device,) = plans.devices
    assert len(device.secure_sums) == len(device.graph.outputs) == len(plans.server.update)
    assert not plans.server.zero.outputs
    assert device.least_runtime_version == allowed_ops.SECURE_AGGREGATION_SINCE
    assert secure_report.parameters_of(device) == secure_report.parameters_of(plans.server)
    verification.check_device_plan(device)


def test_a_process_with_sums_in_the_clear_is_no_secure_one():
    with pytest.raises(building.CannotPlanError, match=r"seen as they are: .*mse/0.*metric_sums"):
        small_tasks.plans(
            small_tasks.evaluation(),
            kind=plan_pb2.EVALUATION,
            secure_aggregation=small_tasks.SECURE_AGGREGATION,
        )


@pytest.mark.slow
def test_variants_serve_devices_with_older_runtimes(process, monkeypatch):
    """Version 2 is the first one with `AddV2`; a variant takes `Add`, which is older."""
    everything = allowed_ops.allowed(allowed_ops.RUNTIME_VERSION)
    since = {1: everything - {"AddV2"}, 2: everything}
    monkeypatch.setattr(allowed_ops, "OPS_SINCE", since)
    monkeypatch.setattr(allowed_ops, "RUNTIME_VERSION", 2)

    def with_the_older_sum(graph_def):
        for node in graph_function.nodes_of(graph_def):
            if node.op == "AddV2":
                node.op = "Add"
        return graph_def

    plans = small_tasks.build_plans(process, variants=[with_the_older_sum])
    assert [plan.least_runtime_version for plan in plans.devices] == [2, 1]
    server = server_work.ServerWork(plans.server)
    broadcast = server.broadcast(server.initialize())
    updates = [
        device_work.DeviceWork(plan).run(small_tasks.examples(1, 4), broadcast)
        for plan in plans.devices
    ]
    for one, other in zip(*updates, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_the_server_may_compute_large_zeros(process, monkeypatch):
    monkeypatch.setattr(large_fills, "_MIN_BYTES", 8)
    server = small_tasks.build_plans(process).server
    graph_def = tf.compat.v1.GraphDef.FromString(server.finish.graph_def)
    assert large_fills.OPS.issubset(verification.operations(graph_def))


def test_operations_that_no_device_runs_are_refused(process, monkeypatch):
    monkeypatch.setattr(allowed_ops, "OPS_SINCE", {1: allowed_ops.allowed(1) - {"ParseExampleV2"}})
    with pytest.raises(building.CannotPlanError, match=r"do not run the operations \['ParseEx"):
        small_tasks.build_plans(process)


def test_a_server_draws_anew_in_every_execution_and_from_the_system_only(process):
    server = server_work.ServerWork(small_tasks.build_plans(process).server)
    state = server.initialize()
    finished = [server.weights(server.finish(state, server.zero())[0]) for _ in range(2)]
    assert all(np.all(finished[0][label] != finished[1][label]) for label in finished[0])
    with seeds.reading("/dev/zero"):
        other = small_tasks.federated_averaging(small_tasks.fixed(0.5, deterministic_seed=None))
    with pytest.raises(building.CannotPlanError, match="TextLineDataset.*nobody could check"):
        small_tasks.build_plans(other)
